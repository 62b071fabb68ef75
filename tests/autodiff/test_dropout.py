"""Dropout of a model in training mode, differentiated with the mask that was drawn."""

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import kfac_engine as ke
from kfac_engine.runtime.model import load_model
from tests import models

# Float32 sums of four products.
ROUNDING = 1e-5


def dropped(training):
    """``output = dropout(input w) v``, the mask hidden; with ``training`` None it is an input."""
    model = models.written(
        "n,3 -> n,2",
        "w(3,8) v(8,2) ratio:0.25",
        "s = MatMul (input, w)  kept = Dropout (s, ratio, training)  output = MatMul (kept, v)",
    )
    if training is None:
        entry = helper.make_tensor_value_info("training", TensorProto.BOOL, [])
        model.graph.input.append(entry)
    else:
        model.graph.initializer.append(numpy_helper.from_array(np.array(training), "training"))
    return model


@pytest.fixture
def batch():
    rng = np.random.default_rng(1)
    return {name: rng.normal(size=(5, d)).astype("float32") for name, d in (("x", 3), ("g", 2))}


@pytest.mark.parametrize("mode", ["constant", "fed", "fed_off"])
def test_dropout_gradient_uses_mask_of_forward_pass(mode, batch):
    model = load_model(dropped(True if mode == "constant" else None))
    feeds = {"input": batch["x"]}
    if mode != "constant":
        feeds["training"] = np.array(mode == "fed")
    trace = model.run(feeds)
    found = trace.vjp({"output": batch["g"]}, ["w", "s"])
    kept = trace["kept"] / trace["s"]
    drops = mode != "fed_off"
    assert set(np.unique(kept.round(5))) == ({0, np.float32(4 / 3).round(5)} if drops else {1})
    ds = kept * (batch["g"] @ model.parameters["v"].T)
    np.testing.assert_allclose(found["s"], ds, rtol=ROUNDING, atol=ROUNDING)
    np.testing.assert_allclose(found["w"], batch["x"].T @ ds, rtol=ROUNDING, atol=ROUNDING)


def test_dropout_in_inference_model_is_unchanged():
    model = load_model(dropped(False))
    assert [node.outputs for node in model.graph.nodes if node.op == "Dropout"] == [("kept",)]


def test_layers_before_and_after_dropout_are_discovered(batch):
    engine = ke.Engine.from_onnx(dropped(True), loss="normal")
    result = engine.step({"input": batch["x"]}, np.zeros((5, 2), "float32"))
    assert sorted(result.natural_gradients) == ["v", "w"]


def test_random_factor_of_weight_is_drawn_for_each_batch():
    net = models.Net()
    w = net.weight("w", 4, 3)
    net.op("RandomUniform", to="r", shape=[1], low=0.5, high=1.5)
    net.op("MatMul", "input", net.op("Mul", w, "r", to="scaled"), to="output")
    proto = net.model({"input": ["batch", 4]}, {"output": ["batch", 3]})
    model, inputs = ke.load_model(proto), models.random_inputs(proto, 5)
    x, c = inputs["input"], np.random.default_rng(1).standard_normal((5, 3)).astype(np.float32)
    drawn = []
    for _ in range(4):
        trace = model.run(inputs)
        r = np.median(trace["output"] / (x @ net._constants["w"]))
        found = trace.vjp({"output": c}, ["w"])["w"]
        # A few float32 products; the number is known to 1e-6.
        np.testing.assert_allclose(found, r * (x.T @ c), atol=1e-5 * np.abs(found).max())
        drawn.append(r)
    assert len(set(drawn)) > 1
