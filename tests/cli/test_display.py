"""A table fits the terminal, or becomes blocks of lines in which names stay whole."""

import pytest
from rich.console import Console

from kfac_engine.cli import display

NAMES = ["encoder.layers.0.self_attention.out_projection.weight", "encoder.layers.0.bias"]
HEADER = ("parameters", "shapes", "factors", " bytes")
ROWS = [(NAMES, ["64×64", "64"], ["65×65", "64×64"], "33.8 KiB"), (["head [1]"], "10", "", "1 B")]


def printed(width, monkeypatch, capsys):
    monkeypatch.setattr(display, "console", lambda: Console(width=width, highlight=False))
    display.print_table("layers", HEADER, ROWS)
    return capsys.readouterr().out


def test_a_wide_terminal_has_a_table(monkeypatch, capsys):
    lines = printed(120, monkeypatch, capsys).splitlines()
    assert lines[2].split() == ["parameters", "shapes", "factors", "bytes"]
    assert lines[4].split() == [NAMES[0], "64×64", "65×65", "33.8", "KiB"]
    assert lines[6].split() == ["head", "[1]", "10", "1", "B"]


@pytest.mark.parametrize("width", [60, 80])
def test_a_narrow_terminal_has_names_on_lines_of_their_own(width, monkeypatch, capsys):
    lines = [line.rstrip() for line in printed(width, monkeypatch, capsys).splitlines()]
    assert lines[:3] == ["layers", *(f"  {name}" for name in NAMES)]
    assert max(map(len, lines)) <= width
    words = " ".join(" ".join(lines).split())
    assert (
        "shapes 64×64, 64 factors 65×65, 64×64 bytes 33.8 KiB head [1] shapes 10 bytes 1 B" in words
    )


def test_a_name_wider_than_the_terminal_is_not_broken(monkeypatch, capsys):
    assert f"  {NAMES[0]}\n" in printed(30, monkeypatch, capsys)
