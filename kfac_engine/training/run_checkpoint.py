"""Writes a run's checkpoints when due, and checks the options of a resumed run.

The records of a run are a file of JSON lines beside the state, which grows by the new records. A
checkpoint stores the position in this file up to which its records are complete. Lines after this
position belong to steps that a resumed run repeats.
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
from typing import Any, Self, TypeAlias

from kfac_engine.arguments import check_int, is_amount, is_count
from kfac_engine.distributed.agreement import Agreement
from kfac_engine.distributed.protocol import Alone
from kfac_engine.errors import InputError, RankError
from kfac_engine.system.reading import check_file, exists
from kfac_engine.system.writing import FileLock, checked_path
from kfac_engine.training.budget import Position
from kfac_engine.training.checkpoint import Parts
from kfac_engine.training.history import STEP_ENTRIES, Record
from kfac_engine.training.optimizer import Optimizer

# Options that a resumed run must have, by name.
Options: TypeAlias = dict[str, str | float | None]

# Values of options that older versions did not have.
_OLDER: Options = {"accumulate": 1}

CHECKPOINT = "training.safetensors"
_LOCK = "run.lock"

_PLACE = ("epoch", "batch", "steps", "seconds")


class RunCheckpoint:
    """The checkpoint of a run: a state in a folder, and the file of its records.

    The size of the state does not grow with the run. As a context, it creates the folder, and holds
    it against other runs.

    Args:
        folder: Folder of the files; None for no checkpoints.
        every: Steps from one checkpoint to the next; None for epochs.
        options: Options that a resumed run must have, by name.
        agreement: The processes of the run, of which the first one writes the files.
    """

    def __init__(
        self,
        folder: str | Path | None,
        every: int | None = None,
        options: Options | None = None,
        agreement: Agreement | None = None,
    ) -> None:
        self._agreement = agreement or Agreement(Alone())
        if every is not None:
            check_int("checkpoint_every", every, least=1)
        self._every, self._options = every, options or {}
        self._file = None if folder is None else checked_path(folder) / CHECKPOINT
        self._records: RecordFile | None = None
        self._lock: FileLock | None = None

    def __enter__(self) -> Self:
        """Create and lock the folder.

        A folder that cannot be written, or that another run uses, raises an InputError.
        """
        if self._file is None or self._agreement.rank:
            return self
        folder = self._file.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as failure:
            raise InputError(f"cannot create the folder '{folder}': {failure.strerror}.") from None
        self._lock = FileLock(folder / _LOCK)
        try:
            holder = self._lock.acquire()
        except OSError as failure:
            raise InputError(f"cannot write into '{folder}': {failure.strerror}.") from None
        if holder is not None:
            raise InputError(
                f"another run writes its checkpoints into '{folder}' ({holder}); wait for its end, "
                f"or name another folder."
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.release()

    def __bool__(self) -> bool:
        """Return whether the run has checkpoints."""
        return self._file is not None

    def exists(self) -> bool:
        """Return whether the folder has a checkpoint."""
        return self._file is not None and exists(self._file)

    @property
    def state_file(self) -> Path | None:
        """The file of the state, if the folder exists and this process writes it."""
        folder_exists = self._file is not None and exists(self._file.parent)
        return self._file if folder_exists and not self._agreement.rank else None

    @property
    def record_files(self) -> list[Path]:
        """The files of the checkpoint that hold the records of its steps."""
        return [] if self.state_file is None else record_files(self.state_file.parent)

    def is_due(self, position: Position, epoch_ends: bool) -> bool:
        """Return whether a checkpoint is written after a step."""
        return epoch_ends if self._every is None else position.steps % self._every == 0

    def begin(self) -> None:
        """Create the file of the records of a new run; a resumed run reads its file in ``restore``.

        Raises:
            InputError: The file cannot be written. A run learns this before its first step.
        """
        if self._file is None or self._records is not None or self._agreement.rank:
            return
        self._records = RecordFile(self._file.parent)
        self._records.add(())

    def write(
        self, optimizer: Optimizer, position: Position, records: Sequence[Record], parts: Parts
    ) -> None:
        """Write a checkpoint, if the run has any; the state is replaced whole or not at all."""
        if self._file is None:
            return
        run = {
            **{name: getattr(position, name) for name in _PLACE},
            "options": dict(self._options),
            "records": {} if self._records is None else self._records.add(records),
        }
        optimizer.save_run(self._file, parts, run)
        if self._records is not None:
            self._records.remove_others()

    def restore(self, optimizer: Optimizer, parts: Parts) -> tuple[Position, list[Record], Parts]:
        """Load the checkpoint, if there is one, and return the position, the records and the parts.

        The optimizer receives its state. ``parts`` is the present state of the further parts. A
        folder that is missing, damaged or of another run raises an InputError; one that some of the
        processes cannot read raises a RankError.
        """
        if self._file is None:
            raise InputError(
                "to resume a run, give its folder: checkpoint=FOLDER (--checkpoint FOLDER)."
            )
        exist = self._agreement.of_all(self.exists())[:, 0]
        if exist.any() and not exist.all():
            self._agreement.refuse(
                RankError(
                    f"rank {exist.argmin()} does not see '{self._file}', which other ranks see; "
                    f"give a folder that all processes share."
                )
            )
        if not exist.any():
            return Position(), [], parts
        records: list[Record] = []

        def check(run: Mapping[str, Any]) -> None:
            self._check(run)
            records.extend(self._read(run))

        saved = optimizer.load_run(self._file, parts, check)
        return Position(**{name: saved.run[name] for name in _PLACE}), records, saved.parts

    def _read(self, run: Mapping[str, Any]) -> list[Record]:
        """Return the records of a checkpoint; later ones are appended to them."""
        assert self._file is not None
        folder, position = self._file.parent, position_of(run["records"])
        if not self._agreement.rank:
            self._records = RecordFile(folder, position)
        return read_records(folder, position)

    def _check(self, run: Mapping[str, Any]) -> None:
        """Refuse the state of a run with other options."""
        options = run.get("options")
        if not (isinstance(options, dict) and isinstance(run.get("records"), dict)):
            raise InputError(
                f"'{self._file}' is the state of an optimizer, not of fit; use optimizer.load."
            )
        for name, value in self._options.items():
            # Checkpoints of older versions do not have all of the options.
            other = options.get(name, _OLDER.get(name, value))
            if other != value:
                raise InputError(
                    f"the run in '{self._file}' has {name}={other!r:.200}, and this run "
                    f"has {name}={value!r:.200}; resume with the same {name}."
                )
        *counts, seconds = (run.get(name) for name in _PLACE)
        if not (all(map(is_count, counts)) and is_amount(seconds)):
            raise InputError(f"the checkpoint '{self._file}' has no valid position; use another.")


# -- the file of the records -----------------------------------------------------------------------

_PATTERN = "records-*.jsonl"
_NAME = re.compile(r"records-[0-9a-f]{8}\.jsonl")
# Entries of records that are counters, and all that are numbers.
_COUNTS = ("step", "epoch")
_NUMBERS = STEP_ENTRIES - {"refreshed"}


@dataclass(frozen=True, slots=True)
class RecordPosition:
    """A position in the file of the records."""

    # Name of the file. Each run has another one: the checkpoint of an older run in the same folder
    # remains valid until the first checkpoint of the new run.
    file: str
    length: int = 0  # number of bytes
    count: int = 0  # number of records
    checksum: int = 0  # CRC-32 of the bytes


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
        """Append the records that the file lacks; return the new position as values of JSON."""
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

    A file that is missing, damaged, or not that of the checkpoint raises an InputError.
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
    """Return whether the value of a line has the form of a record; lines may be forged."""
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
    """Return a position from the values of ``RecordFile.add``; they may be forged.

    Raises:
        InputError: The values are not a position.
    """
    numbers = [values.get(name) for name in ("length", "count", "checksum")]
    file = values.get("file")
    if not (all(map(is_count, numbers)) and isinstance(file, str) and _NAME.fullmatch(file)):
        raise InputError("the checkpoint has no position in a file of records; use another.")
    return RecordPosition(file, *numbers)  # type: ignore[arg-type] # whole numbers
