"""Rewrites a graph until every operator on a differentiated path has a derivative rule.

The table of rewrites is in ``autodiff.lowering``.
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

# Largest depth of nested bodies; no exporter nests as deep.
_MOST_ROUNDS = 16


def lowered(
    graph: Graph, wrt: Iterable[str], inputs: Mapping[str, Array] | None = None
) -> tuple[Graph, dict[str, Fact]]:
    """Return a graph in operators that have derivative rules, with the facts of its values.

    Nodes that do not depend on the values ``wrt`` do not change. Neither do nodes that a lowering
    refuses; ``differentiate`` raises an error if their derivative is needed. Sample runs use
    ``inputs``, or a generated batch if it is None. ``ModelError`` is raised if the model runs on no
    generated batch.
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
    """Return a graph with axes for each ``Squeeze``, so that a batch axis of size one remains."""
    named: dict[str, Node] = {}
    constants: dict[str, Array] = {}
    for node in graph.nodes:
        if node.op == "Squeeze" and not node.domain and not any(node.inputs[1:]):
            (operand, *_), axes = node.inputs, f"axes of {node.name}"
            shape = facts[operand].shape
            constants[axes] = np.array([axis for axis, size in enumerate(shape) if size == 1])
            named[node.name] = replace(node, inputs=(operand, axes))
    if not named:
        return graph, facts
    nodes = tuple(named.get(node.name, node) for node in graph.nodes)
    added = {name: Fact(array.dtype, array.shape) for name, array in constants.items()}
    graph = replace(graph, nodes=nodes, constants={**graph.constants, **constants})
    return graph, {**facts, **added}


def with_taken_branches(
    loaded: LoadedModel, inputs: Mapping[str, Array] | None = None
) -> LoadedModel:
    """Return a model in which the selected branch replaces each ``If`` with a constant condition.

    Scalar integer inputs in ``inputs`` are constants. An ``If`` whose condition depends on sizes
    remains, because the sizes may differ between batches. Weights of removed branches are removed.
    Without ``inputs``, sample runs use a generated batch. ``ModelError`` is raised if the model
    runs on no generated batch.
    """
    graph = replace(loaded.graph, fixed=fixed_inputs(loaded.graph, inputs))
    while ifs := [node for node in graph.nodes if node.qualified_op == "If"]:
        facts = sample_facts(graph, inputs)
        used = [(node, if_) for node in ifs if _is_decided(node, graph, facts)]
        rewritten = _rewritten(graph, facts, used)
        if rewritten is graph:
            break
        graph = rewritten
    read = set(graph.outputs).union(*((*node.inputs, *node.captures) for node in graph.nodes))
    constants = {n: a for n, a in graph.constants.items() if n in read or n not in graph.inner}
    return replace(loaded, graph=replace(graph, constants=constants))


def _is_decided(node: Node, graph: Graph, facts: Mapping[str, Fact]) -> bool:
    origin = Origin(graph, facts, node.inputs[0])
    return not (origin.undecided or origin.sized)


def _without_unread_sequences(graph: Graph, facts: Mapping[str, Fact]) -> Graph:
    """Return a graph without nodes whose results are unread sequences."""
    read = set(graph.outputs)
    needed = []
    for node in reversed(graph.nodes):
        if read.intersection(node.outputs) or any(name in facts for name in node.outputs):
            needed.append(node)
            read.update((*node.inputs, *node.captures))
    return graph if len(needed) == len(graph.nodes) else replace(graph, nodes=tuple(needed[::-1]))


def _rewritten(
    graph: Graph, facts: Mapping[str, Fact], targets: Iterable[tuple[Node, Lowering]]
) -> Graph:
    used = sorted((*graph.values(), *(node.name for node in graph.nodes)))
    builders: dict[str, LoweringBuilder] = {}
    for node, rewriting in targets:
        b = LoweringBuilder(graph, facts, _free_prefix(node, used))
        # A later round may rewrite a refused node. `differentiate` raises the error if its
        # derivative is needed.
        with suppress(UnsupportedOpError):
            rewriting(b, b.read_results(node))
            if not _is_written_again(node, b.nodes):
                builders[node.name] = b
    if not builders:
        return graph
    nodes = (builders[node.name].nodes if node.name in builders else [node] for node in graph.nodes)
    constants = dict(graph.constants)
    for b in builders.values():
        constants |= b.constants
    return replace(graph, nodes=tuple(chain.from_iterable(nodes)), constants=constants)


def _is_written_again(node: Node, nodes: Sequence[Node]) -> bool:
    """Return whether a lowering wrote the node itself, up to the names of results."""
    if len(nodes) != 1:
        return False
    only = replace(nodes[0], outputs=node.outputs)
    same = only.attributes is node.attributes and only == node
    return same and [*map(bool, nodes[0].outputs)] == [*map(bool, node.outputs)]


def _targets(graph: Graph, wrt: Iterable[str]) -> Iterator[tuple[Node, Lowering]]:
    """Yield the nodes to rewrite, each with its lowering."""
    # Values with a nonzero derivative with respect to ``wrt``.
    dependent = dependents(graph.nodes, wrt, ZERO_DERIVATIVE)
    for node in graph.nodes:
        if dependent.intersection((*node.inputs, *node.captures)):
            rewriting = find_lowering(node, graph)
            if rewriting is not None:
                yield node, rewriting


def _free_prefix(node: Node, used: Sequence[str]) -> str:
    """Return a prefix that no name in the sorted list ``used`` starts with."""
    prefix = f"{node.name}/"
    while _is_prefix(prefix, used):
        prefix = f"{prefix}_"
    return prefix


def _is_prefix(prefix: str, names: Sequence[str]) -> bool:
    # In sorted order, names with the prefix follow directly after it.
    first = bisect_left(names, prefix)
    return first < len(names) and names[first].startswith(prefix)
