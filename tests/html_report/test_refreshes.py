"""The refreshes of a page are those of the log, and their costs add up to its times."""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.html_report.page import page
from kfac_engine.html_report.run_log import log_of_lines
from tests.html_report.page_reader import PageReader
from tests.training import softmax_net as net

SIZES = {"w1: A": 6, "w1: G": 4, "w2: A": 5, "w2: G": 3}


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    path = tmp_path_factory.mktemp("log") / "run.jsonl"
    engine = net.engine()
    optimizer = ke.KfacOptimizer(engine, statistics_every=2, refresh_every=3)
    history = ke.fit(
        engine, net.batch(n=50), optimizer=optimizer, steps=20, batch_size=16, log=path
    )
    return history, path


@pytest.fixture(scope="module")
def read(log, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "run.html"
    ke.report(log[1], path)
    return PageReader(path.read_text(encoding="utf-8"))


def drawn(read):
    return read.lines["Refreshes by factor", "factor"]


def test_each_mark_is_a_refresh_of_the_log(read, log):
    names = [row[1] for row in read.tables["Refreshes of the factors"][1:]]
    assert sorted(names) == sorted(SIZES)
    line = drawn(read)
    marks = {
        (step, names[int(row) - 1]) for step, row in zip(line["step"], line["value"], strict=True)
    }
    records = log[0].records
    assert marks == {(r["step"], name) for r in records for name in r["refreshed"]}
    assert len(marks) == len(line["step"])
    assert len({len(record["refreshed"]) for record in records}) > 1


def test_the_table_divides_the_time_of_each_refresh_by_the_cubes_of_the_sizes(read, log):
    rows = {row[1]: row for row in read.tables["Refreshes of the factors"][1:]}
    records = [record for record in log[0].records if record["refreshed"]]
    total = 0.0
    for name, size in SIZES.items():
        steps = [r["step"] for r in records if name in r["refreshed"]]
        seconds = sum(
            r["seconds/inverses"] * size**3 / sum(SIZES[other] ** 3 for other in r["refreshed"])
            for r in records
            if name in r["refreshed"]
        )
        _, _, number, interval, last, cost, share = rows[name]
        assert int(number) == len(steps)
        assert float(interval) == pytest.approx(np.diff(steps).mean(), abs=0.051)
        assert int(last) == steps[-1]
        assert float(cost) == pytest.approx(seconds, abs=5.1e-5)  # four digits
        total += float(share)
    assert total == pytest.approx(100, abs=0.25)


def record(step, **numbers):
    return {"step": step, "seconds": 0.5 * step, "loss": 1.0 / step} | numbers


@pytest.mark.parametrize("wrong", [True, 3, "w", {"w": 1}, [3, None, ["w"]], [], None])
def test_a_log_without_names_has_no_refreshes(wrong):
    read = PageReader(page(log_of_lines([record(1, refreshed=wrong), record(2)])))
    assert "Refreshes of the factors" not in read.tables
    assert ("Refreshes by factor", "factor") not in read.lines


@pytest.mark.parametrize(
    "factors", [None, 3, {"w": 2}, {"w": []}, {"w": ["x"]}, {"w": [0]}, {"w": [1 << 40] * 9}]
)
def test_shapes_that_are_wrong_or_missing_divide_the_time_equally(factors):
    lines = [
        {"run": {"factors": factors}},
        record(1, refreshed=["w", "<b>"], **{"seconds/inverses": 0.5}),
        record(2),
    ]
    rows = PageReader(page(log_of_lines(lines))).tables["Refreshes of the factors"][1:]
    assert [row[1] for row in rows] == ["w", "<b>"]
    assert [row[5] for row in rows] == ["0.2500", "0.2500"]
