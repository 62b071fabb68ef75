"""Measure the share of messages in a step of several processes on one machine.

Run on a machine without other work, with one core for each process:
``mpirun -n 2 python -m scripts.measure_messages``. A collective begins after a barrier, so that its
time has no waiting for a process that computes longer. The first process prints a line for each
network and distribution. ``docs/distributed.md`` has the shares.
"""

from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from mpi4py import MPI

import kfac_engine as ke
from kfac_engine.bench.step_networks import Network, mlp, resnet20, transformer
from kfac_engine.distributed.mpi import OverMPI
from kfac_engine.engine.options import DISTRIBUTIONS

# Network to the number of examples on each process.
NETWORKS = {mlp: 256, resnet20: 64, transformer: 16}
PERIOD, ROUNDS = 10, 5


class TimedRanks(OverMPI):
    """Processes of MPI that measure their collectives.

    Attributes:
        seconds: Time inside of collectives.
        waiting: Time in barriers before them.
    """

    def __init__(self) -> None:
        super().__init__(MPI.COMM_WORLD)
        self.seconds = self.waiting = 0.0

    def allreduce(self, buffer: Any) -> None:
        """See ``Communicator``."""
        self._timed(super().allreduce, buffer)

    def reduce_scatter(self, buffer: Any, counts: list[int]) -> Any:
        """See ``Communicator``."""
        return self._timed(super().reduce_scatter, buffer, counts)

    def allgather(self, buffer: Any, counts: list[int]) -> None:
        """See ``Communicator``."""
        self._timed(super().allgather, buffer, counts)

    def broadcast(self, buffer: Any, root: int) -> None:
        """See ``Communicator``."""
        self._timed(super().broadcast, buffer, root)

    def _timed(self, collective: Any, *arguments: Any) -> Any:
        start = perf_counter()
        MPI.COMM_WORLD.Barrier()
        met = perf_counter()
        try:
            return collective(*arguments)
        finally:
            self.waiting += met - start
            self.seconds += perf_counter() - met


def measured(network: Network, rows: int, distribution: str) -> tuple[float, float, float]:
    """Return seconds of a step, and of its messages and its waiting, medians over the rounds.

    Args:
        network: The network.
        rows: Number of examples on each process.
        distribution: The distribution.
    """
    ranks = TimedRanks()
    engine = ke.Engine.from_onnx(
        network.data,
        loss="categorical",
        damping=0.1,
        threads=1,
        schedule=ke.Schedule(refresh_every=PERIOD),
        communicator=ranks,
        distribution=distribution,  # type: ignore[arg-type] # a row of DISTRIBUTIONS
    )
    batch = engine.sample_batch(rows, seed=ranks.rank)
    engine.step(*batch)
    rounds = []
    for _ in range(ROUNDS):
        ranks.seconds, ranks.waiting, start = 0.0, 0.0, perf_counter()
        for _ in range(PERIOD):
            engine.step(*batch)
        rounds.append((perf_counter() - start, ranks.seconds, ranks.waiting))
    step, messages, waiting = (median(times) / PERIOD for times in zip(*rounds, strict=True))
    return step, messages, waiting


def main() -> None:
    """Measure all networks with both distributions."""
    for make, rows in NETWORKS.items():
        for distribution in DISTRIBUTIONS:
            times = np.array(measured(make(), rows, distribution))
            step, messages, waiting = MPI.COMM_WORLD.allreduce(times) / MPI.COMM_WORLD.size
            if MPI.COMM_WORLD.rank == 0:
                print(
                    f"{make.__name__}, {distribution}: step {1e3 * step:.1f} ms, messages "
                    f"{1e3 * messages:.2f} ms ({100 * messages / step:.1f} %), waiting "
                    f"{1e3 * waiting:.1f} ms",
                    flush=True,
                )


if __name__ == "__main__":
    main()
