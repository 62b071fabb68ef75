"""Writes losses as ONNX operators, for the files of ``differentiate``."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import log, nan, pi
from typing import TypeAlias

import numpy as np

from kfac_engine._types import Array, DType
from kfac_engine.errors import ModelError, UnsupportedError
from kfac_engine.export.target_inputs import TargetInputs
from kfac_engine.graph.node_builder import NodeBuilder
from kfac_engine.graph.structure import AttributeValue, Fact, Graph, Input, Node
from kfac_engine.losses import (
    CategoricalLogitsNegativeLogProbLoss,
    CausalNegativeLogProbLoss,
    HuberNegativeLogProbLoss,
    LaplaceNegativeLogProbLoss,
    LossFunction,
    MultiBernoulliNegativeLogProbLoss,
    NormalMeanNegativeLogProbLoss,
    PoissonNegativeLogProbLoss,
)
from kfac_engine.losses.objective import Reduction
from kfac_engine.losses.outliers import STIRLING
from kfac_engine.runtime.example_axis import ExampleAxis

LOSS = "loss"
_NO_CLASS = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class Term:
    """One summand of the objective."""

    loss: LossFunction  # the loss object; its class has a row in ``LOSS_GRAPHS``
    value: str  # name of the value that the loss reads
    targets: str  # name of the input for the targets
    axis: int  # axis of the classes or features, not negative
    batch_axis: ExampleAxis  # axis of the examples in the value
    weight: float  # factor of the loss in the objective
    # Shape that the file declares for the value, one entry for each axis.
    declared: tuple[int | str | None, ...]
    target_inputs: TargetInputs  # what the targets are, and which of them have weights


def with_losses(
    graph: Graph, facts: Mapping[str, Fact], terms: Sequence[Term], reduction: Reduction
) -> tuple[Graph, dict[str, Fact]]:
    """Return a graph with losses, whose only output ``loss`` is their weighted sum, and its facts.

    The targets of ``terms`` become inputs. The losses are reduced over examples and positions.
    Values of the model with the names of the loss or the targets raise ModelError.
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
            f"them in the model's file."
        )
    return (
        Graph(
            nodes=(*graph.nodes, *(node for builder in builders for node in builder.nodes), total),
            inputs=(*graph.inputs, *(entry for builder in builders for entry in builder.inputs)),
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

    ``fact`` is that of the value that the loss reads, and ``facts`` are those of new values, by
    name. ``inputs`` are the declared targets, and their weights if they have any. ``result`` is the
    name of the loss, reduced over examples and positions.
    """

    def __init__(self, term: Term, fact: Fact, reduction: Reduction, prefix: str) -> None:
        super().__init__(prefix)
        self.fact = fact
        self.facts: dict[str, Fact] = {}
        self.inputs: list[Input] = []
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
        """Add a node with one result and record the fact of the result; return its name.

        ``shape`` is its shape in the sample run. By default it has the element type of the loss.
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

    def each(self, op: str, *inputs: str, dtype: str | None = None) -> str:
        """Add an operation on each entry, in the shape of the value that the loss reads."""
        return self.value(op, *inputs, shape=self.fact.shape, dtype=dtype)

    def declare(self, name: str, axes: Sequence[int], dtype: DType) -> str:
        """Declare an input with some axes of the value that the loss reads; return its name."""
        declared = tuple(self._term.declared[axis] for axis in axes)
        self.inputs.append(Input(name, dtype, declared))
        self.facts[name] = Fact(dtype, tuple(self.fact.shape[axis] for axis in axes))
        return name

    def numbers(self, array: Array, axis: int) -> str:
        """Add a constant with a number for each class or feature; return its name."""
        shape = [-1, *[1] * (len(self.fact.shape) - 1 - axis)]
        return self._recorded(self.constant(np.asarray(array, self.fact.dtype).reshape(shape)))

    def observed(self, axes: Sequence[int], dtype: DType) -> tuple[str, str | None, str | None]:
        """Declare the targets and their weights, and leave out targets that do not count.

        ``axes`` are those of the value that the targets have; those of their weights are among
        them.

        The results are the targets, with zeros in place of those that do not count, their weights,
        and which of them do not count. The last two have the shape of the targets, and are None if
        all targets count alike.
        """
        loss, targets = self._term.loss, self.declare(self._term.targets, axes, dtype)
        shape, weights = self.facts[targets].shape, self._given_weights(targets, axes)
        zero, hidden = self._recorded(self.constant(np.array(0, dtype))), None
        single = loss.entrywise or len(axes) < len(self.fact.shape)  # not rows of probabilities
        ignored = loss.ignore_index if single else None
        if ignored is not None:
            index = self._recorded(self.constant(np.array(ignored, dtype)))
            hidden = self.value("Equal", targets, index, shape=shape, dtype="bool")
            ones = weights or self.scalar(1)
            weights = self.value("Where", hidden, self.scalar(0), ones, shape=shape)
        if weights is None:
            return targets, None, None
        if self._term.target_inputs.form:
            hidden = self.value("Equal", weights, self.scalar(0), shape=shape, dtype="bool")
        assert hidden is not None, "there are weights or an index"
        safe = self.value("Where", hidden, zero, targets, shape=shape, dtype=dtype.name)
        return safe, weights, hidden

    def _given_weights(self, targets: str, axes: Sequence[int]) -> str | None:
        """Declare the weights; return them in the shape of the targets, or None without weights."""
        term, chosen = self._term, self._term.target_inputs
        if chosen.form is None:
            return None
        places = chosen.axes(term.loss, len(self.fact.shape), term.batch_axis)
        name = self.declare(chosen.name(term.targets), places, chosen.dtype(self.fact.dtype))
        shape = self.facts[name].shape
        if chosen.mask:
            name = self.value("Where", name, self.scalar(1), self.scalar(0), shape=shape)
        else:  # A loss with a weight that is wrong is NaN.
            least = self.value("GreaterOrEqual", name, self.scalar(0), shape=shape, dtype="bool")
            name = self.value("Where", least, name, self.scalar(nan), shape=shape)
        others = [place for place, axis in enumerate(axes) if axis not in places]
        if not others:
            return name
        target_shape = self.facts[targets].shape
        ones = tuple(1 if k in others else size for k, size in enumerate(target_shape))
        column = self.value("Unsqueeze", name, self.integers(*others), shape=ones)
        size = self.value("Shape", targets, shape=(len(axes),), dtype="int64")
        return self.value("Expand", column, size, shape=target_shape)

    def ones_like(self, value: str) -> str:
        """Add ones of the type of the loss in the shape of a value; return their name."""
        shape = self.facts[value].shape
        size = self.value("Shape", value, shape=(len(shape),), dtype="int64")
        return self.value("Expand", self.scalar(1), size, shape=shape)

    def later(self, value: str, axis: int) -> str:
        """Shift a value's entries by one towards an axis's start, and put zeros at its end."""
        fact = self.facts[value]
        kind = fact.dtype.name
        one, rest = list(fact.shape), list(fact.shape)
        one[axis], rest[axis] = 1, fact.shape[axis] - 1
        places = [self.integers(k) for k in (0, 1, _NO_CLASS, axis)]
        first = self.value(
            "Slice", value, places[0], places[1], places[3], shape=tuple(one), dtype=kind
        )
        zeros = self.value("Sub", first, first, shape=tuple(one), dtype=kind)
        others = self.value("Slice", value, *places[1:], shape=tuple(rest), dtype=kind)
        return self.value("Concat", others, zeros, shape=fact.shape, dtype=kind, axis=axis)

    def reduce(self, nll: str, axis: int, weights: str | None = None) -> None:
        """Add the sum of ``nll`` over the classes on ``axis``, reduced over positions and examples.

        The terms ``nll`` are already multiplied by their weights. The sum of ``weights`` divides a
        mean; there is one for each prediction or, with the axis of the classes, for each entry.
        None stands for ones.
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
    """Write ``−Σ_c w_c t_c log p_c`` of class numbers or probabilities, after label smoothing."""
    loss, shape, axis = term.loss, b.fact.shape, term.axis
    assert isinstance(loss, CategoricalLogitsNegativeLogProbLoss)
    if not term.target_inputs.are_classes(loss):
        _of_probabilities(b, term)
        return
    w, smoothing = loss.class_weights, loss.label_smoothing
    column = tuple(1 if i == axis else size for i, size in enumerate(shape))
    rest = [i for i in range(len(shape)) if i != axis]
    targets, counts, _ = b.observed(rest, np.dtype(np.int64))
    if isinstance(loss, CausalNegativeLogProbLoss):
        time = rest.index(next(i for i in rest if i != term.batch_axis.axis))
        if counts is None:
            counts = b.ones_like(targets)
        targets, counts = b.later(targets, time), b.later(counts, time)
    index = b.value("Unsqueeze", targets, b.integers(axis), shape=column, dtype="int64")
    nll = _of_classes(b, term, index, column)
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
        share = b.times(_cross_entropy(b, term, None), smoothing / shape[axis])
        share = share if counts is None else b.value("Mul", share, counts, shape=column)
        nll = b.value("Add", b.times(nll, 1 - smoothing), share, shape=column)
    b.reduce(nll, axis, divisor)


def _of_classes(b: _LossBuilder, term: Term, index: str, column: tuple[int, ...]) -> str:
    """Write ``softplus(log Σ exp(z − z[target]))`` over the other classes.

    This is −log softmax(z)[target]. It and its gradient keep all digits where the target is nearly
    certain. ``index`` are the class numbers, with an axis of the classes; ``column`` is their
    shape.
    """
    logits, shape, axis = term.value, b.fact.shape, term.axis
    # GatherElements would count negative targets from the last class. A number beyond every class
    # replaces them, so that ONNX Runtime refuses them.
    negative = b.value("Less", index, b.integers(0), shape=column, dtype="bool")
    index = b.value("Where", negative, b.integers(_NO_CLASS), index, shape=column, dtype="int64")
    picked = b.value("GatherElements", logits, index, shape=column, axis=axis)
    apart = b.each("Sub", logits, picked)
    lowest = b.value(
        "Expand",
        b.scalar(float(np.finfo(b.fact.dtype).min)),
        b.value("Shape", index, shape=(len(column),), dtype="int64"),
        shape=column,
    )
    others = b.value("ScatterElements", apart, index, lowest, shape=shape, axis=axis)
    odds = b.value("ReduceLogSumExp", others, b.integers(axis), shape=column, keepdims=1)
    return b.value("Softplus", odds, shape=column)


def _of_probabilities(b: _LossBuilder, term: Term) -> None:
    """Write ``−Σ_c w_c t_c log p_c`` of rows of probabilities, whose classes count together."""
    loss, shape, axis = term.loss, b.fact.shape, term.axis
    assert isinstance(loss, CategoricalLogitsNegativeLogProbLoss)
    targets, counts, _ = b.observed(range(len(shape)), b.fact.dtype)
    if loss.label_smoothing:
        shrunk = b.times(targets, 1 - loss.label_smoothing)
        targets = b.each("Add", shrunk, b.scalar(loss.label_smoothing / shape[axis]))
    nll = _cross_entropy(b, term, targets)
    if counts is None:
        b.reduce(nll, axis)
        return
    column = b.facts[nll].shape
    counts = b.value("ReduceMax", counts, b.integers(axis), shape=column, keepdims=1)
    b.reduce(b.value("Mul", nll, counts, shape=column), axis, counts)


def _cross_entropy(b: _LossBuilder, term: Term, targets: str | None) -> str:
    """Write ``−Σ_c w_c t_c log p_c``; with ones as t if ``targets`` is None."""
    assert isinstance(term.loss, CategoricalLogitsNegativeLogProbLoss)
    shape, axis, w = b.fact.shape, term.axis, term.loss.class_weights
    log_p = b.value("LogSoftmax", term.value, shape=shape, axis=axis)
    factors = [] if w is None else [b.numbers(w, axis)]
    for factor in (*factors, *([] if targets is None else [targets])):
        log_p = b.each("Mul", log_p, factor)
    column = tuple(1 if i == axis else size for i, size in enumerate(shape))
    total = b.value("ReduceSum", log_p, b.integers(axis), shape=column, keepdims=1)
    return b.value("Neg", total, shape=column)


def _of_entries(nll_of: Callable[[_LossBuilder, Term, str, str], str]) -> _LossGraph:
    """Return the function that writes a loss whose entries have a target each.

    ``nll_of`` writes the terms of the loss, from predictions and targets.
    """

    def write(b: _LossBuilder, term: Term) -> None:
        targets, counts, hidden = b.observed(range(len(b.fact.shape)), b.fact.dtype)
        # A prediction that does not count may have an infinite term, whose product with 0 is NaN.
        z = term.value if hidden is None else b.each("Where", hidden, b.scalar(0), term.value)
        nll = nll_of(b, term, z, targets)
        b.reduce(nll if counts is None else b.each("Mul", nll, counts), term.axis, counts)

    return write


def _normal(b: _LossBuilder, term: Term, mean: str, targets: str) -> str:
    """Write ``(t − m)² / 2v + ½ log 2πv``."""
    assert isinstance(term.loss, NormalMeanNegativeLogProbLoss)
    error, var = b.each("Sub", mean, targets), term.loss.var
    square = b.times(b.each("Mul", error, error), 0.5 / var)
    return b.each("Add", square, b.scalar(0.5 * log(2 * pi * var)))


def _laplace(b: _LossBuilder, term: Term, mean: str, targets: str) -> str:
    """Write ``|t − m| / s + log 2s``."""
    assert isinstance(term.loss, LaplaceNegativeLogProbLoss)
    distance = b.each("Abs", b.each("Sub", mean, targets))
    return b.each("Add", b.times(distance, 1 / term.loss.scale), b.scalar(log(2 * term.loss.scale)))


def _huber(b: _LossBuilder, term: Term, mean: str, targets: str) -> str:
    """Write ``c (e − c/2) + log Z`` for an error e, where c is e clipped to [−δ, δ]."""
    assert isinstance(term.loss, HuberNegativeLogProbLoss)
    error, delta = b.each("Sub", mean, targets), term.loss.delta
    near = b.each("Clip", error, b.scalar(-delta), b.scalar(delta))
    far = b.each("Sub", error, b.times(near, 0.5))
    return b.each("Add", b.each("Mul", near, far), b.scalar(term.loss.log_normalizer))


def _poisson(b: _LossBuilder, term: Term, log_rate: str, targets: str) -> str:
    """Write ``exp z − t z + log t!``."""
    apart = b.each("Sub", b.each("Exp", log_rate), b.each("Mul", targets, log_rate))
    return b.each("Add", apart, _log_factorial(b, targets))


def _log_factorial(b: _LossBuilder, t: str) -> str:
    """Write ``log Γ(t + 1)``: Stirling's series at t + 9, less the logarithms of 8 factors."""
    y = b.each("Add", t, b.scalar(9))
    inverse = b.each("Reciprocal", y)
    square, series = b.each("Mul", inverse, inverse), b.scalar(STIRLING[0])
    for coefficient in STIRLING[1:]:
        series = b.each("Add", b.each("Mul", square, series), b.scalar(coefficient))
    terms = [
        b.each("Mul", b.each("Sub", y, b.scalar(0.5)), b.each("Log", y)),
        b.each("Sub", b.scalar(0.5 * log(2 * pi)), y),
        b.each("Mul", inverse, series),
    ]
    for first in (1, 5):  # no large count overflows
        product = b.each("Add", t, b.scalar(first))
        for k in range(first + 1, first + 4):
            product = b.each("Mul", product, b.each("Add", t, b.scalar(k)))
        terms.append(b.each("Neg", b.each("Log", product)))
    return b.each("Sum", *terms)


def _multi_bernoulli(b: _LossBuilder, term: Term, logits: str, targets: str) -> str:
    """Write ``t·softplus(−z) + (1 − t)·softplus(z)``, without cancellation between the terms."""
    assert isinstance(term.loss, MultiBernoulliNegativeLogProbLoss)
    positive, smoothing = term.loss.positive_weights, term.loss.label_smoothing
    if smoothing:
        targets = b.each("Add", b.times(targets, 1 - smoothing), b.scalar(smoothing / 2))
    miss = b.each("Sub", b.scalar(1), targets)
    if positive is not None:
        targets = b.each("Mul", targets, b.numbers(positive, term.axis))
    pairs = ((targets, b.each("Neg", logits)), (miss, logits))
    terms = [b.each("Mul", weight, b.each("Softplus", z)) for weight, z in pairs]
    return b.each("Add", *terms)


# The function that writes a loss, by class of the loss. The lookup is exact: a subclass may differ.
LOSS_GRAPHS: dict[type[LossFunction], _LossGraph] = {
    CategoricalLogitsNegativeLogProbLoss: _categorical,
    CausalNegativeLogProbLoss: _categorical,
    HuberNegativeLogProbLoss: _of_entries(_huber),
    LaplaceNegativeLogProbLoss: _of_entries(_laplace),
    MultiBernoulliNegativeLogProbLoss: _of_entries(_multi_bernoulli),
    NormalMeanNegativeLogProbLoss: _of_entries(_normal),
    PoissonNegativeLogProbLoss: _of_entries(_poisson),
}


def graph_of(loss: LossFunction) -> _LossGraph:
    """Return the function of ``LOSS_GRAPHS`` that writes a loss as operators."""
    if type(loss) not in LOSS_GRAPHS:
        known = ", ".join(sorted(cls.__name__ for cls in LOSS_GRAPHS))
        raise UnsupportedError(
            f"{type(loss).__name__} cannot be written as ONNX operators; the losses that can are "
            f"{known}. Differentiate without a loss: then the cotangent is an input."
        )
    return LOSS_GRAPHS[type(loss)]
