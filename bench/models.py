"""The suite ``models``: steps of optimizers on networks of real size, from files in a folder.

``tests/exporters/real_size.py`` writes the files. Each optimizer has a process of its own with one
thread; times are CPU seconds.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from time import process_time
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from kfac_engine.bench.environment import answer_of
from kfac_engine.bench.report import Form
from kfac_engine.engine.engine import Engine
from kfac_engine.engine.profiling import forget_peak, peak_bytes, resident_bytes
from kfac_engine.errors import InputError
from kfac_engine.training.first_order import AdamW
from kfac_engine.training.kfac import KfacOptimizer
from kfac_engine.training.optimizer import Optimizer

RATE = 1e-4
# The periods of K-FAC's inverses grow with the number of steps: after so many, most steps are
# without one.
STEPS = 25
TORCH = "AdamW of PyTorch"
_OPTIMIZERS: Mapping[str, Callable[[Engine], Optimizer]] = {
    "AdamW": lambda engine: AdamW(engine, learning_rate=RATE),
    "K-FAC": KfacOptimizer,
}


class Answer(NamedTuple):
    """Steps of an optimizer, as a process tells them: CPU seconds, losses and bytes.

    The first step can start after ``build`` seconds. Announced and measured bytes are 0 if unknown.
    """

    parameters: int
    build: float
    seconds: Sequence[float]
    losses: Sequence[float]
    announced: int
    peak: int


@dataclass(frozen=True, slots=True)
class ModelSteps:
    """Steps of an optimizer on one model; see ``Answer``.

    ``step`` and ``mean`` are the median and the mean of the steps after the first. ``ratio`` is the
    mean divided by that of the first optimizer. There are the losses of the first and of the last
    step.
    """

    model: str
    optimizer: str
    parameters: int
    build: float
    first: float
    step: float
    mean: float
    ratio: float
    announced: int
    peak: int
    losses: Sequence[float]


def _cells(row: Mapping[str, Any]) -> list[str]:
    announced, (first, last) = row["announced"], row["losses"]
    return [
        row["model"], row["optimizer"], f"{row['parameters'] / 1e6:.1f} M", f"{row['build']:.1f}",
        f"{row['first']:.2f}", f"{row['step']:.2f}", f"{row['mean']:.2f}", f"{row['ratio']:.2f}",
        f"{announced / 1e9:.2f}" if announced else "", f"{row['peak'] / 1e9:.2f}",
        f"{first:.3f} → {last:.3f}",
    ]  # fmt: skip


FORM = Form(
    ("model", "optimizer"),
    (
        "parameters", "build s", "first step s", "step s", "mean step s", "× first row",
        "announced GB", "peak GB", "loss",
    ),
    _cells,
)  # fmt: skip


def run_models(
    console: Console, name: str, folder: Path | None, *, with_torch: bool = False
) -> list[ModelSteps]:
    """Measure the models of a folder, and print a table.

    The folder has ``NAME.onnx``, ``NAME.npz`` with an array for each input and ``targets``, and for
    PyTorch the modules ``NAME.pt2``.
    """
    paths = sorted(folder.glob("*.onnx")) if folder else []
    if not paths:
        raise InputError(
            f"the suite models measures the files of a folder, and "
            f"{f'{folder} has no NAME.onnx' if folder else 'there is none'}: write them with "
            f"python -m tests.exporters.real_size DIR, and name the folder with --models DIR."
        )
    rows: list[ModelSteps] = []
    for path in paths:
        answers = {}
        if with_torch and path.with_suffix(".pt2").exists():
            answers[TORCH] = answer_of("peers.torch_models", "measure", str(path), threads=1)
        for optimizer in _OPTIMIZERS:
            answers[optimizer] = answer_of("models", "measure", str(path), optimizer, threads=1)
        rows += _rows(path.stem, answers)
    FORM.show(console, f"Suite {name}", rows)
    return rows


def batch_of(path: Path) -> tuple[dict[str, Any], Any]:
    """Return the inputs and the targets that are next to a model."""
    with np.load(path.with_suffix(".npz")) as archive:
        arrays = dict(archive)
    return arrays, arrays.pop("targets")


def measure(path: str, optimizer: str) -> Answer:
    """Return CPU seconds, losses and memory of steps in this process.

    The batch is next to the model. Only an engine with curvature announces its memory.
    """
    inputs, targets = batch_of(Path(path))
    before, start = resident_bytes(), process_time()
    engine = Engine.from_onnx(path, loss="categorical", threads=1)
    chosen = _OPTIMIZERS[optimizer](engine)
    build = process_time() - start
    announced = chosen.memory(len(targets)).total
    forget_peak()
    seconds, losses = [], []
    for _ in range(STEPS):
        start = process_time()
        losses.append(chosen.step(inputs, targets).loss)
        seconds.append(process_time() - start)
    parameters = sum(array.size for array in engine.parameters.values())
    return Answer(parameters, build, seconds, losses, announced, max(0, peak_bytes() - before))


def _rows(model: str, answers: Mapping[str, Sequence[Any]]) -> Iterator[ModelSteps]:
    """Yield the rows of a model; the first one is that of which the others have a ratio."""
    reference = 0.0
    for optimizer, printed in answers.items():
        answer = Answer(*printed)
        first, *later = answer.seconds
        mean = fmean(later)
        reference = reference or mean
        yield ModelSteps(
            model, optimizer, answer.parameters, answer.build, first, median(later), mean,
            mean / reference, answer.announced, answer.peak,
            (answer.losses[0], answer.losses[-1]),
        )  # fmt: skip
