"""``saliency``, ``prune`` and ``merge``: files of closed forms, and one error for bad input."""

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
from tests.comparing import assert_near
from tests.models import Net, linear

EXAMPLES = 20
# Rounding of a float32 forward pass; closed forms are float64.
ROUNDING = 1e-5


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


def fisher(name):
    """The weights θ as a vector, and ``A ⊗ G`` of a classifier, in float64."""
    weights, x = weights_of(f"{name}.onnx"), np.load(f"{name}.npy").astype(float)
    exponentials = np.exp(x @ weights["fc.weight"] + weights["fc.bias"])
    p = exponentials / exponentials.sum(axis=1, keepdims=True)
    a = np.hstack([x, np.ones((EXAMPLES, 1))])
    G = np.diag(p.mean(axis=0)) - p.T @ p / EXAMPLES
    return vector(weights), np.kron(a.T @ a / EXAMPLES, G)


def vector(arrays):
    """Weight, row by row, then the bias."""
    return np.concatenate([arrays["fc.weight"].ravel(), arrays["fc.bias"]]).astype(float)


def prune(*arguments, model="a.onnx", out="out.onnx"):
    words = [model, "--curvature", "a.curvature", "-o", out]
    return main(["prune", *words, *arguments])


# -- saliency


def test_saliencies_equal_their_closed_forms(capsys):
    theta, F = fisher("a")
    damping = 0.1
    inverse = np.linalg.inv(F + damping * np.eye(15))
    expected = {
        "obd": 0.5 * theta**2 * (np.diag(F) + damping),
        "obs": 0.5 * theta**2 / np.diag(inverse),
        "magnitude": 0.5 * theta**2,
    }
    for method, values in expected.items():
        words = ["--curvature=a.curvature", f"--method={method}", f"--damping={damping}"]
        assert main(["saliency", "a.onnx", *words, "-o", "s.st", "--json"]) == 0
        arrays = load_file("s.st")
        assert arrays["fc.weight"].dtype == np.float64
        assert_near(vector(arrays), values, ROUNDING)
        entry = json.loads(capsys.readouterr().out)["parameters"]["fc.weight"]
        assert entry["shape"] == [4, 3]
        assert entry["sum"] == pytest.approx(values[:12].sum(), rel=ROUNDING)
        assert entry["median"] == pytest.approx(np.median(values[:12]), rel=ROUNDING)
        assert entry["largest"] == pytest.approx(values[:12].max(), rel=ROUNDING)
    with safe_open("s.st", framework="numpy") as file:
        assert file.metadata() == {"method": "magnitude", "damping": "0.1"}


# -- prune


@pytest.mark.parametrize(("options", "count"), [(["--sparsity=0.5"], 6), (["--count=5"], 5)])
def test_smallest_saliencies_become_zero(options, count):
    assert prune(*options) == 0
    theta, F = fisher("a")
    pruned = vector(weights_of("out.onnx"))
    smallest = np.argsort((theta**2 * np.diag(F))[:12])[:count]  # of the weight; the bias remains
    assert set(np.flatnonzero(pruned == 0)) == set(smallest)
    np.testing.assert_array_equal(pruned[pruned != 0], theta[pruned != 0])


def test_other_weights_make_up_for_the_zeros_and_the_rise_is_that_of_the_matrix(capsys):
    damping = 0.1
    assert prune("--count=6", "--method=obs", f"--damping={damping}", "--json") == 0
    theta, F = fisher("a")
    pruned = vector(weights_of("out.onnx"))
    zero = pruned == 0
    H = F + damping * np.eye(15)
    expected = theta.copy()
    expected[zero] = 0
    force = H[np.ix_(~zero, zero)] @ theta[zero]
    expected[~zero] += np.linalg.solve(H[np.ix_(~zero, ~zero)], force)
    # Conjugate gradients stop at a relative residual of 1e-8; the file is float32.
    assert_near(pruned, expected, ROUNDING)
    step = pruned - theta
    rise = json.loads(capsys.readouterr().out)["rise"]
    assert rise == pytest.approx(0.5 * step @ F @ step, rel=10 * ROUNDING)


def test_pruned_model_keeps_names_and_outputs_of_the_file():
    assert prune("--count=0") == 0
    before, after = onnx.load("a.onnx"), onnx.load("out.onnx")
    assert [n.op_type for n in after.graph.node] == [n.op_type for n in before.graph.node]
    np.testing.assert_array_equal(vector(weights_of("out.onnx")), vector(weights_of("a.onnx")))


# -- merge


@pytest.mark.parametrize("weights", [(1, 1), (3, 0.5)])
def test_merged_weights_equal_the_formula(weights, capsys):
    files = ["a.onnx", "b.onnx", "--curvature=a.curvature", "--curvature=b.curvature"]
    options = [] if weights == (1, 1) else [f"--weight={weight}" for weight in weights]
    assert main(["merge", *files, *options, "-o", "out.onnx", "--json"]) == 0
    thetas, diagonals = [], []
    for name in "ab":
        theta, F = fisher(name)
        thetas.append(theta)
        diagonals.append(np.diag(F))
    shares = np.array(weights)[:, None] * diagonals
    merged = vector(weights_of("out.onnx"))
    assert_near(merged, (shares * thetas).sum(axis=0) / shares.sum(axis=0), ROUNDING)
    entry = json.loads(capsys.readouterr().out)["parameters"]["fc.weight"]
    distances = [np.linalg.norm((merged - theta)[:12]) for theta in thetas]
    assert entry["distances"] == pytest.approx(distances, rel=ROUNDING)


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


# -- refusals


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
