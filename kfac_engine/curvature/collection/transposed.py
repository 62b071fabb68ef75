"""Registration of transposed convolutions."""

from collections.abc import Sequence

from kfac_engine.curvature.collection.registry import BlockRegistry
from kfac_engine.layers.layer_forms import transposed_form
from kfac_engine.layers.views import Padding
from kfac_engine.losses.collection import Reuse


class TransposedConvolutionLayers(BlockRegistry):
    """The part of ``LayerCollection`` that registers transposed convolutions."""

    def register_conv_transpose(  # noqa: PLR0913 (the properties of a convolution)
        self,
        params: str,
        inputs: str,
        outputs: str,
        padding: Padding,
        strides: Sequence[int] | None = None,
        dilations: Sequence[int] | None = None,
        data_format: str | None = None,
        approx: str | None = None,
        reuse: Reuse = "VARIABLE_SCOPE",
        weight_format: str | None = None,
    ) -> None:
        """Register a transposed convolution over one, two or three spatial axes.

        The bias is a separate layer, because it is added to pixels of the output. The filter
        multiplies pixels of the input.

        Args:
            params: The filter; its shape must be declared.
            inputs: Name of the images.
            outputs: Name of the output.
            padding: Border that is removed from the output: ``"VALID"`` or ``((begin, end), …)``.
            strides: Number for each spatial axis, or for each axis of the data; ones by default.
            dilations: As ``strides``.
            data_format: Channels last such as ``"NHWC"`` (default), or first such as ``"NCHW"``.
            approx: ``"kron"``.
            reuse: Whether this is a further tower.
            weight_format: Layout such as ``"HWOI"`` (default) or ``"IOHW"``.
        """
        form = transposed_form(
            self.require_filter(params, (3, 4, 5)),
            padding=padding,
            strides=strides,
            dilations=dilations,
            data_format=data_format,
            weight_format=weight_format,
        )
        self._register("conv_transpose", params, form, (inputs, outputs), approx, reuse)
