"""Protobuf tensors as read-only NumPy arrays, wherever their bytes lie.

External data is mapped, not read: a weight costs memory only once something looks at it. A model
file is untrusted, so its paths stay inside the model's own folder and its offsets inside the file.
"""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from kfac_engine._types import Array, DType
from kfac_engine.errors import ModelError, UnsupportedError
from kfac_engine.graph.order import all_nodes

# Element types of which several share a byte: NumPy cannot map them.
_PACKED = ("int4", "uint4", "int2", "uint2", "float4", "float6")


def element_type(code: int, what: str) -> DType:
    """The NumPy type of ``TensorProto.DataType`` number ``code``.

    Args:
        code: As the file has it.
        what: The value it belongs to, for the message.

    Returns:
        The type; bfloat16 and its like are those of ``ml_dtypes``.

    Raises:
        ModelError: ONNX has no such type.
    """
    try:
        return np.dtype(helper.tensor_dtype_to_np_dtype(code))
    except KeyError as failure:
        raise ModelError(
            f"{what} has element type {code}, which ONNX does not define."
        ) from failure


def is_external(tensor: TensorProto) -> bool:
    """Whether the bytes of ``tensor`` lie in another file."""
    return bool(tensor.data_location == TensorProto.EXTERNAL)


def to_array(tensor: TensorProto, model_path: Path | None = None) -> Array:
    """The values of a tensor.

    Args:
        tensor: From a model file.
        model_path: That file, for external data; None if the model did not come from a file.

    Returns:
        A read-only array, mapped from disk if the data is external.

    Raises:
        ModelError: Shape, type and bytes do not agree, or the external data cannot be had.
    """
    what = f"tensor '{tensor.name}'"
    dtype = element_type(tensor.data_type, what)
    if is_external(tensor):
        return _map_external(tensor, dtype, model_path, what)
    try:
        array = numpy_helper.to_array(tensor)
    except (ValueError, TypeError) as failure:
        raise ModelError(
            f"{what} does not hold the data that its shape {list(tensor.dims)} of {dtype} "
            f"asks for: {failure}."
        ) from failure
    array.flags.writeable = False
    return array


def filled(shape: Array, value: Array | None, what: str) -> Array:
    """The result of ``ConstantOfShape``: a read-only array without memory of its own.

    Args:
        shape: The sides.
        value: One number; None means zero in float32.
        what: The value it makes, for the message.

    Returns:
        A view that repeats the number.

    Raises:
        ModelError: The sides are negative, or no machine could hold them.
    """
    number = np.zeros((), np.float32) if value is None else np.asarray(value)
    try:
        return np.broadcast_to(number.reshape(()), tuple(int(side) for side in shape))
    except ValueError as failure:
        sides = [int(side) for side in np.ravel(shape)]
        raise ModelError(f"{what} cannot be filled to the shape {sides}: {failure}.") from failure


def nested_tensors(nodes: Iterable[onnx.NodeProto]) -> Iterator[TensorProto]:
    """All tensors inside ``nodes``: in their attributes, and in the bodies of If, Loop and Scan."""
    for node in all_nodes(nodes):
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            for body in (attribute.g, *attribute.graphs):
                yield from body.initializer


def _map_external(tensor: TensorProto, dtype: DType, model_path: Path | None, what: str) -> Array:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    path = _external_path(entries.get("location", ""), model_path, what)
    offset, length = (_position(entries.get(key, ""), key, what) for key in ("offset", "length"))
    shape = tuple(tensor.dims)
    if any(side < 0 for side in shape):
        raise ModelError(f"{what} has a negative side in its shape {list(shape)}.")
    if dtype.name.startswith(_PACKED):
        raise UnsupportedError(f"{what} holds packed {dtype.name} values in external data.")
    needed, available = math.prod(shape) * dtype.itemsize, path.stat().st_size
    if length not in {0, needed} or offset + needed > available:
        raise ModelError(
            f"{what} of shape {list(shape)} needs {needed} bytes, but its entry names "
            f"{length or 'all'} bytes from byte {offset} of '{path.name}', which has {available}."
        )
    if not needed:
        return np.empty(shape, dtype)
    return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=shape)


def _position(text: str, key: str, what: str) -> int:
    if text and not (text.isascii() and text.isdigit()):
        raise ModelError(f"{what} has '{text}' for the {key} of its external data: not a number.")
    return int(text or 0)


def _external_path(location: str, model_path: Path | None, what: str) -> Path:
    """The file meant by ``location``, inside the model's folder even after links are followed."""
    if model_path is None:
        raise ModelError(
            f"{what} lies in the external file '{location}'; give the path of the model instead of "
            f"its bytes, so that the file can be found."
        )
    # A model that is itself a link may have its data beside the link's target.
    folders = (model_path.parent.resolve(), model_path.resolve().parent)
    path = (model_path.parent / location).resolve() if "\0" not in location else None
    if not location or path is None or not any(path.is_relative_to(f) for f in folders):
        raise ModelError(
            f"{what} names the external file '{location}', which is outside of the model's folder "
            f"'{model_path.parent}'; put the data beside the model."
        )
    if not path.is_file():
        raise ModelError(
            f"{what} needs the external file '{location}', which is missing in "
            f"'{model_path.parent}'."
        )
    return path
