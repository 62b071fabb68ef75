"""Refreshes of the K-FAC optimizer: their names, growing periods and first steps."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from onnx import numpy_helper, parser

import kfac_engine as ke
from kfac_engine.curvature import refreshes
from kfac_engine.curvature.schedule import Due, GrowingPlanner, Planner, Work
from tests.comparing import assert_arrays_equal
from tests.nightly import SEED
from tests.training import softmax_net as net

FACTORS = ("w1: A", "w1: G", "w2: A", "w2: G")
STEPS = 40


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
    assert_arrays_equal(other.engine.parameters, one.engine.parameters)


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


def test_a_report_names_the_factors_whose_inverses_a_step_replaces():
    # Statistics of each step, and a damping that changes, so that each refresh has new bits.
    optimizer, counts = optimizer_of(refresh_every=4, statistics_every=1), set()
    step(optimizer, 0)
    for seed in range(1, STEPS):
        before = stored(optimizer)
        optimizer.damping *= 1.001
        refreshed = step(optimizer, seed).refreshed
        pairs = zip(FACTORS, before, stored(optimizer), strict=True)
        assert refreshed == tuple(n for n, old, new in pairs if not np.array_equal(old, new))
        counts.add(len(refreshed))
    assert counts == {0, len(FACTORS)}


def test_the_period_grows_from_the_first_step():
    reports = run(optimizer_of(refresh_every=9), range(STEPS))
    for name in FACTORS:
        assert steps_of(reports, name) == growing(9)
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


def test_restrain_refreshes_all_factors_in_the_next_step():
    optimizer = optimizer_of()
    reports = run(optimizer, range(STEPS))
    assert not reports[-1].refreshed
    optimizer.restrain()
    assert step(optimizer, STEPS).refreshed == FACTORS


# -- refused options -------------------------------------------------------------------------------


def test_the_schedule_of_the_engine_is_left_alone():
    engine = net.engine(schedule=ke.Schedule(refresh_every=3))
    run(ke.KfacOptimizer(engine), range(3))
    assert engine.schedule == ke.Schedule(refresh_every=3)
    assert engine.planner.refreshed == {}


# -- the planner with growing periods --------------------------------------------------------------


@settings(max_examples=25 if SEED is None else 100)
@given(number=st.integers(1, 6), period=st.integers(1, 9))
def test_a_factor_is_due_exactly_at_its_period_or_the_bound(number, period):
    works = [Work(f"f{i}", float(i + 1)) for i in range(number)]
    planner = Planner(works, ke.Schedule(refresh_every=period))
    for t in range(60):
        bound = max(1, t // 2)
        due = planner.refreshes(t, bound=bound)
        for work in works:
            age = t - planner.refreshed.get(work.key, -np.inf)
            assert (work.key in due) == (age >= min(period, bound))
        planner.advance(Due(t, statistics=False, refreshes=due))


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
        fisher, steps = engine.fisher, []
        assert fisher.differentiated_alone
        real = type(fisher)._measure_examples

        def counted(self, factors, *arguments):
            steps.extend([optimizer.steps] if factors else [])
            return real(self, factors, *arguments)

        monkeypatch.setattr(type(fisher), "_measure_examples", counted)
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
    due = GrowingPlanner.due
    monkeypatch.setattr(
        GrowingPlanner, "due", lambda *call: due(*call)._replace(begins_period=True)
    )
    whole, same = trained()
    assert whole == always
    assert_arrays_equal(same, parameters)
