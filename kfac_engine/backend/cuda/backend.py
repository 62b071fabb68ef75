"""Implements the operations of the NumPy backend on a GPU, with CUDA kernels and libraries.

No operation copies an array to the host. Decisions on the host, such as whether an array is finite,
read a single number.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from math import prod
from types import ModuleType

import numpy as np
import numpy.typing as npt

from kfac_engine._types import Array
from kfac_engine.backend import channel_groups, patch_sums
from kfac_engine.backend.cpu.reductions import summed_in
from kfac_engine.backend.cuda.device import CupyDevice
from kfac_engine.backend.cuda.gram import GroupProducts, PatchMoments, as_entry_images, merge_axes
from kfac_engine.backend.cuda.linear_algebra import CupyLinearAlgebra
from kfac_engine.backend.cuda.many_arrays import CupyManyArrays
from kfac_engine.backend.cuda.matrix_batches import MOST_COPIES
from kfac_engine.backend.cuda.reads import DeviceReads
from kfac_engine.backend.namespace import readable
from kfac_engine.backend.protocol import SUM, Accumulation
from kfac_engine.backend.threads import Task
from kfac_engine.backend.window import Window, pointwise
from kfac_engine.errors import ShapeError
from kfac_engine.kernels.averages import count_ids, update_average
from kfac_engine.kernels.groups import cross_entropy, draw_classes, sum_examples
from kfac_engine.kernels.moments import mirror
from kfac_engine.kernels.patches import write_patches
from kfac_engine.kernels.spans import find_infinite, multiply_pairs
from kfac_engine.kernels.tuned import tuned

SCRATCH_BYTES = 256 << 20

# Element types for which the kernels accumulate in float32.
_COMPUTED = frozenset({"float32", "float16", "bfloat16"})

# Number of products of tensor cores for each float32 product, which gives float32 accuracy.
_PRODUCTS = 3


class CupyBackend:
    """Operations on CuPy arrays.

    Args:
        device: The GPU; by default the current GPU.
        scratch_bytes: Bound of the scratch memory of one operation.
        products: Number of products of tensor cores for each float32 product of a second moment: 3
            has float32 accuracy, 1 has 11 bits, 0 uses FP32 units. By default 3 on devices with
            tensor cores for TF32, else 0.

    Attributes:
        tf32: Whether products round float32 operands to TF32.

    Raises:
        BackendError: There is no usable GPU.
    """

    name = "cupy"

    def __init__(
        self,
        device: CupyDevice | None = None,
        *,
        scratch_bytes: int = SCRATCH_BYTES,
        products: int | None = None,
    ) -> None:
        self.device = device or CupyDevice()
        self.xp = self.device.xp
        self.scratch_bytes = scratch_bytes
        if products is None or not self.device.tensor_cores:
            products = _PRODUCTS if self.device.tensor_cores else 0
        self.tf32 = products == 1
        self._reads = DeviceReads(self.device)
        self.many = CupyManyArrays(self.device)
        self.linalg = CupyLinearAlgebra(self.device, scratch_bytes)
        fastest = tuned(self.device.architecture)
        self._moments = PatchMoments(self.device, scratch_bytes, products, fastest)
        self._groups = GroupProducts(self.device, scratch_bytes)
        self._runs_tasks = self._fits = False

    def working_bytes(self, copied: int, inverted: int, decomposed: int) -> tuple[int, bool]:
        del copied  # part of the reserved memory, which is never released
        # The current stream has ``scratch_bytes``, and so have the refresh streams together. A
        # single matrix may need more.
        largest = MOST_COPIES * 8 * max(inverted, decomposed)
        return self.scratch_bytes + max(self.scratch_bytes, largest), True

    def reserve(self, stored: int) -> None:
        self.device.reserve(stored, self.scratch_bytes)

    def asarray(self, value: object, dtype: npt.DTypeLike | None = None) -> Array:
        if _is_foreign(value, self.xp):
            value = readable(value)
            value = self.xp.from_dlpack(value) if _on_gpu(value) else np.from_dlpack(value)  # type: ignore[arg-type] # it has __dlpack__
        array: Array = self.xp.asarray(value, dtype)
        return array

    def to_numpy(self, array: Array) -> Array:
        return array if isinstance(array, np.ndarray) else self.device.download(array)

    def download(self, arrays: Sequence[Array]) -> list[Array]:
        return self._reads.now(arrays)

    def read_later(self, array: Array, use: Callable[[Array], None]) -> None:
        self._reads.later(array, use)

    def shared_reads(self) -> AbstractContextManager[None]:
        return self._reads.shared()

    def run_parallel(self, tasks: Sequence[Task]) -> None:
        self._runs_tasks = True
        try:
            # Averages and second moments of several tasks share launches.
            with self.many.gathered(), self._moments.gathered():
                for task in tasks:  # the kernels of a task are launched while earlier kernels run
                    task.do()
        finally:
            self._runs_tasks = self._fits = False

    def matmul(self, x: Array, y: Array, out: Array | None = None) -> Array:
        product: Array = self.xp.matmul(x, y, out=out)
        return product

    def second_moment(
        self, x: Array, out: Array, how: Accumulation = SUM, *, feature_axis: int = -1
    ) -> None:
        axis = feature_axis % x.ndim
        self._check_out(out, x.shape[axis] + how.homogeneous)
        is_single = out.dtype == np.float32 and x.dtype != np.float64
        # The kernels read images in place; without tensor cores, cuBLAS multiplies rows faster.
        if is_single and (axis != x.ndim - 1 or self._moments.products):
            images = _as_images(x, axis)
            self.patch_second_moment(images, pointwise(images.ndim - 2), out, how)
            return
        rows = self.xp.moveaxis(x, axis, -1).reshape(-1, x.shape[axis])
        self._add_rows(rows, out, how)

    def mirror(self, moment: Array) -> None:
        # Kernels write both triangles; a caller that mirrors a moment reads it next.
        self._moments.settle(moment)

    def patch_second_moment(
        self, x: Array, window: Window, out: Array, how: Accumulation = SUM
    ) -> None:
        self._fit_scratch()
        is_single = out.dtype == np.float32 and x.dtype != np.float64
        if out.ndim == 3 and is_single:
            self._groups.add_moments(x, window, out, how)
            return
        if out.ndim == 3:
            channel_groups.grouped_second_moment(self, x, window, out, how)
            return
        if is_single:
            self._moments.add(x, window, out, how)
            return
        # In double precision, the patches of a few images at a time are copied.
        features = window.taps * x.shape[1]
        self._check_out(out, features + how.homogeneous)
        positions = prod(window.output_shape(x.shape[2:]))
        step = max(1, self.scratch_bytes // (8 * features * positions))
        for start in range(0, len(x), step):
            rows = self.patches(x[start : start + step], window).reshape(-1, features)
            self._add_rows(rows, out, how)
            how = how.of_others

    def patches(self, x: Array, window: Window) -> Array:
        geometry = self._moments.geometry(x, window)
        features = window.taps * x.shape[1]
        patches = self.device.empty((len(x), geometry.positions, features), x.dtype)
        write_patches(self.device, x, patches, geometry)
        return patches

    def patch_squares(
        self, x: Array, window: Window, out: Array, *, alpha: float = 1.0, beta: float = 0.0
    ) -> None:
        if out.dtype != np.float32 or x.dtype == np.float64:
            patch_sums.add_patch_squares(x, window, out, self.xp, alpha=alpha, beta=beta)
            return
        patch_sums.check_feature_vector(x, window, out)
        x, window = merge_axes(x, window)
        self._moments.add_squares(x, window, out, alpha=alpha, beta=beta)

    def squared_gradients(
        self, x: Array, window: Window, ds: Array, out: Array, how: Accumulation = SUM
    ) -> None:
        self._fit_scratch()
        # For examples with a single row, cuBLAS computes products of matrices.
        if out.dtype != np.float32 or prod(ds.shape[2:]) == 1 or _is_double(x, ds):
            channel_groups.squared_gradients(self, x, window, ds, out, how)
            return
        kind = x.dtype if x.dtype == ds.dtype else np.dtype(np.float32)
        x, window = merge_axes(x, window)
        x, ds = (array.astype(kind, copy=False) for array in (x, ds))
        self._groups.add_squares(x, window, ds, out, how)

    def example_sums(self, x: Array, ds: Array, axes: tuple[int, ...]) -> Array:
        x = self.xp.broadcast_to(x, ds.shape)
        pair = as_entry_images(x, axes), as_entry_images(ds, axes)
        if _is_double(x, ds) or x.dtype != ds.dtype or pair[0] is None or pair[1] is None:
            return channel_groups.example_sums(self, x, ds, axes)
        sums = self.device.empty((len(ds), 2 * pair[1].shape[1]), np.float32)
        sum_examples(self.device, pair[0], pair[1], sums)
        return sums

    def count_ids(self, ids: Array, rows: int) -> Array:
        counts: Array = self.xp.zeros(rows, np.int32)
        count_ids(self.device, self.xp.ascontiguousarray(ids, np.int64), counts)
        return counts

    def draw_classes(self, logits: Array, uniforms: Array, axis: int) -> Array:
        uniforms = self.asarray(uniforms, np.float64)
        if logits.dtype == np.float64:
            return channel_groups.draw_classes(self, logits, uniforms, axis)
        ids = self.device.empty(uniforms.shape, np.int64)
        axis %= logits.ndim
        outer, inner = prod(logits.shape[:axis]), prod(logits.shape[axis + 1 :])
        rows = self.xp.ascontiguousarray(logits).reshape(outer, logits.shape[axis], inner)
        draw_classes(self.device, rows, self.xp.ascontiguousarray(uniforms), ids)
        return ids

    def cross_entropy(self, logits: Array, ids: Array, axis: int) -> tuple[Array, Array] | None:
        if logits.dtype != np.float32 or not logits.flags.c_contiguous:
            return None
        axis %= logits.ndim
        before, after = logits.shape[:axis], logits.shape[axis + 1 :]
        terms = self.device.empty((*before, 1, *after), np.float32)
        gradient = self.device.empty(logits.shape, np.float32)
        rows = prod(before), logits.shape[axis], prod(after)
        arrays = self.xp.ascontiguousarray(ids, np.int64), terms, gradient.reshape(rows)
        cross_entropy(self.device, logits.reshape(rows), *arrays)
        return terms, gradient

    def add_scaled(self, out: Array, measured: Array, alpha: float, beta: float) -> None:
        plain = out.flags.c_contiguous and measured.flags.c_contiguous
        known = out.dtype == np.float32 and measured.dtype.name in _COMPUTED
        if plain and known and out.shape == measured.shape:
            update_average(self.device, out, measured, alpha, beta)
            return
        channel_groups.add_scaled(out, measured, alpha, beta)

    def squared_norms(self, arrays: Sequence[Array]) -> list[float]:
        return self.squared_norms_and(arrays, ())[0]

    def squared_norms_and(
        self, arrays: Sequence[Array], numbers: Sequence[Array]
    ) -> tuple[list[float], list[float]]:
        """Return the sum of squares of each array, and ``numbers``, in one read of the device."""
        launched, others = _by_type(arrays)
        sums = [self._squared_norm(arrays[i])[None, None] for i in others]
        pairs = ([(arrays[i], arrays[i]) for i in which] for which in launched.values())
        sums += (multiply_pairs(self.device, of_type) for of_type in pairs)
        order = [*others, *(i for which in launched.values() for i in which)]
        read = self.download([*sums, *numbers])
        totals = (total for parts in read[: len(sums)] for total in parts.sum(axis=1))
        with np.errstate(over="ignore"):  # sums overflow where the sums of a CPU overflow
            types = (summed_in(arrays[i].dtype).type for i in order)
            squares = [float(kind(total)) for kind, total in zip(types, totals, strict=True)]
        norms = dict(zip(order, squares, strict=True))
        return [norms[i] for i in range(len(arrays))], [*map(float, read[len(sums) :])]

    def are_finite(self, arrays: Sequence[Array]) -> Array:
        launched, others = _by_type(arrays)
        flags: Array = self.xp.ones(len(arrays), np.int32)
        for i in others:
            flags[i] = self.xp.isfinite(arrays[i]).all()
        for which in launched.values():
            chosen = [arrays[i] for i in which]
            if len(chosen) == len(arrays):
                find_infinite(self.device, chosen, flags)
                return flags
            finite = self.xp.ones(len(which), np.int32)
            find_infinite(self.device, chosen, finite)
            flags[self.device.upload(np.array(which))] = finite
        return flags

    # -- private ----------------------------------------------------------------------------------

    def _fit_scratch(self) -> None:
        """Lower ``scratch_bytes`` to the available memory of the device, for all later calls.

        Call this before an operation writes, because it cannot be restarted after it has written.
        The operations of tasks that run together allocate the memory once.
        """
        if self._fits:
            return
        affordable = self.device.affordable(self.scratch_bytes)
        self.scratch_bytes = self._moments.scratch_bytes = self._groups.scratch_bytes = affordable
        self._fits = self._runs_tasks

    def _squared_norm(self, x: Array) -> Array:
        flat = x.astype(summed_in(x.dtype), copy=False).reshape(-1)
        total: Array = flat @ flat
        return total

    def _add_rows(self, rows: Array, out: Array, how: Accumulation) -> None:
        """Compute both triangles of ``out ← beta·out + alpha·rowsᵀ rows`` in place, in parts."""
        xp = self.xp
        self._moments.settle(out)
        self._fit_scratch()
        step = max(1, self.scratch_bytes // (out.itemsize * len(out)))
        for start in range(0, len(rows), step):
            part = rows[start : start + step].astype(out.dtype, copy=False)
            if how.homogeneous:
                part = xp.concatenate([part, xp.ones((len(part), 1), out.dtype)], axis=1)
            self.device.add_gram(xp.ascontiguousarray(part), out, how.alpha, how.beta)
            how = how.of_others
        if out.dtype == np.float32:
            mirror(self.device, out)
        else:
            out[...] = xp.tril(out) + xp.tril(out, -1).T

    def _check_out(self, out: Array, size: int) -> None:
        if out.shape != (size, size) or not out.flags.c_contiguous or out.dtype.char not in "fd":
            raise ShapeError(
                f"a second moment needs a C-contiguous float32 or float64 result of shape "
                f"{(size, size)}, got {out.dtype} of shape {out.shape}."
            )


def _by_type(arrays: Sequence[Array]) -> tuple[dict[str, list[int]], list[int]]:
    """Return the indices of arrays that ``spans.cu`` reads, by type, and of all other arrays."""
    launched: dict[str, list[int]] = {}
    others = []
    for i, array in enumerate(arrays):
        name = array.dtype.name
        if name in ("float32", "float64") and array.flags.c_contiguous:
            launched.setdefault(name, []).append(i)
        else:
            others.append(i)
    return launched, others


def _is_foreign(value: object, xp: ModuleType) -> bool:
    """Return whether a value is an array of another library that supports DLPack."""
    return hasattr(value, "__dlpack_device__") and not isinstance(value, np.ndarray | xp.ndarray)


def _on_gpu(value: object) -> bool:
    """Return whether an array of another library is on a CUDA device (DLPack device type 2)."""
    kind, _ = value.__dlpack_device__()  # type: ignore[attr-defined] # the caller has checked
    return bool(kind == 2)


def _as_images(x: Array, axis: int) -> Array:
    """Return ``x`` as images with at most three spatial axes, as a view where possible."""
    lead, tail = x.shape[:axis], x.shape[axis + 1 :]
    spatial_shape = tail if len(tail) <= 3 else (prod(tail),)
    return x.reshape(prod(lead), x.shape[axis], *spatial_shape)


def _is_double(*arrays: Array) -> bool:
    return any(array.dtype == np.float64 for array in arrays)
