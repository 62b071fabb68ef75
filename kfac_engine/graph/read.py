"""Reads model files as protobuf.

The bytes are untrusted: the result is a ``ModelProto``, or a ``ModelError`` is raised.
"""

import os
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]  # has no stubs

from kfac_engine.errors import InputError, ModelError
from kfac_engine.graph.write import MAX_BYTES
from kfac_engine.system.reading import check_file

# Formats that users pass by mistake, by their first bytes.
_OTHER_FORMATS = {
    b"\x89PNG": "a PNG picture",
    b"\xff\xd8\xff": "a JPEG picture",
    b"PK\x03\x04": "a ZIP archive (.npz, .pt and .keras files are such)",
    b"\x93NUMPY": "a NumPy array",
    b"\x89HDF": "an HDF5 file",
    b"\x1f\x8b": "a gzip archive",
    b"\x80\x02": "a Python pickle",
    b"%PDF": "a PDF document",
    b"version https://git-lfs": "a Git LFS pointer; fetch the file itself with 'git lfs pull'",
}


def read_model(source: "str | os.PathLike[str] | bytes | onnx.ModelProto") -> onnx.ModelProto:
    """Return the protobuf message of a model, without checks and without external data.

    Args:
        source: A path, the bytes of a file, or a message.

    Returns:
        A new message, which the caller may change.

    Raises:
        InputError: ``source`` has another type.
        ModelError: The file cannot be read or is not an ONNX model.
    """
    if isinstance(source, onnx.ModelProto):
        copy = onnx.ModelProto()
        copy.CopyFrom(source)
        return copy
    if isinstance(source, bytes):
        return _parse(source, "the given bytes")
    if isinstance(source, str | os.PathLike):
        return _parse(_read(Path(source)), f"'{os.fspath(source)}'")
    raise InputError(
        f"a model must be a path, bytes or an onnx.ModelProto, got {type(source).__name__}."
    )


def _read(path: Path) -> bytes:
    check_file(path, ModelError)
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ModelError(
                f"'{path}' is larger than 2 GB, the limit of the format; save its weights as "
                f"external data."
            )
        return path.read_bytes()
    except OSError as failure:
        raise ModelError(f"'{path}' cannot be read: {failure.strerror}.") from failure


def _parse(data: bytes, what: str) -> onnx.ModelProto:
    if not data:
        raise ModelError(f"{what} is empty, so it contains no ONNX model.")
    for start, kind in _OTHER_FORMATS.items():
        if data.startswith(start):
            raise ModelError(f"{what} is {kind}, not an ONNX model.")
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError as failure:
        raise ModelError(
            f"{what} is not an ONNX model or is truncated: its {len(data)} bytes do not parse."
        ) from failure
    if not model.HasField("graph"):
        raise ModelError(f"{what} is not an ONNX model: it contains no graph.")
    return model
