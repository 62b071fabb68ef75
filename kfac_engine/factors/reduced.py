"""Second moments of rows that positions were reduced to: one side of KFAC-reduce."""

from dataclasses import dataclass

from kfac_engine._types import Array, Values
from kfac_engine.backend.protocol import Backend
from kfac_engine.errors import UnsupportedError
from kfac_engine.factors.statistics import KroneckerMoment


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
                numbers = self.view.count(x.shape) // len(x) * self.view.width(x.shape)
                # Some examples at a time: patches are as large as the kernel, times the images.
                step = max(1, backend.scratch_bytes // (numbers * out.itemsize))
                for start in range(0, len(x), step):
                    rows = self.view.rows(x[start : start + step], backend)
                    reduced = rows.sum(axis=1, dtype=out.dtype)
                    if self.mean:
                        reduced /= rows.shape[1]
                    backend.second_moment(
                        reduced, out, homogeneous=self.homogeneous, alpha=scale, beta=beta
                    )
                    beta = 1.0
