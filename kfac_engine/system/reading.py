"""Checks and limits the user's files before reading them."""

import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from kfac_engine.errors import InputError
from kfac_engine.system.memory_limits import available_memory

_CHUNK_BYTES = 1 << 20


def check_file(path: Path, error: type[InputError] = InputError) -> None:
    """Raise ``error`` unless a path names a regular file that is smaller than the free memory."""
    size, free = check_regular_file(path, error), available_memory()
    if size > free:
        raise error(
            f"cannot read '{path}': it has {size} bytes, but only {free} bytes of memory are free."
        )


def check_regular_file(path: Path, error: type[InputError] = InputError) -> int:
    """Return the number of bytes of a regular file; raise ``error`` for another path."""
    try:
        status = path.stat()
    except FileNotFoundError as failure:
        raise error(f"cannot read '{path}': there is no such file.") from failure
    except (OSError, ValueError) as failure:  # ValueError: a zero byte in the path
        reason = (failure.strerror if isinstance(failure, OSError) else None) or failure
        raise error(f"cannot read '{path}': {reason}.") from failure
    if not stat.S_ISREG(status.st_mode):
        raise error(f"cannot read '{path}': it is {_kind(status.st_mode)}, not a regular file.")
    return status.st_size


def exists(path: Path) -> bool:
    """Return whether a path leads to a file or a folder; an InputError if the system refuses."""
    with _explained(path):
        return path.exists()


def folder_members(path: Path) -> list[Path] | None:
    """Return the sorted paths in a folder; None for another path.

    ``InputError`` is raised if the folder cannot be read.
    """
    with _explained(path):
        return sorted(path.iterdir()) if path.is_dir() else None


def names_folder(path: Path) -> bool:
    """Return whether a path names a folder; raise ``InputError`` if it cannot be read."""
    with _explained(path):
        return path.is_dir()


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as failure:
        raise InputError(f"cannot read '{path}': {failure.strerror}.") from failure


def is_pipe(path: Path) -> bool:
    """Return whether a path names a pipe or a socket. Both can be read only once."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def read_bounded(file: IO[bytes], most: int) -> bytes:
    """Return the content of a stream to its end; raise ``InputError`` beyond ``most`` bytes."""
    data = bytearray()
    while chunk := file.read(_CHUNK_BYTES):
        data += chunk
        if len(data) > most:
            raise InputError(f"it has more than {most} bytes, the limit for a pipe.")
    return bytes(data)


def _kind(mode: int) -> str:
    return next((name for is_such, name in _KINDS if is_such(mode)), "something else")


_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
)
