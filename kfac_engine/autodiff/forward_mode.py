"""Computes first and second derivatives along directions, in one pass through a graph.

Each value has a ``Jet``: its tangents, one for each direction, and its second derivatives, each a
sum over pairs of directions. The Laplacian is one such sum, so that its cost does not grow with the
square of the number of directions. For a node y = f(x)::

    y'  = J x'
    y'' = J x'' + Σ D²f[x'_i, x'_j]      over the pairs (i, j)

A tangent has the shape of its value, so the node of a layer computes the tangents of the layer as
well: the weight of a layer has one use for each tangent.

What an operator is determines its rule (``forward_rules``). An operator without a row is
differentiated by its reverse rule, twice: its vector–Jacobian product is linear in the cotangent,
and the transposed map is ``x' ↦ J x'``. Its second derivative is the derivative of these nodes.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from typing import TypeAlias

from kfac_engine._types import Array
from kfac_engine.autodiff.activity import activity
from kfac_engine.autodiff.differentiate import differentiate, needed, refuse
from kfac_engine.autodiff.forward_builder import ForwardBuilder
from kfac_engine.autodiff.forward_rules import SUMS, factors, is_elementwise, linear_operands
from kfac_engine.autodiff.rules import ZERO_DERIVATIVE, Cotangents, Wanted, load_rules
from kfac_engine.autodiff.vjp_builder import VjpBuilder
from kfac_engine.graph.analysis.subgraph import dependents
from kfac_engine.graph.structure import ONLY_SHAPES, Graph, Input, Node

# Tangents of operands, by operand number, and of results, by name.
Operands: TypeAlias = Mapping[int, str]
Results: TypeAlias = Mapping[str, str]
# Pairs of directions; a second derivative is the sum over its pairs.
Pairs: TypeAlias = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Jet:
    """Names of the derivatives of a value; derivatives that are zero are absent."""

    # First derivatives, by the index of the direction.
    tangents: Mapping[int, str] = field(default_factory=dict)
    # Second derivatives, by the index of the sum.
    seconds: Mapping[int, str] = field(default_factory=dict)


def push_jets(
    b: ForwardBuilder, jets: Mapping[str, Jet], sums: Sequence[Pairs], outputs: Sequence[str]
) -> tuple[dict[str, Jet], tuple[Node, ...]]:
    """Return the jets of ``outputs`` and of the values on the path from the values with ``jets``.

    ``sums`` has the pairs of directions of each second derivative. The second result are the nodes
    whose second derivative is zero wherever it exists although they are not linear, such as Relu.
    An operator without a derivative rule raises UnsupportedOpError.
    """
    nodes = needed(b.graph.nodes, outputs)
    read = {*outputs}.union(*((*node.inputs, *node.captures) for node in nodes))
    sweep, known = _Sweep(b, b.graph.names.keys() - read), dict(jets)
    active = activity(b.graph, b.facts, jets).active
    for node in nodes:
        operands = {p: known[name] for p, name in enumerate(node.inputs) if name in known}
        if active.isdisjoint(node.outputs):
            continue
        if active.intersection(node.captures):
            refuse(node, b.graph, b.facts)
        if operands:
            results = sweep.jets(node, operands, sums)
            known |= {name: jet for name, jet in results.items() if name in active}
    return known, tuple(sweep.bent.values())


@dataclass(frozen=True, slots=True)
class _Transposed:
    """The map from tangents of operands to tangents of results, as nodes that are still to add."""

    nodes: tuple[Node, ...]  # the nodes of the map
    constants: Mapping[str, Array]  # constants that the nodes read
    # The operands whose tangents are summed to a value that the nodes read, by name.
    operands: Mapping[str, tuple[int, ...]]
    results: Results  # name of the tangent of each result, by the name of the result


class _Sweep:
    """Writes the derivatives of nodes of a graph, and of nodes that are derivatives.

    ``bent`` has the nodes whose derivative changes in steps, by name.
    """

    def __init__(self, builder: ForwardBuilder, unread: Collection[str]) -> None:
        self._b, self._unread = builder, unread
        self.bent: dict[str, Node] = {}
        self._slopes: dict[tuple[str, tuple[str, ...], int], str | None] = {}
        self._transposes: dict[tuple[str, Wanted], _Transposed] = {}

    def jets(
        self, node: Node, operands: Mapping[int, Jet], sums: Sequence[Pairs]
    ) -> dict[str, Jet]:
        """Return the jets of the results of a node, by name."""
        directions = dict.fromkeys(i for jet in operands.values() for i in jet.tangents)
        tangents = {
            i: {p: jet.tangents[i] for p, jet in operands.items() if i in jet.tangents}
            for i in directions
        }
        firsts = {i: self._tangents(node, tangents[i]) for i in directions}
        seconds: dict[int, Results] = {}
        for n, pairs in enumerate(sums):
            before = {p: jet.seconds[n] for p, jet in operands.items() if n in jet.seconds}
            known = [(i, j) for i, j in pairs if i in tangents and j in tangents]
            straight = self._tangents(node, before) if before else {}
            seconds[n] = self._total(straight, self._bend(node, tangents, firsts, known))
        return {
            y: Jet(
                {i: results[y] for i, results in firsts.items() if y in results},
                {n: results[y] for n, results in seconds.items() if y in results},
            )
            for y in filter(None, node.outputs)
        }

    def _total(self, *parts: Results) -> Results:
        """Write the sums of the tangents of each result."""
        terms: dict[str, list[str]] = {}
        for part in parts:
            for y, name in part.items():
                terms.setdefault(y, []).append(name)
        return {y: self._b.total(names) for y, names in terms.items()}

    # -- first derivatives ------------------------------------------------------------------------

    def _tangents(self, node: Node, t: Operands) -> Results:
        """Write the tangents of the results of a node; those that are zero are absent."""
        if node.qualified_op in ZERO_DERIVATIVE:
            return {}
        if node.qualified_op not in load_rules():
            refuse(node, self._b.graph, self._b.facts)
        return self._rule(node, t)(node, t)

    def _rule(self, node: Node, operands: Collection[int]) -> Callable[[Node, Operands], Results]:
        """Return the forward rule of a node for tangents of some operands."""
        if node.qualified_op in SUMS:
            return self._sum
        if set(operands) <= set(linear_operands(node)):
            return self._linear
        if factors(node):
            return self._product
        if is_elementwise(node, operands):
            return self._elementwise
        return self._reverse_twice

    def _sum(self, node: Node, t: Operands) -> Results:
        b, y = self._b, node.outputs[0]
        terms = [
            b.known_as(b.op("Neg", name), name) if p and SUMS[node.op] < 0 else name
            for p, name in t.items()
        ]
        total = b.total([b.expanded(term, y) for term in terms])
        if node.op == "Mean":
            total = b.product(total, b.scalar(1 / len(node.inputs), y), y)
        return {y: total}

    def _linear(self, node: Node, t: Operands) -> Results:
        b, operands = self._b, list(node.inputs)
        for p in linear_operands(node):
            operands[p] = t.get(p) or b.zeros(operands[p])
        results = zip(node.outputs, b.repeat(node, operands), strict=True)
        return {y: b.known_as(name, y) for y, name in results if b.is_real(y)}

    def _product(self, node: Node, t: Operands) -> Results:
        b, y, every = self._b, node.outputs[0], factors(node)
        terms = [self._term(node, {p: name}) for p, name in t.items() if p in every]
        for p in t.keys() - set(every):
            # With a factor of zero, the result is the operand that is added to the product.
            operands = [b.zeros(node.inputs[0]), *node.inputs[1:]]
            operands[p] = t[p]
            terms.append(b.known_as(b.repeat(node, operands)[0], y))
        return {y: b.total(terms)}

    def _term(self, node: Node, replaced: Operands) -> str:
        """Write a product with other factors, and without the operand that is added to it."""
        operands = [replaced.get(p, node.inputs[p]) for p in factors(node)]
        return self._b.known_as(self._b.repeat(node, operands)[0], node.outputs[0])

    def _elementwise(self, node: Node, t: Operands) -> Results:
        b, y = self._b, node.outputs[0]
        plain = self._widened(node, t)
        slopes = {p: self._slope(plain, p) for p in t}
        terms = [b.product(b.expanded(t[p], y), slope, y) for p, slope in slopes.items() if slope]
        return {y: b.total(terms)} if terms else {}

    def _widened(self, node: Node, wanted: Collection[int]) -> Node:
        """Return a node whose operands ``wanted`` are different values of the result's shape."""
        b, y, operands = self._b, node.outputs[0], list(node.inputs)
        for p in wanted:
            operands[p] = b.expanded(operands[p], y)
            while operands.count(operands[p]) > 1:
                operands[p] = b.known_as(b.op("Identity", operands[p]), y)
        return replace(node, inputs=tuple(operands))

    def _slope(self, node: Node, operand: int) -> str | None:
        """Write the derivative of an elementwise node by an operand; None if it is zero."""
        key = node.outputs[0], node.inputs, operand
        if key not in self._slopes:
            one = self._b.one(node.outputs[0])
            gradients = self._pulled(node, {0: one}, frozenset({operand}))
            self._slopes[key] = gradients.get(operand)
        return self._slopes[key]

    def _reverse_twice(self, node: Node, t: Operands) -> Results:
        b, key = self._b, (node.outputs[0], frozenset(t))
        if key not in self._transposes:
            self._transposes[key] = self._transposed(node, frozenset(t))
        maps = self._transposes[key]
        seeds = {name: b.total([t[p] for p in ps]) for name, ps in maps.operands.items()}
        names = b.include(maps.nodes, maps.constants, seeds)
        return {y: b.known_as(names.get(name, name), y) for y, name in maps.results.items()}

    def _transposed(self, node: Node, wanted: Wanted) -> _Transposed:
        """Return the transpose of the vector–Jacobian product of a node."""
        b = self._b
        # The product is linear: the value of a cotangent has no effect, and its size is right.
        cotangents = {
            i: b.known_as(b.op("Identity", y), y)
            for i, y in enumerate(node.outputs)
            if b.is_real(y) and y not in self._unread
        }
        operands: dict[str, tuple[int, ...]] = {}
        for p, name in self._pulled(node, cotangents, wanted).items():
            operands[name] = *operands.get(name, ()), p
        names = tuple(cotangents.values())
        pullback = b.upstream(operands, {*node.inputs, *node.outputs, *names})
        graph = self._part(pullback, (*names, *operands), tuple(operands))
        back = differentiate(graph, b.facts, tuple(operands), names, independent=True)
        return _Transposed(
            (*back.forward_nodes, *back.nodes),
            back.constants,
            {back.cotangents[name]: ps for name, ps in operands.items()},
            {
                node.outputs[i]: back.gradients[name]
                for i, name in cotangents.items()
                if name in back.gradients
            },
        )

    def _pulled(self, node: Node, g: Cotangents, wanted: Wanted) -> dict[int, str]:
        """Write the cotangents of the operands ``wanted`` by the reverse rule of a node."""
        b, graph = self._b, self._b.graph
        # The rules of norms and of softmax look at the nodes before and after a node of the graph.
        within = node.name in graph.positions and all(n in graph.names for n in node.inputs if n)
        context = graph if within else self._part([node], (), node.outputs)
        b.measure()
        vjp = VjpBuilder(context, b.facts)
        gradients = load_rules()[node.qualified_op](vjp, node, g, wanted)
        names = b.include((*vjp.forward_nodes, *vjp.nodes), vjp.constants)
        return {p: names.get(name, name) for p, name in gradients.items() if p in wanted}

    def _part(self, nodes: Sequence[Node], others: Iterable[str], outputs: Sequence[str]) -> Graph:
        """Return a graph of some nodes, whose inputs are what they read, and ``others``."""
        b = self._b
        b.measure()
        computed = {name for node in nodes for name in node.outputs}
        read = dict.fromkeys((*(name for node in nodes for name in node.inputs if name), *others))
        constants = {name: array for name in read if (array := b.array(name)) is not None}
        inputs = tuple(
            Input(name, b.facts[name].dtype, None)
            for name in read
            if name not in computed and name not in constants
        )
        return replace(
            b.graph, nodes=tuple(nodes), inputs=inputs, outputs=tuple(outputs), constants=constants
        )

    # -- second derivatives -----------------------------------------------------------------------

    def _bend(
        self,
        node: Node,
        tangents: Mapping[int, Operands],
        firsts: Mapping[int, Results],
        pairs: Pairs,
    ) -> Results:
        """Write the sum of ``D²f[t_i, t_j]`` over pairs of directions; zeros are absent.

        ``tangents`` are of the operands, and ``firsts`` of the results, by direction.
        """
        operands = {p for pair in pairs for i in pair for p in tangents[i]}
        if not pairs or node.qualified_op in ZERO_DERIVATIVE:
            return {}
        rule = self._rule(node, operands)
        if rule in {self._sum, self._linear}:
            return {}
        if rule == self._product:
            return self._bent_product(node, tangents, pairs)
        if rule == self._elementwise:
            return self._bent_slopes(node, tangents, pairs)
        return self._bent_tangents(node, tangents, firsts, pairs)

    def _bent_product(self, node: Node, tangents: Mapping[int, Operands], pairs: Pairs) -> Results:
        b, y = self._b, node.outputs[0]
        once: list[str] = []
        twice: list[str] = []
        for i, j in pairs:
            terms = twice if i == j else once
            for left, right in [(i, j)] if i == j else [(i, j), (j, i)]:
                terms += [
                    self._term(node, {p: tangents[left][p], q: tangents[right][q]})
                    for p, q in combinations(factors(node), 2)
                    if p in tangents[left] and q in tangents[right]
                ]
        if twice:
            once.append(b.product(b.total(twice), b.scalar(2, y), y))
        return {y: b.total(once)} if once else {}

    def _bent_slopes(self, node: Node, tangents: Mapping[int, Operands], pairs: Pairs) -> Results:
        b, y = self._b, node.outputs[0]
        operands = sorted({p for pair in pairs for i in pair for p in tangents[i]})
        plain = self._widened(node, operands)
        slopes = {p: slope for p in operands if (slope := self._slope(plain, p)) is not None}
        stops = {*plain.inputs, *plain.outputs}
        terms = []
        for (p, slope), (q, other) in product(slopes.items(), repeat=2):
            squares = [
                b.product(b.expanded(tangents[i][p], y), b.expanded(tangents[j][q], y), y)
                for i, j in pairs
                if p in tangents[i] and q in tangents[j]
            ]
            # The slope changes with the operand, and with the result where it is written by it.
            seeds = {y: b.expanded(other, y), plain.inputs[q]: b.ones(y)}
            bend = self._pushed([slope], stops, seeds).get(slope)
            if squares and bend is not None:
                terms.append(b.product(b.total(squares), bend, y))
        if not terms:
            values = {y, *(plain.inputs[p] for p in operands)}
            self._note_steps(node, slopes.values(), stops, values)
        return {y: b.total(terms)} if terms else {}

    def _note_steps(
        self, node: Node, results: Collection[str], stops: Collection[str], values: Collection[str]
    ) -> None:
        """List a node as bent if results without a derivative by ``values`` change with them.

        ``stops`` are all values from which the results are computed.
        """
        nodes = self._b.upstream(results, stops)
        if not dependents(nodes, values, ONLY_SHAPES).isdisjoint(results):
            self.bent[node.name] = node

    def _bent_tangents(
        self,
        node: Node,
        tangents: Mapping[int, Operands],
        firsts: Mapping[int, Results],
        pairs: Pairs,
    ) -> Results:
        """Write the derivatives of the nodes that compute the tangents of the results."""
        parts = []
        for i, j in pairs:
            stops = {*node.inputs, *node.outputs, *tangents[i].values()}
            seeds = {**firsts[j], **{node.inputs[p]: name for p, name in tangents[j].items()}}
            bent = self._pushed(firsts[i].values(), stops, seeds)
            parts.append({y: bent[name] for y, name in firsts[i].items() if name in bent})
            if not parts[-1]:
                self._note_steps(node, firsts[i].values(), stops, {*seeds, *node.outputs})
        return self._total(*parts)

    def _pushed(
        self, results: Iterable[str], stops: Collection[str], seeds: Mapping[str, str]
    ) -> dict[str, str]:
        """Return the tangents of added values, given the tangents of some of ``stops``."""
        known = dict(seeds)
        for node in self._b.upstream(results, stops):
            t = {p: known[name] for p, name in enumerate(node.inputs) if name in known}
            if t and any(map(self._b.is_real, node.outputs)):
                known.update(self._tangents(node, t))
        return known
