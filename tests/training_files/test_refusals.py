"""What an export notes, and what exports and steps of training files refuse."""

import numpy as np
import onnxruntime as ort
import pytest

import kfac_engine as ke
from tests.models import Net, parsed
from tests.training_files.nets import NETS, data, names, network, unchanged

NORMALIZED = """g (float[batch, 3] input) => (float[batch, 3] output) {{
    fc = MatMul(input, w)
    [node_bn] bn{new} = BatchNormalization <training_mode = {mode}> (fc, scale, bias, mean, var)
    output = MatMul(bn, w) }}"""


def trained_normalization(training):
    arrays = {"w": np.eye(3), **dict.fromkeys(("scale", "bias", "mean", "var"), np.ones(3))}
    text = NORMALIZED.format(new=", new_mean, new_var" if training else "", mode=training)
    return parsed(text, {name: array.astype(np.float32) for name, array in arrays.items()})


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
    message = r"shape \(4, 12, 3\), but the training files need \(batch, 8, 3\).*sample_inputs"
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
    assert unchanged(results, start)


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


def test_weights_in_double_precision_are_refused(tmp_path):
    net = Net("float64")
    net.dense("output", "input", 5, 3)
    model = net.model({"input": ["batch", 5]}, {"output": ["batch", 3]})
    with pytest.raises(ke.UnsupportedError, match="float32"):
        ke.export_training(model, path=tmp_path / "files")


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
