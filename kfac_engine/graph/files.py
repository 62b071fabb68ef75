"""Writes a model to one file, or to two for large weights, and reads external data.

The second file follows the ONNX convention for external data, which every runtime reads.

External data are memory-mapped, so a weight takes memory only when its values are read. The model
file is untrusted. Its paths must be inside the folder of the model, and its offsets inside the
files.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto

from kfac_engine._types import Array, DType
from kfac_engine.errors import InputError, ModelError, UnsupportedError
from kfac_engine.graph.write import MAX_BYTES, external_tensor, serialize, tensor
from kfac_engine.system.writing import checked_path, write_file

# Largest number of bytes of weights in a message; 64 MiB of the limit are reserved for other
# contents.
_MOST_INLINE = MAX_BYTES - (1 << 26)
# Smaller tensors, such as shapes and axes, stay in the message, where tools read them.
_SMALL_BYTES = 1024
# A multiple of every element size, so that readers can map each tensor in place.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The contents of a model's files."""

    message: bytes  # contents of the model file
    location: str  # name of the second file, in the same folder
    # Contents of the second file, in order, each at the next aligned offset; empty if the message
    # contains all weights.
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


def saved_model(
    model: onnx.ModelProto, constants: Mapping[str, Array], path: str | Path | None
) -> onnx.ModelProto:
    """Return a model with its initializers, after it was written to ``path`` unless that is None.

    If the weights do not fit into one file, the result refers to the second file.
    """
    if path is None:
        return with_constants(model, constants)
    files = model_files(declare(model, constants), constants, f"{checked_path(path).name}.data")
    write_model(path, files)
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
        place = {"location": location, "offset": offset, "length": array.nbytes}
        entry.CopyFrom(external_tensor(entry.name, array, **place))
        tensors.append(array)
        offset += array.nbytes + -array.nbytes % _ALIGNMENT
    return ModelFiles(serialize(model), location, tuple(tensors))


def write_model(path: str | Path, files: ModelFiles) -> None:
    """Write a model and its second file, if any; each is replaced whole or not at all.

    After a crash between the two, the old message stands beside the new weights. The files still
    fit together if this function wrote both from one graph. Two files for a device or pipe raise
    InputError.
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


# Element types with several elements in a byte, which NumPy cannot map.
_PACKED = ("int4", "uint4", "int2", "uint2", "float4_", "float6_")

# Largest number of bytes of an external tensor that are copied.
_MOST_COPIED = 1 << 20

# Largest number of digits of an offset; Python refuses to convert thousands of digits.
_MOST_DIGITS = 20


def is_packed(dtype: DType) -> bool:
    """Return whether a byte contains several elements of a type."""
    return dtype.name.startswith(_PACKED)


class ExternalData:
    """External data files of the model at a path; each file is mapped once."""

    def __init__(self, model_path: Path) -> None:
        self._model_path = model_path
        self._mapped: dict[Path, Array] = {}

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that have been read."""
        return tuple(self._mapped)

    def array(self, tensor: TensorProto, dtype: DType, what: str) -> Array:
        """Return the values of an external tensor, as a view of the file where they are aligned.

        Few bytes are copied: the file is mapped as long as a view of it exists, and all its pages
        count as memory of the process, also of weights that training has replaced. Messages call
        the tensor ``what``. A file that is missing or outside of the model's folder, bytes that do
        not fit the shape, and packed element types raise errors.
        """
        entries = {entry.key: entry.value for entry in tensor.external_data}
        location = entries.get("location", "")
        data = self._bytes(location, what)
        offset = _position(entries.get("offset", ""), "offset", what)
        length = _position(entries.get("length", ""), "length", what)
        shape = tuple(tensor.dims)
        if any(size < 0 for size in shape):
            raise ModelError(f"{what} has a negative size in its shape {list(shape)}.")
        if is_packed(dtype):
            raise UnsupportedError(
                f"{what} has packed {dtype.name} values in external data, which cannot be mapped; "
                f"store them inside the model file."
            )
        needed = math.prod(shape) * dtype.itemsize
        if length not in {0, needed} or offset + needed > data.size:
            raise ModelError(
                f"{what} of shape {list(shape)} needs {needed} bytes, but its entry names "
                f"{length or 'all'} bytes from byte {offset} of '{location}', which has "
                f"{data.size}."
            )
        values = data[offset : offset + needed].view(dtype).reshape(shape)
        if needed > _MOST_COPIED:
            return np.require(values, requirements="A")
        values = values.copy()
        values.flags.writeable = False
        return values

    def _bytes(self, location: str, what: str) -> Array:
        """Return all bytes of the file at ``location``."""
        try:
            path = self._path(location, what)
            if path not in self._mapped:
                # An empty file cannot be mapped.
                size = path.stat().st_size
                mapped = np.memmap(path, np.uint8, mode="r") if size else np.empty(0, np.uint8)
                self._mapped[path] = np.asarray(mapped)
        except (OSError, RuntimeError) as failure:  # RuntimeError: a cycle of links
            raise ModelError(
                f"{what} needs the external file '{location[:200]}', which cannot be read: "
                f"{failure}."
            ) from failure
        return self._mapped[path]

    def _path(self, location: str, what: str) -> Path:
        """Return the resolved path of ``location``, which must be in the folder of the model."""
        home = self._model_path.parent
        # If the model file is a link, its data may be in the folder of the target.
        folders = (home.resolve(), self._model_path.resolve().parent)
        path = (home / location).resolve() if location and "\0" not in location else None
        if path is None or not any(path.is_relative_to(folder) for folder in folders):
            raise ModelError(
                f"{what} names the external file '{location}', which is outside of the model's "
                f"folder '{home}'; put the data next to the model."
            )
        if not path.is_file():
            raise ModelError(
                f"{what} needs the external file '{location}', which is missing in '{home}'."
            )
        return path


def _position(text: str, key: str, what: str) -> int:
    if text and not (text.isascii() and text.isdigit() and len(text) < _MOST_DIGITS):
        raise ModelError(f"{what} has '{text}' for the {key} of its external data: not a number.")
    return int(text or 0)
