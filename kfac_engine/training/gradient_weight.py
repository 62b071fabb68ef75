"""Gives gradients that are unusually long less weight in the averages."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from kfac_engine.backend.namespace import is_recorded
from kfac_engine.training.optimizer import SlotArrays
from kfac_engine.training.vectors import Products, Vector, Zeros

# Decay of the averages of squares.
_DECAY = 0.9
# A gradient of so many times the usual length counts in full, and a longer one as much as this one.
_LONGEST = 2.0
_SQUARES, _MATRICES = "usual_square", "matrices"


@dataclass(frozen=True, slots=True)
class GradientWeight:
    """The weight of a step's gradient in the averages, at most 1.

    One row of a batch may have a gradient that is longer than those of all other rows together,
    such as a row with a feature of fifty standard deviations. Averages of gradients would follow it
    for the ten steps that they span, with updates of the usual length, beyond the minimum for this
    row and against all others. With the usual squares u of the matrices, averages over about ten
    steps, the gradient is multiplied by ::

        w = min(1, 2 / r)        log r² = mean of log(|g|² / u) over the matrices

    and u is the average of ``w² |g|²``. Squares of zero do not count. A matrix that few steps
    reach, as that of an expert, has little influence on the mean of logarithms.
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
            squares: The |g|² of all matrices.
            steps: Number of steps so far.
            back: Whether the step goes back, and has the weight 0; may be recorded.
        """
        if not squares:
            return 1.0
        usual: Any = old[_SQUARES][_MATRICES]
        of_step: Any = np.concatenate([np.reshape(square, -1) for square in squares.values()])
        of_step = np.where(np.isfinite(of_step), of_step, usual)
        known = np.logical_and(usual > 0, of_step > 0)
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
