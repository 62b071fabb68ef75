"""Blocks for depthwise convolutions with the names and constructors of TensorFlow's library."""

from collections.abc import Sequence

from kfac_engine._types import Params
from kfac_engine.curvature.blocks.base import FactorOwner
from kfac_engine.curvature.blocks.grouped import (
    GroupedDiagonalFB,
    GroupedKroneckerFB,
    single_filter,
)
from kfac_engine.layers.grouped import depthwise_form
from kfac_engine.layers.views import Padding


class DepthwiseConvKFCBasicFB(GroupedKroneckerFB):
    """One Kronecker pair for each channel of a depthwise convolution.

    Args:
        layer_collection: Owner of the factors; must know the filter's shape.
        params: The filter, ``(kh, kw, channels, multiplier)``.
        strides: Strides of the four axes of the data.
        padding: ``"SAME"``, ``"VALID"`` or ``((top, bottom), (left, right))``.
        rate: Dilations of the two spatial axes; ones by default.
        data_format: ``"NHWC"`` (default) or ``"NCHW"``.
    """

    def __init__(
        self,
        layer_collection: FactorOwner,
        params: Params,
        strides: Sequence[int],
        padding: Padding,
        rate: Sequence[int] | None = None,
        data_format: str | None = None,
    ) -> None:
        form = depthwise_form(
            layer_collection.require_shape(single_filter(params)),
            padding=padding,
            strides=strides,
            rate=rate,
            data_format=data_format,
        )
        super().__init__(layer_collection, form)


class DepthwiseConvDiagonalFB(GroupedDiagonalFB):
    """The diagonal of a depthwise convolution's block.

    Args:
        layer_collection: Owner of the factor; must know the filter's shape.
        params: As in ``DepthwiseConvKFCBasicFB``.
        strides: As in ``DepthwiseConvKFCBasicFB``.
        padding: As in ``DepthwiseConvKFCBasicFB``.
        rate: As in ``DepthwiseConvKFCBasicFB``.
        data_format: As in ``DepthwiseConvKFCBasicFB``.
    """

    def __init__(
        self,
        layer_collection: FactorOwner,
        params: Params,
        strides: Sequence[int],
        padding: Padding,
        rate: Sequence[int] | None = None,
        data_format: str | None = None,
    ) -> None:
        form = depthwise_form(
            layer_collection.require_shape(single_filter(params)),
            padding=padding,
            strides=strides,
            rate=rate,
            data_format=data_format,
        )
        super().__init__(layer_collection, form)
