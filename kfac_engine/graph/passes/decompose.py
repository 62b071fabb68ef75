"""Decomposes operators of a model that ONNX Runtime cannot execute or train."""

from collections.abc import Iterable
from dataclasses import replace

from kfac_engine._types import Array
from kfac_engine.graph.passes import contrib_ops, linear_models
from kfac_engine.graph.passes.decomposition import DecompositionBuilder
from kfac_engine.graph.structure import Node


def _normalization(b: DecompositionBuilder) -> None:
    """Name all three results of a normalization in training form.

    ONNX Runtime 1.31 crashes if a result has no name.
    """
    node = b.node
    if b.number("training_mode", 0):
        spare = (f"{node.outputs[0]}.{what}" for what in ("result", "mean", "variance"))
        outputs = (*node.outputs, "", "")
        named = tuple(name or other for name, other in zip(outputs, spare, strict=False))
        node = replace(node, outputs=named)
    b.nodes.append(node)


DECOMPOSITIONS = {
    **linear_models.DECOMPOSITIONS,
    **contrib_ops.DECOMPOSITIONS,
    "BatchNormalization": _normalization,
}


def decompose(nodes: Iterable[Node], constants: dict[str, Array]) -> tuple[Node, ...]:
    """Return nodes with operators that ONNX Runtime executes and whose weights are constants.

    Args:
        nodes: Nodes, in topological order.
        constants: Values by name; receives weights that were attributes, with names such as
            ``<node>.coefficients``.

    Returns:
        The nodes, in topological order.

    Raises:
        UnsupportedError: A linear model has an unsupported output function.
    """
    result: list[Node] = []
    for node in nodes:
        write = DECOMPOSITIONS.get(node.qualified_op)
        if write is None:
            result.append(node)
            continue
        builder = DecompositionBuilder(node)
        write(builder)
        result += builder.nodes
        for array in builder.constants.values():
            array.flags.writeable = False
        constants |= builder.constants
    return tuple(result)
