"""A table fits the terminal, and names stay whole: three snapshots."""

import pytest
from rich.console import Console

from kfac_engine.cli import display
from kfac_engine.cli.inspect import show_flops
from kfac_engine.summary import binary_size

NAMES = ["encoder.layers.0.self_attention.out_projection.weight", "encoder.layers.0.bias"]
HEADER = ("parameters", "shapes", "factors", " bytes")
ROWS = [(NAMES, ["64×64", "64"], ["65×65", "64×64"], "33.8 KiB"), (["head [1]"], "10", "", "1 B")]


SNAPSHOTS = {
    1000: """\
layers

  parameters                                              shapes   factors      bytes
─────────────────────────────────────────────────────────────────────────────────────
  encoder.layers.0.self_attention.out_projection.weight   64×64    65×65     33.8 KiB
  encoder.layers.0.bias                                   64       64×64
  head [1]                                                10                      1 B

""",
    77: """\
layers

parameters                                            shapes factors    bytes
─────────────────────────────────────────────────────────────────────────────
encoder.layers.0.self_attention.out_projection.weight 64×64  65×65   33.8 KiB
encoder.layers.0.bias                                 64     64×64
head [1]                                              10                  1 B

""",
    30: """\
layers

  encoder.layers.0.self_attention.out_projection.weight
  encoder.layers.0.bias
      shapes    64×64, 64
      factors   65×65, 64×64
      bytes     33.8 KiB
  head [1]
      shapes    10
      bytes     1 B

""",
}


@pytest.mark.parametrize(("width", "snapshot"), SNAPSHOTS.items())
def test_a_table_becomes_a_list_of_its_rows(width, snapshot, monkeypatch, capsys):
    monkeypatch.setattr(display, "console", lambda: Console(width=width, highlight=False))
    display.print_table("layers", HEADER, ROWS)
    assert capsys.readouterr().out == snapshot


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
