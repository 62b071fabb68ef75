"""The demo's comparison: four optimizers train one network for the same CPU time.

All runs of a seed start from the same weights and read the same batches. K-FAC and Muon have the
defaults of the library. SGD and Adam run with three learning rates each; the rate with the lowest
training loss counts. The held-out data select nothing.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import numpy as np

import kfac_engine as ke
from kfac_engine._types import Array
from kfac_engine.backend.threads import single_threaded_blas
from kfac_engine.system.writing import write_rendered
from kfac_engine.training.budget import SCHEDULES
from kfac_engine.training.history import Record
from kfac_engine.training.optimizer import Optimizer

BATCH_SIZE = 128
HELD_OUT = 360
# The loss of a run is the mean over so many batches, an epoch.
EPOCH = 11
# Steps from one evaluation on the held-out data to the next.
EVALUATE_EVERY = 5
# A bound that the CPU time never reaches.
_MANY_EPOCHS = 1_000_000

# Returns a new optimizer; the rate is None for the default.
MakeOptimizer: TypeAlias = Callable[[ke.Engine, float | None], Optimizer]


@dataclass(frozen=True, slots=True)
class Method:
    """An optimizer, and the learning rates with which it runs; None for the default."""

    make: MakeOptimizer
    rates: tuple[float | None, ...] = (None,)


def _adam(engine: ke.Engine, rate: float | None) -> Optimizer:
    assert rate is not None
    return ke.Adam(engine, rate, non_finite="skip")


def _sgd(engine: ke.Engine, rate: float | None) -> Optimizer:
    assert rate is not None
    return ke.SGD(engine, rate, momentum=0.9, non_finite="skip")


METHODS: Mapping[str, Method] = {
    "K-FAC": Method(lambda engine, _: ke.KfacOptimizer(engine)),
    "Muon": Method(lambda engine, _: ke.Muon(engine)),
    "Adam": Method(_adam, (0.003, 0.01, 0.03)),
    "SGD": Method(_sgd, (0.05, 0.1, 0.2)),
}


@dataclass(slots=True)
class Run(ke.Callback):
    """The course of one training run, which it records as a callback of ``fit``.

    The clock counts the CPU time of drawing batches and of steps, without the evaluations.

    Attributes:
        budget: CPU seconds after which the run ends.
        held_out: Inputs and targets that no step reads.
        seconds: CPU seconds at the end of each step.
        losses: Loss of each batch before its update.
        evaluations: Losses of the held-out data, by the number of steps before them.
        accuracy: Part of the held-out data that is classified correctly, at the end.
    """

    budget: float
    held_out: tuple[Mapping[str, Array], Array]
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    evaluations: dict[int, float] = field(default_factory=dict)
    accuracy: float = 0.0
    _start: float = 0.0

    @property
    def spent(self) -> float:
        """CPU seconds of all steps so far."""
        return self.seconds[-1] if self.seconds else 0.0

    @property
    def training_loss(self) -> float:
        """Mean loss over the last epoch; infinite if a batch was skipped."""
        loss = float(np.mean(self.losses[-EPOCH:]))
        return loss if np.isfinite(loss) else np.inf

    @property
    def held_out_loss(self) -> float:
        """Held-out loss after the last step."""
        return self.evaluations[len(self.losses)]

    def steps_to(self, loss: float) -> int | None:
        """Return the steps until the held-out loss is at most ``loss``; None for never."""
        return next((step for step, value in self.evaluations.items() if value <= loss), None)

    def seconds_to(self, loss: float) -> float | None:
        """Return the CPU seconds until the held-out loss is at most ``loss``; None for never."""
        steps = self.steps_to(loss)
        return None if steps is None else self.seconds[steps - 1]

    def on_run_start(self, optimizer: Optimizer, records: Sequence[Record]) -> None:
        """Start the clock."""
        del optimizer, records
        self._start = time.process_time()

    def on_step_end(self, record: Record, optimizer: Optimizer) -> bool:
        """Record a step; return whether the budget is spent."""
        self.seconds.append(self.spent + time.process_time() - self._start)
        self.losses.append(record["loss"])
        is_last = self.spent >= self.budget
        if is_last or len(self.losses) % EVALUATE_EVERY == 0:
            values = optimizer.engine.evaluate(self.held_out, metrics=("loss", "accuracy"))
            self.evaluations[len(self.losses)] = values["loss"]
            self.accuracy = values["accuracy"]
        self._start = time.process_time()
        return is_last


def train(
    model: bytes,
    make: Callable[[ke.Engine], Optimizer],
    data: tuple[Array, Array],
    seed: int,
    seconds: float,
) -> Run:
    """Train a model from its own weights for some CPU seconds, on one thread.

    The file ``model`` has an input ``image`` and one output of logits. ``make`` returns a new
    optimizer of an engine. ``data`` are images and labels. The seed determines the held-out part,
    the batches and sampled targets. Only the time of the steps counts.
    """
    images, labels = data
    order = np.random.default_rng(seed).permutation(len(labels))
    held_out, training = order[:HELD_OUT], order[HELD_OUT:]
    engine = ke.Engine.from_onnx(model, loss="categorical", threads=1, seed=seed)
    # Sessions are built before the clock starts.
    first = training[:BATCH_SIZE]
    engine.gradients({"image": images[first]}, labels[first])
    run = Run(seconds, ({"image": images[held_out]}, labels[held_out]))
    with single_threaded_blas():
        ke.fit(
            engine,
            (images[training], labels[training]),
            optimizer=make(engine),
            epochs=_MANY_EPOCHS,
            batch_size=BATCH_SIZE,
            schedule=lambda _: SCHEDULES["tail"](min(1.0, run.spent / seconds)),
            callbacks=[run],
            seed=seed,
        )
    return run


def compared(
    model: bytes, data: tuple[Array, Array], seeds: Sequence[int], seconds: float
) -> Iterator[tuple[str, float | None, Run]]:
    """Yield the method, the rate and the course of each run.

    The methods take turns, so that another load of the machine delays all of them.
    """
    for seed in seeds:
        for name, method in METHODS.items():
            for rate in method.rates:

                def make(
                    engine: ke.Engine, method: Method = method, rate: float | None = rate
                ) -> Optimizer:
                    return method.make(engine, rate)

                yield name, rate, train(model, make, data, seed, seconds)


def best_rate(runs: Mapping[float | None, Sequence[Run]]) -> float | None:
    """Return the rate with the lowest median training loss."""
    return min(runs, key=lambda rate: median(run.training_loss for run in runs[rate]))


# -- the picture: losses against steps and against CPU seconds -------------------------------------

# The medians are drawn at so many places of the axis.
_PLACES = 100


def draw(runs: Mapping[str, Sequence[Run]], path: Path) -> bool:
    """Draw the runs of each method into a PNG; return False if matplotlib is missing.

    Each method has one run for each seed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return False
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    by_step, by_time = figure.subplots(1, 2, sharey=True)
    for index, (name, of_method) in enumerate(runs.items()):
        losses = [list(run.evaluations.values()) for run in of_method]
        _draw_method(
            by_step, f"C{index}", name, [list(run.evaluations) for run in of_method], losses
        )
        seconds = [[run.seconds[step - 1] for step in run.evaluations] for run in of_method]
        _draw_method(by_time, f"C{index}", name, seconds, losses)
    by_step.set(xlabel="steps", ylabel="loss of held-out digits", yscale="log")
    by_time.set(xlabel="CPU seconds of one thread")
    by_step.legend()
    for axes in (by_step, by_time):
        axes.grid(alpha=0.3, which="both")
    count = len(next(iter(runs.values())))
    figure.suptitle(
        f"Handwritten digits, small CNN: median of {count} seeds, thin lines: each seed"
    )
    write_rendered(path, partial(figure.savefig, format="png", dpi=120))
    return True


def _draw_method(
    axes: Any,
    colour: str,
    name: str,
    places: Sequence[Sequence[float]],
    losses: Sequence[Sequence[float]],
) -> None:
    """Draw the curve of each seed, and the median where all seeds have a loss."""
    for x, y in zip(places, losses, strict=True):
        axes.plot(x, y, color=colour, alpha=0.25, linewidth=0.8)
    common = median_curve(places, losses)
    axes.plot(*common, color=colour, label=name, linewidth=2)


def median_curve(
    places: Sequence[Sequence[float]], losses: Sequence[Sequence[float]]
) -> tuple[Any, Any]:
    """Return places and medians of piecewise linear curves, between their common ends.

    The places of each curve ascend.
    """
    ends = max(x[0] for x in places), min(x[-1] for x in places)
    x = np.linspace(*ends, _PLACES)
    curves = [
        np.interp(x, x_of_curve, values) for x_of_curve, values in zip(places, losses, strict=True)
    ]
    return x, np.median(curves, axis=0)
