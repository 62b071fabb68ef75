"""Converts recurrent operators from batch-first to steps-first layout for ONNX Runtime."""

from collections.abc import Iterator, Mapping

import onnx
from onnx import helper

from kfac_engine.graph.passes.order import all_nodes, claim, taken_names

_RECURRENT = frozenset({"LSTM", "GRU", "RNN"})

# Permutations of operands from batch-first to steps-first order, and of results from steps-first to
# batch-first order.
_OPERANDS: Mapping[int, tuple[int, ...]] = {0: (1, 0, 2), 5: (1, 0, 2), 6: (1, 0, 2)}
_RESULTS: Mapping[int, tuple[int, ...]] = {0: (2, 0, 1, 3), 1: (1, 0, 2), 2: (1, 0, 2)}


def put_steps_first(graph: onnx.GraphProto) -> None:
    """Rewrite recurrent nodes of layout 1 as nodes of layout 0 between transpositions, in place.

    Nodes in bodies are rewritten, too.
    """
    if any(_is_batchwise(node) for node in all_nodes(graph.node)):
        _rewrite(graph, taken_names(graph))


def _rewrite(graph: onnx.GraphProto, used: set[str]) -> None:
    nodes = [new for node in graph.node for new in _rewritten(node, used)]
    for node in nodes:
        for attribute in node.attribute:
            for body in (attribute.g, *attribute.graphs):
                _rewrite(body, used)
    del graph.node[:]
    graph.node.extend(nodes)


def _is_batchwise(node: onnx.NodeProto) -> bool:
    recurrent = node.op_type in _RECURRENT and not node.domain
    return recurrent and any(entry.name == "layout" and entry.i == 1 for entry in node.attribute)


def _rewritten(node: onnx.NodeProto, used: set[str]) -> Iterator[onnx.NodeProto]:
    core = onnx.NodeProto()
    core.CopyFrom(node)
    after = []
    if _is_batchwise(node):
        attributes = [entry for entry in node.attribute if entry.name != "layout"]
        del core.attribute[:]
        core.attribute.extend(attributes)
        for index, perm in _OPERANDS.items():
            name = node.input[index] if len(node.input) > index else ""
            if name:
                core.input[index] = claim(f"{name}, steps first", used)
                yield helper.make_node("Transpose", [name], [core.input[index]], perm=perm)
        for index, perm in _RESULTS.items():
            name = node.output[index] if len(node.output) > index else ""
            if name:
                core.output[index] = claim(f"{name}, steps first", used)
                after.append(helper.make_node("Transpose", [core.output[index]], [name], perm=perm))
    yield core
    yield from after
