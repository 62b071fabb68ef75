"""Stacks of matrices of equal size on a GPU, with one read of the device for all of them.

Each operation converts its matrices to float64, as on a CPU. The device alone knows facts about a
matrix: is it finite, what is its trace, did its factorisation succeed. These facts are gathered
from all matrices and read once.

Float64 is used on devices with slow float64 too: an inverse costs ``d³`` operations, and a step of
Newton's iteration, which could repair a float32 inverse, costs ``4d³`` in float64.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from kfac_engine._types import Array, DType
from kfac_engine.backend.cuda.device import CupyDevice
from kfac_engine.backend.cuda.solvers import STACKED_SIZE, STREAMS
from kfac_engine.errors import NonFiniteError, ShapeError
from kfac_engine.kernels.symmetric import FACTS, Floor, widen

# Float64 matrices that are allocated at once for each matrix of a stack.
_COPIES = 5

# Computes results of a damped float64 stack: its arguments are the stack, which it may overwrite,
# and the indices of its matrices. Returns one result and one row of numbers for each matrix; the
# numbers are read from the device later.
Work: TypeAlias = Callable[[Array, Sequence[int]], tuple[Any, Array]]
_NO_FLOOR = Floor(0.0, 0.0)


class Outcome(NamedTuple):
    """Result of an operation on one matrix, with numbers read from the device.

    Attributes:
        result: Result of the operation, on the device.
        facts: Three numbers: one if the matrix is zero, the damping that was added, and the trace
            of the undamped matrix.
        numbers: Numbers that the operation returned.
    """

    result: Any
    facts: Array
    numbers: Array


@dataclass(frozen=True, slots=True)
class DampedMatrices:
    """Matrices with the dampings of their diagonals.

    Attributes:
        matrices: Square matrices of any sizes and types.
        dampings: One for each matrix; zero if None.
        floored: Whether dampings are raised to the rounding of the eigenvalues.
    """

    matrices: Sequence[Array]
    dampings: Sequence[float] | None = None
    floored: bool = False

    def dampings_of(self, indices: Sequence[int]) -> Array:
        """Return the dampings of some of the matrices, float64."""
        dampings = [self.dampings[i] if self.dampings else 0.0 for i in indices]
        return np.array(dampings, np.float64)

    def floor(self, dtype: DType) -> Floor:
        """Return the least damping of matrices of an element type."""
        limits = np.finfo(dtype)
        return Floor(float(limits.eps), float(limits.tiny)) if self.floored else _NO_FLOOR


@dataclass(frozen=True, slots=True)
class _Launched:
    """Operation on matrices of one size that was launched on the device.

    Attributes:
        results: One for each matrix.
        rows: Numbers that are still on the device, ``(matrices of a stack, numbers)`` each.
        streams: Streams of the operation.
    """

    results: list[object]
    rows: list[Array]
    streams: Sequence[Any]


class MatrixBatches:
    """Operations on many matrices of one device, stacked by size and element type.

    Args:
        device: The GPU.
        scratch_bytes: Bound of the working memory; a single matrix may take more.
    """

    def __init__(self, device: CupyDevice, scratch_bytes: int) -> None:
        self._device = device
        self._xp = device.xp
        self._scratch_bytes = scratch_bytes

    def run(self, given: DampedMatrices, work: Work, *, copies: int = _COPIES) -> list[Outcome]:
        """Apply an operation to stacks of matrices, and read the device once.

        Args:
            given: The matrices.
            work: Operation on a stack.
            copies: Float64 matrices that it allocates at once for each matrix of a stack.

        Returns:
            One outcome for each matrix, with its numbers on the host.

        Raises:
            ShapeError: A matrix is not square.
            NonFiniteError: A matrix holds NaN or infinity.
        """
        return self.begin(given, work, copies=copies)()

    def begin(
        self, given: DampedMatrices, work: Work, *, copies: int = _COPIES
    ) -> Callable[[], list[Outcome]]:
        """Launch ``run`` and return a function that waits for its outcomes.

        Args:
            given: The matrices.
            work: Operation on a stack.
            copies: As for ``run``.

        Returns:
            A function that reads the device once. It raises NonFiniteError for a matrix with NaN or
            infinity.

        Raises:
            ShapeError: A matrix is not square.
        """
        groups: dict[tuple[int, str], list[int]] = {}
        for i, matrix in enumerate(given.matrices):
            if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size:
                raise ShapeError(f"a square matrix is needed, got one of shape {matrix.shape}.")
            groups.setdefault((len(matrix), matrix.dtype.char), []).append(i)
        launched = [
            self._device.within_memory(
                partial(self._launch, given, indices, work, copies), self._scratch_bytes
            )
            for indices in groups.values()
        ]
        order = [i for indices in groups.values() for i in indices]

        def finish() -> list[Outcome]:
            if not launched:
                return []
            for group in launched:
                self._device.solvers.join(group.streams)
            rows = self._xp.concatenate([row for group in launched for row in group.rows])
            numbers = self._device.download(rows)
            results = [result for group in launched for result in group.results]
            ordered = sorted(zip(order, results, numbers, strict=True), key=lambda item: item[0])
            for i, _, (finite, *_) in ordered:
                if not finite:
                    self._refuse(given.matrices[i])
            return [Outcome(result, row[1:FACTS], row[FACTS:]) for _, result, row in ordered]

        return finish

    def rows(self, *columns: Array) -> Array:
        """Return columns ``(n,)`` as rows ``(n, columns)``, float64."""
        rows: Array = self._xp.stack([column.astype(np.float64) for column in columns], axis=1)
        return rows

    # -- private ----------------------------------------------------------------------------------

    def _launch(
        self,
        given: DampedMatrices,
        indices: Sequence[int],
        work: Work,
        copies: int,
        scratch_bytes: int,
    ) -> _Launched:
        """Launch an operation on matrices of one size."""
        # Small matrices are stacked as memory allows. Each large matrix is a stack of its own, on
        # one of several streams.
        first = given.matrices[indices[0]]
        size, dtype = len(first), first.dtype
        most = max(1, scratch_bytes // (copies * 8 * size * size))
        large = size > STACKED_SIZE
        step = 1 if large else most
        streams = self._device.solvers.fork(min(most, STREAMS, len(indices)) if large else 0)
        group = _Launched([], [], streams)
        try:
            for start, stream in zip(range(0, len(indices), step), cycle(streams), strict=False):
                chunk = indices[start : start + step]
                with stream:
                    stack = self._stacked([given.matrices[i] for i in chunk])
                    dampings = self._device.upload(given.dampings_of(chunk))
                    # `widen` writes zeros for NaN and infinity: libraries may fail on those.
                    wide, facts = widen(self._device, stack, dampings, given.floor(dtype))
                    results, numbers = work(wide, chunk)
                    group.results.extend(results)
                    group.rows.append(self._xp.concatenate([facts, numbers], axis=1))
        except MemoryError:
            self._device.solvers.join(streams)
            raise
        return group

    def _stacked(self, matrices: Sequence[Array]) -> Array:
        """Return a contiguous stack ``(n, d, d)``; a single matrix is not copied."""
        single = len(matrices) == 1
        stack: Array = self._xp.ascontiguousarray(
            matrices[0][None] if single else self._xp.stack(matrices)
        )
        return stack

    def _refuse(self, matrix: Array) -> None:
        """Raise NonFiniteError for the first entry of a matrix that is not finite."""
        bad = divmod(int((~self._xp.isfinite(matrix)).argmax()), len(matrix))
        raise NonFiniteError(
            f"a {matrix.shape} factor holds {float(matrix[bad])} at {list(bad)}; look for overflow "
            f"in the statistics it was averaged from."
        )
