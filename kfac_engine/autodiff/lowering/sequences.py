"""Replaces operators on sequences and optional values by operators on their tensors.

Constants and sizes must determine the order of the tensors. No node then reads the sequences.
"""

import numpy as np

from kfac_engine.autodiff.lowering import lowering
from kfac_engine.autodiff.lowering.builder import LoweringBuilder, check_steps, label_last, stacked
from kfac_engine.autodiff.lowering.known import KnownValues, gated
from kfac_engine.autodiff.lowering.loops import loop_constants, write_body
from kfac_engine.autodiff.rules.attributes import integer
from kfac_engine.graph.passes.bodies import body_of
from kfac_engine.graph.structure import Node

# -- content of a sequence -----------------------------------------------------------------------


def elements(b: LoweringBuilder, node: Node, sequence: str, known: KnownValues) -> tuple[str, ...]:
    """Return the names of the tensors in a sequence that ``node`` reads, in order.

    A content that depends on more than constants and sizes raises UnsupportedOpError. ``known``
    records the values that the content depends on.
    """
    changes: list[Node] = []
    maker = _maker(b, node, sequence)
    while maker.op in _CHANGES:
        changes.append(maker)
        maker = _maker(b, node, maker.inputs[0])
    if maker.op not in {"SequenceConstruct", "SequenceEmpty"}:
        raise b.refuse(
            node,
            f"its sequence is the result of {maker.op} node '{maker.name}', whose tensors are "
            f"unknown",
        )
    tensors = list(maker.inputs)
    for change in reversed(changes):
        _CHANGES[change.op](tensors, b, change, known)
    return tuple(tensors)


# Operators whose result has the tensors of their operand.
_RELAYS = frozenset({"Identity", "Optional", "OptionalGetElement"})


def _maker(b: LoweringBuilder, node: Node, value: str, relays: frozenset[str] = _RELAYS) -> Node:
    """Return the node that computes a sequence or optional value; skip Identity nodes."""
    while True:
        maker = b.graph.producers.get(value)
        if maker is None:
            raise b.refuse(node, f"no node of the graph computes its operand '{value}'")
        if maker.op not in relays or not maker.inputs:
            return maker
        value = maker.inputs[0]


def _insert(tensors: list[str], b: LoweringBuilder, node: Node, known: KnownValues) -> None:
    tensors.insert(_position(b, node, 2, known, len(tensors)), node.inputs[1])


def _erase(tensors: list[str], b: LoweringBuilder, node: Node, known: KnownValues) -> None:
    del tensors[_position(b, node, 1, known, len(tensors) - 1)]


_CHANGES = {"SequenceInsert": _insert, "SequenceErase": _erase}


def _position(b: LoweringBuilder, node: Node, index: int, known: KnownValues, last: int) -> int:
    """Return operand ``index`` as a position from 0 to ``last``; ``last`` if it is omitted."""
    name = node.operand(index)
    if not name:
        return last
    value = known.get(name)
    if value is None:
        raise b.refuse(node, f"its position '{name}' depends on the data")
    count = last if node.op == "SequenceInsert" else last + 1
    at = int(value.item())
    return at + count if at < 0 else at


# -- tensors out -----------------------------------------------------------------------------------


@lowering("SequenceAt")
def sequence_at(b: LoweringBuilder, node: Node) -> None:
    """Write the tensor at a position, which constants and sizes must determine."""
    known = KnownValues(b)
    tensors = elements(b, node, node.inputs[0], known)
    at = _position(b, node, 1, known, len(tensors) - 1)
    gated(b, node, tensors[at], known, node.outputs[0])


@lowering("ConcatFromSequence")
def concat_from_sequence(b: LoweringBuilder, node: Node) -> None:
    """Write a Concat of the tensors of the sequence, which constants and sizes must determine."""
    known = KnownValues(b)
    tensors = elements(b, node, node.inputs[0], known)
    result = node.outputs[0]
    axis = integer(node, "axis", 0)
    if integer(node, "new_axis", 0):
        joined = stacked(b, tensors, axis % len(b.facts[result].shape))
    else:
        joined = b.op("Concat", *tensors, axis=axis)
    gated(b, node, joined, known, result)


@lowering("SequenceLength")
def sequence_length(b: LoweringBuilder, node: Node) -> None:
    """Write the sequence's length as a constant; constants and sizes must determine it."""
    known = KnownValues(b)
    tensors = elements(b, node, node.inputs[0], known)
    gated(b, node, b.constant(len(tensors)), known, node.outputs[0])


@lowering("OptionalGetElement")
def optional_get_element(b: LoweringBuilder, node: Node) -> None:
    """Write the tensor in the optional value."""
    value = node.inputs[0]
    if value not in b.facts:
        maker = _maker(b, node, value, frozenset({"Identity"}))
        if maker.op != "Optional" or not maker.inputs:
            raise b.refuse(node, f"the tensor in its operand '{value}' is unknown")
        value = maker.inputs[0]
    b.op("Identity", value, result=node.outputs[0])


# -- sequences out ---------------------------------------------------------------------------------


@lowering("SplitToSequence")
def split_to_sequence(b: LoweringBuilder, node: Node) -> None:
    """Write a Split into as many parts as in the sample run."""
    x, split = (*node.inputs, "")[:2]
    axis = integer(node, "axis", 0)
    side = b.facts[x].shape[axis]
    known = KnownValues(b)
    each = known.get(split) if split else np.asarray(1)
    if each is None or known.checks:
        raise b.refuse(node, f"its parts '{split}' are not constant")
    if each.ndim:
        sizes = [int(size) for size in each]
    else:
        whole, rest = divmod(side, int(each))
        sizes = [int(each)] * whole + [rest] * bool(rest)
    count = check_steps(b, node, len(sizes))
    parts = b.split(x, sizes, axis)
    label_last(b, f"{node.op} has {count} parts of {side}, as in the sample inputs")
    if not split and not integer(node, "keepdims", 1):
        at = b.constant([axis])
        parts = tuple(b.op("Squeeze", part, at) for part in parts)
    b.op("SequenceConstruct", *parts, result=node.outputs[0])


@lowering("SequenceMap")
def sequence_map(b: LoweringBuilder, node: Node) -> None:
    """Write the body for each element; constants and sizes must determine their number."""
    known = KnownValues(b)
    body = body_of(node, "body", b.graph.opset)
    # Operands after the first may be tensors, which the body receives whole in each iteration.
    is_tensor = [name in b.facts for name in node.inputs]
    first = elements(b, node, node.inputs[0], known)
    columns = [
        (name,) * len(first) if whole else elements(b, node, name, known)
        for name, whole in zip(node.inputs, is_tensor, strict=True)
    ]
    if known.checks:
        raise b.refuse(node, "the tensors of its sequences depend on sizes")
    inner = loop_constants(b, body)
    rows = [
        write_body(b, body, {**inner, **dict(zip(body.inputs, row, strict=True))})
        for row in zip(*columns, strict=True)
    ]
    for index, result in enumerate(node.outputs):
        if result:
            b.op("SequenceConstruct", *(row[index] for row in rows), result=result)
