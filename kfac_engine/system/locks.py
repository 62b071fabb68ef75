"""Locks of files, by which processes notice each other; the system frees them when one ends."""

import os
import platform
import sys
from pathlib import Path

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
