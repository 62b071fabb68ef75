"""Losses with a batch each, and what is done with every one of them."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kfac_engine.losses import (
    CategoricalLogitsNegativeLogProbLoss,
    HuberNegativeLogProbLoss,
    LaplaceNegativeLogProbLoss,
    LossFunction,
    MultiBernoulliNegativeLogProbLoss,
    NormalMeanNegativeLogProbLoss,
    NormalMeanVarianceNegativeLogProbLoss,
    OnehotCategoricalLogitsNegativeLogProbLoss,
    PoissonNegativeLogProbLoss,
)


@dataclass(frozen=True)
class Case:
    """A loss on inputs ``z`` (and ``s``) with targets ``t``, and a batch for it."""

    name: str  # test id
    loss: LossFunction
    shape: tuple[int, ...]  # of each input
    targets: Callable[[np.random.Generator], NDArray]  # makes targets from a generator
    positions: int = 1  # predictions per example

    def values(self, dtype: str = "float64") -> dict[str, NDArray]:
        rng = np.random.default_rng(7)
        inputs = {"z": rng.standard_normal(self.shape).astype(dtype)}
        if len(self.loss.inputs) == 2:
            inputs["s"] = rng.uniform(0.5, 2, self.shape).astype(dtype)
        targets = self.targets(rng)
        return {**inputs, "t": targets.astype(dtype) if targets.dtype.kind == "f" else targets}


def ids(*shape: int, classes: int) -> Callable[[np.random.Generator], NDArray]:
    return lambda rng: rng.integers(0, classes, shape)


def reals(*shape: int) -> Callable[[np.random.Generator], NDArray]:
    return lambda rng: rng.standard_normal(shape)


def bits(*shape: int) -> Callable[[np.random.Generator], NDArray]:
    return lambda rng: rng.integers(0, 2, shape).astype(np.float64)


def counts(*shape: int) -> Callable[[np.random.Generator], NDArray]:
    return lambda rng: rng.integers(0, 4, shape).astype(np.float64)


def rows(n: int, classes: int) -> Callable[[np.random.Generator], NDArray]:
    return lambda rng: np.eye(classes)[rng.integers(0, classes, n)]


CATEGORICAL = CategoricalLogitsNegativeLogProbLoss
NORMAL = NormalMeanNegativeLogProbLoss
BOTH = NormalMeanVarianceNegativeLogProbLoss
LAPLACE = LaplaceNegativeLogProbLoss
HUBER = HuberNegativeLogProbLoss
POISSON = PoissonNegativeLogProbLoss
BERNOULLI = MultiBernoulliNegativeLogProbLoss

CASES = (
    Case("categorical", CATEGORICAL("z", "t"), (3, 4), ids(3, classes=4)),
    Case("categorical of tokens", CATEGORICAL("z", "t"), (2, 3, 4), ids(2, 3, classes=4), 3),
    Case(
        "categorical of pixels", CATEGORICAL("z", "t", class_axis=1), (2, 3, 2, 2),
        ids(2, 2, 2, classes=3), 4),
    Case("one-hot", OnehotCategoricalLogitsNegativeLogProbLoss("z", "t"), (3, 4), rows(3, 4)),
    Case("normal", NORMAL("z", 0.3, "t"), (3, 4), reals(3, 4)),
    Case("normal, one number an example", NORMAL("z", 2, "t"), (3,), reals(3)),
    Case(
        "normal image", NORMAL("z", targets="t", class_axis=1), (2, 3, 2, 1), reals(2, 3, 2, 1), 2),
    Case("mean and variance", BOTH("z", "s", "t"), (3, 2), reals(3, 2)),
    Case(
        "mean and variance image", BOTH("z", "s", "t", class_axis=1), (2, 3, 2), reals(2, 3, 2), 2),
    Case("Bernoulli", BERNOULLI("z", "t"), (3, 4), bits(3, 4)),
    Case("Laplace", LAPLACE("z", 0.7, "t"), (3, 4), reals(3, 4)),
    Case("Huber", HUBER("z", 0.7, "t"), (3, 4), reals(3, 4)),
    Case("Poisson", POISSON("z", "t"), (3, 4), counts(3, 4)),
    Case("Bernoulli tokens", BERNOULLI("z", "t"), (2, 3, 2), bits(2, 3, 2), 3),
)  # fmt: skip
NATURAL = tuple(case for case in CASES if case.loss.ggn_equals_fisher)


def by_name(case: Case) -> str:
    """The test id of a case."""
    return case.name


def flat(parts: NDArray | tuple[NDArray, ...]) -> NDArray:
    """A vector of the input space as ``(n, D)``, one row an example, inputs side by side."""
    parts = parts if isinstance(parts, tuple) else (parts,)
    return np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1)


def basis(case: Case) -> list[NDArray | tuple[NDArray, ...]]:
    """Unit vectors of the input space of one example, each repeated for every example."""
    n, size, count = case.shape[0], int(np.prod(case.shape[1:])), len(case.loss.inputs)
    vectors = []
    for row in np.eye(size * count):
        parts = tuple(np.tile(part, (n, 1)).reshape(case.shape) for part in np.split(row, count))
        vectors.append(parts if count > 1 else parts[0])
    return vectors


def dense_fisher(case: Case, values: dict[str, NDArray]) -> NDArray:
    """The Fisher matrices ``(n, D, D)`` of all examples, column by column."""
    columns = [flat(case.loss.multiply_fisher(e)(values)) for e in basis(case)]
    return np.stack(columns, axis=-1)
