"""The options of ``train`` that choose callbacks."""

import sys
from pathlib import Path

import numpy as np
import pytest

import kfac_engine as ke
from tests.cli.test_train import FAST, IMAGES, LABELS, N, folder, logged, parameters, run

__all__ = ["folder"]


@pytest.mark.parametrize(("metric", "best_of"), [("validation_loss", min), ("accuracy", max)])
def test_the_result_has_the_weights_of_the_best_validation(metric, best_of, folder, capsys):
    # Half of the labels of few images are random: what the network learns of them soon does harm.
    labels = LABELS[:40].copy()
    labels[::2] = np.random.default_rng(0).integers(0, 10, 20)
    np.savez("d.npz", image=IMAGES[:40], targets=labels)
    options = ["--optimizer=adam", "--learning-rate=0.02", "--schedule=constant", "--batch-size=20"]
    arguments = [*options, "--validation=v.npz", f"--best={metric}", "--epochs=40"]
    assert run(*arguments, "--early-stop=4", "--log=run.jsonl") == 0
    out = capsys.readouterr().out
    records = logged(Path("run.jsonl"))
    values = [record[metric] for record in records if metric in record]
    best = values.index(best_of(values)) + 1
    assert len(values) == best + 4 < 40
    assert f"weights of step {2 * best} of {len(records)}\n" in out
    assert f"{metric} {best_of(values):.6g}\n" in out
    evaluated = ke.Engine.from_onnx("out.onnx", loss="categorical").evaluate(
        ({"image": IMAGES[N : N + 90]}, LABELS[N : N + 90])
    )
    # Sums of float32 in another order.
    found = evaluated[metric.removeprefix("validation_")]
    assert found == pytest.approx(best_of(values), rel=1e-6)


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
