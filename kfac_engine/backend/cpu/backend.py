"""Implements the NumPy backend, which defines every operation."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import attrgetter
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kfac_engine._types import Array
from kfac_engine.backend import channel_groups, patch_sums
from kfac_engine.backend.cpu import blas, gram, grouped_gram, patch_gram, reductions
from kfac_engine.backend.cpu.linear_algebra import NumpyLinearAlgebra
from kfac_engine.backend.cpu.syrk import threads_for
from kfac_engine.backend.namespace import as_array
from kfac_engine.backend.protocol import SUM, Accumulation
from kfac_engine.backend.threads import TO_READ, WORTH_WAKING, Task, Workers, run_parallel
from kfac_engine.backend.window import Window
from kfac_engine.errors import BackendError

SCRATCH_BYTES = 64 << 20

Number = TypeVar("Number", float, bool)
_NOTHING = nullcontext()


class NumpyBackend:
    """Operations on NumPy arrays, in ``workers``, a pool of ``threads`` threads.

    ``scratch_bytes`` bounds the scratch memory of one operation.
    """

    name = "numpy"
    xp = np
    many = None

    def __init__(self, *, scratch_bytes: int = SCRATCH_BYTES, threads: int | None = None) -> None:
        self.scratch_bytes = scratch_bytes
        self.workers = Workers(threads)
        self.linalg = NumpyLinearAlgebra(self.workers, scratch_bytes)

    def working_bytes(self, copied: int, inverted: int, decomposed: int) -> tuple[int, bool]:
        # Float64, one matrix at a time: the damped matrix and its inverse; or the matrix, its
        # eigenvectors and LAPACK's workspace of twice its size.
        return max(min(self.scratch_bytes, copied), 8 * 2 * inverted, 8 * 5 * decomposed), False

    def reserve(self, stored: int) -> None:
        del stored  # the host allocates memory as it is used

    def asarray(self, value: object, dtype: npt.DTypeLike | None = None) -> Array:
        array = value if type(value) is np.ndarray else as_array(value)
        if not isinstance(array, np.ndarray):
            raise BackendError(
                f"the numpy backend cannot read a {type(array).__module__} array on a device; copy "
                f"it to the host first (cupy.asnumpy)."
            )
        return array if dtype is None else array.astype(dtype, copy=False)

    def to_numpy(self, array: Array) -> Array:
        return array

    def download(self, arrays: Sequence[Array]) -> list[Array]:
        return [np.array(array, np.float64) for array in arrays]

    def read_later(self, array: Array, use: Callable[[Array], None]) -> None:
        use(np.array(array, np.float64))

    def shared_reads(self) -> AbstractContextManager[None]:
        return _NOTHING

    def run_parallel(self, tasks: Sequence[Task]) -> None:
        run_parallel(tasks, self.workers)

    def matmul(self, x: Array, y: Array, out: Array | None = None) -> Array:
        return blas.matmul(x, y, out, self.workers)

    def second_moment(
        self, x: Array, out: Array, how: Accumulation = SUM, *, feature_axis: int = -1
    ) -> None:
        x = x if feature_axis == -1 else np.moveaxis(x, feature_axis, -1)
        gram.second_moment(x, out, how, self._scratch(), self.workers)

    def mirror(self, moment: Array) -> None:
        gram.mirror(moment, self.workers)

    def patch_second_moment(
        self, x: Array, window: Window, out: Array, how: Accumulation = SUM
    ) -> None:
        gram_of = patch_gram.patch_second_moment
        if out.ndim == 3:
            gram_of = grouped_gram.grouped_second_moment
        gram_of(x, window, out, how, self._scratch(), self.workers)

    def patches(self, x: Array, window: Window) -> Array:
        return patch_gram.patches(x, window)

    def patch_squares(
        self, x: Array, window: Window, out: Array, *, alpha: float = 1.0, beta: float = 0.0
    ) -> None:
        patch_sums.add_patch_squares(x, window, out, np, alpha=alpha, beta=beta)

    def squared_gradients(
        self, x: Array, window: Window, ds: Array, out: Array, how: Accumulation = SUM
    ) -> None:
        scratch, size = self._scratch(), out.size * out.itemsize
        threads = threads_for(ds.size * out.shape[1], self.workers)
        parts = max(1, min(threads, len(ds), scratch // max(2 * size, 1)))
        alone = NumpyBackend(scratch_bytes=scratch // (2 * parts), threads=1)

        def add(part: slice, result: Array, beta: float) -> None:
            of_part = how._replace(beta=beta)
            channel_groups.squared_gradients(alone, x[part], window, ds[part], result, of_part)

        grouped_gram.squared_gradients(add, len(ds), out, how.beta, parts, self.workers)

    def example_sums(self, x: Array, ds: Array, axes: tuple[int, ...]) -> Array:
        return reductions.example_sums(x, ds, axes)

    def count_ids(self, ids: Array, rows: int) -> Array:
        flat = ids.reshape(-1)
        return np.bincount(flat[(flat >= 0) & (flat < rows)], minlength=rows)

    def draw_classes(self, logits: Array, uniforms: Array, axis: int) -> Array:
        return channel_groups.draw_classes(self, logits, uniforms, axis)

    def cross_entropy(self, logits: Array, ids: Array, axis: int) -> tuple[Array, Array] | None:
        return None

    def add_scaled(self, out: Array, measured: Array, alpha: float, beta: float) -> None:
        channel_groups.add_scaled(out, measured, alpha, beta)

    def squared_norms(self, arrays: Sequence[Array]) -> list[float]:
        return self._reduced(reductions.squared_norm, arrays)

    def are_finite(self, arrays: Sequence[Array]) -> Array:
        return np.array(self._reduced(reductions.all_finite, arrays), bool)

    def _reduced(self, reduced: Callable[[Array], Number], arrays: Sequence[Array]) -> list[Number]:
        """Reduce each array to a number; threads share many large arrays."""
        if TO_READ * sum(map(attrgetter("size"), arrays)) < WORTH_WAKING:
            return list(map(reduced, arrays))
        numbers: dict[int, Number] = {}

        def compute(index: int, array: Array) -> None:
            numbers[index] = reduced(array)

        self.run_parallel(
            [Task(TO_READ * x.size, partial(compute, i, x)) for i, x in enumerate(arrays)]
        )
        return [numbers[index] for index in range(len(arrays))]

    def _scratch(self) -> int:
        """Return the scratch memory of an operation, in bytes; inside a task, a share of it."""
        return self.scratch_bytes * self.workers.free // self.workers.count
