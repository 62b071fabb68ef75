"""The options of ``train`` for the refreshes of K-FAC."""

import json
from pathlib import Path

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.__main__ import main
from kfac_engine.data import demo_model, digits

IMAGES, LABELS = (array[:320] for array in digits())


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mlp.onnx").write_bytes(demo_model("mlp"))
    np.savez("d.npz", image=IMAGES, targets=LABELS)


def run(*arguments):
    fast = "--batch-size=64", "--steps=8"
    return main(["train", "mlp.onnx", "--data=d.npz", "-o", "out.onnx", *fast, *arguments])


@pytest.mark.usefixtures("folder")
def test_the_refreshes_of_kfac_follow_the_options():
    options = "--refresh-policy=balanced", "--refresh-every=3", "--refresh-period=dense1.*=2"
    assert run("--log=run.jsonl", *options) == 0
    engine = ke.Engine.from_onnx("mlp.onnx", loss="categorical")
    optimizer = ke.KfacOptimizer(
        engine, policy="balanced", refresh_every=3, periods={"dense1.*": 2}
    )
    history = ke.fit(engine, (IMAGES, LABELS), optimizer=optimizer, batch_size=64, steps=8)
    entries = [json.loads(line) for line in Path("run.jsonl").read_text().splitlines()]
    refreshed = [entry["refreshed"] for entry in entries if "step" in entry]
    assert refreshed == [record["refreshed"] for record in history.records]
    assert len({len(names) for names in refreshed}) > 1


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--optimizer=sgd", "--refresh-period=dense1.*=2"], "--refresh-period belongs to kfac; s"),
        (["--refresh-policy=often"], "policy must be one of"),
        (["--refresh-policy=budget", "--refresh-budget=2"], "budget must lie in (0, 1), got 2"),
        (["--refresh-period=conv=2"], "'conv' of periods matches no parameter"),
    ],
)
def test_wrong_options_are_refused(arguments, message, capsys):
    assert run(*arguments) != 0
    assert message in capsys.readouterr().err
    assert not Path("out.onnx").exists()
