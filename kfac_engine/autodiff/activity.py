"""Determines which values have a derivative, and which rounding nodes remove it."""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kfac_engine.autodiff.rules import QUANTIZERS, ZERO_DERIVATIVE, load_rules
from kfac_engine.errors import UnsupportedOpError
from kfac_engine.graph.analysis.subgraph import dependents
from kfac_engine.graph.node_builder import FLOAT_CODES
from kfac_engine.graph.passes.bodies import operators_inside
from kfac_engine.graph.structure import ONLY_SHAPES, Fact, Graph, Node
from kfac_engine.printable import quoted

ZERO = "without a nonzero gradient"

_CASTS = frozenset({"Cast", "CastLike"})
# Integer types of rounded values; longer integers are indices and counts.
_COARSE = frozenset({"int8", "uint8"})

# Operators of which straight-through estimators consist, and the depth to which they are nested.
_SUMS = frozenset({"Add", "Sub", "Identity"})
_DEEPEST_SUM = 3


@dataclass(frozen=True)
class Activity:
    """The values that have a nonzero derivative with respect to a set of values."""

    # Floating-point values, and values that are computed from rounded values.
    active: frozenset[str]
    rounded: Mapping[str, Node]  # the rounding node of each rounded value of a coarse type

    def members(self, names: Iterable[str]) -> list[str]:
        """Return the members of ``active`` and ``rounded`` among ``names``."""
        return [name for name in names if name in self.active or name in self.rounded]


def activity(graph: Graph, facts: Mapping[str, Fact], wrt: Iterable[str]) -> Activity:
    """Return the names of the values that depend on ``wrt`` and have a derivative."""
    active, rounded = set(wrt), dict[str, Node]()
    for node in graph.nodes:
        reads = (*node.inputs, *node.captures)
        sources = [rounded[name] for name in reads if name in rounded]
        depends = bool(sources) or not active.isdisjoint(reads)
        if not depends or node.qualified_op in ZERO_DERIVATIVE:
            continue
        if not sources and rounds(node, facts):
            sources = [node]
        floats = {n for n in node.outputs if n in facts and facts[n].dtype.name in FLOAT_CODES}
        others = [name for name in node.outputs if name and name not in floats]
        active |= floats.union(name for name in others if name not in facts)
        if sources:
            rounded.update(dict.fromkeys(others, sources[0]))
    return Activity(frozenset(active), rounded)


def behind_quantizers(
    graph: Graph,
    facts: Mapping[str, Fact],
    outputs: Iterable[str],
    wrt: Sequence[str],
    stops: Container[str] = frozenset(),
) -> dict[str, Node]:
    """Return the values of ``wrt`` with at least one path to an output through rounding.

    Each name is mapped to the last rounding node on its path. Values in ``stops`` are independent
    variables: no path continues through them.
    """
    last = _smooth(graph, facts, outputs, wrt, stops)
    return {name: node for name in wrt if (node := last.get(name))}


def _smooth(
    graph: Graph,
    facts: Mapping[str, Fact],
    outputs: Iterable[str],
    wrt: Sequence[str],
    stops: Container[str] = frozenset(),
) -> dict[str, Node | None]:
    """Map each value on a path from ``wrt`` to an output to the last rounding node behind it."""
    reached = activity(graph, facts, wrt)

    def passes_on(node: Node, results: Sequence[str]) -> bool:
        depends = reached.members(name for name in results if name not in stops)
        return node.qualified_op not in ZERO_DERIVATIVE and bool(depends)

    last = _last_marked(graph, outputs, passes_on, lambda node: rounds(node, facts))
    return {name: last[name] for name in reached.members(last)}


def behind_jumps(
    graph: Graph, facts: Mapping[str, Fact], outputs: Iterable[str], wrt: Iterable[str]
) -> dict[str, Node]:
    """Return the values of ``wrt`` that reach an output through operators of derivative zero.

    The values of ``wrt`` have no gradient. Each name is mapped to the last node of derivative zero
    on its path. Values that do not affect the outputs, or only their shapes, are absent.
    """

    def passes_on(node: Node, _: Sequence[str]) -> bool:
        return node.qualified_op not in ONLY_SHAPES

    last = _last_marked(graph, outputs, passes_on, lambda node: _jumps(node, facts))
    return {name: node for name in wrt if (node := last.get(name))}


def _jumps(node: Node, facts: Mapping[str, Fact]) -> bool:
    """Return whether the derivative of a node is zero, for example of a cast to integers."""
    whole = node.outputs[0] in facts and facts[node.outputs[0]].dtype.kind in "iub"
    return node.qualified_op in ZERO_DERIVATIVE or (node.qualified_op in _CASTS and whole)


def _last_marked(
    graph: Graph,
    outputs: Iterable[str],
    passes_on: Callable[[Node, Sequence[str]], bool],
    marks: Callable[[Node], bool],
) -> dict[str, Node | None]:
    """Map each ancestor of the outputs to the last marked node on its path, or to None."""
    last: dict[str, Node | None] = dict.fromkeys(outputs)
    for node in reversed(graph.nodes):
        results = [name for name in node.outputs if name in last]
        if results and passes_on(node, results):
            marked = next((last[name] for name in results if last[name]), None)
            marked = marked or (node if marks(node) else None)
            for name in filter(None, (*node.inputs, *node.captures)):
                last[name] = last.get(name) or marked
    return last


def left_out(
    graph: Graph, facts: Mapping[str, Fact], outputs: Iterable[str], parameters: Sequence[str]
) -> dict[str, str]:
    """Return parameters whose derivative is zero or does not exist because of rounding.

    Each name is mapped to a reason that can follow "it is".
    """
    smooth = _smooth(graph, facts, outputs, parameters)
    zero = [name for name in parameters if name not in smooth]
    jumps = behind_jumps(graph, facts, outputs, zero)
    left = {name: no_slope(node) for name, node in jumps.items()}
    for name in parameters:
        if node := smooth.get(name):
            left[name] = f"before a quantizer, through which no gradient passes ({node.title})"
    return left


def straight_through(graph: Graph, facts: Mapping[str, Fact], wrt: Sequence[str]) -> list[str]:
    """Return a sentence for each straight-through estimator behind the values ``wrt``.

    An estimator such as ``h + (round(h) − h)`` stops the gradient of the bracket in its framework.
    A file does not stop it, so that the derivatives with respect to h cancel.
    """
    reached = activity(graph, facts, wrt).active
    jumps = (node for node in graph.nodes if _jumps(node, facts))
    behind = dependents(graph.nodes, (name for node in jumps for name in node.outputs))
    notes: dict[tuple[str, str], str] = {}
    for node in graph.nodes:
        if node.qualified_op not in _SUMS:
            continue
        signs: dict[str, int] = {}
        for name, sign in _terms(graph, node.outputs[0], 1, _DEEPEST_SUM)[1:]:
            signs[name] = signs.get(name, 0) + sign
        if behind.isdisjoint(signs):
            continue
        # Where h cancels, its own terms do, too.
        gone = [name for name, sign in signs.items() if not sign and name in reached]
        inner = {part for name in gone for part, _ in _terms(graph, name, 1, _DEEPEST_SUM)[1:]}
        for name in [name for name in gone if name not in inner]:
            smooth = activity(graph, facts, [name]).active
            flat = [other for other in signs if signs[other] and other not in smooth]
            for jump in behind_jumps(graph, facts, flat, [name]).values():
                notes.setdefault(
                    (name, jump.name),
                    f"no gradient passes {node.title}, a straight-through estimator around "
                    f"{jump.title}: the file does not stop the gradient of the difference, "
                    f"so that '{name}' has the derivative zero",
                )
    return list(notes.values())


def _terms(graph: Graph, name: str, sign: int, depth: int) -> list[tuple[str, int]]:
    """Return a value, and the operands of the nested sums that compute it, each with its sign."""
    terms, node = [(name, sign)], graph.producers.get(name)
    if node is not None and node.qualified_op in _SUMS and depth:
        for index, operand in enumerate(node.inputs):
            part = -sign if index and node.op == "Sub" else sign
            terms += _terms(graph, operand, part, depth - 1)
    return terms


def no_slope(jump: Node) -> str:
    """Explain that a parameter is not trained because ``jump`` has the derivative zero."""
    return f"{ZERO}, behind an operator with derivative zero ({jump.title})"


def zero_notes(jumps: Mapping[str, Node]) -> tuple[str, ...]:
    """Return one sentence for each parameter in the result of ``behind_jumps``."""
    return tuple(f"'{name}' is {no_slope(node)}" for name, node in jumps.items())


def notes_of(left: Mapping[str, str]) -> tuple[str, ...]:
    """Return one sentence for each reason of ``left_out``, with all its parameters."""
    alike: dict[str, list[str]] = {}
    for name, reason in left.items():
        alike.setdefault(reason.partition(" (")[0], []).append(name)
    return tuple(
        f"{quoted(names, 1)} {'is' if len(names) == 1 else 'are'} not trained: {left[names[0]]}"
        for names in alike.values()
    )


def nothing_to_train(model: str, outputs: Sequence[str], left: Mapping[str, str]) -> str:
    """Return the error message for outputs that depend on no trained parameter.

    ``left`` is the result of ``left_out``.
    """
    results = f"{'depends' if len(outputs) == 1 else 'depend'} on no trainable parameter"
    if not left:
        return f"{', '.join(outputs)} {results} of model '{model}'."
    return (
        f"{', '.join(outputs)} {results} of model '{model}' that has a gradient: "
        f"{'; '.join(notes_of(left))}. Use the model as it was before quantization."
    )


def refuse_rounding(blocked: Mapping[str, Node]) -> None:
    """Raise an UnsupportedOpError if ``behind_quantizers`` returned any values."""
    for node in blocked.values():
        alike = [name for name, rounding in blocked.items() if rounding is node]
        raise UnsupportedOpError(
            f"{node.qualified_op} at node '{node.name}' rounds to numbers of a few bits, so that "
            f"its derivative is zero or does not exist; use the model as it was before "
            f"quantization. {way_out(alike)}"
        )


def way_out(names: Sequence[str]) -> str:
    """Return the remedy for values on the path to a node, as the end of a message."""
    return (
        f"The node is on the path from {quoted(names, 1)} to the output: exclude "
        f"{'it' if len(names) == 1 else 'these'} with freeze=… or --freeze."
    )


def rounds(node: Node, facts: Mapping[str, Fact]) -> bool:
    """Return whether a node rounds real numbers to a few bits, so that it has no useful derivative.

    Such nodes are quantizers, casts to types of at most eight bits that NumPy does not have, nodes
    with a quantizer in a body, and nodes without a derivative rule that compute 8-bit integers.
    """
    known = [facts[name].dtype for name in node.outputs if name in facts]
    if node.qualified_op in QUANTIZERS:
        return True
    if node.qualified_op in _CASTS:
        # A sample run has no facts of types that NumPy does not have.
        return not known or (known[0].kind == "V" and known[0].name not in FLOAT_CODES)
    if node.qualified_op in load_rules():
        return False
    coarse = any(dtype.name in _COARSE for dtype in known)
    return coarse or not QUANTIZERS.isdisjoint(operators_inside(node))
