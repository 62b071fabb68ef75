"""Measure the CPU time of one of several ranks outside of collectives, into a results file.

Run on a machine without other work: ``python -m scripts.measure_ranks``. The table is in
docs/distributed.md.

Ranks are threads. One of them computes at a time, and the others sleep until it enters a
collective. Their number does not depend on the number of cores, they wait without CPU time, and the
CPU time of the process while a rank computes is that of the rank, with the threads of all
libraries. A rank reads memory that others have displaced from the caches, which a rank with a core
of its own need not do. Sums inside of collectives are not counted: they belong to the MPI library.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from threading import Lock, Thread
from time import process_time
from typing import Any

import numpy as np

import kfac_engine as ke
from kfac_engine.bench.environment import environment
from kfac_engine.bench.machine import machine
from kfac_engine.bench.step_networks import mlp
from kfac_engine.distributed.protocol import Alone
from kfac_engine.engine.options import DISTRIBUTIONS
from kfac_engine.system.writing import write_file
from tests.distributed.threads import Ranks, ThreadRank

RESULTS = Path(__file__).resolve().parent.parent / "bench/results/2026-11-25-ranks.jsonl"
ROWS, PERIOD, ROUNDS = 256, 10, 9
SIZES = (1, 2, 4, 8)


class Baton:
    """Lets one rank compute at a time, and counts its CPU time."""

    def __init__(self) -> None:
        self._lock, self._start = Lock(), 0.0

    def take(self) -> None:
        """Wait until the other ranks are in collectives, then start to count."""
        self._lock.acquire()
        self._start = process_time()

    def give(self) -> float:
        """Let another rank compute; return the CPU seconds since ``take``."""
        seconds = process_time() - self._start
        self._lock.release()
        return seconds


class CountedRank(ThreadRank):
    """A rank whose CPU seconds outside of collectives are counted."""

    def __init__(self, shared: Ranks, rank: int, baton: Baton) -> None:
        super().__init__(shared, rank)
        self._baton, self.seconds = baton, 0.0

    def begin(self) -> None:
        """Begin to compute."""
        self._baton.take()

    def end(self) -> None:
        """Enter a collective, or finish."""
        self.seconds += self._baton.give()

    def allreduce(self, buffer: Any) -> None:
        """See ``Communicator``."""
        self._counted(super().allreduce, buffer)

    def reduce_scatter(self, buffer: Any, counts: list[int]) -> Any:
        """See ``Communicator``."""
        return self._counted(super().reduce_scatter, buffer, counts)

    def allgather(self, buffer: Any, counts: list[int]) -> None:
        """See ``Communicator``."""
        self._counted(super().allgather, buffer, counts)

    def broadcast(self, buffer: Any, root: int) -> None:
        """See ``Communicator``."""
        self._counted(super().broadcast, buffer, root)

    def _counted(self, collective: Callable[..., Any], *arguments: Any) -> Any:
        self.end()
        try:
            return collective(*arguments)
        finally:
            self.begin()


class Case:
    """Engines of all ranks of one row of the table, on the same number of rows each.

    An empty distribution is an engine without a communicator. ``seconds`` has for each round the
    CPU seconds of a step of each rank.
    """

    def __init__(self, distribution: str, size: int, baton: Baton) -> None:
        shared = Ranks(size)
        self.distribution, self.size = distribution, size
        self.seconds: list[list[float]] = []
        self._ranks = [CountedRank(shared, rank, baton) for rank in range(size)]
        self._engines: list[Any] = [None] * size
        self._batches = [_batch(rank) for rank in range(size)]
        self._on_all(self._build)
        self._on_all(self._step)  # the first step refreshes all inverses

    def measure(self) -> None:
        """Take the steps from one refresh to the next."""
        for rank in self._ranks:
            rank.seconds = 0.0
        for _ in range(PERIOD):
            self._on_all(self._step)
        self.seconds.append([rank.seconds / PERIOD for rank in self._ranks])

    def milliseconds(self) -> list[float]:
        """Return the median over the rounds for each rank."""
        return [1e3 * median(seconds) for seconds in zip(*self.seconds, strict=True)]

    def _build(self, rank: int) -> None:
        options: dict[str, Any] = {}
        if self.distribution:
            several = self._ranks[rank] if self.size > 1 else Alone()
            options = {"communicator": several, "distribution": self.distribution}
        self._engines[rank] = ke.Engine.from_onnx(
            mlp().data,
            loss="categorical",
            damping=0.1,
            threads=1,
            backend="numpy",
            schedule=ke.Schedule(refresh_every=PERIOD),
            **options,
        )

    def _step(self, rank: int) -> None:
        self._engines[rank].step(*self._batches[rank])

    def _on_all(self, work: Callable[[int], None]) -> None:
        """Call a function for each rank, in a thread of its own."""
        done = []

        def go(rank: int) -> None:
            self._ranks[rank].begin()
            try:
                work(rank)
                done.append(rank)
            finally:
                self._ranks[rank].end()

        threads = [Thread(target=go, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(done) == self.size, "a rank has failed"


def _batch(rank: int) -> tuple[dict[str, Any], Any]:
    rng = np.random.default_rng(rank)
    return {"x": rng.standard_normal((ROWS, 784), np.float32)}, rng.integers(0, 10, ROWS)


def measured(rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """Measure all cases in turns; return a row of the results file for each."""
    baton = Baton()
    cases = [Case("", 1, baton)]
    cases += [Case(name, size, baton) for name in DISTRIBUTIONS for size in SIZES]
    for number in range(rounds):
        for case in cases if number % 2 == 0 else reversed(cases):
            case.measure()
    return [
        {
            "distribution": case.distribution,
            "ranks": case.size,
            "slowest": max(case.milliseconds()),
            "mean": sum(case.milliseconds()) / case.size,
        }
        for case in cases
    ]


def main() -> None:
    """Measure, and write the results file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--output", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    if os.environ.get("OPENBLAS_NUM_THREADS") != "1":  # libraries read it when they are loaded
        command = [sys.executable, "-m", "scripts.measure_ranks", *sys.argv[1:]]
        os.execve(sys.executable, command, environment(1))
    facts = {"machine": machine(1)}
    rows = measured(chosen.rounds)
    for row in rows:
        print(row)
    facts["load"] = os.getloadavg()[0]
    write_file(chosen.output, [json.dumps(line).encode() + b"\n" for line in (facts, *rows)])


if __name__ == "__main__":
    main()
