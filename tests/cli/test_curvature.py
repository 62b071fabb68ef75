"""``curvature``: the library's numbers for any batch size, and one error for bad input."""

import json
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

import kfac_engine as ke
from kfac_engine.__main__ import main
from kfac_engine.cli.curvature import spectra_of
from tests.comparing import assert_arrays_close
from tests.models import Net, linear, two_outputs

EXAMPLES, DAMPING = 20, 0.1
# Rounding of a float32 forward pass.
ROUNDING = 1e-5


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A directory with linear classifiers and a data set, and the shell in it."""
    monkeypatch.chdir(tmp_path)
    onnx.save(linear(), "m.onnx")
    rng = np.random.default_rng(0)
    np.savez("x.npz", input=rng.standard_normal((EXAMPLES, 4)).astype(np.float32))
    np.savez("y.npz", targets=rng.integers(0, 3, EXAMPLES))
    return tmp_path


def run(*arguments, model="m.onnx", inputs="x.npz"):
    words = ["--inputs", inputs, "--threads=1", "-o", "c.safetensors", f"--damping={DAMPING}"]
    return main(["curvature", model, *words, *arguments])


def report(capsys, *arguments, **files):
    assert run("--json", *arguments, **files) == 0
    return json.loads(capsys.readouterr().out)


def stored():
    return ke.Curvature.load("c.safetensors", "m.onnx")


def eigenvalues():
    """The eigenvalues of the only block of the file, ascending."""
    (values,) = stored().eigenvalues().values()
    return np.sort(values, axis=None)


def test_numbers_of_a_block_are_those_of_the_library(capsys):
    result = report(capsys, "--targets", "y.npz")
    (block,) = result["blocks"]
    assert block["parameters"] == ["fc.weight", "fc.bias"]
    assert block["shapes"] == [[4, 3], [3]]
    s = eigenvalues().clip(0)
    expected = {
        "eigenvalues": s.size,
        "trace": s.sum(),
        "largest": s.max(),
        "smallest": s.min(),
        "log_determinant": np.log(s + DAMPING).sum(),
        "effective_dimension": (s / (s + DAMPING)).sum(),
    }
    for name, value in expected.items():
        assert block[name] == pytest.approx(value, rel=ROUNDING, abs=ROUNDING * s.max())
        if name in result:
            assert result[name] == block[name]
    assert result["log_likelihood"] == pytest.approx(stored().log_likelihood)
    assert (result["examples"], result["parameters"], result["damping"]) == (EXAMPLES, 15, DAMPING)
    assert result["above_damping"] == (s > DAMPING).sum()


def test_file_has_the_curvature_of_the_library():
    assert run("--structure", "ekfac") == 0
    found = stored()
    x = np.load("x.npz")["input"]
    options = {"structure": "ekfac", "threads": 1}
    direct = ke.curvature("m.onnx", ({"input": x}, None), loss="categorical", **options)
    assert found.options.structure == "ekfac"
    assert_arrays_close(found.diagonal(), direct.diagonal(), rtol=ROUNDING, atol=ROUNDING)


def test_model_with_a_fixed_batch_reads_batches_of_its_size(capsys):
    net = Net()
    net.dense("fc", "input", 4, 3)
    onnx.save(net.model({"input": [5, 4]}, {"fc": [5, 3]}), "fixed.onnx")
    fixed = report(capsys, model="fixed.onnx")
    net = Net()
    net.dense("fc", "input", 4, 3)
    onnx.save(net.model({"input": ["n", 4]}, {"fc": ["n", 3]}), "free.onnx")
    free = report(capsys, model="free.onnx")
    assert fixed["examples"] == EXAMPLES
    assert fixed["trace"] == pytest.approx(free["trace"], rel=ROUNDING)
    assert run("--batch-size", "4", model="fixed.onnx") == 2
    assert "--batch-size is 4, but " in capsys.readouterr().err


def test_positions_folded_into_the_axis_of_the_examples_stay_together(capsys):
    net = Net()
    rows = net.op("Reshape", "input", net.constant("rows", np.array([-1, 2])), to="flat")
    net.dense("fc", rows, 2, 3)
    onnx.save(net.model({"input": ["n", 4]}, {"fc": ["m", 3]}), "folded.onnx")
    np.save("folded.npy", np.zeros(2 * EXAMPLES, np.int64))
    arguments = "--targets", "folded.npy", "--fisher", "empirical"
    result = report(capsys, *arguments, model="folded.onnx")
    assert result["examples"] == EXAMPLES
    assert run("--batch-size", "4", *arguments, model="folded.onnx") == 2
    assert "examples and positions" in capsys.readouterr().err


def test_several_losses_have_targets_by_output(capsys):
    onnx.save(two_outputs(d=4), "two.onnx")
    outputs = [entry.name for entry in onnx.load("two.onnx").graph.output]
    arguments = [f"--output={name}" for name in outputs] + ["--loss=normal"] * 2
    result = report(capsys, *arguments, model="two.onnx")
    assert result["trace"] > 0


def test_data_may_be_larger_than_the_memory(monkeypatch, capsys):
    whole = report(capsys, "--targets", "y.npz")
    monkeypatch.setattr("kfac_engine.system.arrays.available_memory", lambda: 10)
    assert report(capsys, "--targets", "y.npz", "--batch-size", "4")["trace"] == pytest.approx(
        whole["trace"], rel=ROUNDING
    )
    np.savez_compressed("packed.npz", input=np.load("x.npz")["input"])
    assert run(inputs="packed.npz") == 2
    assert "bytes of memory are free" in capsys.readouterr().err


# -- pictures


def test_spectra_of_the_picture_are_those_of_the_file(capsys):
    assert run("--plot", "p.html") == 0
    (spectrum,) = spectra_of(stored(), DAMPING)
    expected = eigenvalues()
    np.testing.assert_allclose(spectrum.eigenvalues, expected, atol=ROUNDING * expected.max())
    assert spectrum.damping == DAMPING
    assert spectrum.below_damping == (expected < DAMPING).sum()
    # One class probability follows from the others: the matrix is singular.
    assert spectrum.condition == np.inf
    assert "Eigenvalues of the curvature of m.onnx" in Path("p.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_picture_has_the_format_of_its_name(suffix, start):
    pytest.importorskip("matplotlib")
    assert run("--plot", f"p.{suffix}") == 0
    assert Path(f"p.{suffix}").read_bytes().startswith(start)


def test_picture_without_matplotlib_is_one_error_before_the_measurement(monkeypatch, capsys):
    monkeypatch.setattr("kfac_engine.cli.spectra.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "kfac_engine.analysis.fisher_matrix.measure", None)
    assert run("--plot", "p.png") == 2
    error = capsys.readouterr().err
    assert "pip install 'kfac-engine[plot]'" in error
    assert error.count("\n") == 1


# -- refusals

WRONG = {
    "unknown structure": (["--structure", "krom"], "did you mean 'kron'"),
    "unknown Fisher matrix": (["--fisher", "exakt"], "did you mean 'exact'"),
    "unknown layers": (["--layers", "first"], "layers must be one of all, last"),
    "unknown loss": (["--loss", "categorial"], "did you mean 'categorical'"),
    "unknown parameter": (["--trainable", "fc.wieght"], "did you mean 'fc.weight'"),
    "empirical without targets": (["--fisher", "empirical"], "are missing; pass them"),
    "no examples in a batch": (["--batch-size", "0"], "--batch-size"),
    "damping of zero": (["--damping", "0"], "--damping"),
    "no data": (["--inputs", "none.npz"], "none.npz"),
    "data of another name": (["--inputs", "named.npz"], "the arrays are: 'inputs' (did you mean"),
    "too few targets": (["--targets", "few.npy"], "20 examples"),
    "targets outside the classes": (["--targets", "far.npy"], "7"),
    "NaN": (["--inputs", "nan.npz"], "NaN"),
    "no example": (["--inputs", "none.npy"], "the data have no examples"),
    "picture of no format": (["--plot", "p.bmp"], "no known format"),
    "picture over the data": (["--plot", "x.svg"], "would overwrite"),
    "file over the data": (["-o", "x.npz"], "would overwrite"),
    "file in no folder": (["-o", "none/c"], "existing folder"),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "named"), WRONG.values(), ids=WRONG)
def test_wrong_input_is_one_error_and_leaves_files_unchanged(arguments, named, folder, capsys):
    np.savez("named.npz", inputs=np.load("x.npz")["input"])
    np.savez("nan.npz", input=np.full((6, 4), np.nan, np.float32))
    np.save("none.npy", np.zeros((0, 4), np.float32))
    np.save("few.npy", np.zeros(5, np.int64))
    np.save("far.npy", np.full(EXAMPLES, 7))
    Path("x.svg").symlink_to("x.npz")
    Path("c.safetensors").write_bytes(b"an older result")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert run(*arguments) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert named in error
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
