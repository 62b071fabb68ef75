"""The script that compares the optimizers on the bundled digits."""

import re
import sys

import pytest

from scripts import compare_optimizers


def test_the_table_has_a_row_for_each_method(monkeypatch, capsys):
    arguments = ["--models", "mlp", "--seconds", "0.02", "--seeds", "0,1"]
    monkeypatch.setattr(sys, "argv", ["compare_optimizers", *arguments])
    compare_optimizers.main()
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split(" | ")[2] for row in rows] == list(compare_optimizers.METHODS)
    assert all(re.fullmatch(r"\| mlp \| 0.02 \|.*\| [\d.]+ \| [\d.]+ \|", row) for row in rows)


def test_a_longer_run_has_a_lower_loss():
    runs = [compare_optimizers.train("mlp", "Adam .01", seconds, 0) for seconds in (0.005, 0.2)]
    (steps, loss, _), (more_steps, lower, held_out) = runs
    assert steps < more_steps
    assert lower < 0.5 * loss
    # The held-out digits are none of those that the model was trained on.
    assert held_out == pytest.approx(lower, abs=0.5)
    assert held_out != lower
