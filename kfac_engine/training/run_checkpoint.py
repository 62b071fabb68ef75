"""The checkpoints of a run: when they are written, and the options that a resumed run must have."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeAlias

from kfac_engine.arguments import is_amount, is_count, whole
from kfac_engine.distributed.agreement import Agreement
from kfac_engine.distributed.protocol import Alone
from kfac_engine.errors import InputError, RankError
from kfac_engine.system.locks import FileLock
from kfac_engine.system.reading import exists
from kfac_engine.system.writing import checked_path
from kfac_engine.training.budget import Position
from kfac_engine.training.checkpoint import Parts
from kfac_engine.training.history import Record
from kfac_engine.training.optimizer import Optimizer
from kfac_engine.training.record_file import (
    RecordFile,
    position_of,
    read_records,
    record_files,
)

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
            whole("checkpoint_every", every, least=1)
        self._every, self._options = every, options or {}
        self._file = None if folder is None else checked_path(folder) / CHECKPOINT
        self._records: RecordFile | None = None
        self._lock: FileLock | None = None

    def __enter__(self) -> Self:
        """Create and lock the folder.

        Returns:
            This object.

        Raises:
            InputError: The folder cannot be written, or another run uses it.
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
        """Create the file of the records of a new run; ``restore`` reads that of a resumed run.

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
        """Load the checkpoint, if there is one.

        Args:
            optimizer: The optimizer, which receives its state.
            parts: The present state of the further parts.

        Returns:
            The position, the records, and the state of the further parts.

        Raises:
            InputError: There is no folder, or its checkpoint is damaged or that of another run.
            RankError: Some of the processes cannot read the folder.
        """
        if self._file is None:
            raise InputError("resume=True needs the folder of the run: give checkpoint=FOLDER.")
        exist = self._agreement.vote(self.exists(), place="resume")[:, 0]
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
