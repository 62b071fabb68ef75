"""Which axis of each value holds the examples of a batch, found by running the model.

A file does not say. So the model runs on two batch sizes: what grows in proportion holds the batch.
Where several axes of the inputs are open, the batch is the one along which a change of one example
leaves the results of the others as they are.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from kfac_engine._types import Array
from kfac_engine.autodiff.examples import says_batch
from kfac_engine.autodiff.feeds import SampleRun, sample_batch
from kfac_engine.errors import BackendError
from kfac_engine.graph.structure import Fact, Graph
from kfac_engine.graph.subgraph import of_data

# A changed example moves the others by rounding at most, relative to the largest entry.
_ROUNDING = 1e-5

# Input name to its axis.
_Axes: TypeAlias = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Place:
    """Where the examples lie in a value.

    Attributes:
        axis: The axis.
        repeats: Entries along it for each example: more than one where positions are folded in.
    """

    axis: int
    repeats: int

    @property
    def comes_first(self) -> bool:
        """Whether the examples lie alone on the first axis."""
        return self.axis == 0 and self.repeats == 1


@dataclass(frozen=True, slots=True)
class Batch:
    """What two sample runs showed of the batch.

    Attributes:
        size: Examples in the sample run.
        inputs: Input name to its batch axis, for inputs that have one.
        places: Value name to the place of the examples; values without the batch are absent.
        fixed: Why no other number of examples can be run; empty where any can.
        samples: Outputs in the second run, or none where no second size runs.
    """

    size: int
    inputs: Mapping[str, int]
    places: Mapping[str, Place]
    fixed: str = ""
    samples: Mapping[str, Array] = field(default_factory=dict)


def find_batch(
    graph: Graph,
    facts: Mapping[str, Fact],
    outputs: Sequence[str],
    inputs: Mapping[str, Array] | None = None,
) -> Batch:
    """The batch axis of inputs and values.

    Args:
        graph: The model.
        facts: Of a sample run on ``inputs``.
        outputs: Values that have the batch: what losses read.
        inputs: The batch of the sample run; None if it was made up.

    Returns:
        The axes. Where no second size runs, axes are told by their length.
    """
    probe = _Probe(graph, facts, inputs)
    candidates = _candidates(graph, facts)
    ran: list[Batch] = []
    for named, axes in candidates:
        batch = probe.batch_along(axes, outputs)
        if batch is None or not any(name in batch.places for name in outputs):
            continue
        if named or len(candidates) == 1 or not probe.coupled(batch, outputs):
            return batch
        ran.append(batch)
    return ran[0] if ran else _told_by_length(graph, facts)


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
        self._run = SampleRun(graph, declared=False)
        self._made_up = inputs is None
        self._feeds = sample_batch(graph, facts, inputs)

    def batch_along(self, axes: _Axes, outputs: Sequence[str]) -> Batch | None:
        """Places of the examples if they lie along these axes; None if no second size runs."""
        size = next(self._feeds[name].shape[axis] for name, axis in axes.items())
        other = size - 1 or 2
        resized = {
            name: array.take(np.arange(other) % size, axes[name]) if name in axes else array
            for name, array in self._feeds.items()
        }
        try:
            values = self._run.values(resized)
        except BackendError:
            return None
        places = {}
        for name, array in values.items():
            place = _place(self._facts[name].shape, array.shape, size, other)
            if place is not None:
                places[name] = place
        samples = {name: np.array(values[name]) for name in outputs if name in values}
        return Batch(size, axes, places, _declared(self._graph, axes), samples)

    def coupled(self, batch: Batch, outputs: Sequence[str]) -> str:
        """The first node whose result for one example changes with another; empty if none does."""
        if batch.size == 1:
            return ""
        before = self._run.values(self._feeds)
        # What runs forward along an axis shows at a changed first example, backward at the last.
        for changed in (0, batch.size - 1):
            after = self._with_other(changed, batch)
            moved = {
                name
                for name, array in before.items()
                if _others_move(array, after[name], changed, batch.size, batch.places.get(name))
            }
            if moved.intersection(outputs):
                node = next(node for node in self._graph.nodes if moved.intersection(node.outputs))
                return f"{node.qualified_op} node '{node.name}'"
        return ""

    def _with_other(self, changed: int, batch: Batch) -> dict[str, Array]:
        """All values, one example being another one: as far as one that is legal is known."""
        for new_id in (_next_id, _same_id) if self._made_up else (_same_id,):
            feeds = dict(self._feeds)
            for name, axis in batch.inputs.items():
                feeds[name] = _with_example(feeds[name], axis, changed, new_id)
            try:
                return self._run.values(feeds)
            except BackendError:
                continue
        return self._run.values(self._feeds)


def _candidates(graph: Graph, facts: Mapping[str, Fact]) -> list[tuple[bool, _Axes]]:
    """Axes of the inputs that may hold the batch, the likeliest first, and whether they say so."""
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
    found: list[tuple[bool, _Axes]] = [(says_batch(key), groups[key]) for key in ordered]
    # Exporters give the batch of each input a symbol of its own where they do not see that they are
    # one: then all open first axes have to grow together.
    firsts = {
        name: 0
        for key, group in groups.items()
        if not isinstance(key, tuple)
        for name, axis in group.items()
        if axis == 0
    }
    together = len(firsts) > 1 and all(axes != firsts for _, axes in found)
    if together and not any(named for named, _ in found):
        found.insert(0, (False, firsts))
    return found


def _declared(graph: Graph, axes: _Axes) -> str:
    for entry in graph.inputs:
        side = entry.shape[axes[entry.name]] if entry.shape and entry.name in axes else None
        if isinstance(side, int):
            return (
                f"the file declares {side} example{'s' if side > 1 else ''} in '{entry.name}'; "
                f"export the model with an open batch axis"
            )
    return ""


def _told_by_length(graph: Graph, facts: Mapping[str, Fact]) -> Batch:
    """First axes as long as that of the first input, where a second size does not run."""
    sides = {entry.name: facts[entry.name].shape[:1] for entry in graph.inputs}
    size = next((side[0] for side in sides.values() if side), 1)
    computed = of_data(graph)
    return Batch(
        size,
        {name: 0 for name, side in sides.items() if side == (size,)},
        {
            name: Place(0, fact.shape[0] // size)
            for name, fact in facts.items()
            if name in computed and fact.shape and fact.shape[0] and not fact.shape[0] % size
        },
        f"the model fixes its batch of {size} inside, in the shape of a Reshape most often; "
        f"export it with an open batch axis",
    )


def _place(
    shape: tuple[int, ...], other_shape: tuple[int, ...], size: int, other: int
) -> Place | None:
    """The axis that grows with the batch, if it is one and grows in proportion."""
    if len(shape) != len(other_shape):
        return None
    grown = [
        axis for axis, pair in enumerate(zip(shape, other_shape, strict=True)) if len({*pair}) > 1
    ]
    if len(grown) != 1:
        return None
    (axis,) = grown
    proportional = shape[axis] * other == other_shape[axis] * size
    return Place(axis, shape[axis] // size) if proportional else None


def _others_move(before: Array, after: Array, changed: int, size: int, place: Place | None) -> bool:
    """Whether entries of a value differ that do not belong to the changed example."""
    if before.shape != after.shape:
        return True
    scale = _ROUNDING * float(np.abs(before).max(initial=0)) if before.dtype.kind == "f" else 0
    moved = np.abs(before.astype(np.float64) - after.astype(np.float64)) > scale
    if place is None:
        return bool(moved.any())
    sides, others = moved.shape, [i for i in range(size) if i != changed]
    # Examples may come before or after the positions that are folded into their axis.
    orders = ((size, place.repeats), (place.repeats, size))
    return all(
        moved.reshape(*sides[: place.axis], *order, *sides[place.axis + 1 :])
        .take(others, place.axis + later)
        .any()
        for later, order in enumerate(orders)
    )


def _with_example(array: Array, axis: int, changed: int, new_id: Callable[[Array], Array]) -> Array:
    """The array with one example replaced by that of the other end, or by another identifier."""
    moved = np.moveaxis(array.copy(), axis, 0)
    other = moved[-1 if changed == 0 else 0]
    moved[changed] = other if array.dtype.kind == "f" else new_id(other)
    return np.moveaxis(moved, 0, axis)


def _next_id(ids: Array) -> Array:
    return np.ones_like(ids) if ids.dtype.kind in "iu" else ~ids


def _same_id(ids: Array) -> Array:
    return ids
