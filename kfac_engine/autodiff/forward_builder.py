"""Builds the nodes that compute derivatives in forward mode, and builds equal nodes once.

The name of a result is a hash of what computes it, so that equal nodes are one node. A slope that
all directions need is therefore computed once, although each direction asks for it.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from kfac_engine._types import Array
from kfac_engine.graph.node_builder import FLOAT_CODES, NodeBuilder, digest_of
from kfac_engine.graph.structure import AttributeValue, Fact, Graph, Input, Node

# Returns element type and shape of every value of a graph, from a run on the given inputs.
Measure: TypeAlias = Callable[[Graph, Mapping[str, Array]], Mapping[str, Fact]]
# Returns values of the sample run of the forward graph, by name.
Sample: TypeAlias = Callable[[Iterable[str]], Mapping[str, Array]]


class ForwardBuilder(NodeBuilder):
    """Collects nodes that read values of a graph and results of each other.

    ``facts`` are of every value of the graph, from a sample run, and of the added constants and
    values as far as known; ``measure`` adds the others. ``producers`` has the added node of each
    added value. ``sample`` returns values of the sample run that determine shapes, such as lengths.
    """

    def __init__(
        self, graph: Graph, facts: Mapping[str, Fact], measure: Measure, sample: Sample
    ) -> None:
        super().__init__(prefix="")
        self.graph = graph
        self.facts = dict(facts)
        self.producers: dict[str, Node] = {}
        self._values = frozenset(graph.values())
        self._places: dict[str, int] = {}
        self._ones: set[str] = set()
        self._measure, self._sample = measure, sample
        self._measured = 0

    # -- adding nodes -----------------------------------------------------------------------------

    def write(
        self,
        op: str,
        inputs: Sequence[str],
        results: Sequence[str],
        attributes: Mapping[str, AttributeValue],
        domain: str = "",
    ) -> tuple[str, ...]:
        """Add a node with these results, ``""`` for a name from its content; return the names."""
        node = Node(op, tuple(inputs), ("new",) * len(results), attributes, domain=domain)
        return self._add(node, results)

    def repeat(self, node: Node, inputs: Sequence[str]) -> tuple[str, ...]:
        """Add ``node`` with other operands; return the results, of which the same are omitted."""
        if node.op == "Mul" and not node.domain and not self._ones.isdisjoint(inputs):
            # One may be a number or have the shape of the result.
            return (inputs[1] if inputs[0] in self._ones else inputs[0],)
        return self._add(replace(node, inputs=tuple(inputs)), ("",) * len(node.outputs))

    def include(
        self,
        nodes: Iterable[Node],
        constants: Mapping[str, Array],
        names: Mapping[str, str] | None = None,
    ) -> dict[str, str]:
        """Add nodes and constants of another builder.

        ``names`` map values that the nodes read to values of this builder. The result also maps
        the results of the nodes.
        """
        known = {name: self.constant(array) for name, array in constants.items()}
        known.update(names or {})
        for node in nodes:
            results = self.repeat(node, [known.get(name, name) for name in node.inputs])
            known.update(zip(node.outputs, results, strict=True))
        return known

    def constant(
        self, value: Array | Sequence[int] | int, dtype: str | None = None, label: str = ""
    ) -> str:
        """Add a constant, once for equal constants; return its name."""
        array = np.asarray(value, dtype=dtype)
        digest = digest_of(array.dtype.name, array.shape, array.tobytes())
        name = super().constant(array, label=label or f"constant_{digest}")
        self.facts[name] = Fact(array.dtype, array.shape)
        return name

    def scalar(self, value: float, like: str) -> str:
        """Add a 0-d constant in the type of the value ``like``; return its name."""
        return self.constant(np.asarray(value, self.fact(like).dtype))

    def one(self, like: str) -> str:
        """Add the number one in the type of the value ``like``, a neutral factor."""
        name = self.scalar(1, like)
        self._ones.add(name)
        return name

    def ones(self, like: str) -> str:
        """Write an array of ones with the shape and the type of the value ``like``."""
        name = self.known_as(self.op("Expand", self.one(like), self.op("Shape", like)), like)
        self._ones.add(name)
        return name

    def zeros(self, like: str) -> str:
        """Write zeros in the shape and the type of the value ``like``."""
        zero = np.zeros(1, dtype=self.fact(like).dtype)
        return self.known_as(self.op("ConstantOfShape", self.op("Shape", like), value=zero), like)

    def total(self, terms: Sequence[str]) -> str:
        """Write the sum of values of one shape."""
        result = terms[0]
        for term in terms[1:]:
            result = self.known_as(self.op("Add", result, term), result)
        return result

    def product(self, left: str, right: str, like: str) -> str:
        """Write a product that has the element type and the shape of the value ``like``."""
        if not {left, right}.isdisjoint(self._ones):
            return right if left in self._ones else left
        return self.known_as(self.op("Mul", left, right), like)

    def expanded(self, value: str, like: str) -> str:
        """Write a value in the shape of ``like``, to which it can be broadcast."""
        if self.fact(value).shape == self.fact(like).shape:
            return value
        if value in self._ones:
            return self.ones(like)
        return self.known_as(self.op("Expand", value, self.op("Shape", like)), like)

    def array(self, name: str) -> Array | None:
        """Return the array of a constant of the graph or of this builder; None for other values."""
        known = self.constants.get(name)
        return self.graph.constants.get(name) if known is None else known

    # -- facts ------------------------------------------------------------------------------------

    def known_as(self, name: str, like: str) -> str:
        """Return an added value, after its facts became those of the value ``like``."""
        self.facts.setdefault(name, self.fact(like))
        return name

    def fact(self, name: str) -> Fact:
        """Return element type and shape of a value in the sample run."""
        if name not in self.facts:
            self.measure()
        return self.facts[name]

    def is_real(self, name: str) -> bool:
        """Return whether a value is a tensor of floating-point numbers."""
        return bool(name) and self._is_known(name) and self.fact(name).dtype.name in FLOAT_CODES

    def measure(self) -> None:
        """Measure the facts of all added values."""
        added, self._measured = self.nodes[self._measured :], len(self.nodes)
        nodes = {
            self._places[node.name]: node
            for node in added
            if not all(name in self.facts for name in node.outputs if name)
        }
        if not nodes:
            return
        feeds: dict[str, Array] = {}
        primal: list[str] = []
        waiting = [name for node in nodes.values() for name in node.inputs]
        results = {name for node in nodes.values() for name in node.outputs}
        constants: dict[str, Array] = {}
        for name in filter(None, waiting):  # the loop appends to the list
            known = self.array(name)
            if name in results or name in feeds:
                continue
            if known is not None:
                constants[name] = known
            elif self.facts[name].dtype.kind == "f":
                # Shapes do not depend on these numbers.
                feeds[name] = np.ones(self.facts[name].shape, self.facts[name].dtype)
            elif (node := self.producers.get(name)) is not None:
                nodes[self._places[node.name]] = node
                results.update(node.outputs)
                waiting += node.inputs
            else:
                primal.append(name)
        feeds |= self._sample(primal) if primal else {}
        ordered = tuple(nodes[place] for place in sorted(nodes))
        inputs = tuple(Input(name, array.dtype, array.shape) for name, array in feeds.items())
        outputs = tuple(name for node in ordered for name in node.outputs if name)
        part = replace(
            self.graph, nodes=ordered, inputs=inputs, outputs=outputs, constants=constants
        )
        measured = self._measure(part, feeds)
        self.facts |= {name: measured[name] for name in outputs if name not in self.facts}

    # -- what computes an added value -------------------------------------------------------------

    def upstream(self, results: Iterable[str], stops: Collection[str]) -> list[Node]:
        """Return the nodes that compute ``results`` from the values ``stops``, in order.

        These are added nodes, and nodes of the graph that a rule would have added.
        """
        nodes: dict[int, Node] = {}
        waiting = [name for name in results if name not in stops]
        for name in waiting:  # the loop appends to the list
            node = self.producers.get(name) or self.graph.producers.get(name)
            if node is not None and self._place(node) not in nodes:
                nodes[self._place(node)] = node
                waiting += [operand for operand in node.inputs if operand not in stops]
        return [nodes[place] for place in sorted(nodes)]

    # -- private ----------------------------------------------------------------------------------

    def _place(self, node: Node) -> int:
        """Return the index of a node; added nodes are numbered after the graph's nodes."""
        place = self._places.get(node.name)
        return self.graph.positions[node.name] if place is None else place

    def _is_known(self, name: str) -> bool:
        # Sequences of the forward graph have no facts.
        return name in self.facts or name in self.producers

    def _add(self, node: Node, results: Sequence[str]) -> tuple[str, ...]:
        """Add a node with these results, ``""`` for a name from the content of the node.

        Results that ``node`` omits are omitted.
        """
        content = map(_content, sorted(node.attributes.items()))
        omitted = [not name for name in node.outputs]
        digest = digest_of(node.op, node.domain, *node.inputs, omitted, *content)
        names = tuple(
            old and (new or f"derivative_{node.op}_{digest}_{index}")
            for index, (old, new) in enumerate(zip(node.outputs, results, strict=True))
        )
        first = next(filter(None, names))
        # A graph of derivatives may have the node already.
        if first not in self.producers and first not in self._values:
            node = replace(node, outputs=names, name=f"node_{first}")
            self._places[node.name] = len(self.graph.nodes) + len(self.nodes)
            self.nodes.append(node)
            self.producers.update((name, node) for name in names if name)
        return names


def _content(attribute: tuple[str, AttributeValue]) -> tuple[object, ...]:
    name, value = attribute
    if isinstance(value, np.ndarray):
        return name, value.dtype.name, value.shape, value.tobytes()
    return name, value
