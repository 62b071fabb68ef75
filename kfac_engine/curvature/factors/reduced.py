"""Second moments of rows that are reduced over positions: a factor of KFAC-reduce."""

from dataclasses import dataclass

from kfac_engine._types import Array, DType, Values
from kfac_engine.backend.patch_sums import row_sums
from kfac_engine.backend.protocol import Backend
from kfac_engine.curvature.factors.statistics import KroneckerMoment
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
            for x in self._arrays(uses, values, backend):
                scale = alpha / (len(x) * towers)
                rows = self._reduced(x, out.dtype, backend)
                backend.second_moment(
                    rows, out, homogeneous=self.homogeneous, alpha=scale, beta=beta
                )
                beta = 1.0

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
