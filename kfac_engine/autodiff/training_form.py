"""Describes training and inference forms of normalizations and dropouts, and random values.

The updates of running statistics are added to a graph in training form. A trained model computes in
inference form.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

import numpy as np

from kfac_engine._types import Array
from kfac_engine.graph.structure import Graph, Node

# Operands of BatchNormalization that are running statistics, and the results that replace them.
STATISTICS: Mapping[int, int] = {3: 1, 4: 2}
_DEFAULT_MOMENTUM = 0.9


def with_running_statistics(graph: Graph) -> tuple[Graph, dict[str, str]]:
    """Return a graph that also computes the updated running statistics.

    Its second result maps each running statistic to the name of its updated value. Normalizations
    that share statistics update them one after the other. A graph without a normalization in
    training form is returned unchanged.
    """
    newest: dict[str, str] = {}
    constants: dict[str, Array] = {}
    nodes = [new for node in graph.nodes for new in _written(node, graph, newest, constants)]
    if not newest:
        return graph, newest
    return replace(graph, nodes=tuple(nodes), constants={**graph.constants, **constants}), newest


def joined_statistics(
    graph: Graph, examples: Array, after: Mapping[str, Array]
) -> dict[str, Array]:
    """Return the running statistics after a batch from the statistics after each of its parts.

    ``examples`` has the number of examples of each part, and ``after`` by name the statistics after
    each part, along the first axis; all parts start from the same statistics. A mean after the
    batch is the mean over the parts. A variance also contains the squared distances of the means of
    the parts: it is the variance of the joined parts. Normalizations that share their statistics
    leave out these distances. The arrays may be recorded ones.
    """
    shares = examples / examples.sum()

    def mean(parts: Array) -> Array:
        result: Array = (shares.astype(parts.dtype)[:, None] * parts).sum(axis=0)
        return result

    joined = {name: mean(parts) for name, parts in after.items()}
    nodes = list(filter(trains, graph.nodes))
    readers = Counter(name for node in nodes for name in node.inputs)
    for node in nodes:
        first, second = (node.inputs[operand] for operand in STATISTICS)
        if {first, second} <= joined.keys() and readers[first] == readers[second] == 1:
            # A mean after a part has the mean of the part with the weight 1 − momentum.
            share = 1 - _momentum(node)
            spread = mean((after[first] - joined[first]) ** 2)
            joined[second] = joined[second] + (spread / share if share else 0 * spread)
    return joined


def zeros_name(statistic: str, node: Node) -> str:
    """Return the name of the zeros that a normalization reads in place of a running statistic."""
    return f"{statistic} at {node.name}: zero"


def _written(
    node: Node, graph: Graph, newest: dict[str, str], constants: dict[str, Array]
) -> Iterator[Node]:
    """Yield a node and the nodes that update its statistics; ``newest`` receives their names."""
    if not trains(node):
        yield node
        return
    # ONNX Runtime 1.31 overwrites the old statistics, even in memory of the caller. The node
    # therefore reads zeros that no other node reads. Its result is (1 − momentum) times the
    # statistic of the batch.
    momentum = _momentum(node)
    inputs, outputs, later = list(node.inputs), [*node.outputs, "", ""][:3], []
    for operand, result in STATISTICS.items():
        statistic = inputs[operand]
        if statistic not in graph.constants:
            continue
        prefix, zero = f"{statistic} at {node.name}", zeros_name(statistic, node)
        decayed, share = (f"{prefix}: {what}" for what in ("kept", "share"))
        constants[f"{prefix}: momentum"] = np.asarray(momentum, graph.constants[statistic].dtype)
        old, new = newest.get(statistic, statistic), outputs[result] or f"{prefix}: new"
        yield Node("Sub", (old, old), (zero,), name=f"node of {zero}")
        yield Node("Mul", (old, f"{prefix}: momentum"), (decayed,), name=f"node of {decayed}")
        later.append(Node("Add", (decayed, share), (new,), name=f"node of {new}"))
        inputs[operand], outputs[result], newest[statistic] = zero, share, new
    yield replace(node, inputs=tuple(inputs), outputs=tuple(outputs))
    yield from later


def trains(node: Node) -> bool:
    """Return whether a node is a normalization in training form."""
    training = node.op == "BatchNormalization" and node.attributes.get("training_mode", 0)
    return bool(training) and not node.domain


def _momentum(node: Node) -> float:
    return float(str(node.attributes.get("momentum", _DEFAULT_MOMENTUM)))


# -- inference -------------------------------------------------------------------------------------


def inference_form(graph: Graph, statistics: Collection[str]) -> Graph:
    """Return a graph whose normalizations and dropouts have the form of inference.

    A ``BatchNormalization`` in training form uses its running mean and variance in place of the
    statistics of the batch, and leaves them unchanged. A ``Dropout`` whose training mode is a
    constant drops no elements. Nodes in the bodies of loops do not change. ``graph`` is a result of
    ``with_running_statistics``; ``statistics`` names its constants that are running statistics.
    """
    unchanged: dict[str, str] = {}
    nodes = (new for node in graph.nodes for new in _rewritten(node, graph, statistics, unchanged))
    return replace(graph, nodes=tuple(nodes))


def _rewritten(
    node: Node, graph: Graph, statistics: Collection[str], unchanged: dict[str, str]
) -> Iterator[Node]:
    """Yield the inference form of a node.

    ``unchanged`` receives the running statistic that belongs to each share of the batch in it, so
    that the sum of both becomes the statistic alone.
    """
    if node.qualified_op == "BatchNormalization" and node.attributes.get("training_mode", 0):
        yield from _with_running_statistics(node, statistics, unchanged)
    elif (
        node.qualified_op == "Dropout" and drops(graph, node) and node.inputs[2] in graph.constants
    ):
        yield replace(node, inputs=node.inputs[:1])
    elif node.op == "Add" and node.inputs[-1] in unchanged:
        yield Node("Identity", (unchanged[node.inputs[-1]],), node.outputs, {}, node.name)
    else:
        yield node


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


def draws(graph: Graph, node: Node) -> bool:
    """Return whether the results of a node are random."""
    return node.qualified_op in _RANDOM or (node.qualified_op == "Dropout" and drops(graph, node))


def drops(graph: Graph, node: Node) -> bool:
    """Return whether a Dropout node can be in training mode."""
    training = (*node.inputs, "", "")[2]
    frozen = graph.constants.get(training)
    return bool(training) and (frozen is None or bool(frozen.any()))
