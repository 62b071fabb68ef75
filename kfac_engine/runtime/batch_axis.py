"""Which axis of each value holds the examples of a batch, found by running the model.

A file does not say. So the model runs on two batch sizes: what grows in proportion holds the batch.
Where several axes of the inputs are open, the batch is the one along which a change of one example
leaves the results of the others as they are.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TypeAlias

import numpy as np

from kfac_engine._types import Array
from kfac_engine.errors import BackendError, ShapeError
from kfac_engine.graph.analysis.subgraph import of_data
from kfac_engine.graph.structure import Fact, Graph
from kfac_engine.runtime.example_axis import (
    ExampleAxis,
    grown,
    others_move,
    unmoved_axes,
    with_example,
)
from kfac_engine.runtime.leading_examples import axis_of, says_batch
from kfac_engine.runtime.sample_run import open_run, sample_batch

# Bytes of values that are compared at a time: one value at least.
_HELD = 64 << 20

# Input name to its axis.
Axes: TypeAlias = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Batch:
    """The axes of the examples, as sample runs showed them.

    Attributes:
        size: Examples in the sample run.
        inputs: Input name to its batch axis, for inputs that have one.
        places: Value name to the place of the examples; values without the batch are absent.
        fixed: Why no other number of examples can be run; empty where any can.
        doubt: Why the examples may lie on another axis; empty where nothing speaks for that.
    """

    size: int
    inputs: Mapping[str, int]
    places: Mapping[str, ExampleAxis]
    fixed: str = ""
    doubt: str = ""

    def examples(self, inputs: Mapping[str, Array]) -> int:
        """Examples in a batch of inputs."""
        return next((inputs[name].shape[axis] for name, axis in self.inputs.items()), self.size)

    @property
    def note(self) -> str:
        """The doubt in a sentence."""
        return self.doubt and (
            f"the examples are taken to lie along {_spelled(self.inputs)}, but {self.doubt}; if "
            f"they lie elsewhere, name their axis with batch_axes (--batch-axis)"
        )


def find_batch(
    graph: Graph,
    facts: Mapping[str, Fact],
    outputs: Sequence[str],
    inputs: Mapping[str, Array] | None = None,
    axes: Axes | None = None,
) -> Batch:
    """The batch axis of inputs and values.

    Args:
        graph: The model.
        facts: Of a sample run on ``inputs``.
        outputs: Values that have the batch: what losses read.
        inputs: The batch of the sample run; None if it was made up.
        axes: Input name to the axis of its examples, where the user names them.

    Returns:
        The axes. Where no second size runs, those of a changed example, or of the batch's length.

    Raises:
        ShapeError: ``axes`` names an axis that an input has not, or sizes that differ.
    """
    probe = _Probe(graph, facts, inputs)
    if axes:
        axes = _checked(facts, axes)
        batch = probe.batch_along(axes, outputs)
        return batch if batch is not None and _placed(batch, outputs) else probe.told(axes)
    candidates = _candidates(graph, facts)
    ran: list[Batch] = []
    stuck: list[_Candidate] = []
    for candidate in candidates:
        if stuck and stuck[0].named and not candidate.named:
            break  # an axis with the name of a batch is the batch, even if only one size runs
        batch = probe.batch_along(candidate.axes, outputs)
        if batch is None:
            stuck.append(candidate)
        elif _placed(batch, outputs):
            if candidate.named or (candidate.is_open and len(candidates) == 1):
                return batch
            if not probe.coupled(batch, outputs):
                only = stuck and f"the model runs with no other size of {_spelled(stuck[0].axes)}"
                return replace(batch, doubt=only or "")
            ran.append(batch)
    if ran:
        return probe.doubted(ran[0], outputs)
    named = bool(stuck) and stuck[0].named
    axes = stuck[0].axes if named else _first_axes(graph, facts)
    return probe.doubted(probe.told(axes), outputs)


def find_coupling(
    graph: Graph,
    facts: Mapping[str, Fact],
    outputs: Sequence[str],
    batch: Batch,
    inputs: Mapping[str, Array] | None = None,
) -> str:
    """The node that makes the results of an example depend on the other examples.

    Args:
        graph: The model.
        facts: Of a sample run on ``inputs``.
        outputs: Values whose examples should be independent.
        batch: As ``find_batch`` gave it.
        inputs: The batch of the sample run; None if it was made up.

    Returns:
        Operator and name; empty if each example stands for itself, as far as a changed one shows.
    """
    return _Probe(graph, facts, inputs).coupled(batch, outputs)


class _Probe:
    """Runs a model on variations of its sample batch."""

    def __init__(
        self, graph: Graph, facts: Mapping[str, Fact], inputs: Mapping[str, Array] | None
    ) -> None:
        self._graph, self._facts = graph, facts
        self._run = open_run(graph, facts)
        self._made_up = inputs is None
        self._feeds = sample_batch(graph, facts, inputs)

    def batch_along(self, axes: Axes, outputs: Sequence[str]) -> Batch | None:
        """Places of the examples if they lie along these axes; None if no second size runs."""
        size = self._size(axes)
        found = None
        # A larger batch is tried first: some operators drop an axis of size one.
        for other in filter(None, (size + 1, size - 1)):
            try:
                facts = self._run.facts(self._resized(axes, size, other))
            except BackendError:
                continue
            pairs = ((name, self._facts[name].shape, facts[name].shape) for name in facts)
            grew = {name: grown(shape, larger, size, other) for name, shape, larger in pairs}
            places = {name: place for name, place in grew.items() if place is not None}
            found = Batch(size, axes, places, _declared(self._graph, axes))
            if _placed(found, outputs):
                return found
        return found

    def told(self, axes: Axes) -> Batch:
        """The batch along axes with which the model runs in one size only."""
        size = self._size(axes)
        where = _spelled(axes)
        fixed = _declared(self._graph, axes) or (
            f"the model fixes its batch of {size} inside, by a Reshape, or by a recurrence that is "
            f"unrolled along {where}; export it with an open batch axis, or name the axis of the "
            f"examples with batch_axes (--batch-axis)"
        )
        batch = Batch(size, axes, {}, fixed)
        computed = of_data(self._graph)
        names = [name for name in self._facts if name in computed]
        moved = self._unmoved(batch, names) if size > 1 else {}
        places = {name: self._told_place(name, axes, size, moved.get(name)) for name in names}
        return replace(batch, places={name: place for name, place in places.items() if place})

    def doubted(self, batch: Batch, outputs: Sequence[str]) -> Batch:
        """The batch, with a doubt where its examples depend on each other."""
        node = self.coupled(batch, outputs)
        return replace(batch, doubt=node and f"{node} makes them depend on each other")

    def coupled(self, batch: Batch, outputs: Sequence[str]) -> str:
        """The first node whose result for one example changes with another; empty if none does."""
        if batch.size == 1:
            return ""
        # What runs forward along an axis shows at a changed first example, backward at the last.
        for changed in (0, batch.size - 1):
            if any(self._moved(outputs, changed, batch)):
                names = [name for node in self._graph.nodes for name in node.outputs]
                known = [name for name in names if name in self._facts]
                node = self._graph.producers[next(self._moved(known, changed, batch))]
                return f"{node.qualified_op} node '{node.name}'"
        return ""

    def _size(self, axes: Axes) -> int:
        return next((self._feeds[name].shape[axis] for name, axis in axes.items()), 1)

    def _resized(self, axes: Axes, size: int, other: int) -> dict[str, Array]:
        return {
            name: array.take(np.arange(other) % size, axes[name]) if name in axes else array
            for name, array in self._feeds.items()
        }

    def _moved(self, names: Iterable[str], changed: int, batch: Batch) -> Iterator[str]:
        """Names of the values in which changing one example changes others."""
        for name, before, after in self._compared(names, changed, batch):
            if others_move(before, after, changed, batch.size, batch.places.get(name)):
                yield name

    def _unmoved(self, batch: Batch, names: Sequence[str]) -> dict[str, frozenset[int]]:
        """Axes of values along which the first and the last example change alone."""
        found: dict[str, frozenset[int]] = {}
        for changed in (0, batch.size - 1):
            for name, before, after in self._compared(names, changed, batch):
                axes = unmoved_axes(before, after, changed, batch.size)
                found[name] = found.get(name, axes) & axes
        return found

    def _compared(
        self, names: Iterable[str], changed: int, batch: Batch
    ) -> Iterator[tuple[str, Array, Array]]:
        """Values before and after an example was changed, few at a time."""
        feeds = self._with_other(changed, batch)
        for few in self._chunks(names):
            before, after = self._run.values(self._feeds, few), self._run.values(feeds, few)
            yield from ((name, before[name], after[name]) for name in few)

    def _chunks(self, names: Iterable[str]) -> Iterator[list[str]]:
        chunk: list[str] = []
        held = 0
        for name in names:
            size = self._facts[name].dtype.itemsize * prod(self._facts[name].shape)
            if chunk and held + size > _HELD:
                yield chunk
                chunk, held = [], 0
            chunk.append(name)
            held += size
        if chunk:
            yield chunk

    def _with_other(self, changed: int, batch: Batch) -> dict[str, Array]:
        """The inputs with one example replaced, except where no valid replacement is known."""
        for new_id in (_next_id, _same_id) if self._made_up else (_same_id,):
            feeds = dict(self._feeds)
            for name, axis in batch.inputs.items():
                feeds[name] = with_example(feeds[name], axis, changed, new_id)
            try:
                self._run.facts(feeds)
            except BackendError:
                continue
            return feeds
        return self._feeds

    def _told_place(
        self, name: str, axes: Axes, size: int, unmoved: frozenset[int] | None
    ) -> ExampleAxis | None:
        """The place of the examples, by the entries that one example changes, or by its length."""
        shape = self._facts[name].shape
        if name in axes:
            return ExampleAxis(axes[name], 1)
        fits = unmoved or {axis for axis, side in enumerate(shape) if side == size or not axis}
        fits = {axis for axis in fits if shape[axis] and shape[axis] % size == 0}
        if not fits:
            return None
        preferred = axes.values()
        axis = min(
            fits,
            key=lambda axis: (
                shape[axis] != size,
                shape[axis] == size and axis not in preferred,
                axis,
            ),
        )
        return ExampleAxis(axis, shape[axis] // size)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """Axes of the inputs that may hold the batch, and whether they have the name of a batch."""

    axes: Axes
    named: bool
    is_open: bool


def _candidates(graph: Graph, facts: Mapping[str, Fact]) -> list[_Candidate]:
    """Candidates for the batch, the likeliest first."""
    # Axes of one symbol belong together, and so do open axes without one at the same place. A first
    # axis may hold the batch though its size is declared.
    groups: dict[object, dict[str, int]] = {}
    for entry in graph.inputs:
        sides = entry.shape or (None,) * len(facts[entry.name].shape)
        for axis, side in enumerate(sides):
            if not isinstance(side, int):
                groups.setdefault(side or axis, {}).setdefault(entry.name, axis)
            elif axis == 0:
                groups.setdefault(("declared", side), {})[entry.name] = 0

    ordered = sorted(
        groups,
        key=lambda key: (not says_batch(key), min(groups[key].values()), isinstance(key, tuple)),
    )
    found = [
        _Candidate(groups[key], says_batch(key), not isinstance(key, tuple)) for key in ordered
    ]
    # Exporters give the batch of each input a symbol of its own where they do not see that they are
    # one: then all axes that are called so grow together, or else all open first axes.
    together: dict[str, int] = {}
    for candidate in found:
        if candidate.named:
            together = {**candidate.axes, **together}
    named = bool(together)
    if not named:
        firsts = [c.axes.items() for c in found if c.is_open]
        together = {name: 0 for items in firsts for name, axis in items if axis == 0}
    if len(together) > 1 and all(candidate.axes != together for candidate in found):
        found.insert(0, _Candidate(together, named, is_open=True))
    found += [_Candidate(axes, named=False, is_open=True) for axes in _of_one_size(graph, facts)]
    return [c for c in found if len({facts[n].shape[axis] for n, axis in c.axes.items()}) == 1]


def _of_one_size(graph: Graph, facts: Mapping[str, Fact]) -> list[dict[str, int]]:
    """Open axes of equal length, one of each input."""
    sizes: dict[int, dict[str, int]] = {}
    for entry in graph.inputs:
        for axis, side in enumerate(entry.shape or ()):
            if not isinstance(side, int):
                sizes.setdefault(facts[entry.name].shape[axis], {}).setdefault(entry.name, axis)
    return [axes for axes in sizes.values() if len(axes) > 1]


def _placed(batch: Batch, outputs: Sequence[str]) -> bool:
    return any(name in batch.places for name in outputs)


def _checked(facts: Mapping[str, Fact], axes: Axes) -> dict[str, int]:
    """Axes that the user names, counted from the front."""
    named = {name: axis_of(name, axis, len(facts[name].shape)) for name, axis in axes.items()}
    sizes = {name: facts[name].shape[axis] for name, axis in named.items()}
    if len(set(sizes.values())) > 1:
        spelled = ", ".join(f"{size} in '{name}'" for name, size in sizes.items())
        raise ShapeError(f"the axes that batch_axes names have different sizes: {spelled}.")
    return named


def _declared(graph: Graph, axes: Axes) -> str:
    for entry in graph.inputs:
        side = entry.shape[axes[entry.name]] if entry.shape and entry.name in axes else None
        if isinstance(side, int):
            return (
                f"the file declares {side} example{'s' if side > 1 else ''} in '{entry.name}'; "
                f"export the model with an open batch axis"
            )
    return ""


def _first_axes(graph: Graph, facts: Mapping[str, Fact]) -> dict[str, int]:
    """First axes of the same length as that of the first input."""
    sides = {entry.name: facts[entry.name].shape[:1] for entry in graph.inputs}
    first = next((side for side in sides.values() if side), None)
    return {name: 0 for name, side in sides.items() if side == first}


def _spelled(axes: Axes) -> str:
    """Axes as text for messages."""
    return " and ".join(f"axis {axis} of '{name}'" for name, axis in axes.items())


def _next_id(ids: Array) -> Array:
    return np.ones_like(ids) if ids.dtype.kind in "iu" else ~ids


def _same_id(ids: Array) -> Array:
    return ids
