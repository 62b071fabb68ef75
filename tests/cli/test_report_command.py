"""`report` writes the page of a log, and refuses a wrong file in one line."""

import json

import numpy as np
import pytest

from kfac_engine.__main__ import main
from kfac_engine.data import demo_model, digits
from tests.html_report.page_reader import PageReader


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "run.jsonl"
    lines = [{"step": i, "seconds": i / 4, "loss": 1 / i} for i in (1, 2, 4)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_page_has_the_numbers_of_the_log(log, tmp_path, capsys):
    page = tmp_path / "run.html"
    assert main(["report", str(log), "-o", str(page)]) == 0
    assert f"wrote {page}" in capsys.readouterr().out
    read = PageReader(page.read_text(encoding="utf-8"))
    line = read.lines["Loss", "batch"]
    assert (line["step"], line["seconds"]) == ([1, 2, 4], [0.25, 0.5, 1.0])
    assert line["value"] == [1.0, 0.5, 0.25]


def test_the_log_is_not_overwritten(log, capsys):
    before = log.read_bytes()
    assert main(["report", str(log), "-o", str(log)]) == 2
    assert "would overwrite" in capsys.readouterr().err
    assert log.read_bytes() == before


def test_a_file_that_is_no_log_leaves_the_old_page(tmp_path, capsys):
    (tmp_path / "run.jsonl").write_text("hello\n")
    (tmp_path / "run.html").write_text("old")
    assert main(["report", str(tmp_path / "run.jsonl"), "-o", str(tmp_path / "run.html")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: cannot read the log")
    assert err.count("\n") == 1
    assert (tmp_path / "run.html").read_text() == "old"


def test_train_writes_the_page_of_its_log(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.onnx").write_bytes(demo_model("mlp"))
    images, labels = digits()
    np.savez("d.npz", image=images[:300], targets=labels[:300])
    options = ["--data", "d.npz", "--validation", "0.2", "--steps", "4", "-o", "trained.onnx"]
    command = ["train", "m.onnx", *options, "--log", "run.jsonl", "--report", "run.html"]
    assert main(command) == 0, capsys.readouterr().err
    assert main(["report", "run.jsonl", "-o", "of_log.html"]) == 0
    page = (tmp_path / "run.html").read_text(encoding="utf-8")
    assert page == (tmp_path / "of_log.html").read_text(encoding="utf-8")
    description = json.loads((tmp_path / "run.jsonl").read_text().splitlines()[0])["run"]
    assert description["model"] == "m.onnx"
    read = PageReader(page)
    assert read.terms["steps"] == "4"
    assert "last validation loss" in read.terms
    assert "damping of " in page
