"""Determines how much each target of a batch counts.

A target counts with a weight: 1 by default, 0 for targets that are left out. The weight multiplies
the term of the loss, its gradient and its Fisher matrix, each once. ``Observed`` is the only place
where the weights of a batch are stored; losses, metrics and statistics read them there.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend.namespace import array_module, recordable
from kfac_engine.errors import InputError, ShapeError


@dataclass(frozen=True, slots=True)
class Weighted:
    """Targets with the weight of each; accepted wherever targets are.

    A target with the weight 0 does not count: neither in the loss, its gradient and its Fisher
    matrix, nor in metrics, nor in the number that a mean is divided by. Its value is not read.

    Attributes:
        targets: The targets of the loss; for several losses, by output.
        weights: A number ≥ 0, or a Boolean, for each target, each prediction or each example. For
            several losses, by output, or an array for all of them.

    Targets by output may contain ``Weighted`` targets as well: ``{output: Weighted(…), …}``.
    """

    targets: Array | Mapping[str, Array] | None
    weights: Array | Mapping[str, Array]

    def __post_init__(self) -> None:
        """Refuse targets that have weights already, with an InputError."""
        for form in (self.targets, self.weights):
            parts = form.values() if isinstance(form, Mapping) else (form,)
            if any(isinstance(part, Weighted) for part in parts):
                raise InputError("targets are weighted twice; give each target one weight.")


Targets: TypeAlias = Array | Mapping[str, Array] | Weighted | None


def weights_gathered(targets: Targets) -> Targets:
    """Return targets by output, of which some are ``Weighted``, as one ``Weighted``.

    The targets of the other outputs have no weights. Other forms are returned unchanged.
    ``InputError`` is raised if the targets of an output have outputs themselves.
    """
    if not isinstance(targets, Mapping):
        return targets
    named: Mapping[str, Any] = targets
    weighted = {name: part for name, part in named.items() if isinstance(part, Weighted)}
    for name, part in weighted.items():
        if isinstance(part.targets, Mapping) or isinstance(part.weights, Mapping):
            raise InputError(
                f"the targets of '{name}' and their weights must be one array each; for several "
                f"outputs, give {{output: Weighted(targets, weights)}}."
            )
    if not weighted:
        return targets
    arrays: dict[str, Any] = {
        n: weighted[n].targets if n in weighted else part for n, part in named.items()
    }
    weights: dict[str, Any] = {name: part.weights for name, part in weighted.items()}
    return Weighted(arrays, weights)


@dataclass(frozen=True, slots=True)
class Observed:
    """The targets of a loss in a batch, and how much each counts."""

    # The targets, with a possible observation in place of each one that does not count; None if the
    # batch has no targets.
    labels: Array | None
    # Weights of the predictions as given by the caller, Booleans or numbers; they broadcast to an
    # input of the loss. None if all are 1.
    counts: Array | None
    # The observations whose −log p are the terms of the loss: ``labels`` after label smoothing and
    # weights of classes.
    targets: Array | None
    # Weights of these terms, which broadcast to an input of the loss; None if all are 1.
    weights: Array | None
    total: float  # sum of the weights of the predictions, the divisor of a mean

    @property
    def all_or_nothing(self) -> bool:
        """Whether every weight is 0 or 1."""
        return self.weights is None or self.weights.dtype.kind == "b"


@recordable
def times(x: Array, weights: Array | None) -> Array:
    """Return an array times the weights; zero where a weight is 0.

    What the array holds where a weight is 0 does not matter. Weights are Booleans or numbers that
    broadcast to the array; None stands for ones.
    """
    if weights is None:
        return x
    if x.dtype.kind == weights.dtype.kind == "b":
        both: Array = x & weights
        return both
    xp, zero = array_module(x), x.dtype.type(0)
    product = x
    if weights.dtype.kind != "b":
        product, weights = weights.astype(x.dtype, copy=False) * x, weights > 0
    result: Array = xp.where(weights, product, zero)
    return result


def root(weights: Array) -> Array:
    """Return the square roots of weights; Booleans unchanged."""
    roots: Array = weights if weights.dtype.kind == "b" else array_module(weights).sqrt(weights)
    return roots


def checked_weights(
    name: str, weights: Array, shape: tuple[int, ...], axis: int, *, entries: bool
) -> Array:
    """Return the weights of a caller, after checks, with the rank of the loss input ``name``.

    ``shape`` is the shape of the input, and ``axis`` its axis of classes or features. If
    ``entries``, each entry along this axis has its own target. Weights belong to targets,
    predictions or examples.
    """
    single = len(shape) == 1
    forms = {
        **({shape: shape} if entries else {}),
        shape if single else shape[:axis] + shape[axis + 1 :]: (
            shape if single else (*shape[:axis], 1, *shape[axis + 1 :])
        ),
        shape[:1]: (shape[0], *[1] * (len(shape) - 1)),
    }
    if weights.shape not in forms:
        raise ShapeError(
            f"the weights of '{name}' have shape {weights.shape}; expected "
            f"{' or '.join(map(str, forms))}: one for each {'target, ' if entries else ''}"
            f"prediction or example."
        )
    if weights.dtype.kind not in "biuf":
        raise InputError(f"the weights of '{name}' must be Booleans or numbers ≥ 0.")
    if weights.dtype.kind != "b":
        xp = array_module(weights)
        least, most = xp.stack([weights.min(), weights.max()]).astype(np.float64).tolist()
        if not (least >= 0 and most < np.inf):
            raise InputError(
                f"the weights of '{name}' must be finite and not negative; they reach from "
                f"{least:g} to {most:g}."
            )
    return weights.reshape(forms[weights.shape])


def total_weight(counts: Array | None, shape: tuple[int, ...], axis: int) -> float:
    """Return the sum of the weights of all predictions.

    ``counts`` broadcasts to a loss input of ``shape`` with classes or features on ``axis``; None
    stands for ones. Weights of single targets are averaged over this axis.
    """
    predictions = prod(shape) // shape[axis] if len(shape) > 1 else shape[0]
    if counts is None:
        return predictions
    total: float = counts.sum(dtype=np.float64).item() * predictions / counts.size
    return total
