"""``evaluate.onnx`` has the metrics of an engine, and metadata have the types of the files."""

import json

import numpy as np
import onnx
import pytest
from onnx.helper import tensor_dtype_to_np_dtype

import kfac_engine as ke
from tests.models import Net, random_inputs, sigmoid_output, two_outputs
from tests.training_files.nets import network


def softmax_output(name="output"):
    """The logits, which the loss reads, are no output of the model."""
    net = Net()
    net.op("Softmax", net.dense("logits", "input", 5, 3), to=name, axis=-1)
    return net.model({"input": ["batch", 5]}, {name: ["batch", 3]})


def named_as_a_metric():
    net = Net()
    net.dense("hidden", "input", 5, 4)
    net.op("Identity", net.dense("head", "hidden", 4, 3), to="loss sum")
    return net.model({"input": ["batch", 5]}, {"loss sum": ["batch", 3]})


def classes(rng, n):
    return rng.integers(0, 3, n)


def some_ignored(rng, n):
    return np.where(rng.random(n) < 0.4, -100, rng.integers(0, 3, n))


def weighted(rng, n):
    return ke.Weighted(rng.integers(0, 3, n), rng.random(n).astype(np.float32))


def probabilities(rng, n):
    return rng.dirichlet(np.ones(3), n).astype(np.float32)


def bits(rng, n):
    return rng.integers(0, 2, (n, 2)).astype(np.float32)


def sequences(rng, n):
    """Up to two labels, and three to five frames that count."""
    labels = np.where(np.arange(5) < rng.integers(0, 3, n)[:, None], rng.integers(1, 3, (n, 5)), -1)
    frames = np.arange(5) < rng.integers(3, 6, n)[:, None]
    return ke.Weighted(labels, frames.astype(np.float32))


def both(rng, n):
    return {"logits": rng.integers(0, 3, n), "mean": rng.normal(size=(n, 2)).astype(np.float32)}


# Model, losses, further options of both, options of the export, targets of n examples.
CASES = {
    "classes": (network("conv2d"), "categorical", {}, {}, classes),
    "hidden logits": (softmax_output(), "categorical", {}, {}, classes),
    "a name of a metric": (named_as_a_metric(), "categorical", {}, {}, classes),
    "ignored": (network("conv2d"), ke.Categorical(ignore_index=-100), {}, {}, some_ignored),
    "smoothed": (network("dense"), ke.Categorical(label_smoothing=0.2), {}, {}, classes),
    "weights": (network("dense"), "categorical", {}, {"weights": "examples"}, weighted),
    "probabilities": (network("dense"), "categorical", {}, {"probabilities": True}, probabilities),
    "sum": (network("dense"), "categorical", {"reduction": "sum"}, {}, classes),
    "mean over examples": (
        network("tokens"), "categorical", {"reduction": "batch_mean"}, {},
        lambda rng, n: rng.integers(0, 3, (n, 5))),
    "running statistics": (network("batch normalization"), "categorical", {}, {}, classes),
    "sequences": (network("tokens"), "ctc", {}, {"weights": "targets"}, sequences),
    "bits": (sigmoid_output(), "multi_bernoulli", {}, {}, bits),
    "two losses": (two_outputs(), {"logits": "categorical", "mean": "normal"}, {}, {}, both),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_metrics_equal_those_of_the_engine(case, tmp_path):
    model, loss, options, of_files, targets = CASES[case]
    files = ke.export_training(model, loss, "adamw", path=tmp_path, **options, **of_files)
    rng, sizes = np.random.default_rng(1), (7, 4)
    batches = [(random_inputs(model, n, n), targets(rng, n)) for n in sizes]
    state = files.run(batches, steps=6).state
    engine = ke.Engine.from_onnx(model, loss=loss, **options)
    arrays = files.read(state)
    engine.set_parameters({n: a for n, a in arrays.items() if n in engine.parameters})
    engine.set_buffers({n: a for n, a in arrays.items() if n not in engine.parameters})
    expected = engine.evaluate(batches)
    found = files.evaluate(state, batches)
    assert found.keys() == expected.keys()
    for name, value in expected.items():  # sums of float32
        np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_metadata_have_the_types_and_shapes_of_the_files(case, tmp_path):
    model, loss, options, of_files, _ = CASES[case]
    files = ke.export_training(model, loss, "adamw", path=tmp_path, **options, **of_files)
    folder = files.folder
    training, predict = (onnx.load(folder / f"{n}.onnx") for n in ("training", "predict"))
    about = json.loads(training.metadata_props[0].value)
    declared = {e.name: e.type.tensor_type for e in training.graph.input}
    for name, tensor in declared.items():
        dtype = str(tensor_dtype_to_np_dtype(tensor.elem_type))
        shape = [d.dim_param or d.dim_value for d in tensor.shape.dim]
        if name in about["state"]:
            assert dtype == about["types"].get(name, "float32")
        else:
            assert about["data"][name] == {"type": dtype, "shape": shape}
    assert {*about["data"], *about["state"]} == {*declared}
    outputs = {e.name: e.type.tensor_type.elem_type for e in predict.graph.output}
    for name, entry in about["predictions"].items():
        assert entry["type"] == str(tensor_dtype_to_np_dtype(outputs[name]))
    assert {*about["predictions"]} | {*about["evaluated"].values()} == {*outputs}


def test_shapes_are_those_of_a_step_and_of_predictions(tmp_path):
    files = ke.export_training(network("tokens"), path=tmp_path)
    about = files.description
    assert about.data["input"] == {"type": "float32", "shape": ["batch", 5, 4]}
    assert about.data["rate"] == {"type": "float32", "shape": []}
    assert about.different in about.state
    assert about.predictions["output"] == {"type": "float32", "shape": ["batch", 5, 3]}
    assert [*files.predict(files.initial(), {"input": np.ones((2, 5, 4), np.float32)})] == [
        "output"
    ]


def test_hidden_values_are_no_predictions(tmp_path):
    files = ke.export_training(softmax_output(), path=tmp_path)
    outputs = files.predict(files.initial(), random_inputs(softmax_output(), 4))
    assert [*outputs] == ["output"]
    np.testing.assert_allclose(outputs["output"].sum(axis=1), 1, rtol=1e-5)


@pytest.mark.parametrize(
    ("targets", "says"), [([0, 1, 3, 2], "not a class"), ([-100] * 4, "counts")]
)
def test_targets_that_cannot_be_evaluated_are_refused(targets, says, tmp_path):
    model = network("dense")
    files = ke.export_training(model, ke.Categorical(ignore_index=-100), path=tmp_path)
    batch = random_inputs(model, 4), np.array(targets)
    with pytest.raises(ke.InputError, match=says):
        files.evaluate(files.initial(), [batch])
    with pytest.raises(ke.InputError, match="no batch"):
        files.evaluate(files.initial(), [])
