"""The state of a training run in one safetensors file: engine, optimizer, position in the data.

The state of the engine is stored as the bytes of ``Engine.save``, in a tensor of bytes, so that
one rename replaces both states at once.
"""

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from kfac_engine._types import Array
from kfac_engine.engine.engine import Engine
from kfac_engine.errors import InputError
from kfac_engine.system.reading import check_file
from kfac_engine.system.writing import checked_path, write_file

FORMAT_VERSION = 1

_ENGINE = "engine"
_SLOT = "optimizer/"
_HEADER = "training"
_OTHER = "'{}' is a state of another model or optimizer: {}."
_KEYS = {"format", "optimizer", "numbers", "run", "checksum"}


@dataclass(frozen=True, slots=True)
class Saved:
    """The state of an optimizer.

    Attributes:
        optimizer: Class of the optimizer.
        numbers: Numbers by name.
        slots: Slot to parameter name to state array.
        run: The state of ``fit``; empty in a file of ``Optimizer.save``.
    """

    optimizer: str
    numbers: Mapping[str, float]
    slots: Mapping[str, Mapping[str, Array]]
    run: Mapping[str, Any] = field(default_factory=dict)


def write_training(
    path: str | Path, engine: Engine, saved: Saved, run: Mapping[str, object]
) -> None:
    """Write the state of a training run; the file is replaced whole or not at all.

    Args:
        path: The file.
        engine: The engine.
        saved: The state of its optimizer.
        run: The state of ``fit``, of values that JSON can represent.
    """
    target = checked_path(path)
    to_numpy = engine.collection.backend.to_numpy
    tensors = {
        f"{_SLOT}{slot}/{name}": np.asarray(to_numpy(array), order="C")
        for slot, arrays in saved.slots.items()
        for name, array in arrays.items()
    }
    with TemporaryDirectory() as folder:
        file = Path(folder) / "engine.safetensors"
        engine.save(file)
        tensors[_ENGINE] = np.frombuffer(file.read_bytes(), np.uint8)
    header = {
        "format": FORMAT_VERSION,
        "optimizer": saved.optimizer,
        "numbers": dict(saved.numbers),
        "run": dict(run),
    }
    header["checksum"] = _checksum(header, tensors)
    write_file(target, [save(tensors, {_HEADER: json.dumps(header)})])


def read_training(
    path: str | Path,
    engine: Engine,
    expected: Saved,
    check: Callable[[Mapping[str, Any]], None] | None = None,
) -> Saved:
    """Read the state of a training run into an engine; return the state of its optimizer.

    Args:
        path: A file of ``write_training``.
        engine: The engine of the same model; changed only when the whole file fits.
        expected: The present state of the optimizer, with the same arrays.
        check: Called with the state of ``fit`` before anything changes; may raise.

    Returns:
        The state of the optimizer.

    Raises:
        InputError: The file is missing, damaged, or of another model or optimizer.
    """
    header, tensors = _read(path)
    if header["optimizer"] != expected.optimizer:
        raise InputError(
            f"'{path}' is a state of {header['optimizer']}, and this optimizer is "
            f"{expected.optimizer}; make an optimizer of the same class."
        )
    if check is not None:
        check(header["run"])
    slots: dict[str, dict[str, Array]] = {}
    asarray = engine.collection.backend.asarray
    for slot, arrays in expected.slots.items():
        for name, array in arrays.items():
            stored = tensors.pop(f"{_SLOT}{slot}/{name}", None)
            if stored is None or stored.shape != array.shape or stored.dtype != array.dtype:
                difference = f"the {slot} of '{name}' is {_form(stored)}, not {_form(array)}"
                raise InputError(_OTHER.format(path, difference))
            slots.setdefault(slot, {})[name] = asarray(stored)
    state = tensors.pop(_ENGINE)
    if tensors or header["numbers"].keys() != expected.numbers.keys():
        raise InputError(_OTHER.format(path, "the states have different entries"))
    _load_engine(engine, state.tobytes(), header["numbers"].get("engine_damping", engine.damping))
    return Saved(expected.optimizer, header["numbers"], slots, header["run"])


def _load_engine(engine: Engine, state: bytes, damping: float) -> None:
    """Load a state of an engine that was saved with a damping, which becomes the engine's."""
    present = engine.damping
    with TemporaryDirectory() as folder:
        file = Path(folder) / "engine.safetensors"
        file.write_bytes(state)
        engine.damping = damping
        try:
            engine.load(file)
        except InputError:
            engine.damping = present
            raise


def _read(path: str | Path) -> tuple[dict[str, Any], dict[str, Array]]:
    check_file(checked_path(path))
    try:
        with safe_open(str(path), framework="numpy") as file:
            header = json.loads((file.metadata() or {}).get(_HEADER, "null"))
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError, ValueError, RecursionError) as failure:
        raise InputError(f"cannot read the training state '{path}': {failure}") from failure
    if not isinstance(header, dict) or header.get("format") != FORMAT_VERSION:
        raise InputError(
            f"'{path}' is not a training state of format {FORMAT_VERSION}; another program or "
            f"version wrote it."
        )
    checksum = header.pop("checksum", None)
    if checksum != _checksum(header, tensors) or header.keys() != _KEYS - {"checksum"}:
        raise InputError(f"the training state '{path}' is damaged: its checksum is wrong.")
    return header, tensors


def _checksum(header: Mapping[str, object], tensors: Mapping[str, Array]) -> int:
    """Return the CRC-32 of all entries; the file format detects missing bytes only."""
    crc = zlib.crc32(json.dumps(header, sort_keys=True).encode())
    for name in sorted(tensors):
        array = tensors[name]
        crc = zlib.crc32(f"{name} {_form(array)}".encode(), crc)
        crc = zlib.crc32(array.reshape(-1).view(np.uint8).data, crc)
    return crc


def _form(array: Array | None) -> str:
    return "absent" if array is None else f"{array.dtype} {array.shape}"
