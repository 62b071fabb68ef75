"""Reads ``.npy`` and ``.npz`` files: checks sizes first, and maps contents if possible.

An array that is mapped stays in its file, and the operating system reads the parts that are used. A
member of an ``.npz`` file can be mapped if the archive stores it without compression, as
``numpy.savez`` does: its bytes are then a part of the file. A file must not be changed while it is
mapped.
"""

import io
import lzma
import os
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Literal

import numpy as np

from kfac_engine._types import Array, DType
from kfac_engine.errors import InputError, KfacError
from kfac_engine.system.memory_limits import available_memory
from kfac_engine.system.reading import check_file, check_regular_file, is_pipe, read_bounded

_ZIP, _NPY = b"PK", b"\x93NUMPY"
# The local header of a member of an archive: its length, its signature, and the position of the
# lengths of the name and of the extra field. These two precede the content.
_LOCAL_HEADER, _LOCAL_SIGNATURE, _LOCAL_LENGTHS = 30, b"PK\x03\x04", struct.Struct("<26x2H")
_ENCRYPTED = 1  # bit of the flags of a member
# Exceptions of NumPy and zipfile for damaged files.
_DAMAGED = (
    ArithmeticError,
    EOFError,
    LookupError,
    RuntimeError,  # for an encrypted file, or an unknown version
    SyntaxError,
    TypeError,
    ValueError,
    lzma.LZMAError,
    struct.error,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
)
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


@dataclass(frozen=True, slots=True)
class ArrayHeader:
    """The properties that a file states for an array."""

    shape: tuple[int, ...]  # shape of the array
    dtype: DType  # element type of the array
    order: Literal["C", "F"]  # ``"C"`` or ``"F"``
    length: int  # number of bytes of the header, which is before the elements

    @property
    def bytes(self) -> int:
        """Number of bytes of the elements."""
        return self.dtype.itemsize * int(np.prod(self.shape, dtype=object))


@dataclass(frozen=True, slots=True)
class _Member:
    """An array in a file."""

    name: str | None  # name of the array; None in an ``.npy`` file
    size: int  # number of bytes of the header and the elements
    open: Callable[[], IO[bytes]]  # opens the header and the elements as a stream
    offset: int | None  # position of the header in the file; None if the array is compressed


def read_arrays(path: Path) -> dict[str | None, Array]:
    """Return the arrays of an ``.npz`` file by name, or the array of an ``.npy`` file under None.

    ``InputError`` is raised if the file is missing, has another format, is damaged, or is shorter
    than its headers state.
    """
    piped = is_pipe(path)
    if not piped:
        check_file(path)
    with (
        _explained(path),
        path.open("rb") as file,
        _members(_buffered(file) if piped else file) as members,
    ):
        _check_memory(members)
        return {member.name: _read(member) for member in members}


def map_arrays(path: Path) -> dict[str | None, Array]:
    """Return the arrays of a file as ``read_arrays`` does, mapped where the file allows it.

    Mapped arrays are read-only. Compressed arrays and arrays of a pipe are read.
    """
    if is_pipe(path):
        return read_arrays(path)
    check_regular_file(path)
    with _explained(path), path.open("rb") as file, _members(file) as members:
        _check_memory([member for member in members if member.offset is None])
        return {member.name: _mapped(member, file) for member in members}


def array_headers(path: Path) -> dict[str | None, ArrayHeader]:
    """Return the headers of the arrays of a file by name, without reading elements.

    The file must not be a pipe. Names are as in ``read_arrays``.
    """
    check_regular_file(path)
    with _explained(path), path.open("rb") as file, _members(file) as members:
        return {member.name: _header_of(member) for member in members}


# -- private ---------------------------------------------------------------------------------------


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Convert exceptions of reading a file to InputErrors with the path."""
    try:
        yield
    except OSError as error:
        raise InputError(f"cannot read '{path}': {error.strerror or error}.") from error
    except KfacError as error:
        raise InputError(f"cannot read '{path}': {error}") from error
    except _DAMAGED as error:
        raise InputError(
            f"cannot read '{path}': {error}; write the file with numpy.savez or numpy.save."
        ) from error


def _buffered(pipe: IO[bytes]) -> IO[bytes]:
    """Return the bytes of a pipe that starts like an .npy or .npz file.

    A pipe that starts differently raises ``ValueError``. It is not read to its end, because it may
    have no end.
    """
    start = pipe.read(len(_NPY))
    if not start.startswith((_ZIP, _NPY)):
        raise ValueError("the pipe does not contain a .npy or .npz file")
    # The arrays need as much memory as these bytes, in addition to them.
    return io.BytesIO(start + read_bounded(pipe, available_memory() // 3))


@contextmanager
def _members(file: IO[bytes]) -> Iterator[list[_Member]]:
    """Return a context with the arrays of a file; open the arrays inside the context."""
    start = file.read(len(_NPY))
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    if start == _NPY:
        yield [_Member(None, size, lambda: file, 0)]
        return
    with zipfile.ZipFile(file) as archive:
        yield [
            _Member(
                entry.filename.removesuffix(".npy"),
                entry.file_size,
                partial(archive.open, entry),
                _offset(file, size, entry),
            )
            for entry in archive.infolist()
        ]


def _offset(file: IO[bytes], size: int, entry: zipfile.ZipInfo) -> int | None:
    """Return the position of a member's content; None if it is compressed or encrypted."""
    if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & _ENCRYPTED:
        return None
    file.seek(entry.header_offset)
    header = file.read(_LOCAL_HEADER)
    if not header.startswith(_LOCAL_SIGNATURE):
        return None  # the later read reports the damage
    offset = entry.header_offset + _LOCAL_HEADER + sum(_LOCAL_LENGTHS.unpack(header))
    return offset if offset + entry.file_size <= size else None


def _check_memory(members: list[_Member]) -> None:
    total, free = sum(member.size for member in members), available_memory()
    if total > free:
        raise InputError(
            f"its arrays need {total} bytes, but only {free} bytes of memory are free."
        )


def _header_of(member: _Member) -> ArrayHeader:
    with member.open() as file:
        return _header(file, member.size)


def _header(file: IO[bytes], size: int) -> ArrayHeader:
    """Return the header at the position of a file, before the last ``size`` bytes.

    NumPy allocates the size in a header before it reads the elements, so this size is first
    compared with the number of bytes in the file. ``InputError`` is raised if the header has an
    unknown version, or states an impossible shape or type.
    """
    start = file.tell()
    version = np.lib.format.read_magic(file)
    if version not in _HEADERS:
        raise InputError(f"an array has the unknown format version {version[0]}.{version[1]}.")
    shape, fortran, dtype = _HEADERS[version](file)
    if min(shape, default=0) < 0:  # NumPy 2.0 would infer a negative length
        raise InputError(
            f"the header of an array states the shape {shape}, with a negative length."
        )
    header = ArrayHeader(shape, dtype, "F" if fortran else "C", file.tell() - start)
    if dtype.hasobject or header.bytes > size - header.length:
        what = "Python objects" if dtype.hasobject else f"{header.bytes} bytes in a file of {size}"
        raise InputError(f"the header of an array states {what}.")
    return header


def _read(member: _Member) -> Array:
    with member.open() as file:
        _header(file, member.size)
        file.seek(0)
        array: Array = np.lib.format.read_array(file, allow_pickle=False)
        return array


def _mapped(member: _Member, file: IO[bytes]) -> Array:
    if member.offset is None:
        return _read(member)
    file.seek(member.offset)
    header = _header(file, member.size)
    if not header.bytes:  # an empty range cannot be mapped
        return np.zeros(header.shape, header.dtype)
    start = member.offset + header.length
    return np.memmap(file, header.dtype, "r", start, header.shape, header.order)
