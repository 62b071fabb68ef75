"""``replace-head`` and the commands of adapters: files, reports and errors."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from kfac_engine.__main__ import main
from kfac_engine.data import demo_model, digits


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("m.onnx").write_bytes(demo_model("mlp"))


def weights(path):
    return {e.name: numpy_helper.to_array(e) for e in onnx.load(path).graph.initializer}


def test_replaced_head_is_reported_and_written(capsys):
    assert main(["replace-head", "m.onnx", "--classes", "3", "-o", "new.onnx"]) == 0
    out = capsys.readouterr().out
    assert "head.weight" in out
    assert "outputs: logits" in out
    assert 3 in weights("new.onnx")["head.weight"].shape


def test_adapters_are_added_trained_saved_and_merged(capsys):
    add = ["add-adapters", "m.onnx", "--rank=2", "--layers=dense1*", "--layers=dense2*"]
    assert main([*add, "-o", "a.onnx"]) == 0
    assert "dense1.lora_A" in capsys.readouterr().out
    images, labels = digits()
    np.savez("d.npz", image=images[:128], targets=labels[:128])
    train = ["train", "a.onnx", "--data=d.npz", "--loss=categorical", "--trainable=*lora*"]
    assert main([*train, "--steps=2", "-o", "t.onnx"]) == 0
    before, after = weights("a.onnx"), weights("t.onnx")
    moved = {name for name, array in after.items() if (array != before[name]).any()}
    assert moved == {f"dense{i}.lora_{part}" for i in (1, 2) for part in "AB"}
    assert main(["save-adapter", "t.onnx", "-o", "t.onnx_adapter"]) == 0
    assert main(["merge-adapters", "t.onnx", "-o", "merged.onnx"]) == 0
    merge = ["merge-adapters", "a.onnx", "--adapter=t.onnx_adapter", "-o", "again.onnx"]
    assert main(merge) == 0
    assert weights("merged.onnx").keys() == weights("m.onnx").keys()
    assert Path("merged.onnx").read_bytes() == Path("again.onnx").read_bytes()


WRONG = {
    "no head": (["replace-head", "m.onnx", "-o", "o.onnx"], "classes"),
    "both": (["replace-head", "m.onnx", "--classes=2", "--outputs=2", "-o", "o.onnx"], "either"),
    "unknown value": (["replace-head", "m.onnx", "--classes=2", "--at=x", "-o", "o.onnx"], "'x'"),
    "unknown layer": (["add-adapters", "m.onnx", "--layers=x*", "-o", "o.onnx"], "'x*'"),
    "high rank": (["add-adapters", "m.onnx", "--rank=99", "-o", "o.onnx"], "rank 99"),
    "no adapter": (["merge-adapters", "m.onnx", "-o", "o.onnx"], "no adapter"),
    "nothing to save": (["save-adapter", "m.onnx", "-o", "o"], "no adapter"),
    "no adapter file": (
        ["merge-adapters", "m.onnx", "--adapter=m.onnx", "-o", "o.onnx"], "not an adapter file"),
    "over the model": (["add-adapters", "m.onnx", "-o", "m.onnx"], "m.onnx"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG)
def test_wrong_input_is_one_error(case, capsys):
    arguments, message = case
    before = Path("m.onnx").read_bytes()
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert message in err
    assert Path("m.onnx").read_bytes() == before
    assert [path.name for path in Path().iterdir()] == ["m.onnx"]
