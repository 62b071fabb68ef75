"""`inspect --plot` draws the eigenvalues of the stored factors, and refuses what it cannot draw."""

import sys

import numpy as np
import onnx
import pytest

import kfac_engine as ke
from kfac_engine.__main__ import main
from kfac_engine.cli.spectra import figure
from kfac_engine.data import demo_model, digits
from tests.models import linear

PNG, SVG, PDF = b"\x89PNG", b"<?xml", b"%PDF"


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.onnx").write_bytes(demo_model("mlp"))
    np.savez("batch.npz", image=digits()[0][:200])
    return tmp_path


@pytest.fixture(scope="module")
def observed():
    engine = ke.Engine.from_onnx(demo_model("mlp"), loss="categorical")
    engine.observe({"image": digits()[0][:200]})
    return engine


def stored(engine):
    """Eigenvalues of the stored factors, descending, and dampings, by layer and symbol."""
    for layer in engine.layers:
        block = engine.collection.fisher_blocks[layer.key]
        for symbol, factor, damping in zip("AG", block.factors, block.split_damping(), strict=True):
            matrix = factor.get_cov().astype(np.float64)
            yield layer, symbol, np.linalg.eigvalsh(matrix)[::-1], damping


def test_the_lines_are_the_eigenvalues_of_the_stored_factors(observed):
    drawing = figure("m.onnx", ke.factor_spectra(observed))
    shown = [panel for panel in drawing.axes if panel.lines]
    assert [panel.get_title(loc="left") for panel in shown] == [
        ", ".join(layer.parameters) for layer in observed.layers
    ]
    lines = [line for panel in shown for line in panel.lines]
    curves, dampings = lines[::2], lines[1::2]
    for curve, dashed, (_, symbol, values, damping) in zip(
        curves, dampings, stored(observed), strict=True
    ):
        y = curve.get_ydata()
        # Float32 averages: the eigenvalues of the other triangle differ by rounding.
        np.testing.assert_allclose(y, values[: len(y)], rtol=0, atol=1e-6 * values[0])
        assert (values[len(y) :] <= 1e-6 * len(values) * values[0]).all()
        assert dashed.get_ydata()[0] == pytest.approx(float(damping))
        assert dashed.get_linestyle() == "--"
        assert curve.get_label().startswith(f"{symbol}, condition ")


@pytest.mark.parametrize(("suffix", "start"), [("png", PNG), ("SVG", SVG), ("pdf", PDF)])
def test_a_picture_has_the_format_of_its_name(files, suffix, start, capsys):
    assert main(["inspect", "m.onnx", "--inputs", "batch.npz", "--plot", f"s.{suffix}"]) == 0
    assert (files / f"s.{suffix}").read_bytes().startswith(start)
    out = capsys.readouterr().out
    assert "eigenvalues of the factors" in out
    assert "singular" in out


REFUSED = {
    "no batch": (["--plot", "s.png"], "needs a batch"),
    "unknown format": (["--inputs", "batch.npz", "--plot", "s.jpg"], "no known format"),
    "no format": (["--inputs", "batch.npz", "--plot", "png"], "no known format"),
    "no folder": (["--inputs", "batch.npz", "--plot", "none/s.png"], "an existing folder"),
}


@pytest.mark.parametrize(("options", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_picture_that_cannot_be_drawn_is_refused(files, options, reason, capsys):
    assert main(["inspect", "m.onnx", *options]) == 2
    err = capsys.readouterr().err
    assert reason in err
    assert err.count("\n") == 1
    assert sorted(path.name for path in files.iterdir()) == ["batch.npz", "m.onnx"]


def test_without_matplotlib_a_page_can_be_written(files, monkeypatch, capsys):
    monkeypatch.setattr("kfac_engine.cli.spectra.find_spec", lambda name: None)
    command = ["inspect", "m.onnx", "--inputs", "batch.npz", "--plot"]
    assert main([*command, "s.png"]) == 2
    assert "pip install 'kfac-engine[plot]'" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*command, "s.html"]) == 0


@pytest.mark.parametrize("suffix", ["png", "svg", "html"])
def test_hostile_names_are_drawn_as_texts(files, suffix, capsys):
    name = r"$\frac{</script><b>_^ 漢" + "n" * 5000
    model = linear()
    for values in (model.graph.input, model.graph.output, model.graph.initializer):
        for entry in values:
            entry.name = {"fc.weight": name}.get(entry.name, entry.name)
    for node in model.graph.node:
        node.input[:] = [name if value == "fc.weight" else value for value in node.input]
    onnx.save(model, "m.onnx")
    shape = [d.dim_value or 8 for d in model.graph.input[0].type.tensor_type.shape.dim]
    np.savez("batch.npz", **{model.graph.input[0].name: np.ones(shape, np.float32)})
    command = ["inspect", "m.onnx", "--inputs", "batch.npz", "--plot", f"s.{suffix}"]
    assert main(command) == 0, capsys.readouterr().err
    assert b"<b>" not in (files / f"s.{suffix}").read_bytes()
