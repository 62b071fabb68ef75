"""The axes of inputs that may contain the examples, by the sizes and names that a model declares.

Sample runs read the first examples of a batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from kfac_engine._types import Array
from kfac_engine.errors import ShapeError, UnknownNameError, suggestion
from kfac_engine.graph.structure import Fact, Graph, Input

# Common symbols for the batch axis, besides those that begin with "batch".
_BATCH_SYMBOLS = frozenset({"n", "b", "bs"})

# Number of examples: small, and different from the lengths of most other axes.
_FEW = 5


def says_batch(size: object) -> bool:
    """Return whether the declared size of an axis is a symbol for the batch."""
    symbol = size.lower().replace("_", "") if isinstance(size, str) else ""
    return symbol in _BATCH_SYMBOLS or symbol.startswith("batch")


def axis_of(name: str, axis: int, rank: int) -> int:
    """Return the index of a batch axis, counted from zero; ``axis`` may count from the end.

    ``ShapeError`` is raised if the input has no such axis.
    """
    if not -rank <= axis < rank:
        raise ShapeError(
            f"batch_axes names axis {axis} of input '{name}', which has {rank} "
            f"{'axis' if rank == 1 else 'axes'}."
        )
    return axis % rank


def with_batch_axes(inputs: Sequence[Input], axes: Mapping[str, int] | None) -> tuple[Input, ...]:
    """Return the declared inputs with the batch axes of the user.

    An axis in ``axes`` without a size gets the symbol ``batch``. ``UnknownNameError`` is raised if
    a name is not an input of the model, and ``ShapeError`` if an input has no such axis.
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
    """Return the first examples of a batch as views if the model declares the batch axes.

    The whole arrays are returned if an input with an axis without size has no symbol for the batch,
    because this axis may be time, or if the inputs differ in the number of examples.
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


# Map from the name of an input to the index of an axis.
Axes: TypeAlias = Mapping[str, int]


# -- candidates ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Candidate:
    """Possible axes of the examples in the inputs.

    Attributes:
        axes: Map from an input to an axis.
        named: Whether the axes have a symbol for the batch.
        is_open: Whether the file declares no size for the axes.
        is_declared: Whether the file declares the sizes of all axes of all inputs.
    """

    axes: Axes
    named: bool
    is_open: bool
    is_declared: bool = False


def batch_candidates(graph: Graph, facts: Mapping[str, Fact]) -> list[Candidate]:
    """Return candidates for the batch axes, the most likely first.

    The axes of each candidate have equal lengths in the sample run.
    """
    shapes = [(None,) if entry.shape is None else entry.shape for entry in graph.inputs]
    if all(isinstance(size, int) for shape in shapes for size in shape):
        return _declared_candidates(facts, [entry.name for entry in graph.inputs])
    # Axes with one symbol form a candidate. Axes without a size and a symbol form a candidate if
    # they have the same index. A first axis may be the batch axis although its size is declared.
    groups: dict[object, dict[str, int]] = {}
    for entry in graph.inputs:
        shape = entry.shape or (None,) * len(facts[entry.name].shape)
        for axis, size in enumerate(shape):
            if not isinstance(size, int):
                groups.setdefault(size or axis, {}).setdefault(entry.name, axis)
            elif axis == 0:
                groups.setdefault(("declared", size), {})[entry.name] = 0

    ordered = sorted(
        groups,
        key=lambda key: (not says_batch(key), min(groups[key].values()), isinstance(key, tuple)),
    )
    candidates = [
        Candidate(groups[key], says_batch(key), not isinstance(key, tuple)) for key in ordered
    ]
    # Exporters may give the batch axis of each input a different symbol. All axes with a symbol for
    # the batch then form a candidate, or else all first axes without a size.
    together: dict[str, int] = {}
    for candidate in candidates:
        if candidate.named:
            together = {**candidate.axes, **together}
    named = bool(together)
    if not named:
        firsts = [c.axes.items() for c in candidates if c.is_open]
        together = {name: 0 for items in firsts for name, axis in items if axis == 0}
    if len(together) > 1 and all(candidate.axes != together for candidate in candidates):
        candidates.insert(0, Candidate(together, named, is_open=True))
    candidates += [
        Candidate(axes, named=False, is_open=True) for axes in _of_one_size(graph, facts)
    ]
    return [c for c in candidates if len({facts[n].shape[axis] for n, axis in c.axes.items()}) == 1]


def _declared_candidates(facts: Mapping[str, Fact], names: Sequence[str]) -> list[Candidate]:
    """Return candidates for a file that declares all sizes: axes of equal sizes.

    Candidates with axes of most inputs come first, and first axes before later ones.
    """
    shapes = {name: facts[name].shape for name in names}
    groups: list[dict[str, int]] = []
    for axis in range(max(map(len, shapes.values()), default=0)):
        on_axis = {name: shape[axis] for name, shape in shapes.items() if len(shape) > axis}
        for size in dict.fromkeys(on_axis.values()):
            same = {name: axis for name in on_axis if on_axis[name] == size}
            elsewhere = {name: shape.index(size) for name, shape in shapes.items() if size in shape}
            groups += [same, {**elsewhere, **same}]
    distinct = [axes for place, axes in enumerate(groups) if axes not in groups[:place]]
    distinct.sort(key=len, reverse=True)
    return [Candidate(axes, named=False, is_open=False, is_declared=True) for axes in distinct]


def _of_one_size(graph: Graph, facts: Mapping[str, Fact]) -> list[dict[str, int]]:
    """Return axes without a declared size that have equal lengths, one for each input."""
    sizes: dict[int, dict[str, int]] = {}
    for entry in graph.inputs:
        for axis, size in enumerate(entry.shape or ()):
            if not isinstance(size, int):
                sizes.setdefault(facts[entry.name].shape[axis], {}).setdefault(entry.name, axis)
    return [axes for axes in sizes.values() if len(axes) > 1]
