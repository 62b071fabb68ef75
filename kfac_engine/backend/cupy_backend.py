"""The CuPy backend: the primitives of the NumPy one, on a GPU, by our kernels and CUDA's libraries.

Nothing here copies an array to the host; what must be decided on the host (is it finite, did a
factorisation succeed) reads a single number.
"""

from collections.abc import Callable, Sequence
from math import prod
from types import ModuleType

import numpy as np
import numpy.typing as npt

from kfac_engine._types import Array
from kfac_engine.backend.cupy_device import CupyDevice
from kfac_engine.backend.cupy_inverse import CupyInverses
from kfac_engine.backend.cupy_moments import PatchMoments
from kfac_engine.backend.cupy_roots import inverse_roots
from kfac_engine.backend.window import Window
from kfac_engine.errors import ShapeError
from kfac_engine.kernels.moments import mirror
from kfac_engine.kernels.patches import write_patches

SCRATCH_BYTES = 256 << 20

# Two TF32 numbers for each factor: float32's accuracy at the speed of tensor cores.
_SPLIT = 3


class CupyBackend:
    """Primitives on CuPy arrays.

    Args:
        device: The GPU; the current one when left out.
        scratch_bytes: Upper bound of the working memory of one primitive.

    Raises:
        BackendError: There is no usable GPU.
    """

    name = "cupy"

    def __init__(
        self, device: CupyDevice | None = None, *, scratch_bytes: int = SCRATCH_BYTES
    ) -> None:
        self.device = device or CupyDevice()
        self.scratch_bytes = scratch_bytes
        split = _SPLIT if self.device.tensor_cores else 0
        self._inverses = CupyInverses(self.device, scratch_bytes)
        self._moments = PatchMoments(self.device, scratch_bytes, split)

    @property
    def xp(self) -> ModuleType:
        return self.device.xp

    def working_bytes(self) -> tuple[int, bool]:
        return 2 * self.scratch_bytes, True  # on the current stream, and on those of refreshes

    def reserve(self, kept: int) -> None:
        self.device.reserve(kept, self.working_bytes()[0])

    def asarray(self, value: object, dtype: npt.DTypeLike | None = None) -> Array:
        if _is_foreign(value, self.xp):
            value = self.xp.from_dlpack(value) if _on_gpu(value) else np.from_dlpack(value)  # type: ignore[arg-type] # it has the protocol
        array: Array = self.xp.asarray(value, dtype)
        return array

    def to_numpy(self, array: Array) -> Array:
        return array if isinstance(array, np.ndarray) else self.device.download(array)

    def download(self, arrays: Sequence[Array]) -> list[Array]:
        if not arrays:
            return []
        flat = [array.reshape(-1).astype(np.float64) for array in arrays]
        host = self.device.download(self.xp.concatenate(flat))
        ends = np.cumsum([array.size for array in arrays])
        return [
            part.reshape(array.shape)
            for part, array in zip(np.split(host, ends[:-1]), arrays, strict=True)
        ]

    def second_moment(
        self,
        x: Array,
        out: Array,
        *,
        feature_axis: int = -1,
        homogeneous: bool = False,
        alpha: float = 1.0,
        beta: float = 0.0,
    ) -> None:
        axis = feature_axis % x.ndim
        if axis != x.ndim - 1 and out.dtype == np.float32 and x.dtype != np.float64:
            # Features outside, as channels of images are: pixels are read where they lie.
            images = _as_images(x, axis)
            window = _pointwise(images.ndim - 2)
            self.patch_second_moment(
                images, window, out, homogeneous=homogeneous, alpha=alpha, beta=beta
            )
            return
        rows = self.xp.moveaxis(x, axis, -1).reshape(-1, x.shape[axis])
        self._check_out(out, rows.shape[1] + homogeneous)
        self._add_rows(rows, out, homogeneous, alpha, beta)

    def patch_second_moment(
        self,
        x: Array,
        window: Window,
        out: Array,
        *,
        homogeneous: bool = False,
        alpha: float = 1.0,
        beta: float = 0.0,
    ) -> None:
        if out.dtype == np.float32 and x.dtype != np.float64:
            self._moments.add(x, window, out, homogeneous=homogeneous, alpha=alpha, beta=beta)
            return
        # Double precision: patches written out, some images at a time.
        features = window.taps * x.shape[1]
        self._check_out(out, features + homogeneous)
        positions = prod(window.output_sides(x.shape[2:]))
        step = max(1, self.scratch_bytes // (8 * features * positions))
        for start in range(0, len(x), step):
            rows = self.patches(x[start : start + step], window).reshape(-1, features)
            self._add_rows(rows, out, homogeneous, alpha, beta)
            beta = 1.0

    def patches(self, x: Array, window: Window) -> Array:
        geometry = self._moments.geometry(x, window)
        features = window.taps * x.shape[1]
        found = self.device.empty((len(x), geometry.positions, features), x.dtype)
        write_patches(self.device, x, found, geometry)
        return found

    def damped_inverse(self, matrix: Array, damping: float) -> Array:
        return self.damped_inverses([matrix], [damping])[0]

    def damped_cholesky(self, matrix: Array, damping: float) -> Array:
        return self._inverses.damped_choleskys([matrix], [damping])[0]

    def triangular_inverse(self, lower: Array) -> Array:
        return self._inverses.triangular_inverses([lower])[0]

    def eigh(self, matrix: Array) -> tuple[Array, Array]:
        return self._inverses.eighs([matrix])[0]

    def damped_inverses(self, matrices: Sequence[Array], dampings: Sequence[float]) -> list[Array]:
        return self.begin_damped_inverses(matrices, dampings)()

    def begin_damped_inverses(
        self, matrices: Sequence[Array], dampings: Sequence[float]
    ) -> Callable[[], list[Array]]:
        return self._inverses.begin_damped_inverses(matrices, dampings)

    def damped_choleskys(self, matrices: Sequence[Array], dampings: Sequence[float]) -> list[Array]:
        return self._inverses.damped_choleskys(matrices, dampings)

    def triangular_inverses(self, lowers: Sequence[Array]) -> list[Array]:
        return self._inverses.triangular_inverses(lowers)

    def eighs(self, matrices: Sequence[Array]) -> list[tuple[Array, Array]]:
        return self._inverses.eighs(matrices)

    def inverse_roots(
        self, matrices: Sequence[Array], dampings: Sequence[float], degrees: Sequence[int]
    ) -> list[Array | None]:
        return inverse_roots(self.device, self._inverses, matrices, dampings, degrees)

    def all_finite(self, x: Array) -> bool:
        if x.dtype.kind in "biu":
            return True
        wide = x.astype(np.promote_types(x.dtype, np.float32), copy=False)
        return bool(self.xp.isfinite((wide * wide).sum()))

    def rng(self, seed: int) -> np.random.Generator:
        return np.random.default_rng(seed)

    # -- private ----------------------------------------------------------------------------------

    def _add_rows(
        self, rows: Array, out: Array, homogeneous: bool, alpha: float, beta: float
    ) -> None:
        """``out ← beta·out + alpha·rowsᵀ rows``, both triangles, a part of the rows at a time."""
        xp = self.xp
        step = max(1, self.scratch_bytes // (out.itemsize * len(out)))
        for start in range(0, len(rows), step):
            part = rows[start : start + step].astype(out.dtype, copy=False)
            if homogeneous:
                part = xp.concatenate([part, xp.ones((len(part), 1), out.dtype)], axis=1)
            self.device.add_gram(xp.ascontiguousarray(part), out, alpha, beta)
            beta = 1.0
        if out.dtype == np.float32:
            mirror(self.device, out)
        else:
            out[...] = xp.tril(out) + xp.tril(out, -1).T

    def _check_out(self, out: Array, side: int) -> None:
        if out.shape != (side, side) or not out.flags.c_contiguous or out.dtype.char not in "fd":
            raise ShapeError(
                f"a second moment needs a C-contiguous float32 or float64 result of shape "
                f"{(side, side)}, got {out.dtype} of shape {out.shape}."
            )


def _is_foreign(value: object, xp: ModuleType) -> bool:
    """Whether a value is an array of a third library, which shares it by DLPack."""
    return hasattr(value, "__dlpack_device__") and not isinstance(value, np.ndarray | xp.ndarray)


def _on_gpu(value: object) -> bool:
    """Whether an array of another library lies on a CUDA device (DLPack's device type 2)."""
    kind, _ = value.__dlpack_device__()  # type: ignore[attr-defined] # the caller has looked
    return bool(kind == 2)


def _as_images(x: Array, axis: int) -> Array:
    """``x`` as images ``(n, channels, *sides)`` of at most three axes, a view where possible."""
    lead, tail = x.shape[:axis], x.shape[axis + 1 :]
    sides = tail if len(tail) <= 3 else (prod(tail),)
    return x.reshape(prod(lead), x.shape[axis], *sides)


def _pointwise(axes: int) -> Window:
    ones, zeros = (1,) * axes, (0,) * axes
    return Window(ones, ones, ones, zeros, zeros)
