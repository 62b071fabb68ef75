"""The choice of an array library: made once, by name, and said aloud."""

import logging
from typing import Literal, TypeAlias, cast, get_args

from kfac_engine.backend.numpy_backend import SCRATCH_BYTES, NumpyBackend
from kfac_engine.backend.protocol import Backend
from kfac_engine.errors import BackendError, UnknownNameError

BackendName: TypeAlias = Literal["auto", "numpy", "cupy"]

_LOG = logging.getLogger(__name__)
_NO_CUPY = "this version has no CuPy backend yet"


def select(name: str = "auto", *, scratch_bytes: int = SCRATCH_BYTES) -> Backend:
    """The backend that goes by ``name``.

    Args:
        name: ``"numpy"``, ``"cupy"``, or ``"auto"`` for the best one here, which is logged.
        scratch_bytes: Upper bound of the working memory of one primitive.

    Returns:
        A new backend.

    Raises:
        BackendError: The library was asked for by name and cannot be used.
        UnknownNameError: No backend has this name.
    """
    checked = _checked(name)
    if checked == "cupy":
        raise BackendError(f"{_NO_CUPY}; choose backend 'numpy' or 'auto'.")
    if checked == "auto":
        _LOG.info("backend: %s", choice_reason("auto"))
    return NumpyBackend(scratch_bytes=scratch_bytes)


def choice_reason(name: str = "auto") -> str:
    """What ``select(name)`` does on this machine and why, in one line.

    Args:
        name: As for ``select``.

    Returns:
        A sentence without full stop.

    Raises:
        UnknownNameError: No backend has this name.
    """
    return {
        "auto": f"numpy, chosen automatically: {_NO_CUPY}",
        "numpy": "numpy, as asked for",
        "cupy": f"none: {_NO_CUPY}",
    }[_checked(name)]


def _checked(name: str) -> BackendName:
    known = get_args(BackendName)
    if name not in known:
        raise UnknownNameError(f"unknown backend '{name}'; choose one of: {', '.join(known)}.")
    return cast(BackendName, name)
