"""Multiplies by embedding blocks ``F ≈ u·t · diag(A) ⊗ G``, for dense vectors or rows.

``A`` is the fraction of rows that contain each token id, ``G`` the second moment of the output
gradients. The gradient of an embedding is nonzero only in the rows of the token ids of a batch. A
product with ``Rows`` reads these rows only.
"""

from kfac_engine._types import Array, Rows, Vector
from kfac_engine.curvature.blocks.base import ExampleReader, Found, GradsList
from kfac_engine.curvature.blocks.kronecker import DENSE, DIAGONAL, KroneckerProductFB, Side
from kfac_engine.curvature.factors.owner import FactorOwner
from kfac_engine.curvature.factors.row_weights import LayerRows
from kfac_engine.curvature.factors.tables import (
    IdCounts,
    TableEntries,
    TableEntriesFactor,
    TableFeatures,
    TableFeatureSquares,
    VocabularyFactor,
)
from kfac_engine.layers.layer_forms import LayerForm
from kfac_engine.layers.views import RowView, TokenIdView

TOKEN_IDS = Side(IdCounts, VocabularyFactor, DIAGONAL.shape)


class EmbeddingKroneckerFB(KroneckerProductFB):
    """A Kronecker block of a table whose rows are selected by token ids.

    Args:
        collection: Owner of the factors.
        form: Layout of the tensors of one use; its input view is ``TokenIdView``.
        output_side: Form of ``G``.
    """

    selects_rows = True

    def __init__(
        self, collection: FactorOwner, form: LayerForm, *, output_side: Side = DENSE
    ) -> None:
        super().__init__(collection, form, input_side=TOKEN_IDS, output_side=output_side)

    @property
    def multiplies_rows(self) -> bool:
        return True

    def multiply_matpower(self, vector: Vector, exp: float) -> Vector:
        if not isinstance(vector, Rows):
            return super().multiply_matpower(vector, exp)
        vector = self._rows(vector)
        (A, G), (damping_a, damping_g) = self.factors, self._dampings
        assert isinstance(A, VocabularyFactor)  # by the input side
        rows = A.left_multiply_matpower(vector, exp, damping_a)
        values = G.right_multiply_matpower(rows.values, exp, damping_g)
        return self._scaled(vector, values, exp)

    def _multiply_root(self, vector: Vector, *, transpose: bool, inverse: bool) -> Vector:
        if not isinstance(vector, Rows):
            return super()._multiply_root(vector, transpose=transpose, inverse=inverse)
        exp = -0.5 if inverse else 0.5
        vector = self._rows(vector)
        (A, G), (damping_a, damping_g) = self.factors, self._dampings
        assert isinstance(A, VocabularyFactor)  # by the input side
        rows = A.left_multiply_matpower(vector, exp, damping_a)
        values = G.right_multiply_cholesky(
            rows.values, damping_g, transpose=not transpose, inverse=inverse
        )
        return self._scaled(vector, values, exp)

    def _rows(self, rows: Rows) -> Rows:
        """Return rows in floating point; a product of integers would be truncated."""
        if rows.values.dtype.kind == "f":
            return rows
        return Rows(rows.indices, rows.values.astype("float64"), rows.num_rows)

    def _scaled(self, vector: Rows, values: Array, exp: float) -> Rows:
        scaled = float(self.repeats) ** exp * values
        return Rows(vector.indices, scaled.astype(vector.values.dtype), vector.num_rows)


class TiedTableFB(KroneckerProductFB):
    """A Kronecker block of a table that embeddings and products read.

    Args:
        collection: Owner of the factors.
        form: Layout of the tensors: the input view reads token ids, the output view features and
            all gradients. ``num_uses`` is the number of uses by token ids, which come first.
        input_side: Form of the factor over the features, dense or diagonal.
    """

    symbols = ("H", "V")

    def __init__(
        self, collection: FactorOwner, form: LayerForm, *, input_side: Side = DENSE
    ) -> None:
        super().__init__(collection, form, input_side=input_side, output_side=DIAGONAL)

    @property
    def repeats(self) -> float:
        """One: the factors are sums over the rows of an example, not means."""
        return 1

    def layer_rows(self) -> tuple[LayerRows, ...]:
        return ()  # each term has a gradient, which vanishes in rows that do not count

    def read_examples(self, reader: ExampleReader[Found]) -> Found:
        return reader.one_by_one()  # its uses are read in two ways

    def _make_factors(self, grads_list: GradsList) -> None:
        ids, view, lookups = self.form.input_view, self.form.output_view, self.form.num_uses
        assert isinstance(ids, TokenIdView)  # by the registration
        assert isinstance(view, RowView)
        side, layout = self._sides[0], (ids, view, lookups)
        features = TableFeatures if side is DENSE else TableFeatureSquares
        self._factors = (
            self._make_factor(side.factor, lambda x, ds: features(x, ds, *layout), grads_list),
            self._make_factor(
                TableEntriesFactor, lambda x, ds: TableEntries(x, ds, *layout), grads_list
            ),
        )
