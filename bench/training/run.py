"""One training run: steps until the budget is spent, with evaluations off the clock."""

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

import kfac_engine as ke
from kfac_engine._types import Array
from kfac_engine.bench.training.data import load_images
from kfac_engine.bench.training.methods import Method, parse_method
from kfac_engine.bench.training.models import Model
from kfac_engine.bench.training.tasks import Task, find_task
from kfac_engine.errors import DivergenceWarning, KfacError

Batch: TypeAlias = tuple[Mapping[str, Array], Array]
Clock: TypeAlias = Callable[[], float]

# Parts of the budget after which the model is evaluated.
MARKS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
# A run whose loss exceeds this multiple of its first loss, plus this number, is ended.
_EXPLOSION = 100.0


@dataclass(frozen=True, slots=True)
class Run:
    """The settings of a run.

    One seed serves the initial weights, the order of the examples and the engine. The budget is in
    CPU seconds, or in steps if ``budget_steps`` is not 0.
    """

    task: str
    method: str
    rate: float | None
    schedule: str
    seed: int
    seconds: float
    budget_steps: int = 0

    def __str__(self) -> str:
        rate = "" if self.rate is None else f" {self.rate:g}"
        return (
            f"{self.task}, {self.method}{rate} {self.schedule}, seed {self.seed}, "
            f"{budget_text(self.seconds, self.budget_steps)}"
        )


def budget_text(seconds: float, steps: int) -> str:
    """Return a budget in words."""
    return f"{steps} steps" if steps else f"{seconds:g} s"


@dataclass(frozen=True, slots=True)
class Point:
    """An evaluation on the validation examples; there is no accuracy without classes."""

    step: int
    cpu: float
    wall: float
    loss: float
    accuracy: float | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a run, whose first evaluation comes before the first step.

    ``died`` says why the run ended before its budget was spent; empty if it did not.
    """

    steps: int
    cpu: float
    wall: float
    curve: tuple[Point, ...] = field(repr=False)
    died: str = ""

    @property
    def lowest(self) -> float:
        """The lowest loss of the validation examples."""
        return min(point.loss for point in self.curve)

    @classmethod
    def parse(cls, entries: Mapping[str, Any]) -> "Outcome":
        """Return the result whose fields are values of JSON, as ``asdict`` yields them."""
        return cls(**{**entries, "curve": tuple(Point(**point) for point in entries["curve"])})


class Trainer:
    """A model in training by an optimizer of the engine."""

    def __init__(
        self,
        model: Model,
        task: Task,
        method: Method,
        rate: float | None,
        options: Mapping[str, Any],
        seed: int,
    ) -> None:
        self._engine = ke.Engine.from_onnx(
            model.data, loss=task.loss, trainable=tuple(model.weights), threads=1, seed=seed
        )
        self._step = method.factory(self._engine, rate, options)
        self._squared, self._validated = task.squared, task.validated

    def step(self, inputs: Mapping[str, Array], targets: Array, scale: float) -> float:
        """Change the parameters by one batch; return the loss before the change."""
        loss: float = self._step(inputs, targets, scale)
        return loss

    def warm_up(self, inputs: Mapping[str, Array], targets: Array) -> None:
        """Compute the gradients of a batch without a change, which builds sessions."""
        self._engine.gradients(inputs, targets)

    def evaluate(self, batches: Iterable[Batch]) -> tuple[float, float | None]:
        """Return the loss and the accuracy of batches, with their own normalizations.

        The loss of a task with squared errors is their mean over the examples.
        """
        losses, hits, count = 0.0, 0.0, 0
        discrete = False
        for inputs, targets in batches:
            trace = self._engine.trace(inputs, None if self._validated else targets)
            objective = self._engine.objective
            if self._squared:
                predicted = trace[self._validated or objective.inputs[0]]
                errors = predicted.astype(np.float64) - targets
                losses += float((errors * errors).sum())
            else:
                losses += objective.value(trace) * len(targets)
            discrete = targets.dtype.kind == "i"
            if discrete:
                predictions = np.argmax(trace[objective.inputs[0]], axis=-1)
                hits += float(np.mean(predictions == targets)) * len(targets)
            count += len(targets)
        return losses / count, hits / count if discrete else None


def train(
    run: Run,
    folder: Path | None,
    *,
    cpu_clock: Clock = time.process_time,
    wall_clock: Clock = time.perf_counter,
) -> Outcome:
    """Train until the budget is spent, the loss explodes or a step fails.

    The clock counts cutting batches, gradients, the optimizer and ``set_parameters``. It stops for
    the sessions, which are built before, and for evaluations.
    """
    task, batch = find_task(run.task)
    method, options = parse_method(run.method)
    # The files of images take seconds to read.
    images = load_images(folder if task.images else None)
    data, model = task.data(images), task.model(images.side, run.seed)
    trainer = Trainer(model, task, method, run.rate, options, run.seed)
    trainer.warm_up(*next(data.batches(batch, run.seed)))
    held_out = partial(data.held_batches, task.evaluated)
    course = _Course(run, method, trainer, held_out)
    with warnings.catch_warnings():
        # A run that diverges is reported as its result.
        warnings.simplefilter("ignore", DivergenceWarning)
        return course.follow(data.batches(batch, run.seed), cpu_clock, wall_clock)


class _Course:
    """The course of a run: its clock, its losses and its evaluations."""

    def __init__(
        self, run: Run, method: Method, trainer: Trainer, held_out: Callable[[], Iterable[Batch]]
    ) -> None:
        self._run, self._method, self._trainer, self._held_out = run, method, trainer, held_out
        self._steps, self._cpu, self._wall = 0, 0.0, 0.0
        self._curve: list[Point] = []

    def follow(self, batches: Iterator[Batch], cpu_clock: Clock, wall_clock: Clock) -> Outcome:
        """Train and evaluate; return the result."""
        died, first, marks = "", None, list(MARKS)
        self._evaluate()
        try:
            while (spent := self._spent()) < 1 and not died:
                wall, cpu = wall_clock(), cpu_clock()
                scale = self._method.scale(self._run.schedule, spent)
                loss = self._trainer.step(*next(batches), scale)
                self._cpu += cpu_clock() - cpu
                self._wall += wall_clock() - wall
                self._steps += 1
                first = loss if first is None else first
                died = _explosion(first, loss)
                if marks and self._spent() >= marks[0]:
                    marks = [mark for mark in marks if mark > self._spent()]
                    self._evaluate()
        except KfacError as error:
            died = str(error)
        return Outcome(self._steps, self._cpu, self._wall, tuple(self._curve), died)

    def _spent(self) -> float:
        """Return the part of the budget that is spent."""
        if self._run.budget_steps:
            return self._steps / self._run.budget_steps
        return self._cpu / self._run.seconds

    def _evaluate(self) -> None:
        loss, accuracy = self._trainer.evaluate(self._held_out())
        self._curve.append(Point(self._steps, self._cpu, self._wall, loss, accuracy))


def _explosion(first: float, loss: float) -> str:
    """Return a message if a loss exploded, or else an empty text."""
    if isfinite(loss) and loss <= _EXPLOSION * (abs(first) + 1):
        return ""
    return f"the loss of a batch grew from {first:g} to {loss:g}."
