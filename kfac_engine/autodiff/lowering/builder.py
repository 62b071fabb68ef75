"""Builds the nodes that replace a node of a graph, and splits a value along an axis."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from kfac_engine.errors import UnsupportedOpError
from kfac_engine.graph.node_builder import NodeBuilder
from kfac_engine.graph.structure import Fact, Graph, Node


class LoweringBuilder(NodeBuilder):
    """Collects the nodes that replace one node of a graph.

    ``facts`` has the element type and shape of every value, from a sample run. All new names start
    with ``prefix``; no name in the graph starts with it.
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


# -- steps along an axis ---------------------------------------------------------------------------


# Largest number of unrolled steps. A step of an LSTM becomes fifteen nodes, or fifty with its
# derivative. ONNX Runtime takes a few tenths of a millisecond for each node when it builds a
# session, and longer for larger graphs.
MOST_STEPS = 1024

# In the name of a node that fails if a value, such as the number of steps, is not the sample's.
UNROLLED = "was unrolled for"

# What to do about a Split that fails for another number of steps.
STEPS_OF_THE_DATA = "give sample_inputs (--inputs) with the steps of the data"


def split_steps(b: LoweringBuilder, node: Node, value: str, axis: int) -> tuple[str, ...]:
    """Write the slices of a value along an axis, as many as in the sample run; return their names.

    The slices do not have the axis. For a batch with another number of slices, the Split node
    fails, and its name gives the reason. ``node`` is the unrolled node, for messages.
    """
    shape = b.facts[value].shape
    length = check_steps(b, node, shape[axis])
    pieces = b.split(value, [1] * length, axis)
    label_last(
        b,
        f"{node.op} was unrolled over {length} steps, the number in the sample inputs; "
        f"{STEPS_OF_THE_DATA}",
    )
    at = b.constant([axis])
    return tuple(b.op("Squeeze", piece, at) for piece in pieces)


def stacked(b: LoweringBuilder, values: Sequence[str], axis: int, result: str = "") -> str:
    """Write values stacked along a new axis; return the name of the result."""
    at = b.constant([axis])
    rows = [b.op("Unsqueeze", value, at) for value in values]
    return b.op("Concat", *rows, result=result, axis=axis)


def check_steps(b: LoweringBuilder, node: Node, length: int) -> int:
    """Return ``length``, or raise UnsupportedOpError for no steps or too many to unroll."""
    if not 0 < length <= MOST_STEPS:
        raise b.refuse(
            node, f"it has {length} steps, but only 1 to {MOST_STEPS} steps can be unrolled"
        )
    return length


def label_last(b: LoweringBuilder, label: str) -> None:
    """Append ``label`` to the name of the last node, which messages of ONNX Runtime show."""
    last = b.nodes[-1]
    b.nodes[-1] = replace(last, name=f"{last.name} ({label})")
