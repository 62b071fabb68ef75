"""``LayerCollection``: registers the layers of a model, each kind by a method.

``*_multi`` registers a layer that an evaluation of the model uses several times.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, Self

from kfac_engine._types import Array, Params
from kfac_engine.arguments import instance
from kfac_engine.curvature.blocks.base import TowerNames, uses
from kfac_engine.curvature.blocks.grouped import single_filter
from kfac_engine.curvature.blocks.kronecker import count_uses
from kfac_engine.curvature.collection.registry import BlockRegistry, canonical_key, names_of
from kfac_engine.errors import InputError, RegistrationError
from kfac_engine.layers.broadcast import BroadcastShape, ScaleShiftForm
from kfac_engine.layers.grouped import depthwise_form, grouped_form, stacked_dense_form
from kfac_engine.layers.layer_forms import (
    LayerForm,
    convolution_form,
    dense_form,
    embedding_form,
    transposed_form,
)
from kfac_engine.layers.packing import Packing
from kfac_engine.layers.views import Padding, RowView, TokenIdView
from kfac_engine.losses.collection import Reuse
from kfac_engine.registry import Registry

_CHANNEL_AXIS = {"NCHW": 1}  # the last one otherwise


class LayerCollection(BlockRegistry):
    """The layers and losses of a model with their blocks and shared factors.

    A collection belongs to one estimator.

    Args:
        graph: The model, or shapes of named tensors (``{"w": (4, 3)}``) for use without one.
        name: For messages.
        config: Options of averages, damping and inverses.
        backend: ``"auto"``, ``"numpy"`` or ``"cupy"``, or a result of ``select``.

    Attributes:
        fisher_blocks: Parameters (a name or a tuple) to block, in the order of registration.
        fisher_factors: (class, arguments) to factor, in the order of creation.
        graph: The model, or the shapes.
        subgraph: The part of the model that the losses depend on; None before
            ``create_subgraph``, and without a model.
    """

    @contextmanager
    def as_default(self) -> Iterator[Self]:
        """Return a context in which ``get_default_layer_collection`` returns this collection."""
        set_default_layer_collection(self)
        try:
            yield self
        finally:
            set_default_layer_collection(None)

    # -- dense -------------------------------------------------------------------------------------

    def register_fully_connected(  # noqa: PLR0913 (the specification's signature)
        self,
        params: Params | Sequence[str],
        inputs: str,
        outputs: str,
        approx: str | None = None,
        reuse: Reuse = "VARIABLE_SCOPE",
        weight_format: str = "IO",
        feature_axis: int = -1,
        dense_inputs: bool = True,
    ) -> None:
        """Register a dense layer.

        Args:
            params: The weight, or ``(weight, bias)``.
            inputs: Name of the input, ``(n, …positions, d_in)``.
            outputs: Name of the output, ``(n, …positions, d_out)``.
            approx: Name of an approximation of the kind; by default that of the collection.
            reuse: Whether this is a further tower.
            weight_format: ``"IO"`` or ``"OI"``.
            feature_axis: Axis of the features in inputs and outputs; -2 for ``weight · inputs``.
            dense_inputs: False for ``inputs`` of token ids ``(n,)``, which select rows of the
                weight ``(vocabulary, d_out)``. The layer then has no bias and a diagonal input
                factor.
        """
        key = canonical_key(params)
        layout = weight_format, feature_axis, dense_inputs
        form = self._dense("fully_connected", key, approx, *layout)
        self._register("fully_connected", key, form, (inputs, outputs), approx, reuse)

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
        layout = weight_format, feature_axis, dense_inputs
        form = self._dense("fully_connected_multi", key, approx, *layout)
        form = replace(form, num_uses=count_uses(num_uses, inputs, outputs))
        self._register("fully_connected_multi", key, form, (inputs, outputs), approx, reuse)

    def register_stacked_dense(
        self,
        params: Params | Sequence[str],
        inputs: str,
        outputs: str,
        approx: str | None = None,
        reuse: Reuse = "VARIABLE_SCOPE",
    ) -> None:
        """Register several dense layers as one, such as the experts of a mixture.

        Args:
            params: The weights ``(slots, d_in, d_out)``, or ``(weights, biases)``; the shape of the
                weights must be declared.
            inputs: Name of the input, ``(n, …positions, slots, d_in)``.
            outputs: Name of the output, ``(n, …positions, slots, d_out)``.
            approx: ``"kron"``, a Kronecker product for each slot, or ``"diagonal"``.
            reuse: Whether this is a further tower.
        """
        key = canonical_key(params)
        shape = self.require_shape(names_of(key)[0])
        form = stacked_dense_form(shape, has_bias=not isinstance(key, str))
        self._register("stacked_dense", key, form, (inputs, outputs), approx, reuse)

    # -- embeddings --------------------------------------------------------------------------------

    def register_embedding(  # noqa: PLR0913 (the specification's signature, and OneHot)
        self,
        params: Params | Sequence[str],
        inputs: str,
        outputs: str,
        approx: str | None = None,
        reuse: Reuse = "VARIABLE_SCOPE",
        count_repeats: bool = False,
        positions: bool = False,
        zeros_outside: bool = False,
    ) -> None:
        """Register an embedding.

        Args:
            params: The table ``(vocabulary, d_out)``; its shape must be declared.
            inputs: Name of integers, ``(n,)`` or ``(n, ids)``; negative ones count from the end.
            outputs: Name of the output, ``(n, d_out)``: the sum of the selected rows.
            approx: ``"kron"``.
            reuse: Whether this is a further tower.
            count_repeats: Whether a token id that occurs ``k`` times in a row of ``inputs``
                counts ``k`` times in the input factor; otherwise once.
            positions: Whether each token id has a separate output, ``(n, …positions)`` and
                ``(n, …positions, d_out)``, as in ONNX's Gather.
            zeros_outside: Whether a token id outside the vocabulary selects a row of zeros, as in
                ONNX's OneHot; otherwise it is an error.
        """
        key = canonical_key(params)
        form = embedding_form(
            self.require_vocabulary(key),
            positions=positions,
            count_repeats=count_repeats,
            zeros_outside=zeros_outside,
        )
        self._register("embedding", key, form, (inputs, outputs), approx, reuse)

    def register_embedding_multi(  # noqa: PLR0913 (the specification's signature)
        self,
        params: Params | Sequence[str],
        inputs: TowerNames,
        outputs: TowerNames,
        num_uses: int | None = None,
        approx: str | None = None,
        reuse: Reuse = "VARIABLE_SCOPE",
        count_repeats: bool = False,
        positions: bool = False,
        zeros_outside: bool = False,
    ) -> None:
        """Register an embedding that is used several times.

        Args:
            params: As in ``register_embedding``.
            inputs: Names over uses, each as in ``register_embedding``; or one name of all uses,
                ``(num_uses·n, ids)`` (use by use) or ``(num_uses, n, ids)``.
            outputs: Names of outputs with ``d_out`` features, in either form.
            num_uses: Number of uses; optional if they are listed.
            approx: ``"kron_indep"``.
            reuse: Whether this is a further tower.
            count_repeats: As in ``register_embedding``.
            positions: As in ``register_embedding``.
            zeros_outside: As in ``register_embedding``.
        """
        key = canonical_key(params)
        form = embedding_form(
            self.require_vocabulary(key),
            positions=positions,
            count_repeats=count_repeats,
            zeros_outside=zeros_outside,
        )
        form = replace(form, num_uses=count_uses(num_uses, inputs, outputs))
        self._register("embedding_multi", key, form, (inputs, outputs), approx, reuse)

    def register_tied_embedding(
        self,
        params: str,
        inputs: TowerNames,
        outputs: TowerNames,
        lookups: int = 1,
        approx: str | None = None,
        reuse: Reuse = "VARIABLE_SCOPE",
    ) -> None:
        """Register a table that embeddings and products read.

        Args:
            params: The table ``(vocabulary, d)``; its shape must be declared.
            inputs: Names over uses: of token ids, ``(n, …positions)``, then of the features of
                products, ``(n, …positions, d)``.
            outputs: Names of the selected rows, ``(n, …positions, d)``, then of the products,
                ``(n, …positions, vocabulary)``.
            lookups: Number of uses by token ids.
            approx: ``"kron"``.
            reuse: Whether this is a further tower.
        """
        key = canonical_key(params)
        ids = TokenIdView(self.require_vocabulary(key), positions=True, zeros_outside=True)
        form = LayerForm(ids, RowView(), Packing("OI", has_bias=False), num_uses=lookups)
        self._register("tied_embedding", key, form, (inputs, outputs), approx, reuse)

    # -- convolutions ------------------------------------------------------------------------------

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
        form = self._convolution(
            key,
            (3,),
            padding=padding,
            strides=strides,
            dilations=dilations,
            data_format=data_format,
            weight_format=weight_format,
            sampling=self.config.sampling(sub_sample_inputs, sub_sample_patches),
        )
        self._register("conv1d", key, form, (inputs, outputs), approx, reuse)

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
        form = self._convolution(
            key,
            (4,),
            padding=padding,
            strides=strides,
            dilations=dilations,
            data_format=data_format,
            weight_format=weight_format,
            mask=patch_mask,
            sampling=self.config.sampling(sub_sample_inputs, sub_sample_patches),
        )
        self._register("conv2d", key, form, (inputs, outputs), approx, reuse)

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
        form = self._convolution(
            key,
            (4,),
            padding=padding,
            strides=strides,
            dilations=dilations,
            data_format=data_format,
            weight_format=weight_format,
        )
        form = replace(form, num_uses=count_uses(num_uses, inputs, outputs))
        self._register("conv2d_multi", key, form, (inputs, outputs), approx, reuse)

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
        form = self._convolution(
            key,
            (3, 4, 5),
            padding=padding,
            strides=strides,
            dilations=dilation_rate,
            data_format=data_format,
            weight_format=weight_format,
        )
        self._register("convolution", key, form, (inputs, outputs), approx, reuse)

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
        form = self._convolution(
            key,
            (3, 4, 5),
            padding=padding,
            strides=strides,
            dilations=dilations,
            data_format=data_format,
            weight_format=weight_format,
        )
        form = replace(form, num_uses=count_uses(num_uses, inputs, outputs))
        self._register("convolution_multi", key, form, (inputs, outputs), approx, reuse)

    # -- transposed convolutions -------------------------------------------------------------------

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

    # -- convolutions in groups --------------------------------------------------------------------

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

    # -- scales and shifts -------------------------------------------------------------------------

    def register_scale_and_shift(
        self,
        params: Params | Sequence[str],
        inputs: TowerNames,
        outputs: TowerNames,
        approx: str | None = None,
        reuse: Reuse = "VARIABLE_SCOPE",
        feature_axis: int = -1,
        batch_axis: int = 0,
    ) -> None:
        """Register ``outputs = inputs ∘ scale + shift``.

        Args:
            params: The scale, or ``(scale, shift)``; their shapes must be declared. They are
                broadcast against the data from the right, and have one entry along the batch.
            inputs: Name of the data before scaling, with as many axes as ``outputs``; or names over
                the uses of the parameters.
            outputs: Name of the scaled and shifted data, likewise.
            approx: ``"full"`` or ``"diagonal"``; by default that of the collection.
            reuse: Whether this is a further tower.
            feature_axis: Axis of the data for the last axis of the parameters; 1 for a number for
                each channel of ``(n, channels, …)``.
            batch_axis: Axis of the examples in the data.

        Raises:
            InputError: There are more than two parameters.
        """
        key = canonical_key(params)
        names = names_of(key)
        if len(names) > 2:
            raise InputError(f"a scale and a shift are two parameters at most, got {names}.")
        sums = self._sums(names, (*uses(outputs), *uses(inputs)), feature_axis, batch_axis)
        form = ScaleShiftForm(sums[0], sums[1] if len(sums) > 1 else None)
        self._register("scale_and_shift", key, form, (inputs, outputs), approx, reuse)

    def register_shift(
        self,
        params: str,
        outputs: TowerNames,
        approx: str | None = None,
        reuse: Reuse = "VARIABLE_SCOPE",
        feature_axis: int = -1,
        batch_axis: int = 0,
    ) -> None:
        """Register ``outputs = inputs + shift`` without a trained scale.

        Args:
            params: The shift.
            outputs: As in ``register_scale_and_shift``.
            approx: As in ``register_scale_and_shift``.
            reuse: Whether this is a further tower.
            feature_axis: As in ``register_scale_and_shift``.
            batch_axis: As in ``register_scale_and_shift``.

        Raises:
            InputError: There are several parameters.
        """
        if not isinstance(params, str):
            raise InputError(f"a shift is one parameter, got {params}.")
        (sums,) = self._sums((params,), uses(outputs), feature_axis, batch_axis)
        form = ScaleShiftForm(None, sums)
        self._register("shift", params, form, ((), outputs), approx, reuse)

    # -- private -----------------------------------------------------------------------------------

    def _dense(
        self,
        kind: str,
        key: Params,
        approx: str | None,
        weight_format: str,
        feature_axis: int,
        dense_inputs: bool,
    ) -> LayerForm:
        """Return the form of a dense layer; without dense inputs, of one that selects rows."""
        if dense_inputs:
            return dense_form(weight_format, not isinstance(key, str), feature_axis=feature_axis)
        chosen = self._resolve(kind, approx, key)
        if not chosen.endswith(("_in_diag", "_both_diag")):
            raise InputError(
                f"Bad value '{chosen}' for approx with dense_inputs=False: identifiers have a "
                f"diagonal input factor; choose one that ends with 'in_diag' or 'both_diag'."
            )
        return embedding_form(self.require_vocabulary(key), rank=1)

    def _convolution(self, key: Params, ranks: tuple[int, ...], **options: Any) -> LayerForm:
        """Return the form of a convolution, whose filter has one of the given numbers of axes."""
        shape = self.require_filter(names_of(key)[0], ranks)
        options.setdefault("sampling", self.config.sampling())
        return convolution_form(shape, has_bias=not isinstance(key, str), **options)

    def _sums(
        self, names: Sequence[str], data: Sequence[str], feature_axis: int, batch_axis: int
    ) -> list[BroadcastShape]:
        """Return the broadcasts of parameters, checked against the first data of known shape."""
        sums = [BroadcastShape(self.require_shape(n), feature_axis, batch_axis) for n in names]
        known = next((shape for name in data if (shape := self.shape_of(name))), None)
        if known is not None:  # otherwise the first batch is checked
            for reduction in sums:
                reduction.summed(known)
        return sums


# A context variable, so that threads and tasks have separate defaults.
_default: ContextVar[LayerCollection | None] = ContextVar("default collection", default=None)


def get_default_layer_collection() -> LayerCollection:
    """Return the collection that was set as the default.

    Raises:
        RegistrationError: No default is set.
    """
    collection = _default.get()
    if collection is None:
        raise RegistrationError(
            "no default LayerCollection is set; pass a collection, or use `with "
            "collection.as_default():`."
        )
    return collection


def set_default_layer_collection(layer_collection: LayerCollection | None) -> None:
    """Set the default collection; None clears it.

    Raises:
        InputError: The argument is no collection.
        RegistrationError: Another default is set; clear it first.
    """
    if layer_collection is not None:
        instance("layer_collection", layer_collection, LayerCollection)
    if layer_collection is not None and _default.get() is not None:
        raise RegistrationError(
            "a default LayerCollection is set already; clear it with "
            "set_default_layer_collection(None) first."
        )
    _default.set(layer_collection)


# Kind of layer to the method that registers it. The method takes the collection, the parameters,
# ``inputs`` unless the layer reads none, ``outputs``, ``approx`` and the options of the kind.
REGISTRATIONS: Registry[Callable[..., None]] = Registry(
    "kind of layer",
    {
        "fully_connected": LayerCollection.register_fully_connected,
        "fully_connected_multi": LayerCollection.register_fully_connected_multi,
        "conv1d": LayerCollection.register_conv1d,
        "conv2d": LayerCollection.register_conv2d,
        "conv2d_multi": LayerCollection.register_conv2d_multi,
        "convolution": LayerCollection.register_convolution,
        "convolution_multi": LayerCollection.register_convolution_multi,
        "conv_transpose": LayerCollection.register_conv_transpose,
        "conv_transpose_multi": LayerCollection.register_conv_transpose_multi,
        "grouped_convolution": LayerCollection.register_grouped_convolution,
        "grouped_convolution_multi": LayerCollection.register_grouped_convolution_multi,
        "depthwise_conv2d": LayerCollection.register_depthwise_conv2d,
        "stacked_dense": LayerCollection.register_stacked_dense,
        "embedding": LayerCollection.register_embedding,
        "embedding_multi": LayerCollection.register_embedding_multi,
        "tied_embedding": LayerCollection.register_tied_embedding,
        "scale_and_shift": LayerCollection.register_scale_and_shift,
        "shift": LayerCollection.register_shift,
    },
)
