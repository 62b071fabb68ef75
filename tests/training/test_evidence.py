"""The shrinkage and damping of weights by the evidence, in networks that read a table."""

import numpy as np
import pytest
from scipy.optimize import brentq

import kfac_engine as ke
from kfac_engine.bench.training import models
from kfac_engine.curvature.blocks.base import uses
from kfac_engine.training import kfac
from kfac_engine.training.evidence import Evidence, left_by_neighbours
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


def precisions(optimizer):
    return optimizer.state().arrays["evidence"]["precisions"]


@pytest.mark.parametrize(("rows", "left"), [(300, 1.0), (2000, 0.4), (300, 0.3)])
def test_precisions_and_dampings_are_fixed_points_of_the_evidence(rows, left):
    """The truth: eigenvalues of whole blocks, a root by bisection, and the count of the rows."""
    optimizer = trained(ke.KfacOptimizer(engine_of()), 3)
    engine, rule = optimizer.engine, optimizer._shrinkage
    basis = optimizer._basis
    found = rule.measured(
        basis.evidence, optimizer.steps, basis.seen, engine.parameters, rows, left
    )
    again = (2 / 3) / ROWS  # of the rows of three epochs, two thirds came again
    for name, *own in zip(rule.blocks, found.precisions, found.dampings, strict=True):
        (block,) = [b for key, b in engine.collection.fisher_blocks.items() if uses(key)[0] == name]
        h = np.linalg.eigvalsh(block.full_fisher_block().astype(np.float64))
        square = (engine.parameters[name].astype(np.float64) ** 2).sum()
        for number, part, unit in zip(
            own, (again, 1 / min(rows, ROWS)), (1, h.mean()), strict=True
        ):
            scale = part * basis.evidence.noise / square * (left > 1 / 3)

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
    optimizer, (x, y, *_) = ke.KfacOptimizer(engine, update_length=1e-6), table(1.0)
    for step in range(12):
        optimizer.step(x[:64], y[:64] * (1 + step))
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
    """The part of the errors that those of the nearest other rows leave, one row at a time."""
    x = x / np.where(x.std(axis=0) > 0, x.std(axis=0), 1)
    differences, total = 0.0, 0.0
    for row, error in zip(x, errors, strict=True):
        others = [(sum((row - r) ** 2), i) for i, r in enumerate(x) if (row != r).any()]
        if others:
            differences += ((error - errors[min(others)[1]]) ** 2).sum()
            total += (error**2).sum()
    return differences / total if total else 1.0


RNG = np.random.default_rng(5)
POINTS = RNG.uniform(-1, 1, (60, 2))
WAVES = np.stack([np.sin(3 * POINTS[:, 0]), np.cos(2 * POINTS[:, 1])], axis=1)
NOISES = RNG.standard_normal((60, 2))
# Inputs and errors, and bounds of the part of the errors that is left.
LEFT = {
    "a function": (POINTS, WAVES, (0.0, 0.15)),
    "noise": (POINTS, NOISES, (1.4, 2.6)),
    "a function with noise": (POINTS, WAVES + 0.4 * NOISES, (0.51, 0.9)),
    "columns of other units": (POINTS * [1e-3, 1e5] + [7, 0], WAVES + 0.4 * NOISES, (0.51, 0.9)),
    "a constant column": (np.insert(POINTS, 1, 3.0, axis=1), WAVES + 0.4 * NOISES, (0.51, 0.9)),
    "noise of rows that come twice": (POINTS.repeat(2, 0), NOISES.repeat(2, 0), (1.4, 2.6)),
    "a constant error": (POINTS, np.ones((60, 1)), (0.0, 0.0)),
    "no error": (POINTS, np.zeros((60, 1)), (1.0, 1.0)),
    "equal rows": (np.ones((8, 2)), NOISES[:8], (1.0, 1.0)),
    "one row": (POINTS[:1], NOISES[:1], (1.0, 1.0)),
}


@pytest.mark.parametrize("case", LEFT)
def test_errors_that_neighbours_predict_are_no_noise(case):
    x, errors, (least, most) = LEFT[case]
    found = left_by_neighbours(x.astype(np.float32), errors.astype(np.float32))
    assert found == pytest.approx(by_search(x, errors), rel=1e-4)
    assert least <= found <= most


def test_targets_that_do_not_count_are_not_compared():
    x = RNG.uniform(-1, 1, (300, 1))
    errors = np.concatenate([np.sin(3 * x), RNG.standard_normal((300, 1))], axis=1)
    counts = RNG.random((300, 1)) < 0.5
    of_rows = left_by_neighbours(x, errors * counts)
    assert of_rows == pytest.approx(left_by_neighbours(x[counts[:, 0]], errors[counts[:, 0]]))
    # Without the second feature, only the first one is left.
    assert left_by_neighbours(x, errors * [1, 0]) == pytest.approx(by_search(x, errors[:, :1]))
    assert left_by_neighbours(x, 0 * errors) == 1


def test_at_most_512_rows_are_compared():
    x, errors = RNG.uniform(-1, 1, (1500, 1)), RNG.standard_normal((1500, 1))
    errors[::3] += 2 * np.sin(x[::3])  # each third row is one of 500
    assert left_by_neighbours(x, errors) == pytest.approx(by_search(x[::3], errors[::3]), rel=1e-3)


X = np.insert(RNG.uniform(-1, 1, (30, 1)), [0] * 5, 0.0, axis=1).astype(np.float32)
Y = np.sin(X[:, 5:]) + RNG.standard_normal((30, 1)).astype(np.float32)


def step_of(division, communicator=None):
    """Take steps with a batch in parts, whose targets change; ``division`` has their rows."""
    optimizer = ke.KfacOptimizer(engine_of(communicator=communicator), update_length=1e-5)
    for step in range(9):
        optimizer.step([({"input": X[rows]}, Y[rows] * (1 + step)) for rows in division])


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

    monkeypatch.setattr(kfac, "left_by_neighbours", noted)
    step_of([ALL])
    whole, found[:] = found[:], []
    DIVISIONS[case]()
    ranks = len(found) // len(whole)
    assert sorted(found) == pytest.approx(sorted(whole * ranks), rel=1e-4)
    assert len(whole) > 1
    assert ranks


@pytest.mark.parametrize("case", DIVISIONS)
def test_few_rows_of_a_large_batch_are_copied(case, monkeypatch):
    found = []
    monkeypatch.setattr(kfac, "MOST_COMPARED", 10)
    monkeypatch.setattr(kfac, "left_by_neighbours", lambda x, e: found.append((x, e)) or 1.0)
    DIVISIONS[case]()
    for inputs, errors in found:  # every third row of each part of a process
        assert 10 <= len(inputs) == len(errors) <= 14
        assert {*map(tuple, inputs)} <= {*map(tuple, X.astype(np.float64))}
    assert found


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


def test_few_rows_shrink_by_the_evidence_from_the_seventh_epoch_on():
    optimizer, (x, y, *_) = ke.KfacOptimizer(engine_of()), table(1.0)
    found = []
    for step in range(18):
        rows = slice(0, 30) if step % 2 else slice(30, 60)
        optimizer.step(x[rows], y[rows])
        found.append(bool(precisions(optimizer).any()))
    assert found == [False] * 13 + [True] * 5


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
