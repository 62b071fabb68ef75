"""``train``: the file that it writes, its refusals, and its end by a signal."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import kfac_engine as ke
from kfac_engine.__main__ import main
from kfac_engine.cli import train
from kfac_engine.data import demo_model, digits
from kfac_engine.training.budget import SCHEDULES
from kfac_engine.training.fit import OPTIMIZERS
from tests import models
from tests.comparing import same
from tests.nightly import nightly_but
from tests.training import softmax_net as net

IMAGES, LABELS = digits()
N = 320  # examples for training
FAST = ["--batch-size=64", "--epochs=2"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mlp.onnx").write_bytes(demo_model("mlp"))
    np.savez("d.npz", image=IMAGES[:N], targets=LABELS[:N])
    np.savez("v.npz", image=IMAGES[N : N + 90], targets=LABELS[N : N + 90])
    return tmp_path


def run(*arguments, model="mlp.onnx", data="d.npz"):
    return main(["train", model, f"--data={data}", "-o", "out.onnx", *arguments])


def parameters(path="out.onnx"):
    return ke.Engine.from_onnx(path, loss="categorical").parameters


def logged(path):
    """The records of a log, without the description of the run and the spectra."""
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    return [entry for entry in entries if "step" in entry]


# -- the result ------------------------------------------------------------------------------------


def cross_entropy(logits, labels):
    z = logits.astype(np.float64)
    z -= z.max(axis=1, keepdims=True)
    return float(np.mean(np.log(np.exp(z).sum(1)) - z[np.arange(len(labels)), labels]))


def test_the_result_runs_in_onnx_runtime_with_the_loss_that_is_reported(folder, capsys):
    assert run("--validation=v.npz", "--json", "--epochs=20") == 0
    report = json.loads(capsys.readouterr().out)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession("out.onnx", options, providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {"image": IMAGES[N : N + 90]})
    labels = LABELS[N : N + 90]
    # Sums of float32 in another order.
    assert report["validation_loss"] == pytest.approx(cross_entropy(logits, labels), rel=1e-5)
    assert report["accuracy"] == np.mean(logits.argmax(1) == labels)
    assert report["accuracy"] > 0.6
    assert (report["step"], report["epoch"], report["out"]) == (40, 19, "out.onnx")


def without_weights(model):
    """A message without the contents of its initializers."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for entry in copy.graph.initializer:
        entry.raw_data = b""
    return copy


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_the_result_differs_from_the_file_in_its_weights_alone(name, folder):
    Path("model.onnx").write_bytes(demo_model(name))
    assert run(*FAST, model="model.onnx") == 0
    old, new = onnx.load("model.onnx"), onnx.load("out.onnx")
    assert without_weights(old) == without_weights(new)
    history = ke.fit(
        "model.onnx", (IMAGES[:N], LABELS[:N]), loss="categorical", batch_size=64, epochs=2
    )
    for entry in new.graph.initializer:
        value = history.engine.parameters[entry.name]
        assert np.array_equal(onnx.numpy_helper.to_array(entry), value)
    assert any(a != b for a, b in zip(old.graph.initializer, new.graph.initializer, strict=True))


@pytest.mark.parametrize("optimizer", train.OPTIMIZERS)
def test_the_command_is_fit_with_the_same_options(optimizer, folder):
    options = {"learning_rate": 0.02, "weight_decay": 0.1}
    if optimizer == "gauss_newton":
        options = {"learning_rate": 0.5, "damping": 2.0}
    given = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    given += ["--schedule=cosine", "--seed=3"]
    run(f"--optimizer={optimizer}", "--validation=0.25", "--log=run.jsonl", *given, *FAST)
    engine = ke.Engine.from_onnx("mlp.onnx", loss="categorical", seed=3)
    made = OPTIMIZERS[optimizer](engine, **options)
    history = ke.fit(
        engine, (IMAGES[:N], LABELS[:N]), optimizer=made, validation=0.25, schedule="cosine",
        seed=3, batch_size=64, epochs=2, metrics=("loss", "accuracy"),
    )  # fmt: skip
    assert same(parameters(), engine.parameters)
    lines = logged(Path("run.jsonl"))
    assert [line["loss"] for line in lines] == [record["loss"] for record in history.records]
    assert history.metrics.keys() == {"validation_loss", "accuracy"}
    assert {name: lines[-1][name] for name in history.metrics} == history.metrics


# Options of the command, and those of ``fit`` for an engine.
AS_FIT = {
    "--refresh-every=3": lambda e: {"optimizer": ke.KfacOptimizer(e, refresh_every=3)},
    "--average=0.9": lambda e: {"callbacks": [ke.WeightAverage(0.9)]},
    "--average=tail": lambda e: {"callbacks": [ke.WeightAverage("tail")]},
    "--best=accuracy": lambda e: {"callbacks": [ke.BestWeights("accuracy")]},
    "--early-stop=1": lambda e: {"callbacks": [ke.EarlyStop("validation_loss", 1)]},
    "--best=accuracy --early-stop=1": lambda e: {
        "callbacks": [ke.EarlyStop("accuracy", 1), ke.BestWeights("accuracy")]
    },
}


@pytest.mark.parametrize("words", AS_FIT)
def test_refreshes_and_callbacks_are_those_of_fit(words, folder, capsys):
    # Random labels: what the network learns of them soon does harm.
    labels = np.random.default_rng(0).integers(0, 10, 64)
    np.savez("d.npz", image=IMAGES[:64], targets=labels)
    fast = {"batch_size": 16, "epochs": 12, "schedule": "constant"}
    given = ["--batch-size=16", "--epochs=12", "--schedule=constant", "--validation=0.25"]
    assert run(*given, "--log=run.jsonl", *words.split()) == 0
    engine = ke.Engine.from_onnx("mlp.onnx", loss="categorical")
    usual = {"metrics": ("loss", "accuracy"), "validation": 0.25, "optimizer": "kfac"}
    history = ke.fit(engine, (IMAGES[:64], labels), **usual | fast | AS_FIT[words](engine))
    assert same(parameters(), engine.parameters)
    lines, records = logged(Path("run.jsonl")), history.records
    assert [line["refreshed"] for line in lines] == [record["refreshed"] for record in records]
    assert ("early-stop" in words) == (len(records) < 36)
    if "best" in words:
        shown = capsys.readouterr().out
        assert f"weights of step {records[-1]['best_step']} of {len(records)}\n" in shown
        assert f"accuracy {history.metrics['accuracy']:.6g}\n" in shown


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


def test_the_choices_are_those_of_the_library():
    assert set(train.OPTIMIZERS) == set(OPTIMIZERS)
    assert set(train.SCHEDULES) == set(SCHEDULES)


def test_progress_and_notes_are_on_stderr(folder, capsys):
    net_ = models.Net()
    net_.op(
        "BatchNormalization", "input", net_.constant("scale", np.ones(3, np.float32)),
        net_.constant("shift", np.zeros(3, np.float32)),
        net_.constant("mean", np.zeros(3, np.float32)),
        net_.constant("variance", np.ones(3, np.float32)), to="normal",
    )  # fmt: skip
    net_.dense("output", "normal", 3, 2)
    onnx.save(net_.model({"input": ["batch", 3]}, {"output": ["batch", 2]}), "norm.onnx")
    x = np.random.default_rng(0).standard_normal((20, 3)).astype(np.float32)
    np.savez("n.npz", input=x, targets=np.arange(20) % 2)
    assert run("--steps=2", model="norm.onnx", data="n.npz") == 0
    out, err = capsys.readouterr()
    assert out == "written to out.onnx\n"
    note, line = err.splitlines()
    assert note.startswith("note: ")
    assert "its running statistics do not change; train_form trains it" in note
    assert line.startswith("epoch 2 step 2: loss ")
    assert run("--steps=2", "--train-form", model="norm.onnx", data="n.npz") == 0
    assert "note" not in capsys.readouterr().err
    with pytest.warns(ke.InferenceFormWarning, match="trains it with those of the batch"):
        ke.fit("norm.onnx", (x, np.arange(20) % 2), steps=1)


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data=missing.npz"], "there is no such file"),
        (["--data=v.onnx"], "cannot read 'v.onnx'"),
        (["--data=lone.npy"], "holds one array"),
        (["--validation=1.5"], "must lie in (0, 1)"),
        (["--validation=missing.npz"], "there is no such file"),
        (["--metrics=f1"], "unknown metric 'f1'; choose one of: accuracy"),
        (["--optimizer=adam", "--damping=0.1"], "--damping belongs to kfac, gauss_newton; adam"),
        (
            ["--optimizer=gauss_newton", "--weight-decay=0.1"],
            "to kfac, adam, adamw, muon, sgd; gauss",
        ),
        (["--optimizer=lbfgs"], "'lbfgs' is not one of 'kfac'"),
        (["--learning-rate=-1"], "--learning-rate must be at least 0"),
        (["--optimizer=sgd", "--refresh-every=2"], "--refresh-every belongs to kfac; sgd has"),
        (["--refresh-every=0"], "--refresh-every must be a whole number"),
        (["--seconds=0"], "seconds must be a positive number"),
        (["--resume"], "(--checkpoint FOLDER)."),
        (["--checkpoint=state"], "'state' has the checkpoint of a run; give --resume"),
        (["-o", "d.npz"], "would overwrite the file of --data"),
        (["-o", "mlp.onnx"], "would overwrite the file of the model"),
        (["--log=v.npz", "--validation=v.npz"], "would overwrite the file of --validation"),
        (["-o", "missing/out.onnx"], "name a file in an existing folder"),
        (["--loss=normal"], "targets"),
        (["--early-stop=2"], "EarlyStop reads the metric 'validation_loss', and the run has no va"),
        (["--average=1.5"], "--average must lie in [0, 1), got 1.5"),
        (["--average=mean"], "or be 'tail', got 'mean'"),
        (["--best=f1", "--validation=0.2"], "cannot know which values of 'f1'"),
        (["--best=top2", "--validation=0.2"], "the run has 'validation_loss', 'a"),
    ],
)
def test_wrong_input_is_one_line_and_nothing_is_written(arguments, message, folder, capsys):
    np.save("lone.npy", IMAGES[:5])
    Path("v.onnx").write_bytes(b"no arrays")
    Path("state").mkdir()
    Path("state/training.safetensors").write_bytes(b"")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert run(*FAST, *arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


# -- signals ---------------------------------------------------------------------------------------

STEPS = 60
ENDINGS = {"Ctrl-C": (signal.SIGINT, 130, "interrupted"), "SIGTERM": (signal.SIGTERM, 143, "termi")}
LONG = [
    "-m", "kfac_engine", "train", "model.onnx", "--data=data.npz", "--batch-size=10",
    "--validation=0.2", f"--steps={STEPS}", "--threads=1", "-o", "out.onnx",
]  # fmt: skip
# A program whose steps take minutes.
STUCK = """
import sys, time
import kfac_engine as ke
from kfac_engine.__main__ import main

def step(*_):
    print("ready", flush=True)
    time.sleep(300)

ke.KfacOptimizer.step = step
sys.exit(main())
"""
# A program whose later steps take half a second, so that a signal comes within the run.
SLOW = """
import sys, time
import kfac_engine as ke
from kfac_engine.__main__ import main

step = ke.KfacOptimizer.step

def slow(self, *batch):
    time.sleep(0.5 if self.steps > 6 else 0)
    return step(self, *batch)

ke.KfacOptimizer.step = slow
sys.exit(main())
"""


@pytest.fixture
def start(tmp_path):
    """Starts Python in the test's folder, which has a model and data."""
    onnx.save(net.model("float32"), tmp_path / "model.onnx")
    x, y = net.batch(n=50, dtype="float32")
    np.savez(tmp_path / "data.npz", x=x, targets=y)
    started = []

    def run_python(*arguments):
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        process = subprocess.Popen(
            [sys.executable, *arguments], cwd=tmp_path, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        started.append(process)
        return process

    yield run_python
    for process in started:
        process.kill()
        process.communicate()


def wait_for_lines(path, count, process):
    while not path.exists() or len(path.read_text().splitlines()) < count:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


posix = pytest.mark.skipif(sys.platform == "win32", reason="sends signals")


@posix
@pytest.mark.parametrize("ending", nightly_but(["SIGTERM"], ENDINGS))
def test_a_signal_ends_with_a_checkpoint_that_continues_with_equal_bits(
    ending, start, tmp_path, monkeypatch
):
    number, status, line = ENDINGS[ending]
    monkeypatch.chdir(tmp_path)
    assert main(LONG[2:]) == 0
    expected = (tmp_path / "out.onnx").read_bytes()
    (tmp_path / "out.onnx").unlink()
    store = ["--checkpoint=state", "--checkpoint-every=1000", "--log=run.jsonl"]
    process = start("-c", SLOW, *LONG[2:], *store)
    wait_for_lines(tmp_path / "run.jsonl", 7, process)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == status
    last = err.splitlines()[-1]
    assert last.startswith(f"error: {line}")
    assert last.endswith("; the same command with --resume continues from 'state'.")
    steps = len(logged(tmp_path / "run.jsonl"))
    assert 7 <= steps < STEPS
    assert not (tmp_path / "out.onnx").exists()
    resumed = start(*LONG, *store, "--resume")
    assert resumed.wait(60) == 0, resumed.stderr.read()
    assert (tmp_path / "out.onnx").read_bytes() == expected
    assert [entry["step"] for entry in logged(tmp_path / "run.jsonl")] == list(range(1, STEPS + 1))


@posix
@pytest.mark.nightly
def test_a_second_signal_ends_a_step_that_does_not_end(start, tmp_path):
    process = start("-c", STUCK, *LONG[2:], "--checkpoint=state")
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    time.sleep(2)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143
    assert err == "error: terminated; the run has no checkpoint yet.\n"
    assert {path.name for path in tmp_path.iterdir()} == {"model.onnx", "data.npz", "state"}
    assert not list((tmp_path / "state").glob("*.safetensors"))


@posix
def test_a_run_without_a_checkpoint_ends_at_once(start, tmp_path):
    process = start("-c", STUCK, *LONG[2:])
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)  # its step takes 300 seconds
    assert process.returncode == 143
    line = "error: terminated; nothing is written, because the run has no --checkpoint.\n"
    assert err == line
    assert {path.name for path in tmp_path.iterdir()} == {"model.onnx", "data.npz"}


def test_the_command_returns_to_earlier_parameters(folder, capsys):
    options = ["--optimizer=sgd", "--learning-rate=30", "--steps=40", "--log=run.jsonl"]
    assert run(*options) == 0
    assert "steps are smaller (roll-back 1 of 3)" in capsys.readouterr().err
    assert any(line["rolled_back"] for line in logged(Path("run.jsonl")))
    assert run(*options, "--rollbacks=0") == 0
    assert not any(line["rolled_back"] for line in logged(Path("run.jsonl")))
