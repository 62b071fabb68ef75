"""Splits values into steps along an axis, and stacks steps."""

from collections.abc import Sequence
from dataclasses import replace

from kfac_engine.autodiff.lowering.builder import LoweringBuilder
from kfac_engine.graph.structure import Node

# Largest number of unrolled steps. A step of an LSTM becomes fifteen nodes, or fifty with its
# derivative. ONNX Runtime takes a few tenths of a millisecond for each node when it builds a
# session, and longer for larger graphs.
MOST_STEPS = 1024


def split_steps(b: LoweringBuilder, node: Node, value: str, axis: int) -> tuple[str, ...]:
    """Write the slices of a value along an axis, as many as in the sample run.

    For a batch with another number of slices, the Split node fails, and its name gives the reason.

    Args:
        b: Receives the nodes.
        node: The unrolled node, for messages.
        value: Name of a value of the graph.
        axis: Axis of the steps; the slices do not have it.

    Returns:
        Names of the slices.

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
    """Write values stacked along a new axis; return the name of the result."""
    at = b.constant([axis])
    rows = [b.op("Unsqueeze", value, at) for value in values]
    return b.op("Concat", *rows, result=result, axis=axis)


def check_steps(b: LoweringBuilder, node: Node, length: int) -> int:
    """Return a number of steps if it can be unrolled.

    Args:
        b: Builder, for the error.
        node: The unrolled node.
        length: Number of steps.

    Returns:
        The same number.

    Raises:
        UnsupportedOpError: The number is zero or too large.
    """
    if not 0 < length <= MOST_STEPS:
        raise b.refuse(
            node, f"it has {length} steps, but only 1 to {MOST_STEPS} steps can be unrolled"
        )
    return length


def label_last(b: LoweringBuilder, label: str) -> None:
    """Append ``label`` to the name of the last node, which messages of ONNX Runtime show."""
    last = b.nodes[-1]
    b.nodes[-1] = replace(last, name=f"{last.name} ({label})")
