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

from kfac_engine.errors import InputError
from kfac_engine.system.reading import check_file
from kfac_engine.training.history import Record

_PATTERN = "records-*.jsonl"
_NAME = re.compile(r"records-[0-9a-f]{8}\.jsonl")


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
            data = file.read(position.length)
    except OSError as failure:
        raise InputError(f"cannot read '{path}': {failure.strerror}.") from failure
    lines = data.splitlines()
    if zlib.crc32(data) != position.checksum or len(lines) != position.count:
        raise InputError(
            f"'{path}' does not have the records of the checkpoint beside it; restore the file, "
            f"or begin a new run in another folder."
        )
    return [json.loads(line) for line in lines]


def position_of(values: Mapping[str, Any]) -> RecordPosition:
    """Return a position from the values of ``RecordFile.add``, which may be forged.

    Raises:
        InputError: The values are not a position.
    """
    numbers = [values.get(name) for name in ("length", "count", "checksum")]
    file = values.get("file")
    whole = all(type(number) is int and number >= 0 for number in numbers)
    if not (whole and isinstance(file, str) and _NAME.fullmatch(file)):
        raise InputError("the checkpoint has no position in a file of records; use another.")
    return RecordPosition(file, *numbers)  # type: ignore[arg-type] # whole numbers
