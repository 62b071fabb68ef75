"""The inverse of a matrix, an operator of ONNX Runtime."""

from kfac_engine.autodiff.rules import Cotangents, Gradients, Wanted, vjp_rule
from kfac_engine.autodiff.vjp_builder import VjpBuilder
from kfac_engine.graph.structure import Node


@vjp_rule("com.microsoft::Inverse")
def inverse(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return −Yᵀ G Yᵀ for each matrix of a batch."""
    y = node.outputs[0]
    rank = b.rank(y)
    transposed = b.op("Transpose", y, perm=(*range(rank - 2), rank - 1, rank - 2))
    return {0: b.op("Neg", b.op("MatMul", b.op("MatMul", transposed, g[0]), transposed))}
