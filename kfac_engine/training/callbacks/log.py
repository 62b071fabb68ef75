"""Writes the log of a run to a file of JSON lines."""

import json
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path

from kfac_engine.errors import InputError
from kfac_engine.training.description import Description, described_spectra
from kfac_engine.training.history import RUN, SPECTRA, Record
from kfac_engine.training.hooks import Callback
from kfac_engine.training.optimizer import Optimizer


class Log(Callback):
    """Writes the lines ``{"run": description}``, the records, and ``{"spectra": [...]}``.

    Args:
        path: The file, which is replaced; None for no file.
        description: The description of the run.
    """

    def __init__(self, path: Path | None, description: Description) -> None:
        self._path, self._description = path, description
        self._has_steps = False

    def on_run_start(self, optimizer: Optimizer, records: Sequence[Record]) -> None:
        """Write the description, and the records of the part of the run before."""
        del optimizer
        self._write("w", [{RUN: self._description}, *map(_valid, records)])

    def on_record(self, record: Record, optimizer: Optimizer) -> None:
        """Append a record."""
        del optimizer
        self._write("a", [_valid(record)])
        self._has_steps = True

    def on_run_end(self, optimizer: Optimizer, records: Sequence[Record]) -> None:
        """Append the spectra of the factors."""
        if not self._has_steps:  # the last record may have a validation now
            self.on_run_start(optimizer, records)
            return
        optimizer.engine.synchronize()  # before averages are read
        if self._path is not None:
            self._write("a", [{SPECTRA: described_spectra(optimizer.engine)}])

    def _write(self, mode: str, lines: Sequence[Mapping[str, object]]) -> None:
        if self._path is None:
            return
        try:
            with self._path.open(mode, encoding="utf-8") as file:
                file.writelines(f"{json.dumps(line, allow_nan=False)}\n" for line in lines)
        except OSError as failure:
            raise InputError(f"cannot write the log '{self._path}': {failure.strerror}.") from None


def _valid(record: Record) -> Record:
    """Return a record with null in place of NaN, which JSON cannot represent."""
    return {
        name: value if isinstance(value, list) or isfinite(value) else None
        for name, value in record.items()
    }
