"""Registration of layers used several times in one evaluation of the model."""

from collections.abc import Sequence
from dataclasses import replace

from kfac_engine._types import Params
from kfac_engine.blocks.base import TowerNames
from kfac_engine.blocks.multi import count_uses
from kfac_engine.collection.dense import require_diagonal_input
from kfac_engine.collection.registry import BlockRegistry, canonical_key, names_of
from kfac_engine.layers.forms import convolution_form, dense_form, embedding_form
from kfac_engine.layers.sampling import choose_sampling
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
    ) -> None:
        """Register a dense layer that is used several times.

        Args:
            params: The weight, or ``(weight, bias)``.
            inputs: Names over uses, each ``(n, d_in)``; or one name of all uses,
                ``(num_uses·n, d_in)`` (use by use) or ``(num_uses, n, d_in)``.
            outputs: Likewise with ``d_out``; need not be given in the same way.
            num_uses: Uses; may be left out where they are listed.
            approx: A row of the table of approximations; the default when left out.
            reuse: Whether this is a further tower.
            weight_format: ``"IO"`` or ``"OI"``.
            dense_inputs: As in ``register_fully_connected``; a single tensor of identifiers is
                ``(num_uses·n,)`` or ``(num_uses, n)``.
        """
        key = canonical_key(params)
        if dense_inputs:
            form = dense_form(weight_format, not isinstance(key, str))
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
            outputs: Likewise; need not be given in the same way.
            num_uses: Uses; may be left out where they are listed.
            data_format: As in ``register_conv2d``: that of one use.
            dilations: As in ``register_conv2d``.
            approx: A row of the table of approximations; the default when left out.
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
            sampling=choose_sampling(self.config),
        )
        form = replace(form, num_uses=count_uses(num_uses, inputs, outputs))
        self._register("conv2d_multi", key, form, (inputs, outputs), approx, reuse)
