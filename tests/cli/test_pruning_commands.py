"""``saliency``, ``prune`` and ``merge``: the library's results, and one error for bad input."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import kfac_engine as ke
from kfac_engine.__main__ import main
from kfac_engine.data import demo_model, digits
from tests.comparing import assert_arrays_near
from tests.models import Net, linear

EXAMPLES = 20
ROUNDING = 1e-6  # a file is float32


def weights_of(path):
    """The weights in a file, by onnx alone."""
    tensors = onnx.load(path).graph.initializer
    return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in tensors}


def save_model(path, seed):
    """Write a linear classifier with random weights."""
    model, rng = linear(), np.random.default_rng(seed)
    for tensor in model.graph.initializer:
        values = rng.standard_normal(tuple(tensor.dims)).astype(np.float32)
        tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
    onnx.save(model, path)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Two classifiers ``a`` and ``b`` with data and curvatures of their own."""
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate("ab"):
        save_model(f"{name}.onnx", seed)
        x = np.random.default_rng(10 + seed).standard_normal((EXAMPLES, 4)).astype(np.float32)
        np.save(f"{name}.npy", x)
        curvature = ke.curvature(f"{name}.onnx", ({"input": x}, None), loss="categorical")
        curvature.save(f"{name}.curvature")
    return tmp_path


def curvature_of(name):
    return ke.Curvature.load(f"{name}.curvature", f"{name}.onnx")


def prune(*arguments, model="a.onnx", out="out.onnx"):
    words = [model, "--curvature", "a.curvature", "-o", out]
    return main(["prune", *words, *arguments])


def test_saliencies_are_those_of_the_library(capsys):
    for method in ("obd", "obs", "magnitude"):
        words = ["--curvature=a.curvature", f"--method={method}", "--damping=0.1"]
        assert main(["saliency", "a.onnx", *words, "-o", "s.st", "--json"]) == 0
        expected = ke.saliency(curvature_of("a"), method, 0.1)
        arrays, values = load_file("s.st"), expected["fc.weight"]
        assert arrays["fc.weight"].dtype == np.float64
        assert_arrays_near(arrays, expected, 1e-12)
        entry = json.loads(capsys.readouterr().out)["parameters"]["fc.weight"]
        assert entry["shape"] == [4, 3]
        assert entry["sum"] == pytest.approx(values.sum())
        assert entry["median"] == pytest.approx(np.median(values))
        assert entry["largest"] == pytest.approx(values.max())
    with safe_open("s.st", framework="numpy") as file:
        assert file.metadata() == {"method": "magnitude", "damping": "0.1"}


@pytest.mark.parametrize(
    "options",
    [
        {"sparsity": 0.5},
        {"count": 5},
        {"count": 0},
        {"count": 6, "method": "obs", "damping": 0.1},
        {"pattern": "2:4", "method": "magnitude"},
    ],
    ids=str,
)
def test_pruned_weights_are_those_of_the_library(options, capsys):
    assert prune(*(f"--{name}={value}" for name, value in options.items()), "--json") == 0
    before, after = onnx.load("a.onnx"), onnx.load("out.onnx")
    assert [n.op_type for n in after.graph.node] == [n.op_type for n in before.graph.node]
    curvature, pruned = curvature_of("a"), weights_of("out.onnx")
    assert_arrays_near(pruned, ke.prune(curvature, **options), ROUNDING)
    step = {name: pruned[name].astype(float) - a for name, a in curvature.parameters.items()}
    rise = sum((step[name] * a).sum() for name, a in curvature.multiply(step).items()) / 2
    assert json.loads(capsys.readouterr().out)["rise"] == pytest.approx(rise, rel=1e-4)


@pytest.mark.parametrize("weights", [None, (3, 0.5)])
def test_merged_weights_are_those_of_the_library(weights, capsys):
    files = ["a.onnx", "b.onnx", "--curvature=a.curvature", "--curvature=b.curvature"]
    options = [f"--weight={weight}" for weight in weights or ()]
    assert main(["merge", *files, *options, "-o", "out.onnx", "--json"]) == 0
    curvatures = [curvature_of(name) for name in "ab"]
    parameters, merged = [c.parameters for c in curvatures], weights_of("out.onnx")
    assert_arrays_near(merged, ke.merge(parameters, curvatures, weights), ROUNDING)
    entry = json.loads(capsys.readouterr().out)["parameters"]["fc.weight"]
    distances = [np.linalg.norm(merged["fc.weight"] - p["fc.weight"]) for p in parameters]
    assert entry["distances"] == pytest.approx(distances, rel=1e-4)


def normalized(path, mean, seed):
    """Write a dense layer before a normalization in inference form, and its curvature."""
    net = Net(seed=seed)
    x = net.dense("fc", "input", 4, 3)
    ones = np.ones(3, np.float32)
    statistics = [net.constant("mean", mean * ones), net.constant("var", ones)]
    scale, shift = net.positive("scale", 3), net.weight("shift", 3)
    net.op("BatchNormalization", x, scale, shift, *statistics, to="output")
    onnx.save(net.model({"input": ["n", 4]}, {"output": ["n", 3]}), path)
    curvature = ke.curvature(path, ({"input": np.load("a.npy")}, None), loss="categorical")
    curvature.save(f"{path}.curvature")


@pytest.mark.filterwarnings("ignore::kfac_engine.InferenceFormWarning")
@pytest.mark.parametrize("mean", [0.0, 1.0])
def test_running_statistics_are_those_of_the_first_model_with_a_warning(mean, capsys):
    normalized("first.onnx", 0.0, seed=1)
    normalized("second.onnx", mean, seed=2)
    capsys.readouterr()
    curvatures = [f"--curvature={name}.onnx.curvature" for name in ("first", "second")]
    assert main(["merge", "first.onnx", "second.onnx", *curvatures, "-o", "out.onnx"]) == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if "differ" in line]
    start = "warning: 'mean' differ between the models and are not among the parameters; "
    assert len(warnings) == (mean != 0)
    assert all(line.startswith(start) for line in warnings)
    np.testing.assert_array_equal(weights_of("out.onnx")["mean"], np.zeros(3, np.float32))


def changed(**tensors):
    """Write the curvature of ``a`` with other arrays."""
    with safe_open("a.curvature", framework="numpy") as file:
        header = file.metadata()
    save_file(load_file("a.curvature") | tensors, "changed.curvature", header)


A, B = "--curvature=a.curvature", "--curvature=b.curvature"
WRONG = {
    "other weights": (["saliency", "a.onnx", B], "'fc.bias', 'fc.weight' differ"),
    "other weights to prune": (["prune", "b.onnx", A, "--count=1"], "'fc.bias', 'fc.weight'"),
    "swapped curvatures": (["merge", "a.onnx", "b.onnx", B, A], "belongs to other weights"),
    "no curvature": (["saliency", "a.onnx"], "--curvature"),
    "missing file": (["saliency", "a.onnx", "--curvature=none"], "none"),
    "cut file": (["saliency", "a.onnx", "--curvature=cut.curvature"], "cut.curvature"),
    "file of arrays": (["saliency", "a.onnx", "--curvature=arrays.st"], "is not a curvature"),
    "file of another shape": (["prune", "a.onnx", "--curvature=changed.curvature", "--count=1"],
                              "is damaged"),
    "no model": (["prune", "none.onnx", A, "--count=1"], "none.onnx"),
    "unknown method": (["saliency", "a.onnx", A, "--method=magnitud"], "did you mean 'magnitude'"),
    "negative damping": (["prune", "a.onnx", A, "--count=1", "--damping=-1"], "--damping"),
    "singular matrix": (["saliency", "a.onnx", A, "--method=obs"], "raise the damping"),
    "no number of zeros": (["prune", "a.onnx", A], "one of sparsity, count, pattern"),
    "two numbers of zeros": (["prune", "a.onnx", A, "--count=1", "--sparsity=0"], "got sparsity"),
    "all weights": (["prune", "a.onnx", A, "--sparsity=1"], "sparsity must lie in [0, 1)"),
    "negative count": (["prune", "a.onnx", A, "--count=-1"], "count must be"),
    "too large count": (["prune", "a.onnx", A, "--count=13"], "12 weights"),
    "unknown pattern": (["prune", "a.onnx", A, "--pattern=4:2"], "pattern must be"),
    "pattern that divides no inputs": (["prune", "a.onnx", A, "--pattern=1:3"], "multiple of 3"),
    "unknown parameter": (["prune", "a.onnx", A, "--count=1", "--parameters=fc.weigth"],
                          "did you mean 'fc.weight'"),
    "one model": (["merge", "a.onnx", A], "two or more models"),
    "one curvature": (["merge", "a.onnx", "b.onnx", A], "2 models and 1 curvatures"),
    "one weight": (["merge", "a.onnx", "b.onnx", A, B, "--weight=1"], "1 weights"),
    "weight of zero": (["merge", "a.onnx", "b.onnx", A, B, "--weight=0", "--weight=1"], "--weight"),
    "another architecture": (["merge", "a.onnx", "cnn.onnx", A, "--curvature=cnn.curvature"],
                             "one architecture"),
    "model over its curvature": (["prune", "a.onnx", A, "--count=1", "-o", "a.curvature"],
                                 "would overwrite"),
    "model over itself": (["prune", "a.onnx", A, "--count=1", "-o", "a.onnx"], "would overwrite"),
    "model over the second": (["merge", "a.onnx", "b.onnx", A, B, "-o", "b.onnx"],
                              "would overwrite"),
    "saliencies over the model": (["saliency", "a.onnx", A, "-o", "a.onnx"], "would overwrite"),
    "no folder": (["saliency", "a.onnx", A, "-o", "none/s"], "existing folder"),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "named"), WRONG.values(), ids=WRONG)
def test_wrong_input_is_one_error_and_leaves_files_unchanged(arguments, named, folder, capsys):
    Path("cut.curvature").write_bytes(Path("a.curvature").read_bytes()[:-9])
    save_file({"x": np.zeros(3)}, "arrays.st")
    changed(**{"0/eigenvalues": np.ones((1, 3, 3))})
    if "cnn.onnx" in arguments:
        Path("cnn.onnx").write_bytes(demo_model("cnn"))
        batch = {"image": digits()[0][:8]}, None
        ke.curvature("cnn.onnx", batch, loss="categorical").save("cnn.curvature")
    Path("out").write_bytes(b"an older result")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    output = [] if "-o" in arguments else ["-o", "out"]
    assert main([*arguments, *output]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert named in error
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
