"""The tasks: a model, its data, a loss and a batch size."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from kfac_engine.bench.training import models, modern, repeated
from kfac_engine.bench.training.data import (
    TABLES,
    Data,
    Images,
    Table,
    blurred,
    classified,
    load_digits,
    next_characters,
    reconstructed,
    smooth_function,
)
from kfac_engine.bench.training.models import Model
from kfac_engine.errors import InputError
from kfac_engine.losses.kinds import LossKind, Normal
from kfac_engine.registry import Registry

# Validation examples of the tasks whose evaluation takes long.
_HELD_OUT = 4_000
_EVALUATED = 1_000  # examples of a batch of the validation


@dataclass(frozen=True, slots=True)
class Task:
    """A model that is trained on data.

    ``model`` returns the model for images of a side, from a seed. Validation has batches of
    ``evaluated`` examples: normalizations in training form use the statistics of these batches, for
    every method. If ``squared``, it has squared errors in place of the loss ``"normal"``, which has
    a constant as well: those of the output ``validated``, if it is named.
    """

    title: str
    model: Callable[[int, int], Model] = field(repr=False)
    data: Callable[[Images], Data] = field(repr=False)
    loss: str | Mapping[str, str | LossKind]
    batch: int
    evaluated: int = _EVALUATED
    images: bool = True
    squared: bool = False
    validated: str = ""


def _planes(images: Images, held_out: int | None = _HELD_OUT) -> Data:
    return classified(images, (1, images.side, images.side), held_out)


def _flat(images: Images) -> Data:
    return classified(images, (images.side**2,))


def _table(name: str, table: Table, *, raw: bool) -> Task:
    """Return the task of an MLP on a table of data."""
    widths = (table.columns, 64, 32, table.outputs)
    return Task(
        f"{name}, {'raw' if raw else 'standardized'}, MLP 64-32, ReLU",
        lambda side, seed: models.perceptron(widths, "Relu", seed),
        lambda images: table.data(raw=raw), "categorical" if table.classes else "normal", 64,
        images=False, squared=not table.classes,
    )  # fmt: skip


# Groups of tasks with short names; the figures of these tasks are those of the last step.
MODERN: Mapping[str, Task] = {
    "llama": Task(
        "character Llama", lambda side, seed: modern.llama(seed),
        lambda images: next_characters(100), "categorical", 16, evaluated=100, images=False),
    "gpt": Task(
        "the same with LayerNorm, biases, GELU",
        lambda side, seed: modern.llama(seed, classic=True), lambda images: next_characters(100),
        "categorical", 16, evaluated=100, images=False),
    "vit": Task("ViT", modern.vit, partial(_planes, held_out=1_000), "categorical", 128),
    "mobilenet": Task("MobileNet with batch normalization", modern.mobilenet,
                      partial(_planes, held_out=1_000), "categorical", 64),
    "gru": Task(
        "character GRU", lambda side, seed: modern.character_gru(seed),
        lambda images: next_characters(100), "categorical", 32, evaluated=100, images=False),
    "unet": Task(
        "blurred images, U-Net with GroupNorm", modern.unet,
        lambda images: blurred(images, images.training // 5, 500), "normal", 64, evaluated=250,
        squared=True),
}  # fmt: skip
# Tasks of some thousand steps.
LONG: Mapping[str, Task] = {
    "gpt-long": replace(MODERN["gpt"], title="character GPT with LayerNorm, biases, GELU"),
    "allconv": Task("all-convolutional net, ReLU", models.allconv, _planes, "categorical", 64),
}
_WHOLE = 2_000  # examples of a batch of all


def _equation(name: str, equation: repeated.Equation) -> Task:
    return Task(
        f"{name}, tanh network 48-48-48, {equation.inside:,} points",
        lambda side, seed: equation.model((48, 48, 48), seed), lambda images: equation.data(),
        {repeated.INSIDE: "normal", repeated.EDGE: Normal(weight=repeated.EDGE_WEIGHT)}, _WHOLE,
        evaluated=_WHOLE, images=False, squared=True, validated=repeated.EDGE,
    )  # fmt: skip


def _fitted(title: str, model: Callable[[int, int], Model], data: Callable[[], Data]) -> Task:
    return Task(title, model, lambda images: data(), "normal", _WHOLE, evaluated=_WHOLE,
                images=False, squared=True)  # fmt: skip


# Every step has the same examples.
REPEATED: Mapping[str, Task] = {
    "image": _fitted(
        "image by coordinates, sines of frequency 20",
        lambda side, seed: repeated.sine_network((2, 64, 64, 64, 1), 20, seed),
        lambda: repeated.image(1)),
    "colours": _fitted(
        "three images by coordinates, sines of frequency 30",
        lambda side, seed: repeated.sine_network((2, 64, 64, 64, 3), 30, seed),
        lambda: repeated.image(3)),
    "chirp": _fitted(
        "sin(20x³) + |x|, tanh 48-48",
        lambda side, seed: models.perceptron((1, 48, 48, 1), "Tanh", seed), repeated.chirp),
    "surface": _fitted(
        "function of three variables, tanh 48-48",
        lambda side, seed: models.perceptron((3, 48, 48, 1), "Tanh", seed), repeated.surface),
    "compressed": _fitted(
        "digits through 10 numbers, tanh 48-10-48",
        lambda side, seed: models.perceptron((64, 48, 10, 48, 64), "Tanh", seed),
        lambda: repeated.compressed(load_digits())),
    **{name: _equation(name, equation) for name, equation in repeated.EQUATIONS.items()},
}  # fmt: skip
TABULAR: Mapping[str, Task] = {
    f"{name}{suffix}": _table(name, table, raw=bool(suffix))
    for name, table in TABLES.items()
    for suffix in ("", "-raw")
}

TASKS: Mapping[str, Task] = Registry(
    "training task",
    {
        "autoencoder": Task(
            "autoencoder 784-400-200-100-30, tanh", models.autoencoder,
            lambda images: reconstructed(images, _HELD_OUT), "multi_bernoulli", 512),
        "resnet": Task("ResNet with batch normalization", models.resnet, _planes, "categorical",
                       256),
        "transformer": Task(
            "character transformer", lambda side, seed: models.transformer(seed),
            lambda images: next_characters(), "categorical", 32, evaluated=100, images=False),
        "mlp": Task(
            "MLP 784-512-256-10, ReLU",
            lambda side, seed: models.perceptron((side**2, 512, 256, 10), "Relu", seed), _flat,
            "categorical", 512),
        "lenet": Task("LeNet, tanh", models.lenet, _planes, "categorical", 256),
        "digits": Task(
            "digits, MLP 64-100-50-10, tanh",
            lambda side, seed: models.perceptron((64, 100, 50, 10), "Tanh", seed),
            lambda images: _flat(load_digits()), "categorical", 128, images=False),
        "cnn": Task("CNN without normalization, ReLU", models.cnn, _planes, "categorical", 256),
        "restorer": Task(
            "blurred images, convolutional regression", models.restorer,
            lambda images: blurred(images, images.training // 5, 1_000), "normal", 128),
        "function": Task(
            "smooth function, dense regression",
            lambda side, seed: models.perceptron((8, 64, 64, 4), "Tanh", seed),
            lambda images: smooth_function(), "normal", 256, images=False),
        **MODERN,
        **LONG,
        **REPEATED,
        **TABULAR,
    },
)  # fmt: skip

OF_TEXT = ("transformer", "llama", "gpt", "gru", "gpt-long")
# A task and another size of its batches.
SEPARATOR = "@"


def find_task(name: str) -> tuple[Task, int]:
    """Return a task and the size of its batches, from ``name`` or ``name@batch``."""
    key, separator, size = name.partition(SEPARATOR)
    task = TASKS[key]
    if not separator:
        return task, task.batch
    if not re.fullmatch(r"0*[1-9]\d{0,8}", size):
        raise InputError(f"task '{name}': the batch size after '@' must be a positive integer.")
    return task, int(size)
