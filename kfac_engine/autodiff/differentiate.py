"""Reverse mode: from a forward graph to the graph of its vector–Jacobian product.

The sweep is short because the knowledge is in the table of ``rules``: walk the nodes backwards,
add up the cotangents of each value, hand them to the rule of the node that made it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import NoReturn

from kfac_engine._types import Array, DType
from kfac_engine.autodiff.builder import FLOAT_CODES, Builder
from kfac_engine.autodiff.leaves import KernelLeaf
from kfac_engine.autodiff.lowering import find_lowering
from kfac_engine.autodiff.lowering.pen import Pen
from kfac_engine.autodiff.rules import (
    QUANTIZERS,
    ZERO_DERIVATIVE,
    Cotangents,
    Gradients,
    Wanted,
    load_rules,
)
from kfac_engine.autodiff.rules.refused import REFUSED
from kfac_engine.errors import UnknownNameError, UnsupportedOpError
from kfac_engine.graph.structure import Fact, Graph, Node

# Operators that may cut off, hand on or put back a part without elements.
_CUTTERS = frozenset(
    {"Cast", "CastLike", "Concat", "Flatten", "Identity", "Pad", "Reshape", "Slice"}
    | {"Split", "Squeeze", "Transpose", "Unsqueeze"}
)


@dataclass(frozen=True)
class Backward:
    """The vector–Jacobian product of a graph as nodes.

    Attributes:
        nodes: Backward nodes in topological order.
        constants: Constants that ``nodes`` and ``forward_nodes`` read.
        forward_nodes: Nodes to append to the forward graph.
        saved: Forward values that ``nodes`` read: what the forward session must hand over.
        cotangents: Value that is differentiated to the name of its cotangent, an input of
            ``nodes``.
        gradients: Value asked for to the name of its gradient. Values that the differentiated
            ones do not depend on are absent: their gradient is zero.
        dtypes: Element type of each cotangent, by its name.
        leaves: Results of ``nodes`` that could be made elsewhere, and how.
    """

    nodes: tuple[Node, ...]
    constants: Mapping[str, Array]
    forward_nodes: tuple[Node, ...]
    saved: tuple[str, ...]
    cotangents: Mapping[str, str]
    gradients: Mapping[str, str]
    dtypes: Mapping[str, DType]
    leaves: Mapping[str, KernelLeaf] = field(default_factory=dict)


def differentiate(
    graph: Graph,
    facts: Mapping[str, Fact],
    outputs: Sequence[str],
    wrt: Sequence[str],
    *,
    independent: bool = False,
) -> Backward:
    """The graph that maps cotangents of ``outputs`` to gradients with respect to ``wrt``.

    Args:
        graph: Canonical forward graph.
        facts: Element type and shape of every forward value, from a sample run.
        outputs: Values to differentiate; any value of the graph.
        wrt: Values to differentiate with respect to: parameters, inputs or intermediate values.
            The gradient of an intermediate value is total: through all that depends on it.
        independent: Whether values of ``wrt`` count as variables of their own even where one is
            computed from another: gradients are then partial, with all other ``wrt`` held fixed.

    Returns:
        Backward nodes, and what to feed and fetch.

    Raises:
        UnknownNameError: A name is not a value of the graph.
        UnsupportedOpError: An operator between ``wrt`` and ``outputs`` has no derivative rule.
    """
    known = set(graph.values())
    for name in (*outputs, *wrt):
        if name not in known:
            raise UnknownNameError(f"'{name}' is not a value of model '{graph.name}'.")
    builder = Builder(graph, facts)
    stops = frozenset(wrt) if independent else frozenset[str]()
    active = _active(graph, facts, wrt)
    rounded = _rounded(graph, facts, active)
    sweep = _Sweep(graph, facts, builder, _active(graph, facts, (*wrt, *rounded)), rounded, stops)
    cotangents = {name: f"cotangent_{index}_of_{name}" for index, name in enumerate(outputs)}
    for name, cotangent in cotangents.items():
        sweep.add(name, cotangent)
    for node in reversed(graph.nodes):
        sweep.visit(node, wrt)
    gradients = {name: sweep.total(name) for name in wrt if sweep.reached(name)}
    saved = _saved(builder, gradients.values())
    return Backward(
        nodes=needed(builder.nodes, gradients.values()),
        constants=builder.constants,
        forward_nodes=needed(builder.forward_nodes, saved),
        saved=saved,
        cotangents=cotangents,
        gradients=gradients,
        dtypes={cotangent: facts[name].dtype for name, cotangent in cotangents.items()},
        leaves=builder.leaves,
    )


class _Sweep:
    """The cotangents found so far, by value."""

    def __init__(
        self,
        graph: Graph,
        facts: Mapping[str, Fact],
        builder: Builder,
        active: frozenset[str],
        rounded: Mapping[str, Node],
        stops: frozenset[str],
    ) -> None:
        self._graph, self._facts, self._builder = graph, facts, builder
        self._active, self._rounded, self._stops = active, rounded, stops
        self._rules = load_rules()
        self._parts: dict[str, list[str]] = {}

    def reached(self, value: str) -> bool:
        return value in self._parts

    def add(self, value: str, cotangent: str) -> None:
        self._parts.setdefault(value, []).append(cotangent)

    def total(self, value: str) -> str:
        """The sum of the parts; summed once, then remembered."""
        parts = self._parts[value]
        # Two at a time: ONNX Runtime's Sum of three takes 1.4 times as long as two of its Add.
        parts[:] = [reduce(lambda total, part: self._builder.op("Add", total, part), parts)]
        return parts[0]

    def visit(self, node: Node, wrt: Sequence[str]) -> None:
        """Carry the cotangents of a node's outputs to its active operands."""
        g = {
            i: self.total(name)
            for i, name in enumerate(node.outputs)
            if self.reached(name) and name not in self._stops
        }
        wanted = frozenset(i for i, name in enumerate(node.inputs) if name in self._active)
        captured = self._active.intersection(node.captures)
        if not g or not (wanted or captured) or node.qualified_op in ZERO_DERIVATIVE:
            return
        try:
            gradients = self._gradients(node, g, wanted)
        except UnsupportedOpError as refusal:
            culprit = _culprit(node, self._graph, wrt)
            raise UnsupportedOpError(
                f"{refusal} The node is on the path from '{culprit}' to the output: leave "
                f"'{culprit}' out of the trainable parameters to do without."
            ) from refusal
        for index, cotangent in gradients.items():
            if index in wanted:
                self.add(node.inputs[index], cotangent)

    def _gradients(self, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
        rounding = [self._rounded[name] for name in node.inputs if name in self._rounded]
        if rounding or _rounds(node, self._facts):
            raise _refused_quantizer(rounding[0] if rounding else node)
        if node.qualified_op not in self._rules or self._active.intersection(node.captures):
            self._refuse(node)
        for name in self._active.intersection((*node.inputs, *node.outputs)):
            empty = name in self._facts and 0 in self._facts[name].shape
            if empty and node.qualified_op not in _CUTTERS:
                raise UnsupportedOpError(
                    f"'{name}' at node '{node.name}' has no elements: its shape is "
                    f"{self._facts[name].shape}."
                )
        return self._rules[node.qualified_op](self._builder, node, g, wanted)

    def _refuse(self, node: Node) -> NoReturn:
        """Raise the reason why a node was not rewritten, or say that nobody knows how to."""
        lowering = find_lowering(node, self._graph)
        if lowering is not None:
            lowering(Pen(self._graph, self._facts, f"{node.name}/"), node)
        raise _unsupported(node, self._graph.opset)


def _active(graph: Graph, facts: Mapping[str, Fact], wrt: Iterable[str]) -> frozenset[str]:
    """Floating-point values that depend on ``wrt`` through differentiable operators."""
    active = set(wrt)
    for node in graph.nodes:
        if node.qualified_op in ZERO_DERIVATIVE:
            continue
        if active.intersection(node.inputs) or active.intersection(node.captures):
            active.update(
                name
                for name in node.outputs
                if name and (name not in facts or facts[name].dtype.name in FLOAT_CODES)
            )
    return frozenset(active)


def _rounded(graph: Graph, facts: Mapping[str, Fact], active: frozenset[str]) -> dict[str, Node]:
    """Values of a coarse type that stand for active ones, each with the node that rounded."""
    found: dict[str, Node] = {}
    for node in graph.nodes:
        sources = [found[name] for name in node.inputs if name in found]
        if _rounds(node, facts) and active.intersection(node.inputs):
            sources = [node]
        if sources and node.qualified_op not in ZERO_DERIVATIVE:
            coarse = (name for name in node.outputs if name and not _is_floating(facts, name))
            found.update(dict.fromkeys(coarse, sources[0]))
    return found


def _rounds(node: Node, facts: Mapping[str, Fact]) -> bool:
    """Whether a node quantizes; so does a cast to a type of eight or four bits."""
    if node.qualified_op not in _CASTS:
        return node.qualified_op in QUANTIZERS
    # A sample run shows no facts of types that NumPy lacks.
    fact = facts.get(node.outputs[0])
    return fact is None or (fact.dtype.kind == "V" and fact.dtype.name not in FLOAT_CODES)


_CASTS = frozenset({"Cast", "CastLike"})


def _is_floating(facts: Mapping[str, Fact], name: str) -> bool:
    return name in facts and facts[name].dtype.name in FLOAT_CODES


def needed(nodes: Sequence[Node], results: Iterable[str]) -> tuple[Node, ...]:
    """Those of ``nodes`` that ``results`` depend on, in their order."""
    wanted, kept = set(results), []
    for node in reversed(nodes):
        if wanted.intersection(node.outputs):
            wanted.update((*node.inputs, *node.captures))
            kept.append(node)
    return tuple(reversed(kept))


def _saved(builder: Builder, gradients: Iterable[str]) -> tuple[str, ...]:
    gradients = tuple(gradients)
    reads = dict.fromkeys(n for node in needed(builder.nodes, gradients) for n in node.inputs)
    return tuple(name for name in (*reads, *gradients) if builder.is_forward(name))


def _refused_quantizer(node: Node) -> UnsupportedOpError:
    return UnsupportedOpError(
        f"{node.qualified_op} at node '{node.name}' rounds to numbers of a few bits, so "
        f"that its derivative is zero or does not exist; use the model as it was before "
        f"quantization."
    )


def _unsupported(node: Node, opset: int) -> UnsupportedOpError:
    if node.qualified_op in REFUSED:
        return UnsupportedOpError(
            f"no derivative of {node.qualified_op} at node '{node.name}': "
            f"{REFUSED[node.qualified_op]}."
        )
    return UnsupportedOpError(
        f"no derivative rule for {node.qualified_op} (opset {opset}) at node '{node.name}'; "
        f"docs/operators.md shows how to add one."
    )


def _culprit(node: Node, graph: Graph, wrt: Sequence[str]) -> str:
    """A value of ``wrt`` that a node depends on."""
    upstream = set(node.inputs) | set(node.captures)
    for earlier in reversed(graph.nodes[: graph.nodes.index(node)]):
        if upstream.intersection(earlier.outputs):
            upstream.update(earlier.inputs)
    return next((name for name in wrt if name in upstream), "?")
