"""Inverses, roots and eigenvectors of many matrices on a GPU.

Matrices of equal side are stacked, in float64 as on a CPU. What only the device knows (is a matrix
finite, how large is it, did its factorisation succeed) is gathered and read once for all of them;
only those that failed are tried again.

Float64 throughout, on devices with slow float64 too: an inverse costs ``d³`` operations, and one
step of Newton's iteration, which could repair a float32 inverse, ``4d³`` in float64.
"""

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from kfac_engine._types import Array, DType
from kfac_engine.backend.cuda.device import CupyDevice
from kfac_engine.backend.cuda.solvers import STACKED_SIDE, STREAMS
from kfac_engine.errors import BackendError, InputError, NonFiniteError, ShapeError
from kfac_engine.kernels.symmetric import FACTS, Floor, narrow, widen

_LOG = logging.getLogger(__name__)

# Dampings tried before the eigenvalues are clamped: each ten times the one before.
_LADDER = (1, 10, 100, 1000)
_NOT_YET = "a %s matrix of mean eigenvalue %.3g is not positive definite with damping %.3g"
# Float64 matrices that are alive at once for each one that is worked on.
_COPIES = 5
# Eigenvectors are taken if they are right to this part of the largest entry, times the side.
_EIGEN_ROUNDING = 1e-12

# Takes a damped float64 stack and which matrices it holds: results, and numbers to be read, one row
# each. The stack is symmetric, and its own to spoil.
Work: TypeAlias = Callable[[Array, Sequence[int]], tuple[Any, Array]]
_NO_FLOOR = Floor(0.0, 0.0)


class Told(NamedTuple):
    """What the device told of a matrix.

    Attributes:
        result: Of the work.
        facts: Whether the matrix is zero, the damping added, the trace without.
        numbers: Of the work.
    """

    result: Any
    facts: Array
    numbers: Array


@dataclass(frozen=True, slots=True)
class Damped:
    """Matrices, and what is added to their diagonals.

    Attributes:
        matrices: Any sides and types.
        dampings: One a matrix; none at all where left out.
        floored: Whether to add what rounding may have moved the eigenvalues by, where that is more.
    """

    matrices: Sequence[Array]
    dampings: Sequence[float] | None = None
    floored: bool = False

    def asked(self, which: Sequence[int]) -> Array:
        """Dampings of some of them."""
        return np.array([self.dampings[i] if self.dampings else 0.0 for i in which], np.float64)

    def floor(self, kind: DType) -> Floor:
        """The least damping of matrices of a type."""
        limits = np.finfo(kind)
        return Floor(float(limits.eps), float(limits.tiny)) if self.floored else _NO_FLOOR


@dataclass(frozen=True, slots=True)
class _Begun:
    """Work on matrices of one side.

    Attributes:
        results: One a matrix.
        rows: Numbers that are still to be read, some rows a piece.
        streams: Where the work is done.
    """

    results: list[object]
    rows: list[Array]
    streams: Sequence[Any]


class CupyInverses:
    """Operations on many matrices of one device, with the results of the NumPy backend.

    Args:
        device: The GPU.
        scratch_bytes: Upper bound of the working memory, but for a single matrix.
    """

    def __init__(self, device: CupyDevice, scratch_bytes: int) -> None:
        self._device = device
        self._xp = device.xp
        self._scratch_bytes = scratch_bytes

    def begin_damped_inverses(
        self, matrices: Sequence[Array], dampings: Sequence[float]
    ) -> Callable[[], list[Array]]:
        def inverse(roots: Array, kind: DType) -> Array:
            whole: Array = narrow(self._device, self._device.solvers.inverse(roots), kind)
            return whole

        return _begun(self._factored(matrices, dampings, inverse, _inverse))

    def damped_choleskys(self, matrices: Sequence[Array], dampings: Sequence[float]) -> list[Array]:
        def root(roots: Array, kind: DType) -> Array:
            lower: Array = self._xp.tril(roots).astype(kind)
            return lower

        return _begun(self._factored(matrices, dampings, root, self._root))()

    def triangular_inverses(self, lowers: Sequence[Array]) -> list[Array]:
        xp = self._xp

        def solved(stack: Array, which: Sequence[int]) -> tuple[Sequence[Array], Array]:
            zeros = xp.diagonal(stack, axis1=1, axis2=2) == 0
            first = xp.where(zeros.any(axis=1), zeros.argmax(axis=1), -1)
            inverses = self._device.solvers.solve_lower(stack)
            return inverses.astype(lowers[which[0]].dtype), self._rows(first)

        results = []
        for inverse, _, (first,) in self.run(Damped(lowers), solved):
            if first >= 0:
                raise InputError(
                    f"a triangular matrix with zero at [{first:.0f}, {first:.0f}] has no inverse."
                )
            results.append(inverse)
        return results

    def eighs(self, matrices: Sequence[Array]) -> list[tuple[Array, Array]]:
        # A stack is taken apart, to meet others of its side, and put together again.
        single = [part for m in matrices for part in (m if m.ndim > 2 else m[None])]
        pairs: list[tuple[Array, Array]] = []
        told = self.run(Damped(single), self._eigh)
        for matrix, (pair, _, (error,)) in zip(single, told, strict=True):
            if not error <= _EIGEN_ROUNDING * len(matrix):
                raise BackendError(
                    f"the eigenvectors of a {matrix.shape} matrix are wrong by {error:.2g} of its "
                    f"largest entry; an inverse (exponent -1) needs none."
                )
            pairs.append(pair)
        parts = iter(pairs)
        return [self._together(matrix, parts) for matrix in matrices]

    def run(self, given: Damped, work: Work, *, copies: int = _COPIES) -> list[Told]:
        """Do work on stacks of matrices of equal side, and read the device once.

        Args:
            given: The matrices.
            work: What to do with stacks of them.
            copies: Float64 matrices that are alive at once for each one worked on.

        Returns:
            The result of each matrix, with its numbers on the host.
        """
        return self._begin(given, work, copies)()

    # -- private ----------------------------------------------------------------------------------

    def _factored(
        self,
        matrices: Sequence[Array],
        dampings: Sequence[float],
        finish: Callable[[Array, DType], Array],
        clamped: Callable[[Array, Array], Array],
    ) -> Generator[None, None, list[Array]]:
        """What ``finish`` makes of a stack of Cholesky roots; ``clamped`` where there is no root.

        Args:
            matrices: Symmetric.
            dampings: For each matrix.
            finish: Takes a stack of roots and the type of the result.
            clamped: Takes damped eigenvalues and eigenvectors of one matrix.

        Yields:
            Once, when everything was begun and nothing was read.

        Returns:
            One a matrix, in its type.

        Raises:
            InputError: A damping is wrong, or zero for a matrix that is zero.
        """
        for damping in dampings:
            if not 0.0 <= damping < np.inf:
                raise InputError(f"the damping must be zero or positive and finite, got {damping}.")
        results: list[Any] = [None] * len(matrices)
        left, least = list(range(len(matrices))), list(dampings)
        for factor in _LADDER:
            tried = [matrices[i] for i in left]
            given = Damped(tried, [factor * least[i] for i in left], floored=True)
            wait = self._begin(given, self._attempt(tried, finish))
            if factor == 1:
                yield
            for i, (result, (zero, level, trace), (code,)) in zip(left, wait(), strict=True):
                side = len(matrices[i])
                if zero and dampings[i] == 0.0:
                    raise InputError(f"a zero matrix {matrices[i].shape} needs a positive damping.")
                if code:
                    _LOG.warning(_NOT_YET, matrices[i].shape, trace / side, level)
                    least[i] = level / factor
                else:
                    results[i] = result
            left = [i for i in left if results[i] is None]
        for i, pair in zip(left, self.eighs([matrices[i] for i in left]), strict=True):
            what = "a %s matrix is indefinite; its negative eigenvalues are cut off"
            _LOG.warning(what, matrices[i].shape)
            whole = clamped(self._xp.maximum(pair[0], 0.0) + least[i], pair[1])
            results[i] = self._xp.ascontiguousarray(whole.astype(matrices[i].dtype))
        return results

    def _attempt(self, matrices: Sequence[Array], finish: Callable[[Array, DType], Array]) -> Work:
        """Factors stacks; tells the codes."""

        def attempt(stack: Array, which: Sequence[int]) -> tuple[Array, Array]:
            code = self._device.solvers.cholesky(stack)
            return finish(stack, matrices[which[0]].dtype), self._rows(code)

        return attempt

    def _eigh(self, stack: Array, which: Sequence[int]) -> tuple[Sequence[object], Array]:
        """Decomposes stacks; tells how wrong the eigenvectors are."""
        xp, whole = self._xp, stack
        values, vectors = xp.linalg.eigh(whole[0] if len(which) == 1 else whole, UPLO="L")
        values, vectors = values.reshape(len(which), -1), vectors.reshape(stack.shape)
        largest = xp.maximum(abs(whole).max(axis=(1, 2)), float(np.finfo(np.float64).tiny))
        wrong = abs(whole @ vectors - vectors * values[:, None, :]).max(axis=(1, 2)) / largest
        eye = xp.eye(stack.shape[1], dtype=np.float64)
        skew = abs(vectors.swapaxes(1, 2) @ vectors - eye).max(axis=(1, 2))
        return list(zip(values, vectors, strict=True)), self._rows(xp.maximum(wrong, skew))

    def _begin(self, given: Damped, work: Work, copies: int = _COPIES) -> Callable[[], list[Told]]:
        """The work is begun; who calls the result waits for it, and reads the device once.

        Args:
            given: The matrices.
            work: What to do with stacks of them.
            copies: As for ``run``.

        Returns:
            Gives the result of each matrix, with its numbers on the host; a NonFiniteError for a
            matrix with NaN or infinity.

        Raises:
            ShapeError: One is not square.
        """
        groups: dict[tuple[int, str], list[int]] = {}
        for i, matrix in enumerate(given.matrices):
            if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size:
                raise ShapeError(f"a square matrix is needed, got one of shape {matrix.shape}.")
            groups.setdefault((len(matrix), matrix.dtype.char), []).append(i)
        begun = [
            self._device.within_memory(
                partial(self._group, given, which, work, copies), self._scratch_bytes
            )
            for which in groups.values()
        ]
        order = [i for which in groups.values() for i in which]

        def finished() -> list[Told]:
            if not begun:
                return []
            for group in begun:
                self._device.solvers.join(group.streams)
            rows = self._xp.concatenate([row for group in begun for row in group.rows])
            numbers = self._device.download(rows)
            results = [result for group in begun for result in group.results]
            found = sorted(zip(order, results, numbers, strict=True), key=lambda one: one[0])
            for i, _, (finite, *_) in found:
                if not finite:
                    self._refuse(given.matrices[i])
            return [Told(result, row[1:FACTS], row[FACTS:]) for _, result, row in found]

        return finished

    def _group(
        self, given: Damped, which: Sequence[int], work: Work, copies: int, scratch: int
    ) -> _Begun:
        """Matrices of one side: small ones some at a time, large ones on streams of their own."""
        first = given.matrices[which[0]]
        side, kind = len(first), first.dtype
        most = max(1, scratch // (copies * 8 * side * side))
        large = side > STACKED_SIDE
        size = 1 if large else most
        streams = self._device.solvers.fork(min(most, STREAMS, len(which)) if large else 0)
        group = _Begun([], [], streams)
        try:
            for start, stream in zip(range(0, len(which), size), cycle(streams), strict=False):
                chunk = which[start : start + size]
                with stream:
                    stack = self._stacked([given.matrices[i] for i in chunk])
                    asked = self._device.upload(given.asked(chunk))
                    # Libraries are not shown what they may stumble over: NaN and infinity.
                    wide, facts = widen(self._device, stack, asked, given.floor(kind))
                    found, numbers = work(wide, chunk)
                    group.results.extend(found)
                    group.rows.append(self._xp.concatenate([facts, numbers], axis=1))
        except MemoryError:
            self._device.solvers.join(streams)
            raise
        return group

    def _stacked(self, matrices: Sequence[Array]) -> Array:
        """``(n, d, d)``, contiguous; a single matrix is not copied."""
        single = len(matrices) == 1
        stack: Array = self._xp.ascontiguousarray(
            matrices[0][None] if single else self._xp.stack(matrices)
        )
        return stack

    def _rows(self, *columns: Array) -> Array:
        """Columns ``(n,)`` as ``(n, columns)``, float64."""
        rows: Array = self._xp.stack([column.astype(np.float64) for column in columns], axis=1)
        return rows

    def _together(self, matrix: Array, pairs: Iterator[tuple[Array, Array]]) -> tuple[Array, Array]:
        """The next pair; for a stack as many as it has matrices."""
        if matrix.ndim == 2:
            return next(pairs)
        values, vectors = zip(*islice(pairs, len(matrix)), strict=True)
        return self._xp.stack(values), self._xp.stack(vectors)

    def _root(self, values: Array, vectors: Array) -> Array:
        """A triangular root of ``QΛQᵀ`` that cannot fail: with ``√Λ Qᵀ = Q'R`` it is ``Rᵀ``."""
        xp = self._xp
        R = xp.linalg.qr(xp.sqrt(values)[:, None] * vectors.T, mode="r")
        lower: Array = (R * xp.where(xp.diagonal(R) < 0, -1.0, 1.0)[:, None]).T
        return lower

    def _refuse(self, matrix: Array) -> None:
        """Say which entry of a matrix is not finite."""
        bad = divmod(int((~self._xp.isfinite(matrix)).argmax()), len(matrix))
        raise NonFiniteError(
            f"a {matrix.shape} factor holds {float(matrix[bad])} at {list(bad)}; look for overflow "
            f"in the statistics it was averaged from."
        )


def _begun(steps: Generator[None, None, list[Array]]) -> Callable[[], list[Array]]:
    """Take the first step now; the others when the result is called."""
    next(steps)

    def finished() -> list[Array]:
        try:
            next(steps)
        except StopIteration as end:
            results: list[Array] = end.value
            return results
        raise AssertionError("there are two steps")

    return finished


def _inverse(values: Array, vectors: Array) -> Array:
    """``QΛ⁻¹Qᵀ``, symmetric."""
    inverse = (vectors / values) @ vectors.T
    symmetric: Array = 0.5 * (inverse + inverse.T)
    return symmetric
