"""Assembles an engine: loads a model, and finds and registers its layers and losses."""

from collections.abc import Container, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cache, partial

import numpy as np

from kfac_engine._types import Array
from kfac_engine.autodiff.activity import (
    ZERO,
    behind_jumps,
    no_slope,
    notes_of,
    nothing_to_train,
    straight_through,
)
from kfac_engine.autodiff.differentiate import Backward, needed
from kfac_engine.backend.namespace import on_host
from kfac_engine.backend.select import memory_space_of, select
from kfac_engine.backend.threads import default_count
from kfac_engine.compat.collection import LayerCollection
from kfac_engine.compat.estimator import FisherEstimator
from kfac_engine.curvature.approximations import KINDS, row
from kfac_engine.curvature.blocks.base import uses
from kfac_engine.curvature.factors.row_weights import ExamplePlaces
from kfac_engine.curvature.fisher import Fisher
from kfac_engine.datasets.examples import WEIGHTS, ExampleAxes
from kfac_engine.distributed.agreement import Agreement
from kfac_engine.distributed.protocol import Alone, Communicator
from kfac_engine.distributed.shards import DrawAxis
from kfac_engine.engine.example_gradients import ExampleGradients
from kfac_engine.engine.file_losses import TakenLoss, taken_loss
from kfac_engine.engine.loss_bindings import LossBinding, LossOptions, bind_losses
from kfac_engine.engine.options import EngineOptions
from kfac_engine.engine.validation import check_mode
from kfac_engine.errors import InputError, ModelError, UnsupportedError
from kfac_engine.graph.load import LoadedModel, ModelSource, load_model
from kfac_engine.graph.structure import RELAYS, Fact, Graph, Node
from kfac_engine.layers.discover import Discovery, discover
from kfac_engine.layers.match import LayerMatch
from kfac_engine.layers.parameter_slices import ParameterSlice
from kfac_engine.losses.objective import Objective, Reduction
from kfac_engine.losses.output import OutputLoss
from kfac_engine.runtime.batch_axis import Batch, find_position_orders
from kfac_engine.runtime.example_axis import with_batch_axes
from kfac_engine.runtime.model import OnnxModel
from kfac_engine.sessions.device_session import available_memory_space
from kfac_engine.system.memory_limits import return_freed_memory


@dataclass(frozen=True, slots=True)
class Task:
    """The objective of an engine, with the values it reads and the axes of the examples."""

    objective: Objective  # losses under a reduction
    heads: tuple[LossBinding, ...]  # the losses with the values that they read
    batch: Batch  # the axes of the examples
    # The batch of the sample run; None for generated inputs.
    inputs: Mapping[str, Array] | None = None
    # The loss that was taken out of the file; None for no such loss.
    file_loss: TakenLoss | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on values that losses read in place of outputs, and on uncertain choices."""
        reads = (
            f"the loss on '{head.output}' reads '{head.logits.value}', {head.logits.how}"
            for head in self.heads
            if head.logits
        )
        in_file = self.file_loss.notes if self.file_loss else ()
        return (*in_file, *reads, *self.doubts)

    @property
    def example_axes(self) -> ExampleAxes:
        """The axes of the examples in inputs and targets."""
        # A loss of the file reads the inputs alone, also if it has a number for each example.
        targeted = [head.output for head in self.heads if not isinstance(head.loss, OutputLoss)]
        outputs = [output for output in targeted if output in self.batch.places]
        names = dict.fromkeys(outputs, self.file_loss.loss.labels) if self.file_loss else {}
        weights = self.file_loss.loss.weights if self.file_loss else ""
        sequences = [head.output for head in self.heads if head.loss.sequences]
        optional = [head.output for head in self.heads if head.loss.of_residuals]
        default = self.heads[0].default_targets if len(self.heads) == 1 else ("", "")
        return ExampleAxes(
            self.batch, outputs, names, weights or WEIGHTS, sequences, optional, default
        )

    def require_examples(self, what: str) -> None:
        """Refuse a loss that the file computes as a single number for the whole batch.

        ``what`` begins the message with its subject and verb, such as ``"statistics of curvature
        need"``.
        """
        for head in self.heads:
            if head.output not in self.batch.places:
                raise UnsupportedError(
                    f"{what} losses of single examples, but the output '{head.output}' of the file "
                    f"is a single number for the whole batch. Give the file an output with a "
                    f"number for each example, or use an optimizer without curvature, such as "
                    f"'adamw', on whole batches in one process."
                )

    def require_parts(self) -> None:
        """Refuse parts of a batch whose outputs have an entry for each pair of examples."""
        pairs = next((head.output for head in self.heads if head.output in self.batch.squares), "")
        if pairs:
            raise UnsupportedError(
                f"'{pairs}' has an entry for each pair of examples, so that the parts of a batch "
                f"have other predictions than the batch; give whole batches."
            )

    @property
    def doubts(self) -> tuple[str, ...]:
        """Notes on losses and batch axes that may be interpreted wrongly."""
        return tuple(filter(None, (*(head.doubt for head in self.heads), self.batch.note)))


@dataclass(frozen=True, slots=True)
class Assembly:
    """The registered layers and losses of a model."""

    model: OnnxModel  # the model with its sessions
    task: Task  # the losses, their sum, and the trained parameters
    discovery: Discovery  # layers of the graph, parameters without a layer, and parameter slices
    collection: LayerCollection  # the blocks of the layers, and the losses
    options: EngineOptions  # the options of the engine
    # Largest number of examples whose memory was checked, by the part of them that statistics
    # measure.
    checked: dict[float, int] = field(default_factory=dict)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on values that losses read in place of outputs, and on missing gradients."""
        zero = (layer for layer in self.discovery.layers if layer.reason.startswith(ZERO))
        untrained = (f"'{layer.parameters[0]}' is {layer.reason}" for layer in zero)
        model, form = self.model, self.model.loaded.notes
        stopped = straight_through(model.graph, model.facts, tuple(model.parameters))
        return (*self.task.notes, *form, *notes_of(model.left_out), *untrained, *stopped)

    def request_values(self, fisher: Fisher) -> None:
        """Request the values that losses and statistics read from every forward pass."""
        layers, losses = self.discovery.layers, self.task.objective.inputs
        read = (name for layer in layers if layer.inputs for name in uses(layer.inputs))
        self.model.want([*losses, *read])
        self.backwards(fisher)

    def backwards(self, fisher: Fisher) -> tuple[Backward, ...]:
        """Return the backward graphs of a step that updates statistics."""
        parameters, read = tuple(self.model.parameters), fisher.differentiated
        wrt = [(*parameters, *read)] if fisher.reads_gradients else [parameters, read]
        losses = self.task.objective.inputs
        graphs = (*wrt, fisher.differentiated_alone)
        return tuple(self.model.backward(losses, tuple(dict.fromkeys(n))) for n in graphs if n)

    def draw_placements(self) -> dict[str, DrawAxis]:
        """Return the axis of the examples in the random numbers of each loss, by its name.

        The model runs twice if an output has examples and positions on one axis.
        """
        task, model = self.task, self.model
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
            placements[loss.name] = DrawAxis(axis, orders.get(head.output, False))
        return placements


def _threads(chosen: int | None, communicator: Communicator | None) -> int:
    """Return the number of threads: the option, or the default.

    Products in another number of threads may be rounded differently. The default is therefore the
    same in all processes of a communicator: the smallest share of cores of a process.
    """
    share = default_count(getattr(communicator, "local_size", 1))
    least = Agreement(communicator or Alone()).of_all(share).min()
    return chosen or int(least)


def build(
    source: ModelSource, options: EngineOptions, *, trains: bool = False
) -> tuple[Assembly, FisherEstimator]:
    """Load a model, register its layers and losses, and create the estimator of its curvature.

    The estimator has no statistics. If it ``trains``, a loss without a distribution of targets has
    the mode ``empirical`` in place of sampled targets.
    """
    threads = _threads(options.threads, options.communicator)
    backend = select(options.backend, threads=threads)
    inputs, reduction = options.sample_inputs, options.reduction
    loaded = load_model(source, train_form=options.train_form)
    losses = options.losses.on(loaded.graph)
    inputs = on_host(inputs, backend) if isinstance(inputs, Mapping) else inputs
    file_loss = taken_loss(loaded, losses, inputs)
    if file_loss is not None:
        loaded = replace(loaded, graph=file_loss.loss.logits_graph(loaded.graph))
        losses = file_loss.options(losses)
        reduction = file_loss.reduction(reduction)
        inputs = file_loss.without(inputs) if isinstance(inputs, Mapping) else inputs
    model = OnnxModel(
        _with_named_axes(loaded, losses),
        trainable=options.trainable,
        freeze=options.freeze,
        threads=threads,
        sample_inputs=inputs,
        gradient_dtype=options.gradient_dtype,
        tie_weights=options.tie_weights,
        graph_passes=options.graph_passes,
    )
    collection = LayerCollection(model, backend=backend)
    collection.data = _data(model.graph)
    chosen = options.approximations or {}
    for kind, approximation in chosen.items():
        collection.set_default_approximation(kind, approximation)
    if file_loss is not None:
        losses = file_loss.weighted(losses, model.facts)
    task = register_losses(model, collection, losses, reduction, inputs, file_loss)
    discovery = register_layers(model, task, collection, chosen)
    assembly = Assembly(model, task, discovery, collection, options)
    estimator = FisherEstimator(
        collection.registered_variables,
        options.ema_decay,
        options.damping,
        collection,
        exps=options.exps,
        estimation_mode=_mode(options.estimation_mode, task, trains=trains),
        compute_cholesky=options.compute_cholesky,
        compute_cholesky_inverse=options.compute_cholesky_inverse,
        seed=options.seed,
        examples=ExampleGradients(model, task.objective, task.batch, task.inputs),
    )
    _describe_model(estimator, assembly)
    model.passes.seed = options.seed
    model.move(available_memory_space(memory_space_of(backend)))
    assembly.request_values(estimator)
    return_freed_memory()
    return assembly, estimator


def _describe_model(fisher: Fisher, assembly: Assembly) -> None:
    """Tell a Fisher matrix where the parameters and the examples of a model are."""
    model, task, discovery = assembly.model, assembly.task, assembly.discovery
    fisher.slices, fisher.to_file = discovery.parts, model.to_file_layout
    sources, batch, objective = fisher.sources, task.batch, task.objective
    axes = {name: place.axis for name, place in batch.places.items() if place.axis}
    read = {name for layer in discovery.layers for name in uses(layer.outputs)}
    sources.places = ExamplePlaces(
        axes | {**objective.axes},
        frozenset(read - batch.places.keys() if batch.joint else ()),
        cache(partial(_positions_first, model, batch, task.inputs, read)),
    )
    sources.batch = objective.batch
    sources.placements = cache(assembly.draw_placements)
    sources.reached = partial(_values_of_losses, model, objective)


def _mode(chosen: str, task: Task, *, trains: bool) -> str:
    """Return the estimation mode, after checks; see ``build``."""
    in_file = [isinstance(head.loss, OutputLoss) for head in task.heads]
    if trains and chosen == "gradients" and in_file and all(in_file):
        chosen = "empirical"  # the same matrix by one backward pass
    check_mode(chosen, task.heads, task.batch)
    return chosen


def _values_of_losses(model: OnnxModel, objective: Objective) -> list[set[str]]:
    """Return the values that each loss function depends on."""
    nodes = model.extended_graph().nodes
    parts = [(term.inputs, needed(nodes, term.inputs)) for term in objective.terms]
    return [
        {*inputs, *(name for node in its for name in (*node.inputs, *node.outputs))}
        for inputs, its in parts
    ]


def _positions_first(
    model: OnnxModel, batch: Batch, inputs: Mapping[str, Array] | None, names: Set[str]
) -> frozenset[str]:
    """Return the values of ``names`` in which each position has the rows of all examples.

    The model runs twice if a value has examples and positions on one axis.
    """
    results = {name for node in model.graph.nodes for name in node.outputs}
    mixed = [n for n, place in batch.places.items() if n in names & results and place.repeats > 1]
    if not mixed:
        return frozenset()
    orders = find_position_orders(model.graph, model.facts, mixed, batch, inputs)
    return frozenset(name for name, first in orders.items() if first)


def _data(graph: Graph) -> frozenset[str]:
    """Return the inputs of a graph, and the values that only rearrange entries of an input."""
    names = {entry.name for entry in graph.inputs}
    for node in graph.nodes:
        if node.op in RELAYS and node.inputs[0] in names:
            names.update(node.outputs)
    return frozenset(names)


def _with_named_axes(loaded: LoadedModel, losses: LossOptions) -> LoadedModel:
    """Return a model with its batch axes; its outputs are chosen before anything runs."""
    if loaded.float_outputs and losses.output is None:
        losses.outputs_among(loaded.graph, loaded.float_outputs)
    named = with_batch_axes(loaded.graph.inputs, losses.batch_axes)
    return replace(loaded, graph=replace(loaded.graph, inputs=named))


def register_losses(
    model: OnnxModel,
    collection: LayerCollection,
    options: LossOptions,
    reduction: Reduction,
    inputs: Mapping[str, Array] | None,
    file_loss: TakenLoss | None = None,
) -> Task:
    """Bind losses to the outputs of a model and register them with a collection.

    Values that the losses need are added to the model. ``inputs`` are the batch of the sample run,
    or None for generated inputs. ``file_loss`` is the loss that was taken out of the file, if there
    is one.
    """
    heads, batch = bind_losses(model.graph, model.facts, options, inputs)
    if batch.sets and reduction == "batch_mean":
        raise InputError(
            f"reduction='batch_mean', which kfac_engine.curvature has as well, divides by one "
            f"number of examples, but {batch.joint}; make an Engine with reduction='mean' or "
            f"'sum', and multiply by its matrices with curvature_products."
        )
    for head in heads:
        if head.logits:
            model.extend(head.logits.nodes, head.logits.facts, head.logits.constants)
    counted = _batch_first(model, batch, [head.loss.inputs[0] for head in heads])
    if counted:
        collection.count_examples_by(counted)
    collection.sets = {name: i for i, each in enumerate(batch.sets) for name in each.places}
    for index, (head, weight) in enumerate(zip(heads, options.coefficients, strict=True)):
        collection.add_loss(head.loss, f"loss_{index}", weight)
    outputs = {head.loss.inputs[0]: head.output for head in heads}
    placed = {value: output for value, output in outputs.items() if output in batch.places}
    axes = {value: batch.places[output].axis for value, output in placed.items()}
    of_batch = frozenset(outputs.keys() - placed.keys())
    prepare = {}
    if file_loss is not None:
        outputs = dict.fromkeys(outputs, file_loss.loss.labels)
        prepare = {heads[0].loss.targets or "": file_loss.prepare}
    losses = collection.registered_losses
    objective = Objective(losses, reduction, counted, outputs, axes, prepare, of_batch)
    return Task(objective, heads, batch, inputs, file_loss)


def _batch_first(model: OnnxModel, batch: Batch, read: Sequence[str]) -> str:
    """Return a value whose first axis has only the examples; empty if there is none.

    It is an input, or among ``read`` if no input has an axis of examples.
    """
    if not batch.inputs:
        return read[0] if batch.joint else ""
    if batch.sets:
        return _every_example(model, batch)
    name, axis = min(batch.inputs.items(), key=lambda item: item[1])
    if axis == 0:
        return name
    first = f"{name} with the batch first"
    fact = model.facts[name]
    perm = (axis, *(i for i in range(len(fact.shape)) if i != axis))
    model.define(
        Node("Transpose", (name,), (first,), {"perm": perm}, f"node of {first}"),
        {},
        like=Fact(fact.dtype, tuple(fact.shape[i] for i in perm)),
    )
    model.want([first])
    return first


def _every_example(model: OnnxModel, batch: Batch) -> str:
    """Add a value with one entry for each example of all sets; return its name."""
    rows = []
    for each in batch.sets:
        name, axis = min(each.inputs.items(), key=lambda item: item[1])
        length, row = f"examples of {name}", f"row of {name}"
        count = Fact(np.dtype(np.int64), (1,))
        define = {"start": axis, "end": axis + 1}
        model.define(Node("Shape", (name,), (length,), define, f"node of {length}"), {}, like=count)
        like = Fact(np.dtype(np.float32), (each.size,))
        value = {"value": np.ones(1, np.float32)}
        model.define(Node("ConstantOfShape", (length,), (row,), value, f"node of {row}"), {}, like)
        rows.append(row)
    name = f"rows of {', '.join(batch.inputs)}"
    like = Fact(np.dtype(np.float32), (batch.size,))
    model.define(Node("Concat", tuple(rows), (name,), {"axis": 0}, f"node of {name}"), {}, like)
    model.want([name])
    return name


def register_layers(
    model: OnnxModel, task: Task, collection: LayerCollection, chosen: Container[str]
) -> Discovery:
    """Find the layers of a model and register them with a collection.

    ``chosen`` are the kinds of layers whose approximation the user chose. A loss that depends on no
    trainable parameter raises ModelError.
    """
    objective = task.objective
    model.leave_out(objective.inputs)
    reached = model.backward(objective.inputs, tuple(model.parameters)).gradients
    if not reached:
        raise ModelError(nothing_to_train(model.graph.name, objective.inputs, model.left_out))
    shapes = {name: fact.shape for name, fact in model.facts.items()}
    jumps = behind_jumps(model.graph, model.facts, objective.inputs, model.parameters)
    unreached = [
        LayerMatch("generic", (name,), reason=_why_unreached(jumps.get(name)))
        for name in model.parameters
        if name not in reached
    ]
    # A use that the loss does not depend on is none.
    graph = replace(model.graph, nodes=needed(model.graph.nodes, objective.inputs))
    dtypes = {name: fact.dtype for name, fact in model.facts.items()}
    alone = {name: p.axis for name, p in task.batch.places.items() if p.repeats == 1}
    discovery = discover(graph, tuple(reached), shapes, task.batch.size, dtypes, alone)
    apart = {layer.parameters[0]: (ParameterSlice(layer.parameters[0]),) for layer in unreached}
    layers = [_with_row(layer) for layer in discovery.layers]
    matches = [m for layer in layers for m in _placed(layer, task.batch, chosen)]
    discovery = Discovery((*matches, *unreached), {**discovery.parts, **apart})
    collection.sized = frozenset(kind for kind in KINDS if kind not in chosen)
    for layer in discovery.layers:
        if layer.form is None:
            collection.register_generic(layer.key, objective.batch or objective.inputs[0])
        else:
            for value in layer.computed:
                model.define(value.node, value.constants, value.like)
            read = layer.inputs or ()
            collection.register(layer.kind, layer.key, layer.form, read, layer.outputs)
            _check_places(layer, collection.approximation_of(layer.key), task.batch)
    return discovery


def _why_unreached(jump: Node | None) -> str:
    """Return the reason why a parameter has no gradient; ``jump`` is a node that blocks it."""
    return "the loss does not depend on it" if jump is None else no_slope(jump)


def _with_row(layer: LayerMatch) -> LayerMatch:
    """Return a layer with the row of its kind that has its number of uses."""
    several = layer.form is not None and layer.form.num_uses > 1
    return replace(layer, kind=(several and KINDS[layer.kind].several) or layer.kind)


def _placed(layer: LayerMatch, batch: Batch, chosen: Container[str]) -> list[LayerMatch]:
    """Return the layer, or a generic one for each parameter if examples are off axis 0."""
    moved = _moved(layer, batch)
    if not moved or layer.kind in chosen:
        return [layer]
    if not row(layer.kind, KINDS[layer.kind].default).examples_first:
        return [layer]
    reason = f"{layer.kind}, but {moved}"
    return [LayerMatch("generic", (name,), reason=reason) for name in layer.parameters]


def _moved(layer: LayerMatch, batch: Batch) -> str:
    """Return text on where the examples of a layer lie; empty for the first axis."""
    if batch.sets:
        return "its uses have different examples"
    for name in (*uses(layer.inputs), *uses(layer.outputs)):
        place = batch.places.get(name)
        if batch.joint and not place:
            return f"no axis of '{name}' holds the examples"
        if place and not place.comes_first:
            folded = " together with positions" if place.repeats > 1 else ""
            return f"the examples lie on axis {place.axis} of '{name}'{folded}"
    return ""


def _check_places(layer: LayerMatch, approximation: str, batch: Batch) -> None:
    """Check that an approximation supports the axis of the examples."""
    moved = _moved(layer, batch)
    if moved and row(layer.kind, approximation).examples_first:
        raise UnsupportedError(
            f"approximation '{approximation}' of {', '.join(layer.parameters)} measures each "
            f"example's gradient, but {moved}; choose another approximation for {layer.kind}."
        )
