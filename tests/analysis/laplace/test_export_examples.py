"""The exported variance of parameters whose gradients take a Scan over the examples."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

import kfac_engine as ke
from tests import models
from tests.analysis.fisher_matrix.dense import STRUCTURES, assert_close, measured
from tests.analysis.laplace.test_export import run
from tests.analysis.laplace.test_export_network import (
    EXAMPLES,
    PRECISION,
    TOLERANCES,
    precision,
    variance_of,
)
from tests.analysis.laplace.test_posterior import jacobian

EXPORTS = Path(__file__).parents[2] / "exports"


def positive_weights(batch="batch", dtype="float64", idle=False):
    """A dense layer, and two weights that are exponentials of parameters."""
    net = models.Net(dtype)
    value = net.dense("h", "input", 4, 3)
    for index, width in enumerate((3, 2)):
        weight = net.op("Exp", net.weight(f"log{index}", 3, width), to=f"weight{index}")
        act = net.op("Tanh", value, to=f"act{index}")
        value = net.op("MatMul", act, weight, to="output" if index else "middle")
    if idle:  # a parameter of an output that the loss does not read
        net.op("MatMul", "act0", net.op("Exp", net.weight("idle", 3, 2), to="gate"), to="other")
    outputs = {"output": [batch, 2], **({"other": [batch, 2]} if idle else {})}
    return net.model({"input": [batch, 4]}, outputs)


def steps_first():
    """A state that starts as a parameter; the examples are on axis 1 of the input."""
    net = models.Net("float64")
    decay = net.op("Exp", net.weight("log decay", 3), to="decay")
    rest = net.op("Mul", "input", decay, to="scaled")
    axes = net.constant("axes", np.array([0]))
    net.dense("output", net.op("ReduceMean", rest, axes, to="mean", keepdims=0), 3, 2)
    return net.model({"input": [4, "batch", 3]}, {"output": ["batch", 2]})


def flattened(tokens, order):
    """A dense layer on rows of examples and tokens, with the examples or the tokens first."""
    net = models.Net("float64")
    value = net.op("Transpose", "input", to="moved", perm=order)
    rows = net.op("Reshape", value, net.constant("to_rows", np.array([-1, 4])), to="rows")
    act = net.op("Tanh", net.dense("fc0", rows, 4, 2), to="act")
    sizes = [-1, 3, 2] if order[0] == 0 else [3, -1, 2]
    back = net.op("Reshape", act, net.constant("sizes", np.array(sizes)), to="separate")
    moved = net.op("Transpose", back, to="back", perm=order)
    flat = net.op("Flatten", moved, to="flat")
    net.dense("output", flat, 6, 2)
    return net.model({"input": ["batch", tokens, 4]}, {"output": ["batch", 2]})


def check(model, path, batch, structure="kron", **options):
    """Compare with the dense product; return the posterior."""
    examples = models.random_inputs(model, batch=EXAMPLES)
    curvature = measured(model, (examples, None), structure=structure, **options)
    posterior = ke.Laplace(curvature, prior_precision=PRECISION)
    posterior.export(path)
    onnx.checker.check_model(str(path), full_check=True)
    written, P = onnx.load(path), precision(posterior)
    assert "Scan" in {node.op_type for node in written.graph.node}
    assert {entry.domain for entry in written.opset_import} == {""}
    expected = variance_of(jacobian(curvature, model, batch), P)
    variance = run(path, batch)["variance"]
    assert_close(variance, expected, TOLERANCES[variance.dtype.name])
    assert_close(posterior.predict(batch).variance, expected, TOLERANCES[variance.dtype.name])
    return posterior, written


@pytest.mark.parametrize("structure", STRUCTURES)
def test_parameters_without_a_layer_have_a_variance(tmp_path, structure):
    model, path = positive_weights(), tmp_path / "uncertain.onnx"
    batch = models.random_inputs(model, batch=3, seed=5)
    _, written = check(model, path, batch, structure)
    (variance,) = ReferenceEvaluator(written).run(["variance"], batch)
    assert_close(variance, run(path, batch)["variance"], TOLERANCES["float64"])
    single = {"input": batch["input"][1:2]}
    assert_close(run(path, single)["variance"], variance[1:2], TOLERANCES["float64"])


def test_examples_on_another_axis_are_scanned_along_it(tmp_path):
    model = steps_first()
    check(model, tmp_path / "uncertain.onnx", models.random_inputs(model, batch=3, seed=5))


def test_parameter_of_another_output_adds_no_variance(tmp_path):
    path = tmp_path / "uncertain.onnx"
    model = positive_weights(idle=True)
    batch = models.random_inputs(model, batch=3, seed=5)
    posterior, _ = check(model, path, batch, output="output")
    assert "idle" in posterior.curvature.parameters
    other = run(path, batch)["other"]
    assert other.shape == (3, 2)


@pytest.mark.parametrize("structure", ["kron", "full"])
@pytest.mark.parametrize("tokens", [3, "tokens"])
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2)], ids=["examples first", "tokens first"])
def test_rows_of_examples_and_tokens_take_a_scan(tmp_path, structure, tokens, order):
    # The weight (d_out, d_in) and the bias are packed in another order than in the file.
    model, path, fixed = flattened(tokens, order), tmp_path / "u.onnx", flattened(3, order)
    batch = models.random_inputs(fixed, batch=2, seed=5)
    examples = models.random_inputs(fixed, batch=EXAMPLES)
    curvature = measured(model, (examples, None), structure=structure, sample_inputs=examples)
    assert all(layer.kind == "fully_connected" for layer, _ in curvature.layout.layers)
    posterior = ke.Laplace(curvature, prior_precision=PRECISION)
    posterior.export(path)
    assert "Scan" in {node.op_type for node in onnx.load(path).graph.node}
    expected = variance_of(jacobian(curvature, fixed, batch), precision(posterior))
    assert_close(run(path, batch)["variance"], expected, TOLERANCES["float64"])
    assert_close(posterior.predict(batch).variance, expected, TOLERANCES["float64"])


@pytest.mark.parametrize("name", ["encoder-dynamo", "encoder-legacy", "lstm-plain", "tied-plain"])
def test_exported_variance_of_files_of_pytorch_equals_the_prediction(tmp_path, name):
    source, path = EXPORTS / f"{name}.onnx", tmp_path / "uncertain.onnx"
    model = onnx.load(source)
    posterior = ke.Laplace(measured(source, (models.random_inputs(model, batch=4), None)))
    posterior.export(path)
    onnx.checker.check_model(str(path), full_check=True)
    batch = models.random_inputs(model, batch=3, seed=5)
    expected, results = posterior.predict(batch), run(path, batch)
    assert_close(results["variance"], expected.variance, TOLERANCES["float32"])
    assert_close(results[model.graph.output[0].name], expected.mean, TOLERANCES["float32"])


def test_half_precision_file_scans_in_float32(tmp_path):
    model, path = positive_weights(dtype="float32"), tmp_path / "half.onnx"
    for entry in model.graph.initializer:
        array = onnx.numpy_helper.to_array(entry).astype(np.float16)
        entry.CopyFrom(onnx.numpy_helper.from_array(array, entry.name))
    for entry in (*model.graph.input, *model.graph.output):
        entry.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    inputs = {"input": np.random.default_rng(0).uniform(-1, 1, (6, 4)).astype(np.float16)}
    posterior = ke.Laplace(measured(model, (inputs, None)))
    posterior.export(path)
    variance = run(path, inputs)["variance"]
    assert variance.dtype == np.float32
    assert_close(variance, posterior.predict(inputs).variance, TOLERANCES["float32"])


def test_node_limit_counts_the_nodes_of_the_scan(tmp_path):
    model, path = positive_weights(), tmp_path / "uncertain.onnx"
    _, written = check(model, path, models.random_inputs(model, batch=2))
    (scan,) = (node for node in written.graph.node if node.op_type == "Scan")
    (body,) = (entry.g for entry in scan.attribute if entry.name == "body")
    nodes = len(written.graph.node) + len(body.node)
    curvature = measured(model, (models.random_inputs(model), None))
    ke.Laplace(curvature).export(path, node_limit=nodes)
    with pytest.raises(ke.InputError, match=f"at least {nodes} nodes"):
        ke.Laplace(curvature).export(path, node_limit=nodes - 1)


def test_model_of_one_batch_size_cannot_be_scanned(tmp_path):
    net = models.Net()
    rows = net.op("Reshape", "input", net.constant("shape", np.array([3, 4])), to="rows")
    weight = net.op("Exp", net.weight("logarithm", 4, 2), to="weight")
    net.op("MatMul", net.op("Tanh", rows, to="act"), weight, to="output")
    model = net.model({"input": [3, 4]}, {"output": [3, 2]})
    curvature = measured(model, (models.random_inputs(model), None))
    with pytest.raises(ke.UnsupportedError, match="for logarithm take a model that runs on one"):
        ke.Laplace(curvature).export(tmp_path / "uncertain.onnx")
    assert not list(tmp_path.iterdir())
