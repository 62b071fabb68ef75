"""Schedules of an engine: by drift, by a budget of time, and with periods of layers."""

from itertools import count

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.curvature import refreshes
from kfac_engine.engine import engine as engine_module
from tests import models

CLOSE = 1e-6  # float32 averages of numbers of size one, squared in float64


def engine_of(**schedule):
    return ke.Engine.from_onnx(
        models.mlp(), loss="categorical", damping=1e-2, schedule=ke.Schedule(**schedule)
    )


def batch(seed):
    inputs = models.random_inputs(models.mlp(), batch=6, seed=seed)
    return inputs, np.random.default_rng(seed).integers(0, 3, 6)


def stored(engine):
    """The inverses of each factor with inverses."""
    return [f.arrays()["power/0"].copy() for f in engine.estimator.factors]


def refreshed(engine, seed):
    """Indices of the factors whose inverses a call replaces."""
    before = stored(engine)
    engine.step(*batch(seed))
    pairs = zip(before, stored(engine), strict=True)
    return [i for i, (old, new) in enumerate(pairs) if not np.array_equal(old, new)]


def assert_same(one, other):
    for name, array in one.natural_gradients.items():
        np.testing.assert_array_equal(array, other.natural_gradients[name])


def test_drift_is_the_relative_change_of_the_average_since_its_refresh():
    # Sixteen rows are all rows of these factors.
    engine = engine_of(policy="drift", drift=1e9, refresh_every=100)
    engine.step(*batch(0))
    old = [np.tril(factor.cov).astype(float) for factor in engine.estimator.factors]
    for seed in (1, 2):
        engine.step(*batch(seed))
    new = [np.tril(factor.cov).astype(float) for factor in engine.estimator.factors]
    drifts = engine.estimator.refreshes.drifts()
    assert len(drifts) == len(old)
    for drift, before, now in zip(drifts.values(), old, new, strict=True):
        expected = np.linalg.norm(now - before) / np.linalg.norm(before)
        assert expected > 0.01
        assert drift == pytest.approx(expected, rel=CLOSE)


def test_a_run_continues_with_the_drifts_of_its_file(tmp_path):
    schedule = {"policy": "drift", "drift": 0.05, "refresh_every": 4}
    first, second = engine_of(**schedule), engine_of(**schedule)
    for seed in range(3):
        first.step(*batch(seed))
    first.save(tmp_path / "state")
    second.load(tmp_path / "state")
    assert second.estimator.refreshes.drifts() == first.estimator.refreshes.drifts()
    for seed in range(3, 8):
        assert_same(second.step(*batch(seed)), first.step(*batch(seed)))
    assert second.planner.state.refreshed == first.planner.state.refreshed


@pytest.fixture
def clock(monkeypatch):
    """Each reading of the clock is a second after the one before."""
    seconds = count()
    for module in (refreshes, engine_module):
        monkeypatch.setattr(module, "perf_counter", lambda: float(next(seconds)))


@pytest.mark.usefixtures("clock")
def test_a_budget_counts_the_time_of_calls_and_refreshes():
    # A call reads the clock six times: begin, twice in wait, twice in run, end. It takes five
    # seconds, of which waiting takes one and a refresh one.
    engine = engine_of(policy="budget", budget=0.45)
    engine.step(*batch(0))
    counts = [len(refreshed(engine, seed)) for seed in range(1, 9)]
    state = engine.planner.state
    assert (state.elapsed, state.spent) == (40.0, 16.0)
    assert state.spent <= 0.45 * state.elapsed + 1
    assert counts[0] == 0  # no time has been counted
    assert sum(counts) > 0


def test_a_pattern_without_a_parameter_is_refused_and_the_schedule_kept():
    with pytest.raises(ke.UnknownNameError, match="'conv' of periods matches no parameter"):
        engine_of(periods={"conv": 2})
    engine = engine_of(refresh_every=3)
    with pytest.raises(ke.UnknownNameError, match="matches no parameter"):
        engine.schedule = ke.Schedule(periods={"conv": 2})
    assert engine.schedule.refresh_every == 3


@pytest.mark.parametrize("policy", ["drift", "budget"])
def test_a_call_that_fails_is_not_counted(policy):
    engine = engine_of(policy=policy)
    engine.step(*batch(0))
    planned, refreshes = engine.planner.saved(), engine.estimator.refreshes
    samples, drifts = refreshes.saved(), refreshes.drifts()
    inputs, targets = batch(1)
    bad = {name: np.full_like(array, np.nan) for name, array in inputs.items()}
    with pytest.raises(ke.NonFiniteError):
        engine.step(bad, targets)
    assert engine.planner.saved() == planned
    assert refreshes.saved().keys() == samples.keys()
    assert refreshes.drifts() == drifts
    assert engine.counter == 1


def test_a_state_without_a_schedule_is_loaded(tmp_path):
    engine = engine_of(refresh_every=2)
    engine.step(*batch(0))
    engine.save(tmp_path / "state")
    by_drift = engine_of(policy="drift", refresh_every=50)
    by_drift.load(tmp_path / "state")
    assert len(refreshed(by_drift, 1)) == len(by_drift.estimator.factors)  # drifts are unknown
    assert by_drift.estimator.refreshes.drifts()
