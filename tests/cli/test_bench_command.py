"""`bench` runs the suites that were asked for, and refuses others."""

import json

import pytest

from kfac_engine.__main__ import main
from kfac_engine.bench import run
from kfac_engine.bench.roofline import Roofline


@pytest.fixture
def one_small_case(monkeypatch):
    """Leaves one suite of one case."""
    cases = [job for job in run.SUITES["inverse"] if job.name == "64 × 64"]
    assert cases
    monkeypatch.setattr(run, "SUITES", {"inverse": cases})
    monkeypatch.setattr(run, "ceilings", lambda threads: [Roofline(threads, 1e9, 1e9)])
    monkeypatch.setattr(run, "ceiling", lambda threads: Roofline(threads, 1e9, 1e9))


def test_measurements_are_printed_and_written(one_small_case, tmp_path, capsys):
    command = ["bench", "--suite", "inverse", "--threads", "1", "--repeats", "2", "--json"]
    assert main([*command, str(tmp_path / "b.json")]) == 0
    assert "64 × 64" in capsys.readouterr().out
    assert "64 × 64" in json.dumps(
        json.loads((tmp_path / "b.json").read_text()), ensure_ascii=False
    )


def test_a_peer_that_nobody_knows_is_refused_by_name(capsys):
    assert main(["bench", "--compare", "torch,caffe"]) == 2
    assert "unknown peer 'caffe'; choose one of: " in capsys.readouterr().err
