"""Runs a model on a small batch, which determines the shapes and element types of values.

A run returns shapes, and returns values only on request.

The time to build a session grows faster than its number of nodes. It is 2.5 s for 30,000 nodes and
28 s for 100,000 nodes. As sessions of 2,000 nodes, 30,000 nodes take 0.7 s.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np

from kfac_engine._types import Array, DType
from kfac_engine.autodiff.rules.attributes import integers
from kfac_engine.errors import BackendError, MissingKernelError, ModelError
from kfac_engine.graph.analysis.subgraph import SubGraph
from kfac_engine.graph.structure import Fact, Graph, Input, Node
from kfac_engine.graph.write import compact_model
from kfac_engine.runtime.example_axis import first_examples, says_batch
from kfac_engine.runtime.inputs import check_inputs, disagreements, spelled_shape
from kfac_engine.sessions.session import Session

# Nodes of a session; with 500 a run takes 10 % less time, with 8,000 a third more.
_MOST_NODES = 2000


@dataclass(frozen=True, slots=True)
class _Link:
    """A session of successive nodes in a chain; ``end`` is the index of the first node after it."""

    session: Session
    reads: tuple[str, ...]
    outputs: tuple[str, ...]
    end: int


class Chain:
    """Runs nodes of a graph, in topological order, on inputs of different sizes.

    A run returns ``outputs``, which are results and constants. ``what`` describes the graph in
    messages. ``BackendError`` is raised if ONNX Runtime refuses the graph.
    """

    def __init__(
        self, graph: Graph, nodes: Sequence[Node], outputs: Iterable[str], what: str
    ) -> None:
        self._outputs = tuple(outputs)
        self._constants = {n: graph.constants[n] for n in self._outputs if n in graph.constants}
        self._last = _last_readers(nodes)
        self._links = tuple(_links(graph, nodes, self._outputs, what, with_shapes=False))

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Return the outputs for the inputs ``feeds``, as read-only arrays.

        ``BackendError`` is raised if an operator failed, usually because the sizes of the feeds do
        not fit.
        """
        values, outputs = dict(feeds), dict(self._constants)
        for link in self._links:
            results = link.session.run(link.outputs, {name: values[name] for name in link.reads})
            outputs.update(results)
            values.update(results)
            values = {n: array for n, array in values.items() if self._last.get(n, -1) >= link.end}
        return {name: outputs[name] for name in self._outputs}


def inferred(
    graph: Graph, nodes: Sequence[Node], outputs: Iterable[str], what: str
) -> dict[str, Input]:
    """Return the element types and shapes of results that ONNX Runtime infers without a run.

    Only numeric results are returned. A shape is empty for scalars and for unknown ranks. ``what``
    describes the graph in messages. ``BackendError`` is raised if ONNX Runtime refuses the graph.
    """
    names = tuple(outputs)
    declared: dict[str, Input] = {}
    for link in _links(graph, nodes, names, what, with_shapes=True):
        types, shapes = link.session.output_dtypes, link.session.output_shapes
        declared |= {name: Input(name, dtype, shapes[name]) for name, dtype in types.items()}
    return {name: declared[name] for name in names if name in declared}


def _links(
    graph: Graph, nodes: Sequence[Node], outputs: Iterable[str], what: str, *, with_shapes: bool
) -> Iterator[_Link]:
    """Yield the sessions in order, with inferred shapes of their inputs if ``with_shapes``."""
    wanted, last = frozenset(outputs), _last_readers(nodes)
    known = {entry.name: entry for entry in graph.inputs}
    # Each session creates threads, so a hundred sessions would create thousands of threads.
    threads = 0 if len(nodes) <= _MOST_NODES else 1
    start, size = 0, _MOST_NODES
    while start < len(nodes):
        few, end = nodes[start : start + size], start + size
        results = [name for node in few for name in node.outputs if name]
        passed_on = {name for name in results if last.get(name, -1) >= end}
        fetched = [name for name in results if name in wanted or name in passed_on]
        link = _link(_part(graph, known, few, fetched), end, threads, what)
        types, shapes = link.session.output_dtypes, link.session.output_shapes
        if types.keys() >= passed_on:
            yield link
            for name in passed_on:
                shape = shapes[name] if with_shapes else ()
                known[name] = Input(name, types[name], shape or None)  # () may be an unknown rank
            start, size = end, _MOST_NODES
        else:  # a sequence cannot be an input of the next session
            size *= 2


def _part(
    graph: Graph, known: Mapping[str, Input], nodes: Sequence[Node], outputs: Iterable[str]
) -> Graph:
    """Return the graph of some nodes, with the inputs and the constants that they read."""
    read = dict.fromkeys(n for node in nodes for n in (*node.inputs, *node.captures))
    constants = {n: graph.constants[n] for n in read if n in graph.constants and n not in known}
    return replace(
        graph,
        nodes=tuple(nodes),
        inputs=tuple(known[name] for name in read if name in known),
        outputs=tuple(outputs),
        constants=constants,
    )


def _link(part: Graph, end: int, threads: int, what: str) -> _Link:
    model = compact_model(
        part.nodes,
        part.inputs,
        part.outputs,
        part.constants,
        part.opset,
        name=part.name,
        domains=part.domains,
        once=True,
    )
    session = Session(model, threads=threads, optimize=False, once=True, what=what)
    return _Link(session, tuple(entry.name for entry in part.inputs), part.outputs, end)


def _last_readers(nodes: Sequence[Node]) -> dict[str, int]:
    """Return a map from each value to the index of the last node that reads it."""
    return {
        name: index for index, node in enumerate(nodes) for name in (*node.inputs, *node.captures)
    }


# Sizes of axes without a declared size, as (first axis, other axes), in the order of trial. The
# first axis is usually the batch, and a batch of two differs from axes of size one. Other axes must
# be long enough for pooling and short enough for position tables. A batch of one is last, because
# some exporters write it into the targets of Reshape.
_TRIED_SIZES = ((2, 8), (2, 32), (2, 64), (2, 224), (1, 8), (1, 32), (1, 224))
# Values of a run that are kept for the next reader of the same values.
_KEPT_BYTES = 16 << 20
_POOLS = frozenset({"AveragePool", "LpPool", "MaxPool"})
# Means and maxima over whole images, with the least number of axes of the images.
_OF_IMAGES = {"GlobalAveragePool": 3, "GlobalLpPool": 3, "GlobalMaxPool": 3, "ReduceMean": 4}
_MOST_ENTRIES = 2**31  # largest number of entries of a generated input


class SampleRun:
    """Runs a graph on small batches; inputs without a declared shape accept any shape.

    ``what`` is the purpose of the runs, for messages. ``facts`` of an earlier run replace a session
    that infers element types.
    """

    def __init__(
        self, graph: Graph, what: str = "a sample run", facts: Mapping[str, Fact] | None = None
    ) -> None:
        self._graph, self._facts = graph, facts
        self._what = f"{what} of '{graph.name}'"
        self._chains: dict[tuple[str, ...], Chain] = {}
        # The first feeds whose few values were read, which are read again, and these values.
        self._first: tuple[Mapping[str, Array], dict[str, Array]] = {}, {}

    @cached_property
    def dtypes(self) -> Mapping[str, DType]:
        """Element type of each numeric result, in topological order.

        ``BackendError`` is raised if ONNX Runtime refuses the graph.
        """
        if self._facts is not None:
            known = {name: fact.dtype for name, fact in self._facts.items()}
        else:
            known = {name: entry.dtype for name, entry in self._inferred.items()}
        return {name: known[name] for name in self._computed if name in known}

    def inferred_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes that ONNX Runtime infers from the shapes of the inputs."""
        shapes = {name: entry.shape or () for name, entry in self._inferred.items()}
        # ONNX Runtime returns an empty shape for scalars and for unknown ranks.
        empty = [name for name, shape in shapes.items() if not shape]
        nodes = _measuring(self._graph.nodes, empty)
        ranks = inferred(self._graph, nodes, map(_shape_of, empty), self._what) if empty else {}
        fixed = {
            name: tuple(size for size in shape if isinstance(size, int))
            for name, shape in shapes.items()
            if shape or ranks[_shape_of(name)].shape == (0,)
        }
        return {name: shape for name, shape in fixed.items() if len(shape) == len(shapes[name])}

    def facts(
        self, feeds: Mapping[str, Array], known: Mapping[str, tuple[int, ...]] | None = None
    ) -> dict[str, Fact]:
        """Return element type and shape of constants, inputs and results, except sequences.

        ``known`` has the shapes of results that need no run. ``BackendError`` is raised if an
        operator failed, because the sizes of the feeds do not fit.
        """
        shapes = dict(known or {})
        unknown = tuple(name for name in self.dtypes if name not in shapes)
        if unknown:
            names = tuple(map(_shape_of, unknown))
            if names not in self._chains:
                nodes = _measuring(SubGraph(self._graph, unknown).nodes, unknown)
                self._chains[names] = Chain(self._graph, nodes, names, self._what)
            measured = self._chains[names].run(self._with_copies(feeds))
            shapes |= {name: tuple(map(int, measured[_shape_of(name)])) for name in unknown}
        return {
            **{name: Fact(array.dtype, array.shape) for name, array in self._constants.items()},
            **{name: Fact(array.dtype, array.shape) for name, array in feeds.items()},
            **{name: Fact(dtype, shapes[name]) for name, dtype in self.dtypes.items()},
        }

    def values(self, feeds: Mapping[str, Array], names: Iterable[str]) -> dict[str, Array]:
        """Return values of the graph: inputs, constants, or results that are arrays.

        ``BackendError`` is raised if an operator failed, because the sizes of the feeds do not fit.
        """
        results = tuple(name for name in names if name not in feeds)
        first, known = self._first
        again = not first or _equal(first, feeds)
        if not (again and known.keys() >= {*results}):
            if results not in self._chains:
                nodes = SubGraph(self._graph, results).nodes
                self._chains[results] = Chain(self._graph, nodes, results, self._what)
            values = self._chains[results].run(self._with_copies(feeds))
            if again and sum(array.nbytes for array in values.values()) <= _KEPT_BYTES:
                self._first = dict(feeds), values
            return {**values, **feeds}
        return {**{name: known[name] for name in results}, **feeds}

    def _with_copies(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Return feeds with copies of running statistics, which ONNX Runtime 1.32 overwrites."""
        norms = (node for node in self._graph.nodes if node.op == "BatchNormalization")
        written = {name for node in norms for name in node.inputs[3:]}
        return {name: a.copy() if name in written else a for name, a in feeds.items()}

    @cached_property
    def _computed(self) -> tuple[str, ...]:
        return tuple(name for node in self._graph.nodes for name in node.outputs if name)

    @cached_property
    def _constants(self) -> Mapping[str, Array]:
        inputs = {entry.name for entry in self._graph.inputs}
        return {name: a for name, a in self._graph.constants.items() if name not in inputs}

    @cached_property
    def _inferred(self) -> Mapping[str, Input]:
        return inferred(self._graph, self._graph.nodes, self._computed, self._what)


def _equal(left: Mapping[str, Array], right: Mapping[str, Array]) -> bool:
    """Return whether feeds have the same arrays, or arrays of the same bits."""
    return left.keys() == right.keys() and all(
        array is right[name]
        or (array.shape == right[name].shape and array.tobytes() == right[name].tobytes())
        for name, array in left.items()
    )


def _shape_of(name: str) -> str:
    return f"shape of {name}"


def _measuring(nodes: Iterable[Node], names: Collection[str]) -> list[Node]:
    """Return the nodes, with nodes that return the shapes of the results among ``names``."""
    measured = frozenset(names)
    extended: list[Node] = []
    for node in nodes:
        results = [name for name in node.outputs if name in measured]
        extended += [node, *(Node("Shape", (name,), (_shape_of(name),)) for name in results)]
    return extended


def open_run(graph: Graph, facts: Mapping[str, Fact] | None = None) -> SampleRun:
    """Return sample runs that ignore the declared sizes of the inputs."""
    inputs = tuple(replace(entry, shape=None) for entry in graph.inputs)
    return SampleRun(replace(graph, inputs=inputs), facts=facts)


def sample_facts(graph: Graph, inputs: Mapping[str, Array] | None = None) -> dict[str, Fact]:
    """Return element type and shape of every value, from one run on a small batch.

    Sequences and optional values have none. The run uses the first examples of ``inputs`` if the
    model declares the batch axes. An axis of size one without a declared size is doubled, so that
    it differs from axes of fixed size one. None generates inputs from the declared shapes. A
    ModelError says that the model fails on all tried inputs.
    """
    run = SampleRun(graph)
    failures: list[str] = []
    ran: list[dict[str, Fact]] = []
    for feeds in _sample_feeds(graph, inputs):
        try:
            ran.append(run.facts(feeds))
        except MissingKernelError:  # the error does not depend on the inputs
            raise
        except BackendError as failure:
            failures.append(f"{failure}")
            continue
        if inputs is not None or _pools_fit(graph, ran[-1]):
            return ran[-1]
    if ran:
        return ran[0]
    if inputs is None:
        raise ModelError(
            f"the model does not run on generated inputs; pass sample_inputs (--inputs), a real "
            f"batch. {failures[0]}"
        )
    differing = "; ".join(disagreements(graph, inputs))
    raise ModelError(
        f"the model does not run on the batch. {failures[-1]}{differing and f' {differing}.'}"
    )


def measured_facts(graph: Graph, feeds: Mapping[str, Array]) -> dict[str, Fact]:
    """Return element type and shape of every value on a batch.

    ``feeds`` has arrays for all inputs, and for constants with another value.
    """
    inputs = tuple(Input(name, array.dtype, array.shape) for name, array in feeds.items())
    run = SampleRun(replace(graph, inputs=inputs), "a measuring run")
    return run.facts(feeds, run.inferred_shapes())


def sample_batch(
    graph: Graph, facts: Mapping[str, Fact], inputs: Mapping[str, Array] | None
) -> dict[str, Array]:
    """Return the inputs of the sample run that measured the facts.

    ``facts`` is the result of ``sample_facts`` for ``inputs``.
    """
    return next(
        feeds
        for feeds in _sample_feeds(graph, inputs)
        if all(facts[name].shape == array.shape for name, array in feeds.items())
    )


def _sample_feeds(graph: Graph, inputs: Mapping[str, Array] | None) -> Iterator[dict[str, Array]]:
    """Yield candidates for the inputs of a sample run, in the order of trial."""
    if inputs is None:
        for first, other in _TRIED_SIZES:
            yield _generated_feeds(graph.inputs, first, other)
        # A mask over past states and tokens is as long as both together.
        for entry in graph.inputs:
            if entry.dtype.kind in "iu":
                yield _generated_feeds(graph.inputs, *_TRIED_SIZES[0], mask=entry.name)
    else:
        checked = check_inputs(graph, inputs)
        few = first_examples(graph.inputs, checked)
        yield {entry.name: _doubled(entry, few[entry.name]) for entry in graph.inputs}
        yield {entry.name: _doubled(entry, checked[entry.name]) for entry in graph.inputs}
        yield checked


def _pools_fit(graph: Graph, facts: Mapping[str, Fact]) -> bool:
    """Return whether all pooling windows fit their images, and images have several entries.

    ONNX Runtime does not check the windows. An image of one entry would hide along which axes the
    mean of an image is broadcast.
    """
    for node in graph.nodes:
        if node.op in _OF_IMAGES and not node.domain:
            shape, mean = (facts[name].shape for name in (node.inputs[0], node.outputs[0]))
            if len(shape) >= _OF_IMAGES[node.op] and shape == mean:
                return False
        if node.op in _POOLS:
            image = facts[node.inputs[0]].shape[2:]
            window = integers(node, "kernel_shape", image)
            pads = integers(node, "pads", (0,) * 2 * len(image))
            padded = zip(image, pads, pads[len(image) :], window, strict=False)
            if any(size + before + after < taps for size, before, after, taps in padded):
                return False
    return True


def _generated_feeds(
    inputs: Sequence[Input], first: int, other: int, mask: str = ""
) -> dict[str, Array]:
    """Return generated inputs whose axes without a declared size have the given sizes.

    Axes of the input ``mask`` whose symbol no other input has are twice as long.
    """
    symbols: dict[str, int] = {}
    uses = Counter(size for entry in inputs for size in {*(entry.shape or ())})
    sums: list[str] = []
    for entry in inputs:
        for axis, declared in enumerate(entry.shape or ()):
            if isinstance(declared, str):
                size = first if axis == 0 or says_batch(declared) else other
                twice = axis > 0 and entry.name == mask and uses[declared] == 1
                symbols.setdefault(declared, 2 * size if twice else size)
                sums += [declared] if "+" in declared else []
    for total in sums:
        terms = [term.strip() for term in total.split("+")]
        if all(term in symbols or term.isdecimal() for term in terms):
            symbols[total] = sum(symbols.get(term) or int(term) for term in terms)
    return {entry.name: _generated(entry, first, other, symbols) for entry in inputs}


def _generated(entry: Input, first: int, other: int, symbols: Mapping[str, int]) -> Array:
    """Return an input of small positive numbers, zeros for indices, or True for masks."""
    if entry.shape is None:
        raise ModelError(
            f"input '{entry.name}' declares no shape; pass sample_inputs (--inputs), a real batch."
        )
    shape = [
        symbols[size]
        if isinstance(size, str)
        else (other if axis else first)
        if size is None
        else size
        for axis, size in enumerate(entry.shape)
    ]
    if not 0 < prod(shape) <= _MOST_ENTRIES:
        raise ModelError(
            f"input '{entry.name}' declares the shape ({spelled_shape(entry.shape)}), which "
            f"{'no batch can have' if prod(shape) else 'has no entries'}; correct the declaration."
        )
    if np.issubdtype(entry.dtype, np.floating):
        return np.random.default_rng(0).uniform(0.1, 0.9, shape).astype(entry.dtype)
    filling: bool | str = "" if entry.dtype == np.object_ else entry.dtype == np.bool_
    return np.full(shape, filling, dtype=entry.dtype)


def _doubled(entry: Input, array: Array) -> Array:
    for axis, size in enumerate(entry.shape or ()):
        if not isinstance(size, int) and array.shape[axis] == 1:
            array = np.repeat(array, 2, axis=axis)
    return array
