"""Defines factors that are symmetric matrices, with inverses, powers and Cholesky factors."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from math import inf, prod
from typing import Any, TypeAlias, Unpack, cast

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend.namespace import recordable
from kfac_engine.curvature.config import LEAST_EIGENVALUE
from kfac_engine.curvature.factors.base import FactorOptions, FisherFactor
from kfac_engine.curvature.factors.refresh import Damping, RefreshTask, Request, Result, damping_id
from kfac_engine.curvature.factors.statistics import KroneckerMoment, Statistic
from kfac_engine.curvature.linalg.kronecker import symmetric_product
from kfac_engine.errors import (
    InputError,
    NotReadyError,
    ShapeError,
    UnknownNameError,
)

# Second moments of features count as at least this part of their median. Few examples of a batch
# have a rare feature, whose measured moment may be far too small.
_LEAST_OF_MEDIAN = 0.3

# Largest part of an average that shrinkage replaces, and the least divisor.
_MOST_SHRUNK, _TINY = 0.9, 1e-30

_INVERSE: Hashable = -1.0
CHOLESKY: Hashable = "cholesky"
CHOLESKY_INVERSE: Hashable = "cholesky_inverse"

# An operation and its damping: a number, or a number for each matrix of a stack.
Wanted: TypeAlias = tuple[Hashable, float | tuple[float, ...]]


@recordable
def shrinkage(squares: Any, traces: Any, side: int, rows: Any) -> Any:
    """Return the multiple of the identity that shrinks averages of few rows.

    For the sample covariance ``S`` of normal numbers, ``(1 − ρ) S + ρ tr(S)/d I`` has about the
    least expected squared error. The result is ``ρ / (1 − ρ)``, with ρ of at most 0.9.

    Args:
        squares: Sums of the squares of all entries of matrices.
        traces: Their traces.
        side: Their number of rows, d.
        rows: Number of rows that they are averages of.

    Source: Chen, Wiesel, Eldar & Hero 2010, "Shrinkage algorithms for MMSE covariance estimation",
    equation 23 (oracle approximating shrinkage).
    """
    weight = 1 - 2 / side
    errors = (rows + weight) * (squares - traces**2 / side)
    part = np.minimum((weight * squares + traces**2) / np.maximum(errors, _TINY), _MOST_SHRUNK)
    return part / (1 - part)


class DenseSquareMatrixFactor(FisherFactor):
    """A factor whose average is a symmetric positive semi-definite matrix ``(d, d)``.

    Attributes:
        stored: Results of the last refresh, by ``(operation, damping id)``. An operation is an
            exponent, ``"cholesky"`` or ``"cholesky_inverse"``.
    """

    is_symmetric = True

    def __init__(self, statistic: Statistic, **options: Unpack[FactorOptions]) -> None:
        super().__init__(statistic, **options)
        self._registered: dict[tuple[Hashable, Hashable], Damping] = {}
        self.stored: dict[tuple[Hashable, Hashable], Array] = {}

    @property
    def has_inverses(self) -> bool:
        return bool(self._registered)

    @property
    def only_refreshes_read(self) -> bool:
        starts_from_zero = self.config.debias or self.config.initial_covariance != "identity"
        return self.has_inverses and not self.statistic.of_sums and starts_from_zero

    def stored_numbers(self, shape: tuple[int, ...]) -> int:
        return len(self._registered) * prod(shape)

    @property
    def side(self) -> int:
        return len(self._lower())

    def complete(self, value: Array) -> None:
        self.backend.mirror(self._within(value))

    def measured_traces(self) -> Array:
        traces: Array = self.backend.xp.trace(self._lower())
        return traces

    def get_cov(self) -> Array:
        return self.cov

    def multiplications(self, shape: tuple[int, ...]) -> int:
        return shape[-1]

    def register_matpower(self, exp: float, damping_func: Damping) -> None:
        if exp != 1:  # power 1 is always computed from the current average
            self._register(float(exp), damping_func)

    def register_cholesky(self, damping_func: Damping) -> None:
        self._register(CHOLESKY, damping_func)

    def register_cholesky_inverse(self, damping_func: Damping) -> None:
        self._register(CHOLESKY_INVERSE, damping_func)

    def refresh_task(self) -> RefreshTask:
        # Blocks with equal dampings share a result.
        wanted = {key: (key[0], self._level(damping)) for key, damping in self._registered.items()}
        requests = self._requests(dict.fromkeys(wanted.values()))

        def store(results: Sequence[Result]) -> None:
            computed: dict[Wanted, Array] = {}
            for operations, arrays in zip(requests.values(), results, strict=True):
                computed |= zip(operations, arrays, strict=True)
            self.stored = {key: computed[operation] for key, operation in wanted.items()}

        return RefreshTask(list(requests), store)

    def stored_power(self, exp: float, damping_func: Damping) -> Array | None:
        return None if exp == 1 else self._read(float(exp), damping_func)

    def left_multiply_matpower(self, x: Array, exp: float, damping_func: Damping) -> Array:
        self._check_operand(x, axis=-2)
        if exp == 1:
            fresh: Array = self.backend.matmul(self._matrix(), x) + self._added(x, damping_func)
            return fresh
        return symmetric_product(self._read(float(exp), damping_func), x, self.backend)

    def right_multiply_matpower(self, x: Array, exp: float, damping_func: Damping) -> Array:
        self._check_operand(x, axis=-1)
        columns = x.swapaxes(-1, -2)
        if exp == 1:
            added = self._added(columns, damping_func).swapaxes(-1, -2)
            fresh: Array = self.backend.matmul(x, self._matrix()) + added
            return fresh
        power = self._read(float(exp), damping_func)
        return symmetric_product(power, columns, self.backend).swapaxes(-1, -2)

    def left_multiply_cholesky(
        self, x: Array, damping_func: Damping, *, transpose: bool, inverse: bool
    ) -> Array:
        self._check_operand(x, axis=-2)
        L = self._read(CHOLESKY_INVERSE if inverse else CHOLESKY, damping_func)
        product: Array = self.backend.matmul(L.swapaxes(-1, -2) if transpose else L, x)
        return product

    def right_multiply_cholesky(
        self, x: Array, damping_func: Damping, *, transpose: bool, inverse: bool
    ) -> Array:
        self._check_operand(x, axis=-1)
        L = self._read(CHOLESKY_INVERSE if inverse else CHOLESKY, damping_func)
        product: Array = self.backend.matmul(x, L.swapaxes(-1, -2) if transpose else L)
        return product

    @property
    def operations(self) -> tuple[str, ...]:
        return tuple(str(operation) for operation, _ in self._registered)

    def arrays(self) -> dict[str, Array]:
        order = {key: index for index, key in enumerate(self._registered)}
        stored = {f"power/{order[key]}": array for key, array in self.stored.items()}
        return super().arrays() | {k: self.backend.to_numpy(v) for k, v in stored.items()}

    def restore(self, arrays: Mapping[str, Array], weight: float, repeats: float | None) -> None:
        super().restore(arrays, weight, repeats)
        self.stored = {
            key: self.backend.asarray(arrays[f"power/{index}"])
            for index, key in enumerate(self._registered)
            if f"power/{index}" in arrays
        }

    def _matrix(self) -> Array:
        """Return the matrix, or the stack of matrices, with both triangles."""
        return self._within(self.average.read())

    def _lower(self) -> Array:
        """Return the average, a matrix or a stack; only its lower triangle is defined."""
        return self._within(self.average.lower())

    def _within(self, average: Array) -> Array:
        """Return the view of the average that is the matrix."""
        return average

    def _identity(self, like: Array) -> Array:
        eye: Array = self.backend.xp.eye(len(like), dtype=like.dtype)
        return eye

    def _register(self, operation: Hashable, damping_func: Damping) -> None:
        if self.registrations_closed:
            raise InputError(
                f"register '{operation}' of {self.name} before instantiate_inv_variables."
            )
        self._registered[operation, damping_id(damping_func)] = damping_func

    def _requests(self, wanted: Iterable[Wanted]) -> dict[Request, Sequence[Wanted]]:
        """Return the requests, with the operations that each request computes."""
        powers = [(op, damping) for op, damping in wanted if isinstance(op, float)]
        requests: dict[Request, Sequence[Wanted]] = {}
        takes_eigenvectors = self._takes_eigenvectors(powers)
        cov = self._matrix() if takes_eigenvectors else self._lower()
        if self.damped_by_feature():
            return self._requests_by_feature(cov, wanted)
        if takes_eigenvectors:
            clip = self.config.eigenvalue_clipping_threshold
            requests[Request("powers", cov, powers=tuple(powers), clip=clip)] = powers
        else:
            requests |= {Request("inverse", cov, pair[1]): [pair] for pair in powers}
        for damping in dict.fromkeys(d for op, d in wanted if not isinstance(op, float)):
            both = (CHOLESKY, damping), (CHOLESKY_INVERSE, damping)
            requests[Request("cholesky", cov, damping)] = both
        return requests

    def _requests_by_feature(
        self, cov: Array, wanted: Iterable[Wanted]
    ) -> dict[Request, Sequence[Wanted]]:
        """Return a request for each operation; the matrix contains all but the least damping."""
        requests: dict[Request, Sequence[Wanted]] = {}
        for op, level in wanted:
            levels = self._by_feature(level)
            least = float(self.backend.download([levels.min()])[0])
            matrix = cov + self.backend.xp.diag(levels - least).astype(cov.dtype)
            if not isinstance(op, float):
                both = (CHOLESKY, level), (CHOLESKY_INVERSE, level)
                requests[Request("cholesky", matrix, least)] = both
            elif op == _INVERSE:
                requests[Request("inverse", matrix, least)] = [(op, level)]
            else:
                clip = self.config.eigenvalue_clipping_threshold
                powers = ((op, least),)
                requests[Request("powers", matrix, powers=powers, clip=clip)] = [(op, level)]
        return requests

    def shrinkage(self, examples: float) -> float:
        if examples == inf or not self.damped_by_feature():
            return 0.0
        lower, xp = self._lower(), self.backend.xp
        # Averages are zero until a target counts.
        scales = xp.maximum(self.moments(lower, xp), LEAST_EIGENVALUE) ** -0.5
        scaled = xp.tril(lower * scales * scales[:, None])
        diagonal = xp.diagonal(scaled)
        squares = 2 * xp.vdot(scaled, scaled) - xp.vdot(diagonal, diagonal)
        rows = examples * self.average.weight
        multiple = shrinkage(squares, diagonal.sum(), self.side, rows)
        return float(self.backend.download([multiple])[0])

    def _by_feature(self, level: Any) -> Array:
        """Return the numbers that a damping by feature adds to the diagonal, in float64."""
        multiple = level / max(self.trace() / self.side, LEAST_EIGENVALUE)
        levels: Array = multiple * self.moments(self._lower().astype(np.float64), self.backend.xp)
        return levels

    @recordable
    def moments(self, average: Any, xp: Any = np) -> Any:
        diagonal = xp.diagonal(average)
        features = diagonal[: len(diagonal) - cast(KroneckerMoment, self.statistic).homogeneous]
        least = xp.maximum(_LEAST_OF_MEDIAN * xp.median(features), LEAST_EIGENVALUE)
        return xp.concatenate([xp.maximum(features, least), diagonal[len(features) :]])

    def _added(self, x: Array, damping_func: Damping) -> Array:
        """Return the damping times columns."""
        level: Any = damping_func()
        if self.damped_by_feature():
            level = self._by_feature(level).astype(x.dtype)[:, None]
        product: Array = level * x
        return product

    def _level(self, damping_func: Damping) -> float | tuple[float, ...]:
        """Return the current value of a damping, as a hashable object."""
        return float(damping_func())

    def _takes_eigenvectors(self, powers: Sequence[Wanted]) -> bool:
        """Return whether eigenvectors are needed, or cheaper than the inverses."""
        many = len(powers) >= self.config.eigendecomposition_threshold
        return many or any(op != _INVERSE for op, _ in powers)

    def _read(self, operation: Hashable, damping_func: Damping) -> Array:
        key = operation, damping_id(damping_func)
        stored = self.stored.get(key)
        if stored is not None:
            return stored
        if key not in self._registered:
            raise UnknownNameError(
                f"'{operation}' of {self.name} was not registered with this damping; register it "
                f"before the inverses are computed."
            )
        raise NotReadyError(
            f"'{operation}' of {self.name} was not computed yet: update the statistics, then "
            f"refresh the inverses."
        )

    def _check_operand(self, x: Array, axis: int) -> None:
        if x.ndim != 2 or x.shape[axis] != self.side:
            raise ShapeError(
                f"{self.name} is {self.side} × {self.side}; it cannot multiply an array of shape "
                f"{x.shape} from the {'left' if axis == -2 else 'right'}."
            )
