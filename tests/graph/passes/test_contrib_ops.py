"""Operators without a kernel for the CPU compute what their definition says."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.special import erf

from kfac_engine.errors import ModelError
from kfac_engine.graph.load import load_graph
from kfac_engine.graph.structure import Input, Node
from kfac_engine.graph.write import build_model
from scripts.node_tests import check
from tests.graph.running import run_graph

# A dozen roundings to float32.
CLOSE = 1e-5
RNG = np.random.default_rng(0)


def gelu(x):
    return 0.5 * x * (1 + erf(x / np.sqrt(2)))


def fast_gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def split_gelu(x, bias):
    kept, gate = np.split(x + bias, 2, axis=-1)
    return kept * gelu(gate)


def group_norm(x, scale, shift, swish=False):
    """With channels last, in two groups."""
    groups = x.reshape(len(x), -1, 2, x.shape[-1] // 2)
    mean, variance = groups.mean(axis=(1, 3), keepdims=True), groups.var(axis=(1, 3), keepdims=True)
    y = ((groups - mean) / np.sqrt(variance + 1e-3)).reshape(x.shape) * scale + shift
    return y / (1 + np.exp(-y)) if swish else y


IMAGE, CHANNELS = (2, 3, 2, 4), (4,)
NORM = {"groups": 2, "epsilon": 1e-3}
CASES = {
    "BiasAdd": ([(2, 3, 4), CHANNELS, (2, 3, 4)], {}, lambda x, b, s: x + b + s),
    "BiasSplitGelu": ([(2, 3, 8), (8,)], {}, split_gelu),
    "GemmFastGelu": ([(2, 3), (3, 4), CHANNELS], {}, lambda x, w, b: fast_gelu(x @ w + b)),
    "GroupNorm": ([IMAGE, CHANNELS, CHANNELS], NORM, group_norm),
    "GroupNorm-swish": (
        [IMAGE, CHANNELS, CHANNELS], {**NORM, "activation": 1},
        lambda *operands: group_norm(*operands, swish=True)),
    "GroupNorm-channels-first": (
        [(2, 4, 3, 2), CHANNELS, CHANNELS], {**NORM, "channels_last": 0},
        lambda x, *rest: group_norm(x.transpose(0, 2, 3, 1), *rest).transpose(0, 3, 1, 2)),
    "SkipGroupNorm": (
        [IMAGE, CHANNELS, CHANNELS, IMAGE, CHANNELS], NORM,
        lambda x, scale, shift, skip, bias: group_norm(x + skip + bias, scale, shift)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_contrib_operator_equals_definition(name):
    sides, attributes, definition = CASES[name]
    feeds = {f"x{i}": RNG.normal(size=side).astype(np.float32) for i, side in enumerate(sides)}
    node = Node(name.split("-")[0], tuple(feeds), ("y",), attributes, "n", "com.microsoft")
    inputs = [Input(n, array.dtype, array.shape) for n, array in feeds.items()]
    model = build_model([node], inputs, ["y"], {}, 18, domains={"com.microsoft": 1})
    graph = load_graph(model)
    expected = definition(*(array.astype(np.float64) for array in feeds.values()))
    np.testing.assert_allclose(run_graph(graph, feeds)["y"], expected, CLOSE, CLOSE)
    check(graph, feeds, {"y": expected.astype(np.float32)})


def damaged(**changes):
    node = Node("GroupNorm", ("x", "scale", "shift"), ("y",), NORM, "n", "com.microsoft")
    inputs = [Input(name, np.dtype("float32"), None) for name in node.inputs]
    domains = {"com.microsoft": 1}
    return build_model([replace(node, **changes)], inputs, ["y"], {}, 18, domains=domains)


@pytest.mark.parametrize(
    "changes",
    [{"inputs": ("x",)}, {"inputs": ("x", "", "shift")}, {"attributes": {"groups": "two"}}],
    ids=["too-few-operands", "unnamed-operand", "wrong-attribute"],
)
def test_damaged_node_error_names_node(changes):
    with pytest.raises(ModelError, match=r"com\.microsoft::GroupNorm node 'n'"):
        load_graph(damaged(**changes))
