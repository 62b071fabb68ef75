"""The contract of training files: names, states, and runs that end and continue."""

import json
import math
import re

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import kfac_engine as ke
from tests.comparing import assert_arrays_close, assert_arrays_equal
from tests.models import Net
from tests.training_files.nets import data, names, network, unchanged


@pytest.fixture
def files(tmp_path):
    return ke.export_training(network("conv2d"), path=tmp_path / "files")


def test_the_files_have_the_names_of_the_contract(files):
    inputs, outputs = names(files.folder / "training.onnx")
    state = list(files.description.state)
    assert inputs == ["input", "targets", "rate", *state]
    assert outputs == ["loss", "accuracy", "finite", *(f"new {name}" for name in state)]
    assert names(files.folder / "initial.onnx") == ([], state)
    weights = ["conv.weight", "conv.bias", "head.weight", "head.bias"]
    assert names(files.folder / "predict.onnx") == (["input", *weights], ["output"])
    assert list(files.parameters) == weights


@pytest.mark.parametrize("loss", ["categorical", "normal"])
def test_the_state_has_what_a_step_changes(loss, tmp_path):
    """Records of batches, which an optimizer in Python stores beside its slots, are none of it."""
    files = ke.export_training(network("dense"), loss, path=tmp_path, noise="input")
    groups = {name.partition("/")[0] for name in files.description.state}
    assert groups.isdisjoint({"examples", "repeated"})
    inputs, outputs = names(files.folder / "training.onnx")
    assert {*files.description.state} <= {*inputs}
    assert {f"new {name}" for name in files.description.state} <= {*outputs}


def test_the_files_hold_standard_operators_and_no_weights(files):
    model = onnx.load(files.folder / "training.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert [entry.domain for entry in model.opset_import] == [""]
    weights = {e.name: onnx.numpy_helper.to_array(e) for e in model.graph.initializer}
    initial = files.initial()
    for name in files.parameters:
        if initial[name].size > 8:
            assert not any(np.array_equal(initial[name], array) for array in weights.values())


@pytest.mark.parametrize(
    ("net", "options"),
    [
        ("dense", {"weights": "examples"}),
        ("tokens", {"optimizer": "muon"}),
        ("conv2d", {"accumulate": 2}),
        ("gru", {"noise": "input"}),
        ("batch normalization", {"optimizer": "adamw", "provider": "webgpu"}),
    ],
)
def test_sessions_of_the_files_print_no_warnings(net, options, tmp_path, capfd):
    ke.export_training(network(net), path=tmp_path, **options)
    for path in tmp_path.glob("*.onnx"):
        ort.InferenceSession(path)
    assert capfd.readouterr().err == ""


def test_the_loop_of_the_readme_runs(files, monkeypatch):
    text = (files.folder / "README.md").read_text()
    loop = re.search(r"```python\n(options.*?)```", text, re.DOTALL).group(1)
    inputs, targets = data(network("conv2d"))
    scope = {"onnxruntime": ort, "numpy": np, "batches": [{**inputs, "targets": targets}] * 4}
    monkeypatch.chdir(files.folder)
    exec(loop, scope)
    run = files.run([(inputs, targets)] * 4, steps=4)
    for name in files.parameters:
        np.testing.assert_array_equal(scope["state"][name], run.state[name])


def test_metadata_are_equal_json_in_all_files(files):
    found = [
        json.loads(onnx.load(files.folder / name).metadata_props[0].value)
        for name in ("training.onnx", "initial.onnx", "predict.onnx")
    ]
    assert found[0] == found[1] == found[2]
    assert found[0]["optimizer"] == "kfac"


@pytest.mark.parametrize("optimizer", ["kfac", "muon"])
def test_a_step_that_is_not_finite_changes_nothing(optimizer, tmp_path):
    files = ke.export_training(network("conv2d"), optimizer=optimizer, path=tmp_path / "files")
    inputs, targets = data(network("conv2d"))
    start = files.run([(inputs, targets)] * 2, steps=2).state
    broken = {"input": inputs["input"].copy()}
    broken["input"][3, 0, 0, 0] = np.nan
    results = files.step(start, broken, targets)
    assert not results["finite"]
    assert math.isnan(results["loss"])
    assert unchanged(results, start)
    after = files.run([(broken, targets), (inputs, targets)], steps=2, state=start)
    without = files.run([(inputs, targets)], steps=1, state=start)
    assert (after.skipped, without.skipped) == (1, 0)
    assert_arrays_equal(after.state, without.state)


@pytest.mark.parametrize(("wrong", "hidden"), [(-100, None), (-1, -100), (3, -100)])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_target_that_is_no_class_changes_nothing(wrong, hidden, accumulate, tmp_path):
    model = network("conv2d")
    loss = ke.Categorical(ignore_index=hidden)
    files = ke.export_training(model, loss, path=tmp_path / "files", accumulate=accumulate)
    inputs, targets = data(model)
    start, other = files.initial(), targets.copy()
    other[4] = wrong
    results = files.step(start, inputs, other)
    assert not results["finite"]
    assert unchanged(results, start)
    assert files.step(start, inputs, targets)["finite"]


def test_a_state_comes_home_and_goes_out_again(files, tmp_path):
    model = network("conv2d")
    inputs, _ = data(model)
    batches = [data(model, seed) for seed in range(6)]
    whole = files.run(batches, steps=6)
    path = tmp_path / "state.safetensors"
    files.save(files.run(batches[:4], steps=4).state, path)
    again = ke.TrainingFiles(files.folder).run(batches[4:], steps=2, state=path)
    assert_arrays_equal(again.state, whole.state)
    assert again.losses == whole.losses[4:]

    files.export(whole.state, tmp_path / "trained.onnx")
    trained = onnx.load(tmp_path / "trained.onnx")
    arrays = {e.name: onnx.numpy_helper.to_array(e) for e in trained.graph.initializer}
    for name in files.parameters:
        np.testing.assert_array_equal(arrays[name], whole.state[name])
    session = ort.InferenceSession(trained.SerializeToString())
    expected = session.run(None, inputs)[0]
    np.testing.assert_allclose(files.predict(whole.state, inputs)["output"], expected, atol=1e-6)

    engine = ke.Engine.from_onnx(model, loss="categorical")
    engine.set_parameters(files.read(whole.state))
    np.testing.assert_allclose(engine.predict(inputs), expected, atol=1e-6)
    assert not np.allclose(expected, files.predict(files.initial(), inputs)["output"])


def test_running_statistics_are_state(tmp_path):
    model = network("batch normalization")
    files = ke.export_training(model, optimizer="adamw", path=tmp_path / "files")
    assert {"bn.mean", "bn.var"} < set(files.parameters)
    inputs, targets = data(model)
    run = files.run([(inputs, targets)] * 3, steps=3)
    assert np.abs(run.state["bn.mean"]).max() > 1e-3
    engine = ke.Engine.from_onnx(model, loss="categorical")
    read = files.read(run.state)
    engine.set_buffers({name: read[name] for name in ("bn.mean", "bn.var")})
    engine.set_parameters({n: a for n, a in read.items() if n in engine.parameters})
    expected = engine.predict(inputs)
    np.testing.assert_allclose(files.predict(run.state, inputs)["output"], expected, atol=1e-5)


def test_frozen_parameters_cost_nothing(tmp_path):
    model = network("conv2d")
    whole = ke.export_training(model, path=tmp_path / "whole")
    head = ke.export_training(model, path=tmp_path / "head", freeze="conv*")
    assert head.parameters == ("head.weight", "head.bias")
    inputs, _ = names(head.folder / "training.onnx")
    assert not [name for name in inputs if "conv" in name]

    def operators(folder):
        graph = onnx.load(folder / "training.onnx").graph
        return [node.op_type for node in graph.node]

    # No gradient below the layer that is trained: one convolution, the model's own.
    assert operators(head.folder).count("Conv") == 1 < operators(whole.folder).count("Conv")
    batch = data(model)
    run = head.run([batch] * 5, steps=5)
    assert run.losses[-1] < run.losses[0]
    head.export(run.state, tmp_path / "trained.onnx")


def test_a_file_reads_the_random_numbers_that_it_names(tmp_path):
    """Of two losses, one is on frozen layers and shifts, which need no sampled targets."""
    net = Net()
    net.op("Tanh", net.dense("trunk", "input", 3, 4), to="x")
    net.op("MatMul", "x", net.weight("frozen", 4, 2), to="product")
    net.op("Add", "product", net.weight("shift", 2), to="mean")
    net.dense("logits", "x", 4, 3)
    model = net.model({"input": ["n", 3]}, {"mean": ["n", 2], "logits": ["n", 3]})
    losses = {"mean": "normal", "logits": "categorical"}
    freeze = ["frozen", "trunk*"]
    files = ke.export_training(model, losses, path=tmp_path, freeze=freeze, noise="input")
    inputs = {e.name for e in onnx.load(tmp_path / "training.onnx").graph.input}
    assert {*files.description.noise} == {"noise 1"} == {n for n in inputs if "noise" in n}


def test_a_small_added_matrix_is_trained_alone(tmp_path):
    net = Net()
    net.dense("base", "input", 5, 6)
    net.weight("lora.A", 5, 2)
    net.weight("lora.B", 2, 6)
    net.op("MatMul", "input", "lora.A", to="low")
    net.op("MatMul", "low", "lora.B", to="added")
    net.op("Add", "base", "added", to="output")
    model = net.model({"input": ["batch", 5]}, {"output": ["batch", 6]})
    files = ke.export_training(model, path=tmp_path / "files", trainable="lora*")
    assert set(files.parameters) == {"lora.A", "lora.B"}
    batch = data(model)
    run = files.run([batch] * 10, steps=10)
    assert run.losses[-1] < run.losses[0]


def test_half_precision_files_train_in_single_precision(tmp_path):
    net = Net("float16")
    net.dense("fc", "input", 5, 6)
    net.op("Tanh", "fc", to="act")
    net.dense("output", "act", 6, 3)
    model = net.model({"input": ["batch", 5]}, {"output": ["batch", 3]})
    files = ke.export_training(model, path=tmp_path / "files")
    inputs, targets = data(model)
    run = files.run([(inputs, targets)] * 10, steps=10)
    assert run.losses[-1] < run.losses[0]
    predicted = files.predict(run.state, inputs)["output"]
    assert predicted.dtype == np.float16
    files.export(run.state, tmp_path / "trained.onnx")
    trained = onnx.load(tmp_path / "trained.onnx")
    assert {e.data_type for e in trained.graph.initializer} == {onnx.TensorProto.FLOAT16}


def test_names_of_the_model_may_be_those_of_the_files(tmp_path):
    net = Net()
    net.dense("loss", "input", 5, 6)  # an intermediate value of this name
    net.op("Tanh", "loss", to="step")
    net.dense("output", "step", 6, 3)
    model = net.model({"input": ["batch", 5]}, {"output": ["batch", 3]})
    files = ke.export_training(model, path=tmp_path / "files")
    run = files.run([data(model)] * 3, steps=3)
    assert run.losses[-1] < run.losses[0]


@pytest.mark.parametrize("given", [None, 20])
def test_a_run_counts_the_examples_of_arrays(given, tmp_path):
    files = ke.export_training(network("dense"), path=tmp_path / "files")
    start, examples = files.initial(), data(network("dense"), n=50)
    assert np.isinf(start["different examples"])
    if given:
        start["different examples"] = np.array(given, np.float32)
    state = files.run(examples, steps=4, batch_size=16, state=start).state
    assert state["different examples"] == (given or 50)
    assert state["examples seen"] == 3 * 16 + 16
    assert np.isinf(files.run([examples], steps=1).state["different examples"])


def test_a_run_takes_the_batches_of_fit(tmp_path):
    model, (inputs, targets) = network("dense"), data(network("dense"), n=50)
    files = ke.export_training(model, optimizer="adamw", path=tmp_path / "files")
    run = files.run((inputs, targets), steps=9, batch_size=16, seed=3)
    options = {"optimizer": "adamw", "steps": 9, "batch_size": 16, "seed": 3}
    history = ke.fit(model, (inputs, targets), schedule="constant", **options)
    np.testing.assert_allclose(run.losses, [r["loss"] for r in history.records], rtol=1e-4)
    for name, value in files.read(run.state).items():
        np.testing.assert_allclose(value, history.engine.parameters[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("given", ["arrays", "batches"])
def test_a_run_from_a_state_continues_the_run(given, tmp_path):
    """The order of the data and the schedule are at the step of the state."""
    model = network("dense")
    files = ke.export_training(model, path=tmp_path / "files")
    form = data(model, n=50) if given == "arrays" else [data(model, seed) for seed in range(4)]

    def run(steps, state=None):
        return files.run(
            form, steps=steps, batch_size=16, seed=3, rate=lambda k: 1 - k / 20, state=state
        )

    whole, first = run(10), run(5)
    second = run(5, first.state)
    assert [*first.losses, *second.losses] == whole.losses
    assert_arrays_equal(second.state, whole.state)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw", "muon"])
def test_learning_rate_left_out_is_that_of_fit(optimizer, tmp_path):
    model = network("dense")
    inputs, targets = data(model)
    files = ke.export_training(model, "categorical", optimizer, path=tmp_path / "files")
    result = files.step(files.initial(), inputs, targets)
    found = {name: result[f"new {name}"] for name in files.parameters}
    history = ke.fit(model, [(inputs, targets)], optimizer=optimizer, steps=1, schedule="constant")
    assert_arrays_close(found, history.engine.parameters, rtol=1e-5, atol=1e-6)


def test_files_of_two_exports_are_refused(files, tmp_path):
    other = ke.export_training(network("dense"), path=tmp_path / "other")
    (files.folder / "initial.onnx").write_bytes((other.folder / "initial.onnx").read_bytes())
    with pytest.raises(ke.InputError, match="different exports"):
        ke.TrainingFiles(files.folder)


def test_files_that_are_not_training_files_are_refused(files):
    (files.folder / "training.onnx").write_bytes(network("dense").SerializeToString())
    with pytest.raises(ke.InputError, match="not a training file"):
        ke.TrainingFiles(files.folder)
    with pytest.raises(ke.InputError):
        ke.TrainingFiles(files.folder / "nowhere")


def test_a_state_of_another_model_is_refused(files):
    state = files.initial()
    with pytest.raises(ke.InputError, match=r"conv\.weight"):
        files.read({n: a for n, a in state.items() if n != "conv.weight"})
    with pytest.raises(ke.ShapeError, match="shape"):
        files.read({**state, "conv.weight": np.zeros(3, np.float32)})
    with pytest.raises(ke.UnknownNameError, match=r"conv\.weight"):
        files.read({**state, "conv.weigth": state["conv.weight"]})
