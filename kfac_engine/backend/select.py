"""The choice of an array library: made once, by name, and said aloud."""

import logging
from collections.abc import Mapping
from functools import cache
from typing import Literal, TypeAlias, cast, get_args

from kfac_engine._types import Array
from kfac_engine.backend.cpu.backend import NumpyBackend
from kfac_engine.backend.cuda.backend import CupyBackend
from kfac_engine.backend.cuda.device import CupyDevice
from kfac_engine.backend.cuda.memory_space import CupyMemorySpace
from kfac_engine.backend.memory_space import HOST, MemorySpace
from kfac_engine.backend.namespace import array_module
from kfac_engine.backend.protocol import Backend
from kfac_engine.errors import BackendError, UnknownNameError

BackendName: TypeAlias = Literal["auto", "numpy", "cupy", "cupy-tf32", "cupy-fp32"]

# TF32 numbers that factors of products are split into on tensor cores; None: what keeps float32.
_SPLITS: Mapping[str, int | None] = {"cupy": None, "cupy-tf32": 1, "cupy-fp32": 0}

_LOG = logging.getLogger(__name__)


def select(
    name: str = "auto", *, scratch_bytes: int | None = None, threads: int | None = None
) -> Backend:
    """The backend that goes by ``name``.

    Args:
        name: ``"numpy"``, ``"cupy"``, or ``"auto"`` for the GPU where one works; the choice of
            ``"auto"`` is logged. ``"cupy"`` multiplies patches in float32's accuracy on tensor
            cores, ``"cupy-tf32"`` faster with three digits, ``"cupy-fp32"`` without tensor cores.
        scratch_bytes: Upper bound of the working memory of one primitive; by default 64 MiB on a
            CPU, 256 MiB on a GPU.
        threads: That share the work of one primitive on a CPU; by default as ``Workers`` has it.

    Returns:
        A new backend.

    Raises:
        BackendError: CuPy was asked for by name and cannot be used.
        UnknownNameError: No backend has this name.
    """
    checked = _checked(name)
    bound = {} if scratch_bytes is None else {"scratch_bytes": scratch_bytes}
    if checked == "auto":
        _LOG.info("backend: %s", choice_reason("auto"))
        checked = "numpy" if isinstance(_gpu(), str) else "cupy"
    if checked == "numpy":
        return NumpyBackend(threads=threads, **bound)
    found = _gpu()
    if isinstance(found, str):
        raise BackendError(f"{found} Choose backend 'numpy' or 'auto' to go without.")
    return CupyBackend(found, split=_SPLITS[checked], **bound)


def choice_reason(name: str = "auto") -> str:
    """What ``select(name)`` does on this machine and why, in one line.

    Args:
        name: As for ``select``.

    Returns:
        A sentence without full stop.

    Raises:
        UnknownNameError: No backend has this name.
    """
    checked = _checked(name)
    if checked == "numpy":
        return "numpy, as asked for"
    found = _gpu()
    asked = "chosen automatically" if checked == "auto" else "as asked for"
    if not isinstance(found, str):
        return f"cupy on {found.name}, {asked}"
    reason = found.rstrip(".")
    return f"numpy, {asked}: {reason}" if checked == "auto" else f"none: {reason}"


def memory_space_of(backend: Backend) -> MemorySpace:
    """Return the memory space of the arrays of a backend."""
    if isinstance(backend, CupyBackend):
        return _gpu_memory_space(backend.device, backend.tf32)
    return HOST


@cache
def owner_named(library: str) -> Backend:
    """The backend of arrays of a library, with its default working memory."""
    return select(library)


def owner(array: Array) -> Backend:
    """A backend whose arrays ``array`` is one of.

    Args:
        array: Of NumPy or CuPy.

    Returns:
        The same object for every array of a library.

    Raises:
        InputError: The object belongs to neither library.
    """
    return owner_named(array_module(array).__name__)


@cache
def _gpu() -> CupyDevice | str:
    """The GPU, proven by one kernel and one product; or why there is none. Asked once."""
    try:
        device = CupyDevice()
    except BackendError as failure:
        return str(failure)
    _LOG.info("curvature on %s", device.name)
    return device


@cache
def _gpu_memory_space(device: CupyDevice, tf32: bool) -> CupyMemorySpace:
    """One stream for all engines: their sessions take turns anyway."""
    return CupyMemorySpace(CupyBackend(device), tf32=tf32)


def _checked(name: str) -> BackendName:
    known = get_args(BackendName)
    if name not in known:
        raise UnknownNameError(f"unknown backend '{name}'; choose one of: {', '.join(known)}.")
    return cast(BackendName, name)
