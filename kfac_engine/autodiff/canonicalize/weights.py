"""Weights on their way to the data: constant scales moved over to the data, equal steps merged."""

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace

from kfac_engine._types import Array
from kfac_engine.graph.analysis.rearrangements import MOVES
from kfac_engine.graph.analysis.subgraph import of_data
from kfac_engine.graph.structure import Fact, Graph, Node

# Operators linear in the data and in a weight: the index of the one to that of the other.
_PRODUCTS: Mapping[str, Mapping[int, int]] = {
    "Conv": {1: 0},
    "ConvTranspose": {1: 0},
    "Einsum": {0: 1, 1: 0},
    "Gemm": {0: 1, 1: 0},
    "MatMul": {0: 1, 1: 0},
}

SCALINGS = frozenset({"Mul", "Div"})


def moved(graph: Graph, parameters: Iterable[str]) -> frozenset[str]:
    """Parameters, and values that hold entries of one in another order."""
    values = set(parameters)
    for node in graph.nodes:
        if _moves_one_of(values, node):
            values.update(node.outputs)
    return frozenset(values - {""})


def _moves_one_of(weights: Set[str], node: Node) -> bool:
    """Whether a node moves the entries of weights about."""
    if node.domain:
        return False
    if node.op == "Concat":
        return all(name in weights for name in node.inputs)
    return node.op in MOVES and node.inputs[0] in weights


def merged(graph: Graph, parameters: Iterable[str]) -> Graph:
    """The same values; of nodes that move the entries of a weight about alike one is read.

    The result of an ``Identity`` of a weight is the weight.

    Args:
        graph: Canonical graph.
        parameters: Names of the weights.

    Returns:
        The graph; the given one where nothing was written twice.
    """
    weights = moved(graph, parameters)
    captured = {name for node in graph.nodes for name in node.captures}
    fixed = captured.union(graph.outputs)
    names: dict[str, str] = {}
    first: dict[object, Node] = {}
    nodes = []
    for old in graph.nodes:
        node = replace(old, inputs=tuple(names.get(name, name) for name in old.inputs))
        if _moves_one_of(weights, node):
            same = first.setdefault(_content(node, graph.constants), node)
            if node.op == "Identity":
                names[node.outputs[0]] = node.inputs[0]
            elif fixed.isdisjoint(node.outputs) and same is not node:
                names |= zip(node.outputs, same.outputs, strict=True)
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes)) if names else graph


def _content(node: Node, constants: Mapping[str, Array]) -> object:
    """What tells a node from others but its names; constants count by value."""
    operands = tuple(
        (array.dtype.name, array.shape, array.tobytes())
        if (array := constants.get(name)) is not None
        else name
        for name in node.inputs[1:]
    )
    named = tuple(bool(name) for name in node.outputs)
    return node.op, node.inputs[0], operands, repr(sorted(node.attributes.items())), named


def unscaled(
    graph: Graph, facts: Mapping[str, Fact], parameters: Set[str]
) -> tuple[Graph, Mapping[str, Fact]]:
    """The same values; a constant that multiplies a weight multiplies the data instead.

    Args:
        graph: Canonical graph.
        facts: Element type and shape of every value.
        parameters: Names of the weights.

    Returns:
        The graph, and facts about its values; the given ones where no weight is scaled.
    """
    weights, data = moved(graph, parameters), of_data(graph)
    names: dict[str, str] = {}  # scaled value to what it is without the scale
    factors: dict[str, list[_Factor]] = {}  # by the name of the product
    for node in graph.nodes:
        factor = _factor(node, graph.constants, weights, parameters)
        products = _products_of(node.outputs[0], graph, data) if factor else ()
        if factor and products:
            names[node.outputs[0]] = factor.weight
            for product, operand in products:
                factors.setdefault(product.name, []).append(replace(factor, operand=operand))
    if not names:
        return graph, facts
    known = dict(facts)
    nodes: list[Node] = []
    for node in graph.nodes:
        product = node
        for factor in factors.get(node.name, ()):
            scaled, product = factor.applied(product)
            known[scaled.outputs[0]] = known[scaled.inputs[0]]
            nodes.append(scaled)
        if product is not node:
            product = replace(
                product, inputs=tuple(names.get(name, name) for name in product.inputs)
            )
        elif not node.domain and node.op in MOVES and node.inputs[0] in names:
            # The scaled values stay for whoever asks for them; the products read these.
            nodes.append(moved_on := _beside(node, names))
            pairs = zip(node.outputs, moved_on.outputs, strict=True)
            known |= {new: known[old] for old, new in pairs if old}
        nodes.append(product)
    return replace(graph, nodes=tuple(nodes)), known


def _beside(node: Node, names: dict[str, str]) -> Node:
    """The same move of a weight without its scale; enters the new names of the results."""
    outputs = tuple(f"{name}/unscaled" if name else "" for name in node.outputs)
    names |= zip(node.outputs, outputs, strict=True)
    inputs = names[node.inputs[0]], *node.inputs[1:]
    return replace(node, inputs=inputs, outputs=outputs, name=f"{node.name}/unscaled")


@dataclass(frozen=True, slots=True)
class _Factor:
    """A number that multiplies or divides an operand.

    Attributes:
        op: ``"Mul"`` or ``"Div"``.
        constant: Its name.
        weight: Name of what it scales.
        source: Name of the node that does.
        operand: Index of the operand.
    """

    op: str
    constant: str
    weight: str
    source: str
    operand: int = 0

    def applied(self, node: Node) -> tuple[Node, Node]:
        """What computes the scaled operand, and the node that reads it."""
        name = f"{node.name}/{self.source}"
        scaling = Node(self.op, (node.inputs[self.operand], self.constant), (name,), name=name)
        operands = list(node.inputs)
        operands[self.operand] = name
        return scaling, replace(node, inputs=tuple(operands))


def _factor(
    node: Node, constants: Mapping[str, Array], weights: Set[str], parameters: Set[str]
) -> _Factor | None:
    """The number that a node multiplies a weight by."""
    if node.domain or node.op not in SCALINGS:
        return None
    number, weight = node.inputs[::-1] if node.inputs[0] in weights else node.inputs
    if weight not in weights or number not in constants or number in parameters:
        return None
    # One number on one axis adds no axes to any data; c / W is not linear.
    array = constants[number]
    if array.size != 1 or array.ndim > 1 or (node.op == "Div" and weight != node.inputs[0]):
        return None
    return _Factor(node.op, number, weight, node.name)


def _products_of(value: str, graph: Graph, data: Set[str]) -> list[tuple[Node, int]]:
    """Products of a weight with data, with the index of the data; empty if it has other uses."""
    products: list[tuple[Node, int]] = []
    for node, index in graph.consumers.get(value, ()):
        moves = not node.domain and node.op in MOVES and index == 0
        other = _PRODUCTS.get(node.op, {}).get(index) if not node.domain else None
        if moves:
            further = [_products_of(name, graph, data) for name in node.outputs if name]
            if not all(further):
                return []
            products += [product for group in further for product in group]
        elif other is not None and other < len(node.inputs) and node.inputs[other] in data:
            products.append((node, other))
        else:
            return []
    return [] if value in graph.results else products
