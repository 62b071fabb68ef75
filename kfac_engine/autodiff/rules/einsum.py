"""Einstein sums, whose gradients are Einstein sums of the cotangent and the other operands.

With y = Σ a·b over the letters that y does not have, the gradient of a is Σ g·b over the letters
that a does not have. Three cases need further nodes: a letter that only the operand has, along
which its gradient is constant; an axis of size one that is broadcast; and a letter twice in one
operand, for which only the diagonal has a gradient.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_letters

from kfac_engine.autodiff.rules import Cotangents, Gradients, Wanted, vjp_rule
from kfac_engine.autodiff.rules.attributes import text
from kfac_engine.autodiff.vjp_builder import VjpBuilder
from kfac_engine.graph.structure import Node

_DOTS = "..."


@dataclass(frozen=True, slots=True)
class _Factor:
    """A value and one letter for each of its axes."""

    value: str
    letters: str


@vjp_rule("Einsum")
def einsum(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Write an Einstein sum for each operand."""
    *terms, result = _terms(b, node)
    operands = [
        _narrowed(b, name, name, term) for name, term in zip(node.inputs, terms, strict=True)
    ]
    cotangent = _narrowed(b, g[0], node.outputs[0], result)
    return {
        i: _gradient(b, node.inputs[i], terms[i], [cotangent, *operands[:i], *operands[i + 1 :]])
        for i in wanted
    }


def _gradient(b: VjpBuilder, x: str, term: str, others: Sequence[_Factor]) -> str:
    """Write the gradient of the operand ``x``, whose letters in the equation are ``term``."""
    shape = b.sample_shape(x)
    known = {letter for factor in others for letter in factor.letters}
    known -= {letter for letter, size in zip(term, shape, strict=True) if size == 1}
    letters = [letter for letter in dict.fromkeys(term) if letter in known]
    factors = _in_order(others, letters)
    equation = f"{','.join(factor.letters for factor in factors)}->{''.join(letters)}"
    value = b.op("Einsum", *(factor.value for factor in factors), equation=equation)
    places = {term.index(letter) for letter in letters}
    if added := [axis for axis in range(len(term)) if axis not in places]:
        value = b.op("Unsqueeze", value, b.constant(added))
    diagonals = [(term.index(term[axis]), axis) for axis in added if shape[axis] != 1]
    twice = [(first, second) for first, second in diagonals if first != second]
    for first, second in twice:
        value = b.op("Mul", value, _diagonal(b, x, first, second))
    constant = {first for first, second in diagonals if first == second}
    if constant - {first for first, _ in twice}:
        value = b.op("Expand", value, b.shape(x))
    return value


def _in_order(factors: Sequence[_Factor], result: Sequence[str]) -> Sequence[_Factor]:
    """Return the factors, sorted so that ONNX Runtime need not transpose the product."""
    # Factors with the first result letter that not all factors have come first. The gradients of
    # the two Einstein sums of attention take 0.7 to 1.0 ms in this order, and 2.5 ms in the other
    # order.
    for letter in result:
        without = [letter not in factor.letters for factor in factors]
        if any(without):
            return [factors[i] for i in sorted(range(len(factors)), key=lambda i: without[i])]
    return factors


def _diagonal(b: VjpBuilder, x: str, first: int, second: int) -> str:
    """Write ones where two axes of ``x`` have equal indices, and zeros elsewhere."""
    size = b.forward("Gather", b.shape(x), b.constant(first))[0]
    line = b.forward("Range", b.constant(0), size, b.constant(1))[0]
    rank = b.rank(x)
    along = [
        b.forward("Unsqueeze", line, b.constant([other for other in range(rank) if other != axis]))
        for axis in (first, second)
    ]
    return b.cast_like(b.forward("Equal", along[0][0], along[1][0])[0], x)


def _narrowed(b: VjpBuilder, value: str, like: str, letters: str) -> _Factor:
    """Write ``value`` without the axes in which the forward value ``like`` has size one."""
    ones = [axis for axis, size in enumerate(b.sample_shape(like)) if size == 1]
    if not ones:
        return _Factor(value, letters)
    letters = "".join(letter for axis, letter in enumerate(letters) if axis not in ones)
    return _Factor(b.op("Squeeze", value, b.constant(ones)), letters)


def _terms(b: VjpBuilder, node: Node) -> tuple[str, ...]:
    """Return the letters of each operand and of the result, with letters for dots."""
    equation = text(node, "equation", "").replace(" ", "")
    left, arrow, result = equation.partition("->")
    terms = left.split(",")
    if not arrow:
        counts = Counter(left.replace(_DOTS, "").replace(",", ""))
        once = sorted(letter for letter, count in counts.items() if count == 1)
        result = (_DOTS if _DOTS in left else "") + "".join(once)
    free = [letter for letter in ascii_letters if letter not in equation]
    ranks = [b.rank(name) for name in (*node.inputs, node.outputs[0])]
    return tuple(
        _without_dots(term, rank, free) for term, rank in zip((*terms, result), ranks, strict=True)
    )


def _without_dots(term: str, rank: int, free: Sequence[str]) -> str:
    """Return a term with letters for dots; shorter operands align with the trailing axes."""
    dotted = rank - len(term.replace(_DOTS, ""))
    # Letters are assigned from the last axis, because operands share the last axes.
    return term.replace(_DOTS, "".join(reversed(free[:dotted])))
