"""Layouts of the tensors and parameters of a layer, by layer kind."""

from collections.abc import Sequence
from dataclasses import dataclass

from kfac_engine._types import Array
from kfac_engine.arguments import listed, whole
from kfac_engine.errors import InputError
from kfac_engine.layers.packing import Packing
from kfac_engine.layers.subsampling import EVERYTHING, Sampling
from kfac_engine.layers.views import (
    Padding,
    RowView,
    TokenIdView,
    View,
    masked_patch_view,
    patch_view,
)

# Number of spatial axes to their letters in formats.
_SPATIAL = {1: "W", 2: "HW", 3: "DHW"}


@dataclass(frozen=True, slots=True)
class LayerForm:
    """The layout of a layer.

    Attributes:
        input_view: View of the input, as rows of ``d_in`` features.
        output_view: View of the gradient of the pre-activation, as rows of ``d_out`` features.
        packing: Map from weight and bias to a matrix ``(d_in (+ 1), d_out)``.
        num_uses: Number of uses. For more than one, a tensor has all uses along its first axis.
        sampling: Subset of a batch that the input statistic reads.
    """

    input_view: View
    output_view: View
    packing: Packing
    num_uses: int = 1
    sampling: Sampling = EVERYTHING


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


def convolution_form(  # noqa: PLR0913 (all parameters of a convolution)
    filter_shape: tuple[int, ...],
    *,
    has_bias: bool,
    padding: Padding,
    strides: Sequence[int] | None = None,
    dilations: Sequence[int] | None = None,
    data_format: str | None = None,
    weight_format: str | None = None,
    mask: Array | None = None,
    sampling: Sampling = EVERYTHING,
) -> LayerForm:
    """Return the form of a convolution over one, two or three spatial axes.

    Args:
        filter_shape: Shape of the filter, in ``weight_format``.
        has_bias: Whether the layer has a bias.
        padding: ``"SAME"``, ``"VALID"`` (in any case) or ``((begin, end), …)``.
        strides: Stride of each spatial axis, or of each data axis (1 for batch and channels).
        dilations: Dilation of each spatial axis, or of each data axis.
        data_format: ``"NHWC"`` (the default) or ``"NCHW"``, with ``W``, ``HW`` or ``DHW``.
        weight_format: ``"HWIO"`` (the default) or ``"OIHW"``, with ``W``, ``HW`` or ``DHW``.
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
    if data_format not in (last, first):
        raise InputError(f"data_format is '{data_format}'; choose '{last}' or '{first}'.")
    if not isinstance(padding, str):
        for pair in listed("padding", padding, "((1, 1), (1, 1)) or 'SAME'"):
            listed("each of padding", pair, "(1, 1)")
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
    if weight_format not in (last, first):
        raise InputError(f"weight_format is '{weight_format}'; choose '{last}' or '{first}'.")
    adjoint = convolution_form(
        filter_shape,
        has_bias=False,
        padding=padding,
        strides=strides,
        dilations=dilations,
        data_format=data_format,
        weight_format=f"{spatial}IO" if weight_format == last else f"OI{spatial}",
    )
    packing = Packing(weight_format, has_bias=False)
    return LayerForm(adjoint.output_view, adjoint.input_view, packing)


def _spatial_entries(name: str, entries: Sequence[int] | None, data_format: str) -> tuple[int, ...]:
    """Return one entry for each spatial axis."""
    axes = len(data_format) - 2
    if entries is None:
        return (1,) * axes
    for entry in listed(name, entries, str([1] * (axes + 2))):
        whole(f"each of {name}", entry, least=None)
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
