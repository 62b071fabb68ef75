"""Merges, moves to the data or precomputes the operators that rearrange or scale weights."""

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace

from kfac_engine._types import Array
from kfac_engine.autodiff.differentiate import needed
from kfac_engine.autodiff.training_form import draws
from kfac_engine.graph.analysis.subgraph import of_data
from kfac_engine.graph.structure import MOVES, Fact, Graph, Node
from kfac_engine.graph.write import compact_model
from kfac_engine.sessions.session import Session

# Operators that are linear in two operands: for the index of each, the index of the other.
_PRODUCTS: Mapping[str, Mapping[int, int]] = {
    "Conv": {1: 0},
    "ConvTranspose": {1: 0},
    "Einsum": {0: 1, 1: 0},
    "Gemm": {0: 1, 1: 0},
    "MatMul": {0: 1, 1: 0},
}

SCALINGS = frozenset({"Mul", "Div"})


def rearranged_weight(graph: Graph, parameters: Iterable[str]) -> frozenset[str]:
    """Return the parameters and the values that rearrange their entries."""
    values = set(parameters)
    for node in graph.nodes:
        if _rearranges(values, node):
            values.update(node.outputs)
    return frozenset(values - {""})


def _rearranges(weights: Set[str], node: Node) -> bool:
    """Return whether a node rearranges the entries of weights."""
    if node.domain:
        return False
    if node.op == "Concat":
        return all(name in weights for name in node.inputs)
    return node.op in MOVES and node.inputs[0] in weights


def merge_rearrangements(graph: Graph, parameters: Iterable[str]) -> Graph:
    """Return a graph without repeated nodes that rearrange the entries of a weight.

    The readers of an ``Identity`` of a weight read the weight instead. The result is ``graph``
    itself if nothing changes.
    """
    weights = rearranged_weight(graph, parameters)
    captured = {name for node in graph.nodes for name in node.captures}
    fixed = captured.union(graph.outputs)
    names: dict[str, str] = {}
    first: dict[object, Node] = {}
    nodes = []
    for old in graph.nodes:
        node = replace(old, inputs=tuple(names.get(name, name) for name in old.inputs))
        if _rearranges(weights, node):
            same = first.setdefault(_content(node, graph.constants), node)
            if node.op == "Identity":
                names[node.outputs[0]] = node.inputs[0]
            elif fixed.isdisjoint(node.outputs) and same is not node:
                names |= zip(node.outputs, same.outputs, strict=True)
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes)) if names else graph


def _content(node: Node, constants: Mapping[str, Array]) -> object:
    """Return a value that is equal for nodes that differ in names only."""
    operands = tuple(
        (array.dtype.name, array.shape, array.tobytes())
        if (array := constants.get(name)) is not None
        else name
        for name in node.inputs[1:]
    )
    named = tuple(bool(name) for name in node.outputs)
    return node.op, node.inputs[0], operands, repr(sorted(node.attributes.items())), named


def move_scales_to_data(
    graph: Graph, facts: Mapping[str, Fact], parameters: Set[str]
) -> tuple[Graph, Mapping[str, Fact]]:
    """Return a graph in which constants multiply the data instead of the weights, and its facts.

    The results are the arguments themselves if no weight is scaled.
    """
    weights, data = rearranged_weight(graph, parameters), of_data(graph)
    names: dict[str, str] = {}  # scaled value to the value without its scale
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
            # Products read the values without scale, and other readers the scaled values.
            nodes.append(copy := _without_scale(node, names))
            pairs = zip(node.outputs, copy.outputs, strict=True)
            known |= {new: known[old] for old, new in pairs if old}
        nodes.append(product)
    return replace(graph, nodes=tuple(nodes)), known


def _without_scale(node: Node, names: dict[str, str]) -> Node:
    """Return a rearrangement of the weight without its scale; add its names to ``names``."""
    outputs = tuple(f"{name}/unscaled" if name else "" for name in node.outputs)
    names |= zip(node.outputs, outputs, strict=True)
    inputs = names[node.inputs[0]], *node.inputs[1:]
    return replace(node, inputs=inputs, outputs=outputs, name=f"{node.name}/unscaled")


@dataclass(frozen=True, slots=True)
class _Factor:
    """A number that multiplies or divides an operand."""

    op: str  # ``"Mul"`` or ``"Div"``
    constant: str  # name of the constant
    weight: str  # name of the scaled value
    source: str  # name of the scaling node
    operand: int = 0  # index of the operand

    def applied(self, node: Node) -> tuple[Node, Node]:
        """Return a node that scales an operand of ``node``, and the node that reads the result."""
        name = f"{node.name}/{self.source}"
        scaling = Node(self.op, (node.inputs[self.operand], self.constant), (name,), name=name)
        operands = list(node.inputs)
        operands[self.operand] = name
        return scaling, replace(node, inputs=tuple(operands))


def _factor(
    node: Node, constants: Mapping[str, Array], weights: Set[str], parameters: Set[str]
) -> _Factor | None:
    """Return the number by which a node multiplies or divides a weight; None for other nodes."""
    if node.domain or node.op not in SCALINGS:
        return None
    number, weight = node.inputs[::-1] if node.inputs[0] in weights else node.inputs
    if weight not in weights or number not in constants or number in parameters:
        return None
    # A constant with several entries could broadcast the data, and c / W is not linear in W.
    array = constants[number]
    if array.size != 1 or array.ndim > 1 or (node.op == "Div" and weight != node.inputs[0]):
        return None
    return _Factor(node.op, number, weight, node.name)


def _products_of(value: str, graph: Graph, data: Set[str]) -> list[tuple[Node, int]]:
    """Return the products of a value and data, with the index of the data.

    The list is empty if the value has other uses.
    """
    products: list[tuple[Node, int]] = []
    moved = [value]
    for name in moved:  # the loop appends to the list
        if name in graph.results or name not in graph.consumers:
            return []
        for node, index in graph.consumers[name]:
            other = _PRODUCTS.get(node.op, {}).get(index) if not node.domain else None
            if not node.domain and node.op in MOVES and index == 0:
                moved += filter(None, node.outputs)
            elif other is not None and other < len(node.inputs) and node.inputs[other] in data:
                products.append((node, other))
            else:
                return []
    return products


def fold_weight_operands(graph: Graph, parameters: Set[str]) -> Graph:
    """Return a graph in which the operands that slice, reshape or scale a weight are constants.

    The result is ``graph`` itself if all such operands are constants.
    """
    weights = rearranged_weight(graph, parameters)
    known = _computed_from_constants(graph, parameters)
    wanted = {
        name
        for node in graph.nodes
        if not node.domain and node.op in MOVES | SCALINGS and weights.intersection(node.inputs)
        for name in node.inputs
        if name in known and name not in graph.constants
    }
    if not wanted:
        return graph
    nodes = needed(graph.nodes, wanted)
    reads = {name for node in nodes for name in node.inputs}
    inputs = {name: array for name, array in graph.constants.items() if name in reads}
    model = compact_model(nodes, [], list(wanted), inputs, graph.opset)
    session = Session(model, threads=1, optimize=False, what="the operands of weights")
    values = session.run(list(wanted), {})
    names = {name: f"{name}/folded" for name in wanted}
    constants = {names[name]: array for name, array in values.items()}
    return replace(
        graph,
        nodes=tuple(
            replace(node, inputs=tuple(names.get(name, name) for name in node.inputs))
            for node in graph.nodes
        ),
        constants={**graph.constants, **constants},
    )


def _computed_from_constants(graph: Graph, parameters: Set[str]) -> frozenset[str]:
    """Return the values that deterministic standard operators compute from untrained constants."""
    known = graph.constants.keys() - parameters
    for node in graph.nodes:
        plain = not node.domain and not node.captures and not draws(graph, node)
        if plain and known.issuperset(filter(None, node.inputs)):
            known.update(node.outputs)
    return frozenset(known - {""})
