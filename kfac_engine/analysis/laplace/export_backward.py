"""Records backward passes whose cotangents are the unit vectors, of a batch or of each example.

The values are recorded arrays (``recording``). The gradients of a layer's output for the ``k``
outputs of an example are one array ``(kn, …)``: one after the other along the first axis.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from kfac_engine.analysis.fisher_matrix.example_gradients import (
    FactoredGradients,
    Gradients,
    WholeGradients,
)
from kfac_engine.analysis.fisher_matrix.layout import Layout
from kfac_engine.autodiff.differentiate import Backward, needed
from kfac_engine.backend.channel_groups import split_features
from kfac_engine.errors import InputError, UnsupportedError
from kfac_engine.graph.analysis.subgraph import dependents
from kfac_engine.graph.passes.bodies import renamed
from kfac_engine.graph.structure import Input, Node
from kfac_engine.layers.grouped import GroupedPacking
from kfac_engine.layers.layer_forms import BroadcastShape, LayerForm, ScaleShiftForm, per_example
from kfac_engine.layers.views import PatchView, RowView, TokenIdView, View
from kfac_engine.recording.operations import Operations, new_tape
from kfac_engine.recording.recorded import Level, Recorded, Symbol, Tape, size_of
from kfac_engine.runtime.model import OnnxModel


@dataclass(frozen=True, slots=True)
class Recording:
    """How the gradients of a layer are recorded.

    Attributes:
        fixed_axes: Return the axes of a tensor whose sizes are those of the parameters of the
            layer, from whether it is an output and from its shape in the sample run.
        gradients: Return the gradients of each example, from the input of each use (none for a
            shift), the gradients of the output of each use, and the number of outputs of an
            example.
        needs_first_axis: Whether the examples must be alone on the first axis of each tensor.
    """

    fixed_axes: Callable[[bool, tuple[int, ...]], set[int]]
    gradients: Callable[[Sequence[Symbol], Sequence[Symbol], int], Gradients]
    needs_first_axis: bool


@dataclass(frozen=True, slots=True)
class Recordings:
    """Chooses how the gradients of a layer are recorded, by the form of its block.

    Attributes:
        inputs: Number of inputs of the layer.
        outputs: Number of its outputs.
    """

    inputs: int
    outputs: int

    def rows(self, form: LayerForm) -> Recording | None:
        """Return a recording of rows; None if a view is unknown or an output has no own input."""
        views, packing = (form.input_view, form.output_view), form.packing
        known = all(type(view) in _VIEWS for view in views) and form.output_view.has_rows
        known = known and (packing.one_matrix or type(packing) in _PACKINGS)
        if not known or any(_VIEWS[type(view)].crops(view) for view in views):
            return None
        folded = form.num_uses > 1 and self.outputs == 1
        if folded or self.inputs != self.outputs:
            return None

        def fixed_axes(output: bool, shape: tuple[int, ...]) -> set[int]:
            view = views[output]
            return _VIEWS[type(view)].feature_axes(view, len(shape))

        return Recording(fixed_axes, partial(_recorded_rows, form), needs_first_axis=True)

    def sums(self, form: ScaleShiftForm) -> Recording | None:
        """Record the gradients of a scale and a shift: sums over the axes that broadcast them."""
        parts = [part for part in (form.scale, form.shift) if part]

        def fixed_axes(_: bool, shape: tuple[int, ...]) -> set[int]:
            rank = len(shape)
            entries = {i for part in parts for i in range(rank) if i not in part.summed(shape)}
            return entries - {part.batch_axis % rank for part in parts}

        return Recording(fixed_axes, partial(_recorded_sums, form), needs_first_axis=False)

    def one_by_one(self) -> Recording | None:
        """Return None: inputs and output gradients do not suffice."""
        return None


def _recorded_rows(
    form: LayerForm, inputs: Sequence[Symbol], outputs: Sequence[Symbol], sources: int
) -> Gradients:
    """Record ``Σ_t a_t ds_tᵀ`` over uses and positions."""
    views = form.input_view, form.output_view
    backend = Operations(outputs[0].tape)
    a, ds = (
        np.concatenate([_VIEWS[type(view)].rows(view, x, backend) for x in tensors], axis=1)
        for view, tensors in zip(views, (inputs, outputs), strict=True)
    )
    split = _PACKINGS.get(type(form.packing))
    if split is not None:
        taps = [_VIEWS[type(view)].taps(view) for view in views]
        a, ds = (split(form.packing, *pair) for pair in zip((a, ds), taps, strict=True))
    if form.packing.has_bias:
        a = backend.homogeneous(a)
    ds = _by_source(ds, sources).swapaxes(0, 1)
    if split is not None:
        return WholeGradients(a.swapaxes(2, 3)[:, None] @ ds)
    return FactoredGradients(a, ds)


def _recorded_sums(
    form: ScaleShiftForm, inputs: Sequence[Symbol], outputs: Sequence[Symbol], sources: int
) -> Gradients:
    """Record ``[Σ x∘ds, Σ ds]`` over uses and positions."""
    total: Symbol = 0
    for number, stacked in enumerate(outputs):
        ds, columns = _by_source(stacked, sources), []
        if form.scale and inputs:
            columns.append(_per_example(inputs[number] * ds, form.scale))
        if form.shift:
            columns.append(_per_example(ds, form.shift))
        total = total + np.concatenate(columns, axis=2)
    return WholeGradients(total[:, :, None, :, None])


def _by_source(x: Symbol, sources: int) -> Symbol:
    """Split the first axis into the ``k`` outputs of an example and the examples, ``(k, n, …)``."""
    return x.reshape(sources, x.shape[0] // sources, *x.shape[1:])


class _AfterSources(BroadcastShape):
    """The broadcast of a parameter to data that has an axis of sources before its other axes."""

    __slots__ = ()

    def summed(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(axis for axis in BroadcastShape.summed(self, shape) if axis)


def _per_example(gradients: Symbol, of: BroadcastShape) -> Symbol:
    """Return the gradients of a parameter that is broadcast, ``(n, k, entries)``."""
    rank = gradients.ndim - 1
    feature_axis, batch_axis = of.feature_axis % rank - rank, 1 + of.batch_axis % rank
    rows: Symbol = per_example(gradients, _AfterSources(of.shape, feature_axis, batch_axis))
    return rows.reshape(rows.shape[0], gradients.shape[0], -1)


# -- views and packings ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _RecordedView:
    """How a view is recorded.

    Attributes:
        feature_axes: Return the axes of the features of a tensor, from its number of axes.
        rows: Record the rows of a tensor, ``(n, t, d)``.
        taps: Return the number of features of a channel.
        crops: Return whether the window removes pixels, which is not recorded.
    """

    feature_axes: Callable[[Any, int], set[int]]
    rows: Callable[[Any, Symbol, Operations], Symbol]
    taps: Callable[[Any], int] = lambda _: 1
    crops: Callable[[Any], bool] = lambda _: False


def _patches(view: PatchView, x: Symbol, backend: Operations) -> Symbol:
    images = x if view.channels_first else np.moveaxis(x, -1, 1)
    return backend.patches(images, view.window)


def _one_hot(view: TokenIdView, x: Symbol, backend: Operations) -> Symbol:
    del backend
    ids = x.reshape(x.shape[0], -1)
    depth = x.tape.constant(view.vocabulary, np.int64)
    levels, shape = x.tape.constant([0, 1], x.tape.dtype), (*ids.shape, view.vocabulary)
    units = ids.new("OneHot", depth, levels, shape=shape, dtype=x.tape.dtype)
    return units if view.positions else units.sum(axis=1, keepdims=True)


# The views that can be recorded.
_VIEWS: Mapping[type[View], _RecordedView] = {
    RowView: _RecordedView(
        feature_axes=lambda view, rank: {view.feature_axis % rank},
        rows=lambda view, x, backend: view.rows(x, backend),
    ),
    PatchView: _RecordedView(
        feature_axes=lambda view, rank: {view.feature_axis % rank},
        rows=_patches,
        taps=lambda view: view.window.taps,
        crops=lambda view: min(view.window.begins + view.window.ends) < 0,
    ),
    TokenIdView: _RecordedView(feature_axes=lambda view, rank: set(), rows=_one_hot),
}


def _by_group(packing: GroupedPacking, x: Symbol, taps: int) -> Symbol:
    groups: Symbol = split_features(x, packing.groups, taps)
    return groups


# The packings with several matrices that can be recorded.
_PACKINGS: Mapping[type, Callable[[Any, Symbol, int], Symbol]] = {GroupedPacking: _by_group}


PREFIX = "variance/"
_EXAMPLE = f"{PREFIX}example/"


@dataclass(frozen=True, slots=True)
class Network:
    """A model whose variance is written.

    Attributes:
        layout: The model with its layers.
        value: Name of the value that the loss reads.
        node_limit: Largest number of nodes of the file.
        tape: Receives the nodes.
    """

    layout: Layout
    value: str
    node_limit: int
    tape: Tape

    @property
    def model(self) -> OnnxModel:
        """The model."""
        return self.layout.assembly.model

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the outputs of an example."""
        return self.model.facts[self.value].shape[1:]

    @property
    def sources(self) -> int:
        """Number ``k`` of outputs of an example."""
        return int(np.prod(self.shape))

    def read(self, name: str, fixed: Collection[int], stacked: str = "") -> Symbol:
        """Return a value of the model, or its gradients for the ``k`` outputs of an example.

        The sizes of the axes ``fixed`` are those of the sample run in every run. ``stacked`` is the
        name of the gradients, one after the other along the first axis.
        """
        fact, tape = self.model.facts[name], self.tape
        axes = enumerate(fact.shape)
        shape: list[Any] = [s if i in fixed else size_of(tape, name, i) for i, s in axes]
        if stacked:
            shape[0] = shape[0] * self.sources
        array: Symbol = Recorded(tape, stacked or name, tuple(shape), fact.dtype)
        return array.astype(tape.dtype) if fact.dtype.kind == "f" else array

    def check_count(self, count: int) -> None:
        """Check a number of nodes.

        Raises:
            InputError: The number is above the limit.
        """
        if count > self.node_limit:
            # The last layer has no backward pass if an example has one row of outputs.
            last = ", or measure the curvature of the last layer (layers='last')"
            raise InputError(
                f"the file would have at least {count} nodes, which is above the limit of "
                f"{self.node_limit}, because it has a backward pass for each of {self.sources} "
                f"outputs of an example; raise node_limit{last if len(self.shape) == 1 else ''}."
            )

    def unrolled(self, level: Level, backward: Backward) -> dict[str, list[str]]:
        """Write a backward graph into a level, once for each output of an example.

        The result maps a differentiated value to its gradient for each of the ``k`` unit vectors.
        An InputError says that the file would have too many nodes.
        """
        start = backward.cotangents[self.value]
        local = dependents(backward.nodes, (start,))
        copied = [node for node in backward.nodes if local.intersection(node.outputs)]
        self.check_count(self.sources * (1 + len(copied)))
        level.nodes += (node for node in backward.nodes if not local.intersection(node.outputs))
        self.tape.graph.constants |= backward.constants
        sizes = level.op("Shape", self.value)
        gradients: dict[str, list[str]] = {name: [] for name in backward.gradients}
        units = np.eye(self.sources, dtype=self.model.facts[self.value].dtype)
        for j, unit in enumerate(units.reshape(-1, 1, *self.shape)):
            names = {name: f"{level.prefix}{j}/{name}" for name in local}
            level.op("Expand", level.constant(unit), sizes, result=names[start])
            level.nodes += (_copy(node, names, f"{level.prefix}{j}/") for node in copied)
            for name, gradient in backward.gradients.items():
                gradients[name].append(names.get(gradient, gradient))
        return gradients


def stacked_gradients(network: Network, outputs: Sequence[str]) -> dict[str, str]:
    """Return the name of the gradients of outputs of layers for all outputs of an example."""
    if not outputs:
        return {}
    level = network.tape.graph
    gradients = network.unrolled(level, network.model.backward((network.value,), tuple(outputs)))
    return {name: level.op("Concat", *parts, axis=0) for name, parts in gradients.items()}


def example_gradients(network: Network, layers: Sequence[tuple[str, ...]]) -> dict[str, Symbol]:
    """Record the gradients of each example, by a Scan that runs the model on one example at a time.

    ``layers`` are the parameters of each layer. Gradients are ``(n, k, size)`` by parameter. Layers
    that the value does not depend on are absent. A model that runs with one batch size only raises
    an UnsupportedError.
    """
    task, model = network.layout.assembly.task, network.model
    names = tuple(name for layer in layers for name in layer)
    if not names:
        return {}
    if not task.batch.inputs or (task.batch.fixed and task.batch.size != 1):
        raise UnsupportedError(
            f"the gradients of each example for {', '.join(names)} take a model that runs on one "
            f"example: {task.batch.fixed or 'its inputs have no axis of examples'}."
        )
    inner = new_tape(_EXAMPLE, network.tape.dtype)
    gradients = network.unrolled(inner.graph, model.backward((network.value,), names))
    rows: dict[str, Symbol] = {}
    for layer in layers:
        for name in layer if gradients.keys() & set(layer) else ():
            shape, zeros = model.facts[name].shape, Operations(inner).xp.zeros
            parts: list[Symbol] = [
                Recorded(inner, part, shape, model.facts[name].dtype).reshape(1, -1)
                for part in gradients.get(name, ())
            ] or [zeros((network.sources, *shape))]
            rows[name] = np.concatenate(parts, axis=0).reshape(network.sources, -1)
    if not rows:
        return {}
    scanned, slices = _move_into_body(network, inner.graph, rows.values())
    results = network.tape.graph.multi(
        "Scan",
        scanned,
        [""] * len(rows),
        body=inner.graph.closed([*rows.values()], slices),
        num_scan_inputs=len(scanned),
        scan_input_axes=tuple(task.batch.inputs[name] for name in scanned),
    )
    n = size_of(network.tape, results[0], 0)
    return {
        name: Recorded(network.tape, result, (n, *row.shape), row.dtype)
        for (name, row), result in zip(rows.items(), results, strict=True)
    }


# -- private ---------------------------------------------------------------------------------------


def _move_into_body(
    network: Network, level: Level, results: Iterable[Symbol]
) -> tuple[list[str], list[Input]]:
    """Add the forward pass of one example to a body; all other values come from outside of it.

    The body has the backward passes already. The results are the inputs of the model that have
    examples, and the inputs of the body.
    """
    graph, axes = network.model.extended_graph(), network.layout.assembly.task.batch.inputs
    added = {name for node in level.nodes for name in node.outputs}
    nodes = needed((*graph.nodes, *level.nodes), [value.name for value in results])
    local = added | dependents(nodes, axes)
    nodes = tuple(node for node in nodes if local.intersection(node.outputs))
    read = {name for node in nodes for name in (*node.inputs, *node.captures)}
    names = {n: n if n.startswith(_EXAMPLE) else f"{_EXAMPLE}{n}" for n in local}
    scanned = [entry for entry in graph.inputs if entry.name in axes and entry.name in read]
    level.nodes, slices = [], []
    for entry in scanned:
        axis, part = axes[entry.name], f"{_EXAMPLE}{entry.name}/slice"
        shape = entry.shape and (*entry.shape[:axis], *entry.shape[axis + 1 :])
        slices.append(Input(part, entry.dtype, shape))
        level.op("Unsqueeze", part, level.constant([axis]), result=names[entry.name])
    level.nodes += (_copy(node, names, _EXAMPLE) for node in nodes)
    for value in results:
        value.name = names[value.name]
    return [entry.name for entry in scanned], slices


def _copy(node: Node, names: dict[str, str], prefix: str) -> Node:
    return replace(renamed(node, names), name=f"{prefix}{node.name}")
