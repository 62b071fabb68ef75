"""A model with the variance of an uncertain last layer computes that of the library."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import kfac_engine as ke
from kfac_engine.data import demo_model, digits
from tests import models
from tests.analysis.fisher_matrix.dense import measured
from tests.graph.running import outputs

STRUCTURES = ("kron", "ekfac", "diagonal", "full")


def gemm(transposed, dtype="float32"):
    """A hidden layer and a Gemm, with the weight of the last layer in both layouts."""
    net = models.Net(dtype)
    hidden = net.op("MatMul", "input", net.weight("first", 4, 5), to="hidden")
    act = net.op("Tanh", hidden, to="act")
    weight = net.weight("last", *((3, 5) if transposed else (5, 3)))
    net.op("Gemm", act, weight, net.weight("bias", 3), to="output", transB=int(transposed))
    return net.model({"input": ["batch", 4]}, {"output": ["batch", 3]})


def without_bias(dtype="float32"):
    net = models.Net(dtype)
    act = net.op("Tanh", net.op("MatMul", "input", net.weight("first", 4, 5), to="h"), to="act")
    net.op("MatMul", act, net.weight("last", 5, 3), to="output")
    return net.model({"input": ["batch", 4]}, {"output": ["batch", 3]})


NETWORKS = {
    "gemm": lambda: gemm(transposed=False),
    "transposed": lambda: gemm(transposed=True),
    "double": lambda: gemm(transposed=True, dtype="float64"),
    "without bias": without_bias,
}


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("network", NETWORKS)
def test_exported_variance_equals_the_prediction(tmp_path, network, structure):
    model = NETWORKS[network]()
    inputs = models.random_inputs(model, batch=9)
    curvature = measured(model, (inputs, None), structure=structure, layers="last")
    posterior = ke.Laplace(curvature, prior_precision=0.3)
    posterior.export(tmp_path / "uncertain.onnx")
    onnx.checker.check_model(str(tmp_path / "uncertain.onnx"))
    queries = models.random_inputs(model, batch=4, seed=5)
    results, expected = outputs(tmp_path / "uncertain.onnx", queries), posterior.predict(queries)
    assert results["variance"].shape == (4, 3, 3)
    np.testing.assert_allclose(results["variance"], expected.variance, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(results["output"], expected.mean, rtol=1e-5, atol=1e-6)
    assert results["variance"].dtype == results["output"].dtype


@pytest.mark.parametrize("biases", ["joint", "separate"])
def test_exported_cnn_reads_its_own_features(tmp_path, biases):
    images, labels = digits()
    inputs = {"image": images[:100]}
    model = demo_model("cnn")
    curvature = ke.curvature(
        model, (inputs, labels[:100]), loss="categorical", layers="last", biases=biases
    )
    posterior = ke.Laplace(curvature).fit_prior()
    path = tmp_path / "uncertain.onnx"
    posterior.export(path)
    queries = {"image": images[100:110]}
    variance = outputs(path, queries)["variance"]
    np.testing.assert_allclose(variance, posterior.predict(queries).variance, rtol=1e-3, atol=1e-6)
    before, after = onnx.load_from_string(model), onnx.load(path)
    assert after.opset_import == before.opset_import
    assert after.graph.node[: len(before.graph.node)] == before.graph.node


def test_file_of_an_old_format_declares_its_constants_as_inputs(tmp_path):
    model, path = models.mlp((4, 3, 3)), tmp_path / "uncertain.onnx"
    model.ir_version, model.opset_import[0].version = 3, 8
    for entry in model.graph.initializer:
        form = onnx.helper.make_tensor_value_info(entry.name, entry.data_type, entry.dims)
        model.graph.input.append(form)
    inputs = models.random_inputs(model)
    posterior = ke.Laplace(measured(model, (inputs, None), layers="last"))
    posterior.export(path)
    onnx.checker.check_model(str(path), full_check=True)
    expected = posterior.predict(inputs).variance
    np.testing.assert_allclose(outputs(path, inputs)["variance"], expected, rtol=1e-4, atol=1e-6)


def test_half_precision_file_computes_the_variance_in_float32(tmp_path):
    model = models.mlp((4, 3, 3))
    half = onnx.ModelProto()
    half.CopyFrom(model)
    for entry in half.graph.initializer:
        array = numpy_helper.to_array(entry)
        if array.dtype == np.float32:
            entry.CopyFrom(numpy_helper.from_array(array.astype(np.float16), entry.name))
    for entry in (*half.graph.input, *half.graph.output):
        entry.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    inputs = {"input": np.random.default_rng(0).uniform(-1, 1, (6, 4)).astype(np.float16)}
    curvature = ke.curvature(half, (inputs, None), loss="categorical", layers="last")
    posterior = ke.Laplace(curvature)
    posterior.export(tmp_path / "half.onnx")
    results = outputs(tmp_path / "half.onnx", inputs)
    assert results["variance"].dtype == np.float32
    # The features are rounded to half precision, 1e-3, in the file only.
    expected = posterior.predict(inputs).variance
    np.testing.assert_allclose(results["variance"], expected, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda: models.mlp((4, 3, 3)), {}),  # a curvature of all layers
        (models.token_mlp, {"layers": "last"}),  # positions
        (lambda: models.mlp((4, 3, 3)), {"layers": "last", "loss": "normal", "trainable": "fc0*"}),
    ],
    ids=["all layers", "positions", "first layer"],
)
def test_other_parameters_than_those_of_a_last_layer_are_refused(tmp_path, make, options):
    model = make()
    curvature = measured(model, (models.random_inputs(model), None), **options)
    with pytest.raises(ke.UnsupportedError, match=r"under an uncertain last layer.*weight"):
        ke.Laplace(curvature).export(tmp_path / "uncertain.onnx")
    assert not list(tmp_path.iterdir())
