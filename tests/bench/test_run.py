"""Measurements are checked before they are timed, fair while they are timed, and written down."""

import json
from contextlib import contextmanager

import numpy as np
import pytest

from kfac_engine.bench import jobs, run
from kfac_engine.bench.ceiling import Ceiling, measure_ceiling
from kfac_engine.bench.contenders import CONTENDERS, DEFINITION, OURS, PEERS, running
from kfac_engine.bench.measure import chosen, measure
from kfac_engine.bench.usage import Usage
from kfac_engine.errors import BackendError, UnknownNameError

CEILING = Ceiling(multiplications=1e9, copied_bytes=1e9)
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
    with running([DEFINITION, OURS]) as found:
        yield found


@pytest.mark.parametrize("job", SMALL.values(), ids=SMALL)
def test_ours_gives_the_result_of_the_definition(job, processes, monkeypatch):
    monkeypatch.setattr("kfac_engine.bench.measure._MOST", 3)
    definition, ours = measure(job, processes, CEILING)
    assert (definition.contender, ours.contender) == (DEFINITION, OURS)
    assert definition.error == 0 <= ours.error <= job.tolerance
    assert ours.ratio == 1
    assert definition.ratio == ours.seconds.median / definition.seconds.median
    assert ours.fraction * CEILING.multiplications == pytest.approx(ours.rate)


def test_every_operation_has_a_small_job():
    contested = {job.operation for suite in jobs.SUITES.values() for job in suite}
    assert contested == {job.operation for job in SMALL.values()} | {"step"}


class Fake:
    """A contender that takes a second for each run and gives what it is told to."""

    def __init__(self, name, result, order):
        self.name, self.result, self.order = name, result, order

    def prepare(self, job):
        return np.array(self.result)

    def run(self):
        self.order.append(self.name)
        return Usage(seconds=1.0, cpu_seconds=1.0, others_seconds=0.5, switches=2, peak_bytes=1000)


def fakes(definition, ours):
    order = []
    given = {DEFINITION: definition, OURS: ours}
    return {name: Fake(name, result, order) for name, result in given.items()}, order


@pytest.mark.parametrize("ours", [[1.0, 2.01], [1.0, np.nan]])
def test_a_wrong_result_is_not_timed(ours):
    contenders, order = fakes([1.0, 2.0], ours)
    with pytest.raises(BackendError, match="'7 × 7' is off by"):
        measure(SMALL["inverse"], contenders, CEILING)
    assert not order


def test_contenders_take_turns_and_what_disturbs_them_is_marked():
    contenders, order = fakes([1.0], [1.0])
    rows = measure(SMALL["inverse"], contenders, CEILING)
    assert order == [DEFINITION, OURS] * (len(order) // 2)
    assert all(row.others == 0.5 and row.disturbed for row in rows)
    assert [row.peak_bytes for row in rows] == [1000, 1000]
    assert [row.cpu_seconds for row in rows] == [1.0, 1.0]


def test_times_are_those_of_one_part_of_a_cycle():
    contenders, _ = fakes([1.0], [1.0])
    rows = measure(jobs.step("mlp", 2, "gradient", 10), {OURS: contenders[OURS]}, CEILING)
    assert [row.seconds.median for row in rows] == [0.1]


def test_a_contender_that_fails_is_named():
    with running([OURS]) as found, pytest.raises(BackendError, match="'ours' ended with status 1"):
        found[OURS].prepare(jobs.Job("inverse", "none", {"side": 3}))


def test_a_peer_that_is_not_installed_is_refused_by_name(monkeypatch):
    assert chosen([]) == [DEFINITION, OURS]
    monkeypatch.setattr("kfac_engine.bench.contenders.find_spec", lambda name: None)
    with pytest.raises(BackendError, match="cannot compare with torch: torch is not installed"):
        chosen(["torch"])
    with pytest.raises(UnknownNameError, match="choose one of: curvlinops"):
        chosen(["tensorflow"])


def test_every_contender_can_do_only_operations_that_are_measured():
    operations = {job.operation for suite in jobs.SUITES.values() for job in suite}
    assert all(contender.operations <= operations for contender in CONTENDERS.values())
    assert {"torch", "jax"} <= set(PEERS)


def test_a_run_prints_tables_and_writes_json_and_charts(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(run, "SUITES", {"small": [SMALL["inverse"]]})
    monkeypatch.setattr(run, "measure_ceiling", lambda: CEILING)

    @contextmanager
    def pretended(names):
        yield fakes([1.0, 2.0], [1.0, 2.0])[0]

    monkeypatch.setattr(run, "running", pretended)
    run.run_suites(["small"], tmp_path / "times.json", plot=tmp_path / "charts")
    printed = capsys.readouterr().out
    assert "Suite small" in printed
    assert "7 × 7" in printed
    assert "other processes ran" in printed
    report = json.loads((tmp_path / "times.json").read_text())
    definition, ours = report["suites"]["small"]
    assert ours["error"] == 0.0
    assert definition["seconds"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert {"kernel", "threads"} <= set(report["machine"]["blas"][0])
    assert (tmp_path / "charts" / "small.png").read_bytes().startswith(b"\x89PNG")


def test_unknown_suites_list_the_known_ones():
    expected = "build, conv, dense, gpu, inverse, memory, power, precondition, scaling, step"
    with pytest.raises(UnknownNameError, match=f"choose one of: {expected}"):
        run.run_suites(["cloud"])


def test_the_ceiling_is_positive():
    found = measure_ceiling(side=64, nbytes=1 << 12)
    assert found.multiplications > 0
    assert found.copied_bytes > 0
