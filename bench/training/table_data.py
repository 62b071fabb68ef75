"""Small tables of data, those of scikit-learn and two synthetic ones."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kfac_engine._types import Array
from kfac_engine.bench.training.data import Data
from kfac_engine.errors import BackendError

_TRAINING_PART = 0.8
_WHITE = 16  # digits from 0 to 16 become bytes


@dataclass(frozen=True, slots=True)
class Table:
    """A table of data; ``outputs`` is the number of classes or of targets.

    ``read`` returns the columns and the targets, as they are.
    """

    columns: int
    outputs: int
    read: Callable[[], tuple[Array, Array]] = field(repr=False)
    classes: bool = True

    def data(self, *, raw: bool) -> Data:
        """Return four fifths of the rows to train on, and a fifth to validate on.

        Raw columns and targets have their own units, in place of the mean 0 and the deviation 1.
        """
        x, y = self.read()
        if not raw:
            x, y = _standardized(x), y if self.classes else _standardized(y)
        x, y = x.astype(np.float32), y if self.classes else y.astype(np.float32)
        order = np.random.default_rng(0).permutation(len(x))
        training, validation = np.split(order, [int(_TRAINING_PART * len(x))])
        return Data(x[training], y[training], x[validation], y[validation])


def _standardized(x: Array) -> Array:
    deviation = x.std(axis=0)
    result: Array = (x - x.mean(axis=0)) / np.where(deviation > 0, deviation, 1)
    return result


def _of_sklearn(name: str, **options: Any) -> tuple[Array, Array]:
    try:
        from sklearn import datasets
    except ImportError as error:
        raise BackendError(
            "the tasks 'tables' need scikit-learn: run pip install scikit-learn, or leave them out."
        ) from error
    x, y = getattr(datasets, f"load_{name}")(return_X_y=True, **options)
    return x, y


def _digits() -> tuple[Array, Array]:
    x, y = _of_sklearn("digits")
    return _WHITE * x, y


def _diabetes() -> tuple[Array, Array]:
    x, y = _of_sklearn("diabetes", scaled=False)
    return x, y[:, None]


def _moons() -> tuple[Array, Array]:
    """Return two half circles with noise, a class each."""
    rng, angles = np.random.default_rng(0), np.linspace(0, np.pi, 300)
    upper = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    x = np.concatenate([upper, [1.0, 0.5] - upper]) + 0.2 * rng.standard_normal((600, 2))
    return x, np.repeat([0, 1], 300)


def _houses() -> tuple[Array, Array]:
    """Return prices from incomes, ages, rooms, people of a block and of a house, latitudes."""
    rng, n = np.random.default_rng(5), 2000
    columns = [
        rng.lognormal(1.3, 0.5, n), rng.uniform(1, 52, n), rng.lognormal(1.6, 0.4, n),
        rng.lognormal(7, 0.7, n), rng.lognormal(1, 0.3, n), rng.uniform(32, 42, n),
    ]  # fmt: skip
    income, age, rooms, _, _, latitude = columns
    price = 0.4 * income + 0.01 * age - 0.01 * (latitude - 37) ** 2 + np.log(rooms)
    price += 0.2 * rng.standard_normal(n)
    return np.stack(columns, axis=1), 1e4 * price[:, None]


TABLES: Mapping[str, Table] = {
    "handwriting": Table(64, 10, _digits),
    "wine": Table(13, 3, lambda: _of_sklearn("wine")),
    "cancer": Table(30, 2, lambda: _of_sklearn("breast_cancer")),
    "diabetes": Table(10, 1, _diabetes, classes=False),
    "moons": Table(2, 2, _moons),
    "houses": Table(6, 1, _houses, classes=False),
}
