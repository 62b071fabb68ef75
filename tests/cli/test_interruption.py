"""Ctrl-C and SIGTERM end each command soon, wherever it is, and leave nothing half written."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread

import numpy as np
import onnx
import pytest

from kfac_engine.cli.app import run
from tests import models
from tests.nightly import nightly_but

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="sends signals")

# The contract is two seconds; a loaded machine may take longer to schedule.
SOON = 10
ENDINGS = {
    "Ctrl-C": (signal.SIGINT, 130, "error: interrupted.\n"),
    "SIGTERM": (signal.SIGTERM, 143, "error: terminated.\n"),
}

# A program whose command prints a line and then does something for minutes.
PROGRAM = """
import sys, time
import click, numpy as np
from kfac_engine.__main__ import main
from kfac_engine.cli.app import app
from kfac_engine.system.writing import write_file
from tests.cli.test_interruption import *

@click.command
def stuck():
    {body}

app.add_command(stuck)
sys.argv[1:] = ["stuck"]
sys.exit(main())
"""
STUCK = {
    "Python": "ready(); time.sleep(300)",
    "BLAS": "x = np.ones((5000, 5000)); ready(); [x.dot(x) for _ in range(9)]",
    "a run of ONNX Runtime": "endless(once=False)",
    "a run that can be cancelled": "endless(once=True)",
    "the creation of a session": "folded()",
    "writing a file": "write_file('out', slow_chunks())",
    "BLAS while a file is written": "write_file('out', blas_chunks())",
    "a finalizer": "finalize(); time.sleep(300)",
}


def ready():
    print("ready", flush=True)


def endless(*, once):
    """A loop without an end, which runs inside ONNX Runtime."""
    import onnxruntime as ort

    from kfac_engine.graph.write import CompactModel
    from kfac_engine.sessions.session import Session

    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 18]> g (float x) => (float y) {
          y = Loop <body = b (int64 i, bool go, float a) => (bool on, float c) {
            on = Identity(go)
            c = Sin(a)
          }> ("", "", x)
        }"""
    )
    session = Session(
        CompactModel(model.SerializeToString(), {}, {}), threads=1, once=once, what="a"
    )
    assert isinstance(session._open[0], ort.InferenceSession)
    ready()
    session.run(["y"], {"x": np.ones((), np.float32)})


def folded():
    """Products of constants, which ONNX Runtime computes when it creates a session."""
    from kfac_engine.graph.write import CompactModel
    from kfac_engine.sessions.session import Session

    net = models.Net()
    x = w = net.constant("w", np.ones((1000, 1000), np.float32))
    for i in range(1000):
        x = net.op("MatMul", x, w, to=f"x{i}")
    net.op("Add", x, "input", to="output")
    model = net.model({"input": [1000, 1000]}, {"output": [1000, 1000]})
    ready()
    Session(CompactModel(model.SerializeToString(), {}, {}), threads=1, what="products")


def finalize():
    """A finalizer, whose exceptions Python ignores."""

    class Slow:
        def __del__(self):
            ready()
            time.sleep(300)

    Slow()


def slow_chunks():
    yield b"half"
    ready()
    time.sleep(300)


def blas_chunks():
    yield b"half"
    x = np.ones((5000, 5000))
    ready()
    for _ in range(9):
        x.dot(x)


def _heed_ctrl_c():
    """A shell has its background jobs ignore Ctrl-C, and these tests with them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def start(tmp_path):
    """Starts a program in the test's folder; it is killed when the test is over."""
    started = []

    def run(*command):
        paths = {"PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(
            [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            cwd=tmp_path, env=os.environ | paths | {"PATH": f".{os.pathsep}{os.environ['PATH']}"},
            preexec_fn=_heed_ctrl_c,
        )  # fmt: skip
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def end(process, number):
    """Send a signal; exit status, stderr, and how long it took."""
    start = time.perf_counter()
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    return process.returncode, err, time.perf_counter() - start


def wait_for_handler(process):
    """Wait until a program catches SIGTERM, where the system tells; otherwise long enough."""
    status = Path(f"/proc/{process.pid}/status")
    if not status.is_file():
        time.sleep(3)
        return
    caught = 0
    while not caught & (1 << (signal.SIGTERM - 1)) and process.poll() is None:
        time.sleep(0.01)
        caught = int(status.read_text().partition("SigCgt:")[2].split()[0], 16)


def test_another_thread_runs_the_program_without_handlers(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["kfac-engine", "--version"])
    found = []
    thread = Thread(target=lambda: found.append(run(None)))
    thread.start()
    thread.join()
    assert found == [0]
    assert "version" in capsys.readouterr().out


SMOKE = ["Ctrl-C in a run of ONNX Runtime", "SIGTERM in BLAS while a file is written"]
INSIDE = {f"{name} in {place}": (name, place) for name in ENDINGS for place in STUCK}


@pytest.mark.parametrize("case", nightly_but(SMOKE, INSIDE))
def test_a_signal_ends_a_command_inside(case, start, tmp_path, record_testsuite_property):
    name, place = INSIDE[case]
    number, status, line = ENDINGS[name]
    (tmp_path / "out").write_bytes(b"old")
    process = start("-c", PROGRAM.format(body=STUCK[place]))
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.2)
    found, err, seconds = end(process, number)
    record_testsuite_property("seconds to the end", f"{seconds:.2f}")
    assert (found, err) == (status, line)
    assert seconds < SOON
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"out": b"old"}


COMMANDS = {
    "precondition": ["precondition", "m.onnx", "--inputs=pipe", "--targets=y.npz", "-o", "out"],
    "inspect": ["inspect", "m.onnx", "--inputs=pipe"],
    "differentiate": ["differentiate", "m.onnx", "--inputs=pipe", "-o", "out"],
    "curvature": ["curvature", "m.onnx", "--inputs=pipe", "-o", "out"],
    "demo": ["demo", "--seconds=60", "--out=."],
    "bench": ["bench", "--suite=inverse", "--json=out", "--threads=1"],
    "doctor": ["doctor"],
}


@pytest.mark.parametrize("name", nightly_but(["precondition"], COMMANDS))
def test_a_signal_ends_each_command(name, start, tmp_path, record_testsuite_property):
    onnx.save(models.linear(), tmp_path / "m.onnx")
    np.savez(tmp_path / "y.npz", targets=np.zeros(6, np.int64))
    os.mkfifo(tmp_path / "pipe")  # nobody writes into it: whoever reads it waits
    (tmp_path / "out").write_bytes(b"old")
    program = tmp_path / "nvidia-smi"  # what doctor waits for
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    before = set(tmp_path.iterdir())
    process = start("-m", "kfac_engine", *COMMANDS[name])
    wait_for_handler(process)
    time.sleep(1)
    status, err, seconds = end(process, signal.SIGTERM)
    record_testsuite_property("seconds to the end", f"{seconds:.2f}")
    assert (status, err) == (143, "error: terminated.\n")
    assert seconds < SOON
    assert set(tmp_path.iterdir()) == before
    assert (tmp_path / "out").read_bytes() == b"old"


def test_ctrl_c_in_the_library_ends_a_loop_without_an_end(start):
    """KeyboardInterrupt, as everywhere in Python: the library has no handlers."""
    code = "from tests.cli.test_interruption import endless; endless(once=True)"
    process = start("-c", code)
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.2)
    status, err, seconds = end(process, signal.SIGINT)
    assert status == -signal.SIGINT
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert seconds < SOON


def test_an_ignored_signal_stays_ignored_and_handlers_are_put_back():
    from kfac_engine.cli.interruption import Invocation

    before = signal.getsignal(signal.SIGTERM)
    older = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Invocation():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) != before
        assert signal.getsignal(signal.SIGTERM) == before
    finally:
        signal.signal(signal.SIGHUP, older)


def test_the_library_installs_no_handlers():
    code = """
import signal, kfac_engine as ke
from kfac_engine.data import demo_model, digits
before = [signal.getsignal(n) for n in signal.valid_signals()]
images, labels = digits()
engine = ke.Engine.from_onnx(demo_model("mlp"), loss="categorical", threads=1)
engine.step({"image": images[:8]}, labels[:8])
after = [signal.getsignal(n) for n in signal.valid_signals()]
print(before == after, signal.set_wakeup_fd(-1))
"""
    ended = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert ended.stdout.split() == ["True", "-1"]
