"""Layers in a graph: every trainable parameter belongs to one, or is listed with the reason."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from kfac_engine.graph.structure import Graph
from kfac_engine.layers.found import Found, Scene, Tensors
from kfac_engine.layers.matchers import match

# Kind of a layer used once to the kind that takes several uses.
_SEVERAL_USES = {
    "fully_connected": "fully_connected_multi",
    "conv2d": "conv2d_multi",
    "embedding": "embedding_multi",
}

# Options that the registration of several uses does not have.
_ONE_USE_ONLY = {"feature_axis": "with its features on an inner axis"}


def discover(
    graph: Graph, trainable: Sequence[str], shapes: Mapping[str, tuple[int, ...]], batch: int
) -> tuple[Found, ...]:
    """All layers of a graph, then the parameters without one.

    Args:
        graph: The canonical graph: the part of the model that the loss depends on.
        trainable: Names of the trainable parameters.
        shapes: Shape of every value in a sample run.
        batch: Length of the batch axis in that run.

    Returns:
        Layers in the order of their first use, generic parameters after them; each parameter is in
        exactly one.
    """
    scene = Scene(graph, frozenset(trainable), shapes, batch)
    layers: list[Found] = []
    reasons: dict[str, str] = {}
    first_uses = dict.fromkeys(
        name for node in graph.nodes for name in node.inputs if name in scene.trainable
    )
    for name in first_uses:
        found = _layer_of(scene, name)
        if isinstance(found, Found):
            layers.append(found)
        else:
            reasons[name] = found
    claimed = {name for layer in layers for name in layer.parameters}
    generic = [
        Found("generic", (name,), reason=reasons.get(name, "no operator of the graph reads it"))
        for name in trainable
        if name not in claimed
    ]
    return (*layers, *generic)


def _layer_of(scene: Scene, weight: str) -> Found | str:
    """The layer that a parameter is the weight of, over all its uses."""
    consumers = scene.graph.consumers[weight]
    matches = [match(scene, node, index) for node, index in consumers]
    uses = [found for found in matches if isinstance(found, Found)]
    if len(matches) == 1:
        return matches[0]
    roles = ", ".join(sorted({node.qualified_op for node, _ in consumers}))
    several = f"used {len(matches)} times, by {roles}"
    return _joined(uses, several) if len(uses) == len(matches) else several


def _joined(uses: Sequence[Found], several: str) -> Found | str:
    """One layer from several uses of its weight, or why they make none."""
    first = uses[0]
    kinds = sorted({use.kind for use in uses})
    if len(kinds) > 1 or first.kind not in _SEVERAL_USES:
        return f"{several}: no approximation covers several uses as {' and '.join(kinds)}"
    if any(use.options != first.options for use in uses):
        return f"{several}, not all alike"
    inner = [text for option, text in _ONE_USE_ONLY.items() if option in first.options]
    if inner:
        return f"{several} {inner[0]}"
    # A bias that is not the same in all uses has a use of its own: it stays outside.
    same = all(use.parameters == first.parameters for use in uses)
    return replace(
        first,
        kind=_SEVERAL_USES[first.kind],
        parameters=first.parameters if same else first.parameters[:1],
        inputs=_over([use.inputs for use in uses]),
        outputs=_over([use.outputs for use in uses]),
    )


def _over(uses: Sequence[Tensors]) -> tuple[str, ...]:
    return tuple(name for use in uses for name in ((use,) if isinstance(use, str) else use))
