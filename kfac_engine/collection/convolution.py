"""Registration of convolutions."""

from collections.abc import Sequence

from kfac_engine._types import Params
from kfac_engine.collection.registry import BlockRegistry, canonical_key, names_of
from kfac_engine.layers.forms import convolution_form
from kfac_engine.layers.views import Padding
from kfac_engine.losses.collection import Reuse


class ConvolutionLayers(BlockRegistry):
    """The part of ``LayerCollection`` that registers convolutions."""

    def register_conv2d(  # noqa: PLR0913 (the specification's signature)
        self,
        params: Params | Sequence[str],
        strides: Sequence[int],
        padding: Padding,
        inputs: str,
        outputs: str,
        data_format: str | None = None,
        dilations: Sequence[int] | None = None,
        approx: str | None = None,
        reuse: Reuse = "VARIABLE_SCOPE",
        weight_format: str | None = None,
    ) -> None:
        """Register a convolution over two spatial axes.

        Args:
            params: The filter, or ``(filter, bias)``; the filter's shape must be declared.
            strides: One an axis of the data, or one a spatial axis.
            padding: ``"SAME"``, ``"VALID"`` or ``((top, bottom), (left, right))``.
            inputs: Name of the images.
            outputs: Name of the output.
            data_format: ``"NHWC"`` (default) or ``"NCHW"``.
            dilations: Like ``strides``; ones when left out.
            approx: A row of the table of approximations; the default when left out.
            reuse: Whether this is a further tower.
            weight_format: ``"HWIO"`` (default) or ``"OIHW"``.
        """
        key = canonical_key(params)
        form = convolution_form(
            self.require_shape(names_of(key)[0]),
            has_bias=not isinstance(key, str),
            padding=padding,
            strides=strides,
            dilations=dilations,
            data_format=data_format,
            weight_format=weight_format,
        )
        self._register("conv2d", key, form, (inputs, outputs), approx, reuse)
