"""Gradient models against finite differences, run by ONNX Runtime and by the reference."""

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument

import kfac_engine as ke
from tests import models, oracle
from tests.graph.running import outputs

LOSSES = {
    "mlp": "categorical",
    "token_mlp": "categorical",
    "cnn": "categorical",
    "layer_norm": "multi_bernoulli",
    "tied": "normal",
    "embedding": "categorical",
    "resnet_block": "normal",
}
# Relative to the largest gradient: float32 passes of small networks.
TOLERANCE = 2e-5


def run(model, feeds):
    onnx.checker.check_model(model, full_check=True)
    return outputs(model, feeds)


def targets_for(model, inputs, loss):
    (z,) = oracle.evaluate(model, inputs, "output")
    rng = np.random.default_rng(1)
    if loss == "categorical":
        return rng.integers(0, z.shape[-1], z.shape[:-1])
    return rng.integers(0, 2, z.shape).astype(np.float32)


@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradients_equal_finite_differences_at_any_batch_size(name):
    model, loss = models.MODELS[name](), LOSSES[name]
    gradient = ke.differentiate(model, loss)
    parameters = list(ke.load_model(model).parameters)
    for batch in (3, 1):
        inputs = models.random_inputs(model, batch=batch)
        targets = targets_for(model, inputs, loss)
        found = run(gradient, {**inputs, "targets": targets})
        value, expected = oracle.loss_and_gradient(
            model, inputs, "output", parameters, loss, targets
        )
        assert found["loss"] == pytest.approx(value, rel=1e-5)
        scale = max(np.abs(array).max() for array in expected.values())
        assert sorted(found) == sorted(["loss", *(f"gradient/{p}" for p in parameters)])
        for parameter in parameters:
            np.testing.assert_allclose(
                found[f"gradient/{parameter}"], expected[parameter], atol=TOLERANCE * scale
            )


@pytest.mark.parametrize("reduction", ["mean", "batch_mean", "sum"])
def test_gradient_models_of_all_reductions_agree_in_both_runtimes(reduction):
    model = models.token_mlp(dtype="float64")
    inputs = models.random_inputs(model, batch=3)
    targets = targets_for(model, inputs, "categorical")
    gradient = ke.differentiate(model, "categorical", reduction=reduction)
    value, expected = oracle.loss_and_gradient(
        model, inputs, "output", ["fc0.weight"], "categorical", targets, reduction=reduction
    )
    feeds = {**inputs, "targets": targets}
    names = ["loss", "gradient/fc0.weight"]
    reference = dict(zip(names, ReferenceEvaluator(gradient).run(names, feeds), strict=True))
    for found in (run(gradient, feeds), reference):
        assert float(found["loss"]) == pytest.approx(value, rel=1e-10)
        np.testing.assert_allclose(found["gradient/fc0.weight"], expected["fc0.weight"], atol=1e-8)


def test_gradient_model_supports_other_class_axis():
    net = models.Net()
    net.op("Conv", "input", net.weight("w", 3, 2, 1, 1), to="output")
    model = net.model({"input": ["batch", 2, 4, 4]}, {"output": ["batch", 3, 4, 4]})
    inputs = models.random_inputs(model, batch=2)
    targets = np.random.default_rng(0).integers(0, 3, (2, 4, 4))
    gradient = ke.differentiate(model, "categorical", class_axis=1)
    engine = ke.Engine.from_onnx(model, loss="categorical", class_axis=1)
    expected = engine.gradients(inputs, targets)
    found = run(gradient, {**inputs, "targets": targets})
    assert found["loss"] == pytest.approx(expected.loss, rel=1e-5)
    np.testing.assert_allclose(found["gradient/w"], expected.gradients["w"], atol=1e-6)


@pytest.mark.parametrize("output", [None, "output", ["output"]])
def test_gradient_model_without_loss_has_cotangent_input(output):
    model = models.mlp(dtype="float64")
    inputs = models.random_inputs(model, batch=4)
    gradient = ke.differentiate(model, output=output, wrt=["input"])
    cotangent = np.random.default_rng(0).standard_normal((4, 3))
    found = run(gradient, {**inputs, "cotangent": cotangent})
    x = inputs["input"]

    def inner(moved):
        (y,) = oracle.evaluate(model, {"input": moved}, "output")
        return np.array((cotangent * y).sum())

    expected = np.array(
        [oracle.derivative(inner, x, index) for index in np.ndindex(x.shape)]
    ).reshape(x.shape)
    np.testing.assert_allclose(found["gradient/input"], expected, atol=1e-9)


@pytest.mark.parametrize("name", ["loss", "targets", "cotangent", "gradient/fc0.weight"])
def test_output_may_have_the_name_of_another_value(name):
    model = models.mlp(dtype="float64")
    inputs = models.random_inputs(model, batch=4)
    cotangent = np.random.default_rng(0).standard_normal((4, 3))
    (expected,) = list(run(ke.differentiate(model), {**inputs, "cotangent": cotangent}).items())[
        1:2
    ]
    for node in model.graph.node:
        node.output[:] = [name if value == "output" else value for value in node.output]
    model.graph.output[0].name = name
    gradient = ke.differentiate(model)
    added = gradient.graph.input[-1].name
    assert added == ("cotangent_2" if name == "cotangent" else "cotangent")
    results = list(run(gradient, {**inputs, added: cotangent}).values())
    np.testing.assert_array_equal(results[1], expected[1])


def test_gradient_model_is_differentiable():
    """Force matching: the loss is on the gradient with respect to the input."""
    model = models.mlp(widths=(3, 4, 1), dtype="float64")
    inputs = models.random_inputs(model, batch=2)
    forces = ke.differentiate(model, wrt=["input"])
    matching = ke.differentiate(forces, "normal", output="gradient/input", wrt=["fc0.*"])
    ones = np.ones((2, 1))
    rng = np.random.default_rng(0)
    targets = rng.standard_normal((2, 3))
    found = run(matching, {**inputs, "cotangent": ones, "targets": targets})

    def loss(weight):
        changed = onnx.ModelProto()
        changed.CopyFrom(forces)
        for entry in changed.graph.initializer:
            if entry.name == "fc0.weight":
                entry.CopyFrom(onnx.numpy_helper.from_array(weight, entry.name))
        force = run(changed, {**inputs, "cotangent": ones})["gradient/input"]
        return np.array(((force - targets) ** 2 + 0.5 * np.log(np.pi)).sum() / 2)

    weight = ke.load_model(model).parameters["fc0.weight"]
    assert found["loss"] == pytest.approx(float(loss(weight)), rel=1e-12)
    expected = np.array(
        [oracle.derivative(loss, weight, index) for index in np.ndindex(weight.shape)]
    ).reshape(weight.shape)
    np.testing.assert_allclose(found["gradient/fc0.weight"], expected, atol=1e-8)


def test_gradients_of_unused_parameters_are_zero():
    model = models.two_outputs()
    gradient = ke.differentiate(model, "categorical", "logits")
    inputs = models.random_inputs(model, batch=2)
    found = run(gradient, {**inputs, "targets": np.array([0, 2])})
    np.testing.assert_array_equal(found["gradient/mean.weight"], np.zeros((2, 4)))
    assert found["gradient/logits.weight"].any()


@pytest.mark.parametrize("gap", [0, 15, 18, 40], ids=str)
@pytest.mark.parametrize("loss", ["categorical", "multi_bernoulli"])
def test_gradients_of_confident_predictions_keep_their_digits(loss, gap):
    """For a gap of 15, p is 1 − 6e-7; for 18, the nearest number to p in float32 is one."""
    net = models.Net()
    net.op("Add", "input", net.constant("b", np.zeros(3, np.float32)), to="output")
    model = net.model({"input": ["batch", 3]}, {"output": ["batch", 3]})
    gradient = ke.differentiate(model, loss, wrt=["input"], reduction="sum")
    noise = np.random.default_rng(0).uniform(0, 1, 3)
    z = np.where([True, False, False], gap + noise, -noise).astype(np.float32)
    if loss == "categorical":  # the largest logit is right
        targets, odds = np.array([0]), np.exp(z[1:].astype(float) - z[0])
        value = np.log1p(odds.sum())
        expected = np.array([-odds.sum(), *odds]) / (1 + odds.sum())
    else:  # every logit is far from zero, with the right sign
        z = np.where(z > 0, z, -gap + z).astype(np.float32)
        targets, odds = (z[None] > 0).astype(np.float32), np.exp(-abs(z.astype(float)))
        value = np.log1p(odds).sum()
        expected = np.where(z > 0, -1, 1) * odds / (1 + odds)
    found = run(gradient, {"input": z[None], "targets": targets})
    # Roundings of exp and log, whose arguments are up to 41.
    assert found["loss"] == pytest.approx(value, rel=1e-5)
    np.testing.assert_allclose(found["gradient/input"][0], expected, rtol=1e-5)


BAD = {
    "several outputs": (models.two_outputs, {}, "logits, mean"),
    "unknown output": (models.mlp, {"output": "nowhere"}, "nowhere"),
    "unknown loss": (models.mlp, {"loss": "hinge"}, "hinge"),
    "unknown pattern": (models.mlp, {"wrt": ["head.*"]}, "head"),
    "nothing asked for": (models.mlp, {"wrt": []}, "wrt is empty"),
    "no path": (models.two_outputs, {"output": "logits", "wrt": ["mean.*"]}, "depends on none"),
    "rounding": (models.odd_ops, {"wrt": ["fc0.*"]}, r"QuantizeLinear.*'fc0\.weight' and 1 more"),
    "frozen": (models.mlp, {"freeze": "*"}, "left to train"),
    "unknown frozen": (models.mlp, {"freeze": "head.*"}, r"head\.\*"),
    "bad axis": (models.mlp, {"loss": "normal", "class_axis": 5}, "class_axis=5"),
    "bad reduction": (models.mlp, {"loss": "normal", "reduction": "median"}, "median"),
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_request_error_names_argument(name):
    make, options, message = BAD[name]
    with pytest.raises(ke.KfacError, match=message):
        ke.differentiate(make(), **options)


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (f"Softmax <axis = {-(2**63)}> (x)", r"Softmax.*axis -9223372036854775808.*'x'.*-2 to 1"),
        (f"LogSoftmax <axis = {2**32}> (x)", r"LogSoftmax.*axis 4294967296"),
        ("Clip (x, nan, one)", "Clip.*NaN as the bound 'nan'"),
        ("Clip (x, one, nan)", "Clip.*NaN as the bound 'nan'"),
    ],
)
def test_settings_that_onnx_does_not_define_have_an_error(node, message):
    """ONNX Runtime runs such models."""
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> m (float[N,3] x) => (float[] y) {{ y = {node} }}'
    )
    numbers = {"nan": np.float32("nan"), "one": np.float32(1)}
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(np.asarray(number), name) for name, number in numbers.items()
    )
    with pytest.raises(ke.ModelError, match=message):
        ke.differentiate(model, wrt=["x"])


def test_second_derivatives_of_same_value_have_new_name():
    """The Hessian of an energy with respect to positions, times a vector."""
    model = models.mlp(widths=(3, 4, 1), dtype="float64")
    inputs = {**models.random_inputs(model, batch=2), "cotangent": np.ones((2, 1))}
    forces = ke.differentiate(model, wrt=["input"])
    hessian = ke.differentiate(forces, output="gradient/input", wrt=["input"])
    direction = np.random.default_rng(0).standard_normal((2, 3))
    found = run(hessian, {**inputs, "cotangent_2": direction})["gradient/input_2"]

    def slope(step):
        moved = {**inputs, "input": inputs["input"] + step * direction}
        return run(forces, moved)["gradient/input"]

    # Central differences of a smooth function in float64.
    np.testing.assert_allclose(found, (slope(1e-5) - slope(-1e-5)) / 2e-5, atol=1e-8)


def test_targets_are_declared_with_shape_of_output():
    declared = {
        loss: ke.differentiate(models.token_mlp(), loss).graph.input[-1].type.tensor_type
        for loss in ("categorical", "normal")
    }
    (output,) = models.token_mlp().graph.output
    sides = list(output.type.tensor_type.shape.dim)
    assert list(declared["normal"].shape.dim) == sides
    assert list(declared["categorical"].shape.dim) == sides[:-1]


@pytest.mark.parametrize("pattern", ["fc0.weight", "fc0.w*"])
def test_single_pattern_may_be_string(pattern):
    gradient = ke.differentiate(models.mlp(), wrt=pattern)
    assert [entry.name for entry in gradient.graph.output] == ["output", "gradient/fc0.weight"]
    engine = ke.Engine.from_onnx(models.mlp(), loss="categorical", trainable=pattern)
    assert list(engine.parameters) == ["fc0.weight"]


@pytest.mark.parametrize("label", [-1, -99, 3])
def test_runtime_rejects_invalid_class_ids(label):
    model = models.mlp(widths=(2, 4, 3))
    gradient = ke.differentiate(model, "categorical")
    feeds = {**models.random_inputs(model, batch=2), "targets": np.array([0, label])}
    with pytest.raises(InvalidArgument, match="Gather node"):
        outputs(gradient, feeds)
