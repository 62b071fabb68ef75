"""Describes grouped and depthwise convolutions and stacks of dense layers as packed matrices.

A group of a convolution reads ``channels / groups`` consecutive channels and computes
``outputs / groups`` consecutive outputs with its filter. A depthwise convolution has a group for
each channel. A stack of dense layers with separate weights, such as experts or attention heads, has
the weight ``(stack, d_in, d_out)`` and the input ``(n, …positions, stack, d_in)``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from types import ModuleType
from typing import ClassVar

from kfac_engine._types import Array, Rows, Vector
from kfac_engine.backend.namespace import recordable
from kfac_engine.backend.protocol import Accumulation, Backend
from kfac_engine.backend.window import Window
from kfac_engine.errors import InputError, ShapeError
from kfac_engine.layers.layer_forms import LayerForm, convolution_form
from kfac_engine.layers.packing import Packing
from kfac_engine.layers.views import Padding, rows_as_images

_IMAGE_AXES = 4


@dataclass(frozen=True, slots=True)
class GroupedPacking(Packing):
    """The map from a filter and a bias to matrices ``(groups, d_in (+ 1), d_out)``.

    The input axis of ``weight_format`` has the channels of one group.
    """

    one_matrix: ClassVar[bool] = False

    groups: int = 1  # number of groups
    # Whether the filter is ``(*kernel, groups, d_out)``, the layout of a depthwise filter, instead
    # of ``(*kernel, d_in / taps, groups·d_out)``.
    multiplier_last: bool = False

    @recordable
    def pack(self, vector: Vector, where: object, xp: ModuleType) -> Array:
        rows = Packing.pack(self, vector, where, xp)
        if rows.shape[0 if self.multiplier_last else 1] % self.groups:
            raise ShapeError(
                f"the filter of {where} has a packed matrix of shape {rows.shape}, which cannot be "
                f"divided into {self.groups} groups."
            )
        outputs = rows.shape[1] // (1 if self.multiplier_last else self.groups)
        stack = rows.reshape(-1, self.groups, outputs).swapaxes(0, 1)
        packed: Array = xp.ascontiguousarray(stack)
        return packed

    @recordable
    def unpack(self, matrix: Array, like: Vector) -> Vector:
        columns = matrix.shape[2] * (1 if self.multiplier_last else self.groups)
        return Packing.unpack(self, matrix.swapaxes(0, 1).reshape(-1, columns), like)


@dataclass(frozen=True, slots=True)
class GroupedForm(LayerForm):
    """The layout of a grouped convolution: views of all groups, and a packing by group."""

    groups: int = 1  # number of groups
    d_in: int = 1  # number of features of a row of a group, without the homogeneous coordinate
    d_out: int = 1  # number of outputs of a group
    taps: int = 1  # number of taps of the kernel

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of a packed vector, ``(groups, d_in (+ 1), d_out)``."""
        return self.groups, self.d_in + self.packing.has_bias, self.d_out

    def packed_shape(self, weight_shape: tuple[int, ...]) -> tuple[int, ...]:
        del weight_shape  # the form has the sizes of the filter
        return self.shape

    def sides(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        del shapes  # likewise
        return self.shape[1:]


def grouped_form(  # noqa: PLR0913 (all parameters of a convolution)
    filter_shape: tuple[int, ...],
    groups: int,
    padding: Padding,
    strides: Sequence[int] | None = None,
    dilations: Sequence[int] | None = None,
    data_format: str | None = None,
    weight_format: str | None = None,
    *,
    has_bias: bool,
) -> GroupedForm:
    """Return the form of a grouped convolution over one, two or three spatial axes.

    ``filter_shape`` is ``(*kernel, channels / groups, outputs)`` by default. The other arguments
    are as in ``convolution_form``.
    """
    geometry = padding, strides, dilations, data_format, weight_format
    plain = convolution_form(filter_shape, *geometry, has_bias=has_bias)
    rows, outputs = plain.packing.matrix_shape(filter_shape)
    if groups < 1 or outputs % groups:
        raise InputError(f"{outputs} outputs cannot be divided into {groups} groups of equal size.")
    d_in = rows - has_bias
    return GroupedForm(
        plain.input_view,
        plain.output_view,
        GroupedPacking(plain.packing.weight_format, has_bias, groups),
        groups=groups,
        d_in=d_in,
        d_out=outputs // groups,
        taps=d_in // filter_shape[plain.packing.axes[-2]],
    )


def depthwise_form(
    filter_shape: tuple[int, ...],
    padding: Padding,
    strides: Sequence[int],
    rate: Sequence[int] | None = None,
    data_format: str | None = None,
    weight_format: str | None = None,
    channels: int | None = None,
) -> GroupedForm:
    """Return the form of a depthwise convolution over two spatial axes, without a bias.

    Args:
        filter_shape: ``(kh, kw, channels, multiplier)``, or ``(channels·multiplier, 1, kh, kw)``.
        padding: As in ``convolution_form``.
        strides: Strides of the four axes of the data.
        rate: Dilations of the two spatial axes; 1 by default.
        data_format: ``"NHWC"`` (the default) or ``"NCHW"``.
        weight_format: ``"HWIO"`` (the default) or ``"OIHW"``.
        channels: Number of channels of the images; needed for ``"OIHW"``.
    """
    if len(filter_shape) != _IMAGE_AXES or len(strides) != _IMAGE_AXES:
        raise InputError(
            f"a depthwise convolution needs a filter with 4 axes and 4 strides, got shape "
            f"{filter_shape} and strides {tuple(strides)}."
        )
    if rate is not None and len(rate) != 2:
        raise InputError(f"rate needs a dilation for each of two spatial axes, got {tuple(rate)}.")
    last = weight_format in (None, "HWIO")
    if last:
        kh, kw, channels, multiplier = filter_shape
        filter_shape = (kh, kw, 1, channels * multiplier)
    if channels is None or (not last and filter_shape[1] != 1):
        raise InputError(
            f"a depthwise filter of shape {filter_shape} in format {weight_format} needs a second "
            f"axis of one and the number of channels: declare the shape of the layer's inputs."
        )
    geometry = padding, strides, rate, data_format, weight_format
    form = grouped_form(filter_shape, channels, *geometry, has_bias=False)
    packing = GroupedPacking(form.packing.weight_format, False, channels, last)
    return replace(form, packing=packing)


# -- stacks of dense layers ------------------------------------------------------------------------

_LEAST_RANK = 3


@dataclass(frozen=True, slots=True)
class StackedDenseView:
    """A tensor ``(n, …positions, stack, d)``, read as rows of ``stack · d`` features."""

    has_rows: ClassVar[bool] = True
    feature_axis: ClassVar[int] = -1

    @property
    def rank(self) -> None:
        """None, because any number of axes from three on is valid."""
        return

    def width(self, shape: tuple[int, ...]) -> int:
        if len(shape) < _LEAST_RANK:
            raise ShapeError(
                f"a tensor of stacked dense layers needs at least 3 axes, got shape {shape}."
            )
        return shape[-2] * shape[-1]

    def count(self, shape: tuple[int, ...]) -> int:
        return prod(shape[:-2])

    def second_moment(self, x: Array, out: Array, backend: Backend, how: Accumulation) -> None:
        raise InputError(
            "stacked dense layers have no common second moment; choose 'kron' or 'diagonal'."
        )

    def rows(self, x: Array, backend: Backend) -> Array:
        return x.reshape(x.shape[0], -1, self.width(x.shape))

    def images(self, x: Array, backend: Backend) -> tuple[Array, Window]:
        return rows_as_images(self.rows(x, backend))


@dataclass(frozen=True, slots=True)
class StackedDensePacking(Packing):
    """The map from a weight ``(stack, d_in, d_out)`` and a bias to matrices."""

    one_matrix: ClassVar[bool] = False

    @recordable
    def pack(self, vector: Vector, where: object, xp: ModuleType) -> Array:
        parts = self.arrays(vector, where)
        weight = parts[0]
        if weight.ndim != _LEAST_RANK:
            raise ShapeError(f"the weight of {where} needs 3 axes, got shape {weight.shape}.")
        stack, _, d_out = weight.shape
        if not self.has_bias:
            return weight.copy()
        if parts[1].size != stack * d_out:
            raise ShapeError(
                f"the bias of {where} has shape {parts[1].shape}, not ({stack}, {d_out})."
            )
        packed: Array = xp.concatenate([weight, parts[1].reshape(stack, 1, d_out)], axis=1)
        return packed

    @recordable
    def unpack(self, matrix: Array, like: Vector) -> Vector:
        assert not isinstance(like, Rows)  # ``pack`` refuses them
        parts = like if isinstance(like, tuple | list) else (like,)
        rows = matrix[:, :-1] if self.has_bias else matrix
        weight = rows.astype(parts[0].dtype, order="C")
        if not self.has_bias:
            return (weight,) if isinstance(like, tuple | list) else weight
        return weight, matrix[:, -1].reshape(parts[1].shape).astype(parts[1].dtype)


def stacked_dense_form(weight_shape: tuple[int, ...], *, has_bias: bool) -> GroupedForm:
    """Return the form of stacked dense layers with weight ``(stack, d_in, d_out)``.

    A bias is ``(stack, d_out)``.
    """
    if len(weight_shape) != _LEAST_RANK:
        raise ShapeError(
            f"the weight of stacked dense layers has shape {weight_shape}; (stack, d_in, d_out) is "
            f"needed."
        )
    stack, d_in, d_out = weight_shape
    view, packing = StackedDenseView(), StackedDensePacking("IO", has_bias)
    return GroupedForm(view, view, packing, groups=stack, d_in=d_in, d_out=d_out)
