"""The demo runs from end to end; test_comparison.py checks its numbers."""

import builtins
import re

from kfac_engine.__main__ import main
from kfac_engine.cli import comparison

PNG = b"\x89PNG\r\n"
SHORT = ["demo", "--seconds", "0.05", "--seeds", "2"]


def test_the_demo_prints_its_tables_and_draws_its_picture(tmp_path, capsys):
    assert main([*SHORT, "--out", str(tmp_path / "new" / "folder")]) == 0
    out = capsys.readouterr().out
    assert (tmp_path / "new" / "folder" / "demo.png").read_bytes().startswith(PNG)
    assert "conv2d" in out
    assert re.search(r"loss of the batch: \d", out)
    assert "median of 2 seeds" in out
    for name, method in comparison.METHODS.items():
        assert len(re.findall(rf"^  {name} ", out, re.M)) == len(method.rates) + 2
    assert re.search(r"^held-out loss: \S+ is ahead, \d", out, re.M)


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
    assert "cannot make the folder" in capsys.readouterr().err
