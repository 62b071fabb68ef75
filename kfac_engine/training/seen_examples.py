"""Estimates how often a run has seen its examples, without listing them.

Each example has a fingerprint, a number that looks like a draw from the uniform distribution in
(0, 1). The examples with the smallest ones are a random sample of all different examples: how
often they come again tells how often examples come again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import gcd, prod
from typing import Any
from zlib import crc32

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend.namespace import array_module, recordable
from kfac_engine.backend.protocol import Backend
from kfac_engine.datasets.examples import Batch, ExampleAxes
from kfac_engine.distributed.protocol import Communicator

# Fingerprints that are kept.
_KEPT = 1024
# Part of the examples of all steps that came again, in the seventh epoch.
_FAMILIAR = 0.85
# Inputs have the 32 high bits of a fingerprint, and targets the 20 low ones.
_HIGH = 2.0**32
# Entries of an example that are converted at a time.
_WORDS = 4096
# Numbers such as 1.0 have bits in the high half only, which a product modulo 2⁶⁴ would cut off.
_HALF = np.uint64(32)
# The finalizer of MurmurHash3, which spreads the bits of a sum of products.
_SHIFT, _MIX = np.uint64(33), np.uint64(0xFF51AFD7ED558CCD)
_TO_UNIT = np.uint64(12)  # 52 bits remain, so that adding 1/2 is exact


@dataclass(frozen=True)
class SeenExamples:
    """The examples of all steps so far."""

    count: int = 0  # number of examples of all steps; an example counts each time
    # The smallest fingerprints of different examples, ascending, ``(1024,)``; 1 where there are
    # fewer.
    least: Array = field(default_factory=lambda: np.ones(_KEPT))
    # How often each example of ``least`` has been seen, ``(1024,)``; 0 where there are fewer.
    times: Array = field(default_factory=lambda: np.zeros(_KEPT))
    scarcity: float = field(init=False)  # ``scarcity`` of the examples of all steps
    share: float = field(init=False)  # part of the examples of all steps that came again
    # Estimated number of different examples of all steps; 1 without fingerprints.
    different: float = field(init=False)
    many: bool = field(init=False)  # whether at least 1,024 examples are different

    def __post_init__(self) -> None:
        """Count how often the examples of ``least`` have been seen together."""
        seen, different = float(self.times.sum()), int(np.count_nonzero(self.times))
        vars(self).update(
            scarcity=float(scarcity(self.count, seen, different)) if different else 0.0,
            share=1 - different / max(seen, 1.0),
            different=max(self.count * different / max(seen, 1.0), 1.0),
            many=different == _KEPT,
        )

    @property
    def familiar(self) -> bool:
        """Whether at least 1,024 examples are different, or most of them came several times."""
        return self.many or self.share > _FAMILIAR

    def saved(self) -> dict[str, Array]:
        """Return the arrays of a checkpoint."""
        count = np.array(self.count, np.float64)
        return {"fingerprints": self.least, "times": self.times, "count": count}

    @classmethod
    def restored(cls, saved: Mapping[str, Array]) -> "SeenExamples":
        """Return the examples of ``saved``."""
        values = {name: np.array(array, np.float64) for name, array in saved.items()}
        return cls(int(values["count"]), values["fingerprints"], values["times"])

    def after(self, fingerprints: Array) -> "SeenExamples":
        """Return the examples after one more step."""
        count = self.count + len(fingerprints)
        places = self.least[:-1].searchsorted(fingerprints)
        known = self.least[places] == fingerprints
        least, times = self.least, self.times + np.bincount(places, known, _KEPT)
        if not known.all() and len(new := fingerprints[~known & (fingerprints < least[-1])]):
            values, repeats = np.unique(new, return_counts=True)
            least, times = np.append(least, values), np.append(times, repeats)
            order = np.argsort(least, kind="stable")[:_KEPT]
            least, times = least[order], times[order]
        return SeenExamples(count, least, times)


@recordable
def scarcity(count: Any, seen: Any, different: Any) -> Any:
    """Return the share of examples that came again, divided by the number of different examples.

    ``count`` is the number of examples of all steps; an example counts each time. ``seen`` is the
    same number and ``different`` that of different examples, both of all examples, or of a random
    sample of the different ones.
    """
    # Of c examples, 1 - different / seen came again, and c * different / seen are different.
    return (seen / different - 1) / count


def fingerprints(
    batch: Sequence[Batch],
    axes: ExampleAxes,
    backend: Backend,
    communicator: Communicator,
    sizes: Sequence[Sequence[int]],
) -> Array:
    """Return the fingerprints of the examples of a batch, of all processes.

    ``batch`` has the parts of the shard of this process, and ``sizes`` the number of examples of
    each process in each part. Fingerprints are numbers in (0, 1), equal for examples with equal
    inputs and targets: targets that follow the model, such as the local energies of quantum states,
    make an example new. There are none if no input has an axis of examples. If some examples of a
    part are no batch, such as graphs, they have equal fingerprints in parts with equal inputs only,
    whatever the targets are.
    """
    if axes.joint:
        of_rank = (of_part[communicator.rank] for of_part in sizes)
        pairs = zip(batch, of_rank, strict=True)
        parts = [_of_whole(inputs, count, backend) for (inputs, *_), count in pairs]
    else:
        parts = [_with_targets(part, axes, backend) for part in batch]
    shard = parts[0] if len(parts) == 1 else np.concatenate(parts)
    whole = gathered(shard, communicator, sizes)
    return whole[whole > 0]


def gathered(shard: Array, communicator: Communicator, sizes: Sequence[Sequence[int]]) -> Array:
    """Return the rows of all processes, in order of ranks, in double precision.

    ``shard`` are the rows of this process, ``(examples,)`` or ``(examples, columns)``. ``sizes`` is
    as for ``fingerprints``. Rows that a process does not have are zeros.
    """
    if communicator.size == 1:
        return shard
    counts = [sum(of_rank) for of_rank in zip(*sizes, strict=True)]
    columns = shard.shape[1:]
    whole, start = np.zeros((sum(counts), *columns)), sum(counts[: communicator.rank])
    whole[start : start + len(shard)] = shard
    communicator.allgather(whole.reshape(-1), [prod(columns) * count for count in counts])
    return whole


def fingerprints_of_part(
    inputs: Mapping[str, Array], axes: Mapping[str, int], backend: Backend
) -> Array:
    """Return the fingerprints of the examples of a part of a batch, on the host."""
    every: list[Array] = []
    for name in sorted(axes.keys() & inputs.keys()):
        array = inputs[name]
        array = array if isinstance(array, np.ndarray) else backend.asarray(array)
        every.append(_hashes(array, axes[name], crc32(name.encode())))
    return _to_unit(sum(every[1:], every[0]), backend) if every else np.empty(0)


def _with_targets(part: Batch, axes: ExampleAxes, backend: Backend) -> Array:
    """Return a fingerprint of each example; targets and weights have its low bits.

    The high bits, which order examples, are those of the inputs. The sample of the different
    examples therefore does not depend on the targets.
    """
    whole = fingerprints_of_part(part[0], axes.inputs, backend)
    placed = {
        name: (array, axis)
        for name, array, axis in axes.arrays(*part)
        if name not in axes.inputs
        if axis is not None and np.shape(array)[axis : axis + 1] == whole.shape
    }
    arrays = {name: array for name, (array, _) in placed.items()}
    low = fingerprints_of_part(arrays, {name: axis for name, (_, axis) in placed.items()}, backend)
    return (np.floor(whole * _HIGH) + low) / _HIGH if len(low) else whole


def _of_whole(inputs: Mapping[str, Array], count: int, backend: Backend) -> Array:
    """Return ``count`` fingerprints of a batch, equal for a batch with equal arrays."""
    whole = {name: np.asarray(backend.to_numpy(array))[None] for name, array in inputs.items()}
    hashes = [_hashes(whole[name], 0, crc32(name.encode())) for name in sorted(whole)]
    numbers = np.arange(count, dtype=np.uint64) * _odd(count, 1)
    return _to_unit(sum(hashes[1:], hashes[0]) + numbers, backend)


def _to_unit(hashes: Array, backend: Backend) -> Array:
    """Return hashes as numbers in (0, 1) that look like random draws."""
    hashes ^= hashes >> _SHIFT
    hashes *= _MIX
    hashes ^= hashes >> _SHIFT
    on_host: Array = backend.to_numpy(hashes)
    return ((on_host >> _TO_UNIT).astype(np.float64) + 0.5) * 2.0**-52


def _hashes(array: Array, axis: int, seed: int) -> Array:
    """Return a sum of products of the bits of each example with random odd numbers, modulo 2⁶⁴."""
    xp = array_module(array)
    rows = xp.moveaxis(array, axis, 0) if axis else array
    rows = rows.reshape(len(rows), prod(rows.shape[1:]))
    rows = xp.ascontiguousarray(rows)
    if rows.dtype.kind in "OUT":  # equal texts may have other widths in another batch
        rows = np.vectorize(lambda text: crc32(str(text).encode()), otypes=[np.uint32])(rows)
    size = gcd(8, rows.shape[1] * rows.dtype.itemsize)  # of the widest words that fill a row
    bits = rows.view(np.uint8).view(f"u{size}")
    sums: list[Array] = []
    for start in range(0, bits.shape[1], _WORDS):
        words = bits[:, start : start + _WORDS].astype(np.uint64, copy=False)
        if size == words.itemsize:
            words = words ^ (words >> _HALF)
        sums.append(words @ xp.asarray(_odd(seed + start, words.shape[1])))
    return sum(sums[1:], sums[0]) if sums else xp.zeros(len(bits), np.uint64)


@lru_cache
def _odd(seed: int, count: int) -> Array:
    """Return random odd numbers."""
    return np.random.default_rng(seed).integers(0, 2**64, count, np.uint64) | np.uint64(1)
