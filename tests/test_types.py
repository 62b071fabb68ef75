"""Models in float64, models with quantized parts, and models with text beside the numbers."""

import numpy as np
import pytest
from onnx import TensorProto, helper

import kfac_engine as ke
from kfac_engine.errors import BackendError, ModelError
from tests import models, oracle
from tests.comparing import assert_arrays_equal

# Relative to the largest gradient, of finite differences in float64...
DOUBLE = 1e-8
# ...and of float32 passes.
SINGLE = 2e-5


def assert_gradients(model, names, tolerance):
    inputs = models.random_inputs(model)
    targets = np.arange(3) % 3
    found = ke.Engine.from_onnx(model, loss="categorical").gradients(inputs, targets).gradients
    assert list(found) == names
    _, truth = oracle.loss_and_gradient(model, inputs, "output", names, "categorical", targets)
    scale = max(np.abs(array).max() for array in truth.values())
    for name in names:
        np.testing.assert_allclose(found[name], truth[name], atol=tolerance * scale)


@pytest.mark.parametrize("name", ["mlp", "embedding", "token_mlp"])
def test_float64_models_are_computed_in_float64(name):
    model = models.MODELS[name](dtype="float64")
    engine = ke.Engine.from_onnx(model, loss="normal")
    inputs = models.random_inputs(model)
    (z,) = oracle.evaluate(model, inputs, "output")
    result = engine.step(inputs, np.zeros_like(z))
    names = list(engine.parameters)
    _, truth = oracle.loss_and_gradient(model, inputs, "output", names, "normal", np.zeros_like(z))
    for key in names:
        assert result.natural_gradients[key].dtype == np.float64
        scale = np.abs(truth[key]).max()
        np.testing.assert_allclose(result.gradients[key], truth[key], atol=DOUBLE * scale)


def test_float64_operator_without_a_kernel_is_named_with_its_node():
    with pytest.raises(BackendError, match=r"no Conv for the CPU.*'node_conv0'.*float32"):
        ke.Engine.from_onnx(models.cnn(dtype="float64"), loss="categorical")


# -- quantized -------------------------------------------------------------------------------------


def quantized(*, activations, before, head):
    """A layer with int8 weights, maybe between float layers, maybe with rounded activations."""
    net, x = models.Net(), "input"
    whole = np.random.default_rng(0).integers(-100, 100, (6, 3), dtype=np.int8)
    scale = net.constant("q.scale", np.array(0.01, np.float32))
    zero = net.constant("q.zero", np.array(0, np.int8))
    weight = net.op("DequantizeLinear", net.constant("q.weight", whole), scale, zero, to="weight")
    if before:
        x = net.op("MatMul", x, net.weight("before.weight", 6, 6), to="before")
    if activations:
        scale = net.constant("x.scale", np.array(0.02, np.float32))
        zero = net.constant("x.zero", np.array(128, np.uint8))
        x = net.op("QuantizeLinear", x, scale, zero, to="whole")
        x = net.op("DequantizeLinear", x, scale, zero, to="rounded")
    x = net.op("MatMul", x, weight, to="hidden" if head else "output")
    if head:
        x = net.op("Tanh", x, to="act")
        net.op("MatMul", x, net.weight("head.weight", 3, 3), to="output")
    model = net.model({"input": ["batch", 6]}, {"output": ["batch", 3]})
    model.opset_import[0].version = 21  # an older one has no reference implementation
    return model


@pytest.mark.parametrize("activations", [False, True], ids=["weights", "activations"])
def test_float_layer_after_quantized_layers_is_trained(activations):
    model = quantized(activations=activations, before=False, head=True)
    assert_gradients(model, ["head.weight"], SINGLE)


def test_float_layer_before_int8_weights_is_trained():
    model = quantized(activations=False, before=True, head=True)
    assert_gradients(model, ["before.weight", "head.weight"], SINGLE)


@pytest.mark.parametrize("activations", [False, True], ids=["weights", "activations"])
def test_model_with_only_quantized_weights_raises_error(activations):
    model = quantized(activations=activations, before=False, head=False)
    with pytest.raises(ModelError, match=r"its weights are quantized .'q.weight' is int8.*before"):
        ke.Engine.from_onnx(model, loss="categorical")


def test_tree_models_have_no_parameters():
    model = models.parsed(
        """forest (float[batch,4] input) => (float[batch,1] output) {
          [trees] output = ai.onnx.ml.TreeEnsembleRegressor <
            n_targets = 1, nodes_treeids = [0], nodes_nodeids = [0], nodes_featureids = [0],
            nodes_modes = ["LEAF"], nodes_values = [0.0], nodes_truenodeids = [0],
            nodes_falsenodeids = [0], target_treeids = [0], target_nodeids = [0],
            target_ids = [0], target_weights = [1.0]> (input)
        }""",
        {},
        '"": 18, "ai.onnx.ml": 3',
    )
    with pytest.raises(ModelError, match=r"TreeEnsembleRegressor node 'trees' stores .*'nodes_val"):
        ke.Engine.from_onnx(model, loss="normal")


# -- text ------------------------------------------------------------------------------------------


def test_text_input_off_gradient_path_is_accepted():
    model = models.mlp()
    text = helper.make_tensor_value_info("text", TensorProto.STRING, ["batch"])
    echo = helper.make_tensor_value_info("echo", TensorProto.STRING, ["batch"])
    model.graph.input.append(text)
    model.graph.node.append(helper.make_node("Identity", ["text"], ["echo"]))
    model.graph.output.append(echo)
    inputs = models.random_inputs(models.mlp())
    targets = np.arange(3)
    plain = ke.Engine.from_onnx(models.mlp(), loss="categorical").gradients(inputs, targets)
    engine = ke.Engine.from_onnx(model, loss="categorical", output="output")
    inputs["text"] = np.asarray(["one", "two", "three"], object)
    found = engine.gradients(inputs, targets)
    assert found.loss == plain.loss
    assert_arrays_equal(found.gradients, plain.gradients)
