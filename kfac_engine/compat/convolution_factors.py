"""Provides convolution factors with the constructors of TensorFlow's K-FAC library.

The page docs/building_blocks.md has the arguments that several of them share.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import TypeAlias, Unpack

from kfac_engine._types import Array
from kfac_engine.compat.factors import Gradients, InTowers, Tower, of_towers, uses_in
from kfac_engine.curvature.config import CollectionConfig
from kfac_engine.curvature.factors.base import FactorOptions
from kfac_engine.curvature.factors.dense import DenseSquareMatrixFactor
from kfac_engine.curvature.factors.diagonal import DiagonalFactor
from kfac_engine.curvature.factors.sampled import SampledFactor, SampledMoment
from kfac_engine.curvature.factors.statistics import KroneckerMoment, LayerSquare
from kfac_engine.curvature.factors.sua import PixelCovariance, SpatiallyUncorrelatedFactor
from kfac_engine.errors import InputError, UnsupportedError
from kfac_engine.layers.layer_forms import LayerForm, convolution_form
from kfac_engine.layers.views import MaskedPatchView, Padding, PatchView, RowView

_CHANNELS_LAST = (None, "NWC", "NHWC", "NDHWC")
_CHANNELS_FIRST = ("NCW", "NCHW", "NCDHW")


class ConvInputKroneckerFactor(InTowers, SampledFactor):
    """The second moment of the patches that a convolution sees.

    Args:
        inputs: Name of the images of each tower.
    """

    def __init__(  # noqa: PLR0913 (the specification's signature)
        self,
        inputs: Sequence[Tower],
        filter_shape: tuple[int, ...],
        padding: Padding,
        strides: Sequence[int] | None = None,
        dilation_rate: Sequence[int] | None = None,
        data_format: str | None = None,
        extract_patches_fn: str | None = None,
        has_bias: bool = False,
        sub_sample_inputs: bool | None = None,
        sub_sample_patches: bool | None = None,
        patch_mask: Array | None = None,
        **options: Unpack[FactorOptions],
    ) -> None:
        geometry = padding, strides, dilation_rate, data_format
        form = convolution_form(filter_shape, *geometry, has_bias=has_bias, mask=patch_mask)
        check_extraction(extract_patches_fn, form, strides, dilation_rate)
        config = options.get("config") or CollectionConfig()
        moment = partial(
            SampledMoment,
            view=form.input_view,
            homogeneous=has_bias,
            sampling=config.sampling(sub_sample_inputs, sub_sample_patches),
        )
        super().__init__(of_towers(moment, [inputs]), **options)


class ConvInputMultiKF(ConvInputKroneckerFactor):
    """The second moment of patches over all uses of a convolution.

    Args:
        inputs: Names of the images of each tower: a list over uses, or one name for all uses.
    """

    def __init__(  # noqa: PLR0913 (the specification's signature)
        self,
        inputs: Sequence[Tower],
        filter_shape: tuple[int, ...],
        padding: Padding,
        num_uses: int | None = None,
        strides: Sequence[int] | None = None,
        dilation_rate: Sequence[int] | None = None,
        data_format: str | None = None,
        extract_patches_fn: str | None = None,
        has_bias: bool = False,
        sub_sample_inputs: bool | None = None,
        sub_sample_patches: bool | None = None,
        patch_mask: Array | None = None,
        **options: Unpack[FactorOptions],
    ) -> None:
        geometry = padding, strides, dilation_rate, data_format, extract_patches_fn
        reading = has_bias, sub_sample_inputs, sub_sample_patches, patch_mask
        super().__init__(inputs, filter_shape, *geometry, *reading, **options)
        self._moment = replace(self._moment, num_uses=uses_in([inputs], num_uses))
        self._continue_from(0)


class ConvInputSUAKroneckerFactor(InTowers, SpatiallyUncorrelatedFactor):
    """The second moment of patches, on the assumption that different pixels are uncorrelated.

    Args:
        inputs: Name of the images of each tower, with channels last.
    """

    def __init__(
        self,
        inputs: Sequence[str],
        filter_shape: tuple[int, ...],
        has_bias: bool = False,
        **options: Unpack[FactorOptions],
    ) -> None:
        covariance = partial(
            PixelCovariance.configured,
            options.get("config") or CollectionConfig(),
            view=RowView(rank=len(filter_shape)),
            homogeneous=has_bias,
            taps=prod(filter_shape[:-2]),
        )
        super().__init__(of_towers(covariance, [inputs]), **options)


class ConvOutputKroneckerFactor(InTowers, DenseSquareMatrixFactor):
    """The second moment of a convolution's output gradients over examples and locations."""

    def __init__(
        self,
        outputs_grads: Gradients,
        data_format: str | None = None,
        **options: Unpack[FactorOptions],
    ) -> None:
        moment = partial(KroneckerMoment, view=_output_view(data_format))
        super().__init__(of_towers(moment, outputs_grads), **options)


class ConvOutputMultiKF(InTowers, DenseSquareMatrixFactor):
    """The second moment of output gradients over the uses of a convolution."""

    def __init__(
        self,
        outputs_grads: Gradients,
        data_format: str | None = None,
        num_uses: int | None = None,
        **options: Unpack[FactorOptions],
    ) -> None:
        view, count = _output_view(data_format or "NHWC"), uses_in(outputs_grads, num_uses)
        moment = partial(KroneckerMoment, view=view, num_uses=count)
        super().__init__(of_towers(moment, outputs_grads), **options)


class ConvDiagonalFactor(InTowers, DiagonalFactor):
    """The mean squared per-example gradient of a convolution, ``(taps·channels (+ 1), outputs)``.

    Args:
        inputs: Name of the images of each tower.
    """

    def __init__(  # noqa: PLR0913 (the specification's signature)
        self,
        inputs: Sequence[str],
        outputs_grads: Gradients,
        filter_shape: tuple[int, ...],
        strides: Sequence[int],
        padding: Padding,
        data_format: str | None = None,
        dilations: Sequence[int] | None = None,
        has_bias: bool = False,
        patch_mask: Array | None = None,
        **options: Unpack[FactorOptions],
    ) -> None:
        geometry = padding, strides, dilations, data_format
        form = convolution_form(filter_shape, *geometry, has_bias=has_bias, mask=patch_mask)
        squares = partial(
            LayerSquare,
            input_view=form.input_view,
            output_view=form.output_view,
            homogeneous=has_bias,
        )
        super().__init__(of_towers(squares, outputs_grads, inputs), **options)


def _output_view(data_format: str | None) -> RowView:
    """Return the view of outputs; a format that is not None determines the number of axes."""
    if data_format not in (*_CHANNELS_LAST, *_CHANNELS_FIRST):
        known = ", ".join(name for name in (*_CHANNELS_LAST, *_CHANNELS_FIRST) if name)
        raise InputError(f"data_format is '{data_format}'; choose one of: {known}.")
    axis = 1 if data_format in _CHANNELS_FIRST else -1
    return RowView(axis, rank=len(data_format) if data_format else None)


Entries: TypeAlias = Sequence[int] | None
# Function of the geometry, the strides and the dilations that returns the missing property, or "".
_Requirement: TypeAlias = Callable[[PatchView, Entries, Entries], str]

_IMAGE_AXES = 4


# -- names of extractions of patches ---------------------------------------------------------------
#
# All extractions return the same patches. A name is checked, so that layers that TensorFlow's
# library refuses raise an error.


def check_extraction(name: str | None, form: LayerForm, strides: Entries, rates: Entries) -> None:
    """Refuse a convolution that an extraction of this name does not support; None supports all.

    ``strides`` and ``rates`` are the entries of the caller.
    """
    requirement = _REQUIREMENTS.get(name)
    if requirement is None:
        known = ", ".join(key for key in _REQUIREMENTS if key)
        raise UnsupportedError(f"unknown extract_patches_fn '{name}'; choose one of: {known}.")
    view = form.input_view
    patches = view.patches if isinstance(view, MaskedPatchView) else view
    assert isinstance(patches, PatchView)  # the view of every convolution
    missing = requirement(patches, strides, rates)
    if missing:
        raise UnsupportedError(
            f"{name} needs {missing}; got kernel {patches.window.kernel}, strides {strides} and "
            f"dilations {rates}. Omit extract_patches_fn."
        )


def _anything(patches: PatchView, strides: Entries, rates: Entries) -> str:
    return ""


def _images(patches: PatchView, strides: Entries, rates: Entries) -> str:
    entered = [entries for entries in (strides, rates) if entries is not None]
    fits = patches.rank == _IMAGE_AXES and all(len(entries) == _IMAGE_AXES for entries in entered)
    return "" if fits else "images with two spatial axes, strides and dilations of four entries"


def _pointwise(patches: PatchView, strides: Entries, rates: Entries) -> str:
    fits = patches.window.kernel == patches.window.strides == (1, 1)
    return "" if fits else "a filter of one pixel and strides of one"


_REQUIREMENTS: Mapping[str | None, _Requirement] = {
    None: _anything,
    "extract_convolution_patches": _anything,
    "extract_image_patches": _images,
    "extract_pointwise_conv2d_patches": _pointwise,
}
