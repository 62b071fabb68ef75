"""Describes how each kind of layer lays out its tensors and parameters, and sums over axes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import ClassVar, Self

import numpy as np
import numpy.typing as npt

from kfac_engine._types import Array
from kfac_engine.arguments import check_choice, check_int, check_list
from kfac_engine.backend.namespace import array_module
from kfac_engine.errors import InputError, ShapeError
from kfac_engine.layers.packing import Packing
from kfac_engine.layers.views import (
    Padding,
    RowView,
    TokenIdView,
    View,
    masked_patch_view,
    patch_view,
)

# -- random subsets of the examples and patches that an input statistic reads ----------------------


@dataclass(frozen=True, slots=True)
class Sampling:
    """How large a random subset of the examples and patches is; by default all of them."""

    # Fraction of the examples whose patches are read; None for all.
    input_fraction: float | None = None
    max_patches: int | None = None  # largest number of patches; None for all
    max_patches_per_feature: float = 1.0  # largest number of patches for each feature of a patch

    @property
    def active(self) -> bool:
        """Whether the subset may be smaller than the batch."""
        return self.input_fraction is not None or self.max_patches is not None

    def examples(self, count: int, rng: np.random.Generator) -> npt.NDArray[np.intp] | None:
        """Draw the indices of the examples to read, ascending; None for all of ``count``."""
        if self.input_fraction is None:
            return None
        return _choose(count, ceil(self.input_fraction * count), rng)

    def patches(
        self, counts: Sequence[int], features: int, rng: np.random.Generator
    ) -> list[npt.NDArray[np.intp]] | None:
        """Draw the ascending indices of the patches to read from each tensor; None for all patches.

        ``counts`` has the number of patches in each tensor, and ``features`` is the length of a
        patch without the homogeneous coordinate. The draw is uniform over the patches of all
        tensors.
        """
        if self.max_patches is None:
            return None
        limit = min(self.max_patches, ceil(self.max_patches_per_feature * features))
        total = sum(counts)
        if limit >= total:
            return None
        ends = np.cumsum(counts)
        chosen = _choose(total, limit, rng)
        pieces = np.split(chosen, np.searchsorted(chosen, ends[:-1]))
        return [piece - start for piece, start in zip(pieces, ends - counts, strict=True)]


EVERYTHING = Sampling()


def _choose(count: int, size: int, rng: np.random.Generator) -> npt.NDArray[np.intp]:
    """Return ``size`` different random indices below ``count``, in ascending order."""
    return np.sort(rng.choice(count, size, replace=False))


# -- layouts ---------------------------------------------------------------------------------------

# Number of spatial axes to their letters in formats.
_SPATIAL = {1: "W", 2: "HW", 3: "DHW"}


@dataclass(frozen=True, slots=True)
class LayerForm:
    """The layout of a layer."""

    input_view: View  # view of the input, as rows of ``d_in`` features
    output_view: View  # view of the gradient of the pre-activation, as rows of ``d_out`` features
    packing: Packing  # map from weight and bias to a matrix ``(d_in (+ 1), d_out)``
    # Number of uses. For more than one, a tensor has all uses along its first axis.
    num_uses: int = 1
    sampling: Sampling = EVERYTHING  # subset of a batch that the input statistic reads

    @property
    def num_parameters(self) -> int:
        """Number of parameters: a weight, and a bias if there is one."""
        return 1 + self.packing.has_bias

    def with_bias(self, has_bias: bool) -> Self:
        """Return the form of the layer with or without a bias."""
        return replace(self, packing=replace(self.packing, has_bias=has_bias))

    def with_uses(self, num_uses: int) -> Self:
        """Return the form of a layer that is used ``num_uses`` times."""
        return replace(self, num_uses=num_uses)

    def packed_shape(self, weight_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a packed vector, from the shape of the weight."""
        return self.packing.matrix_shape(weight_shape)

    def sides(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Return the rows of the layer's matrices, inputs first, for these parameter shapes."""
        if not self.input_view.has_rows:  # token ids: the vocabulary has a diagonal
            return (1, shapes[0][-1])
        return self.packing.matrix_shape(shapes[0])


def dense_form(
    weight_format: str, has_bias: bool, *, num_uses: int = 1, feature_axis: int = -1
) -> LayerForm:
    """Return the form of a dense layer, with positions on the axes between batch and features."""
    view = RowView(feature_axis)
    return LayerForm(view, view, Packing(weight_format, has_bias), num_uses)


def embedding_form(
    vocabulary: int,
    *,
    positions: bool = False,
    count_repeats: bool = False,
    rank: int = 2,
    zeros_outside: bool = False,
) -> LayerForm:
    """Return the form of an embedding table, ``(vocabulary, d_out)``.

    The other arguments are as in ``TokenIdView``.
    """
    view = TokenIdView(vocabulary, rank, positions, count_repeats, zeros_outside)
    return LayerForm(view, RowView(-1, None if positions else 2), Packing("IO", has_bias=False))


def tied_form(vocabulary: int, lookups: int) -> LayerForm:
    """Return the form of a table ``(vocabulary, d)`` that embeddings and products read.

    The input view reads the token ids of the first ``lookups`` uses; the output view reads the
    features of the others, and all gradients.
    """
    ids = TokenIdView(vocabulary, positions=True, zeros_outside=True)
    return LayerForm(ids, RowView(), Packing("OI", has_bias=False), num_uses=lookups)


def convolution_form(  # noqa: PLR0913 (all parameters of a convolution)
    filter_shape: tuple[int, ...],
    padding: Padding,
    strides: Sequence[int] | None = None,
    dilations: Sequence[int] | None = None,
    data_format: str | None = None,
    weight_format: str | None = None,
    *,
    has_bias: bool,
    mask: Array | None = None,
    sampling: Sampling = EVERYTHING,
) -> LayerForm:
    """Return the form of a convolution over one, two or three spatial axes.

    Args:
        filter_shape: Shape of the filter, in ``weight_format``.
        padding: ``"SAME"``, ``"VALID"`` (in any case) or ``((begin, end), …)``.
        strides: Stride of each spatial axis, or of each data axis (1 for batch and channels).
        dilations: Dilation of each spatial axis, or of each data axis.
        data_format: ``"NHWC"`` (the default) or ``"NCHW"``, with ``W``, ``HW`` or ``DHW``.
        weight_format: ``"HWIO"`` (the default) or ``"OIHW"``, with ``W``, ``HW`` or ``DHW``.
        has_bias: Whether the layer has a bias.
        mask: Factor of each entry of a patch, ``(*kernel, channels)``.
        sampling: Subset of a batch that the input statistic reads.
    """
    spatial = _SPATIAL.get(len(filter_shape) - 2)
    if spatial is None:
        raise InputError(
            f"a filter of shape {filter_shape} has {len(filter_shape)} axes; a convolution needs "
            f"3, 4 or 5."
        )
    last, first = f"N{spatial}C", f"NC{spatial}"
    data_format = data_format or last
    check_choice("data_format", data_format, (last, first))
    if not isinstance(padding, str):
        for pair in check_list("padding", padding, "((1, 1), (1, 1)) or 'SAME'"):
            check_list("each of padding", pair, "(1, 1)")
    packing = Packing(weight_format or f"{spatial}IO", has_bias)
    patches = patch_view(
        kernel=packing.kernel(filter_shape),
        strides=_spatial_entries("strides", strides, data_format),
        dilations=_spatial_entries("dilations", dilations, data_format),
        padding=padding.upper() if isinstance(padding, str) else tuple((b, e) for b, e in padding),
        channels_first=data_format == first,
    )
    outputs = RowView(1 if data_format == first else -1, rank=len(data_format))
    view: View = patches
    if mask is not None:
        view = masked_patch_view(patches, mask, channels=filter_shape[packing.axes[-2]])
    return LayerForm(view, outputs, packing, sampling=sampling)


def transposed_form(
    filter_shape: tuple[int, ...],
    *,
    padding: Padding,
    strides: Sequence[int] | None = None,
    dilations: Sequence[int] | None = None,
    data_format: str | None = None,
    weight_format: str | None = None,
) -> LayerForm:
    """Return the form of a transposed convolution, without its bias.

    A transposed convolution is the adjoint of a convolution, so the two views are exchanged. A row
    is an input position. Its input features are the channels, its output features are the patch of
    the output that depends on the position. ``padding`` is the pixels that are removed from the
    output: ``"VALID"`` or ``((begin, end), …)``. ``weight_format`` is ``"HWOI"`` (the default) or
    ``"IOHW"``, with ``W``, ``HW`` or ``DHW``. The other arguments are as in ``convolution_form``.
    """
    spatial = _SPATIAL.get(len(filter_shape) - 2, "")
    last, first = f"{spatial}OI", f"IO{spatial}"
    weight_format = weight_format or last
    check_choice("weight_format", weight_format, (last, first))
    convolution = f"{spatial}IO" if weight_format == last else f"OI{spatial}"
    geometry = padding, strides, dilations, data_format, convolution
    adjoint = convolution_form(filter_shape, *geometry, has_bias=False)
    packing = Packing(weight_format, has_bias=False)
    return LayerForm(adjoint.output_view, adjoint.input_view, packing)


def _spatial_entries(name: str, entries: Sequence[int] | None, data_format: str) -> tuple[int, ...]:
    """Return one entry for each spatial axis."""
    axes = len(data_format) - 2
    if entries is None:
        return (1,) * axes
    for entry in check_list(name, entries, str([1] * (axes + 2))):
        check_int(f"each of {name}", entry, least=None)
    sizes = tuple(int(entry) for entry in entries)
    if len(sizes) == axes + 2:
        batch_and_channel = sizes[0], sizes[data_format.index("C")]
        if batch_and_channel != (1, 1):
            raise InputError(f"{name} {sizes} must be 1 along batch and channels ({data_format}).")
        sizes = tuple(e for e, axis in zip(sizes, data_format, strict=True) if axis not in "NC")
    if len(sizes) != axes or min(sizes) < 1:
        raise InputError(
            f"{name} {sizes} must be positive, with an entry for each axis or each spatial axis of "
            f"{data_format}."
        )
    return sizes


@dataclass(frozen=True, slots=True)
class BroadcastShape:
    """The axes along which a parameter of a given shape is broadcast."""

    shape: tuple[int, ...]  # shape of the parameter
    feature_axis: int = -1  # axis of the data with which the last axis of the parameter is aligned
    batch_axis: int = 0  # axis of the examples in the data

    def summed(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        rank = len(shape)
        for axis in (self.feature_axis, self.batch_axis):
            if not -rank <= axis < rank:
                raise ShapeError(f"data of shape {shape} has no axis {axis}.")
        trailing = rank - 1 - self.feature_axis % rank
        missing = rank - trailing - len(self.shape)
        aligned = (1,) * missing + self.shape + (1,) * trailing
        if missing < 0:
            raise ShapeError(
                f"a parameter of shape {self.shape} has too many axes for data of shape {shape}."
            )
        if aligned[self.batch_axis] != 1:
            raise ShapeError(
                f"a parameter of shape {self.shape} has several entries along the batch axis of "
                f"data of shape {shape}; it must have one entry there."
            )
        if any(entries not in (1, size) for entries, size in zip(aligned, shape, strict=True)):
            raise ShapeError(
                f"a parameter of shape {self.shape} cannot be broadcast to data of shape {shape}."
            )
        others = (axis for axis in range(rank) if axis != self.batch_axis)
        return tuple(axis for axis in others if aligned[axis] == 1)


@dataclass(frozen=True, slots=True)
class ScaleShiftForm:
    """The broadcast of a scale, a shift or both against the data."""

    num_uses: ClassVar[int] = 1  # a block sums gradients over uses, however many

    scale: BroadcastShape | None  # axes that are summed for the scale; None without a scale
    shift: BroadcastShape | None  # axes that are summed for the shift; None without a shift

    @property
    def num_parameters(self) -> int:
        """Number of parameters: a scale, a shift or both."""
        return (self.scale is not None) + (self.shift is not None)

    def with_bias(self, has_bias: bool) -> Self:
        """Return the form with or without a shift after the scale."""
        return self if has_bias or self.scale is None else replace(self, shift=None)

    def with_uses(self, num_uses: int) -> Self:
        """Return the form itself: it is the same for any number of uses."""
        return self

    def sides(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Return the rows of the matrix over all parameters with these shapes."""
        return (sum(map(prod, shapes)),)


def per_example(gradient: Array, reduction: BroadcastShape) -> Array:
    """Return the gradient of a parameter for each example, ``(n, entries)``: sums over the data."""
    summed, batch = reduction.summed(gradient.shape), reduction.batch_axis
    rows = gradient.sum(axis=summed)
    moved: Array = array_module(rows).moveaxis(rows, batch - sum(a < batch for a in summed), 0)
    return moved.reshape(gradient.shape[batch], -1)


def entries(shape: tuple[int, ...], reduction: BroadcastShape) -> int:
    """Return the number of entries of the parameter, from the shape of the data."""
    left_out = (*reduction.summed(shape), reduction.batch_axis)
    return prod(size for axis, size in enumerate(shape) if axis not in left_out)
