"""Lengthens the averages of gradients where the gradients of several steps cancel."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import Any

import numpy as np

from kfac_engine.backend.namespace import is_recorded
from kfac_engine.training.optimizer import SlotArrays
from kfac_engine.training.vectors import Products, Vector, Zeros, block_of

# Steps between two measurements: an odd number, because gradients may alternate.
_PERIOD = 7
# Decay of the averages of squares, and the largest change of the logarithm of the span, for a
# measurement.
_DECAY, _RATE = 0.7, 0.2
# The span grows below this ρ, and by the largest change at this distance from it.
_CANCELLED, _DISTANCE = 0.35, 0.1
_LONGEST = 20.0
_SQUARES = ("gradient_square", "average_square")
_MATRICES = "matrices"  # name of the only span


@dataclass(frozen=True, slots=True)
class AverageSpan:
    """The number of steps 1 / (1 − μ) that the averages ``v ← μ v + (1 − μ) g`` of matrices span.

    ``ρ = (1 + μ) / (1 − μ) · |v|² / |g|²`` is 1 for independent gradients, more where they have a
    common part, and less where they cancel: a step goes beyond the minimum, and the next one comes
    back. A longer average keeps only the common part. In every seventh step, with the mean ρ of
    the matrices, ::

        log span ← log span + 0.2 min(max(10 (0.35 − ρ), −1), 1)

    between the span of ``momentum`` and 20 steps. |v|² and |g|² are averages over about three
    measurements. Squares of zero do not count.
    """

    momentum: float  # the μ of the shortest span, in [0, 1)

    def new_slots(self, numbers: Vector) -> SlotArrays:
        """Return the state before the first step, with the shapes of ``numbers`` of each weight.

        Returns:
            The logarithm of the span relative to the shortest one; averages of |g|² and |v|².
        """
        squares = {slot: Zeros(numbers) for slot in _SQUARES}
        return {"log_span": Zeros({_MATRICES: np.empty(())}), **squares}

    def momentum_of(self, slots: SlotArrays) -> Any:
        """Return μ for a state, a number or a recorded one."""
        log_span: Any = slots["log_span"][_MATRICES]
        momentum = 1 - (1 - self.momentum) * np.exp(-log_span)
        return momentum if is_recorded(momentum) else float(momentum)

    def is_due(self, steps: Any, onward: Any) -> Any:
        """Return whether a step measures ρ, or a recorded truth value.

        Args:
            steps: Number of steps so far.
            onward: Whether the step has gradients.
        """
        if is_recorded(steps):
            return np.logical_and(steps.astype(np.int64) % _PERIOD == _PERIOD - 1, onward)
        return onward and steps % _PERIOD == _PERIOD - 1

    def write(
        self, old: SlotArrays, new: SlotArrays, squares: Sequence[Products], due: Any
    ) -> None:
        """Write the new state.

        Args:
            old: The state.
            new: Arrays that receive the new one.
            squares: The |g|² and |v|² of a step that measures.
            due: Whether the step does; may be recorded.
        """
        if due is False:
            for slot in ("log_span", *_SQUARES):
                for name, block in old[slot].blocks.items():
                    new[slot].blocks[name][...] = block
            return
        momentum, total, count = self.momentum_of(old), 0.0, 0.0
        for names in squares[0]:
            means = []
            for slot, of_step in zip(_SQUARES, squares, strict=True):
                before = block_of(old[slot], names)
                means.append(_DECAY * before + (1 - _DECAY) * of_step[names])
                block_of(new[slot], names)[...] = np.where(due, means[-1], before)
            known = np.logical_and(means[0] > 0, np.isfinite(means[0]))
            ratios = np.where(known, means[1], 0.0) / np.where(known, means[0], 1.0)
            total, count = total + ratios.sum(), count + np.where(known, 1.0, 0.0).sum()
        ratio = (1 + momentum) / (1 - momentum) * total / np.maximum(count, 1.0)
        change = np.minimum(np.maximum((_CANCELLED - ratio) / _DISTANCE, -1.0), 1.0)
        last: Any = old["log_span"][_MATRICES]
        longest = max(log(_LONGEST * (1 - self.momentum)), 0.0)
        moved = np.minimum(np.maximum(last + _RATE * change, 0.0), longest)
        new["log_span"][_MATRICES][...] = np.where(due, np.where(count > 0, moved, last), last)
