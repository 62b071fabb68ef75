"""Registration of embeddings: tables whose rows are selected by token ids."""

from collections.abc import Sequence
from dataclasses import replace

from kfac_engine._types import Params
from kfac_engine.curvature.blocks.base import TowerNames
from kfac_engine.curvature.blocks.kronecker import count_uses
from kfac_engine.curvature.collection.registry import BlockRegistry, canonical_key
from kfac_engine.layers.layer_forms import LayerForm, embedding_form
from kfac_engine.layers.packing import Packing
from kfac_engine.layers.token_ids import TokenIdView
from kfac_engine.layers.views import RowView
from kfac_engine.losses.collection import Reuse


class EmbeddingLayers(BlockRegistry):
    """The part of ``LayerCollection`` that registers embeddings."""

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
