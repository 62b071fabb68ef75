"""Classes of TensorFlow's library for embeddings: names and constructors over the general ones."""

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
    """``Cov = (1/n) Σ_i diag(n_hot(ids_i)²)``: counts of each identifier.

    Args:
        input_ids: Names of identifiers ``(n, ids)`` or ``(n,)``, one a tower.
        vocab_size: Identifiers are below it.
        dtype: Of the statistics, floating point; float32 when left out.
        count_repeats: Whether an identifier that comes several times in a row counts as often.
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
        vocab_size: Rows of the table.
        count_repeats: Whether an identifier that comes several times in a row counts as often.
        positions: Whether each identifier of an example has an output of its own.
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
        vocab_size: Rows of the table.
        num_uses: Uses; may be left out if a tower lists them.
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
