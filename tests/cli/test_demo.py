"""The demo runs from end to end; tests/test_examples.py holds its methods to their losses."""

import builtins
import re

import pytest

from kfac_engine.__main__ import main
from kfac_engine.cli import comparison

PNG = b"\x89PNG\r\n"

# One setting of each grid that is among its best: the demo itself runs the full grids.
GOOD = {
    "SGD": {"learning rate": 0.4},
    "Adam": {"learning rate": 0.02},
    "K-FAC": {"KL clip": 0.003},
}


@pytest.fixture
def small_grids(monkeypatch):
    """One setting for each method."""
    methods = {
        name: comparison.Method((GOOD[name],), method.start)
        for name, method in comparison.METHODS.items()
    }
    monkeypatch.setattr(comparison, "METHODS", methods)
    return methods


@pytest.mark.parametrize("name", comparison.METHODS)
def test_the_settings_tested_here_are_in_the_grid(name):
    assert GOOD[name] in comparison.METHODS[name].grid


@pytest.mark.slow
def test_the_demo_prints_its_tables_and_draws_its_picture(small_grids, tmp_path, capsys):
    assert main(["demo", "--steps", "12", "--out", str(tmp_path / "new" / "folder")]) == 0
    out = capsys.readouterr().out
    assert (tmp_path / "new" / "folder" / "demo.png").read_bytes().startswith(PNG)
    assert "conv2d" in out
    assert re.search(r"loss of the batch: \d", out)
    for name in comparison.METHODS:
        assert len(re.findall(rf"^  {name} ", out, re.M)) == 2


@pytest.mark.slow
def test_without_matplotlib_the_demo_says_how_to_get_it(small_grids, tmp_path, capsys, monkeypatch):
    original = builtins.__import__

    def refuse(name, *arguments, **keywords):
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(name)
        return original(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", refuse)
    assert main(["demo", "--steps", "12", "--out", str(tmp_path)]) == 0
    assert "pip install 'kfac-engine[plot]'" in capsys.readouterr().out


def test_a_folder_that_cannot_be_made_is_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["demo", "--out", str(tmp_path / "file" / "folder")]) == 2
    assert "cannot make the folder" in capsys.readouterr().err
