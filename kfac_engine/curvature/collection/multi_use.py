"""Registration of layers with several uses in one evaluation of the model."""

from collections.abc import Sequence
from dataclasses import replace

from kfac_engine._types import Params
from kfac_engine.curvature.blocks.base import TowerNames
from kfac_engine.curvature.blocks.kronecker import count_uses
from kfac_engine.curvature.collection.dense import require_diagonal_input
from kfac_engine.curvature.collection.registry import BlockRegistry, canonical_key, names_of
from kfac_engine.layers.grouped import grouped_form
from kfac_engine.layers.layer_forms import (
    convolution_form,
    dense_form,
    embedding_form,
    transposed_form,
)
from kfac_engine.layers.views import Padding
from kfac_engine.losses.collection import Reuse


class MultiUseLayers(BlockRegistry):
    """The part of ``LayerCollection`` that registers layers used several times."""

    def register_fully_connected_multi(  # noqa: PLR0913 (the specification's signature)
        self,
        params: Params | Sequence[str],
        inputs: TowerNames,
        outputs: TowerNames,
        num_uses: int | None = None,
        approx: str | None = None,
        reuse: Reuse = "VARIABLE_SCOPE",
        weight_format: str = "IO",
        dense_inputs: bool = True,
        feature_axis: int = -1,
    ) -> None:
        """Register a dense layer that is used several times.

        Args:
            params: The weight, or ``(weight, bias)``.
            inputs: Names over uses, each ``(n, d_in)``; or one name of all uses,
                ``(num_uses·n, d_in)`` (use by use) or ``(num_uses, n, d_in)``.
            outputs: Names of outputs with ``d_out`` features, in either form.
            num_uses: Number of uses; optional if they are listed.
            approx: Name of an approximation of the kind; by default that of the collection.
            reuse: Whether this is a further tower.
            weight_format: ``"IO"`` or ``"OI"``.
            dense_inputs: As in ``register_fully_connected``; a single tensor of token ids is
                ``(num_uses·n,)`` or ``(num_uses, n)``.
            feature_axis: As in ``register_fully_connected``.
        """
        key = canonical_key(params)
        if dense_inputs:
            has_bias = not isinstance(key, str)
            form = dense_form(weight_format, has_bias, feature_axis=feature_axis)
        else:
            require_diagonal_input(self._resolve("fully_connected_multi", approx, key))
            form = embedding_form(self.require_vocabulary(key), rank=1)
        form = replace(form, num_uses=count_uses(num_uses, inputs, outputs))
        self._register("fully_connected_multi", key, form, (inputs, outputs), approx, reuse)

    def register_conv2d_multi(  # noqa: PLR0913 (the specification's signature)
        self,
        params: Params | Sequence[str],
        strides: Sequence[int],
        padding: Padding,
        inputs: TowerNames,
        outputs: TowerNames,
        num_uses: int | None = None,
        data_format: str | None = None,
        dilations: Sequence[int] | None = None,
        approx: str | None = None,
        reuse: Reuse = "VARIABLE_SCOPE",
        weight_format: str | None = None,
    ) -> None:
        """Register a convolution over two spatial axes that is used several times.

        Args:
            params: The filter, or ``(filter, bias)``; the filter's shape must be declared.
            strides: As in ``register_conv2d``.
            padding: As in ``register_conv2d``.
            inputs: Names of the images over uses; or one name of all uses, the batch axis
                ``num_uses·n`` long (use by use) or with an axis of ``num_uses`` before it.
            outputs: Names of the outputs, in either form.
            num_uses: Number of uses; optional if they are listed.
            data_format: As in ``register_conv2d``, for one use.
            dilations: As in ``register_conv2d``.
            approx: Name of an approximation of the kind; by default that of the collection.
            reuse: Whether this is a further tower.
            weight_format: As in ``register_conv2d``.
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
            sampling=self.config.sampling(),
        )
        form = replace(form, num_uses=count_uses(num_uses, inputs, outputs))
        self._register("conv2d_multi", key, form, (inputs, outputs), approx, reuse)

    def register_convolution_multi(  # noqa: PLR0913 (the properties of a convolution)
        self,
        params: Params | Sequence[str],
        inputs: TowerNames,
        outputs: TowerNames,
        padding: Padding,
        num_uses: int | None = None,
        strides: Sequence[int] | None = None,
        dilations: Sequence[int] | None = None,
        data_format: str | None = None,
        approx: str | None = None,
        reuse: Reuse = "VARIABLE_SCOPE",
        weight_format: str | None = None,
    ) -> None:
        """Register a convolution over one, two or three axes that is used several times.

        Args:
            params: The filter, or ``(filter, bias)``; the filter's shape must be declared.
            inputs: As in ``register_conv2d_multi``.
            outputs: Likewise.
            padding: ``"SAME"``, ``"VALID"`` or ``((begin, end), …)``.
            num_uses: Number of uses; optional if they are listed.
            strides: Number for each spatial axis, or for each axis of the data; 1 by default.
            dilations: As ``strides``.
            data_format: Channels last such as ``"NHWC"`` (default), or first such as ``"NCHW"``.
            approx: ``"kron_indep"``.
            reuse: Whether this is a further tower.
            weight_format: Layout such as ``"HWIO"`` (default) or ``"OIHW"``.
        """
        key = canonical_key(params)
        form = convolution_form(
            self.require_filter(names_of(key)[0], (3, 4, 5)),
            has_bias=not isinstance(key, str),
            padding=padding,
            strides=strides,
            dilations=dilations,
            data_format=data_format,
            weight_format=weight_format,
            sampling=self.config.sampling(),
        )
        form = replace(form, num_uses=count_uses(num_uses, inputs, outputs))
        self._register("convolution_multi", key, form, (inputs, outputs), approx, reuse)

    def register_conv_transpose_multi(  # noqa: PLR0913 (the properties of a convolution)
        self,
        params: str,
        inputs: TowerNames,
        outputs: TowerNames,
        padding: Padding,
        num_uses: int | None = None,
        strides: Sequence[int] | None = None,
        dilations: Sequence[int] | None = None,
        data_format: str | None = None,
        approx: str | None = None,
        reuse: Reuse = "VARIABLE_SCOPE",
        weight_format: str | None = None,
    ) -> None:
        """Register a transposed convolution that is used several times.

        Args:
            params: The filter; its shape must be declared.
            inputs: As in ``register_conv2d_multi``.
            outputs: Likewise.
            padding: As in ``register_conv_transpose``, as all that follow.
            num_uses: Number of uses; optional if they are listed.
            strides: Number for each spatial axis, or for each axis of the data; 1 by default.
            dilations: As ``strides``.
            data_format: Channels last such as ``"NHWC"`` (default), or first such as ``"NCHW"``.
            approx: ``"kron_indep"``.
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
        form = replace(form, num_uses=count_uses(num_uses, inputs, outputs))
        self._register("conv_transpose_multi", params, form, (inputs, outputs), approx, reuse)

    def register_grouped_convolution_multi(  # noqa: PLR0913 (the properties of a convolution)
        self,
        params: Params | Sequence[str],
        inputs: TowerNames,
        outputs: TowerNames,
        padding: Padding,
        groups: int,
        num_uses: int | None = None,
        strides: Sequence[int] | None = None,
        dilation_rate: Sequence[int] | None = None,
        data_format: str | None = None,
        approx: str | None = None,
        reuse: Reuse = "VARIABLE_SCOPE",
        weight_format: str | None = None,
    ) -> None:
        """Register a convolution in groups that is used several times.

        Args:
            params: As in ``register_grouped_convolution``.
            inputs: As in ``register_conv2d_multi``.
            outputs: Likewise.
            padding: As in ``register_grouped_convolution``, as all that follow.
            groups: Number of groups.
            num_uses: Number of uses; optional if they are listed.
            strides: Number for each spatial axis, or for each axis of the data; 1 by default.
            dilation_rate: As ``strides``.
            data_format: Channels last such as ``"NHWC"`` (default), or first such as ``"NCHW"``.
            approx: ``"kron_indep"``, a Kronecker product for each group.
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
        uses = replace(form.layer, num_uses=count_uses(num_uses, inputs, outputs))
        form = replace(form, layer=uses)
        self._register("grouped_convolution_multi", key, form, (inputs, outputs), approx, reuse)
