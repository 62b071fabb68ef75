"""Operators that are spelled out when a model is read: before anything of it is run."""

from collections.abc import Iterable
from dataclasses import replace

from kfac_engine._types import Array
from kfac_engine.graph.passes import contrib_ops, linear_models
from kfac_engine.graph.passes.decomposition import DecompositionBuilder
from kfac_engine.graph.structure import Node


def _normalization(b: DecompositionBuilder) -> None:
    """With all three results in training form: ONNX Runtime 1.31 ends the process without."""
    node = b.node
    if b.number("training_mode", 0):
        spare = (f"{node.outputs[0]}.{what}" for what in ("result", "mean", "variance"))
        given = (*node.outputs, "", "")
        named = tuple(name or other for name, other in zip(given, spare, strict=False))
        node = replace(node, outputs=named)
    b.nodes.append(node)


SPELLINGS = {
    **linear_models.SPELLINGS,
    **contrib_ops.SPELLINGS,
    "BatchNormalization": _normalization,
}


def spell_out(nodes: Iterable[Node], constants: dict[str, Array]) -> tuple[Node, ...]:
    """``nodes`` with some in standard operators.

    Args:
        nodes: In topological order.
        constants: Grows by weights that were attributes, called ``<node>.coefficients`` and so on.

    Returns:
        The nodes, in topological order.

    Raises:
        UnsupportedError: A linear model has an output function that is not covered.
    """
    result: list[Node] = []
    for node in nodes:
        spell = SPELLINGS.get(node.qualified_op)
        if spell is None:
            result.append(node)
            continue
        spelled = DecompositionBuilder(node)
        spell(spelled)
        result += spelled.nodes
        constants |= spelled.constants
    return tuple(result)
