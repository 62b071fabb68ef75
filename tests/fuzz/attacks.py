"""What is done with bytes that nobody should trust: it works, or one error of ours says why not."""

import io
import tempfile
from collections.abc import Callable
from functools import cache
from math import prod
from pathlib import Path

import numpy as np
import onnx
from safetensors.numpy import save

import kfac_engine as ke
from kfac_engine.cli.precondition import read_gradients
from kfac_engine.system.arrays import map_arrays, read_arrays
from tests import models
from tests.fuzz.mutants import BASES, mutated

BATCH = 3
_MOST_NUMBERS = 1_000_000
_MAGIC = (
    b"\x00",
    b"\xff",
    b"\x7f\xff\xff\xff",
    b"\xff" * 8,
    b"{",
    b"}",
    b"\n",
    b"PK",
    b"9999999999",
)


def bent(data: bytes, rng: np.random.Generator) -> bytes:
    """Bytes with a few of them flipped, left out, repeated or replaced."""
    changed = bytearray(data)
    for _ in range(int(rng.integers(1, 5))):
        at, kind = int(rng.integers(len(changed) or 1)), int(rng.integers(6))
        length = int(rng.integers(1, 16))
        if kind < 2 and changed:
            changed[at] ^= 1 << int(rng.integers(8))
        elif kind == 2:
            magic = _MAGIC[int(rng.integers(len(_MAGIC)))]
            changed[at : at + len(magic)] = magic
        elif kind == 3:
            del changed[at : at + length]
        elif kind == 4:
            changed[at:at] = changed[at : at + length]
        elif rng.random() < 0.2:
            del changed[at:]
    return bytes(changed)


def use_model(data: bytes) -> None:
    """Inspect a model, differentiate it, and observe a batch of the declared shape."""
    refusal = None
    try:
        ke.differentiate(data)
    except ke.KfacError as error:
        refusal = error
    engine = ke.Engine.from_onnx(data, loss="normal", threads=1)
    assert engine.layers
    assert engine.losses
    assert engine.memory(BATCH).total > 0
    rng = np.random.default_rng(0)
    feeds = {}
    for entry in engine.collection.graph.graph.inputs:
        sides = [side if isinstance(side, int) else BATCH for side in entry.shape or (BATCH,)]
        if prod(sides) > _MOST_NUMBERS:
            return
        feeds[entry.name] = rng.normal(size=sides).astype(entry.dtype)
    engine.observe(feeds)
    engine.precondition({name: np.ones_like(array) for name, array in engine.parameters.items()})
    if refusal is not None:
        raise refusal


def use_arrays(path: Path) -> None:
    """Map the arrays of a file, then read them, and use every element."""
    for array in map_arrays(path).values():
        array.tobytes()
    read_arrays(path)


def use_state(path: Path) -> None:
    """Resume from a state, and go on."""
    engine = trained_engine()
    engine.load(path)
    engine.step(*batch())


@cache
def batch() -> tuple[dict[str, np.ndarray], np.ndarray]:
    return models.random_inputs(models.mlp(), BATCH), np.array([0, 1, 2])


def trained_engine() -> ke.Engine:
    engine = ke.Engine.from_onnx(models.mlp(), loss="categorical", threads=1)
    engine.step(*batch())
    return engine


@cache
def valid_file(kind: str) -> bytes:
    """What an attack bends."""
    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    stream = io.BytesIO()
    if kind == "npy":
        np.save(stream, x)
    elif kind == "npz":
        np.savez(stream, input=x, mask=x > 3)
    elif kind == "packed npz":
        np.savez_compressed(stream, input=x, mask=x > 3)
    elif kind == "gradients":
        return save({f"gradient/{name}": array for name, array in _parameters().items()})
    else:
        with tempfile.TemporaryDirectory() as folder:
            trained_engine().save(Path(folder) / "state")
            return (Path(folder) / "state").read_bytes()
    return stream.getvalue()


@cache
def _parameters() -> dict[str, np.ndarray]:
    return ke.Engine.from_onnx(models.mlp(), loss="categorical", threads=1).parameters


# How bytes are made from a seed, and what is done with them.
ATTACKS: dict[str, tuple[Callable[[int], bytes], Callable[[Path], object]]] = {
    "model": (lambda seed: mutated(seed).SerializeToString(), lambda p: use_model(p.read_bytes())),
    "model bytes": (
        lambda seed: bent(_base(seed).SerializeToString(), np.random.default_rng(seed)),
        lambda p: use_model(p.read_bytes()),
    ),
    **{
        kind: (lambda seed, kind=kind: bent(valid_file(kind), np.random.default_rng(seed)), read)
        for kind, read in {
            "npy": use_arrays,
            "npz": use_arrays,
            "packed npz": use_arrays,
            "gradients": lambda path: read_gradients(path, _parameters()),
            "state": use_state,
        }.items()
    },
}


def _base(seed: int) -> onnx.ModelProto:
    names = list(BASES)
    return BASES[names[seed % len(names)]](seed)


def outcome(kind: str, data: bytes, folder: Path) -> str:
    """What became of an attack: ``done`` or ``refused``; any other exception is raised."""
    path = folder / "attack"
    path.write_bytes(data)
    try:
        ATTACKS[kind][1](path)
    except ke.KfacError as error:
        message = str(error)
        assert message.isprintable(), "an error that is not one printable line"
        assert 0 < len(message) <= 4001, "an error without words, or without end"
        return "refused"
    return "done"
