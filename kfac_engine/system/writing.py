"""Writes files completely or not at all; all other modules use these functions.

The new content of a regular file is written to a temporary file in the same folder, which is then
renamed. A failure at any time leaves either the old content or the new content. Devices, pipes and
the standard output are written in place.
"""

import errno
import io
import os
import platform
import secrets
import stat
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import IO, TypeAlias

from kfac_engine.errors import InputError
from kfac_engine.system.reading import folder_members

Chunks: TypeAlias = Iterable[bytes | memoryview]

_PREFIX, _SUFFIX = ".kfac-engine-", ".tmp"
# An unlocked temporary file belongs to a killed process. The age is checked too, because a file
# system may not support locks, and a file is unlocked for a moment before it is renamed.
_STALE_SECONDS = 3600
_STDOUT = 1

# Temporary files of this process, and the lock for creating them.
_TEMPORARY: set[Path] = set()
_CREATION = Lock()


def checked_path(path: object) -> Path:
    """Convert an argument to a path; raise an InputError if it is not a path."""
    try:
        is_path = isinstance(path, str | os.PathLike) and path and b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        is_path = False
    if not is_path:
        raise InputError(f"{path!r:.80} is not a path; pass the name of a file.")
    return Path(path)  # type: ignore[arg-type] # checked above


def write_file(path: str | os.PathLike[str], chunks: Chunks) -> None:
    """Write chunks to a file completely or not at all.

    A symbolic link is followed. An existing file keeps its permissions and its owner. Devices,
    pipes and the standard output are written in place. ``InputError`` is raised if the folder does
    not exist, or if the file cannot be written.
    """
    try:
        old = _status(Path(path))
    except (TypeError, ValueError) as failure:  # ValueError: a zero byte in the path
        raise InputError(f"cannot write {path!r}: it is not a path ({failure}).") from failure
    except OSError as failure:
        raise InputError(f"cannot write '{path}': {failure.strerror}.") from failure
    try:
        _write(Path(path), chunks, old)
    except OSError as failure:
        raise InputError(f"cannot write '{path}': {failure.strerror}.") from failure


def write_rendered(path: str | os.PathLike[str], render: Callable[[IO[bytes]], object]) -> None:
    """Write a file with the content that ``render`` writes into a stream; see ``write_file``."""
    content = io.BytesIO()
    render(content)
    write_file(path, [content.getbuffer()])


def check_outputs(
    outputs: Mapping[str, Path | None],
    inputs: Mapping[str, Path | Iterable[Path] | None] | None = None,
    appended: Collection[str] = (),
) -> None:
    """Raise ``InputError`` unless outputs can be written, are different files, and are not inputs.

    Names are for messages. An output that is None is not requested. The files of a folder are
    inputs. ``appended`` names the outputs that are written in place; the others are replaced.
    """
    names = {
        _identity(path): name
        for name, paths in (inputs or {}).items()
        for path in _with_members(paths)
    }
    for name, path in outputs.items():
        if path is None:
            continue
        obstacle = _obstacle(path, in_place=name in appended)
        if obstacle:
            raise InputError(f"{name} '{path}' cannot be written: {obstacle}.")
        identity = _identity(path)
        if identity is not None and identity in names:
            raise InputError(
                f"{name} '{path}' would overwrite the file of {names[identity]}; name another file."
            )
        names[identity] = name


def is_stdout(path: Path) -> bool:
    """Return whether a path names the standard output of this process, such as ``/dev/stdout``."""
    try:
        status = _status(path)
    except (OSError, ValueError):
        return False
    return status is not None and _is_stdout(status)


def abandon_files() -> None:
    """Remove all temporary files of this process, and prevent new ones, before it ends."""
    _CREATION.acquire(timeout=0.5)
    for path in tuple(_TEMPORARY):
        with suppress(OSError):
            path.unlink()


# -- private ---------------------------------------------------------------------------------------


def _write(path: Path, chunks: Chunks, old: os.stat_result | None) -> None:
    if old is not None and _is_stdout(old):
        _write_to_stdout(chunks)
        return
    target = Path(os.path.realpath(path))
    if _is_replaced(target, old):
        _replace(target, chunks, old)
        return
    with path.open("wb") as file:
        file.writelines(chunks)


def _is_replaced(target: Path, old: os.stat_result | None) -> bool:
    """Return whether a new file takes the place of a target; others are written in place."""
    return old is None or (stat.S_ISREG(old.st_mode) and _names(target, old))


def _replace(target: Path, chunks: Chunks, old: os.stat_result | None) -> None:
    _require_permission(target, old)
    _remove_stale(target.parent)
    with _temporary(target, old) as (file, temporary):
        file.writelines(chunks)
        file.flush()
        os.fsync(file.fileno())
        file.close()
        temporary.replace(target)


def _require_permission(target: Path, old: os.stat_result | None) -> None:
    effective = os.access in os.supports_effective_ids
    if old is not None and not os.access(target, os.W_OK, effective_ids=effective):
        raise PermissionError(errno.EACCES, "the file is write-protected")


def _obstacle(path: Path, *, in_place: bool) -> str:
    """Return why a file cannot be written and what to do; empty if it can.

    A trial decides: permissions do not bind the administrator, and file systems such as ``/proc``
    or read-only ones refuse new files whatever the permissions are.
    """
    try:
        old, target = _status(path), Path(os.path.realpath(path))
        if (old is not None and stat.S_ISDIR(old.st_mode)) or not path.parent.is_dir():
            return "name a file in an existing folder"
        if old is not None and _is_stdout(old):
            return ""
        _require_permission(path, old)
        if not (in_place and old is not None) and _is_replaced(target, old):
            with _temporary(target, old):
                pass
    except (OSError, ValueError) as failure:  # ValueError: a zero byte in the path
        return f"{getattr(failure, 'strerror', None) or failure}; name another file"
    return ""


def _with_members(paths: Path | Iterable[Path] | None) -> Iterator[Path]:
    """Yield paths, and the files of each path that is a folder."""
    for path in [paths] if isinstance(paths, Path) else paths or ():
        yield path
        with suppress(InputError):  # what the run cannot read is an error elsewhere
            yield from folder_members(path) or ()


@contextmanager
def _temporary(target: Path, old: os.stat_result | None) -> Iterator[tuple[IO[bytes], Path]]:
    """Return a context with a new file next to a target; it is removed unless it is renamed."""
    temporary = target.with_name(f"{_PREFIX}{secrets.token_hex(8)}{_SUFFIX}")
    try:
        with _create(temporary, old) as file:
            yield file, temporary
    finally:
        with suppress(OSError):  # the file was renamed
            temporary.unlink()
        _TEMPORARY.discard(temporary)


def _create(temporary: Path, old: os.stat_result | None) -> IO[bytes]:
    """Create a file with owner and permissions of ``old``, locked while it is open."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    mode = 0o666 if old is None else stat.S_IMODE(old.st_mode)
    with _CREATION:
        _TEMPORARY.add(temporary)
        file = os.fdopen(os.open(temporary, flags, mode), "wb")
    try:
        lock(file.fileno())
        if old is not None and sys.platform != "win32":
            with suppress(OSError):  # only root may change the owner
                os.fchown(file.fileno(), old.st_uid, old.st_gid)
            os.fchmod(file.fileno(), mode)
    except OSError:
        file.close()
        raise
    return file


def _remove_stale(folder: Path) -> None:
    """Remove temporary files of killed processes."""
    for path in folder.glob(f"{_PREFIX}*{_SUFFIX}"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                # Windows refuses to remove a file that is open.
                descriptor = os.open(path, os.O_RDWR)
                try:
                    # A file system without locks says nothing about the process.
                    unused = sys.platform == "win32" or lock(descriptor) is True
                finally:
                    os.close(descriptor)
                if unused:
                    path.unlink()


def _write_to_stdout(chunks: Chunks) -> None:
    if sys.stdout is not None:
        sys.stdout.flush()
    with os.fdopen(_STDOUT, "wb", closefd=False) as file:
        file.writelines(chunks)


def _status(path: Path) -> os.stat_result | None:
    """Return the status of the file that a path leads to; None if the file does not exist."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _is_stdout(status: os.stat_result) -> bool:
    try:
        stdout = os.fstat(_STDOUT)
    except OSError:  # the standard output is closed
        return False
    # All processes share the null device: it does not identify the output of this process.
    is_null = stat.S_ISCHR(stdout.st_mode) and not os.isatty(_STDOUT)
    return os.path.samestat(status, stdout) and not is_null


def _names(target: Path, status: os.stat_result) -> bool:
    """Return whether a resolved path is this file; links in ``/proc`` may not resolve."""
    resolved = _status(target)
    return resolved is not None and os.path.samestat(resolved, status)


def _identity(path: Path) -> tuple[int, int] | str | None:
    """Return a value that is equal for two names of one file; None for devices and pipes."""
    try:
        status = path.stat()
    except OSError:
        return os.path.realpath(path)
    except ValueError:  # a zero byte in the path
        return None
    return (status.st_dev, status.st_ino) if stat.S_ISREG(status.st_mode) else None


if sys.platform != "win32":
    import fcntl

_ATTEMPTS = 100


class FileLock:
    """The lock of a file that exists while a process holds the lock.

    File systems without locks, and Windows, do not exclude other processes.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def acquire(self) -> str | None:
        """Lock the file; return None, or a description of the process that holds the lock.

        ``OSError`` is raised if the file cannot be opened for writing.
        """
        for _ in range(_ATTEMPTS):
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
            if lock(descriptor) is False:
                holder = os.read(descriptor, 1000).decode(errors="replace")
                os.close(descriptor)
                return holder or "another process"
            if self._names(descriptor):
                break
            os.close(descriptor)  # the holder before has removed the file
        else:
            return "other processes, one after another"
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {platform.node()}".encode())
        self._descriptor = descriptor
        return None

    def release(self) -> None:
        """Release the lock, if this object holds it, and remove the file."""
        if self._descriptor is None:
            return
        descriptor, self._descriptor = self._descriptor, None
        try:
            if sys.platform != "win32":  # which refuses to remove an open file
                self._path.unlink(missing_ok=True)
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child process may have the descriptor
        except OSError:  # the folder was removed, or has no locks
            pass
        finally:
            os.close(descriptor)

    def _names(self, descriptor: int) -> bool:
        """Return whether the path still leads to an open file."""
        try:
            return os.path.samestat(self._path.stat(), os.fstat(descriptor))
        except OSError:
            return False


def lock(descriptor: int) -> bool | None:
    """Lock an open file.

    Return True; False if another process has locked it; None if locks do not work.
    """
    if sys.platform == "win32":
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
