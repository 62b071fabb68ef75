"""Converts arrays between libraries, for code without a backend."""

import sys
from collections.abc import Callable, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeVar

import numpy as np

from kfac_engine._types import Array
from kfac_engine.arguments import check_arrays
from kfac_engine.backend.protocol import Backend
from kfac_engine.errors import InputError

_LIBRARIES = ("numpy", "cupy")
_RECORDED = "kfac_engine"  # arrays of training files, which bring their functions
Function = TypeVar("Function", bound=Callable[..., Any])
# The name of each function that is marked as ``recordable``, by its code.
RECORDABLE: dict[CodeType, str] = {}


def recordable(function: Function) -> Function:
    """Mark a function that training files call with recorded arrays; return it.

    It, and what it calls with them, must compute by functions of arrays alone: a recorded array has
    no entries to read or to branch by, unless ``is_recorded`` chooses another way.
    """
    assert isinstance(function, FunctionType), "marks are below other decorators"
    RECORDABLE[function.__code__] = f"{function.__module__}.{function.__qualname__}"
    return function


@recordable
def array_module(array: Array) -> ModuleType:
    """Return the module of an array, ``numpy`` or ``cupy``.

    ``InputError`` is raised if the object belongs to neither library.
    """
    if type(array) is np.ndarray or isinstance(array, np.ndarray | np.generic):
        return np
    library = _library(array)
    if library == _RECORDED and hasattr(array, "__array_namespace__"):
        module: ModuleType = array.__array_namespace__()
        return module
    if library not in _LIBRARIES:
        raise InputError(
            f"expected an array of NumPy or CuPy, got {type(array).__module__}."
            f"{type(array).__qualname__}; convert it with numpy.asarray first."
        )
    return sys.modules[library]


def is_recorded(array: Array) -> bool:
    """Return whether an array records operations for a file; its entries are not known."""
    return type(array).__module__.partition(".")[0] == _RECORDED


def on_device(array: Array) -> bool:
    """Return whether an array is in the memory of a GPU."""
    return not isinstance(array, np.ndarray) and _library(array) == "cupy"


def as_array(value: Any) -> Array:
    """Return an array of NumPy or CuPy unchanged, and other objects as NumPy arrays.

    Memory is shared if possible. ``InputError`` is raised if the array has a mask, or if NumPy
    cannot convert the object.
    """
    if type(value) is np.ndarray:  # most often
        return value
    refuse_mask(value)
    if isinstance(value, np.ndarray) or _library(value) in ("cupy", _RECORDED):
        array: Array = value
        return array
    try:
        return np.from_dlpack(readable(value)) if _is_foreign(value) else np.asarray(value)
    # NumPy raises a RuntimeError for element types that it lacks.
    except (TypeError, ValueError, BufferError, RuntimeError) as failure:
        raise InputError(
            f"{type(value).__name__} is not an array of numbers: {str(failure).rstrip('.')}."
        ) from failure


def refuse_mask(value: object) -> None:
    """Raise an InputError for a masked array."""
    if isinstance(value, np.ma.MaskedArray):
        raise InputError(
            "a masked array cannot be used, because its mask would be ignored; fill the "
            "array, for example with array.filled(0)."
        )


def numeric(what: str, array: Array) -> Array:
    """Return the array; raise an InputError for text, objects, times and complex numbers."""
    if array.dtype.kind in "OSUMmc":
        raise InputError(
            f"{what} contains {array.dtype}, not real numbers; pass an array of numbers."
        )
    return array


def readable(value: Any) -> Any:
    """Return a tensor that NumPy and CuPy can read: without autograd, bfloat16 as float32."""
    if getattr(value, "requires_grad", False):
        value = value.detach()
    if str(getattr(value, "dtype", "")).rpartition(".")[2] != "bfloat16":
        return value
    return value.float() if hasattr(value, "float") else value.astype("float32")


def read_only(array: Array) -> Array:
    """Return a read-only view, or a copy for a library without such views."""
    if not isinstance(array, np.ndarray):
        copy: Array = array.copy()
        return copy
    view = array.view()
    view.flags.writeable = False
    return view


def on_host(values: Mapping[str, Any], backend: Backend) -> dict[str, Any]:
    """Return values by name with arrays of a device copied to the host, and other values unchanged.

    ``InputError`` is raised if ``values`` is not a mapping.
    """
    check_arrays(values)
    return {
        n: v
        if type(v) is np.ndarray or not _is_foreign(v)
        else backend.to_numpy(backend.asarray(v))
        for n, v in values.items()
    }


def in_library(values: Mapping[str, Any], backend: Backend) -> dict[str, Any]:
    """Return values by name with device arrays of any library as arrays of the backend.

    Arrays are not copied if possible. ``InputError`` is raised if ``values`` is not a mapping.
    """
    check_arrays(values)
    return {n: backend.asarray(v) if _is_foreign(v) else v for n, v in values.items()}


def _is_foreign(value: Any) -> bool:
    return not isinstance(value, np.ndarray | np.generic) and hasattr(value, "__dlpack__")


def _library(value: object) -> str:
    """Return the top-level package of the type of ``value``."""
    return type(value).__module__.partition(".")[0]
