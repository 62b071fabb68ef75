"""A user whom permissions bind: tests often run as the administrator, whom they do not."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_NOBODY = 65534


@contextmanager
def unprivileged() -> Iterator[Path]:
    """Return a context of an ordinary user, with a folder of this user."""
    folder = Path(tempfile.mkdtemp())
    administrator = os.geteuid() == 0
    try:
        if administrator:
            os.chown(folder, _NOBODY, -1)
            try:
                os.seteuid(_NOBODY)
            except PermissionError:
                pytest.skip("the administrator of this container cannot become another user")
        yield folder
    finally:
        if administrator:
            os.seteuid(0)
        for path, _, _ in os.walk(folder):
            Path(path).chmod(0o700)
        shutil.rmtree(folder)
