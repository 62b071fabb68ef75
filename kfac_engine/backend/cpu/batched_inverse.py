"""Many matrices at once: small ones of equal side stacked, the others side by side."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from kfac_engine._types import Array, DType
from kfac_engine.backend.cpu import inverse
from kfac_engine.backend.threads import Workers

# Sides up to which a stack is quicker than its matrices one by one: 64 inverses took, in ms, 6.7
# one by one and 0.3 stacked at side 8, 6.7 and 0.8 at 16, 7.0 and 3.0 at 32, 11 and 16 at 48.
_STACKED = 32
# Float64 stacks alive while one is factored and inverted.
_COPIES = 4
# Float64 matrices that one may take alone: damped and its inverse; eigenvectors and LAPACK's work.
_INVERTED = 2
_DECOMPOSED = 5

Stacked = Callable[[Sequence[int]], Array | None]


def damped_inverses(
    matrices: Sequence[Array], dampings: Sequence[float], workers: Workers, scratch_bytes: int
) -> list[Array]:
    """The ``damped_inverse`` of each matrix.

    Args:
        matrices: Symmetric.
        dampings: For each matrix.
        workers: Share the work.
        scratch_bytes: Bound of what is done side by side; one matrix alone may take more.

    Returns:
        New matrices.
    """

    def stacked(which: Sequence[int]) -> Array | None:
        found = _factors(matrices, dampings, which)
        if found is None:
            return None
        K = np.linalg.inv(found)
        inverses: Array = K.swapaxes(1, 2) @ K
        return 0.5 * (inverses + inverses.swapaxes(1, 2))

    def alone(i: int) -> Array:
        return inverse.damped_inverse(matrices[i], dampings[i], workers)

    return _each(matrices, stacked, alone, workers, _room(matrices, _INVERTED, scratch_bytes))


def damped_choleskys(
    matrices: Sequence[Array], dampings: Sequence[float], workers: Workers, scratch_bytes: int
) -> list[Array]:
    """The ``damped_cholesky`` of each matrix; arguments as for ``damped_inverses``."""

    def alone(i: int) -> Array:
        return inverse.damped_cholesky(matrices[i], dampings[i], workers)

    stacked = partial(_factors, matrices, dampings)
    return _each(matrices, stacked, alone, workers, _room(matrices, _INVERTED, scratch_bytes))


def triangular_inverses(
    lowers: Sequence[Array], workers: Workers, scratch_bytes: int
) -> list[Array]:
    """The ``triangular_inverse`` of each matrix; arguments as for ``damped_inverses``."""

    def stacked(which: Sequence[int]) -> Array | None:
        stack = np.tril(np.stack([lowers[i] for i in which]).astype(np.float64))
        regular = np.isfinite(stack).all() and np.einsum("nii->ni", stack).all()
        return np.tril(np.linalg.inv(stack)) if regular else None

    def alone(i: int) -> Array:
        return inverse.triangular_inverse(lowers[i], workers)

    return _each(lowers, stacked, alone, workers, _room(lowers, _INVERTED, scratch_bytes))


def eighs(
    matrices: Sequence[Array], workers: Workers, scratch_bytes: int
) -> list[tuple[Array, Array]]:
    """The ``eigh`` of each matrix, ``eigh_stack`` of each stack; arguments as above."""
    pairs: dict[int, tuple[Array, Array]] = {}

    def decompose(i: int) -> None:
        pairs[i] = inverse.eigh(matrices[i], workers)

    for i, stack in enumerate(matrices):
        if stack.ndim > 2:
            pairs[i] = _decomposed(stack, workers)
    rest = [i for i, matrix in enumerate(matrices) if matrix.ndim <= 2]
    room = _room(matrices, _DECOMPOSED, scratch_bytes) // _DECOMPOSED
    _side_by_side(matrices, rest, decompose, workers, room)
    return [pairs[i] for i in range(len(matrices))]


def _decomposed(stack: Array, workers: Workers) -> tuple[Array, Array]:
    """Eigenvalues and eigenvectors of a stack, a part of it in each thread."""
    parts: dict[int, tuple[Array, Array]] = {}

    def decompose(rows: slice) -> None:
        parts[rows.start] = inverse.eigh_stack(stack[rows])

    bands = workers.bands(len(stack))
    if len(bands) == 1:
        return inverse.eigh_stack(stack)
    workers.run([partial(decompose, rows) for rows in bands])
    ordered = [parts[rows.start] for rows in bands]
    return np.concatenate([v for v, _ in ordered]), np.concatenate([Q for _, Q in ordered])


def _each(
    matrices: Sequence[Array],
    stacked: Stacked,
    alone: Callable[[int], Array],
    workers: Workers,
    room: int,
) -> list[Array]:
    """A matrix for each, from stacks of small ones where that succeeds, else each alone."""
    results: dict[int, Array] = {}
    groups: dict[tuple[int, DType], list[int]] = defaultdict(list)
    for i, matrix in enumerate(matrices):
        if matrix.ndim == 2 and 0 < matrix.shape[0] == matrix.shape[1] <= _STACKED:
            groups[len(matrix), matrix.dtype].append(i)
    for (_, dtype), group in groups.items():
        many = max(room // (_COPIES * _float64_bytes(matrices[group[0]])), 1)
        for which in (group[i : i + many] for i in range(0, len(group), many)):
            found = stacked(which) if len(which) > 1 else None
            if found is not None:
                results |= zip(which, found.astype(dtype), strict=True)

    def keep(i: int) -> None:
        results[i] = alone(i)

    rest = [i for i in range(len(matrices)) if i not in results]
    _side_by_side(matrices, rest, keep, workers, room)
    return [results[i] for i in range(len(matrices))]


def _side_by_side(
    matrices: Sequence[Array],
    which: Sequence[int],
    work: Callable[[int], None],
    workers: Workers,
    room: int,
) -> None:
    """Work on each matrix, on one thread each and the longest first.

    A matrix that would keep one thread busy for longer than all threads need for everything, or
    that has no room beside others of its size, comes before and is worked on by all.
    """
    costs = {i: float(len(matrices[i])) ** 3 for i in which}
    share = sum(costs.values()) / workers.count
    large = [i for i in which if costs[i] > share or _too_large(matrices[i], workers, room)]
    for i in large:
        work(i)
    order = sorted(set(which).difference(large), key=lambda i: (-costs[i], i))
    if len(order) == 1:
        work(order[0])
    elif order:
        workers.run([partial(work, i) for i in order])


def _too_large(matrix: Array, workers: Workers, room: int) -> bool:
    return _float64_bytes(matrix) * workers.count > room


def _room(matrices: Sequence[Array], copies: int, scratch_bytes: int) -> int:
    """Bytes for what is done side by side: no less than the largest takes alone."""
    return max(scratch_bytes, copies * max(map(_float64_bytes, matrices), default=0))


def _float64_bytes(matrix: Array) -> int:
    return matrix.size * np.dtype(np.float64).itemsize


def _factors(
    matrices: Sequence[Array], dampings: Sequence[float], which: Sequence[int]
) -> Array | None:
    """Cholesky factors of some damped matrices of equal side; None if one is unfit for it."""
    lower = np.tril(np.stack([matrices[i] for i in which]).astype(np.float64))
    levels = np.array([dampings[i] for i in which], np.float64)
    least = inverse.least_dampings(lower, levels, matrices[which[0]].dtype)
    if least is None:
        return None
    diagonals = np.einsum("nii->ni", lower)
    diagonals += least[:, None]
    try:
        factors: Array = np.linalg.cholesky(lower)
    except np.linalg.LinAlgError:
        return None
    return factors
