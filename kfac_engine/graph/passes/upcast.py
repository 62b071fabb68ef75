"""Converts a model's float16 and bfloat16 values to float32.

A machine without kernels for half types can then execute any model, and sums are more accurate. The
types of the file are returned, so that results can be converted to them; or casts are added between
inputs and outputs in half precision and the nodes in float32.
"""

from collections.abc import Iterable, Mapping
from typing import Literal, TypeAlias

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper

from kfac_engine._types import Array, DType
from kfac_engine.arguments import check_choice
from kfac_engine.errors import NonFiniteError, UnsupportedError
from kfac_engine.graph.passes.bodies import with_new_names
from kfac_engine.graph.passes.order import bodies_of, claim, label_of
from kfac_engine.graph.structure import Node
from kfac_engine.graph.tensors import distinct, element_type, to_array
from kfac_engine.graph.write import tensor

# Element type of half-precision values' gradients: the file's type, or float32, in which they are
# computed.
GradientDType: TypeAlias = Literal["file", "float32"]
GRADIENT_DTYPES: tuple[GradientDType, ...] = ("file", "float32")

_HALVES = frozenset({"float16", "bfloat16"})
_CODES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)

# Attributes that name an element type, in operators of the domains below.
_TYPE_ATTRIBUTES = frozenset(
    {"dtype", "output_datatype", "output_dtype", "precision", "softmax_precision", "stash_type"}
    | {"to"}
)
_DOMAINS = frozenset({"", "ai.onnx", "com.microsoft"})


def in_single(array: Array) -> Array:
    """Return a half-precision array in float32, and any other array unchanged."""
    return array.astype(np.float32) if array.dtype.name in _HALVES else array


def upcast(graph: onnx.GraphProto, constants: dict[str, Array]) -> dict[str, DType]:
    """Convert all half-precision values of a graph and its bodies to float32, in place.

    Float32 copies replace the arrays in ``constants``. The result is the types of the converted
    constants in the file, by name. A node that reads the bits of a half-precision value raises
    UnsupportedError.
    """
    narrow = {name: array.dtype for name, array in constants.items() if array.dtype.name in _HALVES}
    for name in narrow:
        constants[name] = widened(constants[name])
    _upcast_body(graph)
    return narrow


def widened(array: Array) -> Array:
    """Return a read-only array in float32; a broadcast view remains a broadcast view."""
    wide = np.broadcast_to(distinct(array).astype(np.float32), array.shape)
    wide.flags.writeable = False
    return wide


def in_types(values: Mapping[str, Array], types: Mapping[str, DType]) -> dict[str, Array]:
    """Return the arrays in the element types of ``types``.

    An array without an entry is not copied. A number that is too large for its new type raises
    NonFiniteError.
    """
    if not types:
        return dict(values)
    return {name: _in_type(name, array, types.get(name)) for name, array in values.items()}


def _in_type(name: str, array: Array, dtype: DType | None) -> Array:
    if dtype is None or array.dtype == dtype:
        return array
    with np.errstate(over="ignore"):
        result = array.astype(dtype)
    lost = np.isinf(result) & np.isfinite(array)
    if lost.any():
        largest = float(abs(array[lost]).max())
        raise NonFiniteError(
            f"the values for '{name}' reach {largest:.3g}, which exceeds the range of {dtype}; set "
            f"gradient_dtype='float32', or scale the loss down."
        )
    return result


def result_types(stored: Mapping[str, DType], choice: str) -> Mapping[str, DType]:
    """Return the element types of results that differ from the graph.

    These are the types that the file has stored for the choice ``"file"``, and none for
    ``"float32"``.
    """
    check_choice("gradient_dtype", choice, GRADIENT_DTYPES)
    return stored if choice == "file" else {}


def declared_halves(entries: Iterable[onnx.ValueInfoProto]) -> dict[str, DType]:
    """Return the element types of half-precision inputs or outputs, by name."""
    return {
        entry.name: element_type(entry.type.tensor_type.elem_type, f"'{entry.name}'")
        for entry in entries
        if entry.type.tensor_type.elem_type in _CODES
    }


def _upcast_body(graph: onnx.GraphProto) -> None:
    for entry in (*graph.input, *graph.output, *graph.value_info):
        _upcast_type(entry.type)
    for initializer in graph.initializer:
        _upcast_tensor(initializer)
    for node in graph.node:
        _upcast_node(node)


def _upcast_node(node: onnx.NodeProto) -> None:
    for attribute in node.attribute:
        names_type = attribute.name in _TYPE_ATTRIBUTES and node.domain in _DOMAINS
        if names_type and attribute.type == AttributeProto.INT and attribute.i in _CODES:
            if node.op_type == "BitCast":
                raise UnsupportedError(
                    f"the {label_of(node)} reads the bits of half-precision numbers, which are "
                    f"computed in float32 here; export the model in float32."
                )
            attribute.i = TensorProto.FLOAT
        if attribute.HasField("t"):
            _upcast_tensor(attribute.t)
        for values in attribute.tensors:
            _upcast_tensor(values)
    for body in bodies_of(node):
        _upcast_body(body)


def _upcast_tensor(values: TensorProto) -> None:
    if values.data_type in _CODES:
        values.CopyFrom(tensor(widened(to_array(values)), values.name))


def _upcast_type(form: onnx.TypeProto) -> None:
    kind = form.WhichOneof("value")
    if kind in {"tensor_type", "sparse_tensor_type"}:
        inner = getattr(form, kind)
        inner.elem_type = TensorProto.FLOAT if inner.elem_type in _CODES else inner.elem_type
    elif kind in {"sequence_type", "optional_type"}:
        _upcast_type(getattr(form, kind).elem_type)


def with_borders(
    nodes: Iterable[Node], operands: Mapping[str, DType], results: Mapping[str, DType]
) -> list[Node]:
    """Return float32 nodes with casts for operands and results of other element types.

    ``operands`` and ``results`` map names to these types. The float32 values have new names.
    """
    nodes = tuple(nodes)
    used = {name for node in nodes for name in (*node.inputs, *node.outputs, *node.captures)}
    names = {name: claim(f"{name}/float32", used) for name in (*operands, *results)}
    widening = [_cast(name, names[name], TensorProto.FLOAT) for name in operands]
    narrowing = [
        _cast(names[name], name, helper.np_dtype_to_tensor_dtype(dtype))
        for name, dtype in results.items()
    ]
    return [*widening, *(with_new_names(node, names) for node in nodes), *narrowing]


def _cast(source: str, target: str, code: int) -> Node:
    return Node("Cast", (source,), (target,), {"to": code}, name=f"node_{source}_to_{target}")
