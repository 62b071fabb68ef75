"""A table fits the terminal, and names stay whole."""

import pytest
from rich.console import Console

from kfac_engine.cli import display
from kfac_engine.cli.display import show_flops
from kfac_engine.summary import binary_size

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
    assert lines[:4] == ["layers", "", "  parameters", "      shapes  factors     bytes"]
    assert lines[5:11] == [
        *(f"  {name}" for name in NAMES),
        "      64×64   65×65    33.8 KiB",
        "      64      64×64",
        "  head [1]",
        "      10                    1 B",
    ]
    assert max(map(len, lines)) <= width


def test_a_terminal_narrower_than_the_numbers_has_a_line_for_each_cell(monkeypatch, capsys):
    lines = printed(30, monkeypatch, capsys).splitlines()
    assert lines[3:6] == [
        "      shapes    64×64, 64",
        "      factors   65×65, 64×64",
        "      bytes     33.8 KiB",
    ]


@pytest.mark.parametrize(
    ("count", "text"),
    [(999, "999 B"), (999.6 * 1024, "0.976 MiB"), (1023, "0.999 KiB"), (3 << 20, "3 MiB")],
)
def test_numbers_of_bytes_have_three_digits(count, text):
    assert binary_size(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 FLOP"), (5.1e3, "5.1 kFLOP"), (31e9, "31 GFLOP"), (2e20, "2e+05 PFLOP")],
)
def test_numbers_of_operations_have_a_decimal_unit(count, text):
    assert show_flops(count) == text


def test_a_name_wider_than_the_terminal_is_not_broken(monkeypatch, capsys):
    assert f"  {NAMES[0]}\n" in printed(30, monkeypatch, capsys)
