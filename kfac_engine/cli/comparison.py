"""The demo's comparison: SGD, Adam and K-FAC train one network from the same weights.

Every method sees the same batches in the same order. SGD and Adam run once for each of nine
learning rates, and the run with the lowest training loss over the last epoch counts. K-FAC runs
once, with the defaults of the library. The held-out data select nothing.

The loops are part of the package because the command ``demo`` has to work in a wheel; the script
``examples/digits.py`` uses them too.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

import kfac_engine as ke
from kfac_engine._types import Array
from kfac_engine.engine import result as results
from kfac_engine.engine.result import Result
from kfac_engine.errors import NonFiniteError

BATCH_SIZE = 128
EPOCH = 12  # batches
HELD_OUT = 1797 - EPOCH * BATCH_SIZE
LEARNING_RATE, KL_CLIP = "learning rate", "KL clip"

Setting: TypeAlias = Mapping[str, float]
# Computes one batch's update and applies it to the engine's parameters; returns the batch's result.
Step: TypeAlias = Callable[[Array, Array], Result]


@dataclass(frozen=True, slots=True)
class Digits:
    """Batches and held-out data of one seed.

    Attributes:
        batches: Images and labels, one batch for each step.
        held_out: Images and labels that no step sees.
    """

    batches: tuple[tuple[Array, Array], ...]
    held_out: tuple[Array, Array]

    @classmethod
    def draw(cls, images: Array, labels: Array, steps: int, seed: int) -> "Digits":
        """Shuffle the data, hold a part out, and divide the rest into batches for each epoch."""
        rng = np.random.default_rng(seed)
        order = rng.permutation(len(labels))
        held_out, training = order[:HELD_OUT], order[HELD_OUT:]
        epochs = (rng.permutation(training) for _ in range(math.ceil(steps / EPOCH)))
        parts = [part for epoch in epochs for part in np.split(epoch, EPOCH)][:steps]
        return cls(
            tuple((images[part], labels[part]) for part in parts),
            (images[held_out], labels[held_out]),
        )


@dataclass(frozen=True, slots=True)
class Run:
    """The record of one training run.

    Attributes:
        setting: Hyperparameters by name.
        losses: Loss of each batch before its step; infinite from where the run diverged.
        seconds: Wall time of each step.
        held_out_loss: Loss of the held-out data after the last step.
    """

    setting: Setting
    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    held_out_loss: float

    @property
    def final_loss(self) -> float:
        """Mean loss over the last epoch."""
        return float(np.mean(self.losses[-EPOCH:]))

    def steps_to(self, loss: float) -> int | None:
        """Number of steps until a batch's loss is at or below ``loss``; None if it never is."""
        return next((step for step, value in enumerate(self.losses) if value <= loss), None)


@dataclass(frozen=True, slots=True)
class Method:
    """An optimization method and the settings that it is run with.

    Attributes:
        grid: The settings.
        start: Return the step function of a run, with fresh state.
    """

    grid: tuple[Setting, ...]
    start: Callable[[ke.Engine, Setting], Step]


def _move(engine: ke.Engine, directions: Mapping[str, Array], learning_rate: float) -> None:
    engine.set_parameters(
        {
            name: value - np.float32(learning_rate) * directions[name]
            for name, value in engine.parameters.items()
        }
    )


def _sgd(engine: ke.Engine, setting: Setting) -> Step:
    def step(images: Array, labels: Array) -> Result:
        result = engine.gradients({"image": images}, labels)
        _move(engine, result.gradients, setting[LEARNING_RATE])
        return result

    return step


def _adam(engine: ke.Engine, setting: Setting) -> Step:
    # The default constants of Kingma & Ba 2015, arXiv:1412.6980, algorithm 1.
    beta1, beta2, epsilon = 0.9, 0.999, 1e-8
    first = {name: np.zeros_like(value) for name, value in engine.parameters.items()}
    second = {name: np.zeros_like(value) for name, value in engine.parameters.items()}
    count = 0

    def step(images: Array, labels: Array) -> Result:
        nonlocal count
        count += 1
        result = engine.gradients({"image": images}, labels)
        directions = {}
        for name, gradient in result.gradients.items():
            first[name] += (1 - beta1) * (gradient - first[name])
            second[name] += (1 - beta2) * (gradient**2 - second[name])
            mean, square = first[name] / (1 - beta1**count), second[name] / (1 - beta2**count)
            directions[name] = mean / (np.sqrt(square) + epsilon)
        _move(engine, directions, setting[LEARNING_RATE])
        return result

    return step


def _kfac(engine: ke.Engine, setting: Setting) -> Step:
    def step(images: Array, labels: Array) -> Result:
        result = engine.step({"image": images}, labels)
        _move(engine, result.natural_gradients, result.clipped_rate(kl_clip=setting[KL_CLIP]))
        return result

    return step


def _rates(*rates: float) -> tuple[Setting, ...]:
    return tuple({LEARNING_RATE: rate} for rate in rates)


METHODS: Mapping[str, Method] = {
    "SGD": Method(_rates(0.03, 0.06, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0), _sgd),
    "Adam": Method(_rates(0.001, 0.002, 0.004, 0.007, 0.01, 0.02, 0.03, 0.05, 0.1), _adam),
    "K-FAC": Method(({KL_CLIP: results.KL_CLIP},), _kfac),
}


def build_engine(model: bytes, seed: int) -> ke.Engine:
    """Return an engine with the defaults of the library, on one thread."""
    return ke.Engine.from_onnx(model, loss="categorical", threads=1, seed=seed)


def train(model: bytes, method: Method, setting: Setting, data: Digits, seed: int) -> Run:
    """Train a model from its own weights with one setting of a method.

    Args:
        model: ONNX file with an input ``image`` and one output of logits.
        method: The method.
        setting: Its hyperparameters.
        data: Batches, in order, and held-out data.
        seed: Seed of the targets that the engine samples.

    Returns:
        The record of the run.
    """
    engine = build_engine(model, seed)
    return _run(engine, method.start(engine, setting), setting, data)


def runs(model: bytes, method: Method, data: Digits, seed: int) -> Iterator[Run]:
    """Yield a run for each setting of a method's grid; see ``train``."""
    for setting in method.grid:
        yield train(model, method, setting, data, seed)


def best(records: Sequence[Run]) -> Run:
    """Return the run with the lowest training loss over the last epoch."""
    return min(records, key=lambda run: run.final_loss)


def _run(engine: ke.Engine, step: Step, setting: Setting, data: Digits) -> Run:
    losses = [math.inf] * len(data.batches)
    seconds = []
    held_out_loss = math.inf
    try:
        for index, (images, labels) in enumerate(data.batches):
            start = time.perf_counter()
            losses[index] = step(images, labels).loss
            seconds.append(time.perf_counter() - start)
        images, labels = data.held_out
        held_out_loss = engine.gradients({"image": images}, labels).loss
    except NonFiniteError:
        pass  # the setting made the weights overflow: its losses stay infinite from here
    return Run(setting, tuple(losses), tuple(seconds), held_out_loss)
