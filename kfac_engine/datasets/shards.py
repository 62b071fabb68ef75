"""Loads a data set one shard at a time.

The order of an epoch is a function of the seed and the number of the epoch: a permutation of the
shards, and for each shard a permutation of its examples. Neighbours in a shard therefore stay near
each other in an epoch, so that a data set on a disk is read shard by shard. Batches may contain the
last examples of one shard and the first of the next.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TypeAlias

import numpy as np

from kfac_engine._types import Array
from kfac_engine.datasets.examples import (
    TARGETS,
    WEIGHTS,
    Batch,
    ExampleAxes,
    NumberedBatch,
    Selection,
)
from kfac_engine.errors import InputError
from kfac_engine.losses.observed import Targets, Weighted

# Shards, each with the examples of it.
Parts: TypeAlias = Sequence[tuple[int, Selection]]
NumberedParts: TypeAlias = Sequence[tuple[int, Array]]

_ALL = slice(None)
# Bounds of the part of a data set whose checksum is compared when a run is resumed.
_CHECKED_SHARDS, _CHECKED_BYTES = 16, 1 << 24


@dataclass(frozen=True, slots=True)
class ShardFile:
    """A part of a data set."""

    count: int  # number of examples
    # Returns the inputs and targets of all examples; their arrays may be mapped files.
    load: Callable[[], Batch]


@dataclass(frozen=True, slots=True)
class Share:
    """The examples of each batch that one of several processes has.

    Each process has consecutive examples, in the order of the processes. The numbers of examples
    differ by one at most.
    """

    rank: int = 0  # number of the process, from 0
    size: int = 1  # number of processes

    def require(self, examples: int) -> None:
        """Refuse a batch that has fewer examples than there are processes, with an InputError."""
        if examples < self.size:
            raise InputError(
                f"a batch of {examples} examples cannot be divided among {self.size} processes; "
                f"give larger batches, or start fewer processes."
            )

    def of_batch(self, batch: Batch, axes: ExampleAxes) -> Batch:
        """Return the examples of this process in a batch."""
        if self.size == 1:
            return batch
        return axes.part(*batch, slice(*self._bounds(axes.check(*batch))))

    def of_parts(self, parts: NumberedParts) -> NumberedParts:
        """Return the examples of this process in the parts of a batch; empty if it has none."""
        if self.size == 1:
            return parts
        start, stop = self._bounds(sum(len(numbers) for _, numbers in parts))
        chosen = []
        for shard, numbers in parts:
            piece = numbers[max(start, 0) : max(stop, 0)]
            chosen += [(shard, piece)] if len(piece) else []
            start, stop = start - len(numbers), stop - len(numbers)
        return chosen

    def _bounds(self, count: int) -> tuple[int, int]:
        return self.rank * count // self.size, (self.rank + 1) * count // self.size


WHOLE = Share()


class Examples:
    """The examples of a data set; one shard is loaded at a time.

    ``counts`` has the number of examples of each shard. ``InputError`` is raised if there are no
    examples.
    """

    def __init__(self, shards: Sequence[ShardFile], axes: ExampleAxes) -> None:
        self._shards, self.axes = shards, axes
        self.counts = tuple(shard.count for shard in shards)
        if not self.total:
            raise InputError("the data have no examples.")
        self._number, self._loaded = 0, shards[0].load()

    @property
    def total(self) -> int:
        """Number of examples."""
        return sum(self.counts)

    def batch(self, parts: NumberedParts) -> NumberedBatch:
        """Return examples of shards as one batch of new arrays, in their order."""
        starts = np.cumsum((0, *self.counts))
        numbers = np.concatenate([starts[shard] + numbers for shard, numbers in parts])
        return NumberedBatch(self._joined(parts), numbers, self.axes)

    def contents(self) -> str:
        """Return a text that is equal for equal data: the number of examples and a checksum.

        The checksum covers at most sixteen shards, spread evenly over all. Of each it covers at
        most 1/16 of 16 MiB, in examples that are spread evenly. Small data are covered whole. The
        time is bounded where data are mapped files.
        """
        checksum = zlib.crc32(str(self.counts).encode())
        shards = np.flatnonzero(self.counts)
        for shard in shards[_evenly(len(shards), _CHECKED_SHARDS)].tolist():
            first = _arrays(*self.batch([(shard, np.zeros(1, np.intp))]))
            size = max(1, sum(array.nbytes for array in first.values()))
            most = max(1, _CHECKED_BYTES // min(len(shards), _CHECKED_SHARDS) // size)
            batch = self.batch([(shard, _evenly(self.counts[shard], most))])
            for name, array in _arrays(*batch).items():
                if array.dtype.hasobject:
                    continue  # the first step refuses it
                checksum = zlib.crc32(f"{name} {array.dtype.str} {array.shape}".encode(), checksum)
                checksum = zlib.crc32(array.reshape(-1).view(np.uint8).data, checksum)
        return f"{self.total} examples with the checksum {checksum:08x}"

    def whole(self) -> Batch:
        """Return all examples as one batch; without a copy if there is one shard."""
        shards = range(len(self.counts))
        return self._load(0) if len(shards) == 1 else self._joined([(i, _ALL) for i in shards])

    def _joined(self, parts: Parts) -> Batch:
        batches = [self.axes.part(*self._load(shard), numbers) for shard, numbers in parts]
        return batches[0] if len(batches) == 1 else self.axes.joined(batches)

    def _load(self, shard: int) -> Batch:
        if shard != self._number:
            self._number, self._loaded = shard, self._shards[shard].load()
        return self._loaded


class ShuffledBatches:
    """Batches of examples in an order that depends on the seed and the epoch only.

    Every epoch leaves out the last examples of its order that do not fill a batch.

    Args:
        examples: The examples.
        batch_size: Examples in a batch; fewer examples in total are one batch.
        seed: Seed of the orders.
        chosen: Numbers of the examples of each shard that take part; None for all.
        share: The examples of a batch that this process has.
        parts: Number of parts of a batch in ``steps``. They have consecutive examples, whose
            numbers differ by one at most; a batch of fewer examples than ``batch_size`` has fewer
            parts.
    """

    def __init__(
        self,
        examples: Examples,
        batch_size: int,
        seed: int,
        chosen: Sequence[Array] | None = None,
        share: Share = WHOLE,
        parts: int = 1,
    ) -> None:
        self._examples, self._seed, self._chosen = examples, seed, chosen
        self._share = share
        self._counts = examples.counts if chosen is None else tuple(map(len, chosen))
        of_part = _part_size(examples.axes, batch_size // parts, sum(self._counts))
        self._size = min(batch_size, sum(self._counts) // of_part * of_part)
        count = ceil(parts * self._size / batch_size)
        self._cuts = [Share(index, count) for index in range(count)]
        share.require(self._size // count)
        self.per_epoch: int | None = sum(self._counts) // self._size

    def steps(self, number: int, start: int = 0) -> Iterator[list[Batch]]:
        """Return the parts of each batch of an epoch, from the batch ``start`` on."""
        parts = self._parts(number, start * self._size)
        for batch in full_batches(parts, self._size):
            pieces = (self._share.of_parts(cut.of_parts(batch)) for cut in self._cuts)
            yield [self._examples.batch(piece) for piece in pieces]

    def _parts(self, epoch: int, skip: int) -> Iterator[tuple[int, Array]]:
        """Yield shards with their examples in the order of an epoch, after the first ``skip``."""
        shards = len(self._counts)
        # Streams 0 to shards − 1 order the examples of a shard, and the next one the shards.
        for shard in np.random.default_rng([self._seed, epoch, shards]).permutation(shards):
            count = self._counts[shard]
            if skip >= count:
                skip -= count
                continue
            stream = np.random.default_rng([self._seed, epoch, int(shard)])
            order = stream.permutation(count)[skip:]
            yield int(shard), order if self._chosen is None else self._chosen[shard][order]
            skip = 0


class OrderedBatches:
    """Batches of all examples in their order; can be iterated again.

    Args:
        examples: The examples.
        batch_size: Examples in a batch; the last batch may have fewer. A model that runs with one
            batch size only has batches of this size.
        chosen: As for ``ShuffledBatches``.
        share: As for ``ShuffledBatches``. Batches of which this process has no example are left
            out.

    Attributes:
        total: Number of examples of all batches.
    """

    def __init__(
        self,
        examples: Examples,
        batch_size: int,
        chosen: Sequence[Array] | None = None,
        share: Share = WHOLE,
    ) -> None:
        axes = examples.axes
        self.examples, self._size, self._chosen = examples, axes.fixed_size or batch_size, chosen
        self._share, self._divides = share, bool(axes.fixed_size) or not axes.obstacle
        self.total = sum(examples.counts if chosen is None else map(len, chosen))

    def __iter__(self) -> Iterator[Batch]:
        if not self._divides:
            yield self.examples.whole()
            return
        for batch in full_batches(self._parts(), self._size, rest=True):
            parts = self._share.of_parts(batch)
            if parts:
                yield self.examples.batch(parts)

    def _parts(self) -> Iterator[tuple[int, Array]]:
        for shard, count in enumerate(self.examples.counts):
            chosen = None if self._chosen is None else self._chosen[shard]
            stop = count if chosen is None else len(chosen)
            for first in range(0, stop, self._size):  # a few numbers at a time
                numbers = np.arange(first, min(first + self._size, stop))
                yield shard, numbers if chosen is None else chosen[numbers]


def _evenly(count: int, most: int) -> Array:
    """Return at most ``most`` evenly spaced numbers below ``count``, from the first to the last."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.intp))


def _arrays(inputs: Mapping[str, Array], targets: Targets) -> dict[str, Array]:
    """Return the arrays of a batch by name, on the host and contiguous."""
    if isinstance(targets, Weighted):
        weights = _arrays({}, targets.weights)
        named = {f"{WEIGHTS} of {name}": array for name, array in weights.items()}
        return _arrays(inputs, targets.targets) | named
    by_name = targets if isinstance(targets, Mapping) else {TARGETS: targets}
    if len(by_name) == 1:  # whatever its name is
        by_name = {TARGETS: next(iter(by_name.values()))}
    arrays = {**inputs, **{n: array for n, array in by_name.items() if array is not None}}
    on_host = (array.get() if hasattr(array, "get") else array for array in arrays.values())
    return {n: np.asarray(a, order="C") for n, a in zip(arrays, on_host, strict=True)}


def split_examples(
    counts: Sequence[int], fraction: float, seed: int
) -> tuple[list[Array], list[Array]]:
    """Return a random split of the examples of a data set into two, by their numbers in each shard.

    The numbers ascend. ``counts`` has the number of examples of each shard. The second part has the
    ``fraction``, in (0, 1), of the examples. ``InputError`` is raised if a part has no examples.
    """
    total = sum(counts)
    size = round(fraction * total)
    if not 0 < size < total:
        raise InputError(
            f"validation={fraction:g} of {total} examples leaves a part without examples; give "
            f"more data, or separate validation data."
        )
    # A stream of its own: the streams of the epochs have no spawn key.
    stream = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(1,)))
    second = np.zeros(total, np.bool_)
    second[stream.permutation(total)[:size]] = True
    masks = np.split(second, np.cumsum(counts)[:-1])
    return [np.flatnonzero(~mask) for mask in masks], [np.flatnonzero(mask) for mask in masks]


def full_batches(
    parts: Iterable[tuple[int, Array]], size: int, *, rest: bool = False
) -> Iterator[NumberedParts]:
    """Cut the examples of shards into batches of ``size`` examples, and yield the parts of each.

    With ``rest``, the examples that do not fill a batch are a last batch.
    """
    waiting: list[tuple[int, Array]] = []
    missing = size
    for shard, numbers in parts:
        while len(numbers) >= missing:
            yield [*waiting, (shard, numbers[:missing])]
            waiting, numbers, missing = [], numbers[missing:], size
        if len(numbers):
            waiting.append((shard, numbers))
            missing -= len(numbers)
    if rest and waiting:
        yield waiting


def _part_size(axes: ExampleAxes, size: int, total: int) -> int:
    """Return the number of which the examples of a batch are a multiple: 1, or a fixed batch size.

    ``size`` is the number of examples in a part of a batch, of ``total`` examples. A model that
    does not run with it raises an InputError.
    """
    if not axes.obstacle:
        return 1
    fixed = axes.fixed_size
    if fixed == size <= total:
        return size
    fits = f"set batch_size={fixed} (accumulate=k takes k of them for a step), or " if fixed else ""
    raise InputError(
        f"the arrays cannot be cut into batches: {axes.obstacle}; {fits}give an iterable of "
        f"batches, such as [(inputs, targets)]."
    )
