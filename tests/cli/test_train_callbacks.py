"""The options of ``train`` that choose callbacks."""

import sys
from pathlib import Path

import numpy as np
import pytest

import kfac_engine as ke
from tests.cli.test_train import FAST, IMAGES, LABELS, N, folder, logged, parameters, run

__all__ = ["folder"]


def test_the_result_has_the_weights_of_the_best_validation(folder, capsys):
    # A rate at which the loss rises and falls.
    options = ["--optimizer=sgd", "--learning-rate=0.3", "--schedule=constant", "--batch-size=64"]
    arguments = [*options, "--validation=v.npz", "--best-metric=accuracy", "--seed=1"]
    assert run(*arguments, "--epochs=12", "--best", "--early-stop=4", "--log=run.jsonl") == 0
    out = capsys.readouterr().out
    records = logged(Path("run.jsonl"))
    accuracies = [record["accuracy"] for record in records if "accuracy" in record]
    best = accuracies.index(max(accuracies)) + 1
    assert len(accuracies) == min(12, best + 4)
    assert f"weights of step {5 * best} of {len(records)}\n" in out
    assert f"accuracy {max(accuracies):.6g}\n" in out
    evaluated = ke.Engine.from_onnx("out.onnx", loss="categorical").evaluate(
        ({"image": IMAGES[N : N + 90]}, LABELS[N : N + 90])
    )
    assert evaluated["accuracy"] == max(accuracies)
    assert best < len(accuracies)


@pytest.mark.parametrize(("text", "decay"), [("0.9", 0.9), ("tail", "tail")])
def test_the_result_has_the_average_of_the_weights(text, decay, folder):
    assert run(f"--average={text}", *FAST) == 0
    plain, average = [], ke.WeightAverage(decay)
    ke.fit(
        "mlp.onnx", (IMAGES[:N], LABELS[:N]), batch_size=64, epochs=2,
        callbacks=[average, lambda _, o: plain.append(o.engine.parameters)],
    )  # fmt: skip
    factors = [0.9 ** (10 - t) if text == "0.9" else t > 6 for t in range(1, 11)]
    for name, value in parameters().items():
        expected = sum(f * p[name].astype(float) for f, p in zip(factors, plain, strict=True))
        # Ten steps in float32.
        np.testing.assert_allclose(value, expected / sum(factors), rtol=1e-4, atol=1e-6)


def test_event_files_of_tensorboard_are_written(folder):
    pytest.importorskip("tensorboardX")
    assert run("--tensorboard=runs", *FAST) == 0
    (events,) = Path("runs").iterdir()
    assert b"learning_rate" in events.read_bytes()


def test_a_missing_tensorboardx_is_one_line_and_nothing_is_written(folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    assert run("--tensorboard=runs", *FAST) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "pip install 'kfac-engine[tensorboard]'" in err
    assert not Path("runs").exists()
