"""The checkpoints of a run: when they are written, and the options that a resumed run must have."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kfac_engine.arguments import whole
from kfac_engine.errors import InputError
from kfac_engine.system.writing import checked_path
from kfac_engine.training.budget import Position
from kfac_engine.training.history import Record
from kfac_engine.training.optimizer import Optimizer

CHECKPOINT = "training.safetensors"


class RunCheckpoint:
    """The checkpoint of a run: one file in a folder.

    Args:
        folder: Folder of the file; None for no checkpoints.
        every: Steps from one checkpoint to the next; None for epochs.
        options: Options that a resumed run must have, by name.
    """

    def __init__(
        self,
        folder: str | Path | None,
        every: int | None = None,
        options: Mapping[str, int | None] | None = None,
    ) -> None:
        if every is not None:
            whole("checkpoint_every", every, least=1)
        self._every, self._options = every, options or {}
        self._file = None if folder is None else checked_path(folder) / CHECKPOINT

    def __bool__(self) -> bool:
        """Return whether the run has checkpoints."""
        return self._file is not None

    def exists(self) -> bool:
        """Return whether the folder has a checkpoint."""
        return self._file is not None and self._file.exists()

    def is_due(self, position: Position, epoch_ends: bool) -> bool:
        """Return whether a checkpoint is written after a step."""
        return epoch_ends if self._every is None else position.steps % self._every == 0

    def write(self, optimizer: Optimizer, position: Position, records: Sequence[Record]) -> None:
        """Write a checkpoint, if the run has any; the file is replaced whole or not at all."""
        if self._file is None:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as failure:
            raise InputError(
                f"cannot create the folder '{self._file.parent}': {failure.strerror}."
            ) from failure
        run = {
            "epoch": position.epoch,
            "batch": position.batch,
            "steps": position.steps,
            "seconds": position.seconds,
            "options": dict(self._options),
            "records": list(records),
        }
        optimizer.save_run(self._file, run)

    def restore(self, optimizer: Optimizer) -> tuple[Position, list[Record]]:
        """Load the checkpoint, if there is one; return the position and the records."""
        if self._file is None:
            raise InputError("resume=True needs the folder of the run: give checkpoint=FOLDER.")
        if not self.exists():
            return Position(), []
        run = optimizer.load_run(self._file, self._check)
        place = {name: run[name] for name in ("epoch", "batch", "steps", "seconds")}
        return Position(**place), list(run["records"])

    def _check(self, run: Mapping[str, Any]) -> None:
        """Refuse the state of a run with other options."""
        if "options" not in run:
            raise InputError(
                f"'{self._file}' is the state of an optimizer, not of fit; use optimizer.load."
            )
        for name, value in self._options.items():
            if run["options"].get(name) != value:
                raise InputError(
                    f"the run in '{self._file}' has {name}={run['options'].get(name)}, and this "
                    f"run has {name}={value}; resume with the same value."
                )
