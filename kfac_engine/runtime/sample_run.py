"""Sample runs: shapes and element types of the values of a model, from one small run.

A run returns shapes. A value itself is returned only on request, and released after use.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from math import prod

import numpy as np

from kfac_engine._types import Array, DType
from kfac_engine.autodiff.rules.attributes import integers
from kfac_engine.errors import BackendError, MissingKernelError, ModelError
from kfac_engine.graph.analysis.subgraph import SubGraph
from kfac_engine.graph.structure import Fact, Graph, Input, Node
from kfac_engine.runtime.inputs import check_inputs, disagreements, spelled
from kfac_engine.runtime.leading_examples import first_examples, says_batch
from kfac_engine.runtime.session_chain import Chain, inferred

# Sizes tried for open axes in a sample run, as (first axis, other axes). The first axis is
# the batch more often than not, and a batch of two keeps it apart from axes of one; other axes
# must be long enough for pooling and short enough for position tables. A batch of one comes last:
# some exporters bake it into Reshape targets.
_TRIED_SIZES = ((2, 8), (2, 32), (2, 224), (1, 8), (1, 32), (1, 224))
_POOLS = frozenset({"AveragePool", "LpPool", "MaxPool"})
_MOST_ENTRIES = 2**31  # of an input that is made up


class SampleRun:
    """Runs a graph on small batches.

    Args:
        graph: The graph. Inputs that declare no shape take arrays of any.
        what: What the runs are for, for messages.
        facts: Of an earlier run, which spare the session that finds element types.
    """

    def __init__(
        self,
        graph: Graph,
        what: str = "a sample run",
        facts: Mapping[str, Fact] | None = None,
    ) -> None:
        self._graph, self._facts = graph, facts
        self._what = f"{what} of '{graph.name}'"
        self._chains: dict[tuple[str, ...], Chain] = {}

    @cached_property
    def dtypes(self) -> Mapping[str, DType]:
        """Element type of each result that is an array of numbers, in topological order.

        Raises:
            BackendError: ONNX Runtime refuses the graph.
        """
        if self._facts is not None:
            known = {name: fact.dtype for name, fact in self._facts.items()}
        else:
            known = {name: entry.dtype for name, entry in self._inferred.items()}
        return {name: known[name] for name in self._computed if name in known}

    def inferred_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of results that ONNX Runtime infers from those of the inputs, without a run."""
        shapes = {name: entry.shape or () for name, entry in self._inferred.items()}
        # An unknown rank looks like that of a scalar, whose shape has no entries.
        empty = [name for name, shape in shapes.items() if not shape]
        nodes = _measuring(self._graph.nodes, empty)
        ranks = inferred(self._graph, nodes, map(_shape_of, empty), self._what) if empty else {}
        fixed = {
            name: tuple(side for side in shape if isinstance(side, int))
            for name, shape in shapes.items()
            if shape or ranks[_shape_of(name)].shape == (0,)
        }
        return {name: shape for name, shape in fixed.items() if len(shape) == len(shapes[name])}

    def facts(
        self, feeds: Mapping[str, Array], known: Mapping[str, tuple[int, ...]] | None = None
    ) -> dict[str, Fact]:
        """Element type and shape of constants, inputs and results; sequences have none.

        Args:
            feeds: One array for each input.
            known: Results to shapes that need no run.

        Returns:
            Name to fact.

        Raises:
            BackendError: An operator failed: the sizes of the feeds do not fit.
        """
        shapes = dict(known or {})
        asked = tuple(name for name in self.dtypes if name not in shapes)
        if asked:
            names = tuple(map(_shape_of, asked))
            if names not in self._chains:
                nodes = _measuring(SubGraph(self._graph, asked).nodes, asked)
                self._chains[names] = Chain(self._graph, nodes, names, self._what)
            found = self._chains[names].run(self._spared(feeds))
            shapes |= {name: tuple(map(int, found[_shape_of(name)])) for name in asked}
        return {
            **{name: Fact(array.dtype, array.shape) for name, array in self._constants.items()},
            **{name: Fact(array.dtype, array.shape) for name, array in feeds.items()},
            **{name: Fact(dtype, shapes[name]) for name, dtype in self.dtypes.items()},
        }

    def values(self, feeds: Mapping[str, Array], names: Iterable[str]) -> dict[str, Array]:
        """Some values by name; see ``facts``.

        Args:
            feeds: One array for each input.
            names: Inputs, or results that are arrays.

        Returns:
            Name to array.
        """
        asked = tuple(name for name in names if name not in feeds)
        if asked not in self._chains:
            nodes = SubGraph(self._graph, asked).nodes
            self._chains[asked] = Chain(self._graph, nodes, asked, self._what)
        return {**self._chains[asked].run(self._spared(feeds)), **feeds}

    def _spared(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """The feeds, with copies of running statistics: ONNX Runtime 1.32 writes into those."""
        norms = (node for node in self._graph.nodes if node.op == "BatchNormalization")
        written = {name for node in norms for name in node.inputs[3:]}
        return {name: a.copy() if name in written else a for name, a in feeds.items()}

    @cached_property
    def _computed(self) -> tuple[str, ...]:
        return tuple(name for node in self._graph.nodes for name in node.outputs if name)

    @cached_property
    def _constants(self) -> Mapping[str, Array]:
        fed = {entry.name for entry in self._graph.inputs}
        return {name: a for name, a in self._graph.constants.items() if name not in fed}

    @cached_property
    def _inferred(self) -> Mapping[str, Input]:
        return inferred(self._graph, self._graph.nodes, self._computed, self._what)


def _shape_of(name: str) -> str:
    return f"shape of {name}"


def _measuring(nodes: Iterable[Node], names: Collection[str]) -> list[Node]:
    """The nodes, and behind each those that return the shapes of its results among ``names``."""
    wanted = frozenset(names)
    placed: list[Node] = []
    for node in nodes:
        found = [name for name in node.outputs if name in wanted]
        placed += [node, *(Node("Shape", (name,), (_shape_of(name),)) for name in found)]
    return placed


def open_run(graph: Graph, facts: Mapping[str, Fact] | None = None) -> SampleRun:
    """Sample runs on inputs of any size, whatever the model declares; see ``SampleRun``."""
    anything = tuple(replace(entry, shape=None) for entry in graph.inputs)
    return SampleRun(replace(graph, inputs=anything), facts=facts)


def sample_facts(graph: Graph, inputs: Mapping[str, Array] | None = None) -> dict[str, Fact]:
    """Element type and shape of every value, from one small run of the model.

    Args:
        graph: The model.
        inputs: A real batch to run on, or its first examples where the declaration tells them. An
            open axis of size one is doubled, to keep it apart from axes that are always one.
            Inputs are made up from their declared shapes when left out.

    Returns:
        Value name to fact; sequences and optional values have none.

    Raises:
        ModelError: The model runs on none of the inputs.
        MissingKernelError: ONNX Runtime has no kernel for an operator.
    """
    run = SampleRun(graph)
    failures: list[str] = []
    ran: list[dict[str, Fact]] = []
    for feeds in _sample_feeds(graph, inputs):
        try:
            ran.append(run.facts(feeds))
        except MissingKernelError:  # no inputs would help
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
            f"the model could not be run on made-up inputs; pass sample_inputs, a real batch. "
            f"{failures[0]}"
        )
    differing = "; ".join(disagreements(graph, inputs))
    raise ModelError(
        f"the model could not be run on the batch. {failures[-1]}{differing and f' {differing}.'}"
    )


def measured_facts(graph: Graph, feeds: Mapping[str, Array]) -> dict[str, Fact]:
    """Element type and shape of every value on a given batch.

    Args:
        graph: A graph of any size.
        feeds: All its inputs, and constants that have another value.

    Returns:
        Value name to fact.
    """
    inputs = tuple(Input(name, array.dtype, array.shape) for name, array in feeds.items())
    run = SampleRun(replace(graph, inputs=inputs), "a measuring run")
    return run.facts(feeds, run.inferred_shapes())


def sample_batch(
    graph: Graph, facts: Mapping[str, Fact], inputs: Mapping[str, Array] | None
) -> dict[str, Array]:
    """The inputs that facts were measured on.

    Args:
        graph: The model.
        facts: As ``sample_facts`` gave them for ``inputs``.
        inputs: A real batch; None makes some up.

    Returns:
        Input name to array.
    """
    return next(
        feeds
        for feeds in _sample_feeds(graph, inputs)
        if all(facts[name].shape == array.shape for name, array in feeds.items())
    )


def _sample_feeds(graph: Graph, inputs: Mapping[str, Array] | None) -> Iterator[dict[str, Array]]:
    """Candidate inputs of a sample run, in the order of trial."""
    if inputs is None:
        for first, other in _TRIED_SIZES:
            symbols: dict[str, int] = {}
            yield {entry.name: _made_up(entry, first, other, symbols) for entry in graph.inputs}
    else:
        given = check_inputs(graph, inputs)
        few = first_examples(graph.inputs, given)
        yield {entry.name: _doubled(entry, few[entry.name]) for entry in graph.inputs}
        yield {entry.name: _doubled(entry, given[entry.name]) for entry in graph.inputs}
        yield given


def _pools_fit(graph: Graph, facts: Mapping[str, Fact]) -> bool:
    """Whether no pooling window is larger than its image, which ONNX Runtime would let pass."""
    for node in graph.nodes:
        if node.op in _POOLS:
            image = facts[node.inputs[0]].shape[2:]
            window = integers(node, "kernel_shape", image)
            pads = integers(node, "pads", (0,) * 2 * len(image))
            padded = zip(image, pads, pads[len(image) :], window, strict=False)
            if any(side + before + after < taps for side, before, after, taps in padded):
                return False
    return True


def _made_up(entry: Input, first: int, other: int, symbols: dict[str, int]) -> Array:
    """Small positive numbers, zeros for indices, True for masks: legal for nearly all operators."""
    if entry.shape is None:
        raise ModelError(
            f"input '{entry.name}' declares no shape; pass sample_inputs, a real batch."
        )
    sides = []
    for axis, side in enumerate(entry.shape):
        size = first if axis == 0 or says_batch(side) else other
        if isinstance(side, str):
            size = symbols.setdefault(side, size)  # one symbol is one size, as for real inputs
        sides.append(side if isinstance(side, int) else size)
    if not 0 < prod(sides) <= _MOST_ENTRIES:
        raise ModelError(
            f"input '{entry.name}' declares the shape ({spelled(entry.shape)}), which "
            f"{'no batch can have' if prod(sides) else 'holds nothing'}; correct the declaration."
        )
    if np.issubdtype(entry.dtype, np.floating):
        return np.random.default_rng(0).uniform(0.1, 0.9, sides).astype(entry.dtype)
    filling: bool | str = "" if entry.dtype == np.object_ else entry.dtype == np.bool_
    return np.full(sides, filling, dtype=entry.dtype)


def _doubled(entry: Input, array: Array) -> Array:
    for axis, side in enumerate(entry.shape or ()):
        if not isinstance(side, int) and array.shape[axis] == 1:
            array = np.repeat(array, 2, axis=axis)
    return array
