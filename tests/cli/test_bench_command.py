"""`bench` runs the suites that were asked for, and refuses others."""

import contextlib
import json
import os
import subprocess
import sys

import pytest

from kfac_engine.__main__ import main
from kfac_engine.bench import run
from kfac_engine.bench.roofline import Roofline


@pytest.fixture
def one_small_case(monkeypatch):
    """Leaves one suite of one case."""
    cases = [job for job in run.SUITES["inverse"] if job.name == "64 × 64"]
    assert cases
    monkeypatch.setattr(run, "SUITES", {"inverse": cases})
    monkeypatch.setattr(run, "ceilings", lambda threads: [Roofline(threads, 1e9, 1e9)])
    monkeypatch.setattr(run, "ceiling", lambda threads: Roofline(threads, 1e9, 1e9))


def test_measurements_are_printed_and_written(one_small_case, tmp_path, capsys):
    command = ["bench", "--suite", "inverse", "--threads", "1", "--repeats", "2", "--json"]
    assert main([*command, str(tmp_path / "b.json")]) == 0
    assert "64 × 64" in capsys.readouterr().out
    assert "64 × 64" in json.dumps(
        json.loads((tmp_path / "b.json").read_text()), ensure_ascii=False
    )


def test_a_peer_that_nobody_knows_is_refused_by_name(capsys):
    assert main(["bench", "--compare", "torch,caffe"]) == 2
    assert "unknown peer 'caffe'; choose one of: " in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.parametrize("width", [80, 100, 120])
def test_bench_keeps_its_rows_on_a_terminal(width, tmp_path):
    pyte = pytest.importorskip("pyte")
    pty = pytest.importorskip("pty", reason="no pseudo-terminals on this system")
    program = (
        "from kfac_engine.bench import run\n"
        "from kfac_engine.bench.roofline import Roofline\n"
        "from kfac_engine.__main__ import main\n"
        "run.SUITES = {'inverse': run.SUITES['inverse'][:2]}\n"
        "run.ceilings = lambda threads: [Roofline(threads, 1e9, 1e9)]\n"
        "run.ceiling = lambda threads: Roofline(threads, 1e9, 1e9)\n"
        "main(['bench', '--suite', 'inverse', '--threads', '1', '--repeats', '2'])\n"
    )
    screen = pyte.HistoryScreen(width, 60)
    stream = pyte.ByteStream(screen)
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(width), "LINES": "60", "TERM": "xterm"}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=theirs, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        with contextlib.suppress(OSError):  # Linux ends a closed terminal by an error
            while data := os.read(ours, 65536):
                stream.feed(data)
    os.close(ours)
    assert process.returncode == 0
    lines = [line.rstrip() for line in screen.display]
    start = lines.index("Suite inverse")
    words = [line.split()[0] for line in lines[start + 3 : start + 9]]
    assert lines[start + 3] == "  64 × 64"
    assert lines[start + 6] == "  256 × 256"
    assert words == ["64", "definition", "ours", "256", "definition", "ours"]
    # The bar is erased at the end.
    assert not any("elapsed" in line for line in lines)
