"""Values taken apart along an axis and put together again: what unrolling begins and ends with."""

from collections.abc import Sequence
from dataclasses import replace

from kfac_engine.autodiff.lowering.pen import Pen
from kfac_engine.graph.structure import Node

# A step of an LSTM becomes fifteen nodes and, with its derivative, fifty. ONNX Runtime takes some
# tenths of a millisecond for each when it builds a session, and longer the more there are.
MOST_STEPS = 1024


def taken_apart(pen: Pen, node: Node, value: str, axis: int) -> tuple[str, ...]:
    """The slices of a value along an axis, as many as the sample run shows.

    On a batch with another number of slices the runtime refuses to split, and names the node: the
    name says why.

    Args:
        pen: Writes the nodes.
        node: What is unrolled, for messages.
        value: Of the graph.
        axis: Its axis of steps; the slices do not have it.

    Returns:
        One name each.

    Raises:
        UnsupportedOpError: There are no steps, or too many to unroll.
    """
    sides = pen.facts[value].shape
    length = check_steps(pen, node, sides[axis])
    pieces = pen.multi("Split", [value, pen.constant([1] * length)], ("",) * length, axis=axis)
    label_last(pen, f"{node.op} was unrolled over {length} steps, the number in the sample inputs")
    at = pen.constant([axis])
    return tuple(pen.op("Squeeze", piece, at) for piece in pieces)


def stacked(pen: Pen, values: Sequence[str], axis: int, to: str = "") -> str:
    """Join values along a new axis; returns the name of the result."""
    at = pen.constant([axis])
    rows = [pen.op("Unsqueeze", value, at) for value in values]
    return pen.op("Concat", *rows, to=to, axis=axis)


def check_steps(pen: Pen, node: Node, length: int) -> int:
    """``length``, where that many steps can be unrolled.

    Args:
        pen: For the error.
        node: What is unrolled.
        length: Number of its steps.

    Returns:
        The same number.

    Raises:
        UnsupportedOpError: It is none, or too large.
    """
    if not 0 < length <= MOST_STEPS:
        raise pen.refuse(node, f"it has {length} steps, and from 1 to {MOST_STEPS} can be unrolled")
    return length


def label_last(pen: Pen, label: str) -> None:
    """Put words into the name of the last node, for the message when the runtime fails there."""
    last = pen.nodes[-1]
    pen.nodes[-1] = replace(last, name=f"{last.name} ({label})")
