"""Selects the array library, by name or automatically."""

import logging
from collections.abc import Mapping
from functools import cache
from typing import Literal, TypeAlias, cast, get_args

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend.cpu.backend import NumpyBackend
from kfac_engine.backend.cuda.backend import CupyBackend
from kfac_engine.backend.cuda.device import CupyDevice
from kfac_engine.backend.cuda.memory_space import CupyMemorySpace
from kfac_engine.backend.memory_space import HOST, MemorySpace
from kfac_engine.backend.namespace import array_module
from kfac_engine.backend.protocol import Backend
from kfac_engine.errors import BackendError, UnknownNameError, suggestion

BackendName: TypeAlias = Literal["auto", "numpy", "cupy", "cupy-tf32", "cupy-fp32"]

# Number of products of tensor cores for each float32 product; None for float32 accuracy.
_PRODUCTS: Mapping[str, int | None] = {"cupy": None, "cupy-tf32": 1, "cupy-fp32": 0}

_LOG = logging.getLogger(__name__)


def select(
    name: str = "auto", *, scratch_bytes: int | None = None, threads: int | None = None
) -> Backend:
    """Return a backend by name.

    Args:
        name: ``"numpy"``, ``"cupy"``, or ``"auto"``, which selects a usable GPU and logs the
            choice. ``"cupy"`` multiplies patches with float32 accuracy on tensor cores,
            ``"cupy-tf32"`` faster with three digits, ``"cupy-fp32"`` without tensor cores.
        scratch_bytes: Bound of the scratch memory of one operation; by default 64 MiB on a CPU and
            256 MiB on a GPU.
        threads: Number of threads of one operation on a CPU; by default as in ``Workers``.

    Returns:
        A new backend.

    Raises:
        BackendError: CuPy was selected by name and cannot be used.
        UnknownNameError: No backend has this name.
    """
    checked = _checked(name)
    bound = {} if scratch_bytes is None else {"scratch_bytes": scratch_bytes}
    if checked == "auto":
        _LOG.info("backend: %s", choice_reason("auto"))
        checked = "numpy" if isinstance(_gpu(), str) else "cupy"
    if checked == "numpy":
        return NumpyBackend(threads=threads, **bound)
    gpu = _gpu()
    if isinstance(gpu, str):
        raise BackendError(f"{gpu} Choose backend 'numpy' or 'auto' to compute without a GPU.")
    return CupyBackend(gpu, products=_PRODUCTS[checked], **bound)


def choice_reason(name: str = "auto") -> str:
    """Return the backend of ``select(name)`` on this machine with the reason, in one line.

    It is a sentence without full stop.
    """
    checked = _checked(name)
    if checked == "numpy":
        return "numpy, as requested"
    gpu = _gpu()
    origin = "chosen automatically" if checked == "auto" else "as requested"
    if not isinstance(gpu, str):
        return f"cupy on {gpu.name}, {origin}"
    reason = gpu.rstrip(".")
    return f"numpy, {origin}: {reason}" if checked == "auto" else f"none: {reason}"


def memory_space_of(backend: Backend) -> MemorySpace:
    """Return the memory space of the arrays of a backend."""
    if isinstance(backend, CupyBackend):
        return _gpu_memory_space(backend.device, backend.tf32)
    return HOST


@cache
def owner_named(library: str) -> Backend:
    """Return the backend of a library, with the default scratch memory."""
    return select(library)


def owner(array: Array) -> Backend:
    """Return the backend of an array's library, always the same one.

    ``InputError`` is raised if the object belongs to neither NumPy nor CuPy.
    """
    module = array_module(array)
    recorded: Backend | None = None if module is np else getattr(module, "backend", None)
    return recorded or owner_named(module.__name__)


@cache
def _gpu() -> CupyDevice | str:
    """Return the GPU if it passes a test, or the reason why there is no usable GPU."""
    try:
        device = CupyDevice()
    except BackendError as failure:
        return str(failure)
    _LOG.info("curvature on %s", device.name)
    return device


@cache
def _gpu_memory_space(device: CupyDevice, tf32: bool) -> CupyMemorySpace:
    """Return the memory space of a GPU, which all engines share."""
    return CupyMemorySpace(CupyBackend(device), tf32=tf32)


def _checked(name: str) -> BackendName:
    known = get_args(BackendName)
    if name not in known:
        raise UnknownNameError(
            f"unknown backend '{name}'{suggestion(name, known)}; choose one of: {', '.join(known)}."
        )
    return cast(BackendName, name)
