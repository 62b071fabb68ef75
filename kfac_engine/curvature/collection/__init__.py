"""The registry of layers and losses: which parameters form which block.

Tensors are names; their values follow with each batch, as a mapping from names to arrays.
``LayerCollection`` has a base class for the losses (``losses.collection``), one for the blocks,
their approximations and their uses in the graph (``registry``), and one for each family of layers.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Self

from kfac_engine.arguments import instance
from kfac_engine.curvature.collection.dense import DenseLayers
from kfac_engine.curvature.collection.embedding import EmbeddingLayers
from kfac_engine.curvature.collection.grouped import GroupedConvolutionLayers
from kfac_engine.curvature.collection.multi_use import MultiUseLayers
from kfac_engine.curvature.collection.scale_shift import ScaleAndShiftLayers
from kfac_engine.curvature.collection.transposed import TransposedConvolutionLayers
from kfac_engine.errors import RegistrationError
from kfac_engine.registry import Registry

__all__ = [
    "REGISTRATIONS",
    "LayerCollection",
    "get_default_layer_collection",
    "set_default_layer_collection",
]


class LayerCollection(
    DenseLayers,
    GroupedConvolutionLayers,
    TransposedConvolutionLayers,
    MultiUseLayers,
    EmbeddingLayers,
    ScaleAndShiftLayers,
):
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
