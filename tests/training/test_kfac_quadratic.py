"""Learning rate and momentum of the quadratic model, and L2, against dense algebra."""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.bench.training.models import perceptron
from kfac_engine.training.quadratic_update import QuadraticModel
from tests.training import softmax_net as net
from tests.training.kfac_reference import Reference
from tests.training.test_kfac import CLOSE, distance, engine, linear_model, scale_of

STEPS = 40
# Enough that the curvature of a quarter has few small eigenvalues, along which steps are long.
EXAMPLES = 64
LM = ke.DampingAdaptation(interval=3)
BOTH = {"learning_rate": "quadratic", "momentum": "quadratic"}
RATE = {"learning_rate": "quadratic", "momentum": 0.6}
CASES = {
    "both": (BOTH, {"quadratic": "both"}),
    "rate": (RATE, {"quadratic": "rate", "momentum": 0.6}),
    "both, whole batch": (BOTH | {"statistics_part": 1.0}, {"quadratic": "both", "part": 1.0}),
    "both, l2": (
        BOTH | {"l2": 0.02, "damping": 0.05}, {"quadratic": "both", "l2": 0.02, "damping": 0.05}),
    "rate, l2": (
        RATE | {"l2": 0.02, "damping": 0.05},
        {"quadratic": "rate", "momentum": 0.6, "l2": 0.02, "damping": 0.05}),
    "both, adapted damping": (
        BOTH | {"adapt_damping": LM, "l2": 0.01, "damping": 0.1, "statistics_part": 1.0},
        {"quadratic": "both", "interval": 3, "l2": 0.01, "damping": 0.1, "part": 1.0}),
    "rate, adapted damping": (
        # A larger damping than 0.01, whose steps multiply roundings by 1e6 within this run.
        RATE | {"adapt_damping": LM, "damping": 0.05},
        {"quadratic": "rate", "momentum": 0.6, "interval": 3, "damping": 0.05},
    ),
    "both, decay": (
        BOTH | {"adapt_damping": LM, "weight_decay": 0.01},
        {"quadratic": "both", "interval": 3, "decay": 0.01}),
    "auto, l2": ({"l2": 0.003}, {"l2": 0.003}),
    "given rate, l2, adapted damping": (
        {"learning_rate": 0.02, "l2": 0.005, "adapt_damping": LM},
        {"rate": 0.02, "l2": 0.005, "interval": 3}),
    "least damping": (
        {"learning_rate": 0.02, "l2": 0.009, "adapt_damping": ke.DampingAdaptation(3, 0.95, 5e-4)},
        {"rate": 0.02, "l2": 0.009, "interval": 3, "min_damping": 5e-4}),
}  # fmt: skip


@pytest.mark.rounding
@pytest.mark.parametrize("case", CASES)
def test_the_optimizer_follows_the_reference(case):
    options, same = CASES[case]
    optimizer, reference = ke.KfacOptimizer(engine(), **options), Reference(**same)
    for step in range(STEPS):
        x, y = net.batch(step, n=EXAMPLES)
        penalty = 0.5 * reference.l2 * sum((v**2).sum() for v in reference.theta.values())
        loss = net.loss(reference.theta, x, y) + penalty
        report = optimizer.step({"x": x}, y, scale_of(step))
        reference.step(x, y, scale_of(step))
        assert (report.loss, report.penalty) == pytest.approx((loss, penalty), rel=CLOSE)
        assert distance(optimizer.engine.parameters, reference.theta) < CLOSE
        damping, ratio, _ = reference.log[-1]
        assert report.damping == pytest.approx(damping, rel=1e-7)
        assert (report.reduction_ratio is None) == (ratio is None)
        if ratio is not None:
            assert report.reduction_ratio == pytest.approx(ratio, rel=1e-5)
        if reference.solution is not None:
            rate, momentum, change = reference.solution
            assert report.learning_rate == pytest.approx(rate, rel=1e-6)
            assert report.momentum == pytest.approx(momentum, rel=1e-6, abs=1e-12)
            if ratio is not None or not reference.decay:
                assert report.predicted_change == pytest.approx(change, rel=1e-6)
    # With its momentum, the model of some steps rises.
    assert any(reference.uphill) == (reference.quadratic == "rate")


@pytest.mark.parametrize("case", CASES)
def test_each_option_changes_the_run(case):
    same = CASES[case][1]
    for option in [name for name in same if name not in ("rate", "min_damping", "interval")]:
        runs = []
        for options in (same, {name: value for name, value in same.items() if name != option}):
            reference = Reference(**options)
            for step in range(STEPS):
                reference.step(*net.batch(step, n=EXAMPLES), scale_of(step))
            runs.append(reference.theta)
        assert distance(*runs) > 1e-5, option


def test_the_least_damping_contains_l2():
    options, _ = CASES["least damping"]
    optimizer = ke.KfacOptimizer(engine(), **options)
    for step in range(STEPS):
        x, y = net.batch(step)
        optimizer.step({"x": x}, y)
    assert optimizer.damping == pytest.approx(0.0095)


@pytest.mark.parametrize("l2", [0.0, 0.5])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("part", [0.25, 1.0])
def test_one_step_reaches_the_minimum_of_a_linear_regression(l2, reduction, part):
    """With white inputs in each part, the natural gradient points to the minimum.

    The Hessian matrix of the squared error is a multiple of the identity there, and so are its
    Kronecker factors. Without damping beyond ``l2``, the solved length is that of Newton's step.
    """
    rng = np.random.default_rng(0)
    n, d = 24, 3
    whites = [np.linalg.qr(rng.standard_normal((n // 4, d)))[0] * np.sqrt(n // 4) for _ in range(4)]
    # The examples of a part are spread over the batch.
    x, y = np.stack(whites, axis=1).reshape(n, d), rng.standard_normal((n, d))
    built = ke.Engine.from_onnx(
        linear_model(), loss="normal", estimation_mode="exact", threads=1, reduction=reduction
    )
    # The smallest damping beyond l2: relative to curvatures near one, below all roundings.
    optimizer = ke.KfacOptimizer(
        built, "quadratic", l2 + 1e-14, "quadratic", l2=l2, statistics_part=part
    )
    report = optimizer.step({"x": x}, y)
    # Minimum of Σ (xᵀw − y)² weight + ½ l2 ‖w‖², by the normal equations.
    weight = {"mean": 1 / n, "sum": 1.0}[reduction]
    w = np.linalg.solve(2 * weight * x.T @ x + l2 * np.eye(d), 2 * weight * x.T @ y)
    np.testing.assert_allclose(built.parameters["w"], w, rtol=1e-9, atol=1e-12)
    best = weight * ((x @ w - y) ** 2).sum() + 0.5 * l2 * (w**2).sum()
    constant = {"mean": 1, "sum": n}[reduction] * d * 0.5 * np.log(np.pi)  # 2πv with v = ½
    assert report.loss + report.predicted_change == pytest.approx(best + constant, rel=1e-9)


def test_targets_of_any_scale_are_learned_without_a_roll_back():
    """The first steps multiply the weights of several layers, whose product grows faster."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((256, 4)).astype(np.float32)
    y = np.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:3]
    model = perceptron((4, 16, 16, 1), "Relu", 0)
    for scale in (1.0, 1e3, 1e6):
        targets = (scale * y).astype(np.float32)
        built = ke.Engine.from_onnx(model.data, loss="normal", threads=1)
        before = built.parameters
        optimizer = ke.KfacOptimizer(built, statistics_part=1.0, **BOTH)
        for _ in range(60):
            optimizer.step({"x": x}, targets)
            for name, value in built.parameters.items():
                norms = np.linalg.norm(value - before[name]), np.linalg.norm(before[name])
                assert norms[0] < (1 + 1e-3) * max(1.0, norms[1])
            before = built.parameters
        errors = built.predict({"x": x}) - targets
        assert (errors**2).mean() < 0.2 * targets.var()


def test_two_solved_steps_are_the_method_of_conjugate_gradients():
    """The minimum over the gradient and the previous update is the step of this method.

    Three steps solve a quadratic problem of three unknowns.
    """
    rng = np.random.default_rng(1)
    H = np.diag([1.0, 4.0, 9.0])
    target, w, d = rng.standard_normal(3), np.zeros(3), np.zeros(3)
    for step in range(3):
        g = H @ (w - target)
        X = np.stack([g, d], axis=1)[:, : 1 + bool(step)]
        model = QuadraticModel(X.T @ g, X.T @ H @ X, X.T @ X, 0.0, 0.0, 2.2e-16)
        x = model.minimum()
        before = 0.5 * (w - target) @ H @ (w - target)
        d = X @ x
        w = w + d
        assert model.change(x) == pytest.approx(0.5 * (w - target) @ H @ (w - target) - before)
    np.testing.assert_allclose(w, target, atol=1e-12)


def test_directions_that_coincide_share_their_part():
    """Twice the same direction, up to float32 rounding, must not give huge coefficients."""
    noise = 1e-7
    ones = np.array([[1.0, 1.0], [1.0, 1.0 + noise]])
    model = QuadraticModel(np.array([-1.0, -1.0]), ones, 0 * ones, 0.0, 0.0, 1.2e-7)
    np.testing.assert_allclose(model.minimum(), [0.5, 0.5], rtol=1e-5)
    sharp = QuadraticModel(np.array([-1.0, -1.0]), ones, 0 * ones, 0.0, 0.0, 2.2e-16)
    np.testing.assert_allclose(sharp.minimum(), [1.0, 0.0], atol=1e-6)
    still = QuadraticModel(np.array([-2.0, 0.0]), np.diag([4.0, 0.0]), 0 * ones, 0.0, 0.0, 2e-16)
    np.testing.assert_array_equal(still.minimum(), [0.5, 0.0])


def test_a_curvature_that_overflows_is_an_error():
    model = QuadraticModel(np.ones(1), np.full((1, 1), np.inf), np.ones((1, 1)), 0.1, 0.0, 1e-7)
    with pytest.raises(ke.NonFiniteError, match="the quadratic model of the loss overflows"):
        model.minimum()


def test_a_gradient_of_zero_leaves_the_parameters():
    built = ke.Engine.from_onnx(linear_model(), loss="normal", estimation_mode="exact")
    x = np.random.default_rng(0).standard_normal((8, 3))
    optimizer = ke.KfacOptimizer(built, "quadratic", momentum="quadratic")
    before = built.parameters["w"].copy()
    report = optimizer.step({"x": x}, built.trace({"x": x})["y"])
    assert (report.learning_rate, report.momentum, report.predicted_change) == (0, 0, 0)
    np.testing.assert_array_equal(built.parameters["w"], before)


def test_momentum_may_depend_on_the_step():
    optimizer = ke.KfacOptimizer(engine(), 0.02, momentum=lambda step: 0.1 * step)
    reference = Reference(rate=0.02)
    for step in range(8):
        reference.momentum = 0.1 * step
        x, y = net.batch(step)
        report = optimizer.step({"x": x}, y)
        reference.step(x, y)
        assert report.momentum == pytest.approx(0.1 * step)
    assert distance(optimizer.engine.parameters, reference.theta) < CLOSE
    optimizer = ke.KfacOptimizer(engine(), 0.02, momentum=lambda step: 1.0)
    with pytest.raises(ke.InputError, match="the momentum of step 0 must lie in"):
        optimizer.step({"x": x}, y)
