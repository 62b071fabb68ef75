"""Defines factors of tables that embeddings read by token id and products read as features.

The input factor of an embedding is the diagonal of the frequencies of token ids. A table that
products read as well has two factors.

A row ``h`` of features whose logits ``E h`` have the gradient δ adds ``h hᵀ ⊗ δ δᵀ`` to the Fisher
block of the table E. A token id whose row ``E[id]`` has the gradient ε adds ``ε εᵀ ⊗ 1_id 1_idᵀ``.
Rows and uses are assumed to be independent. The factors are the partial traces of the sum of all
terms::

    H = Σ ‖δ‖² h hᵀ + Σ ε εᵀ            over the features
    V = Σ ‖h‖² δ δᵀ + Σ ‖ε‖² 1_id 1_idᵀ over the vocabulary, of which the diagonal is stored

Each use thus has the weight of its part of the trace, in both factors. Sums of the moments of h and
ε alone would not do: an activation and a gradient have different units. Both factors have the trace
of the block, which is therefore approximately ``H ⊗ V / tr V``. That is exact if the terms have a
common factor.

Source: Gao et al. 2020, arXiv:2011.10741 (Kronecker products with the trace of the Fisher block).
"""

from collections import ChainMap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Unpack, overload

import numpy as np

from kfac_engine._types import Array, Rows, Values
from kfac_engine.backend.protocol import Accumulation, Backend
from kfac_engine.curvature.factors.base import FactorOptions
from kfac_engine.curvature.factors.diagonal import DiagonalFactor
from kfac_engine.curvature.factors.refresh import Damping
from kfac_engine.curvature.factors.statistics import KroneckerDiagonal, LayerPairs, scale, the_same
from kfac_engine.errors import ShapeError
from kfac_engine.layers.views import RowView, TokenIdView


@dataclass(frozen=True, slots=True)
class IdCounts(KroneckerDiagonal):
    """Fraction of rows that contain each token id, ``(vocabulary,)``; reads a ``TokenIdView``."""

    moment: ClassVar[str] = ""
    sizes_by_shape: ClassVar[bool] = False  # the ids are compared with the vocabulary

    def shape(self, values: Values) -> tuple[int, ...]:
        for name in self.names():
            self._ids.check(name, values[name])
        return KroneckerDiagonal.shape(self, self._in_rows(values))

    def batch_size(self, values: Values) -> int:
        return KroneckerDiagonal.batch_size(self, self._in_rows(values))

    def repeats(self, values: Values) -> int | float:
        return KroneckerDiagonal.repeats(self, self._in_rows(values))

    def add_to(
        self, out: Array, values: Values, backend: Backend, alpha: float, beta: float
    ) -> None:
        arrays = self._arrays(self._in_rows(values), backend)
        weights = self._row_weights(values)
        shares: Sequence[Array | None] = weights or [None] * len(arrays)
        rows = sum(self.view.count(ids.shape) for ids in arrays)
        total = rows if weights is None else sum(float(w.sum()) for w in weights)
        for ids, share in zip(arrays, shares, strict=True):
            counts = self._ids.counts(ids, backend, share)
            backend.add_scaled(out, counts, alpha / max(total, 1e-30), beta)
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
    """A diagonal over a vocabulary, which multiplies dense matrices and selected rows."""

    def __init__(self, statistic: IdCounts, **options: Unpack[FactorOptions]) -> None:
        super().__init__(statistic, **options)
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
            raise ShapeError(f"{self.name} has {self.side} entries, but x has {x.num_rows} rows.")
        diagonal = self.average.read()[x.indices]
        damped = self._power(diagonal, exp, damping_func)[:, None]
        return Rows(x.indices, (damped * x.values).astype(x.values.dtype), x.num_rows)


# -- tables with products --------------------------------------------------------------------------


_TINY = 1e-30  # least divisor


@dataclass(frozen=True, slots=True)
class TableRows(LayerPairs):
    """Base of the statistics of a table: means over examples of sums over their rows."""

    ids: TokenIdView  # reads token ids
    view: RowView  # reads features, and the gradients of all uses
    lookups: int  # Number of uses by token ids. They come first, before the products.

    def repeats(self, values: Values) -> int | float:
        inputs = self.inputs[self.lookups :]
        return sum(self.view.count(values[a].shape) // len(values[a]) for a in inputs)

    def add_to(
        self, out: Array, values: Values, backend: Backend, alpha: float, beta: float
    ) -> None:
        scale(out, beta)
        for use, (a, ds) in enumerate(self.products()):
            share = alpha / len(values[ds])
            gradients = self._rows(values[ds], out, backend)
            if use < self.lookups:
                self._add_lookup(out, backend.asarray(values[a]), gradients, backend, share)
            else:
                features = self._rows(values[a], out, backend)
                self._add_product(out, features, gradients, backend, share)

    def _rows(self, x: Array, out: Array, backend: Backend) -> Array:
        """Return the rows of a tensor, ``(m, d)``."""
        rows = self.view.rows(backend.asarray(x), backend)
        flat: Array = rows.reshape(-1, rows.shape[-1]).astype(out.dtype, copy=False)
        return flat

    def _add_lookup(
        self, out: Array, ids: Array, gradients: Array, backend: Backend, share: float
    ) -> None:
        """Add ``share`` times the sum over token ids; ids outside the table add nothing."""
        raise NotImplementedError

    def _add_product(
        self, out: Array, features: Array, gradients: Array, backend: Backend, share: float
    ) -> None:
        """Add ``share`` times the sum over rows of features."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class TableFeatures(TableRows):
    """``Σ ‖δ‖² h hᵀ + Σ ε εᵀ``, ``(features, features)``."""

    def shape(self, values: Values) -> tuple[int, ...]:
        names = (*self.tensors[: self.lookups], *self.inputs[self.lookups :])
        d = the_same("features", {name: self.view.width(values[name].shape) for name in names})
        return d, d

    def _add_lookup(
        self, out: Array, ids: Array, gradients: Array, backend: Backend, share: float
    ) -> None:
        flat = ids.reshape(-1, 1)
        inside = (flat >= -self.ids.vocabulary) & (flat < self.ids.vocabulary)
        self._add_moment(out, gradients * inside, backend, share)

    def _add_product(
        self, out: Array, features: Array, gradients: Array, backend: Backend, share: float
    ) -> None:
        norms = _squared_norms(gradients, backend) ** 0.5
        self._add_moment(out, norms[:, None] * features, backend, share)

    def _add_moment(self, out: Array, rows: Array, backend: Backend, share: float) -> None:
        backend.second_moment(rows, out, Accumulation(alpha=share, beta=1.0))


@dataclass(frozen=True, slots=True)
class TableFeatureSquares(TableFeatures):
    """The diagonal of ``TableFeatures``, ``(features,)``."""

    def shape(self, values: Values) -> tuple[int, ...]:
        return TableFeatures.shape(self, values)[:1]

    def _add_moment(self, out: Array, rows: Array, backend: Backend, share: float) -> None:
        backend.add_scaled(out, (rows * rows).sum(axis=0), share, 1.0)


@dataclass(frozen=True, slots=True)
class TableEntries(TableRows):
    """The diagonal of ``Σ ‖h‖² δ δᵀ + Σ ‖ε‖² 1_id 1_idᵀ``, ``(vocabulary,)``."""

    def shape(self, values: Values) -> tuple[int, ...]:
        vocabulary = self.ids.vocabulary
        widths = {"the table": vocabulary}
        for a in self.inputs[: self.lookups]:
            self.ids.check(a, values[a])
        products = self.tensors[self.lookups :]
        widths |= {ds: self.view.width(values[ds].shape) for ds in products}
        return (the_same("entries of the vocabulary", widths),)

    def _add_lookup(
        self, out: Array, ids: Array, gradients: Array, backend: Backend, share: float
    ) -> None:
        counts = self.ids.counts(ids.reshape(-1), backend, _squared_norms(gradients, backend))
        backend.add_scaled(out, counts, share, 1.0)

    def _add_product(
        self, out: Array, features: Array, gradients: Array, backend: Backend, share: float
    ) -> None:
        weights = _squared_norms(features, backend)
        step = max(1, backend.scratch_bytes // (gradients.shape[1] * gradients.itemsize))
        for start in range(0, len(gradients), step):
            rows = gradients[start : start + step]
            backend.add_scaled(out, weights[start : start + step] @ (rows * rows), share, 1.0)


class TableEntriesFactor(DiagonalFactor):
    """Diagonal factor over the entries of a vocabulary, ``V / tr V`` of the stored diagonal V."""

    def diagonal(self) -> Array:
        diagonal = super().diagonal()
        shares: Array = diagonal / self.backend.xp.maximum(diagonal.sum(), _TINY)
        return shares


def _squared_norms(rows: Array, backend: Backend) -> Array:
    """Return the squared norm of each row of a matrix."""
    norms: Array = backend.xp.einsum("ij,ij->i", rows, rows)
    return norms
