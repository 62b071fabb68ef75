"""Writes losses as ONNX operators, for the files of ``differentiate``."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import log, pi
from typing import TypeAlias

import numpy as np

from kfac_engine._types import Array
from kfac_engine.errors import ModelError, UnsupportedError
from kfac_engine.graph.node_builder import NodeBuilder
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
    """One summand of the objective.

    Attributes:
        loss: The loss object; its class has a row in ``LOSS_GRAPHS``.
        value: Name of the value that the loss reads.
        targets: Name of the input for the targets.
        axis: Axis of the classes or features, not negative.
        batch_axis: Axis of the examples in the value.
        weight: Factor of the loss in the objective.
        declared: Shape that the file declares for the value, one entry for each axis.
    """

    loss: LossFunction
    value: str
    targets: str
    axis: int
    batch_axis: ExampleAxis
    weight: float
    declared: tuple[int | str | None, ...]


def with_losses(
    graph: Graph, facts: Mapping[str, Fact], terms: Sequence[Term], reduction: Reduction
) -> tuple[Graph, dict[str, Fact]]:
    """Return a graph with losses, whose only output ``loss`` is their weighted sum.

    Args:
        graph: The model.
        facts: Element type and shape of its values in a sample run.
        terms: The losses; their targets become inputs.
        reduction: Reduction over examples and positions.

    Returns:
        The graph, and facts about all its values.

    Raises:
        ModelError: Values of the model have the names of the loss or the targets.
    """
    builders, weighted = [], []
    for index, term in enumerate(terms):
        builder = _LossBuilder(term, facts[term.value], reduction, f"{LOSS}_{index}_")
        graph_of(term.loss)(builder, term)
        weighted.append(builder.times(builder.result, term.weight))
        builders.append(builder)
    total = Node("Sum", tuple(weighted), (LOSS,), name=f"node_{LOSS}")
    added = {LOSS: Fact(facts[terms[0].value].dtype, ())}
    constants = dict(graph.constants)
    for builder in builders:
        added |= builder.facts
        constants |= builder.constants
    clashes = sorted(added.keys() & set(graph.values()))
    if clashes:
        raise ModelError(
            f"the model has values with the names of loss or targets: {', '.join(clashes)}; rename "
            f"them."
        )
    return (
        Graph(
            nodes=(*graph.nodes, *(node for builder in builders for node in builder.nodes), total),
            inputs=(*graph.inputs, *(builder.targets for builder in builders if builder.targets)),
            outputs=(LOSS,),
            constants=constants,
            opset=graph.opset,
            name=graph.name,
            domains=graph.domains,
        ),
        {**facts, **added},
    )


class _LossBuilder(NodeBuilder):
    """Collects the nodes of one loss, with the facts of their results.

    Args:
        term: The loss.
        fact: Element type and shape of the value that the loss reads.
        reduction: Reduction over examples and positions.
        prefix: Start of all new names; no name in the graph starts with it.

    Attributes:
        fact: Element type and shape of the value that the loss reads.
        facts: Element type and shape of each new value, by name.
        targets: The declared targets.
        result: Name of the reduced loss.
    """

    def __init__(self, term: Term, fact: Fact, reduction: Reduction, prefix: str) -> None:
        super().__init__(prefix)
        self.fact = fact
        self.facts: dict[str, Fact] = {}
        self.targets: Input | None = None
        self.result = ""
        self._term, self._reduction = term, reduction

    def value_name(self, op: str, index: int) -> str:
        """Return an unused name for the result of the next node."""
        return f"{self.prefix}{op}_{len(self.nodes)}"

    def node_name(self, op: str, results: Sequence[str]) -> str:
        """Return the name of a node, derived from the name of its first result."""
        return f"node_{results[0]}"

    def value(
        self,
        op: str,
        *inputs: str,
        shape: tuple[int, ...],
        dtype: str | None = None,
        **attributes: AttributeValue,
    ) -> str:
        """Add a node with one result and record the fact of the result.

        Args:
            op: Operator.
            *inputs: Names of the operands.
            shape: Shape of the result in the sample run.
            dtype: Element type of the result, if not that of the loss.
            **attributes: Attributes of the node.

        Returns:
            The name of the result.
        """
        name = self.write(op, inputs, ("",), attributes)[0]
        self.facts[name] = Fact(np.dtype(dtype or self.fact.dtype), shape)
        return name

    def integers(self, *values: int) -> str:
        """Add a constant with a list of integers, such as axes; return its name."""
        return self._recorded(self.constant(values, "int64"))

    def scalar(self, value: float) -> str:
        """Add a 0-d constant with the element type of the loss; return its name."""
        return self._recorded(self.constant(np.asarray(value, self.fact.dtype)))

    def times(self, value: str, factor: float) -> str:
        """Add the product of a value and a number; return its name, or the value for one."""
        if factor == 1:
            return value
        return self.value("Mul", value, self.scalar(factor), shape=self.facts[value].shape)

    def declare_targets(self, without: int | None = None, dtype: str | None = None) -> str:
        """Declare the targets, in the shape of the value without the axis ``without``."""
        name, stored = self._term.targets, np.dtype(dtype) if dtype else self.fact.dtype
        axes = [axis for axis in range(len(self.fact.shape)) if axis != without]
        self.targets = Input(name, stored, tuple(self._term.declared[axis] for axis in axes))
        self.facts[name] = Fact(stored, tuple(self.fact.shape[axis] for axis in axes))
        return name

    def numbers(self, array: Array, axis: int) -> str:
        """Add a constant with a number for each class or feature; return its name."""
        shape = [-1, *[1] * (len(self.fact.shape) - 1 - axis)]
        return self._recorded(self.constant(np.asarray(array, self.fact.dtype).reshape(shape)))

    def counting(self, targets: str, ignored: int | None, dtype: str) -> tuple[str, str | None]:
        """Leave out targets that do not count.

        Args:
            targets: Name of the targets.
            ignored: The target that does not count; None for none.
            dtype: Element type of the targets.

        Returns:
            The targets with zeros in place of those, and 1 for each that counts or else 0; None if
            all count.
        """
        if ignored is None:
            return targets, None
        shape = self.facts[targets].shape
        constants = [self._recorded(self.constant(np.array(n, dtype))) for n in (ignored, 0)]
        hidden = self.value("Equal", targets, constants[0], shape=shape, dtype="bool")
        safe = self.value("Where", hidden, constants[1], targets, shape=shape, dtype=dtype)
        counts = self.value("Where", hidden, self.scalar(0), self.scalar(1), shape=shape)
        return safe, counts

    def reduce(self, nll: str, axis: int, weights: str | None = None) -> None:
        """Add the sum of ``nll`` over the classes, reduced over positions and examples.

        Args:
            nll: The terms, already multiplied by their weights.
            axis: Axis of the classes.
            weights: Weights whose sum divides a mean, for each prediction or, with the axis of the
                classes, for each entry; None for ones.
        """
        if weights is not None and self._reduction == "mean":
            shape = self.facts[weights].shape
            features = shape[axis] if len(shape) == len(self.fact.shape) and len(shape) > 1 else 1
            total = self.value("ReduceSum", weights, shape=(), keepdims=0)
            product = self.value("ReduceSum", nll, shape=(), keepdims=0)
            mean = self.value("Div", product, total, shape=())
            self.result = self.times(mean, float(features))
            return
        shape, batch_axis = self.facts[nll].shape, self._term.batch_axis
        if len(shape) > 1 and self._reduction != "sum":
            every = [i for i in range(len(shape)) if i != batch_axis.axis]
            summed = [axis] if self._reduction == "mean" else every
            rest = tuple(size for i, size in enumerate(shape) if i not in summed)
            nll = self.value("ReduceSum", nll, self.integers(*summed), shape=rest, keepdims=0)
        op = "ReduceSum" if self._reduction == "sum" else "ReduceMean"
        self.result = self.value(op, nll, shape=(), keepdims=0)
        if self._reduction == "batch_mean":  # the batch axis may include positions
            self.result = self.times(self.result, float(batch_axis.repeats))

    def _recorded(self, name: str) -> str:
        array = self.constants[name]
        self.facts[name] = Fact(array.dtype, array.shape)
        return name


_LossGraph: TypeAlias = Callable[[_LossBuilder, Term], None]


def _categorical(b: _LossBuilder, term: Term) -> None:
    """Write ``softplus(log Σ exp(z − z[target]))`` over the other classes, with integer targets.

    This is −log softmax(z)[target]. It and its gradient keep all digits where the target is nearly
    certain.
    """
    logits, axis = term.value, term.axis
    shape = b.fact.shape
    column = tuple(1 if i == axis else size for i, size in enumerate(shape))
    assert isinstance(term.loss, CategoricalLogitsNegativeLogProbLoss)
    targets = b.declare_targets(axis, "int64")
    w, smoothing = term.loss.class_weights, term.loss.label_smoothing
    targets, counts = b.counting(targets, term.loss.ignore_index, "int64")
    index = b.value("Unsqueeze", targets, b.integers(axis), shape=column, dtype="int64")
    # GatherElements would count negative targets from the last class. A number beyond every class
    # replaces them, so that ONNX Runtime refuses them.
    negative = b.value("Less", index, b.integers(0), shape=column, dtype="bool")
    index = b.value("Where", negative, b.integers(_NO_CLASS), index, shape=column, dtype="int64")
    picked = b.value("GatherElements", logits, index, shape=column, axis=axis)
    apart = b.value("Sub", logits, picked, shape=shape)
    lowest = b.value(
        "Expand",
        b.scalar(float(np.finfo(b.fact.dtype).min)),
        b.value("Shape", index, shape=(len(column),), dtype="int64"),
        shape=column,
    )
    others = b.value("ScatterElements", apart, index, lowest, shape=shape, axis=axis)
    odds = b.value("ReduceLogSumExp", others, b.integers(axis), shape=column, keepdims=1)
    nll = b.value("Softplus", odds, shape=column)
    if counts is not None:
        counts = b.value("Unsqueeze", counts, b.integers(axis), shape=column)
    divisor = counts
    if w is not None:
        of_classes = b.value("Gather", b.numbers(w, len(shape) - 1), index, shape=column, axis=0)
        divisor = of_classes
        if counts is not None:
            divisor = b.value("Mul", counts, of_classes, shape=column)
    if divisor is not None:
        nll = b.value("Mul", nll, divisor, shape=column)
    if smoothing:
        share = _of_all_classes(b, term, counts)
        nll = b.value("Add", b.times(nll, 1 - smoothing), share, shape=column)
    b.reduce(nll, axis, divisor)


def _of_all_classes(b: _LossBuilder, term: Term, counts: str | None) -> str:
    """Write the part of the loss that label smoothing divides among all classes."""
    assert isinstance(term.loss, CategoricalLogitsNegativeLogProbLoss)
    shape, axis, w = b.fact.shape, term.axis, term.loss.class_weights
    column = tuple(1 if i == axis else size for i, size in enumerate(shape))
    log_p = b.value("LogSoftmax", term.value, shape=shape, axis=axis)
    if w is not None:
        log_p = b.value("Mul", log_p, b.numbers(w, axis), shape=shape)
    total = b.value("ReduceSum", log_p, b.integers(axis), shape=column, keepdims=1)
    share = b.times(total, -term.loss.label_smoothing / shape[axis])
    return share if counts is None else b.value("Mul", share, counts, shape=column)


def _normal(b: _LossBuilder, term: Term) -> None:
    """Write ``(t − m)² / 2v + ½ log 2πv``."""
    assert isinstance(term.loss, NormalMeanNegativeLogProbLoss)
    shape, var = b.fact.shape, term.loss.var
    targets, counts = b.counting(b.declare_targets(), term.loss.ignore_index, b.fact.dtype.name)
    error = b.value("Sub", term.value, targets, shape=shape)
    square = b.times(b.value("Mul", error, error, shape=shape), 0.5 / var)
    nll = b.value("Add", square, b.scalar(0.5 * log(2 * pi * var)), shape=shape)
    nll = nll if counts is None else b.value("Mul", nll, counts, shape=shape)
    b.reduce(nll, term.axis, counts)


def _multi_bernoulli(b: _LossBuilder, term: Term) -> None:
    """Write ``t·softplus(−z) + (1 − t)·softplus(z)``, without cancellation between the terms."""
    assert isinstance(term.loss, MultiBernoulliNegativeLogProbLoss)
    shape, positive, smoothing = b.fact.shape, term.loss.positive_weights, term.loss.label_smoothing
    targets, counts = b.counting(b.declare_targets(), term.loss.ignore_index, b.fact.dtype.name)
    if smoothing:
        shrunk = b.times(targets, 1 - smoothing)
        targets = b.value("Add", shrunk, b.scalar(smoothing / 2), shape=shape)
    miss = b.value("Sub", b.scalar(1), targets, shape=shape)
    if positive is not None:
        targets = b.value("Mul", targets, b.numbers(positive, term.axis), shape=shape)
    opposite = b.value("Neg", term.value, shape=shape)
    terms = [
        b.value("Mul", weight, b.value("Softplus", logits, shape=shape), shape=shape)
        for weight, logits in ((targets, opposite), (miss, term.value))
    ]
    nll = b.value("Add", *terms, shape=shape)
    nll = nll if counts is None else b.value("Mul", nll, counts, shape=shape)
    b.reduce(nll, term.axis, counts)


# Class of a loss to the function that writes it. The lookup is exact: a subclass may differ.
LOSS_GRAPHS: dict[type[LossFunction], _LossGraph] = {
    CategoricalLogitsNegativeLogProbLoss: _categorical,
    NormalMeanNegativeLogProbLoss: _normal,
    MultiBernoulliNegativeLogProbLoss: _multi_bernoulli,
}


def graph_of(loss: LossFunction) -> _LossGraph:
    """Return the function that writes a loss as operators.

    Args:
        loss: The loss.

    Returns:
        The function.

    Raises:
        UnsupportedError: The class of the loss has no row in ``LOSS_GRAPHS``.
    """
    if type(loss) not in LOSS_GRAPHS:
        known = ", ".join(sorted(cls.__name__ for cls in LOSS_GRAPHS))
        raise UnsupportedError(
            f"{type(loss).__name__} cannot be written as ONNX operators; the losses that can are "
            f"{known}. Differentiate without a loss: then the cotangent is an input."
        )
    return LOSS_GRAPHS[type(loss)]
