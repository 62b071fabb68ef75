"""Factors that are a symmetric matrix: inverses, powers and Cholesky factors of it."""

from collections.abc import Hashable, Mapping
from math import prod

from kfac_engine._types import Array
from kfac_engine.backend.protocol import Backend
from kfac_engine.config import CollectionConfig
from kfac_engine.errors import (
    InputError,
    NonFiniteError,
    NotReadyError,
    ShapeError,
    UnknownNameError,
)
from kfac_engine.factors.base import Damping, FisherFactor, damping_id
from kfac_engine.factors.statistics import Statistic
from kfac_engine.linalg.spectral import eigh_power

_INVERSE: Hashable = -1.0
CHOLESKY: Hashable = "cholesky"
CHOLESKY_INVERSE: Hashable = "cholesky_inverse"


class DenseSquareMatrixFactor(FisherFactor):
    """A factor whose average is a symmetric positive semi-definite matrix ``(d, d)``.

    Attributes:
        stored: What each refresh computes, by ``(operation, damping id)``; an operation is an
            exponent, ``"cholesky"`` or ``"cholesky_inverse"``. Stale between refreshes by design.
    """

    def __init__(
        self,
        statistic: Statistic,
        *,
        backend: Backend | None = None,
        config: CollectionConfig | None = None,
    ) -> None:
        super().__init__(statistic, backend=backend, config=config)
        self._registered: dict[tuple[Hashable, Hashable], Damping] = {}
        self.stored: dict[tuple[Hashable, Hashable], Array] = {}

    @property
    def has_inverses(self) -> bool:
        return bool(self._registered)

    def stored_numbers(self, shape: tuple[int, ...]) -> int:
        return len(self._registered) * prod(shape)

    @property
    def side(self) -> int:
        return len(self._matrix())

    def trace(self) -> float:
        return float(self.backend.xp.trace(self._matrix()))

    def get_cov(self) -> Array:
        return self.cov

    def register_matpower(self, exp: float, damping_func: Damping) -> None:
        if exp != 1:  # power 1 is always computed from the current average
            self._register(float(exp), damping_func)

    def register_cholesky(self, damping_func: Damping) -> None:
        self._register(CHOLESKY, damping_func)

    def register_cholesky_inverse(self, damping_func: Damping) -> None:
        self._register(CHOLESKY_INVERSE, damping_func)

    def refresh(self) -> None:
        cov = self._matrix()
        if not bool(self.backend.xp.isfinite(cov).all()):
            raise NonFiniteError(f"the average of {self.name} holds NaN or infinity.")
        dampings = {key: float(damping()) for key, damping in self._registered.items()}
        # Blocks whose dampings are equal now share one result.
        wanted = {(key[0], damping) for key, damping in dampings.items()}
        computed = self._compute(cov, wanted)
        self.stored = {key: computed[key[0], damping] for key, damping in dampings.items()}

    def left_multiply_matpower(self, x: Array, exp: float, damping_func: Damping) -> Array:
        self._check_operand(x, axis=0)
        if exp == 1:
            fresh: Array = self._matrix() @ x + damping_func() * x
            return fresh
        product: Array = self._read(float(exp), damping_func) @ x
        return product

    def right_multiply_matpower(self, x: Array, exp: float, damping_func: Damping) -> Array:
        self._check_operand(x, axis=-1)
        if exp == 1:
            fresh: Array = x @ self._matrix() + damping_func() * x
            return fresh
        product: Array = x @ self._read(float(exp), damping_func)
        return product

    def left_multiply_cholesky(
        self, x: Array, damping_func: Damping, *, transpose: bool, inverse: bool
    ) -> Array:
        self._check_operand(x, axis=0)
        L = self._read(CHOLESKY_INVERSE if inverse else CHOLESKY, damping_func)
        product: Array = (L.T if transpose else L) @ x
        return product

    def right_multiply_cholesky(
        self, x: Array, damping_func: Damping, *, transpose: bool, inverse: bool
    ) -> Array:
        self._check_operand(x, axis=-1)
        L = self._read(CHOLESKY_INVERSE if inverse else CHOLESKY, damping_func)
        product: Array = x @ (L.T if transpose else L)
        return product

    @property
    def operations(self) -> tuple[str, ...]:
        return tuple(str(operation) for operation, _ in self._registered)

    def arrays(self) -> dict[str, Array]:
        order = {key: index for index, key in enumerate(self._registered)}
        stored = {f"power/{order[key]}": array for key, array in self.stored.items()}
        return super().arrays() | {k: self.backend.to_numpy(v) for k, v in stored.items()}

    def restore(self, arrays: Mapping[str, Array], weight: float, repeats: int | None) -> None:
        super().restore(arrays, weight, repeats)
        self.stored = {
            key: self.backend.asarray(arrays[f"power/{index}"])
            for index, key in enumerate(self._registered)
            if f"power/{index}" in arrays
        }

    def _matrix(self) -> Array:
        """The matrix within the average, as it is stored."""
        return self.average.read(self.name)

    def _identity(self, like: Array) -> Array:
        eye: Array = self.backend.xp.eye(len(like), dtype=like.dtype)
        return eye

    def _register(self, operation: Hashable, damping_func: Damping) -> None:
        if self._inverse_ready:
            raise InputError(
                f"register '{operation}' of {self.name} before instantiate_inv_variables."
            )
        self._registered[operation, damping_id(damping_func)] = damping_func

    def _compute(
        self, cov: Array, wanted: set[tuple[Hashable, float]]
    ) -> dict[tuple[Hashable, float], Array]:
        """Every ``(operation, damping)``; the eigenvectors are shared and then dropped."""
        backend = self.backend
        results: dict[tuple[Hashable, float], Array] = {}
        powers = {(op, damping) for op, damping in wanted if isinstance(op, float)}
        inverses = {pair for pair in powers if pair[0] == _INVERSE}
        if powers - inverses or len(inverses) >= self.config.eigendecomposition_threshold:
            values, vectors = backend.eigh(cov)
            for op, damping in powers:
                assert isinstance(op, float)  # by the selection above
                results[op, damping] = eigh_power(
                    values,
                    vectors,
                    damping,
                    op,
                    clip=self.config.eigenvalue_clipping_threshold,
                    dtype=cov.dtype,
                )
        else:
            for op, damping in inverses:
                results[op, damping] = backend.damped_inverse(cov, damping)
        for damping in {damping for op, damping in wanted if not isinstance(op, float)}:
            lower = backend.damped_cholesky(cov, damping)
            results[CHOLESKY, damping] = lower
            results[CHOLESKY_INVERSE, damping] = backend.triangular_inverse(lower)
        return results

    def _read(self, operation: Hashable, damping_func: Damping) -> Array:
        key = operation, damping_id(damping_func)
        if key not in self._registered:
            raise UnknownNameError(
                f"'{operation}' of {self.name} was not registered with this damping; register it "
                f"before the inverses are made."
            )
        if key not in self.stored:
            raise NotReadyError(
                f"'{operation}' of {self.name} was not computed yet: update the statistics, then "
                f"refresh the inverses."
            )
        return self.stored[key]

    def _check_operand(self, x: Array, axis: int) -> None:
        if x.ndim != 2 or x.shape[axis] != self.side:
            raise ShapeError(
                f"{self.name} is {self.side} × {self.side}; it cannot multiply an array of shape "
                f"{x.shape} from the {'left' if axis == 0 else 'right'}."
            )
