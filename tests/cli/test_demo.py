"""The demo runs from end to end, and its table has medians of the runs."""

import builtins
import re

from kfac_engine.__main__ import main
from kfac_engine.cli.demo import METHODS, method_row

PNG = b"\x89PNG\r\n"
SHORT = ["demo", "--seconds", "0.05", "--seeds", "2"]


def test_the_demo_prints_its_tables_and_draws_its_picture(tmp_path, capsys):
    assert main([*SHORT, "--out", str(tmp_path / "new" / "folder")]) == 0
    out = capsys.readouterr().out
    assert (tmp_path / "new" / "folder" / "demo.png").read_bytes().startswith(PNG)
    assert "conv2d" in out
    assert re.search(r"loss of the batch: \d", out)
    assert "median of 2 seed(s)" in out
    for name in METHODS:
        assert re.search(rf"^  {name} +\d\.\d{{4}} ", out, re.M)


def test_a_row_has_the_medians_of_the_runs_of_a_method():
    curves = [
        [(0.1, 0.6), (0.2, 0.4), (0.3, 0.15)],
        [(0.1, 0.5), (0.3, 0.3), (0.4, 0.21)],
        [(0.1, 0.9), (0.5, 0.2), (0.6, 0.05)],
    ]
    assert method_row("K-FAC", curves) == ["K-FAC", "0.1500", "0.20", "0.50", "never"]


def test_without_matplotlib_the_demo_says_how_to_get_it(tmp_path, capsys, monkeypatch):
    original = builtins.__import__

    def refuse(name, *arguments, **keywords):
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(name)
        return original(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", refuse)
    assert main(["demo", "--seconds", "0.01", "--seeds", "1", "--out", str(tmp_path)]) == 0
    assert "pip install 'kfac-engine[plot]'" in capsys.readouterr().out


def test_a_folder_that_cannot_be_made_is_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["demo", "--out", str(tmp_path / "file" / "folder")]) == 2
    assert f"cannot use '{tmp_path / 'file' / 'folder'}'" in capsys.readouterr().err
