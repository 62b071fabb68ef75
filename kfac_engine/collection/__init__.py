"""The registry of layers and losses: which parameters form which block.

``LayerCollection`` keeps the specification's names. Tensors are named; their values arrive later,
as a mapping from names to arrays. The specification asks for one class with fifty methods; they
lie in a file for each topic: ``losses.collection``, ``coverage`` (uses beside those of the graph),
``choices`` (defaults and linked groups), ``registry`` (blocks and factors), and a file for each
family of layers.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from kfac_engine.collection.default import (
    get_default_layer_collection,
    set_default_layer_collection,
)
from kfac_engine.collection.dense import DenseLayers
from kfac_engine.collection.embedding import EmbeddingLayers
from kfac_engine.collection.grouped import GroupedConvolutionLayers
from kfac_engine.collection.multi import MultiUseLayers
from kfac_engine.collection.norm import ScaleAndShiftLayers
from kfac_engine.collection.transposed import TransposedConvolutionLayers

__all__ = ["LayerCollection", "get_default_layer_collection", "set_default_layer_collection"]


class LayerCollection(
    DenseLayers,
    GroupedConvolutionLayers,
    TransposedConvolutionLayers,
    MultiUseLayers,
    EmbeddingLayers,
    ScaleAndShiftLayers,
):
    """Layers, losses and the factors they share; one for each estimator.

    Args:
        graph: The model, or shapes of named tensors (``{"w": (4, 3)}``) for use without one.
        name: For messages.
        config: How statistics are averaged, damped and inverted.
        backend: ``"auto"``, ``"numpy"`` or ``"cupy"``, or what ``select`` made of one of them.

    Attributes:
        fisher_blocks: Parameters (a name or a tuple) to block, in the order of registration.
        fisher_factors: (class, arguments) to factor, in the order of creation.
    """

    @contextmanager
    def as_default(self) -> Iterator["LayerCollection"]:
        """A context in which this is the collection of ``get_default_layer_collection``."""
        set_default_layer_collection(self)
        try:
            yield self
        finally:
            set_default_layer_collection(None)
