"""Where commands write: never over what they read, and into devices, pipes and links as named."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from safetensors.numpy import load, load_file

from kfac_engine.__main__ import main
from tests.comparing import assert_arrays_equal
from tests.models import linear

posix = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such files")
ARGUMENTS = ["m.onnx", "--inputs=x.npz", "--targets=y.npz", "--threads=1"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    onnx.save(
        linear(), "m.onnx", save_as_external_data=True, location="m.weights", size_threshold=0
    )
    np.savez("x.npz", input=np.ones((6, 4), np.float32))
    np.savez("y.npz", targets=np.zeros(6, np.int64))
    return tmp_path


def run(*arguments, **options):
    command = [sys.executable, "-m", "kfac_engine", *arguments]
    return subprocess.run(command, capture_output=True, check=True, **options)


def training(*arguments):
    return ["train", "m.onnx", "--data=shards", "--epochs=1", *arguments]


OWN_INPUTS = {
    "shard": training("-o", "shards/0.npz"),
    "shard as log": training("-o", "out.onnx", "--log=shards/0.npz"),
    "shard as report": training("-o", "out.onnx", "--report=shards/0.npz"),
    "shard of the validation": training("-o", "other/0.npz", "--validation=other"),
    "state of the checkpoint": training("-o", "c/training.safetensors", "--checkpoint=c"),
    "records of the checkpoint": training(
        "-o", "c/records-01234567.jsonl", "--checkpoint=c", "--resume"
    ),
    "log of a report": ["report", "run.jsonl", "-o", "./run.jsonl"],
    "model": ["precondition", *ARGUMENTS, "-o", "m.onnx"],
    "weights beside the model": ["precondition", *ARGUMENTS, "-o", "m.weights"],
    "batch": ["precondition", *ARGUMENTS, "-o", "x.npz"],
    "targets": ["precondition", *ARGUMENTS, "-o", "./y.npz"],
    "gradients": ["precondition", *ARGUMENTS, "-o", "g.st", "--gradients", "g.st"],
    "state": ["precondition", *ARGUMENTS, "-o", "s.st", "--state", "s.st"],
    "state as batch": ["precondition", *ARGUMENTS, "-o", "s.st", "--state", "x.npz"],
    "differentiated model": ["differentiate", "m.onnx", "-o", "m.onnx"],
    "differentiated weights": ["differentiate", "m.onnx", "-o", "m.weights"],
    "sample": ["differentiate", "m.onnx", "--inputs", "x.npz", "-o", "x.npz"],
}


def contents():
    return {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}


@pytest.mark.parametrize("arguments", OWN_INPUTS.values(), ids=OWN_INPUTS)
def test_an_output_that_is_an_input_is_refused_before_anything_is_computed(arguments, capsys):
    Path("g.st").write_bytes(b"")
    Path("run.jsonl").write_text("{}")
    for place in ("shards/0.npz", "other/0.npz", "c/records-01234567.jsonl"):
        Path(place).parent.mkdir()
        Path(place).write_bytes(Path("x.npz").read_bytes())
    before = contents()
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert "would overwrite the file of" in err
    assert contents() == before


# Each command that writes, before the name of a file that cannot be written.
WRITERS = {
    "precondition": ["precondition", *ARGUMENTS, "-o"],
    "state": ["precondition", *ARGUMENTS, "-o", "out", "--state"],
    "differentiate": ["differentiate", "m.onnx", "-o"],
    "head": ["replace-head", "m.onnx", "--classes=2", "-o"],
    "adapters": ["add-adapters", "m.onnx", "-o"],
    "merged adapters": ["merge-adapters", "m.onnx", "-o"],
    "adapter": ["save-adapter", "m.onnx", "-o"],
    "train": ["train", "m.onnx", "--data=x.npz", "-o"],
    "log": ["train", "m.onnx", "--data=x.npz", "-o", "out", "--log"],
    "report": ["train", "m.onnx", "--data=x.npz", "-o", "out", "--report"],
    "curvature": ["curvature", "m.onnx", "--inputs=x.npz", "--targets=y.npz", "-o"],
    "influence": [
        "influence", "m.onnx", "--curvature=x.npz", "--inputs=x.npz", "--targets=y.npz", "-o"
    ],
    "laplace": ["laplace", "m.onnx", "--curvature=x.npz", "--inputs=x.npz", "-o"],
    "exported": ["laplace", "m.onnx", "--curvature=x.npz", "--export"],
    "prune": ["prune", "m.onnx", "--curvature=x.npz", "--sparsity=0.5", "-o"],
    "saliency": ["saliency", "m.onnx", "--curvature=x.npz", "-o"],
    "merge": ["merge", "m.onnx", "m.onnx", "--curvature=x.npz", "--curvature=y.npz", "-o"],
    "page": ["report", "x.npz", "-o"],
    "spectra": ["inspect", "m.onnx", "--inputs=x.npz", "--plot"],
}  # fmt: skip


@pytest.mark.parametrize("arguments", WRITERS.values(), ids=WRITERS)
def test_an_output_that_cannot_be_written_is_refused_first(arguments, capsys, monkeypatch):
    monkeypatch.setattr("kfac_engine.graph.load._load", None)  # no model is read
    Path("loop").symlink_to("loop")
    Path("dangling").symlink_to("none/out.png")
    before = contents()
    for place in ("none/out.png", "loop/out.png", "dangling", ".", "x" * 300 + ".png"):
        if place.endswith("png") or arguments[-1] != "--plot":
            assert main([*arguments, place]) == 2
            err = capsys.readouterr().err
            assert "cannot be written" in err or "cannot read" in err
            assert err.count("\n") == 1
    assert contents() == before


@posix
def test_the_null_device_as_output_leaves_the_table(capsys):
    assert main(["precondition", *ARGUMENTS, "-o", os.devnull]) == 0
    assert "natural gradient" in capsys.readouterr().out
    assert Path(os.devnull).is_char_device()


@posix
def test_a_state_behind_a_link_is_resumed_and_saved_there():
    Path("far").mkdir()
    Path("s.st").symlink_to("far/state")
    for _ in range(2):
        assert main(["precondition", *ARGUMENTS, "-o", "out.st", "--state", "s.st"]) == 0
    assert Path("s.st").is_symlink()
    with Path("far/state").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    assert header["__metadata__"]["counter"] == "2"


@posix
def test_the_standard_output_takes_the_result_alone_and_stderr_the_report():
    run("precondition", *ARGUMENTS, "-o", "out.st")
    done = run("precondition", *ARGUMENTS, "-o", "/dev/stdout")
    found, wanted = load(done.stdout), load_file("out.st")
    assert found.keys() == wanted.keys()
    assert_arrays_equal(found, wanted)
    assert b"natural gradient" in done.stderr


@posix
def test_a_log_on_the_standard_output_leaves_the_report_to_stderr():
    np.savez("shards.npz", input=np.ones((6, 4), np.float32), targets=np.zeros(6, np.int64))
    done = run("train", "m.onnx", "--data=shards.npz", "--steps=2", "-o=o", "--log=/dev/stdout")
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert [record["step"] for record in records if "step" in record] == [1, 2]
    assert b"written to" in done.stderr


@posix
def test_a_result_is_appended_where_the_standard_output_is():
    Path("log").write_bytes(b"before")
    with Path("log").open("ab") as log:
        command = [sys.executable, "-m", "kfac_engine", "differentiate", "m.onnx"]
        subprocess.run([*command, "-o", "/dev/stdout"], stdout=log, check=True)
    data = Path("log").read_bytes()
    assert data.startswith(b"before")
    onnx.load_from_string(data.removeprefix(b"before"))
