"""Operators that ONNX itself defines by other operators: their definitions, as protobuf."""

from collections.abc import Mapping, Sequence
from typing import Any

import onnx
from onnx import AttributeProto, defs

# Calls of a definition go by a domain of our own: one that no operator has.
DOMAIN = "definition"
# Files hold longer integers than onnx takes for versions.
_NO_VERSION = 2**31


def schema_of(op: str, domain: str, versions: Mapping[str, int]) -> Any:
    """The row of onnx's table for an operator; None if it has none."""
    # Typed as anything: the stub of OpSchema lacks half of it.
    version = versions.get(domain, 0)
    # Protobuf gives bytes where a name is not UTF-8.
    named = isinstance(op, str) and 0 < version < _NO_VERSION
    return defs.get_schema(op, version, domain) if named and defs.has(op, version, domain) else None


def is_defined(op: str, domain: str, versions: Mapping[str, int]) -> bool:
    """Whether ONNX defines an operator by other operators.

    Args:
        op: Its name.
        domain: Its domain; ``""`` is the standard one.
        versions: Versions of the operator domains in use.

    Returns:
        False for primitive operators, and for those that the installed onnx does not know.
    """
    schema = schema_of(op, domain, versions)
    return schema is not None and bool(schema.has_function or schema.has_context_dependent_function)


def as_call(
    node: onnx.NodeProto, types: Sequence[onnx.TypeProto], versions: Mapping[str, int], name: str
) -> tuple[onnx.NodeProto, onnx.FunctionProto]:
    """A node as the call of a function, and the function: its operator's definition.

    Args:
        node: Its operator is defined by others.
        types: Of its operands; empty for those that are left out.
        versions: Versions of the operator domains in use; the standard one is ``""``.
        name: For the function.

    Returns:
        The call, attributes with defaults spelled out, and the newest form of the definition that
        the operator set in use knows.
    """
    schema = schema_of(node.op_type, node.domain, versions)
    version = versions[node.domain]
    function = onnx.FunctionProto()
    if schema.has_function:
        form = _newest(schema.function_opset_versions, version)
        function.ParseFromString(schema.get_function_with_opset_version(form))
    else:
        form = _newest(schema.context_dependent_function_opset_versions, version)
        data = schema.get_context_dependent_function_with_opset_version(
            form, node.SerializeToString(), [entry.SerializeToString() for entry in types]
        )
        function.ParseFromString(data)
    function.domain, function.name = DOMAIN, name
    call = onnx.NodeProto()
    call.CopyFrom(node)
    call.domain, call.op_type = DOMAIN, name
    given = {entry.name for entry in call.attribute}
    for key, attribute in schema.attributes.items():
        if key not in given and attribute.default_value.type != AttributeProto.UNDEFINED:
            call.attribute.append(attribute.default_value)
    return call, function


def _newest(known: Sequence[int], version: int) -> int:
    """Definitions go by the operator set that they are written in."""
    return max((entry for entry in known if entry <= version), default=min(known))
