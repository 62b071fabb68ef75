"""The contract of training files: names, states that stay or come home, and what is refused."""

import json
import math
import re
from itertools import pairwise

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import kfac_engine as ke
from tests.models import Net, parsed, random_inputs, two_outputs
from tests.nightly import nightly_but
from tests.training_files.nets import NETS, network

ROWS = 12


def data(model, seed=0, n=ROWS):
    return random_inputs(model, n, seed), np.random.default_rng(seed).integers(0, 3, n)


@pytest.fixture
def files(tmp_path):
    return ke.export_training(network("conv2d"), path=tmp_path / "files")


def names(path):
    model = onnx.load(path)
    return [e.name for e in model.graph.input], [e.name for e in model.graph.output]


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
        ("conv2d", {"accumulate": 2, "steps_per_call": 2}),
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
    loop = re.search(r"```python\n(trainer.*?)```", text, re.DOTALL).group(1)
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
    for name, value in start.items():
        new = results[f"new {name}"]
        assert new.size == 0 or np.array_equal(new, value)
    after = files.run([(broken, targets), (inputs, targets)], steps=2, state=start)
    without = files.run([(inputs, targets)], steps=1, state=start)
    assert (after.skipped, without.skipped) == (1, 0)
    for name, value in without.state.items():
        np.testing.assert_array_equal(after.state[name], value)


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
    for name, value in start.items():
        new = results[f"new {name}"]
        assert new.size == 0 or np.array_equal(new, value)
    assert files.step(start, inputs, targets)["finite"]


def test_a_state_comes_home_and_goes_out_again(files, tmp_path):
    model = network("conv2d")
    inputs, _ = data(model)
    batches = [data(model, seed) for seed in range(6)]
    whole = files.run(batches, steps=6)
    path = tmp_path / "state.safetensors"
    files.save(files.run(batches[:4], steps=4).state, path)
    again = ke.TrainingFiles(files.folder).run(batches[4:], steps=2, state=path)
    for name, value in whole.state.items():
        np.testing.assert_array_equal(again.state[name], value)
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
    from onnx import helper

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
    assert {e.data_type for e in trained.graph.initializer} == {
        helper.np_dtype_to_tensor_dtype(np.dtype("float16"))
    }


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
    engine = ke.Engine.from_onnx(model, loss="categorical")
    history = ke.fit(
        engine,
        (inputs, targets),
        optimizer=ke.AdamW(engine),
        steps=9,
        batch_size=16,
        seed=3,
        schedule="constant",
    )
    np.testing.assert_allclose(run.losses, [r["loss"] for r in history.records], rtol=1e-4)
    for name, value in files.read(run.state).items():
        np.testing.assert_allclose(value, history.engine.parameters[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize("given", ["arrays", "batches"])
def test_a_run_from_a_state_continues_the_run(given, calls, tmp_path):
    """The order of the data and the schedule are at the step of the state."""
    model = network("dense")
    files = ke.export_training(model, path=tmp_path / "files", steps_per_call=calls)
    form = data(model, n=50) if given == "arrays" else [data(model, seed) for seed in range(4)]

    def run(steps, state=None):
        return files.run(
            form, steps=steps, batch_size=16, seed=3, rate=lambda k: 1 - k / 20, state=state
        )

    whole, first = run(10), run(5)
    second = run(5, first.state)
    assert [*first.losses, *second.losses] == whole.losses
    for name, value in whole.state.items():
        np.testing.assert_array_equal(second.state[name], value)


# -- notes of an export ----------------------------------------------------------------------------


def trained_normalization(training):
    net = Net()
    net.dense("fc", "input", 3, 4)
    for name in ("scale", "var"):
        net.positive(f"bn.{name}", 4)
    for name in ("bias", "mean"):
        net.weight(f"bn.{name}", 4)
    operands = [f"bn.{name}" for name in ("scale", "bias", "mean", "var")]
    further = ["bn.new mean", "bn.new var"] if training else []
    net.op("BatchNormalization", "fc", *operands, to="bn", further=further, training_mode=training)
    net.dense("output", "bn", 4, 3)
    return net.model({"input": ["batch", 3]}, {"output": ["batch", 3]})


@pytest.mark.parametrize(
    ("training", "options"), [(0, {}), (0, {"train_form": True}), (1, {})], ids=str
)
def test_the_form_of_inference_is_named_as_by_fit(training, options, tmp_path, recwarn):
    ke.export_training(trained_normalization(training), path=tmp_path, **options)
    expected = ("'node_bn': normalization in the form of inference", ke.InferenceFormWarning)
    noted = [(str(w.message).partition(",")[0], w.category) for w in recwarn.list]
    assert noted == ([] if training or options else [expected])


def open_lengths(length):
    """A recurrence over the second axis."""
    net, _ = NETS["gru"]()
    return net.model({"input": ["batch", length, 3]}, {"output": ["batch", 3]})


def test_a_length_that_files_fix_is_named(tmp_path):
    """The remedy of the warning gives files of another length."""
    with pytest.warns(UserWarning, match=r"axis 1 \('length'\) of input 'input'.*sample_inputs"):
        files = ke.export_training(
            open_lengths("length"), optimizer="adamw", path=tmp_path / "fixed"
        )
    targets = np.arange(4) % 3
    batches = {n: {"input": np.ones((4, n, 3), np.float32)} for n in (8, 12)}
    assert np.isfinite(files.step(files.initial(), batches[8], targets)["loss"])
    message = r"shape \(4, 12, 3\), the training files need \(batch, 8, 3\).*sample_inputs"
    for call in (
        lambda: files.step(files.initial(), batches[12], targets),
        lambda: files.run((batches[12], targets), steps=1),
        lambda: files.predict(files.initial(), batches[12]),
    ):
        with pytest.raises(ke.ShapeError, match=message):
            call()
    model = open_lengths("length")
    other = ke.export_training(
        model, optimizer="adamw", path=tmp_path / "given", sample_inputs=batches[12]
    )
    assert np.isfinite(other.step(other.initial(), batches[12], targets)["loss"])
    ke.export_training(open_lengths(8), optimizer="adamw", path=tmp_path / "declared")


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "rate"), [("kfac", np.nan), ("adamw", np.inf), ("sgd", -1.0)]
)
def test_a_rate_that_is_no_length_is_refused_and_changes_nothing(optimizer, rate, tmp_path):
    model, options = network("dense"), {"learning_rate": 0.1} if optimizer == "sgd" else {}
    files = ke.export_training(model, optimizer=optimizer, path=tmp_path, **options)
    inputs, targets = data(model)
    start = files.run((inputs, targets), steps=1).state
    with pytest.raises(ke.InputError, match="rate"):
        files.step(start, inputs, targets, rate=rate)
    with pytest.raises(ke.InputError, match="rate of step 0"):
        files.run((inputs, targets), steps=2, rate=rate)
    with pytest.raises(ke.InputError, match="rate of step 3"):
        files.run((inputs, targets), steps=4, rate=lambda step: rate if step == 3 else 1.0)
    session = ort.InferenceSession(files.folder / "training.onnx")
    feeds = {**inputs, "targets": targets, "rate": np.array(rate, "float32"), **start}
    outputs = names(files.folder / "training.onnx")[1]
    results = dict(zip(outputs, session.run(outputs, feeds), strict=True))
    assert not results["finite"]
    assert np.isfinite(results["loss"])
    for name, value in start.items():
        new = results[f"new {name}"]
        assert new.size == 0 or np.array_equal(new, value)


TWO_KINDS = """g (int32[batch] ids, float[batch, 4] input) => (float[batch, 3] output) {
    rows = Gather(table, ids)  sum = Add(rows, input)  output = MatMul(sum, w) }"""


N = 6
RIGHT = {
    "ids": np.arange(N, dtype=np.int32), "input": np.ones((N, 4), np.float32),
    "targets": np.arange(N) % 3,
}  # fmt: skip
# What is wrong, what replaces it, and words of the error.
WRONG = {
    "fractions as classes": ("targets", RIGHT["targets"] + 0.7, "float64"),
    "classes as real numbers": ("targets", RIGHT["targets"].astype(float), "astype.'int64'"),
    "text as classes": ("targets", RIGHT["targets"].astype(str), "<U"),
    "no targets": ("targets", None, "object"),
    "fewer targets": ("targets", RIGHT["targets"][:1], "1 in 'targets'"),
    "targets of two axes": ("targets", RIGHT["targets"][:, None], r"shape \(6, 1\)"),
    "fractions as ids": ("ids", RIGHT["ids"] + 0.9, "float64"),
    "ids beyond the type": ("ids", RIGHT["ids"].astype(int) + 2**33, "int32 cannot hold"),
    "text as ids": ("ids", RIGHT["ids"].astype("S"), "real numbers"),
    "a ragged list": ("input", [[1.0, 2.0], [3.0]], "not an array of numbers"),
    "text as numbers": ("input", RIGHT["input"].astype(str), "real numbers"),
    "complex numbers": ("input", RIGHT["input"] + 1j, "complex"),
    "another width": ("input", np.ones((N, 5), np.float32), r"need \(batch, 4\)"),
    "fewer rows": ("input", np.ones((2, 4), np.float32), "axis 'batch' has"),
    "another name": ("inputs", RIGHT["input"], "no input 'inputs'.*'input'"),
}  # fmt: skip
ACCEPTED = {
    "classes of another width": ("targets", RIGHT["targets"].astype(np.uint8)),
    "ids of another width": ("ids", RIGHT["ids"].astype(np.int64)),
    "double precision": ("input", RIGHT["input"].astype(float)),
    "whole numbers": ("input", RIGHT["input"].astype(int)),
    "a list": ("input", RIGHT["input"].tolist()),
}


@pytest.fixture(scope="module")
def two_kinds(tmp_path_factory):
    rng = np.random.default_rng(0)
    shapes = {"table": (7, 4), "w": (4, 3)}
    weights = {n: rng.standard_normal(s).astype("float32") for n, s in shapes.items()}
    model, folder = parsed(TWO_KINDS, weights), tmp_path_factory.mktemp("two")
    files = ke.export_training(model, optimizer="adamw", path=folder)
    return files, files.initial()


@pytest.mark.parametrize("case", WRONG)
def test_arrays_of_another_kind_or_shape_are_refused(case, two_kinds):
    (files, state), (name, array, message) = two_kinds, WRONG[case]
    given = {**RIGHT, name: array}
    targets = given.pop("targets")
    with pytest.raises(ke.KfacError, match=message):
        files.step(state, given, targets)
    if name in ("ids", "input") and case != "fewer rows":  # a data set has one number of examples
        with pytest.raises(ke.KfacError, match=message):
            files.predict(state, given)
    if name == "targets" and array is not None and len(array) == N:
        with pytest.raises(ke.KfacError, match=message):
            files.run((given, targets), steps=1)


def test_inputs_without_names_are_refused(two_kinds):
    files, state = two_kinds
    with pytest.raises(ke.InputError, match="inputs must be a mapping"):
        files.step(state, RIGHT["input"], RIGHT["targets"])
    with pytest.raises(ke.InputError, match="inputs must be a mapping"):
        files.predict(state, RIGHT["input"])


@pytest.mark.parametrize("case", ACCEPTED)
def test_arrays_of_another_width_are_accepted(case, two_kinds):
    (files, state), (name, array) = two_kinds, ACCEPTED[case]
    given = {**RIGHT, name: array}
    inputs = {n: a for n, a in RIGHT.items() if n != "targets"}
    expected = files.step(state, inputs, RIGHT["targets"])["loss"]
    targets = given.pop("targets")
    assert files.step(state, given, targets)["loss"] == expected


@pytest.mark.parametrize(
    ("optimizer", "options", "message"),
    [
        ("kfac", {"learning_rate": "quadratic"}, "learning_rate"),
        ("kfac", {"learning_rate": 0.1}, "adamw"),
        ("kfac", {"adapt_damping": True}, "adapt_damping"),
        ("adamw", {"learning_rate": lambda step: 0.1}, "rate"),
    ],
)
def test_options_that_a_file_cannot_have_are_refused(optimizer, options, message, tmp_path):
    folder = tmp_path / "files"
    with pytest.raises(ke.UnsupportedError, match=message):
        ke.export_training(network("dense"), optimizer=optimizer, path=folder, **options)
    assert not folder.exists()


def test_unknown_names_are_refused_with_the_nearest(tmp_path):
    with pytest.raises(ke.UnknownNameError, match="adamw"):
        ke.export_training(network("dense"), optimizer="adamv", path=tmp_path / "files")
    with pytest.raises(ke.UnknownNameError, match="momentum"):
        ke.export_training(
            network("dense"), optimizer="sgd", learning_rate=1.0, momentun=0.1, path=tmp_path / "f"
        )
    assert not (tmp_path / "files").exists()


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw", "muon"])
def test_learning_rate_left_out_is_that_of_fit(optimizer, tmp_path):
    model = network("dense")
    inputs, targets = data(model)
    files = ke.export_training(model, "categorical", optimizer, path=tmp_path / "files")
    result = files.step(files.initial(), inputs, targets)
    found = {name: result[f"new {name}"] for name in files.parameters}
    history = ke.fit(model, [(inputs, targets)], optimizer=optimizer, steps=1, schedule="constant")
    for name, array in history.engine.parameters.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-6)


class CubeRoots(ke.NormalMeanNegativeLogProbLoss):
    """A loss with a function that no file computes."""

    def errors(self, values, targets):
        return np.cbrt(super().errors(values, targets))


class Decisions(ke.NormalMeanNegativeLogProbLoss):
    """A loss with a decision by a number that is known in a run only."""

    def gradient_of(self, values, targets):
        error = self.errors(values, targets)
        return {self.mean: error if error.sum() > 0 else -error}


class Comparisons(ke.NormalMeanNegativeLogProbLoss):
    """A loss that compares the number of examples."""

    def gradient_of(self, values, targets):
        error = self.errors(values, targets)
        return {self.mean: error if error.shape[0] < 100 else -error}


@pytest.mark.parametrize(
    ("loss", "message"),
    [(CubeRoots, "cbrt"), (Decisions, "truth value"), (Comparisons, "not supported")],
)
def test_a_loss_that_no_file_computes_is_refused_before_anything_is_written(
    loss, message, tmp_path
):
    files = ke.export_training(network("dense"), path=tmp_path / "files")
    before = {path.name: path.read_bytes() for path in files.folder.iterdir()}
    with pytest.raises(ke.UnsupportedError, match=message):
        ke.export_training(network("dense"), loss("output", targets="targets"), path=files.folder)
    assert before == {path.name: path.read_bytes() for path in files.folder.iterdir()}


def test_a_loss_without_targets_is_refused(tmp_path):
    net = Net()
    net.dense("fc", "input", 5, 1)
    net.op("Flatten", "fc", to="flat", axis=0)
    net.op("Squeeze", "fc", net.constant("axes", np.array([1])), to="output")
    model = net.model({"input": ["batch", 5]}, {"output": ["batch"]})
    for optimizer in ("adamw", "kfac"):
        with pytest.raises(ke.UnsupportedError, match=r"loss on 'output' has none"):
            ke.export_training(model, "output", optimizer, path=tmp_path / "files")
    assert not (tmp_path / "files").exists()


@pytest.mark.parametrize("optimizer", ["kfac", "adamw"])
def test_parts_count_the_targets_of_the_whole_batch(optimizer, tmp_path):
    model = network("conv2d")
    inputs, targets = data(model)
    targets[[1, 2, 5]] = -100
    results = []
    for parts in (1, 3):
        folder = tmp_path / str(parts)
        files = ke.export_training(model, optimizer=optimizer, path=folder, accumulate=parts)
        results.append(files.step(files.initial(), inputs, targets))
    for name, value in results[0].items():
        np.testing.assert_allclose(results[1][name], value, rtol=1e-4, atol=1e-6)
    engine = ke.Engine.from_onnx(model, loss="categorical", threads=1)
    expected = engine.evaluate((inputs, targets), metrics=["loss", "accuracy"])
    for name in ("loss", "accuracy"):
        np.testing.assert_allclose(results[0][name], expected[name], rtol=1e-5)
    targets[:] = -100
    assert not files.step(files.initial(), inputs, targets)["finite"]


CLASS_ROWS = np.random.default_rng(4).dirichlet(np.ones(3), ROWS).astype("float32")
# Means of an order, so that each part has means of its own.
MEANS = np.sort(50 + np.random.default_rng(6).standard_normal((ROWS, 3)), axis=0).astype("float32")
WEIGHTS = np.where(np.arange(ROWS) % 5 == 1, 0, np.random.default_rng(5).random(ROWS))


@pytest.mark.parametrize(
    ("loss", "given", "targets"),
    [
        ("categorical", {"weights": "examples"}, None),
        ("categorical", {"weights": "targets", "probabilities": True}, CLASS_ROWS),
        ("multi_bernoulli", {"weights": "examples"}, CLASS_ROWS.round()),
        ("multi_bernoulli", {"weights": "predictions"}, CLASS_ROWS.round()),
        ("normal", {"weights": "examples"}, MEANS),
    ],
)
@pytest.mark.parametrize("optimizer", ["kfac", "adam"])
def test_parts_have_the_weights_of_the_whole_batch(loss, given, targets, optimizer, tmp_path):
    model = network("conv2d")
    inputs, ids = data(model)
    batch = inputs, ke.Weighted(ids if targets is None else targets, WEIGHTS)
    results = []
    for parts in (1, 3):
        folder = tmp_path / str(parts)
        files = ke.export_training(model, loss, optimizer, path=folder, accumulate=parts, **given)
        results.append(files.step(files.initial(), *batch))
        for name, value in results[0].items():
            np.testing.assert_allclose(results[-1][name], value, rtol=1e-4, atol=1e-6)
    engine = ke.Engine.from_onnx(model, loss=loss, threads=1)
    metrics = [name for name in ("loss", "accuracy") if name in results[0]]
    expected = engine.evaluate([batch], metrics=metrics)
    for name in metrics:
        np.testing.assert_allclose(results[0][name], expected[name], rtol=1e-5)
    unweighted = engine.evaluate([(inputs, batch[1].targets)], metrics=["loss"])["loss"]
    assert abs(unweighted - expected["loss"]) > 1e-3


@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize("form", [{"weights": "examples"}, {"mask": "predictions"}])
def test_batches_without_weights_have_weights_of_one(form, calls, tmp_path):
    files = ke.export_training(
        network("tokens"), "categorical", "adam", path=tmp_path, steps_per_call=calls, **form
    )
    rng, batches = np.random.default_rng(0), []
    shape = (6, 5) if "mask" in form else (6,)
    for seed, weights in enumerate([None, rng.integers(0, 2, shape), None, np.ones(shape)]):
        inputs, targets = random_inputs(network("tokens"), 6, seed), rng.integers(0, 3, (6, 5))
        batches.append((inputs, targets) if weights is None else (inputs, targets, weights))
    whole = [batch if len(batch) == 3 else (*batch, np.ones(shape)) for batch in batches]
    found, expected = (files.run(given, steps=4) for given in (batches, whole))
    assert found.losses == expected.losses


@pytest.mark.parametrize("kind", ["weights", "mask"])
@pytest.mark.parametrize("calls", [1, 2])
def test_a_run_reads_the_weights_of_the_data(kind, calls, tmp_path):
    model = network("conv2d")
    inputs, targets = data(model)
    weights = WEIGHTS > 0 if kind == "mask" else WEIGHTS
    files = ke.export_training(
        model, "categorical", "adam", path=tmp_path / "files", steps_per_call=calls,
        **{kind: "examples"},
    )  # fmt: skip
    run = files.run((inputs, targets, weights), steps=4, batch_size=6, seed=3)
    engine = ke.Engine.from_onnx(model, loss="categorical", threads=1)
    history = ke.fit(
        engine, (inputs, targets, weights), optimizer=ke.Adam(engine), batch_size=6, steps=4,
        seed=3, schedule="constant", progress=False,
    )  # fmt: skip
    losses = [record["loss"] for record in history.records if "loss" in record]
    np.testing.assert_allclose(run.losses, losses, rtol=1e-4)
    names_of_inputs, _ = names(files.folder / "training.onnx")
    assert names_of_inputs[:4] == ["input", "targets", kind, "rate"]
    assert f"| `{kind}` |" in (files.folder / "README.md").read_text()


@pytest.mark.parametrize("wrong", [-1.0, np.nan, np.inf])
def test_a_wrong_weight_changes_nothing(wrong, tmp_path):
    model = network("dense")
    files = ke.export_training(model, path=tmp_path / "files", weights="examples")
    (inputs, targets), weights = data(model), WEIGHTS.copy()
    weights[4] = wrong
    start = files.initial()
    results = files.step(start, inputs, ke.Weighted(targets, weights))
    assert not results["finite"]
    assert all(
        results[f"new {name}"].size == 0 or np.array_equal(results[f"new {name}"], array)
        for name, array in start.items()
    )
    assert files.step(start, inputs, ke.Weighted(targets, WEIGHTS))["finite"]


def test_what_lies_under_a_mask_changes_no_bit_of_a_step(tmp_path):
    model = network("tokens")
    files = ke.export_training(model, path=tmp_path / "files", mask="predictions")
    inputs, rng = random_inputs(model, 6, 0), np.random.default_rng(0)
    targets, mask = rng.integers(0, 3, (6, 5)), np.ones((6, 5), bool)
    mask[1, 2:] = mask[4] = False
    start, results = files.initial(), []
    for garbage, other in ((0, 0), (1e6, 2**40)):
        (name, array), *_ = inputs.items()
        spoiled = np.where(mask[..., None], array, np.float32(garbage))
        batch = {name: spoiled}, ke.Weighted(np.where(mask, targets, other), mask)
        results.append(files.step(start, *batch))
    for name, array in results[0].items():
        np.testing.assert_array_equal(results[1][name], array)


@pytest.mark.parametrize(
    ("given", "targets", "error", "message"),
    [
        ({}, ke.Weighted(np.zeros(ROWS, int), WEIGHTS), ke.InputError, "no input for weights"),
        (
            {"weights": "examples"}, ke.Weighted(np.zeros(ROWS, int), WEIGHTS[:, None]),
            ke.ShapeError, "has 1 axes",
        ),
        (
            {"mask": "examples"}, ke.Weighted(np.zeros(ROWS, int), WEIGHTS), ke.InputError,
            "other weights than 0 and 1",
        ),
    ],
)  # fmt: skip
def test_weights_without_an_input_are_refused(given, targets, error, message, tmp_path):
    model = network("dense")
    files = ke.export_training(model, path=tmp_path / "files", **given)
    with pytest.raises(error, match=message):
        files.step(files.initial(), data(model)[0], targets)


def test_an_input_of_the_model_is_no_input_for_weights(tmp_path):
    net = Net()
    net.op("Mul", "input", "mask", to="masked")
    net.dense("output", "masked", 5, 3)
    shape = ["batch", 5]
    model = net.model({"input": shape, "mask": shape}, {"output": ["batch", 3]})
    with pytest.raises(ke.InputError, match="input or a weight 'mask'"):
        ke.export_training(model, path=tmp_path / "files", mask="examples")
    assert not (tmp_path / "files").exists()
    ke.export_training(model, path=tmp_path / "files", weights="examples")


@pytest.mark.parametrize("kept", [0, 3, 7])
def test_statistics_are_those_of_the_next_part_in_which_something_counts(kept, tmp_path):
    model = network("dense")
    options = {"statistics_part": 0.125, "statistics_every": 1, "refresh_every": 1}
    files = ke.export_training(model, path=tmp_path / "files", **options)
    inputs, targets = data(model, n=8)
    targets[np.arange(8) != kept] = -100
    x = np.append(inputs["input"][kept], 1)
    state = files.initial()
    for _ in range(3):  # the part of each step is another example
        results = files.step(state, inputs, targets)
        assert results["finite"]
        state |= {n: results[f"new {n}"] for n in state if results[f"new {n}"].size}
        np.testing.assert_allclose(state["average/0"], np.outer(x, x), atol=1e-5)


def test_weights_in_double_precision_are_refused(tmp_path):
    net = Net("float64")
    net.dense("output", "input", 5, 3)
    model = net.model({"input": ["batch", 5]}, {"output": ["batch", 3]})
    with pytest.raises(ke.UnsupportedError, match="float32"):
        ke.export_training(model, path=tmp_path / "files")


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


def test_the_model_is_not_overwritten(tmp_path):
    path = tmp_path / "predict.onnx"
    path.write_bytes(network("dense").SerializeToString())
    before = path.read_bytes()
    with pytest.raises(ke.InputError, match="overwrite"):
        ke.export_training(path, path=tmp_path)
    assert [*tmp_path.iterdir()] == [path]
    assert path.read_bytes() == before


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ke.InputError, match="folder"):
        ke.export_training(network("dense"), path=tmp_path / "file")


# -- several steps in a call, and random nodes -----------------------------------------------------


@pytest.mark.parametrize("optimizer", ["kfac", "adamw"])
@pytest.mark.parametrize("net", ["conv2d", "batch normalization"])
def test_several_steps_in_a_call_equal_single_steps(optimizer, net, tmp_path):
    model = network(net)
    one = ke.export_training(model, optimizer=optimizer, path=tmp_path / "one")
    many = ke.export_training(model, optimizer=optimizer, path=tmp_path / "many", steps_per_call=4)
    batches = [data(model, seed, 7 if seed < 6 else 5) for seed in range(10)]
    batches[2][0]["input"][0] = np.inf  # a step that is skipped inside the loop

    def rate(step):
        return 1 - step / 20

    first, second = (files.run(batches, steps=10, rate=rate) for files in (one, many))
    assert first.skipped == second.skipped == 1
    np.testing.assert_allclose(second.losses, first.losses, rtol=1e-5)
    for name, value in first.state.items():
        np.testing.assert_allclose(second.state[name], value, rtol=1e-4, atol=1e-5)


def dropping(ratio, masked=False):
    """A network with Dropout in training mode, or with its mask as an input."""
    net = Net()
    net.dense("fc", "input", 5, 6)
    net.op("Tanh", "fc", to="act")
    if masked:
        net.op("Mul", "act", "mask", to="dropped")
    else:
        options = net.constant("ratio", np.float32(ratio)), net.constant("on", np.array(True))
        net.op("Dropout", "act", *options, to="dropped")
    net.dense("output", "dropped", 6, 3)
    inputs = {"input": ["batch", 5]} | ({"mask": ["batch", 6]} if masked else {})
    return net.model(inputs, {"output": ["batch", 3]})


@pytest.mark.parametrize("optimizer", ["kfac", "adamw"])
def test_dropout_multiplies_by_its_mask_also_in_the_statistics(optimizer, tmp_path):
    ratio, rng = 0.3, np.random.default_rng(0)
    drops, masks = (
        ke.export_training(
            dropping(ratio, masked), optimizer=optimizer, path=tmp_path / str(masked), noise="input"
        )
        for masked in (False, True)
    )
    states = [drops.initial(), masks.initial()]
    (name,) = [name for name in drops.description.noise if "dropped" in name]
    for _ in range(6):
        x, targets = rng.standard_normal((8, 5)), rng.integers(0, 3, 8)
        numbers, targets_noise = rng.random((8, 6)), rng.random(2)
        mask = (numbers.astype("float32") >= np.float32(ratio)) / (1 - ratio)
        extra = ({name: numbers, "noise": targets_noise}, {"mask": mask, "noise": targets_noise})
        for files, state, given in zip((drops, masks), states, extra, strict=True):
            given.pop("noise") if optimizer == "adamw" else None
            results = files.step(state, {"input": x, **given}, targets)
            state |= {n: results[f"new {n}"] for n in state if results[f"new {n}"].size}
    states[0].pop("feature_powers/feature_powers", None)  # a mask has features, too
    for key, value in states[0].items():
        np.testing.assert_allclose(value, states[1][key], rtol=1e-4, atol=1e-6)


def test_the_file_draws_a_new_mask_in_each_step(tmp_path):
    model = dropping(0.25)
    files = ke.export_training(model, optimizer="sgd", learning_rate=0.0, path=tmp_path / "files")
    batch = ({"input": np.ones((64, 5), np.float32)}, np.zeros(64, np.int64))
    run = files.run([batch] * 30, steps=30)
    assert len(set(run.losses)) == 30  # nothing else changes
    again = files.run([batch] * 30, steps=30)
    assert run.losses == again.losses
    first, second = (files.predict(run.state, batch[0])["output"] for _ in range(2))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("op", ["RandomNormalLike", "RandomUniformLike", "Bernoulli"])
def test_other_random_nodes_are_drawn_in_the_file(op, tmp_path):
    net = Net()
    net.dense("fc", "input", 5, 6)
    net.op("Sigmoid", "fc", to="act")
    net.op(op, "act", to="drawn")
    net.op("Add", "act", "drawn", to="noisy")
    net.dense("output", "noisy", 6, 3)
    model = net.model({"input": ["batch", 5]}, {"output": ["batch", 3]})
    files = ke.export_training(model, path=tmp_path / "files")
    operators = {node.op_type for node in onnx.load(files.folder / "training.onnx").graph.node}
    assert op not in operators
    run = files.run([data(model)] * 8, steps=8)
    assert len(set(run.losses)) == 8
    assert run.skipped == 0


def test_a_dropout_whose_mode_is_an_input_is_refused(tmp_path):
    net = Net()
    net.dense("fc", "input", 5, 6)
    options = net.constant("ratio", np.float32(0.5)), net.constant("training", np.array(True))
    net.op("Dropout", "fc", *options, to="dropped")
    net.dense("output", "dropped", 6, 3)
    model = net.model({"input": ["batch", 5]}, {"output": ["batch", 3]})
    entry = onnx.helper.make_tensor_value_info("training", onnx.TensorProto.BOOL, [])
    model.graph.input.append(entry)
    kept = [e for e in model.graph.initializer if e.name != "training"]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    with pytest.raises(ke.UnsupportedError, match="Dropout"):
        ke.export_training(model, path=tmp_path / "files")


# -- accumulation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["kfac", "adamw"])
@pytest.mark.parametrize(
    "net", nightly_but(["conv2d"], ["conv2d", "attention", "embedding", "gru"])
)
def test_parts_of_a_batch_give_the_step_of_the_batch(optimizer, net, tmp_path):
    model = network(net)
    whole, parts = (
        ke.export_training(model, optimizer=optimizer, path=tmp_path / str(n), accumulate=n)
        for n in (1, 3)
    )
    batches = [data(model, seed, n) for seed, n in enumerate((12, 7, 3, 2, 1, 12))]
    first, second = (files.run(batches, steps=6) for files in (whole, parts))
    np.testing.assert_allclose(second.losses, first.losses, rtol=1e-4)
    for name, value in first.state.items():
        np.testing.assert_allclose(second.state[name], value, rtol=1e-3, atol=1e-5)
    inputs, targets = batches[1]
    states = first.state, second.state
    a, b = (f.step(s, inputs, targets) for f, s in zip((whole, parts), states, strict=True))
    np.testing.assert_allclose(a["accuracy"], b["accuracy"], atol=1e-6)


def test_parts_in_several_steps_a_call_and_with_other_options(tmp_path):
    model = network("conv2d")
    options = [{}, {"accumulate": 2, "steps_per_call": 3, "statistics_part": 1.0}]
    one, many = (
        ke.export_training(model, path=tmp_path / str(i), **{"statistics_part": 1.0, **chosen})
        for i, chosen in enumerate(options)
    )
    batches = [data(model, seed) for seed in range(6)]
    first, second = (files.run(batches, steps=6) for files in (one, many))
    np.testing.assert_allclose(second.losses, first.losses, rtol=1e-4)


@pytest.mark.parametrize("several", [{}, {"steps_per_call": 2}], ids=["one step", "two steps"])
@pytest.mark.parametrize(("parts", "n"), [(2, 12), (3, 7), (4, 9), (4, 3)])
def test_running_statistics_after_parts_are_those_of_the_optimizer(parts, n, several, tmp_path):
    """They move once in a step: the variance is that of all examples, not of one of the parts."""
    model = network("batch normalization")
    folder = tmp_path / "files"
    files = ke.export_training(model, optimizer="adamw", path=folder, accumulate=parts, **several)
    inputs, targets = data(model, n=n)
    x = inputs["input"] + np.linspace(0, 9, n, dtype="float32").reshape(-1, 1, 1, 1)  # unlike parts
    result = files.run([({"input": x}, targets)] * 2, steps=2)
    engine = ke.Engine.from_onnx(model, loss="categorical")
    optimizer = ke.AdamW(engine)
    places = np.arange(min(parts, n) + 1) * n // min(parts, n)
    batch = [({"input": x[a:b]}, targets[a:b]) for a, b in pairwise(places)]
    losses = [optimizer.step(batch).loss for _ in range(2)]
    np.testing.assert_allclose(result.losses, losses, rtol=1e-5)
    assert list(engine.buffers) == ["bn.mean", "bn.var"]
    for name, value in engine.buffers.items():
        np.testing.assert_allclose(result.state[name], value, rtol=1e-5, atol=1e-6)


def test_parts_have_masks_of_their_own(tmp_path):
    model = dropping(0.5)
    files = ke.export_training(
        model, optimizer="sgd", learning_rate=0.0, path=tmp_path / "files", accumulate=2
    )
    run = files.run([data(model)] * 5, steps=5)
    assert len(set(run.losses)) == 5
    with pytest.raises(ke.UnsupportedError, match="accumulate"):
        ke.export_training(model, path=tmp_path / "other", accumulate=2, noise="input")


def test_a_model_of_one_batch_size_is_not_divided(tmp_path):
    net = Net()
    net.dense("fc", "input", 5, 6)
    net.op("Reshape", "fc", net.constant("shape", np.array([4, 2, 3])), to="split")
    net.op("ReduceMean", "split", net.constant("axis", np.array([1])), to="output", keepdims=0)
    model = net.model({"input": [4, 5]}, {"output": [4, 3]})
    with pytest.raises(ke.UnsupportedError, match="accumulate"):
        ke.export_training(model, path=tmp_path / "files", accumulate=2)
    files = ke.export_training(model, path=tmp_path / "files")
    run = files.run([data(model, seed, 4) for seed in range(4)], steps=8, batch_size=4)
    assert run.losses[-1] < run.losses[0]


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("optimizer", ["kfac", "adamw"])
def test_a_batch_without_targets_of_one_loss_trains_the_other(optimizer, parts, tmp_path):
    """The truth is the loss of the other output alone; one task may come first or alternate."""
    model, rng = two_outputs(), np.random.default_rng(0)
    losses = ["categorical", "categorical"]
    files = ke.export_training(model, losses, optimizer, path=tmp_path / "files", accumulate=parts)
    state = files.initial()
    for step in range(4):
        inputs = random_inputs(model, ROWS, step)
        targets = {"logits": rng.integers(0, 3, ROWS), "mean": rng.integers(0, 2, ROWS)}
        left, kept = ("mean", "logits") if step % 2 == 0 else ("logits", "mean")
        targets[left][:] = -100
        z = files.predict(state, inputs)
        z = z[kept] if isinstance(z, dict) else z
        log_p = z - np.log(np.exp(z).sum(axis=1, keepdims=True))
        results = files.step(state, inputs, targets)
        assert results["finite"]
        expected = -log_p[np.arange(ROWS), targets[kept]].mean()
        np.testing.assert_allclose(results["loss"], expected, rtol=1e-5)
        state |= {n: results[f"new {n}"] for n in state if results[f"new {n}"].size}
        weights = files.read(state)
        assert all(np.isfinite(array).all() for array in weights.values())
    if optimizer == "kfac":
        averages = [state[n] for n in state if n.startswith("average/")]
        assert all(average.any() for average in averages)


HEADS = """heads (float[batch,4] x) => (float[batch,3] cls, float[batch,2] box) {
  t = MatMul(x, w)  h = Tanh(t)  cls = MatMul(h, a)
  u = MatMul(h, b)  v = Tanh(u)  box = MatMul(v, c)
}"""


def test_a_batch_without_targets_of_one_loss_leaves_its_own_layers(tmp_path):
    """Their averages are those of the steps that have its targets, whatever is in between."""
    rng = np.random.default_rng(0)
    shapes = {"w": (4, 5), "a": (5, 3), "b": (5, 6), "c": (6, 2)}
    model = parsed(HEADS, {n: rng.normal(size=s).astype(np.float32) for n, s in shapes.items()})
    files = ke.export_training(
        model, {"cls": "categorical", "box": "multi_bernoulli"}, path=tmp_path / "files",
        statistics_every=1, statistics_part=1.0, noise="input",
    )  # fmt: skip
    factors = files.description.factors
    x, ids = rng.normal(size=(8, 4)).astype(np.float32), rng.integers(0, 3, 8)
    boxes = rng.integers(0, 2, (8, 2)).astype(np.float32)
    noise = {name: rng.random((8, *shape[1:])) for name, shape in files.description.noise.items()}
    own = [i for i, name in factors.items() if name.endswith(("(∂u)", "(v)", "(∂box)"))]
    assert len(own) == 3

    def averages(steps):
        """The averages after some steps with constant parameters."""
        state = files.initial()
        parameters = {name: state[name] for name in files.parameters}
        for has_boxes in steps:
            targets = {"cls": ids, "box": boxes if has_boxes else np.full_like(boxes, -100)}
            results = files.step(state, {"x": x, **noise}, targets, rate=0.0)
            state |= {n: results[f"new {n}"] for n in state if results[f"new {n}"].size}
            state |= parameters
        return state

    expected = averages([True])
    for order in ([True, False], [False, True], [True, False, False, True]):
        found = averages(order)
        for i in own:
            name = f"average/{i}"
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, err_msg=factors[i])
