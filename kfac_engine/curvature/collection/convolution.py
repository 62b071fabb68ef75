"""Registration of convolutions."""

from collections.abc import Sequence

from kfac_engine._types import Array, Params
from kfac_engine.curvature.collection.registry import BlockRegistry, canonical_key, names_of
from kfac_engine.layers.layer_forms import convolution_form
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
        sub_sample_inputs: bool | None = None,
        sub_sample_patches: bool | None = None,
        patch_mask: Array | None = None,
        weight_format: str | None = None,
    ) -> None:
        """Register a convolution over two spatial axes.

        Args:
            params: The filter, or ``(filter, bias)``; the filter's shape must be declared.
            strides: Number for each axis of the data, or for each spatial axis.
            padding: ``"SAME"``, ``"VALID"`` or ``((top, bottom), (left, right))``.
            inputs: Name of the images.
            outputs: Name of the output.
            data_format: ``"NHWC"`` (default) or ``"NCHW"``.
            dilations: As ``strides``; 1 by default.
            approx: Name of an approximation of the kind; by default that of the collection.
            reuse: Whether this is a further tower.
            sub_sample_inputs: Whether the input factor reads a random subset of the examples; by
                default the choice of the configuration.
            sub_sample_patches: Whether the input factor reads a random subset of the patches;
                by default the choice of the configuration.
            patch_mask: Factor of the entries of each patch, ``(*kernel, channels)``.
            weight_format: ``"HWIO"`` (default) or ``"OIHW"``.
        """
        key = canonical_key(params)
        form = convolution_form(
            self.require_filter(names_of(key)[0], (4,)),
            has_bias=not isinstance(key, str),
            padding=padding,
            strides=strides,
            dilations=dilations,
            data_format=data_format,
            weight_format=weight_format,
            mask=patch_mask,
            sampling=self.config.sampling(sub_sample_inputs, sub_sample_patches),
        )
        self._register("conv2d", key, form, (inputs, outputs), approx, reuse)

    def register_conv1d(  # noqa: PLR0913 (the specification's signature)
        self,
        params: Params | Sequence[str],
        strides: Sequence[int],
        padding: Padding,
        inputs: str,
        outputs: str,
        dilations: Sequence[int] | None = None,
        approx: str | None = None,
        reuse: Reuse = "VARIABLE_SCOPE",
        sub_sample_inputs: bool | None = None,
        sub_sample_patches: bool | None = None,
        data_format: str | None = None,
        weight_format: str | None = None,
    ) -> None:
        """Register a convolution over one spatial axis.

        Args:
            params: As in ``register_conv2d``.
            strides: A number for each axis of the data, or for the spatial axis.
            padding: ``"SAME"``, ``"VALID"`` or ``((begin, end),)``.
            inputs: As in ``register_conv2d``.
            outputs: As in ``register_conv2d``.
            dilations: As ``strides``; 1 by default.
            approx: ``"kron"``.
            reuse: As in ``register_conv2d``.
            sub_sample_inputs: As in ``register_conv2d``.
            sub_sample_patches: As in ``register_conv2d``.
            data_format: ``"NWC"`` (default) or ``"NCW"``.
            weight_format: ``"WIO"`` (default) or ``"OIW"``.
        """
        key = canonical_key(params)
        form = convolution_form(
            self.require_filter(names_of(key)[0], (3,)),
            has_bias=not isinstance(key, str),
            padding=padding,
            strides=strides,
            dilations=dilations,
            data_format=data_format,
            weight_format=weight_format,
            sampling=self.config.sampling(sub_sample_inputs, sub_sample_patches),
        )
        self._register("conv1d", key, form, (inputs, outputs), approx, reuse)

    def register_convolution(  # noqa: PLR0913 (the specification's signature)
        self,
        params: Params | Sequence[str],
        inputs: str,
        outputs: str,
        padding: Padding,
        strides: Sequence[int] | None = None,
        dilation_rate: Sequence[int] | None = None,
        data_format: str | None = None,
        approx: str | None = None,
        reuse: Reuse = "VARIABLE_SCOPE",
        weight_format: str | None = None,
    ) -> None:
        """Register a convolution over one, two or three spatial axes.

        Args:
            params: As in ``register_conv2d``.
            inputs: As in ``register_conv2d``.
            outputs: As in ``register_conv2d``.
            padding: ``"SAME"``, ``"VALID"`` or ``((begin, end), …)``.
            strides: Number for each spatial axis, or for each axis of the data; 1 by default.
            dilation_rate: As ``strides``.
            data_format: ``"NWC"``, ``"NHWC"``, ``"NDHWC"`` (defaults), or with the channels first.
            approx: ``"kron"``.
            reuse: As in ``register_conv2d``.
            weight_format: ``"WIO"``, ``"HWIO"``, ``"DHWIO"`` (defaults) or ``"OIW"`` and so on.
        """
        key = canonical_key(params)
        form = convolution_form(
            self.require_filter(names_of(key)[0], (3, 4, 5)),
            has_bias=not isinstance(key, str),
            padding=padding,
            strides=strides,
            dilations=dilation_rate,
            data_format=data_format,
            weight_format=weight_format,
            sampling=self.config.sampling(),
        )
        self._register("convolution", key, form, (inputs, outputs), approx, reuse)
