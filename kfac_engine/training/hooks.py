"""The hooks of a training run: what ``fit`` calls after steps and epochs, and when a run ends."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TypeAlias

from kfac_engine.errors import InputError
from kfac_engine.training.checkpoint import SavedState
from kfac_engine.training.history import Record
from kfac_engine.training.optimizer import Optimizer


class Callback:
    """Base of the callbacks of ``fit``; a subclass overrides the hooks that it needs.

    ``on_step_end`` and ``on_epoch_end`` end the run if they return True.
    """

    def on_run_start(self, optimizer: Optimizer, records: Sequence[Record]) -> object:
        """Begin a run.

        Args:
            optimizer: The optimizer with its engine, after the checkpoint of a resumed run.
            records: The records of the part of the run before; empty for a new run.

        Returns:
            True to end the run before its first step.
        """

    def on_step_end(self, record: Record, optimizer: Optimizer) -> object:
        """Receive the record of a step; it may be changed.

        Args:
            record: The record. In the last step of an epoch it has the metrics of the validation.
            optimizer: The optimizer, after the step.

        Returns:
            True to end the run.
        """

    def on_epoch_end(self, record: Record, optimizer: Optimizer) -> object:
        """Receive the record of the last step of an epoch, after ``on_step_end``.

        Args:
            record: The record with the metrics of the validation.
            optimizer: The optimizer.

        Returns:
            True to end the run.
        """

    def on_run_end(self, optimizer: Optimizer, records: Sequence[Record]) -> None:
        """Complete a run that reached its end, after its last checkpoint.

        Args:
            optimizer: The optimizer with its engine.
            records: All records of the run.
        """

    def state(self, optimizer: Optimizer) -> SavedState:
        """Return the state that checkpoints store.

        A resumed run calls it before ``restore``: the names of its numbers and arrays, and the
        types and shapes, must be those of the checkpoint.

        Args:
            optimizer: The optimizer with its engine.
        """
        del optimizer
        return SavedState()

    def restore(self, state: SavedState) -> None:
        """Restore the state of a checkpoint, before ``on_run_start``."""

    def close(self) -> None:
        """Release files and threads; called once, also after an error or a signal."""


class Hooks(Callback):
    """All callbacks of a run as one, which closes them when its context ends.

    Args:
        callbacks: Callbacks, or functions that are called after each step with its record and the
            optimizer.

    Raises:
        InputError: An entry is neither.
    """

    def __init__(self, callbacks: Sequence["Callback | StepFunction"]) -> None:
        self._callbacks = [_as_callback(callback) for callback in callbacks]
        self._closing = ExitStack()

    def __enter__(self) -> "Hooks":
        for callback in self._callbacks:
            self._closing.callback(callback.close)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._closing.close()

    def on_run_start(self, optimizer: Optimizer, records: Sequence[Record]) -> bool:
        """Return whether a callback ends the run before its first step."""
        answers = [c.on_run_start(optimizer, records) for c in self._callbacks]
        return any(answer is True for answer in answers)

    def on_step_end(self, record: Record, optimizer: Optimizer) -> bool:
        """Return whether a callback ends the run; every callback receives the record."""
        answers = [c.on_step_end(record, optimizer) for c in self._callbacks]
        return any(answer is True for answer in answers)

    def on_epoch_end(self, record: Record, optimizer: Optimizer) -> bool:
        """Return whether a callback ends the run; every callback receives the record."""
        answers = [c.on_epoch_end(record, optimizer) for c in self._callbacks]
        return any(answer is True for answer in answers)

    def on_run_end(self, optimizer: Optimizer, records: Sequence[Record]) -> None:
        """Complete a run."""
        for callback in self._callbacks:
            callback.on_run_end(optimizer, records)

    def states(self, optimizer: Optimizer) -> dict[str, SavedState]:
        """Return the states of the callbacks that have one, by class; a second one has a number."""
        states = {name: c.state(optimizer) for name, c in self._named()}
        return {name: state for name, state in states.items() if state.numbers or state.arrays}

    def restore_all(self, states: Mapping[str, SavedState]) -> None:
        """Restore the states of the callbacks."""
        for name, callback in self._named():
            if name in states:
                callback.restore(states[name])

    def _named(self) -> Iterator[tuple[str, Callback]]:
        counts = Counter[str]()
        for callback in self._callbacks:
            name = type(callback).__name__
            counts[name] += 1
            yield name if counts[name] == 1 else f"{name} {counts[name]}", callback


# Called after each step with its record and the optimizer; True ends the run.
StepFunction: TypeAlias = Callable[[Mapping[str, float], Optimizer], object]


class _EachStep(Callback):
    """A function as a callback."""

    def __init__(self, function: StepFunction) -> None:
        self._function = function

    def on_step_end(self, record: Record, optimizer: Optimizer) -> object:
        return self._function(record, optimizer)


def _as_callback(callback: object) -> Callback:
    if isinstance(callback, Callback):
        return callback
    if not callable(callback):
        raise InputError(
            f"a callback must be a Callback or a function of a record and an optimizer, got "
            f"{callback!r:.80}."
        )
    return _EachStep(callback)
