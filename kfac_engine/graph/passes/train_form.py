"""Converts normalizations and dropouts from the inference form to the training form."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kfac_engine._types import Array
from kfac_engine.errors import InputError
from kfac_engine.graph.structure import Graph, Node
from kfac_engine.printable import quoted

# Default dropout ratio of ONNX.
_DEFAULT_RATIO = 0.5
_CONVOLUTIONS = frozenset({"Conv", "ConvTranspose"})
# Largest number of nodes that a message names.
_MOST_NAMES = 6


@dataclass(frozen=True, slots=True)
class InferenceNodes:
    """Nodes of a graph that compute another function in training, in the form of inference."""

    # ``BatchNormalization`` nodes with running statistics that are constants.
    normalizations: tuple[Node, ...]
    dropouts: tuple[Node, ...]  # ``Dropout`` nodes that drop nothing
    fixed: tuple[Node, ...]  # ``BatchNormalization`` nodes with computed running statistics
    # Convolutions with a constant bias whose result no ``BatchNormalization`` reads. A
    # normalization that an exporter folded into the weights leaves such a convolution.
    biased: tuple[Node, ...]


def inference_nodes(graph: Graph) -> InferenceNodes:
    """Return the nodes of a canonical graph that are in the form of inference."""
    nodes = [node for node in graph.nodes if not node.domain]
    norms = [node for node in nodes if node.op == "BatchNormalization" and not _trains(graph, node)]
    normalized = {node.inputs[0] for node in nodes if node.op == "BatchNormalization"}
    return InferenceNodes(
        normalizations=tuple(node for node in norms if _has_constants(graph, node)),
        dropouts=tuple(node for node in nodes if node.op == "Dropout" and _is_idle(graph, node)),
        fixed=tuple(node for node in norms if not _has_constants(graph, node)),
        biased=tuple(
            node
            for node in nodes
            if node.op in _CONVOLUTIONS
            and "".join(node.inputs[2:3]) in graph.constants
            and node.outputs[0] not in normalized
        ),
    )


def in_train_form(graph: Graph) -> tuple[Graph, tuple[str, ...]]:
    """Return a graph with normalizations and dropouts in training form, and notes on exceptions.

    A ``BatchNormalization`` with constant running statistics normalizes with the statistics of the
    batch, and returns new running statistics under its ``momentum``. A ``Dropout`` drops elements.
    Nodes in bodies do not change.
    Values keep their names. Each note is a sentence without its period about nodes that remain in
    the form of inference. A graph without normalization and dropout raises InputError.
    """
    idle = inference_nodes(graph)
    changed = {node.name for node in (*idle.normalizations, *idle.dropouts)}
    if not changed and not any(_trains(graph, node) for node in graph.nodes):
        raise InputError(_nothing_to_train(graph, idle))
    always = _free_name("training mode", graph)
    rewritten = (_trained(node, always) if node.name in changed else node for node in graph.nodes)
    constants: dict[str, Array] = {**graph.constants}
    if idle.dropouts:
        constants[always] = np.array(True)
    return replace(graph, nodes=tuple(rewritten), constants=constants), tuple(_notes(graph, idle))


def listed_names(nodes: Sequence[Node]) -> str:
    """Return the names of the first nodes for a message, with the number of further nodes."""
    return quoted((node.name for node in nodes), _MOST_NAMES)


def _trained(node: Node, always: str) -> Node:
    """Return a node in training form; ``always`` is a constant that is true."""
    if node.op == "BatchNormalization":
        # Further results of operator sets before 14 no longer exist.
        attributes = {**node.attributes, "training_mode": 1}
        return replace(node, outputs=node.outputs[:1], attributes=attributes)
    ratio = "".join(node.inputs[1:2])
    return replace(node, inputs=(node.inputs[0], ratio, always))


def _trains(graph: Graph, node: Node) -> bool:
    """Return whether a node is a normalization or a dropout that can be in training form."""
    if node.domain:
        return False
    if node.op == "BatchNormalization":
        return bool(node.attributes.get("training_mode", 0))
    return node.op == "Dropout" and not _is_idle(graph, node, least=-1.0)


def _has_constants(graph: Graph, node: Node) -> bool:
    return all(name in graph.constants for name in node.inputs[3:5])


def _is_idle(graph: Graph, node: Node, least: float = 0.0) -> bool:
    """Return whether a node is a Dropout in the form of inference with a ratio above ``least``."""
    _, ratio, mode = (*node.inputs, "", "")[:3]
    known = graph.constants.get(ratio)
    if known is None and ratio:
        return False
    value = _DEFAULT_RATIO if known is None else float(known)
    return value > least and (not mode or (mode in graph.constants and not graph.constants[mode]))


def _notes(graph: Graph, idle: InferenceNodes) -> Iterator[str]:
    if idle.fixed:
        yield (
            f"train_form leaves {listed_names(idle.fixed)} in the form of inference: the running "
            f"statistics are not constants of the file"
        )
    others = any(node.op == "BatchNormalization" for node in graph.nodes)
    if idle.biased and not others:
        yield _folded(idle)


def _nothing_to_train(graph: Graph, idle: InferenceNodes) -> str:
    if idle.fixed:
        why = f"the running statistics of {listed_names(idle.fixed)} are not constants of the file"
    else:
        why = "it has no BatchNormalization and no Dropout"
    folded = f" {_folded(idle).capitalize()}." if idle.biased else ""
    return (
        f"train_form changes nothing in model '{graph.name}': {why}.{folded} Omit train_form, or "
        f"export the model in training form."
    )


def _folded(idle: InferenceNodes) -> str:
    return (
        f"normalizations that were folded into convolutions cannot be recovered; these "
        f"convolutions have biases, as folding leaves them: {listed_names(idle.biased)}"
    )


def _free_name(name: str, graph: Graph) -> str:
    used = set(graph.values())
    while name in used:
        name += "_"
    return name
