"""Views the tensors of a layer as rows of features.

All layers have one data format: rows over uses ``u``, examples ``n`` and positions ``t``, with
``d`` features. A dense layer has ``u = t = 1``. A convolution has a position for each output pixel.
A layer of a recurrence has a use for each time step. A *view* names the axes of a tensor, and
computes second moments in the backend without a copy of the rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar, Protocol, TypeAlias

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend.protocol import Accumulation, Backend
from kfac_engine.backend.window import SlidingWindow, Window, pointwise
from kfac_engine.errors import InputError, NonFiniteError, ShapeError

Padding: TypeAlias = str | tuple[tuple[int, int], ...]

# Name of a padding to the name in ONNX; padding that does not depend on the image has none.
_AUTOMATIC = {"SAME": "SAME_UPPER", "SAME_LOWER": "SAME_LOWER", "VALID": ""}


class View(Protocol):
    """A tensor of one use of a layer, read as rows of features."""

    has_rows: ClassVar[bool]  # whether ``rows`` may be called

    @property
    def rank(self) -> int | None:
        """Number of axes of the tensor; None for any number of at least two."""

    @property
    def feature_axis(self) -> int:
        """Axis of the features or channels; for token ids, the last axis of the rows."""

    def width(self, shape: tuple[int, ...]) -> int:
        """Return the number of features ``d`` of a tensor of this shape."""

    def count(self, shape: tuple[int, ...]) -> int:
        """Return the number of rows of a tensor of this shape."""

    def second_moment(self, x: Array, out: Array, backend: Backend, how: Accumulation) -> None:
        """Compute ``out ← beta·out + alpha·Σ_rows x xᵀ``, in the lower triangle.

        ``out`` is ``(d, d)``, or ``(d + 1, d + 1)`` for homogeneous rows. A view without a second
        moment as one matrix raises InputError.
        """

    def rows(self, x: Array, backend: Backend) -> Array:
        """Return the rows, ``(n, t, d)``. They may take much more memory than the tensor."""

    def images(self, x: Array, backend: Backend) -> tuple[Array, Window]:
        """Return images ``(n, channels, *shape)`` and the window whose patches are the rows."""


@dataclass(frozen=True, slots=True)
class RowView:
    """A tensor whose rows lie along one axis, with a row for each entry of the other axes."""

    has_rows: ClassVar[bool] = True

    # Axis of the features: -1 for dense layers and channels-last images, 1 for channels-first
    # images.
    feature_axis: int = -1
    rank: int | None = None  # number of axes of the tensor; None for any number of at least two

    def width(self, shape: tuple[int, ...]) -> int:
        self._check(shape)
        return shape[self.feature_axis]

    def count(self, shape: tuple[int, ...]) -> int:
        self._check(shape)
        return prod(shape) // max(shape[self.feature_axis], 1)

    def second_moment(self, x: Array, out: Array, backend: Backend, how: Accumulation) -> None:
        self._check(x.shape)
        backend.second_moment(x, out, how, feature_axis=self.feature_axis)

    def rows(self, x: Array, backend: Backend) -> Array:
        self._check(x.shape)
        moved = backend.xp.moveaxis(x, self.feature_axis, -1)
        rows: Array = moved.reshape(x.shape[0], -1, moved.shape[-1])
        return rows

    def images(self, x: Array, backend: Backend) -> tuple[Array, Window]:
        self._check(x.shape)
        return backend.xp.moveaxis(x, self.feature_axis, 1), pointwise(x.ndim - 2)

    def _check(self, shape: tuple[int, ...]) -> None:
        rank, axis = len(shape), self.feature_axis
        if rank < 2 or (self.rank is not None and rank != self.rank):
            needed = "at least 2" if self.rank is None else str(self.rank)
            raise ShapeError(f"a tensor of a layer has shape {shape}, but needs {needed} axes.")
        if not -rank < axis < rank or axis == 0:
            raise ShapeError(
                f"feature axis {self.feature_axis} does not exist in a tensor of shape {shape}, "
                f"where axis 0 is the batch."
            )


@dataclass(frozen=True, slots=True)
class PatchView:
    """The input of a convolution, with a row for each output position.

    The features of a row are ``(*kernel, channels)``, as in a channels-last filter.
    """

    has_rows: ClassVar[bool] = True

    window: SlidingWindow  # window of the convolution
    channels_first: bool  # whether images are ``(n, channels, *spatial_shape)``

    @property
    def rank(self) -> int:
        return len(self.window.kernel) + 2

    @property
    def feature_axis(self) -> int:
        return 1 if self.channels_first else -1

    def width(self, shape: tuple[int, ...]) -> int:
        return self.window.taps * shape[self.feature_axis]

    def count(self, shape: tuple[int, ...]) -> int:
        spatial_shape = self._spatial_shape(shape)
        return shape[0] * prod(self.window.resolved(spatial_shape).output_shape(spatial_shape))

    def second_moment(self, x: Array, out: Array, backend: Backend, how: Accumulation) -> None:
        window = self.window.resolved(self._spatial_shape(x.shape))
        backend.patch_second_moment(self._channels_first(x, backend), window, out, how)

    def rows(self, x: Array, backend: Backend) -> Array:
        window = self.window.resolved(self._spatial_shape(x.shape))
        return backend.patches(self._channels_first(x, backend), window)

    def images(self, x: Array, backend: Backend) -> tuple[Array, Window]:
        return self._channels_first(x, backend), self.window.resolved(self._spatial_shape(x.shape))

    def _spatial_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if len(shape) != self.rank:
            raise ShapeError(
                f"a convolution over {self.rank - 2} spatial axes cannot read an input of shape "
                f"{shape}."
            )
        return shape[2:] if self.channels_first else shape[1:-1]

    def _channels_first(self, x: Array, backend: Backend) -> Array:
        if self.channels_first:
            return x
        moved: Array = backend.xp.moveaxis(x, -1, 1)
        return moved


def patch_view(
    kernel: tuple[int, ...],
    strides: tuple[int, ...],
    dilations: tuple[int, ...],
    padding: Padding,
    *,
    channels_first: bool,
) -> PatchView:
    """Return the view of the input of a convolution.

    Args:
        kernel: Taps of each spatial axis.
        strides: Step between output positions, for each spatial axis.
        dilations: Step between taps, for each spatial axis.
        padding: ``"SAME"`` as in TensorFlow (the odd pixel comes last), ``"SAME_LOWER"`` (the odd
            pixel comes first), ``"VALID"`` or ``((begin, end), …)``.
        channels_first: Whether images are ``(n, channels, *spatial_shape)``.
    """
    if isinstance(padding, str) and padding not in _AUTOMATIC:
        raise InputError(
            f"unknown padding '{padding}'; choose one of {', '.join(_AUTOMATIC)}, or give "
            f"((begin, end), …)."
        )
    axes = len(kernel)
    pads = ((0, 0),) * axes if isinstance(padding, str) else padding
    if not axes == len(strides) == len(dilations) == len(pads):
        raise InputError(
            f"a filter with {axes} spatial axes has strides {strides}, dilations {dilations} and "
            f"padding {padding}; give one entry for each axis."
        )
    window = SlidingWindow(
        kernel,
        strides,
        dilations,
        begins=tuple(begin for begin, _ in pads),
        ends=tuple(end for _, end in pads),
        same=_AUTOMATIC[padding] if isinstance(padding, str) else "",
    )
    return PatchView(window, channels_first)


def rows_as_images(rows: Array) -> tuple[Array, Window]:
    """Return rows ``(n, t, d)`` as images ``(n, d, t)`` with the window of a single pixel."""
    return rows.swapaxes(1, 2), pointwise(1)


# -- patches that are multiplied by a mask ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MaskedPatchView:
    """The input of a convolution whose patches are multiplied by a mask."""

    has_rows: ClassVar[bool] = True

    patches: PatchView  # view without the mask
    mask: tuple[float, ...]  # factor of each feature, in the order ``(*kernel, channels)``

    @property
    def rank(self) -> int:
        return self.patches.rank

    @property
    def feature_axis(self) -> int:
        return self.patches.feature_axis

    @property
    def channels_first(self) -> bool:
        """Whether images are ``(n, channels, *spatial_shape)``."""
        return self.patches.channels_first

    def width(self, shape: tuple[int, ...]) -> int:
        features = self.patches.width(shape)
        if features != len(self.mask):
            raise ShapeError(
                f"a patch mask has {len(self.mask)} entries, but patches of an input of shape "
                f"{shape} have {features} features."
            )
        return features

    def count(self, shape: tuple[int, ...]) -> int:
        return self.patches.count(shape)

    def second_moment(self, x: Array, out: Array, backend: Backend, how: Accumulation) -> None:
        d = self.width(x.shape)
        moment = backend.xp.zeros_like(out)
        self.patches.second_moment(x, moment, backend, how._replace(beta=0.0))
        # (m∘z)(m∘z)ᵀ = (m mᵀ)∘(z zᵀ): masking the moment costs d², masking the patches n·t·d.
        mask = self._mask(backend, out)
        moment[:d] *= mask[:, None]
        moment[:, :d] *= mask
        if how.beta == 0.0:  # 0 · NaN would be NaN
            out[...] = moment
            return
        out *= how.beta
        out += moment

    def rows(self, x: Array, backend: Backend) -> Array:
        patches = self.patches.rows(x, backend)
        masked: Array = patches * self._mask(backend, patches)
        return masked

    def images(self, x: Array, backend: Backend) -> tuple[Array, Window]:
        return rows_as_images(self.rows(x, backend))

    def _mask(self, backend: Backend, like: Array) -> Array:
        return backend.asarray(np.array(self.mask), like.dtype)


def masked_patch_view(patches: PatchView, mask: Array, channels: int) -> MaskedPatchView:
    """Return the view of patches that are multiplied by a finite mask, ``(*kernel, channels)``."""
    expected = (*patches.window.kernel, channels)
    array = np.asarray(mask, dtype=np.float64)
    if array.shape != expected:
        raise ShapeError(f"patch_mask has shape {array.shape}; (*kernel, channels) is {expected}.")
    if not np.isfinite(array).all():
        raise NonFiniteError("patch_mask contains NaN or infinity.")
    return MaskedPatchView(patches, tuple(array.reshape(-1).tolist()))


# -- token ids, read as one-hot rows without a copy of them ----------------------------------------


@dataclass(frozen=True, slots=True)
class TokenIdView:
    """Token ids, read as rows; a row is the sum of the unit vectors of its ids."""

    has_rows: ClassVar[bool] = False  # one-hot rows are as long as the table
    feature_axis: ClassVar[int] = -1

    vocabulary: int  # number of rows of the table, which is the number of features
    rank: int = 2  # 1 for one id in an example, ``(n,)``; 2 for several, ``(n, ids)``
    # Whether each id is a row, ``(n, …positions)``; otherwise the ids of an example are one row.
    positions: bool = False
    # Whether an id that occurs ``k`` times in a row counts ``k`` times in the diagonal of the
    # second moment; otherwise it counts once.
    count_repeats: bool = False
    # Whether an id outside the table is a row of zeros, as in OneHot; otherwise it is an error.
    zeros_outside: bool = False

    def width(self, shape: tuple[int, ...]) -> int:
        if len(shape) != self.rank and not self.positions:
            accepted = "(n,)" if self.rank == 1 else "(n,) or (n, ids)"
            raise ShapeError(
                f"token ids need shape {accepted}, got {shape}; set positions=True if each id has "
                f"an output."
            )
        return self.vocabulary

    def count(self, shape: tuple[int, ...]) -> int:
        return prod(shape) if self.positions else shape[0]

    def second_moment(self, x: Array, out: Array, backend: Backend, how: Accumulation) -> None:
        raise InputError(
            "the second moment of token ids is diagonal; use an approximation with a diagonal "
            "input factor, such as 'kron_in_diag'."
        )

    def rows(self, x: Array, backend: Backend) -> Array:
        raise InputError(
            "token ids cannot be read as one-hot rows; use an approximation with a diagonal "
            "input factor, such as 'kron_in_diag'."
        )

    def images(self, x: Array, backend: Backend) -> tuple[Array, Window]:
        return rows_as_images(self.rows(x, backend))

    def counts(self, ids: Array, backend: Backend, weights: Array | None = None) -> Array:
        """Count the rows with each id, ``(vocabulary,)``: the diagonal of ``Σ_rows x xᵀ``.

        The checked ids are ``(n,)`` or ``(n, ids)``. With ``weights``, one for each row, the
        results are sums of weights; with ``count_repeats``, numbers of occurrences.
        """
        xp = backend.xp
        flat = xp.where(ids < 0, ids + self.vocabulary, ids)
        flat = xp.where((flat < 0) | (flat >= self.vocabulary), -1, flat)
        if not (self.count_repeats or self.positions or ids.ndim == 1):
            ordered = xp.sort(flat, axis=1)
            first = xp.ones(ordered.shape, bool)
            first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
            flat = xp.where(first, ordered, -1)
        if weights is None:
            return backend.count_ids(flat, self.vocabulary)
        of_ids = xp.repeat(weights, flat.size // len(weights))
        sums = xp.bincount(flat.reshape(-1) + 1, of_ids, minlength=self.vocabulary + 1)
        counts: Array = sums[1:]
        return counts

    def check(self, name: str, ids: Array) -> None:
        """Check that token ids are rows of the table; negative ids count from its end.

        With ``zeros_outside``, any integers are allowed.
        """
        if ids.dtype.kind not in "iu":
            raise InputError(f"'{name}' contains token ids and must be integer, not {ids.dtype}.")
        if self.zeros_outside:
            return
        low, high = (int(ids.min()), int(ids.max())) if ids.size else (0, 0)
        if not -self.vocabulary <= low <= high < self.vocabulary:
            raise InputError(
                f"'{name}' contains token ids from {low} to {high}; the vocabulary has "
                f"{self.vocabulary} entries."
            )


# -- examples and rows in the tensors of a layer with several uses ---------------------------------

_DENSE_RANK = 2


def folded_shape(shape: tuple[int, ...], view: View, num_uses: int) -> tuple[int, ...]:
    """Return the shape of a tensor after its uses are folded into the batch axis.

    The result is ``(num_uses · n, …)``. ``shape`` is of this form or ``(num_uses, n, …)``; it can
    be any shape for one use. A view of one use without a fixed rank has two axes.
    """
    if num_uses == 1:
        return shape
    rank = view.rank or _DENSE_RANK
    if len(shape) == rank + 1 and shape[0] == num_uses:
        return shape[0] * shape[1], *shape[2:]
    if len(shape) == rank and shape[0] % num_uses == 0:
        return shape
    raise ShapeError(
        f"a tensor of {num_uses} uses has shape {shape}; it needs {rank} axes with a multiple of "
        f"{num_uses} first, or {rank + 1} axes with {num_uses} first."
    )


def examples(
    shapes: Sequence[tuple[int, ...]],
    view: View,
    num_uses: int,
    batch: int | None = None,
    *,
    exact: bool = False,
) -> int:
    """Return the number of examples in the tensors of one part of a batch.

    ``shapes`` are those of the tensors of each use, or of one tensor with all uses, and ``view`` is
    the view of one use. ``batch`` is the length of a value whose first axis is the batch, or with
    ``exact`` the number of examples. If it is shorter than the first axis of the tensors, that axis
    includes positions; if it is longer, the value has positions. It is not read for one tensor with
    several uses.
    """
    folded = num_uses if len(shapes) == 1 else 1
    length = folded_shape(shapes[0], view, folded)[0] // folded
    if batch is None or folded > 1:
        return length
    return batch if exact else min(length, batch)


def rows_per_example(
    shapes: Sequence[tuple[int, ...]],
    view: View,
    num_uses: int,
    batch: int | None = None,
    *,
    exact: bool = False,
) -> int | float:
    """Return the number of rows for each example: uses × positions.

    The arguments are as in ``examples``. The number is a fraction if examples differ in it, such as
    graphs in their nodes.
    """
    folded = num_uses if len(shapes) == 1 else 1
    rows = sum(view.count(folded_shape(shape, view, folded)) for shape in shapes)
    count = examples(shapes, view, num_uses, batch, exact=exact)
    return rows / count if rows % count else rows // count
