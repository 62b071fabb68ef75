"""Targets with weights: losses, gradients, curvature and metrics of an engine.

An example with the weight k counts as k examples: whatever a model or an approximation is, a batch
with whole weights gives the results of the batch with repeated examples.
"""

import numpy as np
import pytest
from onnx import numpy_helper, parser

import kfac_engine as ke
from tests import models, oracle
from tests.comparing import assert_arrays_close, assert_arrays_equal
from tests.distributed.threads import run

WEIGHTS = np.array([2, 1, 0, 3, 1])
REPEATED = np.repeat(np.arange(5), WEIGHTS)
MODES = ["gradients", "empirical", "exact", "curvature_prop"]


def engine(model, **options):
    return ke.Engine.from_onnx(
        model, **{"loss": "categorical", "threads": 1, "damping": 0.1} | options
    )


def targets_of(model, inputs, **options):
    z = engine(model, **options).trace(inputs)["output"]
    return np.random.default_rng(1).integers(0, z.shape[-1], z.shape[:-1])


def rows(inputs, chosen):
    return {name: array[chosen] for name, array in inputs.items()}


def dense_fisher(w, jac, z, loss="categorical"):
    """``Σ w Jᵀ F J``, divided by the number of examples."""
    blocks = (
        w[at] * jac[at].T @ oracle.predictive_fisher(loss, z[at]) @ jac[at]
        for at in np.ndindex(w.shape)
    )
    return sum(blocks) / len(w)


def assert_same(one, two, engines, atol=3e-5):
    assert one.loss == pytest.approx(two.loss, rel=1e-5)
    for results in ("gradients", "natural_gradients"):
        for name, array in getattr(two, results).items():
            found, scale = getattr(one, results)[name], abs(array).max()
            np.testing.assert_allclose(found / scale, array / scale, rtol=0, atol=10 * atol)
    for factor, other in zip(*(e.estimator.factors for e in engines), strict=True):
        scale = abs(other.cov).max()
        np.testing.assert_allclose(factor.cov / scale, other.cov / scale, rtol=0, atol=atol)


MODELS = ("mlp", "token_mlp", "cnn", "layer_norm", "tied", "embedding", "tied_table")
CASES = {
    **{name: (name, {}) for name in MODELS},
    "conv diagonal": ("cnn", {"conv2d": "diagonal"}),
    "conv reduce": ("cnn", {"conv2d": "kron_reduce"}),
    "conv ekfac": ("cnn", {"conv2d": "ekfac"}),
    "dense ekfac": ("mlp", {"fully_connected": "ekfac"}),
    "dense diagonal": ("mlp", {"fully_connected": "diagonal"}),
}


@pytest.mark.parametrize("mode", ["empirical", "exact"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_whole_weights_repeat_examples(case, mode):
    name, approximations = case
    model = models.MODELS[name]()
    inputs = models.random_inputs(model, batch=5)
    targets = targets_of(model, inputs)
    options = {"estimation_mode": mode, "approximations": approximations}
    one, two = engine(model, **options), engine(model, **options)
    weighted = one.step(inputs, ke.Weighted(targets, WEIGHTS))
    repeated = two.step(rows(inputs, REPEATED), targets[REPEATED])
    assert_same(weighted, repeated, (one, two))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reduction", ["mean", "batch_mean", "sum"])
def test_garbage_under_a_mask_changes_no_bit(mode, reduction):
    model = models.token_mlp()
    inputs = models.random_inputs(model, batch=5)
    targets = targets_of(model, inputs)
    mask = np.ones((5, 4), bool)
    mask[1, 2:] = mask[3] = False
    results, averages = [], []
    for garbage, ignored in ((0, -100), (1e6, -100), (1e6, 2**40)):
        x = np.where(mask[..., None], inputs["input"], np.float32(garbage))
        y = np.where(mask, targets, ignored)
        tested = engine(model, estimation_mode=mode, reduction=reduction)
        results.append(tested.step({"input": x}, y if ignored == -100 else ke.Weighted(y, mask)))
        averages.append([factor.cov for factor in tested.estimator.factors])
    for result, average in zip(results[1:], averages[1:], strict=True):
        assert result.loss == results[0].loss
        assert_arrays_equal(result.natural_gradients, results[0].natural_gradients)
        for found, expected in zip(average, averages[0], strict=True):
            np.testing.assert_array_equal(found, expected)
    x = np.column_stack([inputs["input"][mask], np.ones(mask.sum())])
    np.testing.assert_allclose(averages[0][0], x.T @ x / len(x), atol=1e-6)


TEXTS = {
    "examples first": ("N,4,3 -> N,4,2", (0, 1, 2)),
    "time first": ("4,N,3 -> 4,N,2", (1, 0, 2)),
}


@pytest.mark.parametrize("case", TEXTS.values(), ids=TEXTS)
def test_weights_reach_the_rows_of_their_examples_in_both_orders(case):
    """A dense layer reads the tokens of all examples as rows of one matrix."""
    sides, axes = case
    nodes = """h = Tanh(input)  rows = Reshape(h, flat)  g = Gemm(rows, W)  s = Shape <end = 2>(h)
        shape = Concat <axis = 0>(s, end)  output = Reshape(g, shape)"""
    model = models.written(sides, "W(3,2) flat=-1,3 end=2", nodes, "double")
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((5, 4, 3)), rng.integers(0, 2, (5, 4))
    w = np.broadcast_to(WEIGHTS[:, None], y.shape)
    tested = engine(model, estimation_mode="empirical", batch_axes={"input": axes[0]})
    inputs, targets = x.transpose(axes), ke.Weighted(y.transpose(axes[:2]), w.transpose(axes[:2]))
    tested.step({"input": inputs}, targets)
    rows = np.tanh(x).reshape(-1, 3)
    expected = (rows * w.reshape(-1, 1)).T @ rows / w.sum()
    np.testing.assert_allclose(tested.estimator.factors[0].cov, expected, rtol=0, atol=1e-14)


def attention(dtype="float64"):
    """Two heads of nothing but a softmax over the tokens: each token reads the earlier ones."""
    model = parser.parse_model("""<ir_version: 8, opset_import: ["": 18]>
        g (double[N,T,4] x, double[T,T] causal) => (double[N,T,3] y) {
            q = MatMul(x, Q)  k = MatMul(x, K)  v = MatMul(x, V)
            kt = Transpose<perm=[0,2,1]>(k)
            s = MatMul(q, kt)  m = Add(s, causal)  p = Softmax<axis=-1>(m)
            o = MatMul(p, v)  y = MatMul(o, W) }""")
    rng = np.random.default_rng(3)
    for name, shape in {"Q": (4, 4), "K": (4, 4), "V": (4, 4), "W": (4, 3)}.items():
        array = rng.standard_normal(shape).astype(dtype) / 2
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model


def test_an_attention_leaves_out_the_tokens_that_no_prediction_reads():
    model, rng = attention(), np.random.default_rng(0)
    x, y = rng.standard_normal((3, 5, 4)), rng.integers(0, 3, (3, 5))
    causal = np.triu(np.full((5, 5), -np.inf), 1).clip(-1e9)
    mask = np.ones((3, 5), bool)
    mask[0, 3:] = False  # padding behind the text: read by padding only
    mask[1, :2] = False  # the question before an answer: read by the answer
    tested = engine(
        model, estimation_mode="exact", sample_inputs={"x": x, "causal": causal},
        batch_axes={"x": 0},
    )  # fmt: skip
    tested.step({"x": x, "causal": causal}, ke.Weighted(y, mask))
    read = mask.copy()
    read[1, :2] = True
    outputs = tested.trace({"x": x, "causal": causal})["o"]
    expected = [x[read], outputs[mask]]
    found = [factor.cov for factor in tested.estimator.factors if factor.cov.shape == (4, 4)]
    for rows_read in expected:
        moment = rows_read.T @ rows_read / len(rows_read)
        assert any(np.allclose(A, moment, atol=1e-12) for A in found)


@pytest.mark.parametrize("loss", ["categorical", "normal", "multi_bernoulli"])
def test_the_fisher_matrix_is_the_weighted_sum_of_those_of_the_predictions(loss):
    model = models.token_mlp(dtype="float64")
    inputs, rng = models.random_inputs(model, batch=3), np.random.default_rng(0)
    z = engine(model).trace(inputs)["output"]
    w = rng.random(z.shape[:2]) * (rng.random(z.shape[:2]) > 0.3)
    targets = rng.integers(0, 2, z.shape[:2] if loss == "categorical" else z.shape)
    tested = engine(model, loss=loss)
    names = list(tested.parameters)
    jac = oracle.jacobian(model, inputs, "output", names)
    F = dense_fisher(w, jac, z, loss) * len(w) / w.sum()
    trace = tested.trace(inputs, ke.Weighted(targets, w))
    products = tested.curvature_products(trace)
    vector = {name: rng.standard_normal(array.shape) for name, array in tested.parameters.items()}
    flat = np.concatenate([array.ravel() for array in vector.values()])
    found = products.multiply_fisher(vector)
    np.testing.assert_allclose(
        np.concatenate([found[name].ravel() for name in names]), F @ flat, atol=1e-9
    )
    assert products.quadratic_forms(vector)[0, 0] == pytest.approx(flat @ F @ flat)


@pytest.mark.parametrize("mode", [*MODES, "exact_GGN", "curvature_prop_GGN"])
def test_a_weight_enters_the_block_once_in_every_mode(mode):
    model = models.linear(dtype="float64")
    inputs = models.random_inputs(model, batch=4)
    targets = targets_of(model, inputs)
    options = {"estimation_mode": mode, "reduction": "batch_mean", "seed": 1}
    one, two = engine(model, **options), engine(model, **options)
    one.observe(inputs, targets)
    two.observe(inputs, ke.Weighted(targets, np.full(4, 0.3)))
    (A, B), (G, H) = zip(*([f.cov for f in e.estimator.factors] for e in (one, two)), strict=True)
    np.testing.assert_allclose(B, A, rtol=1e-12)
    np.testing.assert_allclose(H, 0.3 * G, rtol=1e-12)


@pytest.mark.parametrize("distribution", ["replicate", "shard"])
@pytest.mark.parametrize("mode", ["gradients", "exact"])
@pytest.mark.parametrize("name", ["token_mlp", "cnn"])
def test_ranks_with_different_counts_equal_one_process(name, mode, distribution):
    model = models.MODELS[name]()
    inputs, rng = models.random_inputs(model, batch=7), np.random.default_rng(0)
    targets = targets_of(model, inputs)
    weights = rng.random(targets.shape) * (rng.random(targets.shape) > 0.4)
    weights[:2] = 0  # the first rank has nothing that counts
    options = {"estimation_mode": mode, "schedule": ke.Schedule(refresh_every=1)}
    alone = engine(model, **options)
    expected = alone.step(inputs, ke.Weighted(targets, weights))
    cuts = [0, 2, 4, 7]

    def work(communicator):
        part = slice(*cuts[communicator.rank :][:2])
        ranks = engine(model, communicator=communicator, distribution=distribution, **options)
        batch = rows(inputs, part), ke.Weighted(targets[part], weights[part])
        result = ranks.step(*batch, gradients="all")
        ranks.synchronize()
        return result, [factor.cov for factor in ranks.estimator.factors]

    for result, averages in run(3, work):
        assert result.loss == pytest.approx(expected.loss, rel=1e-5)
        for key, array in expected.natural_gradients.items():
            scale = abs(array).max()
            np.testing.assert_allclose(
                result.natural_gradients[key] / scale, array / scale, rtol=0, atol=1e-4
            )
        for average, factor in zip(averages, alone.estimator.factors, strict=True):
            np.testing.assert_allclose(
                average, factor.cov, rtol=0, atol=3e-5 * abs(factor.cov).max()
            )


def test_metrics_count_what_counts():
    model = models.token_mlp()
    inputs = models.random_inputs(model, batch=5)
    targets = targets_of(model, inputs)
    mask = np.random.default_rng(0).random((5, 4)) > 0.4
    tested = engine(model)
    z = tested.predict(inputs).astype(np.float64)
    hits = (z.argmax(-1) == targets)[mask]
    log_p = z - np.log(np.exp(z).sum(-1, keepdims=True))
    nats = -np.take_along_axis(log_p, targets[..., None], -1)[..., 0]
    expected = {"loss": nats[mask].mean(), "accuracy": hits.mean()}
    ignored = np.where(mask, targets, -100)
    forms = {
        "mask": (inputs, targets, mask),
        "ignored": (inputs, ignored),
        "batches": [
            (rows(inputs, slice(0, 2)), targets[:2], mask[:2]),
            (rows(inputs, slice(2, 5)), targets[2:], mask[2:]),
        ],
        "names": inputs | {"targets": targets, "weights": mask},
    }
    for data in forms.values():
        assert tested.evaluate(data) == pytest.approx(expected, rel=1e-5)
    assert tested.evaluate((inputs, targets)) != pytest.approx(expected, rel=1e-3)


def of_tokens(outputs, targets):
    return (outputs.argmax(-1) == targets).astype(float)


def of_texts(outputs, targets):
    return abs(outputs).max(axis=(1, 2))


def share_of_hits(outputs, targets, weights):
    hits = (outputs.argmax(-1) == targets) * weights
    return hits.sum(axis=1) / weights.sum(axis=1).clip(1e-9)


def of_logits(outputs, targets):
    return outputs


def test_functions_as_metrics_are_weighted_means():
    model = models.token_mlp()
    inputs, rng = models.random_inputs(model, batch=5), np.random.default_rng(0)
    targets = targets_of(model, inputs)
    weights = rng.random((5, 4)) * (rng.random((5, 4)) > 0.4)
    weights[3] = 0
    tested = engine(model)
    z = tested.predict(inputs)
    hits, largest = (z.argmax(-1) == targets), abs(z).max(axis=(1, 2))
    texts = np.array([w[w > 0].mean() if w.any() else 0 for w in weights])
    shares = (hits * weights).sum(1) / weights.sum(1).clip(1e-9)
    expected = {
        "of_tokens": (hits * weights).sum() / weights.sum(),
        "of_texts": (largest * texts).sum() / texts.sum(),
        "share_of_hits": (shares * texts).sum() / texts.sum(),
    }
    functions = [of_tokens, of_texts, share_of_hits]
    batches = [
        (rows(inputs, s), targets[s], weights[s]) for s in (slice(0, 1), slice(1, 4), slice(4, 5))
    ]
    for data in ((inputs, targets, weights), batches):
        assert tested.evaluate(data, functions) == pytest.approx(expected, rel=1e-5)
    assert tested.evaluate((inputs, targets, weights > 0), ["accuracy"])["accuracy"] == (
        pytest.approx(tested.evaluate((inputs, targets, weights > 0), [of_tokens])["of_tokens"])
    )
    plain = tested.evaluate((inputs, targets), functions)
    assert plain == pytest.approx(
        {"of_tokens": hits.mean(), "of_texts": largest.mean(), "share_of_hits": hits.mean()}
    )
    with pytest.raises(ke.UnsupportedError, match=r"of_logits.*whose values have no weights"):
        tested.evaluate((inputs, targets, weights), [of_logits])


def test_functions_as_metrics_have_the_weights_of_examples_and_of_entries():
    model = models.mlp()
    inputs, rng = models.random_inputs(model, batch=5), np.random.default_rng(0)
    t, seen = rng.standard_normal((5, 3)), []

    def errors(outputs, targets, weights):
        seen.append(np.asarray(weights))
        return (outputs - targets) ** 2

    def error(outputs, targets):
        return ((outputs - targets) ** 2).sum(axis=1)

    tested = engine(model, loss="normal")
    z, w = tested.predict(inputs), rng.random((5, 3))
    found = tested.evaluate((inputs, t, w), [errors, "mean_squared_error"])
    expected = (w * (z - t) ** 2).sum() / w.sum()
    assert found == pytest.approx({"errors": expected, "mean_squared_error": expected}, rel=1e-5)
    np.testing.assert_array_equal(seen[0], w)
    found = tested.evaluate((inputs, t, w[:, 0]), [error])["error"]
    squares = ((z - t) ** 2).sum(axis=1)
    assert found == pytest.approx((w[:, 0] * squares).sum() / w[:, 0].sum(), rel=1e-5)


BAD = {
    "another shape": (np.ones((5, 3)), ke.ShapeError, "weights of 'output' have shape"),
    "negative": (np.full(5, -1.0), ke.InputError, "finite and not negative"),
    "not finite": (np.full(5, np.nan), ke.InputError, "finite and not negative"),
    "infinite": (np.full(5, np.inf), ke.InputError, "finite and not negative"),
    "texts": (np.full(5, "a"), ke.InputError, "Booleans or numbers"),
    "nothing": (np.zeros(5), ke.NonFiniteError, "no target of the loss on 'output' counts"),
}


@pytest.mark.parametrize("call", ["step", "gradients", "observe", "loss"])
@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_bad_weights_are_one_clear_error(case, call):
    weights, error, message = case
    model = models.mlp()
    inputs = models.random_inputs(model, batch=5)
    tested = engine(model)
    with pytest.raises(error, match=message):
        getattr(tested, call)(inputs, ke.Weighted(targets_of(model, inputs), weights))
    assert tested.counter == 0


def test_an_optimizer_skips_a_batch_in_which_nothing_counts():
    model = models.mlp()
    inputs = models.random_inputs(model, batch=5)
    nothing = np.full(5, -100)
    for kind in (ke.Adam, ke.KfacOptimizer):
        with pytest.raises(ke.NonFiniteError, match="counts"):
            kind(engine(model)).step(inputs, nothing)
        tested = kind(engine(model), non_finite="skip")
        before = {name: array.copy() for name, array in tested.engine.parameters.items()}
        assert tested.step(inputs, nothing).skipped
        assert_arrays_equal(before, tested.engine.parameters)


def test_fit_takes_weights_in_files_and_shuffles_them_with_the_targets(tmp_path):
    model = models.mlp()
    inputs = models.random_inputs(model, batch=40)
    targets, weights = targets_of(model, inputs), np.random.default_rng(0).random(40)
    np.savez(tmp_path / "data.npz", **inputs, targets=targets, weights=weights)
    results = []
    for data in ((inputs, targets, weights), tmp_path / "data.npz", (inputs, targets)):
        tested = engine(model)
        ke.fit(tested, data, optimizer="adam", batch_size=8, epochs=2, progress=False)
        results.append(tested.parameters["fc0.weight"])
    np.testing.assert_array_equal(results[0], results[1])
    assert abs(results[0] - results[2]).max() > 1e-4


def test_an_approximation_of_pixels_refuses_weights():
    model = models.cnn()
    inputs = models.random_inputs(model, batch=5)
    tested = engine(model, approximations={"conv2d": "kron_sua"})
    with pytest.raises(ke.UnsupportedError, match="kron_sua"):
        tested.step(inputs, ke.Weighted(targets_of(model, inputs), WEIGHTS))


def test_statistics_of_a_part_in_which_nothing_counts_stay():
    model = models.mlp()
    inputs = models.random_inputs(model, batch=6)
    targets = targets_of(model, inputs)
    tested = engine(model)
    tested.step(inputs, targets)
    before = [factor.cov for factor in tested.estimator.factors]
    trace = tested.trace(rows(inputs, slice(0, 2)), np.full(2, -100))
    tested.update_statistics(trace, 6)
    for factor, average in zip(tested.estimator.factors, before, strict=True):
        np.testing.assert_array_equal(factor.cov, average)
    with pytest.raises(ke.NonFiniteError, match="counts"):
        tested.update_statistics(trace)


RULES = {
    "auto": lambda e, part: ke.KfacOptimizer(e, statistics_part=part),
    "quadratic": lambda e, part: ke.KfacOptimizer(
        e, "quadratic", 1.0, "quadratic", statistics_part=part
    ),
}


@pytest.mark.parametrize("kept", [0, 5, 7])
@pytest.mark.parametrize("part", [0.125, 0.25, 0.3])
@pytest.mark.parametrize("rule", RULES)
def test_statistics_are_those_of_the_next_part_in_which_something_counts(rule, part, kept):
    model = models.mlp()
    inputs = models.random_inputs(model, batch=8)
    targets = np.full(8, -100)
    targets[kept] = 1
    tested = engine(model)
    report = RULES[rule](tested, part).step(inputs, targets)
    assert np.isfinite(report.loss)
    x = np.append(inputs["input"][kept], 1)
    np.testing.assert_allclose(tested.estimator.factors[0].cov, np.outer(x, x), atol=1e-5)


def test_losses_that_count_in_no_common_part_have_the_statistics_of_the_whole_batch():
    model = models.two_outputs()
    inputs = models.random_inputs(model, batch=8)
    tested = ke.Engine.from_onnx(
        model, loss=["categorical", "normal"], output=["logits", "mean"], threads=1
    )
    shape = tested.trace(inputs)["mean"].shape
    counts = {"logits": np.arange(8) == 1, "mean": np.arange(8) == 6}
    targets = {"logits": np.zeros(8, int), "mean": np.zeros(shape)}
    batch = inputs, ke.Weighted(targets, counts)
    ke.KfacOptimizer(tested, statistics_part=0.125).step(*batch)
    whole = ke.Engine.from_onnx(
        model, loss=["categorical", "normal"], output=["logits", "mean"], threads=1
    )
    ke.KfacOptimizer(whole, statistics_part=1).step(*batch)
    for one, two in zip(tested.estimator.factors, whole.estimator.factors, strict=True):
        np.testing.assert_allclose(one.cov, two.cov, atol=1e-6)


@pytest.mark.parametrize("make", [ke.Adam, ke.Muon])
def test_optimizers_take_the_steps_of_a_batch_without_what_does_not_count(make):
    model = models.mlp()
    inputs = models.random_inputs(model, batch=12)
    targets = targets_of(model, inputs)
    ignored = np.where(np.arange(12) % 3 == 0, -100, targets)
    one, two = make(engine(model)), make(engine(model))
    chosen = ignored >= 0
    for _ in range(3):
        padded = one.step(inputs, ignored)
        alone = two.step(rows(inputs, chosen), targets[chosen])
        assert padded.loss == pytest.approx(alone.loss, rel=1e-5)
    assert_arrays_close(one.engine.parameters, two.engine.parameters, atol=1e-5)


@pytest.fixture(scope="module")
def tokens():
    """Model, inputs, targets, weights, parameter names, Jacobian and the logits."""
    model, rng = models.token_mlp("tokens", (2, 3), dtype="float64"), np.random.default_rng(0)
    x, y = rng.standard_normal((6, 4, 2)), rng.integers(0, 3, (6, 4))
    w = rng.random((6, 4)) * (rng.random((6, 4)) > 0.3)
    w[4] = 0
    names = list(engine(model).parameters)
    z = engine(model).trace({"input": x})["output"]
    jac = oracle.jacobian(model, {"input": x}, "output", names)
    return model, {"input": x}, y, w, names, jac, z


@pytest.mark.parametrize("matrix", ["ggn", "fisher", "hessian"])
def test_an_operator_is_the_weighted_sum_over_the_data(tokens, matrix):
    model, inputs, y, w, names, jac, z = tokens
    batches = [(rows(inputs, s), y[s], w[s]) for s in (slice(0, 2), slice(2, 6))]
    A = ke.curvature_operator(model, batches, matrix, loss="categorical", threads=1)
    places = [A.vector.starts[name] + np.arange(np.prod(A.vector.shapes[name])) for name in names]
    order = np.concatenate(places)
    found = (A @ np.eye(len(order)))[np.ix_(order, order)]
    # The model is linear, so that its Hessian matrix is the same.
    np.testing.assert_allclose(found, dense_fisher(w, jac, z), atol=1e-12)
    assert abs(found - dense_fisher(w > 0, jac, z)).max() > 1e-3
    ignored = np.where(w > 0, y, -100)
    B = ke.curvature_operator(model, (inputs, ignored), matrix, loss="categorical", threads=1)
    found = (B @ np.eye(len(order)))[np.ix_(order, order)]
    np.testing.assert_allclose(found, dense_fisher(w > 0, jac, z), atol=1e-12)


def test_influence_is_that_of_weighted_gradients(tokens):
    model, inputs, y, w, names, jac, z = tokens
    curvature = ke.curvature(model, (inputs, y, w), loss="categorical", structure="full")
    influence = ke.Influence(curvature, damping=0.3)
    p = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
    score = w[..., None] * (p - np.eye(3)[y])
    gradients = np.einsum("ntc,ntcp->np", score, jac)
    F = dense_fisher(w, jac, z)
    expected = gradients @ np.linalg.solve(F + 0.3 * np.eye(len(F)), gradients.T)
    batches = [(rows(inputs, s), y[s], w[s]) for s in (slice(0, 1), slice(1, 6))]
    found = influence.scores((inputs, y, w), batches)
    np.testing.assert_allclose(found, expected, atol=1e-10)
    np.testing.assert_allclose(influence.self_scores(batches), np.diag(expected), atol=1e-10)
    assert not found[4].any()  # an example in which nothing counts
    assert abs(influence.scores((inputs, y), (inputs, y)) - expected).max() > 1e-2
    tile = next(curvature.example_gradients(inputs, ke.Weighted(y, w)))
    flat = np.concatenate([tile.arrays[n].reshape(6, -1) for n in names], axis=1)
    np.testing.assert_allclose(flat, gradients, atol=1e-12)


@pytest.mark.parametrize("loss", ["categorical", "normal", "multi_bernoulli"])
def test_a_posterior_of_whole_weights_is_that_of_repeated_examples(loss, tmp_path):
    model = models.mlp(dtype="float64")
    x, rng = models.random_inputs(model, batch=5), np.random.default_rng(0)
    y = rng.integers(0, 3, 5) if loss == "categorical" else rng.integers(0, 2, (5, 3)).astype(float)
    data, repeated = (x, y, WEIGHTS), (rows(x, REPEATED), y[REPEATED])
    found = []
    for entries in (data, repeated, (x, y)):
        curvature = ke.curvature(model, entries, loss=loss, structure="full")
        curvature.save(tmp_path / "c.safetensors")
        curvature = ke.Curvature.load(tmp_path / "c.safetensors", model)
        posterior = ke.Laplace(curvature)
        numbers = [curvature.predictions, posterior.log_marginal_likelihood()]
        numbers += [posterior.fit_prior(noise=loss == "normal").prior_precision, posterior.noise]
        numbers.append(posterior.fit_prior(validation=entries).prior_precision)
        found.append(numbers)
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)
    assert found[0] != pytest.approx(found[2], rel=1e-3)


def test_an_analysis_of_nothing_is_one_clear_error(tokens):
    model, inputs, y, w, *_ = tokens
    data = inputs, y, 0 * w
    curvature = ke.curvature(model, (inputs, y), loss="categorical")
    calls = [
        lambda: ke.curvature_operator(model, data, loss="categorical").matvec(np.ones(9)),
        lambda: ke.Influence(curvature).self_scores(data),
        lambda: ke.Laplace(curvature).fit_prior(validation=data),
    ]
    for call in calls:
        with pytest.raises(ke.NonFiniteError, match="no target of the loss on 'output' counts"):
            call()


def test_verify_checks_weighted_targets():
    model = models.token_mlp(dtype="float64")
    inputs = models.random_inputs(model, batch=4)
    targets = targets_of(model, inputs)
    targets[1, 2:] = -100
    assert ke.verify(model, inputs, targets, loss="categorical").passed
    weights = np.array([1.0, 0.5, 2.0, 0.0])
    report = ke.verify(model, inputs, ke.Weighted(targets, weights), loss="categorical")
    assert report.passed, report


@pytest.mark.parametrize("structure", ["full", "diagonal", "kron", "ekfac"])
def test_a_curvature_is_the_weighted_sum_over_the_data(structure, tokens, tmp_path):
    model, inputs, y, w, names, jac, z = tokens
    batches = [(rows(inputs, s), y[s], w[s]) for s in (slice(0, 2), slice(2, 6))]
    measured = ke.curvature(model, batches, loss="categorical", structure=structure)
    F = dense_fisher(w, jac, z)
    assert measured.trace() == pytest.approx(np.trace(F), rel=0.3 if structure == "kron" else 1e-9)
    if structure == "full":
        flat = np.random.default_rng(0).standard_normal(len(F))
        sizes = [measured.model.parameters[name].shape for name in names]
        parts = np.split(flat, np.cumsum([np.prod(shape) for shape in sizes])[:-1])
        vector = {n: p.reshape(s) for n, p, s in zip(names, parts, sizes, strict=True)}
        found = measured.multiply(vector)
        np.testing.assert_allclose(
            np.concatenate([found[name].ravel() for name in names]), F @ flat, atol=1e-9
        )
    if structure == "kron":  # of one layer with the gradients of a softmax, not exact
        whole = ke.curvature(model, (inputs, y, w), loss="categorical", structure="kron")
        assert measured.trace() == pytest.approx(whole.trace(), rel=1e-9)
        measured.save(tmp_path / "c.safetensors")


def heads(**options):
    """An engine with two losses, and a batch of 5 examples."""
    model, rng = models.two_outputs(), np.random.default_rng(0)
    inputs = {"input": rng.normal(size=(5, 5)).astype(np.float32)}
    targets = {"logits": rng.integers(0, 3, 5), "mean": rng.normal(size=(5, 2)).astype(np.float32)}
    chosen = {"logits": "categorical", "mean": "normal"}
    return engine(model, loss=chosen, reduction="batch_mean", **options), inputs, targets


ONES = np.ones(5)
BY_OUTPUT = {
    "both": ({"logits": WEIGHTS, "mean": WEIGHTS[::-1]}, {}),
    "one": ({"logits": WEIGHTS}, {"mean": ONES}),
}
CALLS = {
    "loss": lambda e, x, y: e.loss(x, y),
    "step": lambda e, x, y: e.step(x, y).loss,
    "parts": lambda e, x, y: e.gradients([(x, y), (x, y)]).loss,
    "evaluate": lambda e, x, y: e.evaluate((x, y))["loss"],
    "an optimizer": lambda e, x, y: ke.SGD(e, 0.1).step(x, y).loss,
    "fit": lambda e, x, y: ke.fit(e, (x, y), optimizer=ke.SGD(e, 0.1), steps=1).records[0]["loss"],
    "fit on batches": lambda e, x, y: ke.fit(
        e, [(x, y)], optimizer=ke.SGD(e, 0.1), steps=1
    ).records[0]["loss"],
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("case", BY_OUTPUT.values(), ids=BY_OUTPUT)
def test_each_output_may_have_weighted_targets(case, call):
    given, others = case
    tested, inputs, targets = heads(gradient_dtype="float32")
    mixed = {n: ke.Weighted(y, given[n]) if n in given else y for n, y in targets.items()}
    found = call(tested, inputs, mixed)
    tested, inputs, targets = heads(gradient_dtype="float32")
    expected = call(tested, inputs, ke.Weighted(targets, {**given, **others}))
    assert found == pytest.approx(expected, rel=1e-6)
    tested, inputs, targets = heads(gradient_dtype="float32")
    assert call(tested, inputs, targets) != pytest.approx(expected, rel=1e-3)


TWICE = {
    "of an output": lambda y: ke.Weighted({"logits": ke.Weighted(y, ONES), "mean": y}, ONES),
    "of all": lambda y: ke.Weighted(ke.Weighted(y, ONES), ONES),
    "weights": lambda y: ke.Weighted(y, ke.Weighted(ONES, ONES)),
    "outputs of an output": lambda y: {"logits": ke.Weighted({"logits": y}, ONES)},
}


@pytest.mark.parametrize("make", TWICE.values(), ids=TWICE)
def test_targets_are_weighted_once(make):
    tested, inputs, targets = heads()
    with pytest.raises(ke.InputError, match=r"weighted twice|'logits' and their weights must be"):
        tested.loss(inputs, make(targets["logits"]))
