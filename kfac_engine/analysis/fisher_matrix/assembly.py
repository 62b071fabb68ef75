"""Assembly of the model whose curvature is measured, with all layers or the last layer."""

from dataclasses import replace
from glob import escape

from kfac_engine.analysis.fisher_matrix.options import CurvatureOptions
from kfac_engine.autodiff.differentiate import needed
from kfac_engine.curvature.blocks.base import uses
from kfac_engine.curvature.estimator import FisherEstimator
from kfac_engine.engine.build import Assembly, build
from kfac_engine.errors import ModelError
from kfac_engine.graph.load import ModelSource


def assembled(model: ModelSource, options: CurvatureOptions) -> tuple[Assembly, FisherEstimator]:
    """Return a model with its layers and an estimator of their blocks.

    Args:
        model: Path, bytes or ``ModelProto``.
        options: What is measured.

    Returns:
        The model, without statistics.

    Raises:
        InputError: The file, the loss or an option is wrong.
        ModelError: There is no layer.
        UnsupportedError: The loss is a single number for the whole batch.
    """
    assembly, estimator = build(model, options.engine)
    assembly.task.require_examples("a curvature needs")
    if options.layers == "last":
        only = replace(options.engine, trainable=last_layers(assembly), freeze=None)
        assembly, estimator = build(model, only)
    return assembly, estimator


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
