"""Builds the nodes that replace one node of a graph."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from kfac_engine.errors import UnsupportedOpError
from kfac_engine.graph.node_builder import NodeBuilder
from kfac_engine.graph.structure import Fact, Graph, Node


class LoweringBuilder(NodeBuilder):
    """Collects the nodes that replace one node.

    Args:
        graph: The graph that is rewritten.
        facts: Element type and shape of every value of the graph, from a sample run.
        prefix: Start of all new names; no name in the graph starts with it.
    """

    def __init__(self, graph: Graph, facts: Mapping[str, Fact], prefix: str) -> None:
        super().__init__(prefix)
        self.graph = graph
        self.facts = facts

    def scalar(self, value: float, like: str) -> str:
        """Add a 0-d constant with the element type of the value ``like``; return its name."""
        return self.constant(np.asarray(value, dtype=self.facts[like].dtype))

    def read_results(self, node: Node) -> Node:
        """Return a node of the graph without the names of optional results that nothing reads."""
        consumers, results = self.graph.consumers, self.graph.results
        first, *others = node.outputs
        read = (name if name in consumers or name in results else "" for name in others)
        return replace(node, outputs=(first, *read))

    def refuse(self, node: Node, why: str) -> UnsupportedOpError:
        """Return the error to raise for a node that has no lowering."""
        return UnsupportedOpError(
            f"no derivative of {node.qualified_op} at node '{node.name}': {why}."
        )
