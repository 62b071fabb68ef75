"""Logs: what is read from good files, and one clear error for each damaged file."""

import json

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.html_report.charts import extremes
from kfac_engine.html_report.run_log import log_of_lines, read_log

GOOD = {"step": 1, "seconds": 0.5, "loss": 2.0}


@pytest.fixture
def log(tmp_path):
    def write(text):
        path = tmp_path / "run.jsonl"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def rows(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


def test_a_number_that_a_record_lacks_is_nan(log):
    columns = read_log(log(rows(GOOD, {"step": 3, "seconds": 1, "accuracy": 0.5}))).columns
    np.testing.assert_array_equal(columns["step"], [1, 3])
    np.testing.assert_array_equal(columns["loss"], [2, np.nan])
    np.testing.assert_array_equal(columns["accuracy"], [np.nan, 0.5])


def test_an_incomplete_last_line_is_left_out_with_a_note(log):
    read = read_log(log(rows(GOOD) + '{"step": 2, "sec'))
    assert read.steps == 1
    assert any("incomplete" in note for note in read.notes)
    assert not read_log(log(rows(GOOD))).notes


DAMAGED = {
    "empty": ("", "no record"),
    "description alone": (rows({"run": {}}), "no record"),
    "no json": ("step 1\n" + rows(GOOD), "line 1 is not JSON"),
    "damaged middle": (rows(GOOD) + '{"step": 2,\n' + rows(GOOD), "line 2 is not JSON"),
    "a list": (rows(GOOD) + "[1]\n", "line 2 is not an object"),
    "not utf-8": (b"\xff\xfe\n", "line 1 is not JSON"),
    "deep": ("[" * 100_000 + "\n", "line 1 is not JSON"),
    "a long number": (f'{{"step": {"9" * 5000}}}\n', "line 1 is not JSON"),
    "steps fall": (rows(GOOD, GOOD), "do not increase"),
    "no steps": (rows({"step": None}), "do not increase"),
    "a huge step": (rows({"step": 10**400}), "do not increase"),
}


@pytest.mark.parametrize(("text", "reason"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_log_is_refused(log, text, reason):
    path = log(text)
    with pytest.raises(ke.InputError, match=reason) as error:
        read_log(path)
    assert str(path) in str(error.value)


def test_a_missing_log_is_refused_and_no_page_is_written(tmp_path):
    with pytest.raises(ke.InputError, match="no such file"):
        ke.report(tmp_path / "none.jsonl", tmp_path / "run.html")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("seconds", [[2.0, 1.0], [1.0, None], [0.0, "x"]])
def test_seconds_that_do_not_increase_are_left_out_with_a_note(seconds):
    records = [{"step": i, "seconds": value} for i, value in enumerate(seconds)]
    read = log_of_lines(records)
    assert np.isnan(read.columns["seconds"]).all()
    assert any("steps only" in note for note in read.notes)


@pytest.mark.parametrize("n", [1, 4, 5, 99, 100, 101, 1000, 12345])
def test_shortened_series_keep_their_extremes_and_their_ends(n):
    values = np.random.default_rng(n).standard_normal(n)
    chosen = extremes(values, 100)
    assert (np.diff(chosen) > 0).all()
    assert len(chosen) <= 100
    assert (len(chosen) == n) if n <= 100 else (len(chosen) > 50)
    assert {0, n - 1, int(values.argmin()), int(values.argmax())} <= set(chosen.tolist())
