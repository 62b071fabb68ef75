"""Puts the parts of an engine together: layers found and registered, refreshes priced."""

from collections.abc import Container, Sequence
from dataclasses import replace
from math import prod

import numpy as np

from kfac_engine._types import Params
from kfac_engine.autodiff.differentiate import needed
from kfac_engine.autodiff.model import OnnxModel
from kfac_engine.blocks.base import uses
from kfac_engine.collection import LayerCollection
from kfac_engine.errors import InputError, ModelError
from kfac_engine.factors.base import FisherFactor
from kfac_engine.inspection import refresh_cost
from kfac_engine.layers.discover import Discovery, discover
from kfac_engine.layers.found import Found
from kfac_engine.layers.parts import Part
from kfac_engine.objective import Objective
from kfac_engine.scheduler import Work

# A full block of scales and shifts costs the cube of its side at each refresh: 2048 channels of a
# normalization would cost as much as the largest layer of a ResNet-50. Above this side (256
# channels with scale and shift) the diagonal is taken, unless the approximation was chosen.
LARGEST_FULL_SIDE = 512


def register_layers(
    model: OnnxModel, objective: Objective, collection: LayerCollection, chosen: Container[str]
) -> Discovery:
    """Find layers and register them by the functions a user would call.

    Args:
        model: The model.
        objective: What its parameters are to change.
        collection: Where the layers go.
        chosen: Kinds of layers whose approximation the user chose.

    Returns:
        Layers, then parameters without one; and the parts of parameters that they name.

    Raises:
        ModelError: The loss depends on no trainable parameter.
    """
    reached = model.backward(objective.inputs, tuple(model.parameters)).gradients
    if not reached:
        raise ModelError(
            f"the loss on {', '.join(objective.inputs)} depends on no trainable parameter of model "
            f"'{model.graph.name}' through differentiable operators."
        )
    shapes = {name: fact.shape for name, fact in model.facts.items()}
    unreached = [
        Found("generic", (name,), reason="the loss does not depend on it")
        for name in model.parameters
        if name not in reached
    ]
    # A use that the loss does not depend on is none.
    graph = replace(model.graph, nodes=needed(model.graph.nodes, objective.inputs))
    batch = shapes[objective.inputs[0]][0]
    dtypes = {name: fact.dtype for name, fact in model.facts.items()}
    found = discover(graph, tuple(reached), shapes, batch, dtypes)
    apart = {layer.parameters[0]: (Part(layer.parameters[0]),) for layer in unreached}
    found = Discovery((*found.layers, *unreached), {**found.parts, **apart})
    for layer in found.layers:
        key: Params = layer.parameters if len(layer.parameters) > 1 else layer.parameters[0]
        if layer.kind == "generic":
            collection.register_generic(key, objective.inputs[0])
        else:
            if layer.computed:
                model.define(layer.computed.node, layer.computed.constants, layer.computed.like)
            # The method is named after the kind; each takes options of its own.
            getattr(collection, f"register_{layer.kind}")(
                key,
                inputs=layer.inputs,
                outputs=layer.outputs,
                approx=_frugal(layer, collection) if layer.kind not in chosen else None,
                **layer.options,
            )
    return found


def _frugal(layer: Found, collection: LayerCollection) -> str | None:
    """The diagonal for scales and shifts of many channels; None leaves the default."""
    side = sum(prod(collection.require_shape(name)) for name in layer.parameters)
    large = layer.kind == "scale_and_shift" and side > LARGEST_FULL_SIDE
    return "diagonal" if large else None


def refreshes(collection: LayerCollection) -> dict[str, tuple[FisherFactor, Work]]:
    """Every factor that stores powers, with what its refresh costs: cubic in its side."""
    costs: dict[int, float] = {}
    for key, block in collection.fisher_blocks.items():
        shapes = block.factor_shapes([collection.require_shape(name) for name in uses(key)])
        for factor, shape in zip(block.factors, shapes, strict=True):
            costs[id(factor)] = refresh_cost(shape)
    return {
        str(index): (factor, Work(str(index), costs[id(factor)]))
        for index, factor in enumerate(collection.get_factors())
        if factor.has_inverses
    }


def check_options(
    damping: float, ema_decay: float, exps: Sequence[float], threads: int | None
) -> None:
    """Refuse options outside their range.

    Args:
        damping: Must be positive.
        ema_decay: Must lie in [0, 1).
        exps: One or more numbers.
        threads: At least one, if given.

    Raises:
        InputError: One is not.
    """
    if not (np.isfinite(damping) and damping > 0):
        raise InputError(f"damping must be a positive number, got {damping}.")
    if not 0 <= ema_decay < 1:
        raise InputError(f"ema_decay must lie in [0, 1), got {ema_decay}.")
    if not exps or not all(np.isfinite(exp) for exp in exps):
        raise InputError(f"exps must be one or more numbers, got {exps}.")
    if threads is not None and threads < 1:
        raise InputError(f"threads must be at least 1, got {threads}.")
