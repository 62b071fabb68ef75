"""Estimates second moments from a random subset of a convolution's patches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import ClassVar, TypeAlias, Unpack

import numpy as np
import numpy.typing as npt

from kfac_engine._types import Array, Values
from kfac_engine.backend.protocol import Accumulation, Backend
from kfac_engine.curvature.factors.base import FactorOptions
from kfac_engine.curvature.factors.dense import DenseSquareMatrixFactor
from kfac_engine.curvature.factors.statistics import KroneckerMoment, at_least, scale
from kfac_engine.distributed.shards import RowRange
from kfac_engine.errors import ShapeError
from kfac_engine.layers.layer_forms import EVERYTHING, Sampling

Indices: TypeAlias = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class _Draw:
    """The examples and positions that are read of a tensor."""

    images: Indices | None  # indices of the images, ascending; None for all
    rows: Indices | None  # indices of the rows of these images, ascending; None for all
    length: int  # number of the images
    positions: int  # number of rows of an image

    @property
    def count(self) -> int:
        """Number of rows that are read."""
        return self.length * self.positions if self.rows is None else len(self.rows)

    def part(self, shard: RowRange, batch: int, uses: int) -> "_Draw":
        """Return the part of the draw that lies in the images of a shard.

        ``batch`` is the number of images in the whole batch. The tensor has ``uses`` uses, one
        after the other, each with all examples.
        """
        images = np.arange(batch) if self.images is None else self.images
        use, index = np.divmod(images, batch // uses)
        start, length = (n * batch // (uses * shard.whole) for n in (shard.start, shard.count))
        inside = (start <= index) & (index < start + length)
        numbers = (use * length + index - start)[inside]
        rows = self.rows
        if rows is not None:
            image, position = np.divmod(rows, self.positions)
            # The images of the shard are numbered in the order in which they are read.
            number = np.cumsum(inside)[image] - 1
            rows = (number * self.positions + position)[inside[image]]
        return _Draw(None if self.images is None else numbers, rows, len(numbers), self.positions)


@dataclass(frozen=True, slots=True)
class SampledMoment(KroneckerMoment):
    """Mean of ``x xᵀ`` over randomly drawn examples and positions."""

    moment: ClassVar[str] = ""
    sizes_by_shape: ClassVar[bool] = False

    sampling: Sampling = EVERYTHING  # numbers of examples and positions to draw
    # Seed of the draws; the factor sets it for each batch.
    seed: tuple[int, int] = field(default=(0, 0), compare=False, repr=False)
    # The rows of the batch that the tensors have; None for all. Draws are from the whole batch, and
    # the draws among the rows are measured. The mean over all ranks, weighted by their examples, is
    # the measurement of the whole batch.
    rows: RowRange | None = field(default=None, compare=False, repr=False)

    def batch_size(self, values: Values) -> int:
        examples = KroneckerMoment.batch_size(self, values)
        if self.rows is not None and (not self.rows.count or examples % self.rows.count):
            raise ShapeError(
                f"{', '.join(self.names())} have {examples} examples, but set_rows gave this "
                f"process {self.rows.count} examples; call set_rows before each batch."
            )
        return examples

    def add_to(
        self, out: Array, values: Values, backend: Backend, alpha: float, beta: float
    ) -> None:
        if self._row_weights(values) is not None:
            KroneckerMoment.add_to(self, out, values, backend, alpha, beta)  # all rows that count
            return
        scale(out, beta)
        rng = np.random.default_rng(self.seed)
        shard = self.rows or RowRange(0, 1, 1)
        arrays = self._arrays(values, backend)
        # Images of the whole batch in each tensor.
        batches = [len(x) // shard.count * shard.whole for x in arrays]
        draws = self._draws(batches, arrays, self.features(values), rng)
        # ÷ number of drawn rows: the mean of a sample estimates the mean of all rows.
        total = sum(draw.count for draw in draws)
        # Ranks weigh this measurement by their examples: their mean is the sum over all draws.
        weight = alpha * shard.whole / (shard.count * total)
        for x, draw, batch in zip(arrays, draws, batches, strict=True):
            if self.rows is not None:
                draw = draw.part(shard, batch, self.num_uses if len(arrays) == 1 else 1)
            if draw.count:
                images = x if draw.images is None else x[draw.images]
                self._add_piece(out, images, draw.rows, backend, weight)

    def _draws(
        self,
        batches: Sequence[int],
        arrays: Sequence[Array],
        features: int,
        rng: np.random.Generator,
    ) -> list[_Draw]:
        """Draw examples and positions of arrays of ``batches`` images in the whole batch."""
        drawn = [self.sampling.examples(images, rng) for images in batches]
        lengths = [n if i is None else len(i) for n, i in zip(batches, drawn, strict=True)]
        positions = [self.view.count((1, *x.shape[1:])) for x in arrays]
        counts = [n * t for n, t in zip(lengths, positions, strict=True)]
        rows = self.sampling.patches(counts, features, rng) or repeat(None)
        return list(map(_Draw, drawn, rows, lengths, positions))

    def _add_piece(
        self, out: Array, array: Array, rows: Array | None, backend: Backend, alpha: float
    ) -> None:
        array = at_least(out.dtype, array)
        how = Accumulation(self.homogeneous, alpha, 1.0)
        if rows is None:
            self.view.second_moment(array, out, backend, how)
            return
        positions = self.view.count(array.shape) // len(array)
        width = self.view.width(array.shape)
        # Images in chunks: their patches are larger than the images by the size of the kernel.
        step = max(1, backend.scratch_bytes // (positions * width * array.itemsize))
        for start in range(0, len(array), step):
            low, high = np.searchsorted(rows, [start * positions, (start + step) * positions])
            if low < high:
                patches = self.view.rows(array[start : start + step], backend)
                chosen = patches.reshape(-1, width)[rows[low:high] - start * positions]
                backend.second_moment(chosen, out, how)


class SampledFactor(DenseSquareMatrixFactor):
    """A dense factor whose statistic draws a new subset of every batch.

    The draws depend on the seed of the configuration and on the number of averaged batches: equal
    seeds give equal statistics, and a checkpoint continues the sequence.
    """

    def __init__(self, statistic: SampledMoment, **options: Unpack[FactorOptions]) -> None:
        super().__init__(statistic, **options)
        self._moment = statistic
        self._continue_from(0)

    def set_rows(self, rows: RowRange | None) -> None:
        self._moment = replace(self._moment, rows=rows)
        self._continue_from(self._batches)

    def arrays(self) -> dict[str, Array]:
        return super().arrays() | {"batches": np.array(self._batches)}

    def restore(self, arrays: Mapping[str, Array], weight: float, repeats: float | None) -> None:
        super().restore(arrays, weight, repeats)
        self._continue_from(int(arrays["batches"]))

    def _advance(self) -> None:
        super()._advance()
        self._continue_from(self._batches + 1)

    def _continue_from(self, batches: int) -> None:
        """Set the seed of the next batch, which follows a number of batches."""
        self._batches = batches
        self.statistic = replace(self._moment, seed=(self.config.seed, batches))
