"""Implements batched linear algebra on a CPU.

Small matrices of equal size are stacked for one call of LAPACK. Other matrices are computed in
parallel, each on one thread. All threads compute a matrix that takes longer than the others
together.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from kfac_engine._types import Array, DType
from kfac_engine.backend.cpu import inverse
from kfac_engine.backend.threads import Workers, equal_slices

# Largest size at which a stack is faster than its matrices one after the other. For 64 inverses of
# size 32, the stack takes 3 ms and single matrices 7 ms; for size 48, 16 ms and 11 ms.
_STACKED = 32
# Number of float64 stacks that are allocated at once while one stack is factored and inverted.
_COPIES = 4
# Number of float64 matrices for one inverse (the damped matrix and the inverse), and for one
# decomposition (the eigenvectors and the workspace of LAPACK).
_INVERTED = 2
_DECOMPOSED = 5

Stacked = Callable[[Sequence[int]], Array | None]


class NumpyLinearAlgebra:
    """Batched linear algebra on NumPy arrays.

    Matrices that are computed in parallel have at most ``scratch_bytes``; one matrix may take more.
    """

    def __init__(self, workers: Workers, scratch_bytes: int) -> None:
        self._workers = workers
        self._scratch_bytes = scratch_bytes

    def begin_damped_inverses(
        self, matrices: Sequence[Array], dampings: Sequence[float]
    ) -> Callable[[], list[Array]]:
        def stacked(indices: Sequence[int]) -> Array | None:
            factors = _factors(matrices, dampings, indices)
            if factors is None:
                return None
            K = np.linalg.inv(factors)
            inverses: Array = K.swapaxes(1, 2) @ K
            return 0.5 * (inverses + inverses.swapaxes(1, 2))

        def alone(i: int) -> Array:
            return inverse.damped_inverse(matrices[i], dampings[i], self._workers)

        inverses = self._each(matrices, stacked, alone)
        return lambda: inverses

    def damped_choleskys(self, matrices: Sequence[Array], dampings: Sequence[float]) -> list[Array]:
        def alone(i: int) -> Array:
            return inverse.damped_cholesky(matrices[i], dampings[i], self._workers)

        return self._each(matrices, partial(_factors, matrices, dampings), alone)

    def triangular_inverses(self, lowers: Sequence[Array]) -> list[Array]:
        def stacked(indices: Sequence[int]) -> Array | None:
            stack = np.tril(np.stack([lowers[i] for i in indices]).astype(np.float64))
            regular = np.isfinite(stack).all() and np.einsum("nii->ni", stack).all()
            return np.tril(np.linalg.inv(stack)) if regular else None

        def alone(i: int) -> Array:
            return inverse.triangular_inverse(lowers[i], self._workers)

        return self._each(lowers, stacked, alone)

    def eighs(self, matrices: Sequence[Array]) -> list[tuple[Array, Array]]:
        pairs: dict[int, tuple[Array, Array]] = {}

        def decompose(i: int) -> None:
            pairs[i] = inverse.eigh(matrices[i], self._workers)

        for i, stack in enumerate(matrices):
            if stack.ndim > 2:
                pairs[i] = _eigh_of_stack(stack, self._workers)
        single = [i for i, matrix in enumerate(matrices) if matrix.ndim <= 2]
        self._in_parallel(
            matrices, single, decompose, self._budget(matrices, _DECOMPOSED) // _DECOMPOSED
        )
        return [pairs[i] for i in range(len(matrices))]

    def inverse_roots(
        self, matrices: Sequence[Array], dampings: Sequence[float], degrees: Sequence[int]
    ) -> list[Array | None]:
        del dampings, degrees  # on a CPU eigenvectors are faster
        return [None] * len(matrices)

    # -- private ----------------------------------------------------------------------------------

    def _each(
        self, matrices: Sequence[Array], stacked: Stacked, alone: Callable[[int], Array]
    ) -> list[Array]:
        """Return a result for each matrix, in its element type.

        ``stacked`` computes the results of small matrices of one size from their indices, or
        returns None if they must be computed one by one. ``alone`` computes the result of one
        matrix.
        """
        results: dict[int, Array] = {}
        budget = self._budget(matrices, _INVERTED)
        groups: dict[tuple[int, DType], list[int]] = defaultdict(list)
        for i, matrix in enumerate(matrices):
            if matrix.ndim == 2 and 0 < matrix.shape[0] == matrix.shape[1] <= _STACKED:
                groups[len(matrix), matrix.dtype].append(i)
        for (_, dtype), group in groups.items():
            count = max(budget // (_COPIES * _float64_bytes(matrices[group[0]])), 1)
            for indices in (group[i : i + count] for i in range(0, len(group), count)):
                stack = stacked(indices) if len(indices) > 1 else None
                if stack is not None:
                    results |= zip(indices, stack.astype(dtype), strict=True)

        def compute(i: int) -> None:
            results[i] = alone(i)

        remaining = [i for i in range(len(matrices)) if i not in results]
        self._in_parallel(matrices, remaining, compute, budget)
        return [results[i] for i in range(len(matrices))]

    def _in_parallel(
        self,
        matrices: Sequence[Array],
        indices: Sequence[int],
        compute: Callable[[int], None],
        budget: int,
    ) -> None:
        """Call ``compute`` for each matrix on one thread, the largest first.

        A matrix is computed first, and by all threads, in two cases. One thread would take longer
        for it than all threads for all matrices, or the budget is too small for a matrix of its
        size on each thread.
        """
        workers = self._workers
        costs = {i: float(len(matrices[i])) ** 3 for i in indices}
        even = sum(costs.values()) / workers.count
        large = [
            i
            for i in indices
            if costs[i] > even or _float64_bytes(matrices[i]) * workers.count > budget
        ]
        for i in large:
            compute(i)
        order = sorted(set(indices).difference(large), key=lambda i: (-costs[i], i))
        if len(order) == 1:
            compute(order[0])
        elif order:
            workers.run([partial(compute, i) for i in order])

    def _budget(self, matrices: Sequence[Array], copies: int) -> int:
        """Return the bytes for matrices in parallel, enough for the largest matrix."""
        largest = max(map(_float64_bytes, matrices), default=0)
        return max(self._scratch_bytes, copies * largest)


def _eigh_of_stack(stack: Array, workers: Workers) -> tuple[Array, Array]:
    """Return eigenvalues and eigenvectors of a stack of matrices, computed in threads."""
    parts: dict[int, tuple[Array, Array]] = {}

    def decompose(rows: slice) -> None:
        parts[rows.start] = inverse.eigh_stack(stack[rows])

    bands = equal_slices(len(stack), workers.free)
    if len(bands) == 1:
        return inverse.eigh_stack(stack)
    workers.run([partial(decompose, rows) for rows in bands])
    ordered = [parts[rows.start] for rows in bands]
    return np.concatenate([v for v, _ in ordered]), np.concatenate([Q for _, Q in ordered])


def _float64_bytes(matrix: Array) -> int:
    return matrix.size * np.dtype(np.float64).itemsize


def _factors(
    matrices: Sequence[Array], dampings: Sequence[float], indices: Sequence[int]
) -> Array | None:
    """Return Cholesky factors of damped matrices of one size; None if a matrix needs retries."""
    lower = np.tril(np.stack([matrices[i] for i in indices]).astype(np.float64))
    levels = np.array([dampings[i] for i in indices], np.float64)
    least = inverse.least_dampings(lower, levels, matrices[indices[0]].dtype)
    if least is None:
        return None
    diagonals = np.einsum("nii->ni", lower)
    diagonals += least[:, None]
    try:
        factors: Array = np.linalg.cholesky(lower)
    except np.linalg.LinAlgError:
        return None
    return factors
