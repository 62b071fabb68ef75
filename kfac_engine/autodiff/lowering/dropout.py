"""Adds the mask to Dropout's results in training mode."""

from dataclasses import replace

from kfac_engine.autodiff.lowering import lowering
from kfac_engine.autodiff.lowering.builder import LoweringBuilder
from kfac_engine.autodiff.training_form import drops
from kfac_engine.graph.structure import Node


@lowering("Dropout")
def dropout(b: LoweringBuilder, node: Node) -> None:
    """Write a Dropout, with the mask as second result if it can be in training mode."""
    if drops(b.graph, node) and not any(node.outputs[1:]):
        node = replace(node, outputs=(node.outputs[0], f"{b.prefix}mask"))
    b.nodes.append(node)
