"""Records losses as ONNX operators, with targets and weights as inputs of the file."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kfac_engine._types import Array
from kfac_engine.errors import KfacError, ModelError, UnsupportedError
from kfac_engine.export.target_inputs import TargetInputs
from kfac_engine.graph.structure import Fact, Graph, Input, Node
from kfac_engine.losses.base import LossFunction, RegisteredLoss
from kfac_engine.losses.objective import BatchSize, Objective, Observation, Reduction
from kfac_engine.recording.operations import new_tape
from kfac_engine.recording.recorded import (
    Recorded,
    Shape,
    Size,
    Symbol,
    Tape,
    lifted,
    size_of,
)
from kfac_engine.runtime.example_axis import ExampleAxis

LOSS, TARGETS = "loss", "targets"
# Frames of a sequence in a file: the nodes grow with them, their products quadratically.
MOST_FRAMES = 128
# What code raises that needs numbers in place of symbols.
_OF_SYMBOLS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


class LossValues(ABC):
    """The values that losses read in a graph, and the targets and weights as inputs of the file.

    Attributes:
        tape: Receives the nodes.
        names: Names in the file, by value of the model; the same name where absent.
        target_inputs: What the targets are, and which of them have weights.
    """

    __slots__ = ()
    tape: Tape
    names: Mapping[str, str]
    target_inputs: TargetInputs

    @abstractmethod
    def fact(self, name: str) -> Fact:
        """Return type and shape of a value of the model in a sample run."""

    @abstractmethod
    def shape(self, name: str) -> Shape:
        """Return the shape of a value of the model in the file."""

    @abstractmethod
    def place(self, loss: LossFunction) -> ExampleAxis:
        """Return the axis of the examples in the first input of a loss."""

    def __getitem__(self, name: str) -> Recorded:
        """Return a value of the model."""
        return self.value(name, name)

    def value(self, name: str, like: str) -> Recorded:
        """Return a value of the file that has the shape and type of a value of the model."""
        return self._named(name, self.shape(like), self.fact(like).dtype)

    def _named(self, name: str, shape: Sequence[Any], dtype: Any) -> Recorded:
        return Recorded(self.tape, self.names.get(name, name), tuple(shape), dtype)

    def targets(self, loss: LossFunction) -> Recorded:
        """Return the targets of a loss."""
        axes, shape = self.target_places(loss), self.shape(loss.inputs[0])
        if loss.sequences:
            _refuse_sequences(loss, shape)
        dtype = self.tape.dtype if len(axes) == len(shape) else np.int64
        return self._named(loss.require_target_name(), [shape[axis] for axis in axes], dtype)

    def target_places(self, loss: LossFunction) -> tuple[int, ...]:
        """Return the axes of a loss input that its targets have; labels take those of frames."""
        rank = len(self.shape(loss.inputs[0]))
        without = tuple(axis for axis in range(rank) if axis != loss.class_axis % rank)
        classes = loss.sequences
        if self.target_inputs.are_classes(loss):
            classes = loss.sample(self.ones(loss), np.random.default_rng(0)).ndim < rank
        return without if classes else tuple(range(rank))

    def ones(self, loss: LossFunction) -> dict[str, Array]:
        """Return ones in the shapes of what a loss reads in a sample run."""
        return {n: np.ones(self.fact(n).shape, self.fact(n).dtype) for n in loss.inputs}

    def weights(self, loss: LossFunction) -> Recorded | None:
        """Return the weights of the targets of a loss as they are given; None without weights."""
        chosen, shape = self.target_inputs, self.shape(loss.inputs[0])
        if chosen.form is None:
            return None
        sizes = [shape[axis] for axis in self.weight_places(loss)]
        dtype = chosen.dtype(self.tape.dtype)
        return self._named(chosen.name(loss.require_target_name()), sizes, dtype)

    def weight_places(self, loss: LossFunction) -> tuple[int, ...]:
        """Return the axes that a loss's input shares with the weights of its targets."""
        return self.target_inputs.axes(loss, len(self.shape(loss.inputs[0])), self.place(loss))

    def observe(self, objective: Objective) -> Observation:
        """Record how much each target counts; see ``Objective.observe``.

        Class numbers outside the classes are read as other classes: see ``has_possible_targets``.
        """
        values: Any = self
        terms = []
        for term in objective.terms:
            labels, counts = self._labels(term)
            classes = self._classes(term, labels)
            inside = labels if classes is None else labels.clip(0, classes - 1)
            terms.append(term.weigh(values, inside, counts))
        size = BatchSize(objective.examples(values), tuple(seen.total for seen in terms))
        return Observation(tuple(terms), size, size)

    def has_possible_targets(self, objective: Objective) -> Symbol | None:
        """Record whether each counting target is a class, and each weight finite and at least 0.

        The result is None for targets of other kinds without weights.
        """
        possible: Symbol = None
        for term in objective.terms:
            labels, _ = self._labels(term)
            classes, weights = self._classes(term, labels), self.weights(term)
            wrong: list[Symbol] = []
            if classes is not None:
                wrong.append((labels < 0) | (labels >= classes))
            if weights is not None and weights.dtype != np.bool_:
                wrong.append(~((weights >= 0) & np.isfinite(weights)))
            for entries in wrong:
                right = entries.sum() == 0
                possible = right if possible is None else possible & right
        return possible

    def _labels(self, loss: LossFunction) -> tuple[Symbol, Symbol | None]:
        """Return the targets, with classes where they do not count, and weights."""
        values: Any = self
        targets: Any = self.targets(loss)
        counts: Any = self.weights(loss)
        if counts is not None:
            shape, axes = self.shape(loss.inputs[0]), self.weight_places(loss)
            counts = counts.reshape([n if k in axes else 1 for k, n in enumerate(shape)])
        return loss.masked(values, targets, counts)

    def _classes(self, loss: LossFunction, labels: Symbol) -> Any:
        """Return how many classes ``labels`` number; None if targets are not class numbers."""
        shape = self.shape(loss.inputs[0])
        numbers = labels.ndim < len(shape) and labels.dtype.kind == "i"
        return shape[loss.class_axis % len(shape)] if numbers else None


def _refuse_sequences(loss: LossFunction, shape: Shape) -> None:
    """Refuse sequences whose recursions are too long, or whose frames come first."""
    value, frames = loss.inputs[0], shape[3 - loss.class_axis % 3]
    if isinstance(frames, Size):
        raise UnsupportedError(
            f"a file needs the examples on the first axis of '{value}', and a number of frames, "
            f"for the loss 'ctc'; transpose the output, declare the number, or compute in Python."
        )
    if frames > MOST_FRAMES:
        raise UnsupportedError(
            f"a file unrolls the recursions of the loss 'ctc' over the frames, at most "
            f"{MOST_FRAMES}, but '{value}' has {frames}; give sample_inputs with fewer frames, or "
            f"compute in Python."
        )


# -- the losses of a model's outputs ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Term:
    """One summand of the objective."""

    loss: LossFunction  # the loss object
    batch_axis: ExampleAxis  # axis of the examples in its first input
    weight: float  # factor of the loss in the objective
    # Shape that the file declares for the first input, one entry for each axis.
    declared: tuple[int | str | None, ...]


@dataclass(frozen=True, slots=True)
class RecordedLoss:
    """A recorded sum of losses, with its gradient with respect to the values that they read."""

    nodes: tuple[Node, ...]
    constants: Mapping[str, Array]
    inputs: tuple[Input, ...]  # the targets and their weights
    cotangents: Mapping[str, str]  # name of the gradient, by value

    def after(self, graph: Graph, cotangents: Mapping[str, str]) -> Graph:
        """Return a graph with the loss as its output, and its gradients by new names."""
        named = [
            Node("Identity", (name,), (cotangents[value],), name=f"node_{cotangents[value]}")
            for value, name in self.cotangents.items()
        ]
        return replace(
            graph,
            nodes=(*graph.nodes, *self.nodes, *named),
            inputs=(*graph.inputs, *self.inputs),
            outputs=(LOSS,),
            constants={**graph.constants, **self.constants},
        )


def record_losses(
    graph: Graph,
    facts: Mapping[str, Fact],
    terms: Sequence[Term],
    reduction: Reduction,
    target_inputs: TargetInputs,
) -> RecordedLoss:
    """Record the weighted sum of losses, reduced over examples and positions.

    Values of the model with the names of the loss or the targets raise ModelError, and a loss that
    cannot be recorded UnsupportedError.
    """
    values, prefix = set(graph.values()), "loss/"
    while any(value.startswith(prefix) for value in values):
        prefix = f"loss_{prefix}"
    tape = new_tape(prefix, facts[terms[0].loss.inputs[0]].dtype)
    batch = _Outputs(tape, facts, terms, target_inputs)
    inputs = batch.declared()
    if clashes := sorted({LOSS, *(entry.name for entry in inputs)} & values):
        raise ModelError(
            f"the model has values with the names of loss or targets: {', '.join(clashes)}; rename "
            f"them in the model's file."
        )
    registered = [RegisteredLoss(term.loss.inputs[0], term.loss, term.weight) for term in terms]
    objective = Objective(tuple(registered), reduction, batch.examples)
    try:
        total, gradients = batch.computed(objective)
        results = {value: lifted(tape, x).name for value, x in (*gradients.items(), (LOSS, total))}
    except (*_OF_SYMBOLS, UnsupportedError) as failure:
        if isinstance(failure, KfacError) and not isinstance(failure, UnsupportedError):
            raise
        known = ", ".join(dict.fromkeys(type(term.loss).__name__ for term in terms))
        raise UnsupportedError(
            f"{known} cannot be written as ONNX operators: {str(failure).rstrip('.')}. "
            f"Differentiate without a loss: then the cotangent is an input."
        ) from failure
    last = Node("Identity", (results.pop(LOSS),), (LOSS,), name=f"node_{LOSS}")
    return RecordedLoss((*tape.graph.nodes, last), tape.graph.constants, inputs, results)


class _Outputs(LossValues):
    """The outputs of a model with their losses, of any size where the file declares none."""

    def __init__(
        self,
        tape: Tape,
        facts: Mapping[str, Fact],
        terms: Sequence[Term],
        target_inputs: TargetInputs,
    ) -> None:
        self.tape, self.names, self.target_inputs = tape, {}, target_inputs
        self._terms = terms
        shapes = [_open_shape(tape, term, facts) for term in terms]
        self._shapes = {
            n: shape for t, shape in zip(terms, shapes, strict=True) for n in t.loss.inputs
        }
        place = terms[0].batch_axis
        size = shapes[0][place.axis]
        self.examples = f"{tape.graph.prefix}examples"
        self._facts = {**facts, self.examples: Fact(tape.dtype, (1,))}
        self._shapes[self.examples] = (size / place.repeats,)

    def fact(self, name: str) -> Fact:
        return self._facts[name]

    def shape(self, name: str) -> Shape:
        return self._shapes[name]

    def place(self, loss: LossFunction) -> ExampleAxis:
        return next(term.batch_axis for term in self._terms if term.loss is loss)

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def declared(self) -> tuple[Input, ...]:
        """Return the targets and weights as the file declares them, after checks of the values."""
        entries = []
        for term in self._terms:
            term.loss.check_inputs(self.ones(term.loss))
            rows = [(self.targets(term.loss), self.target_places(term.loss))]
            if (weights := self.weights(term.loss)) is not None:
                rows.append((weights, self.weight_places(term.loss)))
            for value, axes in rows:
                shape = tuple(term.declared[axis] for axis in axes)
                entries.append(Input(value.name, value.dtype, shape))
        return tuple(entries)

    def computed(self, objective: Objective) -> tuple[Symbol, dict[str, Symbol]]:
        """Record the loss and its gradient by value; both are NaN for weights that are wrong."""
        values: Any = self
        seen, possible = self.observe(objective), self.has_possible_targets(objective)
        right: Any = 1.0 if possible is None else np.where(possible, 1.0, np.nan)
        total, gradients = objective.value_and_cotangents(values, right, seen)
        return total * right, gradients

    def _labels(self, loss: LossFunction) -> tuple[Symbol, Symbol | None]:
        labels, counts = super()._labels(loss)
        classes = super()._classes(loss, labels)
        if classes is None or loss.sequences:
            return labels, counts
        # Gather would count negative numbers from the last class. A number beyond every class
        # replaces them, so that ONNX Runtime refuses them.
        end = classes.number() if isinstance(classes, Size) else lifted(self.tape, classes)
        bounds = [self.tape.constant(0, np.int64), end.name, self.tape.constant(1, np.int64)]
        numbers = Recorded(self.tape, self.tape.record("Range", bounds), (classes,), np.int64)
        return numbers.take(np.where(labels < 0, end, labels)), counts

    def _classes(self, loss: LossFunction, labels: Symbol) -> Any:
        return super()._classes(loss, labels) if loss.sequences else None


def _open_shape(tape: Tape, term: Term, facts: Mapping[str, Fact]) -> Shape:
    """Return the shape of the values that a loss reads; sizes may depend on the batch."""
    loss, shape = term.loss, facts[term.loss.inputs[0]].shape
    # Weights of classes fix their number.
    fixed = loss.class_axis % len(shape) if loss.weighs_classes and len(shape) > 1 else None
    return tuple(
        size
        if isinstance(term.declared[axis], int) or axis == fixed
        else size_of(tape, loss.inputs[0], axis)
        for axis, size in enumerate(shape)
    )
