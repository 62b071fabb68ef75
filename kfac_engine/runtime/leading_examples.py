"""Returns declared batch axes, and the first examples of a batch for sample runs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from kfac_engine._types import Array
from kfac_engine.errors import ShapeError, UnknownNameError
from kfac_engine.graph.structure import Input
from kfac_engine.suggestions import suggestion

# Common symbols for the batch axis, besides those that begin with "batch".
_BATCH_SYMBOLS = frozenset({"n", "b", "bs"})

# Number of examples: small, and different from the lengths of most other axes.
_FEW = 5


def says_batch(size: object) -> bool:
    """Return whether the declared size of an axis is a symbol for the batch."""
    symbol = size.lower().replace("_", "") if isinstance(size, str) else ""
    return symbol in _BATCH_SYMBOLS or symbol.startswith("batch")


def axis_of(name: str, axis: int, rank: int) -> int:
    """Return the nonnegative index of a batch axis.

    Args:
        name: Name of the input.
        axis: Index of the axis; a negative index counts from the end.
        rank: Number of axes of the input.

    Returns:
        Index of the axis, from zero.

    Raises:
        ShapeError: The input has no such axis.
    """
    if not -rank <= axis < rank:
        raise ShapeError(
            f"batch_axes names axis {axis} of input '{name}', which has {rank} "
            f"{'axis' if rank == 1 else 'axes'}."
        )
    return axis % rank


def with_batch_axes(inputs: Sequence[Input], axes: Mapping[str, int] | None) -> tuple[Input, ...]:
    """Return the declared inputs with the batch axes of the user.

    Args:
        inputs: Declared inputs of the model.
        axes: Map from an input to the axis of the examples.

    Returns:
        The inputs, in which the axes of ``axes`` without a size have the symbol ``batch``.

    Raises:
        UnknownNameError: A name is not an input of the model.
        ShapeError: An input has no such axis.
    """
    axes = axes or {}
    known = [entry.name for entry in inputs]
    for name in axes:
        if name not in known:
            raise UnknownNameError(
                f"batch_axes names '{name}'{suggestion(name, known)}, which is not an input of the "
                f"model; its inputs are: {', '.join(known)}."
            )
    result = []
    for entry in inputs:
        if entry.name in axes and entry.shape is not None:
            axis, shape = axis_of(entry.name, axes[entry.name], len(entry.shape)), [*entry.shape]
            shape[axis] = shape[axis] if isinstance(shape[axis], int) else "batch"
            entry = replace(entry, shape=tuple(shape))
        result.append(entry)
    return tuple(result)


def first_examples(declared: Sequence[Input], inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Return the first examples of a batch if the model declares the batch axes.

    Args:
        declared: Declared inputs of the model.
        inputs: Input name to checked array.

    Returns:
        Views of the first examples. The whole arrays if an input with an axis without size has no
        symbol for the batch, because this axis may be that of time, or if the numbers of examples
        differ.
    """
    opened = [entry for entry in declared if any(not isinstance(s, int) for s in entry.shape or ())]
    places = [
        (entry.name, axis)
        for entry in opened
        for axis, size in enumerate(entry.shape or ())
        if says_batch(size)
    ]
    axes, sizes = dict(places), {inputs[name].shape[axis] for name, axis in places}
    unknown = any(entry.shape is None for entry in declared)
    if unknown or not len(axes) == len(places) == len(opened) or len(sizes) != 1:
        return dict(inputs)
    return {
        name: array[(slice(None),) * axes[name] + (slice(_FEW),)] if name in axes else array
        for name, array in inputs.items()
    }
