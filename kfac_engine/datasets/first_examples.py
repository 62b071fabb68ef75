"""Returns the first examples of data, for sample runs of models with open sizes.

The axes of the examples are known only after the sample run. Here they are those that the caller
or the file names, or the first ones.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import TypeAlias

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend.namespace import as_array
from kfac_engine.datasets.examples import ExampleAxes
from kfac_engine.datasets.files import files_of
from kfac_engine.datasets.forms import Data, GivenBatches, batches_of
from kfac_engine.errors import InputError, ShapeError
from kfac_engine.graph.load import ModelSource, declared_values
from kfac_engine.graph.structure import Input
from kfac_engine.losses.observed import Targets
from kfac_engine.runtime.batch_axis import Batch
from kfac_engine.runtime.example_axis import ExampleAxis, axis_of, says_batch

# Examples of a sample, if the file declares no number of them.
_FEW = 8

_Pair: TypeAlias = tuple[Mapping[str, Array], Targets]


def with_first_examples(
    model: ModelSource,
    data: Data,
    axes: object = None,
    *,
    labeled: bool = True,
    passes: int = 0,
    divided: bool = True,
    size: int | None = None,
) -> tuple[Data, dict[str, Array] | None]:
    """Return data, and the inputs of their first examples for ``sample_inputs`` of an engine.

    Args:
        model: The model.
        data: Data as for ``fit``.
        axes: The option ``batch_axes``, unchecked.
        labeled: As for ``batches_of``.
        passes: As for ``GivenBatches``. Only an iterator that is read once is begun; the data that
            are returned have its first batch, too.
        divided: Whether arrays in memory are divided into batches; if not, they are one batch.
        size: Number of examples that the user names; without it, at most eight are returned, and
            only for a file that leaves more than their number to the data.

    Returns:
        The data. The inputs by name: the first examples, or the first batch if its examples lie on
        other axes than presumed. None if they are not needed, and for data that are wrong, which
        whoever reads them afterwards refuses.
    """
    declared, outputs = declared_values(model)
    piped = not all(path.is_file() or path.is_dir() for path in files_of(data))
    if piped or (isinstance(data, Iterator) and passes != 1):
        return data, None
    try:
        places = _presumed(declared, axes if isinstance(axes, Mapping) else {})
        if not (size or any(_is_open(entry, places.get(entry.name)) for entry in declared)):
            return data, None
        first = data
        if isinstance(data, Iterator):
            first = list(islice(data, 1))
            data = chain(first, data)
        known = Batch(size or _FEW, places, dict.fromkeys(outputs, ExampleAxis(0, 1)))
        presumed = ExampleAxes(known, outputs)
        batches, first_ones = _first_batch(first, presumed, labeled=labeled)
        for inputs, targets in first_ones:
            whole = isinstance(batches, GivenBatches) or not divided
            pairs = any(_has_pairs(entry, places, inputs) for entry in declared)
            # Some of the graphs, without their nodes, do not fit the model.
            others = (entry.shape or (None,) for entry in declared if entry.name not in places)
            joint = whole and any(not isinstance(size, int) for shape in others for size in shape)
            if _fit(presumed, inputs, targets) and not (pairs or joint):
                count = min(_declared_counts(declared, places), default=size or _FEW)
                few, _ = presumed.part(inputs, None, slice(count))
                return data, {name: as_array(array).copy() for name, array in few.items()}
            if whole or pairs:
                return data, dict(inputs)
    except InputError:
        pass
    return data, None


def _first_batch(
    data: Data, axes: ExampleAxes, *, labeled: bool
) -> tuple[Iterable[_Pair], list[_Pair]]:
    """Return all batches, and a list with the first batch.

    If the file computes its loss, the batches may lack targets. An InputError says that the data
    are wrong.
    """
    try:
        batches = batches_of(data, axes, labeled=labeled)
        return batches, list(islice(batches, 1))
    except InputError:
        if not labeled:
            raise
        return _first_batch(data, axes, labeled=False)


def _fit(axes: ExampleAxes, inputs: Mapping[str, Array], targets: Targets) -> bool:
    """Return whether the inputs and targets of a batch have equally many examples."""
    try:
        axes.check(inputs, targets)
    except ShapeError:
        return False
    return True


def _has_pairs(entry: Input, axes: Mapping[str, int], inputs: Mapping[str, Array]) -> bool:
    """Return whether a second axis of an input is as long as the examples' axis.

    An adjacency matrix has such an axis, and some of its rows alone do not fit the model.
    """
    lengths = np.shape(inputs[entry.name]) if entry.name in inputs else ()
    axis = axes.get(entry.name, len(lengths))
    if axis >= len(lengths):
        return False
    sizes = (None,) * len(lengths) if entry.shape is None else entry.shape
    pairs = zip(lengths, sizes, strict=False)
    return any(
        length == lengths[axis] and not isinstance(size, int)
        for other, (length, size) in enumerate(pairs)
        if other != axis
    )


def _presumed(declared: Iterable[Input], axes: Mapping[str, object]) -> dict[str, int]:
    """Return the axes of the examples in the inputs.

    An axis that the caller names comes first. The others are the axes with a symbol for the batch;
    if there are none, the first axes without a size; if there are none, all first axes.
    """
    shapes = {entry.name: (None,) if entry.shape is None else entry.shape for entry in declared}
    named = {n: axis for n, shape in shapes.items() for axis in _batch_axis(shape)}
    opened = {n: 0 for n, shape in shapes.items() if not isinstance([*shape, 1][0], int)}
    from_caller = {
        n: axis_of(n, axis, len(shapes[n]))
        for n, axis in axes.items()
        if n in shapes and isinstance(axis, int)
    }
    return {**(named or opened or {n: 0 for n, shape in shapes.items() if shape}), **from_caller}


def _batch_axis(shape: Sequence[int | str | None]) -> list[int]:
    """Return the first axis with a symbol for the batch; empty for none."""
    return [axis for axis, size in enumerate(shape) if says_batch(size)][:1]


def _is_open(entry: Input, place: int | None) -> bool:
    """Return whether data determine more of an input than the number of examples."""
    if entry.shape is None or entry.is_setting:
        return True
    return any(not isinstance(size, int) for i, size in enumerate(entry.shape) if i != place)


def _declared_counts(declared: Iterable[Input], places: Mapping[str, int]) -> Iterator[int]:
    """Yield the numbers of examples that the file declares."""
    for entry in declared:
        size = entry.shape[places[entry.name]] if entry.shape and entry.name in places else None
        if isinstance(size, int):
            yield size
