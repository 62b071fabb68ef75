"""Random draws of a graph: a batch keeps those of its first forward pass.

Values that are asked for later are computed by another pass. It is fed what the first one drew, so
that all values of a batch belong together, and gradients to the values that were read before.
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
    """Results of all nodes that draw."""
    return tuple(
        name for node in graph.nodes if draws(graph, node) for name in node.outputs if name
    )


def given_draws(nodes: Iterable[Node], drawn: Iterable[str]) -> tuple[Node, ...]:
    """``nodes`` without those that make the values ``drawn``."""
    names = frozenset(drawn)
    return tuple(node for node in nodes if names.isdisjoint(node.outputs))


def draws(graph: Graph, node: Node) -> bool:
    """Whether a node of a graph makes something else each time it runs."""
    return node.qualified_op in _RANDOM or (node.qualified_op == "Dropout" and drops(graph, node))


def drops(graph: Graph, node: Node) -> bool:
    """Whether a Dropout node may drop anything: it can be in training mode."""
    training = (*node.inputs, "", "")[2]
    frozen = graph.constants.get(training)
    return bool(training) and (frozen is None or bool(frozen.any()))
