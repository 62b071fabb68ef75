"""What the engine asks of an array library: the few primitives that deserve a kernel of their own.

Everything else is plain array code through ``xp``. The NumPy backend defines each primitive;
another backend must give the same numbers within a stated tolerance and raise the same errors.

Symmetric results are C-contiguous. Second moments are sure to have their lower triangle only: what
stands above the diagonal is unspecified until ``mirror`` has completed it, which few readers need.
All other symmetric results have both triangles. Input dtypes float16 and bfloat16 are accumulated
in float32; float32 and float64 stay what they are.
"""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kfac_engine._types import Array
from kfac_engine.backend.tasks import Task
from kfac_engine.backend.window import Window


class Backend(Protocol):
    """The primitives of one array library.

    Attributes:
        name: What ``select`` calls it.
        scratch_bytes: Bound of the working memory of one primitive; others may plan by it too.
    """

    name: str
    scratch_bytes: int

    @property
    def xp(self) -> ModuleType:
        """The array module: ``numpy`` or one with its interface."""

    def working_bytes(self, copied: int, inverted: int, decomposed: int) -> tuple[int, bool]:
        """All working memory, and whether it and arrays lie in a device's own memory.

        Args:
            copied: Bytes of the largest operand of a second moment, patches and all.
            inverted: Entries of the largest matrix, or stack, that is inverted.
            decomposed: Entries of the largest whose eigenvectors are computed.
        """

    def reserve(self, kept: int) -> None:
        """Take working memory and room for arrays of ``kept`` bytes from a device, at once.

        Arrays made later get their places in it. Nothing is taken of the host's memory.
        """

    def asarray(self, value: object, dtype: npt.DTypeLike | None = None) -> Array:
        """``value`` as an array of this library: NumPy's, or anything with ``__dlpack__``."""

    def to_numpy(self, array: Array) -> Array:
        """A host copy or view: the way back to the host for arrays."""

    def download(self, arrays: Sequence[Array]) -> list[Array]:
        """Host copies of a few small arrays, float64; a device is read once for all of them."""

    def share(self, tasks: Sequence[Task]) -> None:
        """Do tasks that do not depend on each other, side by side where there are threads."""

    def bands(self, length: int, work: float) -> list[slice]:
        """``range(length)`` in parts that are worth a thread each; one part where there are none.

        Args:
            length: Of an axis.
            work: Multiplications along the whole axis.
        """

    def matmul(self, x: Array, y: Array, out: Array | None = None) -> Array:
        """``x y`` of matrices or of stacks of them, into ``out`` if it is given."""

    def add_outer(self, out: Array, x: Array, y: Array, alpha: float, beta: float) -> None:
        """``out ← beta·out + alpha·x yᵀ`` of vectors, in place."""

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
        """Lower triangle of ``out ← beta·out + alpha·Σ_rows x xᵀ``, in place.

        Args:
            x: Any rank ≥ 1, any strides; features along ``feature_axis``, all other axes are rows.
            out: ``(d, d)``, or ``(d + 1, d + 1)`` with the homogeneous coordinate (a one, last).
            feature_axis: Axis of the features.
            homogeneous: Whether each row ends with an implicit one.
            alpha: Scale of the new moment.
            beta: Scale of the old one; 0 overwrites, whatever ``out`` held (NaN included).
        """

    def mirror(self, moment: Array) -> None:
        """Complete a second moment in place: every lower triangle of ``(…, d, d)`` onto its upper.

        A backend whose second moments have both triangles need not do anything.
        """

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
        """Lower triangle of ``out ← beta·out + alpha·Σ z zᵀ`` over all patches ``z``, in place.

        Features are tap-major: ``(*kernel, channels)`` in row-major order, then the one.

        Args:
            x: Images, ``(n, channels, *sides)``, any strides.
            window: Geometry; as many axes as ``sides``.
            out: ``(taps·channels (+ 1), same)``.
            homogeneous: Whether each patch ends with an implicit one.
            alpha: Scale of the new moment.
            beta: Scale of the old one; 0 overwrites.
        """

    def patches(self, x: Array, window: Window) -> Array:
        """The patches themselves, a new array: ``(n, positions, taps·channels)``, tap-major."""

    def patch_squares(
        self, x: Array, window: Window, out: Array, *, alpha: float = 1.0, beta: float = 0.0
    ) -> None:
        """``out ← beta·out + alpha·Σ z²`` over all patches ``z``, feature by feature, in place.

        The diagonal of ``patch_second_moment``, without the one.

        Args:
            x: Images, ``(n, channels, *sides)``, any strides.
            window: Geometry.
            out: ``(taps·channels,)``, contiguous.
            alpha: Scale of the new squares.
            beta: Scale of the old ones; 0 overwrites.
        """

    def grouped_second_moment(
        self,
        x: Array,
        window: Window,
        out: Array,
        *,
        homogeneous: bool = False,
        alpha: float = 1.0,
        beta: float = 0.0,
    ) -> None:
        """``patch_second_moment`` of each group of neighbouring channels, in place.

        Args:
            x: Images, ``(n, channels, *sides)``, any strides.
            window: Geometry; of a group, features are tap-major.
            out: ``(groups, taps·channels/groups (+ 1), same)``; says how many groups there are.
            homogeneous: Whether each row ends with an implicit one.
            alpha: Scale of the new moments.
            beta: Scale of the old ones; 0 overwrites.
        """

    def squared_gradients(
        self,
        x: Array,
        window: Window,
        ds: Array,
        out: Array,
        *,
        homogeneous: bool = False,
        alpha: float = 1.0,
        beta: float = 0.0,
    ) -> None:
        """``out ← beta·out + alpha·Σ_n (Σ_t z_nt ds_ntᵀ)²`` for each group, in place.

        Entry by entry: the squared gradients of examples, in the weights of a layer.

        Args:
            x: Images, ``(n, channels, *sides)``, any strides.
            window: Geometry.
            ds: ``(n, outputs, *output sides)``, any strides.
            out: ``(groups, taps·channels/groups (+ 1), outputs/groups)``.
            homogeneous: Whether each row ends with an implicit one.
            alpha: Scale of the new squares.
            beta: Scale of the old ones; 0 overwrites.
        """

    def example_sums(self, x: Array, ds: Array, axes: tuple[int, ...]) -> Array:
        """``[Σ x∘ds, Σ ds]`` of each example over some axes: ``(n, 2·entries)``, a new array.

        Args:
            x: As many axes as ``ds``, each as long or of length one.
            ds: The batch first.
            axes: Summed; not the batch axis. The others are the entries, in row-major order.
        """

    def count_ids(self, ids: Array, rows: int) -> Array:
        """How often each number in [0, rows) occurs: ``(rows,)`` integers."""

    def draw_classes(self, logits: Array, uniforms: Array, axis: int) -> Array:
        """A class of each row of ``softmax(logits)``, int64: by inversion, the same everywhere.

        Args:
            logits: Floating point; rows are along ``axis``.
            uniforms: Numbers in [0, 1), float64, in the shape of ``logits`` without that axis.
            axis: Of the classes.
        """

    def add_scaled(self, out: Array, measured: Array, alpha: float, beta: float) -> None:
        """``out ← beta·out + alpha·measured``, in place; 0 overwrites."""

    def damped_inverse(self, matrix: Array, damping: float) -> Array:
        """``(matrix + damping·I)⁻¹``, symmetric, computed in float64, in the dtype of ``matrix``.

        Of the matrix the lower triangle is read, here and by ``damped_cholesky``.
        A matrix that rounding made indefinite is retried with more damping (ten times, a few
        times), then inverted through its clamped eigenvalues; never NaN.
        """

    def damped_cholesky(self, matrix: Array, damping: float) -> Array:
        """Lower-triangular ``L`` with ``L Lᵀ = matrix + damping·I`` (same retries)."""

    def triangular_inverse(self, lower: Array) -> Array:
        """``L⁻¹`` of a lower-triangular matrix, lower-triangular."""

    def eigh(self, matrix: Array) -> tuple[Array, Array]:
        """Ascending eigenvalues ``(d,)`` and orthonormal eigenvectors as columns, float64."""

    def damped_inverses(self, matrices: Sequence[Array], dampings: Sequence[float]) -> list[Array]:
        """The ``damped_inverse`` of each matrix; a device is read a few times for all of them."""

    def begin_damped_inverses(
        self, matrices: Sequence[Array], dampings: Sequence[float]
    ) -> Callable[[], list[Array]]:
        """``damped_inverses`` in two steps: begun now, waited for when the result is called.

        The matrices must not change in between.
        """

    def damped_choleskys(self, matrices: Sequence[Array], dampings: Sequence[float]) -> list[Array]:
        """The ``damped_cholesky`` of each matrix, likewise."""

    def triangular_inverses(self, lowers: Sequence[Array]) -> list[Array]:
        """The ``triangular_inverse`` of each matrix, likewise."""

    def eighs(self, matrices: Sequence[Array]) -> list[tuple[Array, Array]]:
        """The ``eigh`` of each matrix, likewise.

        A stack ``(g, d, d)`` may stand for a matrix; then its values are ``(g, d)`` and its vectors
        ``(g, d, d)``.
        """

    def inverse_roots(
        self, matrices: Sequence[Array], dampings: Sequence[float], degrees: Sequence[int]
    ) -> list[Array | None]:
        """``(matrix + damping·I)^(−1/degree)`` where there is a quicker way than eigenvectors.

        None for other matrices, also for those that are not positive definite. Negative
        eigenvalues that rounding left are damped, not cut off.
        """

    def squared_norms(self, arrays: Sequence[Array]) -> list[float]:
        """The sum of squares of each, in its own type; of half precision in single, else in double.

        Not finite where a number is not, or where squares overflow: where it is finite, a second
        moment will be. A device is read once for all of them.
        """

    def are_finite(self, arrays: Sequence[Array]) -> Array:
        """Whether each holds finite numbers only: ``(len(arrays),)``, of this library, not read."""

    def rng(self, seed: int) -> np.random.Generator:
        """A generator for this library's random draws."""
