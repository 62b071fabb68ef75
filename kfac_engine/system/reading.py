"""Reading of files that a user names: regular files that fit into the free memory."""

import stat
from pathlib import Path
from typing import IO

from kfac_engine.errors import InputError
from kfac_engine.system.memory_limits import available_memory

_CHUNK_BYTES = 1 << 20


def check_file(path: Path, error: type[InputError] = InputError) -> None:
    """Refuse a path that is not a regular file, and a file larger than the free memory.

    Args:
        path: The file.
        error: Type of the error.

    Raises:
        InputError: There is no such file, it is a folder, a device or a pipe, or too large.
    """
    try:
        found = path.stat()
    except FileNotFoundError as failure:
        raise error(f"cannot read '{path}': there is no such file.") from failure
    except (OSError, ValueError) as failure:  # ValueError: a zero byte in the path
        reason = (failure.strerror if isinstance(failure, OSError) else None) or failure
        raise error(f"cannot read '{path}': {reason}.") from failure
    if not stat.S_ISREG(found.st_mode):
        raise error(f"cannot read '{path}': it is {_kind(found.st_mode)}, no regular file.")
    free = available_memory()
    if found.st_size > free:
        raise error(
            f"cannot read '{path}': it has {found.st_size} bytes, more than the {free} bytes of "
            f"memory that are free."
        )


def is_pipe(path: Path) -> bool:
    """Whether a path leads to a pipe or a socket, which can be read only once."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def read_bounded(file: IO[bytes], most: int) -> bytes:
    """All bytes of a stream.

    Args:
        file: The stream.
        most: Bytes that it may hold.

    Returns:
        The bytes.

    Raises:
        InputError: There are more.
    """
    data = bytearray()
    while chunk := file.read(_CHUNK_BYTES):
        data += chunk
        if len(data) > most:
            raise InputError(f"it holds more than the {most} bytes that may be read from a pipe.")
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
