"""Defines softmax cross-entropy, with class ids or probabilities as targets.

Let p be the softmax of the logits z along the class axis. The Fisher matrix is
``F = diag(p) − p pᵀ``, with the factor ``B = diag(√p) − p √pᵀ`` (Martens & Grosse 2015,
arXiv:1503.05671, section 2).

A confident prediction has one probability near one. Terms such as ``1 − p`` and the gradient of
that class are then sums over the other classes: ``1 − p`` itself would lose all digits. K-FAC
amplifies such an error, because the gradient sums to zero along the null direction of F.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, ClassVar, NamedTuple

import numpy as np

from kfac_engine._types import Array, Values
from kfac_engine.backend.namespace import array_module, is_recorded, recordable
from kfac_engine.backend.select import owner
from kfac_engine.errors import InputError, ShapeError
from kfac_engine.losses.base import LossFunction
from kfac_engine.losses.checks import (
    check_matching_targets,
    class_numbers,
    first_index,
    require_shape,
    smoothing,
)
from kfac_engine.losses.observed import Observed, times, total_weight

# Largest accepted distance of a sum of probabilities from one: the rounding of half precision.
_ROW_SUM_TOLERANCE = 1e-3


class CategoricalLogitsNegativeLogProbLoss(LossFunction):
    """Softmax cross-entropy with class ids or probabilities as targets.

    With weights of classes ``w``, the loss of a target with the probabilities t is
    ``−Σ_c w_c t_c log p_c``. It is the loss of the probabilities ``w_c t_c / W``, times their sum
    ``W = Σ_c w_c t_c``, and its Gauss–Newton matrix is ``W F``.

    Args:
        logits: Name of the logits, of shape ``(n, …positions, classes)`` for the default
            ``class_axis``.
        targets: Name of the targets: class ids, in the shape of the logits without the class axis,
            or probabilities, in the shape of the logits.
        seed: Seed of ``evaluate_on_sample``; None counts as 0.
        class_axis: Axis of the classes.
        ignore_index: Class id that does not count; None for none.
        class_weights: A number ≥ 0 for each class; None for ones. The weight of a class id is
            part of the divisor of a mean.
        label_smoothing: Part of each target, in [0, 1), that is divided among all classes.

    Raises:
        InputError: An option has a wrong value.
    """

    min_rank: ClassVar[int] = 2
    discrete: ClassVar[bool] = True
    links: ClassVar[frozenset[str]] = frozenset({"Softmax", "LogSoftmax"})

    def __init__(
        self,
        logits: str,
        targets: str | None = None,
        seed: int | None = None,
        *,
        class_axis: int = -1,
        ignore_index: int | None = -100,
        class_weights: Sequence[float] | Array | None = None,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__((logits,), targets, seed, class_axis, ignore_index)
        self.logits = logits
        self.class_weights = class_numbers("class_weights", class_weights)
        self.label_smoothing = smoothing(label_smoothing)

    @recordable
    def weigh(self, values: Values, labels: Array | None, counts: Array | None) -> Observed:
        observed, w = super().weigh(values, labels, counts), self.class_weights
        if w is None and not self.label_smoothing:
            return observed
        z, axis = values[self.logits], self._axis(values)
        xp, classes = array_module(z), z.shape[axis]
        if w is not None:
            if labels is None:
                raise InputError(
                    f"the loss on '{self.logits}' has class_weights, so its Fisher matrix depends "
                    f"on the targets; pass targets with the batch."
                )
            if len(w) != classes:
                raise ShapeError(
                    f"class_weights has {len(w)} numbers, but '{self.logits}' has {classes} "
                    f"classes."
                )
        elif labels is None:
            return observed
        ids = labels if labels.ndim < z.ndim else None
        weights, total = counts, observed.total
        if w is not None and ids is not None:
            weights = times(xp.expand_dims(xp.asarray(w)[ids], axis), counts)
            total = weights.sum(dtype=np.float64).item()
            if not self.label_smoothing:
                return replace(observed, weights=weights, total=total)
        rows = labels if ids is None else _one_hot_rows(ids, z, axis)
        rows = rows * (1 - self.label_smoothing) + self.label_smoothing / classes
        if w is not None:
            weighted = rows * xp.asarray(w).reshape([-1, *[1] * (z.ndim - 1 - axis)])
            sums = weighted.sum(axis=axis, keepdims=True)
            rows = xp.where(sums > 0, weighted / xp.where(sums > 0, sums, 1), rows)
            weights = times(sums, counts)
        return replace(observed, targets=rows, weights=weights, total=total)

    @property
    def weighs_classes(self) -> bool:
        return self.class_weights is not None

    def may_observe(self, values: Values, target: int) -> bool:
        return target in range(values[self.logits].shape[self._axis(values)])

    def negative_log_probs(self, values: Values, targets: Array) -> Array:
        return self.terms_and_gradient(values, targets)[0]

    def gradient_of(self, values: Values, targets: Array) -> dict[str, Array]:
        return self.terms_and_gradient(values, targets)[1]

    def terms_and_gradient(self, values: Values, targets: Array) -> tuple[Array, dict[str, Array]]:
        z, axis = values[self.logits], self._axis(values)
        if targets.ndim < z.ndim and (pair := owner(z).cross_entropy(z, targets, axis)):
            return pair[0], {self.logits: pair[1]}
        xp, softmax = array_module(z), Softmax.of(z, axis)
        if targets.ndim == z.ndim:
            return self._with_probabilities(softmax, axis, targets)
        entries = _entries(targets, z, axis, softmax.first)
        p, log_total = softmax.p, xp.log1p(softmax.rest)
        terms = log_total - (z.take(entries).reshape(log_total.shape) - softmax.top)
        q_largest = softmax.others.reshape(entries.shape)
        q_target = xp.where(entries == softmax.largest, q_largest, 1 - p.take(entries))
        p.put(entries, -q_target)
        return terms, {self.logits: p}

    def _with_probabilities(
        self, softmax: "Softmax", axis: int, targets: Array
    ) -> tuple[Array, dict[str, Array]]:
        """Return the terms and their gradient for rows of probabilities."""
        p, q = softmax.p, softmax.complements()
        # Finite logits have finite log-probabilities, so the product never is 0·∞.
        terms = -(targets.astype(p.dtype, copy=False) * softmax.log_probabilities())
        t = targets.astype(np.float64)
        others = t.sum(axis=axis, keepdims=True) - t  # 1 − t for targets with the sum 1
        return terms, {self.logits: p * others.astype(p.dtype) - t.astype(p.dtype) * q}

    def sample(self, values: Values, rng: np.random.Generator) -> Array:
        axis, z = self._axis(values), values[self.logits]
        # The host draws the random numbers, so that a seed gives the same targets with every
        # library.
        uniforms = rng.random((*z.shape[:axis], *z.shape[axis + 1 :]))
        return owner(z).draw_classes(z, uniforms, axis)

    def expected_squares(self, values: Values, weights: Array | None = None) -> float:
        shape, axis = values[self.logits].shape, self._axis(values)
        expected: float = total_weight(weights, shape, axis) * (1 - 1 / shape[axis])
        return expected

    def rate_sums(self, values: Values, observed: Observed, gradients: Values) -> tuple[Any, ...]:
        assert observed.targets is not None, "observe has read the targets"
        g, t, w = gradients[self.logits], observed.targets, observed.weights
        axis, xp = self.class_axis % g.ndim, array_module(g)
        rows = xp.ones((*g.shape[:axis], 1, *g.shape[axis + 1 :]), g.dtype)
        weights, over = times(rows, w), tuple(k for k in range(g.ndim) if k != axis)
        if t.ndim == g.ndim or is_recorded(g):
            rows = t if t.ndim == g.ndim else _one_hot_rows(t, g, axis)
            of_targets = times(rows.astype(g.dtype, copy=False), w).sum(axis=over, dtype=np.float64)
        else:  # an array of the size of the logits is not needed
            of_targets = xp.bincount(
                t.astype(np.int64).reshape(-1), weights.reshape(-1), g.shape[axis]
            )
        along = (g * values[self.logits]).sum(dtype=np.float64)
        count = (weights > 0).sum(dtype=np.float64)
        numbers = xp.concatenate([count.reshape(1), along.reshape(1)])
        return numbers, g.sum(axis=over, dtype=np.float64), of_targets

    def fisher(self, values: Values, v: Mapping[str, Array]) -> dict[str, Array]:
        p = self._probs(values)
        x = v[self.logits]
        # F maps a constant to zero. Without it, the entry of a p near one is a sum of small terms.
        x = x - self._of_largest(values, x)
        return {self.logits: p * (x - self._total(values, p * x))}

    def fisher_factor(self, values: Values, u: Array) -> dict[str, Array]:
        p = self._probs(values)
        weighted = array_module(p).sqrt(p) * u
        # B maps √p to zero.
        ratio = self._of_largest(values, weighted) / self._of_largest(values, p)
        weighted = weighted - ratio * p
        return {self.logits: weighted - p * self._total(values, weighted)}

    def fisher_factor_transpose(self, values: Values, v: Mapping[str, Array]) -> Array:
        p = self._probs(values)
        x = v[self.logits]
        x = x - self._of_largest(values, x)  # Bᵀ maps a constant to zero.
        result: Array = array_module(p).sqrt(p) * (x - self._total(values, p * x))
        return result

    def solve_fisher_factor(self, values: Values, gradient: Mapping[str, Array]) -> Array:
        # The gradient sums to zero, so that B maps its quotient with √p to the gradient.
        root = array_module(values[self.logits]).sqrt(self._probs(values))
        solved: Array = gradient[self.logits] / (root + (root == 0))
        return solved

    def one_hot(self, values: Values, index: tuple[int, ...]) -> dict[str, Array]:
        z = values[self.logits]
        class_index = index[self._axis(values) - 1]
        position = list[int | slice]((slice(None), *index))
        position[self._axis(values)] = slice(None)
        # Positions are independent, so the result depends on the logits (n, classes) of one
        # position.
        xp, one = array_module(z), z[tuple(position)]
        softmax = Softmax.of(one, axis=1)
        p, is_largest = softmax.p, one.argmax(axis=1) == class_index
        q = xp.where(is_largest, softmax.others[:, 0], 1 - p[:, class_index])
        root = xp.sqrt(p[:, class_index])
        column = -root[:, None] * p
        column[:, class_index] = root * q
        result = xp.zeros_like(z)
        result[tuple(position)] = column
        return {self.logits: result}

    @recordable
    def hits(self, values: Values, targets: Array) -> Array:
        z = values[self.logits]
        equal: Array = z.argmax(axis=self._axis(values)) == self._classes(values, targets)
        return equal

    def ranks(self, values: Values, targets: Array) -> Array:
        z, axis = values[self.logits], self._axis(values)
        xp = array_module(z)
        ids = xp.expand_dims(self._classes(values, targets), axis)
        of_target = xp.take_along_axis(z, ids, axis)
        classes = xp.arange(z.shape[axis]).reshape([-1, *[1] * (z.ndim - 1 - axis)])
        ahead: Array = ((z > of_target) | ((z == of_target) & (classes < ids))).sum(axis=axis)
        return ahead

    def check_target_array(self, values: Values, targets: Array) -> None:
        axis, shape = self._axis(values), values[self.logits].shape
        if targets.shape == shape:
            self._check_probabilities(values, targets)
            return
        if targets.shape != (expected := shape[:axis] + shape[axis + 1 :]):
            axes = range(1, len(shape))
            fitting = [k for k in axes if targets.shape == shape[:k] + shape[k + 1 :]]
            meaning = f"one class id per row of '{self.logits}'"
            if fitting:
                meaning += (
                    f"; give class_axis={fitting[0]} (--class-axis), if that axis of {shape} holds "
                    f"the classes"
                )
            require_shape("targets", targets.shape, expected, meaning)
        if targets.dtype.kind not in "iu":
            raise InputError(
                f"targets of '{self.logits}' must be integer class ids, got {targets.dtype}; "
                f"convert them with targets.astype('int64')."
            )
        outside = (targets < 0) | (targets >= shape[axis])
        if outside.any():
            where = first_index(outside)
            at = f", position {where[1:]}" if where[1:] else ""
            ignored = self.ignore_index
            hint = "" if ignored is None else f" Targets of {ignored} do not count."
            raise InputError(
                f"target {targets[where]} of example {where[0]}{at} is not a class: "
                f"'{self.logits}' has {shape[axis]} classes, 0 to {shape[axis] - 1}.{hint}"
            ).at("targets", where)

    def _check_probabilities(self, values: Values, targets: Array) -> None:
        check_matching_targets(self.logits, values[self.logits], targets)
        off = abs(self._total(values, targets.astype(np.float64)) - 1) > _ROW_SUM_TOLERANCE
        if ((targets < 0) | off).any():
            raise InputError(
                f"targets of '{self.logits}' must be one-hot rows or probabilities: non-negative, "
                f"with sum 1 along the class axis; for other real numbers give loss='normal'."
            )

    def _classes(self, values: Values, targets: Array) -> Array:
        """Return the class ids of targets; the most probable ones of probabilities."""
        rows = targets.ndim == values[self.logits].ndim
        return targets.argmax(axis=self._axis(values)) if rows else targets

    def _probs(self, values: Values) -> Array:
        return Softmax.of(values[self.logits], self._axis(values)).p

    def _of_largest(self, values: Values, x: Array) -> Array:
        """Return the entry of x at the first of the most probable classes, with that axis."""
        z, axis = values[self.logits], self._axis(values)
        xp = array_module(z)
        entry: Array = xp.take_along_axis(x, xp.expand_dims(z.argmax(axis=axis), axis), axis=axis)
        return entry

    def _total(self, values: Values, x: Array) -> Array:
        """Return the sum over the classes, with a class axis of size 1."""
        total: Array = x.sum(axis=self._axis(values), keepdims=True)
        return total


class OnehotCategoricalLogitsNegativeLogProbLoss(CategoricalLogitsNegativeLogProbLoss):
    """Softmax cross-entropy with rows in the shape of the logits as targets, for samples as well.

    The rows are one-hot rows or probabilities, such as smoothed labels. The loss is the
    cross-entropy relative to these probabilities.
    """

    def sample(self, values: Values, rng: np.random.Generator) -> Array:
        z = values[self.logits]
        return _one_hot_rows(super().sample(values, rng), z, self._axis(values))

    def check_target_array(self, values: Values, targets: Array) -> None:
        self._check_probabilities(values, targets)


class Softmax(NamedTuple):
    """Probabilities, in the one array of the size of the logits that is made."""

    logits: Array
    first: Array  # flat index of the first class in each row, without a class axis
    top: Array  # the largest logit of each row, with a class axis of size 1
    p: Array  # the probabilities
    largest: Array  # flat index of the first largest entry in each row, without a class axis
    # Sum of the other probabilities relative to the largest one, in the shape of ``top``.
    rest: Array

    @classmethod
    def of(cls, z: Array, axis: int) -> "Softmax":
        """Return the softmax of logits with the classes on an axis."""
        xp, first = array_module(z), _first_entries(z, axis)
        largest = _entries(z.argmax(axis=axis), z, axis, first)
        top = z.take(largest).reshape(*z.shape[:axis], 1, *z.shape[axis + 1 :])
        p = z - top
        xp.exp(p, out=p)
        p.put(largest, 0)
        rest = p.sum(axis=axis, keepdims=True)
        p.put(largest, 1)
        p /= 1 + rest
        return cls(z, first, top, p, largest, rest)

    @property
    def others(self) -> Array:
        """``1 − p`` of the first largest p, the only p above ½."""
        result: Array = self.rest / (1 + self.rest)
        return result

    def log_probabilities(self) -> Array:
        """Return ``log p``, which is finite for all finite logits."""
        result: Array = self.logits - self.top
        result -= array_module(self.rest).log1p(self.rest)
        return result

    def complements(self) -> Array:
        """Return ``1 − p`` of all classes."""
        q: Array = 1 - self.p
        q.put(self.largest, self.others)
        return q


def _entries(ids: Array, like: Array, axis: int, first: Array) -> Array:
    """Return flat indices of the class ``ids`` of each row in ``like``, in the shape of ``ids``."""
    ids = ids.astype(np.int64, copy=False)  # uint64 would become float64
    inner = prod(like.shape[axis + 1 :])
    result: Array = first + (ids * inner if inner != 1 else ids)
    return result


def _first_entries(like: Array, axis: int) -> Array:
    """Return flat indices of the first class of each row in ``like``, without its class axis."""
    shape, inner = like.shape, prod(like.shape[axis + 1 :])
    classes = shape[axis]
    rows: Array = array_module(like).arange(like.size // classes)
    places = rows // inner * (inner * classes) + rows % inner if inner != 1 else rows * classes
    first: Array = places.reshape(*shape[:axis], *shape[axis + 1 :])
    return first


def _one_hot_rows(ids: Array, like: Array, axis: int) -> Array:
    """Return class ids as one-hot rows in the shape and element type of ``like``."""
    rows: Array = array_module(like).zeros_like(like)
    rows.put(_entries(ids, like, axis, _first_entries(like, axis)), 1)
    return rows
