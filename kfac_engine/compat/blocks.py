"""Block classes with the names and constructors of TensorFlow's library."""

from collections.abc import Sequence

from kfac_engine._types import Array, Params
from kfac_engine.compat.patch_extraction import check_extraction
from kfac_engine.curvature.blocks.base import FactorOwner
from kfac_engine.curvature.blocks.convolution import patches_side, uncorrelated_side
from kfac_engine.curvature.blocks.kronecker import DENSE, DIAGONAL, KroneckerProductFB
from kfac_engine.curvature.blocks.multi_use import MultiUseKroneckerFB
from kfac_engine.curvature.blocks.series import USES, SeriesFB
from kfac_engine.curvature.blocks.single import LayerDiagonalFB
from kfac_engine.layers.layer_forms import convolution_form, dense_form
from kfac_engine.layers.views import Padding


class FullyConnectedKFACBasicFB(KroneckerProductFB):
    """``F ≈ A ⊗ G`` for a dense layer (Martens & Grosse 2015, section 3).

    Args:
        layer_collection: Owner of the factors.
        has_bias: Whether the layer has a bias.
        diagonal_approx_for_input: Whether ``A`` is diagonal.
        diagonal_approx_for_output: Whether ``G`` is diagonal.
        weight_format: ``"IO"`` or ``"OI"``.
    """

    def __init__(
        self,
        layer_collection: FactorOwner,
        has_bias: bool = False,
        diagonal_approx_for_input: bool = False,
        diagonal_approx_for_output: bool = False,
        weight_format: str = "IO",
    ) -> None:
        super().__init__(
            layer_collection,
            dense_form(weight_format, has_bias),
            input_side=DIAGONAL if diagonal_approx_for_input else DENSE,
            output_side=DIAGONAL if diagonal_approx_for_output else DENSE,
        )


class FullyConnectedDiagonalFB(LayerDiagonalFB):
    """The diagonal of a dense layer's block.

    Args:
        layer_collection: Owner of the factors.
        has_bias: Whether the layer has a bias.
        weight_format: ``"IO"`` or ``"OI"``.
    """

    def __init__(
        self,
        layer_collection: FactorOwner,
        has_bias: bool = False,
        weight_format: str = "IO",
    ) -> None:
        super().__init__(layer_collection, dense_form(weight_format, has_bias))


class ConvKFCBasicFB(KroneckerProductFB):
    """``F ≈ #locations · A ⊗ G`` for a convolution (Grosse & Martens 2016, equation 23).

    Args:
        layer_collection: Owner of the factors; must know the filter's shape.
        params: The filter, or ``(filter, bias)``.
        padding: ``"SAME"``, ``"VALID"`` or ``((begin, end), …)``.
        strides: Stride of each spatial axis, or of each axis of the data; ones by default.
        dilation_rate: Dilations, in the form of ``strides``.
        data_format: ``"NHWC"`` (the default) or ``"NCHW"``, with ``W``, ``HW`` or ``DHW``.
        extract_patches_fn: Name of an extraction in ``compat.patch_extraction``. All extractions
            return the same patches, and each is restricted to some layers.
        sub_sample_inputs: Whether ``A`` reads a random subset of the examples; by default the
            choice of the configuration.
        sub_sample_patches: Whether ``A`` reads a random subset of the patches; by default the
            choice of the configuration.
        use_sua_approx_for_input_factor: Whether pixels of different positions are assumed to be
            uncorrelated, so that ``A`` follows from single pixels.
        patch_mask: Factor of each entry of a patch, ``(*kernel, channels)``.
        weight_format: ``"HWIO"`` (the default) or ``"OIHW"``, with ``W``, ``HW`` or ``DHW``.
    """

    def __init__(  # noqa: PLR0913 (the specification's signature)
        self,
        layer_collection: FactorOwner,
        params: Params,
        padding: Padding,
        strides: Sequence[int] | None = None,
        dilation_rate: Sequence[int] | None = None,
        data_format: str | None = None,
        extract_patches_fn: str | None = None,
        sub_sample_inputs: bool | None = None,
        sub_sample_patches: bool | None = None,
        use_sua_approx_for_input_factor: bool = False,
        patch_mask: Array | None = None,
        weight_format: str | None = None,
    ) -> None:
        form = convolution_form(
            layer_collection.require_shape(params if isinstance(params, str) else params[0]),
            has_bias=not isinstance(params, str),
            padding=padding,
            strides=strides,
            dilations=dilation_rate,
            data_format=data_format,
            weight_format=weight_format,
            mask=patch_mask,
            sampling=layer_collection.config.sampling(sub_sample_inputs, sub_sample_patches),
        )
        check_extraction(extract_patches_fn, form, strides, dilation_rate)
        side = (
            uncorrelated_side(form, layer_collection.config)
            if use_sua_approx_for_input_factor
            else patches_side(form)
        )
        super().__init__(layer_collection, form, input_side=side)


class FullyConnectedMultiIndepFB(MultiUseKroneckerFB):
    """``F ≈ u · A ⊗ G`` for a dense layer used several times (Martens, Ba & Johnson 2018).

    Args:
        layer_collection: Owner of the factors.
        has_bias: Whether the layer has a bias.
        num_uses: Number of uses; optional if a tower lists them.
        diagonal_approx_for_input: Whether ``A`` is diagonal.
        diagonal_approx_for_output: Whether ``G`` is diagonal.
        weight_format: ``"IO"`` or ``"OI"``.
    """

    def __init__(
        self,
        layer_collection: FactorOwner,
        has_bias: bool = False,
        num_uses: int | None = None,
        diagonal_approx_for_input: bool = False,
        diagonal_approx_for_output: bool = False,
        weight_format: str = "IO",
    ) -> None:
        super().__init__(
            layer_collection,
            dense_form(weight_format, has_bias),
            num_uses,
            input_side=DIAGONAL if diagonal_approx_for_input else USES,
            output_side=DIAGONAL if diagonal_approx_for_output else USES,
        )


class FullyConnectedSeriesFB(SeriesFB):
    """The sum over lags between the uses of a dense layer (Martens, Ba & Johnson 2018).

    Args:
        layer_collection: Owner of the factors.
        has_bias: Whether the layer has a bias.
        num_uses: Number of uses; optional if a tower lists them.
        option: 1 or 2; see ``SeriesFB``.
        weight_format: ``"IO"`` or ``"OI"``.
    """

    def __init__(
        self,
        layer_collection: FactorOwner,
        has_bias: bool = False,
        num_uses: int | None = None,
        option: int = 2,
        weight_format: str = "IO",
    ) -> None:
        super().__init__(layer_collection, dense_form(weight_format, has_bias), num_uses, option)


class ConvKFCBasicMultiIndepFB(MultiUseKroneckerFB):
    """``F ≈ u · #locations · A ⊗ G`` for a convolution used several times.

    Args:
        layer_collection: Owner of the factors; must know the filter's shape.
        params: As in ``ConvKFCBasicFB``.
        padding: As in ``ConvKFCBasicFB``.
        strides: As in ``ConvKFCBasicFB``.
        dilation_rate: As in ``ConvKFCBasicFB``.
        data_format: As in ``ConvKFCBasicFB``.
        extract_patches_fn: As in ``ConvKFCBasicFB``.
        num_uses: Number of uses; optional if a tower lists them.
        sub_sample_inputs: As in ``ConvKFCBasicFB``.
        sub_sample_patches: As in ``ConvKFCBasicFB``.
        weight_format: As in ``ConvKFCBasicFB``.
    """

    def __init__(  # noqa: PLR0913 (the specification's signature)
        self,
        layer_collection: FactorOwner,
        params: Params,
        padding: Padding,
        strides: Sequence[int] | None = None,
        dilation_rate: Sequence[int] | None = None,
        data_format: str | None = None,
        extract_patches_fn: str | None = None,
        num_uses: int | None = None,
        sub_sample_inputs: bool | None = None,
        sub_sample_patches: bool | None = None,
        weight_format: str | None = None,
    ) -> None:
        form = convolution_form(
            layer_collection.require_shape(params if isinstance(params, str) else params[0]),
            has_bias=not isinstance(params, str),
            padding=padding,
            strides=strides,
            dilations=dilation_rate,
            data_format=data_format,
            weight_format=weight_format,
            sampling=layer_collection.config.sampling(sub_sample_inputs, sub_sample_patches),
        )
        check_extraction(extract_patches_fn, form, strides, dilation_rate)
        super().__init__(layer_collection, form, num_uses, input_side=patches_side(form))


class ConvDiagonalFB(LayerDiagonalFB):
    """The diagonal of a convolution's block: the mean squared gradient of an example.

    Args:
        layer_collection: Owner of the factors; must know the filter's shape.
        params: The filter, or ``(filter, bias)``.
        strides: Stride of each spatial axis, or of each axis of the data.
        padding: ``"SAME"``, ``"VALID"`` or ``((begin, end), …)``.
        data_format: As in ``ConvKFCBasicFB``.
        dilations: Dilations, in the form of ``strides``.
        patch_mask: As in ``ConvKFCBasicFB``.
        weight_format: As in ``ConvKFCBasicFB``.
    """

    def __init__(  # noqa: PLR0913 (the specification's signature)
        self,
        layer_collection: FactorOwner,
        params: Params,
        strides: Sequence[int],
        padding: Padding,
        data_format: str | None = None,
        dilations: Sequence[int] | None = None,
        patch_mask: Array | None = None,
        weight_format: str | None = None,
    ) -> None:
        form = convolution_form(
            layer_collection.require_shape(params if isinstance(params, str) else params[0]),
            has_bias=not isinstance(params, str),
            padding=padding,
            strides=strides,
            dilations=dilations,
            data_format=data_format,
            weight_format=weight_format,
            mask=patch_mask,
        )
        super().__init__(layer_collection, form)
