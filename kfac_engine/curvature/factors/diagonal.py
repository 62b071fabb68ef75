"""Defines factors that are diagonal matrices, stored as one number for each parameter."""

import numpy as np

from kfac_engine._types import Array
from kfac_engine.curvature.factors.base import FisherFactor
from kfac_engine.curvature.factors.refresh import Damping, RefreshTask
from kfac_engine.errors import InputError, ShapeError


class DiagonalFactor(FisherFactor):
    """A factor whose average, of any shape, is the diagonal of a matrix.

    Powers are elementwise powers of the current average. A refresh stores nothing, registration
    has no effect, and no eigenvalue is clipped. The Cholesky factor is the square root.
    """

    is_diagonal = True

    def diagonal(self) -> Array:
        """Return the diagonal of the current average, in its shape."""
        return self.average.read()

    @property
    def has_inverses(self) -> bool:
        return False

    @property
    def side(self) -> int:
        return int(self.diagonal().size)

    def measured_traces(self) -> Array:
        total: Array = self.diagonal().sum()
        return total

    def get_cov(self) -> Array:
        dense: Array = self.backend.xp.diag(self.diagonal().reshape(-1))
        return dense

    def eigenvalues(self) -> Array:
        average = self.backend.to_numpy(self.diagonal())
        return np.sort(average.astype(np.float64), axis=None)

    def register_matpower(self, exp: float, damping_func: Damping) -> None:
        del exp, damping_func

    def register_cholesky(self, damping_func: Damping) -> None:
        del damping_func

    def register_cholesky_inverse(self, damping_func: Damping) -> None:
        del damping_func

    def refresh_task(self) -> RefreshTask:
        return RefreshTask((), lambda _: None)  # products read the current average

    def left_multiply_matpower(self, x: Array, exp: float, damping_func: Damping) -> Array:
        diagonal = self.diagonal()
        if diagonal.size not in (len(x), x.size):
            raise ShapeError(
                f"{self.name} has {diagonal.size} entries; it cannot multiply an array of shape "
                f"{x.shape} from the left."
            )
        damped = self._power(diagonal, exp, damping_func)
        if damped.size == x.size:
            return damped.reshape(x.shape) * x
        return damped.reshape(-1, *(1,) * (x.ndim - 1)) * x

    def right_multiply_matpower(self, x: Array, exp: float, damping_func: Damping) -> Array:
        diagonal = self.diagonal()
        if diagonal.size != x.shape[-1]:
            raise ShapeError(
                f"{self.name} has {diagonal.size} entries; it cannot multiply an array of shape "
                f"{x.shape} from the right."
            )
        return x * self._power(diagonal.reshape(-1), exp, damping_func)

    def left_multiply_cholesky(
        self, x: Array, damping_func: Damping, *, transpose: bool, inverse: bool
    ) -> Array:
        del transpose  # a diagonal matrix is its own transpose
        return self.left_multiply_matpower(x, -0.5 if inverse else 0.5, damping_func)

    def right_multiply_cholesky(
        self, x: Array, damping_func: Damping, *, transpose: bool, inverse: bool
    ) -> Array:
        del transpose
        return self.right_multiply_matpower(x, -0.5 if inverse else 0.5, damping_func)

    def _power(self, diagonal: Array, exp: float, damping_func: Damping) -> Array:
        damped = diagonal + damping_func()
        if exp < 0 and not bool((damped > 0).all()):
            raise InputError(
                f"{self.name} has a damped entry of {float(damped.min())}, which has no power "
                f"{exp}; use a positive damping."
            )
        power: Array = damped**exp
        return power

    def _identity(self, like: Array) -> Array:
        ones: Array = self.backend.xp.ones_like(like)
        return ones
