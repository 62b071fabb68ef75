"""Which layers are found, how they are spelled, and what is said of the rest."""

import numpy as np
import pytest

import kfac_engine as ke
from tests import models


def layers_of(model, loss="normal"):
    return ke.Engine.from_onnx(model, loss=loss).layers


def summary(layer):
    return layer.kind, layer.parameters, layer.inputs, layer.outputs


def net(*steps, inputs=("batch", 4), outputs=("batch", 3)):
    made = models.Net()
    for step in steps:
        step(made)
    return made.model({"input": list(inputs)}, {"output": list(outputs)})


def test_layers_are_discovered_in_order_of_use():
    assert [summary(layer) for layer in layers_of(models.cnn(), "categorical")] == [
        ("conv2d", ("conv0.weight", "conv0.bias"), "input", "conv0"),
        ("conv2d", ("conv1.weight", "conv1.bias"), "pool0", "conv1"),
        ("fully_connected", ("output.weight", "output.bias"), "flat", "output"),
    ]
    assert [summary(layer) for layer in layers_of(models.token_mlp(), "categorical")] == [
        ("fully_connected", ("fc0.weight", "fc0.bias"), "input", "fc0"),
        ("fully_connected", ("fc1.weight", "fc1.bias"), "act1", "output"),
    ]


@pytest.mark.parametrize("shape", [(3,), (1, 3)])
@pytest.mark.parametrize("swapped", [False, True])
def test_bias_is_either_operand_of_add(shape, swapped):
    def build(n):
        x = n.op("MatMul", "input", n.weight("w", 4, 3), to="product")
        operands = (x, n.weight("b", *shape))
        n.op("Add", *(operands[::-1] if swapped else operands), to="output")

    (layer,) = layers_of(net(build))
    assert summary(layer) == ("fully_connected", ("w", "b"), "input", "output")


def turned_gemm(n):
    w = n.op("Transpose", n.weight("w", 3, 4), to="turned")
    n.op("Gemm", "input", w, n.weight("b", 3), to="output")


def turned_twice(n):
    w = n.op("Transpose", n.weight("w", 4, 3), to="turned", perm=[1, 0])
    n.op("Gemm", "input", w, n.weight("b", 3), to="output", transB=1)


def turned_matmul(n):
    w = n.op("Transpose", n.weight("w", 3, 4), to="turned")
    n.op("Add", n.op("MatMul", "input", w, to="product"), n.weight("b", 3), to="output")


@pytest.mark.parametrize("build", [turned_gemm, turned_twice, turned_matmul])
def test_transposed_weight_operand_is_discovered(build):
    model = net(build)
    engine = ke.Engine.from_onnx(model, loss="normal", estimation_mode="exact")
    (layer,) = engine.layers
    assert summary(layer) == ("fully_connected", ("w", "b"), "input", "output")
    inputs = models.random_inputs(model, batch=4)
    engine.observe(inputs)
    # Squared error on a linear layer: G = 2·I, so that the natural gradient is A⁻¹ V / 2.
    x = np.hstack([inputs["input"], np.ones((4, 1), np.float32)]).astype("float64")
    block = engine.collection.fisher_blocks["w", "b"].full_fisher_block()
    np.testing.assert_allclose(block, np.kron(x.T @ x / 4, 2 * np.eye(3)), rtol=1e-4, atol=1e-5)
    result = engine.step(inputs, np.zeros((4, 3), np.float32))
    assert result.natural_gradients["w"].shape == engine.parameters["w"].shape


def test_bias_added_after_convolution_is_discovered():
    def build(n):
        x = n.op("Conv", "input", n.weight("w", 3, 2, 1, 1), to="conv")
        n.op("Add", x, n.weight("b", 3, 1, 1), to="output")

    model = net(build, inputs=("batch", 2, 4, 4), outputs=("batch", 3, 4, 4))
    (layer,) = layers_of(model)
    assert summary(layer) == ("conv2d", ("w", "b"), "input", "output")


def test_bias_of_reused_product_is_separate():
    def build(n):
        x = n.op("MatMul", "input", n.weight("w", 4, 3), to="product")
        y = n.op("Add", x, n.weight("b", 3), to="biased")
        n.op("Mul", x, y, to="output")

    weight, bias = layers_of(net(build))
    assert summary(weight) == ("fully_connected", ("w",), "input", "product")
    assert (bias.parameters, bias.kind, bias.outputs) == (("b",), "shift", "biased")


@pytest.mark.parametrize("batch", [1, 4])
def test_left_weight_has_block_of_transposed_form(batch):
    """``s = W·x`` with x ``(n, d_in, t)``: the block must equal that of the transposed spelling."""

    def left(n):
        n.op("MatMul", n.weight("w", 3, 4), "input", to="output")

    def right(n):
        x = n.op("Transpose", "input", to="turned", perm=[0, 2, 1])
        x = n.op("MatMul", x, n.constant("w", w.T.copy()), to="product")
        n.op("Transpose", x, to="output", perm=[0, 2, 1])

    made = models.Net()
    left(made)
    model = made.model({"input": ["batch", 4, 5]}, {"output": ["batch", 3, 5]})
    w = np.frombuffer(model.graph.initializer[0].raw_data, np.float32).reshape(3, 4)
    other = net(right, inputs=("batch", 4, 5), outputs=("batch", 3, 5))
    inputs = models.random_inputs(model, batch=batch)
    blocks = []
    for candidate in (model, other):
        engine = ke.Engine.from_onnx(candidate, loss="normal", estimation_mode="exact")
        engine.observe(inputs)
        blocks.append(engine.collection.get_blocks()[0].full_fisher_block())
    # float32 sums of a handful of terms
    np.testing.assert_allclose(*blocks, rtol=1e-5, atol=1e-6)


def test_parameter_without_influence_has_reason():
    engine = ke.Engine.from_onnx(models.two_outputs(), loss="categorical", output="logits")
    reasons = {layer.parameters: layer.reason for layer in engine.layers}
    assert reasons["mean.weight",] == "the loss does not depend on it"
    inputs = models.random_inputs(models.two_outputs(), batch=4)
    result = engine.step(inputs, np.array([0, 1, 2, 0]))
    assert not result.gradients["mean.weight"].any()
    assert not result.natural_gradients["mean.weight"].any()
