"""Operators that pick or place elements by index.

Picking goes back as adding: an element picked twice gets two cotangents. That is written with
ScatterElements, never with ScatterND: ONNX Runtime spreads the latter over threads that add to the
same element at the same time, and sums come out short.
"""

from kfac_engine.autodiff.builder import Builder
from kfac_engine.autodiff.rules import Cotangents, Gradients, Wanted, vjp_rule
from kfac_engine.autodiff.rules.attributes import integer, text
from kfac_engine.errors import UnsupportedOpError
from kfac_engine.graph.structure import Node


def rearranged(b: Builder, node: Node, g: str, *, narrow: bool = False) -> str:
    """The adjoint of any operator that only picks elements of its first operand.

    The operator is applied to the elements' numbers, which tells where each result came from.

    Args:
        b: The builder.
        node: Picks elements of a floating-point operand, but would pick integers as well.
        g: Cotangent of its only result.
        narrow: Whether ONNX Runtime has the operator for int32 but not for int64.

    Returns:
        The cotangent of its first operand.
    """
    x, *others = node.inputs
    everything = b.constant([-1])
    size = b.forward("ReduceProd", b.shape(x), keepdims=0)[0]
    numbers = b.forward("Range", b.constant(0), size, b.constant(1))[0]
    numbers = b.forward("Reshape", numbers, b.shape(x))[0]
    if narrow:
        numbers = b.forward("Cast", numbers, to=_INT32)[0]
    sources = b.repeat(node, numbers, *others)[0]
    flat = (b.op("Reshape", value, everything) for value in (b.zeros(x), sources, g))
    return b.reshape_like(b.op("ScatterElements", *flat, axis=0, reduction="add"), x)


_INT32 = 6  # TensorProto.INT32


@vjp_rule("Gather")
def gather(b: Builder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Slices are added where they came from."""
    x, indices = node.inputs
    axis = integer(node, "axis", 0) % b.rank(x)
    # All indices in a row, along the picked axis: updates then have the rank of the operand.
    before, after = [0] * axis, range(axis + 1, b.rank(x))
    behind = b.forward("Gather", b.shape(x), b.constant(after, "int64"))[0]
    sides = b.forward("Concat", b.constant([*before, -1]), behind, axis=0)[0]
    updates = b.op("Reshape", g[0], sides)
    line = b.op("Reshape", indices, b.constant([1] * axis + [-1] + [1] * len(after)))
    places = b.op("Expand", line, b.op("Shape", updates))
    return {0: b.op("ScatterElements", b.zeros(x), places, updates, axis=axis, reduction="add")}


@vjp_rule("GatherElements")
def gather_elements(b: Builder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Elements are added where they came from."""
    x, indices = node.inputs
    axis = integer(node, "axis", 0)
    return {0: b.op("ScatterElements", b.zeros(x), indices, g[0], axis=axis, reduction="add")}


@vjp_rule("GatherND")
def gather_nd(b: Builder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Slices are added where they came from."""
    return {0: rearranged(b, node, g[0])}


@vjp_rule("ScatterElements")
def scatter_elements(b: Builder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Updates get the cotangent of where they went; what they replaced gets none."""
    _, indices, updates = node.inputs
    axis = integer(node, "axis", 0)
    adds = _adds(node)
    gradients = {0: g[0]}
    if 0 in wanted and not adds:
        gradients[0] = b.op("ScatterElements", g[0], indices, b.zeros(updates), axis=axis)
    if 2 in wanted:
        gradients[2] = b.op("GatherElements", g[0], indices, axis=axis)
    return gradients


@vjp_rule("ScatterND")
def scatter_nd(b: Builder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Updates get the cotangent of where they went; what they replaced gets none."""
    _, indices, updates = node.inputs
    adds = _adds(node)
    gradients = {0: g[0]}
    if 0 in wanted and not adds:
        gradients[0] = b.op("ScatterND", g[0], indices, b.zeros(updates))
    if 2 in wanted:
        gradients[2] = b.op("GatherND", g[0], indices)
    return gradients


def _adds(node: Node) -> bool:
    reduction = text(node, "reduction", "none")
    if reduction not in {"none", "add"}:
        raise UnsupportedOpError(
            f"no derivative rule for {node.op} with reduction '{reduction}' at node "
            f"'{node.name}'; only 'none' and 'add' have one."
        )
    return reduction == "add"


@vjp_rule("TopK")
def top_k(b: Builder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Elements are added where they came from."""
    x = node.inputs[0]
    winners = b.repeat(node, *node.inputs, outputs=2)[1]
    axis = integer(node, "axis", -1)
    return {0: b.op("ScatterElements", b.zeros(x), winners, g[0], axis=axis, reduction="add")}
