"""Sequences and optional values, traced back to the tensors that were put into them.

That is possible where constants and sizes decide the order: nodes that take tensors out then read
the tensors themselves, and nobody reads the sequence any more.
"""

import numpy as np

from kfac_engine.autodiff.lowering import lowering
from kfac_engine.autodiff.lowering.bodies import constants_of, write_body
from kfac_engine.autodiff.lowering.known import KnownValues, gated
from kfac_engine.autodiff.lowering.pen import Pen
from kfac_engine.autodiff.lowering.steps import check_steps, label_last, stacked
from kfac_engine.autodiff.rules.attributes import integer
from kfac_engine.graph.passes.bodies import body_of
from kfac_engine.graph.structure import Node

# -- what lies in a sequence -----------------------------------------------------------------------


def elements(pen: Pen, node: Node, sequence: str, known: KnownValues) -> tuple[str, ...]:
    """The tensors in a sequence.

    Args:
        pen: For the graph, and for errors.
        node: Who reads the sequence.
        sequence: Its name.
        known: What constants and sizes decide; remembers what was asked for.

    Returns:
        Their names, in order.

    Raises:
        UnsupportedOpError: Something else than constants and sizes decides what lies in it.
    """
    changes: list[Node] = []
    maker = _maker(pen, node, sequence)
    while maker.op in _CHANGES:
        changes.append(maker)
        maker = _maker(pen, node, maker.inputs[0])
    if maker.op not in {"SequenceConstruct", "SequenceEmpty"}:
        raise pen.refuse(
            node,
            f"its sequence is made by {maker.op} node '{maker.name}', which cannot be followed",
        )
    found = list(maker.inputs)
    for change in reversed(changes):
        _CHANGES[change.op](found, pen, change, known)
    return tuple(found)


# An optional value that holds a sequence is followed like the sequence.
_RELAYS = frozenset({"Identity", "Optional", "OptionalGetElement"})


def _maker(pen: Pen, node: Node, value: str, relays: frozenset[str] = _RELAYS) -> Node:
    """The node that makes a sequence or optional value, behind those that hand it on."""
    while True:
        maker = pen.graph.producers.get(value)
        if maker is None:
            raise pen.refuse(node, f"nothing in the graph makes its operand '{value}'")
        if maker.op not in relays or not maker.inputs:
            return maker
        value = maker.inputs[0]


def _insert(found: list[str], pen: Pen, node: Node, known: KnownValues) -> None:
    found.insert(_position(pen, node, 2, known, len(found)), node.inputs[1])


def _erase(found: list[str], pen: Pen, node: Node, known: KnownValues) -> None:
    del found[_position(pen, node, 1, known, len(found) - 1)]


_CHANGES = {"SequenceInsert": _insert, "SequenceErase": _erase}


def _position(pen: Pen, node: Node, index: int, known: KnownValues, last: int) -> int:
    """Operand ``index`` as a position from 0 to ``last``, which it is where it is left out."""
    name = node.inputs[index] if len(node.inputs) > index else ""
    if not name:
        return last
    value = known.get(name)
    if value is None:
        raise pen.refuse(node, f"its position '{name}' depends on the data")
    count = last if node.op == "SequenceInsert" else last + 1
    at = int(value.item())
    return at + count if at < 0 else at


# -- tensors out -----------------------------------------------------------------------------------


@lowering("SequenceAt")
def sequence_at(pen: Pen, node: Node) -> None:
    """The tensor that lies there, where constants and sizes decide which one; else refused."""
    known = KnownValues(pen)
    found = elements(pen, node, node.inputs[0], known)
    at = _position(pen, node, 1, known, len(found) - 1)
    gated(pen, node, found[at], known, node.outputs[0])


@lowering("ConcatFromSequence")
def concat_from_sequence(pen: Pen, node: Node) -> None:
    """Concat, where constants and sizes decide what lies in the sequence; else refused."""
    known = KnownValues(pen)
    found = elements(pen, node, node.inputs[0], known)
    to = node.outputs[0]
    axis = integer(node, "axis", 0)
    if integer(node, "new_axis", 0):
        joined = stacked(pen, found, axis % len(pen.facts[to].shape))
    else:
        joined = pen.op("Concat", *found, axis=axis)
    gated(pen, node, joined, known, to)


@lowering("SequenceLength")
def sequence_length(pen: Pen, node: Node) -> None:
    """A constant, where constants and sizes decide what lies in the sequence; else refused."""
    known = KnownValues(pen)
    found = elements(pen, node, node.inputs[0], known)
    gated(pen, node, pen.constant(len(found)), known, node.outputs[0])


@lowering("OptionalGetElement")
def optional_get_element(pen: Pen, node: Node) -> None:
    """What was put into the optional value."""
    value = node.inputs[0]
    if value not in pen.facts:
        maker = _maker(pen, node, value, frozenset({"Identity"}))
        if maker.op != "Optional" or not maker.inputs:
            raise pen.refuse(node, f"its operand '{value}' cannot be followed")
        value = maker.inputs[0]
    pen.op("Identity", value, to=node.outputs[0])


# -- sequences out ---------------------------------------------------------------------------------


@lowering("SplitToSequence")
def split_to_sequence(pen: Pen, node: Node) -> None:
    """Split, into as many parts as in the sample run."""
    x, split = (*node.inputs, "")[:2]
    axis = integer(node, "axis", 0)
    side = pen.facts[x].shape[axis]
    known = KnownValues(pen)
    each = known.get(split) if split else np.asarray(1)
    if each is None or known.checks:
        raise pen.refuse(node, f"its parts '{split}' are not constant")
    if each.ndim:
        sizes = [int(size) for size in each]
    else:
        whole, rest = divmod(side, int(each))
        sizes = [int(each)] * whole + [rest] * bool(rest)
    count = check_steps(pen, node, len(sizes))
    parts = pen.multi("Split", [x, pen.constant(sizes)], ("",) * count, axis=axis)
    label_last(pen, f"{node.op} made {count} parts of {side}, as in the sample inputs")
    if not split and not integer(node, "keepdims", 1):
        at = pen.constant([axis])
        parts = tuple(pen.op("Squeeze", part, at) for part in parts)
    pen.op("SequenceConstruct", *parts, to=node.outputs[0])


@lowering("SequenceMap")
def sequence_map(pen: Pen, node: Node) -> None:
    """The body once an element, where constants and sizes decide how many there are."""
    known = KnownValues(pen)
    body = body_of(node, "body", pen.graph.opset)
    # Those after the first may be tensors, which the body is given whole each time.
    is_tensor = [name in pen.facts for name in node.inputs]
    first = elements(pen, node, node.inputs[0], known)
    columns = [
        (name,) * len(first) if whole else elements(pen, node, name, known)
        for name, whole in zip(node.inputs, is_tensor, strict=True)
    ]
    if known.checks:
        raise pen.refuse(node, "sizes decide what lies in its sequences")
    held = constants_of(pen, body)
    rows = [
        write_body(pen, body, {**held, **dict(zip(body.inputs, row, strict=True))})
        for row in zip(*columns, strict=True)
    ]
    for index, to in enumerate(node.outputs):
        if to:
            pen.op("SequenceConstruct", *(row[index] for row in rows), to=to)
