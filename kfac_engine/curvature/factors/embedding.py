"""The input factor of embeddings: a diagonal of the frequencies of token ids."""

from collections import ChainMap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from kfac_engine._types import Array, Rows, Values
from kfac_engine.backend.protocol import Backend
from kfac_engine.curvature.config import CollectionConfig
from kfac_engine.curvature.factors.diagonal import DiagonalFactor
from kfac_engine.curvature.factors.refresh import Damping
from kfac_engine.curvature.factors.statistics import KroneckerDiagonal
from kfac_engine.errors import ShapeError
from kfac_engine.layers.token_ids import TokenIdView


@dataclass(frozen=True, slots=True)
class IdCounts(KroneckerDiagonal):
    """Fraction of rows that contain each token id, ``(vocabulary,)``; reads a ``TokenIdView``."""

    def shape(self, values: Values) -> tuple[int, ...]:
        for name in self.names():
            self._ids.check(name, values[name])
        return KroneckerDiagonal.shape(self, self._in_rows(values))

    def batch_size(self, values: Values) -> int:
        return KroneckerDiagonal.batch_size(self, self._in_rows(values))

    def repeats(self, values: Values) -> int:
        return KroneckerDiagonal.repeats(self, self._in_rows(values))

    def add_to(
        self, out: Array, values: Values, backend: Backend, alpha: float, beta: float
    ) -> None:
        for towers, uses in self._towers():
            arrays = self._arrays(uses, self._in_rows(values), backend)
            weights = self._row_weights(uses, values)
            shares: Sequence[Array | None] = weights or [None] * len(arrays)
            rows = sum(self.view.count(ids.shape) for ids in arrays)
            total = rows if weights is None else sum(float(w.sum()) for w in weights)
            for ids, share in zip(arrays, shares, strict=True):
                counts = self._ids.counts(ids, backend, share)
                backend.add_scaled(out, counts, alpha / (max(total, 1e-30) * towers), beta)
                beta = 1.0

    @property
    def _ids(self) -> TokenIdView:
        assert isinstance(self.view, TokenIdView)  # the class is made for it
        return self.view

    def _in_rows(self, values: Values) -> Values:
        """Return the values, with token ids ``(n,)`` as rows ``(n, 1)``."""
        if self._ids.rank == 1:
            return values
        single = {n: values[n][:, None] for n in self.names() if values[n].ndim == 1}
        return ChainMap(single, values)  # type: ignore[arg-type] # only read


class VocabularyFactor(DiagonalFactor):
    """A diagonal over a vocabulary, which multiplies dense matrices and selected rows.

    Args:
        statistic: Frequencies of token ids.
        backend: Array library; NumPy by default.
        config: Options of averages; the defaults if omitted.
    """

    def __init__(
        self,
        statistic: IdCounts,
        *,
        backend: Backend | None = None,
        config: CollectionConfig | None = None,
    ) -> None:
        super().__init__(statistic, backend=backend, config=config)
        # Token ids do not determine the precision of the network: use the highest.
        self.narrowest = np.dtype(np.float64)

    @overload
    def left_multiply_matpower(self, x: Array, exp: float, damping_func: Damping) -> Array: ...

    @overload
    def left_multiply_matpower(self, x: Rows, exp: float, damping_func: Damping) -> Rows: ...

    def left_multiply_matpower(
        self, x: Array | Rows, exp: float, damping_func: Damping
    ) -> Array | Rows:
        """Return ``(C + damping·I)**exp · x``.

        Args:
            x: ``(vocabulary, d)``, or selected rows of such a matrix.
            exp: Any exponent.
            damping_func: The damping.

        Returns:
            The product, in the form and type of ``x``.

        Raises:
            ShapeError: The number of rows of ``x`` is not the size of the vocabulary.
        """
        if not isinstance(x, Rows):
            return super().left_multiply_matpower(x, exp, damping_func).astype(x.dtype)
        if x.num_rows != self.side:
            raise ShapeError(f"{self.name} has {self.side} entries, the rows are of {x.num_rows}.")
        diagonal = self.average.read()[x.indices]
        damped = self._power(diagonal, exp, damping_func)[:, None]
        return Rows(x.indices, (damped * x.values).astype(x.values.dtype), x.num_rows)
