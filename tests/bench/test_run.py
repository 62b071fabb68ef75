"""Measurements are checked before they are timed, fair while they are timed, and written down."""

import json
import time
from types import SimpleNamespace

import numpy as np
import pytest

from kfac_engine.bench.cases import SUITES
from kfac_engine.bench.run import measure, run_suites
from kfac_engine.bench.timing import time_in_turn
from kfac_engine.errors import BackendError, UnknownNameError


@pytest.mark.parametrize("suite", SUITES)
def test_the_smallest_case_of_each_suite_equals_its_definition(suite):
    case = min(SUITES[suite], key=lambda case: case.multiplications)
    row = measure(case, rounds=2)
    assert row.error <= case.tolerance
    assert row.definition.low <= row.definition.median <= row.definition.high
    assert row.gain == row.definition.median / row.ours.median


def fake(definition, ours):
    contest = SimpleNamespace(definition=lambda: np.array(definition), ours=lambda: np.array(ours))
    return SimpleNamespace(name="fake", setup=lambda: contest, multiplications=1.0, tolerance=1e-3)


@pytest.mark.parametrize("ours", [[1.0, 2.01], [1.0, np.nan]])
def test_a_wrong_result_is_not_timed(ours):
    with pytest.raises(BackendError, match="'fake' is off by"):
        measure(fake([1.0, 2.0], ours))


def test_contenders_take_turns():
    order = []
    time_in_turn({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=3)
    assert order == ["a", "b"] * 3


def test_the_spread_is_that_of_the_times(monkeypatch):
    ticks = iter([0, 5, 10, 11, 20, 23, 30, 32, 40, 44])  # runs of 5, 1, 3, 2 and 4 seconds
    monkeypatch.setattr("kfac_engine.bench.timing.perf_counter", lambda: next(ticks))
    found = time_in_turn({"a": lambda: None}, rounds=5)["a"]
    assert (found.low, found.median, found.high) == (2, 3, 4)


def test_a_run_prints_a_table_and_writes_json(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("kfac_engine.bench.run.SUITES", {"small": [fake([1.0, 2.0], [1.0, 2.0])]})
    run_suites(["small"], tmp_path / "times.json")
    printed = capsys.readouterr().out
    assert "Suite small" in printed
    assert "fake" in printed
    report = json.loads((tmp_path / "times.json").read_text())
    (row,) = report["suites"]["small"]
    assert row["error"] == 0.0
    assert row["ours"]["median"] > 0
    assert {"kernel", "threads"} <= set(report["machine"]["blas"][0])


def test_unknown_suites_list_the_known_ones():
    with pytest.raises(UnknownNameError, match="choose one of: build, conv, dense, inverse"):
        run_suites(["gpu"])


def test_the_clock_runs():
    spread = time_in_turn({"nap": lambda: time.sleep(0.01)}, rounds=2)["nap"]
    assert 0.01 <= spread.low < 1
