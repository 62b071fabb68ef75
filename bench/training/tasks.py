"""The tasks: a model, its data, a loss and a batch size."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kfac_engine.bench.training import models
from kfac_engine.bench.training.data import (
    Data,
    Images,
    blurred,
    classified,
    load_digits,
    next_characters,
    reconstructed,
    smooth_function,
)
from kfac_engine.bench.training.layers import Model
from kfac_engine.errors import InputError
from kfac_engine.registry import Registry

# Validation examples of the tasks whose evaluation takes long.
_HELD_OUT = 4_000
_EVALUATED = 1_000  # examples of a batch of the validation


@dataclass(frozen=True, slots=True)
class Task:
    """A model that is trained on data.

    Attributes:
        title: Description for tables.
        model: Return the model for images of a side, from a seed.
        data: Return the data from the images.
        loss: Name of the loss.
        batch: Number of examples of a batch.
        evaluated: Number of examples of a batch of the validation. Normalizations in training form
            use the statistics of these batches, for every method.
    """

    title: str
    model: Callable[[int, int], Model] = field(repr=False)
    data: Callable[[Images], Data] = field(repr=False)
    loss: str
    batch: int
    evaluated: int = _EVALUATED


def _planes(images: Images, held_out: int | None = _HELD_OUT) -> Data:
    return classified(images, (1, images.side, images.side), held_out)


def _flat(images: Images) -> Data:
    return classified(images, (images.side**2,))


TASKS: Mapping[str, Task] = Registry(
    "training task",
    {
        "autoencoder": Task(
            "autoencoder 784-400-200-100-30, tanh",
            lambda side, seed: models.autoencoder(side, "Tanh", seed),
            lambda images: reconstructed(images, _HELD_OUT), "multi_bernoulli", 512,
        ),
        "resnet": Task("ResNet with batch normalization", models.resnet, _planes, "categorical",
                       256),
        "transformer": Task(
            "character transformer", lambda side, seed: models.transformer(seed),
            lambda images: next_characters(), "categorical", 32, evaluated=100,
        ),
        "mlp": Task(
            "MLP 784-512-256-10, ReLU",
            lambda side, seed: models.perceptron((side**2, 512, 256, 10), "Relu", seed), _flat,
            "categorical", 512,
        ),
        "lenet": Task("LeNet, tanh", models.lenet, _planes, "categorical", 256),
        "autoencoder-relu": Task(
            "autoencoder, ReLU, squared error",
            lambda side, seed: models.autoencoder(side, "Relu", seed),
            lambda images: reconstructed(images, _HELD_OUT), "normal", 512,
        ),
        "digits": Task(
            "digits, MLP 64-100-50-10, tanh",
            lambda side, seed: models.perceptron((64, 100, 50, 10), "Tanh", seed),
            lambda images: _flat(load_digits()), "categorical", 128,
        ),
        "cnn": Task("CNN without normalization, ReLU", models.cnn, _planes, "categorical", 256),
        "restorer": Task(
            "blurred images, convolutional regression", models.restorer,
            lambda images: blurred(images, images.training // 5, 1_000), "normal", 128,
        ),
        "function": Task(
            "smooth function, dense regression",
            lambda side, seed: models.perceptron((8, 64, 64, 4), "Tanh", seed),
            lambda images: smooth_function(), "normal", 256,
        ),
        "recurrent": Task(
            "GRU over the rows of images", models.recurrent,
            lambda images: classified(images, (images.side,) * 2, _HELD_OUT), "categorical", 256,
        ),
    },
)  # fmt: skip

# The tasks that no choice in the optimizers was made on.
UNSEEN = ("autoencoder-relu", "digits", "cnn", "restorer", "function", "recurrent")
# A task and another size of its batches.
SEPARATOR = "@"


def find_task(name: str) -> tuple[Task, int]:
    """Return a task and its batch size.

    Args:
        name: Name of a task, or ``name@batch`` for another batch size.

    Returns:
        The task, and the number of examples of a batch.

    Raises:
        UnknownNameError: There is no such task.
        InputError: The batch size is not a positive integer.
    """
    key, separator, size = name.partition(SEPARATOR)
    task = TASKS[key]
    if not separator:
        return task, task.batch
    if not re.fullmatch(r"0*[1-9]\d{0,8}", size):
        raise InputError(f"task '{name}': the batch size after '@' must be a positive integer.")
    return task, int(size)
