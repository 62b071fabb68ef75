"""The first few examples of a user's batch: enough to tell shapes, and they cost nothing to run."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from kfac_engine._types import Array
from kfac_engine.errors import ShapeError, UnknownNameError
from kfac_engine.graph.structure import Input

# Symbols that exporters and people write for the batch; others begin with "batch".
_BATCH_SYMBOLS = frozenset({"n", "b", "bs"})

# Few, and a length that few other axes have.
_FEW = 5


def says_batch(side: object) -> bool:
    """Whether the declared side of an input is called like a batch."""
    symbol = side.lower().replace("_", "") if isinstance(side, str) else ""
    return symbol in _BATCH_SYMBOLS or symbol.startswith("batch")


def axis_of(name: str, axis: int, rank: int) -> int:
    """An axis that the user names as that of the examples, counted from the front.

    Args:
        name: The input.
        axis: Negative ones are counted from the end.
        rank: Axes of the input.

    Returns:
        The axis.

    Raises:
        ShapeError: The input has no such axis.
    """
    if not -rank <= axis < rank:
        raise ShapeError(
            f"batch_axes gives axis {axis} for input '{name}', which has {rank} "
            f"{'axis' if rank == 1 else 'axes'}."
        )
    return axis % rank


def with_batch_axes(inputs: Sequence[Input], axes: Mapping[str, int] | None) -> tuple[Input, ...]:
    """The inputs of a model, the open axes that the user names being called a batch.

    Args:
        inputs: As declared.
        axes: Input name to the axis of its examples.

    Returns:
        The inputs.

    Raises:
        UnknownNameError: A name is not an input of the model.
        ShapeError: An input has no such axis.
    """
    axes = axes or {}
    known = [entry.name for entry in inputs]
    for name in axes:
        if name not in known:
            raise UnknownNameError(
                f"batch_axes names '{name}', which is no input of the model; its inputs are: "
                f"{', '.join(known)}."
            )
    result = []
    for entry in inputs:
        if entry.name in axes and entry.shape is not None:
            axis, sides = axis_of(entry.name, axes[entry.name], len(entry.shape)), [*entry.shape]
            sides[axis] = sides[axis] if isinstance(sides[axis], int) else "batch"
            entry = replace(entry, shape=tuple(sides))
        result.append(entry)
    return tuple(result)


def first_examples(declared: Sequence[Input], given: Mapping[str, Array]) -> dict[str, Array]:
    """The inputs with a few examples each, where the declaration says which axis holds them.

    Args:
        declared: The inputs of the model.
        given: Input name to array, checked.

    Returns:
        Views of the arrays; the whole ones unless all inputs with an open axis have one that is
        called like a batch, and as many examples. An axis without a name may be that of time.
    """
    opened = [entry for entry in declared if any(not isinstance(s, int) for s in entry.shape or ())]
    places = [
        (entry.name, axis)
        for entry in opened
        for axis, side in enumerate(entry.shape or ())
        if says_batch(side)
    ]
    axes, sizes = dict(places), {given[name].shape[axis] for name, axis in places}
    unknown = any(entry.shape is None for entry in declared)
    if unknown or not len(axes) == len(places) == len(opened) or len(sizes) != 1:
        return dict(given)
    return {
        name: array[(slice(None),) * axes[name] + (slice(_FEW),)] if name in axes else array
        for name, array in given.items()
    }
