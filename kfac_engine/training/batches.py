"""The data of a run: arrays in memory or in files, which are cut into batches, or batches."""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from numbers import Real
from typing import Any, Protocol, TypeAlias, TypeGuard

from kfac_engine._types import Array
from kfac_engine.backend.namespace import as_array
from kfac_engine.errors import InputError
from kfac_engine.losses.objective import Targets
from kfac_engine.training.data_files import is_path, opened_inputs, opened_targets, shards_of
from kfac_engine.training.examples import Batch, ExampleAxes
from kfac_engine.training.shards import (
    WHOLE,
    Examples,
    OrderedBatches,
    Shard,
    Share,
    ShuffledBatches,
    split,
)

# A file or folder; all examples, as inputs and targets or as arrays by name; or batches, each in
# one of these two forms.
Data: TypeAlias = (
    str
    | os.PathLike[str]
    | Mapping[str, Any]
    | tuple[Any, Targets | str | os.PathLike[str]]
    | Iterable[Any]
)


class Batches(Protocol):
    """A source of batches.

    Attributes:
        per_epoch: Number of batches in an epoch; None if it is not known.
    """

    per_epoch: int | None

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """Return the batches of an epoch from the batch ``start`` on; both count from 0."""


class GivenBatches:
    """The batches of an iterable, in its order.

    Args:
        data: A list, or another object that can be iterated again. If it has a method
            ``set_epoch``, each epoch begins with a call of it.
        axes: The axes of the examples.
        share: The examples of a batch that this process has.

    Raises:
        InputError: The object is no iterable, or cannot be iterated again.
    """

    def __init__(self, data: object, axes: ExampleAxes, share: Share = WHOLE) -> None:
        if not isinstance(data, Iterable) or isinstance(data, bytes):
            raise InputError(
                f"data must be a pair (inputs, targets), a path, or an iterable of such pairs, got "
                f"{type(data).__name__}."
            )
        if isinstance(data, Iterator):
            raise InputError(
                "data is an iterator, which a second epoch cannot read again; give a list, or an "
                "object whose __iter__ starts anew."
            )
        self._data, self._axes, self._share = data, axes, share
        self.per_epoch: int | None = _length(data)

    def __iter__(self) -> Iterator[Batch]:
        """Return the batches, without those of which this process has no example."""
        parts = (self._share.of_batch(batch, self._axes) for batch in self._whole(0))
        return (part for part in parts if self._share.size == 1 or self._axes.count(part[0]))

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """Return the batches of an epoch from the batch ``start`` on.

        Raises:
            InputError: An entry is no batch, or has fewer examples than there are processes.
        """
        for batch in self._whole(number, start):
            if self._share.size > 1:
                self._share.require(self._axes.check(*batch))
            yield self._share.of_batch(batch, self._axes)

    def _whole(self, number: int, start: int = 0) -> Iterator[Batch]:
        """Return the batches of all processes."""
        set_epoch = getattr(self._data, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(number)
        for batch in islice(self._data, start, None):
            if isinstance(batch, Mapping):
                yield self._axes.separated(batch)
            elif isinstance(batch, tuple | list) and len(batch) == 2:
                yield self._axes.named(batch[0]), batch[1]
            else:
                raise InputError(
                    f"each batch must be a pair (inputs, targets), or arrays by name with "
                    f"'targets', got {type(batch).__name__}."
                )


@dataclass(frozen=True, slots=True)
class RunData:
    """The data of a run.

    Attributes:
        train: The batches to train on.
        validation: Batches to evaluate, which can be iterated again; None for no validation.
        source: The examples before a split; None for an iterable of batches.
        fraction: Fraction of the examples that is split off for the validation; None for none.
    """

    train: Batches
    validation: Iterable[Batch] | None
    source: Examples | None = None
    fraction: float | None = None

    @property
    def examples(self) -> int | None:
        """Number of examples before a split; None for an iterable of batches."""
        return None if self.source is None else self.source.total

    def contents(self) -> dict[str, str | float | None]:
        """Return texts that are equal for equal data: of ``data`` and of ``validation``.

        Iterables of batches are not read: their texts are equal.
        """
        held_out = self.validation
        if self.fraction is not None:
            return {"data": _contents(self.source), "validation": self.fraction}
        examples = held_out.examples if isinstance(held_out, OrderedBatches) else None
        validation = None if held_out is None else _contents(examples)
        return {"data": _contents(self.source), "validation": validation}


def run_data(
    data: Data,
    validation: Data | float | None,
    axes: ExampleAxes,
    batch_size: int,
    seed: int,
    share: Share = WHOLE,
) -> RunData:
    """Return the batches of a run.

    Args:
        data: Training data.
        validation: Data to evaluate; or a fraction of the examples, which are split off.
        axes: The axes of the examples.
        batch_size: Examples in a batch, where data are not batches already.
        seed: Seed of the orders and of the split.
        share: The examples of each batch that this process has.

    Returns:
        The batches.

    Raises:
        InputError: The data have another form, or do not fit the model.
    """
    if share.size > 1 and axes.obstacle:
        raise InputError(
            f"the batches cannot be divided among {share.size} processes: {axes.obstacle}; call "
            f"optimizer.step with the examples of each process."
        )
    examples = _examples(data, axes)
    if examples is None:
        if isinstance(validation, Real):
            raise InputError(
                "a fraction as validation splits arrays or files; data are batches, which need "
                "validation data of their own."
            )
        held_out_batches = _ordered(validation, axes, batch_size, share)
        return RunData(GivenBatches(data, axes, share), held_out_batches)
    if isinstance(validation, Real):
        used, held_out = _split(examples, float(validation), seed)
        ordered = OrderedBatches(examples, batch_size, held_out, share)
        shuffled = ShuffledBatches(examples, batch_size, seed, used, share)
        return RunData(shuffled, ordered, examples, float(validation))
    shuffled = ShuffledBatches(examples, batch_size, seed, share=share)
    return RunData(shuffled, _ordered(validation, axes, batch_size, share), examples)


def _contents(examples: Examples | None) -> str:
    return "batches" if examples is None else examples.contents()


def _split(examples: Examples, fraction: float, seed: int) -> tuple[list[Array], list[Array]]:
    if not 0 < fraction < 1:
        raise InputError(f"validation as a number must lie between 0 and 1, got {fraction!r}.")
    return split(examples.counts, fraction, seed)


def _ordered(data: Any, axes: ExampleAxes, batch_size: int, share: Share) -> Iterable[Batch] | None:
    """Return the batches of validation data; None for none."""
    if data is None:
        return None
    examples = _examples(data, axes)
    if examples is None:
        return GivenBatches(data, axes, share)
    return OrderedBatches(examples, batch_size, share=share)


def _examples(data: Data, axes: ExampleAxes) -> Examples | None:
    """Return data as examples; None for an iterable of batches."""
    if is_path(data):
        return Examples(shards_of(data, axes), axes)
    if isinstance(data, Mapping):
        inputs, targets = axes.separated(data)
    elif _is_pair(data):
        inputs, targets = data
    else:
        return None
    batch = _named(_opened(inputs), axes), _targets(targets)
    count = axes.check(*batch)
    return Examples([Shard(count, lambda: batch)], axes)


def _is_pair(data: object) -> TypeGuard[tuple[Any, Any]]:
    """Return whether data are inputs and targets, in place of an iterable of batches."""
    return isinstance(data, tuple) and len(data) == 2 and not isinstance(data[0], tuple | list)


def _named(inputs: object, axes: ExampleAxes) -> dict[str, Array]:
    named = axes.named(inputs)
    return {name: as_array(_opened(array)) for name, array in named.items()}


def _targets(targets: Any) -> Targets:
    if is_path(targets):
        return opened_targets(targets)
    if isinstance(targets, Mapping):
        return {name: as_array(_opened(array)) for name, array in targets.items()}
    return None if targets is None else as_array(targets)


def _opened(value: Any) -> Any:
    """Return the contents of a file in place of its path."""
    return opened_inputs(value) if is_path(value) else value


def _length(data: object) -> int | None:
    """Return the number of batches; loaders of a stream have no length, or raise a TypeError."""
    try:
        return len(data)  # type: ignore[arg-type] # may have none
    except TypeError:
        return None
