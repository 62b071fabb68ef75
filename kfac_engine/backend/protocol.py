"""Defines the interface that each array library implements.

All other array code goes through ``xp``. The NumPy backend defines every operation; another backend
returns the same numbers within a stated tolerance and raises the same errors.

Symmetric results are C-contiguous. Second moments define the lower triangle only: the upper
triangle is unspecified until ``mirror`` completes it. All other symmetric results have both
triangles. Inputs of type float16 and bfloat16 are accumulated in float32; float32 and float64 keep
their type.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import NamedTuple, Protocol

import numpy.typing as npt

from kfac_engine._types import Array
from kfac_engine.backend.threads import Task
from kfac_engine.backend.window import Window


class Accumulation(NamedTuple):
    """How a sum over rows changes a result: ``out ← beta·out + alpha·Σ``, in place.

    A ``beta`` of zero overwrites, NaN included. A one, the homogeneous coordinate, is appended to
    ``homogeneous`` rows.
    """

    homogeneous: bool = False
    alpha: float = 1.0
    beta: float = 0.0

    @property
    def of_others(self) -> "Accumulation":
        """The same accumulation for further rows, which keeps the result so far."""
        return self._replace(beta=1.0)


# Writes the sum of the rows as they are.
SUM = Accumulation()


class LinearAlgebra(Protocol):
    """Dense linear algebra on any number of matrices in one call.

    Matrices of one call may differ in size and element type. Operations compute in float64, and
    results have the element type of their matrix unless stated otherwise. Only the lower triangle
    of a symmetric matrix is read. The host reads a device a few times in a call, for any number of
    matrices.

    Every operation raises ShapeError for a matrix that is not square and NonFiniteError for a
    matrix with NaN or infinity.
    """

    def begin_damped_inverses(
        self, matrices: Sequence[Array], dampings: Sequence[float]
    ) -> Callable[[], list[Array]]:
        """Start to compute ``(matrix + damping·I)⁻¹`` of each symmetric matrix.

        The returned function waits for the inverses, symmetric. Do not change the matrices before
        it was called. If rounding made a matrix indefinite, its damping is multiplied by ten, up to
        three times. If that fails, negative eigenvalues are replaced with zero. The result is never
        NaN.

        ``InputError`` is raised if a damping is negative or not finite, or zero for a matrix of
        zeros. A device may raise it in the returned function.
        """

    def damped_choleskys(self, matrices: Sequence[Array], dampings: Sequence[float]) -> list[Array]:
        """Return lower-triangular ``L`` with ``L Lᵀ = matrix + damping·I`` for each matrix.

        Indefinite matrices are treated as by ``begin_damped_inverses``.
        """

    def triangular_inverses(self, lowers: Sequence[Array]) -> list[Array]:
        """Return ``L⁻¹``, lower-triangular, for each lower-triangular matrix."""

    def eighs(self, matrices: Sequence[Array]) -> list[tuple[Array, Array]]:
        """Return eigenvalues and eigenvectors of each symmetric matrix, or stack of matrices.

        The eigenvalues ``(…, d)`` ascend. The eigenvectors are the columns of ``(…, d, d)``,
        orthonormal. Both are float64.
        """

    def inverse_roots(
        self, matrices: Sequence[Array], dampings: Sequence[float], degrees: Sequence[int]
    ) -> list[Array | None]:
        """Return ``(matrix + damping·I)^(−1/degree)`` for matrices whose eigenvectors are slower.

        A root is None if eigenvectors are faster or the matrix is not positive definite. Negative
        eigenvalues due to rounding are damped, not replaced with zero.
        """


class ManyArrays(Protocol):
    """Operations on many small arrays of a device at once, because each call takes time.

    Arrays are contiguous and of one floating-point type unless stated otherwise. Arrays that are
    written are in the memory of no other argument, or equal to one of them.
    """

    def inner_products(self, pairs: Sequence[tuple[Array, Array]]) -> Array:
        """Return the float64 addends of the inner product of each pair, ``(pairs, addends)``."""

    def combine(self, combinations: Sequence[tuple[Array, float, Array, float, Array]]) -> None:
        """Write ``a·x + b·y`` to ``out`` for each ``(out, a, x, b, y)``."""

    def multiply_between(
        self, left: Array, V: Array, right: Array, out: Array, scale: float
    ) -> bool:
        """Write ``scale·left·V·right`` to ``out``, and return whether the matrices are small.

        For other matrices or types, nothing is computed. The matrices have any strides; ``V`` and
        ``out`` may have two axes of rows. Inside ``run_parallel``, the result is defined at its
        end.
        """

    def orthogonalize(
        self,
        matrices: Sequence[Array],
        polynomial: tuple[float, float, float],
        iterations: Sequence[int],
        along: Sequence[Array],
    ) -> list[Array]:
        """Return matrices after iterations ``a·X + b·X Xᵀ X + c·(X Xᵀ)² X``, as new arrays.

        The iterations of each matrix start from the matrix divided by its Frobenius norm and by the
        root of the norm of ``X Xᵀ``. A matrix is returned unchanged where its result has no
        positive inner product with the array of ``along``. All are float32.
        """

    def fits(self, matrix: Array) -> bool:
        """Return whether a matrix has the type and the size for ``orthogonalize``."""


class Backend(Protocol):
    """The operations of one array library."""

    name: str  # name of the backend in ``select``
    scratch_bytes: int  # bound of the scratch memory of one operation, in bytes

    @property
    def xp(self) -> ModuleType:
        """The array module: ``numpy``, or a module with its interface."""

    @property
    def linalg(self) -> LinearAlgebra:
        """Batched linear algebra on arrays of this library."""

    @property
    def many(self) -> ManyArrays | None:
        """Operations on many arrays at once; None if calls take no time."""

    # -- memory -----------------------------------------------------------------------------------

    def working_bytes(self, copied: int, inverted: int, decomposed: int) -> tuple[int, bool]:
        """Return the temporary memory of all operations in bytes, and whether it is on a device.

        ``copied`` is the number of bytes of the largest operand of a second moment, including its
        patches. ``inverted`` and ``decomposed`` are the numbers of entries of the largest matrix,
        or stack, that is inverted or whose eigenvectors are computed.
        """

    def reserve(self, stored: int) -> None:
        """Allocate device memory for ``stored`` bytes of arrays and for the scratch memory.

        Later arrays are allocated in this memory. On the host this does nothing. If the device has
        less memory, ``MemoryLimitError`` is raised.
        """

    # -- conversion -------------------------------------------------------------------------------

    def asarray(self, value: object, dtype: npt.DTypeLike | None = None) -> Array:
        """Return a NumPy array, or an object with ``__dlpack__``, as an array of this library."""

    def to_numpy(self, array: Array) -> Array:
        """Return an array as an array of NumPy: a view if the array is in host memory."""

    def download(self, arrays: Sequence[Array]) -> list[Array]:
        """Return float64 copies of small arrays on the host, after a single read of a device."""

    def read_later(self, array: Array, use: Callable[[Array], None]) -> None:
        """Call ``use`` with a float64 copy of a small array on the host, or raise its error.

        In a block of ``shared_reads``, a device is read together with the next ``download``, norms
        or inner products, or at the end of the block. Elsewhere, it is read at once.
        """

    def shared_reads(self) -> AbstractContextManager[None]:
        """Return a block in which ``read_later`` may wait; nothing in it may depend on ``use``."""

    # -- threads ----------------------------------------------------------------------------------

    def run_parallel(self, tasks: Sequence[Task]) -> None:
        """Run independent tasks, in threads on a CPU, and wait for them."""

    # -- products ---------------------------------------------------------------------------------

    def matmul(self, x: Array, y: Array, out: Array | None = None) -> Array:
        """Return the product ``x y`` of matrices or stacks of matrices, in ``out`` if given."""

    def add_scaled(self, out: Array, measured: Array, alpha: float, beta: float) -> None:
        """Compute ``out ← beta·out + alpha·measured``, in place; ``beta = 0`` overwrites."""

    # -- second moments ---------------------------------------------------------------------------

    def second_moment(
        self, x: Array, out: Array, how: Accumulation = SUM, *, feature_axis: int = -1
    ) -> None:
        """Compute the lower triangle of ``out ← beta·out + alpha·Σ_rows x xᵀ``, in place.

        All axes of ``x`` but ``feature_axis`` are rows; it has any strides. ``out`` is ``(d, d)``,
        or ``(d + 1, d + 1)`` for homogeneous rows.
        """

    def patch_second_moment(
        self, x: Array, window: Window, out: Array, how: Accumulation = SUM
    ) -> None:
        """Compute the lower triangle of ``out ← beta·out + alpha·Σ z zᵀ`` over all patches ``z``.

        Features are tap-major: ``(*kernel, channels)`` in row-major order, then the homogeneous
        coordinate. With three axes, ``out`` contains one moment for each group of adjacent
        channels. The features of a group are tap-major, too.

        Args:
            x: Images, ``(n, channels, *spatial_shape)``, any strides.
            window: Geometry; as many axes as ``spatial_shape``.
            out: ``(d, d)`` with ``d = taps·channels (+ 1)``, or ``(groups, d, d)`` with
                ``d = taps·channels/groups (+ 1)``.
            how: Whether patches are homogeneous, and the factors of old and new moment.
        """

    def mirror(self, moment: Array) -> None:
        """Copy the lower triangle of each matrix ``(…, d, d)`` to its upper triangle, in place.

        If the second moments of a backend have both triangles, this does nothing.
        """

    def patches(self, x: Array, window: Window) -> Array:
        """Return all patches, ``(n, positions, taps·channels)``, tap-major; a new array."""

    def patch_squares(
        self, x: Array, window: Window, out: Array, *, alpha: float = 1.0, beta: float = 0.0
    ) -> None:
        """Compute ``out ← beta·out + alpha·Σ z²`` over all patches ``z``, entry by entry, in place.

        This is the diagonal of ``patch_second_moment`` without the homogeneous coordinate. ``out``
        is contiguous, ``(taps·channels,)``.
        """

    # -- sums over examples -----------------------------------------------------------------------

    def squared_gradients(
        self, x: Array, window: Window, ds: Array, out: Array, how: Accumulation = SUM
    ) -> None:
        """Compute ``out ← beta·out + alpha·Σ_n (Σ_t z_nt ds_ntᵀ)²`` for each group, in place.

        These are the squared weight gradients of the examples, entry by entry. The gradients of the
        outputs ``ds`` are ``(n, outputs, *output_shape)`` with any strides. ``out`` is
        ``(groups, taps·channels/groups (+ 1), outputs/groups)``. The other arguments are as for
        ``patch_second_moment``.
        """

    def example_sums(self, x: Array, ds: Array, axes: tuple[int, ...]) -> Array:
        """Return ``[Σ x∘ds, Σ ds]`` of each example, summed over ``axes``.

        The first axis of ``ds`` is the batch, which is not summed. ``x`` has the axes of ``ds``,
        each of the same length or of length one. The result is a new array ``(n, 2·entries)``;
        entries are the axes that are not summed, in row-major order.
        """

    def count_ids(self, ids: Array, rows: int) -> Array:
        """Return the number of occurrences of each integer in ``[0, rows)``, shape ``(rows,)``."""

    def draw_classes(self, logits: Array, uniforms: Array, axis: int) -> Array:
        """Return a class for each row of ``softmax(logits)``, sampled by inversion, int64.

        Rows are along ``axis``. The uniform numbers are in [0, 1), float64, with the shape of
        ``logits`` without ``axis``. All backends sample the same classes from the same uniform
        numbers.
        """

    def cross_entropy(self, logits: Array, ids: Array, axis: int) -> tuple[Array, Array] | None:
        """Return ``−log softmax(logits)`` at class ids along ``axis``, and its gradient, at once.

        The terms have an axis of one class; both are new arrays of the type of ``logits``. The ids
        are in the range of the classes. None is returned if array functions take as little time.
        """

    # -- checks -----------------------------------------------------------------------------------

    def squared_norms(self, arrays: Sequence[Array]) -> list[float]:
        """Return the sum of squares of each array; a device is read once for all arrays.

        The sum is computed in float32 for half precision, and in the type of the array otherwise.
        The sum is not finite if an entry is not finite or if squares overflow. If it is finite, the
        second moment of the array is finite.
        """

    def are_finite(self, arrays: Sequence[Array]) -> Array:
        """Return whether each array is finite, as an array ``(len(arrays),)`` of this library."""
