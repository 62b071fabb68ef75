"""The suite of models: steps from files, in processes of their own, and the tables of its rows."""

import json
from dataclasses import asdict

import numpy as np
import onnx
import pytest
from rich.console import Console

import kfac_engine as ke
from kfac_engine.bench import models
from scripts import bench_tables
from tests.models import mlp, random_inputs


@pytest.fixture
def folder(tmp_path):
    model = mlp()
    onnx.save(model, tmp_path / "tiny.onnx")
    targets = np.random.default_rng(0).integers(0, 3, 6)
    np.savez(tmp_path / "tiny.npz", targets=targets, **random_inputs(model, 6))
    return tmp_path


def test_steps_are_those_of_the_optimizers(folder, monkeypatch):
    monkeypatch.setattr(models, "STEPS", 3)
    path = folder / "tiny.onnx"
    inputs, targets = models.batch_of(path)
    assert inputs.keys() == random_inputs(mlp()).keys()
    for name, make in models._OPTIMIZERS.items():
        engine = ke.Engine.from_onnx(path, loss="categorical", threads=1)
        optimizer = make(engine)
        answer = models.measure(str(path), name)
        expected = [optimizer.step(inputs, targets).loss for _ in range(3)]
        assert answer.losses == pytest.approx(expected)
        assert answer.announced == make(engine).memory(6).total
        assert answer.parameters == sum(array.size for array in engine.parameters.values())
        assert len(answer.seconds) == 3
        assert min(answer.seconds) > 0


def test_each_optimizer_has_a_row_from_its_own_process(folder, monkeypatch):
    asked = []

    def answer_of(module, *words, threads):
        asked.append((module, *words))
        return json.loads(json.dumps((10, 0.5, [9.0, 1.0, 2.0, 6.0], [4.0, 3.0], 7, 8)))

    monkeypatch.setattr(models, "answer_of", answer_of)
    console = Console(width=200, record=True)
    rows = models.run_models(console, "models", folder, with_torch=True)
    path = folder / "tiny.onnx"
    # There is no tiny.pt2.
    assert asked == [("models", "measure", str(path), name) for name in ("AdamW", "K-FAC")]
    (folder / "tiny.pt2").touch()
    assert models.run_models(console, "models", folder) == rows
    with_torch = models.run_models(console, "models", folder, with_torch=True)
    assert [row.optimizer for row in with_torch] == [models.TORCH, "AdamW", "K-FAC"]
    assert (rows[0].first, rows[0].step, rows[0].mean) == (9.0, 2.0, 3.0)
    assert "4.000 → 3.000" in console.export_text()
    report = json.loads(json.dumps([asdict(row) for row in with_torch]))
    page = bench_tables.page({"machine": {}, "suites": {"models": report}})
    assert page.count("| 4.000 → 3.000 |") == 3


@pytest.mark.nightly
def test_processes_measure_steps(folder):
    rows = models.run_models(Console(width=200), "models", folder)
    assert [row.optimizer for row in rows] == ["AdamW", "K-FAC"]
    assert all(row.peak > 0 and row.losses[1] < row.losses[0] for row in rows)
