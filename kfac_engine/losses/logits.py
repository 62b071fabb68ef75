"""Finds the logits of a model that returns probabilities.

The losses are functions of logits. Many models end in an operator that converts logits to
probabilities, followed by views such as Reshape and Transpose. A loss on the output of such a model
reads the operand of that operator. The same views are applied to the operand, so that the logits
and the targets have the shape of the output.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np

from kfac_engine._types import Array
from kfac_engine.errors import ShapeError
from kfac_engine.graph.analysis.interval_bounds import bounds
from kfac_engine.graph.node_builder import NodeBuilder
from kfac_engine.graph.structure import RELAYS, Fact, Graph, Node
from kfac_engine.losses.base import LossFunction

# Operators that preserve the meaning of the axis of the classes if its size does not change.
_KEEP_CHANNELS = frozenset({"Add", "AveragePool", "Clip", "Concat", "Mul", "Relu", "Resize"})

_SOFTMAX = ("LogSoftmax", "Softmax")

# The axis of the classes in the result of an operator; a softmax states the axis as an attribute.
_CLASSES = {
    "Conv": 1,
    "ConvTranspose": 1,
    "Gemm": -1,
    "MatMul": -1,
    "LogSoftmax": -1,
    "Softmax": -1,
}

# Largest accepted distance of a sum of probabilities from one: the rounding of half precision.
_SUM_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class Logits:
    """The value that a loss reads in place of an output of probabilities."""

    output: str  # name of the output
    value: str  # name of the logits, whose softmax or sigmoid is the output
    how: str  # relation of the logits to the output, a phrase for messages
    # Nodes that compute the logits, to be added to the graph, in topological order.
    nodes: tuple[Node, ...] = ()
    # Element type and shape of the results of ``nodes`` and of ``constants``.
    facts: Mapping[str, Fact] = field(default_factory=dict)
    # Constants that the nodes read, by name.
    constants: Mapping[str, Array] = field(default_factory=dict)


def logits_before(
    graph: Graph, facts: Mapping[str, Fact], output: str, links: frozenset[str], class_axis: int
) -> Logits | None:
    """Return the operand of the operator that computes an output of probabilities.

    ``links`` are the operators that convert the logits of the loss to probabilities. The result is
    None if none of them computes the output. An operator that normalizes along another axis than
    ``class_axis`` raises ShapeError.
    """
    views: list[Node] = []
    node = graph.producers.get(output)
    while node is not None and not node.domain and node.op in RELAYS:
        views.append(node)
        node = graph.producers.get(node.inputs[0])
    if node is None or node.domain or node.op not in links:
        return None
    if node.op != "Sigmoid":
        _check_axis(node, views, facts, output, class_axis)
    value, nodes, new_facts = node.inputs[0], [], {}
    for view in reversed(views):
        name = f"{view.outputs[0]} before {node.op}"
        inputs = (value, *view.inputs[1:])
        nodes.append(replace(view, inputs=inputs, outputs=(name,), name=f"node of {name}"))
        new_facts[name] = facts[view.outputs[0]]
        value = name
    how = f"before {node.op} (node '{node.name}')"
    return Logits(output, value, how, tuple(nodes), new_facts)


def logits_of_probabilities(
    graph: Graph,
    facts: Mapping[str, Fact],
    loss: LossFunction,
    output: str,
    sample: Callable[[], Array],
) -> Logits | None:
    """Return logits for an output of probabilities, by the inverse of softmax or sigmoid.

    Any operators may compute the output. For a loss on softmax, the sample run must contain
    probabilities; ``sample`` returns the value of the output in it. For a loss on sigmoid, bounds
    of the output must prove that all entries are between 0 and 1. The result is None if the output
    may contain other numbers than probabilities.
    """
    if facts[output].dtype.kind != "f":
        return None
    if "Softmax" in loss.links and _sums_to_one(facts[output], sample, loss.class_axis):
        return _LogitsBuilder(output, facts[output]).logarithm()
    if "Sigmoid" in loss.links:
        low, high = bounds(graph, output)
        return _LogitsBuilder(output, facts[output]).log_odds() if low >= 0 and high <= 1 else None
    return None


def possible_probabilities(loss: LossFunction, sample: Callable[[], Array]) -> str:
    """Return a warning if an output that a loss reads as logits may contain probabilities.

    ``sample`` returns the value of the output in a sample run. The warning is a sentence without
    its subject, the output; it is empty if nothing indicates probabilities.
    """
    if "Sigmoid" not in loss.links:
        return ""
    value = sample()
    if value.dtype.kind != "f" or (value < 0).any() or (value > 1).any():
        return ""
    return (
        "is read as logits, but all its entries were between 0 and 1 in a sample run; if they are "
        "probabilities, put the loss on their logits"
    )


def find_class_axis(
    graph: Graph, facts: Mapping[str, Fact], output: str, links: frozenset[str]
) -> int:
    """Return the axis of the classes of an output; -1, the last axis, where nothing else is known.

    A softmax normalizes over the classes. Otherwise the channels of a convolution and the columns
    of a matrix product are the classes. Views such as ``Transpose`` move them. ``links`` are the
    operators that convert the logits of the loss to probabilities; only losses on softmax have
    classes.
    """
    rank = len(facts[output].shape)
    axis = _classes_of(graph, facts, output) if "Softmax" in links and rank > 2 else None
    return axis if axis and axis < rank - 1 else -1


def _classes_of(graph: Graph, facts: Mapping[str, Fact], value: str) -> int | None:
    """Return the axis of a value that holds softmax classes, channels or columns."""
    path: list[Node] = []
    node = graph.producers.get(value)
    while node is not None and not node.domain and node.op in _KEEP_CHANNELS | RELAYS:
        path.append(node)
        like = len(facts[node.outputs[0]].shape)
        same = [name for name in node.inputs if name and len(facts[name].shape) == like]
        node = graph.producers.get(node.inputs[0] if node.op in RELAYS else (*same, "")[0])
    if node is None or node.domain or node.op not in _CLASSES:
        return None
    shape = facts[node.outputs[0]].shape
    attribute = node.attributes.get("axis", -1) if node.op in _SOFTMAX else _CLASSES[node.op]
    assert isinstance(attribute, int)  # by the operator's definition
    axis: int | None = attribute % len(shape)
    for later in reversed(path):
        before, after = facts[later.inputs[0]].shape, facts[later.outputs[0]].shape
        if axis is not None and later.op in RELAYS:
            axis = _axis_after(later, facts, axis)
        elif axis is None or (len(before) == len(after) and before[axis] != after[axis]):
            return None
    return axis


class _LogitsBuilder(NodeBuilder):
    """Collects the nodes that compute logits from the probabilities ``output``.

    ``fact`` is that of the probabilities, and so of the result of every node.
    """

    def __init__(self, output: str, fact: Fact) -> None:
        super().__init__("")
        self._output, self._fact = output, fact

    def value_name(self, op: str, index: int) -> str:
        """Return an unused name for the result of the next node."""
        return f"{op} {len(self.nodes)} of {self._output}"

    def node_name(self, op: str, results: Sequence[str]) -> str:
        """Return the name of a node, derived from the name of its result."""
        return f"node of {results[0]}"

    def logarithm(self) -> Logits:
        """Return the logarithm of each probability."""
        # A probability that underflowed to zero would have no finite logarithm.
        smallest = np.finfo(self._fact.dtype).tiny
        p = self.op("Clip", self._output, self._number("least", smallest))
        return self._logits("Log", (p,), "logarithm", "no Softmax makes")

    def log_odds(self) -> Logits:
        """Return the logarithm of the odds of each probability."""
        # Floating-point numbers are sparser near one than near zero. 1 − p is exact near one.
        info = np.finfo(self._fact.dtype)
        least, most = self._number("least", info.tiny), self._number("most", 1 - info.epsneg)
        p = self.op("Clip", self._output, least, most)
        q = self.op("Sub", self._number("one", 1), p)
        logarithms = (self.op("Log", p), self.op("Log", q))
        return self._logits("Sub", logarithms, "logarithm of the odds", "no Sigmoid computes")

    def _logits(self, op: str, inputs: Sequence[str], label: str, why: str) -> Logits:
        """Add the last node; return its result with all nodes, constants and their facts."""
        value = self.op(op, *inputs, result=f"{label} of {self._output}")
        how = f"the {label}, because the output contains probabilities that {why}"
        facts = {node.outputs[0]: self._fact for node in self.nodes}
        facts |= {name: Fact(x.dtype, x.shape) for name, x in self.constants.items()}
        return Logits(self._output, value, how, tuple(self.nodes), facts, self.constants)

    def _number(self, label: str, value: float) -> str:
        """Add a constant in the element type of the probabilities; return its name."""
        array = np.asarray(value, self._fact.dtype)
        return self.constant(array, label=f"{label} of {self._output}")


def _sums_to_one(fact: Fact, sample: Callable[[], Array], class_axis: int) -> bool:
    """Return whether the entries of an output in a sample run are probabilities of classes.

    The entries must not be negative, and their sums over the classes must be one.
    """
    if len(fact.shape) < 2 or fact.shape[class_axis] < 2:
        return False
    value = sample()
    sums = value.sum(axis=class_axis, dtype=np.float64)
    return bool((value >= 0).all() and (np.abs(sums - 1) <= _SUM_TOLERANCE).all())


def _check_axis(
    node: Node, views: list[Node], facts: Mapping[str, Fact], output: str, class_axis: int
) -> None:
    """Raise a ShapeError if an operator does not normalize along the class axis."""
    attribute = node.attributes.get("axis", -1)
    assert isinstance(attribute, int)  # by the operator's definition
    axis: int | None = attribute % len(facts[node.inputs[0]].shape)
    for view in reversed(views):
        axis = _axis_after(view, facts, axis) if axis is not None else None
    rank = len(facts[output].shape)
    if axis is None:
        raise ShapeError(
            f"{node.op} (node '{node.name}') normalizes over entries that are not one axis of "
            f"'{output}'; put the loss on its operand '{node.inputs[0]}', or keep the output "
            f"with find_logits=False, an option of the loss."
        )
    if not -rank <= class_axis < rank or axis != class_axis % rank:
        raise ShapeError(
            f"class_axis={class_axis}, but {node.op} (node '{node.name}') makes '{output}' with "
            f"the classes on axis {axis}; pass class_axis={axis} "
            f"(--class-axis)."
        )


def _axis_after(view: Node, facts: Mapping[str, Fact], axis: int) -> int | None:
    """Return the axis of a view's result that equals an axis of its operand.

    The result is None if the view splits the axis or joins it with another axis.
    """
    before, after = facts[view.inputs[0]].shape, facts[view.outputs[0]].shape
    if view.op != "Transpose" and before == after:
        return axis
    if view.op == "Transpose":
        perm = view.attributes.get("perm", tuple(reversed(range(len(before)))))
        assert isinstance(perm, tuple)  # by the operator's definition
        return perm.index(axis)
    # Size and stride identify an axis of a contiguous array.
    size_and_stride = before[axis], prod(before[axis + 1 :])
    axes = [i for i, size in enumerate(after) if (size, prod(after[i + 1 :])) == size_and_stride]
    return axes[0] if len(axes) == 1 else None
