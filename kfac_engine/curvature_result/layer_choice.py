"""Which layers are measured, and whether their blocks have a requested structure."""

from glob import escape

from kfac_engine.autodiff.differentiate import needed
from kfac_engine.curvature.blocks.base import uses
from kfac_engine.curvature.factors.diagonal import DiagonalFactor
from kfac_engine.engine.build import Assembly
from kfac_engine.errors import ModelError, UnsupportedError


def last_layers(assembly: Assembly) -> list[str]:
    """Return patterns of the parameters of the last layer before each loss.

    The last layer is that whose output the graph computes last among the values on which the loss
    depends.

    Args:
        assembly: The model with all its layers.

    Returns:
        Patterns for ``trainable``, each of one name.

    Raises:
        ModelError: A loss depends on no layer.
    """
    nodes = assembly.model.graph.nodes
    names: dict[str, None] = {}
    layers = [layer for layer in assembly.discovery.layers if layer.outputs]
    owners = {part.name: name for name, parts in assembly.discovery.parts.items() for part in parts}
    for value in assembly.task.objective.inputs:
        order = {o: i for i, node in enumerate(needed(nodes, (value,))) for o in node.outputs}
        last = max(
            layers,
            key=lambda layer: max(order.get(name, -1) for name in uses(layer.outputs)),
            default=None,
        )
        if last is None or not any(name in order for name in uses(last.outputs)):
            raise ModelError(f"the loss on '{value}' depends on no layer; use layers='all'.")
        names |= dict.fromkeys(escape(owners[name]) for name in last.parameters)
    return list(names)


def check_diagonals(assembly: Assembly, structure: str) -> None:
    """Refuse a layer whose block is not diagonal, where the structure is diagonal.

    Args:
        assembly: The model with its layers.
        structure: The structure of the measurement.

    Raises:
        UnsupportedError: A layer has no diagonal block; the message names its parameters.
    """
    if structure != "diagonal":
        return
    for block in assembly.collection.fisher_blocks.values():
        if not all(isinstance(factor, DiagonalFactor) for factor in block.factors):
            raise UnsupportedError(
                f"the layer of {block.params} has no diagonal block; use structure='kron', or "
                f"exclude it by freeze."
            )
