"""Defines blocks of layers used at successive steps, with correlations between the steps.

Source: Martens, Ba & Johnson 2018, section 3.5; the algebra is in ``curvature.linalg.lags``.
"""

from collections.abc import Callable, Mapping
from typing import TypeAlias, cast

from kfac_engine._types import Array, Vector
from kfac_engine.backend.protocol import Backend
from kfac_engine.curvature.blocks.base import Decomposition, FisherBlock, Found, GradsList
from kfac_engine.curvature.blocks.kronecker import KroneckerProductFB, Side
from kfac_engine.curvature.factors.lagged import LaggedFactor
from kfac_engine.curvature.factors.owner import FactorOwner
from kfac_engine.curvature.factors.statistics import KroneckerMoment
from kfac_engine.curvature.linalg.lags import (
    Whitened,
    multiply_infinite,
    multiply_symmetric,
    solve_infinite,
    solve_symmetric,
)
from kfac_engine.errors import InputError, UnsupportedError
from kfac_engine.layers.layer_forms import LayerForm

_Multiply: TypeAlias = Callable[[Array, Whitened, Whitened, int, Backend], Array]
_Solve: TypeAlias = Callable[..., Array]

_OPTIONS: Mapping[int, tuple[_Multiply, _Solve]] = {
    1: (multiply_symmetric, solve_symmetric),
    2: (multiply_infinite, solve_infinite),
}


# Measures the lag after ``register_cov_dt1`` only: blocks of both kinds can share a factor.
USES = Side(KroneckerMoment, LaggedFactor)
_SUCCESSIVE_USES = Side(KroneckerMoment, LaggedFactor, lambda d: (2, d, d))


class SeriesFB(KroneckerProductFB):
    """``F ≈ t · Σ_d weight(d) · A_d ⊗ G_d`` over the lags between uses; powers 1 and −1 only.

    Args:
        collection: Owner of the factors.
        form: Layout of the tensors and parameters of one use, with the number of uses, which are
            in the order of time.
        option: 1 (symmetric lag moments, weights ``u − |d|``) or 2 (any lag moments, infinite
            sequence, weights ``u``).

    Raises:
        InputError: The option is neither 1 nor 2.
    """

    is_product = False

    def __init__(self, collection: FactorOwner, form: LayerForm, option: int = 2) -> None:
        uses = _SUCCESSIVE_USES
        super().__init__(collection, form, input_side=uses, output_side=uses)
        if option not in _OPTIONS:
            raise InputError(f"option must be 1 or 2, got {option}.")
        self._option = option

    def _make_factors(self, grads_list: GradsList) -> None:
        super()._make_factors(grads_list)
        for factor in self._lagged():
            factor.register_cov_dt1()

    def decompose(self, decomposition: Decomposition[Found]) -> Found:
        raise UnsupportedError(
            f"the block of {self.params} is a sum over lags, which has no eigenvalues in closed "
            f"form; use approximation 'kron_indep'."
        )

    def register_matpower(self, exp: float) -> None:
        self._check_power(exp)
        if exp == -1:
            for factor, damping in zip(self._lagged(), self._dampings, strict=True):
                factor.register_series(self._option, damping)

    def register_cholesky(self) -> None:
        raise UnsupportedError(_NO_CHOLESKY)

    def register_cholesky_inverse(self) -> None:
        raise UnsupportedError(_NO_CHOLESKY)

    def multiply_matpower(self, vector: Vector, exp: float) -> Vector:
        self._check_power(exp)
        vector = self._operand(vector)
        V = self._pack(vector)
        if exp == 1:
            product = self._multiplied(V, *map(float, self.split_damping()))
        else:
            product = self._solved(V)
        return self.form.packing.unpack(product, vector)

    def multiply_weight(self, weight: Array, exp: float) -> Array:
        # A sum over lags is not a product of two powers.
        return FisherBlock.multiply_weight(self, weight, exp)

    def _multiply_root(self, vector: Vector, *, transpose: bool, inverse: bool) -> Vector:
        raise UnsupportedError(_NO_CHOLESKY)

    def full_fisher_block(self) -> Array:
        A, G = self.factors
        size = A.side * G.side
        basis = self._collection.backend.xp.eye(size).reshape(size, A.side, G.side)
        block: Array = self._multiplied(basis, 0.0, 0.0).reshape(size, size)
        return block

    # -- private ----------------------------------------------------------------------------------

    @property
    def _positions(self) -> float:
        """Mean number of positions of a use for each example, each an independent sequence."""
        return self.repeats / self.form.num_uses

    def _multiplied(self, V: Array, damping_a: float, damping_g: float) -> Array:
        A, G = self._lagged()
        multiply, _ = _OPTIONS[self._option]
        whitened = A.whitened(damping_a), G.whitened(damping_g)
        product = multiply(V, *whitened, self.form.num_uses, self._collection.backend)
        return self._positions * product

    def _solved(self, V: Array) -> Array:
        _, solve = _OPTIONS[self._option]
        A, G = (
            factor.series(self._option, damping)
            for factor, damping in zip(self._lagged(), self._dampings, strict=True)
        )
        return solve(V, A, G, self.form.num_uses) / self._positions

    def _lagged(self) -> tuple[LaggedFactor, LaggedFactor]:
        return cast("tuple[LaggedFactor, LaggedFactor]", self.factors)

    def _check_power(self, exp: float) -> None:
        if exp not in (1, -1):
            raise UnsupportedError(
                f"the block of {self.params} sums over lags: it has the powers 1 and -1 only, not "
                f"{exp}; use approximation 'kron_indep'."
            )


_NO_CHOLESKY = "a block summed over lags has no Cholesky factor; use approximation 'kron_indep'."
