"""How the tensors of a layer become rows: uses, examples and positions in, features out.

Every layer speaks one format: rows over uses ``u``, batch ``n`` and positions ``t``, with ``d``
features. A dense layer has ``u = t = 1``; a convolution has as many positions as output locations;
a layer used at each step of a recurrence has ``u`` uses. A *view* knows which axis of a tensor is
which, and asks the backend for moments without building the rows.
"""

from dataclasses import dataclass
from math import prod
from typing import Protocol, TypeAlias

from kfac_engine._types import Array
from kfac_engine.backend.protocol import Backend
from kfac_engine.backend.window import Window, pointwise
from kfac_engine.errors import InputError, ShapeError

Padding: TypeAlias = str | tuple[tuple[int, int], ...]

_AUTOMATIC = ("SAME", "SAME_LOWER", "VALID")


class View(Protocol):
    """The reading of one tensor of one use as rows of features."""

    @property
    def rank(self) -> int | None:
        """Axes of a tensor of one use; None accepts any number from two on."""

    def width(self, shape: tuple[int, ...]) -> int:
        """Features ``d`` of a tensor of this shape."""

    def count(self, shape: tuple[int, ...]) -> int:
        """Rows in a tensor of this shape."""

    def second_moment(
        self,
        x: Array,
        out: Array,
        backend: Backend,
        *,
        homogeneous: bool,
        alpha: float,
        beta: float,
    ) -> None:
        """``out ← beta·out + alpha·Σ_rows x xᵀ``."""

    def rows(self, x: Array, backend: Backend) -> Array:
        """The rows, example by example: ``(n, t, d)``. May be large: for blocks that need them."""

    def images(self, x: Array, backend: Backend) -> tuple[Array, Window]:
        """Images ``(n, channels, *sides)`` whose patches are the rows, without copies."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Features lie along one axis; every other axis counts rows.

    Attributes:
        feature_axis: -1 for dense layers and channels-last images, 1 for channels-first ones.
        rank: Axes a tensor must have; None accepts any number from two on.
    """

    feature_axis: int = -1
    rank: int | None = None

    def width(self, shape: tuple[int, ...]) -> int:
        self._check(shape)
        return shape[self.feature_axis]

    def count(self, shape: tuple[int, ...]) -> int:
        return prod(shape) // max(self.width(shape), 1)

    def second_moment(
        self,
        x: Array,
        out: Array,
        backend: Backend,
        *,
        homogeneous: bool,
        alpha: float,
        beta: float,
    ) -> None:
        self._check(x.shape)
        backend.second_moment(
            x,
            out,
            feature_axis=self.feature_axis,
            homogeneous=homogeneous,
            alpha=alpha,
            beta=beta,
        )

    def rows(self, x: Array, backend: Backend) -> Array:
        self._check(x.shape)
        moved = backend.xp.moveaxis(x, self.feature_axis, -1)
        rows: Array = moved.reshape(x.shape[0], -1, moved.shape[-1])
        return rows

    def images(self, x: Array, backend: Backend) -> tuple[Array, Window]:
        self._check(x.shape)
        return backend.xp.moveaxis(x, self.feature_axis, 1), pointwise(x.ndim - 2)

    def _check(self, shape: tuple[int, ...]) -> None:
        if len(shape) < 2 or (self.rank is not None and len(shape) != self.rank):
            wanted = "at least 2" if self.rank is None else str(self.rank)
            raise ShapeError(f"a layer's tensor has shape {shape}; {wanted} axes are needed.")
        if not -len(shape) < self.feature_axis < len(shape) or self.feature_axis == 0:
            raise ShapeError(
                f"a layer's tensor has shape {shape}; axis {self.feature_axis} is none of features "
                f"(axis 0 is the batch)."
            )


@dataclass(frozen=True, slots=True)
class Patches:
    """The input of a convolution: one row of features for each output location.

    Features are tap-major, ``(*kernel, channels)``, as a channels-last filter is laid out.

    Attributes:
        kernel: Taps an axis.
        strides: Step between locations, an axis.
        dilations: Step between taps, an axis.
        padding: ``"SAME"`` (TensorFlow's: the smaller half first; ``"SAME_LOWER"``: last),
            ``"VALID"`` or ``((begin, end), …)``.
        channels_first: Whether images are ``(n, channels, *sides)``.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    padding: Padding
    channels_first: bool

    def __post_init__(self) -> None:
        """Check that all parts speak of the same number of axes.

        Raises:
            InputError: They do not, or the padding's name is unknown.
        """
        if isinstance(self.padding, str) and self.padding not in _AUTOMATIC:
            raise InputError(
                f"unknown padding '{self.padding}'; choose one of {', '.join(_AUTOMATIC)}, or give "
                f"((begin, end), …)."
            )
        axes = len(self.kernel)
        explicit = axes if isinstance(self.padding, str) else len(self.padding)
        if not axes == len(self.strides) == len(self.dilations) == explicit:
            raise InputError(
                f"a filter with {axes} spatial axes has strides {self.strides}, dilations "
                f"{self.dilations} and padding {self.padding}; give one entry an axis."
            )

    @property
    def rank(self) -> int:
        return len(self.kernel) + 2

    def window(self, sides: tuple[int, ...]) -> Window:
        """The geometry for images of these sides."""
        pads = self.padding
        if isinstance(pads, str):
            pads = tuple(self._automatic(axis, side) for axis, side in enumerate(sides))
        return Window(
            self.kernel,
            self.strides,
            self.dilations,
            tuple(begin for begin, _ in pads),
            tuple(end for _, end in pads),
        )

    def width(self, shape: tuple[int, ...]) -> int:
        return prod(self.kernel) * shape[1 if self.channels_first else -1]

    def count(self, shape: tuple[int, ...]) -> int:
        return shape[0] * prod(self.window(self._sides(shape)).output_shape(self._sides(shape)))

    def second_moment(
        self,
        x: Array,
        out: Array,
        backend: Backend,
        *,
        homogeneous: bool,
        alpha: float,
        beta: float,
    ) -> None:
        window = self.window(self._sides(x.shape))
        backend.patch_second_moment(
            self._channels_first(x, backend),
            window,
            out,
            homogeneous=homogeneous,
            alpha=alpha,
            beta=beta,
        )

    def rows(self, x: Array, backend: Backend) -> Array:
        window = self.window(self._sides(x.shape))
        return backend.patches(self._channels_first(x, backend), window)

    def images(self, x: Array, backend: Backend) -> tuple[Array, Window]:
        return self._channels_first(x, backend), self.window(self._sides(x.shape))

    def _sides(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if len(shape) != len(self.kernel) + 2:
            raise ShapeError(
                f"a convolution over {len(self.kernel)} spatial axes got an input of shape {shape}."
            )
        return shape[2:] if self.channels_first else shape[1:-1]

    def _channels_first(self, x: Array, backend: Backend) -> Array:
        if self.channels_first:
            return x
        moved: Array = backend.xp.moveaxis(x, -1, 1)
        return moved

    def _automatic(self, axis: int, side: int) -> tuple[int, int]:
        """Padding that TensorFlow's strings and ONNX's ``auto_pad`` stand for."""
        if self.padding == "VALID":
            return 0, 0
        k, stride, dilation = self.kernel[axis], self.strides[axis], self.dilations[axis]
        total = max((-(-side // stride) - 1) * stride + (k - 1) * dilation + 1 - side, 0)
        small, large = total // 2, total - total // 2
        return (large, small) if self.padding == "SAME_LOWER" else (small, large)


def written_out(rows: Array) -> tuple[Array, Window]:
    """Rows ``(n, t, d)`` as images with a pixel for each row."""
    return rows.swapaxes(1, 2), pointwise(1)
