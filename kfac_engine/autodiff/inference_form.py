"""Converts a graph to the form of inference, which a trained model computes."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from kfac_engine.autodiff.random_ops import drops
from kfac_engine.autodiff.running_statistics import STATISTICS, zeros_name
from kfac_engine.graph.structure import Graph, Node


def inference_form(graph: Graph, statistics: Collection[str]) -> Graph:
    """Return a graph whose normalizations and dropouts have the form of inference.

    A ``BatchNormalization`` in training form uses its running mean and variance in place of the
    statistics of the batch, and leaves them unchanged. A ``Dropout`` whose training mode is a
    constant drops no elements. Nodes in the bodies of loops do not change.

    Args:
        graph: Graph after ``with_running_statistics``, which may be lowered.
        statistics: Names of the constants that are running statistics.

    Returns:
        The graph, with the same names for the same values.
    """
    unchanged: dict[str, str] = {}
    nodes = (new for node in graph.nodes for new in _rewritten(node, graph, statistics, unchanged))
    return replace(graph, nodes=tuple(nodes))


def _rewritten(
    node: Node, graph: Graph, statistics: Collection[str], unchanged: dict[str, str]
) -> Iterator[Node]:
    """Yield the inference form of a node.

    Args:
        node: A node of the graph.
        graph: The graph.
        statistics: Names of running statistics.
        unchanged: Receives a map from the batch's share of a running statistic to that statistic.
    """
    if node.qualified_op == "BatchNormalization" and node.attributes.get("training_mode", 0):
        yield from _with_running_statistics(node, statistics, unchanged)
    elif node.qualified_op == "Dropout" and _always_drops(node, graph):
        yield replace(node, inputs=node.inputs[:1])
    elif node.op == "Add" and node.inputs[-1] in unchanged:
        yield Node("Identity", (unchanged[node.inputs[-1]],), node.outputs, {}, node.name)
    else:
        yield node


def _always_drops(node: Node, graph: Graph) -> bool:
    """Return whether the training mode of a Dropout node is a constant of the file that is true."""
    return drops(graph, node) and node.inputs[2] in graph.constants


def _with_running_statistics(
    node: Node, statistics: Collection[str], unchanged: dict[str, str]
) -> Iterator[Node]:
    """Yield a normalization with running statistics, and nodes that return them unchanged."""
    replaced: Mapping[str, str] = {zeros_name(name, node): name for name in statistics}
    inputs, outputs = list(node.inputs), [*node.outputs, "", ""]
    for operand, result in STATISTICS.items():
        if inputs[operand] in replaced:
            inputs[operand] = replaced[inputs[operand]]
            unchanged[outputs[result]] = inputs[operand]
        elif outputs[result]:
            name = f"node of {outputs[result]} in inference"
            yield Node("Identity", (inputs[operand],), (outputs[result],), {}, name)
    settings = {key: value for key, value in node.attributes.items() if key != "training_mode"}
    yield replace(node, inputs=tuple(inputs), outputs=node.outputs[:1], attributes=settings)
