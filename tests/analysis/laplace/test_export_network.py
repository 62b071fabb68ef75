"""A model with the variance of all uncertain parameters computes the dense ``J Σ Jᵀ``."""

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

import kfac_engine as ke
from tests import models, oracle
from tests.analysis.fisher_matrix.dense import MODELS, STRUCTURES, assert_close, dense, measured
from tests.analysis.laplace.test_export import run
from tests.analysis.laplace.test_posterior import jacobian
from tests.nightly import nightly_but

# Relative to the largest entry of the variance, in the element type of the file.
TOLERANCES = {"float64": 1e-6, "float32": 1e-4}
EXAMPLES, PRECISION = 7, 0.7
NETWORKS = {
    **{name: make for name, (make, _) in MODELS.items()},
    "cnn": lambda: models.cnn(channels=1, side=5),
    "resnet": lambda: models.resnet_block(channels=2, side=4),
}


def exported(model, path, queries=(1, 3), loss="categorical", prior=PRECISION, **options):
    """Write the model; return its posterior, and inputs of several sizes."""
    curvature = measured(
        model, (models.random_inputs(model, batch=EXAMPLES), None), loss=loss, **options
    )
    posterior = ke.Laplace(curvature, prior_precision=prior)
    posterior.export(path)
    onnx.checker.check_model(str(path), full_check=True)
    return posterior, [models.random_inputs(model, batch=size, seed=5) for size in queries]


def precision(posterior, scale=EXAMPLES, prior=PRECISION):
    """``hF + λI``, for one λ or for a λ of each entry of the parameters."""
    F = dense(posterior.curvature)
    return scale * F + prior * np.eye(len(F))


def variance_of(jac, P):
    """``J P⁻¹ Jᵀ``, for Jacobian matrices ``(n, k, parameters)``."""
    return jac @ np.linalg.solve(P, jac.swapaxes(1, 2))


@pytest.fixture(scope="module", params=NETWORKS)
def case(request):
    """A model, and three examples with their outputs and Jacobian matrices by the oracle."""
    model = NETWORKS[request.param]()
    curvature = measured(model, (models.random_inputs(model, batch=1), None))
    inputs = models.random_inputs(model, batch=3, seed=5)
    outputs = oracle.evaluate(model, inputs, "output")[0]
    return model, inputs, outputs, jacobian(curvature, model, inputs)


@pytest.mark.parametrize("structure", nightly_but(["kron", "diagonal", "full"], STRUCTURES))
def test_exported_variance_equals_the_dense_product(tmp_path, case, structure):
    (model, batch, outputs, jac), path = case, tmp_path / "uncertain.onnx"
    posterior, _ = exported(model, path, structure=structure)
    written = onnx.load(path)
    assert {entry.domain for entry in written.opset_import} == {""}
    reference, variance = ReferenceEvaluator(written), variance_of(jac, precision(posterior))
    for examples in (slice(3), slice(1, 2)):
        inputs = {name: array[examples] for name, array in batch.items()}
        expected, results = variance[examples], run(path, inputs)
        tolerance = TOLERANCES[results["variance"].dtype.name]
        assert results["variance"].dtype == results["output"].dtype
        assert_close(results["variance"], expected, tolerance)
        assert_close(results["variance"], posterior.predict(inputs).variance, tolerance)
        assert_close(reference.run(["variance"], inputs)[0], expected, tolerance)
        assert_close(results["output"], outputs[examples], tolerance)


@pytest.mark.parametrize(
    "make", [models.token_mlp, lambda: models.conv_linear(side=3, kernel=2, pads=0)]
)
def test_last_layer_with_positions_has_a_variance(tmp_path, make):
    model, path = make(), tmp_path / "uncertain.onnx"
    posterior, batches = exported(model, path, layers="last")
    for inputs in batches:
        expected = posterior.predict(inputs).variance
        assert_close(run(path, inputs)["variance"], expected, TOLERANCES["float32"])


def test_last_layer_of_a_rewritten_operator_has_a_variance(tmp_path):
    # The layer reads rows of both axes, which are no value of the file.
    net, path = models.Net("float64"), tmp_path / "uncertain.onnx"
    product = net.op("MatMul", "input", net.weight("first", 4, 3), to="product")
    hidden, w = net.op("Tanh", product, to="act"), net.weight("w", 2, 3, 2)
    net.op("Einsum", hidden, w, to="output", equation="nab,abc->nc")
    model = net.model({"input": ["batch", 2, 4]}, {"output": ["batch", 2]})
    posterior, batches = exported(model, path, layers="last")
    assert list(posterior.curvature.parameters) == ["w"]
    for inputs in batches:
        jac = jacobian(posterior.curvature, model, inputs)
        expected = variance_of(jac, precision(posterior))
        assert_close(run(path, inputs)["variance"], expected, TOLERANCES["float64"])


def test_priors_of_parameters_and_separate_biases_change_the_variance(tmp_path):
    model, path = models.mlp((4, 3, 3), dtype="float64"), tmp_path / "uncertain.onnx"
    names = ("fc0.weight", "fc0.bias", "fc1.weight", "fc1.bias")
    prior = dict(zip(names, (0.1, 2.0, 0.5, 30.0), strict=True))
    posterior, (inputs, _) = exported(model, path, prior=prior, biases="separate")
    sizes = {name: value.size for name, value in posterior.curvature.parameters.items()}
    levels = np.concatenate([np.full(size, prior[name]) for name, size in sizes.items()])
    jac = jacobian(posterior.curvature, model, inputs)
    expected = variance_of(jac, precision(posterior, prior=levels))
    assert_close(run(path, inputs)["variance"], expected, TOLERANCES["float64"])


def test_normal_loss_exports_the_variance_of_its_means(tmp_path):
    model, path = models.mlp((4, 3, 2), dtype="float64"), tmp_path / "uncertain.onnx"
    curvature = measured(model, (models.random_inputs(model, batch=EXAMPLES), None), loss="normal")
    posterior = ke.Laplace(curvature, prior_precision=0.2, noise=0.3, temperature=2.0)
    posterior.export(path)
    inputs = models.random_inputs(model, batch=3, seed=5)
    # The likelihood has the precision n v/(σ² T) for the variance v = 1/2 of the loss.
    P = precision(posterior, scale=EXAMPLES * 0.5 / (0.3**2 * 2), prior=0.2)
    expected = variance_of(jacobian(curvature, model, inputs), P)
    assert_close(run(path, inputs)["variance"], expected, TOLERANCES["float64"])


@pytest.mark.parametrize("last", ["Softmax", "Identity", "Abs"])
def test_model_of_probabilities_exports_the_variance_of_its_logits(tmp_path, last):
    net, path = models.Net("float64"), tmp_path / "uncertain.onnx"
    logits = net.dense("logits", net.op("Tanh", net.dense("h", "input", 4, 5), to="act"), 5, 3)
    p = net.op("Softmax", logits, to="output" if last == "Softmax" else "p", axis=-1)
    if last != "Softmax":  # the file has no name for what the loss reads
        net.op(last, p, to="output")
    model = net.model({"input": ["batch", 4]}, {"output": ["batch", 3]})
    posterior, (inputs, _) = exported(model, path)
    names, results = list(posterior.curvature.model.parameters), run(path, inputs)
    jac = oracle.jacobian(model, inputs, "logits", names).reshape(1, 3, -1)  # of one example
    if last == "Abs":  # the loss reads log p, because it does not see the Softmax
        jac = jac - results["output"][:, None] @ jac
    expected = variance_of(jac, precision(posterior))
    assert_close(results["variance"], expected, TOLERANCES["float64"])
    np.testing.assert_allclose(results["output"].sum(axis=1), 1.0)


def test_half_precision_file_computes_the_variance_of_all_layers_in_float32(tmp_path):
    model, path = models.mlp((4, 3, 3)), tmp_path / "half.onnx"
    for entry in model.graph.initializer:
        array = onnx.numpy_helper.to_array(entry).astype(np.float16)
        entry.CopyFrom(onnx.numpy_helper.from_array(array, entry.name))
    for entry in (*model.graph.input, *model.graph.output):
        entry.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    inputs = {"input": np.random.default_rng(0).uniform(-1, 1, (6, 4)).astype(np.float16)}
    posterior = ke.Laplace(measured(model, (inputs, None)))
    posterior.export(path)
    results = run(path, inputs)
    assert results["variance"].dtype == np.float32
    assert results["output"].dtype == np.float16
    # The file widens the weights and computes in float32, like the library.
    assert_close(results["variance"], posterior.predict(inputs).variance, TOLERANCES["float32"])


def test_node_limit_bounds_the_file(tmp_path):
    model, path = models.mlp((4, 3, 3)), tmp_path / "uncertain.onnx"
    posterior, _ = exported(model, path)
    nodes = len(onnx.load(path).graph.node)
    path.unlink()
    posterior.export(path, node_limit=nodes)
    path.unlink()
    for limit in (nodes - 1, 3):
        with pytest.raises(
            ke.InputError, match="each of 3 outputs of an example; raise node_limit"
        ):
            posterior.export(path, node_limit=limit)
    assert not list(tmp_path.iterdir())


def test_inputs_that_no_output_reads_stay_inputs(tmp_path):
    net, path = models.Net(), tmp_path / "uncertain.onnx"
    net.dense("output", net.op("Tanh", net.dense("h", "input", 4, 5), to="act"), 5, 3)
    model = net.model({"input": ["batch", 4], "idle": ["batch", 2]}, {"output": ["batch", 3]})
    posterior, (inputs, _) = exported(model, path)
    expected = posterior.predict(inputs).variance
    assert_close(run(path, inputs)["variance"], expected, TOLERANCES["float32"])


# -- models without such a file --------------------------------------------------------------------


def refused(model, tmp_path, error, match, **options):
    curvature = measured(model, (models.random_inputs(model), None), **options)
    with pytest.raises(error, match=match):
        ke.Laplace(curvature).export(tmp_path / "uncertain.onnx")
    assert not list(tmp_path.iterdir())


def test_outputs_of_positions_need_a_fixed_number_of_them(tmp_path):
    model = models.token_mlp()
    for entry in (*model.graph.input, *model.graph.output):
        entry.type.tensor_type.shape.dim[1].dim_param = "tokens"
    curvature = measured(
        model, ({"input": np.random.default_rng(0).standard_normal((3, 4, 5), "f4")}, None)
    )
    with pytest.raises(
        ke.UnsupportedError, match="axis 1 of the input 'input' has the size tokens"
    ):
        ke.Laplace(curvature).export(tmp_path / "uncertain.onnx")
    assert not list(tmp_path.iterdir())


def test_examples_that_depend_on_each_other_are_refused(tmp_path):
    net = models.Net()
    hidden = net.dense("h", "input", 4, 4)
    mean = net.op("ReduceMean", hidden, net.constant("axes", np.array([0])), to="mean")
    net.dense("output", net.op("Sub", hidden, mean, to="centred"), 4, 3)
    model = net.model({"input": ["batch", 4]}, {"output": ["batch", 3]})
    refused(model, tmp_path, ke.UnsupportedError, "examples that do not depend on each other")


def test_several_losses_are_refused(tmp_path):
    refused(
        models.two_outputs(),
        tmp_path,
        ke.UnsupportedError,
        "one value that the loss reads",
        loss=["categorical", "normal"],
        output=["logits", "mean"],
    )


@pytest.mark.parametrize("name", ["variance", "variance/0"])
def test_file_with_a_value_of_this_name_is_refused(tmp_path, name):
    net = models.Net()
    hidden = net.op("MatMul", "input", net.weight("w0", 4, 4), to="hidden")
    net.op("MatMul", net.op("Tanh", hidden, to=name), net.weight("w1", 4, 3), to="output")
    model = net.model({"input": ["batch", 4]}, {"output": ["batch", 3]})
    refused(model, tmp_path, ke.InputError, f"a value '{name}' already")
