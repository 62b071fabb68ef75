"""Computes with stacks of matrices on a GPU, and reads the device once for all of them.

Each operation converts its matrices to float64, as on a CPU. The host needs facts about each
matrix: whether it is finite, its trace, and whether its factorisation succeeded. The device
collects these facts for all matrices, and the host reads them once.

Devices with slow float64 use float64, too. An inverse costs ``d³`` operations, and a step of
Newton's iteration that corrects a float32 inverse costs ``4d³`` operations in float64.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from kfac_engine._types import Array, DType
from kfac_engine.backend.cuda.device import STACKED_SIZE, STREAMS, CupyDevice
from kfac_engine.errors import NonFiniteError, ShapeError
from kfac_engine.kernels.symmetric import FACTS, Floor, widen

# Number of float64 matrices that are allocated at once for each matrix of a stack, and the largest
# number of any operation (inverse roots).
COPIES = 5
MOST_COPIES = 10

# Operation on a damped float64 stack. Its arguments are the stack, which it may overwrite, and the
# indices of the matrices. It returns one result and one row of numbers for each matrix. The host
# reads the numbers later.
Work: TypeAlias = Callable[[Array, Sequence[int]], tuple[Any, Array]]
_NO_FLOOR = Floor(0.0, 0.0)


class Outcome(NamedTuple):
    """Result of an operation on one matrix, with numbers read from the device."""

    result: Any  # result of the operation, on the device
    # Three numbers: 1 if the matrix is zero, the added damping, and the trace of the undamped
    # matrix.
    facts: Array
    numbers: Array  # numbers that the operation returned


@dataclass(frozen=True, slots=True)
class DampedMatrices:
    """Matrices with their dampings."""

    matrices: Sequence[Array]  # square matrices of any sizes and types
    dampings: Sequence[float] | None = None  # the damping of each matrix; zeros if None
    floored: bool = False  # whether dampings are raised to the rounding error of the eigenvalues

    def dampings_of(self, indices: Sequence[int]) -> Array:
        """Return the dampings of the matrices with these indices, float64."""
        dampings = [self.dampings[i] if self.dampings else 0.0 for i in indices]
        return np.array(dampings, np.float64)

    def floor(self, dtype: DType) -> Floor:
        """Return the least damping of matrices of an element type."""
        limits = np.finfo(dtype)
        return Floor(float(limits.eps), float(limits.tiny)) if self.floored else _NO_FLOOR


class MatrixBatches:
    """Runs operations on many matrices of one device, stacked by size and element type.

    ``scratch_bytes`` bounds the scratch memory. It may be exceeded up to ``MOST_COPIES`` float64
    matrices of the largest size.
    """

    def __init__(self, device: CupyDevice, scratch_bytes: int) -> None:
        self._device = device
        self._xp = device.xp
        self._scratch_bytes = scratch_bytes

    def run(self, damped: DampedMatrices, work: Work, *, copies: int = COPIES) -> list[Outcome]:
        """Return the outcomes of an operation on stacks of matrices; the device is read once.

        There is one outcome for each matrix, with its numbers on the host. The operation allocates
        ``copies`` float64 matrices at once for each matrix. Errors are as for ``begin``.
        """
        return self.begin(damped, work, copies=copies)()

    def begin(
        self, damped: DampedMatrices, work: Work, *, copies: int = COPIES, stacked: bool = False
    ) -> Callable[[], list[Outcome]]:
        """Launch ``run`` and return a function that waits for its outcomes.

        If ``stacked``, matrices of any size are stacked; else each large matrix is a stack of its
        own, on one of several streams. The function reads the device once. ``ShapeError`` is raised
        at once if a matrix is not square. ``NonFiniteError`` is raised by the function if a matrix
        contains NaN or infinity.
        """
        groups: dict[tuple[int, str], list[int]] = {}
        for i, matrix in enumerate(damped.matrices):
            if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size:
                raise ShapeError(f"a factor must be a square matrix, got shape {matrix.shape}.")
            groups.setdefault((len(matrix), matrix.dtype.char), []).append(i)
        largest = MOST_COPIES * 8 * max((size**2 for size, _ in groups), default=0)
        launched = [
            self._device.within_memory(
                partial(self._launch, damped, indices, work, copies, stacked),
                max(self._scratch_bytes, largest),
            )
            for indices in groups.values()
        ]
        order = [i for indices in groups.values() for i in indices]

        def finish() -> list[Outcome]:
            if not launched:
                return []
            for *_, streams in launched:
                self._device.solvers.join(streams)
            rows = self._xp.concatenate([row for _, rows, _ in launched for row in rows])
            numbers = self._device.download(rows)
            results = [result for results, *_ in launched for result in results]
            ordered = sorted(zip(order, results, numbers, strict=True), key=lambda item: item[0])
            for i, _, (finite, *_) in ordered:
                if not finite:
                    self._refuse(damped.matrices[i])
            return [Outcome(result, row[1:FACTS], row[FACTS:]) for _, result, row in ordered]

        return finish

    def rows(self, *columns: Array) -> Array:
        """Return columns ``(n,)`` as rows ``(n, columns)``, float64."""
        rows: Array = self._xp.stack([column.astype(np.float64) for column in columns], axis=1)
        return rows

    # -- private ----------------------------------------------------------------------------------

    def _launch(
        self,
        damped: DampedMatrices,
        indices: Sequence[int],
        work: Work,
        copies: int,
        stacked: bool,
        scratch_bytes: int,
    ) -> tuple[list[object], list[Array], Sequence[Any]]:
        """Launch an operation on matrices of one size and return its pending results.

        There is one result for each matrix. Arrays ``(matrices of a stack, numbers)`` stay on the
        device, and streams may still run.
        """
        # Stacks are as large as memory allows.
        first = damped.matrices[indices[0]]
        size, dtype = len(first), first.dtype
        most = max(1, scratch_bytes // (copies * 8 * size * size))
        large = size > STACKED_SIZE and not stacked
        step = 1 if large else most
        streams = self._device.solvers.fork(min(most, STREAMS, len(indices)) if large else 0)
        outcomes: list[object] = []
        rows: list[Array] = []
        try:
            for start, stream in zip(range(0, len(indices), step), cycle(streams), strict=False):
                chunk = indices[start : start + step]
                with stream:
                    stack = self._stacked([damped.matrices[i] for i in chunk])
                    dampings = self._device.upload(damped.dampings_of(chunk))
                    # `widen` writes zeros for NaN and infinity, on which libraries may fail.
                    wide, facts = widen(self._device, stack, dampings, damped.floor(dtype))
                    results, numbers = work(wide, chunk)
                    outcomes.extend(results)
                    rows.append(self._xp.concatenate([facts, numbers], axis=1))
        except MemoryError:
            self._device.solvers.join(streams)
            raise
        return outcomes, rows, streams

    def _stacked(self, matrices: Sequence[Array]) -> Array:
        """Return a contiguous stack ``(n, d, d)``; a single matrix is not copied."""
        single = len(matrices) == 1
        stack: Array = self._xp.ascontiguousarray(
            matrices[0][None] if single else self._xp.stack(matrices)
        )
        return stack

    def _refuse(self, matrix: Array) -> None:
        """Raise a NonFiniteError that names the first entry that is not finite."""
        bad = divmod(int((~self._xp.isfinite(matrix)).argmax()), len(matrix))
        raise NonFiniteError(
            f"a {matrix.shape} factor contains {float(matrix[bad])} at {list(bad)}; look for "
            f"overflow in the statistics it was averaged from."
        )
