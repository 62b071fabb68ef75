"""Whatever goes wrong is one line on stderr and the right exit status."""

import os
import subprocess
import sys

import click
import onnx
import pytest

from kfac_engine.__main__ import main
from kfac_engine.cli import app as frame
from kfac_engine.cli.interruption import Invocation, SignalReceived
from kfac_engine.distributed.agreement import Agreement
from kfac_engine.distributed.protocol import Alone
from kfac_engine.errors import InputError
from tests import models

COMMANDS = sorted(frame.app.commands)


@pytest.fixture
def failing(monkeypatch):
    """Adds a command `fail` that raises what it is given."""

    def add(error):
        @click.command(params=[frame.debug_option])
        def fail():
            raise error

        monkeypatch.setitem(frame.app.commands, "fail", fail)

    return add


FAILURES = {
    "wrong input": (InputError("too\nsmall."), 2, "too small."),
    "missing file": (FileNotFoundError(2, "No such file", "a"), 2, "cannot use 'a': No such file."),
    "memory": (MemoryError("8 TiB"), 2, "out of memory (8 TiB); 'kfac-engine inspect' shows"),
    "bug": (KeyError("oops"), 1, "internal error, KeyError: 'oops'. This is a bug: please report"),
    "interruption": (KeyboardInterrupt(), 130, "interrupted."),
}


@pytest.mark.parametrize(("error", "status", "line"), FAILURES.values(), ids=FAILURES)
def test_a_failure_is_one_line_and_a_status(error, status, line, failing, capsys):
    failing(error)
    assert main(["fail"]) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.lstrip("\n").startswith(f"error: {line}")
    assert err.strip().count("\n") == 0


@pytest.fixture
def ended(monkeypatch):
    """Statuses with which the job of several processes is ended; this process is one of three."""
    statuses = []
    monkeypatch.setenv("PMI_SIZE", "3")
    monkeypatch.setattr(frame, "end_job", statuses.append)
    return statuses


@pytest.mark.parametrize(("rank", "lines"), [(0, ["error: too small."]), (1, [])])
def test_of_several_processes_the_first_prints_an_error_of_all(
    rank, lines, failing, ended, monkeypatch, capsys
):
    monkeypatch.setenv("PMI_RANK", str(rank))
    error = InputError("too small.")
    with pytest.raises(InputError):
        Agreement(Alone()).refuse(error)
    failing(error)
    assert main(["fail"]) == 2
    assert capsys.readouterr().err.splitlines() == lines
    assert ended == []


@pytest.mark.parametrize("rank", [0, 1])
def test_of_several_processes_the_first_prints_a_mistyped_option(rank, ended, monkeypatch, capsys):
    monkeypatch.setenv("PMI_RANK", str(rank))
    assert main(["doctor", "--jsno"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" '--jsno'")[0] for line in lines] == ["error: No such option"][rank:]
    assert ended == []


@pytest.mark.parametrize("rank", [0, 1])
def test_of_several_processes_the_first_prints_a_signal(rank, failing, ended, monkeypatch, capsys):
    monkeypatch.setenv("PMI_RANK", str(rank))
    monkeypatch.setattr(Invocation, "explanation", (143, "terminated."))
    monkeypatch.setattr(Invocation, "__enter__", received)
    failing(SignalReceived())
    assert main(["fail"]) == 143
    assert capsys.readouterr().err.splitlines() == ["error: terminated."][rank:]
    assert ended == []


def received(invocation):
    invocation.received = 15
    return invocation


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (InputError("too small."), 2, "error: rank 1: too small."),
        (KeyError("oops"), 1, "error: rank 1: internal error, KeyError: 'oops'."),
    ],
)
def test_an_error_of_one_of_several_processes_ends_all_of_them(
    error, status, line, failing, ended, monkeypatch, capsys
):
    monkeypatch.setenv("PMI_RANK", "1")
    failing(error)
    assert main(["fail"]) == status
    assert capsys.readouterr().err.startswith(line)
    assert ended == [status]


@pytest.mark.parametrize("arguments", [["--debug", "fail"], ["fail", "--debug"]], ids=" ".join)
def test_debug_shows_the_traceback_wherever_it_stands(arguments, failing, capsys):
    failing(InputError("wrong."))
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" in err
    assert err.endswith("\nerror: wrong.\n")


USAGE = {
    "unknown command": (["precond"], "precond"),
    "unknown option": (["doctor", "--jsno"], "--jsno"),
    "missing argument": (["inspect"], "MODEL"),
    "missing option": (["precondition", "m.onnx", "-o", "o"], "--inputs"),
    "no number": (["demo", "--seeds", "many"], "many"),
    "out of range": (["demo", "--seeds", "0"], "0"),
    "not a choice": (["inspect", "m.onnx", "--reduction", "median"], "median"),
    "no pair": (["inspect", "m.onnx", "--approx", "conv2d"], "KIND=NAME"),
}


@pytest.mark.parametrize(("arguments", "named"), USAGE.values(), ids=USAGE)
def test_a_wrong_command_line_is_one_line_that_points_to_the_help(arguments, named, capsys):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert named in err
    assert err.count("\n") == 1
    assert "--help'." in err


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]], ids=["nothing", "--help", "-h"])
def test_help_lists_every_command(arguments, capsys):
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_option_has_a_help_text(name):
    command = frame.app.commands[name]
    assert command.help
    assert [
        option.name
        for option in command.params
        if isinstance(option, click.Option) and not option.help
    ] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_debug(name):
    assert "debug" in {option.name for option in frame.app.commands[name].params}


def test_letters_that_the_encoding_lacks_are_shown_as_escapes(tmp_path):
    onnx.save(models.linear(), tmp_path / "m.onnx")
    done = subprocess.run(
        [sys.executable, "-m", "kfac_engine", "inspect", "m.onnx"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "\\u2297" in done.stdout  # ⊗, of a Kronecker product


@pytest.mark.parametrize("words", [["--help"], ["demo", "--help"], ["bench", "--help"]])
def test_help_without_options_of_the_engine_imports_nothing_slow(words):
    code = (
        f"import sys; from kfac_engine.__main__ import main; main({words});"
        "print(*({'numpy', 'scipy', 'onnx', 'onnxruntime', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == ""
