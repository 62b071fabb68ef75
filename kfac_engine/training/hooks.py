"""Defines the hooks that ``fit`` calls during a run."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import MappingProxyType, TracebackType
from typing import TypeAlias

import numpy as np

from kfac_engine.arguments import check_list
from kfac_engine.errors import InputError, suggestion
from kfac_engine.printable import quoted
from kfac_engine.training.checkpoint import Numbers, SavedState, saved, set_numbers
from kfac_engine.training.history import Record, check_entries
from kfac_engine.training.optimizer import Optimizer
from kfac_engine.training.weights import Weights


class Callback:
    """Base of the callbacks of ``fit``; a subclass overrides the hooks that it needs.

    ``on_step_end`` and ``on_epoch_end`` end the run if they return True.

    Attributes:
        metric: Name, as in records, of a metric that validations must compute; None for any.
        on_every_rank: Whether each of several processes calls the hooks; False if only the first
            process does. All processes must call a callback that evaluates the engine or replaces
            weights. Only the first process should call a callback that writes a file.
    """

    metric: str | None = None
    on_every_rank = True
    # Name of the state in checkpoints; by default that of the class.
    part: str | None = None
    # The numbers of the state, if attributes of the callback have them.
    _table: Numbers = MappingProxyType({})

    def on_run_start(self, optimizer: Optimizer, records: Sequence[Record]) -> object:
        """Begin a run.

        Args:
            optimizer: The optimizer with its engine, after the checkpoint of a resumed run.
            records: The records of the part of the run before; empty for a new run.

        Returns:
            True to end the run before its first step.
        """

    def on_step_end(self, record: Record, optimizer: Optimizer) -> object:
        """Receive the record of a step, to which it may add numbers.

        Args:
            record: The record. In the last step of an epoch it has the metrics of the validation.
                The validation of a run that ends inside an epoch comes after this call.
                Numbers of NumPy become numbers of Python, and None becomes NaN. The run ends with
                an error if an added entry is not a number, or if an entry of the step is removed.
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

    def evaluated_weights(self, record: Record, optimizer: Optimizer) -> Weights | None:
        """Return weights for validations and for the end of the run, or None.

        Args:
            record: The record of the latest step.
            optimizer: The optimizer, after the step.

        Returns:
            The weights; None for the weights of the optimizer.
        """
        del record, optimizer
        return None

    def on_validation_end(self, record: Record, optimizer: Optimizer) -> None:
        """Receive the record of a step with the metrics of its validation.

        The call precedes ``on_step_end`` at the end of an epoch, and follows it, and the last
        checkpoint, at the end of a run inside an epoch.

        Args:
            record: The record, to which numbers may be added.
            optimizer: The optimizer. Its engine has the weights that were evaluated.
        """

    def on_record(self, record: Record, optimizer: Optimizer) -> None:
        """Receive the complete record of a step, after all other hooks of the step.

        Args:
            record: The record, with the metrics of its validation and the numbers of all callbacks.
            optimizer: The optimizer.
        """

    def final_weights(self, optimizer: Optimizer) -> Weights | None:
        """Return the weights that the engine receives at the end of the run.

        Args:
            optimizer: The optimizer, after the last step.

        Returns:
            The weights; None for the weights that a validation would evaluate.
        """
        del optimizer
        return None

    def on_run_end(self, optimizer: Optimizer, records: Sequence[Record]) -> None:
        """Complete a run that reached its end, after its last checkpoint.

        Args:
            optimizer: The optimizer with its engine.
            records: All records of the run.
        """

    def state(self, optimizer: Optimizer) -> SavedState:
        """Return the state that checkpoints store.

        A resumed run calls it before ``restore``. The names of numbers and arrays, the types and
        the shapes must then equal those in the checkpoint.

        Args:
            optimizer: The optimizer with its engine.
        """
        del optimizer
        return saved(self, self._table)

    def restore(self, state: SavedState) -> None:
        """Restore the state of a checkpoint, before ``on_run_start``."""
        set_numbers(self, self._table, state.numbers)

    def close(self) -> None:
        """Release files and threads; called once, also after an error or a signal."""


class Hooks(Callback):
    """All callbacks of a run as one, which closes them when its context ends.

    Args:
        callbacks: Callbacks, or functions that are called after each step with its record and the
            optimizer.

    Raises:
        InputError: An entry is neither, or two of them replace the same weights.
    """

    def __init__(self, callbacks: Sequence["Callback | StepFunction"]) -> None:
        entries = check_list("callbacks", callbacks, "[kfac_engine.EarlyStop()]")
        self._callbacks = self._every_callback = [_as_callback(callback) for callback in entries]
        self._closing = ExitStack()
        for hook in ("evaluated_weights", "final_weights"):
            names = [type(c).__name__ for c in self._callbacks if _overrides(c, hook)]
            if len(names) > 1:
                raise InputError(
                    f"the callbacks {' and '.join(names)} replace the same weights; give one of "
                    f"them."
                )

    def add(self, callbacks: Sequence[Callback], rank: int) -> None:
        """Add callbacks, and call only those of a process; ``states`` has all of them."""
        self._every_callback = [*self._every_callback, *callbacks]
        self._callbacks = [c for c in self._every_callback if rank == 0 or c.on_every_rank]

    def check_metrics(self, names: Collection[str]) -> None:
        """Refuse a callback whose metric no validation measures.

        ``names`` are the metrics of the validation in records; there are none without a validation.
        """
        for callback in self._callbacks:
            if callback.metric is not None and callback.metric not in names:
                measured = quoted(names) or "no validation"
                near = suggestion(callback.metric, names)
                raise InputError(
                    f"{type(callback).__name__} reads the metric '{callback.metric}'{near}, and "
                    f"the run has {measured}; give validation=… and metrics=[…] with this metric."
                )

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
        return _any_true([c.on_run_start(optimizer, records) for c in self._callbacks])

    def on_step_end(self, record: Record, optimizer: Optimizer) -> bool:
        """Return whether a callback ends the run; every callback receives the record."""
        return self._each(lambda c: c.on_step_end(record, optimizer), record)

    def on_epoch_end(self, record: Record, optimizer: Optimizer) -> bool:
        """Return whether a callback ends the run; every callback receives the record."""
        return self._each(lambda c: c.on_epoch_end(record, optimizer), record)

    @contextmanager
    def evaluating(self, record: Record, optimizer: Optimizer) -> Iterator[None]:
        """Return a context in which the engine has the weights to evaluate."""
        weights = self._evaluated_weights(record, optimizer)
        if weights is None:
            yield
        else:
            with weights.applied(optimizer.engine):
                yield

    def on_validation_end(self, record: Record, optimizer: Optimizer) -> None:
        """Pass on the record of a validation."""
        self._each(lambda c: c.on_validation_end(record, optimizer), record)

    def on_record(self, record: Record, optimizer: Optimizer) -> None:
        """Pass on a complete record."""
        self._each(lambda c: c.on_record(record, optimizer), record)

    def on_run_end(self, optimizer: Optimizer, records: Sequence[Record]) -> None:
        """Replace the weights, and complete a run."""
        finals = (c.final_weights(optimizer) for c in self._callbacks)
        weights = next((final for final in finals if final is not None), None)
        if weights is None and records:
            weights = self._evaluated_weights(records[-1], optimizer)
        if weights is not None:
            weights.apply(optimizer.engine)
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

    def _each(self, call: Callable[[Callback], object], record: Record) -> bool:
        """Return whether a hook ends the run; the record is checked after each callback."""
        answers = []
        for callback in self._callbacks:
            before = dict(record)
            answers.append(call(callback))
            check_entries(record, before, _name(callback))
        return _any_true(answers)

    def _evaluated_weights(self, record: Record, optimizer: Optimizer) -> Weights | None:
        answers = (c.evaluated_weights(record, optimizer) for c in self._callbacks)
        return next((weights for weights in answers if weights is not None), None)

    def _named(self) -> Iterator[tuple[str, Callback]]:
        counts = Counter[str]()
        for callback in self._every_callback:
            name = callback.part or type(callback).__name__
            counts[name] += 1
            yield name if counts[name] == 1 else f"{name} {counts[name]}", callback


# Called after each step with its record and the optimizer; True ends the run.
StepFunction: TypeAlias = Callable[[Record, Optimizer], object]


class _EachStep(Callback):
    """A function as a callback."""

    def __init__(self, function: StepFunction) -> None:
        self.function = function

    def on_step_end(self, record: Record, optimizer: Optimizer) -> object:
        return self.function(record, optimizer)


def _any_true(answers: Sequence[object]) -> bool:
    """Return whether an answer is True, of Python or of NumPy."""
    return any(isinstance(answer, bool | np.bool_) and bool(answer) for answer in answers)


def _name(callback: Callback) -> str:
    function = getattr(callback, "function", type(callback))
    return str(getattr(function, "__name__", type(function).__name__))


def _overrides(callback: Callback, hook: str) -> bool:
    return getattr(type(callback), hook) is not getattr(Callback, hook)


def _as_callback(callback: object) -> Callback:
    if isinstance(callback, Callback):
        return callback
    if isinstance(callback, type) and issubclass(callback, Callback):
        raise InputError(
            f"a callback must be an object: give {callback.__name__}(…), not the class itself."
        )
    if not callable(callback):
        raise InputError(
            f"a callback must be a Callback or a function of a record and an optimizer, got "
            f"{callback!r:.80}."
        )
    return _EachStep(callback)
