"""Replaces the loops that exporters of PyTorch write for ``EmbeddingBag``.

Such a loop reads the entries of one bag in each iteration, and adds them, or takes their mean or
maximum. Its number of iterations is a number of bags, and the sizes of the bags are
data, so that it cannot be unrolled. The nodes in its place add all bags at once. An empty bag is a
row of zeros, as in PyTorch. With ``padding_idx``, a loop in the loop lists the entries of the bag
that are no padding, and only these entries count.

A loop is replaced if its body is understood: each value in it is a term, such as "the first entry
of this bag", and one term of an unknown form leaves the loop as it is.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from kfac_engine._types import Array
from kfac_engine.graph.analysis.subgraph import SubGraph
from kfac_engine.graph.node_builder import FLOAT_CODES
from kfac_engine.graph.passes.bodies import Body, body_of
from kfac_engine.graph.passes.decompose import DecompositionBuilder
from kfac_engine.graph.structure import Graph, Node

# A form and what it contains:
# ("row", k)       the number of this bag, plus k
# ("bags",)        the number of bags
# ("last row",)    the number of the last bag
# ("is last",)     whether this bag is the last one
# ("going",)       whether another bag follows
# ("offsets",)     the first entries of the bags, and the number of all entries
# ("ends",)        the same without the first one
# ("at", k)        the first entry of this bag (0), or of the next one (1)
# ("total",)       the number of all entries
# ("count",)       the number of entries of this bag
# ("is empty",)    whether it is zero;  ("has entries",)  whether it is not
# ("constant", a)  an array
# ("value", name)  a value outside the body, with an entry on each row
# ("bag", t)       the rows of this bag of the table t
# ("sum", t, k)    the result of a bag of t, also "mean" and "max"; k is whether it keeps its axis
# ("entry",)       a number of an entry of this bag, of a loop over them;  ("next entry",)  plus one
# ("entry follows",)     whether the next entry is in this bag, too
# ("id", name)           the id of the entry in a vector of ids;  ("is negative", name)  its sign
# ("from 0", name, n)    the same from 0 to n - 1, where an id of -1 is n - 1
# ("is padding", p)      whether this id is the padding, p = (name, n, id);  ("counts", p)  not
# ("listed",)            the entries listed so far;  ("one more",)  with this one
# ("listed if", p)       with this one if it is no padding p
# ("no padding", p)      the entries of this bag that are no padding;  ("size", p)  their number
# ("sequence",)    the results so far;  ("inserted", t)  the same with another one
# Tables are values, ("gather", weight, ids), ("times", t, t) and ("column", t). The table of a bag
# may be ("unpadded", t, p), without the rows of the padding.
Term: TypeAlias = tuple[Any, ...]

_UNKNOWN: Term = ("unknown",)
_REDUCTIONS = {"ReduceSum": "sum", "ReduceMean": "mean", "ReduceMax": "max"}
# Operators that do not change a number.
_SAME_NUMBER = frozenset({"Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
# Forms that are one number, whose shape does not matter.
_NUMBERS = {"row", "at", "entry", "count", "total", "bags", "last row", "constant"}


class _UnknownFormError(Exception):
    """A body is not a bag of entries."""


@dataclass(frozen=True, slots=True)
class _Bags:
    """What a loop computes: a reduction of the bags of a table, without ids of the padding."""

    kind: str
    table: Term
    offsets: str
    entries: str
    padding: tuple[int, ...] = ()


def without_bag_loops(graph: Graph) -> Graph:
    """Return a graph in which other nodes replace the loops over bags of entries."""
    replaced: dict[str, list[Node]] = {}
    constants: dict[str, Array] = {}
    for loop in graph.nodes:
        result = _result(graph, loop) if loop.qualified_op == "Loop" else None
        if result is None:
            continue
        try:
            bags = _Reading(graph, loop, stacks=result is loop).bags()
        except _UnknownFormError:
            continue
        b = DecompositionBuilder(replace(result, outputs=result.outputs[-1:]))
        _write(b, graph, bags)
        replaced[loop.name] = []
        replaced[result.name] = b.nodes
        for reader, _ in graph.consumers.get(b.node.outputs[0], ()):
            replaced[reader.name] = [_without_like(graph, reader)]
        constants |= b.constants
    if not replaced:
        return graph
    nodes = [new for node in graph.nodes for new in replaced.get(node.name, [node])]
    graph = replace(graph, nodes=tuple(nodes), constants={**graph.constants, **constants})
    # Nodes that the loops have read are not uses of their weights.
    return replace(graph, nodes=SubGraph(graph, graph.outputs).nodes)


def _without_like(graph: Graph, node: Node) -> Node:
    """Return a cast to a weight's type as a cast to this type, which is not a use of the weight.

    Other nodes are returned unchanged.
    """
    like = graph.constants.get(node.inputs[-1]) if node.op == "CastLike" else None
    code = None if like is None else FLOAT_CODES.get(like.dtype.name)
    if code is None:
        return node
    return replace(node, op="Cast", inputs=node.inputs[:1], attributes={"to": code})


def _result(graph: Graph, loop: Node) -> Node | None:
    """Return the node with the results of all iterations; None if more of the loop is read."""
    if len(loop.inputs) == 2 and len(loop.outputs) == 1:
        return loop
    place = _sequence(graph, loop)
    if place is None or len(loop.outputs) != 2 or graph.results.intersection(loop.outputs):
        return None
    readers, others = (graph.consumers.get(loop.outputs[k], ()) for k in (place, 1 - place))
    if others or len(readers) != 1:
        return None
    node = readers[0][0]
    settings = node.attributes.get("axis", 0), node.attributes.get("new_axis", 0)
    return node if node.op == "ConcatFromSequence" and settings == (0, 0) else None


def _sequence(graph: Graph, loop: Node) -> int | None:
    """Return which of two states of a loop begins as an empty sequence; None for neither."""
    makers = [graph.producers.get(name) for name in loop.inputs[2:]]
    empty = [k for k, node in enumerate(makers) if node is not None and node.op == "SequenceEmpty"]
    return empty[0] if len(makers) == 2 and len(empty) == 1 else None


class _Reading:
    """Reads a loop as bags of entries; ``_UnknownFormError`` is raised if it is something else.

    ``stacks`` is whether the loop stacks its results, in place of a sequence.
    """

    def __init__(self, graph: Graph, loop: Node, *, stacks: bool) -> None:
        self._graph, self._loop, self._stacks = graph, loop, stacks
        self._offsets, self._entries = self._found_offsets()

    def bags(self) -> _Bags:
        """Return the bags that the loop computes."""
        body = body_of(self._loop, "body", self._graph.opset)
        if self._stacks:
            trips = self._outer(self._loop.inputs[0])
            going, result = self._terms(body, [("row", 0), ("constant", np.array(True))])
            begins = _is_true(self._outer(self._loop.inputs[1]))
            self._require(trips == ("bags",) and begins and _is_true(going), "all bags")
        else:
            place = _sequence(self._graph, self._loop)
            assert place is not None, "_result has found it"
            row = 1 - place
            states: list[Term] = [("row", 0), ("sequence",)][:: -1 if row else 1]
            first = self._outer(self._loop.inputs[2 + row])
            begins = not self._loop.inputs[0] and self._begins(self._loop.inputs[1])
            self._require(begins and _number(first) == 0, "rows from 0")
            going, *after = self._terms(body, [("iteration",), ("condition",), *states])
            self._require(going == ("going",) and after[row] == ("row", 1), "the next row")
            self._require(after[place][0] == "inserted", "a result of each row")
            result = after[place][1]
        kind, *parts = result
        self._require(kind in _REDUCTIONS.values(), "a reduction of each bag")
        table, keeps = parts
        self._require(keeps != self._stacks, "a row for each bag")
        padding: tuple[int, ...] = ()
        if table[0] == "unpadded":
            _, table, (_, size, index) = table
            padding = (index, index - size)
        table = _expanded(self._graph, table)
        ids = [index for _, _, index in _terms_in(table, "gather")]
        self._require(("value", self._entries) in ids, "entries that are ids")
        return _Bags(kind, table, self._offsets, self._entries, padding)

    def _terms(self, body: Body, first: list[Term]) -> list[Term]:
        """Return the terms of the results of the loop's body, from the terms of its inputs."""
        return self._results(body, dict(zip(body.inputs, first, strict=True)), last=False)

    def _results(self, body: Body, known: dict[str, Term], last: bool) -> list[Term]:
        """Return the terms of the results of a body; ``last`` is whether the bag is the last."""
        for name, array in body.graph.constants.items():
            known[name] = ("constant", array)
        for node in body.graph.nodes:
            operands = [self._known(name, known) for name in node.inputs]
            place, term = 0, _UNKNOWN
            with suppress(_UnknownFormError):  # a result that depends on the term is unknown, too
                if node.op == "Loop":
                    place, term = self._unpadded(node, operands, known)
                elif node.op == "If":
                    term = self._branch(node, operands[0], known, last)
                elif node.op == "Shape":
                    term = self._shape(node)
                elif node.op == "Expand" and self._is_zeros(operands[0]):
                    term = operands[0]
                elif node.op in _TERMS:
                    term = _TERMS[node.op](node, operands, last)
            known |= dict.fromkeys(node.outputs, _UNKNOWN) | {node.outputs[place]: term}
        return [self._known(name, known) for name in body.graph.outputs]

    def _branch(self, node: Node, condition: Term, known: dict[str, Term], last: bool) -> Term:
        """Return the common term of two branches, for the last row and for all other rows."""
        if condition[0] == "constant":
            name = "then_branch" if _is_true(condition) else "else_branch"
            return self._results(body_of(node, name, self._graph.opset), dict(known), last)[0]
        then, otherwise = (
            self._results(body_of(node, name, self._graph.opset), dict(known), last or is_last)[0]
            for name, is_last in (
                ("then_branch", condition == ("is last",)),
                ("else_branch", False),
            )
        )
        if condition == ("is empty",) and self._is_zeros(then):
            return otherwise
        if condition == ("has entries",):
            return then
        if condition[0] == "is negative":
            name = condition[1]
            wraps = then[:2] == ("from 0", name) and otherwise == ("id", name)
            self._require(wraps, "an id from 0")
            return then
        if condition[0] == "counts":
            lists = (then, otherwise) == (("one more",), ("listed",))
            self._require(lists, "entries that are no padding")
            return ("listed if", condition[1])
        alike = then[0] not in ("constant", "unknown") and then == otherwise
        self._require(condition == ("is last",) and alike, "equal branches")
        return then

    def _unpadded(
        self, node: Node, operands: list[Term], known: dict[str, Term]
    ) -> tuple[int, Term]:
        """Return the entries of a bag that are no padding, of a loop that lists them.

        The first value is their place in the results of the loop.
        """
        begins = not node.inputs[0] and operands[1] == ("has entries",)
        states = operands[2:]
        self._require(begins and len(states) == 2 and ("at", 0) in states, "entries of a bag")
        place = 1 - states.index(("at", 0))
        empty = states[place][0] == "constant" and states[place][1].size == 0
        self._require(empty, "no entry at first")
        body = body_of(node, "body", self._graph.opset)
        first: list[Term] = [("entry",), ("listed",)][:: 1 if place else -1]
        inner = dict(zip(body.inputs, [("iteration",), ("condition",), *first], strict=True))
        going, *after = self._results(body, known | inner, last=False)
        follows = going == ("entry follows",) and after[1 - place] == ("next entry",)
        form, *parts = after[place]
        self._require(follows and form == "listed if", "all entries of a bag")
        name, size, index = parts[0]
        whole = _vector(self._graph, name) == self._entries
        self._require(whole and 0 <= index < size, "entries that are ids")
        return place, ("no padding", parts[0])

    def _shape(self, node: Node) -> Term:
        """Return the number of all entries, if they are the vector that has this shape."""
        whole = _vector(self._graph, node.inputs[0]) == self._entries
        self._require(whole and not node.attributes.get("start", 0), "all entries")
        return ("total",)

    def _is_zeros(self, term: Term) -> bool:
        """Return whether a term is a constant of zeros."""
        if term[0] == "constant":
            return term[1].dtype.kind == "f" and not term[1].any()
        array = self._graph.constants.get(term[1]) if term[0] == "value" else None
        return array is not None and not array.any()

    def _known(self, name: str, known: Mapping[str, Term]) -> Term:
        return known[name] if name in known else self._outer(name)

    def _begins(self, condition: str) -> bool:
        """Return whether the first condition of a loop is that there is a bag."""
        node = self._graph.producers.get(condition)
        if node is None or node.op != "Less" or self._outer(node.inputs[1]) != ("bags",):
            return False
        return _is_number(self._graph, node.inputs[0], 0)

    # -- values outside the body -------------------------------------------------------------------

    def _found_offsets(self) -> tuple[str, str]:
        """Return the offsets, and the entries whose number is joined to them."""
        for name in (*self._loop.captures, *self._loop.inputs):
            for value in self._origins(name):
                node = self._graph.producers.get(value)
                if node is not None and node.op == "Concat" and len(node.inputs) == 2:
                    counted = self._counted(node.inputs[1])
                    if counted:
                        return node.inputs[0], counted
        raise _UnknownFormError("offsets")

    def _origins(self, name: str) -> Iterator[str]:
        """Yield a value, and the values of which it is a copy or a slice."""
        yield name
        node = self._graph.producers.get(name)
        if node is not None and node.op in {"Identity", "Slice"}:
            yield from self._origins(node.inputs[0])

    def _outer(self, name: str) -> Term:
        """Return the term of a value outside the body."""
        if name in self._graph.constants:
            array = self._graph.constants[name]
            return ("constant", array) if array.dtype.kind != "f" else ("value", name)
        node = self._graph.producers.get(name)
        if node is None:
            return ("value", name)
        if node.op == "Identity":
            return self._outer(node.inputs[0])
        if node.op == "Concat" and node.inputs[0] == self._offsets:
            same = self._counted(node.inputs[-1]) == self._entries and len(node.inputs) == 2
            return ("offsets",) if same else ("value", name)
        if node.op == "Slice" and self._outer(node.inputs[0]) == ("offsets",):
            bounds = [self._graph.constants.get(n) for n in node.inputs[1:]]
            rest = [None if b is None else int(b.item()) for b in bounds]
            whole = rest[0] == 1 and (rest[1] or 0) > 2**31 and rest[2:] in ([], [0], [0, 1])
            return ("ends",) if whole else ("value", name)
        if node.op == "Size" and node.inputs[0] == self._offsets:
            return ("bags",)
        counted = self._counted(name)
        if counted == self._entries:
            return ("total",)
        if counted and self._outer(counted) == ("ends",):
            return ("bags",)
        return ("value", name)

    def _counted(self, name: str) -> str:
        """Return the vector whose length a value is; empty for other values."""
        node = self._graph.producers.get(self._graph.source(name, _SAME_NUMBER))
        if node is not None and node.op == "Gather" and _is_number(self._graph, node.inputs[1], 0):
            node = self._graph.producers.get(node.inputs[0])
        if node is not None and node.op == "Size":
            return (
                _vector(self._graph, node.inputs[0])
                if _rank(self._graph, node.inputs[0]) == 1
                else ""
            )
        if node is None or node.op != "Shape" or node.attributes.get("start", 0) != 0:
            return ""
        return _vector(self._graph, node.inputs[0])

    @staticmethod
    def _require(holds: bool, what: str) -> None:
        if not holds:
            raise _UnknownFormError(what)


# -- terms -----------------------------------------------------------------------------------------


def _is_true(term: Term) -> bool:
    return term[0] == "constant" and bool(term[1].all())


def _number(term: Term) -> int:
    """Return a constant whole number."""
    if term[0] != "constant" or term[1].size != 1:
        raise _UnknownFormError(term)
    return int(term[1].item())


def _same(node: Node, operands: list[Term], last: bool) -> Term:
    """Return a number in another shape or type, or a column of a bag."""
    term = operands[0]
    if term[0] == "bag" and node.op == "Unsqueeze" and _number(operands[1]) in (1, -1):
        return ("bag", ("column", term[1]))
    if node.op != "Identity" and term[0] not in _NUMBERS:
        raise _UnknownFormError(node.op)
    return term


def _slice(node: Node, operands: list[Term], last: bool) -> Term:
    """Return an offset, or the rows of a bag."""
    table, start, end, *rest = operands
    if [_number(term) for term in rest] not in ([], [0], [0, 1]):
        raise _UnknownFormError(node.op)
    if table == ("offsets",) and (start, end) in ((("row", k), ("row", k + 1)) for k in (0, 1)):
        return ("at", start[1])
    ends = end == ("at", 1) or (last and end == ("total",))
    if table[0] == "value" and start == ("at", 0) and ends:
        return ("bag", table)
    raise _UnknownFormError(node.op)


def _gather(node: Node, operands: list[Term], last: bool) -> Term:
    """Return an offset, an id, or the rows of a weight or of a table for a bag."""
    table, index = operands
    if node.attributes.get("axis", 0) == 0:
        if index == ("row", 0) and table in (("offsets",), ("ends",)):
            return ("at", int(table == ("ends",)))
        if index == ("row", 1) and table == ("offsets",):
            return ("at", 1)
        if index == ("entry",) and table[0] == "value":
            return ("id", table[1])
        if index[0] == "no padding" and table[0] == "value":
            return ("bag", ("unpadded", table, index[1]))
        if table[0] == "value" and index[0] == "bag":
            return ("bag", ("gather", table[1], index[1]))
    raise _UnknownFormError(node.op)


def _add(node: Node, operands: list[Term], last: bool) -> Term:
    """Return the term of a sum: a later row, the next entry, or a negative id counted from 0."""
    if operands[0][0] == "id":
        return ("from 0", operands[0][1], _number(operands[1]))
    if operands[0] == ("entry",) and _number(operands[1]) == 1:
        return ("next entry",)
    if operands[0][0] != "row":
        raise _UnknownFormError(node.op)
    return ("row", operands[0][1] + _number(operands[1]))


def _subtract(node: Node, operands: list[Term], last: bool) -> Term:
    """Return the number of the last row, or of the entries of a bag."""
    whole, less = operands
    if whole == ("bags",) and _number(less) == 1:
        return ("last row",)
    if less == ("at", 0) and (whole == ("at", 1) or (last and whole == ("total",))):
        return ("count",)
    raise _UnknownFormError(node.op)


def _compare(node: Node, operands: list[Term], last: bool) -> Term:
    """Return a property of the bag."""
    left, right = operands
    if node.op == "Equal" and left[0] == right[0] == "constant":
        return ("constant", left[1] == right[1])
    pairs = (left, right), (right, left)
    if node.op == "Equal" and (("row", 0), ("last row",)) in pairs:
        return ("is last",)
    if node.op == "Equal" and (("at", 0), ("at", 1)) in pairs:
        return ("is empty",)
    if node.op == "Greater" and left == ("count",) and _number(right) == 0:
        return ("has entries",)
    for pair, meaning in _ORDERS:
        if node.op == "Less" and (left, right) == pair:
            return meaning
    if node.op == "Less" and left[0] == "id" and _number(right) == 0:
        return ("is negative", left[1])
    if node.op == "Equal" and left[0] == "from 0":
        return ("is padding", (*left[1:], _number(right)))
    if node.op == "Equal" and left[0] == "size" and _number(right) == 0:
        return ("is empty",)
    raise _UnknownFormError(node.op)


# What it means that a term is less than another one.
_ORDERS: Sequence[tuple[tuple[Term, Term], Term]] = (
    ((("row", 1), ("bags",)), ("going",)),
    ((("at", 0), ("at", 1)), ("has entries",)),
    ((("next entry",), ("at", 1)), ("entry follows",)),
)


def _not(node: Node, operands: list[Term], last: bool) -> Term:
    """Return whether an entry counts."""
    if operands[0][0] != "is padding":
        raise _UnknownFormError(node.op)
    return ("counts", operands[0][1])


def _concat(node: Node, operands: list[Term], last: bool) -> Term:
    """Return the term of the list to which a loop over the entries of a bag appends an entry."""
    if operands != [("listed",), ("entry",)]:
        raise _UnknownFormError(node.op)
    return ("one more",)


def _size(node: Node, operands: list[Term], last: bool) -> Term:
    """Return the term of the length of such a list, which leaves out the padding."""
    if operands[0][0] != "no padding":
        raise _UnknownFormError(node.op)
    return ("size", operands[0][1])


def _reduce(node: Node, operands: list[Term], last: bool) -> Term:
    """Return the result of a bag."""
    bag, *axes = operands
    if bag[0] != "bag" or len(axes) != 1 or _number(axes[0]) != 0:
        raise _UnknownFormError(node.op)
    return (_REDUCTIONS[node.op], bag[1], bool(node.attributes.get("keepdims", 1)))


def _divide(node: Node, operands: list[Term], last: bool) -> Term:
    """Return the mean of a bag: its sum divided by the number of its entries."""
    if operands[0][0] != "sum" or operands[1] != ("count",):
        raise _UnknownFormError(node.op)
    return ("mean", *operands[0][1:])


def _multiply(node: Node, operands: list[Term], last: bool) -> Term:
    """Return the product of two tables in a bag."""
    if {term[0] for term in operands} != {"bag"}:
        raise _UnknownFormError(node.op)
    return ("bag", ("times", *(term[1] for term in operands)))


def _insert(node: Node, operands: list[Term], last: bool) -> Term:
    """Return the sequence with another result at its end."""
    if operands[0] != ("sequence",) or len(operands) > 2:
        raise _UnknownFormError(node.op)
    return ("inserted", operands[1])


_TERMS: Mapping[str, Callable[[Node, list[Term], bool], Term]] = {
    **dict.fromkeys(("Identity", "Reshape", "Unsqueeze", "Squeeze", "Cast", "CastLike"), _same),
    **dict.fromkeys(("Equal", "Greater", "Less"), _compare),
    **dict.fromkeys(_REDUCTIONS, _reduce),
    "Slice": _slice,
    "Gather": _gather,
    "Add": _add,
    "Sub": _subtract,
    "Div": _divide,
    "Mul": _multiply,
    "SequenceInsert": _insert,
    "Not": _not,
    "Concat": _concat,
    "Size": _size,
}


# -- nodes in the place of a loop ------------------------------------------------------------------


def _write(b: DecompositionBuilder, graph: Graph, bags: _Bags) -> None:
    """Write the reduction of the bags."""
    if _are_rows(graph, bags):
        _write_of_matrix(b, graph, bags)
        return
    rows = _written(b, bags.table, lambda name: name)
    counting = _counting(b, bags.entries, bags.padding)
    one, zero = b.constant([1]), b.constant([0])
    entries, count = b.op("Shape", bags.entries), b.op("Shape", bags.offsets)
    # Each offset opens a bag: the number of the bag of an entry is the number of offsets up to it.
    places = b.op("Expand", zero, b.op("Add", entries, one))
    opened = b.op("Expand", one, count)
    marks = b.op("ScatterElements", places, bags.offsets, opened, axis=0, reduction="add")
    numbers = b.op("CumSum", marks, b.constant(np.array(0)))
    numbers = b.op("Sub", b.op("Slice", numbers, zero, entries), one)
    owners = b.op("Unsqueeze", numbers, one)
    features = b.op("Shape", rows, start=1)
    shape = b.op("Concat", count, features, axis=0)

    def filled(value: float, shape: str) -> str:
        # An array of constants, unlike a constant, is never taken for a parameter.
        array = b.op("ConstantOfShape", shape, value=np.array([value], np.float32))
        return b.op("CastLike", array, rows)

    def added(values: str, result: str = "") -> str:
        zeros = filled(0, shape)
        return b.op("ScatterND", zeros, owners, values, reduction="add", result=result)

    result = b.node.outputs[0]
    counted = filled(1, b.op("Shape", rows))
    if bags.kind == "max":  # entries that equal the largest one share it
        lowest = filled(-np.inf, shape)
        largest = b.op("ScatterND", lowest, owners, _visible(b, rows, counting), reduction="max")
        equal = b.op("Equal", rows, b.op("Gather", largest, numbers, axis=0))
        counted = b.op("CastLike", equal, rows)
        rows = b.op("Mul", rows, counted)
    if counting:
        counts = b.op("CastLike", counting, rows)
        rows, counted = b.op("Mul", rows, counts), b.op("Mul", counted, counts)
    if bags.kind == "sum":
        added(rows, result)
        return
    b.op("Div", added(rows), b.op("Max", added(counted), filled(1, shape)), result=result)


def _counting(b: DecompositionBuilder, entries: str, padding: tuple[int, ...]) -> str:
    """Write which entries are no padding, with a last axis of size one; empty if all count."""
    if not padding:
        return ""
    equal = [b.op("Equal", entries, b.constant(np.array(index))) for index in padding]
    return b.op("Unsqueeze", b.op("Not", b.op("Or", *equal)), b.constant([-1]))


def _visible(b: DecompositionBuilder, rows: str, counting: str) -> str:
    """Write rows that are minus infinity where an entry does not count."""
    if not counting:
        return rows
    lowest = b.op("CastLike", b.constant(np.array(-np.inf, np.float32)), rows)
    return b.op("Where", counting, rows, lowest)


def _write_of_matrix(b: DecompositionBuilder, graph: Graph, bags: _Bags) -> None:
    """Write the reduction of bags that are the rows of a matrix."""
    rows = _written(b, bags.table, lambda name: _matrix(graph, name))
    counting = _counting(b, _matrix(graph, bags.entries), bags.padding)
    axis, result = b.constant([1]), b.node.outputs[0]
    op = {kind: op for op, kind in _REDUCTIONS.items()}[bags.kind]
    if not counting:
        b.op(op, rows, axis, keepdims=0, result=result)
        return
    counts = b.op("CastLike", counting, rows)
    one, zero = (b.op("CastLike", b.constant(np.array(x, np.float32)), rows) for x in (1, 0))
    if bags.kind == "max":
        largest = b.op(op, _visible(b, rows, counting), axis, keepdims=0)
        filled = b.op("Greater", b.op("ReduceMax", counts, axis, keepdims=0), zero)
        b.op("Where", filled, largest, zero, result=result)
        return
    total = "" if bags.kind == "mean" else result
    total = b.op("ReduceSum", b.op("Mul", rows, counts), axis, keepdims=0, result=total)
    if bags.kind == "mean":
        number = b.op("Max", b.op("ReduceSum", counts, axis, keepdims=0), one)
        b.op("Div", total, number, result=result)


def _expanded(graph: Graph, table: Term) -> Term:
    """Return a table with the nodes that compute it as terms."""
    form, *parts = table
    if form in ("times", "column"):
        return (form, *(_expanded(graph, part) for part in parts))
    node = graph.producers.get(parts[0]) if form == "value" else None
    if node is None:
        return table
    if node.op == "Gather" and node.attributes.get("axis", 0) == 0:
        return ("gather", node.inputs[0], ("value", _vector(graph, node.inputs[1])))
    if node.op == "Unsqueeze" and _is_number(graph, node.inputs[1], 1):
        return ("column", ("value", _vector(graph, node.inputs[0])))
    if node.op in {"Cast", "CastLike"}:
        inner = _expanded(graph, ("value", node.inputs[0]))
        weight = next((graph.constants.get(t[1]) for t in _terms_in(inner, "gather")), None)
        like = graph.constants.get(node.inputs[-1])
        wanted = FLOAT_CODES.get("" if weight is None else weight.dtype.name)
        keeps = node.attributes.get("to") == wanted if node.op == "Cast" else like is weight
        return inner if weight is not None and keeps else table
    if node.op == "Mul":
        factors = [name for name in node.inputs if not _is_ones(graph, name)]
        terms = [_expanded(graph, ("value", name)) for name in factors]
        return terms[0] if len(terms) == 1 else ("times", *terms)
    return table


def _written(b: DecompositionBuilder, table: Term, read: Callable[[str], str]) -> str:
    """Write a table; ``read`` returns the value to read in the place of a vector."""
    form, *parts = table
    if form == "value":
        return read(parts[0])
    if form == "gather":
        return b.op("Gather", parts[0], _written(b, parts[1], read), axis=0)
    if form == "column":
        return b.op("Unsqueeze", _written(b, parts[0], read), b.constant([-1]))
    return b.op("Mul", *(_written(b, part, read) for part in parts))


def _are_rows(graph: Graph, bags: _Bags) -> bool:
    """Return whether each bag has the entries of one row of a matrix."""
    ids, offsets = _matrix(graph, bags.entries), graph.producers.get(bags.offsets)
    if not ids or offsets is None or offsets.op != "Range":
        return False
    if any(not _matrix(graph, name) for _, name in _terms_in(bags.table, "value")):
        return False
    start, _, step = offsets.inputs
    if not _is_number(graph, start, 0):
        return False
    declared = next((entry.shape for entry in graph.inputs if entry.name == ids), None)
    known = _constant(graph, step)
    if known is not None:
        return declared is not None and declared[1:] == (int(known.item()),)
    node = graph.producers.get(graph.source(step, _SAME_NUMBER))
    if node is None:
        return False
    if node.op == "Gather" and _is_number(graph, node.inputs[1], 1):
        node = graph.producers.get(node.inputs[0])
        return node is not None and node.op == "Shape" and node.inputs[0] == ids
    bounds = node.attributes.get("start", 0), node.attributes.get("end", 0)
    return node.op == "Shape" and node.inputs[0] == ids and bounds == (1, 2)


def _terms_in(table: Term, form: str) -> Iterator[Term]:
    """Yield the terms of a form in a table."""
    if table[0] == form:
        yield table
    for part in table[1:]:
        if isinstance(part, tuple):
            yield from _terms_in(part, form)


def _flattened(graph: Graph, name: str) -> str:
    """Return the value that a value is a flat copy of; empty for other values."""
    node = graph.producers.get(name)
    if node is None or node.op != "Reshape":
        return ""
    shape = _constant(graph, node.inputs[1])
    return node.inputs[0] if shape is not None and shape.tolist() == [-1] else ""


def _rank(graph: Graph, name: str) -> int | None:
    """Return the number of axes of an input or of a flat copy; None if it is unknown."""
    if _flattened(graph, name):
        return 1
    shape = next((entry.shape for entry in graph.inputs if entry.name == name), None)
    return None if shape is None else len(shape)


def _vector(graph: Graph, name: str) -> str:
    """Return the first of several equal vectors."""
    while (before := _flattened(graph, name)) and _rank(graph, before) == 1:
        name = before
    return name


def _matrix(graph: Graph, name: str) -> str:
    """Return the matrix that a vector is a flat copy of; empty if there is none."""
    before = _flattened(graph, _vector(graph, name))
    return before if before and _rank(graph, before) == 2 else ""


def _constant(graph: Graph, name: str) -> Array | None:
    """Return the array of a constant, or of a copy of one; None for other values."""
    node = graph.producers.get(name)
    while node is not None and node.op in {"Cast", "Concat", "Identity"} and len(node.inputs) == 1:
        name = node.inputs[0]
        node = graph.producers.get(name)
    return graph.constants.get(name)


def _is_number(graph: Graph, name: str, number: int) -> bool:
    """Return whether a value is a constant with one entry, the number."""
    array = _constant(graph, name)
    return array is not None and array.size == 1 and bool(array.item() == number)


def _is_ones(graph: Graph, name: str) -> bool:
    """Return whether a value is one number 1 in any shape."""
    return _is_number(graph, graph.source(name, {"CastLike", "Expand", *_SAME_NUMBER}), 1)
