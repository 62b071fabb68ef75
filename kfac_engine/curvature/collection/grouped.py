"""Registration of grouped, depthwise and separable convolutions."""

from collections.abc import Sequence

from kfac_engine._types import Params
from kfac_engine.curvature.blocks.grouped import single_filter
from kfac_engine.curvature.collection.convolution import ConvolutionLayers
from kfac_engine.curvature.collection.registry import canonical_key, names_of
from kfac_engine.layers.grouped import depthwise_form, grouped_form
from kfac_engine.layers.views import Padding
from kfac_engine.losses.collection import Reuse

_CHANNEL_AXIS = {"NCHW": 1}  # the last one otherwise


class GroupedConvolutionLayers(ConvolutionLayers):
    """The part of ``LayerCollection`` that registers convolutions in groups."""

    def register_grouped_convolution(  # noqa: PLR0913 (the properties of a convolution)
        self,
        params: Params | Sequence[str],
        inputs: str,
        outputs: str,
        padding: Padding,
        groups: int,
        strides: Sequence[int] | None = None,
        dilation_rate: Sequence[int] | None = None,
        data_format: str | None = None,
        approx: str | None = None,
        reuse: Reuse = "VARIABLE_SCOPE",
        weight_format: str | None = None,
    ) -> None:
        """Register a convolution in groups of channels, each with its own filters.

        Args:
            params: The filter ``(*kernel, channels / groups, outputs)``, or ``(filter, bias)``.
            inputs: Name of the images.
            outputs: Name of the output; the outputs of a group are adjacent.
            padding: ``"SAME"``, ``"VALID"`` or ``((begin, end), …)``.
            groups: Number of groups.
            strides: Number for each spatial axis, or for each axis of the data; 1 by default.
            dilation_rate: As ``strides``.
            data_format: Channels last such as ``"NHWC"`` (default), or first such as ``"NCHW"``.
            approx: ``"kron"``, a Kronecker product for each group, or ``"diagonal"``.
            reuse: Whether this is a further tower.
            weight_format: Layout such as ``"HWIO"`` (default) or ``"OIHW"``.
        """
        key = canonical_key(params)
        form = grouped_form(
            self.require_filter(names_of(key)[0], (3, 4, 5)),
            groups,
            has_bias=not isinstance(key, str),
            padding=padding,
            strides=strides,
            dilations=dilation_rate,
            data_format=data_format,
            weight_format=weight_format,
        )
        self._register("grouped_convolution", key, form, (inputs, outputs), approx, reuse)

    def register_depthwise_conv2d(  # noqa: PLR0913 (the specification's signature)
        self,
        params: Params | Sequence[str],
        inputs: str,
        outputs: str,
        strides: Sequence[int],
        padding: Padding,
        rate: Sequence[int] | None = None,
        data_format: str | None = None,
        approx: str | None = None,
        reuse: Reuse = "VARIABLE_SCOPE",
        weight_format: str | None = None,
    ) -> None:
        """Register a depthwise convolution: each channel has its own filters.

        Args:
            params: The filter ``(kh, kw, channels, multiplier)``.
            inputs: Name of the images.
            outputs: Name of the output, ``channels·multiplier`` channels; the outputs of an input
                channel are adjacent.
            strides: Four numbers, one for each axis of the data.
            padding: ``"SAME"``, ``"VALID"`` or ``((top, bottom), (left, right))``.
            rate: Two dilations; 1 by default.
            data_format: ``"NHWC"`` (default) or ``"NCHW"``.
            approx: ``"diagonal"``, or ``"kron"``: a Kronecker product for each channel.
            reuse: Whether this is a further tower.
            weight_format: ``"HWIO"`` (default), the layout above, or ``"OIHW"``: the filter is
                ``(channels·multiplier, 1, kh, kw)``, and the shape of ``inputs`` must be declared.

        Raises:
            UnsupportedError: There is a bias.
        """
        name = single_filter(canonical_key(params))
        channels = None
        if weight_format == "OIHW":
            channels = self.require_shape(inputs)[_CHANNEL_AXIS.get(data_format or "", -1)]
        form = depthwise_form(
            self.require_filter(name, (4,)),
            padding=padding,
            strides=strides,
            rate=rate,
            data_format=data_format,
            weight_format=weight_format,
            channels=channels,
        )
        self._register("depthwise_conv2d", name, form, (inputs, outputs), approx, reuse)

    def register_separable_conv2d(  # noqa: PLR0913 (the specification's signature)
        self,
        depthwise_params: Params | Sequence[str],
        pointwise_params: Params | Sequence[str],
        inputs: str,
        depthwise_outputs: str,
        pointwise_outputs: str,
        strides: Sequence[int],
        padding: Padding,
        rate: Sequence[int] | None = None,
        data_format: str | None = None,
        approx: str | None = None,
        reuse: Reuse = "VARIABLE_SCOPE",
        weight_format: str | None = None,
    ) -> None:
        """Register a depthwise convolution followed by a pointwise convolution.

        Args:
            depthwise_params: As in ``register_depthwise_conv2d``; its default approximation.
            pointwise_params: The filter ``(1, 1, channels·multiplier, outputs)``, or
                ``(filter, bias)``.
            inputs: Name of the images.
            depthwise_outputs: Name of the output of the depthwise convolution.
            pointwise_outputs: Name of the output.
            strides: Strides of the depthwise convolution.
            padding: Padding of the depthwise convolution.
            rate: Dilations of the depthwise convolution.
            data_format: As in ``register_depthwise_conv2d``.
            approx: Approximation of the pointwise convolution, as in ``register_conv2d``.
            reuse: Whether this is a further tower.
            weight_format: As in ``register_depthwise_conv2d``, for both filters.
        """
        pointwise = canonical_key(pointwise_params)
        self.require_filter(names_of(pointwise)[0], (4,))
        self._resolve("conv2d", approx, pointwise)  # before anything is registered
        self.register_depthwise_conv2d(
            depthwise_params,
            inputs,
            depthwise_outputs,
            strides,
            padding,
            rate,
            data_format,
            reuse=reuse,
            weight_format=weight_format,
        )
        self.register_conv2d(
            pointwise,
            (1, 1, 1, 1),
            "VALID",
            depthwise_outputs,
            pointwise_outputs,
            data_format,
            approx=approx,
            reuse=reuse,
            weight_format=weight_format,
        )
