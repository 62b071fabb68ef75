"""Folds computed operands that slice, reshape or scale a weight to constants."""

from collections.abc import Set
from dataclasses import replace

from kfac_engine.autodiff.canonicalize.weights import SCALINGS, rearranged
from kfac_engine.autodiff.differentiate import needed
from kfac_engine.autodiff.random_ops import draws
from kfac_engine.graph.analysis.rearrangements import MOVES
from kfac_engine.graph.compact import compact_model
from kfac_engine.graph.structure import Graph
from kfac_engine.sessions.session import Session


def fold_weight_operands(graph: Graph, parameters: Set[str]) -> Graph:
    """Return a graph in which the operands that slice, reshape or scale a weight are constants.

    The result is ``graph`` itself if all such operands are constants.
    """
    weights = rearranged(graph, parameters)
    known = _computed_from_constants(graph, parameters)
    wanted = {
        name
        for node in graph.nodes
        if not node.domain and node.op in MOVES | SCALINGS and weights.intersection(node.inputs)
        for name in node.inputs
        if name in known and name not in graph.constants
    }
    if not wanted:
        return graph
    nodes = needed(graph.nodes, wanted)
    reads = {name for node in nodes for name in node.inputs}
    inputs = {name: array for name, array in graph.constants.items() if name in reads}
    model = compact_model(nodes, [], list(wanted), inputs, graph.opset)
    session = Session(model, threads=1, optimize=False, what="the operands of weights")
    values = session.run(list(wanted), {})
    names = {name: f"{name}/folded" for name in wanted}
    constants = {names[name]: array for name, array in values.items()}
    return replace(
        graph,
        nodes=tuple(
            replace(node, inputs=tuple(names.get(name, name) for name in node.inputs))
            for node in graph.nodes
        ),
        constants={**graph.constants, **constants},
    )


def _computed_from_constants(graph: Graph, parameters: Set[str]) -> frozenset[str]:
    """Return the values that deterministic standard operators compute from untrained constants."""
    known = graph.constants.keys() - parameters
    for node in graph.nodes:
        plain = not node.domain and not node.captures and not draws(graph, node)
        if plain and known.issuperset(filter(None, node.inputs)):
            known.update(node.outputs)
    return frozenset(known - {""})
