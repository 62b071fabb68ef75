"""Dropout in training mode, made to show which elements it kept."""

from dataclasses import replace

from kfac_engine.autodiff.lowering import lowering
from kfac_engine.autodiff.lowering.builder import LoweringBuilder
from kfac_engine.autodiff.random_ops import drops
from kfac_engine.graph.structure import Node


@lowering("Dropout")
def dropout(b: LoweringBuilder, node: Node) -> None:
    """The same node, with its mask as a second result wherever it may drop anything."""
    if drops(b.graph, node) and not any(node.outputs[1:]):
        node = replace(node, outputs=(node.outputs[0], f"{b.prefix}mask"))
    b.nodes.append(node)
