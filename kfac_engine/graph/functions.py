"""What an operator is by definition, as a graph of other operators."""

from collections.abc import Mapping
from dataclasses import replace

import onnx
from onnx import helper

from kfac_engine._types import Array
from kfac_engine.graph.definitions import DOMAIN, as_call, is_defined
from kfac_engine.graph.load import load_graph
from kfac_engine.graph.passes.branches import rename
from kfac_engine.graph.structure import Fact, Graph, Node
from kfac_engine.graph.write import node_proto, tensor


def has_definition(node: Node, versions: Mapping[str, int]) -> bool:
    """Whether ONNX defines the operator of ``node`` by other operators."""
    return is_defined(node.op, node.domain, versions)


def definition(
    node: Node,
    facts: Mapping[str, Fact],
    known: Mapping[str, Array],
    versions: Mapping[str, int],
    prefix: str,
) -> Graph:
    """What ``node`` does in other operators, in canonical form.

    Args:
        node: Its operator has a definition.
        facts: Element type and shape of its operands. Of shapes only the rank is used: the batch
            stays open.
        known: Values that are fixed, such as sizes and axes: branches that they decide are folded.
        versions: Versions of the operator domains; the standard one is ``""``.
        prefix: Starts the names of all new values and nodes.

    Returns:
        A graph with the operands of ``node`` as inputs and constants, and its results as outputs,
        under the names they have there.

    Raises:
        ModelError: The definition cannot be brought to the operator set of the graph.
    """
    operands = [name for name in dict.fromkeys(node.inputs) if name]
    declared = {name: _declaration(name, facts[name]) for name in operands}
    types = [declared[name].type if name else onnx.TypeProto() for name in node.inputs]
    call, function = as_call(node_proto(node, versions), types, versions, node.op)
    renamed = {name: f"{prefix}{name}" for inner in function.node for name in inner.output if name}
    rename(function, renamed)
    function.output[:] = [renamed.get(name, name) for name in function.output]
    graph = helper.make_graph(
        [call],
        node.name,
        list(declared.values()),
        [onnx.ValueInfoProto(name=name) for name in node.outputs if name],
        [tensor(known[name], name) for name in operands if name in known],
    )
    # In the operator set of the definition: what is older than ours is upgraded like any model.
    model = helper.make_model(
        graph,
        functions=[function],
        opset_imports=[*function.opset_import, helper.make_opsetid(DOMAIN, 1)],
        ir_version=onnx.IR_VERSION,
    )
    body = load_graph(model)
    return replace(
        body, nodes=tuple(replace(inner, name=f"{prefix}{inner.name}") for inner in body.nodes)
    )


def _declaration(name: str, fact: Fact) -> onnx.ValueInfoProto:
    code = helper.np_dtype_to_tensor_dtype(fact.dtype)
    return helper.make_tensor_value_info(name, code, [None] * len(fact.shape))
