"""Models as they are run in production: sessions, threads, saved tensors, made-up samples."""

import numpy as np
import pytest
from onnx import helper, parser

import kfac_engine as ke
from tests import models, oracle


def masked():
    """``output = where(input > 0, input · w, v)``: a truth value is saved for the backward pass."""
    net = models.Net()
    zero = net.constant("zero", np.zeros(1, np.float32))
    product = net.op("Mul", "input", net.weight("w", 4), to="product")
    mask = net.op("Greater", "input", zero, to="mask")
    net.op("Where", mask, product, net.weight("v", 4), to="output")
    return net.model({"input": ["batch", 4]}, {"output": ["batch", 4]})


def test_boolean_values_are_saved_as_booleans():
    model = ke.load_model(masked())
    inputs = models.random_inputs(masked(), batch=5)
    x, trace = inputs["input"], model.run(inputs)
    assert trace["mask"].dtype == np.bool_
    found = trace.vjp({"output": np.ones_like(x)}, ["w", "v"])
    np.testing.assert_allclose(found["w"], np.where(x > 0, x, 0).sum(0), rtol=1e-6)
    np.testing.assert_allclose(found["v"], (x <= 0).sum(0))


@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet_block", "layer_norm", "token_mlp"])
def test_vjp_equals_finite_differences_for_parameters_inputs_and_activations(name):
    proto = models.MODELS[name]()
    inputs = models.random_inputs(proto, batch=2)
    trace = ke.load_model(proto, threads=2).run(inputs)
    rng = np.random.default_rng(0)
    cotangent = rng.standard_normal(trace["output"].shape).astype(np.float32)
    parameters = list(ke.load_model(proto).parameters)[:2]
    found = trace.vjp({"output": cotangent}, [*parameters, "input"])
    jacobian = oracle.jacobian(proto, inputs, "output", parameters)
    flat = cotangent.reshape(len(cotangent), -1, cotangent.shape[-1])
    expected = np.einsum("btc,btcp->p", flat, jacobian)
    together = np.concatenate([found[name].ravel() for name in parameters])
    # float32 passes against float64 differences, relative to the largest entry
    np.testing.assert_allclose(together, expected, atol=2e-5 * np.abs(expected).max())
    step = 2.0**-8 * rng.standard_normal(inputs["input"].shape)
    moved = [{"input": inputs["input"].astype(np.float64) + sign * step} for sign in (1, -1)]
    (plus,), (minus,) = (oracle.evaluate(proto, m, "output") for m in moved)
    slope = float((cotangent * (plus - minus)).sum() / 2)
    # A second-order difference with a step of 1/256: good to some 1e-4 unless a kink is crossed.
    assert float((found["input"] * step).sum()) == pytest.approx(slope, rel=2e-3, abs=1e-4)


def test_value_is_computed_on_first_read_and_then_for_every_batch():
    proto = models.mlp()
    model = ke.load_model(proto)
    inputs = models.random_inputs(proto, batch=3)
    trace = model.run(inputs)
    (expected,) = oracle.evaluate(proto, inputs, "act0")
    np.testing.assert_allclose(trace["act0"], expected, atol=1e-6)
    assert "act0" in model.fetch({**inputs, **model.parameters})


def test_gradient_of_differentiated_value_includes_other_paths():
    proto = models.mlp()
    trace = ke.load_model(proto).run(models.random_inputs(proto, batch=3))
    cotangent = np.ones_like(trace["output"])
    found = trace.vjp({"output": cotangent}, ["output", "fc1"])
    np.testing.assert_array_equal(found["output"], cotangent)
    assert found["fc1"].any()


def test_gradient_of_value_without_influence_is_zero():
    proto = models.two_outputs()
    trace = ke.load_model(proto).run(models.random_inputs(proto, batch=3))
    found = trace.vjp({"logits": np.ones((3, 3), np.float32)}, ["mean.weight"])
    np.testing.assert_array_equal(found["mean.weight"], np.zeros((2, 4)))


def test_run_accepts_other_parameters():
    proto = models.linear()
    model = ke.load_model(proto)
    inputs = models.random_inputs(proto, batch=3)
    zero = {"fc.weight": np.zeros((4, 3), np.float32)}
    output = model.run(inputs, parameters=zero)["output"]
    np.testing.assert_allclose(output, np.broadcast_to(model.parameters["fc.bias"], (3, 3)))
    assert model.parameters["fc.weight"].any()


def test_unknown_names_and_wrong_cotangents_raise_error():
    proto = models.mlp()
    trace = ke.load_model(proto).run(models.random_inputs(proto, batch=3))
    with pytest.raises(ke.UnknownNameError, match="nowhere"):
        trace["nowhere"]
    with pytest.raises(ke.UnknownNameError, match="nowhere"):
        trace.vjp({"output": np.ones_like(trace["output"])}, ["nowhere"])
    with pytest.raises(ke.ShapeError, match=r"\(3, 4\)"):
        trace.vjp({"output": np.ones((3, 4), np.float32)}, ["fc1"])


def test_sample_run_of_one_example_supports_all_batch_sizes():
    proto = models.resnet_block()
    one = models.random_inputs(proto, batch=1)
    model = ke.load_model(proto, sample_inputs=one)
    other = ke.load_model(proto)
    inputs = models.random_inputs(proto, batch=3)
    results = []
    for candidate in (model, other):
        trace = candidate.run(inputs)
        found = trace.vjp({"output": np.ones_like(trace["output"])}, list(candidate.parameters))
        results.append(np.concatenate([array.ravel() for array in found.values()]))
    np.testing.assert_array_equal(*results)


def test_model_without_generated_inputs_asks_for_sample_inputs():
    net = models.Net()
    x = net.op("Reshape", "input", net.constant("sides", np.array([-1, 5])), to="rows")
    net.op("MatMul", x, net.weight("w", 5, 2), to="output")
    proto = net.model({"input": ["batch", "length"]}, {"output": ["rows", 2]})
    with pytest.raises(ke.ModelError, match="sample_inputs"):
        ke.load_model(proto)
    sample = {"input": np.ones((2, 5), np.float32)}
    assert ke.load_model(proto, sample_inputs=sample).run(sample)["output"].shape == (2, 2)


@pytest.mark.parametrize(("op", "kernel", "stride"), [("AveragePool", 4, 2), ("MaxPool", 4, 4)])
def test_window_larger_than_image_raises_error(op, kernel, stride):
    def pooled(side):
        net = models.Net()
        x = net.op("Mul", "input", net.weight("w", 1, 2, 1, 1), to="scaled")
        net.op(op, x, to="output", kernel_shape=[kernel] * 2, strides=[stride] * 2)
        shape = ["batch", 2, side, side]
        return net.model({"input": shape}, {"output": ["batch", 2, "rows", "columns"]})

    trace = ke.load_model(pooled(3)).run(models.random_inputs(pooled(3)))
    assert trace["output"].shape == (3, 2, 1, 1)  # the runtime makes an output of three pixels
    with pytest.raises(ke.ModelError, match=rf"{op} at node 'node_output'.*\(3, 3\)"):
        trace.vjp({"output": np.ones((3, 2, 1, 1), np.float32)}, ["w"])
    fitting = ke.load_model(pooled(4)).run(models.random_inputs(pooled(4)))
    found = fitting.vjp({"output": np.ones_like(fitting["output"])}, ["w"])
    assert found["w"].any()


@pytest.mark.parametrize("mean", ["GlobalAveragePool (a)", "ReduceMean (a, axes)"])
def test_generated_images_are_not_pooled_to_one_pixel_before_their_mean(mean):
    """A gate multiplies all pixels, which an image of one pixel does not tell."""
    model = models.written(
        "batch,2,rows,columns -> batch,2,h,v",
        "w(2,2,3,3) gate(2,2,1,1) axes=2,3",
        "a = Conv<strides=[8, 8], pads=[1, 1, 1, 1]> (input, w) "
        f"m = {mean} g = Conv (m, gate) output = Mul (a, g)",
    )
    engine = ke.Engine.from_onnx(model, loss="normal")
    x = np.random.default_rng(0).standard_normal((3, 2, 24, 16)).astype("float32")
    t, before = np.ones((3, 2, 3, 2), "float32"), engine.parameters["gate"].copy()
    slope = engine.gradients({"input": x}, t).gradients["gate"].sum()
    ends = []
    for step in (-0.5, 0.5):  # the loss is quadratic
        engine.set_parameters({"gate": before + np.float32(step)})
        ends.append(engine.gradients({"input": x}, t).loss)
    assert slope == pytest.approx(ends[1] - ends[0], rel=1e-4)


def test_generated_axes_of_one_symbol_have_one_size():
    """Time comes first in one input and the batch in the other, as with lengths of sequences."""
    graph = parser.parse_graph(
        "g (float[S, N, 2] x, float[N, 3] b) => (float[N, 3] y) <int64[1] first = {0}, "
        "float[2, 3] w = {1, 2, 3, 4, 5, 6}> "
        "{ total = ReduceSum <keepdims = 0> (x, first) s = MatMul(total, w) y = Add(s, b) }"
    )
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)])
    facts = ke.load_model(model).facts
    assert facts["x"].shape[1] == facts["b"].shape[0]


@pytest.mark.parametrize("length", ["past + tokens", "s3"])
def test_generated_masks_cover_past_states_and_tokens(length):
    """The declaration names the sum, or gives the mask a symbol of its own."""
    model = parser.parse_model(
        """<ir_version: 8, opset_import: ["": 18]>
        m (float[n,past] state, float[n,tokens] x, int64[n,LENGTH] mask) => (float[n,k] y)
          <float[1] w = {2}> {
          both = Concat <axis = 1> (state, x)
          weight = Cast <to = 1> (mask)
          y = Mul (both, weight)  z = Mul (y, w)
        }""".replace("LENGTH", "k").replace("float[n,k] y", "float[n,k] z")
    )
    model.graph.input[2].type.tensor_type.shape.dim[1].dim_param = length
    assert ke.load_model(model, trainable="w").facts["mask"].shape == (2, 16)
    model.graph.input[2].type.tensor_type.shape.dim[1].dim_value = 9
    with pytest.raises(ke.ModelError, match="pass sample_inputs"):
        ke.load_model(model, trainable="w")


@pytest.mark.parametrize(
    ("side", "words"), [(2**33, "no batch can have"), (0, "has no entries")], ids=["huge", "empty"]
)
def test_impossible_declared_shape_raises_error(side, words):
    """ONNX Runtime 1.31 ends the process on some operands without entries."""
    model = models.mlp()
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = side
    with pytest.raises(ke.ModelError, match=f"'input'.*{side}.*{words}"):
        ke.load_model(model)


@pytest.mark.parametrize(
    ("freeze", "kept"),
    [
        (None, ["fc0.weight", "fc0.bias", "fc1.weight", "fc1.bias"]),
        ([], ["fc0.weight", "fc0.bias", "fc1.weight", "fc1.bias"]),
        ("*.bias", ["fc0.weight", "fc1.weight"]),
        (["fc0.*", "fc1.bias"], ["fc1.weight"]),
    ],
)
def test_frozen_parameters_are_excluded(freeze, kept):
    proto = models.mlp((6, 5, 3))
    inputs = models.random_inputs(proto, batch=2)
    model = ke.load_model(proto, freeze=freeze)
    assert list(model.parameters) == kept
    cotangent = {"output": np.ones((2, 3), np.float32)}
    found = model.run(inputs).vjp(cotangent, kept)
    expected = ke.load_model(proto).run(inputs).vjp(cotangent, kept)
    for name in kept:
        np.testing.assert_array_equal(found[name], expected[name])


def test_freeze_overrides_trainable():
    model = ke.load_model(models.mlp((6, 5, 3)), trainable="fc1.*", freeze="*.bias")
    assert list(model.parameters) == ["fc1.weight"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"freeze": "nothing*"}, ke.UnknownNameError, "nothing"),
        ({"freeze": "*"}, ke.ModelError, "freeze='\\*' matches all 4"),
        ({"freeze": 3}, ke.InputError, "freeze must be a list"),
        ({"freeze": [3]}, ke.InputError, "freeze must be a list of names"),
        ({"trainable": 3}, ke.InputError, "trainable must be a list"),
    ],
)
def test_invalid_parameter_pattern_raises_error(options, error, message):
    with pytest.raises(error, match=message):
        ke.load_model(models.mlp((6, 5, 3)), **options)
