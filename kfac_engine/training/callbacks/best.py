"""Compares validations, to stop early or to return the weights of the best validation."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from types import MappingProxyType

from kfac_engine.arguments import check_at_least_zero, check_int
from kfac_engine.engine.metrics import METRICS, Direction, metrics_of
from kfac_engine.errors import InputError, UnknownNameError, suggestion
from kfac_engine.training.checkpoint import COUNTER, Number, SavedState
from kfac_engine.training.history import Record
from kfac_engine.training.hooks import Callback
from kfac_engine.training.optimizer import Optimizer
from kfac_engine.training.weights import Weights

VALIDATION_LOSS = "validation_loss"


class _BestValidation(Callback):
    """Base of callbacks with the best value of a metric so far.

    Attributes:
        metric: Name of the metric in records.
        best: The best value so far; None before the first validation.
        best_step: Its step; 0 before the first validation.
    """

    metric: str
    _table = MappingProxyType(
        {"score": Number("_score"), "best_step": Number("best_step", COUNTER)}
    )

    def __init__(self, metric: str, better: Direction | None, least_change: float) -> None:
        self.metric, self._sign = metric, _sign(type(self).__name__, metric, better)
        check_at_least_zero("least_change", least_change)
        self._least_change = least_change
        self._score, self.best_step = inf, 0  # lower scores are better

    @property
    def best(self) -> float | None:
        """The best value so far; None before the first validation."""
        return self._sign * self._score if self.best_step else None

    def _improves(self, record: Record) -> bool:
        """Return whether a validation is better than the best one so far, and remember it if so."""
        score = self._sign * record[self.metric]
        improves: bool = score < self._score - self._least_change
        if improves:
            self._score, self.best_step = score, int(record["step"])
        return improves


class EarlyStop(_BestValidation):
    """Ends a run whose validation does not improve.

    The run keeps the weights of its last step; ``BestWeights`` returns the weights of the best
    validation.

    Source: Prechelt 1998, "Early stopping – but when?", criterion UP.

    Args:
        metric: Name of the metric in records: ``"validation_loss"`` or another metric of ``fit``.
        patience: Number of successive validations without an improvement that ends the run.
        least_change: An improvement changes the best value by more than this, at least 0.
        better: Which values are better, ``"higher"`` or ``"lower"``, for a metric that is a
            function; the metrics of the library have a direction.

    Raises:
        InputError: An argument is wrong.
    """

    _table = MappingProxyType({**_BestValidation._table, "waits": Number("waits", COUNTER)})

    def __init__(
        self,
        metric: str = VALIDATION_LOSS,
        patience: int = 5,
        least_change: float = 0.0,
        better: Direction | None = None,
    ) -> None:
        super().__init__(metric, better, least_change)
        check_int("patience", patience, least=1)
        self.patience = patience
        self.waits = 0

    @property
    def ended(self) -> bool:
        """Whether the last ``patience`` validations bring no improvement, so that the run ends."""
        return self.waits >= self.patience

    def on_run_start(self, optimizer: Optimizer, records: Sequence[Record]) -> bool:
        """Return whether the run has ended before it was resumed."""
        del optimizer, records
        return self.ended

    def on_validation_end(self, record: Record, optimizer: Optimizer) -> None:
        """Count the validations since the latest improvement."""
        del optimizer
        self.waits = 0 if self._improves(record) else self.waits + 1

    def on_step_end(self, record: Record, optimizer: Optimizer) -> bool:
        """Return whether the run ends."""
        del record, optimizer
        return self.ended


class BestWeights(_BestValidation):
    """Gives the engine the weights of the best validation at the end of the run.

    The weights are the parameters and the running statistics. Records of validations have the
    ``best_step`` so far.

    Args:
        metric: Name of the metric in records: ``"validation_loss"`` or another metric of ``fit``.
        better: Which values are better, ``"higher"`` or ``"lower"``, for a metric that is a
            function; the metrics of the library have a direction.

    Raises:
        InputError: An argument is wrong.
    """

    def __init__(self, metric: str = VALIDATION_LOSS, better: Direction | None = None) -> None:
        super().__init__(metric, better, 0.0)
        self._weights: Weights | None = None

    def on_validation_end(self, record: Record, optimizer: Optimizer) -> None:
        """Copy the weights that were evaluated, if they are the best ones so far."""
        if self._improves(record):
            self._weights = Weights.present(optimizer.engine).copy()
        record["best_step"] = self.best_step

    def final_weights(self, optimizer: Optimizer) -> Weights | None:
        """Return the weights of the best validation; None without a validation."""
        del optimizer
        return self._weights

    def state(self, optimizer: Optimizer) -> SavedState:
        """Return the best score, its step and the weights; before a validation, present weights."""
        weights = self._weights or Weights.present(optimizer.engine)
        return replace(super().state(optimizer), arrays=weights.arrays)

    def restore(self, state: SavedState) -> None:
        """Restore the best score, its step, and the weights."""
        super().restore(state)
        self._weights = Weights.stored(state.arrays) if self.best_step else None


def _sign(callback: str, metric: object, better: object) -> int:
    """Return 1 if lower values of a metric are better, and −1 if higher values are."""
    if not isinstance(metric, str):
        raise InputError(f"metric must be the name of a metric in records, got {metric!r:.80}.")
    if not isinstance(better, str | None) or better not in (None, "higher", "lower"):
        raise InputError(f"better must be 'higher' or 'lower', got {better!r:.80}.")
    if metric == "loss":
        raise InputError(
            f"'loss' is the loss of a batch; {callback} reads '{VALIDATION_LOSS}' or another "
            f"metric of the validation."
        )
    known = _known_direction(metric)
    if known is not None and better not in (None, known):
        raise InputError(f"{known} values of '{metric}' are better; leave out better={better!r}.")
    if known is None and better is None:
        names = [VALIDATION_LOSS, *(name for name in METRICS if name != "loss")]
        raise InputError(
            f"{callback} cannot know which values of '{metric}'{suggestion(metric, names)} are "
            f"better; give better='higher' or better='lower', or one of {', '.join(names)}."
        )
    return -1 if (known or better) == "higher" else 1


def _known_direction(metric: str) -> Direction | None:
    """Return which values of a metric of the library are better; None for other metrics."""
    try:
        (row,) = metrics_of(["loss" if metric == VALIDATION_LOSS else metric]).values()
    except UnknownNameError:
        return None
    return row.better
