"""Values taken apart along an axis and put together again: what unrolling begins and ends with."""

from collections.abc import Sequence
from dataclasses import replace

from kfac_engine.autodiff.lowering.builder import LoweringBuilder
from kfac_engine.graph.structure import Node

# A step of an LSTM becomes fifteen nodes and, with its derivative, fifty. ONNX Runtime takes some
# tenths of a millisecond for each when it builds a session, and longer the more there are.
MOST_STEPS = 1024


def taken_apart(b: LoweringBuilder, node: Node, value: str, axis: int) -> tuple[str, ...]:
    """The slices of a value along an axis, as many as the sample run shows.

    On a batch with another number of slices the runtime refuses to split, and names the node: the
    name says why.

    Args:
        b: Writes the nodes.
        node: What is unrolled, for messages.
        value: Of the graph.
        axis: Its axis of steps; the slices do not have it.

    Returns:
        One name each.

    Raises:
        UnsupportedOpError: There are no steps, or too many to unroll.
    """
    shape = b.facts[value].shape
    length = check_steps(b, node, shape[axis])
    pieces = b.multi("Split", [value, b.constant([1] * length)], ("",) * length, axis=axis)
    label_last(b, f"{node.op} was unrolled over {length} steps, the number in the sample inputs")
    at = b.constant([axis])
    return tuple(b.op("Squeeze", piece, at) for piece in pieces)


def stacked(b: LoweringBuilder, values: Sequence[str], axis: int, result: str = "") -> str:
    """Join values along a new axis; returns the name of the result."""
    at = b.constant([axis])
    rows = [b.op("Unsqueeze", value, at) for value in values]
    return b.op("Concat", *rows, result=result, axis=axis)


def check_steps(b: LoweringBuilder, node: Node, length: int) -> int:
    """``length``, where that many steps can be unrolled.

    Args:
        b: For the error.
        node: What is unrolled.
        length: Number of its steps.

    Returns:
        The same number.

    Raises:
        UnsupportedOpError: It is none, or too large.
    """
    if not 0 < length <= MOST_STEPS:
        raise b.refuse(node, f"it has {length} steps, and from 1 to {MOST_STEPS} can be unrolled")
    return length


def label_last(b: LoweringBuilder, label: str) -> None:
    """Put words into the name of the last node, for the message when the runtime fails there."""
    last = b.nodes[-1]
    b.nodes[-1] = replace(last, name=f"{last.name} ({label})")
