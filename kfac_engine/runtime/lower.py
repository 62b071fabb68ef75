"""Rewrites a graph until every operator that is to be differentiated has a derivative rule.

What an operator becomes is in the table of ``lowering``.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain

import numpy as np

from kfac_engine._types import Array
from kfac_engine.autodiff.lowering import Lowering, find_lowering
from kfac_engine.autodiff.lowering.builder import LoweringBuilder
from kfac_engine.autodiff.lowering.known import Origin
from kfac_engine.autodiff.lowering.loops import if_
from kfac_engine.autodiff.rules import ZERO_DERIVATIVE
from kfac_engine.errors import UnsupportedOpError
from kfac_engine.graph.analysis.subgraph import dependents
from kfac_engine.graph.load import LoadedModel
from kfac_engine.graph.structure import Fact, Graph, Node
from kfac_engine.runtime.inputs import fixed_inputs
from kfac_engine.runtime.sample_run import sample_facts

# Bodies within bodies: far more rounds than any exporter nests.
_MOST_ROUNDS = 16


def lowered(
    graph: Graph, wrt: Iterable[str], inputs: Mapping[str, Array] | None = None
) -> tuple[Graph, dict[str, Fact]]:
    """The same function in operators that have derivative rules, and facts about its values.

    Args:
        graph: Canonical graph.
        wrt: What it will be differentiated with respect to; nodes that do not depend on it stay.
            So do those that a lowering refuses: ``differentiate`` says why where it matters.
        inputs: A batch for the sample run; made up when left out.

    Returns:
        The graph, the given one if nothing was to be rewritten, and type and shape of each value.

    Raises:
        ModelError: The model runs on none of the inputs that were made up.
    """
    graph, facts = _with_named_axes(graph, sample_facts(graph, inputs))
    wrt = tuple(wrt)
    for _ in range(_MOST_ROUNDS):
        rewritten = _rewritten(graph, facts, _targets(graph, wrt))
        if rewritten is graph:
            break
        graph, facts = _with_named_axes(rewritten, sample_facts(rewritten, inputs))
    return _without_unread_sequences(graph, facts), facts


def _with_named_axes(graph: Graph, facts: dict[str, Fact]) -> tuple[Graph, dict[str, Fact]]:
    """The graph with ``Squeeze`` naming its axes: a batch of one keeps its axis, as others do."""
    named: dict[str, Node] = {}
    constants: dict[str, Array] = {}
    for node in graph.nodes:
        if node.op == "Squeeze" and not node.domain and not any(node.inputs[1:]):
            (operand, *_), axes = node.inputs, f"axes of {node.name}"
            shape = facts[operand].shape
            constants[axes] = np.array([axis for axis, side in enumerate(shape) if side == 1])
            named[node.name] = replace(node, inputs=(operand, axes))
    if not named:
        return graph, facts
    nodes = tuple(named.get(node.name, node) for node in graph.nodes)
    known = {name: Fact(array.dtype, array.shape) for name, array in constants.items()}
    graph = replace(graph, nodes=nodes, constants={**graph.constants, **constants})
    return graph, {**facts, **known}


def with_taken_branches(
    loaded: LoadedModel, inputs: Mapping[str, Array] | None = None
) -> LoadedModel:
    """The model with the branch in the place of each ``If`` that constants decide.

    Inputs of one whole number each count as constants if they are given. What sizes decide stays,
    as it may be decided otherwise in another batch. Weights of other branches are gone.

    Args:
        loaded: The model.
        inputs: A batch for sample runs; made up when left out.

    Returns:
        The model; its file is the same.

    Raises:
        ModelError: The model runs on none of the inputs that were made up.
    """
    graph = replace(loaded.graph, fixed=fixed_inputs(loaded.graph, inputs))
    while ifs := [node for node in graph.nodes if node.qualified_op == "If"]:
        facts = sample_facts(graph, inputs)
        taken = [(node, if_) for node in ifs if _is_decided(node, graph, facts)]
        rewritten = _rewritten(graph, facts, taken)
        if rewritten is graph:
            break
        graph = rewritten
    read = set(graph.outputs).union(*((*node.inputs, *node.captures) for node in graph.nodes))
    kept = {n: a for n, a in graph.constants.items() if n in read or n not in graph.inner}
    return replace(loaded, graph=replace(graph, constants=kept))


def _is_decided(node: Node, graph: Graph, facts: Mapping[str, Fact]) -> bool:
    origin = Origin(graph, facts, node.inputs[0])
    return not (origin.undecided or origin.sized)


def _without_unread_sequences(graph: Graph, facts: Mapping[str, Fact]) -> Graph:
    """The graph without values that are no tensors, where rewriting left them without readers."""
    read = set(graph.outputs)
    kept = []
    for node in reversed(graph.nodes):
        if read.intersection(node.outputs) or any(name in facts for name in node.outputs):
            kept.append(node)
            read.update((*node.inputs, *node.captures))
    return graph if len(kept) == len(graph.nodes) else replace(graph, nodes=tuple(kept[::-1]))


def _rewritten(
    graph: Graph, facts: Mapping[str, Fact], targets: Iterable[tuple[Node, Lowering]]
) -> Graph:
    taken = sorted((*graph.values(), *(node.name for node in graph.nodes)))
    builders: dict[str, LoweringBuilder] = {}
    for node, rewriting in targets:
        b = LoweringBuilder(graph, facts, _free_prefix(node, taken))
        # What is refused may be known better in another round. What stays is refused by
        # `differentiate`, if it is asked for a derivative there.
        with suppress(UnsupportedOpError):
            rewriting(b, node)
            builders[node.name] = b
    if not builders:
        return graph
    nodes = (builders[node.name].nodes if node.name in builders else [node] for node in graph.nodes)
    constants = dict(graph.constants)
    for b in builders.values():
        constants |= b.constants
    return replace(graph, nodes=tuple(chain.from_iterable(nodes)), constants=constants)


def _targets(graph: Graph, wrt: Iterable[str]) -> Iterator[tuple[Node, Lowering]]:
    """The nodes that are to be rewritten, and what rewrites each."""
    # Values that change with ``wrt``, other than in jumps.
    dependent = dependents(graph, wrt, ZERO_DERIVATIVE)
    for node in graph.nodes:
        if dependent.intersection((*node.inputs, *node.captures)):
            rewriting = find_lowering(node, graph)
            if rewriting is not None:
                yield node, rewriting


def _free_prefix(node: Node, taken: Sequence[str]) -> str:
    """A prefix that none of the sorted names ``taken`` has."""
    prefix = f"{node.name}/"
    while _is_prefix(prefix, taken):
        prefix = f"{prefix}_"
    return prefix


def _is_prefix(prefix: str, names: Sequence[str]) -> bool:
    # Sorted, names that start with it come first among those that are not before it.
    first = bisect_left(names, prefix)
    return first < len(names) and names[first].startswith(prefix)
