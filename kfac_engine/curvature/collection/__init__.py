"""The registry of layers and losses: which parameters form which block.

Tensors are names; their values follow with each batch, as a mapping from names to arrays.
``LayerCollection`` has a base class for each topic: ``losses.collection``, ``coverage`` (uses of
parameters in the graph), ``choices`` (defaults and linked groups), ``registry`` (blocks and
factors), and one for each family of layers.
"""

from collections.abc import Callable

from kfac_engine.curvature.collection.dense import DenseLayers
from kfac_engine.curvature.collection.embedding import EmbeddingLayers
from kfac_engine.curvature.collection.grouped import GroupedConvolutionLayers
from kfac_engine.curvature.collection.multi_use import MultiUseLayers
from kfac_engine.curvature.collection.scale_shift import ScaleAndShiftLayers
from kfac_engine.curvature.collection.transposed import TransposedConvolutionLayers
from kfac_engine.registry import Registry

__all__ = [
    "REGISTRATIONS",
    "LayerCollection",
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
    """


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
        "scale_and_shift": LayerCollection.register_scale_and_shift,
        "shift": LayerCollection.register_shift,
    },
)
