"""Classes for embeddings with the names and constructors of TensorFlow's library."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kfac_engine.backend.protocol import Backend
from kfac_engine.curvature.blocks.base import FactorOwner
from kfac_engine.curvature.blocks.embedding import EmbeddingKroneckerFB
from kfac_engine.curvature.config import CollectionConfig
from kfac_engine.curvature.factors.embedding import IdCounts, VocabularyFactor
from kfac_engine.curvature.factors.statistics import one_use
from kfac_engine.errors import InputError
from kfac_engine.layers.layer_forms import embedding_form
from kfac_engine.layers.token_ids import TokenIdView


class EmbeddingInputKroneckerFactor(VocabularyFactor):
    """The mean count of each token id, ``(1/n) Σ_i diag(n_hot(ids_i)²)``.

    Args:
        input_ids: Name of the token ids of each tower, ``(n, ids)`` or ``(n,)``.
        vocab_size: Number of rows of the table; token ids are smaller.
        dtype: Floating-point type of the statistics; float32 by default.
        count_repeats: Whether an id that occurs k times in a row counts k times.
        backend: Array library; NumPy by default.
        config: Options of averages; the defaults if omitted.

    Raises:
        InputError: The vocabulary is empty or the type is not floating point.
    """

    def __init__(
        self,
        input_ids: Sequence[str],
        vocab_size: int,
        dtype: npt.DTypeLike | None = None,
        *,
        count_repeats: bool = False,
        backend: Backend | None = None,
        config: CollectionConfig | None = None,
    ) -> None:
        chosen = np.dtype(np.float32 if dtype is None else dtype)
        if chosen.kind != "f" or vocab_size < 1:
            raise InputError(
                f"an embedding's factor needs a vocabulary of at least one entry and a floating "
                f"point type, got {vocab_size} and {chosen}."
            )
        view = TokenIdView(int(vocab_size), count_repeats=count_repeats)
        super().__init__(IdCounts((one_use(input_ids),), view), backend=backend, config=config)
        self.narrowest = chosen


class EmbeddingKFACFB(EmbeddingKroneckerFB):
    """``F ≈ diag(A) ⊗ G`` for an embedding.

    Args:
        layer_collection: Owner of the factors.
        vocab_size: Number of rows of the table.
        count_repeats: Whether an id that occurs k times in a row counts k times.
        positions: Whether each token id of an example has an output.
    """

    def __init__(
        self,
        layer_collection: FactorOwner,
        vocab_size: int,
        count_repeats: bool = False,
        positions: bool = False,
    ) -> None:
        form = embedding_form(vocab_size, count_repeats=count_repeats, positions=positions)
        super().__init__(layer_collection, form)


class EmbeddingKFACMultiIndepFB(EmbeddingKroneckerFB):
    """``F ≈ u · diag(A) ⊗ G`` for an embedding used several times.

    Args:
        layer_collection: Owner of the factors.
        vocab_size: Number of rows of the table.
        num_uses: Number of uses; optional if a tower lists them.
        count_repeats: As in ``EmbeddingKFACFB``.
        positions: As in ``EmbeddingKFACFB``.
    """

    def __init__(
        self,
        layer_collection: FactorOwner,
        vocab_size: int,
        num_uses: int | None = None,
        count_repeats: bool = False,
        positions: bool = False,
    ) -> None:
        form = embedding_form(vocab_size, count_repeats=count_repeats, positions=positions)
        super().__init__(layer_collection, form, num_uses)
