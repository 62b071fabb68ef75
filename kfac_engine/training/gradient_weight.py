"""Gives gradients that are unusually long less weight in the averages."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from kfac_engine.backend.namespace import is_recorded
from kfac_engine.training.optimizer import SlotArrays
from kfac_engine.training.vectors import Products, Vector, Zeros, joined

# Decay of the averages of squares.
_DECAY = 0.9
# A gradient up to this multiple of the usual length counts in full; longer gradients are shortened.
_LONGEST = 2.0
_SQUARES, _MATRICES = "usual_square", "matrices"


@dataclass(frozen=True, slots=True)
class GradientWeight:
    """The weight of a step's gradient in the averages, at most 1.

    One row of a batch may have a gradient that is longer than those of all other rows together,
    such as a row with a feature of fifty standard deviations. Averages of gradients would follow
    this row for the ten steps that they span. Updates of the usual length would then pass the
    minimum of the row's loss, and raise the loss of other rows. With the gradient g of a matrix and
    its usual square u, all gradients of a step are multiplied by ::

        w = min(1, 2 / r)        log r² = mean of log(|g|² / u) over the matrices

    and u is the average of ``w² |g|²`` over about ten steps. Squares of zero do not count. A matrix
    that few steps reach, such as an expert's, has little influence on the mean of logarithms.
    """

    def new_slots(self, numbers: Vector) -> SlotArrays:
        """Return the usual squares before the first step.

        ``numbers`` have an entry for each matrix of each weight.
        """
        count = sum(array.size for array in numbers.values())
        return {_SQUARES: Zeros({_MATRICES: np.empty(count)} if count else {})}

    def of_step(
        self, old: SlotArrays, new: SlotArrays, squares: Products, steps: Any, back: Any
    ) -> Any:
        """Write the new state; return the weight of a step, a number or a recorded one.

        Args:
            old: The state.
            new: Arrays that receive the new one.
            squares: ``|g|²`` of each matrix.
            steps: Number of steps so far.
            back: Whether the step ignores its gradient; the weight is then 0. May be recorded.
        """
        if not squares:
            return np.where(back, 0.0, 1.0) if is_recorded(back) else float(not back)
        usual: Any = old[_SQUARES][_MATRICES]
        of_step: Any = joined(squares, [*squares])
        of_step = np.where(np.isfinite(of_step), of_step, usual)
        known = np.minimum(usual, of_step) > 0
        logs = np.log(np.where(known, of_step, 1.0)) - np.log(np.where(known, usual, 1.0))
        mean = logs.sum() / np.maximum(np.where(known, 1.0, 0.0).sum(), 1.0)
        weight = np.minimum(_LONGEST * np.exp(-0.5 * mean), 1.0)
        decay = np.minimum(steps / (steps + 1.0), _DECAY)
        moved = decay * usual + (1 - decay) * weight**2 * of_step
        if is_recorded(back):
            new[_SQUARES][_MATRICES][...] = np.where(back, usual, moved)
            return np.where(back, 0.0, weight)
        new[_SQUARES][_MATRICES][...] = usual if back else moved
        return 0.0 if back else float(weight)
