"""Finds the layers of a graph, and explains why a parameter has no layer.

One product may compute what several could: queries, keys and values, or the gates of a recurrence.
Its weight is then several matrices side by side; ``output_parts`` finds what the graph reads apart.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np

from kfac_engine._types import Array, DType
from kfac_engine.graph.analysis.subgraph import PASS_ON, of_data
from kfac_engine.graph.structure import ONLY_SHAPES, Graph, Node
from kfac_engine.layers.layer_forms import LayerForm, dense_form, tied_form
from kfac_engine.layers.match import LayerMatch, MatchContext, Tensors
from kfac_engine.layers.matchers import Matcher, match
from kfac_engine.layers.parameter_slices import ParameterSlice
from kfac_engine.layers.parameter_views import (
    ParameterView,
    find_parameter_views,
    is_move,
    rearrange_entries,
)
from kfac_engine.layers.scales import SHIFTS, match_shift

# Kinds of layers without an approximation for several uses.
_USED_ONCE = {"stacked_dense"}


def merge_uses(
    uses: Sequence[LayerMatch], several: str, shapes: Mapping[str, tuple[int, ...]]
) -> LayerMatch | str:
    """Merge the uses of a weight into one layer, or return the reason why there is no layer.

    ``several`` describes the uses; the reason begins with it.
    """
    first = uses[0]
    if len(uses) == 1:
        return first
    kinds = sorted({use.kind for use in uses})
    if kinds == _TIED:
        return _tied(uses, several, shapes)
    if len(kinds) > 1 or first.kind in _USED_ONCE or first.form is None:
        return f"{several}: no approximation covers several uses as {' and '.join(kinds)}"
    if len({use.form and use.form.with_bias(False) for use in uses}) > 1:
        return f"{several}, with different properties"
    # A bias that differs between the uses does not belong to the layer.
    same = all(use.parameters == first.parameters for use in uses)
    return replace(
        first,
        form=first.form.with_uses(len(uses)),
        parameters=first.parameters if same else first.parameters[:1],
        inputs=_over([use.inputs for use in uses]),
        outputs=_over([use.outputs for use in uses]),
        computed=tuple(value for use in uses for value in use.computed),
    )


def _tied(
    uses: Sequence[LayerMatch], several: str, shapes: Mapping[str, tuple[int, ...]]
) -> LayerMatch | str:
    """Return the layer of a table that embeddings and products read."""
    ordered = sorted(uses, key=lambda use: _TIED.index(use.kind))
    products = [use for use in ordered if use.kind != "embedding"]
    table = dense_form("OI", False)  # features are on the last axis
    if any(use.form and use.form.with_bias(False) != table for use in products):
        return f"{several}: no approximation covers a product whose outputs are not those rows"
    (vocabulary, _), lookups = shapes[products[0].parameters[0]], ordered[: -len(products)]
    return LayerMatch(
        "tied_embedding",
        products[0].parameters[:1],
        _over([use.inputs for use in ordered]),
        _over([use.outputs for use in ordered]),
        tied_form(vocabulary, len(lookups)),
        computed=tuple(value for use in ordered for value in use.computed),
    )


def _over(uses: Sequence[Tensors]) -> tuple[str, ...]:
    return tuple(name for use in uses for name in ((use,) if isinstance(use, str) else use) if name)


# The kinds of the uses of a table that is the embedding and the last layer of a model.
_TIED = ["embedding", "fully_connected"]


@dataclass(frozen=True, slots=True)
class Discovery:
    """The layers of a graph, and the slices of parameters that they use."""

    # Layers in the order of their first use, then generic parameters. Their parameters are names of
    # slices.
    layers: tuple[LayerMatch, ...]
    # Slices by parameter name; each slice belongs to exactly one layer.
    parts: Mapping[str, tuple[ParameterSlice, ...]]


def discover(
    graph: Graph,
    trainable: Sequence[str],
    shapes: Mapping[str, tuple[int, ...]],
    batch: int,
    dtypes: Mapping[str, DType] | None = None,
    axes: Mapping[str, int] | None = None,
) -> Discovery:
    """Find the layers of a graph, and the parameters without a layer.

    The graph is the part of the model that the loss depends on. A parameter is generic as a whole
    if its slices overlap, or if one slice cannot be separated from the others.

    ``shapes`` and ``dtypes`` are of the values of a sample run with ``batch`` examples; by default
    types are those of the constants. ``axes`` map a value to the axis of its examples, as in
    ``MatchContext``. By default it is the first axis of each value that depends on the data, if it
    is not longer than ``batch``.
    """
    views = find_parameter_views(graph, trainable, shapes)
    types = dtypes or {name: array.dtype for name, array in graph.constants.items()}
    if axes is None:
        first = {name: shapes[name][:1] for name in of_data(graph) if name in shapes}
        axes = {name: 0 for name, sizes in first.items() if sizes and sizes[0] <= batch}
    whole: dict[str, str] = {}  # parameters that cannot be divided into slices, with the reason
    while True:
        groups = _groups(graph, frozenset(trainable) - whole.keys(), views)
        unfit = _overlapping(groups, views)
        if not unfit:
            values = frozenset(value for group in groups for value in group.values)
            shared = frozenset(v for group in groups if len(group.values) > 1 for v in group.values)
            context = MatchContext(graph, values, shapes, batch, views, types, axes, shared)
            layers, reasons = _layers(context, groups)
            unfit = _partly_used(groups, layers, reasons)
            if not unfit:
                layers = [
                    replace(layer, output_parts=output_parts(graph, layer, shapes))
                    for layer in layers
                ]
                return _complete(layers, groups, reasons | whole, trainable, views)
        whole |= unfit


@dataclass(frozen=True, slots=True)
class _Group:
    """Values that contain the same entries of a parameter, in one or several layouts."""

    parameter: str
    values: list[str]

    def intersects(self, names: Set[str]) -> bool:
        """Return whether a set of names contains a value of the group."""
        return self.parameter in names or not names.isdisjoint(self.values)


def _groups(
    graph: Graph, parameters: Set[str], views: Mapping[str, ParameterView]
) -> tuple[_Group, ...]:
    """Return the values that computations read, in groups of equal entries."""
    read: dict[str, str] = {}
    for node in graph.nodes:
        for index, name in enumerate(node.inputs):
            source = views[name].parameter if name in views else name
            counts = source in parameters and node.op not in ONLY_SHAPES
            if counts and not is_move(node, index, views):
                read.setdefault(name, source)
    times = Counter(read.values())
    groups: dict[tuple[str, bytes], _Group] = {}
    for value, parameter in read.items():
        several = times[parameter] > 1
        entries = np.sort(views[value].index, axis=None).tobytes() if several else b""
        groups.setdefault((parameter, entries), _Group(parameter, [])).values.append(value)
    return tuple(groups.values())


def _overlapping(groups: Sequence[_Group], views: Mapping[str, ParameterView]) -> dict[str, str]:
    """Return the parameters whose slices overlap, by name, with the reason."""
    times: dict[str, Array] = {}
    groups_of = Counter(group.parameter for group in groups)
    for group in groups:
        entries = views.get(group.values[0])
        if entries is not None and groups_of[group.parameter] > 1:
            counts = times.setdefault(group.parameter, np.zeros(entries.size, np.int32))
            counts[entries.index] += 1
    return {
        parameter: "read in parts that overlap"
        for parameter, counts in times.items()
        if counts.max(initial=0) > 1
    }


def _layers(
    context: MatchContext, groups: Sequence[_Group]
) -> tuple[list[LayerMatch], dict[str, str]]:
    """Return the layers of all groups, and the reason for each value without a layer."""
    outcomes = [_layer_of(context, group, match) for group in groups]
    claimed: set[str] = set()
    for i, layer in enumerate(outcomes):
        if isinstance(layer, LayerMatch):
            named = _with_named_bias(context, layer)
            if not claimed.isdisjoint(named.parameters[1:]):
                named = replace(named, parameters=named.parameters[:1])
            claimed.update(named.parameters)
            outcomes[i] = named
    for i, group in enumerate(groups):
        operands = {(node.qualified_op, index) for _, node, index in _uses(context, group)}
        if (
            isinstance(outcomes[i], str)
            and not group.intersects(claimed)
            and operands <= SHIFTS.keys()
        ):
            outcomes[i] = _layer_of(context, group, match_shift)
    return [outcome for outcome in outcomes if isinstance(outcome, LayerMatch)], {
        group.values[0]: reason
        for group, reason in zip(groups, outcomes, strict=True)
        if isinstance(reason, str)
    }


def _uses(context: MatchContext, group: _Group) -> list[tuple[str, Node, int]]:
    """Return each use of a group: the value, the node that reads it and the operand number."""
    return [
        (value, node, index)
        for value in group.values
        for node, index in context.graph.consumers[value]
        if not is_move(node, index, context.views) and node.op not in ONLY_SHAPES
    ]


def _layer_of(context: MatchContext, group: _Group, match: Matcher) -> LayerMatch | str:
    """Return the layer whose weight is a group, with all uses; or why there is no layer."""
    uses = _uses(context, group)
    matches = [match(context, node, index) for _, node, index in uses]
    if len({isinstance(outcome, LayerMatch) for outcome in matches}) > 1:
        # The first step of a recurrence may act on a state that is the same for all examples.
        matches = [match(context.loose, node, index) for _, node, index in uses]
    roles = ", ".join(sorted({node.qualified_op for _, node, _ in uses}))
    several = f"used {len(uses)} times, by {roles}"
    layers = [outcome for outcome in matches if isinstance(outcome, LayerMatch)]
    if len(layers) < len(uses):
        return next(m for m in matches if isinstance(m, str)) if len(uses) == 1 else several
    # The parameter itself if the layer reads its layout, else the value that the layer reads. Uses
    # are counted by name, so nodes between the parameter and the layer must not change it.
    plain = all(context.graph.source(value, PASS_ON) == group.parameter for value in group.values)
    for name in (group.parameter, *group.values) if plain else group.values:
        renamed = [_with_weight(context, layer, name) for layer in layers]
        if all(renamed):
            return merge_uses([layer for layer in renamed if layer], several, context.shapes)
    return f"{several}, in several layouts"


def _with_weight(context: MatchContext, layer: LayerMatch, name: str) -> LayerMatch | None:
    """Return a layer with its weight renamed to ``name``; None if the layouts differ."""
    old, *bias = layer.parameters
    if old == name:
        return layer
    if old not in context.views or name not in context.views:
        return None
    weight, renamed = context.views[old], context.views[name]
    if weight.same_as(renamed):
        return replace(layer, parameters=(name, *bias))
    form = layer.form
    if layer.kind != "fully_connected" or not isinstance(form, LayerForm):
        return None
    if not weight.transpose_of(renamed):
        return None
    packing = replace(form.packing, weight_format=form.packing.weight_format[::-1])
    return replace(layer, parameters=(name, *bias), form=replace(form, packing=packing))


def _with_named_bias(context: MatchContext, layer: LayerMatch) -> LayerMatch:
    """Return a layer with its bias renamed to the parameter, if all entries are in order."""
    weight, *biases = layer.parameters
    for i, name in enumerate(biases):
        view = context.views.get(name)
        if view and view.in_order and context.graph.source(name, PASS_ON) == view.parameter:
            biases[i] = view.parameter
    return replace(layer, parameters=(weight, *biases))


def _partly_used(
    groups: Iterable[_Group], layers: Iterable[LayerMatch], reasons: Mapping[str, str]
) -> dict[str, str]:
    """Return parameters that layers use in part and whose other entries are in several values.

    Each is mapped to the reason why these entries have no layer.
    """
    claimed = {name for layer in layers for name in layer.parameters}
    partly = {group.parameter for group in groups if group.intersects(claimed)}
    return {
        group.parameter: reasons[group.values[0]]
        for group in groups
        if group.parameter in partly and len(group.values) > 1 and not group.intersects(claimed)
    }


def _complete(
    layers: Sequence[LayerMatch],
    groups: Sequence[_Group],
    reasons: Mapping[str, str],
    trainable: Sequence[str],
    views: Mapping[str, ParameterView],
) -> Discovery:
    """Add the generic parameters and the slices to the layers."""
    claimed = dict.fromkeys(name for layer in layers for name in layer.parameters)
    order = {name: number for number, name in enumerate(claimed)}
    groups_of: dict[str, list[_Group]] = {}
    for group in groups:
        groups_of.setdefault(group.parameter, []).append(group)
    generic: list[LayerMatch] = []
    parts: dict[str, tuple[ParameterSlice, ...]] = {}
    for parameter in trainable:
        groups_here = groups_of.get(parameter, [])
        values = {parameter, *(value for group in groups_here for value in group.values)}
        names = sorted(values & order.keys(), key=order.__getitem__)
        free = [group.values[0] for group in groups_here if not group.intersects(claimed.keys())]
        if not names:
            why = dict.fromkeys(reasons[value] for value in (parameter, *free) if value in reasons)
            reason = "; ".join(why) or "no operator of the graph reads it"
            generic.append(LayerMatch("generic", (parameter,), reason=reason))
            names, free = [parameter], []
        generic += [LayerMatch("generic", (value,), reason=reasons[value]) for value in free]
        parts[parameter] = tuple(
            ParameterSlice(name, None if name == parameter else views[name].index)
            for name in (*names, *free)
        )
    return Discovery((*map(_with_form, layers), *generic), parts)


def _with_form(layer: LayerMatch) -> LayerMatch:
    """Return a layer whose form has a bias if its parameters have one."""
    form = layer.form and layer.form.with_bias(len(layer.parameters) > 1)
    return replace(layer, form=form)


# -- parts of outputs that a graph reads apart -----------------------------------------------------


# The weights of these layers are vectors, a matrix for each group, or read in two ways.
_WITHOUT_PARTS = {"grouped_convolution", "scale_and_shift", "shift", "tied_embedding"}
# A feature of the result depends on the same feature of an operand. A division after the operator
# is one before it.
_BY_FEATURE = {"Add", "Clip", "Relu", "Sigmoid", "Sub", "Tanh"}


def output_parts(
    graph: Graph, layer: LayerMatch, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[Array, ...]:
    """Return the parts into which all uses of a layer divide its outputs.

    A part is the indices of its outputs; every output is in one part. There are no parts if an
    operator reads all outputs, or reads outputs of several parts.
    """
    if layer.kind in _WITHOUT_PARTS or not isinstance(layer.form, LayerForm):
        return ()
    names = (layer.outputs,) if isinstance(layer.outputs, str) else layer.outputs
    axis = layer.form.output_view.feature_axis
    width, read = shapes[names[0]][axis], []
    for name in names:
        shape = shapes[name]
        numbers = np.arange(width).reshape(-1, *[1] * (len(shape) - 1 - axis % len(shape)))
        for part in _read_parts(graph, name, np.broadcast_to(numbers, shape), shapes):
            if part.size == width:
                return ()
            read.append(part)
    parts: list[Array] = []
    owner = np.full(width, -1)  # an output to the number of its part
    for part in sorted(read, key=len, reverse=True):
        owners = np.unique(owner[part]).tolist()
        if len(owners) > 1:
            return ()
        if owners == [-1]:
            owner[part] = len(parts)
            parts.append(part)
    return () if -1 in owner else tuple(parts)


def _read_parts(
    graph: Graph, name: str, features: Array, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[Array]:
    """Yield the features that are read together, once for each operator that computes with them.

    ``features`` has the number of the feature of each entry of the value.
    """
    queue, reached = [(name, features)], {name: [features]}
    for value, entries in queue:
        users = [(n, i) for n, i in graph.consumers.get(value, ()) if n.op not in ONLY_SHAPES]
        following = [_following(graph, node, index, entries, shapes) for node, index in users]
        if value in graph.results or not users or not all(following):
            varying = tuple(slice(None if stride else 1) for stride in entries.strides)
            yield np.unique(entries[varying])
        for result, array in (item for results in following for item in results.items()):
            known = reached.setdefault(result, [])
            if not any(np.array_equal(array, other) for other in known):
                known.append(array)
                queue.append((result, array))


def _following(
    graph: Graph, node: Node, index: int, entries: Array, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Array]:
    """Return the features of the results of a node; empty if it computes with several features."""
    if node.op in _BY_FEATURE and not node.domain and index >= 0:
        return {node.outputs[0]: np.broadcast_to(entries, shapes[node.outputs[0]])}
    return rearrange_entries(entries, node, graph, shapes) if index == 0 else {}
