"""Writes a model that computes the variance of its outputs, by nodes of standard operators."""

from collections.abc import Sequence
from pathlib import Path

from kfac_engine.analysis.fisher_matrix.blocks import Block
from kfac_engine.analysis.fisher_matrix.layout import Layout
from kfac_engine.analysis.fisher_matrix.spectrum import Float
from kfac_engine.analysis.laplace.export_last_layer import export_last_layer, is_last_layer
from kfac_engine.analysis.laplace.export_network import export_network


def export_variance(
    layout: Layout, blocks: Sequence[tuple[Block, Float]], path: str | Path, node_limit: int
) -> None:
    """Write the model with the output ``variance``, ``(n, k, k)``.

    The variance under an uncertain last layer needs no backward pass.

    Args:
        layout: The model with its layers.
        blocks: The blocks, each with the eigenvalues of the covariance of its parameters.
        path: File to write.
        node_limit: Largest number of nodes of a file with backward passes.

    Raises:
        UnsupportedError: The gradients of examples cannot be written for a layer or the model.
        InputError: The path is wrong, the file would have more nodes, or it has a value
            ``variance`` already.
    """
    if is_last_layer(layout) and len(blocks) == 1:
        (layer, _), (block, variances) = layout.layers[0], blocks[0]
        export_last_layer(layout, layer, block, variances, path)
    else:
        export_network(layout, blocks, path, node_limit)
