"""Finds the axis of the examples in each value by running the model.

A model file does not declare this axis. The model runs on two batch sizes, and an axis whose length
is proportional to the batch size is a batch axis. If several axes of the inputs have no fixed size,
a change of one example along the batch axis does not change the results of other examples.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np

from kfac_engine._types import Array
from kfac_engine.autodiff.lowering.builder import STEPS_OF_THE_DATA, UNROLLED
from kfac_engine.errors import BackendError, ShapeError
from kfac_engine.graph.analysis.subgraph import dependents, of_data
from kfac_engine.graph.structure import Fact, Graph
from kfac_engine.printable import quoted
from kfac_engine.runtime.example_axis import (
    BATCH,
    Axes,
    Candidate,
    ExampleAxis,
    Squares,
    axes_by_symbol,
    axis_of,
    batch_candidates,
    grown,
    others_change,
    rest_changes,
    same_length,
    same_symbol,
    unmoved_axes,
    with_example,
)
from kfac_engine.runtime.sample_run import SampleRun, open_run, sample_batch

# Bytes of values that are compared at a time, with at least one value.
_COMPARED_BYTES = 64 << 20
# The node in an error of ONNX Runtime.
_AT_NODE = re.compile("at node '([^']+)'")


@dataclass(frozen=True, slots=True)
class Batch:
    """The axes of the examples in the inputs and values of a model."""

    size: int  # number of examples in the sample run
    inputs: Mapping[str, int]  # map from an input to its batch axis, for inputs with a batch axis
    # Map from a value to the axis of the examples, for values with such an axis.
    places: Mapping[str, ExampleAxis]
    # The reason why the model runs with one batch size only; ``""`` if it runs with others.
    fixed: str = ""
    doubt: str = ""  # the reason why the examples may be on another axis; ``""`` without a reason
    # The reason why some examples of a batch are not a batch, as in a graph network, whose file
    # does not say which nodes a graph has; ``""`` if they are.
    joint: str = ""
    # Map from an input or a value to its further axes that grow with the batch, such as those of an
    # adjacency matrix.
    squares: Squares = field(default_factory=dict)
    # Sets of examples, such as an equation's inner points and its boundary points. Each set has its
    # own inputs, values and number of examples. Empty if all examples form a single set.
    sets: tuple["Batch", ...] = ()

    @classmethod
    def of_sets(cls, sets: Sequence["Batch"]) -> "Batch":
        """Return the batch of several sets of examples, set by set."""
        inputs = {name: axis for each in sets for name, axis in each.inputs.items()}
        places = {name: place for each in sets for name, place in each.places.items()}
        joint = f"{quoted(inputs)} have numbers of examples of their own"
        doubt = next((each.doubt for each in sets if each.doubt), "")
        size = sum(each.size for each in sets)
        return cls(size, inputs, places, doubt=doubt, joint=joint, sets=tuple(sets))

    def examples(self, inputs: Mapping[str, Array]) -> int:
        """Return the number of examples in a batch."""
        if self.sets:
            return sum(each.examples(inputs) for each in self.sets)
        return next((inputs[name].shape[axis] for name, axis in self.inputs.items()), self.size)

    def axes(self, name: str) -> tuple[int, ...]:
        """Return the axes of an input or a value that grow with the batch."""
        place = self.places.get(name)
        axis = place.axis if place and name not in self.inputs else self.inputs.get(name)
        return () if axis is None else (axis, *self.squares.get(name, ()))

    def resized(self, inputs: Mapping[str, Array], count: int) -> dict[str, Array]:
        """Return the inputs of the sample run with ``count`` examples, the first ones repeated.

        Several sets of examples have their shares of ``count``, and an example each at least.
        """
        for each in self.sets:
            inputs = each.resized(inputs, max(1, round(count * each.size / self.size)))
        if self.sets:
            return dict(inputs)
        return _taken(inputs, self.inputs, self.squares, np.arange(count) % self.size)

    @property
    def note(self) -> str:
        """Return ``doubt`` as a sentence for reports."""
        return self.doubt and (
            f"the batch axis is assumed to be {_spelled(self.inputs)}, but {self.doubt}; if it is "
            f"another axis, name it with batch_axes (--batch-axis)"
        )


def find_batch(
    graph: Graph,
    facts: Mapping[str, Fact],
    outputs: Sequence[str],
    inputs: Mapping[str, Array] | None = None,
    axes: Axes | None = None,
    run: SampleRun | None = None,
) -> Batch:
    """Return the batch axes of inputs and values, from a sample run.

    If the model runs with one batch size only, these are axes along which a change of one example
    changes no other example, or axes as long as the batch. ``outputs`` are the values that the
    losses read, which have a batch axis; none if no value needs one. ``inputs`` is the batch of the
    sample run; None if it was generated. ``axes`` map an input to its batch axis, if the user names
    them. An input without its axis, and axes of different sizes, raise a ShapeError. ``run`` is the
    result of ``open_run``, if the caller reads further values.
    """
    probe = _Probe(graph, facts, inputs, run)
    batch = (
        probe.batch_of_user(_checked(facts, axes), outputs)
        if axes
        else probe.sets_of_examples(outputs) or probe.found(outputs)
    )
    return replace(batch, joint=batch.joint or probe.why_joint(batch, outputs))


def find_coupling(
    graph: Graph,
    facts: Mapping[str, Fact],
    outputs: Sequence[str],
    batch: Batch,
    inputs: Mapping[str, Array] | None = None,
) -> str:
    """Return a node by which the result of an example depends on other examples.

    It is the operator and the name of the node, or ``""`` if a change of one example changes no
    other. ``outputs`` are the values whose examples should be independent. ``inputs`` is the batch
    of the sample run, or None if it was generated.
    """
    return _Probe(graph, facts, inputs).coupled(batch, outputs)


class _Probe:
    """Runs a model on variations of its sample batch."""

    def __init__(
        self,
        graph: Graph,
        facts: Mapping[str, Fact],
        inputs: Mapping[str, Array] | None,
        run: SampleRun | None = None,
    ) -> None:
        self._graph, self._facts = graph, facts
        self._run = run or open_run(graph, facts)
        self._is_generated, self._named = inputs is None, False
        # Messages of runs that failed, by the axes along which another size was tried.
        self._failures: dict[frozenset[tuple[str, int]], str] = {}
        self._feeds = sample_batch(graph, facts, inputs)
        # The latest values of the sample batch, of a few names.
        self._before: tuple[list[str], dict[str, Array]] = [], {}

    def found(self, outputs: Sequence[str]) -> Batch:
        """Return the batch along the first of the candidates that has evidence."""
        graph, facts = self._graph, self._facts
        candidates = self.without_axes_apart(batch_candidates(graph, facts), outputs)
        ran: list[tuple[Batch, Candidate]] = []
        stuck: list[Candidate] = []
        for candidate in candidates:
            # An axis with a symbol for the batch is the batch, even if only one size runs. It may
            # run together with axes of other inputs.
            wider = bool(stuck) and candidate.axes.items() > stuck[0].axes.items()
            if stuck and stuck[0].named and not (candidate.named or wider):
                continue
            batch = self.batch_along(candidate.axes, outputs, candidate.squares)
            # A size of one may run because it is broadcast, and then changes no output.
            if candidate.is_declared and (batch is None or not _placed(batch, outputs)):
                batch = self.batch_alone(candidate.axes, outputs)
            if batch is None:
                stuck.append(candidate)
            elif _placed(batch, outputs):
                only = candidate.named or (candidate.is_open and len(candidates) == 1)
                # Nodes and graphs may have equal lengths by chance, and then grow together.
                if candidate.is_merged and not self.divides(batch, outputs):
                    ran.append((batch, candidate))
                elif only:
                    return batch
                elif not self.coupled(batch, outputs, first=not candidate.is_merged):
                    tried = stuck and not (candidate.is_declared or wider)
                    alone = (
                        tried and f"the model runs with a single size of {_spelled(stuck[0].axes)}"
                    )
                    return replace(batch, doubt=alone or "")
                else:
                    ran.append((batch, candidate))
        if ran:
            batch, candidate = ran[0]
            return batch if candidate.named else self.with_doubt(batch, outputs)
        named = bool(stuck) and stuck[0].named
        axes = stuck[0].axes if named else _first_axes(graph, facts)
        batch = self.batch_of_others(candidates, outputs) or self.batch_from_lengths(axes)
        return self.with_doubt(batch, outputs)

    def sets_of_examples(self, outputs: Sequence[str]) -> Batch | None:
        """Return a batch of several sets of examples; None if the model has no such sets.

        Each set has inputs and outputs of its own, with a number of examples of its own.
        """
        apart = axes_by_symbol(self._graph.inputs)
        different = len({name for axes in apart for name in axes}) == sum(map(len, apart)) > 1
        if len(outputs) < 2 or not different:
            return None
        sets = [self.placed_along(axes, outputs, {}) for axes in apart]
        placed = [each for each in sets if each and not each.fixed]
        counts = [sum(name in each.places for each in placed) for name in outputs]
        if len(placed) < 2 or set(counts) != {1}:
            return None
        return Batch.of_sets([self.with_doubt(each, _of_set(each, outputs)) for each in placed])

    def without_axes_apart(
        self, candidates: Sequence[Candidate], outputs: Sequence[str]
    ) -> Sequence[Candidate]:
        """Leave out axes of several symbols if outputs grow along only one of these symbols.

        The ids of all bags have such a symbol of their own, beside the offsets of each bag. A size
        of one tells nothing, because it is broadcast.
        """
        merged = next((c for c in candidates if c.is_merged), None)
        if merged is None or self._size(merged.axes) == 1:
            return candidates
        parts = (c for c in candidates if c.is_open and c.axes.items() < merged.axes.items())
        if not any(self.placed_along(c.axes, outputs, c.squares) for c in parts):
            return candidates
        return [c for c in candidates if c.axes != merged.axes]

    def batch_of_others(
        self, candidates: Sequence[Candidate], outputs: Sequence[str]
    ) -> Batch | None:
        """Return the batch where no candidate has the examples alone; None for none."""
        squares = (self.batch_of_squares(candidate.axes, outputs) for candidate in candidates)
        batch = next(filter(None, squares), None) or self.batch_of_values(outputs)
        if batch or any(candidate.named and not candidate.squares for candidate in candidates):
            return batch
        return self.batch_of_one(candidates, outputs)

    def batch_of_user(self, axes: Axes, outputs: Sequence[str]) -> Batch:
        """Return the batch along axes that the user names."""
        self._named = True
        inputs = self._graph.inputs
        if batch := self.placed_along(axes, outputs, same_symbol(inputs, axes)):
            return batch
        # Axes of other inputs may have the same symbol.
        shapes = {entry.name: entry.shape or () for entry in inputs}
        shared = {name: shape.index(BATCH) for name, shape in shapes.items() if BATCH in shape}
        every = {**shared, **axes}
        if batch := self.placed_along(every, outputs, same_symbol(inputs, every)):
            return batch
        return self.batch_of_squares(axes, outputs) or self.batch_from_lengths(axes)

    def batch_of_squares(self, axes: Axes, outputs: Sequence[str]) -> Batch | None:
        """Return the batch along all open axes of the inputs that are as long; None for none."""
        squares = same_length(self._graph.inputs, self._facts, axes)
        return self.placed_along(axes, outputs, squares) if squares else None

    def batch_along(self, axes: Axes, outputs: Sequence[str], squares: Squares) -> Batch | None:
        """Return the batch along axes of the inputs; None if no second size runs."""
        size = self._size(axes)
        batch = None
        # A larger batch is tried first, because some operators remove an axis of size one.
        for other in filter(None, (size + 1, size - 1)):
            try:
                feeds = _taken(self._feeds, axes, squares, np.arange(other) % size)
                facts = self._run.facts(feeds)
            except BackendError as failure:
                self._failures.setdefault(frozenset(axes.items()), str(failure))
                continue
            pairs = ((name, self._facts[name].shape, facts[name].shape) for name in facts)
            all_grown = {name: grown(shape, resized, size, other) for name, shape, resized in pairs}
            places = {name: along[0] for name, along in all_grown.items() if along}
            further = {
                name: tuple(place.axis for place in along[1:])
                for name, along in all_grown.items()
                if len(along) > 1
            }
            batch = Batch(size, axes, places, _declared(self._graph, axes), squares=further)
            if _placed(batch, outputs):
                return batch
        return batch

    def placed_along(self, axes: Axes, outputs: Sequence[str], squares: Squares) -> Batch | None:
        """Return the batch along axes of the inputs if it has an output; None otherwise."""
        batch = self.batch_along(axes, outputs, squares)
        return batch if batch and _placed(batch, outputs) else None

    def batch_of_values(self, outputs: Sequence[str]) -> Batch | None:
        """Return the batch along first axes of outputs that follow from the values of an input.

        The number of graphs may be the largest number of a graph, for example. None is returned if
        other integers in an input do not change the first axes.
        """
        whole = {name: array for name, array in self._feeds.items() if array.dtype.kind in "iu"}
        changes = [
            (name, np.asarray(array * times + more))
            for name, array in (whole if outputs else {}).items()
            for times, more in ((1, 1), (0, 0), (0, 1))
        ]
        for name, array in changes:
            try:
                facts = self._run.facts({**self._feeds, name: array})
            except BackendError:
                continue
            shapes = {value: (self._facts[value].shape, facts[value].shape) for value in facts}
            (size, *_), (other, *_) = (shape or (0,) for shape in shapes[outputs[0]])
            if not size or not other or size == other:
                continue
            all_grown = {value: grown(*pair, size, other) for value, pair in shapes.items()}
            if all(all_grown[value] == (ExampleAxis(0, 1),) for value in outputs):
                places = {value: axes[0] for value, axes in all_grown.items() if axes}
                joint = f"the number of examples of '{outputs[0]}' follows from '{name}'"
                return Batch(size, {}, places, joint=joint)
        return None

    def batch_of_one(self, candidates: Iterable[Candidate], outputs: Sequence[str]) -> Batch | None:
        """Return the batch of one example that all entries of an open axis belong to, or None.

        The only graph of a batch has such axes of nodes and edges, and a prediction for all of
        them.
        """
        for candidate in candidates:
            batch = self.batch_along(candidate.axes, outputs, candidate.squares)
            shapes = [self._facts[name].shape for name in outputs]
            if batch and not batch.fixed and shapes and all(shape[:1] == (1,) for shape in shapes):
                joint = f"'{outputs[0]}' has one prediction for all of {_spelled(candidate.axes)}"
                return Batch(1, {}, {name: ExampleAxis(0, 1) for name in outputs}, joint=joint)
        return None

    def batch_from_lengths(self, axes: Axes) -> Batch:
        """Return the batch along axes of the inputs, for a model that runs with one size only."""
        size = self._size(axes)
        fixed = _declared(self._graph, axes) or self._why_fixed(axes)
        batch = Batch(size, axes, {}, fixed)
        computed = of_data(self._graph)
        names = [name for name in self._facts if name in computed]
        moved = self._unmoved(batch, names) if size > 1 else {}
        places = {
            name: self._place_from_length(name, axes, size, moved.get(name)) for name in names
        }
        return replace(batch, places={name: place for name, place in places.items() if place})

    def _why_fixed(self, axes: Axes) -> str:
        """Return the reason why the model runs with one batch size along axes only."""
        size, where = self._size(axes), _spelled(axes)
        failed = _AT_NODE.search(self._failures.get(frozenset(axes.items()), ""))
        node = next((n for n in self._graph.nodes if failed and n.name == failed[1]), None)
        by = node.title if node else "the model"
        if STEPS_OF_THE_DATA in by:  # the node's name says what to do
            return f"{by} fixes the batch size at {size} along {where}, the axis of the steps"
        if UNROLLED in by:
            return (
                f"{by} fixes the batch size at {size} along {where}, because the batch decides the "
                f"number of steps or the branch; give batches of this size"
            )
        named = "" if self._named else ", or name the axis of the examples with batch_axes"
        return (
            f"{by} fixes the batch size at {size} along {where}; export it with a dynamic batch "
            f"axis{named and f'{named} (--batch-axis)'}"
        )

    def why_joint(self, batch: Batch, outputs: Sequence[str]) -> str:
        """Return the reason why some examples of a batch are not a batch, or ``""``."""
        if batch.fixed or not batch.places.keys() & {*outputs}:
            return ""
        for name in (*batch.inputs, *outputs):
            if name in batch.squares:
                return f"'{name}' has an entry for each pair of examples"
        nodes = self._graph.nodes
        others = [
            f"'{entry.name}'"
            for entry in self._graph.inputs
            if entry.name not in batch.inputs
            and any(not isinstance(size, int) for size in entry.shape or (None,))
            and not dependents(nodes, [entry.name]).isdisjoint(outputs)
        ]
        if not others or self.divides(batch, outputs):
            return ""
        return (
            f"the examples are along {_spelled(batch.inputs)}, and the file does not say which "
            f"entries of {', '.join(others)} belong to each of them"
        )

    def divides(self, batch: Batch, outputs: Sequence[str]) -> bool:
        """Return whether a sample run shows that examples do not depend on the first example.

        If all examples have equal outputs, values on the way to them are compared as well.
        """
        size = max(batch.size, 2)
        whole = batch.resized(self._feeds, size)
        rest = _taken(whole, batch.inputs, batch.squares, np.arange(1, size))
        ends = [name for name in outputs if name in batch.places]

        def differ(names: list[str]) -> bool | None:
            """Return whether examples differ from each other; None if a result changes."""
            before, after = self._run.values(whole, names), self._run.values(rest, names)
            pairs = [(before[n], after[n], batch.places[n]) for n in names]
            if any(not np.isfinite(x).all() or rest_changes(x, y, size, at) for x, y, at in pairs):
                return None
            return any((x != x.take([0], at.axis)).any() for x, _, at in pairs)

        try:
            different = differ(ends)
            if different is False:
                on_the_way = [n for n in batch.places if self._facts[n].dtype.kind == "f"]
                different = all(differ(few) is not None for few in self._chunks(on_the_way))
        except BackendError:
            return False
        return bool(different)

    def batch_alone(self, axes: Axes, outputs: Sequence[str]) -> Batch | None:
        """Return the batch along axes of a model that runs with one size only, or None.

        A change of one example must change no other in an output. This cannot be seen with one
        example, which is on the first axes of all inputs.
        """
        size = self._size(axes)
        if size == 1:
            fits = len(axes) == len(self._graph.inputs) and not any(axes.values())
        else:
            fits = any(self._unmoved(Batch(size, axes, {}), outputs).values())
        return self.batch_from_lengths(axes) if fits else None

    def with_doubt(self, batch: Batch, outputs: Sequence[str]) -> Batch:
        """Return the batch, with a doubt if its examples depend on each other."""
        node = self.coupled(batch, outputs)
        return replace(batch, doubt=node and f"{node} makes the examples depend on each other")

    def coupled(self, batch: Batch, outputs: Sequence[str], *, first: bool = True) -> str:
        """Return the first node by which examples depend on each other, or ``""``.

        Without ``first``, ``divides`` has shown that examples do not depend on the first example.
        """
        if batch.sets:
            nodes = (self.coupled(each, _of_set(each, outputs), first=first) for each in batch.sets)
            return next(filter(None, nodes), "")
        if batch.size == 1:
            return ""
        # In a recurrence, examples depend on earlier or on later examples, so the first and the
        # last example are changed.
        for changed in (0, batch.size - 1) if first else (batch.size - 1,):
            if any(self._moved(outputs, changed, batch)):
                arrays = [n for node in self._graph.nodes for n in node.outputs if n in self._facts]
                for name in self._moved(arrays, changed, batch):  # of random values, maybe none
                    node = self._graph.producers[name]
                    return node.title
        return ""

    def _size(self, axes: Axes) -> int:
        return next((self._feeds[name].shape[axis] for name, axis in axes.items()), 1)

    def _moved(self, names: Iterable[str], changed: int, batch: Batch) -> Iterator[str]:
        """Yield the names of values in which a change of one example changes other examples."""
        for name, before, after in self._compared(names, changed, batch):
            if others_change(before, after, changed, batch.size, batch.places.get(name)):
                yield name

    def _unmoved(self, batch: Batch, names: Sequence[str]) -> dict[str, frozenset[int]]:
        """Return the axes along which a change of the first or last example changes no other."""
        alone: dict[str, frozenset[int]] = {}
        for changed in (0, batch.size - 1):
            for name, before, after in self._compared(names, changed, batch):
                axes = unmoved_axes(before, after, changed, batch.size)
                alone[name] = alone.get(name, axes) & axes
        return alone

    def _compared(
        self, names: Iterable[str], changed: int, batch: Batch
    ) -> Iterator[tuple[str, Array, Array]]:
        """Yield values before and after a change of one example, a few in memory at a time."""
        candidates = list(self._with_other(changed, batch))
        for few in self._chunks(names):
            if few != self._before[0]:
                self._before = few, self._run.values(self._feeds, few)
            before, after = self._before[1], self._values(candidates, few)
            yield from ((name, before[name], after[name]) for name in few)

    def _values(self, candidates: list[dict[str, Array]], names: list[str]) -> dict[str, Array]:
        """Return values for the first candidate that runs; the others are removed."""
        while True:
            try:
                return self._run.values(candidates[0], names)
            except BackendError:
                del candidates[0]

    def _chunks(self, names: Iterable[str]) -> Iterator[list[str]]:
        chunk: list[str] = []
        chunk_bytes = 0
        for name in names:
            size = self._facts[name].dtype.itemsize * prod(self._facts[name].shape)
            if chunk and chunk_bytes + size > _COMPARED_BYTES:
                yield chunk
                chunk, chunk_bytes = [], 0
            chunk.append(name)
            chunk_bytes += size
        if chunk:
            yield chunk

    def _with_other(self, changed: int, batch: Batch) -> Iterator[dict[str, Array]]:
        """Yield inputs with one example replaced, for which the run may fail, then old inputs."""
        for new_id in (_next_id, _same_id) if self._is_generated else (_same_id,):
            feeds = dict(self._feeds)
            for name, axis in batch.inputs.items():
                feeds[name] = with_example(feeds[name], axis, changed, new_id)
            yield feeds
        yield self._feeds

    def _place_from_length(
        self, name: str, axes: Axes, size: int, unmoved: frozenset[int] | None
    ) -> ExampleAxis | None:
        """Return the axis of the examples, found by changed entries or by its length."""
        shape = self._facts[name].shape
        if name in axes:
            return ExampleAxis(axes[name], 1)
        fits = unmoved or {axis for axis, length in enumerate(shape) if length == size or not axis}
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


def _taken(
    inputs: Mapping[str, Array], axes: Axes, squares: Squares, examples: Array
) -> dict[str, Array]:
    """Return inputs of chosen examples; those without an axis of examples are returned whole."""
    chosen = dict(inputs)
    for name, axis in axes.items():
        for along in (axis, *squares.get(name, ())):
            chosen[name] = chosen[name].take(examples, along)
    return chosen


def _of_set(batch: Batch, outputs: Sequence[str]) -> list[str]:
    """Return the outputs that have examples of a set."""
    return [name for name in outputs if name in batch.places]


def _placed(batch: Batch, outputs: Sequence[str]) -> bool:
    return not outputs or any(name in batch.places for name in outputs)


def _checked(facts: Mapping[str, Fact], axes: Axes) -> dict[str, int]:
    """Return the axes of the user as nonnegative numbers; raise an error for unequal sizes."""
    named = {name: axis_of(name, axis, len(facts[name].shape)) for name, axis in axes.items()}
    sizes = {name: facts[name].shape[axis] for name, axis in named.items()}
    if len(set(sizes.values())) > 1:
        spelled = ", ".join(f"{size} in '{name}'" for name, size in sizes.items())
        raise ShapeError(f"the axes that batch_axes names have different sizes: {spelled}.")
    return named


def _declared(graph: Graph, axes: Axes) -> str:
    for entry in graph.inputs:
        size = entry.shape[axes[entry.name]] if entry.shape and entry.name in axes else None
        if isinstance(size, int):
            return (
                f"the file declares {size} example{'s' if size > 1 else ''} in '{entry.name}'; "
                f"export the model with a dynamic batch axis"
            )
    return ""


def _first_axes(graph: Graph, facts: Mapping[str, Fact]) -> dict[str, int]:
    """Return the first axes of all inputs, if they are as long as in the first input."""
    lengths = {entry.name: facts[entry.name].shape[:1] for entry in graph.inputs}
    first = next((length for length in lengths.values() if length), None)
    return {name: 0 for name, length in lengths.items() if length == first}


def _spelled(axes: Axes) -> str:
    """Return axes as text for messages."""
    return " and ".join(f"axis {axis} of '{name}'" for name, axis in axes.items())


def _next_id(ids: Array) -> Array:
    return np.ones_like(ids) if ids.dtype.kind in "iu" else ~ids


def _same_id(ids: Array) -> Array:
    return ids


# -- the order of examples and positions on an axis that has both ----------------------------------

# Relative to the largest entry, for the results of a product whose rows have another order.
_ROUNDING = 1e-5


def find_position_orders(
    graph: Graph,
    facts: Mapping[str, Fact],
    names: Sequence[str],
    batch: Batch,
    inputs: Mapping[str, Array] | None = None,
) -> dict[str, bool | None]:
    """Return whether positions come before examples on the axis that has both, for each value.

    The model runs on a batch and on the same examples in reverse order. The answer is True if each
    position has the entries of all examples, one after the other, and False if each example has the
    entries of its positions. It is None if neither or both are possible.
    """
    sampled, run = sample_batch(graph, facts, inputs), open_run(graph)
    for feeds in (_with_ids(sampled), sampled) if inputs is None else (sampled,):
        reverse = {
            name: np.flip(array, batch.inputs[name]) if name in batch.inputs else array
            for name, array in feeds.items()
        }
        try:
            before, after = run.values(feeds, names), run.values(reverse, names)
        except BackendError:  # other identifiers are not valid
            continue
        return {
            name: _order(before[name], after[name], batch.places[name], batch.size)
            for name in names
        }
    return dict.fromkeys(names)


def _with_ids(feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Replace generated identifiers, which are all zero, by different numbers."""
    rng = np.random.default_rng(0)
    return {
        name: rng.integers(0, 2, array.shape).astype(array.dtype)
        if array.dtype.kind in "iu"
        else array
        for name, array in feeds.items()
    }


def _order(before: Array, after: Array, place: ExampleAxis, size: int) -> bool | None:
    """Return the order under which the reverse batch has the reverse results."""
    scale = _ROUNDING * float(np.abs(before).max(initial=0))
    fits = [
        np.allclose(_reversed(before, place, size, positions_first), after, rtol=0, atol=scale)
        for positions_first in (False, True)
    ]
    return fits[True] if fits[True] != fits[False] else None


def _reversed(array: Array, place: ExampleAxis, size: int, positions_first: bool) -> Array:
    """Return an array with its examples in reverse order."""
    shape, axis = array.shape, place.axis
    order = (place.repeats, size) if positions_first else (size, place.repeats)
    split = array.reshape(*shape[:axis], *order, *shape[axis + 1 :])
    return np.flip(split, axis + positions_first).reshape(shape)
