"""The natural gradient in the sample space: against dense matrices, and as an optimizer."""

from itertools import pairwise

import numpy as np
import onnx
import pytest

import kfac_engine as ke
from kfac_engine.engine import sample_space
from kfac_engine.system import memory_limits
from tests import models, oracle
from tests.analysis.fisher_matrix import test_example_gradients as readings
from tests.comparing import assert_arrays_close, assert_arrays_equal
from tests.distributed import threads
from tests.models import parsed
from tests.training.test_exact_steps import linear, linear_data, network

EXAMPLES, DAMPING = 5, 0.3
# The oracle differentiates in float64; a float32 model rounds its rows and its parameters.
CLOSE = {"float64": 1e-8, "float32": 3e-5}
# Sums of other parts, and of ranks after four steps, in float64.
ROUNDING, SUMS = 1e-11, 1e-8


def attention():
    """One head of attention over four positions, with its mean."""
    net = models.Net("float64")
    q, k, v = (net.op("MatMul", "input", net.weight(f"w{name}", 3, 2), to=name) for name in "qkv")
    scores = net.op("MatMul", q, net.op("Transpose", k, to="kt", perm=[0, 2, 1]), to="scores")
    weights = net.op("Softmax", scores, to="weights", axis=-1)
    mixed = net.op("MatMul", weights, v, to="mixed")
    axes = net.constant("axes", np.array([1]))
    net.op("ReduceMean", mixed, axes, to="output", keepdims=0)
    return net.model({"input": ["batch", 4, 3]}, {"output": ["batch", 2]})


def recurrent():
    """A weight that is used three times, one after the other."""
    net = models.Net("float64")
    h, w = "input", net.weight("w", 3, 3)
    for step in range(3):
        h = net.op("Tanh", net.op("MatMul", h, w, to=f"s{step}"), to=f"h{step}")
    net.op("MatMul", h, net.weight("v", 3, 2), to="output")
    return net.model({"input": ["batch", 3]}, {"output": ["batch", 2]})


MODELS = {name: make for name, (make, _) in readings.MODELS.items()}
MODELS |= {"attention": attention, "recurrent": recurrent}


def dense(jacobian, fisher, score, weights):
    """Mean Fisher matrix and gradient, ``(P, P)`` and ``(P,)``, of predictions with weights."""
    total = weights.sum()
    rows, p = jacobian.reshape(-1, *jacobian.shape[-2:]), jacobian.shape[-1]
    F, g, each = np.zeros((p, p)), np.zeros(p), len(rows) // len(weights)
    for row, f, s, w in zip(rows, fisher, score, np.repeat(weights, each), strict=True):
        F += w * row.T @ f @ row
        g += w * row.T @ s
    return F / total / each, g / total / each


def flat(arrays, names):
    return np.concatenate([np.asarray(arrays[name], np.float64).ravel() for name in names])


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weights"])
@pytest.mark.parametrize("loss", ["normal", "categorical"])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_the_damped_natural_gradient(name, loss, weighted):
    model = MODELS[name]()
    inputs = models.random_inputs(model, EXAMPLES)
    engine = ke.Engine.from_onnx(model, loss=loss, threads=1)
    names = [*engine.parameters]
    (z,) = oracle.evaluate(model, inputs, "output")
    rng = np.random.default_rng(3)
    rows = z.reshape(-1, z.shape[-1])
    labels = rng.integers(0, z.shape[-1], z.shape[:-1])
    noise = rng.standard_normal(rows.shape)
    targets = labels if loss == "categorical" else (rows - noise).reshape(z.shape)
    p = readings.softmax(rows)
    one_hot = np.eye(z.shape[-1])[labels.reshape(-1)]
    score = p - one_hot if loss == "categorical" else 2 * noise  # of the variance ½
    fisher = [np.diag(q) - np.outer(q, q) for q in p]
    if loss == "normal":
        fisher = [2 * np.eye(z.shape[-1])] * len(rows)
    weights = np.linspace(0, 2, EXAMPLES) if weighted else np.ones(EXAMPLES)
    F, g = dense(oracle.jacobian(model, inputs, "output", names), fisher, score, weights)
    before = flat(engine.parameters, names)
    expected = before - np.linalg.solve(F + DAMPING * np.eye(len(g)), g)
    optimizer = ke.GaussNewton(engine, damping=DAMPING, momentum=0.0, adapt_damping=False)
    targets = targets.astype(np.int64 if loss == "categorical" else z.dtype)
    float_type = next(iter(engine.parameters.values())).dtype.name
    if loss == "normal":
        targets = targets.astype(float_type)
    report = optimizer.step(inputs, ke.Weighted(targets, weights) if weighted else targets)
    found = flat(engine.parameters, names)
    np.testing.assert_allclose(found, expected, atol=CLOSE[float_type])
    change = found - before
    predicted = g @ change + 0.5 * change @ F @ change
    assert report.predicted_change == pytest.approx(predicted, rel=1e-3)


def jacobian_of(x, W, v):
    """Outputs and their derivatives for ``tanh(x W) v``, by hand."""
    h = np.tanh(x @ W)
    by_w = x[:, :, None] * ((1 - h * h) * v[:, 0])[:, None, :]
    return h @ v, np.concatenate([by_w.reshape(len(x), -1), h], axis=1)


def test_steps_with_momentum_and_l2_are_those_of_the_formula():
    rng = np.random.default_rng(0)
    W, v = rng.standard_normal((2, 3)), rng.standard_normal((3, 1))
    x, y = rng.standard_normal((4, 2)), rng.standard_normal((4, 1))
    text = (
        "n (double[n,2] x) => (double[n,1] y) { s = MatMul (x, W) h = Tanh (s) y = MatMul (h, v)}"
    )
    engine = ke.Engine.from_onnx(parsed(text, {"W": W, "v": v}), loss="normal", threads=1)
    mu, rate, l2 = 0.7, 0.4, 0.05
    optimizer = ke.GaussNewton(engine, rate, DAMPING, mu, l2=l2, adapt_damping=False)
    theta, update = np.concatenate([W.ravel(), v.ravel()]), np.zeros(9)
    for _ in range(5):
        out, rows = jacobian_of(x, theta[:6].reshape(2, 3), theta[6:, None])
        # The loss is the mean of (y − t)², so that F = 2/n Σ r rᵀ.
        F, g = 2 / 4 * rows.T @ rows, 2 / 4 * rows.T @ (out - y)[:, 0]
        near = DAMPING - l2
        update = np.linalg.solve(F + DAMPING * np.eye(9), g + l2 * theta + near * mu * update)
        theta = theta - rate * update
        optimizer.step({"x": x}, y)
    np.testing.assert_allclose(flat(engine.parameters, ["W", "v"]), theta, atol=1e-12)


def two_heads():
    """A shared layer with an output of three classes and an output of two numbers."""
    net = models.Net("float64")
    h = net.op("Tanh", net.op("MatMul", "input", net.weight("w", 3, 4), to="s"), to="h")
    net.op("MatMul", h, net.weight("a", 4, 3), to="classes")
    net.op("MatMul", h, net.weight("b", 4, 2), to="numbers")
    outputs = {"classes": ["batch", 3], "numbers": ["batch", 2]}
    return net.model({"input": ["batch", 3]}, outputs)


def test_several_losses_are_added_with_their_weights():
    model, rng = two_heads(), np.random.default_rng(4)
    inputs = models.random_inputs(model, EXAMPLES)
    losses = {"classes": "categorical", "numbers": ke.Normal(weight=3)}
    engine = ke.Engine.from_onnx(model, loss=losses, threads=1)
    names = [*engine.parameters]
    z, m = oracle.evaluate(model, inputs, "classes", "numbers")
    labels, t = rng.integers(0, 3, EXAMPLES), rng.standard_normal((EXAMPLES, 2))
    p, ones = readings.softmax(z), np.ones(EXAMPLES)
    jacobians = [oracle.jacobian(model, inputs, o, names) for o in ("classes", "numbers")]
    fishers = [np.diag(q) - np.outer(q, q) for q in p], [2 * np.eye(2)] * EXAMPLES
    of_classes = dense(jacobians[0], fishers[0], p - np.eye(3)[labels], ones)
    of_numbers = dense(jacobians[1], fishers[1], 2 * (m - t), ones)
    F, g = (one + 3 * other for one, other in zip(of_classes, of_numbers, strict=True))
    expected = flat(engine.parameters, names) - np.linalg.solve(F + DAMPING * np.eye(len(g)), g)
    optimizer = ke.GaussNewton(engine, damping=DAMPING, momentum=0.0, adapt_damping=False)
    optimizer.step(inputs, {"classes": labels, "numbers": t})
    np.testing.assert_allclose(flat(engine.parameters, names), expected, atol=CLOSE["float64"])


def mixing(rows, count):
    """The matrix S of random rows ``S R``, dense."""
    S = np.zeros((len(rows.matrix), count))
    S[rows.rows, rows.columns] = rows.entries
    return S


@pytest.mark.parametrize("outputs", [1, 2, 3])
def test_random_rows_are_sums_of_rows_with_their_share(outputs):
    """Sums have all rows with signs. For more than two predictions, rows of examples are drawn."""
    x, y = linear_data(800 // outputs, 6, noise=1.0, outputs=outputs)
    engine = ke.Engine.from_onnx(linear(6, outputs), loss="normal", threads=1)
    space = engine.passes.sample_space([({"x": x[:200]}, y[:200]), ({"x": x[200:]}, y[200:])])
    # Rows of different outputs have no parameter in common.
    every = np.sqrt(2 / len(x)) * np.kron(x, np.eye(outputs))
    for most in (space.rows, 100):
        rows = space.sampled(0, most)
        S = mixing(rows, space.rows)
        assert most <= len(S) <= most + 2 * outputs
        expected = S @ every
        np.testing.assert_allclose(rows.gram(), expected @ expected.T, atol=1e-13)
        v, u = np.arange(6.0 * outputs), np.sin(np.arange(len(S)))
        np.testing.assert_allclose(rows.image(v), expected @ v, atol=1e-12)
        np.testing.assert_allclose(rows.combine(u), expected.T @ u, atol=1e-12)
        np.testing.assert_allclose(rows.gathered(every[rows.columns] @ v), expected @ v, atol=1e-12)
    nonzero = (S != 0).sum(axis=0)
    assert set(nonzero) == ({1} if outputs < 3 else {0, 1})
    # Each part of the batch has rows in proportion to its examples.
    share = (S[:, : 200 * outputs] != 0).any(axis=1).mean()
    assert share == pytest.approx(200 * outputs / space.rows, abs=0.03)


@pytest.mark.parametrize("outputs", [1, 2, 3])
def test_random_rows_have_the_fisher_matrix_on_average(outputs):
    x, y = linear_data(300, 6, noise=1.0, outputs=outputs)
    x[:150] *= 0.01
    engine = ke.Engine.from_onnx(linear(6, outputs), loss="normal", threads=1)
    space = engine.passes.sample_space([({"x": x}, y)])
    every = np.sqrt(2 / len(x)) * np.kron(x, np.eye(outputs))
    total = 0.0
    for seed in range(200):
        rows = space.sampled(seed, 60 * outputs)
        R = mixing(rows, len(every)) @ every
        total = total + R.T @ R / 200
    F = every.T @ every
    np.testing.assert_allclose(total, F, atol=0.1 * np.trace(F) / len(F))


# Models with a layer whose gradients take a pass for each example.
PASSES = {"without_layer", "embedding", "grouped", "stacked"}


@pytest.mark.parametrize("loss", ["normal", "categorical"])
@pytest.mark.parametrize("name", MODELS)
def test_products_by_layer_are_those_of_passes(name, loss, monkeypatch):
    monkeypatch.setattr(sample_space, "_MOST_FACTORED", 1000)
    model = MODELS[name]()
    batch = [(models.random_inputs(model, 9), None), (models.random_inputs(model, 6, 1), None)]
    engine = ke.Engine.from_onnx(model, loss=loss, threads=1)
    space = engine.passes.sample_space(batch)
    rows = space.sampled(0, 4)
    assert (space.factored is None) == (name in PASSES)
    if space.factored is not None:
        rng = np.random.default_rng(5)
        v, u = rng.standard_normal(rows.size), rng.standard_normal(space.rows)
        close = 10 * CLOSE[next(iter(engine.parameters.values())).dtype.name]
        image, combined = space.image(space.named(v)), space.combine(u, [*engine.parameters])
        np.testing.assert_allclose(space.factored.image(v), image, atol=close)
        np.testing.assert_allclose(space.factored.combine(u), space.flat(combined), atol=close)
        expected = mixing(rows, space.rows) @ image
        np.testing.assert_allclose(rows.image(v), expected, atol=3 * close)  # sums of three


def test_steps_with_a_sample_of_rows_reach_the_step_with_all(tmp_path):
    x, y = wave(700)
    optimizer = optimizer_of(network([1, 12, 12, 1]), damping=1e-3, momentum=0.5)
    names = [*optimizer.engine.parameters]
    last = np.zeros(len(flat(optimizer.engine.parameters, names)))
    for _ in range(3):
        before = flat(optimizer.engine.parameters, names)
        optimizer.engine.export(tmp_path / "model.onnx")
        model = onnx.load(tmp_path / "model.onnx")
        rows = oracle.jacobian(model, {"x": x}, "y", names).reshape(len(x), -1)
        residual = (oracle.evaluate(model, {"x": x}, "y")[0] - y).ravel()
        F, g = 2 / len(x) * rows.T @ rows, 2 / len(x) * rows.T @ residual
        report = optimizer.step({"x": x}, y)
        damping, centre = report.damping, report.momentum * last
        last = before - flat(optimizer.engine.parameters, names)

        def damped(update, F=F, g=g, damping=damping, centre=centre):
            off = update - centre
            return 0.5 * update @ F @ update - g @ update + 0.5 * damping * off @ off

        best = damped(np.linalg.solve(F + damping * np.eye(len(g)), g + damping * centre))
        # The iterations end where one adds less than a fiftieth to the decrease.
        assert damped(last) - best < 0.05 * (damped(centre) - best)


def wave(n=60):
    x = np.linspace(-1, 1.5, n)[:, None]
    return x, np.sin(4 * x) + x**2


def optimizer_of(model, loss="normal", communicator=None, **options):
    engine = ke.Engine.from_onnx(model, loss=loss, threads=1, communicator=communicator)
    return ke.GaussNewton(engine, **options)


def test_a_function_is_fitted_and_the_loss_never_rises():
    x, y = wave()
    optimizer = optimizer_of(network([1, 16, 1]))
    reports = [optimizer.step({"x": x}, y) for _ in range(60)]
    assert all(b.loss <= a.loss + 1e-15 for a, b in pairwise(reports))
    assert reports[-1].damping < 1e-3
    assert ((optimizer.engine.predict(x) - y) ** 2).mean() < 1e-5


def test_steps_on_squared_errors_reach_the_ridge_solution():
    x, y = linear_data(50, 6, noise=1.0)
    optimizer = optimizer_of(linear(6), l2=0.1)
    for _ in range(20):
        optimizer.step({"x": x}, y)
    # The loss is the mean squared error, a constant and ½ l2 ‖w‖².
    expected = np.linalg.solve(2 / 50 * x.T @ x + 0.1 * np.eye(6), 2 / 50 * x.T @ y)
    np.testing.assert_allclose(optimizer.engine.parameters["w"], expected, atol=1e-8)


def test_parameters_stay_where_no_damping_lowers_the_loss():
    x, y = wave()
    optimizer = optimizer_of(network([1, 4, 1]), learning_rate=1e6)
    before = optimizer.engine.parameters
    report = optimizer.step({"x": x}, y)
    assert_arrays_equal(before, optimizer.engine.parameters)
    assert report.predicted_change == 0
    assert optimizer.damping == pytest.approx(3**8)


def test_parts_of_a_batch_take_the_step_of_the_whole_batch():
    x, y = wave()
    whole, divided = (optimizer_of(network([1, 6, 1])) for _ in range(2))
    for _ in range(4):
        whole.step({"x": x}, y)
        divided.step([({"x": x[:7]}, y[:7]), ({"x": x[7:]}, y[7:])])
    assert_arrays_close(divided.engine.parameters, whole.engine.parameters, rtol=0, atol=1e-9)


def test_fit_trains_with_the_optimizer_by_name():
    x, y = wave()
    history = ke.fit(
        network([1, 16, 1]), (x, y), loss="normal", optimizer="gauss_newton", batch_size=60,
        steps=60, schedule="constant",
    )  # fmt: skip
    assert ((history.engine.predict(x) - y) ** 2).mean() < 1e-5


def coupled():
    """The mean over the examples is added to each of them."""
    text = """n (double[n,2] x) => (double[n,1] y) {
        s = MatMul (x, w)
        m = ReduceMean <keepdims = 1> (s, axes)
        y = Add (s, m)
    }"""
    return parsed(text, {"w": np.ones((2, 1)), "axes": np.array([0])})


def test_examples_that_depend_on_each_other_are_refused():
    x, y = linear_data(10, 2, noise=1.0)
    optimizer = optimizer_of(coupled())
    before = optimizer.engine.parameters["w"].copy()
    with pytest.raises(ke.UnsupportedError, match="depend on each other"):
        optimizer.step({"x": x}, y)
    np.testing.assert_array_equal(optimizer.engine.parameters["w"], before)


def test_training_files_are_refused(tmp_path):
    with pytest.raises(ke.UnsupportedError, match="no Cholesky"):
        ke.export_training(linear(3), "normal", "gauss_newton", path=tmp_path / "t")


def two_sets():
    """A residual of two outputs inside and one at the ends, with points of their own."""
    residuals = {
        "inside": lambda u: u.d("x", "x") + np.sin(3 * u.x) * u.value,
        "ends": lambda u: u.value[:, :1] - 1.0,
    }
    return ke.equation(network([1, 16, 2]), residuals, {"x": ("x",)})


@pytest.mark.parametrize("n", [30, 300], ids=["all rows", "sample of rows"])
def test_the_damping_of_an_equation_has_the_scale_of_the_fisher_matrix(n, tmp_path):
    """The steps minimize the quadratic model with ``λ D``, from a dense matrix."""
    model, losses, (inputs, _), _ = equation(n)
    mu, l2 = 0.7, 0.01
    optimizer = optimizer_of(model, losses, momentum=mu, l2=l2, damping=0.1)
    names, last = [*optimizer.engine.parameters], 0.0
    for step in range(3):
        optimizer.engine.export(tmp_path / "model.onnx")
        stored = onnx.load(tmp_path / "model.onnx")
        R, rho = [], []
        for name, weight in {"inside": 1, "ends": 10}.items():
            rows = oracle.jacobian(stored, inputs, name, names)
            rows = rows.reshape(-1, rows.shape[-1])
            (values,) = oracle.evaluate(stored, inputs, name)
            share = np.sqrt(2 * weight / len(values))  # of the variance ½
            R.append(share * rows)
            rho.append(share * values.reshape(-1))
        R, rho = np.concatenate(R), np.concatenate(rho)
        sample = optimizer.engine.passes.sample_space([(inputs, None)]).sampled(step)
        squares = ((mixing(sample, len(R)) @ R) ** 2).sum(axis=0)
        D = np.maximum(np.sqrt(np.maximum(squares / squares.mean(), 1e-3)), l2 / optimizer.damping)
        assert D.max() > 3 * D.min()
        theta = flat(optimizer.engine.parameters, names)
        report = optimizer.step(inputs)
        damping = report.damping * D
        near = (damping - l2) * report.momentum * last
        right = R.T @ rho + l2 * theta + near
        best = np.linalg.solve(R.T @ R + np.diag(damping), right)
        last = theta - flat(optimizer.engine.parameters, names)

        def decrease(update, R=R, damping=damping, right=right):
            image = R @ update
            return right @ update - 0.5 * image @ image - 0.5 * damping @ update**2

        # Iterations end where one adds less than a fiftieth to the decrease.
        assert decrease(last) > (0.95 if n == 300 else 1 - 1e-9) * decrease(best)
        if n == 30:
            np.testing.assert_allclose(last, best, atol=1e-8)


# A model with its losses, the batch of one process, and the rows of each input by rank.
def function(n):
    x, y = wave(n)
    return network([1, 16, 1]), "normal", ({"x": x}, y), {"x": [0, n // 5, n // 3, n]}


def equation(n):
    inside, ends = np.linspace(-1, 1, n)[:, None], np.linspace(-1, 1, 8)[:, None]
    losses = {"inside": "normal", "ends": ke.Normal(weight=10)}
    rows = {"inside x": [0, n // 2, n - 1, n], "ends x": [0, 1, 5, 8]}
    return two_sets(), losses, ({"inside x": inside, "ends x": ends}, None), rows


# All rows are read, or a sample of them.
BATCHES = {
    "function": lambda: function(40),
    "sample of a function": lambda: function(600),
    "equation": lambda: equation(20),
    "sample of an equation": lambda: equation(400),
}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", BATCHES)
def test_ranks_take_the_steps_of_one_process(name, ranks):
    model, losses, batch, rows = BATCHES[name]()

    def trained(communicator=None):
        (inputs, targets), cuts = batch, {n: [*c[:ranks], c[-1]] for n, c in rows.items()}
        if communicator:
            rank = communicator.rank
            inputs = {n: array[slice(*cuts[n][rank:][:2])] for n, array in inputs.items()}
            targets = targets if targets is None else targets[slice(*cuts["x"][rank:][:2])]
        optimizer = optimizer_of(model, losses, communicator, l2=1e-6)
        reports = [optimizer.step(inputs, targets) for _ in range(4)]
        return reports, optimizer.engine.parameters

    expected, parameters = trained()
    results = threads.run(ranks, trained)
    for reports, of_rank in results:
        for report, wanted in zip(reports, expected, strict=True):
            assert report.damping == wanted.damping
            assert report.loss == pytest.approx(wanted.loss, rel=SUMS)
            assert report.predicted_change == pytest.approx(wanted.predicted_change, rel=SUMS)
        for key, value in parameters.items():
            np.testing.assert_allclose(of_rank[key], value, rtol=0, atol=SUMS)
            np.testing.assert_array_equal(of_rank[key], results[0][1][key])


def test_a_trial_that_overflows_on_one_rank_is_repeated_by_all():
    """The loss at the first tries is infinite on the second rank alone."""
    text = "n (double[n,1] x) => (double[n,1] y) { s = MatMul (x, w) y = Exp (s) }"
    x, y = np.array([[5.0], [1.0], [-1.0], [2.0]]), np.full((4, 1), 900.0)

    def trained(communicator=None):
        rows = slice(None)
        if communicator:
            rows = slice(0, 2) if communicator.rank == 1 else slice(2, 4)
        optimizer = optimizer_of(parsed(text, {"w": np.zeros((1, 1))}), communicator=communicator)
        report = optimizer.step({"x": x[rows]}, y[rows])
        return report.damping, optimizer.engine.parameters["w"]

    damping, w = trained()
    assert damping > 1
    for found, of_rank in threads.run(2, trained):
        assert found == damping
        np.testing.assert_allclose(of_rank, w, rtol=SUMS)


def test_memory_has_the_rows_and_their_products():
    model = network([2, 30, 3])
    newton, kfac = optimizer_of(model), ke.KfacOptimizer(optimizer_of(model).engine)
    more = newton.memory(50, 4).scratch - newton.engine.memory(50, 4, statistics=0.0).scratch
    rows, parameters = 256, 2 * 30 + 30 + 30 * 3 + 3  # of 600 numbers that are predicted
    assert more >= 8 * rows * (2 * rows + parameters)
    assert more < 3 * 8 * rows * (2 * rows + parameters)
    assert kfac.memory(50, 4).scratch < newton.memory(50, 4).scratch


def test_rows_that_do_not_fit_into_the_memory_are_refused(monkeypatch):
    x, y = linear_data(400, 3, noise=1.0)
    optimizer = optimizer_of(linear(3))
    optimizer.step({"x": x[:5]}, y[:5])
    optimizer.engine.gradients({"x": x}, y)
    monkeypatch.setattr(memory_limits, "available_memory", lambda: 1 << 20)
    with pytest.raises(ke.MemoryLimitError, match=r"400 predictions .* smaller batch"):
        optimizer.engine.passes.sample_space([({"x": x}, y)]).sampled(0)
