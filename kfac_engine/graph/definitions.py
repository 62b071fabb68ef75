"""Returns ONNX's definitions of operators by other operators, as protobuf functions."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import onnx
from onnx import AttributeProto, defs

# Domain of the calls of definitions; no operator belongs to it.
DOMAIN = "definition"
# Versions in files may exceed the integers that onnx accepts.
_NO_VERSION = 2**31


def schema_of(op: str, domain: str, versions: Mapping[str, int]) -> Any:
    """Return the schema of an operator; None if onnx has none."""
    # The type is Any because the stub of OpSchema is incomplete.
    version = versions.get(domain, 0)
    # Protobuf returns bytes if a name is not UTF-8.
    named = isinstance(op, str) and 0 < version < _NO_VERSION
    return defs.get_schema(op, version, domain) if named and defs.has(op, version, domain) else None


def is_defined(op: str, domain: str, versions: Mapping[str, int]) -> bool:
    """Return whether ONNX defines an operator by other operators.

    This is false for primitive operators, and for operators that the installed onnx does not know.
    """
    schema = schema_of(op, domain, versions)
    return schema is not None and bool(schema.has_function or schema.has_context_dependent_function)


def as_call(
    node: onnx.NodeProto, types: Sequence[onnx.TypeProto], versions: Mapping[str, int], name: str
) -> tuple[onnx.NodeProto, onnx.FunctionProto]:
    """Convert a node to the call of a function that is the definition of its operator.

    The call has explicit default attributes, and the function is the newest definition for the
    operator set in use. ``types`` are the types of the operands; a type is empty for an omitted
    operand.
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
    call = deepcopy(node)
    call.domain, call.op_type = DOMAIN, name
    explicit = {entry.name for entry in call.attribute}
    for key, attribute in schema.attributes.items():
        if key not in explicit and attribute.default_value.type != AttributeProto.UNDEFINED:
            call.attribute.append(attribute.default_value)
    return call, function


def _newest(known: Sequence[int], version: int) -> int:
    """Return the newest definition whose operator set is at most ``version``."""
    return max((entry for entry in known if entry <= version), default=min(known))
