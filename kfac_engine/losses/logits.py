"""Where a loss reads a model that gives probabilities: at the logits before them.

Many files end in the operator that turns logits into probabilities, with some views behind it. The
losses are made for logits: what they read is then the operand of that operator, seen through the
same views, so that its shape, and that of the targets, is the output's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np

from kfac_engine._types import Array
from kfac_engine.errors import ShapeError
from kfac_engine.graph.moves import RELAYS
from kfac_engine.graph.structure import Fact, Graph, Node

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
        facts: Of the values that they make.
    """

    output: str
    value: str
    how: str
    nodes: tuple[Node, ...] = ()
    facts: Mapping[str, Fact] = field(default_factory=dict)


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
    facts: Mapping[str, Fact], output: str, sample: Array, class_axis: int
) -> Logits | None:
    """The logarithm of an output that holds probabilities, whatever makes them.

    The logarithms of probabilities are logits of the same probabilities.

    Args:
        facts: Element type and shape of every value.
        output: The output that a loss is put on.
        sample: Its value in a sample run.
        class_axis: Axis of the classes.

    Returns:
        The logits; None where the sample has negative entries or rows that do not sum to one.
    """
    if sample.ndim < 2 or sample.shape[class_axis] < 2 or sample.dtype.kind != "f":
        return None
    sums = sample.sum(axis=class_axis, dtype=np.float64)
    if (sample < 0).any() or (np.abs(sums - 1) > _SUM_TOLERANCE).any():
        return None
    name = f"logarithm of {output}"
    node = Node("Log", (output,), (name,), name=f"node of {name}")
    how = "the logarithm, for the output holds probabilities that no Softmax makes"
    return Logits(output, name, how, (node,), {name: facts[output]})


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
