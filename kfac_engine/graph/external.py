"""Reads weights from external data files.

Files are memory-mapped, so a weight takes memory only when its values are read. The model file is
untrusted. Its paths must be inside the folder of the model, and its offsets inside the files.
"""

import math
from pathlib import Path

import numpy as np
from onnx import TensorProto

from kfac_engine._types import Array, DType
from kfac_engine.errors import ModelError, UnsupportedError

# Element types with several elements in a byte, which NumPy cannot map.
_PACKED = ("int4", "uint4", "int2", "uint2", "float4_", "float6_")

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

        Messages call the tensor ``what``. A file that is missing or outside of the model's folder,
        bytes that do not fit the shape, and packed element types raise errors.
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
        return np.require(values, requirements="A")

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
