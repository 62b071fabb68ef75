"""The CuPy backend: the primitives of the NumPy one, on a GPU, by our kernels and CUDA's libraries.

Nothing here copies an array to the host; what must be decided on the host (is it finite, did a
factorisation succeed) reads a single number.
"""

import logging
from collections.abc import Iterator
from math import prod
from types import ModuleType

import numpy as np
import numpy.typing as npt

from kfac_engine._types import Array
from kfac_engine.backend.cupy_device import CupyDevice
from kfac_engine.backend.cupy_moments import PatchMoments
from kfac_engine.backend.window import Window
from kfac_engine.errors import InputError, NonFiniteError, ShapeError
from kfac_engine.kernels.moments import mirror
from kfac_engine.kernels.patches import write_patches

SCRATCH_BYTES = 256 << 20

_LOG = logging.getLogger(__name__)

# Dampings tried before the eigenvalues are clamped: each ten times the one before.
_LADDER = (1, 10, 100, 1000)
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
        self._moments = PatchMoments(self.device, scratch_bytes, split)

    @property
    def xp(self) -> ModuleType:
        return self.device.xp

    def asarray(self, value: object, dtype: npt.DTypeLike | None = None) -> Array:
        if _is_foreign(value, self.xp):
            value = self.xp.from_dlpack(value) if _on_gpu(value) else np.from_dlpack(value)  # type: ignore[arg-type] # it has the protocol
        array: Array = self.xp.asarray(value, dtype)
        return array

    def to_numpy(self, array: Array) -> Array:
        return array if isinstance(array, np.ndarray) else self.device.download(array)

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
        least = self._least_damping(matrix, damping)
        root = self._root(matrix, least)
        if root is None:
            values, vectors = self._clamped(matrix, least)
            inverse = (vectors / values) @ vectors.T
        else:
            upside = self.triangular_inverse(root)
            inverse = upside.T @ upside
        # Products are symmetric but for rounding.
        symmetric: Array = (0.5 * (inverse + inverse.T)).astype(matrix.dtype)
        return symmetric

    def damped_cholesky(self, matrix: Array, damping: float) -> Array:
        least = self._least_damping(matrix, damping)
        root = self._root(matrix, least)
        if root is None:
            values, vectors = self._clamped(matrix, least)
            # With M = QΛQᵀ and √Λ Qᵀ = Q'R: M = Rᵀ R, a triangular root that cannot fail.
            R = self.xp.linalg.qr(self.xp.sqrt(values)[:, None] * vectors.T, mode="r")
            signs = self.xp.where(self.xp.diagonal(R) < 0, -1.0, 1.0)
            root = (R * signs[:, None]).T
        lower: Array = self.xp.ascontiguousarray(root.astype(matrix.dtype))
        return lower

    def triangular_inverse(self, lower: Array) -> Array:
        xp = self.xp
        self._check_square(lower)
        zeros = xp.diagonal(lower) == 0
        if bool(zeros.any()):
            at = int(zeros.argmax())
            raise InputError(f"a triangular matrix with zero at [{at}, {at}] has no inverse.")
        eye = xp.eye(len(lower), dtype=np.float64)
        solved = self.device.solve_lower(xp.tril(lower).astype(np.float64), eye)
        inverse: Array = xp.ascontiguousarray(xp.tril(solved).astype(lower.dtype))
        return inverse

    def eigh(self, matrix: Array) -> tuple[Array, Array]:
        self._check_square(matrix)
        lower = self.xp.tril(matrix).astype(np.float64)
        values, vectors = self.xp.linalg.eigh(lower, UPLO="L")
        return values, vectors

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

    def _root(self, matrix: Array, least: float) -> Array | None:
        """Float64 Cholesky root with as little damping as it takes; None where none is enough."""
        for work, damping in self._damped(matrix, least):
            root = self.device.cholesky(work)
            if root is not None:
                return root
            _LOG.warning(
                "a %s matrix is not positive definite with damping %.3g", matrix.shape, damping
            )
        return None

    def _damped(self, matrix: Array, least: float) -> Iterator[tuple[Array, float]]:
        for factor in _LADDER:
            lower = self.xp.tril(matrix).astype(np.float64)
            work = lower + self.xp.tril(lower, -1).T
            work.reshape(-1)[:: len(work) + 1] += least * factor
            yield work, least * factor

    def _clamped(self, matrix: Array, least: float) -> tuple[Array, Array]:
        """Damped eigenvalues with the negative ones taken as zero, and their vectors."""
        _LOG.warning(
            "a %s matrix is indefinite; its negative eigenvalues are cut off", matrix.shape
        )
        values, vectors = self.eigh(matrix)
        return self.xp.maximum(values, 0.0) + least, vectors

    def _least_damping(self, matrix: Array, damping: float) -> float:
        """The damping to start with, as the NumPy backend has it; reads the device once."""
        self._check_square(matrix)
        if not 0.0 <= damping < np.inf:
            raise InputError(f"the damping must be zero or positive and finite, got {damping}.")
        limits = np.finfo(matrix.dtype)
        wide = matrix.astype(np.float64)
        tiny = float(limits.tiny)
        largest = self.xp.maximum(self.xp.abs(wide).max(), tiny)
        norm = float(largest * self.xp.linalg.norm(wide / largest))
        if damping == 0.0 and norm == 0.0:
            raise InputError(
                f"a zero matrix {matrix.shape} needs a positive damping to be inverted."
            )
        return max(damping, float(limits.eps) * norm, tiny)

    def _check_square(self, matrix: Array) -> None:
        if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size:
            raise ShapeError(f"a square matrix is needed, got one of shape {matrix.shape}.")
        finite = self.xp.isfinite(matrix)
        if not bool(finite.all()):
            bad = divmod(int((~finite).argmax()), len(matrix))
            raise NonFiniteError(
                f"a {matrix.shape} factor holds {float(matrix[bad])} at {list(bad)}; look for "
                f"overflow in the statistics it was averaged from."
            )

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
