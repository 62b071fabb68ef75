"""Reads and writes ONNX Runtime's adapter files, which identify their model by its weights.

The format has a number for the version of a model. Here it is the start of the SHA-256 of the
weights that are not adapters.
"""

import hashlib
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime as ort

from kfac_engine._types import Array
from kfac_engine.arguments import check_mapping
from kfac_engine.errors import InputError, ModelError, ShapeError, UnknownNameError, suggestion
from kfac_engine.graph.edits.adapters import adapter_names
from kfac_engine.graph.edits.model import EditedModel
from kfac_engine.graph.load import ModelSource
from kfac_engine.graph.tensors import FLOATS
from kfac_engine.graph.write import ModelProto
from kfac_engine.sessions.session import FAILURES
from kfac_engine.system.reading import check_file
from kfac_engine.system.writing import checked_path, write_file

# Version of the contents of the files.
_VERSION = 1
# The format has 31 bits for the version of a model.
_MOST_VERSION = 2**31 - 1
# Element types of which ONNX Runtime makes values from arrays.
_WRITABLE = frozenset({"float16", "float32", "float64"})


def save_adapter(
    model: ModelSource, path: str | Path, parameters: Mapping[str, Array] | None = None
) -> None:
    """Write the adapters of a model as a file that ONNX Runtime loads.

    ``onnxruntime.LoraAdapter`` and the ``RunOptions`` of all languages give the arrays to a session
    of the model that ``add_adapters`` wrote.

    Args:
        model: Path, bytes or ``ModelProto`` of a model with adapters: initializers whose names
            contain ``lora``.
        path: Path of the file, by custom ``.onnx_adapter``.
        parameters: Other values of the adapters by name, such as ``engine.parameters``; those of
            the model by default. Names without ``lora`` are ignored.

    Raises:
        InputError: The file cannot be written, or a value has an element type that ONNX Runtime
            cannot write.
        ModelError: The model has no adapters.
        ShapeError: A value has another shape than in the model.
    """
    check_mapping("parameters", parameters, "{'fc.lora_A': array}")
    target = checked_path(path)
    edited = EditedModel(model)
    values = {name: edited.constants[name] for name in _names(edited)}
    for name in values.keys() & (parameters or {}).keys():
        values[name] = _checked(name, np.asarray((parameters or {})[name]), values[name])
    kinds = {array.dtype.name for array in values.values()} - _WRITABLE
    if kinds:
        raise InputError(
            f"the adapters have the type {kinds.pop()}, which ONNX Runtime's adapter files cannot "
            f"store; use a model in {', '.join(sorted(_WRITABLE))}."
        )
    contents = ort.AdapterFormat()
    contents.set_adapter_version(_VERSION)
    contents.set_model_version(_version(edited))
    contents.set_parameters(
        {
            name: ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))
            for name, array in values.items()
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "adapter"
        contents.export_adapter(str(written))
        write_file(target, [written.read_bytes()])


def load_adapter(
    model: ModelSource, adapter: str | Path, *, path: str | Path | None = None
) -> ModelProto:
    """Return a model with the adapters of a file.

    Args:
        model: Path, bytes or ``ModelProto`` of the model for which ``save_adapter`` wrote the file,
            with adapters of any values.
        adapter: Path of the file.
        path: Path of a file for the result. Required for more than 2 GB of weights.

    Returns:
        The model with the values of the file.

    Raises:
        InputError: The file is not an adapter, or belongs to a model with other weights.
        ModelError: The model has no adapters.
        UnknownNameError: The file lacks an adapter of the model, or has another one.
        ShapeError: A value has another shape than in the model.
    """
    source = checked_path(adapter)
    values, version = _read(source)
    edited = EditedModel(model)
    names = _names(edited)
    for name in values.keys() ^ set(names):
        other = (suggestion(name, names), "the model") if name in values else ("", f"'{source}'")
        raise UnknownNameError(f"{other[1]} has no adapter '{name}'{other[0]}.")
    fitting = {n: _checked(n, array, edited.constants[n]) for n, array in values.items()}
    if version != _version(edited):
        raise InputError(
            f"'{source}' belongs to a model with other weights than '{edited.name}'; pass the "
            f"model for which the adapter was trained."
        )
    for name, array in fitting.items():
        edited.set_constant(name, array)
    return edited.written(path)


def _names(edited: EditedModel) -> list[str]:
    """Return the names of the matrices of all adapters; raise ModelError if there are none."""
    names = adapter_names(edited)
    if not names:
        raise ModelError(
            f"model '{edited.name}' has no adapter, an initializer whose name contains 'lora'; add "
            f"adapters with add_adapters."
        )
    return names


def _version(edited: EditedModel) -> int:
    """Return a number of the weights that are not adapters."""
    digest = hashlib.sha256()
    for name in sorted(set(edited.initializers) - set(adapter_names(edited))):
        array = edited.constants[name]
        digest.update(f"{name}\0{array.dtype.name}\0{array.shape}\0".encode())
        if array.dtype.kind == "O":
            digest.update(repr(array.tolist()).encode())
        else:
            digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return int.from_bytes(digest.digest()[:4], "big") & _MOST_VERSION


def _checked(name: str, value: Array, old: Array) -> Array:
    """Return the value of an adapter in the type of the model, after a check of its shape."""
    if value.shape != old.shape:
        raise ShapeError(
            f"the adapter '{name}' has the shape {value.shape}, but the model needs {old.shape}."
        )
    if value.dtype.name not in FLOATS:
        raise InputError(f"the adapter '{name}' needs real numbers, got {value.dtype}.")
    return value.astype(old.dtype)


def _read(path: Path) -> tuple[dict[str, Array], int]:
    """Return the arrays of a file, and the version of its model."""
    check_file(path)
    try:
        contents = ort.AdapterFormat.read_adapter(str(path))
        values = {name: np.array(v.numpy()) for name, v in contents.get_parameters().items()}
        return values, contents.get_model_version()
    except FAILURES as failure:
        raise InputError(
            f"'{path}' is not an adapter file of ONNX Runtime, or is damaged."
        ) from failure
