"""Refreshes of the K-FAC optimizer by drift, by a budget and with periods of layers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper, parser

import kfac_engine as ke
from kfac_engine.curvature import refreshes
from kfac_engine.curvature.refreshes import Refreshes
from kfac_engine.curvature.schedule import POLICIES, GrowingPlanner, Planner, Work
from kfac_engine.engine import profiling
from tests.nightly import SEED
from tests.training import softmax_net as net

FACTORS = ("w1: A", "w1: G", "w2: A", "w2: G")
FIRST, SECOND = FACTORS[:2], FACTORS[2:]
STEPS = 40
ROUNDING = 1e-9  # of sums of some hundred simulated seconds


def optimizer_of(**options):
    return ke.KfacOptimizer(net.engine(), **options)


def step(optimizer, seed):
    x, y = net.batch(seed)
    return optimizer.step({"x": x}, y)


def run(optimizer, seeds):
    return [step(optimizer, seed) for seed in seeds]


def stored(optimizer):
    return [factor.arrays()["power/0"].copy() for factor in optimizer.engine.estimator.factors]


def assert_same(one, other):
    for name, value in one.engine.parameters.items():
        np.testing.assert_array_equal(value, other.engine.parameters[name])


def growing(period, steps=STEPS, start=0):
    """The steps of updates whose period grows to its largest value."""
    due, last = [], None
    for t in range(start, steps):
        if last is None or t - last >= min(period, max(1, (t - start) // 2)):
            due.append(t)
            last = t
    return due


def steps_of(reports, name):
    return [t for t, report in enumerate(reports) if name in report.refreshed]


# -- the names of a report -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "drift", "drift": 0.05, "refresh_every": 20, "statistics_every": 1},
        {"policy": "round_robin", "refresh_every": 4},
        {"periods": {"w1": 2, "w2": 7}, "statistics_every": 1},
    ],
    ids=["drift", "round robin", "periods"],
)
def test_a_report_names_the_factors_whose_inverses_a_step_replaces(options):
    # Statistics of each step, and a damping that changes, so that each refresh has new bits.
    optimizer, partial = optimizer_of(**options), 0
    step(optimizer, 0)
    for seed in range(1, STEPS):
        before = stored(optimizer)
        optimizer.damping *= 1.001
        refreshed = step(optimizer, seed).refreshed
        pairs = zip(FACTORS, before, stored(optimizer), strict=True)
        assert refreshed == tuple(n for n, old, new in pairs if not np.array_equal(old, new))
        partial += 0 < len(refreshed) < len(FACTORS)
    assert partial


def test_periods_of_layers_grow_from_the_first_step():
    reports = run(optimizer_of(refresh_every=9, periods={"w1": 3}), range(STEPS))
    for name in FIRST:
        assert steps_of(reports, name) == growing(3)
    for name in SECOND:
        assert steps_of(reports, name) == growing(9)
    assert reports[1].refreshed == FACTORS
    assert all(("inverses" in report.seconds) == bool(report.refreshed) for report in reports)
    assert sum(not report.refreshed for report in reports) > 1


# -- the first refreshes -------------------------------------------------------------------------


def operations(examples):
    """Those of a refresh; and of a step, by the sizes of the network."""
    sides = {"w1": (net.D + 1, net.H), "w2": (net.H + 1, net.K)}
    refresh = 2 * sum(d**3 for pair in sides.values() for d in pair)  # in double precision
    step = sum(a * g * (3 * examples + a + g) for a, g in sides.values())
    return refresh, step


@pytest.mark.parametrize("share", [0.2, 0.03, 0.003])
def test_the_first_refreshes_have_their_share_of_the_operations(share, monkeypatch):
    monkeypatch.setattr(refreshes, "_CHEAP", 0)
    monkeypatch.setattr(refreshes, "_EARLY_SHARE", share)
    optimizer = optimizer_of(refresh_every=30)
    reports = run(optimizer, range(STEPS))
    refresh, step = operations(len(net.batch(0)[1]))
    done = steps_of(reports, FACTORS[0])
    assert all(report.refreshed in ((), FACTORS) for report in reports)
    for count, t in enumerate(done[1:], 1):
        spent, total = count * refresh, count * refresh + t * step
        assert spent <= share * total or t - done[count - 1] == 30
    # One refresh more would exceed the share, unless the period was that of a growing period.
    plain = growing(30)
    assert len(done) < len(plain) if share < 0.2 else len(done) <= len(plain)
    least = int(refresh * (1 / share - 1) / step) + 1
    assert done[1] == min(30, least)


def test_cheap_refreshes_have_growing_periods_alone():
    assert steps_of(run(optimizer_of(refresh_every=9), range(STEPS)), FACTORS[0]) == growing(9)


def test_a_budget_of_time_alone_limits_its_early_refreshes(monkeypatch):
    monkeypatch.setattr(refreshes, "_CHEAP", 0)
    monkeypatch.setattr(refreshes, "_EARLY_SHARE", 1e-6)
    reports = run(optimizer_of(policy="budget", budget=0.9), range(8))
    assert any(report.refreshed for report in reports[1:])


def test_a_run_that_resumes_refreshes_at_the_same_steps(monkeypatch, tmp_path):
    monkeypatch.setattr(refreshes, "_CHEAP", 0)
    monkeypatch.setattr(refreshes, "_EARLY_SHARE", 0.02)
    whole, first = optimizer_of(refresh_every=30), optimizer_of(refresh_every=30)
    expected = run(whole, range(STEPS))
    run(first, range(7))
    first.save(tmp_path / "state")
    second = optimizer_of(refresh_every=30)
    second.load(tmp_path / "state")
    for seed in range(7, STEPS):
        assert step(second, seed).refreshed == expected[seed].refreshed
    assert_same(second, whole)


# -- drift -----------------------------------------------------------------------------------------


# -- budget ----------------------------------------------------------------------------------------


# Simulated seconds of a gradient, and of refreshes: the cubes of the sizes of the factors.
GRADIENT = 1.0
REFRESH = {name: size**3 / 2000 for name, size in zip(FACTORS, (6, 4, 5, 3), strict=True)}


@pytest.fixture
def clock(monkeypatch):
    """Gradients and the refresh of each factor take simulated seconds, and nothing else does."""
    now, begin, gradients = [0.0], Refreshes.begin, ke.Engine.step_gradients

    def timed_begin(self, keys):
        now[0] += sum(REFRESH[FACTORS[int(key)]] for key in keys)
        return begin(self, keys)

    def timed_gradients(self, *arguments, **options):
        now[0] += GRADIENT
        return gradients(self, *arguments, **options)

    monkeypatch.setattr(Refreshes, "begin", timed_begin)
    monkeypatch.setattr(ke.Engine, "step_gradients", timed_gradients)
    for module in (refreshes, profiling):
        monkeypatch.setattr(module, "perf_counter", lambda: now[0])


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("budget", [0.02, 0.1, 0.6])
def test_refreshes_take_the_budget_of_the_time_of_the_steps(budget):
    optimizer = optimizer_of(policy="budget", budget=budget, statistics_every=1)
    spent = elapsed = 0.0
    assert step(optimizer, 0).refreshed == FACTORS  # the first step does not count
    for seed in range(1, 3 * STEPS):
        result = step(optimizer, seed)
        cost = sum(REFRESH[name] for name in result.refreshed)
        assert result.seconds.get("inverses", 0.0) == pytest.approx(cost)
        spent, elapsed = spent + cost, elapsed + GRADIENT + cost
        before = elapsed - GRADIENT - cost
        assert spent <= budget * before + max(REFRESH.values()) + ROUNDING
        # With fresh inverses of all factors there is nothing to spend on.
        assert spent >= budget * before - ROUNDING or len(result.refreshed) == len(FACTORS)
    assert spent > 0


# -- resumption ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("policy", ["drift", "budget", "balanced"])
def test_a_run_resumes_with_the_plans_of_its_file(policy, tmp_path):
    options = {"policy": policy, "drift": 0.1, "budget": 0.07, "refresh_every": 6}
    whole, first, second = (optimizer_of(**options) for _ in range(3))
    expected = run(whole, range(STEPS))
    run(first, range(17))
    first.save(tmp_path / "state")
    second.load(tmp_path / "state")
    reports = run(second, range(17, STEPS))
    assert [r.refreshed for r in reports] == [r.refreshed for r in expected[17:]]
    assert any(0 < len(r.refreshed) < len(FACTORS) for r in reports)
    assert_same(whole, second)


def test_a_state_without_the_times_of_a_budget_is_refused(tmp_path):
    run(first := optimizer_of(), range(3))
    first.save(tmp_path / "state")
    second = optimizer_of(policy="budget")
    before = second.engine.parameters
    with pytest.raises(ke.InputError, match="refreshes of 'times'"):
        second.load(tmp_path / "state")
    assert second.steps == 0
    assert all(np.array_equal(before[n], v) for n, v in second.engine.parameters.items())


@pytest.mark.parametrize("policy", ["all_at_once", "drift", "budget"])
def test_restrain_refreshes_all_factors_in_the_next_step(policy):
    optimizer = optimizer_of(policy=policy, budget=1e-6, drift=1e9)
    reports = run(optimizer, range(STEPS))
    assert not reports[-1].refreshed
    optimizer.restrain()
    assert step(optimizer, STEPS).refreshed == FACTORS


# -- refused options -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"policy": "often"}, ke.InputError, "policy must be one of"),
        ({"policy": "budget", "budget": 1.0}, ke.InputError, r"budget must lie in \(0, 1\)"),
        ({"policy": "drift", "drift": 0.0}, ke.InputError, "drift must be"),
        ({"periods": {"w1": 0}}, ke.InputError, "periods"),
        ({"periods": {"conv*": 2}}, ke.UnknownNameError, "'conv\\*' of periods matches no"),
        ({"refresh_every": 0}, ke.InputError, "refresh_every"),
        ({"statistics_every": 0}, ke.InputError, "statistics_every"),
    ],
)
def test_wrong_schedules_are_refused(options, error, message):
    engine = net.engine()
    with pytest.raises(error, match=message):
        ke.KfacOptimizer(engine, **options)
    ke.KfacOptimizer(engine, policy="budget", budget=0.5, periods={"w1": 2})


def test_the_schedule_of_the_engine_is_left_alone():
    engine = net.engine(schedule=ke.Schedule(refresh_every=3))
    run(ke.KfacOptimizer(engine, policy="budget"), range(3))
    assert engine.schedule == ke.Schedule(refresh_every=3)
    assert engine.planner.state.refreshed == {}


# -- the planner with growing periods --------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=25 if SEED is None else 100, deadline=None)
@given(periods=st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_no_factor_waits_longer_than_its_period_or_the_bound(policy, periods):
    works = [Work(f"f{i}", float(i + 1), (f"p{i}",)) for i in range(len(periods))]
    patterns = {f"p{i}": period for i, period in enumerate(periods)}
    planner = Planner(works, ke.Schedule(policy=policy, periods=patterns))
    for t in range(60):
        bound = max(1, t // 2)
        due = planner.refreshes(t, bound=bound)
        for work, period in zip(works, periods, strict=True):
            age = planner.age(work.key, t)
            assert work.key in due or age < min(period, bound)
            # Nothing is refreshed early but by the slots that spread the works of a period.
            if work.key in due and policy == "all_at_once" and t:
                assert age >= min(period, bound)
        planner.advance(t, due, 0.0, 0.0)


def test_gradients_of_single_examples_are_measured_once_in_a_period_of_refreshes(monkeypatch):
    """A matrix that is read twice has no layer; Adam updates it, and the run keeps its bits."""
    rng = np.random.default_rng(0)
    model = parser.parse_model("""<ir_version: 8, opset_import: ["": 18]>
        tied (float[n, 4] x) => (float[n, 4] y) {
            h = MatMul(x, W)
            s = Tanh(h)
            t = Transpose<perm=[1, 0]>(W)
            r = MatMul(s, t)
            y = MatMul(r, V)
        }""")
    for name in ("W", "V"):
        value = rng.standard_normal((4, 4)).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    x, y = rng.standard_normal((64, 4)).astype(np.float32), rng.integers(0, 4, 64)

    def trained(**options):
        engine = ke.Engine.from_onnx(model, loss="categorical", threads=1)
        optimizer = ke.KfacOptimizer(engine, refresh_every=10, statistics_every=2, **options)
        statistics, steps = engine.estimator.statistics, []
        assert statistics.alone
        real = type(statistics)._measure_examples

        def counted(self, factors, *arguments):
            steps.extend([optimizer.steps] if factors else [])
            return real(self, factors, *arguments)

        monkeypatch.setattr(type(statistics), "_measure_examples", counted)
        for t in range(32):
            part = slice(32 * (t % 2), 32 * (t % 2) + 32)
            optimizer.step({"x": x[part]}, y[part])
        monkeypatch.undo()
        return steps, engine.parameters

    rarely, parameters = trained()
    assert len(rarely) == 4
    assert rarely[0] == 0
    assert [step // 10 for step in rarely] == [0, 1, 2, 3]
    # A predicted change reads all blocks: each statistics contain them.
    always, _ = trained(adapt_damping=True)
    assert len(always) > 12
    monkeypatch.setattr(GrowingPlanner, "begins_period", lambda self, counter: True)
    whole, same = trained()
    assert whole == always
    for name, value in parameters.items():
        np.testing.assert_array_equal(value, same[name])
