"""The log of a run as arrays: a file of JSON lines, which may be damaged or hostile."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import isfinite, nan
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from kfac_engine._types import Array
from kfac_engine.errors import InputError
from kfac_engine.system.reading import check_file
from kfac_engine.training.history import RUN, SPECTRA

Json: TypeAlias = Mapping[str, Any]

_MOST_BYTES_IN_LINE = 1 << 26
_MOST_COLUMNS = 64
_MOST_NAMES = 4096
# Products of two numbers, and sums over all records, are finite below this bound.
_LARGEST = 1e150
# Entry of a record with the names of factors.
REFRESHED = "refreshed"


@dataclass(slots=True)
class RunLog:
    """The records of a run, with the description of the run and its last spectra.

    Attributes:
        run: Settings, versions and layers; empty if the log has no description.
        spectra: An entry for each factor; empty if the log has none.
        columns: Values of each number, ``(steps,)``, by name; NaN where a record lacks the number.
        refreshed: Names of the factors that each step refreshed.
        notes: Sentences about parts of the log that are missing.
    """

    run: Json = field(default_factory=dict)
    spectra: list[Json] = field(default_factory=list)
    columns: dict[str, Array] = field(default_factory=dict)
    refreshed: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """Number of records."""
        return len(self.columns["step"])


def gathered(lines: Iterable[Json]) -> RunLog:
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
            numbers = {name: value for name, value in line.items() if name != REFRESHED}
            for name, value in numbers.items():
                if name not in values and len(values) == _MOST_COLUMNS:
                    omitted.add(name)
                    continue
                column = values.setdefault(name, [])
                column.extend([nan] * (steps - len(column)))
                entry = number(value)
                column.append(nan if entry is None else entry)
            log.refreshed.append(_texts(line.get(REFRESHED)))
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
        log = gathered(_lines(path, notes))
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


def _texts(values: object) -> list[str]:
    """Return the different texts of a list, at most 4096; empty for anything else."""
    entries = values[:_MOST_NAMES] if isinstance(values, list) else []
    return list(dict.fromkeys(entry for entry in entries if isinstance(entry, str)))


def number(value: object) -> float | None:
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


def finite(value: float) -> float | None:
    """Return a number, or None in place of NaN and infinity, which JSON cannot represent."""
    return float(value) if isfinite(value) else None
