"""Where the examples lie in the random numbers that the losses of an engine draw."""

from kfac_engine.distributed.shards import Placement
from kfac_engine.engine.build import Assembly
from kfac_engine.runtime.position_order import find_position_orders


def draw_placements(assembly: Assembly) -> dict[str, Placement]:
    """Return the axis of the examples in the random numbers of each loss.

    Args:
        assembly: The registered model. It runs twice if an output has examples and positions on
            one axis.

    Returns:
        Name of a loss to the placement.
    """
    task, model = assembly.task, assembly.model
    places = {head.output: task.batch.places[head.output] for head in task.heads}
    folded = [output for output, place in places.items() if place.repeats > 1]
    orders: dict[str, bool | None] = {}
    if folded:
        orders = find_position_orders(model.graph, model.facts, folded, task.batch, task.inputs)
    placements = {}
    for loss, head in zip(task.objective.losses, task.heads, strict=True):
        axis, rank = places[head.output].axis, len(model.facts[head.output].shape)
        # Samples of classes have no class axis. An axis behind it is counted from the end.
        if axis >= head.loss.class_axis % rank:
            axis -= rank
        placements[loss.name] = Placement(axis, orders.get(head.output, False))
    return placements
