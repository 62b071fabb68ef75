"""The shrinkage and damping of weights by the evidence, in networks that read a table."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import brentq

import kfac_engine as ke
from kfac_engine.bench.training import models
from kfac_engine.curvature.blocks.base import uses
from kfac_engine.training import evidence, kfac
from kfac_engine.training.evidence import (
    Evidence,
    ShrinkageByEvidence,
    classes_overlap,
    left_by_neighbours,
)
from tests.comparing import assert_arrays_equal
from tests.distributed.threads import run
from tests.models import written

ROWS, COLUMNS, BATCH = 1280, 6, 128
NODES = "p = MatMul(input, w) s = Add(p, b) h = Tanh(s) q = MatMul(h, w1) output = Add(q, b1)"
WEIGHTS = "w(6,16) b(16) w1(16,1) b1(1)"


def table(noise):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((ROWS + 1000, COLUMNS))
    y = np.sin(x[:, :1]) + x[:, 1:2] + noise * rng.standard_normal((len(x), 1))
    x, y = x.astype(np.float32), y.astype(np.float32)
    return x[:ROWS], y[:ROWS], x[ROWS:], y[ROWS:]


def engine_of(nodes=NODES, weights=WEIGHTS, sides="n,6 -> n,1", **options):
    return ke.Engine.from_onnx(
        written(sides, weights, nodes), **{"loss": "normal", "seed": 0, "threads": 1, **options}
    )


def trained(optimizer, epochs, noise=1.0, start=0):
    """Train an optimizer; each epoch has its own order of the rows."""
    x, y, *_ = table(noise)
    for epoch in range(start, epochs):
        order = np.random.default_rng(epoch).permutation(ROWS)
        for rows in np.split(order, ROWS // BATCH):
            optimizer.step(x[rows], y[rows])
    return optimizer


CLASSES = {"weights": "w(6,16) b(16) w1(16,2) b1(2)", "sides": "n,6 -> n,2", "loss": "categorical"}


def fitted_classes(count, units=1.0, **options):
    """Train an optimizer nine epochs on two classes of rows whose columns have units."""
    engine, (x, y, *_) = engine_of(**CLASSES), table(1.0)
    engine.set_parameters({"w": engine.parameters["w"] / (units * np.ones((6, 1)))})
    optimizer = ke.KfacOptimizer(engine, **options)
    for step in range(18):
        rows = slice(step % 2 * count // 2, (step % 2 + 1) * count // 2)
        optimizer.step(x[rows] * np.ravel(units), (y[rows, 0] > 0).astype(np.int64))
    return optimizer


def precisions(optimizer):
    return optimizer.state().arrays["evidence"]["precisions"]


@pytest.mark.parametrize(("rows", "unlearned"), [(300, False), (2000, False), (300, True)])
@pytest.mark.parametrize(("classes", "count"), [(False, ROWS), (True, 300), (True, 1200)])
def test_precisions_and_dampings_are_fixed_points_of_the_evidence(rows, unlearned, classes, count):
    """The truth: eigenvalues of whole blocks, a root by bisection, and the count of the rows."""
    few = classes and count < 1024
    optimizer = fitted_classes(count) if classes else trained(ke.KfacOptimizer(engine_of()), 3)
    engine, rule = optimizer.engine, optimizer._shrinkage
    basis = optimizer._basis
    uneven = 1.3 if classes else 1.0  # as by unequal weights
    known = basis.evidence._replace(unlearned=unlearned, noise=basis.evidence.noise * uneven)
    found = rule.measured(known, basis.seen, engine.parameters, rows)
    again = 1 - 1 / 9 if classes else 2 / 3  # the part of the rows of all epochs that came again
    noise = basis.evidence.noise if not classes else 1.3
    if few:
        noise *= 1 - basis.evidence.residual**2
    assert ({*found.units} == {1.0}) != classes
    for name, *own in zip(rule.blocks, found.precisions, found.dampings, strict=True):
        (block,) = [b for key, b in engine.collection.fisher_blocks.items() if uses(key)[0] == name]
        fisher, value = block.full_fisher_block().astype(np.float64), engine.parameters[name]
        units = np.ones(len(value) + 1)
        if classes and name == "w":  # of the columns, and of the bias
            units = np.diag(engine.factors[name].input.value).astype(np.float64)
        h = np.linalg.eigvalsh(fisher / np.sqrt(np.outer(*2 * [units.repeat(value.shape[1])])))
        square = (units[:-1] @ value.astype(np.float64) ** 2).sum()
        for number, part, unit in zip(
            own, (again / count, 1 / min(rows, count)), (1, h.mean()), strict=True
        ):
            scale = part * noise / square * (not unlearned or (classes and not few))

            def surplus(a, h=h, scale=scale):
                return scale * (h / (h + a)).sum() - a

            root = brentq(surplus, 1e-12, 1e3, xtol=1e-15) if scale else 0.0
            assert number == pytest.approx(root / unit, rel=0.02)  # 12 passes; float32 averages


def test_noise_damps_each_block_beside_the_given_damping():
    optimizer = trained(ke.KfacOptimizer(engine_of(), statistics_every=1), 2)
    blocks, found = optimizer._shrinkage.blocks, optimizer._basis.evidence.dampings
    assert all(0 < damping < 100 for damping in found)
    for block, of_noise in zip(blocks.values(), found, strict=True):
        damping = optimizer._basis.evidence.residual * of_noise
        assert block.damping == pytest.approx((0.1 + damping) * block.mean_eigenvalue())
        for level, factor in zip(block.factor_dampings(), block.factors, strict=True):
            of_few = factor.shrinkage(BATCH / 4)
            assert (of_few > 0) == (factor.name == "KroneckerMoment(input)")
            multiple = np.sqrt(0.1 + damping) + of_few
            assert level == pytest.approx(multiple * factor.trace() / factor.side)
    given = trained(ke.KfacOptimizer(engine_of(), damping=0.1), 2)
    assert not any(given._basis.evidence.dampings)
    assert given.engine.damping.examples == np.inf


def test_a_skipped_step_keeps_the_damping_of_the_blocks(monkeypatch):
    options = {"statistics_every": 1, "refresh_every": 1, "non_finite": "skip"}
    optimizer = trained(ke.KfacOptimizer(engine_of(), **options), 1)
    (x, y, *_), before = table(1.0), optimizer.engine.damping

    def fail(*_, **__):
        raise ke.errors.NonFiniteError("an update")

    with monkeypatch.context() as patch:
        patch.setattr(type(optimizer._curvature), "update", fail)
        assert optimizer.step(x[:BATCH], y[:BATCH]).skipped
    assert optimizer.engine.damping is before
    optimizer.step(x[:BATCH], y[:BATCH])  # the first step that measures the noise
    assert min(optimizer.engine.damping.more.values()) > 0


@pytest.mark.parametrize("of_weight", [0.0, 1e-12])
def test_weights_of_zero_have_a_finite_damping(of_weight):
    engine = engine_of()
    engine.set_parameters({"w1": np.full((16, 1), of_weight, np.float32)})
    optimizer = ke.KfacOptimizer(engine, momentum=0.85, update_length=1e-6)  # no exact steps
    x, y, *_ = table(1.0)
    for _ in range(12):
        optimizer.step(x[:64], y[:64])
    assert np.isfinite(engine.parameters["w1"]).all()
    assert 0 < max(optimizer._basis.evidence.dampings) <= 100


def test_many_columns_of_one_direction_are_learned_from_few_rows():
    """The held-out error beside that without the damping by noise."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2600, 100)).astype(np.float32)
    y = np.tanh(x @ rng.standard_normal((100, 1)) / 10).astype(np.float32)
    errors = []
    for damping in (None, 0.1):
        engine = engine_of(sides="n,100 -> n,1", weights="w(100,16) b(16) w1(16,1) b1(1)")
        ke.fit(engine, (x[:1600], y[:1600]), epochs=4, batch_size=64, damping=damping)
        errors.append(((engine.predict(x[1600:]) - y[1600:]) ** 2).mean())
    assert errors[0] < 0.85 * errors[1]


def test_noise_is_the_error_relative_to_the_variance_of_the_loss():
    optimizer = trained(ke.KfacOptimizer(engine_of()), 12)
    x, y, *_ = table(1.0)
    error = ((optimizer.engine.predict(x) - y) ** 2).mean()
    variance = 0.5  # of the loss "normal"
    noise = optimizer.state().arrays["evidence"]["numbers"][1]
    assert noise == pytest.approx(error / variance, rel=0.1)  # the last batches, not all rows


def by_search(x, errors):
    """The part of the errors that the mean of the three nearest other rows leaves, row by row."""
    x = x / np.where(x.std(axis=0) > 0, x.std(axis=0), 1)
    differences, total = 0.0, 0.0
    for row, error in zip(x, errors, strict=True):
        others = sorted((sum((row - r) ** 2), i) for i, r in enumerate(x) if (row != r).any())
        if others:
            mean = np.mean([errors[i] for _, i in others[:3]], axis=0)
            differences += ((error - mean) ** 2).sum()
            total += (error**2).sum()
    return differences / total if total else 1.0


RNG = np.random.default_rng(5)
POINTS = RNG.uniform(-1, 1, (60, 2))
WAVES = np.stack([np.sin(3 * POINTS[:, 0]), np.cos(2 * POINTS[:, 1])], axis=1)
NOISES = RNG.standard_normal((60, 2))
# Inputs and errors, and bounds of the part of the errors that is left: 4/3 for noise.
LEFT = {
    "a function": (POINTS, WAVES, (0.0, 0.25)),
    "noise": (POINTS, NOISES, (1.1, 1.6)),
    "a function with noise": (POINTS, WAVES + 0.7 * NOISES, (0.67, 1.1)),
    "columns of other units": (POINTS * [1e-3, 1e5] + [7, 0], WAVES + 0.7 * NOISES, (0.67, 1.1)),
    "a constant column": (np.insert(POINTS, 1, 3.0, axis=1), WAVES + 0.7 * NOISES, (0.67, 1.1)),
    "a constant error": (POINTS, np.ones((60, 1)), (0.0, 1e-12)),
    "no error": (POINTS, np.zeros((60, 1)), (1.0, 1.0)),
    "equal rows": (np.ones((8, 2)), NOISES[:8], (1.0, 1.0)),
    "two rows": (POINTS[:2], np.array([[1.0], [-1.0]]), (4.0, 4.0)),
    "one row": (POINTS[:1], NOISES[:1], (1.0, 1.0)),
}  # fmt: skip


@pytest.mark.parametrize("case", LEFT)
def test_errors_that_neighbours_predict_are_no_noise(case):
    x, errors, (least, most) = LEFT[case]
    found = left_by_neighbours(x.astype(np.float32), errors.astype(np.float32))
    assert found == pytest.approx(by_search(x, errors), rel=1e-4, abs=1e-12)
    assert least <= found <= most


@pytest.mark.parametrize("last", [60, 20])
def test_of_equal_rows_the_last_one_is_compared(last):
    """Several rows of each example, as in the latest 512 rows of a table that has fewer."""
    x, errors = (np.concatenate([*[a] * 7, a[:last]]) for a in (POINTS, NOISES))
    errors[:-60] *= np.random.default_rng(7).standard_normal((len(errors) - 60, 1))
    found = left_by_neighbours(x, errors)
    assert found == pytest.approx(by_search(x[-60:], errors[-60:]))
    assert 1.1 <= found <= 1.6


def test_targets_that_do_not_count_are_not_compared():
    rng = np.random.default_rng(6)
    x = rng.uniform(-1, 1, (300, 1))
    errors = np.concatenate([np.sin(3 * x), rng.standard_normal((300, 1))], axis=1)
    counts = rng.random((300, 1)) < 0.5
    of_rows = left_by_neighbours(x, errors * counts)
    assert of_rows == pytest.approx(left_by_neighbours(x[counts[:, 0]], errors[counts[:, 0]]))
    # Without the second feature, only the first one is left.
    assert left_by_neighbours(x, errors * [1, 0]) == pytest.approx(by_search(x, errors[:, :1]))
    assert left_by_neighbours(x, 0 * errors) == 1
    # Of a feature that one of three neighbours lacks, the mean of the two others counts.
    lacking = np.array([[2.0, 1], [3, 1], [0, 1], [7, 1]])
    of_one = (2 - 5) ** 2 + (3 - 4.5) ** 2 + (7 - 2.5) ** 2
    found = left_by_neighbours(np.array([[0.0], [0.1], [0.2], [0.3]]), lacking)
    assert found == pytest.approx(of_one / (4 + 9 + 49 + 4))


def test_the_latest_512_rows_are_compared():
    rule = ShrinkageByEvidence(columns=1, features=2)
    steps = [RNG.standard_normal((size, 3)) for size in (300, 200, 200, 30, 10)]
    found = rule.start()
    for rows in steps:
        found = found.with_rows(rows)
    latest, large = np.concatenate(steps)[-512:], RNG.standard_normal((900, 3))
    for each in (found, Evidence.restored(found.saved())):
        np.testing.assert_array_equal(np.concatenate(each.rows), latest)
        of_large = each.with_rows(large)  # the rows of one step are more
        np.testing.assert_array_equal(np.concatenate(of_large.rows), large[-512:])
        assert len(of_large.rows) == 1


@pytest.mark.parametrize("noise", [0.1, 3.0])
def test_errors_are_no_noise_while_neighbours_leave_less_than_a_third(noise):
    """Without new rows, what the last rows have shown remains."""
    rule = ShrinkageByEvidence(columns=2, features=2)
    found = rule.start()
    for rows in np.split(np.concatenate([POINTS, WAVES + noise * NOISES], axis=1), 6):
        found = found.with_rows(rows)
    for _ in range(2):
        found = rule.compared(found, 50)
        assert (found.unlearned, found.due) == (noise < 1, 61)
        assert not len(np.concatenate(found.rows))


X = np.insert(RNG.uniform(-1, 1, (30, 1)), [0] * 5, 0.0, axis=1).astype(np.float32)
Y = np.sin(X[:, 5:]) + RNG.standard_normal((30, 1)).astype(np.float32)


def step_of(division, communicator=None):
    """Take steps with a batch in parts, none of them exact; ``division`` has their rows.

    Each target has a weight. The result is the average of the noise.
    """
    engine = engine_of(communicator=communicator)
    optimizer = ke.KfacOptimizer(engine, momentum=0.85, update_length=1e-5)
    for _ in range(9):
        targets = [ke.Weighted(Y[rows], 1.0 + rows % 3) for rows in division]
        optimizer.step([({"input": X[r]}, y) for r, y in zip(division, targets, strict=True)])
    return optimizer.state().arrays["evidence"]["numbers"][1]


ALL = np.arange(30)
DIVISIONS = {
    "parts": lambda: step_of(np.split(ALL, [7, 20])),
    "processes": lambda: run(3, lambda c: step_of([np.split(ALL, [4, 19])[c.rank]], c)),
    "parts of processes": lambda: run(
        2, lambda c: step_of([np.split(p, 2)[c.rank] for p in np.split(ALL, [10])], c)
    ),
}


@pytest.mark.parametrize("case", DIVISIONS)
def test_rows_are_compared_across_parts_and_processes(case, monkeypatch):
    found = []

    def noted(*rows):
        found.append(left_by_neighbours(*rows))
        return found[-1]

    monkeypatch.setattr(evidence, "left_by_neighbours", noted)
    noise = step_of([ALL])
    whole, found[:] = found[:], []
    np.testing.assert_allclose(DIVISIONS[case](), noise, rtol=1e-4)
    ranks = len(found) // len(whole)
    assert sorted(found) == pytest.approx(sorted(whole * ranks), rel=1e-4)
    assert len(whole) > 1
    assert ranks


@pytest.mark.parametrize("case", DIVISIONS)
def test_few_rows_of_a_large_batch_are_copied(case, monkeypatch):
    found = []
    monkeypatch.setattr(kfac, "MOST_COMPARED", 10)
    monkeypatch.setattr(Evidence, "with_rows", lambda known, rows: found.append(rows) or known)
    DIVISIONS[case]()
    for rows in found:  # every third row of the batch
        assert rows.shape == (10, X.shape[1] + 1)
        assert {*map(tuple, rows[:, :-1])} == {*map(tuple, X[::3].astype(np.float64))}
    assert found


@pytest.mark.parametrize(("sides", "shape"), [("n,6 -> m,2", (-1, 2)), ("n,6 -> m", (-1,))])
def test_several_rows_of_an_output_for_each_example_are_compared(
    sides, shape, monkeypatch, tmp_path
):
    """Each row read has the four errors of its own example; a saved state has these rows."""
    found, keep = [], Evidence.with_rows
    nodes = NODES.replace("output = Add(q, b1)", "r = Add(q, b1) output = Reshape(r, shape)")
    weights = f"w(6,16) b(16) w1(16,4) b1(4) shape={','.join(map(str, shape))}"
    x = table(1.0)[0][:1099]
    engine = engine_of(nodes, weights, sides)
    optimizer = ke.KfacOptimizer(engine)
    monkeypatch.setattr(
        Evidence, "with_rows", lambda known, rows: found.append(rows) or keep(known, rows)
    )
    for _ in range(9):
        errors = RNG.standard_normal((len(x), 4)).astype(np.float32)
        before = len(found)
        optimizer.step(x, engine.predict(x) - errors.reshape(shape))
        if len(found) > before:
            of_rows = found[-1][:, 6:] / found[-1][0, 6]
            np.testing.assert_array_equal(found[-1][:, :6], x[::3])
            np.testing.assert_allclose(of_rows, errors[::3] / errors[0, 0], rtol=1e-3, atol=1e-3)
    assert found
    optimizer.save(tmp_path / "state")
    resumed = ke.KfacOptimizer(engine_of(nodes, weights, sides))
    resumed.load(tmp_path / "state")
    rows = [np.concatenate(o._basis.evidence.rows) for o in (resumed, optimizer)]
    np.testing.assert_array_equal(*rows)


def test_weights_do_not_shrink_by_the_evidence_while_many_rows_are_new():
    """One decay at a time: that of the evidence ends when the other one is whole again."""
    optimizer, (x, y, *_) = ke.KfacOptimizer(engine_of()), table(1.0)
    for _ in range(9):
        optimizer.step(x[:60], y[:60])
    rule, basis = optimizer._shrinkage, optimizer._basis
    assert rule.kept_decay(basis.seen, basis.evidence) < 1
    assert min(basis.evidence.precisions) > 0
    optimizer.step(x[60:200], y[60:200])
    basis = optimizer._basis
    assert rule.kept_decay(basis.seen, basis.evidence) == 1
    assert not any((*basis.evidence.precisions, *basis.evidence.dampings))
    assert basis.evidence.residual < 1


def test_a_function_in_shuffled_batches_is_learned():
    """Errors that are not learned were taken for noise, and the weights shrank to nothing."""
    x = np.random.default_rng(2).uniform(-1, 1, (256, 1)).astype(np.float32)
    y = np.sin(9 * x) + abs(x)
    model = models.perceptron((1, 48, 48, 1), "Tanh", 2)
    engine = ke.Engine.from_onnx(model.data, loss="normal", seed=0, threads=1)
    ke.fit(engine, (x, y), batch_size=32, steps=700, seed=2)
    assert ((engine.predict(x) - y) ** 2).mean() < 0.05 * y.var()


RULES = {
    "a table": ({}, {}, True),
    "a weight decay that is given": ({}, {"weight_decay": 0.05}, False),
    "a sum of losses": ({"reduction": "sum"}, {}, False),
    "wide factors": (
        {"sides": "n,1000 -> n,1", "weights": "w(1000,64) b(64) w1(64,1) b1(1)"}, {}, False),
    "rows of a sequence": ({"sides": "n,5,6 -> n,5,1"}, {}, False),
    "a convolution": (
        {"nodes": "d = Unsqueeze(input, axis) c = Conv(d, k) f = Flatten(c) output = MatMul(f, w1)",
         "weights": "axis=1 k(4,1,3) w1(16,1)"}, {}, False),
}  # fmt: skip


@pytest.mark.parametrize("case", RULES)
def test_only_networks_that_read_a_table_shrink_by_the_evidence(case):
    of_engine, of_optimizer, applies = RULES[case]
    optimizer = ke.KfacOptimizer(engine_of(**of_engine), **of_optimizer)
    assert ("evidence" in optimizer.state().arrays) == applies


def test_rows_that_come_for_the_first_time_have_a_quarter_of_the_decay():
    ones = [ke.KfacOptimizer(engine_of(), weight_decay=w) for w in (None, 0.05 / 4)]
    for optimizer in ones:
        trained(optimizer, 1)
    assert not precisions(ones[0]).any()
    assert_arrays_equal(ones[1].engine.parameters, ones[0].engine.parameters)
    for optimizer in ones:
        trained(optimizer, 2, start=1)
    assert precisions(ones[0]).all()
    first, second = (optimizer.engine.parameters["w"] for optimizer in ones)
    assert not np.array_equal(first, second)


@pytest.mark.parametrize("noise", [0.1, 3.0])
def test_noise_shrinks_the_weights_and_little_noise_does_not(noise):
    """The held-out error beside that of a constant decay."""
    errors = []
    for decay in (None, 0.05):
        optimizer = ke.KfacOptimizer(engine_of(), damping=0.1, weight_decay=decay)
        trained(optimizer, 12, noise)
        *_, x, y = table(noise)
        errors.append(((optimizer.engine.predict(x) - y) ** 2).mean())
    assert errors[0] < errors[1]


@pytest.mark.parametrize("options", [{}, CLASSES], ids=["numbers", "classes"])
def test_few_rows_shrink_by_the_evidence_from_the_seventh_epoch_on(options):
    optimizer, (x, y, *_) = ke.KfacOptimizer(engine_of(**options)), table(1.0)
    y, found = (y[:, 0] > 0).astype(np.int64) if options else y, []
    for step in range(18):
        rows = slice(0, 120) if step % 2 else slice(120, 240)
        optimizer.step(x[rows], y[rows])
        found.append(bool(precisions(optimizer).any()))
    assert found == [False] * 13 + [True] * 5


@pytest.mark.parametrize("error", [0.04, 0.12, 0.5])
def test_few_rows_shrink_a_network_less_if_errors_are_small(error):
    """The change of weights with and without a memory of the same rows in the step before."""
    rng, values = np.random.default_rng(3), []
    x = rng.standard_normal((60, COLUMNS)).astype(np.float32)
    noise = rng.standard_normal((60, 1)).astype(np.float32)
    for forgets in (False, True):
        optimizer = ke.KfacOptimizer(engine_of())
        engine, fresh = optimizer.engine, optimizer.state().arrays["examples"]
        optimizer.step(x, np.sin(x[:, :1]))
        earlier = ke.KfacOptimizer(engine_of())
        before, state = engine.parameters["w"].copy(), optimizer.state()
        y = engine.predict(x)
        y += error * y.std() * noise
        earlier.step(x, y)
        examples = fresh if forgets else earlier.state().arrays["examples"]
        optimizer.restore(replace(state, arrays={**state.arrays, "examples": examples}))
        r = np.sqrt(((engine.predict(x) - y) ** 2).sum() / ((y - y.mean()) ** 2).sum())
        rate = optimizer.step(x, y).learning_rate
        values.append(engine.parameters["w"].copy())
    assert rate == pytest.approx(0.03 * min(10 * r, 1), rel=1e-4)
    # 19 and 0.75 by half of the rows; without the memory, the first of them is 0.
    few = 19 * min(10 * r, 1) * min(r**2 / 0.015, 1)
    np.testing.assert_allclose(
        values[1] - values[0], rate * 0.05 * (few + 0.75) * before, rtol=1e-3, atol=1e-7
    )


@pytest.mark.parametrize("error", [0.03, 0.5])
def test_updates_of_short_epochs_are_less_long_if_residuals_are_small(error):
    optimizer, (x, y, *_) = ke.KfacOptimizer(engine_of()), table(3.0)
    for step in range(13):
        rows = slice(0, 300) if step % 2 else slice(300, 600)
        targets = y[rows]
        if step == 12:  # two batches an epoch double the lengths of large residuals
            targets = optimizer.engine.predict(x[rows])
            targets += error * targets.std() * np.sign(y[rows])
            errors = targets - optimizer.engine.predict(x[rows])
        report = optimizer.step(x[rows], targets)
    r = np.sqrt((errors**2).sum() / ((targets - targets.mean()) ** 2).sum())
    small = min(10 * r, 1)
    assert report.learning_rate == pytest.approx(0.03 * small * (1 + small), rel=1e-2)


def added(optimizer, **changes):
    """What the evidence adds to the gradients of the weights."""
    values, basis = optimizer.engine.parameters, optimizer._basis
    terms = {name: np.zeros_like(value) for name, value in values.items()}
    evidence = basis.evidence._replace(**changes)
    assert len(evidence.units) == 6 + 16
    optimizer._shrinkage.add_to(terms, evidence, values)
    return {name: terms[name] for name in ("w", "w1")}


@pytest.mark.parametrize("count", [300, 1200])
def test_classes_shrink_in_the_units_of_columns(count):
    """The same function of columns in other units: the weights have the inverse ones."""
    units = np.array([[1], [1], [20], [1], [1e4], [1]], np.float32)  # none far below the median
    # The weights hardly move, so that both networks remain the same function.
    options = {"update_length": 1e-12, "adam_rate": 1e-12}
    one, other = (fitted_classes(count, u, **options) for u in (1.0, units))
    changes = {"precisions": (0.1, 0.2), "residual": 0.25}
    terms, others = added(one, **changes), added(other, **changes)
    moments = np.array(one._basis.evidence.units[:6])[:, None]
    assert np.ravel(moments) == pytest.approx((table(1.0)[0][:count] ** 2).mean(axis=0), rel=0.3)
    values = one.engine.parameters
    np.testing.assert_allclose(terms["w"], 0.05 * moments * values["w"], rtol=1e-5)
    np.testing.assert_allclose(terms["w1"], 0.1 * values["w1"], rtol=1e-5)
    np.testing.assert_allclose(others["w"], terms["w"] * units, rtol=1e-3)


def of_classes(case):
    """Rows with two classes."""
    rng = np.random.default_rng(3)
    if case == "words":  # 16 different rows
        words = rng.integers(0, 4, (300, 2))
        return np.eye(4)[words].reshape(-1, 8), (words[:, 0] == 0) ^ (words[:, 1] == 2)
    if case == "bits":
        x = rng.integers(0, 2, (150, 9))
        return x, x.sum(axis=1) % 2 == 1  # a neighbour has another class
    x = rng.standard_normal((1200, 10))
    y = x[:, 0] + np.tanh(2 * x[:, 1]) > 0
    if case == "apart":
        x[:, :2] += 4 * y[:, None]
        return x[:, :2], y
    return x, y ^ (rng.random(1200) < 0.15)


@pytest.mark.parametrize(("case", "overlap"), [("noise", True), ("apart", False), ("bits", False)])
def test_classes_overlap_where_neighbours_differ_less_than_by_chance(case, overlap):
    x, y = of_classes(case)
    errors = np.where(np.stack([~y, y], axis=1), -0.2, 0.2)
    assert classes_overlap(x, errors) == overlap
    assert not classes_overlap(x, 0 * errors)  # no target counts
    assert not classes_overlap(x, abs(errors) * [-1, 1])  # one class


@pytest.mark.parametrize(("case", "count", "most"), [("words", 200, 0.01), ("noise", 240, 0.65)])
def test_few_rows_of_classes_are_fitted_and_their_noise_is_not(case, count, most):
    """Held-out losses where steps have all rows; with a constant decay, noise ends at 1.9."""
    x, y = of_classes(case)
    x, y = x.astype(np.float32), y.astype(np.int64)
    model = models.perceptron((x.shape[1], 64, 32, 2), "Relu", 0)
    engine = ke.Engine.from_onnx(model.data, loss="categorical", seed=0, threads=1)
    ke.fit(engine, (x[:count], y[:count]), batch_size=count, steps=300, seed=0)
    assert engine.evaluate((x[count:], y[count:]))["loss"] < most


def test_a_rare_class_with_much_weight_is_not_fitted():
    """3 % of the rows have half of the weight. As 2,000 equal rows, they end at a loss of 1.33."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5000, 10)).astype(np.float32)
    logits = x[:, 0] * x[:, 1] + 1.5 * x[:, 2] - 5
    y = (rng.random(5000) < 1 / (1 + np.exp(-logits))).astype(np.int64)
    loss = ke.Categorical(class_weights=[1.0, float(1 / y.mean() - 1)])
    model = models.perceptron((10, 64, 64, 2), "Relu", 0)
    engine = ke.Engine.from_onnx(model.data, loss=loss, seed=0, threads=1)
    ke.fit(engine, (x[:2000], y[:2000]), batch_size=64, steps=250, seed=0)
    assert engine.evaluate((x[2000:], y[2000:]))["loss"] < 0.65


def cancelled(batches, decay=0.85, runs=2000):
    """How much less noise an average over epochs has than one over independent batches."""
    rng, squares = np.random.default_rng(0), []
    for _ in range(runs):
        noise = rng.standard_normal(batches)
        noise = (noise - noise.mean()) / np.sqrt(1 - 1 / batches)  # an epoch has no noise in all
        steps = np.concatenate([rng.permutation(noise) for _ in range(90 // batches + 2)])
        steps = steps[: len(steps) - rng.integers(batches)][-90:]
        squares.append((steps @ decay ** np.arange(len(steps))[::-1] * (1 - decay)) ** 2)
    return (1 - decay) / (1 + decay) / np.mean(squares)


@pytest.mark.parametrize("batches", [5, 8, 16])
def test_batches_whose_noise_cancels_have_longer_updates(batches):
    """The squares of the lengths grow with the noise that cancels, which a simulation shows."""
    optimizer, size, epochs = ke.KfacOptimizer(engine_of()), 10, 12
    rng = np.random.default_rng(1)
    x = rng.standard_normal((batches * size, COLUMNS)).astype(np.float32)
    y = 5 * rng.standard_normal((len(x), 1)).astype(np.float32)
    for step in range(batches * epochs):
        rows = slice(step % batches * size, (step % batches + 1) * size)
        report = optimizer.step(x[rows], y[rows])
        if step == 0:
            assert report.learning_rate == pytest.approx(0.03)
    again = 1 - 1 / epochs  # the noise of the first epoch does not cancel
    longer = (report.learning_rate / 0.03) ** 2
    assert longer == pytest.approx(1 + again * (cancelled(batches) - 1), rel=0.15)


def test_two_batches_an_epoch_double_the_lengths():
    optimizer, (x, y, *_) = ke.KfacOptimizer(engine_of()), table(3.0)
    for step in range(8):
        rows = slice(0, 300) if step % 2 else slice(300, 600)
        report = optimizer.step(x[rows], y[rows])
    assert report.learning_rate == pytest.approx(0.06)


def test_a_saved_run_continues_with_equal_bits(tmp_path):
    whole = trained(ke.KfacOptimizer(engine_of()), 4)
    trained(ke.KfacOptimizer(engine_of()), 2).save(tmp_path / "state")
    resumed = ke.KfacOptimizer(engine_of())
    resumed.load(tmp_path / "state")
    assert isinstance(resumed._basis.evidence, Evidence)
    trained(resumed, 4, start=2)
    np.testing.assert_array_equal(precisions(resumed), precisions(whole))
    assert_arrays_equal(resumed.engine.parameters, whole.engine.parameters)


@pytest.mark.parametrize(("smoothing", "tells"), [(0.0, True), (0.1, False)])
def test_errors_of_smoothed_targets_do_not_tell_the_classes(smoothing, tells):
    loss = ke.Categorical(label_smoothing=smoothing)
    model = models.perceptron((4, 8, 3), "Relu", 0)
    engine = ke.Engine.from_onnx(model.data, loss=loss, threads=1)
    assert ke.KfacOptimizer(engine)._shrinkage.classes == tells
