"""Writes and reads named arrays as safetensors; equal content gives equal bytes.

The header of a state has the version of its format and a checksum: safetensors itself detects
missing bytes only. The kinds of states, with what older files lack, are at the end.
"""

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from kfac_engine._types import Array
from kfac_engine.errors import InputError
from kfac_engine.system.reading import check_file
from kfac_engine.system.writing import checked_path, write_file

# What a safetensors file begins with: the length of its header.
_LENGTH_BYTES = 8
# The value of a text that is not JSON.
_INVALID: Any = object()


@dataclass(frozen=True, slots=True)
class StateKind:
    """A kind of state, and the version of its format that this library writes and reads."""

    name: str  # name in messages
    full_name: str  # full name in messages, with an article
    version: int  # version of the format
    # Entry of the metadata that holds the whole header; None if each has its own.
    entry: str | None = None
    # Entries that files of older versions lack, with the values that hold for such files.
    older: Mapping[str, Any] = field(default_factory=dict)
    always_checked: bool = True  # whether files of all versions have a checksum
    # What may have written a file that is not of this kind and version, for messages.
    otherwise: str = "another program or version"

    def another(self, path: str | Path) -> str:
        """Return the message for a file of another kind or version."""
        kind = f"{self.full_name} of format {self.version}"
        return f"'{path}' is not {kind}; {self.otherwise} wrote it."

    def damaged(self, path: str | Path, reason: str) -> str:
        """Return the error message for a damaged file."""
        return f"the {self.name} '{path}' is damaged: {reason}; use another."


@dataclass(frozen=True, slots=True)
class StateFile:
    """The content of a file with a state."""

    path: str | Path
    kind: StateKind
    header: Mapping[str, Any]
    arrays: Mapping[str, Array]

    def value(self, entry: str, fits: Callable[[Any], bool]) -> Any:
        """Return an entry of the header; an InputError if it is missing or does not fit."""
        value = self.header.get(entry, _INVALID)
        if value is _INVALID or not fits(value):
            reason = f"its {entry} is missing or not valid"
            raise InputError(self.kind.damaged(self.path, reason))
        return value

    def below(self, prefix: str) -> dict[str, Array]:
        """Return the arrays whose names have a prefix, without the prefix."""
        return {k.removeprefix(prefix): v for k, v in self.arrays.items() if k.startswith(prefix)}


def write_state(
    path: str | Path, kind: StateKind, header: Mapping[str, Any], arrays: Mapping[str, Array]
) -> None:
    """Write a state; the file is replaced whole or not at all.

    JSON must be able to represent the values of the header, to which version and checksum are
    added.
    """
    header = {"format": kind.version, **header}
    if kind.entry is None:
        header = {entry: json.dumps(value) for entry, value in header.items()}
    header["checksum"] = checksum(header, arrays)
    if kind.entry is not None:
        header = {kind.entry: json.dumps(header, sort_keys=True)}
    write_tensors(path, arrays, header)


def read_state(path: str | Path, kind: StateKind) -> StateFile:
    """Read a state, and check its checksum.

    ``InputError`` is raised if the file is missing, damaged, or of another kind or version.
    """
    metadata, arrays = read_tensors(path, f"the {kind.name} '{path}'")
    header: Any = metadata if kind.entry is None else _parsed(metadata).get(kind.entry)
    if not isinstance(header, dict) or str(header.get("format")) != str(kind.version):
        raise InputError(kind.another(path))
    is_checked = kind.always_checked or "checksum" in header
    if is_checked and header.pop("checksum", None) != checksum(header, arrays):
        raise InputError(kind.damaged(path, "its checksum is wrong"))
    if kind.entry is None:
        header = _parsed(header)
    return StateFile(path, kind, {**kind.older, **header}, arrays)


def write_tensors(
    path: str | Path, arrays: Mapping[str, Array], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file; it is replaced whole or not at all.

    ``metadata`` are texts by name.
    """
    # safetensors writes the memory behind a view as it lies there, whatever the view's strides.
    ordered = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    data = save(ordered, None if metadata is None else dict(metadata))
    write_file(path, [data] if metadata is None else _with_sorted_metadata(data))


def read_tensors(path: str | Path, what: str) -> tuple[dict[str, str], dict[str, Array]]:
    """Return the metadata and the arrays of a safetensors file, which messages call ``what``.

    ``InputError`` is raised if the file is missing or damaged.
    """
    check_file(checked_path(path))
    try:
        with safe_open(str(path), framework="numpy") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
            return file.metadata() or {}, arrays
    except (OSError, SafetensorError, TypeError, AttributeError) as failure:
        # The latter two: an element type that NumPy does not have, such as bfloat16.
        raise InputError(f"cannot read {what}: {failure}") from failure


def checksum(header: Mapping[str, object], arrays: Mapping[str, Array]) -> str:
    """Return the CRC-32 of a header and its arrays."""
    crc = zlib.crc32(json.dumps(header, sort_keys=True).encode())
    for name in sorted(arrays):
        array = np.asarray(arrays[name], order="C")
        crc = zlib.crc32(f"{name} {array.dtype} {array.shape}".encode(), crc)
        crc = zlib.crc32(array.reshape(-1).view(np.uint8).data, crc)
    return f"{crc:08x}"


def form_of(array: Array | None) -> str:
    """Return the type and the shape of an array as text, for comparisons with a file."""
    return "absent" if array is None else f"{np.dtype(array.dtype)} {array.shape}"


def _parsed(texts: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of JSON texts; ``_INVALID`` for other texts."""
    values = {}
    for entry, text in texts.items():
        try:
            values[entry] = json.loads(text)
        except (ValueError, RecursionError):
            values[entry] = _INVALID
    return values


def _with_sorted_metadata(data: bytes) -> list[bytes | memoryview]:
    """Return a safetensors file with sorted metadata; the library writes them in random order."""
    start = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    header = json.loads(data[_LENGTH_BYTES:start])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)  # tensors lie aligned
    return [len(text).to_bytes(_LENGTH_BYTES, "little"), text, memoryview(data)[start:]]


ENGINE_STATE = StateKind(
    "state", "an engine state", 1, older={"damping": None, "planner": None, "extras": {}}
)
# Stored in the extras of an engine state.
TRAINING_STATE = StateKind(
    "training state",
    "a training state",
    2,
    otherwise="it is the state of an engine, or another version",
)
CURVATURE = StateKind("curvature", "a curvature", 1, entry="curvature", always_checked=False)
