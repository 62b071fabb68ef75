"""How one layer's tensors and parameters are laid out: all a block needs to know of its kind."""

from collections.abc import Sequence
from dataclasses import dataclass

from kfac_engine._types import Array
from kfac_engine.arguments import listed, whole
from kfac_engine.errors import InputError
from kfac_engine.layers.masked import masked_patch_view
from kfac_engine.layers.packing import Packing
from kfac_engine.layers.subsampling import EVERYTHING, Sampling
from kfac_engine.layers.token_ids import TokenIdView
from kfac_engine.layers.views import Padding, RowView, View, patch_view

# Names of the spatial axes of images, by their number.
_SPATIAL = {1: "W", 2: "HW", 3: "DHW"}


@dataclass(frozen=True, slots=True)
class LayerForm:
    """The layout of a layer.

    Attributes:
        input_view: Reads the layer's input as rows of ``d_in`` features.
        output_view: Reads its output gradient as rows of ``d_out`` features.
        packing: Brings weight and bias to a matrix ``(d_in (+ 1), d_out)``.
        num_uses: Uses of the layer; a single tensor then holds them all, along its first axis.
        sampling: The part of a batch that the input statistic looks at.
    """

    input_view: View
    output_view: View
    packing: Packing
    num_uses: int = 1
    sampling: Sampling = EVERYTHING


def dense_form(
    weight_format: str, has_bias: bool, *, num_uses: int = 1, feature_axis: int = -1
) -> LayerForm:
    """The form of a dense layer: axes besides the batch and the features are positions."""
    view = RowView(feature_axis)
    return LayerForm(view, view, Packing(weight_format, has_bias), num_uses)


def embedding_form(
    vocabulary: int, *, positions: bool = False, count_repeats: bool = False, rank: int = 2
) -> LayerForm:
    """The form of a table ``(vocabulary, d_out)`` whose rows are picked by identifiers.

    Args:
        vocabulary: Rows of the table.
        positions: As in ``TokenIdView``.
        count_repeats: As in ``TokenIdView``.
        rank: As in ``TokenIdView``.

    Returns:
        The form.
    """
    view = TokenIdView(vocabulary, rank, positions, count_repeats)
    return LayerForm(view, RowView(-1, None if positions else 2), Packing("IO", has_bias=False))


def convolution_form(  # noqa: PLR0913 (a convolution has so many sides)
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
    """The form of a convolution over one, two or three spatial axes.

    Args:
        filter_shape: Shape of the filter, in ``weight_format``.
        has_bias: Whether the layer has a bias.
        padding: ``"SAME"``, ``"VALID"`` (in any case) or ``((begin, end), …)``.
        strides: One a spatial axis, or one a data axis (batch and channels then being one).
        dilations: Likewise.
        data_format: ``"NHWC"`` and its relatives (the default) or ``"NCHW"`` and its relatives.
        weight_format: ``"HWIO"`` and its relatives (the default) or ``"OIHW"`` and its relatives.
        mask: Multiplies each patch, ``(*kernel, channels)``.
        sampling: The part of a batch that the input statistic looks at.

    Returns:
        The form.

    Raises:
        InputError: A format is unknown, strides or dilations have a wrong number of entries, or the
            mask does not fit the filter.
    """
    spatial = _SPATIAL.get(len(filter_shape) - 2)
    if spatial is None:
        raise InputError(
            f"a filter of shape {filter_shape} is no convolution's: 3, 4 or 5 axes are needed."
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
    """The form of a transposed convolution, its bias apart.

    It is the adjoint of a convolution, and its views are the other way round: a row is an input
    location, its features are the input's channels and the patch of the output that it is spread
    over.

    Args:
        filter_shape: Shape of the filter, in ``weight_format``.
        padding: What is cut off the output: ``"VALID"`` or ``((begin, end), …)``.
        strides: As in ``convolution_form``.
        dilations: As in ``convolution_form``.
        data_format: As in ``convolution_form``.
        weight_format: ``"HWOI"`` and its relatives (the default) or ``"IOHW"`` and its relatives.

    Returns:
        The form.

    Raises:
        InputError: A format is unknown, or strides or dilations have a wrong number of entries.
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
    """One entry a spatial axis, from either spelling."""
    axes = len(data_format) - 2
    if entries is None:
        return (1,) * axes
    for entry in listed(name, entries, str([1] * (axes + 2))):
        whole(f"each of {name}", entry, least=None)
    found = tuple(int(entry) for entry in entries)
    if len(found) == axes + 2:
        batch_and_channel = found[0], found[data_format.index("C")]
        if batch_and_channel != (1, 1):
            raise InputError(f"{name} {found} must be 1 along batch and channels ({data_format}).")
        found = tuple(e for e, axis in zip(found, data_format, strict=True) if axis not in "NC")
    if len(found) != axes or min(found) < 1:
        raise InputError(
            f"{name} {found} must be positive, one an axis or one a spatial axis of {data_format}."
        )
    return found
