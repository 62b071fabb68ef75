"""Time and memory of a step by stage."""

from dataclasses import dataclass
from statistics import median

from rich.console import Console

from kfac_engine.bench.jobs import DAMPING, DECAY, SUITES
from kfac_engine.bench.report import print_table
from kfac_engine.bench.step_networks import NETWORKS
from kfac_engine.curvature.schedule import Schedule
from kfac_engine.engine.engine import Engine
from kfac_engine.engine.result import Stage

_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class StageRow:
    """A stage of a step that updates factors and inverses."""

    network: str  # name of the network
    stage: Stage  # median time and largest memory over the steps


def run_stages(console: Console, threads: int) -> list[StageRow]:
    """Profile the steps of the suite, and print a table."""
    batches = {job.sizes["network"]: job.sizes["batch"] for job in SUITES["step"]}
    rows = [
        row for network, batch in batches.items() for row in take_apart(network, batch, threads)
    ]
    cells = [
        (row.network, row.stage.name, f"{1e3 * row.stage.seconds:.2f}",
         f"{row.stage.nbytes / 1e6:.0f}")
        for row in rows
    ]  # fmt: skip
    heads = ("network", "stage"), ("ms", "peak MB")
    print_table(console, "Suite step, by stage", heads, cells)
    return rows


def take_apart(
    network: str, batch: int, threads: int | None = None, rounds: int = _ROUNDS
) -> list[StageRow]:
    """Profile the steps of one network; every step updates factors and inverses."""
    net = NETWORKS[network]()
    inputs, targets = net.inputs(batch), net.targets(batch)
    engine = Engine.from_onnx(
        net.data, loss="categorical", estimation_mode="empirical", schedule=Schedule(1, 1),
        damping=DAMPING, ema_decay=DECAY, threads=threads,
    )  # fmt: skip
    engine.step(inputs, targets)
    steps = [engine.step(inputs, targets, profile=True).stages for _ in range(rounds)]
    return [
        StageRow(
            network,
            Stage(
                same[0].name,
                median(stage.seconds for stage in same),
                max(stage.nbytes for stage in same),
            ),
        )
        for same in zip(*steps, strict=True)
    ]
