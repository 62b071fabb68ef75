"""Writes a model as one file, or as two files if its weights exceed the limit of a message.

The second file follows the ONNX convention for external data, which every runtime reads.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from kfac_engine._types import Array
from kfac_engine.errors import InputError, ModelError
from kfac_engine.graph.external import is_packed
from kfac_engine.graph.write import MAX_BYTES, serialize, tensor
from kfac_engine.system.writing import write_file

# Largest number of bytes of weights in a message; 64 MiB of the limit are reserved for other
# contents.
_MOST_INLINE = MAX_BYTES - (1 << 26)
# Smaller tensors, such as shapes and axes, stay in the message, where tools read them.
_SMALL_BYTES = 1024
# A multiple of every element size, so that readers can map each tensor in place.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What the files of a model contain.

    Attributes:
        message: Contents of the model file.
        location: Name of the second file, in the same folder.
        tensors: Contents of the second file, in order, each at the next aligned offset; empty if
            the message contains all weights.
    """

    message: bytes
    location: str
    tensors: tuple[Array, ...]

    def data(self) -> Iterator[memoryview]:
        """Yield the bytes of the second file, one tensor at a time."""
        for array in self.tensors:
            yield np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            yield memoryview(bytes(-array.nbytes % _ALIGNMENT))


def with_constants(model: onnx.ModelProto, constants: Mapping[str, Array]) -> onnx.ModelProto:
    """Add initializers with their values to ``model``, in place, and return it.

    More values than one message can contain raise ModelError.
    """
    size = sum(array.nbytes for array in constants.values())
    if size > _MOST_INLINE:
        raise ModelError(
            f"'{model.graph.name}' has {size / 1e9:.1f} GB of weights, but an ONNX message is "
            f"limited to 2 GB; pass a path, so that the weights can be written to a second file."
        )
    model.graph.initializer.extend(tensor(array, name) for name, array in constants.items())
    return model


def declare(model: onnx.ModelProto, constants: Iterable[str]) -> onnx.ModelProto:
    """Add initializers without data to ``model``, in place, and return it."""
    model.graph.initializer.extend(TensorProto(name=name) for name in constants)
    return model


def model_files(
    model: onnx.ModelProto, constants: Mapping[str, Array], location: str
) -> ModelFiles:
    """Return the contents of the files of a model: one file, or two if a message is too small.

    The initializers of ``model`` may lack their data; ``constants`` has the values of all of them.
    ``location`` is the name of the second file.
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


def write_model(path: str | Path, files: ModelFiles) -> None:
    """Write a model and its second file, if any; each is replaced whole or not at all.

    A crash between the two leaves the old message beside new weights, which it fits if it was
    written here from the same graph. Two files for a device or pipe raise InputError.
    """
    target = Path(path)
    if files.tensors:
        if target.exists() and not target.is_file():
            raise InputError(
                f"cannot write '{path}': a model of more than 2 GB takes two files; name a regular "
                f"file."
            )
        write_file(target.with_name(files.location), files.data())
    write_file(path, [files.message])


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
