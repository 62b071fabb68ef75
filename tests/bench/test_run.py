"""Measurements are checked before they are timed, fair while they are timed, and written down."""

import json
from contextlib import contextmanager

import numpy as np
import pytest

from kfac_engine.bench import jobs, run
from kfac_engine.bench.contenders import DEFINITION, OURS
from kfac_engine.bench.measure import measure
from kfac_engine.bench.processes import running
from kfac_engine.bench.resource_usage import Usage
from kfac_engine.bench.roofline import Roofline
from kfac_engine.curvature.schedule import Planner, Schedule, Work
from kfac_engine.errors import BackendError, UnknownNameError

CEILING = Roofline(threads=1, multiplications=1e9, copied_bytes=1e9)
SLOW = Roofline(threads=1, multiplications=7e8, copied_bytes=2e9)
# One small job of every operation that has a definition.
SMALL = {
    "dense": jobs.dense(9, 5),
    "patches": jobs.patches((2, 3, 6, 5), 3, 1, 1),
    "patches, strided": jobs.patches((2, 3, 7, 7), 3, 2, 0),
    "depthwise": jobs.depthwise((2, 3, 6, 5), 3, 1),
    "inverse": jobs.inverse(7),
    "power": jobs.power(6, -0.5),
    "precondition": jobs.precondition("two", ((3, 4, 1), (5, 2, 2))),
}


@pytest.fixture(scope="module")
def processes():
    with running([DEFINITION, OURS], threads=1) as found:
        yield found


@pytest.mark.parametrize("job", SMALL.values(), ids=SMALL)
def test_ours_gives_the_result_of_the_definition(job, processes, monkeypatch):
    monkeypatch.setattr("kfac_engine.bench.measure._SETTLING", 0.0)
    definition, ours = measure(job, processes, CEILING, repeats=2)
    assert (definition.contender, ours.contender) == (DEFINITION, OURS)
    assert definition.errors["result"] == 0 <= ours.errors["result"] <= job.tolerance
    assert ours.ratio == 1
    assert definition.ratio == ours.seconds.median / definition.seconds.median


# Later runs find in place what the first one allocates.
FIRST = Usage((1.0,), (1.0,), 0.0, 0, 3000)


class Fake:
    """A contender that takes a second for each run and gives what it is told to."""

    def __init__(self, name, result, order):
        self.name, self.result, self.order = name, result, order

    def prepare(self, job):
        return {"result": np.array(self.result)}, FIRST

    def run(self, runs, *, warm, settle):
        self.order.append(self.name)
        return self.used(runs)

    def used(self, runs):
        # Two clocks that count others coarsely: the sum is right, single ones are not.
        others = [1.5, -0.5][len(self.order) % 2]
        return Usage((1.0,) * runs, (1.0,) * runs, others * runs, 2 * runs, 1000)


def fakes(definition, ours):
    order = []
    given = {DEFINITION: definition, OURS: ours}
    return {name: Fake(name, result, order) for name, result in given.items()}, order


@pytest.mark.parametrize("ours", [[1.0, 2.01], [1.0, np.nan]])
def test_a_wrong_result_is_not_timed(ours):
    contenders, order = fakes([1.0, 2.0], ours)
    with pytest.raises(BackendError, match="the result of '7 × 7' is off by"):
        measure(SMALL["inverse"], contenders, CEILING)
    assert not order


def test_contenders_take_turns_and_what_disturbs_them_is_marked():
    contenders, order = fakes([1.0], [1.0])
    rows = measure(SMALL["inverse"], contenders, CEILING, repeats=4)
    # What takes so long needs no run that warms caches: the first counts.
    assert order == [DEFINITION, OURS] * 4
    # The definition always finds the clock ahead, ours behind.
    assert [(row.others, row.disturbed) for row in rows] == [(0.0, False), (1.5, True)]
    assert [row.peak_bytes for row in rows] == [3000, 3000]
    assert [row.cpu_seconds for row in rows] == [1.0, 1.0]
    assert [row.runs for row in rows] == [4, 4]


def step_fakes():
    contenders, order = fakes([1.0], [1.0])
    for fake in contenders.values():
        parts = {"gradient": np.ones(2), "natural gradient": np.ones(2)}
        fake.prepare = lambda job, parts=parts: (parts, FIRST)
    return contenders, order


def test_the_truth_of_steps_is_not_timed():
    contenders, order = step_fakes()
    rows = measure(jobs.step("mlp", 2, "gradient"), contenders, CEILING)
    assert [(row.contender, row.seconds.median) for row in rows] == [(OURS, 1.0)]
    assert rows[0].errors == {"gradient": 0.0, "natural gradient": 0.0}
    assert set(order) == {OURS}


def timed(contender, seconds):
    """Has each run of a contender take what its number, from the first turn on, says."""
    count = iter(range(10**6))

    def run(runs, *, warm, settle):
        assert not warm
        times = tuple(seconds(next(count)) for _ in range(runs))
        return Usage(times, tuple(2 * time for time in times), 0.0, 0, 0)

    contender.run = run


# Every sort of step takes another time; inverses are made in a step in which factors move, too.
SECONDS = {"gradient": 1.0, "factors": 2.0, "inverses": 5.0}
# Of a hundred steps in use.
IN_USE = {
    "factors 1, inverses 10": {"factors": 90, "inverses": 10},
    jobs.SELDOM: {"gradient": 90, "factors": 9, "inverses": 1},
}


@pytest.mark.parametrize("kind", IN_USE)
def test_each_sort_of_step_counts_as_often_as_it_comes_in_use(kind):
    job = jobs.step("mlp", 2, kind)
    contenders, _ = step_fakes()
    timed(contenders[OURS], lambda number: SECONDS[job.turn[number % len(job.turn)]])
    (row,) = measure(job, contenders, CEILING)
    expected = sum(SECONDS[sort] * count for sort, count in IN_USE[kind].items()) / 100
    assert row.seconds.median == pytest.approx(expected)
    assert row.seconds.low == row.seconds.high == row.seconds.median
    assert row.cpu_seconds == pytest.approx(2 * expected)
    assert row.runs % len(job.turn) == 0


@pytest.mark.parametrize("kind", IN_USE)
def test_what_a_step_has_to_do_is_what_the_scheduler_finds_due(kind):
    """The first step, which is only checked, is step 0: everything is due."""
    job, periods = jobs.step("mlp", 2, kind), jobs.STEPS[kind]
    planner = Planner([Work("A", 1.0)], Schedule(*periods.measured))
    for number, sort in enumerate(job.turn * 2, start=1):
        assert planner.due(number).statistics == (sort != "gradient")
        assert bool(planner.refreshes(number)) == (sort == "inverses")


@pytest.fixture
def small_run(monkeypatch):
    """Leaves two suites of one job, and contenders that only pretend."""
    suites = {"small": [SMALL["inverse"]], "other": [SMALL["dense"]]}
    monkeypatch.setattr(run, "SUITES", suites)
    monkeypatch.setattr(run, "ceilings", lambda threads: [CEILING])
    monkeypatch.setattr(run, "ceiling", lambda threads: SLOW)
    served = []

    @contextmanager
    def pretended(names, threads):
        served.append(tuple(names))
        yield fakes([1.0, 2.0], [1.0, 2.0])[0]

    monkeypatch.setattr(run, "running", pretended)
    return served


def test_a_run_prints_tables_and_writes_json_and_charts(small_run, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    options = run.Options(plot=tmp_path / "charts", threads=1)
    run.run_suites(["small"], tmp_path / "times.json", options=options)
    printed = capsys.readouterr().out
    assert "Suite small" in printed
    assert "\n  7 × 7\n" in printed
    assert "CPU time of other processes" in printed
    assert "every contender works in a process with a single thread: peers" in printed
    report = json.loads((tmp_path / "times.json").read_text())
    definition, ours = report["suites"]["small"]
    assert ours["errors"] == {"result": 0.0}
    assert definition["seconds"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert report["machine"]["threads"] == 1
    assert "kernel" in report["machine"]["blas"][0]
    assert report["machine"]["ceilings"][0]["multiplications"] == 1e9
    assert report["course"]["small"]["before"]["multiplications"] == 1e9
    assert report["course"]["small"]["after"]["multiplications"] == 7e8
    assert "before it: 2 GFLOP/s (sgemm), 1.0 GB/s (copy); after it: 1 GFLOP/s (sgemm)" in printed
    assert "the machine was slower than at its best, 2 GFLOP/s (sgemm), 2.0 GB/s (copy)" in printed
    assert (tmp_path / "charts" / "small.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_that_was_interrupted_is_resumed(small_run, tmp_path, capsys, monkeypatch):
    path = tmp_path / "times.json"
    run.run_suites(["small"], path, options=run.Options(threads=1))
    before = json.loads(path.read_text())["suites"]["small"]
    capsys.readouterr()
    run.run_suites(["small", "other"], path, options=run.Options(threads=1, resume=True))
    assert len(small_run) == 2
    assert "small: skipped" in capsys.readouterr().out
    suites = json.loads(path.read_text())["suites"]
    assert suites["small"] == before
    assert set(suites) == {"small", "other"}


def test_a_job_that_fails_does_not_stop_the_others(small_run, tmp_path, capsys, monkeypatch):
    results = iter([[1.0, 2.5], [1.0, 2.0], [1.0, 2.0]])

    @contextmanager
    def pretended(names, threads):
        yield fakes([1.0, 2.0], next(results))[0]

    monkeypatch.setattr(run, "running", pretended)
    path = tmp_path / "times.json"
    with pytest.raises(BackendError, match="not measured: small: 7 × 7"):
        run.run_suites(["small", "other"], path, options=run.Options(threads=1))
    assert "error: the result of '7 × 7' is off by" in capsys.readouterr().out
    suites = json.loads(path.read_text())["suites"]
    assert [len(rows) for rows in (suites["small"], suites["other"])] == [0, 2]
    # Resumed, what has gaps is measured again.
    run.run_suites(["small", "other"], path, options=run.Options(threads=1, resume=True))
    assert "other: skipped" in capsys.readouterr().out
    suites = json.loads(path.read_text())["suites"]
    assert [len(rows) for rows in (suites["small"], suites["other"])] == [2, 2]


def test_unknown_suites_list_the_known_ones():
    expected = "build, conv, dense, gpu, inverse, memory, models, power, precondition, scaling"
    with pytest.raises(UnknownNameError, match=f"choose one of: {expected}"):
        run.run_suites(["cloud"])
