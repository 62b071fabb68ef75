"""Converts nodes, inputs and arrays to a ``ModelProto``, the inverse of ``graph.load``.

The result is for a file of the user, or for a session of ONNX Runtime in the same process.
Constants inside a message are copied twice, and a message is limited to 2 GB. For a session, large
constants are therefore declared as external data, which ONNX Runtime copies once into the layout of
its kernels, or as inputs, which it reads in place.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import onnx
from google.protobuf.message import DecodeError, EncodeError  # type: ignore[import-untyped]  # has no stubs
from onnx import AttributeProto, TensorProto, defs, helper, numpy_helper

from kfac_engine._types import Array
from kfac_engine.errors import ModelError
from kfac_engine.graph.structure import AttributeValue, Input, Node, Subgraph

# A model as protobuf. Other packages pass it as an argument, but do not read it.
ModelProto: TypeAlias = onnx.ModelProto

# Protobuf cannot serialize a larger message.
MAX_BYTES = 2**31 - 1

# The first version of the format in which an initializer need not be an input of the graph.
INITIALIZERS_ALONE = 4

# Oldest format version that is written. Newer operator sets require newer versions.
_MIN_IR_VERSION = 10


def build_model(
    nodes: Sequence[Node],
    inputs: Sequence[Input],
    outputs: Sequence[Input | str],
    constants: Mapping[str, Array],
    opset: int,
    *,
    name: str = "model",
    domains: Mapping[str, int] | None = None,
) -> onnx.ModelProto:
    """Return a model with these nodes, in topological order.

    The runtime infers the type of an output that is a name alone. ``opset`` is the version of the
    standard operators, and ``domains`` has those of others. The format version of the model is the
    oldest that its operator set requires, and at least 10.
    """
    total = sum(array.nbytes for array in constants.values())
    if total > MAX_BYTES:
        raise ModelError(_too_large(name, f"has {total / 1e9:.1f} GB of constants"))
    # Rules write operators of ONNX Runtime's domains, whose version is 1.
    named = dict.fromkeys((node.domain for node in nodes), 1)
    versions = {**named, "": opset, **(domains or {})}
    graph = helper.make_graph(
        [node_proto(node, versions) for node in nodes],
        name,
        [value_info(entry) for entry in inputs],
        [
            onnx.ValueInfoProto(name=entry) if isinstance(entry, str) else value_info(entry)
            for entry in outputs
        ],
        [tensor(array, key) for key, array in constants.items()],
    )
    standard = helper.make_opsetid("", opset)
    others = [helper.make_opsetid(domain, n) for domain, n in versions.items() if domain]
    return helper.make_model(
        graph,
        opset_imports=[standard, *others],
        ir_version=max(_MIN_IR_VERSION, helper.find_min_ir_version_for([standard])),
        producer_name="kfac_engine",
    )


def with_properties(model: onnx.ModelProto, properties: Mapping[str, str]) -> onnx.ModelProto:
    """Set the metadata of a model, in place, and return it."""
    helper.set_model_props(model, dict(properties))
    return model


def properties_of(data: bytes) -> dict[str, str]:
    """Return the metadata of a serialized model; empty if the bytes are not a model."""
    try:
        entries = onnx.ModelProto.FromString(data).metadata_props
    except DecodeError:
        return {}
    return {entry.key: entry.value for entry in entries}


def serialize(model: onnx.ModelProto) -> bytes:
    """Return a model as the bytes of an ``.onnx`` file; more than 2 GB raise ModelError."""
    try:
        return bytes(model.SerializeToString())
    except EncodeError as failure:
        raise ModelError(_too_large(model.graph.name, "is too large to serialize")) from failure


def tensor(array: Array, name: str = "") -> onnx.TensorProto:
    """Return an array as a protobuf tensor, with its bytes in ``raw_data``."""
    return numpy_helper.from_array(np.asarray(array), name)


def value_info(entry: Input) -> onnx.ValueInfoProto:
    """Return the declaration of an input or output of a graph."""
    code = helper.np_dtype_to_tensor_dtype(entry.dtype)
    return helper.make_tensor_value_info(entry.name, code, entry.shape)


def node_proto(node: Node, versions: Mapping[str, int]) -> onnx.NodeProto:
    """Return a node as protobuf; ``versions`` determines the types of its attributes."""
    declared = _declared_types(node, versions.get(node.domain, 0))
    proto = helper.make_node(
        node.op, node.inputs, node.outputs, name=node.name, domain=node.domain or None
    )
    proto.attribute.extend(
        _attribute(key, value, declared.get(key)) for key, value in node.attributes.items()
    )
    return proto


def _declared_types(node: Node, version: int) -> Mapping[str, int]:
    """Return the attribute types in the schema of an operator; empty if onnx has no schema."""
    if not version or not defs.has(node.op, version, node.domain):
        return {}
    schema = defs.get_schema(node.op, version, node.domain)
    # The stub does not state that this enumeration has integer values.
    return {
        key: int(entry.type)  # type: ignore[call-overload]
        for key, entry in schema.attributes.items()
    }


def _attribute(name: str, value: AttributeValue, declared: int | None) -> AttributeProto:
    """Return an attribute in its declared type, which an empty tuple does not determine."""
    if isinstance(value, Subgraph):
        return helper.make_attribute(name, onnx.GraphProto.FromString(value.proto))
    if isinstance(value, np.ndarray):
        return helper.make_attribute(name, tensor(value))
    if declared == AttributeProto.FLOAT and isinstance(value, int):
        value = float(value)
    if value == () and declared is None:
        declared = AttributeProto.INTS
    return helper.make_attribute(name, value, attr_type=declared)


def _too_large(name: str, finding: str) -> str:
    return (
        f"model '{name}' {finding}, but an ONNX message is limited to 2 GB; train its large "
        f"weights, which are then fed and not stored, or use a smaller model."
    )


# Smaller constants are shapes, axes and scales, which optimizations of the runtime read.
_SMALL_BYTES = 4096

# Kinds of element types that the runtime reads from NumPy arrays. Packed and half types stay in the
# message.
_SHARED_KINDS = "biuf"

# Number of bytes of constants above which nothing is copied, because memory matters more than
# faster kernels.
MOST_COPIED_BYTES = 1 << 27


@dataclass(frozen=True, slots=True)
class CompactModel:
    """A serialized model and its large constants."""

    proto: bytes  # the serialized message
    # Constants that the message declares as external data; contiguous arrays.
    copied: Mapping[str, Array] = field(default_factory=dict)
    # Constants that the message declares as inputs, by name.
    fed: Mapping[str, Array] = field(default_factory=dict)
    nodes: int = 0  # number of nodes
    reads_text: bool = False  # whether an input is an array of text


def compact_model(  # noqa: PLR0913 (those of build_model, and ``once``)
    nodes: Sequence[Node],
    inputs: Sequence[Input],
    outputs: Sequence[Input | str],
    constants: Mapping[str, Array],
    opset: int,
    *,
    name: str = "model",
    domains: Mapping[str, int] | None = None,
    once: bool = False,
) -> CompactModel:
    """Return a serialized model, with its large constants outside the message.

    The arguments before ``once`` are as for ``build_model``. A model that runs only ``once`` needs
    no copy of its constants.
    """
    large = {key: array for key, array in constants.items() if _is_large(array)}
    small = {key: array for key, array in constants.items() if key not in large}
    size = sum(array.nbytes for array in large.values())
    copied, fed = ({}, large) if once or size > MOST_COPIED_BYTES else (large, {})
    declared = [*inputs, *(Input(key, array.dtype, array.shape) for key, array in fed.items())]
    model = build_model(nodes, declared, outputs, small, opset, name=name, domains=domains)
    model.graph.initializer.extend(
        external_tensor(key, array, location="memory") for key, array in copied.items()
    )
    contiguous = {key: np.ascontiguousarray(array) for key, array in copied.items()}
    texts = any(entry.dtype.kind in "OUST" for entry in declared)
    return CompactModel(serialize(model), contiguous, fed, len(nodes), reads_text=texts)


def _is_large(array: Array) -> bool:
    return array.nbytes > _SMALL_BYTES and array.dtype.kind in _SHARED_KINDS


def external_tensor(name: str, array: Array, **place: object) -> TensorProto:
    """Return the declaration of an array whose bytes are elsewhere: at the entries of ``place``."""
    declared = TensorProto(
        name=name,
        data_type=helper.np_dtype_to_tensor_dtype(array.dtype),
        dims=array.shape,
        data_location=TensorProto.EXTERNAL,
    )
    for key, value in place.items():
        declared.external_data.add(key=key, value=str(value))
    return declared
