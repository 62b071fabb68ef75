"""`inspect` says what a layer takes of a parameter, and which weights are equal."""

import json

import numpy as np
import pytest

from kfac_engine.__main__ import main
from tests.models import Net

WIDTH = 3


def fused():
    """Two layers whose weights lie side by side in one array."""
    net = Net()
    net.weight("w", WIDTH, 2 * WIDTH)
    axis = net.constant("axis", np.array([1]))
    for i in range(2):
        bounds = (net.constant(f"{i} {side}", np.array([WIDTH * (i + side)])) for side in range(2))
        net.op("MatMul", "input", net.op("Slice", "w", *bounds, axis, to=f"w{i}"), to=f"s{i}")
    net.op("Mul", "s0", "s1", to="output")
    return net.model({"input": ["batch", WIDTH]}, {"output": ["batch", WIDTH]})


def twice():
    """One weight, written a second time transposed."""
    net = Net()
    x = net.op("MatMul", "input", net.weight("w", WIDTH, WIDTH), to="s")
    net.constant("copy", net._constants["w"].T.copy())
    net.op("Gemm", x, "copy", to="output", transB=1)
    return net.model({"input": ["batch", WIDTH]}, {"output": ["batch", WIDTH]})


@pytest.fixture
def inspect(tmp_path, capsys):
    def run(model, *options):
        path = tmp_path / "model.onnx"
        path.write_bytes(model.SerializeToString())
        assert main(["inspect", str(path), "--loss", "normal", *options]) == 0
        return capsys.readouterr().out

    return run


def test_a_layer_is_shown_with_its_part_of_a_parameter(inspect):
    assert "  w [:, 3:6] " in inspect(fused())
    layers = json.loads(inspect(fused(), "--json"))["layers"]
    shown = [(layer["parameters"], layer["parts"], layer["key"]) for layer in layers]
    assert shown == [(["w"], ["[:, 0:3]"], "w0"), (["w"], ["[:, 3:6]"], "w1")]


@pytest.mark.parametrize(
    ("options", "layers", "text"),
    [
        ((), 2, "copy equals w, transposed: trained apart, as one with --tie-weights"),
        (("--tie-weights",), 1, "copy equals w, transposed: trained as one"),
    ],
    ids=["apart", "tied"],
)
def test_equal_weights_are_listed_and_tied_where_asked(inspect, options, layers, text):
    assert text in inspect(twice(), *options)
    found = json.loads(inspect(twice(), "--json", *options))
    assert found["ties"] == [{"first": "w", "copy": "copy", "transposed": True}]
    assert len(found["layers"]) == layers
