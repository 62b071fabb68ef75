"""Stores the records of a training run in memory, and as a file of JSON lines."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from math import nan
from numbers import Integral, Real
from typing import Any, TypeAlias

from kfac_engine.engine.engine import Engine
from kfac_engine.errors import InputError
from kfac_engine.summary import Summarized, Summary, Table, counted
from kfac_engine.training.description import Description, described_spectra
from kfac_engine.training.optimizer import Optimizer

# Keys of the lines of a log that are not records.
RUN, SPECTRA = "run", "spectra"

# Entries of a record besides the metrics of a validation and the seconds of stages.
STEP_ENTRIES = frozenset(
    {
        "step", "epoch", "seconds", "loss", "learning_rate", "momentum", "damping",
        "reduction_ratio", "refreshed", "skipped", "rolled_back", "spent",
        "best_step",
    }
)  # fmt: skip

# Entries of a record that callbacks must not change.
_POSITION = frozenset({"step", "epoch", "seconds"})

# Columns of the summary of a history, before the metrics.
_COLUMNS = ("step", "epoch", "seconds", "loss", "learning_rate")
_MOST_METRICS = 8

# Name to number, but ``refreshed`` to a list of names; see ``History.records``.
Record: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True, repr=False)
class History(Summarized):
    """The result of ``fit``.

    Attributes:
        engine: The engine with the trained parameters.
        optimizer: The optimizer with its state.
        records: A dictionary of numbers for each step: ``step`` (from 1), ``epoch`` (from 0),
            ``seconds``, ``loss`` of the batch before the update, and ``learning_rate``. Further
            numbers come from ``StepReport``, where they are defined: ``momentum``, ``damping``,
            ``reduction_ratio``, ``refreshed``, ``skipped``, ``rolled_back``, and ``seconds/STAGE``
            for each stage. ``loss/OUTPUT`` is the part of the loss of each output, such as the
            residuals of an equation, if several have a loss. ``spent`` is the part of the budget
            that is spent. Steps that end an epoch or the run also have ``validation_loss`` and the
            other metrics by name, and with ``BestWeights`` the ``best_step`` so far.
        description: ``settings``, ``versions`` and ``layers`` of the run, and the name of the
            ``model``: values that JSON can hold.
    """

    engine: Engine
    optimizer: Optimizer
    records: list[Record]
    description: Description = field(default_factory=dict)

    def lines(self) -> Iterator[Description]:
        """Yield the lines of a log: the description, the records and the present spectra."""
        yield {RUN: self.description}
        yield from self.records
        yield {SPECTRA: described_spectra(self.engine)}

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the weights of the engine at the end of the run, by name in records."""
        if not self.records:
            return {}
        last = self.records[-1]
        step = last.get("best_step", last["step"])
        return metrics_in(next(r for r in reversed(self.records) if r["step"] == step))

    def _summary(self) -> Summary:
        title = f"Training of '{self.engine.name}' by {type(self.optimizer).__name__}"
        if not self.records:
            return Summary(title, {"steps": 0})
        last = self.records[-1]
        facts = {
            "steps": f"{last['step']:,} in {counted(last['epoch'] + 1, 'epoch')}",
            "seconds": f"{last['seconds']:.4g}",
            "loss": f"{last['loss']:.4g} of the last batch",
            **dict(islice(((n, f"{v:.4g}") for n, v in self.metrics.items()), _MOST_METRICS)),
        }
        heads = [*_COLUMNS, *islice(self.metrics, _MOST_METRICS)]
        rows = ([_show_number(r.get(head)) for head in heads] for r in reversed(self.records))
        return Summary(title, facts, Table(heads, rows, len(self.records), "steps before"))


def metrics_in(record: Record) -> dict[str, float]:
    """Return the metrics of a validation among the entries of a record."""
    return {n: v for n, v in record.items() if n not in STEP_ENTRIES and "/" not in n}


def check_entries(record: Record, before: Record, callback: str) -> None:
    """Convert the numbers in a record that a callback received to Python numbers, in place.

    None becomes NaN, and a NumPy number or an array without axes becomes the number of Python. An
    entry that is not a number, or an entry of the step that the callback removed or moved, raises
    an InputError.
    """
    for name in before.keys() & STEP_ENTRIES:
        if name not in record or (name in _POSITION and record[name] != before[name]):
            raise InputError(
                f"the callback {callback} removed or changed '{name}' of a record; add entries of "
                f"other names."
            )
    for name, value in record.items():
        entry = value if name == "refreshed" else _as_number(value)
        if entry is None or not isinstance(name, str):
            raise InputError(
                f"the callback {callback} put {name!r:.80} = {value!r:.80} into a record; a name "
                f"must be a string, and a value must be a number or None."
            )
        record[name] = entry


def _as_number(value: object) -> float | None:
    """Return a number of Python; None if ``value`` is not a number."""
    if value is None:
        return nan
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    try:
        as_float = float(value) if isinstance(value, Real) else None
    except OverflowError:  # a whole number of many digits
        return None
    if isinstance(value, bool) or as_float is None:
        return value if isinstance(value, bool) else None
    return int(value) if isinstance(value, Integral) else as_float


def _show_number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
