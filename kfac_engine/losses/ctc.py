"""Defines connectionist temporal classification (CTC), for label sequences without alignment.

A path has a class in each frame, drawn independently from the softmax of the frame's logits. It
collapses to a sequence of labels: repeats are merged, then blanks are removed. The probability of a
sequence is the sum over all paths that collapse to it (Graves, Fernández, Gomez & Schmidhuber 2006,
"Connectionist temporal classification", section 3, with the forward–backward recursions of section
4.1). The recursions run on logarithms, normalized in each frame.

With the share ``o`` of the paths of the observed sequence that are in a class, the gradient of a
frame is ``p − o``. The Fisher matrix is the mean of ``(p − o)(p − o)ᵀ`` over all sequences. Their
number grows exponentially, so that the matrix has no closed form. A drawn path, collapsed, is an
exact sample of a sequence.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import numpy as np

from kfac_engine._types import Array, Values
from kfac_engine.arguments import check_int
from kfac_engine.backend.namespace import array_module, as_array, is_recorded, recordable
from kfac_engine.backend.select import owner
from kfac_engine.errors import InputError, ShapeError, UnsupportedError
from kfac_engine.losses.base import LossFunction, LossWithoutProducts, weights_of
from kfac_engine.losses.categorical import Softmax
from kfac_engine.losses.checks import Named, first_index, require_shape
from kfac_engine.losses.observed import Observed, times, total_weight

# Logarithm of a probability of zero, finite so that differences are no NaN.
_ZERO = -1e30
# Padding of label sequences that are drawn or decoded.
PADDING = -1


class CTCNegativeLogProbLoss(LossWithoutProducts):
    """Connectionist temporal classification; an example is one prediction, a sequence of labels.

    The loss of an example is −log of the probability of its sequence, summed over its frames. The
    weights of a batch have a number for each frame, in the shape of the logits without the classes,
    or one for each example. Frames of weight 0 are left out, such as the frames after the end of an
    example. The other frames of an example have one weight, the weight of the example.

    Args:
        logits: Name of the logits, of shape ``(n, frames, classes)`` for the default axes.
        targets: Name of the targets: class ids ``(n, labels)``, with negative numbers after the
            last label of a shorter sequence.
        seed: Seed of ``evaluate_on_sample``; None counts as 0.
        blank: Class that stands for no label.
        class_axis: Axis of the classes.
        batch_axis: Axis of the examples.

    Raises:
        InputError: An option has a wrong value.
    """

    min_rank: ClassVar[int] = 3
    links: ClassVar[frozenset[str]] = frozenset({"Softmax", "LogSoftmax"})
    ggn_equals_fisher: ClassVar[bool] = False
    ordered: ClassVar[bool] = True
    sequences: ClassVar[bool] = True

    def __init__(
        self,
        logits: str,
        targets: str | None = None,
        seed: int | None = None,
        *,
        blank: int = 0,
        class_axis: int = -1,
        batch_axis: int = 0,
    ) -> None:
        super().__init__((logits,), targets, seed, class_axis)
        check_int("blank", blank, least=0)
        self.logits, self.blank, self.batch_axis = logits, blank, batch_axis

    def placed(self, axis: int) -> LossFunction:
        if axis == self.batch_axis:
            return self
        place: dict[str, Any] = {"class_axis": self.class_axis, "batch_axis": axis}
        return CTCNegativeLogProbLoss(
            self.logits, self.targets, self.seed, blank=self.blank, **place
        )

    # -- targets and weights -----------------------------------------------------------------------

    def check_inputs(self, values: Values) -> None:
        super().check_inputs(values)
        shape = values[self.logits].shape
        if len(shape) != 3 or self.batch_axis == self._axis(values):
            raise ShapeError(
                f"'{self.logits}' has shape {shape}, but the loss 'ctc' needs three axes: "
                f"examples, frames and classes; choose or reshape an output of the model."
            )
        if self.blank >= shape[self._axis(values)]:
            raise InputError(
                f"blank={self.blank} is not a class: '{self.logits}' has "
                f"{shape[self._axis(values)]} classes."
            )

    def positions(self, values: Values) -> int:
        return 1

    @recordable
    def weigh(self, values: Values, labels: Array | None, counts: Array | None) -> Observed:
        z = values[self.logits]
        if counts is None:
            return Observed(labels, None, labels, None, z.shape[self.batch_axis])
        sizes = [1 if k == self._axis(values) else size for k, size in enumerate(z.shape)]
        weights = array_module(z).broadcast_to(counts, sizes)
        total = weights.max(axis=self._order(values)[1]).sum(dtype=np.float64).item()
        return Observed(labels, weights, labels, weights, total)

    def of_predictions(self, values: Values, counts: Array) -> Array:
        weights: Array = counts.max(axis=self._order(values)[1], keepdims=True)
        return weights

    @recordable
    def masked(
        self, values: Values, targets: Array, counts: Array | None
    ) -> tuple[Array, Array | None]:
        """Return targets that end with blanks, only blanks for an example that does not count."""
        xp = array_module(targets)
        labels = xp.where(targets < 0, self.blank, targets)
        if counts is not None:
            present = self._frames(values, counts).max(axis=1, keepdims=True)
            labels = xp.where(present > 0, labels, self.blank)
        return labels, counts

    def check_target_array(self, values: Values, targets: Array) -> None:
        z, xp = values[self.logits], array_module(targets)
        n, count, classes = (z.shape[axis] for axis in self._order(values))
        if targets.ndim != 2 or len(targets) != n:
            raise ShapeError(
                f"targets have shape {targets.shape}, expected ({n}, labels): the class ids of "
                f"each example of '{self.logits}', with {PADDING} after the last one of a shorter "
                f"sequence."
            )
        if targets.dtype.kind not in "iu":
            raise InputError(
                f"targets of '{self.logits}' must be integer class ids, got {targets.dtype}; "
                f"convert them with targets.astype('int64')."
            )
        weights = self._weights(values)
        frames = xp.ones((n, 1)) if weights is None else self._frames(values, weights)
        padding, read = targets < 0, frames.max(axis=1, keepdims=True) > 0
        for wrong, problem in (
            (
                targets >= classes,
                f"is not a class: '{self.logits}' has {classes} classes, 0 to {classes - 1}",
            ),
            (targets == self.blank, "is the blank, which stands for no label"),
            (
                ~padding & (padding.cumsum(axis=1) > 0),
                "comes after padding; negative numbers may follow the last label only",
            ),
        ):
            if (wrong & read).any():
                where = first_index(wrong & read)
                raise InputError(
                    f"target {targets[where]} of example {where[0]}, label {where[1]}, {problem}."
                ).at("targets", where)
        equal = (targets[:, 1:] == targets[:, :-1]) & ~padding[:, 1:]
        needed = (~padding).sum(axis=1) + equal.sum(axis=1)
        counting = xp.full(n, count) if weights is None else frames.sum(axis=1)
        short = (needed > counting) & read[:, 0]
        if short.any():
            where = first_index(short)
            raise InputError(
                f"the labels of example {where[0]} need {needed[where]} frames, one for each label "
                f"and one for a blank between equal labels, but {counting[where]:g} frames of "
                f"'{self.logits}' count. Give the example the weight 0, or the model more frames."
            ).at("targets", where)

    def _that_count(
        self, values: Values, targets: Array, counts: Array | None
    ) -> tuple[Array, Array | None]:
        targets = self._moved(values, targets)
        self.check_target_array(values, targets)
        return self.masked(values, targets, counts)

    def _given_weights(self, values: Values) -> Array | None:
        weights = self._weights(values)
        if weights is None or weights.dtype.kind == "b":
            return weights
        real, xp = weights.dtype.kind in "iuf", array_module(weights)
        if not real or not (xp.isfinite(weights) & (weights >= 0)).all():
            raise InputError(
                f"the weights of '{self.logits}' must be Booleans or finite numbers ≥ 0."
            )
        largest = weights.max(axis=self._order(values)[1], keepdims=True)
        different = (weights > 0) & (weights != largest)
        if different.any():
            example = first_index(different)[self.batch_axis]
            raise InputError(
                f"frames of example {example} have different weights; give each frame that counts "
                f"the weight of its example, and each other frame the weight 0."
            )
        return weights

    def _weights(self, values: Named) -> Array | None:
        """Return the weights of frames or examples in the rank of the logits; None without them."""
        name = None if self.targets is None else weights_of(self.targets)
        try:
            array = None if name is None else values[name]
        except KeyError:
            array = None
        if array is None:
            return None
        z, order = values[self.logits], self._order(values)
        weights = array if is_recorded(array) else array_module(z).asarray(array)
        left = order[:1] if weights.ndim == 1 else order[:2]
        sizes = [size if axis in left else 1 for axis, size in enumerate(z.shape)]
        expected = tuple(z.shape[axis] for axis in sorted(left))
        require_shape(
            f"the weights of '{self.logits}'",
            weights.shape,
            expected,
            "one for each frame, or one for each example",
        )
        shaped: Array = weights.reshape(sizes)
        return shaped

    # -- the loss ----------------------------------------------------------------------------------

    def read(self, values: Named, *, targets: bool = False) -> dict[str, Array]:
        arrays = super().read(values, targets=targets)
        if self._weights(values) is not None:  # sequences are drawn for the frames that count
            name = weights_of(self.require_target_name())
            arrays[name] = as_array(values[name])
        return arrays

    def negative_log_probs(self, values: Values, targets: Array) -> Array:
        return self.terms_and_gradient(values, targets)[0]

    def gradient_of(self, values: Values, targets: Array) -> dict[str, Array]:
        return self.terms_and_gradient(values, targets)[1]

    def terms_and_gradient(self, values: Values, targets: Array) -> tuple[Array, dict[str, Array]]:
        return self._computed(values, targets, self._weights(values))

    def value(self, values: Values, observed: Observed | None = None) -> float:
        observed = self.observe(values) if observed is None else observed
        assert observed.targets is not None, "observe has read the targets"
        recursions = self._recursions(values, observed.targets, observed.weights)
        terms = self._terms(values, recursions.losses()[0], observed.weights)
        value: float = times(terms, observed.weights).sum(dtype=np.float64).item()
        return value

    def value_and_gradient(
        self, values: Values, observed: Observed | None = None
    ) -> tuple[float, dict[str, Array]]:
        observed = self.observe(values) if observed is None else observed
        assert observed.targets is not None, "observe has read the targets"
        terms, gradient = self._computed(values, observed.targets, observed.weights)
        value: float = times(terms, observed.weights).sum(dtype=np.float64).item()
        return value, {name: times(array, observed.weights) for name, array in gradient.items()}

    def _recursions(self, values: Values, targets: Array, weights: Array | None) -> "_Recursions":
        z = values[self.logits]
        xp = array_module(z)
        ordered = xp.transpose(z, self._order(values))
        # A file has one type. Elsewhere, rounding in single precision would grow with the frames.
        wide = ordered if is_recorded(z) else ordered.astype(np.float64)
        labels = xp.where(targets < 0, self.blank, targets).astype(np.int64, copy=False)
        frames = None if weights is None else self._frames(values, weights)
        return _Recursions(wide, labels, frames, self.blank)

    def _terms(self, values: Values, losses: Array, weights: Array | None) -> Array:
        """Return the losses of the examples, divided among their frames."""
        z = values[self.logits]
        xp, (n, count, _) = array_module(z), (z.shape[axis] for axis in self._order(values))
        if weights is None:
            terms = xp.broadcast_to((losses / count).reshape(n, 1, 1), (n, count, 1))
        else:
            frames = self._frames(values, weights)
            shares = frames / xp.maximum(frames.sum(axis=1, keepdims=True), 1.0)
            terms = xp.where(frames > 0, losses[:, None] * shares, 0.0).reshape(n, count, 1)
        return self._back(values, terms)

    def _computed(
        self, values: Values, targets: Array, weights: Array | None
    ) -> tuple[Array, dict[str, Array]]:
        """Return the terms and their gradient."""
        recursions = self._recursions(values, targets, weights)
        losses, ahead = recursions.losses()
        gradient = self._back(values, recursions.gradient(ahead))
        return self._terms(values, losses, weights), {self.logits: gradient}

    def _back(self, values: Values, array: Array) -> Array:
        """Return an array ``(n, frames, …)`` with the axes and the type of the logits."""
        z, order = values[self.logits], self._order(values)
        back = [order.index(axis) for axis in range(3)]
        result: Array = array_module(z).transpose(array, back).astype(z.dtype, copy=False)
        return result

    def sample(self, values: Values, rng: np.random.Generator) -> Array:
        z, axis = values[self.logits], self._axis(values)
        uniforms = rng.random((*z.shape[:axis], *z.shape[axis + 1 :]))
        paths, weights = owner(z).draw_classes(z, uniforms, axis), self._weights(values)
        return self._collapsed(values, paths, weights)

    def _collapsed(self, values: Values, paths: Array, weights: Array | None) -> Array:
        """Return the sequences of the paths of a batch."""
        examples, time, _ = self._order(values)
        paths = paths if examples < time else array_module(paths).swapaxes(paths, 0, 1)
        frames = None if weights is None else self._frames(values, weights)
        return collapsed(paths, frames, self.blank)

    def expected_squares(self, values: Values, weights: Array | None = None) -> float:
        """Return a bound, the trace of the Fisher matrix of paths."""
        shape, axis = values[self.logits].shape, self._axis(values)
        bound: float = total_weight(weights, shape, axis) * (1 - 1 / shape[axis])
        return bound

    def hits(self, values: Values, targets: Array) -> Array:
        equal: Array = self.label_errors(values, targets)[0] == 0
        return equal

    @recordable
    def label_errors(self, values: Values, targets: Array) -> tuple[Array, Array]:
        best = values[self.logits].argmax(axis=self._axis(values))
        decoded = self._collapsed(values, best, self._weights(values))
        present = (targets >= 0) & (targets != self.blank)
        examples, time, _ = self._order(values)
        shape, numbers = (-1, 1) if examples < time else (1, -1), present.sum(axis=1)
        distances = edit_distances(decoded, targets, numbers)
        return distances.reshape(shape), numbers.reshape(shape)

    def hessian(self, values: Values, v: Mapping[str, Array]) -> dict[str, Array]:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise UnsupportedError(
            f"the Fisher matrix of the loss 'ctc' on '{self.logits}' is a mean over all sequences "
            f"of labels, so that products with it have no closed form. Estimate it with "
            f"estimation_mode 'gradients', from sampled sequences, or 'empirical'."
        )

    # -- axes --------------------------------------------------------------------------------------

    def _order(self, values: Named) -> tuple[int, int, int]:
        """Return the axes of the examples, the frames and the classes."""
        axis = self.class_axis % 3
        return self.batch_axis, 3 - axis - self.batch_axis, axis

    def _frames(self, values: Values, weights: Array) -> Array:
        """Return 1 for frames that count and 0 for other frames, as ``(n, frames)``."""
        xp, order = array_module(weights), self._order(values)
        sizes = tuple(values[self.logits].shape[axis] for axis in order[:2])
        counting = weights if weights.dtype.kind == "b" else weights > 0
        ordered = xp.transpose(xp.where(counting, 1.0, 0.0), order).squeeze(2)
        frames: Array = xp.broadcast_to(ordered, sizes)
        return frames


def collapsed(paths: Array, frames: Array | None, blank: int) -> Array:
    """Return the sequences of labels to which paths collapse.

    Args:
        paths: A class for each frame, ``(n, frames)``.
        frames: Positive numbers for the frames that count; None for all.
        blank: The class of no label.

    Returns:
        The labels of each path, with ``PADDING`` after the last one. The width is the length of the
        longest sequence, at least 1; in a file it is the number of frames.
    """
    xp, (n, count) = array_module(paths), paths.shape
    if frames is not None:  # a frame that does not count repeats the class before it
        classes, column = [], xp.full_like(paths[:, 0], blank)
        for t in range(count):
            column = xp.where(frames[:, t] > 0, paths[:, t], column)
            classes.append(column)
        paths = xp.stack(classes, axis=1)
    before = xp.concatenate([xp.full_like(paths[:, :1], blank), paths[:, :-1]], axis=1)
    new = (paths != blank) & (paths != before)
    places = new.astype(np.int64).cumsum(axis=1) - 1
    rows = xp.arange(n)[:, None] * (count + 1)
    labels = xp.full_like(xp.concatenate([paths, paths[:, :1]], axis=1), PADDING)
    labels.put(rows + xp.where(new, places, count), paths)  # the last column takes the rest
    if is_recorded(paths):
        sequences: Array = labels[:, :count]
        return sequences
    longest = max(int(places.max()) + 1, 1)
    trimmed: Array = labels[:, : min(longest, count)]
    return trimmed


class _Recursions:
    """The recursions over the states of sequences: blank, label, blank, …, label, blank.

    Args:
        z: Logits, ``(n, frames, classes)``.
        labels: Sequences, ``(n, labels)``, with blanks after the last label.
        frames: Positive numbers for the frames that count, ``(n, frames)``; None for all.
        blank: The class of no label.
    """

    def __init__(self, z: Array, labels: Array, frames: Array | None, blank: int) -> None:
        self._xp, (n, self._count, _) = array_module(z), z.shape
        xp = self._xp
        if not labels.shape[1]:
            labels = xp.full((n, 1), blank)
        blanks, number = xp.full_like(labels, blank), labels.shape[1]
        pairs = xp.stack([blanks, labels], axis=2).reshape(n, 2 * number)
        states = xp.concatenate([pairs, blanks[:, :1]], axis=1)
        two_before = xp.concatenate([blanks[:, :1], blanks[:, :1], states[:, :-2]], axis=1)
        # A path may leave out a blank between labels that differ.
        skips = xp.where((states != blank) & (states != two_before), 0.0, _ZERO)
        last = 2 * (labels != blank).sum(axis=1)[:, None]
        places = xp.arange(2 * number + 1)[None]
        ends = xp.where((places == last) | (places == last - 1), 0.0, _ZERO)
        self._z, self._labels, self._frames, self._blank = z, labels, frames, blank
        self._skips, self._ends = skips.astype(z.dtype), ends.astype(z.dtype)
        # Before the first frame, a path is at the first blank.
        self._start = xp.zeros_like(self._skips) + xp.where(places == 0, 0.0, _ZERO)
        self._softmax = Softmax.of(z, 2)
        log_p = self._softmax.log_probabilities()
        self._emissions = [
            xp.take_along_axis(log_p[:, t], states, axis=1) for t in range(self._count)
        ]

    def losses(self) -> tuple[Array, list[Array]]:
        """Return −log p of the sequences, ``(n,)``, and the forward logarithms of the frames."""
        xp, forward, ahead = self._xp, self._start, []
        nothing, losses = self._nothing(), xp.zeros_like(self._z[:, :1, 0])
        for t in range(self._count):
            one = xp.concatenate([nothing[:, :1], forward[:, :-1]], axis=1)
            two = xp.concatenate([nothing, forward[:, :-2]], axis=1) + self._skips
            moved = self._joined(forward, one, two) + self._emissions[t]
            total = self._log_sum(moved)
            forward = self._chosen(t, xp.maximum(moved - total, _ZERO), forward)
            losses = losses - self._chosen(t, total, xp.zeros_like(total))
            ahead.append(forward)
        losses = (losses - self._log_sum(forward + self._ends))[:, 0]
        # A sequence that is too long, or continues after padding, has no probability.
        labels, blank = self._labels, self._blank
        gaps = ((labels[:, 1:] != blank) & (labels[:, :-1] == blank)).sum(axis=1) > 0
        return xp.where(gaps | (losses > -_ZERO / 10), np.inf, losses), ahead

    def gradient(self, ahead: Sequence[Array]) -> Array:
        """Return the gradient of the losses in the shape of the logits."""
        xp, z, labels, blank = self._xp, self._z, self._labels, self._blank
        (n, count, classes), number = z.shape, labels.shape[1]
        shares = xp.stack(self._shares(ahead), axis=1)
        pairs = shares[:, :, :-1].reshape(n, count, number, 2)
        of_blank = pairs[:, :, :, 0].sum(axis=2) + shares[:, :, -1]
        # The states of a label that occurs several times have one class.
        equal = (labels[:, :, None] == labels[:, None, :]).astype(z.dtype)
        of_labels = xp.matmul(pairs[:, :, :, 1], equal)
        first = (xp.arange(z.size // classes) * classes).reshape(n, count)
        occupied = xp.zeros_like(z)
        occupied.put(first[:, :, None] + labels[:, None, :], of_labels)
        occupied.put(first + blank, of_blank)
        gradient = self._softmax.p - occupied
        # The entry of a nearly certain class is a difference of numbers near one.
        gradient.put(self._softmax.largest, 0)
        gradient.put(self._softmax.largest, -gradient.sum(axis=2))
        if self._frames is None:
            result: Array = gradient
        else:
            result = xp.where(self._frames[:, :, None] > 0, gradient, 0.0)
        return result

    def _shares(self, ahead: Sequence[Array]) -> list[Array]:
        """Return the share of the paths of a sequence in each state, for each frame."""
        xp, backward, nothing, shares = self._xp, self._ends, self._nothing(), []
        for t in reversed(range(self._count)):
            both = ahead[t] + backward
            shares.append(xp.exp(both - self._log_sum(both)))
            moved = backward + self._emissions[t]
            one = xp.concatenate([moved[:, 1:], nothing[:, :1]], axis=1)
            two = xp.concatenate([(moved + self._skips)[:, 2:], nothing], axis=1)
            behind = self._joined(moved, one, two)
            normalized = xp.maximum(behind - self._log_sum(behind), _ZERO)
            backward = self._chosen(t, normalized, backward)
        return shares[::-1]

    def _nothing(self) -> Array:
        """Return two columns of impossible states."""
        columns: Array = self._xp.full_like(self._start[:, :2], _ZERO)
        return columns

    def _joined(self, *terms: Array) -> Array:
        """Return the logarithm of the sum of three numbers, given by their logarithms."""
        xp, (zero, one, two) = self._xp, terms
        top = xp.maximum(xp.maximum(zero, one), two)
        total: Array = top + xp.log(xp.exp(zero - top) + xp.exp(one - top) + xp.exp(two - top))
        return total

    def _log_sum(self, x: Array) -> Array:
        """Return the logarithm of the sum over the states, in a column."""
        xp, top = self._xp, x.max(axis=1, keepdims=True)
        total: Array = top + xp.log(xp.exp(x - top).sum(axis=1, keepdims=True))
        return total

    def _chosen(self, t: int, new: Array, old: Array) -> Array:
        """Return ``new`` for examples whose frame counts, and ``old`` for other examples."""
        if self._frames is None:
            return new
        chosen: Array = self._xp.where(self._frames[:, t, None] > 0, new, old)
        return chosen


def edit_distances(first: Array, second: Array, lengths: Array) -> Array:
    """Return the least numbers of insertions, deletions and substitutions between sequences.

    Args:
        first: Labels, ``(n, labels)``, with negative numbers after the last label.
        second: Labels, ``(n, labels)``, with any numbers after the last label.
        lengths: Numbers of labels of the second sequences.
    """
    xp, width = array_module(first), second.shape[1]
    places = xp.arange(width + 1)[None]
    row = places + 0 * first[:, :1]  # distances of no label to the starts of the second sequence
    for i in range(first.shape[1]):
        label = first[:, i, None]
        changed = xp.minimum(row[:, :-1] + (second != label), row[:, 1:] + 1)
        new = xp.concatenate([row[:, :1] + 1, changed], axis=1) - places
        shift = 1
        while shift <= width:  # the least number up to each place
            ahead = xp.concatenate([new[:, :shift], new[:, :-shift]], axis=1)
            new, shift = xp.minimum(new, ahead), 2 * shift
        row = xp.where(label >= 0, new + places, row)
    distances: Array = xp.take_along_axis(row, lengths[:, None], axis=1)[:, 0]
    return distances
