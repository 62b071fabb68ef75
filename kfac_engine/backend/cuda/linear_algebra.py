"""Inverts, factors and diagonalizes many matrices at once on a GPU."""

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

from kfac_engine._types import Array, DType
from kfac_engine.backend.cuda import recursive_inverse
from kfac_engine.backend.cuda.device import CupyDevice
from kfac_engine.backend.cuda.inverse_roots import inverse_roots
from kfac_engine.backend.cuda.matrix_batches import COPIES, DampedMatrices, MatrixBatches, Work
from kfac_engine.errors import BackendError, InputError
from kfac_engine.kernels.symmetric import narrow

_LOG = logging.getLogger(__name__)

# Factors of the damping in successive attempts, before eigenvalues are clamped.
_ATTEMPTS = (1, 10, 100, 1000)
_FAILED_ATTEMPT = "a %s matrix of mean eigenvalue %.3g is not positive definite with damping %.3g"
# Bound of the error of eigenvectors, relative to the largest entry times the size.
_EIGEN_ROUNDING = 1e-12


class CupyLinearAlgebra:
    """Batched linear algebra of one device; the NumPy backend has the same results.

    ``scratch_bytes`` bounds the scratch memory; a single matrix may take more.
    """

    def __init__(self, device: CupyDevice, scratch_bytes: int) -> None:
        self._device = device
        self._xp = device.xp
        self._batches = MatrixBatches(device, scratch_bytes)

    def begin_damped_inverses(
        self, matrices: Sequence[Array], dampings: Sequence[float]
    ) -> Callable[[], list[Array]]:
        single = all(matrix.dtype == np.float32 for matrix in matrices)
        copies = recursive_inverse.COPIES if single else COPIES
        work = self._inverses, _inverse
        return _begin(self._factored(matrices, dampings, *work, copies=copies, stacked=single))

    def damped_choleskys(self, matrices: Sequence[Array], dampings: Sequence[float]) -> list[Array]:
        return _begin(self._factored(matrices, dampings, self._roots, self._root))()

    def triangular_inverses(self, lowers: Sequence[Array]) -> list[Array]:
        xp = self._xp

        def solve(stack: Array, indices: Sequence[int]) -> tuple[Sequence[Array], Array]:
            zeros = xp.diagonal(stack, axis1=1, axis2=2) == 0
            first = xp.where(zeros.any(axis=1), zeros.argmax(axis=1), -1)
            inverses = self._device.solvers.solve_lower(stack)
            return inverses.astype(lowers[indices[0]].dtype), self._batches.rows(first)

        results = []
        for inverse, _, (first,) in self._batches.run(DampedMatrices(lowers), solve):
            if first >= 0:
                raise InputError(
                    f"a triangular matrix with zero at [{first:.0f}, {first:.0f}] has no inverse."
                )
            results.append(inverse)
        return results

    def eighs(self, matrices: Sequence[Array]) -> list[tuple[Array, Array]]:
        # A stack is split into matrices, which are stacked with all others of their size.
        single = [part for m in matrices for part in (m if m.ndim > 2 else m[None])]
        pairs: list[tuple[Array, Array]] = []
        outcomes = self._batches.run(DampedMatrices(single), self._eigh)
        for matrix, (pair, _, (error,)) in zip(single, outcomes, strict=True):
            if not error <= _EIGEN_ROUNDING * len(matrix):
                raise BackendError(
                    f"the eigenvectors of a {matrix.shape} matrix have an error of {error:.2g} "
                    f"times its largest entry; use the exponent -1, which is computed without "
                    f"eigenvectors."
                )
            pairs.append(pair)
        parts = iter(pairs)
        return [self._joined(matrix, parts) for matrix in matrices]

    def inverse_roots(
        self, matrices: Sequence[Array], dampings: Sequence[float], degrees: Sequence[int]
    ) -> list[Array | None]:
        return inverse_roots(self._device, self._batches, matrices, dampings, degrees)

    # -- private ----------------------------------------------------------------------------------

    def _factored(
        self,
        matrices: Sequence[Array],
        dampings: Sequence[float],
        compute: Callable[[Array, DType], tuple[Array, Array]],
        clamped: Callable[[Array, Array], Array],
        *,
        copies: int = COPIES,
        stacked: bool = False,
    ) -> Generator[None, None, list[Array]]:
        """Return results of positive definite matrices, or from eigenvalues for indefinite ones.

        ``compute`` returns results and error codes of a stack, which it may overwrite, for the type
        of the results. ``clamped`` returns the result of one matrix from its damped eigenvalues and
        its eigenvectors. ``copies`` and ``stacked`` are as for ``MatrixBatches.begin``. The
        generator yields once, after all operations are launched and before any number is read.
        """
        for damping in dampings:
            if not 0.0 <= damping < np.inf:
                raise InputError(f"the damping must be zero or positive and finite, got {damping}.")
        results: list[Any] = [None] * len(matrices)
        remaining, least = list(range(len(matrices))), list(dampings)
        for factor in _ATTEMPTS:
            tried = [matrices[i] for i in remaining]
            damped = DampedMatrices(tried, [factor * least[i] for i in remaining], floored=True)
            attempt = self._attempt(tried, compute)
            wait = self._batches.begin(damped, attempt, copies=copies, stacked=stacked)
            if factor == 1:
                yield
            for i, (result, (zero, level, trace), (code,)) in zip(remaining, wait(), strict=True):
                size = len(matrices[i])
                if zero and dampings[i] == 0.0:
                    raise InputError(f"a zero matrix {matrices[i].shape} needs a positive damping.")
                if code:
                    _LOG.warning(_FAILED_ATTEMPT, matrices[i].shape, trace / size, level)
                    least[i] = level / factor
                else:
                    results[i] = result
            remaining = [i for i in remaining if results[i] is None]
        pairs = self.eighs([matrices[i] for i in remaining])
        for i, pair in zip(remaining, pairs, strict=True):
            message = "a %s matrix is indefinite; its negative eigenvalues are replaced with zero"
            _LOG.warning(message, matrices[i].shape)
            result = clamped(self._xp.maximum(pair[0], 0.0) + least[i], pair[1])
            results[i] = self._xp.ascontiguousarray(result.astype(matrices[i].dtype))
        return results

    def _attempt(
        self, matrices: Sequence[Array], compute: Callable[[Array, DType], tuple[Array, Array]]
    ) -> Work:
        """Return an operation on stacks that returns results and error codes."""

        def attempt(stack: Array, indices: Sequence[int]) -> tuple[Array, Array]:
            results, codes = compute(stack, matrices[indices[0]].dtype)
            return results, self._batches.rows(codes)

        return attempt

    def _inverses(self, stack: Array, dtype: DType) -> tuple[Array, Array]:
        """Return the inverses of a stack, and codes that are zero where they exist."""
        if dtype == np.float32:  # the damping is at least the rounding: conditions are below 1e7
            codes = recursive_inverse.invert(self._device, stack)
        else:
            codes = self._device.solvers.cholesky(stack)
            lowers = self._xp.ascontiguousarray(stack.swapaxes(1, 2))
            K = self._device.solvers.solve_lower(lowers)
            stack = self._xp.ascontiguousarray(K.swapaxes(1, 2) @ K)
        return narrow(self._device, stack, dtype), codes

    def _roots(self, stack: Array, dtype: DType) -> tuple[Array, Array]:
        """Return the Cholesky factors of a stack, and codes that are zero where they exist."""
        codes = self._device.solvers.cholesky(stack)
        lower = self._xp.tril(stack.swapaxes(1, 2))
        return self._xp.ascontiguousarray(lower, dtype), codes

    def _eigh(self, stack: Array, indices: Sequence[int]) -> tuple[Sequence[object], Array]:
        """Return eigenvalues and eigenvectors of a stack, and the errors of the eigenvectors."""
        xp, count = self._xp, len(indices)
        values, vectors = xp.linalg.eigh(stack[0] if count == 1 else stack, UPLO="L")
        values, vectors = values.reshape(count, -1), vectors.reshape(stack.shape)
        largest = xp.maximum(abs(stack).max(axis=(1, 2)), float(np.finfo(np.float64).tiny))
        wrong = abs(stack @ vectors - vectors * values[:, None, :]).max(axis=(1, 2)) / largest
        eye = xp.eye(stack.shape[1], dtype=np.float64)
        skew = abs(vectors.swapaxes(1, 2) @ vectors - eye).max(axis=(1, 2))
        errors = self._batches.rows(xp.maximum(wrong, skew))
        return list(zip(values, vectors, strict=True)), errors

    def _joined(self, matrix: Array, pairs: Iterator[tuple[Array, Array]]) -> tuple[Array, Array]:
        """Return the next pair of ``pairs``, or the stacked pairs of all matrices of a stack."""
        if matrix.ndim == 2:
            return next(pairs)
        values, vectors = zip(*islice(pairs, len(matrix)), strict=True)
        return self._xp.stack(values), self._xp.stack(vectors)

    def _root(self, values: Array, vectors: Array) -> Array:
        """Return a triangular root of ``QΛQᵀ``: the matrix ``Rᵀ`` of ``√Λ Qᵀ = Q'R``."""
        xp = self._xp
        R = xp.linalg.qr(xp.sqrt(values)[:, None] * vectors.T, mode="r")
        lower: Array = (R * xp.where(xp.diagonal(R) < 0, -1.0, 1.0)[:, None]).T
        return lower


def _begin(steps: Generator[None, None, list[Array]]) -> Callable[[], list[Array]]:
    """Run a generator to its only yield; return a function that completes it."""
    next(steps)

    def finish() -> list[Array]:
        try:
            next(steps)
        except StopIteration as end:
            results: list[Array] = end.value
            return results
        raise AssertionError("the generator yields once")

    return finish


def _inverse(values: Array, vectors: Array) -> Array:
    """Return the symmetric matrix ``QΛ⁻¹Qᵀ``."""
    inverse = (vectors / values) @ vectors.T
    symmetric: Array = 0.5 * (inverse + inverse.T)
    return symmetric
