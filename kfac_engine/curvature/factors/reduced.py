"""Second moments of rows that are reduced over positions: a factor of KFAC-reduce."""

from collections.abc import Sequence
from dataclasses import dataclass

from kfac_engine._types import Array, DType, Values
from kfac_engine.backend.patch_sums import row_sums
from kfac_engine.backend.protocol import Backend
from kfac_engine.curvature.factors.statistics import KroneckerMoment, Sizes, at_least, scale
from kfac_engine.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class ReducedMoment(KroneckerMoment):
    """Mean over examples of ``x xᵀ``, where ``x`` is the mean or the sum of an example's rows.

    Attributes:
        mean: Whether rows are averaged (inputs) or summed (gradients).
    """

    mean: bool = False

    def shape(self, values: Values) -> tuple[int, ...]:
        batch = self._batch(values)
        for name in self.names():
            if batch is not None and len(values[name]) != batch:
                raise UnsupportedError(
                    f"'{name}' has {len(values[name])} rows along its first axis for {batch} "
                    f"examples; 'kron_reduce' needs positions along axes of their own, use 'kron'."
                )
        return KroneckerMoment.shape(self, values)

    def repeats(self, values: Values) -> int:
        del values
        return 1

    def add_to(
        self, out: Array, values: Values, backend: Backend, alpha: float, beta: float
    ) -> None:
        for towers, uses in self._towers():
            weights = self._row_weights(uses, values)
            if weights is not None:
                arrays = self._arrays(uses, values, backend)
                self._add_weighted(out, arrays, weights, backend, alpha / towers, beta)
                beta = 1.0
                continue
            for x in self._arrays(uses, values, backend):
                share = alpha / (len(x) * towers)
                rows = self._reduced(x, out.dtype, backend)
                backend.second_moment(
                    rows, out, homogeneous=self.homogeneous, alpha=share, beta=beta
                )
                beta = 1.0

    def counted(self, values: Values, sizes: Sizes) -> float | None:
        weights = [self._row_weights(uses, values) for _, uses in self._towers()]
        if weights[0] is None:
            return None
        return sum(
            float(w.reshape(sizes.examples, -1).max(axis=1).sum())
            for ws in weights
            for w in ws or ()
        )

    def _add_weighted(
        self,
        out: Array,
        arrays: Sequence[Array],
        weights: Sequence[Array],
        backend: Backend,
        alpha: float,
        beta: float,
    ) -> None:
        """Add the weighted mean of ``x xᵀ``, with x the mean of the rows that count."""
        scale(out, beta)
        ((x, w),) = zip(arrays, weights, strict=True)
        w = w.reshape(len(x), -1)
        counting = (w > 0).astype(out.dtype)
        of_examples = w.max(axis=1)
        total = float(of_examples.sum())
        positions = counting.sum(axis=1)[:, None]
        rows = self.view.rows(at_least(out.dtype, x), backend)
        means = (rows * counting[:, :, None]).sum(axis=1) / backend.xp.maximum(positions, 1)
        if total > 0:
            self._add_rows(out, means, of_examples, backend, alpha / total)

    def _reduced(self, x: Array, dtype: DType, backend: Backend) -> Array:
        """Return the sum of the rows of each example, ``(n, d)``."""
        positions = self.view.count(x.shape) // max(len(x), 1)
        numbers = positions * self.view.width(x.shape)
        # Examples in chunks: a view may extract its rows into scratch memory.
        step = max(1, backend.scratch_bytes // (numbers * dtype.itemsize))
        parts = []
        for start in range(0, len(x), step):
            images, window = self.view.images(x[start : start + step], backend)
            parts.append(row_sums(images, window, dtype, backend.xp))
        rows: Array = backend.xp.concatenate(parts)
        if self.mean:
            rows /= positions
        return rows
