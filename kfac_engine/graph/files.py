"""Models as files: one message, and beside it the weights that would not fit into it.

The second file follows ONNX's convention for external data, so that every runtime finds it.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper

from kfac_engine._types import Array
from kfac_engine.errors import ModelError
from kfac_engine.graph.external import is_packed
from kfac_engine.graph.write import MAX_BYTES, serialize, tensor

# A message ends at MAX_BYTES; what is no weight needs some room in it.
_MOST_INLINE = MAX_BYTES - (1 << 26)
# Smaller tensors stay in the message: shapes and axes that tools want to read.
_SMALL_BYTES = 1024
# Wide enough for any element type, so that readers can map each tensor where it lies.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What to write.

    Attributes:
        message: The model file.
        location: Name of the file beside it.
        tensors: What goes into that file, in order, each on the next aligned place; none if
            everything is in the message.
    """

    message: bytes
    location: str
    tensors: tuple[Array, ...]

    def data(self) -> Iterator[memoryview]:
        """The bytes of the second file, a tensor at a time."""
        for array in self.tensors:
            yield np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            yield memoryview(bytes(-array.nbytes % _ALIGNMENT))


def with_constants(model: onnx.ModelProto, constants: Mapping[str, Array]) -> onnx.ModelProto:
    """``model`` with initializers of these values, which lie in the message.

    Args:
        model: Has none of them yet; changed in place.
        constants: Name to value.

    Returns:
        The model.

    Raises:
        ModelError: One message cannot hold them.
    """
    size = sum(array.nbytes for array in constants.values())
    if size > _MOST_INLINE:
        raise ModelError(
            f"'{model.graph.name}' holds {size / 1e9:.1f} GB of weights, but one ONNX message ends "
            f"at 2 GB; give a path to write it to, so that they can go into a file beside it."
        )
    model.graph.initializer.extend(tensor(array, name) for name, array in constants.items())
    return model


def declare(model: onnx.ModelProto, constants: Iterable[str]) -> onnx.ModelProto:
    """``model`` with initializers of these names, which lack their data; changed in place."""
    model.graph.initializer.extend(TensorProto(name=name) for name in constants)
    return model


def model_files(
    model: onnx.ModelProto, constants: Mapping[str, Array], location: str
) -> ModelFiles:
    """A model with its constants in one file, or in two if one message cannot hold them.

    Args:
        model: Its initializers may lack data; they get it here.
        constants: Values of all initializers by name.
        location: Name of the second file.

    Returns:
        The contents of both.

    Raises:
        ModelError: What is no weight is larger than a message already.
    """
    entries = list(model.graph.initializer)
    beside = sum(constants[entry.name].nbytes for entry in entries) > _MOST_INLINE
    tensors: list[Array] = []
    offset = 0
    for entry in entries:
        array = constants[entry.name]
        if not beside or array.nbytes < _SMALL_BYTES or is_packed(array.dtype):
            entry.CopyFrom(tensor(array, entry.name))
            continue
        entry.CopyFrom(_reference(entry.name, array, location, offset))
        tensors.append(array)
        offset += array.nbytes + -array.nbytes % _ALIGNMENT
    return ModelFiles(serialize(model), location, tuple(tensors))


def _reference(name: str, array: Array, location: str, offset: int) -> TensorProto:
    entry = TensorProto(
        name=name,
        data_type=helper.np_dtype_to_tensor_dtype(array.dtype),
        dims=array.shape,
        data_location=TensorProto.EXTERNAL,
    )
    for key, value in (("location", location), ("offset", offset), ("length", array.nbytes)):
        entry.external_data.add(key=key, value=str(value))
    return entry
