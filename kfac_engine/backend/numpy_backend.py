"""The NumPy backend: the definition of each primitive."""

from types import ModuleType

import numpy as np
import numpy.typing as npt

from kfac_engine._types import Array
from kfac_engine.backend import numpy_inverse, numpy_moments
from kfac_engine.backend.namespace import as_array
from kfac_engine.backend.numpy_patches import gather
from kfac_engine.backend.window import Window

SCRATCH_BYTES = 64 << 20


class NumpyBackend:
    """Primitives on NumPy arrays.

    Args:
        scratch_bytes: Upper bound of the working memory of one primitive.
    """

    name = "numpy"

    def __init__(self, *, scratch_bytes: int = SCRATCH_BYTES) -> None:
        self.scratch_bytes = scratch_bytes

    @property
    def xp(self) -> ModuleType:
        return np

    def asarray(self, value: object, dtype: npt.DTypeLike | None = None) -> Array:
        array = as_array(value)
        return array if dtype is None else array.astype(dtype, copy=False)

    def to_numpy(self, array: Array) -> Array:
        return array

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
        moved = np.moveaxis(x, feature_axis, -1)
        rows = moved.reshape(-1, moved.shape[-1])
        numpy_moments.second_moment(rows, out, homogeneous, alpha, beta)

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
        self.second_moment(gather(x, window), out, homogeneous=homogeneous, alpha=alpha, beta=beta)

    def patches(self, x: Array, window: Window) -> Array:
        return gather(x, window)

    def damped_inverse(self, matrix: Array, damping: float) -> Array:
        return numpy_inverse.damped_inverse(matrix, damping)

    def damped_cholesky(self, matrix: Array, damping: float) -> Array:
        return numpy_inverse.damped_cholesky(matrix, damping)

    def triangular_inverse(self, lower: Array) -> Array:
        return numpy_inverse.triangular_inverse(lower)

    def eigh(self, matrix: Array) -> tuple[Array, Array]:
        return numpy_inverse.eigh(matrix)

    def all_finite(self, x: Array) -> bool:
        wide = np.float64 if x.dtype == np.float64 else np.float32
        with np.errstate(over="ignore", invalid="ignore"):
            return bool(np.isfinite(np.sum(np.square(x, dtype=wide))))

    def rng(self, seed: int) -> np.random.Generator:
        return np.random.default_rng(seed)
