"""Writes TensorBoard's event files with the library tensorboardX."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic, time
from types import SimpleNamespace
from typing import Any

from kfac_engine.errors import BackendError, InputError
from kfac_engine.system.writing import checked_path
from kfac_engine.training.checkpoint import SavedState
from kfac_engine.training.history import Record, metrics_in
from kfac_engine.training.hooks import Callback
from kfac_engine.training.optimizer import Optimizer

# Seconds after which events reach the file, for a TensorBoard that shows a present run.
_FLUSH_SECONDS = 10.0


class TensorBoard(Callback):
    """Writes the numbers of each record into event files of TensorBoard.

    Each run or part of a run writes a file of its own. A resumed run continues the curves after
    the last step of its checkpoint; TensorBoard hides the events of later steps that an interrupted
    run wrote. A new run hides the curves of an older run in the same folder.

    Args:
        folder: Folder of the event files, which is created at the start of the run.

    Raises:
        InputError: ``folder`` is not a path.
        BackendError: tensorboardX is not installed.
    """

    on_every_rank = False

    def __init__(self, folder: str | Path) -> None:
        self._folder = checked_path(folder)
        self._tensorboard = _library()
        self._writer: Any = None
        self._flushed, self._step = 0.0, 0

    def on_run_start(self, optimizer: Optimizer, records: Sequence[Record]) -> None:
        """Create the event file.

        Raises:
            InputError: The folder or the file cannot be written.
        """
        del optimizer
        event = self._tensorboard.Event
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            # TensorBoard reads the files of a folder in the order of their names.
            number = len(list(self._folder.glob("events.out.tfevents.*")))
            file = self._folder / f"events.out.tfevents.{int(time())}.{number:06d}.kfac-engine"
            self._writer = self._tensorboard.RecordWriter(str(file))
        except OSError as failure:
            raise self._cannot_write(failure) from None
        self._write(event(wall_time=time(), file_version="brain.Event:2"))
        # The start of a session hides earlier events from its step on.
        log = self._tensorboard.SessionLog
        start = log(status=log.START)
        self._write(event(wall_time=time(), step=len(records) + 1, session_log=start))
        self._flush()

    def on_step_end(self, record: Record, optimizer: Optimizer) -> None:
        """Write the numbers of a record.

        Raises:
            InputError: The file cannot be written.
        """
        del optimizer
        self._step = int(record["step"])
        self._add({name: value for name, value in record.items() if name != "step"})
        if monotonic() - self._flushed > _FLUSH_SECONDS:
            self._flush()

    def on_validation_end(self, record: Record, optimizer: Optimizer) -> None:
        """Write the metrics of the validation at a run's end, after the last ``on_step_end``."""
        del optimizer
        if record["step"] == self._step:
            self._add(metrics_in(record))

    def state(self, optimizer: Optimizer) -> SavedState:
        """Return no state; events up to a checkpoint are in the file before the checkpoint is."""
        del optimizer
        if self._writer is not None:
            self._flush()
        return SavedState()

    def close(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            try:
                self._writer.close()
            except OSError as failure:
                raise self._cannot_write(failure) from None
            finally:
                self._writer = None

    def _add(self, numbers: Mapping[str, Any]) -> None:
        """Write numbers of the latest step."""
        summary, event = self._tensorboard.Summary, self._tensorboard.Event
        values = [summary.Value(tag=n, simple_value=_number(v)) for n, v in numbers.items()]
        self._write(event(wall_time=time(), step=self._step, summary=summary(value=values)))

    def _write(self, event: Any) -> None:
        try:
            self._writer.write(event.SerializeToString())
        except OSError as failure:
            raise self._cannot_write(failure) from None

    def _flush(self) -> None:
        try:
            self._writer.flush()
        except OSError as failure:
            raise self._cannot_write(failure) from None
        self._flushed = monotonic()

    def _cannot_write(self, failure: OSError) -> InputError:
        return InputError(f"cannot write events into '{self._folder}': {failure.strerror}.")


def _number(value: Any) -> float:
    """Return an entry of a record as a number: for a list, the number of its names."""
    return float(len(value) if isinstance(value, list) else value)


def _library() -> SimpleNamespace:
    """Return the classes of tensorboardX."""
    try:
        from tensorboardX import RecordWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.proto.summary_pb2 import Summary
    except ModuleNotFoundError:
        raise BackendError(
            "event files of TensorBoard need tensorboardX: pip install 'kfac-engine[tensorboard]'."
        ) from None
    return SimpleNamespace(
        RecordWriter=RecordWriter, Event=Event, SessionLog=SessionLog, Summary=Summary
    )
