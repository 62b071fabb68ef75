"""Converts protobuf tensors, inline or external, to read-only NumPy arrays."""

from collections.abc import Iterable, Iterator
from math import prod

import numpy as np
import onnx
from onnx import SparseTensorProto, TensorProto, helper, numpy_helper

from kfac_engine._types import Array, DType
from kfac_engine.errors import MemoryLimitError, ModelError
from kfac_engine.graph.files import ExternalData
from kfac_engine.graph.passes.order import all_nodes, bodies_of
from kfac_engine.system.memory_limits import available_memory

# Largest number of entries of a value whose size is in the file: 16 GiB in float32.
MOST_ENTRIES = 2**32

# Element types of real numbers.
FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})


def element_type(code: int, what: str) -> DType:
    """Return the NumPy type of a ``TensorProto.DataType`` code.

    Types such as bfloat16 come from ``ml_dtypes``. Messages call the value ``what``.
    """
    try:
        return np.dtype(helper.tensor_dtype_to_np_dtype(code))
    except KeyError as failure:
        raise ModelError(
            f"{what} has element type {code}, which ONNX does not define."
        ) from failure


def distinct(array: Array) -> Array:
    """Return an array without the repetitions of a broadcast view."""
    return array[tuple(slice(1 if stride == 0 else None) for stride in array.strides)]


def is_external(tensor: TensorProto) -> bool:
    """Return whether the bytes of ``tensor`` are in another file."""
    return bool(tensor.data_location == TensorProto.EXTERNAL)


def to_array(tensor: TensorProto, external: ExternalData | None = None) -> Array:
    """Return the values of a tensor as a read-only array, mapped from disk if the data is external.

    ``external`` is None if the model was not read from a file. Shape, type and bytes that do not
    agree raise ModelError.
    """
    what = f"tensor '{tensor.name}'"
    dtype = element_type(tensor.data_type, what)
    if not is_external(tensor):
        array = _inline_array(tensor, dtype, what)
    elif external:
        array = external.array(tensor, dtype, what)
    else:
        raise ModelError(
            f"the data of {what} is in another file; pass the path of the model instead of its "
            f"bytes, so that the file can be found."
        )
    array.flags.writeable = False
    return array


def densified(sparse: SparseTensorProto, external: ExternalData | None = None) -> Array:
    """Return a sparse tensor as a read-only array with all its entries.

    The indices are positions in the flat array or coordinates. ``external`` is None if the model
    was not read from a file. An array that does not fit into the free memory raises
    MemoryLimitError.
    """
    what = f"sparse tensor '{sparse.values.name}'"
    values, indices = to_array(sparse.values, external), to_array(sparse.indices, external)
    sizes = [*sparse.dims]
    size = prod(sizes)
    if min(sizes, default=-1) < 0 or size > MOST_ENTRIES:
        raise ModelError(
            f"{what} has the shape {sizes}; it needs sizes that are not negative, and at "
            f"most {MOST_ENTRIES} entries."
        )
    if (need := size * values.itemsize) > (free := available_memory()):
        raise MemoryLimitError(
            f"{what} takes {need / 1e9:.3g} GB with all its entries, but {free / 1e9:.3g} GB of "
            f"memory are free."
        )
    flat = _flat_indices(indices, sizes)
    if values.ndim != 1 or flat is None or flat.shape != values.shape or _repeat(flat):
        raise ModelError(
            f"{what} of shape {sizes} needs one index of integers inside the shape for each value, "
            f"but has values of shape {values.shape} and indices of shape {indices.shape}, some of "
            f"them outside or repeated."
        )
    array = np.empty(size, values.dtype)
    array.fill(0)  # touches the memory, so that the next check counts it
    array[flat] = values
    array.flags.writeable = False
    return array.reshape(sizes)


def _flat_indices(indices: Array, sizes: list[int]) -> Array | None:
    """Return positions in the flat array; None if an index is outside the array."""
    if indices.dtype != np.int64 or indices.shape[1:] not in ((), (len(sizes),)):
        return None
    limits = np.array(sizes if indices.ndim == 2 else prod(sizes))
    if (indices < 0).any() or (indices >= limits).any():
        return None
    return indices if indices.ndim == 1 else np.ravel_multi_index(tuple(indices.T), sizes)


def _repeat(flat: Array) -> bool:
    return len(np.unique(flat)) < len(flat)


def filled(shape: Array, value: Array | None, what: str) -> Array:
    """Return the result of ``ConstantOfShape`` as a read-only view of one number.

    The number None means zero in float32. Messages call the result ``what``.
    """
    number = np.zeros((), np.float32) if value is None else np.asarray(value)
    sizes = np.ravel(shape).tolist()
    if prod(sizes) > MOST_ENTRIES:
        raise ModelError(
            f"{what} has the shape {sizes}, {prod(sizes) * number.itemsize / 1e9:.3g} GB; at most "
            f"{MOST_ENTRIES} entries are allowed."
        )
    try:
        return np.broadcast_to(number.reshape(()), sizes)
    except (ValueError, TypeError) as failure:
        raise ModelError(f"{what} cannot be filled to the shape {sizes}: {failure}.") from failure


def nested_tensors(nodes: Iterable[onnx.NodeProto]) -> Iterator[TensorProto]:
    """Yield all tensors in attributes of ``nodes`` and in the bodies of If, Loop and Scan."""
    nodes = tuple(nodes)
    for node in all_nodes(nodes):
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
    yield from nested_initializers(nodes)


def nested_initializers(nodes: Iterable[onnx.NodeProto]) -> Iterator[TensorProto]:
    """Yield the initializers in the bodies of If, Loop and Scan."""
    for node in all_nodes(nodes):
        for body in bodies_of(node):
            yield from body.initializer


def _inline_array(tensor: TensorProto, dtype: DType, what: str) -> Array:
    try:
        return numpy_helper.to_array(tensor)
    except (ValueError, TypeError) as failure:
        raise ModelError(
            f"{what} does not contain the data of its shape {list(tensor.dims)} of {dtype}: "
            f"{failure}."
        ) from failure
