"""The suite ``train``: stored runs, tables, pictures and the process of a run."""

from dataclasses import replace

import pytest
from rich.console import Console

from kfac_engine.bench.training import suite as module
from kfac_engine.bench.training.records import Record, Records, revision
from kfac_engine.bench.training.run import Outcome, Point, Run
from kfac_engine.bench.training.suite import TrainingOptions, run_training
from kfac_engine.bench.training.worker import Workers

RUN = Run("digits", "adam", 0.002, "tail", 0, 2.0)
OUTCOME = Outcome(3, 2.0, 2.5, (Point(0, 0.0, 0.0, 2.3, 0.1), Point(3, 2.0, 2.5, 1.5, 0.6)))


def test_runs_of_other_data_or_sources_do_not_count(tmp_path):
    path = tmp_path / "runs.jsonl"
    records, other = Records(path), replace(OUTCOME, steps=9)
    records.add(Record(RUN, OUTCOME, "digits", revision()))
    records.add(Record(replace(RUN, seed=1), OUTCOME, "digits", "older"))
    records.add(Record(RUN, other, "Fashion-MNIST", revision()))
    for stored in (records, Records(path)):
        assert stored.of("digits") == {RUN: OUTCOME}
        assert stored.of("Fashion-MNIST") == {RUN: other}
        assert set(stored.of("digits", any_revision=True)) == {RUN, replace(RUN, seed=1)}
    # The last run of equal settings counts.
    records.add(Record(replace(RUN, seed=1), other, "digits", revision()))
    assert Records(path).of("digits", any_revision=True)[replace(RUN, seed=1)] == other


class Recorder:
    """Executes no run: the loss falls to the rate; K-FAC reaches a thousandth."""

    def __init__(self, execute=None):
        self.runs = []
        self.ended = 0
        self._execute = execute or self.fall

    def execute(self, run, folder, core):
        return self._execute(run, folder, core)

    def end(self):
        self.ended += 1

    def fall(self, run, folder, core):
        self.runs.append(run)
        last = run.rate or 0.001
        curve = (Point(0, 0.0, 0.0, 1.0, 0.1), Point(9, run.seconds, 2.0, last, 0.5))
        return Outcome(9, run.seconds, 2.0, curve)


def execute(recorder, tmp_path, folder=None, **options):
    console = Console(width=160)
    options = {"tasks": ["digits"], "methods": ["kfac", "muon"], "seconds": [2.0], **options}
    return run_training(
        console, TrainingOptions(runs=tmp_path / "runs.jsonl", **options), folder, recorder
    )


def test_the_best_rate_of_the_first_seed_runs_with_all_seeds(tmp_path, capsys):
    recorder = Recorder()
    kfac, muon, comparison = execute(recorder, tmp_path)
    tuned = [run for run in recorder.runs if run.method == "muon" and run.seed == 0]
    assert [run.rate for run in tuned] == [0.01, 0.03, 0.1]
    assert [run.rate for run in recorder.runs if run.seed] == [None, 0.01] * 2
    assert (muon.setting, muon.losses) == ("0.01 tail", (0.01,) * 3)
    assert kfac.losses == (0.001,) * 3
    # From 1 to 0.001 in 2 s: 0.01 is reached after 2 · 0.99 / 0.999 s.
    assert comparison.seconds == pytest.approx(2 * 0.99 / 0.999)
    assert comparison.loss_ratio == pytest.approx(0.1)
    printed = capsys.readouterr().out
    assert "4 runs of 8 CPU seconds follow" in printed
    assert "0.01 tail" in printed
    assert "2.0" in printed


def test_runs_in_the_file_are_skipped(tmp_path, monkeypatch):
    execute(Recorder(), tmp_path)
    again = Recorder()
    assert len(execute(again, tmp_path)) == 3
    assert not again.runs
    more = Recorder()
    execute(more, tmp_path, seeds=(0, 1, 2, 3))
    assert [(run.method, run.seed) for run in more.runs] == [("kfac", 3), ("muon", 3)]
    # Changed sources: everything runs again, unless runs of other sources count.
    monkeypatch.setattr(module, "revision", lambda: "newer")
    monkeypatch.setattr("kfac_engine.bench.training.records.revision", lambda: "newer")
    reused = Recorder()
    execute(reused, tmp_path, reuse=True)
    assert not reused.runs
    renewed = Recorder()
    execute(renewed, tmp_path)
    assert len(renewed.runs) == 8


def test_a_run_has_a_process_of_its_own():
    outcome = Workers().execute(Run("digits", "sgd", 0.1, "tail", 0, 0.02), None, 0)
    assert outcome.steps > 0
    assert outcome.cpu >= 0.02
    assert outcome.curve[-1].accuracy is not None


def test_a_picture_is_drawn_for_each_task(tmp_path):
    pytest.importorskip("matplotlib")
    execute(Recorder(), tmp_path, tmp_path, tasks=["digits", "function"])
    for task in ("digits", "function"):
        assert (tmp_path / f"train-{task}.png").read_bytes().startswith(b"\x89PNG")
