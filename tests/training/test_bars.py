"""Bars show the elapsed time, and the remaining time at the present speed."""

import io

import pytest
from rich.console import Console

from kfac_engine.training import bars


def frame(make, completed, total, *, terminal=True):
    """Return the last line of a display after ten seconds for each completed part."""
    now = 100.0
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=80, color_system=None)
    display = make(console)
    display.get_time = lambda: now
    with display:
        task = display.add_task("work [1]", total=total)
        for part in range(1, completed + 1):
            now += 10
            display.update(task, completed=part, refresh=True)
        text = stream.getvalue()
    return text.replace("\x1b[2K", "\n").split("\n")[-1].strip("\r")


def test_bar_shows_elapsed_and_remaining_time():
    line = frame(bars.bar, 3, 9)
    # Three parts of nine in half a minute: six parts of ten seconds remain.
    assert line.startswith("work [1] ")
    assert line.endswith("33% elapsed 0:00:30 remaining 0:01:00")
    assert len(line) <= 80


def test_spinner_shows_the_elapsed_time_only():
    line = frame(bars.spinner, 7, None)
    assert line.endswith("work [1] elapsed 0:01:10")


@pytest.mark.parametrize("make", [bars.bar, bars.spinner])
def test_nothing_is_written_outside_a_terminal(make):
    assert frame(make, 2, 4, terminal=False) == ""


def test_stages_count_the_stages_that_have_ended(monkeypatch):
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=80, color_system=None)
    monkeypatch.setattr(bars, "Console", lambda **_: console)
    with bars.stages(True, 4) as begin:
        for name in ("first", "second", "third"):
            begin(name)
    last = stream.getvalue().rsplit("third", 1)[1]
    assert "50%" in last
    stream.truncate(0)
    with bars.stages(False, 4) as begin:
        begin("first")
    assert stream.getvalue() == ""
