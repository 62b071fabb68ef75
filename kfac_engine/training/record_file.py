"""The records of a run beside its checkpoints: a file of JSON lines that grows by the new records.

A checkpoint stores the position in this file up to which its records are complete. Lines after
this position belong to steps that a resumed run repeats.
"""

import json
import os
import re
import secrets
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kfac_engine.arguments import is_amount, is_count
from kfac_engine.errors import InputError
from kfac_engine.system.reading import check_file
from kfac_engine.training.history import STEP_ENTRIES, Record

_PATTERN = "records-*.jsonl"
_NAME = re.compile(r"records-[0-9a-f]{8}\.jsonl")
# Entries of records that are counters, and all that are numbers.
_COUNTS = ("step", "epoch")
_NUMBERS = STEP_ENTRIES - {"refreshed"}


@dataclass(frozen=True, slots=True)
class RecordPosition:
    """A position in the file of the records.

    Attributes:
        file: Name of the file. Each run has another one: the checkpoint of an older run in the same
            folder remains valid until the first checkpoint of the new run.
        length: Number of bytes.
        count: Number of records.
        checksum: CRC-32 of the bytes.
    """

    file: str
    length: int = 0
    count: int = 0
    checksum: int = 0


class RecordFile:
    """The file of the records of a run.

    Args:
        folder: An existing folder.
        position: Position of a resumed run; None for a new run.
    """

    def __init__(self, folder: Path, position: RecordPosition | None = None) -> None:
        self._folder = folder
        self._position = position or RecordPosition(f"records-{secrets.token_hex(4)}.jsonl")

    def add(self, records: Sequence[Record]) -> dict[str, Any]:
        """Append the records that the file lacks.

        Args:
            records: All records of the run.

        Returns:
            The new position, as values of JSON: see ``position_of``.

        Raises:
            InputError: The file cannot be written.
        """
        old = self._position
        data = "".join(
            f"{json.dumps(record, default=float)}\n" for record in records[old.count :]
        ).encode()
        path = self._folder / old.file
        try:
            with path.open("r+b" if old.length else "wb") as file:
                file.truncate(old.length)
                file.seek(old.length)
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError as failure:
            raise InputError(f"cannot write '{path}': {failure.strerror}.") from failure
        checksum = zlib.crc32(data, old.checksum)
        self._position = RecordPosition(old.file, old.length + len(data), len(records), checksum)
        return asdict(self._position)

    def remove_others(self) -> None:
        """Remove the records of older runs, to which no checkpoint belongs any more."""
        for path in record_files(self._folder):
            if path.name != self._position.file:
                with suppress(OSError):
                    path.unlink()


def record_files(folder: Path) -> list[Path]:
    """Return the files of records in a folder."""
    return [path for path in folder.glob(_PATTERN) if _NAME.fullmatch(path.name)]


def read_records(folder: Path, position: RecordPosition) -> list[Record]:
    """Return the records up to a position.

    Args:
        folder: Folder of the checkpoint.
        position: The position.

    Raises:
        InputError: The file is missing, damaged, or not that of the checkpoint.
    """
    path = folder / position.file
    check_file(path)
    try:
        with path.open("rb") as file:
            data = file.read(min(position.length, path.stat().st_size))
    except OSError as failure:
        raise InputError(f"cannot read '{path}': {failure.strerror}.") from failure
    lines = data.splitlines()
    right = zlib.crc32(data) == position.checksum and len(lines) == position.count
    records = [_parsed(line) for line in lines] if right else []
    if not right or not all(map(_is_record, records)):
        raise InputError(
            f"'{path}' does not have the records of the checkpoint beside it; restore the file, "
            f"or begin a new run in another folder."
        )
    return records


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _is_record(value: Any) -> bool:
    """Return whether the value of a line, which may be forged, has the form of a record."""
    if not (isinstance(value, dict) and value.keys() >= {*_COUNTS, "seconds", "loss"}):
        return False
    numbers = [entry for entry in value.values() if type(entry) is int]
    names = value.get("refreshed", [])
    return (
        all(is_count(value[name]) for name in _COUNTS)
        and all(isinstance(value[name], int | float) for name in _NUMBERS & value.keys())
        and all(is_amount(abs(number)) for number in numbers)
        and not any(isinstance(entry, dict) for entry in value.values())
        and isinstance(names, list)
        and all(isinstance(name, str) for name in names)
    )


def position_of(values: Mapping[str, Any]) -> RecordPosition:
    """Return a position from the values of ``RecordFile.add``, which may be forged.

    Raises:
        InputError: The values are not a position.
    """
    numbers = [values.get(name) for name in ("length", "count", "checksum")]
    file = values.get("file")
    if not (all(map(is_count, numbers)) and isinstance(file, str) and _NAME.fullmatch(file)):
        raise InputError("the checkpoint has no position in a file of records; use another.")
    return RecordPosition(file, *numbers)  # type: ignore[arg-type] # whole numbers
