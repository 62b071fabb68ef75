"""The EKFAC block: the eigenvectors of a Kronecker product with measured eigenvalues."""

from collections.abc import Sequence

from kfac_engine.curvature.blocks.base import Decomposition, Found, GradsList, shape_of
from kfac_engine.curvature.blocks.single import LayerDiagonalFB
from kfac_engine.curvature.config import LEAST_EIGENVALUE
from kfac_engine.curvature.factors.base import FisherFactor
from kfac_engine.curvature.factors.dense import DenseSquareMatrixFactor
from kfac_engine.curvature.factors.eigenbasis import EigenbasisFactor, RotatedSquare
from kfac_engine.curvature.factors.refresh import Level
from kfac_engine.curvature.factors.statistics import KroneckerMoment


class EigenbasisFB(LayerDiagonalFB):
    """``F ≈ (U_A ⊗ U_G) diag(s) (U_A ⊗ U_G)ᵀ``, damped by λ (George et al. 2018, section 3).

    Powers are those of the current eigenvalues. The Cholesky factor is the symmetric square root.
    Positions are summed within an example, so that no count multiplies the block.
    """

    symbols = ("A", "G", "s")

    @property
    def basis(self) -> EigenbasisFactor:
        factor = self.factor
        assert isinstance(factor, EigenbasisFactor)  # by _make_factors
        return factor

    @property
    def factors(self) -> tuple[FisherFactor, ...]:
        return (*self.basis.kronecker_factors, self.basis)

    def decompose(self, decomposition: Decomposition[Found]) -> Found:
        return decomposition.rotated(self.basis)

    def factor_shapes(self, shapes: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        d_in, d_out = self.form.packing.matrix_shape(shapes[0])
        return (d_in, d_in), (d_out, d_out), (d_in, d_out)

    def factor_dampings(self) -> tuple[Level | None, ...]:
        return None, None, self.damping

    def mean_eigenvalue(self) -> float:
        return max(self.factor.trace() / self.factor.side, LEAST_EIGENVALUE)

    @property
    def work(self) -> float:
        d_in, d_out = shape_of(self.factor) or (0, 0)
        return 2.0 * d_in * d_out * (d_in + d_out)  # into the basis, and back

    def _make_factors(self, grads_list: GradsList) -> None:
        form, collection = self.form, self._collection
        inputs, gradients = tuple(self._towers.inputs), self._towers.gradients(grads_list)
        bias, batch = form.packing.has_bias, collection.batch_value
        exact = collection.batch_is_exact
        a = KroneckerMoment((inputs,), form.input_view, bias, batch=batch, exact=exact)
        ds = KroneckerMoment(gradients, form.output_view, batch=batch, exact=exact)
        kronecker_factors = (
            collection.make_or_get_factor(DenseSquareMatrixFactor, (a,)),
            collection.make_or_get_factor(DenseSquareMatrixFactor, (ds,)),
        )
        squares = RotatedSquare(inputs, gradients, form.input_view, form.output_view, bias)
        self._factor = collection.make_or_get_factor(
            EigenbasisFactor, (squares, *kronecker_factors)
        )
