"""The K-FAC optimizer against a re-implementation in float64."""

from itertools import product

import numpy as np
import pytest
from scipy.special import logit, softmax

import kfac_engine as ke
from kfac_engine.curvature.schedule import GrowingPlanner
from kfac_engine.distributed.shards import RowRange
from kfac_engine.training import adaptive_lengths, average_span, kfac, vectors
from kfac_engine.training.curvature_updates import rotating_part
from tests.models import parsed
from tests.training import softmax_net as net
from tests.training.kfac_reference import Reference

# Names of the factors of the net.
FACTORS = ("w1: A", "w1: G", "w2: A", "w2: G")
# Float64; inverses of matrices with condition numbers up to 1e5 multiply rounding errors.
CLOSE = 1e-9
STEPS = 70

LM = ke.DampingAdaptation(interval=3)
# Options of the optimizer, and the same of the reference.
CASES = {
    "auto": ({}, {}),
    "auto, no decay": ({"weight_decay": 0}, {"decay": 0}),
    "auto, decay": ({"weight_decay": 0.3}, {"decay": 0.3}),
    "auto, other constants": (
        {"damping": 0.3, "momentum": 0.5, "update_length": 0.1, "adam_rate": 0.05},
        {"damping": 0.3, "momentum": 0.5, "length": 0.1, "adam_rate": 0.05}),
    "auto, adapted damping": ({"adapt_damping": LM}, {"interval": 3}),
    "rate": ({"learning_rate": 0.02}, {"rate": 0.02}),
    "rate, decay": ({"learning_rate": 0.02, "weight_decay": 0.5}, {"rate": 0.02, "decay": 0.5}),
    "rate, adapted damping": (
        {"learning_rate": 0.02, "adapt_damping": True}, {"rate": 0.02, "interval": 5}),
    "rate, damping adapted both ways": (
        {"learning_rate": 0.05, "adapt_damping": LM}, {"rate": 0.05, "interval": 3}),
    "rate, other periods": (
        {"learning_rate": 0.02, "statistics_every": 3, "statistics_part": 1, "refresh_every": 7},
        {"rate": 0.02, "every": (3, 7), "part": 1.0}),
}  # fmt: skip


# A batch of fewer rows than the sides of the first layer, 10, and more than those of the second, 8.
WIDE = "auto, few rows"
# The averages span more steps for gradients that cancel each other less than by default.
LONG = "auto, long averages"


def engine(**options):
    return net.engine(estimation_mode="exact", **options)


def scale_of(step):
    return 1.0 if step < STEPS // 2 else 0.5


def run(optimizer, steps=range(STEPS)):
    reports = []
    for step in steps:
        x, y = net.batch(step)
        reports.append(optimizer.step({"x": x}, y, scale_of(step)))
    return reports


def distance(left, right):
    return max(np.abs(value - right[name]).max() for name, value in left.items())


@pytest.mark.parametrize("case", [*CASES, WIDE, LONG])
def test_the_optimizer_follows_the_reference(case, monkeypatch):
    """The first weight has sides of 4 and 5, the second one of 3 and 4: a small matrix."""
    sides = {"smallest": 4 if case == WIDE else 3, "small": 4, "rows_of_small": 5}
    monkeypatch.setattr(adaptive_lengths, "_SMALLEST_SIDE", sides["smallest"])
    monkeypatch.setattr(adaptive_lengths, "_SMALL_SIDE", sides["small"])
    monkeypatch.setattr(adaptive_lengths, "_ROWS_OF_SMALL", sides["rows_of_small"])
    options, same = CASES[case if case in CASES else "auto"]
    reference = Reference(**same, **sides)
    if case == WIDE:
        monkeypatch.setattr(adaptive_lengths, "_NARROW", 0)
        reference.narrow = 0
    optimizer = ke.KfacOptimizer(engine(), **options)
    if case == LONG:
        monkeypatch.setattr(average_span, "_CANCELLED", 1.3)
        reference.cancelled = 1.3
        # Averages of one array after another, as for large weights.
        monkeypatch.setattr(kfac, "_SMALL_STATE", 0)
        monkeypatch.setattr(vectors, "_SMALL", 0)
        monkeypatch.setattr(adaptive_lengths, "_PORTION", 1)
    examples = 9 if case == WIDE else net.N
    momenta = set()
    for step in range(STEPS):
        x, y = net.batch(step, n=examples)
        loss, momentum = net.loss(reference.theta, x, y), reference.mu
        report = optimizer.step({"x": x}, y, scale_of(step))
        reference.step(x, y, scale_of(step))
        damping, ratio, refreshed = reference.log[-1]
        assert report.loss == pytest.approx(loss, rel=CLOSE)
        if case in (LONG, "auto"):
            assert report.momentum == pytest.approx(momentum, rel=CLOSE)
            momenta.add(momentum)
        assert report.damping == pytest.approx(damping, rel=1e-7)
        assert (report.reduction_ratio is None) == (ratio is None)
        if ratio is not None:
            assert report.reduction_ratio == pytest.approx(ratio, rel=1e-5)
        assert report.refreshed == (FACTORS if refreshed else ())
        assert distance(optimizer.engine.parameters, reference.theta) < CLOSE
    assert (len(momenta) > 4) == (case == LONG)


@pytest.mark.parametrize("case", [case for case in CASES if case not in ("auto", "rate")])
def test_each_option_changes_the_run(case):
    _, same = CASES[case]
    plain = Reference(rate=same.get("rate"))
    other = Reference(**same)
    for step in range(STEPS):
        plain.step(*net.batch(step), scale_of(step))
        other.step(*net.batch(step), scale_of(step))
    assert distance(plain.theta, other.theta) > 1e-5


def test_the_damping_of_an_adapted_run_moves_both_ways():
    reference = Reference(**CASES["rate, damping adapted both ways"][1])
    for step in range(STEPS):
        reference.step(*net.batch(step), scale_of(step))
    dampings = np.array([damping for damping, _, _ in reference.log])
    assert (np.diff(dampings) < 0).any()
    assert (np.diff(dampings) > 0).any()


def test_updates_are_due_often_at_first():
    planner, steps = GrowingPlanner([], ke.Schedule(covariance_every=10)), []
    for step in range(60):
        due = planner.due(step)
        planner.advance(due)
        if due.statistics:
            steps.append(step)
    assert steps == [0, 1, 2, 3, 5, 9, 17, 27, 37, 47, 57]


def test_parts_of_a_batch_visit_all_examples():
    for count, part in ((12, 0.25), (13, 0.25), (7, 0.3), (5, 1.0), (3, 0.01)):
        seen = set()
        for step in range(2 * count):
            chosen = rotating_part(step, RowRange(0, count, count), part)
            assert len(set(chosen.tolist())) == max(1, round(count * part))
            seen |= set(chosen.tolist())
        assert seen == set(range(count))


def test_part_of_a_small_batch_has_the_least_number_of_examples():
    for count, size in ((1, 1), (2, 2), (4, 2), (5, 2), (16, 4)):
        seen = [
            rotating_part(step, RowRange(0, count, count), 0.25, least=2) for step in range(count)
        ]
        assert {len(chosen) for chosen in seen} == {size}
        assert {example for chosen in seen for example in chosen.tolist()} == set(range(count))


def test_shards_have_their_share_of_the_part_of_a_batch():
    sizes = (7, 1, 12, 13)
    shards = [RowRange.of(sizes, rank) for rank in range(len(sizes))]
    for step, part in product(range(40), (0.25, 0.3, 0.8)):
        whole = rotating_part(step, RowRange(0, 33, 33), part)
        parts = [rows.start + rotating_part(step, rows, part) for rows in shards]
        np.testing.assert_array_equal(np.concatenate(parts), whole)
        assert all(abs(len(p) - n * part) < 1.5 for p, n in zip(parts, sizes, strict=True))


@pytest.mark.parametrize(
    ("change", "predicted", "factor"),
    [
        (-0.8, -1.0, 0.95**5),
        (-0.76, -1.0, 0.95**5),
        (-0.74, -1.0, 1.0),
        (-0.26, -1.0, 1.0),
        (-0.24, -1.0, 0.95**-5),
        (0.5, -1.0, 0.95**-5),
        (-0.1, 1.0, 0.95**5),
        (0.1, 1.0, 0.95**-5),
        (0.8, 1.0, 0.95**5),
        (np.inf, -1.0, 0.95**-5),
        (np.inf, 1.0, 0.95**-5),
        (0.5, 0.0, 1.0),
    ],
)
def test_the_damping_follows_the_reduction_ratio(change, predicted, factor):
    damping, ratio = ke.DampingAdaptation().adapted(0.1, change, predicted)
    assert damping == pytest.approx(0.1 * factor)
    assert np.isnan(ratio) if predicted == 0 else ratio == change / predicted


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.5}], ids=["plain", "decayed"])
def test_the_quadratic_model_is_exact_for_linear_regression(options):
    """The block of a linear layer under squared error is the Hessian matrix of the loss."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 64, 3))
    engine = ke.Engine.from_onnx(linear_model(), loss="normal", estimation_mode="exact", threads=1)
    optimizer = ke.KfacOptimizer(
        engine, 0.5, 1e-10, statistics_every=1, statistics_part=1.0, refresh_every=1,
        adapt_damping=ke.DampingAdaptation(interval=1), **options,
    )  # fmt: skip
    for _ in range(3):
        report = optimizer.step({"x": x}, y)
        # The factors are damped by about √λ = 1e-5, relative to eigenvalues near 1.
        assert report.reduction_ratio == pytest.approx(1, rel=1e-3)


@pytest.mark.parametrize(
    ("sign", "scale"), [(1, 1.0), (1, 0.25), (-1, 1.0)], ids=["far", "far, scaled", "alternating"]
)
def test_lengths_follow_the_agreement_of_gradients_in_closed_form(sign, scale):
    """Far from the minimum the agreement is 1; gradients of alternating sign have −1."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 3))
    y = 1e6 * x @ rng.standard_normal((3, 3))
    engine = ke.Engine.from_onnx(linear_model(), loss="normal", estimation_mode="exact", threads=1)
    optimizer = ke.KfacOptimizer(engine, momentum=0.85, update_length=2.5e-8, weight_decay=0)
    lengths = []
    for step in range(30):
        before, targets = engine.parameters["w"], y * sign**step
        optimizer.step({"x": x}, targets, scale)
        deviations = targets - x @ before, targets - targets.mean(axis=0)
        spread = max(np.sqrt((d**2).mean()) for d in deviations)
        moment = max(engine.collection.fisher_blocks["w"].factors[0].trace() / 3, 1)
        unit = spread / np.sqrt(moment)
        lengths.append(np.linalg.norm(engine.parameters["w"] - before) / unit)
    exponents = sign * scale * 4 * (1 - 0.9 ** np.arange(30))
    expected = np.clip(np.exp(exponents), 0.1, 20) * scale * 2.5e-8 * np.sqrt(3)
    # Updates change gradients by parts of 1e-6, summed over 30 steps.
    np.testing.assert_allclose(lengths, expected, rtol=1e-3)


def test_updates_that_were_far_too_long_together_are_taken_back():
    """The whole rule by hand, for linear regression with updates beyond the minimum.

    The batch has many examples, whose number bounds no update.
    """
    rng = np.random.default_rng(0)
    x = rng.standard_normal((640, 3))
    y = x @ rng.standard_normal((3, 3))
    engine = ke.Engine.from_onnx(linear_model(), loss="normal", estimation_mode="exact", threads=1)
    optimizer = ke.KfacOptimizer(
        engine, damping=0.1, momentum=0.85, update_length=8, weight_decay=0, statistics_part=1
    )  # options of the caller exclude exact steps and shrinkage
    A = x.T @ x / 640
    level = np.maximum(np.diag(A), 0.3 * np.median(np.diag(A)))
    inverse = np.linalg.inv(A + np.sqrt(0.1) * np.diag(level))
    log_k, average, went_back = 0.0, np.zeros((3, 3)), []
    direction, of_direction, moved = (np.zeros((3, 3)) for _ in range(3))
    for _ in range(16):
        before = engine.parameters["w"]
        errors = x @ before - y
        loss, gradient = (errors**2).sum() / 640 + 1.5 * np.log(np.pi), 2 * x.T @ errors / 640
        rise, fall = (gradient * moved).sum(), -(of_direction * moved).sum()
        assert optimizer.step({"x": x}, y).loss == pytest.approx(loss)
        went_back.append(rise > max(loss, 3 * fall))
        if went_back[-1]:  # the gradient counts as zero
            average *= 0.85
            log_k = max(log_k - 1, np.log(0.1))
            expected, moved = -rise / (max(fall, 0) + rise) * moved, 0 * moved
        else:
            slope = (of_direction * direction).sum()
            agreement = np.clip((gradient * direction).sum() / slope, -1, 1) if slope > 0 else 0
            scale = min(1, 10 * np.sqrt((errors**2).sum() / ((y - y.mean(axis=0)) ** 2).sum()))
            log_k = np.clip(0.9 * log_k + 0.4 * scale * agreement, np.log(0.1), np.log(20))
            spread = max(1, *(np.sqrt((d**2).mean()) for d in (errors, y - y.mean(axis=0))))
            length = 8 * np.exp(log_k) * scale * spread * np.sqrt(3 / max(np.trace(A) / 3, 1))
            average = 0.85 * average + 0.15 * gradient
            direction = inverse @ (0.85 * average + 0.15 * gradient)
            of_direction = gradient
            expected = moved = -length * direction / np.linalg.norm(direction)
        np.testing.assert_allclose(engine.parameters["w"] - before, expected, rtol=1e-6, atol=1e-9)
    assert {*went_back} == {False, True}


CORRECTIONS = {
    "large predictions": (50.0, 0.0, 1.0),
    "large predictions of targets far from zero": (50.0, -7.0, 0.1),
    "targets far from zero": (0.5, 9.0, 1.0),
    "the unit of the targets": (0.5, 0.5, 1.0),
}

# Predictions from the outputs z of a layer, their shape, and the number of the layer's outputs.
VIEWS = {
    "the outputs": ("y = Identity (z)", "n,3", 3),
    "squeezed": ("y = Squeeze (z, axis)", "n", 1),
    "rearranged": ("u = Unsqueeze (z, axis) f = Flatten (u) y = Identity (f)", "n,3", 3),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("case", CORRECTIONS)
def test_a_first_step_brings_predictions_to_the_unit_of_their_targets(case, view):
    """Closed form: moments of the errors and of the targets about the means of the features."""
    size, mean, spread = CORRECTIONS[case]
    predictions, shape, count = VIEWS[view]
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 64, 3))
    y = (spread * y + mean * np.array([1.0, 2.0, 0.0]))[:, :count]
    w, b = size * np.eye(3)[:, :count], np.full(count, 0.25)
    nodes = f"linear (double[n,3] x) => (double[{shape}] y) {{ p = MatMul (x, w) z = Add (p, b) "
    nodes += f"axis = Constant <value_ints = [1]> () {predictions} }}"
    engine = ke.Engine.from_onnx(parsed(nodes, {"w": w, "b": b}), loss="normal", threads=1)
    optimizer = ke.KfacOptimizer(engine, weight_decay=0)
    targets = y.reshape([64, 3][: shape.count(",") + 1])
    optimizer.step({"x": x}, targets)
    errors = x @ w + b - y
    deviations = (y - y.mean(axis=0)).std()
    ratio, offset = (errors - errors.mean(axis=0)).std() / deviations, errors.mean(axis=0)
    found = engine.parameters
    if ratio > 2:
        np.testing.assert_allclose(found["w"], w / ratio, rtol=1e-9)
        np.testing.assert_allclose(found["b"], y.mean(axis=0), rtol=1e-9)
    elif np.sqrt((offset**2).mean()) > 2 * deviations:
        np.testing.assert_array_equal(found["w"], w)
        np.testing.assert_allclose(found["b"], b - offset, rtol=1e-9)
    else:  # a usual update
        assert 0 < np.abs(found["b"] - b).max() < 0.01 < np.abs(found["w"] - w).max() < 0.1
    before = engine.parameters
    optimizer.step({"x": x}, targets)
    changes = {name: np.abs(engine.parameters[name] - before[name]).max() for name in before}
    assert all(0 < change < 0.1 for change in changes.values())


# Predictions of layers with weights u and v, which a correction divides, and biases. Of all others,
# it corrects the mean alone.
SUMS = {
    "scaled and centred": (
        "p = MatMul (x, u) o = Add (p, b) s = Mul (o, ten) y = Add (s, c)", True
    ),
    "each feature in its unit": ("p = MatMul (x, u) o = Add (p, b) y = Mul (c, o)", True),
    "two layers": (
        "p = MatMul (x, u) o = Add (p, b) h = Tanh (x) q = MatMul (h, v) r = Add (q, d) "
        "y = Add (o, r)", True,
    ),
    "the mean of two layers": (
        "p = MatMul (x, u) o = Add (p, b) q = MatMul (x, v) s = Sum (o, q) y = Div (s, ten)", True
    ),
    "a difference": ("p = MatMul (x, u) q = MatMul (x, v) r = Add (q, d) y = Sub (p, r)", True),
    "a bias of two layers": (
        "p = MatMul (x, u) h = Tanh (x) q = MatMul (h, v) s = Add (p, q) y = Add (b, s)", True
    ),
    "an input": ("p = MatMul (x, u) o = Add (p, b) y = Add (o, x)", False),
    # A correction of o would change the other addend, too.
    "a layer and a function of it": (
        "p = MatMul (x, u) o = Add (p, b) h = Tanh (o) q = MatMul (h, v) r = Add (q, d) "
        "y = Add (o, r)", False,
    ),
    "a product of layers": (
        "p = MatMul (x, u) q = MatMul (x, v) m = Mul (p, q) y = Add (m, b)", False
    ),
}  # fmt: skip


@pytest.mark.parametrize("mean", [0.0, 40.0])
@pytest.mark.parametrize("size", [0.2, 30.0])
@pytest.mark.parametrize("case", SUMS)
def test_a_first_step_corrects_sums_of_layers(case, size, mean):
    """Closed form, from the predictions and targets; predictions at x = 0 are those of biases."""
    body, is_whole = SUMS[case]
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((2, 64, 3))
    y += mean
    arrays = {"u": rng.standard_normal((3, 3)), "v": rng.standard_normal((3, 3)), "b": np.ones(3),
              "d": -np.ones(3), "c": np.array([4.0, 5.0, 6.0]), "ten": np.array(10.0)}  # fmt: skip
    arrays = {
        n: size * a if n in "uv" else a
        for n, a in arrays.items()
        if f"{n})" in body or f"({n}," in body
    }
    model = parsed(f"sums (double[n,3] x) => (double[n,3] y) {{ {body} }}", arrays)
    trained = [name for name in arrays if name not in ("c", "ten")]
    engine = ke.Engine.from_onnx(model, loss="normal", trainable=trained, threads=1)
    before, of_biases = engine.predict({"x": x}), engine.predict({"x": 0 * x})
    ke.KfacOptimizer(engine, weight_decay=0).step({"x": x}, y)
    found, errors = engine.predict({"x": x}), before - y
    spread = (y - y.mean(axis=0)).std()
    ratio, offset = (errors - errors.mean(axis=0)).std() / spread, errors.mean(axis=0)
    if ratio > 2 and is_whole:
        expected = (before - of_biases) / ratio + y.mean(axis=0)
    elif ratio > 2 or np.sqrt((offset**2).mean()) > 2 * spread:
        expected = before - offset
    else:  # a usual update
        assert 0 < np.abs(found - before).max() < 1
        return
    np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-8)


# Rates of three binary targets, the logits of the rates that a model predicts, whether it has a
# bias, and whether rates are far off.
RATES = {
    "rare targets": ((0.02, 0.1, 0.3), (0.0, 0.0, 0.0), True, True),
    "frequent targets": ((0.98, 0.9, 0.9), (0.0, 1.0, -1.0), True, True),
    "a target that never occurs": ((0.0, 0.3, 0.4), (0.0, 0.0, 0.0), True, True),
    "balanced targets": ((0.5, 0.5, 0.5), (0.0, 0.0, 0.0), True, False),
    "rates that are known": ((0.02, 0.1, 0.3), (-3.9, -2.2, -0.85), True, False),
    "no bias": ((0.02, 0.1, 0.3), (0.0, 0.0, 0.0), False, False),
}


def is_usual_step(found, w, b, *, is_far):
    """Check that a first step leaves the weight or is a usual update; return which it is."""
    if is_far:
        np.testing.assert_array_equal(found["w"], w)
    else:
        assert 0 < np.abs(found["w"] - w).max() < 0.1
        assert np.abs(found.get("b", b) - b).max() < 0.01
    return not is_far


@pytest.mark.parametrize("size", [None, 1.0, 1 / 400])
@pytest.mark.parametrize("case", RATES)
def test_a_first_step_brings_probabilities_to_the_rates_of_their_targets(case, size):
    """The size of weights does not count."""
    rates, logits, has_bias, is_far = RATES[case]
    rng = np.random.default_rng(0)
    x = rng.standard_normal((400, 3))
    y = (rates > rng.permuted(np.tile(np.arange(400) / 400, (3, 1)), axis=1).T).astype(float)
    w, b = 0.1 * np.eye(3), np.array(logits)
    nodes = "z = Add (p, b)" if has_bias else "z = Identity (p)"
    nodes = f"m (double[n,3] x) => (double[n,3] z) {{ p = MatMul (x, w) {nodes} }}"
    model = parsed(nodes, {"w": w} | ({"b": b} if has_bias else {}))
    engine = ke.Engine.from_onnx(model, loss="multi_bernoulli", threads=1)
    weights = np.ones(400) if size is None else size * rng.integers(0, 3, 400)
    before = engine.loss({"x": x}, ke.Weighted(y, weights))
    optimizer = ke.KfacOptimizer(engine, weight_decay=0)
    optimizer.step({"x": x}, y if size is None else ke.Weighted(y, weights))
    found = engine.parameters
    if is_usual_step(found, w, b, is_far=is_far):
        return
    count, share = (weights > 0).sum(), weights / weights.sum()
    of_targets, of_model = (
        (count * (share @ rate) + 0.5) / (count + 1) for rate in (y, 1 / (1 + np.exp(-(x @ w + b))))
    )
    np.testing.assert_allclose(found["b"] - b, logit(of_targets) - logit(of_model), rtol=1e-9)
    assert engine.loss({"x": x}, ke.Weighted(y, weights)) < 0.9 * before


# Mean counts of three features, the logarithms of the rates that a model predicts, and whether they
# are far off.
COUNTS = {
    "rare counts": ((0.02, 0.1, 0.3), (0.0, 0.0, 0.0), True),
    "many counts": ((300.0, 40.0, 5.0), (0.0, 0.0, 0.0), True),
    "a feature without counts": ((0.0, 2.0, 3.0), (0.0, 0.7, 1.1), True),
    "means of about one": ((1.0, 1.1, 0.9), (0.0, 0.0, 0.0), False),
    "rates that are known": ((300.0, 0.1, 2.0), (5.7, -2.3, 0.7), False),
}


@pytest.mark.parametrize("size", [None, 1.0, 1 / 400])
@pytest.mark.parametrize("case", COUNTS)
def test_a_first_step_brings_rates_to_the_mean_counts(case, size):
    """Neither an exposure, which the model adds, nor the size of weights matters."""
    means, logs, is_far = COUNTS[case]
    rng = np.random.default_rng(0)
    x, exposure = rng.standard_normal((400, 3)), rng.uniform(0.5, 2, (400, 1))
    y = rng.poisson(exposure * means).astype(float)
    w, b, offset = 0.1 * np.eye(3), np.array(logs), np.log(exposure)
    nodes = "p = MatMul (x, w) z = Add (p, b) y = Add (z, e)"
    graph = f"m (double[n,3] x, double[n,1] e) => (double[n,3] y) {{ {nodes} }}"
    model, inputs = parsed(graph, {"w": w, "b": b}), {"x": x, "e": offset}
    engine = ke.Engine.from_onnx(model, loss="poisson", threads=1)
    weights = np.ones(400) if size is None else size * rng.integers(0, 3, 400)
    before = engine.loss(inputs, ke.Weighted(y, weights))
    optimizer = ke.KfacOptimizer(engine, weight_decay=0)
    optimizer.step(inputs, y if size is None else ke.Weighted(y, weights))
    found = engine.parameters
    if is_usual_step(found, w, b, is_far=is_far):
        return
    count, share = (weights > 0).sum(), weights / weights.sum()
    counts, rates = (count * (share @ part) + 0.5 for part in (y, np.exp(x @ w + b + offset)))
    np.testing.assert_allclose(found["b"] - b, np.log(counts / rates), rtol=1e-9, atol=1e-12)
    assert engine.loss(inputs, ke.Weighted(y, weights)) < 0.98 * before


# Rates of three classes, logits that a model predicts, and whether rates are far off.
OF_CLASSES = {
    "a rare class": ((0.02, 0.49, 0.49), (0.0, 0.0, 0.0), True),
    "a class that never occurs": ((0.0, 0.5, 0.5), (0.0, 0.0, 0.0), True),
    "balanced classes": ((0.33, 0.33, 0.34), (0.0, 0.0, 0.0), False),
    "balanced classes, other predictions": ((0.33, 0.33, 0.34), (2.0, 0.0, 0.0), False),
    "rates that are known": ((0.02, 0.49, 0.49), (-3.2, 0.0, 0.0), False),
}
# Targets of a loss from the numbers of classes.
AS_TARGETS = {
    "numbers": lambda classes: classes,
    "unsigned numbers": lambda classes: classes.astype(np.uint64),
    "probabilities": lambda classes: 0.9 * np.eye(3)[classes] + 0.1 / 3,
}


@pytest.mark.parametrize("size", [None, 1.0, 1 / 400])
@pytest.mark.parametrize("form", AS_TARGETS)
@pytest.mark.parametrize("case", OF_CLASSES)
def test_a_first_step_brings_probabilities_to_the_rates_of_their_classes(case, form, size):
    rates, logits, is_far = OF_CLASSES[case]
    rng = np.random.default_rng(0)
    x = rng.standard_normal((400, 3))
    y = rng.permutation(np.repeat(np.arange(3), np.rint(400 * np.array(rates)).astype(int)))
    w, b = 0.1 * np.eye(3), np.array(logits)
    nodes = "m (double[n,3] x) => (double[n,3] z) { p = MatMul (x, w) z = Add (p, b) }"
    engine = ke.Engine.from_onnx(parsed(nodes, {"w": w, "b": b}), loss="categorical", threads=1)
    weights = np.ones(400) if size is None else size * rng.integers(0, 3, 400)
    targets = AS_TARGETS[form](y)
    of_rows = np.eye(3)[y] if targets.ndim == 1 else targets
    optimizer = ke.KfacOptimizer(engine, weight_decay=0)
    optimizer.step({"x": x}, targets if size is None else ke.Weighted(targets, weights))
    found = engine.parameters
    if is_usual_step(found, w, b, is_far=is_far):
        return
    count, share = (weights > 0).sum(), weights / weights.sum()
    of_targets, of_model = (
        (count * (share @ rate) + 0.5) / (count + 1.5) for rate in (of_rows, softmax(x @ w + b, 1))
    )
    np.testing.assert_allclose(found["b"] - b, np.log(of_targets / of_model), rtol=1e-9)


# Numbers of classes, and the classes of a first batch.
NO_RATES = {
    "one of three classes": (3, np.ones(400, int)),
    "two of ten classes": (10, np.arange(400) // 200),
    "few rows": (2, np.zeros(32, int)),
}


@pytest.mark.parametrize("case", NO_RATES)
def test_rows_that_are_few_or_sorted_tell_no_rates_of_classes(case):
    classes, y = NO_RATES[case]
    nodes = f"m (double[n,3] x) => (double[n,{classes}] z) {{ p = MatMul (x, w) z = Add (p, b) }}"
    model = parsed(nodes, {"w": 0.1 * np.eye(3, classes), "b": np.zeros(classes)})
    engine = ke.Engine.from_onnx(model, loss="categorical", threads=1)
    x = np.random.default_rng(0).standard_normal((len(y), 3))
    ke.KfacOptimizer(engine, weight_decay=0).step({"x": x}, y)
    assert 0 < np.abs(engine.parameters["b"]).max() < 0.01


# Number of classes and of rows, whether the targets follow the predictions, what logits contain
# besides the layer, and whether they are divided.
LARGE_LOGITS = {
    "two classes": (2, 100, False, "", True),
    "many classes": (40, 100, False, "", True),
    "a head that Adam updates": (80, 100, False, "", True),
    "targets that are predicted": (40, 100, True, "", False),
    "few rows": (40, 63, False, "", False),
    "a function of the logits": (40, 100, False, "t = Tanh (z)", False),
}


@pytest.mark.parametrize("size", [None, 1 / 400])
@pytest.mark.parametrize("case", LARGE_LOGITS)
def test_a_first_step_divides_far_too_large_logits(case, size, monkeypatch):
    """Closed form: the rule applies if the loss minus the predictions' entropy exceeds 2 log C."""
    monkeypatch.setattr("kfac_engine.training.weight_roles._MOST_CLASSES", 50)
    classes, rows, follows, more, divides = LARGE_LOGITS[case]
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((rows, 6)), 9 * rng.standard_normal((6, classes))
    b = rng.standard_normal(classes)
    last = "Add (z, t)" if more else "Identity (z)"
    nodes = f"p = MatMul (x, w) z = Add (p, b) {more} y = {last}"
    graph = f"m (double[n,6] x) => (double[n,{classes}] y) {{ {nodes} }}"
    engine = ke.Engine.from_onnx(parsed(graph, {"w": w, "b": b}), loss="categorical", threads=1)
    p = softmax(engine.predict({"x": x}), 1)
    y = p.argmax(1) if follows else rng.integers(0, classes, rows)
    weights = np.ones(rows) if size is None else size * rng.integers(0, 3, rows)
    targets = y if size is None else ke.Weighted(y, weights)
    ke.KfacOptimizer(engine, weight_decay=0).step({"x": x}, targets)
    found = engine.parameters
    if not divides:
        assert 0 < np.abs(found["w"] - w).max() < 1
        return
    share = weights / weights.sum()
    excess = share @ (np.sum(p * np.log(p), axis=1) - np.log(p[np.arange(rows), y]))
    assert excess > 2 * np.log(classes)
    np.testing.assert_allclose(found["w"], w / (excess * np.sqrt(2 / np.log(classes))), rtol=1e-9)
    np.testing.assert_allclose(found["b"], b * (found["w"] / w)[0, 0], rtol=1e-9)


# Nodes that add a constant d and a bias to the logits, shapes of inputs, weights, biases, d and
# logits, their axis of classes, and whether d is divided, too.
TRAINED_HEADS = {
    "a dense layer": ("p = MatMul (x, w) q = Add (p, b) z = Add (q, d)", "n,6", (6, 5), (5,), -1),
    "a convolution": ("q = Conv (x, w, b) z = Sub (q, d)", "n,6,2,2", (5, 6, 1, 1), (5,), 1),
    "a shift of channels": (
        "p = Conv (x, w) q = Add (p, b) z = Add (q, d)",
        "n,6,2,2",
        (5, 6, 1, 1),
        (5, 1, 1),
        1,
    ),
}


@pytest.mark.parametrize("case", TRAINED_HEADS)
def test_a_first_step_keeps_the_classes_of_a_trained_head(case):
    """The head is right and confident, but 15 % of the labels are wrong: its loss is large."""
    nodes, shape, of_weight, of_bias, axis = TRAINED_HEADS[case]
    rng = np.random.default_rng(0)
    w, b = 40 * rng.standard_normal(of_weight), 200 * rng.standard_normal(of_bias)
    d = 100 * rng.standard_normal(5) if axis == -1 else np.full((), 3.0)
    arrays = {name: array.astype("f4") for name, array in {"w": w, "b": b, "d": d}.items()}
    of_logits = shape.replace("6", "5")
    graph = f"m (float[{shape}] x) => (float[{of_logits}] z) {{ {nodes} }}"
    engine = ke.Engine.from_onnx(
        parsed(graph, arrays), loss="categorical", class_axis=axis, freeze=["d"], threads=1
    )
    x = rng.standard_normal([200, *map(int, shape.split(",")[1:])]).astype("f4")
    classes = engine.predict({"x": x}).argmax(axis)
    y = np.where(rng.random(classes.shape) < 0.15, rng.integers(0, 5, classes.shape), classes)
    ke.KfacOptimizer(engine, weight_decay=0).step({"x": x}, y)
    factor = (engine.parameters["w"] / w).flat[0]
    assert factor < 0.5
    np.testing.assert_allclose(engine.parameters["w"], factor * w, rtol=1e-5)
    if axis == 1:
        np.testing.assert_allclose(engine.parameters["b"], factor * b, rtol=1e-5)
    np.testing.assert_array_equal(engine.predict({"x": x}).argmax(axis), classes)


# Predictions whose features are not those of the layer, and the axis of the classes.
OTHER_FEATURES = {
    "another axis": ("y = Identity (z)", "n,3,3", 1),
    "transposed": ("y = Transpose <perm = [0, 2, 1]> (z)", "n,3,3", -1),
    "reshaped": ("shape = Constant <value_ints = [-1, 9]> () y = Reshape (z, shape)", "n,9", -1),
}


@pytest.mark.parametrize("loss", ["normal", "multi_bernoulli"])
@pytest.mark.parametrize("case", OTHER_FEATURES)
def test_a_first_step_corrects_no_bias_of_other_features(case, loss):
    view, shape, axis = OTHER_FEATURES[case]
    nodes = (
        f"m (double[n,3,3] x) => (double[{shape}] y) {{ p = MatMul (x, w) z = Add (p, b) {view} }}"
    )
    model = parsed(nodes, {"w": 0.1 * np.eye(3), "b": np.zeros(3)})
    engine = ke.Engine.from_onnx(model, loss=loss, class_axis=axis, threads=1)
    x = np.random.default_rng(0).standard_normal((64, 3, 3))
    targets = np.zeros((64, 3, 3)) if loss == "multi_bernoulli" else 9 + 0.1 * x
    targets = targets.reshape([64, *map(int, shape.split(",")[1:])])
    before = engine.loss({"x": x}, targets)
    ke.KfacOptimizer(engine, weight_decay=0).step({"x": x}, targets)
    assert np.abs(engine.parameters["w"] - 0.1 * np.eye(3)).max() > 0
    assert np.abs(engine.parameters["b"]).max() < 0.1
    assert engine.loss({"x": x}, targets) < before


def linear_model():
    weight = np.random.default_rng(1).standard_normal((3, 3))
    return parsed("linear (double[n,3] x) => (double[n,3] y) { y = MatMul (x, w) }", {"w": weight})


def test_an_adapted_damping_has_a_lower_bound():
    assert ke.DampingAdaptation(min_damping=0.099).adapted(0.1, -1, -1)[0] == 0.099


def test_a_failed_load_leaves_the_damping(tmp_path):
    ke.KfacOptimizer(engine(), damping=0.5).save(tmp_path / "state")
    other = ke.Engine.from_onnx(
        net.model(), loss="categorical", approximations={"fully_connected": "diagonal"}
    )
    optimizer = ke.KfacOptimizer(other, damping=0.25)
    with pytest.raises(ke.InputError, match="another model or options"):
        optimizer.load(tmp_path / "state")
    assert (optimizer.damping, other.damping) == (0.25, 0.25)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"interval": 0}, "interval must be a whole number"),
        ({"decay": 1.0}, r"decay must lie in \(0, 1\)"),
        ({"min_damping": 0}, "min_damping must be a positive number"),
    ],
)
def test_a_wrong_constant_of_the_adaptation_is_refused(options, message):
    with pytest.raises(ke.InputError, match=message):
        ke.DampingAdaptation(**options)


def test_statistics_of_a_part_have_the_scale_of_the_batch():
    """Under the reduction "sum" the Fisher matrix grows with the number of examples."""
    x, y = net.batch()
    data = {"x": np.repeat(x[:1], 12, axis=0)}, np.repeat(y[:1], 12)
    for reduction in ("mean", "sum"):
        factors = []
        for part in (0.25, 1.0):
            optimizer = ke.KfacOptimizer(engine(reduction=reduction), statistics_part=part)
            optimizer.step(*data)
            factors.append([f.get_cov_var() for f in optimizer.engine.estimator.factors])
        for quarter, whole in zip(*factors, strict=True):
            np.testing.assert_allclose(quarter, whole, rtol=1e-12)


def weight_norm(engine):
    return np.sqrt(sum((value**2).sum() for value in engine.parameters.values()))


SOLVED = {
    "normal": lambda outputs: outputs + 1e-8,
    "categorical": lambda outputs: outputs.argmax(1),
}


@pytest.mark.parametrize("loss", SOLVED)
def test_a_run_that_starts_at_a_solution_stays_there(loss):
    x, _ = net.batch(n=64)
    engine = ke.Engine.from_onnx(net.model(), loss=loss, threads=1)
    wide = {"w2": 1e3 * engine.parameters["w2"], "b2": np.zeros(net.K)}
    engine.set_parameters(wide if loss == "categorical" else {})
    clear = np.sort(engine.predict({"x": x}))[:, -2:] @ [-1, 1] > 30
    batch = {"x": x if loss == "normal" else x[clear]}
    assert len(batch["x"]) > 30
    y, before = SOLVED[loss](engine.predict(batch)), weight_norm(engine)
    first, optimizer = engine.loss(batch, y), ke.KfacOptimizer(engine)
    for _ in range(100):
        optimizer.step(batch, y)
    assert weight_norm(engine) == pytest.approx(before, rel=0.01)
    assert engine.loss(batch, y) == pytest.approx(first, rel=0.01)


@pytest.mark.parametrize("seed", range(10))
def test_the_first_update_of_a_weight_points_downhill(seed):
    """RowRange of the natural gradient of weights and biases together need not."""
    engine = net.engine(seed=seed)
    x, y = net.batch(seed)
    y = np.arange(len(y)) % net.K  # other rates would be corrected in place of an update
    before, gradients = engine.parameters, engine.gradients({"x": x}, y).gradients
    ke.KfacOptimizer(engine, weight_decay=0).step({"x": x}, y)
    for name in ("w1", "w2"):
        assert (gradients[name] * (engine.parameters[name] - before[name])).sum() < 0


def test_the_scale_of_the_loss_does_not_change_a_run():
    def trained(reduction):
        engine = net.engine(estimation_mode="exact", reduction=reduction)
        run(ke.KfacOptimizer(engine), range(20))
        return engine.parameters

    assert distance(trained("mean"), trained("sum")) < 1e-6


@pytest.mark.parametrize(("scales", "equal"), [((20, 2e4), True), ((0.05, 20), False)])
def test_a_run_of_means_is_in_units_of_the_targets(scales, equal):
    """The unit of the predictions is at least 1, so that other runs are not in proportion."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((64, net.D))
    y = np.sin(x @ rng.standard_normal((net.D, net.K)))
    y /= y.std(axis=0)
    predictions = []
    for scale in scales:
        engine = ke.Engine.from_onnx(net.model(), loss="normal", threads=1, estimation_mode="exact")
        weights = engine.parameters
        engine.set_parameters({name: scale * weights[name] for name in ("w2", "b2")})
        optimizer = ke.KfacOptimizer(engine, momentum=0.85)  # excludes exact steps
        for _ in range(30):
            optimizer.step({"x": x}, scale * y)
        predictions.append(engine.predict({"x": x}) / scale)
    assert (distance_of(*predictions) < 1e-3) == equal


@pytest.mark.parametrize("scale", [1.0, 1e3, 1e6])
def test_targets_of_any_unit_are_learned(scale):
    rng = np.random.default_rng(1)
    x = rng.standard_normal((256, net.D))
    y = scale * np.sin(x @ rng.standard_normal((net.D, net.K)))
    engine = ke.Engine.from_onnx(net.model(), loss="normal", threads=1)
    optimizer = ke.KfacOptimizer(engine)
    for _ in range(300):
        optimizer.step({"x": x}, y)
    errors = engine.predict({"x": x}) - y
    assert (errors**2).mean() < 0.5 * y.var()


def distance_of(one, other):
    return np.linalg.norm(one - other) / np.linalg.norm(one)
