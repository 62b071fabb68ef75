"""Fused operators of ONNX Runtime's own domain, taken apart into standard ones."""

from kfac_engine.autodiff.lowering import lowering
from kfac_engine.autodiff.lowering.pen import Pen
from kfac_engine.autodiff.rules.attributes import number
from kfac_engine.graph.structure import Node


@lowering("com.microsoft::QuickGelu")
def quick_gelu(pen: Pen, node: Node) -> None:
    """``x · sigmoid(α x)``."""
    x = node.inputs[0]
    gate = pen.op("Sigmoid", pen.op("Mul", x, pen.scalar(number(node, "alpha", 1.702), x)))
    pen.op("Mul", x, gate, to=node.outputs[0])
