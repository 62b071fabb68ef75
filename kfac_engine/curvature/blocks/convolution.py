"""Forms of the input factor of a convolution."""

from functools import partial

from kfac_engine.curvature.blocks.kronecker import DENSE, Side
from kfac_engine.curvature.config import CollectionConfig
from kfac_engine.curvature.factors.sampled import SampledFactor, SampledMoment
from kfac_engine.curvature.factors.statistics import Tensors
from kfac_engine.curvature.factors.sua import PixelCovariance, SpatiallyUncorrelatedFactor
from kfac_engine.errors import UnsupportedError
from kfac_engine.layers.layer_forms import LayerForm
from kfac_engine.layers.views import PatchView, RowView, View


def patches_side(form: LayerForm, side: Side = DENSE) -> Side:
    """Return the form of an input factor, which is dense where it samples a part of a batch.

    Args:
        form: Layout of the convolution.
        side: The form without sampling.
    """
    if not form.sampling.active:
        return side
    return Side(partial(SampledMoment, sampling=form.sampling), SampledFactor)


def uncorrelated_side(form: LayerForm, config: CollectionConfig) -> Side:
    """Return an input factor of single pixels, uncorrelated between positions (SUA).

    Strides and padding have no effect on it.

    Args:
        form: Layout of the convolution.
        config: Decides whether the mean of pixels is modelled.

    Returns:
        The form of the factor.

    Raises:
        UnsupportedError: Patches are masked, so that the pixels of different positions differ.
    """
    patches = form.input_view
    if not isinstance(patches, PatchView):
        raise UnsupportedError("approximation 'kron_sua' cannot mask patches; use 'kron'.")
    pixels = RowView(1 if patches.channels_first else -1, rank=patches.rank)
    taps, has_bias = patches.window.taps, form.packing.has_bias
    modelled = not config.assume_zero_mean_activations

    def statistic(
        tensors: Tensors,
        view: View,
        *,
        homogeneous: bool,
        num_uses: int,
        batch: str | None,
        exact: bool,
    ) -> PixelCovariance:
        del view  # patches are not extracted
        return PixelCovariance.configured(
            config,
            tensors=tensors,
            view=pixels,
            homogeneous=homogeneous,
            taps=taps,
            num_uses=num_uses,
            batch=batch,
            exact=exact,
        )

    def shape(d: int) -> tuple[int, ...]:
        channels = (d - has_bias) // taps
        return channels + modelled, channels

    return Side(statistic, SpatiallyUncorrelatedFactor, shape)
