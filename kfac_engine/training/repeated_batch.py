"""Detects whether every step has the same examples, and whether to fit these exactly.

Where a function or an equation is fitted, every step has the same examples. They have no noise, and
the minimum of their loss is wanted. Where a small table with noise is one batch, its minimum fits
the noise. A trial tells which: its steps leave some examples out, whose loss must not have risen at
its end, nor by much in its second half. If it has, the parameters before the trial return. Where a
kink, such as that of a ReLU, stops exact steps, some steps of the default rule follow.
"""

from collections.abc import Mapping, Sequence
from math import inf
from sys import float_info
from typing import NamedTuple

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend.protocol import Backend
from kfac_engine.datasets.examples import Batch, ExampleAxes
from kfac_engine.errors import ShapeError
from kfac_engine.training.seen_examples import fingerprints_of_part

# Steps with the examples of the step before, until steps are exact.
_REPEATED = 10
# Exact steps of a trial by the number of the rule. Those in the sample space, the first of the
# rules, need fewer steps until they fit noise.
_TRIAL = (30, 60)
# Exact steps in the sample space whose iterations are counted, and their mean above which random
# rows are no good substitute for all rows.
_COUNTED, _MOST_ITERATIONS = 4, 7.5
# Largest rise of the loss of the examples that are left out, relative to the fall of the loss since
# the first step with the batch: at the end of a trial, and in its second half. Before a function of
# a high frequency is learned, that loss may rise for some steps.
_RISE, _LARGE_RISE = 0.05, 0.5
# Fall of the loss that an exact step has missed, relative to the fall so far, above which other
# steps follow, and their number.
_MISSED, _PAUSE = 1e-8, 300
# Part of the examples that a trial leaves out.
_LEFT_OUT = 0.2
# A sum of fingerprints that are multiples of its inverse is exact, in any order.
_SCALE = 2.0**30


class RepeatedBatch(NamedTuple):
    """What the steps of a run tell about the next one."""

    mark: float = -1.0  # the ``mark`` of the last batch
    # Number of steps, up to the last one, with the examples of the step before.
    repeats: float = 0.0
    first: float = float_info.max  # loss of the first step with these examples
    trial: float = 0.0  # number of steps of the trial so far
    least: float = float_info.max  # least loss of the examples that the trial has left out
    refused: float = 0.0  # 1 if their loss has risen by too much, else 0
    # Number of the exact rule that suits the batch; negative before it is chosen.
    rule: float = -1.0
    counted: float = 0.0  # number of exact steps in the sample space, up to four
    iterations: float = 0.0  # their iterations

    def after(self, mark: float, loss: float) -> "RepeatedBatch":
        """Return the state for a step, from the ``mark`` and the loss of its batch."""
        if mark != self.mark:
            return RepeatedBatch(mark, first=loss)
        return self._replace(repeats=self.repeats + 1)

    def following(self, rule: int) -> "RepeatedBatch":
        """Return this state, with the exact rule of this number for the steps that follow."""
        return self._replace(rule=float(rule))

    def solved(self, iterations: int, missed: float, loss: float) -> "RepeatedBatch":
        """Return the state after an exact step.

        Other steps follow where steps hardly move the parameters although the model predicts a
        fall of the loss, as at the kinks of ReLUs. The second of the exact rules takes the place of
        the first if the first steps in the sample space needed many iterations.

        Args:
            iterations: Iterations of the step, if it is one in the sample space.
            missed: See ``Move.missed``.
            loss: Loss of the batch before the step.
        """
        if not self.exact:
            return self
        if not self.tries and missed > _MISSED * max(self.first - loss, 0.0):
            return self._replace(repeats=float(_REPEATED - _PAUSE - 1))
        if self.rule != 0 or self.counted >= _COUNTED:
            return self
        counted, total = self.counted + 1, self.iterations + iterations
        slow = counted == _COUNTED and total > _COUNTED * _MOST_ITERATIONS
        rule = 1.0 if slow else self.rule
        return self._replace(counted=counted, iterations=total, rule=rule)

    @property
    def exact(self) -> bool:
        """Whether the step is exact."""
        return self.repeats >= _REPEATED and not self.refused

    @property
    def awaits_trial(self) -> bool:
        """Whether the examples came again, and the trial of exact steps is not decided yet."""
        return self.repeats > 0 and self.rule < 0

    @property
    def paused(self) -> bool:
        """Whether other steps follow exact steps that no longer moved the parameters."""
        return self.rule >= 0 and not self.refused and not self.exact

    @property
    def tries(self) -> bool:
        """Whether the step is exact and leaves examples out."""
        return self.exact and self.trial < _TRIAL[int(self.rule)]

    def judged(self, fitted: float, left_out: float) -> "RepeatedBatch":
        """Return the state after a step of a trial, from the losses of both groups of examples."""
        least, trial, whole = min(self.least, left_out), self.trial + 1, _TRIAL[int(self.rule)]
        most = _RISE if trial == whole else _LARGE_RISE if trial >= whole / 2 else inf
        refused = left_out - least > most * max(self.first - fitted, float_info.min)
        return self._replace(trial=trial, least=least, refused=float(refused))

    def saved(self) -> dict[str, Array]:
        """Return the arrays of a checkpoint."""
        return {name: np.array(number) for name, number in self._asdict().items()}

    @classmethod
    def restored(cls, saved: Mapping[str, Array]) -> "RepeatedBatch":
        """Return the state of ``saved``."""
        return cls(**{name: float(array) for name, array in saved.items()})


class Division(NamedTuple):
    """The parts of a batch in a trial: the examples that are fitted, and the others."""

    fitted: list[Batch]
    left_out: list[Batch]


def mark(drawn: Array) -> float:
    """Return a number that equal fingerprints share, in any order."""
    return float(np.floor(_SCALE * drawn).sum())


def mark_of_rest(batch: Sequence[Batch], axes: ExampleAxes, backend: Backend) -> float:
    """Return the ``mark`` of targets, their weights, and inputs without examples."""
    total = 0.0
    for part in batch:
        for name, array, axis in axes.arrays(*part):
            if name not in axes.inputs:
                rows = {name: array if axis is not None else array[None]}
                total += mark(fingerprints_of_part(rows, {name: axis or 0}, backend))
    return total


def divided(batch: Sequence[Batch], axes: ExampleAxes, backend: Backend) -> Division | None:
    """Divide a batch for a trial: equal examples are in one group, and the same ones in each step.

    The result is None if the model does not run on a part of the batch, or a group is empty.
    """
    division = Division([], [])
    if axes.obstacle:
        return None
    for inputs, targets in batch:
        try:
            axes.check(inputs, targets)
        except ShapeError:  # inputs have examples of their own, such as the points of an equation
            return None
        leaves = fingerprints_of_part(inputs, axes.inputs, backend) < _LEFT_OUT
        for group, chosen in zip(division, (~leaves, leaves), strict=True):
            if chosen.any():
                group.append(axes.part(inputs, targets, np.flatnonzero(chosen)))
    return division if all(division) else None
