"""Second moments of a random subset of the patches of a convolution."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kfac_engine._types import Array, Values
from kfac_engine.backend.protocol import Backend
from kfac_engine.curvature.config import CollectionConfig
from kfac_engine.curvature.factors.dense import DenseSquareMatrixFactor
from kfac_engine.curvature.factors.measurement import Measurement
from kfac_engine.curvature.factors.statistics import KroneckerMoment, at_least, scale
from kfac_engine.layers.subsampling import EVERYTHING, Sampling


@dataclass(frozen=True, slots=True)
class SampledMoment(KroneckerMoment):
    """Mean of ``x xᵀ`` over randomly drawn examples and positions.

    Attributes:
        sampling: Numbers of examples and positions to draw.
        seed: Seed of the draws; the factor sets it for each batch.
    """

    sampling: Sampling = EVERYTHING
    seed: tuple[int, int] = field(default=(0, 0), compare=False, repr=False)

    def add_to(
        self, out: Array, values: Values, backend: Backend, alpha: float, beta: float
    ) -> None:
        scale(out, beta)
        rng = np.random.default_rng(self.seed)
        for towers, uses in self._towers():
            pieces = self._drawn(self._arrays(uses, values, backend), values, rng)
            # ÷ number of drawn rows: the mean of a sample estimates the mean of all rows.
            total = sum(self._size(piece) for piece in pieces)
            for array, rows in pieces:
                self._add_piece(out, array, rows, backend, alpha / (total * towers))

    def _drawn(
        self, tensors: Sequence[Array], values: Values, rng: np.random.Generator
    ) -> list[tuple[Array, Array | None]]:
        """Return the drawn images of each tensor of a tower with their drawn rows (None: all)."""
        arrays = []
        for x in tensors:
            drawn = self.sampling.examples(len(x), rng)
            arrays.append(x if drawn is None else x[drawn])
        counts = [self.view.count(x.shape) for x in arrays]
        rows = self.sampling.patches(counts, self.features(values), rng)
        if rows is None:
            return [(x, None) for x in arrays]
        return list(zip(arrays, rows, strict=True))

    def _size(self, piece: tuple[Array, Array | None]) -> int:
        array, rows = piece
        return self.view.count(array.shape) if rows is None else len(rows)

    def _add_piece(
        self, out: Array, array: Array, rows: Array | None, backend: Backend, alpha: float
    ) -> None:
        array = at_least(out.dtype, array)
        options = {"homogeneous": self.homogeneous, "alpha": alpha, "beta": 1.0}
        if rows is None:
            self.view.second_moment(array, out, backend, **options)  # type: ignore[arg-type] # as named
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
                backend.second_moment(chosen, out, **options)  # type: ignore[arg-type] # as named


class SampledFactor(DenseSquareMatrixFactor):
    """A dense factor whose statistic draws a new subset of every batch.

    The draws depend on the seed of the configuration and on the number of averaged batches: equal
    seeds give equal statistics, and a checkpoint continues the sequence.

    Args:
        statistic: Statistic of a random subset.
        backend: Array library; NumPy by default.
        config: Options with the seed; the defaults if omitted.
    """

    def __init__(
        self,
        statistic: SampledMoment,
        *,
        backend: Backend | None = None,
        config: CollectionConfig | None = None,
    ) -> None:
        super().__init__(statistic, backend=backend, config=config)
        self._moment = statistic
        self._continue_from(0)

    def arrays(self) -> dict[str, Array]:
        return super().arrays() | {"batches": np.array(self._batches)}

    def restore(self, arrays: Mapping[str, Array], weight: float, repeats: int | None) -> None:
        super().restore(arrays, weight, repeats)
        self._continue_from(int(arrays["batches"]))

    def _advance(self, measurement: Measurement) -> None:
        super()._advance(measurement)
        self._continue_from(self._batches + 1)

    def _continue_from(self, batches: int) -> None:
        """Set the seed of the next batch, which follows a number of batches."""
        self._batches = batches
        self.statistic = replace(self._moment, seed=(self.config.seed, batches))
