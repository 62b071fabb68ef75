"""Engine state on disk: safetensors with a format version, written beside and renamed.

Averages, weights, stored powers, counters, generator state and parameters are saved, so that a
resumed run gives the same bits as one that never stopped: inverses are stale between refreshes, and
recomputing them at load would not give the stale ones back.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from kfac_engine._types import Array
from kfac_engine.errors import InputError
from kfac_engine.factors.base import FisherFactor

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class State:
    """What a checkpoint holds besides the factors.

    Attributes:
        counter: Calls of ``observe`` and ``step`` so far.
        generator: State of the random generator, as NumPy describes it.
        parameters: Parameter name to value.
    """

    counter: int
    generator: Mapping[str, object]
    parameters: Mapping[str, Array]


def save_state(path: str | Path, factors: Sequence[FisherFactor], state: State) -> None:
    """Write a checkpoint; the file is replaced whole or not at all.

    Args:
        path: Where to.
        factors: All factors, in the order of creation.
        state: The rest.
    """
    tensors = {f"parameter/{name}": value for name, value in state.parameters.items()}
    for index, factor in enumerate(factors):
        tensors |= {f"factor/{index}/{key}": array for key, array in factor.arrays().items()}
    header = {
        "format": str(FORMAT_VERSION),
        "counter": str(state.counter),
        "generator": json.dumps(state.generator),
        "factors": json.dumps(
            [{"name": f.name, "weight": f.average.weight, "repeats": f.repeats} for f in factors]
        ),
    }
    write_atomically(path, save(tensors, header))


def load_state(
    path: str | Path, factors: Sequence[FisherFactor], parameters: Mapping[str, Array]
) -> State:
    """Read a checkpoint into factors of the same model and options.

    Args:
        path: Where from.
        factors: All factors, in the order of creation; changed only when everything fits.
        parameters: Parameter name to an array of the right shape.

    Returns:
        The rest.

    Raises:
        InputError: The file is missing or no checkpoint, or does not fit; every difference is
            listed.
    """
    header, tensors = _read(path)
    saved = json.loads(header["factors"])
    differences = [
        f"factor {index} is {new.name} here and {old['name']} there"
        for index, (new, old) in enumerate(zip(factors, saved, strict=False))
        if new.name != old["name"]
    ]
    if len(saved) != len(factors):
        differences.append(f"{len(factors)} factors here and {len(saved)} there")
    values = {
        key.removeprefix("parameter/"): value
        for key, value in tensors.items()
        if key.startswith("parameter/")
    }
    differences += [
        f"parameter '{name}' is {getattr(values.get(name), 'shape', 'absent')} there"
        for name, value in parameters.items()
        if name not in values or values[name].shape != value.shape
    ]
    if differences:
        raise InputError(
            f"state '{path}' belongs to another model or options: {'; '.join(differences)}."
        )
    for index, (factor, old) in enumerate(zip(factors, saved, strict=True)):
        prefix = f"factor/{index}/"
        arrays = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        factor.restore(arrays, old["weight"], old["repeats"])
    return State(int(header["counter"]), json.loads(header["generator"]), values)


def write_atomically(path: str | Path, data: bytes) -> None:
    """Write a file so that a crash leaves the old one or the new one.

    Raises:
        InputError: The folder does not exist or cannot be written.
    """
    target = Path(path)
    beside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with beside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(target)
    except OSError as failure:
        beside.unlink(missing_ok=True)
        raise InputError(f"cannot write '{path}': {failure.strerror}.") from failure


def _read(path: str | Path) -> tuple[dict[str, str], dict[str, Array]]:
    try:
        with safe_open(str(path), framework="numpy") as file:
            header = file.metadata() or {}
            if header.get("format") != str(FORMAT_VERSION) or "factors" not in header:
                raise InputError(
                    f"'{path}' is not an engine state of format {FORMAT_VERSION}; another program "
                    f"or version wrote it."
                )
            return header, {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError) as failure:
        raise InputError(f"cannot read the state '{path}': {failure}") from failure
