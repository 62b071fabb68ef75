"""Lists the random values of a graph.

A later pass over the same batch reads the random values of the first forward pass, so that all
values and gradients of a batch belong to the same sample.
"""

from collections.abc import Iterable

from kfac_engine.graph.structure import Graph, Node

_RANDOM = frozenset(
    {
        "Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform",
        "RandomUniformLike",
    }
)  # fmt: skip


def drawn_values(graph: Graph) -> tuple[str, ...]:
    """Return the results of all random nodes."""
    return tuple(
        name for node in graph.nodes if draws(graph, node) for name in node.outputs if name
    )


def given_draws(nodes: Iterable[Node], drawn: Iterable[str]) -> tuple[Node, ...]:
    """Return ``nodes`` without the nodes that compute the values ``drawn``."""
    names = frozenset(drawn)
    return tuple(node for node in nodes if names.isdisjoint(node.outputs))


def draws(graph: Graph, node: Node) -> bool:
    """Return whether the results of a node are random."""
    return node.qualified_op in _RANDOM or (node.qualified_op == "Dropout" and drops(graph, node))


def drops(graph: Graph, node: Node) -> bool:
    """Return whether a Dropout node can be in training mode."""
    training = (*node.inputs, "", "")[2]
    frozen = graph.constants.get(training)
    return bool(training) and (frozen is None or bool(frozen.any()))
