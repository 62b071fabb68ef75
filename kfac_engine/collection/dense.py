"""Registration of dense layers."""

from collections.abc import Sequence

from kfac_engine._types import Params
from kfac_engine.collection.registry import BlockRegistry, canonical_key
from kfac_engine.layers.forms import dense_form
from kfac_engine.losses.collection import Reuse


class DenseLayers(BlockRegistry):
    """The part of ``LayerCollection`` that registers dense layers."""

    def register_fully_connected(
        self,
        params: Params | Sequence[str],
        inputs: str,
        outputs: str,
        approx: str | None = None,
        reuse: Reuse = "VARIABLE_SCOPE",
        weight_format: str = "IO",
        feature_axis: int = -1,
    ) -> None:
        """Register a dense layer.

        Args:
            params: The weight, or ``(weight, bias)``.
            inputs: Name of the input, ``(n, …positions, d_in)``.
            outputs: Name of the output, ``(n, …positions, d_out)``.
            approx: A row of the table of approximations; the default when left out.
            reuse: Whether this is a further tower.
            weight_format: ``"IO"`` or ``"OI"``.
            feature_axis: Axis of the features in inputs and outputs; -2 for ``weight · inputs``.
        """
        key = canonical_key(params)
        form = dense_form(weight_format, not isinstance(key, str), feature_axis=feature_axis)
        self._register("fully_connected", key, form, (inputs, outputs), approx, reuse)
