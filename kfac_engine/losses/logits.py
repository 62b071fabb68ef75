"""Where a loss reads a model that gives probabilities: at the logits before them.

Many files end in the operator that turns logits into probabilities, with some views behind it. The
losses are made for logits: what they read is then the operand of that operator, seen through the
same views, so that its shape, and that of the targets, is the output's.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np

from kfac_engine._types import Array
from kfac_engine.errors import ShapeError
from kfac_engine.graph.analysis.interval_bounds import bounds
from kfac_engine.graph.analysis.rearrangements import RELAYS
from kfac_engine.graph.structure import Fact, Graph, Node
from kfac_engine.losses.base import LossFunction

# Operators that leave examples and channels on the first two axes where these keep their length.
_KEEP_CHANNELS = frozenset(
    {"Add", "AveragePool", "Concat", "Identity", "Mul", "Relu", "Reshape", "Resize", "Sigmoid"}
)

# How far sums of probabilities may be off one: rounding in half precision.
_SUM_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class Logits:
    """What a loss reads in place of an output.

    Attributes:
        output: The output.
        value: What is read: its softmax or sigmoid is the output.
        how: Why that is, in words.
        nodes: To be added to the graph, in order.
        facts: Of the values that they make, and of ``constants``.
        constants: That the nodes read.
    """

    output: str
    value: str
    how: str
    nodes: tuple[Node, ...] = ()
    facts: Mapping[str, Fact] = field(default_factory=dict)
    constants: Mapping[str, Array] = field(default_factory=dict)


def logits_before(
    graph: Graph, facts: Mapping[str, Fact], output: str, links: frozenset[str], class_axis: int
) -> Logits | None:
    """The logits that an output of probabilities is made of.

    Args:
        graph: The model.
        facts: Element type and shape of every value.
        output: The output that a loss is put on.
        links: Operators that make the loss's probabilities of logits.
        class_axis: Axis of the classes in the output.

    Returns:
        The logits; None where no such operator makes the output.

    Raises:
        ShapeError: The operator runs along another axis than the classes.
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
    value, nodes, known = node.inputs[0], [], {}
    for view in reversed(views):
        name = f"{view.outputs[0]} before {node.op}"
        inputs = (value, *view.inputs[1:])
        nodes.append(replace(view, inputs=inputs, outputs=(name,), name=f"node of {name}"))
        known[name] = facts[view.outputs[0]]
        value = name
    return Logits(output, value, f"before {node.op} (node '{node.name}')", tuple(nodes), known)


def logits_of_probabilities(
    graph: Graph,
    facts: Mapping[str, Fact],
    loss: LossFunction,
    output: str,
    sample: Callable[[], Array],
) -> Logits | None:
    """Logits of the probabilities that an output holds, for any operators that compute them.

    Args:
        graph: The model.
        facts: Element type and shape of every value.
        loss: Its ``links`` say how it makes probabilities of logits.
        output: The output that it is put on.
        sample: Gives the value of the output in a sample run.

    Returns:
        The logits; None where the output is not known to hold probabilities.
    """
    if facts[output].dtype.kind != "f":
        return None
    if "Softmax" in loss.links and _sums_to_one(facts[output], sample, loss.class_axis):
        return _Writer(output, facts[output]).logarithm()
    if "Sigmoid" in loss.links:
        low, high = bounds(graph, output)
        return _Writer(output, facts[output]).log_odds() if low >= 0 and high <= 1 else None
    return None


def possible_probabilities(loss: LossFunction, sample: Callable[[], Array]) -> str:
    """The reason why an output taken for logits may hold probabilities; empty if there is none.

    Args:
        loss: Its ``links`` say how it makes probabilities of logits.
        sample: Gives the value of the output in a sample run.

    Returns:
        A sentence without its subject.
    """
    if "Sigmoid" not in loss.links:
        return ""
    value = sample()
    if value.dtype.kind != "f" or (value < 0).any() or (value > 1).any():
        return ""
    return (
        "is taken for logits, though all its entries were in 0 to 1 in a sample run; if it holds "
        "probabilities, put the loss on the logits that they are computed from"
    )


def channels_elsewhere(
    graph: Graph, facts: Mapping[str, Fact], loss: LossFunction, output: str
) -> str:
    """The reason why the classes may lie on another axis; empty if there is none.

    Args:
        graph: The model.
        facts: Element type and shape of every value.
        loss: Its class axis is asked about, where classes exclude each other.
        output: The output that it is put on.

    Returns:
        A sentence without its subject.
    """
    shape = facts[output].shape
    if "Softmax" not in loss.links or len(shape) < 3 or loss.class_axis % len(shape) == 1:
        return ""
    node = graph.producers.get(output)
    while node is not None and not node.domain and node.op in _KEEP_CHANNELS:
        node = graph.producers.get(node.inputs[0])
        if node is not None and facts[node.outputs[0]].shape[:2] != shape[:2]:
            return ""
    if node is None or node.domain or node.op not in ("Conv", "ConvTranspose"):
        return ""
    axis = loss.class_axis % len(shape)
    return (
        f"is taken to have its {shape[axis]} classes on axis {axis}, but {node.op} (node "
        f"'{node.name}') makes it with {shape[1]} channels on axis 1; if those are the classes, "
        f"give class_axis=1 (--class-axis 1)"
    )


class _Writer:
    """Writes the nodes that make logits of probabilities."""

    def __init__(self, output: str, fact: Fact) -> None:
        self._output, self._fact = output, fact
        self._nodes: list[Node] = []
        self._facts: dict[str, Fact] = {}
        self._constants: dict[str, Array] = {}

    def logarithm(self) -> Logits:
        # A probability that underflowed to zero would have no finite logarithm.
        smallest = np.finfo(self._fact.dtype).tiny
        p = self._op("Clip", self._output, self._number("least", smallest))
        return self._logits("Log", [p], "logarithm", "no Softmax makes")

    def log_odds(self) -> Logits:
        # Floating-point numbers are sparser near one than near zero. 1 − p is exact near one.
        info = np.finfo(self._fact.dtype)
        least, most = self._number("least", info.tiny), self._number("most", 1 - info.epsneg)
        p = self._op("Clip", self._output, least, most)
        q = self._op("Sub", self._number("one", 1), p)
        logs = [self._op("Log", p), self._op("Log", q)]
        return self._logits("Sub", logs, "logarithm of the odds", "no Sigmoid makes")

    def _logits(self, op: str, inputs: Sequence[str], what: str, why: str) -> Logits:
        value = self._op(op, *inputs, to=f"{what} of {self._output}")
        how = f"the {what}, for the output holds probabilities that {why}"
        return Logits(self._output, value, how, tuple(self._nodes), self._facts, self._constants)

    def _op(self, op: str, *inputs: str, to: str = "") -> str:
        name = to or f"{op} {len(self._nodes)} of {self._output}"
        self._nodes.append(Node(op, inputs, (name,), name=f"node of {name}"))
        self._facts[name] = self._fact
        return name

    def _number(self, what: str, value: float) -> str:
        name = f"{what} of {self._output}"
        self._constants[name] = array = np.asarray(value, self._fact.dtype)
        self._facts[name] = Fact(array.dtype, array.shape)
        return name


def _sums_to_one(fact: Fact, sample: Callable[[], Array], class_axis: int) -> bool:
    """Whether an output has no negative entry and rows that sum to one in a sample run."""
    if len(fact.shape) < 2 or fact.shape[class_axis] < 2:
        return False
    value = sample()
    sums = value.sum(axis=class_axis, dtype=np.float64)
    return bool((value >= 0).all() and (np.abs(sums - 1) <= _SUM_TOLERANCE).all())


def _check_axis(
    node: Node, views: list[Node], facts: Mapping[str, Fact], output: str, class_axis: int
) -> None:
    """Refuse an operator along another axis than that of the classes."""
    given = node.attributes.get("axis", -1)
    assert isinstance(given, int)  # by the operator's definition
    axis: int | None = given % len(facts[node.inputs[0]].shape)
    for view in reversed(views):
        axis = _seen_through(view, facts, axis) if axis is not None else None
    rank = len(facts[output].shape)
    if axis is None:
        raise ShapeError(
            f"{node.op} (node '{node.name}') runs over what is no single axis of '{output}'; put "
            f"the loss on its operand '{node.inputs[0]}', or use the output as it is with "
            f"find_logits=False."
        )
    if not -rank <= class_axis < rank or axis != class_axis % rank:
        raise ShapeError(
            f"class_axis={class_axis}, but {node.op} (node '{node.name}') makes '{output}' with "
            f"the classes on axis {axis}; give class_axis={axis}."
        )


def _seen_through(view: Node, facts: Mapping[str, Fact], axis: int) -> int | None:
    """Where an axis of a view's operand lies in its result; None where it is split or joined."""
    before, after = facts[view.inputs[0]].shape, facts[view.outputs[0]].shape
    if view.op == "Transpose":
        perm = view.attributes.get("perm", tuple(reversed(range(len(before)))))
        assert isinstance(perm, tuple)  # by the operator's definition
        return perm.index(axis)
    place = before[axis], prod(before[axis + 1 :])
    fits = [i for i, side in enumerate(after) if (side, prod(after[i + 1 :])) == place]
    return fits[0] if len(fits) == 1 else None
