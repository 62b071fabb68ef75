"""Defines ``LayerCollection`` with the registration methods of TensorFlow's K-FAC library.

``*_multi`` registers a layer that an evaluation of the model uses several times. A *tower* is a
part of the batch whose tensors have names of their own.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from kfac_engine._types import Array, Params
from kfac_engine.arguments import check_instance
from kfac_engine.backend.protocol import Backend
from kfac_engine.compat.losses import LossMethods, Reuse, check_reuse
from kfac_engine.curvature import collection as core
from kfac_engine.curvature.blocks.base import FisherBlock, Names, uses
from kfac_engine.curvature.blocks.grouped import single_filter
from kfac_engine.curvature.blocks.kronecker import count_uses
from kfac_engine.curvature.collection import Form, canonical_key
from kfac_engine.curvature.config import CollectionConfig
from kfac_engine.errors import InputError, RegistrationError, ShapeError, UnknownNameError
from kfac_engine.layers.grouped import depthwise_form
from kfac_engine.layers.layer_forms import (
    BroadcastShape,
    LayerForm,
    ScaleShiftForm,
    convolution_form,
    dense_form,
    embedding_form,
)
from kfac_engine.layers.views import Padding, TokenIdView

if TYPE_CHECKING:  # a collection of named shapes needs no ONNX file, and none of its modules
    from kfac_engine.runtime.model import OnnxModel

_CHANNEL_AXIS = {"NCHW": 1}  # the last one otherwise


def _default(kind: str) -> property:
    """Return a property for the default approximation of a kind of layer."""

    def default(self: "LayerCollection") -> str:
        return self.default_approximation(kind)

    return property(default, doc=f"Default approximation of layers of the kind '{kind}'.")


def _setter(kind: str) -> Callable[["LayerCollection", str], None]:
    """Return a method that sets the default approximation of a kind of layer."""

    def set_default(self: "LayerCollection", value: str) -> None:
        self.set_default_approximation(kind, value)

    set_default.__doc__ = (
        f"Set the default approximation of layers of the kind '{kind}'; raise an InputError for an "
        f"approximation that the kind does not have."
    )
    return set_default


class LayerCollection(LossMethods, core.LayerCollection):
    """The layers and losses of a model with their blocks and shared factors.

    A collection belongs to one estimator.

    Args:
        graph: The model, or shapes of named tensors (``{"w": (4, 3)}``) for use without one.
        name: For messages.
        config: Options of averages, damping and inverses.
        backend: ``"auto"``, ``"numpy"`` or ``"cupy"``, or a result of ``select``.

    Attributes:
        fisher_blocks: Blocks by parameters (a name or a tuple), in the order of registration.
        fisher_factors: Factors by ``(class, arguments)``, in the order of creation.
        graph: The model, or the shapes.
        subgraph: The part of the model that the losses depend on; None before
            ``create_subgraph``, and without a model.
    """

    def __init__(
        self,
        graph: "OnnxModel | Mapping[str, tuple[int, ...]] | None" = None,
        name: str = "LayerCollection",
        config: CollectionConfig | None = None,
        backend: str | Backend = "auto",
    ) -> None:
        super().__init__(graph, name, config, backend)
        self._linked: dict[frozenset[str], str | None] = {}

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
            approx: Name of an approximation of the kind; by default the default of the collection.
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
        inputs: Names,
        outputs: Names,
        num_uses: int | None = None,
        approx: str | None = None,
        reuse: Reuse = "VARIABLE_SCOPE",
        weight_format: str = "IO",
        dense_inputs: bool = True,
        feature_axis: int = -1,
    ) -> None:
        """Register a dense layer that is used several times.

        The arguments are those of ``register_fully_connected``, except that ``inputs`` and
        ``outputs`` are each a list with a name for each use, or the name of one array with all
        uses. Such inputs are ``(num_uses·n, d_in)``, use by use, or ``(num_uses, n, d_in)``; token
        ids lack ``d_in``. ``num_uses`` may be omitted if a list gives it.
        """
        key = canonical_key(params)
        layout = weight_format, feature_axis, dense_inputs
        form = self._dense("fully_connected_multi", key, approx, *layout)
        form = replace(form, num_uses=count_uses(num_uses, inputs, outputs))
        self._register("fully_connected_multi", key, form, (inputs, outputs), approx, reuse)

    # -- embeddings --------------------------------------------------------------------------------

    def register_embedding(
        self,
        params: Params | Sequence[str],
        inputs: str,
        outputs: str,
        approx: str | None = None,
        reuse: Reuse = "VARIABLE_SCOPE",
        count_repeats: bool = False,
        positions: bool = False,
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
        """
        key = canonical_key(params)
        rows = self._require_vocabulary(key)
        form = embedding_form(rows, positions=positions, count_repeats=count_repeats)
        self._register("embedding", key, form, (inputs, outputs), approx, reuse)

    def register_embedding_multi(  # noqa: PLR0913 (the specification's signature)
        self,
        params: Params | Sequence[str],
        inputs: Names,
        outputs: Names,
        num_uses: int | None = None,
        approx: str | None = None,
        reuse: Reuse = "VARIABLE_SCOPE",
        count_repeats: bool = False,
        positions: bool = False,
    ) -> None:
        """Register an embedding that is used several times.

        The arguments are those of ``register_embedding``, for several uses: ``inputs`` are names
        over uses, or one name of all uses, ``(num_uses·n, ids)`` (use by use) or ``(num_uses, n,
        ids)``. ``outputs`` have either form. ``num_uses`` is optional if the uses are listed, and
        ``approx`` is ``"kron_indep"``.
        """
        key = canonical_key(params)
        rows = self._require_vocabulary(key)
        form = embedding_form(rows, positions=positions, count_repeats=count_repeats)
        form = replace(form, num_uses=count_uses(num_uses, inputs, outputs))
        self._register("embedding_multi", key, form, (inputs, outputs), approx, reuse)

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

        The arguments are those of ``register_conv2d``, for one axis: ``padding`` may be ``((begin,
        end),)``, ``data_format`` is ``"NWC"`` (default) or ``"NCW"``, and ``weight_format`` is
        ``"WIO"`` (default) or ``"OIW"``.
        """
        key = canonical_key(params)
        geometry = padding, strides, dilations, data_format, weight_format
        sampling = self.config.sampling(sub_sample_inputs, sub_sample_patches)
        form = self._convolution(key, (3,), *geometry, sampling=sampling)
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
            approx: Name of an approximation of the kind; by default the default of the collection.
            reuse: Whether this is a further tower.
            sub_sample_inputs: Whether the input factor reads a random subset of the examples; by
                default the choice of the configuration.
            sub_sample_patches: Whether the input factor reads a random subset of the patches;
                by default the choice of the configuration.
            patch_mask: Factor of the entries of each patch, ``(*kernel, channels)``.
            weight_format: ``"HWIO"`` (default) or ``"OIHW"``.
        """
        key = canonical_key(params)
        geometry = padding, strides, dilations, data_format, weight_format
        sampling = self.config.sampling(sub_sample_inputs, sub_sample_patches)
        form = self._convolution(key, (4,), *geometry, mask=patch_mask, sampling=sampling)
        self._register("conv2d", key, form, (inputs, outputs), approx, reuse)

    def register_conv2d_multi(  # noqa: PLR0913 (the specification's signature)
        self,
        params: Params | Sequence[str],
        strides: Sequence[int],
        padding: Padding,
        inputs: Names,
        outputs: Names,
        num_uses: int | None = None,
        data_format: str | None = None,
        dilations: Sequence[int] | None = None,
        approx: str | None = None,
        reuse: Reuse = "VARIABLE_SCOPE",
        weight_format: str | None = None,
    ) -> None:
        """Register a convolution over two spatial axes that is used several times.

        The arguments are those of ``register_conv2d``, except that ``inputs`` and ``outputs`` are
        each a list with a name for each use, or the name of one array with all uses. Such an array
        has ``num_uses·n`` examples, use by use, or an axis of ``num_uses`` before the batch axis.
        ``num_uses`` may be omitted if a list gives it.
        """
        key = canonical_key(params)
        geometry = padding, strides, dilations, data_format, weight_format
        form = self._convolution(key, (4,), *geometry)
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

        The arguments are those of ``register_conv2d``, for each spatial axis: ``strides`` and
        ``dilation_rate`` are 1 by default, ``padding`` may be ``((begin, end), …)``, and ``approx``
        is ``"kron"``. ``data_format`` is ``"NWC"``, ``"NHWC"``, ``"NDHWC"`` (defaults), or has the
        channels first; ``weight_format`` is ``"WIO"``, ``"HWIO"``, ``"DHWIO"`` (defaults) or
        ``"OIW"`` and so on.
        """
        key = canonical_key(params)
        geometry = padding, strides, dilation_rate, data_format, weight_format
        form = self._convolution(key, (3, 4, 5), *geometry)
        self._register("convolution", key, form, (inputs, outputs), approx, reuse)

    # -- convolutions in groups --------------------------------------------------------------------

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
        geometry = padding, strides, rate, data_format, weight_format
        form = depthwise_form(self._require_filter(name, (4,)), *geometry, channels)
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

        The arguments are those of ``register_depthwise_conv2d``, with its default approximation.
        ``pointwise_params`` are the filter ``(1, 1, channels·multiplier, outputs)``, or ``(filter,
        bias)``. ``approx`` is the approximation of the pointwise convolution, as in
        ``register_conv2d``, and ``weight_format`` is that of both filters.
        """
        pointwise = canonical_key(pointwise_params)
        self._require_filter(uses(pointwise)[0], (4,))
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
        inputs: Names,
        outputs: Names,
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
            approx: ``"full"`` or ``"diagonal"``; by default the default of the collection.
            reuse: Whether this is a further tower.
            feature_axis: Axis of the data for the last axis of the parameters; 1 for a number for
                each channel of ``(n, channels, …)``.
            batch_axis: Axis of the examples in the data.

        Raises:
            InputError: There are more than two parameters.
        """
        key = canonical_key(params)
        names = uses(key)
        if len(names) > 2:
            raise InputError(f"a scale and a shift are two parameters at most, got {names}.")
        sums = self._sums(names, (*uses(outputs), *uses(inputs)), feature_axis, batch_axis)
        form = ScaleShiftForm(sums[0], sums[1] if len(sums) > 1 else None)
        self._register("scale_and_shift", key, form, (inputs, outputs), approx, reuse)

    # -- blocks ------------------------------------------------------------------------------------

    def register_generic(
        self,
        params: Params | Sequence[str],
        batch_size: int | str,
        approx: str | None = None,
        reuse: Reuse = "VARIABLE_SCOPE",
    ) -> None:
        """Register parameters without a layer.

        Args:
            params: A name, or several names for a joint block.
            batch_size: Examples, or the name of a value whose first axis is the batch.
            approx: ``"diagonal"`` (one parameter) or ``"full"``.
            reuse: Whether this is a further tower.
        """
        self._check_reuse(canonical_key(params), reuse)
        super().register_generic(params, batch_size, approx)

    def register_block(
        self,
        layer_key: Params | Sequence[str],
        fisher_block: FisherBlock,
        reuse: Reuse = "VARIABLE_SCOPE",
    ) -> FisherBlock:
        """Register a block that the caller created.

        Args:
            layer_key: The parameters.
            fisher_block: Block of the parameters.
            reuse: True returns the registered block, False requires a new key.

        Returns:
            The block that is registered under the key.

        Raises:
            RegistrationError: The key exists and ``reuse`` is False, or has another type of
                block, or a parameter belongs to another key.
            UnknownNameError: ``reuse`` is True and the key is unknown.
        """
        self._check_reuse(canonical_key(layer_key), reuse)
        return super().register_block(layer_key, fisher_block)

    # -- approximations: named at registration, of a linked group, or by default ------------------

    @property
    def linked_parameters(self) -> dict[frozenset[str], str | None]:
        """Groups of ``define_linked_parameters``, each with its approximation or None."""
        return dict(self._linked)

    def define_linked_parameters(
        self, params: Params | Sequence[str], approximation: str | None = None
    ) -> None:
        """Group the parameters of a layer, and set its approximation.

        A layer that is registered later with exactly these parameters has the approximation, unless
        its registration names another.

        Args:
            params: A name, or several in any order.
            approximation: Approximation of the layer; by default the default of its kind.

        Raises:
            RegistrationError: A parameter is linked already, or registered with other parameters.
            InputError: The group is empty, or contains a name twice.
        """
        if not isinstance(params, Iterable):
            raise InputError(f"a group has one or more distinct parameters, got {params!r}.")
        group = frozenset(uses(params))
        if not group or len(group) < len(uses(params)):
            raise InputError(f"a group has one or more distinct parameters, got {params!r}.")
        for key in self.fisher_blocks:
            if group.intersection(uses(key)) and group != set(uses(key)):
                raise RegistrationError(
                    f"{_named(group)} cannot be linked: {_named(uses(key))} is registered as a "
                    f"layer, which is a different group."
                )
        for linked in self._linked:
            if group & linked:
                raise RegistrationError(
                    f"{_named(group & linked)} cannot be linked again: it belongs to the group "
                    f"{_named(linked)}."
                )
        self._linked[group] = approximation

    default_generic_approximation = _default("generic")
    default_fully_connected_approximation = _default("fully_connected")
    default_fully_connected_multi_approximation = _default("fully_connected_multi")
    default_conv2d_approximation = _default("conv2d")
    default_conv2d_multi_approximation = _default("conv2d_multi")
    default_embedding_approximation = _default("embedding")
    default_embedding_multi_approximation = _default("embedding_multi")
    default_scale_and_shift_approximation = _default("scale_and_shift")

    set_default_generic_approximation = _setter("generic")
    set_default_fully_connected_approximation = _setter("fully_connected")
    set_default_fully_connected_multi_approximation = _setter("fully_connected_multi")
    set_default_conv2d_approximation = _setter("conv2d")
    set_default_conv2d_multi_approximation = _setter("conv2d_multi")
    set_default_embedding_approximation = _setter("embedding")
    set_default_embedding_multi_approximation = _setter("embedding_multi")
    set_default_scale_and_shift_approximation = _setter("scale_and_shift")

    # -- private -----------------------------------------------------------------------------------

    def _register(
        self,
        kind: str,
        key: Params,
        form: Form,
        tensors: tuple[Names, Names],
        approx: str | None,
        reuse: Reuse,
    ) -> None:
        """Register a layer, or a further tower of a registered layer."""
        self._check_reuse(key, reuse)
        self._check_features(key, form, tensors)
        self.register(kind, key, form, *tensors, approx)

    def _check_features(self, key: Params, form: Form, tensors: tuple[Names, Names]) -> None:
        """Refuse tensors whose declared numbers of features do not fit the weight of a layer."""
        weight = self.shape_of(uses(key)[0])
        if weight is None or not isinstance(form, LayerForm) or form.num_uses > 1:
            return
        if len(weight) != len(form.packing.axes):
            return  # refused by the registration
        *groups, d_in, d_out = form.packed_shape(weight)
        if groups:
            return
        sides = (
            ("input", form.input_view, d_in - form.packing.has_bias),
            ("output", form.output_view, d_out),
        )
        for (side, view, needed), name in zip(sides, tensors, strict=True):
            shape = self.shape_of(name) if isinstance(name, str) else None
            if shape is None or isinstance(view, TokenIdView):
                continue
            try:
                features = view.width(shape)
            except ShapeError as error:
                raise ShapeError(f"the {side} '{name}' of {key} does not fit: {error}") from None
            if features != needed:
                raise ShapeError(
                    f"the {side} '{name}' of shape {shape} has {features} features in a row; the "
                    f"weight '{uses(key)[0]}' of shape {weight} needs {needed}."
                )

    def _check_reuse(self, key: Params, reuse: Reuse) -> None:
        """Check that a key is known if ``reuse`` is True, and new if it is False."""
        self._require_open(f"a layer of {key}")
        check_reuse(reuse)
        known = key in self.fisher_blocks
        if reuse is True and not known:
            raise UnknownNameError(f"reuse=True, but no layer is registered for {key}.")
        if reuse is False and known:
            raise RegistrationError(f"FisherBlock for {key} is already in LayerCollection.")

    def _resolve(self, kind: str, approx: str | None, key: Params) -> str:
        linked = self._linked.get(frozenset(uses(key)))
        return super()._resolve(kind, linked if approx is None else approx, key)

    def _require_filter(self, name: str, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Return the declared shape of the filter of a convolution; ``ranks`` are allowed."""
        shape = self.require_shape(name)
        if len(shape) not in ranks:
            wanted = " or ".join(str(rank) for rank in ranks)
            raise InputError(f"filter '{name}' has shape {shape}; {wanted} axes are needed.")
        return shape

    def _require_vocabulary(self, key: Params) -> int:
        """Return the number of rows in the table of a layer that reads token ids.

        A bias, and a table whose shape is unknown or has not two axes, raise an InputError.
        """
        if not isinstance(key, str):
            raise InputError(f"Bias not supported: identifiers pick rows of one table, got {key}.")
        shape = self.require_shape(key)
        if len(shape) != 2:
            raise InputError(f"table '{key}' has shape {shape}; (vocabulary, d) is needed.")
        return shape[0]

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
        return embedding_form(self._require_vocabulary(key), rank=1)

    def _convolution(
        self, key: Params, ranks: tuple[int, ...], *geometry: Any, **options: Any
    ) -> LayerForm:
        """Return the form of a convolution, whose filter has one of the given numbers of axes."""
        shape = self._require_filter(uses(key)[0], ranks)
        options.setdefault("sampling", self.config.sampling())
        return convolution_form(shape, *geometry, has_bias=not isinstance(key, str), **options)

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
_current: ContextVar[LayerCollection | None] = ContextVar("default collection", default=None)


def get_default_layer_collection() -> LayerCollection:
    """Return the collection that was set as the default.

    Raises:
        RegistrationError: No default is set.
    """
    collection = _current.get()
    if collection is None:
        raise RegistrationError(
            "no default LayerCollection is set; pass a collection, or use `with "
            "collection.as_default():`."
        )
    return collection


def set_default_layer_collection(layer_collection: LayerCollection | None) -> None:
    """Set the default collection; None clears it.

    Raises:
        InputError: The argument is not a collection.
        RegistrationError: Another default is set; clear it first.
    """
    if layer_collection is not None:
        check_instance("layer_collection", layer_collection, LayerCollection)
    if layer_collection is not None and _current.get() is not None:
        raise RegistrationError(
            "a default LayerCollection is set already; clear it with "
            "set_default_layer_collection(None) first."
        )
    _current.set(layer_collection)


def _named(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
