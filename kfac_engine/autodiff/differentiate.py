"""Converts a forward graph to the graph of its vector–Jacobian product, by reverse mode.

The sweep visits the nodes in reverse order. It sums the cotangents of each value and calls the
derivative rule of the node that computes the value, from the table of ``rules``.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

from kfac_engine._types import Array, DType
from kfac_engine.autodiff.activity import activity, behind_quantizers, refuse_rounding, way_out
from kfac_engine.autodiff.lowering import find_lowering
from kfac_engine.autodiff.lowering.builder import LoweringBuilder
from kfac_engine.autodiff.rules import (
    REFUSED,
    REFUSED_DOMAINS,
    ZERO_DERIVATIVE,
    Cotangents,
    Gradients,
    Wanted,
    load_rules,
)
from kfac_engine.autodiff.vjp_builder import KernelGradient, VjpBuilder
from kfac_engine.errors import UnknownNameError, UnsupportedOpError
from kfac_engine.graph.structure import RELAYS, Fact, Graph, Node

# Operators whose operands or results may be empty.
_CUTTERS = frozenset(
    {"Cast", "CastLike", "Concat", "Flatten", "Identity", "Pad", "Reshape", "Slice"}
    | {"Split", "Squeeze", "Transpose", "Unsqueeze"}
)


@dataclass(frozen=True)
class Backward:
    """The nodes that compute the vector–Jacobian product of a graph."""

    nodes: tuple[Node, ...]  # backward nodes in topological order
    constants: Mapping[str, Array]  # constants that ``nodes`` and ``forward_nodes`` read
    forward_nodes: tuple[Node, ...]  # nodes to append to the forward graph
    saved: tuple[str, ...]  # forward values that ``nodes`` read; the forward session returns them
    # Name of the cotangent of each differentiated value; an input of ``nodes``.
    cotangents: Mapping[str, str]
    # Name of the gradient of each variable. The gradient of an absent variable is zero, because the
    # differentiated values do not depend on it.
    gradients: Mapping[str, str]
    dtypes: Mapping[str, DType]  # element types of the cotangents, by name
    # Results of ``nodes`` that can be computed outside the graph, mapped to the computation.
    leaves: Mapping[str, KernelGradient] = field(default_factory=dict)


def differentiate(
    graph: Graph,
    facts: Mapping[str, Fact],
    outputs: Sequence[str],
    wrt: Sequence[str],
    *,
    independent: bool = False,
) -> Backward:
    """Return the backward graph from ``outputs``, which may be any values, to ``wrt``.

    The gradient of an intermediate value includes all paths to the outputs. If ``independent``, the
    values of ``wrt`` are independent variables even where one is computed from another, so that the
    gradients are partial derivatives. An operator between ``wrt`` and ``outputs`` without a
    derivative rule raises UnsupportedOpError.
    """
    known = set(graph.values())
    for name in (*outputs, *wrt):
        if name not in known:
            raise UnknownNameError(f"'{name}' is not a value of model '{graph.name}'.")
    builder = VjpBuilder(graph, facts)
    stops = frozenset(wrt) if independent else frozenset[str]()
    refuse_rounding(behind_quantizers(graph, facts, outputs, wrt, stops))
    sweep = _Sweep(graph, facts, builder, activity(graph, facts, wrt).active, stops)
    cotangents = {
        name: unused(f"cotangent_{index}_of_{name}", known) for index, name in enumerate(outputs)
    }
    for name, cotangent in cotangents.items():
        sweep.add(name, cotangent)
    for node in reversed(graph.nodes):
        sweep.visit(node, wrt)
    gradients = {name: sweep.total(name) for name in wrt if sweep.reached(name)}
    nodes = _rearranging_weights(builder, needed(builder.nodes, gradients.values()))
    reads = dict.fromkeys((*(name for node in nodes for name in node.inputs), *gradients.values()))
    saved = tuple(name for name in reads if builder.is_forward(name))
    return Backward(
        nodes=nodes,
        constants=builder.constants,
        forward_nodes=needed(builder.forward_nodes, saved),
        saved=saved,
        cotangents=cotangents,
        gradients=gradients,
        dtypes={cotangent: facts[name].dtype for name, cotangent in cotangents.items()},
        leaves=builder.leaves,
    )


def unused(name: str, names_in_use: Container[str]) -> str:
    """Return ``name``, with a number if it is in use."""
    index = 1
    while (free := name if index == 1 else f"{name}_{index}") in names_in_use:
        index += 1
    return free


class _Sweep:
    """The state of the reverse sweep: the cotangents of each value."""

    def __init__(
        self,
        graph: Graph,
        facts: Mapping[str, Fact],
        builder: VjpBuilder,
        active: frozenset[str],
        stops: frozenset[str],
    ) -> None:
        self._graph, self._facts, self._builder = graph, facts, builder
        self._active, self._stops = active, stops
        self._rules = load_rules()
        self._sums: dict[str, str] = {}
        self._products: dict[str, list[str]] = {}

    def reached(self, value: str) -> bool:
        return value in self._sums or value in self._products

    def add(self, value: str, cotangent: str) -> None:
        """Add a cotangent of a value at once; a later sum would need all cotangents in memory."""
        if cotangent in self._builder.row_products:
            self._products.setdefault(value, []).append(cotangent)
        elif value in self._sums:
            # A Sum of three values takes 1.4 times as long in ONNX Runtime as two Adds.
            self._sums[value] = self._builder.op("Add", self._sums[value], cotangent)
        else:
            self._sums[value] = cotangent

    def total(self, value: str) -> str:
        """Return the name of the total cotangent of a value, and add the nodes of the sum once."""
        products = self._products.pop(value, [])
        if products:
            cotangent = self._builder.sum_of_products(products)
            known = self._sums.get(value)
            self._sums[value] = self._builder.op("Add", known, cotangent) if known else cotangent
        return self._sums[value]

    def visit(self, node: Node, wrt: Sequence[str]) -> None:
        """Add the cotangents of the active operands of a node; its rule writes them."""
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
            raise UnsupportedOpError(f"{refusal} {way_out(_before(node, self._graph, wrt))}") from (
                refusal
            )
        for index, cotangent in gradients.items():
            if index in wanted:
                self.add(node.inputs[index], cotangent)

    def _gradients(self, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
        if node.qualified_op not in self._rules or self._active.intersection(node.captures):
            refuse(node, self._graph, self._facts)
        for name in self._active.intersection((*node.inputs, *node.outputs)):
            empty = name in self._facts and 0 in self._facts[name].shape
            if empty and node.qualified_op not in _CUTTERS:
                raise UnsupportedOpError(
                    f"'{name}' at node '{node.name}' has the shape {self._facts[name].shape} "
                    f"without entries; give it entries, or exclude the parameters before it."
                )
        return self._rules[node.qualified_op](self._builder, node, g, wanted)


def refuse(node: Node, graph: Graph, facts: Mapping[str, Fact]) -> NoReturn:
    """Raise the error of the lowering of a node, or the error for an unknown operator."""
    lowering = find_lowering(node, graph)
    if lowering is not None:
        b = LoweringBuilder(graph, facts, f"{node.name}/")
        lowering(b, b.read_results(node))
    raise _unsupported(node, graph.opset)


def needed(nodes: Sequence[Node], results: Iterable[str]) -> tuple[Node, ...]:
    """Return the nodes that ``results`` depend on, in their order."""
    wanted, selected = set(results), []
    for node in reversed(nodes):
        if wanted.intersection(node.outputs):
            wanted.update((*node.inputs, *node.captures))
            selected.append(node)
    return tuple(reversed(selected))


def _rearranging_weights(builder: VjpBuilder, nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Return backward nodes that rearrange weights anew instead of reading them rearranged.

    A rearranged weight that the forward pass returns is a copy, which is stored until the backward
    pass has read it.
    """
    constants, rearranged = builder.graph.constants, dict[str, Node]()
    for node in builder.graph.nodes:
        if node.op in RELAYS and all(
            name in constants or name in rearranged for name in node.inputs
        ):
            rearranged[node.outputs[0]] = node
    elsewhere = {name for node in nodes for name in node.captures}
    elsewhere.update(*(leaf.operands for leaf in builder.leaves.values()))
    read = {name for node in nodes for name in node.inputs if name in rearranged} - elsewhere
    views = needed(tuple(rearranged.values()), read)
    names = {node.outputs[0]: builder.value_name(node.op, 0) for node in views}
    anew = (
        Node(
            node.op,
            tuple(names.get(name, name) for name in node.inputs),
            (result := names[node.outputs[0]],),
            node.attributes,
            builder.node_name(node.op, [result]),
        )
        for node in views
    )
    rest = (
        replace(node, inputs=tuple(names[n] if n in read else n for n in node.inputs))
        for node in nodes
    )
    return (*anew, *rest) if views else tuple(nodes)


def _unsupported(node: Node, opset: int) -> UnsupportedOpError:
    reason = REFUSED.get(node.qualified_op) or REFUSED_DOMAINS.get(node.domain)
    if reason:
        return UnsupportedOpError(
            f"no derivative of {node.qualified_op} at node '{node.name}': {reason}."
        )
    return UnsupportedOpError(
        f"no derivative rule for {node.qualified_op} (opset {opset}) at node '{node.name}'; "
        f"docs/operators.md shows how to add one."
    )


def _before(node: Node, graph: Graph, wrt: Sequence[str]) -> list[str]:
    """Return the values of ``wrt`` that a node depends on."""
    upstream = set(node.inputs) | set(node.captures)
    for earlier in reversed(graph.nodes[: graph.nodes.index(node)]):
        if upstream.intersection(earlier.outputs):
            upstream.update((*earlier.inputs, *earlier.captures))
    return [name for name in wrt if name in upstream]
