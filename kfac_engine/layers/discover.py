"""Layers in a graph: every trainable parameter belongs to one, or is listed with the reason."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np

from kfac_engine._types import Array, DType
from kfac_engine.graph.analysis.rearrangements import ONLY_SHAPES
from kfac_engine.graph.analysis.subgraph import handed_on, of_data
from kfac_engine.graph.structure import Graph, Node
from kfac_engine.layers.match import LayerMatch, MatchContext
from kfac_engine.layers.matchers import Matcher, match
from kfac_engine.layers.merged_uses import joined
from kfac_engine.layers.parameter_slices import Held, ParameterSlice, held_values, is_move
from kfac_engine.layers.shifts import SHIFTS, match_shift

# The layout of a dense weight, and that of its transpose.
_TURNED = {"IO": "OI", "OI": "IO"}


@dataclass(frozen=True, slots=True)
class Discovery:
    """What is made of the parameters of a graph.

    Attributes:
        layers: Layers in the order of their first use, generic parameters after them. They name
            parts of parameters.
        parts: Parameter to its parts; each part is in exactly one layer.
    """

    layers: tuple[LayerMatch, ...]
    parts: Mapping[str, tuple[ParameterSlice, ...]]


def discover(
    graph: Graph,
    trainable: Sequence[str],
    shapes: Mapping[str, tuple[int, ...]],
    batch: int,
    dtypes: Mapping[str, DType] | None = None,
    axes: Mapping[str, int] | None = None,
) -> Discovery:
    """All layers of a graph, then the parameters without one.

    A parameter whose parts overlap, or of which a part cannot be told from the others, is generic
    as a whole.

    Args:
        graph: The canonical graph: the part of the model that the loss depends on.
        trainable: Names of the trainable parameters.
        shapes: Shape of every value in a sample run.
        batch: Length of the batch axis in that run.
        dtypes: Element types of values; those of the constants where left out.
        axes: The axis that holds the examples, of values that have them alone on one; where left
            out, the first axis of what depends on the data and is no longer there than the batch.

    Returns:
        The layers, and what they take of each parameter.
    """
    held = held_values(graph, trainable, shapes)
    types = dtypes or {name: array.dtype for name, array in graph.constants.items()}
    if axes is None:
        firsts = {name: shapes[name][:1] for name in of_data(graph) if name in shapes}
        axes = {name: 0 for name, side in firsts.items() if side and side[0] <= batch}
    whole: dict[str, str] = {}  # parameters that cannot be taken apart, with the reason
    while True:
        groups = _groups(graph, frozenset(trainable) - whole.keys(), held)
        unfit = _overlapping(groups, held)
        if not unfit:
            values = frozenset(value for group in groups for value in group.values)
            shared = frozenset(v for group in groups if len(group.values) > 1 for v in group.values)
            scene = MatchContext(graph, values, shapes, batch, held, types, axes, shared)
            layers, reasons = _layers(scene, groups)
            unfit = _mixed(groups, layers, reasons)
            if not unfit:
                return _complete(layers, groups, reasons | whole, trainable, held)
        whole |= unfit


@dataclass(frozen=True, slots=True)
class _Group:
    """Values that hold the same entries of a parameter, in one layout or several."""

    parameter: str
    values: list[str]

    def is_in(self, names: Set[str]) -> bool:
        """Whether its entries are among parameters of layers."""
        return self.parameter in names or not names.isdisjoint(self.values)


def _groups(graph: Graph, parameters: Set[str], held: Mapping[str, Held]) -> tuple[_Group, ...]:
    """What is computed with, in the order of use."""
    read: dict[str, str] = {}
    for node in graph.nodes:
        for index, name in enumerate(node.inputs):
            source = held[name].parameter if name in held else name
            counts = source in parameters and node.op not in ONLY_SHAPES
            if counts and not is_move(node, index, held):
                read.setdefault(name, source)
    times = Counter(read.values())
    groups: dict[tuple[str, bytes], _Group] = {}
    for value, parameter in read.items():
        several = times[parameter] > 1
        entries = np.sort(held[value].index, axis=None).tobytes() if several else b""
        groups.setdefault((parameter, entries), _Group(parameter, [])).values.append(value)
    return tuple(groups.values())


def _overlapping(groups: Sequence[_Group], held: Mapping[str, Held]) -> dict[str, str]:
    """Parameters that are read in different parts that meet, with the reason."""
    times: dict[str, Array] = {}
    groups_of = Counter(group.parameter for group in groups)
    for group in groups:
        entries = held.get(group.values[0])
        if entries is not None and groups_of[group.parameter] > 1:
            counts = times.setdefault(group.parameter, np.zeros(entries.size, np.int32))
            counts[entries.index] += 1
    return {
        parameter: "read in parts that overlap"
        for parameter, counts in times.items()
        if counts.max(initial=0) > 1
    }


def _layers(
    scene: MatchContext, groups: Sequence[_Group]
) -> tuple[list[LayerMatch], dict[str, str]]:
    """Layers by their weights, and by value why the others make none."""
    outcomes = [_layer_of(scene, group, match) for group in groups]
    claimed: set[str] = set()
    for i, found in enumerate(outcomes):
        if isinstance(found, LayerMatch):
            named = _with_named_bias(scene, found)
            if not claimed.isdisjoint(named.parameters[1:]):
                named = replace(named, parameters=named.parameters[:1])
            claimed.update(named.parameters)
            outcomes[i] = named
    for i, group in enumerate(groups):
        operands = {(node.qualified_op, index) for _, node, index in _uses(scene, group)}
        if isinstance(outcomes[i], str) and not group.is_in(claimed) and operands <= SHIFTS.keys():
            outcomes[i] = _layer_of(scene, group, match_shift)
    return [found for found in outcomes if isinstance(found, LayerMatch)], {
        group.values[0]: found
        for group, found in zip(groups, outcomes, strict=True)
        if isinstance(found, str)
    }


def _uses(scene: MatchContext, group: _Group) -> list[tuple[str, Node, int]]:
    """Values of a group with the nodes that compute with them."""
    return [
        (value, node, index)
        for value in group.values
        for node, index in scene.graph.consumers[value]
        if not is_move(node, index, scene.held) and node.op not in ONLY_SHAPES
    ]


def _layer_of(scene: MatchContext, group: _Group, match: Matcher) -> LayerMatch | str:
    """The layer whose weight is a part of a parameter, over all its uses."""
    uses = _uses(scene, group)
    matches = [match(scene, node, index) for _, node, index in uses]
    if len({isinstance(found, LayerMatch) for found in matches}) > 1:
        # The first step of a recurrence may act on a state that is the same for all examples.
        matches = [match(scene.loose, node, index) for _, node, index in uses]
    roles = ", ".join(sorted({node.qualified_op for _, node, _ in uses}))
    several = f"used {len(uses)} times, by {roles}"
    layers = [found for found in matches if isinstance(found, LayerMatch)]
    if len(layers) < len(uses):
        return next(m for m in matches if isinstance(m, str)) if len(uses) == 1 else several
    # The parameter itself where its layout can be told of it, else a value as it is computed with.
    # Uses are counted by name: nodes in between must pass the parameter on unchanged.
    plain = all(handed_on(scene.graph, value) == group.parameter for value in group.values)
    for name in (group.parameter, *group.values) if plain else group.values:
        named = [_with_weight(scene, found, name) for found in layers]
        if all(named):
            return joined([found for found in named if found], several)
    return f"{several}, in several layouts"


def _with_weight(scene: MatchContext, found: LayerMatch, name: str) -> LayerMatch | None:
    """The layer with its weight called ``name``; None where that has another layout."""
    own, *others = found.parameters
    if own == name:
        return found
    if own not in scene.held or name not in scene.held:
        return None
    weight, wanted = scene.held[own], scene.held[name]
    if weight.same_as(wanted):
        return replace(found, parameters=(name, *others))
    layout = str(found.options.get("weight_format"))
    if layout in _TURNED and weight.transpose_of(wanted):
        options = {**found.options, "weight_format": _TURNED[layout]}
        return replace(found, parameters=(name, *others), options=options)
    return None


def _with_named_bias(scene: MatchContext, found: LayerMatch) -> LayerMatch:
    """The layer with its bias called by the parameter it is, if it is all of one in order."""
    weight, *others = found.parameters
    for i, name in enumerate(others):
        held = scene.held.get(name)
        if held and held.in_order and handed_on(scene.graph, name) == held.parameter:
            others[i] = held.parameter
    return replace(found, parameters=(weight, *others))


def _mixed(
    groups: Iterable[_Group], layers: Iterable[LayerMatch], reasons: Mapping[str, str]
) -> dict[str, str]:
    """Parameters partly in layers, while no single value holds another part; with the reason."""
    claimed = {name for layer in layers for name in layer.parameters}
    partly = {group.parameter for group in groups if group.is_in(claimed)}
    return {
        group.parameter: reasons[group.values[0]]
        for group in groups
        if group.parameter in partly and len(group.values) > 1 and not group.is_in(claimed)
    }


def _complete(
    layers: Sequence[LayerMatch],
    groups: Sequence[_Group],
    reasons: Mapping[str, str],
    trainable: Sequence[str],
    held: Mapping[str, Held],
) -> Discovery:
    """Layers and generic parameters, and the parts that they name."""
    claimed = dict.fromkeys(name for layer in layers for name in layer.parameters)
    places = {name: place for place, name in enumerate(claimed)}
    groups_of: dict[str, list[_Group]] = {}
    for group in groups:
        groups_of.setdefault(group.parameter, []).append(group)
    generic: list[LayerMatch] = []
    parts: dict[str, tuple[ParameterSlice, ...]] = {}
    for parameter in trainable:
        own = groups_of.get(parameter, [])
        values = {parameter, *(value for group in own for value in group.values)}
        names = sorted(values & places.keys(), key=places.__getitem__)
        free = [group.values[0] for group in own if not group.is_in(claimed.keys())]
        if not names:
            why = dict.fromkeys(reasons[value] for value in (parameter, *free) if value in reasons)
            reason = "; ".join(why) or "no operator of the graph reads it"
            generic.append(LayerMatch("generic", (parameter,), reason=reason))
            names, free = [parameter], []
        generic += [LayerMatch("generic", (value,), reason=reasons[value]) for value in free]
        parts[parameter] = tuple(
            ParameterSlice(name, None if name == parameter else held[name].index)
            for name in (*names, *free)
        )
    return Discovery((*layers, *generic), parts)
