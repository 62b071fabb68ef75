"""Converts arrays, files, folders and iterables of batches to batches.

Every function that takes data reads them here. Data are

- all examples: ``(inputs, targets)`` or ``(inputs, targets, weights)``, or arrays by name with
  ``targets`` and, optionally, ``weights``;
- a path: an ``.npz`` file with arrays by name, or a folder of shards;
- batches: an iterable, whose entries are such tuples or arrays by name; for a run also a function
  that returns the batch of a step.

Inputs are arrays by input name, or the array of the only input; a path may stand in the place of an
array, of the inputs and of the targets. Where targets are not needed, the inputs alone are data, as
well.
"""

import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count, islice
from math import ceil
from typing import Any, TypeAlias, TypeGuard

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend.namespace import as_array
from kfac_engine.datasets.examples import Batch, ExampleAxes
from kfac_engine.datasets.files import is_path, opened_inputs, opened_targets, separated, shards_of
from kfac_engine.datasets.shards import WHOLE, Examples, OrderedBatches, ShardFile, Share
from kfac_engine.errors import InputError
from kfac_engine.losses.observed import Targets, Weighted, weights_gathered
from kfac_engine.system.arrays import map_arrays
from kfac_engine.system.reading import names_folder

Path: TypeAlias = str | os.PathLike[str]
Data: TypeAlias = Path | Mapping[str, Any] | tuple[Any, Targets | Path] | Array | Iterable[Any]

# Examples in a batch of a file.
FILE_BATCH = 128


def batches_of(
    data: Data, axes: ExampleAxes, *, passes: int = 1, labeled: bool = True, size: int | None = None
) -> Iterable[Batch]:
    """Return data as batches of inputs by name and targets, in the order of the examples.

    Args:
        data: Data in any form.
        axes: The axes of the examples.
        passes: Number of times that the batches are read.
        labeled: Whether targets are needed; if not, the inputs alone are data, as well.
        size: Examples in a batch of arrays, a file or a folder. By default arrays in memory are one
            batch, and files are read in batches of 128. A model that does not run on a part of a
            batch reads all examples at once.

    Returns:
        The batches; entries of an iterable are checked when they are read.

    Raises:
        InputError: The data have another form, or are an iterator and read more than once.
    """
    if is_folder(data):
        shards = shards_of(data, axes, labeled=labeled)
        return OrderedBatches(Examples(shards, axes), size or FILE_BATCH)
    whole = _whole(data, axes, labeled)
    if whole is None:
        return GivenBatches(data, axes, passes=passes, labeled=labeled)
    size = size or (FILE_BATCH if _names_a_file(data) else None)
    if size is None or (axes.obstacle and not axes.fixed_size):
        return [whole]
    return OrderedBatches(_examples(whole, axes), size)


def whole_batch(data: Data, axes: ExampleAxes, *, labeled: bool = True) -> Batch:
    """Return all examples of data as one batch; the arguments are as for ``batches_of``.

    ``InputError`` is raised as by ``batches_of``, or if there is no batch.
    """
    whole = None if is_folder(data) else _whole(data, axes, labeled)
    if whole is not None:
        return whole
    batches = list(batches_of(data, axes, labeled=labeled))
    if not batches:
        raise InputError("the data have no examples; give at least one batch.")
    return batches[0] if len(batches) == 1 else axes.joined(batches)


def examples_of(data: Data, axes: ExampleAxes) -> Examples | None:
    """Return data with targets as examples that can be selected; None for batches."""
    if is_folder(data):
        return Examples(shards_of(data, axes), axes)
    whole = _whole(data, axes, labeled=True)
    return None if whole is None else _examples(whole, axes)


class FromSteps:
    """The batches that a function of a step's number, from 0, returns; they have no end."""

    def __init__(self, function: Callable[[int], Any]) -> None:
        self._function = function

    def __iter__(self) -> Iterator[Any]:
        """Return the batches from the first step on."""
        return map(self._function, count())


def as_batches(data: Data, axes: ExampleAxes) -> Data:
    """Return data as batches where arrays are one batch, or a function returns them.

    The examples of several sets are one batch.
    """
    if callable(data) and not isinstance(data, Iterable):
        return FromSteps(data)
    whole = _whole(data, axes, labeled=True) if axes.in_sets and not is_folder(data) else None
    return data if whole is None else [whole]


class GivenBatches:
    """The batches of an iterable, in its order.

    Args:
        data: A list, or another object that can be iterated again. If it has a method
            ``set_epoch``, each epoch begins with a call of it.
        axes: The axes of the examples.
        share: The examples of a batch that this process has.
        passes: Number of times that the batches are read; 0 for an unknown number.
        labeled: As for ``batches_of``.
        parts: Number of consecutive batches that ``steps`` takes as the parts of one; the last
            ones of an epoch may be fewer.

    Raises:
        InputError: The object is not an iterable, or is read again although it is an iterator.
    """

    def __init__(
        self,
        data: object,
        axes: ExampleAxes,
        share: Share = WHOLE,
        *,
        passes: int = 0,
        labeled: bool = True,
        parts: int = 1,
    ) -> None:
        if not isinstance(data, Iterable) or isinstance(data, bytes):
            raise InputError(
                f"data must be a pair (inputs, targets), arrays by name, a path, or an iterable of "
                f"batches, got {type(data).__name__}."
            )
        labeled = labeled and axes.labeled
        if labeled and is_array(data):
            raise InputError(
                "the data have no targets; give a pair (inputs, targets), or arrays by name with "
                "'targets'."
            )
        if passes != 1 and isinstance(data, Iterator):
            raise InputError(
                f"data is an iterator, which is read "
                f"{f'{passes} times' if passes else 'in each epoch'}, but {type(data).__name__} "
                f"cannot be read again; give a list, or an object whose __iter__ starts anew."
            )
        self._data, self._axes, self._share, self._labeled = data, axes, share, labeled
        self._parts, length = parts, _length(data)
        self.per_epoch = None if length is None else ceil(length / parts)

    def __iter__(self) -> Iterator[Batch]:
        """Return the batches of which this process has an example."""
        parts = (self._share.of_batch(batch, self._axes) for batch in self._batches(0))
        return (part for part in parts if self._share.size == 1 or self._axes.count(part[0]))

    def steps(self, number: int, start: int = 0) -> Iterator[list[Batch]]:
        """Return the parts of the batch of each step of an epoch, from the step ``start`` on.

        ``InputError`` is raised if an entry is not a batch, or has fewer examples than there are
        processes.
        """
        batches = self._batches(number, start * self._parts)
        while parts := [self._shared(batch) for batch in islice(batches, self._parts)]:
            yield parts

    def _shared(self, batch: Batch) -> Batch:
        if self._share.size > 1:
            self._share.require(self._axes.check(*batch))
        return self._share.of_batch(batch, self._axes)

    def _batches(self, number: int, start: int = 0) -> Iterator[Batch]:
        """Return the batches of all processes."""
        set_epoch = getattr(self._data, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(number)
        entries = islice(self._data, start, None)
        for index, entry in enumerate(entries, start + 1):
            if isinstance(entry, tuple | list) and len(entry) in (2, 3):
                entry = tuple(entry)
            pair = isinstance(entry, tuple) and len(entry) == 2
            batch = _whole(entry, self._axes, self._labeled, pair=pair)
            if batch is None:
                raise InputError(
                    f"each batch must be a pair (inputs, targets), also with weights after them, "
                    f"or arrays by name"
                    f"{' with targets' if self._labeled else ''}; batch {index} is "
                    f"{type(entry).__name__}. Give examples as an array, not as a list."
                )
            yield batch


# -- private ---------------------------------------------------------------------------------------


def is_folder(data: object) -> TypeGuard[Path]:
    """Return whether data are the path of a folder."""
    return is_path(data) and names_folder(pathlib.Path(data))


def refuse_separate_targets(value: object, call: str) -> None:
    """Refuse an array of targets as a second argument; the InputError shows a right ``call``."""
    if is_array(value):
        raise InputError(f"inputs and targets are one argument: {call}.")


def is_array(value: object) -> bool:
    """Return whether a value is an array of any library."""
    return hasattr(value, "__array__") or hasattr(value, "__dlpack__")


def _whole(data: Any, axes: ExampleAxes, labeled: bool, pair: bool = False) -> Batch | None:
    """Return inputs by name and targets; None if data are neither arrays nor a file.

    Data have any form but a folder. With ``pair``, they are known to be a pair.
    """
    inputs, targets, labeled = data, None, labeled and axes.labeled
    if _is_triple(data, axes, labeled):
        inputs, targets, weights = data
        targets = Weighted(targets, weights)
    elif pair or _is_pair(data, axes, labeled):
        inputs, targets = data
    elif is_path(data):
        arrays = map_arrays(pathlib.Path(data))
        if labeled or None not in arrays:
            inputs, targets = separated(data, arrays, axes, labeled=labeled)
    elif isinstance(data, Mapping):
        inputs, targets = axes.separated(data, labeled=labeled)
    elif (labeled and not axes.has_default_targets) or not is_array(data):
        return None
    named = {name: _opened(array) for name, array in axes.named(_opened(inputs)).items()}
    targets = _targets(targets, axes)
    return named, axes.with_default_targets(named, targets) if labeled else targets


def _is_pair(data: object, axes: ExampleAxes, labeled: bool) -> bool:
    """Return whether data are inputs and targets, not an iterable of batches.

    ``InputError`` is raised if targets are not needed and a list of two arrays may be either.
    """
    if not isinstance(data, tuple | list) or len(data) != 2 or isinstance(data[0], tuple | list):
        return False
    are_batches = all(isinstance(x, Mapping) and axes.inputs.keys() <= x.keys() for x in data)
    if isinstance(data, list) and not labeled and all(map(is_array, data)):
        first, second = (np.shape(array) for array in data)
        axis = next(iter(axes.inputs.values()), 0)
        if first[:axis] + first[axis + 1 :] == second[:axis] + second[axis + 1 :]:
            raise InputError(
                f"a list of two arrays of the shapes {first} and {second} may be inputs and "
                f"targets or two batches; give inputs and targets as a tuple, batches as "
                f"dictionaries of the inputs by name."
            )
    return not are_batches


def _is_triple(data: object, axes: ExampleAxes, labeled: bool) -> bool:
    """Return whether data are inputs, targets and weights, not an iterable of batches."""
    if not isinstance(data, tuple) or len(data) != 3 or isinstance(data[0], tuple | list):
        return False
    if all(isinstance(x, Mapping) and axes.inputs.keys() <= x.keys() for x in data):
        return False
    # Three arrays in which examples have the same shape are inputs.
    alike = all(map(is_array, data)) and len({np.shape(array)[1:] for array in data}) == 1
    return labeled or not alike


def _names_a_file(data: Any) -> bool:
    """Return whether data are a path, or have one in the place of arrays."""
    if isinstance(data, Mapping):
        return any(map(_names_a_file, data.values()))
    return is_path(data) or (isinstance(data, tuple | list) and any(map(_names_a_file, data)))


def _targets(targets: Any, axes: ExampleAxes) -> Targets:
    targets = weights_gathered(targets)
    if isinstance(targets, Weighted):
        return Weighted(
            _targets(targets.targets, axes),  # type: ignore[arg-type] # not weighted twice
            _targets(targets.weights, axes),  # type: ignore[arg-type] # not weighted twice
        )
    if is_path(targets):
        return opened_targets(targets, axes.outputs)
    if isinstance(targets, Mapping):
        return {name: _opened(array) for name, array in targets.items()}
    return targets  # type: ignore[no-any-return] # the losses check it


def _opened(value: Any) -> Any:
    """Return the contents of a file in place of its path."""
    return opened_inputs(value) if is_path(value) else value


def _examples(batch: Batch, axes: ExampleAxes) -> Examples:
    """Return the examples of a batch, as arrays of NumPy or CuPy."""
    inputs = {name: as_array(array) for name, array in batch[0].items()}
    targets = converted(batch[1])
    return Examples([ShardFile(axes.check(inputs, targets), lambda: (inputs, targets))], axes)


def converted(targets: Targets) -> Targets:
    """Return targets of any library as arrays of NumPy or CuPy."""
    if isinstance(targets, Weighted):
        return Weighted(converted(targets.targets), converted(targets.weights))  # type: ignore[arg-type] # not weighted twice
    if isinstance(targets, Mapping):
        return {name: as_array(array) for name, array in targets.items()}
    return None if targets is None else as_array(targets)


def _length(data: object) -> int | None:
    """Return the number of batches; loaders of a stream have no length, or raise a TypeError."""
    try:
        return len(data)  # type: ignore[arg-type] # may have none
    except TypeError:
        return None
