"""Sums losses under a reduction, with the sum's gradient and Fisher matrix.

A loss object sums over the batch and its positions. A reduction scales this sum and its Fisher
matrix. For n examples and predictions whose weights have the sum W (``n·t`` without weights, for t
positions of each example):

=============  ==================  ======================
reduction      gradient            Fisher matrix
=============  ==================  ======================
mean           sum / W             mean over n, × n / W
batch_mean     sum / n             mean over n
sum            sum                 mean over n, × n
=============  ==================  ======================

The terms of the sum are multiplied by their weights, in the Fisher matrix once as well. n counts
all examples, even without a prediction that counts.

For a part of a larger batch, such as the shard of a process, n and W belong to the larger batch.
``Observation.within`` sets them. The loss of the larger batch is then the sum of the losses of its
parts, and its gradient is the sum of their gradients.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import sqrt
from numbers import Real
from operator import attrgetter
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from kfac_engine._types import Array, Values
from kfac_engine.backend.namespace import array_module, as_array, is_recorded, on_device, recordable
from kfac_engine.backend.select import owner
from kfac_engine.errors import (
    InputError,
    NonFiniteError,
    ShapeError,
    UnknownNameError,
    UnsupportedError,
    suggestion,
)
from kfac_engine.losses.base import LossFunction, RegisteredLoss, weights_of
from kfac_engine.losses.observed import Observed, Targets, Weighted, root

Reduction: TypeAlias = Literal["mean", "batch_mean", "sum"]
REDUCTIONS: tuple[Reduction, ...] = ("mean", "batch_mean", "sum")


@dataclass(frozen=True, slots=True)
class BatchSize:
    """What reductions divide by; the size of a batch is the sum of the sizes of its parts."""

    examples: int  # number n of examples
    totals: tuple[float, ...]  # sum W of the weights of the predictions, for each loss function

    def __add__(self, other: "BatchSize") -> "BatchSize":
        """Return the size of two parts together."""
        totals = (a + b for a, b in zip(self.totals, other.totals, strict=True))
        return BatchSize(self.examples + other.examples, tuple(totals))

    @property
    def absent(self) -> frozenset[int]:
        """Numbers of the loss functions of which no prediction counts."""
        if all(self.totals):  # most often
            return frozenset()
        return frozenset(number for number, total in enumerate(self.totals) if not total)

    def positive(self) -> "BatchSize":
        """Return a size by which a sum can be divided before the size of the batch is known."""
        return BatchSize(self.examples, tuple(total or 1.0 for total in self.totals))

    def of_examples(self, count: int) -> "BatchSize":
        """Return the size of a batch of ``count`` examples, of which this one is a part.

        The rest is expected to have the same mean weight.
        """
        if count == self.examples:
            return self
        return BatchSize(count, tuple(total / self.examples * count for total in self.totals))


@dataclass(frozen=True, slots=True)
class Observation:
    """The targets of a batch or of a part of it, and how much each counts."""

    terms: tuple[Observed, ...]  # the targets of each loss function
    size: BatchSize  # size of the batch, or of the part
    whole: BatchSize  # size of the batch

    def within(self, whole: BatchSize) -> "Observation":
        """Return the observation as a part of a larger batch of a given size."""
        return Observation(self.terms, self.size, whole)

    def as_piece(self) -> "Observation":
        """Return the observation as a piece of larger data, in which nothing may count."""
        return self.within(self.whole.positive())


# Numbers of entries of ``Residuals.sums``: for a loss of classes, for one of independent
# probabilities, for one of counts, and for squared and other errors, whose predictions have the
# unit of their targets. Others have two.
_WITH_CLASSES, _WITH_RATES, _WITH_COUNTS, _WITH_UNITS, _WITH_ERRORS = 5, 6, 7, 8, 11
# Errors have outliers if their root mean square exceeds ``_OUTLIERS`` times their mean absolute
# value, which is 1.25 for normal numbers and 1.41 for exponential ones, and ``_REST`` of the spread
# of the targets.
_OUTLIERS, _REST = 3.0, 0.5
# Errors that spread this many times as far as the targets are far off.
_FAR = 2.0
# Rates of targets are far off if their cross-entropy exceeds their entropy by this part of it, and
# by a nat for each feature, or by two for each class but one, of which noise yields a half. For
# counts, half their deviance from their mean takes the place of the entropy.
_OF_ENTROPY = 0.1
_FEWEST = 64  # number of targets that tell the rates of classes or counts
_MOST_CLASSES = 3  # whose rates are corrected: more, such as characters, gain nothing
_LEAST_RATE = 1e-30  # whose logarithm takes the place of that of 0


class Misfit(NamedTuple):
    """How far the predictions of a loss are from its targets, for each feature."""

    # Root of the mean square of the deviations of the errors from their mean, divided by that of
    # the targets; each feature has means of its own. 0 for equal targets, and for probabilities.
    # For classes, it is 2 σ, with the standard deviation σ of random logits that are as far off.
    spread: Any
    is_wide: Any  # whether the spread is far off
    # Whether the means or, without classes, the spread is; or the rates of probabilities or counts.
    is_far: Any
    # Mean error of each feature, in logits or logarithms of rates where these are predicted.
    means: Any  # ``(features,)``
    centre: Any  # mean target of each feature, ``(features,)``


@dataclass(slots=True)
class Residuals:
    """How far the predictions of a batch are from their targets.

    The numbers do not have the weights of the losses or of the reduction, so that their ratios do
    not depend on the scale of the loss. They are sums over the targets, each times its weight, so
    that the sums of the parts of a batch add up to those of the batch.
    """

    # By number and first input of each loss function, the sum of the squared gradients of the loss
    # at all predictions, ``LossFunction.expected_squares``, ``LossFunction.target_sums`` and, in a
    # first step, ``LossFunction.rate_sums``.
    sums: dict[tuple[int, str], tuple[Any, ...]] = field(default_factory=dict)
    # The argument of ``target_sums`` of each loss function; none if they are not known.
    centres: Sequence[Any] = ()
    # Whether the step is the first one, which compares rates; it may be recorded.
    is_first: Any = False
    # The gradients at the predictions of this process, in order of parts, each divided by the root
    # of its weight, so that their squares have the sum above; None if they are not kept.
    errors: list[Array] | None = None
    # For entries of ``sums``, the sum of their squared gradients times the weights once more, that
    # of the weights, and the number of weights above 0; none where weights are absent or Booleans.
    weighted: dict[tuple[int, str], tuple[Any, Any, Any]] = field(default_factory=dict)
    # The results of ``_squares`` for entries of ``sums``, which several methods read.
    _known: dict[tuple[int, str], tuple[Any, Any]] = field(default_factory=dict)

    def add(
        self, number: int, loss: LossFunction, values: Values, seen: Observed, gradients: Values
    ) -> None:
        """Add the predictions of a loss, whose gradients are multiplied by the weights."""
        key, weights = (number, loss.inputs[0]), seen.weights
        observed: Any = 0.0
        of_weights: Any = 0.0  # sum of squared gradients times squared weights
        for gradient in gradients.values():
            wide = gradient.astype(np.result_type(gradient.dtype, np.float32), copy=False)
            squares = wide * wide
            if weights is not None and weights.dtype.kind != "b":
                of_weights = of_weights + squares.sum(dtype=np.float64)
                divisors = array_module(wide).where(weights > 0, weights, 1)
                squares, wide = wide / divisors * wide, wide / root(divisors)
            if self.errors is not None:
                self.errors.append(wide)
            observed = observed + squares.sum(dtype=np.float64)
        sums = loss.target_sums(values, seen, gradients, *self.centres[number : number + 1])
        rates = self._rates(loss, values, seen, gradients)
        new = (observed, loss.expected_squares(values, weights), *sums, *rates)
        old = self.sums.get(key)
        self._known.clear()
        self.sums[key] = (
            new if old is None else tuple([_added(a, b) for a, b in zip(old, new, strict=True)])
        )
        if weights is not None and weights.dtype.kind != "b":
            total, count = (x.sum(dtype=np.float64) for x in (weights, weights > 0))
            first, second, third = self.weighted.get(key, (0.0, 0.0, 0.0))
            self.weighted[key] = first + of_weights, second + total, third + count

    def _rates(
        self, loss: LossFunction, values: Values, seen: Observed, gradients: Values
    ) -> Sequence[Any]:
        """Return ``rate_sums`` in a first step; a file has zeros in other steps."""
        if not is_recorded(self.is_first):
            return loss.rate_sums(values, seen, gradients) if self.is_first else ()
        rates: list[Any] = []

        def first() -> list[Any]:
            rates.extend(loss.rate_sums(values, seen, gradients))
            return rates

        branch = self.is_first.tape.branch
        names: Sequence[Any] = branch(
            self.is_first, first, lambda: [np.zeros_like(x) for x in rates]
        )
        return names

    def read_later(self) -> None:
        """Move the sums to the host; see ``Backend.read_later``."""
        tables: tuple[dict[tuple[int, str], Any], ...] = self.sums, self.weighted
        for table in tables:
            for key, entry in table.items():
                for place, number in enumerate(entry):
                    if on_device(number):
                        owner(number).read_later(number, partial(self._set, table, key, place))

    def _set(
        self, table: dict[tuple[int, str], Any], key: tuple[int, str], place: int, number: Array
    ) -> None:
        entry = table[key]
        self._known.clear()
        table[key] = (*entry[:place], number, *entry[place + 1 :])

    def size(self) -> Any:
        """Return the root of the sum of squares, divided by the root of the expected sum.

        The expected sum is that of ``LossFunction.expected_squares``. For a loss whose predictions
        have the unit of their targets, it is the sum at the mean of the targets of each feature.
        """
        observed, expected = 0.0, 0.0
        for key in self.sums:
            of_loss, expected_of_loss = self._squares(key)
            observed, expected = observed + of_loss, expected + expected_of_loss
        return (observed / (expected + (expected == 0))) ** 0.5

    def targets_of_example(self, examples: Any) -> Any:
        """Return how many targets an example has in the loss with the most; at least 1.

        For each loss, it is the sum of the expected squares of the targets that count, ``1 − 1 /
        classes`` for a class, divided by the number of all examples.
        """
        largest: Any = 1.0
        for key, sums in self.sums.items():
            _, weight, number = self.weighted.get(key, (0.0, 1.0, 1.0))
            expected = sums[1] * (number / np.where(weight > 0, weight, 1.0))
            largest = np.maximum(largest, expected / examples)
        return largest

    def noise(self) -> Any:
        """Return the mean product of an error and the gradient, relative to that of the loss.

        For squared errors, it is their mean divided by the variance of the loss. Errors larger than
        those of the mean target are no noise: they count as the latter. The noise is 1 for errors
        with outliers, and without a loss whose predictions have the unit of their targets. Unequal
        weights multiply it by ``unevenness``.
        """
        pairs = []
        for key, sums in self.sums.items():
            if len(sums) == _WITH_UNITS:
                pairs.append((np.minimum(*self._squares(key)), sums[1]))
            elif len(sums) == _WITH_ERRORS:
                errors, deviations = self._squares(key)
                share = np.minimum(deviations / np.where(errors > 0, errors, 1.0), 1.0) ** 0.5
                noise = np.where(_has_outliers(sums), sums[2], share * sums[10])
                pairs.append((noise, sums[2]))
        observed, expected = map(sum, zip(*pairs, strict=True)) if pairs else (1.0, 1.0)
        return self.unevenness() * observed / (expected + (expected == 0))

    def unevenness(self) -> Any:
        """Return the factor by which unequal weights raise the squared noise of a gradient.

        It is ``(Σ w² g² / Σ w g²) · n / Σ w`` for the gradients g of the loss at its predictions, n
        of which have weights w above 0; for several losses, the mean. Equal weights have 1, as do
        those by which errors of unequal variances become equal: then g² is inverse to w.
        """
        factors: Any = float(len(self.sums) - len(self.weighted))
        for key, (squares, weight, number) in self.weighted.items():
            observed, weight = (np.where(x > 0, x, 1.0) for x in (self.sums[key][0], weight))
            factors = factors + np.where(squares > 0, squares / observed * (number / weight), 1.0)
        return factors / max(len(self.sums), 1) if self.weighted else 1.0

    def spreads(self) -> dict[str, Any]:
        """Return the spread of the targets, for each loss whose predictions have the same unit.

        The spread is the root of the mean square of the deviations from the mean of the targets, or
        from the predictions if that is larger. It is 1 for errors with outliers, unless the loss is
        that of squared errors.
        """
        spreads = dict[str, Any]()
        for (number, name), sums in self.sums.items():
            if len(sums) < _WITH_UNITS or not (is_recorded(sums[2]) or sums[2] > 0):
                continue
            squares = np.maximum(*self._squares((number, name)))
            if len(sums) == _WITH_ERRORS:
                squares = np.where(_has_outliers(sums), sums[2], squares)
            spreads[name] = np.sqrt(squares / sums[2])
        return spreads

    def misfits(self) -> dict[str, "Misfit"]:
        """Return how far predictions are off, by the first input of losses that can tell."""
        misfit_by_sums = {
            _WITH_CLASSES: _misfit_of_classes,
            _WITH_RATES: _misfit_of_rates,
            _WITH_COUNTS: _misfit_of_counts,
            _WITH_UNITS: _misfit_of_units,
            _WITH_ERRORS: _misfit_of_errors,
        }
        return {
            name: misfit_by_sums[len(sums)](sums)
            for (_, name), sums in self.sums.items()
            if len(sums) in misfit_by_sums
        }

    def _squares(self, key: tuple[int, str]) -> tuple[Any, Any]:
        """Return the sum of the squared gradients of a loss, or errors, and the expected one."""
        if key not in self._known:
            observed, expected, *of_targets = self.sums[key]
            if len(of_targets) + 2 >= _WITH_UNITS:
                deviations, differ = _deviations(of_targets[1:])
                expected = np.where(differ, deviations, expected)
            if len(of_targets) + 2 == _WITH_ERRORS:
                observed = of_targets[6]
            self._known[key] = observed, expected
        return self._known[key]


# Square of the deviations of equal targets, relative to the square of the targets: rounding.
_EQUAL = 1e-12


def _deviations(of_targets: Sequence[Any]) -> tuple[Any, Any]:
    """Return the squared deviations from the mean of the targets, and whether targets differ."""
    weight, first, second, *_ = of_targets
    deviations = np.maximum(second - first * first / np.where(weight > 0, weight, 1), 0).sum()
    return deviations, deviations > _EQUAL * second.sum()


def _misfit_of_rates(sums: tuple[Any, ...]) -> Misfit:
    """Return the misfit of probabilities, each rate with half a target of 1 and half one of 0."""
    _, _, count, weight, errors, targets = sums
    weight = np.where(weight > 0, weight, 1)
    (t, log_t, log_not_t), (_, log_p, log_not_p) = (
        _log_rates(np.maximum(np.minimum(total / weight, 1), 0), count)
        for total in (targets, targets + errors)
    )
    entropy = -(count * (t * log_t + (1 - t) * log_not_t)).sum()
    excess = (count * (t * (log_t - log_p) + (1 - t) * (log_not_t - log_not_p))).sum()
    is_far = excess > _OF_ENTROPY * entropy + (count > 0).sum()
    return Misfit(0.0, False, is_far, log_p - log_not_p - (log_t - log_not_t), t)


def _misfit_of_classes(sums: tuple[Any, ...]) -> Misfit:
    """Return how far predictions are from classes: their logits, and mean probabilities from rates.

    The mean product D of the gradient and the logits is the loss minus the entropy that the model
    predicts. If it exceeds twice the loss of equal rates, logits are far too large: of random ones
    with the standard deviation σ, D is ``σ √(2 log C)`` for C classes. Each rate has half a target
    in addition.
    """
    _, _, numbers, errors, targets = sums
    count, along = numbers[0], numbers[1]  # D is ``along`` divided by the sum of the weights
    weight, classes = targets.sum(), len(targets)
    weight = np.where(weight > 0, weight, 1)
    t, p = (
        (count * np.maximum(np.minimum(total / weight, 1), 0) + 0.5) / (count + 0.5 * classes)
        for total in (targets, targets + errors)
    )
    means = np.log(p) - np.log(t)
    log_t = np.log(t)
    entropy, of_model, of_equal = (
        -count * (t * x).sum() for x in (log_t, means, -log_t - np.log(classes))
    )
    # Predictions of about equal classes may be far off by their weights. Few targets, and a batch
    # of few of the classes, as in data that are sorted, tell no rates.
    enough = _FEWEST if classes <= _MOST_CLASSES else np.inf
    tells = np.logical_and(count >= enough, (targets > 0).sum() >= classes / 2)
    least = _OF_ENTROPY * entropy + 2 * (classes - 1)
    is_far = np.logical_and(tells, np.minimum(of_model, of_equal) > least)
    of_equal_rates, along = np.log(max(classes, 2)), along / weight
    is_wide = np.logical_and(count >= _FEWEST, along > _FAR * of_equal_rates)
    spread = 2 * along / (2 * of_equal_rates) ** 0.5
    return Misfit(spread, is_wide, is_far, means, log_t)


def _log_rates(mean: Any, count: Any) -> tuple[Any, Any, Any]:
    """Return rates r with one more target, the half of it 1, and the logarithms of r and 1 − r."""
    ones, zeros = ((count * part + 0.5) / (count + 1) for part in (mean, 1 - mean))
    return ones, np.log(ones), np.log(zeros)


def _misfit_of_counts(sums: tuple[Any, ...]) -> Misfit:
    """Return the misfit of rates of counts, for sums of half a count more of each feature."""
    _, _, number, weight, errors, targets, products = sums
    per_target = number / np.where(weight > 0, weight, 1)
    counts, rates, t_log_t = (per_target * x for x in (targets, targets + errors, products))
    means = counts / np.maximum(number, 1)
    deviance = (t_log_t - counts * np.log(np.maximum(means, _LEAST_RATE))).sum()
    counts, rates = counts + 0.5, np.maximum(rates, 0.0) + 0.5
    shifts = np.log(rates) - np.log(counts)
    excess = (rates - counts - counts * shifts).sum()
    is_far = np.logical_and(
        number.max() >= _FEWEST, excess > _OF_ENTROPY * deviance + (number > 0).sum()
    )
    return Misfit(0.0, False, is_far, shifts, means)


def _misfit_of_units(sums: tuple[Any, ...]) -> Misfit:
    observed, _, unit, *of_targets = sums
    deviations, differ = _deviations(of_targets)
    weight, *_, errors, targets = of_targets
    weight = np.where(weight > 0, weight, 1)
    means = errors / weight
    of_means = (means * errors).sum()
    spread, offset = (
        np.where(differ, np.maximum(squares, 0.0) / np.where(differ, deviations, 1.0), 0.0) ** 0.5
        for squares in (observed - of_means, of_means)
    )
    # The unit is the sum of the weights divided by the squared variance of the loss.
    variance = (of_targets[0].sum() / np.where(unit > 0, unit, 1.0)) ** 0.5
    is_wide = spread > _FAR
    is_far = np.logical_or(is_wide, offset > _FAR)
    return Misfit(spread, is_wide, is_far, means * variance, targets / weight * variance)


def _misfit_of_errors(sums: tuple[Any, ...]) -> Misfit:
    """Return the misfit of a loss that is not one of squared errors; none with outliers."""
    misfit = _misfit_of_units((sums[8], *sums[1:8]))
    tame = np.logical_not(_has_outliers(sums))
    return misfit._replace(
        is_wide=np.logical_and(misfit.is_wide, tame), is_far=np.logical_and(misfit.is_far, tame)
    )


def _has_outliers(sums: tuple[Any, ...]) -> Any:
    weight, squares, absolute, (deviations, _) = sums[2], *sums[8:10], _deviations(sums[3:8])
    is_uneven = squares * weight > (_OUTLIERS * absolute) ** 2
    return np.logical_and(is_uneven, squares > _REST**2 * deviations)


def _added(one: Any, other: Any) -> Any:
    """Return the sum of two entries of ``Residuals.sums``.

    Arrays may differ in the number of features; features that are absent count as zeros.
    """
    if is_recorded(one) or np.shape(one) == np.shape(other):
        return one + other
    total = array_module(one).zeros(max(len(one), len(other)))
    for array in (one, other):
        total[: len(array)] += array
    return total


@dataclass(frozen=True, slots=True)
class Objective:
    """The function that training minimises: a sum of losses under one reduction."""

    losses: tuple[RegisteredLoss, ...]  # losses to add, at least one
    reduction: Reduction  # a row of the table of this module
    # Name of a value whose first axis has an entry for each example. If it is empty, the first axis
    # of the loss inputs must be such an axis.
    batch: str = ""
    # Map from a loss input to the model output on which the user put the loss, if the two differ.
    outputs: Mapping[str, str] = field(default_factory=dict)
    # Map from a loss input to its axis of examples; 0 where absent.
    axes: Mapping[str, int] = field(default_factory=dict)
    # Map from the name of targets to the function that computes them from the array of the caller,
    # where they differ.
    prepare: Mapping[str, Callable[[Array], Array]] = field(default_factory=dict)
    # Loss inputs that the file has reduced to a single number for the whole batch; no reduction
    # applies to them.
    of_batch: frozenset[str] = frozenset()
    # The loss functions of all losses.
    terms: tuple[LossFunction, ...] = field(init=False)
    # Names of the values that the losses read, each once.
    inputs: tuple[str, ...] = field(init=False)
    # Map from the first input of each loss with targets to their name.
    targeted: Mapping[str, str] = field(init=False)
    # The same by the model output on which the user put the loss.
    by_output: Mapping[str, str] = field(init=False)
    _read: Sequence[str] = field(init=False, repr=False)
    _coefficients: Sequence[float] = field(init=False, repr=False)  # of the terms

    def __post_init__(self) -> None:
        """Collect the terms."""
        terms = tuple(loss.function for loss in self.losses)
        object.__setattr__(self, "terms", terms)
        coefficients = [loss.coefficient for loss in self.losses]
        object.__setattr__(self, "_coefficients", coefficients)
        names = dict.fromkeys(name for term in terms for name in term.inputs)
        object.__setattr__(self, "inputs", tuple(names))
        targeted = {term.inputs[0]: term.targets for term in terms if term.targets}
        object.__setattr__(self, "targeted", targeted)
        by_output = {self.outputs.get(value, value): name for value, name in targeted.items()}
        object.__setattr__(self, "by_output", by_output)
        weights = [weights_of(name) for name in targeted.values()]
        object.__setattr__(self, "_read", (*self.inputs, *targeted.values(), *weights))

    def named_targets(self, targets: Targets) -> dict[str, Array]:
        """Return the targets under the names that the losses read.

        ``targets`` is one array for a single loss, or a mapping to arrays. A key of the mapping is
        the name of the output of a loss, or the name of the targets in a loss object. If the
        examples are not on the first axis, weights of examples raise ShapeError.
        """
        if isinstance(targets, Weighted):
            named = self.named_targets(targets.targets)
            weights = targets.weights
            if not isinstance(weights, Mapping):
                weights = dict.fromkeys(self.targeted.values(), weights)
            by_target = self._named(weights, prepare=False)
            sequences = {term.inputs[0] for term in self.terms if term.sequences}
            for value, name in self.targeted.items():
                if value in sequences:
                    continue
                if self.axes.get(value) and by_target.get(name, np.zeros((1, 1))).ndim == 1:
                    raise ShapeError(
                        f"'{value}' has the examples on axis {self.axes[value]}; give its weights "
                        f"in the shape of the targets."
                    )
            return named | {weights_of(name): array for name, array in by_target.items()}
        return self._named(targets, prepare=True)

    def _named(
        self, targets: Array | Mapping[str, Array] | None, prepare: bool
    ) -> dict[str, Array]:
        """Return targets, or weights, under the names that the losses read."""
        by_output = self.by_output
        if targets is None:
            return {}
        if isinstance(targets, np.ndarray) or not isinstance(targets, Mapping):
            if len(self.terms) > 1:
                raise InputError(
                    f"one array cannot be the targets of several losses; pass a mapping with the "
                    f"keys {', '.join(by_output)}."
                )
            arrays = dict.fromkeys(by_output.values(), as_array(targets))
        else:
            names = {n: n for n in self.targeted.values()} | {**self.targeted, **by_output}
            for name in targets:
                if name not in names:
                    for term in self.terms:
                        if name in term.inputs:
                            term.require_target_name()
                    raise UnknownNameError(
                        f"targets are given for '{name}'{suggestion(name, by_output)}, but no loss "
                        f"is on an output of that name; the losses are on: {', '.join(by_output)}."
                    )
            arrays = {names[name]: as_array(array) for name, array in targets.items()}
        for name, function in self.prepare.items() if prepare else ():
            if name in arrays:
                arrays[name] = function(arrays[name])
        return arrays

    def observe(self, values: Values, *, targets: bool = True) -> Observation:
        """Check the values that the losses read; return how much each target counts.

        The result is for a whole batch. ``values`` has loss inputs, targets and weights by name.
        Without ``targets``, targets are read only if there are any.
        """
        read = {name: values[name] for name in self._read if name in values}
        terms = tuple([term.observe(read, targets=targets) for term in self.terms])
        size = BatchSize(self.examples(values), tuple(map(attrgetter("total"), terms)))
        return Observation(terms, size, size)

    def value(self, values: Values, observation: Observation | None = None) -> float:
        """Return the reduced loss on the targets of a batch, in nats.

        It is the sum over the losses, each times its coefficient. ``observation`` is the result of
        ``observe``, if it is known.
        """
        observation = observation or self.observe(values)
        weights = self.weights(observation.whole)
        terms = zip(weights, self.terms, observation.terms, strict=True)
        return float(sum(weight * term.value(values, seen) for weight, term, seen in terms))

    @recordable
    def sums(
        self, values: Values, observation: Observation, added: Collection[str] = ()
    ) -> list[tuple[float, float]]:
        """Return the sum of each loss function times its coefficient, and the divisor of its mean.

        Once the sums and the divisors of several batches are added, the loss of all batches is the
        sum of the ratios. A divisor is 0 where the loss is a sum, or no prediction counts. A single
        number for a whole batch counts once for each example, unless it is among ``added``.
        """
        examples, sums = self.examples(values), list[tuple[float, float]]()
        for coefficient, term, seen in zip(
            self._coefficients, self.terms, observation.terms, strict=True
        ):
            total = coefficient * term.value(values, seen)
            if term.inputs[0] not in self.of_batch:
                divisors = {"mean": seen.total, "batch_mean": examples, "sum": 0}
                sums.append((total, divisors[self.reduction]))
            elif term.inputs[0] in added:
                sums.append((total, 0))
            else:
                sums.append((total * examples, examples))
        return sums

    def cotangents(
        self, values: Values, times: float = 1.0, observation: Observation | None = None
    ) -> dict[str, Array]:
        """Return ``times`` times the gradient of ``value``; see ``value_and_cotangents``."""
        return self.value_and_cotangents(values, times, observation)[1]

    @recordable
    def value_and_cotangents(
        self,
        values: Values,
        times: float = 1.0,
        observation: Observation | None = None,
        residuals: "Residuals | None" = None,
        each: list[Any] | None = None,
    ) -> tuple[Any, dict[str, Array]]:
        """Return ``value``, and ``times`` times its gradient with respect to each loss input.

        Arguments and unit are as for ``value``. ``residuals`` receives the squares of the gradients
        of the predictions, and ``each`` the addends of ``value``, one for each loss function. On a
        device, the value and its addends are arrays without axes.
        """
        observation = observation or self.observe(values)
        total, cotangents = 0.0, dict[str, Array]()
        weights = self.weights(observation.whole)
        triples = zip(weights, self.terms, observation.terms, strict=True)
        for number, (weight, term, seen) in enumerate(triples):
            value, gradients = term.value_and_gradient(values, seen)
            addend = weight * value
            total = total + addend if number else addend
            if each is not None:
                each.append(addend)
            if residuals is not None:
                residuals.add(number, term, values, seen, gradients)
            for name, gradient in gradients.items():
                part = times * weight * gradient
                cotangents[name] = cotangents[name] + part if name in cotangents else part
        return total, cotangents

    def weights(self, whole: BatchSize) -> tuple[float, ...]:
        """Return the weight of each loss function in ``value`` and in its Fisher matrix.

        The weight is the coefficient of the loss times the weight of the reduction. It is finite
        for a loss of which no prediction counts: its terms are zero. If no prediction of any loss
        counts, NonFiniteError is raised.
        """
        pairs = zip(self._coefficients, self._divisors(whole), strict=True)
        return tuple([k * (1 / divisor) for k, divisor in pairs])

    def fisher_scales(self, observation: Observation) -> dict[str, float | Array]:
        """Return the scale by which cotangents of each loss input enter the Fisher matrix.

        The scale is the square root of the weight of the reduction in the Fisher matrix, times the
        square roots of the weights of the predictions. It is a number, or an array that broadcasts
        to the input. Two losses with different weights on one value raise UnsupportedError.
        """
        scales: dict[str, float | Array] = {}
        divisors = self._divisors(observation.whole)
        for term, seen, divisor in zip(self.terms, observation.terms, divisors, strict=True):
            scale = (observation.whole.examples / divisor) ** 0.5
            for name in term.inputs:
                if name in scales and not (seen.weights is None and scales[name] == scale):
                    raise UnsupportedError(
                        f"two losses read '{name}' with weights of their own, so that their Fisher "
                        f"matrices cannot be measured together; put the losses on two outputs."
                    )
                scales[name] = scale if seen.weights is None else scale * root(seen.weights)
        return scales

    def fisher_ratio(self, observation: Observation) -> float | None:
        """Return the ratio of the source of mode ``empirical`` to the gradient of ``value``.

        The ratio is None if it differs between losses or predictions.
        """
        examples = observation.whole.examples
        ratios = {
            sqrt(examples / divisor) / (1 / divisor)
            for divisor in self._divisors(observation.whole)
        }
        uniform = all(seen.all_or_nothing for seen in observation.terms)
        return ratios.pop() if uniform and len(ratios) == 1 else None

    def corrections(self, used: BatchSize, right: BatchSize) -> tuple[float, ...]:
        """Return the factors that replace the size of a batch by another in a gradient.

        The reduction has divided by the size ``used`` instead of ``right``. There is a factor for
        each loss function.
        """
        pairs = zip(self._divisors(used), self._divisors(right), strict=True)
        return tuple(old / new for old, new in pairs)

    @recordable
    def examples(self, values: Values) -> int:
        """Return the number of examples in a batch."""
        count: int = values[self.batch or self.inputs[0]].shape[0]
        return count

    def positions(self, values: Values, examples: Sequence[int] = ()) -> int:
        """Return the number of predictions of all losses for each example of a batch.

        ``examples`` are the numbers of examples of each loss function, if they differ; without an
        example, a loss function has no prediction.
        """
        predictions = [len(values[t.inputs[0]]) * t.positions(values) for t in self.terms]
        if examples:
            return sum(p // n for p, n in zip(predictions, examples, strict=True) if n)
        return sum(predictions) // self.examples(values)

    def _divisors(self, whole: BatchSize) -> list[float]:
        """Return the divisor of the reduction for each loss function."""
        self.require_counts(whole)
        totals = whole.totals
        if len(totals) > 1:  # a loss without a target that counts is a sum of zeros
            together = sum(totals)
            totals = tuple(_counted(total, together) for total in totals)
        of_all = {"batch_mean": whole.examples, "sum": 1}
        return [
            1 if term.inputs[0] in self.of_batch else of_all.get(self.reduction, total)
            for term, total in zip(self.terms, totals, strict=True)
        ]

    def require_counts(self, whole: BatchSize) -> None:
        """Raise NonFiniteError if no prediction of any loss counts in a batch of a given size."""
        # The totals of a file are known in a run, which finds out itself.
        if all(isinstance(total, int | float | Real) and not total > 0 for total in whole.totals):
            names = " and ".join(f"'{name}'" for name in self.inputs)
            raise NonFiniteError(
                f"no target of the loss on {names} counts: each is ignored or has the weight 0; "
                f"leave the batch out, as optimizers with non_finite='skip' do."
            )


def _counted(total: Any, together: Any) -> Any:
    """Return the divisor of a loss: 1 if none of its predictions counts, but those of others."""
    if is_recorded(total):
        return np.where((total > 0) | (together == 0), total, 1)
    return total if total > 0 else 1
