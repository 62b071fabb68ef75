"""``Trace.jvp`` and ``Trace.second_derivative`` on models, as run in production."""

import numpy as np
import pytest

import kfac_engine as ke
from tests import models, oracle
from tests.comparing import assert_near

# float32 passes against float64 differences, relative to the largest entry.
SINGLE = 5e-5
NAMES = ["mlp", "layer_norm", "token_mlp", "tied", "embedding", "cnn", "resnet_block"]


def directions(trace, names, seed=0):
    rng = np.random.default_rng(seed)
    return {n: rng.standard_normal(trace[n].shape).astype(trace[n].dtype) for n in names}


@pytest.mark.parametrize("name", NAMES)
def test_jvp_equals_finite_differences(name):
    proto = models.MODELS[name]()
    model = ke.load_model(proto)
    for batch in (2, 3, 1):  # one session for each shape
        inputs = models.random_inputs(proto, batch)
        trace = model.run(inputs)
        tangents = directions(trace, model.parameters)
        found = trace.jvp(tangents, ["output"])["output"]
        assert found.dtype == trace["output"].dtype
        assert_near(found, oracle.slope(proto, inputs, "output", tangents), SINGLE)


def smooth_cnn():
    """Without kinks: convolutions with strides, pads and groups, Tanh, AveragePool, Gemm."""
    net = models.Net()
    x = net.conv("conv0", "input", 2, 4, 3, pads=[1, 1, 1, 1], strides=[2, 2])
    x = net.op("Tanh", x, to="act0")
    x = net.conv("conv1", x, 2, 6, 2, group=2)
    x = net.op("AveragePool", net.op("Softplus", x, to="act1"), to="pool", kernel_shape=[2, 2])
    x = net.conv("conv2", x, 6, 4, 2, pads=[1, 0, 0, 1])
    x = net.op("Flatten", net.op("Sigmoid", x, to="act2"), to="flat")
    net.dense("output", x, 16, 3)
    return net.model({"input": ["batch", 2, 8, 8]}, {"output": ["batch", 3]})


@pytest.mark.parametrize("make", [models.mlp, smooth_cnn, models.layer_norm, models.tied,
                                  models.embedding], ids=lambda make: make.__name__)  # fmt: skip
def test_second_derivative_equals_finite_differences_of_gradients(make):
    proto = make()
    model = ke.load_model(proto)
    inputs = models.random_inputs(proto, 3)
    trace = model.run(inputs)
    cotangents, tangents = directions(trace, ["output"]), directions(trace, model.parameters, 1)
    moved, found = trace.second_derivative(cotangents, tangents)
    step = 2.0**-9

    def gradients(sign):
        there = {n: v + sign * step * tangents[n] for n, v in model.parameters.items()}
        return model.run(inputs, parameters=there).vjp(cotangents, list(tangents))

    ahead, behind = gradients(1), gradients(-1)
    together = np.concatenate([f.ravel() for f in found.values()])
    expected = np.concatenate([((ahead[n] - behind[n]) / (2 * step)).ravel() for n in found])
    # Differences of float32 gradients: rounding of 1e-7 over a step of 2e-3, and its square.
    np.testing.assert_allclose(together, expected, atol=1e-3 * np.abs(expected).max())
    assert_near(moved["output"], trace.jvp(tangents, ["output"])["output"], SINGLE)


def test_jvp_of_inputs_and_hidden_values_is_adjoint_of_vjp():
    proto = models.cnn()
    trace = ke.load_model(proto).run(models.random_inputs(proto, 4))
    tangents = directions(trace, ["input", "act0", "conv1.weight"])
    cotangents = directions(trace, ["output", "flat"], 1)
    moved = trace.jvp(tangents, list(cotangents))
    gradients = trace.vjp(cotangents, list(tangents))
    one = sum(float((moved[n] * c).sum()) for n, c in cotangents.items())
    other = sum(float((gradients[n] * v).sum()) for n, v in tangents.items())
    assert one == pytest.approx(other, rel=1e-5)


def test_jvp_treats_values_with_tangents_as_independent():
    proto = models.mlp()
    trace = ke.load_model(proto).run(models.random_inputs(proto, 3))
    tangents = directions(trace, ["act0", "fc0.weight"])
    # The weight acts on the output only through the activation, which is held fixed.
    alone = trace.jvp({"act0": tangents["act0"]}, ["output"])["output"]
    both = trace.jvp(tangents, ["output"], independent=True)["output"]
    np.testing.assert_allclose(both, alone, rtol=1e-6)
    assert not np.allclose(trace.jvp(tangents, ["output"])["output"], alone)
    gradients = trace.vjp({"output": np.ones_like(alone)}, list(tangents), independent=True)
    assert not gradients["fc0.weight"].any()
    assert gradients["act0"].any()


def test_values_with_shared_gradient_have_equal_second_derivatives():
    # s = W x + b: the cotangents of product and bias are one value where the batch is one.
    net = models.Net()
    net.op("Add", "input", net.weight("shift", 3), to="moved")
    net.op("Add", "moved", "input", to="output")
    proto = net.model({"input": ["batch", 3]}, {"output": ["batch", 3]})
    trace = ke.load_model(proto).run(models.random_inputs(proto, 1))
    tangents = directions(trace, ["moved", "input"])
    found = trace.jvp(tangents, ["output"])["output"]
    np.testing.assert_allclose(found, tangents["moved"] + 2 * tangents["input"], rtol=1e-6)


def test_jvp_of_value_without_tangent_is_zero():
    proto = models.two_outputs()
    trace = ke.load_model(proto).run(models.random_inputs(proto, 3))
    tangents = directions(trace, ["mean.weight"])
    found = trace.jvp(tangents, ["logits", "mean"])
    np.testing.assert_array_equal(found["logits"], np.zeros((3, 3)))
    assert found["mean"].any()
    moved, bent = trace.second_derivative({"logits": np.ones((3, 3), np.float32)}, tangents)
    assert not moved["logits"].any()
    np.testing.assert_array_equal(bent["mean.weight"], np.zeros((2, 4)))


def test_output_may_have_tangent():
    proto = models.mlp()
    trace = ke.load_model(proto).run(models.random_inputs(proto, 3))
    tangents = directions(trace, ["output"])
    np.testing.assert_array_equal(trace.jvp(tangents, ["output"])["output"], tangents["output"])


def test_jvp_uses_parameters_of_its_trace():
    proto = models.tied()
    model = ke.load_model(proto)
    inputs = models.random_inputs(proto, 3)
    zero = {"shared.weight": np.zeros((4, 4), np.float32)}
    found = model.run(inputs, parameters=zero).jvp({"shared.weight": np.eye(4)}, ["output"])
    # tanh(x W) W has no linear part at W = 0.
    np.testing.assert_array_equal(found["output"], np.zeros((3, 4)))


def test_tangent_of_wrong_shape_raises_error():
    proto = models.mlp()
    trace = ke.load_model(proto).run(models.random_inputs(proto, 3))
    with pytest.raises(ke.ShapeError, match=r"tangent of 'fc0.bias' has shape \(2,\)"):
        trace.jvp({"fc0.bias": np.zeros(2)}, ["output"])
    with pytest.raises(ke.UnknownNameError, match="nobody"):
        trace.jvp({"nobody": np.zeros(2)}, ["output"])


def test_pad_between_transposes_is_correct_after_runtime_optimization():
    # It moves a Transpose over a Pad; the gradient of a Slice is a Pad.
    net = models.Net()
    front = net.op("Transpose", "input", to="front", perm=[0, 2, 1])
    bounds = [net.constant(n, np.array([v])) for n, v in (("from", 1), ("to", 3), ("axis", 2))]
    cut = net.op("Slice", net.op("Mul", front, net.weight("w", 5), to="scaled"), *bounds, to="cut")
    net.op("Transpose", cut, to="output", perm=[0, 2, 1])
    proto = net.model({"input": ["batch", 5, 2]}, {"output": ["batch", 2, 2]})
    trace = ke.load_model(proto).run(models.random_inputs(proto, 3))
    found = trace.vjp({"output": np.ones((3, 2, 2), np.float32)}, ["front", "input", "w"])
    weight = ke.load_model(proto).parameters["w"]
    expected = np.zeros((3, 5, 2))
    expected[:, 1:3] = weight[1:3, None]
    np.testing.assert_allclose(found["input"], expected, rtol=1e-6)
