"""Measured and announced peak memory of a step; each case has a process of its own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from kfac_engine.bench.environment import answer_of
from kfac_engine.bench.jobs import DECAY
from kfac_engine.bench.report import Form
from kfac_engine.bench.step_networks import NETWORKS
from kfac_engine.engine.engine import Engine
from kfac_engine.engine.profiling import forget_peak, peak_bytes, resident_bytes

# Network, batch and estimation mode: modes differ in the number of backward passes.
CASES = (
    ("mlp", 512, "gradients"),
    ("mlp", 4096, "gradients"),
    ("resnet20", 32, "gradients"),
    ("resnet20", 128, "gradients"),
    ("resnet20", 128, "empirical"),
    ("transformer", 32, "gradients"),
    ("transformer", 128, "gradients"),
    ("mlp", 512, "exact"),
)


@dataclass(frozen=True, slots=True)
class Peak:
    """Announced and measured peak memory of one step in bytes; measured 0 if unknown."""

    case: str
    announced: int
    measured: int


def _cells(row: Mapping[str, Any]) -> list[str]:
    announced, measured = row["announced"] / 1e6, row["measured"] / 1e6
    return [row["case"], f"{announced:.0f}", f"{measured:.0f}", f"{measured / announced:.2f}"]


FORM = Form(("case",), ("announced MB", "measured MB", "measured ÷ announced"), _cells)


def run_memory(console: Console, name: str) -> list[Peak]:
    """Measure the cases, and print a table."""
    peaks = [in_new_process(*case) for case in CASES]
    FORM.show(console, f"Suite {name}", peaks)
    return peaks


def in_new_process(network: str, batch: int, mode: str) -> Peak:
    """Measure the memory of one network, batch and estimation mode in a new process."""
    announced, measured = answer_of("memory", "step_peak", network, batch, mode)
    return Peak(f"{network}, batch {batch}, {mode}", announced, measured)


def step_peak(network: str, batch: int, mode: str) -> tuple[int, int]:
    """Measure the peak memory of two steps in this process."""
    net = NETWORKS[network]()
    inputs, targets = net.inputs(batch), net.targets(batch)
    before = resident_bytes()
    engine = Engine.from_onnx(
        net.data, loss="categorical", estimation_mode=mode, ema_decay=DECAY, backend="numpy"
    )
    announced = engine.memory(batch).total
    forget_peak()
    for _ in range(2):
        engine.step(inputs, targets)
    return announced, max(0, peak_bytes() - before)
