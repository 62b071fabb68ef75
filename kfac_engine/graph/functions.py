"""Operators that ONNX itself defines by other operators: their definitions, as graphs."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import onnx
from onnx import AttributeProto, defs, helper

from kfac_engine._types import Array
from kfac_engine.graph.branches import rename
from kfac_engine.graph.load import load_graph
from kfac_engine.graph.structure import Fact, Graph, Node
from kfac_engine.graph.write import node_proto, tensor

# Calls of a definition go by a domain of our own: one that no operator has.
_DOMAIN = "definition"


def has_definition(node: Node, versions: Mapping[str, int]) -> bool:
    """Whether ONNX defines the operator of ``node`` by other operators.

    Args:
        node: Of any domain.
        versions: Versions of the operator domains; the standard one is ``""``.

    Returns:
        False for primitive operators, and for those that the installed onnx does not know.
    """
    schema = _schema(node, versions)
    return schema is not None and bool(schema.has_function or schema.has_context_dependent_function)


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
    function = _function(node, facts, versions)
    own = {name for inner in function.node for name in inner.output if name}
    inner_names = {name: f"{prefix}{name}" for name in own}
    rename(function, inner_names)
    function.output[:] = [inner_names.get(name, name) for name in function.output]
    operands = [name for name in dict.fromkeys(node.inputs) if name]
    graph = helper.make_graph(
        [_call(node, versions)],
        node.name,
        [_declaration(name, facts[name]) for name in operands],
        [onnx.ValueInfoProto(name=name) for name in node.outputs if name],
        [tensor(known[name], name) for name in operands if name in known],
    )
    # In the operator set of the definition: what is older than ours is upgraded like any model.
    model = helper.make_model(
        graph,
        functions=[function],
        opset_imports=[*function.opset_import, helper.make_opsetid(_DOMAIN, 1)],
        ir_version=onnx.IR_VERSION,
    )
    found = load_graph(model)
    return replace(
        found, nodes=tuple(replace(inner, name=f"{prefix}{inner.name}") for inner in found.nodes)
    )


def _schema(node: Node, versions: Mapping[str, int]) -> Any:
    """The row of onnx's table for an operator (its stub lacks half of it); None if it has none."""
    version = versions.get(node.domain, 0)
    if not version or not defs.has(node.op, version, node.domain):
        return None
    return defs.get_schema(node.op, version, node.domain)


def _function(
    node: Node, facts: Mapping[str, Fact], versions: Mapping[str, int]
) -> onnx.FunctionProto:
    """The newest definition that the operator set in use knows."""
    schema = _schema(node, versions)
    assert schema is not None, node.qualified_op
    if schema.has_function:
        version = _newest(schema.function_opset_versions, versions[""])
        function = _parsed(schema.get_function_with_opset_version(version))
    else:
        version = _newest(schema.context_dependent_function_opset_versions, versions[""])
        types = [
            _declaration(name, facts[name]).type if name else onnx.TypeProto()
            for name in node.inputs
        ]
        function = _parsed(
            schema.get_context_dependent_function_with_opset_version(
                version,
                node_proto(node, versions).SerializeToString(),
                [entry.SerializeToString() for entry in types],
            )
        )
    function.domain, function.name = _DOMAIN, node.op
    return function


def _newest(known: list[int], version: int) -> int:
    # An operator set names its operators' definitions by the set they are written in.
    return max((entry for entry in known if entry <= version), default=min(known))


def _parsed(data: bytes) -> onnx.FunctionProto:
    function = onnx.FunctionProto()
    function.ParseFromString(data)
    return function


def _call(node: Node, versions: Mapping[str, int]) -> onnx.NodeProto:
    """``node`` as the call of its definition, attributes with defaults spelled out."""
    call = node_proto(replace(node, domain=""), versions)
    schema = _schema(node, versions)
    assert schema is not None, node.qualified_op
    given = {entry.name for entry in call.attribute}
    call.domain = _DOMAIN
    for name, attribute in schema.attributes.items():
        default = attribute.default_value
        if name not in given and default.type != AttributeProto.UNDEFINED:
            call.attribute.append(default)
    return call


def _declaration(name: str, fact: Fact) -> onnx.ValueInfoProto:
    code = helper.np_dtype_to_tensor_dtype(fact.dtype)
    return helper.make_tensor_value_info(name, code, [None] * len(fact.shape))
