"""The batches of an epoch: of shuffled arrays, or of an iterable of the user."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Protocol, TypeAlias, TypeGuard

import numpy as np

from kfac_engine.backend.namespace import as_array
from kfac_engine.errors import InputError
from kfac_engine.losses.objective import Targets
from kfac_engine.training.examples import Batch, ExampleAxes

# Arrays of all examples, or batches: pairs of inputs and targets.
Data: TypeAlias = tuple[Any, Targets] | Iterable[tuple[Any, Targets]]


class Batches(Protocol):
    """A source of batches.

    Attributes:
        per_epoch: Number of batches in an epoch; None if it is not known.
    """

    per_epoch: int | None

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """Return the batches of an epoch from the batch ``start`` on; both count from 0."""


class ShuffledArrays:
    """Batches of arrays in an order that depends on the seed and the epoch only.

    Every epoch leaves out the last examples of its order that do not fill a batch.

    Args:
        inputs: Input name to array of all examples, or the array of the only input.
        targets: Targets of all examples.
        axes: The axes of the examples.
        batch_size: Examples in a batch; an array of fewer examples is one batch.
        seed: Seed of the orders.
    """

    def __init__(
        self, inputs: object, targets: Targets, axes: ExampleAxes, batch_size: int, seed: int
    ) -> None:
        _check_divisible(axes)
        self._axes, self._seed = axes, seed
        self._inputs, self._targets = arrays_of(inputs, targets, axes)
        self._count = axes.check(self._inputs, self._targets)
        if not self._count:
            raise InputError("the data have no examples.")
        self._size = min(batch_size, self._count)
        self.per_epoch: int | None = self._count // self._size

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """Return the batches of an epoch from the batch ``start`` on."""
        order = np.random.default_rng([self._seed, number]).permutation(self._count)
        for first in range(start * self._size, self._count - self._size + 1, self._size):
            yield self._axes.part(self._inputs, self._targets, order[first : first + self._size])


class GivenBatches:
    """The batches of an iterable, in its order in each epoch.

    Args:
        data: A list, or another object that can be iterated again.
        axes: The axes of the examples.
    """

    def __init__(self, data: object, axes: ExampleAxes) -> None:
        if not isinstance(data, Iterable) or isinstance(data, str | bytes | Mapping):
            raise InputError(
                f"data must be a pair (inputs, targets) or an iterable of such pairs, got "
                f"{type(data).__name__}."
            )
        if isinstance(data, Iterator):
            raise InputError(
                "data is an iterator, which a second epoch cannot read again; give a list, or an "
                "object whose __iter__ starts anew."
            )
        self._data, self._axes = data, axes
        length = getattr(data, "__len__", None)
        self.per_epoch: int | None = length() if length else None

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """Return the batches of an epoch from the batch ``start`` on.

        Raises:
            InputError: An entry is not a pair of inputs and targets.
        """
        del number
        for batch in islice(self._data, start, None):
            if not isinstance(batch, tuple | list) or len(batch) != 2:
                raise InputError(
                    f"each batch must be a pair (inputs, targets), got {type(batch).__name__}."
                )
            yield self._axes.named(batch[0]), batch[1]


def batches_of(data: Data, axes: ExampleAxes, batch_size: int, seed: int) -> Batches:
    """Return the source of batches for training data.

    Args:
        data: A pair ``(inputs, targets)`` of arrays, or an iterable of such pairs, one a batch.
        axes: The axes of the examples.
        batch_size: Examples in a batch of arrays.
        seed: Seed of the orders of arrays.

    Returns:
        The source.
    """
    if is_pair_of_arrays(data):
        inputs, targets = data
        return ShuffledArrays(inputs, targets, axes, batch_size, seed)
    return GivenBatches(data, axes)


def validation_batches(data: Data, axes: ExampleAxes, batch_size: int) -> list[Batch]:
    """Return the batches of validation data, in their order.

    Args:
        data: As for ``batches_of``.
        axes: The axes of the examples.
        batch_size: Examples in a batch of arrays; the last batch may have fewer.

    Returns:
        The batches. The parts of arrays are views.
    """
    if not is_pair_of_arrays(data):
        return list(GivenBatches(data, axes).epoch(0))
    inputs, targets = arrays_of(*data, axes)
    if axes.obstacle:
        return [(inputs, targets)]
    count = axes.check(inputs, targets)
    return [
        axes.part(inputs, targets, slice(start, start + batch_size))
        for start in range(0, count, batch_size)
    ]


def is_pair_of_arrays(data: object) -> TypeGuard[tuple[Any, Targets]]:
    """Return whether data are inputs and targets, in place of an iterable of batches."""
    return isinstance(data, tuple) and len(data) == 2 and not isinstance(data[0], tuple | list)


def arrays_of(inputs: object, targets: Targets, axes: ExampleAxes) -> Batch:
    """Return inputs and targets of any library as arrays that can be indexed."""
    named = {name: as_array(array) for name, array in axes.named(inputs).items()}
    if targets is None:
        return named, None
    if isinstance(targets, Mapping):
        return named, {name: as_array(array) for name, array in targets.items()}
    return named, as_array(targets)


def _check_divisible(axes: ExampleAxes) -> None:
    if axes.obstacle:
        raise InputError(
            f"the arrays cannot be cut into batches: {axes.obstacle}; give an iterable of batches."
        )
