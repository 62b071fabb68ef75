"""``mpiexec -n N python -m kfac_engine train`` is the run of one process, and fails in one line."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from tests.distributed.test_mpi import MPIEXEC, ROOT, SECONDS, pytestmark  # noqa: F401 (used by pytest)
from tests.nightly import nightly_but
from tests.training import softmax_net as net

# A batch of 27 is uneven over two ranks; a quarter of it has an example of each of three.
STEPS, SAVED_AFTER = 9, 5
WORDS = [
    "train", "model.onnx", "--data=data.npz", "--validation=held_out.npz", "--metrics=loss",
    "--metrics=accuracy", f"--steps={STEPS}", "--batch-size=27", "--threads=1",
]  # fmt: skip
# float64, of the largest entry: each step multiplies the roundings of the steps before.
CLOSE = 1e-12
# The command, whose steps take a twentieth of a second after the marks of its processes.
SLOW = """
import os, sys, time
from pathlib import Path
import kfac_engine as ke
from kfac_engine.__main__ import main

Path(f"process {os.getpid()}").touch()
step = ke.KfacOptimizer.step

def slow(self, *batch):
    time.sleep(0.05)
    return step(self, *batch)

ke.KfacOptimizer.step = slow
sys.exit(main())
"""


def start(size, folder, *words, program=("-m", "kfac_engine")):
    """Start the command on some ranks, or without a launcher on one."""
    launcher = [] if size == 1 else [MPIEXEC, "-n", str(size)]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*launcher, sys.executable, *program, *words], cwd=folder, text=True,
        env={**environment, "PYTHONPATH": paths}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


def finish(process):
    """Exit status and stderr of a command, which is killed after some time."""
    try:
        _, err = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    return process.returncode, err


def train(size, folder, *words):
    status, err = finish(start(size, folder, *WORDS, *words))
    assert status == 0, err
    assert "error: " not in err


def refused(size, folder, *words):
    """Status and error lines of a command that fails; it prints no traceback."""
    status, err = finish(start(size, folder, *words))
    assert "Traceback" not in err
    return status, [line for line in err.splitlines() if "error: " in line]


def assert_same_parameters(file, expected, tolerance=CLOSE):
    found, wanted = (
        {entry.name: numpy_helper.to_array(entry) for entry in onnx.load(path).graph.initializer}
        for path in (file, expected)
    )
    assert found.keys() == wanted.keys() >= set(net.weights())
    for name in net.weights():
        assert found[name].dtype == np.float64
        close = tolerance * abs(wanted[name]).max()
        np.testing.assert_allclose(found[name], wanted[name], rtol=0, atol=close)


def records(file):
    """The records of the steps of a log."""
    entries = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [entry for entry in entries if "step" in entry]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, data, and the results of one process."""
    path = tmp_path_factory.mktemp("train")
    onnx.save(net.model(), path / "model.onnx")
    x, y = net.batch(0, n=59)
    np.savez(path / "data.npz", x=x, targets=y)
    held_out, targets = net.batch(1, n=11)
    np.savez(path / "held_out.npz", x=held_out, targets=targets)
    np.savez(path / "nan.npz", x=np.full_like(x, np.nan), targets=y)
    train(1, path, "--log=one.jsonl", "-o", "one.onnx")
    return path


WAYS = [(2, "replicate", 1), (3, "shard", 1), (2, "replicate", 3)]


@pytest.mark.parametrize("way", nightly_but([(2, "shard", 1), (2, "shard", 3)], WAYS))
def test_the_command_over_processes_is_that_of_one(way, folder):
    size, distribution, parts = way
    # Sums over parts have other roundings than sums over a batch.
    tolerance = CLOSE if parts == 1 else 1e3 * CLOSE
    before = {path.name for path in folder.iterdir()}
    words = f"--distribution={distribution}", f"--batch-size={27 // parts}", f"--accumulate={parts}"
    train(size, folder, *words, "--log=many.jsonl", "-o", "many.onnx")
    assert {path.name for path in folder.iterdir()} - before == {"many.jsonl", "many.onnx"}
    assert_same_parameters(folder / "many.onnx", folder / "one.onnx", tolerance)
    found, wanted = records(folder / "many.jsonl"), records(folder / "one.jsonl")
    assert [record["step"] for record in found] == list(range(1, STEPS + 1))
    for name in ("loss", "validation_loss", "accuracy"):
        assert [name in record for record in found] == [name in record for record in wanted]
        values, expected = ([r[name] for r in rows if name in r] for rows in (found, wanted))
        np.testing.assert_allclose(values, expected, rtol=tolerance)
    for name in ("many.jsonl", "many.onnx"):
        (folder / name).unlink()


def interrupt(folder, size):
    """Send Ctrl-C to a run of some ranks; status, stderr, and the number of its steps."""
    store = ["--checkpoint=state", "--checkpoint-every=1000", "--log=run.jsonl", "-o", "no.onnx"]
    process = start(size, folder, *WORDS, *store, program=("-c", SLOW))
    log = folder / "run.jsonl"
    began = time.monotonic()
    while not log.exists() or len(records(log)) < SAVED_AFTER:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < began + SECONDS
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    return *finish(process), len(records(log))


@pytest.mark.nightly
def test_ctrl_c_leaves_one_checkpoint_that_other_numbers_of_processes_resume(folder, tmp_path):
    for name in ("model.onnx", "data.npz", "held_out.npz"):
        shutil.copy(folder / name, tmp_path)
    status, err, steps = interrupt(tmp_path, 2)
    assert status != 0
    assert [line for line in err.splitlines() if "interrupted" in line] == [
        "error: interrupted; the same command with --resume continues from 'state'."
    ]
    assert SAVED_AFTER <= steps < STEPS
    assert not (tmp_path / "no.onnx").exists()
    assert len(list((tmp_path / "state").glob("*.safetensors"))) == 1
    shutil.copytree(tmp_path / "state", tmp_path / "copy")
    for size, state in ((1, "state"), (3, "copy")):
        train(size, tmp_path, f"--checkpoint={state}", "--resume", "-o", "resumed.onnx")
        assert_same_parameters(tmp_path / "resumed.onnx", folder / "one.onnx")


ERRORS = {
    "NaN": (
        ["--data=nan.npz", "-o", "no.onnx"],
        "error: rank 0 of 2 refused: input 'x' contains NaN or infinity, first at index (0, 0).",
    ),
    "loss": (
        ["--data=data.npz", "--loss=foo", "-o", "no.onnx"],
        "error: rank 0 of 2 refused: unknown loss 'foo'; ",
    ),
    "option": (["--data=data.npz", "--foo"], "error: no option '--foo'"),
    "argument": (["--data=data.npz"], "error: Missing option '-o' / '--out'; "),
}


@pytest.mark.parametrize("error", nightly_but(["NaN"], ERRORS))
def test_an_error_of_all_processes_is_one_line(error, folder):
    words, line = ERRORS[error]
    status, lines = refused(2, folder, "train", "model.onnx", "--threads=1", *words)
    assert status == 2
    assert len(lines) == 1
    assert lines[0].startswith(line)
    assert not (folder / "no.onnx").exists()
