"""The tutorials run in order, as the site executes them, and their pictures show data."""

import contextlib
import re
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from kfac_engine.autodiff.rules import RULES, load_rules
from scripts import pictures
from tests.nightly import nightly_but
from tests.pages import all_blocks

PAGES = {
    path.stem: path for path in sorted(Path(__file__).parent.parent.glob("docs/tutorials/*.md"))
}
FIGURES = {
    "adapters": 1,
    "derivative_rule": 1,
    "equation": 1,
    "fine_tune": 1,
    "forces": 1,
    "helium": 1,
    "policy": 1,
    "spectra": 4,
    "train": 2,
}


def execute(page, folder):
    """Execute the blocks that the site executes; returns the text of each block in HTML."""
    names, drawn = {"__name__": page.stem}, []
    with contextlib.chdir(folder):
        for _, options, code in all_blocks(page):
            if 'exec="on"' in options:
                assert f'session="{page.stem}"' in options
                printed = []
                names["print"] = lambda *texts, printed=printed: printed.extend(map(str, texts))
                exec(compile(code, page.name, "exec"), names)
                if 'html="1"' in options:
                    drawn.append("".join(printed))
                else:
                    assert bool(printed) == ("result=" in options), code
    return drawn


def assert_shows_data(figure):
    for axes in figure.axes:
        lines = [line.get_ydata() for line in axes.lines]
        cells = [mesh.get_array() for mesh in axes.collections]
        assert lines or cells
        for values in [*lines, *cells]:
            assert np.isfinite(np.asarray(values, float)).all()
        assert any(np.ptp(values) > 0 for values in [*lines, *cells])
        assert axes.get_xlabel()
        assert axes.get_ylabel()


@pytest.mark.parametrize("name", nightly_but(["derivative_rule", "spectra"], FIGURES))
def test_tutorial_runs_and_its_pictures_show_data(name, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    if name == "adapters":
        pytest.importorskip("onnx_ir", reason="ONNX Runtime quantizes with it")
    figures, draw = [], pictures.svg
    monkeypatch.setattr(pictures, "svg", lambda figure: figures.append(figure) or draw(figure))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(RULES, "_rows", dict(load_rules()))  # a page adds a rule
    drawn = execute(PAGES[name], tmp_path)
    assert len(figures) == FIGURES[name] == len(drawn)
    for figure, text in zip(figures, drawn, strict=True):
        assert_shows_data(figure)
        element = ET.fromstring(text)
        assert {"width", "height"}.isdisjoint(element.keys())
        assert element.get("viewBox")
        assert "#000000" not in text  # black text would be invisible on a dark page
        assert text.count("currentColor") > 10


def test_each_tutorial_that_the_site_executes_has_a_case():
    executed = {
        name
        for name, page in PAGES.items()
        if any('exec="on"' in block.options for block in all_blocks(page))
    }
    assert executed == FIGURES.keys() == PAGES.keys() - {"pytorch"}  # tests/exporters executes it


def test_stored_picture_of_the_pytorch_tutorial_has_a_curve_for_each_run():
    (picture,) = PAGES["pytorch"].parent.glob("pictures/*.svg")
    assert f"](pictures/{picture.name})" in PAGES["pytorch"].read_text(encoding="utf-8")
    for colour, least_points in {"#d1495b": 20, "#3b8ea5": 80, "#c08a00": 80}.items():
        curves = re.findall(rf'd="([^"]*)"[^>]*stroke: {colour}', picture.read_text("utf-8"))
        assert max(curve.count("L") for curve in curves) >= least_points - 1
