"""Reads and checks a run's log, which may be damaged or hostile, into arrays."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, nan
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from kfac_engine._types import Array
from kfac_engine.errors import InputError
from kfac_engine.printable import printable
from kfac_engine.system.reading import check_file
from kfac_engine.training.history import RUN, SPECTRA

Json: TypeAlias = Mapping[str, Any]

_MOST_BYTES_IN_LINE = 1 << 26
_MOST_COLUMNS = 64
# Products of two numbers, and sums over all records, are finite below this bound.
_LARGEST = 1e150


@dataclass(slots=True)
class RunLog:
    """The records of a run, with the description of the run and its last spectra."""

    # Settings, versions and layers; empty if the log has no description.
    run: Json = field(default_factory=dict)
    # An entry for each factor; empty if the log has none.
    spectra: list[Json] = field(default_factory=list)
    # Values of each number, ``(steps,)``, by name; NaN where a record lacks the number.
    columns: dict[str, Array] = field(default_factory=dict)
    # Sentences about parts of the log that are missing.
    notes: list[str] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """Number of records."""
        return len(self.columns["step"])


def log_of_lines(lines: Iterable[Json]) -> RunLog:
    """Return a log from its lines: records of steps, the description, and the spectra.

    The last description and the last spectra count. No record, or steps that do not increase, raise
    InputError.
    """
    log, values, steps = RunLog(), dict[str, list[float]](), 0
    omitted: set[str] = set()
    for line in lines:
        if isinstance(line.get(RUN), Mapping):
            log.run = line[RUN]
        elif isinstance(line.get(SPECTRA), list):
            log.spectra = [entry for entry in line[SPECTRA] if isinstance(entry, Mapping)]
        elif "step" in line:
            for name, value in line.items():
                if name not in values and len(values) == _MOST_COLUMNS:
                    omitted.add(name)
                    continue
                column = values.setdefault(name, [])
                column.extend([nan] * (steps - len(column)))
                entry = checked_number(value)
                column.append(nan if entry is None else entry)
            steps += 1
    if not steps:
        raise InputError("the run has no record of a step; report a run after its first step.")
    for name, column in values.items():
        column.extend([nan] * (steps - len(column)))
        log.columns[name] = np.array(column)
    if omitted:
        log.notes.append(f"{len(omitted)} of the numbers of a record are not shown.")
    _check_positions(log)
    return log


def read_log(path: Path) -> RunLog:
    """Read the log that ``fit`` writes, a file of JSON lines.

    An interrupted run may leave an incomplete last line, which is left out with a note. A file that
    is missing, larger than the memory, or not the log of a run raises InputError.
    """
    check_file(path)
    notes: list[str] = []
    try:
        log = log_of_lines(_lines(path, notes))
    except InputError as failure:
        raise InputError(f"cannot read the log '{path}': {failure}") from failure
    log.notes += notes
    return log


def _lines(path: Path, notes: list[str]) -> Iterable[Json]:
    """Yield the lines of a file; raise an InputError for a line that is not an object of JSON."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(_MOST_BYTES_IN_LINE):
            number += 1
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                if line.endswith(b"\n") or len(line) == _MOST_BYTES_IN_LINE:
                    raise InputError(
                        f"line {number} is not JSON; give the file that fit writes with log=."
                    ) from None
                notes.append("The last line of the log is incomplete and is left out.")
                return
            if not isinstance(value, dict):
                raise InputError(
                    f"line {number} is not an object of JSON, but {value!r:.40}; give the file "
                    f"that fit writes with log=."
                )
            yield value


def checked_number(value: object) -> float | None:
    """Return a number as float; None for anything else, and for numbers beyond 1e150."""
    # A comparison of a whole number of many digits does not overflow.
    return float(value) if isinstance(value, int | float) and abs(value) <= _LARGEST else None


def _check_positions(log: RunLog) -> None:
    """Refuse steps that do not increase; complete missing seconds by NaN."""
    steps = log.columns["step"]
    if not np.isfinite(steps).all() or (np.diff(steps) <= 0).any():
        raise InputError("the steps of the records do not increase; give the log of one run.")
    seconds = log.columns.get("seconds")
    if seconds is None or not np.isfinite(seconds).all() or (np.diff(seconds) < 0).any():
        log.columns["seconds"] = np.full(len(steps), nan)
        log.notes.append("The log has no increasing seconds; the charts show steps only.")


def finite_or_none(value: float) -> float | None:
    """Return a number, or None in place of NaN and infinity, which JSON cannot represent."""
    return float(value) if isfinite(value) else None


_MOST_ENTRIES = 400
_MOST_CHARACTERS = 2000
_MOST_EIGENVALUES = 200


@dataclass(frozen=True, slots=True)
class LayerEntry:
    """A row in the table of layers."""

    parameters: str
    kind: str
    block: str
    factors: str
    numbers: float | None
    bytes: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class SpectrumEntry:
    """The spectrum of a factor."""

    layer: str  # parameters of the layer
    factor: str  # symbol of the factor
    shape: str  # shape of its average
    count: int | None  # number of eigenvalues; None if they were not computed
    ranks: list[int]  # ranks of the listed eigenvalues, from 1 for the largest
    eigenvalues: list[float]  # eigenvalues at these ranks, descending
    smallest: float | None  # smallest eigenvalue
    largest: float | None  # largest eigenvalue
    resolution: float  # rounding error of an eigenvalue, relative to the largest
    damping: float | None  # damping of the factor, the smallest of all groups
    below_damping: int | None  # number of eigenvalues below the damping
    condition: float | None  # condition number; None if the factor is singular
    damped_condition: float | None  # condition number with the damping


def layer_entries(run: Json) -> tuple[list[LayerEntry], int]:
    """Return the layers of a run, and how many further layers are left out."""
    rows = [value for value in _list(run.get("layers")) if isinstance(value, Mapping)]
    return [
        LayerEntry(
            _names(row.get("parameters")),
            _text(row.get("kind")),
            _text(row.get("block")),
            ", ".join(_shape(shape) for shape in _list(row.get("factors"))),
            _number(row.get("numbers")),
            _number(row.get("bytes")),
            _text(row.get("reason")),
        )
        for row in rows[:_MOST_ENTRIES]
    ], max(0, len(rows) - _MOST_ENTRIES)


def spectrum_entries(spectra: Sequence[Json]) -> tuple[list[SpectrumEntry], int]:
    """Return the spectra of a run, and how many further spectra are left out."""
    entries = [_spectrum(row) for row in spectra[:_MOST_ENTRIES]]
    return entries, max(0, len(spectra) - _MOST_ENTRIES)


def named_texts(values: object) -> list[tuple[str, str]]:
    """Return a mapping of a log as pairs of texts."""
    if not isinstance(values, Mapping):
        return []
    items = list(values.items())[:_MOST_ENTRIES]
    return [(_text(name), _text(value)) for name, value in items]


def _spectrum(row: Json) -> SpectrumEntry:
    pairs = list(_pairs(row.get("eigenvalues")))
    return SpectrumEntry(
        _names(row.get("parameters")),
        _text(row.get("factor")),
        _shape(row.get("shape")),
        _whole(row.get("count")),
        [rank for rank, _ in pairs],
        [value for _, value in pairs],
        _number(row.get("smallest")),
        _number(row.get("largest")),
        _number(row.get("resolution")) or 0.0,
        _number(row.get("damping")),
        _whole(row.get("below_damping")),
        _number(row.get("condition")),
        _number(row.get("damped_condition")),
    )


def _pairs(values: object) -> Iterator[tuple[int, float]]:
    """Yield the pairs (rank, eigenvalue) of a spectrum."""
    for pair in _list(values)[:_MOST_EIGENVALUES]:
        entries = _list(pair)
        if len(entries) == 2:
            rank, value = _whole(entries[0]), _number(entries[1])
            if rank is not None and value is not None:
                yield rank, value


def _list(values: object) -> list[Any]:
    return values if isinstance(values, list) else []


def _names(values: object) -> str:
    return _text(_list(values))


def _shape(values: object) -> str:
    return "×".join(_word(size) for size in _list(values)[:8]) or "scalar"


def _text(value: object) -> str:
    """Return a number, a text or a list of both as printable text of bounded length."""
    if isinstance(value, list):
        return ", ".join(_word(entry) for entry in value[:_MOST_ENTRIES])[:_MOST_CHARACTERS]
    return _word(value)[:_MOST_CHARACTERS]


def _word(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return f"{value:g}" if isinstance(value, float) else str(value)
    return printable(value) if isinstance(value, str) else "…"


def _number(value: object) -> float | None:
    return None if isinstance(value, bool) else checked_number(value)


def _whole(value: object) -> int | None:
    whole = _number(value)
    return None if whole is None else int(whole)
