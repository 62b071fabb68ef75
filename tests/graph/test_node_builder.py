"""New nodes, values and constants have distinct names with the prefix."""

import numpy as np
import pytest

from kfac_engine.graph.node_builder import NodeBuilder
from kfac_engine.graph.passes.decompose import DecompositionBuilder
from kfac_engine.graph.structure import Node


@pytest.mark.parametrize(
    "builder",
    [NodeBuilder("n/"), DecompositionBuilder(Node("Gelu", ("x",), ("n.y",), name="n"))],
    ids=["plain", "decomposition"],
)
def test_new_names_are_unique_with_prefix(builder):
    values = [builder.op("Neg", "x"), builder.op("Neg", "x"), builder.cast("x", "int64")]
    constants = [builder.constant(1), builder.constant([1, 2]), builder.constant(1, label="one")]
    nodes = [node.name for node in builder.nodes]
    for names in (values, constants, nodes):
        assert len(set(names)) == 3
    assert all(name.startswith("n") for name in (*values, *constants, *nodes))
    assert constants[-1].endswith("one")


def test_empty_result_names_are_generated():
    builder = NodeBuilder("p/")
    first, second = builder.multi("Split", ["x"], ("y", ""), axis=1, num_outputs=2)
    assert (first, builder.nodes[0].outputs) == ("y", ("y", second))
    assert second.startswith("p/")
    assert builder.nodes[0].attributes == {"axis": 1, "num_outputs": 2}


def test_python_integers_become_int64_and_arrays_keep_their_type():
    builder = NodeBuilder("")
    names = [builder.constant([1, 2]), builder.constant(np.float32(3)), builder.constant(0, "bool")]
    assert [builder.constants[name].dtype for name in names] == ["int64", "float32", "bool"]
