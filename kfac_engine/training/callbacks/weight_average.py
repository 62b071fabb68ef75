"""Averages the weights over the steps of a run."""

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TypeAlias

from kfac_engine._types import Array
from kfac_engine.arguments import check_number
from kfac_engine.errors import InputError
from kfac_engine.training.checkpoint import COUNTER, Number, SavedState
from kfac_engine.training.history import Record
from kfac_engine.training.hooks import Callback
from kfac_engine.training.optimizer import Optimizer
from kfac_engine.training.vectors import combine
from kfac_engine.training.weights import Weights

# A decay, or ``"tail"``; other texts are refused.
Decay: TypeAlias = float | str

TAIL = "tail"
# The part of the budget where the schedule "tail" begins to lower the learning rate.
_TAIL_START = 0.6


class WeightAverage(Callback):
    """Averages the weights; validations evaluate the average, and the engine has it after the run.

    With a decay ``d``, the average over the steps ``t = 1 … n`` is exponential, without a bias
    towards the first weights: ``Σ dⁿ⁻ᵗ θ_t / Σ dⁿ⁻ᵗ``. With ``"tail"``, it is the mean over the
    steps at the end of the budget. The running statistics of the last step are not averaged: they
    are averages already, and a second average lags behind the parameters. The optimizer continues
    from its own weights, which checkpoints store as well. After a roll-back, the average starts
    anew.

    Sources: Polyak & Juditsky 1992, "Acceleration of stochastic approximation by averaging";
    Kingma & Ba 2015, "Adam", section 7.2, for the exponential average; Jain et al. 2018,
    "Parallelizing stochastic gradient descent for least squares regression", for the tail.

    Args:
        decay: ``d`` in [0, 1), or ``"tail"``. A decay averages about ``1 / (1 − d)`` steps.
        start: Part of the budget in [0, 1) after which steps are averaged. By default 0, and 0.6
            with ``"tail"``.

    Attributes:
        count: Number of steps in the average.

    Raises:
        InputError: An argument is wrong.
    """

    _table = MappingProxyType({"count": Number("count", COUNTER)})

    def __init__(self, decay: Decay = TAIL, start: float | None = None) -> None:
        if not isinstance(decay, str):
            check_number("decay", decay, "[0, 1)")
        elif decay != TAIL:
            raise InputError(f"decay must lie in [0, 1), or be 'tail', got {decay!r:.80}.")
        if start is not None:
            check_number("start", start, "[0, 1)")
        self._decay = None if isinstance(decay, str) else float(decay)
        least = 0.0 if self._decay is not None else _TAIL_START
        self._start = least if start is None else start
        self._average: dict[str, Array] = {}
        self.count, self._steps = 0, 0

    def on_run_start(self, optimizer: Optimizer, records: Sequence[Record]) -> None:
        """Begin with the next step."""
        del records
        self._steps = optimizer.steps

    def evaluated_weights(self, record: Record, optimizer: Optimizer) -> Weights | None:
        """Return the average up to this step; None before the first step that is averaged."""
        self._include(record, optimizer)
        return Weights(self._average, optimizer.engine.buffers) if self.count else None

    def on_step_end(self, record: Record, optimizer: Optimizer) -> None:
        """Include the weights after a step, unless a validation has included them."""
        self._include(record, optimizer)

    def state(self, optimizer: Optimizer) -> SavedState:
        """Return the average and its number of steps; before the first step, present weights."""
        arrays = self._average or Weights.present(optimizer.engine).parameters
        return replace(super().state(optimizer), arrays={"parameter": arrays})

    def restore(self, state: SavedState) -> None:
        """Restore the average and the number of its steps."""
        super().restore(state)
        arrays = state.arrays["parameter"] if self.count else {}
        self._average = {name: array.copy() for name, array in arrays.items()}

    def _include(self, record: Record, optimizer: Optimizer) -> None:
        """Include the present parameters once for each step that changed them."""
        if record.get("rolled_back"):  # the average contains the weights that exploded
            self.count, self._average, self._steps = 0, {}, optimizer.steps
        if optimizer.steps == self._steps or record["spent"] <= self._start:
            return
        self._steps = optimizer.steps
        self.count += 1
        values = Weights.present(optimizer.engine).parameters
        if self.count == 1:
            self._average = {name: value.copy() for name, value in values.items()}
            return
        share = self._share()
        for name, average in self._average.items():
            combine(average, 1 - share, average, share, values[name])

    def _share(self) -> float:
        """Return the share of the latest weights in the average."""
        if self._decay is None:
            return 1 / self.count
        return (1 - self._decay) / (1 - self._decay**self.count)
