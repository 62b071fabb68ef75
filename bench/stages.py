"""Where the time of a step goes: seconds and bytes by stage."""

from dataclasses import dataclass
from statistics import median

from rich.console import Console

from kfac_engine.bench.jobs import DAMPING, DECAY, SUITES
from kfac_engine.bench.report import new_table
from kfac_engine.bench.step_networks import NETWORKS
from kfac_engine.curvature.schedule import Schedule
from kfac_engine.engine.engine import Engine
from kfac_engine.engine.result import Stage

_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class StageRow:
    """A stage of a step in which everything is due.

    Attributes:
        network: Name.
        stage: Medians over some steps.
    """

    network: str
    stage: Stage


def run_stages(console: Console, threads: int) -> list[StageRow]:
    """Take the steps of the suite apart, and print a table.

    Args:
        console: Where to print.
        threads: Of the engine.

    Returns:
        The rows of the table.
    """
    batches = {job.sizes["network"]: job.sizes["batch"] for job in SUITES["step"]}
    rows = [
        row for network, batch in batches.items() for row in take_apart(network, batch, threads)
    ]
    table = new_table("step, by stage", ("network", "stage"), ("ms", "peak MB"))
    for row in rows:
        stage = row.stage
        table.add_row(
            row.network, stage.name, f"{1e3 * stage.seconds:.2f}", f"{stage.nbytes / 1e6:.0f}"
        )
    console.print(table)
    return rows


def take_apart(
    network: str, batch: int, threads: int | None = None, rounds: int = _ROUNDS
) -> list[StageRow]:
    """The stages of one network's step: factors and inverses move in every one.

    Args:
        network: Name.
        batch: Examples.
        threads: Of the engine; None for as many as it takes by itself.
        rounds: Steps.

    Returns:
        A row for each stage.
    """
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
