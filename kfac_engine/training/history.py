"""The records of a training run, in memory and as a file of JSON lines."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TypeAlias

from kfac_engine.engine.engine import Engine
from kfac_engine.errors import InputError
from kfac_engine.system.writing import checked_path
from kfac_engine.training.optimizer import Optimizer

# Name to number; see ``History.records``.
Record: TypeAlias = dict[str, float]


@dataclass(frozen=True, slots=True)
class History:
    """The result of ``fit``.

    Attributes:
        engine: The engine with the trained parameters.
        optimizer: The optimizer with its state.
        records: A dictionary for each step: ``step`` (from 1), ``epoch`` (from 0), ``seconds``,
            ``loss`` of the batch before the update, and ``learning_rate``. The other numbers of
            the step are those of ``StepReport`` where they are defined: ``momentum``, ``damping``,
            ``reduction_ratio``, ``refreshed``, ``skipped``, and ``seconds/STAGE`` for each stage.
            Steps that end an epoch or the run also have ``validation_loss`` and the other metrics
            by name.
    """

    engine: Engine
    optimizer: Optimizer
    records: list[Record]


class Log:
    """A file of records, each a line of JSON.

    Args:
        path: The file, which is replaced; None for no file.
        records: The records of the part of the run before.
    """

    def __init__(self, path: str | Path | None, records: Sequence[Record]) -> None:
        self._path = None if path is None else checked_path(path)
        self._write("w", records)

    def add(self, record: Record) -> None:
        """Append a record."""
        self._write("a", [record])

    def _write(self, mode: str, records: Sequence[Record]) -> None:
        if self._path is None:
            return
        try:
            with self._path.open(mode, encoding="utf-8") as file:
                file.writelines(f"{json.dumps(_valid(record))}\n" for record in records)
        except OSError as failure:
            raise InputError(f"cannot write the log '{self._path}': {failure.strerror}.") from None


def _valid(record: Mapping[str, float]) -> dict[str, float | None]:
    """Return a record with null in place of NaN, which JSON cannot represent."""
    return {name: value if isfinite(value) else None for name, value in record.items()}
