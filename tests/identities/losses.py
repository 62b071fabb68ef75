"""The losses of random cases: targets, and the loss of a batch by its definition in NumPy."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import erf, exp, lgamma, log, pi, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kfac_engine as ke

Array = NDArray[Any]


@dataclass(frozen=True)
class Head:
    """A loss on an output of a model."""

    output: str  # name of the output
    predicted: str  # name of the value that the loss reads, such as the logits of probabilities
    loss: str  # a row of ``LOSSES``
    # Sides of the output: its axes of positions, and the classes or features.
    sides: tuple[int, ...]
    class_axis: int = -1  # axis of the classes
    axis: int = 0  # axis of the examples, of predictions and targets
    flat: bool = False  # whether the output has positions and examples on one axis
    form: str = "predictions"  # what has a weight: "examples", "predictions" or "targets"
    options: Mapping[str, Any] = field(default_factory=dict)  # options of the loss
    probabilities: bool = False  # whether the targets of classes are probabilities
    weight: float = 1.0  # factor of the loss

    @property
    def classes(self) -> int:
        return self.sides[0 if self.class_axis == 1 else -1]

    @property
    def entrywise(self) -> bool:
        """Whether each entry of a prediction has a target."""
        return self.loss not in ("categorical", "ctc") or self.probabilities

    @property
    def ignored(self) -> int | None:
        """The target that does not count."""
        if self.probabilities:
            return None
        usual = -100 if self.loss in (*IGNORING, "categorical") else None
        return self.options.get("ignore_index", usual)

    def junk(self, rng: np.random.Generator) -> float:
        """What a target of weight zero may be."""
        whole = not self.entrywise
        choices = [10**6, -5] if whole else [np.nan, 1e6, -3.0]
        return choices[int(rng.integers(len(choices)))]

    def kind(self) -> Any:
        """The loss as an argument: its name, or an object with its options."""
        plain = not self.options and self.weight == 1
        return self.loss if plain else LOSSES[self.loss].kind(**self.options, weight=self.weight)

    def prediction_shape(self, n: int) -> tuple[int, ...]:
        """Of ``n`` examples, without the classes."""
        places = self.sides[1:] if self.class_axis == 1 else self.sides[:-1]
        return (*places, n) if self.axis else (n, *places)

    def target_shape(self, n: int) -> tuple[int, ...]:
        shape = list(self.prediction_shape(n))
        if self.entrywise:
            shape.insert(1 if self.class_axis == 1 else len(shape), self.classes)
        return tuple(shape)

    def sampled_shape(self, n: int) -> tuple[int, ...]:
        """Of the targets that are drawn from the predictions."""
        shape = self.prediction_shape(n) if self.loss == "categorical" else self.target_shape(n)
        return (shape[0] * shape[1], *shape[2:]) if self.flat else shape

    def weight_shape(self, n: int) -> tuple[int, ...]:
        """One for each example, prediction or target."""
        shapes = {"examples": (n,), "targets": self.target_shape(n)}
        return shapes.get(self.form, self.prediction_shape(n))

    def draw(self, rng: np.random.Generator, n: int) -> Array:
        """Targets."""
        if self.loss == "categorical" and not self.probabilities:
            return rng.integers(0, self.classes, self.target_shape(n))
        if self.loss == "ctc":  # half as many labels as frames have room for repeats
            shape = self.target_shape(n)
            counts = rng.integers(0, max(1, shape[1] // 2) + 1, (n, 1))
            labels = rng.integers(1, self.classes, shape)
            return np.where(np.arange(shape[1]) < counts, labels, -1)
        shape = self.target_shape(n)
        if self.probabilities:
            shares = rng.random(shape)
            return shares / shares.sum(axis=self._class_axis(shares), keepdims=True)
        return LOSSES[self.loss].draw(rng, shape)

    def _class_axis(self, array: Array) -> int:
        return 1 if self.class_axis == 1 else array.ndim - 1

    # -- the definition --

    def total(self, z: Array, targets: Array, weights: Array | None) -> tuple[float, float]:
        """The weighted sum of −log p, and the sum of the weights of the predictions.

        The axes of ``z`` are those of targets of probabilities.
        """
        if self.loss == "ctc":
            w = np.ones(len(z)) if weights is None else np.asarray(weights, np.float64)
            found = zip(z, targets, w, strict=True)
            terms = [_of_sequence(own, t) if k > 0 else 0.0 for own, t, k in found]
            return float(np.dot(w, terms)), float(w.sum())
        axis = self._class_axis(z)
        z = np.moveaxis(z, axis, -1)
        t = np.moveaxis(targets, axis, -1) if self.entrywise else targets
        if self.entrywise and self.loss != "categorical":
            counts = np.ones(z.shape)
            if weights is not None:
                counts = counts * self._spread(weights, z, axis)
            if self.ignored is not None:
                counts = counts * (t != self.ignored)
            terms = LOSSES[self.loss].terms(z, np.where(counts > 0, t, 1.0), self.options)
            return float((terms * counts).sum()), float(counts.mean(axis=-1).sum())
        counts = np.ones(z.shape[:-1])
        if weights is not None:
            counts = counts * self._spread(weights, z, axis)[..., 0]
        if not self.probabilities:
            counts = counts * (t != self.ignored)
            t = np.where(counts > 0, t, 0)
            class_weights = self.options.get("class_weights")
            if class_weights is not None:
                counts = counts * np.asarray(class_weights)[t]
            t = np.eye(z.shape[-1])[t]
        else:
            t = np.where(counts[..., None] > 0, t, 0.0)
        smooth = self.options.get("label_smoothing", 0.0)
        t = (1 - smooth) * t + smooth / z.shape[-1]
        top = z.max(axis=-1, keepdims=True)
        logs = z - top - np.log(np.exp(z - top).sum(axis=-1, keepdims=True))
        return float((-(t * logs).sum(axis=-1) * counts).sum()), float(counts.sum())

    def _spread(self, weights: Array, z: Array, axis: int) -> Array:
        """Weights with the axes of ``z``, the classes last."""
        w = np.asarray(weights, np.float64)
        if self.form == "examples":
            return w.reshape(-1, *[1] * (z.ndim - 1))
        return np.moveaxis(w, axis, -1) if w.ndim == z.ndim else w[..., None]


# -- losses ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loss:
    """Targets of a shape, −log p of each, and the object with options."""

    kind: Callable[..., Any]
    draw: Callable[[np.random.Generator, tuple[int, ...]], Array]
    terms: Callable[[Array, Array, Mapping[str, Any]], Array]


def _softplus(z: Array) -> Array:
    return np.logaddexp(0, z)


def _bernoulli(z: Array, t: Array, options: Mapping[str, Any]) -> Array:
    smooth = options.get("label_smoothing", 0.0)
    t = (1 - smooth) * t + smooth / 2
    return np.asarray(options.get("positive_weights", 1.0)) * t * _softplus(-z) + (
        1 - t
    ) * _softplus(z)


def _normal(z: Array, t: Array, options: Mapping[str, Any]) -> Array:
    var = options.get("var", 0.5)
    return 0.5 * np.log(2 * pi * var) + (t - z) ** 2 / (2 * var)


def _huber(z: Array, t: Array, options: Mapping[str, Any]) -> Array:
    delta, e = options.get("delta", 1.0), abs(t - z)
    mass = sqrt(2 * pi) * erf(delta / sqrt(2)) + 2 / delta * exp(-(delta**2) / 2)
    return np.log(mass) + np.where(e <= delta, e**2 / 2, delta * (e - delta / 2))


def _laplace(z: Array, t: Array, options: Mapping[str, Any]) -> Array:
    b = options.get("scale", 1.0)
    return np.log(2 * b) + abs(t - z) / b


def _poisson(z: Array, t: Array, options: Mapping[str, Any]) -> Array:
    return np.exp(z) - t * z + np.vectorize(lgamma)(t + 1.0)


def _of_sequence(z: Array, labels: Array) -> float:
    """−log p of a sequence of labels: a sum over the paths by the sequences they collapse to."""
    p = np.exp(z - z.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    # The probability of the paths so far, by their sequence and their last class.
    found: dict[tuple[tuple[int, ...], int], float] = {((), 0): 1.0}
    for frame in p:
        longer: dict[tuple[tuple[int, ...], int], float] = defaultdict(float)
        for (known, last), probability in found.items():
            for k, of_class in enumerate(frame.tolist()):
                new = known if k in (0, last) else (*known, k)
                longer[new, k] += probability * of_class
        found = longer
    wanted = tuple(labels[labels >= 0].tolist())
    return -log(sum(probability for (known, _), probability in found.items() if known == wanted))


def _real(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return 2 * rng.standard_normal(shape)


def _bits(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return rng.integers(0, 2, shape).astype(np.float64)


def _counts(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return rng.integers(0, 4, shape).astype(np.float64)


LOSSES: Mapping[str, Loss] = {
    "categorical": Loss(ke.Categorical, _counts, _bernoulli),  # its class has its own formula
    "normal": Loss(ke.Normal, _real, _normal),
    "multi_bernoulli": Loss(ke.MultiBernoulli, _bits, _bernoulli),
    "huber": Loss(ke.Huber, _real, _huber),
    "laplace": Loss(ke.L1, _real, _laplace),
    "poisson": Loss(ke.Poisson, _counts, _poisson),
}
# Losses whose targets of −100 do not count unless another one is named.
IGNORING = ("multi_bernoulli", "poisson")


def options_of(loss: str, classes: int, rng: np.random.Generator) -> dict[str, Any]:
    """Random options of a loss; none in half of the cases."""
    if rng.random() < 0.5:
        return {}
    choices: dict[str, list[dict[str, Any]]] = {
        "categorical": [
            {"label_smoothing": 0.1},
            {"class_weights": [*(0.5 + rng.random(classes))]},
            {"ignore_index": 255},
        ],
        "normal": [{"var": 0.2}, {"ignore_index": -7}],
        "multi_bernoulli": [
            {"label_smoothing": 0.2},
            {"positive_weights": 2.0},
            {"ignore_index": 9},
        ],
        "huber": [{"delta": 0.5}, {"ignore_index": -7}],
        "laplace": [{"scale": 2.0}, {"ignore_index": -7}],
        "poisson": [{"ignore_index": -1}],
    }  # fmt: skip
    found = choices[loss]
    return found[int(rng.integers(len(found)))]
