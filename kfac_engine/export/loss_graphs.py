"""Losses written as operators behind a graph: what ``differentiate`` puts into a file."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import log, pi
from typing import TypeAlias

import numpy as np

from kfac_engine._types import Array
from kfac_engine.errors import ModelError, UnsupportedError
from kfac_engine.graph.structure import AttributeValue, Fact, Graph, Input, Node
from kfac_engine.losses import (
    CategoricalLogitsNegativeLogProbLoss,
    LossFunction,
    MultiBernoulliNegativeLogProbLoss,
    NormalMeanNegativeLogProbLoss,
)
from kfac_engine.losses.objective import Reduction
from kfac_engine.runtime.example_axis import ExampleAxis

LOSS = "loss"
_NO_CLASS = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class Term:
    """One of the losses that are added up.

    Attributes:
        loss: The loss object; its class has a row in ``LOSS_GRAPHS``.
        value: The value that it reads.
        targets: Name of the input that holds its targets.
        axis: Axis of the classes or features, not negative.
        place: Where the examples lie in the value.
        weight: What it is multiplied by.
        declared: The shape the file declares for the value, one entry an axis.
    """

    loss: LossFunction
    value: str
    targets: str
    axis: int
    place: ExampleAxis
    weight: float
    declared: tuple[int | str | None, ...]


def with_losses(
    graph: Graph, facts: Mapping[str, Fact], terms: Sequence[Term], reduction: Reduction
) -> tuple[Graph, dict[str, Fact]]:
    """A graph whose only output is the weighted sum of losses, called ``loss``.

    Args:
        graph: The model.
        facts: Element type and shape of its values in a sample run.
        terms: The losses; their targets become inputs.
        reduction: How they run over examples and positions.

    Returns:
        The graph, and facts about all its values.

    Raises:
        ModelError: The model has values of its own by the names of the loss or the targets.
    """
    pens, weighted = [], []
    for index, term in enumerate(terms):
        pen = _Pen(term, facts[term.value], reduction, f"{LOSS}_{index}")
        graph_of(term.loss)(pen, term)
        weighted.append(pen.times(pen.result, term.weight))
        pens.append(pen)
    total = Node("Sum", tuple(weighted), (LOSS,), name=f"node_{LOSS}")
    added = {LOSS: Fact(facts[terms[0].value].dtype, ())}
    for pen in pens:
        added |= pen.facts
    taken = sorted(added.keys() & set(graph.values()))
    if taken:
        raise ModelError(f"the model has values of its own called {', '.join(taken)}.")
    return (
        Graph(
            nodes=(*graph.nodes, *(node for pen in pens for node in pen.nodes), total),
            inputs=(*graph.inputs, *(pen.targets for pen in pens if pen.targets)),
            outputs=(LOSS,),
            constants={**graph.constants, **{n: a for p in pens for n, a in p.constants.items()}},
            opset=graph.opset,
            name=graph.name,
            domains=graph.domains,
        ),
        {**facts, **added},
    )


class _Pen:
    """Writes the nodes of one loss, with what is known of their results.

    Args:
        term: The loss.
        fact: Of the value that it reads.
        reduction: How it runs over examples and positions.
        prefix: Of the names of its values.
    """

    def __init__(self, term: Term, fact: Fact, reduction: Reduction, prefix: str) -> None:
        self.fact = fact
        self.nodes: list[Node] = []
        self.facts: dict[str, Fact] = {}
        self.constants: dict[str, Array] = {}
        self.targets: Input | None = None
        self.result = ""
        self._term, self._reduction, self._prefix = term, reduction, prefix

    def op(
        self,
        op: str,
        *inputs: str,
        sides: tuple[int, ...],
        results: str | None = None,
        **attributes: AttributeValue,
    ) -> str:
        """Add a node; returns the name of its result.

        Args:
            op: The operator.
            *inputs: Names of its operands.
            sides: Shape of the result in the sample run.
            results: Its element type, where that is not the value's.
            **attributes: Of the node.

        Returns:
            The name.
        """
        name = f"{self._prefix}_{op}_{len(self.nodes)}"
        self.nodes.append(Node(op, inputs, (name,), attributes, name=f"node_{name}"))
        self.facts[name] = Fact(np.dtype(results or self.fact.dtype), sides)
        return name

    def constant(self, value: float | Sequence[int]) -> str:
        """A number in the value's type, or a list of axes."""
        dtype = self.fact.dtype if isinstance(value, float) else np.dtype(np.int64)
        name = f"{self._prefix}_constant_{len(self.constants)}"
        self.constants[name] = array = np.asarray(value, dtype)
        self.facts[name] = Fact(array.dtype, array.shape)
        return name

    def times(self, value: str, factor: float) -> str:
        """A multiple of a value; the value itself where the factor is one."""
        if factor == 1:
            return value
        return self.op("Mul", value, self.constant(float(factor)), sides=self.facts[value].shape)

    def take_targets(self, without: int | None = None, dtype: str | None = None) -> str:
        """Declare the targets: in the shape of the value, ``without`` an axis."""
        name, own = self._term.targets, np.dtype(dtype) if dtype else self.fact.dtype
        kept = [axis for axis in range(len(self.fact.shape)) if axis != without]
        self.targets = Input(name, own, tuple(self._term.declared[axis] for axis in kept))
        self.facts[name] = Fact(own, tuple(self.fact.shape[axis] for axis in kept))
        return name

    def reduce(self, nll: str, axis: int) -> None:
        """Sum over the classes, then over positions and examples as the reduction says."""
        sides, place = self.facts[nll].shape, self._term.place
        if len(sides) > 1 and self._reduction != "sum":
            every = [i for i in range(len(sides)) if i != place.axis]
            within = [axis] if self._reduction == "mean" else every
            kept = tuple(side for i, side in enumerate(sides) if i not in within)
            nll = self.op("ReduceSum", nll, self.constant(within), sides=kept, keepdims=0)
        op = "ReduceSum" if self._reduction == "sum" else "ReduceMean"
        self.result = self.op(op, nll, sides=(), keepdims=0)
        if self._reduction == "batch_mean":  # so far a mean over positions, too, if folded in
            self.result = self.times(self.result, float(place.repeats))


_LossGraph: TypeAlias = Callable[[_Pen, Term], None]


def _categorical(pen: _Pen, term: Term) -> None:
    """``−log softmax(z)[target]``, with integer targets."""
    logits, axis = term.value, term.axis
    sides = pen.fact.shape
    one = tuple(1 if i == axis else side for i, side in enumerate(sides))
    targets = pen.take_targets(axis, "int64")
    log_p = pen.op("LogSoftmax", logits, sides=sides, axis=axis)
    index = pen.op("Unsqueeze", targets, pen.constant([axis]), sides=one, results="int64")
    # Negative numbers would count from the last class: they go where no class is, an error.
    negative = pen.op("Less", index, pen.constant([0]), sides=one, results="bool")
    nowhere = pen.constant([_NO_CLASS])
    index = pen.op("Where", negative, nowhere, index, sides=one, results="int64")
    picked = pen.op("GatherElements", log_p, index, sides=one, axis=axis)
    pen.reduce(pen.op("Neg", picked, sides=one), axis)


def _normal(pen: _Pen, term: Term) -> None:
    """``(t − m)² / 2v + ½ log 2πv``."""
    assert isinstance(term.loss, NormalMeanNegativeLogProbLoss)
    sides, var = pen.fact.shape, term.loss.var
    error = pen.op("Sub", term.value, pen.take_targets(), sides=sides)
    square = pen.times(pen.op("Mul", error, error, sides=sides), 0.5 / var)
    nll = pen.op("Add", square, pen.constant(0.5 * log(2 * pi * var)), sides=sides)
    pen.reduce(nll, term.axis)


def _multi_bernoulli(pen: _Pen, term: Term) -> None:
    """``softplus(z) − t·z``."""
    sides = pen.fact.shape
    softplus = pen.op("Softplus", term.value, sides=sides)
    hit = pen.op("Mul", term.value, pen.take_targets(), sides=sides)
    pen.reduce(pen.op("Sub", softplus, hit, sides=sides), term.axis)


# Class of a loss to the function that writes it; a subclass may differ and has its own row.
LOSS_GRAPHS: dict[type[LossFunction], _LossGraph] = {
    CategoricalLogitsNegativeLogProbLoss: _categorical,
    NormalMeanNegativeLogProbLoss: _normal,
    MultiBernoulliNegativeLogProbLoss: _multi_bernoulli,
}


def graph_of(loss: LossFunction) -> _LossGraph:
    """The function that writes a loss as operators.

    Args:
        loss: The loss.

    Returns:
        The function.

    Raises:
        UnsupportedError: Its class has no row in ``LOSS_GRAPHS``.
    """
    if type(loss) not in LOSS_GRAPHS:
        known = ", ".join(sorted(cls.__name__ for cls in LOSS_GRAPHS))
        raise UnsupportedError(
            f"{type(loss).__name__} cannot be written as ONNX operators; the losses that can are "
            f"{known}. Differentiate without a loss: then the cotangent is an input."
        )
    return LOSS_GRAPHS[type(loss)]
