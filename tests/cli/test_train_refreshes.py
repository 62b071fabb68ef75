"""The options of ``train`` for the refreshes of K-FAC."""

from pathlib import Path

import pytest

import kfac_engine as ke
from tests.cli.test_train import IMAGES, LABELS, N, folder, logged, run

__all__ = ["folder"]
FAST = "--batch-size=64", "--steps=8"


@pytest.mark.usefixtures("folder")
def test_the_refreshes_of_kfac_follow_the_options():
    assert run("--log=run.jsonl", *FAST, "--refresh-every=3") == 0
    engine = ke.Engine.from_onnx("mlp.onnx", loss="categorical")
    optimizer = ke.KfacOptimizer(engine, refresh_every=3)
    history = ke.fit(engine, (IMAGES[:N], LABELS[:N]), optimizer=optimizer, batch_size=64, steps=8)
    refreshed = [entry["refreshed"] for entry in logged(Path("run.jsonl"))]
    assert refreshed == [record["refreshed"] for record in history.records]
    assert len({len(names) for names in refreshed}) > 1


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--optimizer=sgd", "--refresh-every=2"], "--refresh-every belongs to kfac; sgd has"),
        (["--refresh-every=0"], "--refresh-every must be a whole number"),
    ],
)
def test_wrong_options_are_refused(arguments, message, capsys):
    assert run(*FAST, *arguments) != 0
    assert message in capsys.readouterr().err
    assert not Path("out.onnx").exists()
