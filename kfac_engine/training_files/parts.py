"""Provides the model, the optimizer, names and random nodes to the recording of a step."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from kfac_engine._types import Array
from kfac_engine.autodiff.differentiate import Backward, needed
from kfac_engine.autodiff.rules.attributes import integers
from kfac_engine.autodiff.training_form import draws
from kfac_engine.engine.build import Assembly
from kfac_engine.errors import UnsupportedError
from kfac_engine.export.recorded_losses import LossValues
from kfac_engine.export.target_inputs import TargetInputs
from kfac_engine.graph.passes.bodies import with_new_names
from kfac_engine.graph.structure import Fact, Input, Node
from kfac_engine.losses.base import LossFunction, weights_of
from kfac_engine.losses.observed import times
from kfac_engine.recording.operations import Draws
from kfac_engine.recording.random_nodes import RESULTS, drawn, shape_of_numbers
from kfac_engine.recording.recorded import Recorded, Shape, Size, Symbol, Tape
from kfac_engine.runtime.example_axis import ExampleAxis
from kfac_engine.runtime.model import OnnxModel

_FLOAT = np.dtype(np.float32)

# Writes a random node of an evaluation.
Writer: TypeAlias = Callable[["EvaluationGraph", Node], None]


@dataclass(frozen=True, slots=True)
class EvaluationGraph(LossValues):
    """One evaluation of the model in the graph, on the batch or on a part of it."""

    assembly: Assembly  # the model and its losses
    tape: Tape  # receives the nodes
    examples: Size | None  # number of examples, or None if the model runs with one number only
    names: Mapping[str, str]  # names in the file, by value of the model; the same name where absent
    target_inputs: TargetInputs  # what the targets are, and which of them have weights
    selection: Symbol | None = None  # numbers of the examples in the batch; None for all of them
    visible: bool = True  # whether other bodies can read its values

    @property
    def model(self) -> OnnxModel:
        """The model."""
        return self.assembly.model

    def fact(self, name: str) -> Fact:
        """Return type and shape of a value of the model in a sample run."""
        return self.model.facts[name]

    def place(self, loss: LossFunction) -> ExampleAxis:
        """Return the axis of the examples in the first input of a loss."""
        task, value = self.assembly.task, loss.inputs[0]
        return task.batch.places[task.objective.outputs.get(value, value)]

    def shape(self, name: str) -> Shape:
        """Return the shape of a value of the model."""
        shape: list[int | Size] = list(self.model.facts[name].shape)
        place = self.assembly.task.batch.places.get(name)
        axis = self.assembly.task.batch.inputs.get(name)
        if self.examples is not None and name == self.assembly.task.objective.batch:
            shape[0] = self.examples
        elif self.examples is not None and place is not None:
            shape[place.axis] = self.examples * place.repeats
        elif self.examples is not None and axis is not None:
            shape[axis] = self.examples
        return tuple(shape)

    @property
    def target_axes(self) -> dict[str, int]:
        """The axis of the examples in targets and their weights, by name."""
        task, chosen, axes = self.assembly.task, self.target_inputs, dict[str, int]()
        for head in task.heads:
            name, place = head.loss.require_target_name(), task.batch.places[head.output]
            axes[name] = place.axis
            if chosen.form:
                axes[chosen.name(name)] = self.weight_places(head.loss).index(place.axis)
        return axes

    def write(self, nodes: Iterable[Node], random: Writer, renamed_only: str = "") -> None:
        """Write nodes of the model with the names of this evaluation.

        ``random`` writes random nodes. Nodes are left out if none of their results starts with
        ``renamed_only``.
        """
        level = self.tape.level
        for node in nodes:
            results = [self.names.get(name, name) for name in node.outputs]
            if not any(result.startswith(renamed_only) for result in results):
                continue
            if draws(self.model.graph, node):
                random(self, node)
            else:
                copy = with_new_names(node, self.names)
                level.nodes.append(replace(copy, name=f"{level.prefix}{node.name}"))


def forward_nodes(model: OnnxModel, wanted: Sequence[str]) -> tuple[Node, ...]:
    """Return the nodes of the model that some values depend on."""
    return needed(model.extended_graph().nodes, wanted)


def constants_of(model: OnnxModel, *backwards: Backward) -> dict[str, Array]:
    """Return the constants of the model and the backward graphs, except trained weights."""
    graph = model.extended_graph()
    constants = dict(graph.constants)
    for backward in backwards:
        constants |= backward.constants
    trained = {*model.parameters, *model.buffers}
    return {n: np.asarray(a) for n, a in constants.items() if n not in trained}


def declared_value(assembly: Assembly, name: str) -> Input:
    """Return a value of the model as a file declares it, with its type in the file."""
    fact, batch = assembly.model.facts[name], assembly.task.batch
    shape: list[int | str] = list(fact.shape)
    place = batch.places.get(name)
    if place is not None and not batch.fixed:
        shape[place.axis] = "batch" if place.repeats == 1 else f"{place.repeats} batch"
    return Input(name, assembly.model.loaded.stored.get(name, fact.dtype), tuple(shape))


def number_of(tape: Tape, number: Any) -> Symbol:
    """Return a number as a recorded value; it may depend on the number of examples."""
    if isinstance(number, Size):
        return number.recorded()
    if isinstance(number, Recorded):
        return number.astype(_FLOAT)
    return Recorded(tape, tape.constant(number, _FLOAT), (), _FLOAT)


def hits_and_count(
    loss: LossFunction, batch: EvaluationGraph, seen: Any, whole: Any
) -> tuple[Any, Any]:
    """Record how many targets the model finds most probable, weighted, and the sum of all weights.

    ``batch`` is a part with the targets ``seen`` of a batch with the targets ``whole``, to which
    the sum belongs.
    """
    values: Any = batch
    hits: Any = loss.hits(values, seen.labels).astype(_FLOAT)
    rows = seen.labels.ndim > hits.ndim  # of probabilities
    number = whole.labels.size // (seen.labels.shape[loss.class_axis] if rows else 1)
    if seen.counts is None:
        return hits.sum(), number
    axis, entries = loss.class_axis % seen.counts.ndim, hits.ndim == seen.counts.ndim
    counts = seen.counts if entries else np.squeeze(seen.counts, axis)
    total = whole.counts.sum().astype(_FLOAT) * (number / whole.counts.size)
    return times(hits, counts).sum(), total


def label_errors_and_count(
    loss: LossFunction, batch: EvaluationGraph, seen: Any
) -> tuple[Any, Any]:
    """Record the edit distances of predicted sequences, and the labels of their targets."""
    values: Any = {name: batch[name] for name in loss.inputs}
    weights = batch.weights(loss)
    if weights is not None:  # the frames that count
        values[weights_of(loss.require_target_name())] = weights
    errors, labels = loss.label_errors(values, seen.labels)
    if seen.counts is not None:
        counts: Any = loss.of_predictions(values, seen.counts)
        counts = np.squeeze(counts, loss.class_axis % counts.ndim)
        errors, labels = (times(numbers.astype(_FLOAT), counts) for numbers in (errors, labels))
    return errors.sum(), labels.sum()


_SHAPED = ("RandomNormal", "RandomUniform")


class RandomNodes:
    """Writes random nodes; a part of the batch has the numbers of its examples in the batch."""

    def __init__(self, draws: Draws) -> None:
        self._draws, self._numbers = draws, dict[str, Symbol]()

    def write(self, evaluation: EvaluationGraph, node: Node) -> None:
        """Write the results of a random node with the names of an evaluation of the model.

        An input that decides whether the node draws raises UnsupportedError.
        """
        if node.op == "Dropout":
            node = _always_drops(evaluation, node)
        results = RESULTS[node.op](node, self._numbers_of(evaluation, node), evaluation.__getitem__)
        for name, result in zip(node.outputs, results, strict=False):
            if name:
                dtype = evaluation.model.facts[name].dtype
                value = result.astype(dtype, copy=False)
                target = evaluation.names.get(name, name)
                evaluation.tape.level.op("Identity", value.name, result=target)

    def _numbers_of(self, evaluation: EvaluationGraph, node: Node) -> Symbol:
        axis, shape = _form(evaluation, node)
        if evaluation.selection is not None and node.name in self._numbers:
            numbers = self._numbers[node.name]
            if axis is None:
                return numbers
            index = evaluation.selection
            return numbers.new("Gather", index.name, shape=shape, axis=axis)
        self._numbers[node.name] = numbers = drawn(self._draws, node, shape)
        return numbers


def _form(evaluation: EvaluationGraph, node: Node) -> tuple[int | None, Shape]:
    """Return the axis of the examples in the numbers of a node, and their shape."""
    if node.op in _SHAPED:
        return None, integers(node, "shape", ())
    like = node.inputs[0]
    place = evaluation.assembly.task.batch.places.get(like)
    shape = shape_of_numbers(node, evaluation.shape(like))
    return None if place is None else place.axis, shape


def _always_drops(evaluation: EvaluationGraph, node: Node) -> Node:
    """Return a Dropout without its training mode, which is a constant of the model."""
    if node.inputs[2] not in evaluation.model.graph.constants:
        raise UnsupportedError(
            f"the training mode of Dropout (node '{node.name}') is computed, so a training file "
            f"cannot tell whether the node drops; make the mode a constant of the model."
        )
    return replace(node, inputs=node.inputs[:2])
