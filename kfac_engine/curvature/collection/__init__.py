"""The registry of layers and losses: which parameters form which block.

Tensors are names; their values follow with each batch, as a mapping from names to arrays.
``LayerCollection`` has a base class for the blocks, their approximations and their uses in the
graph (``registry``), which has one for the losses (``losses.collection``).
"""

from kfac_engine.curvature.collection.layer_collection import (
    REGISTRATIONS,
    LayerCollection,
    get_default_layer_collection,
    set_default_layer_collection,
)

__all__ = [
    "REGISTRATIONS",
    "LayerCollection",
    "get_default_layer_collection",
    "set_default_layer_collection",
]
