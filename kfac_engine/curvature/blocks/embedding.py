"""Kronecker blocks of embeddings: ``F ≈ u·t · diag(A) ⊗ G``, multiplying dense vectors or rows.

``A`` is the part of the rows that have each identifier, ``G`` the second moment of the output
gradients. The gradient of an embedding has as many rows that are not zero as a batch has
identifiers: given as ``Rows``, it is multiplied without touching the others.
"""

from kfac_engine._types import Array, Rows, Vector
from kfac_engine.curvature.blocks.base import FactorOwner
from kfac_engine.curvature.blocks.kronecker import DENSE, DIAGONAL, Side
from kfac_engine.curvature.blocks.multi_use import MultiUseKroneckerFB
from kfac_engine.curvature.factors.embedding import IdCounts, VocabularyFactor
from kfac_engine.layers.layer_forms import LayerForm

IDENTIFIERS = Side(IdCounts, VocabularyFactor, DIAGONAL.shape)


class EmbeddingKroneckerFB(MultiUseKroneckerFB):
    """A Kronecker block of a table whose rows are picked by identifiers.

    Args:
        collection: Owner of the factors.
        form: How the tensors of one use are laid out; its input view is ``TokenIdView``.
        num_uses: Uses; may be left out if a tower lists them.
        output_side: How ``G`` is kept.
    """

    def __init__(
        self,
        collection: FactorOwner,
        form: LayerForm,
        num_uses: int | None = 1,
        *,
        output_side: Side = DENSE,
    ) -> None:
        super().__init__(
            collection, form, num_uses, input_side=IDENTIFIERS, output_side=output_side
        )

    def multiply_matpower(self, vector: Vector, exp: float) -> Vector:
        if not isinstance(vector, Rows):
            return super().multiply_matpower(vector, exp)
        vector = self._rows(vector)
        (A, damping_a), (G, damping_g) = self._damped()
        assert isinstance(A, VocabularyFactor)  # by the input side
        rows = A.left_multiply_matpower(vector, exp, damping_a)
        values = G.right_multiply_matpower(rows.values, exp, damping_g)
        return self._scaled(vector, values, exp)

    def _multiply_root(self, vector: Vector, *, transpose: bool, inverse: bool) -> Vector:
        if not isinstance(vector, Rows):
            return super()._multiply_root(vector, transpose=transpose, inverse=inverse)
        exp = -0.5 if inverse else 0.5
        vector = self._rows(vector)
        (A, damping_a), (G, damping_g) = self._damped()
        assert isinstance(A, VocabularyFactor)  # by the input side
        rows = A.left_multiply_matpower(vector, exp, damping_a)
        values = G.right_multiply_cholesky(
            rows.values, damping_g, transpose=not transpose, inverse=inverse
        )
        return self._scaled(vector, values, exp)

    def _rows(self, rows: Rows) -> Rows:
        """Rows as floating-point numbers: a product in whole numbers would be cut off."""
        if rows.values.dtype.kind == "f":
            return rows
        return Rows(rows.indices, rows.values.astype("float64"), rows.num_rows)

    def _scaled(self, vector: Rows, values: Array, exp: float) -> Rows:
        scaled = float(self.repeats) ** exp * values
        return Rows(vector.indices, scaled.astype(vector.values.dtype), vector.num_rows)
