"""Registration of dense layers."""

from collections.abc import Sequence

from kfac_engine._types import Params
from kfac_engine.curvature.collection.registry import BlockRegistry, canonical_key, names_of
from kfac_engine.errors import InputError
from kfac_engine.layers.batched_dense import stacked_dense_form
from kfac_engine.layers.layer_forms import dense_form, embedding_form
from kfac_engine.losses.collection import Reuse


class DenseLayers(BlockRegistry):
    """The part of ``LayerCollection`` that registers dense layers."""

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
        if dense_inputs:
            form = dense_form(weight_format, not isinstance(key, str), feature_axis=feature_axis)
        else:
            require_diagonal_input(self._resolve("fully_connected", approx, key))
            form = embedding_form(self.require_vocabulary(key), rank=1)
        self._register("fully_connected", key, form, (inputs, outputs), approx, reuse)

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


def require_diagonal_input(approx: str) -> None:
    """Raise an error for approximations that need inputs in rows.

    Raises:
        InputError: The input factor is not diagonal.
    """
    if not approx.endswith(("_in_diag", "_both_diag")):
        raise InputError(
            f"Bad value '{approx}' for approx with dense_inputs=False: identifiers have a diagonal "
            f"input factor; choose one that ends with 'in_diag' or 'both_diag'."
        )
