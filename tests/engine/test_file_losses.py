"""Losses that a file computes itself: those that are recognized, and those that are not.

The truth is the output of the file in ONNX Runtime, and its differences in float64.
"""

import numpy as np
import onnxruntime
import pytest
from onnx import numpy_helper

import kfac_engine as ke
from kfac_engine.__main__ import main
from kfac_engine.losses.kinds import loss_named
from tests.models import parsed

N, D, C, T = 6, 5, 4, 3
WEIGHTS = np.array([1.0, 2.0, 0.5, 1.5])


def model(entry, nodes, **constants):
    """A model whose weight ``W`` and other constants are float64 unless they are integers."""
    rng = np.random.default_rng(0)
    weights = {"W": rng.standard_normal((D, C)), **constants}
    return parsed(f"file ({entry}) => (double[] loss) {{ {nodes} }}", weights)


FLAT = "double[n,5] x, int64[n] label"
SEQUENCES = "double[n,3,5] x, int64[n,3] label"
IMAGES = "double[n,5,3] x, int64[n,3] label"
REAL = "double[n,5] x, double[n,4] label"
RESHAPED = {"rows": np.array([-1, C]), "all": np.array([-1])}
SHIFTED = {
    **RESHAPED, "zero": np.array([0]), "one": np.array([1]), "last": np.array([-1]),
    "end": np.array([9]),
}  # fmt: skip


def cross_entropy(options="", weights=""):
    return f"y = MatMul(x, W) loss = SoftmaxCrossEntropyLoss{options}(y, label{weights})"


RECOGNIZED = {
    "mean": (FLAT, cross_entropy(), {}),
    "sum": (FLAT, cross_entropy('<reduction="sum">'), {}),
    "ignored": (FLAT, cross_entropy("<ignore_index=2>"), {}),
    "weights": (FLAT, cross_entropy("<ignore_index=-1>", ", w"), {"w": WEIGHTS}),
    "weights, sum": (FLAT, cross_entropy('<reduction="sum">', ", w"), {"w": WEIGHTS}),
    "none and mean": (
        FLAT,
        'y = MatMul(x, W) terms = SoftmaxCrossEntropyLoss<reduction="none">(y, label) '
        "loss = ReduceMean<keepdims=0>(terms)",
        {},
    ),
    "none, weights and sum": (
        FLAT,
        'y = MatMul(x, W) terms = SoftmaxCrossEntropyLoss<reduction="none">(y, label, w) '
        "loss = ReduceSum<keepdims=0>(terms)",
        {"w": WEIGHTS},
    ),
    "positions behind classes": (
        IMAGES,
        "h = Transpose<perm=[0, 2, 1]>(x) s = MatMul(h, W) y = Transpose<perm=[0, 2, 1]>(s) "
        "loss = SoftmaxCrossEntropyLoss(y, label)",
        {},
    ),
    "flattened": (
        SEQUENCES,
        "y = MatMul(x, W) r = Reshape(y, rows) t = Reshape(label, all) "
        "loss = SoftmaxCrossEntropyLoss<ignore_index=3>(r, t)",
        RESHAPED,
    ),
    "shifted": (
        SEQUENCES,
        "y = MatMul(x, W) s = Slice(y, zero, last, one) u = Slice(label, one, end, one) "
        "r = Reshape(s, rows) t = Reshape(u, all) loss = SoftmaxCrossEntropyLoss(r, t)",
        SHIFTED,
    ),
    "negative log likelihood": (
        FLAT,
        "y = MatMul(x, W) p = LogSoftmax<axis=-1>(y) "
        "loss = NegativeLogLikelihoodLoss<ignore_index=1>(p, label, w)",
        {"w": WEIGHTS},
    ),
    "gathered": (
        FLAT,
        "y = MatMul(x, W) p = LogSoftmax<axis=-1>(y) i = Unsqueeze(label, last) "
        "g = GatherElements<axis=-1>(p, i) s = Squeeze(g, last) m = ReduceMean<keepdims=0>(s) "
        "loss = Neg(m)",
        {"last": np.array([-1])},
    ),
    "gathered, axis from the front": (
        FLAT,
        "y = MatMul(x, W) p = LogSoftmax<axis=-1>(y) i = Unsqueeze(label, one) "
        "g = GatherElements<axis=-1>(p, i) s = Squeeze(g, one) m = ReduceMean<keepdims=0>(s) "
        "loss = Neg(m)",
        {"one": np.array([1])},
    ),
    "gathered positions": (
        SEQUENCES,
        "y = MatMul(x, W) p = LogSoftmax<axis=-1>(y) i = Unsqueeze(label, last) "
        "g = GatherElements<axis=-1>(p, i) q = Neg(g) m = ReduceMean<keepdims=1>(q) "
        "loss = Squeeze(m)",
        {"last": np.array([-1])},
    ),
    "sigmoid": (
        REAL,
        "y = MatMul(x, W) c = Sub(one, label) m = Mul(c, y) s = Sigmoid(y) g = Log(s) "
        "q = Sub(m, g) loss = ReduceMean<keepdims=0>(q)",
        {"one": np.array(1.0)},
    ),
    "sigmoid, sum of two terms": (
        REAL,
        "y = MatMul(x, W) s = Sigmoid(y) g = Log(s) r = Sub(one, s) h = Log(r) "
        "c = Sub(one, label) m = Mul(label, g) k = Mul(c, h) a = Add(m, k) q = Neg(a) "
        "loss = ReduceSum<keepdims=0>(q)",
        {"one": np.array(1.0)},
    ),
    "square": (
        REAL, "y = MatMul(x, W) d = Sub(y, label) q = Mul(d, d) loss = ReduceMean<keepdims=0>(q)",
        {}),
    "power, sum": (
        REAL, "y = MatMul(x, W) d = Sub(label, y) q = Pow(d, two) loss = ReduceSum<keepdims=0>(q)",
        {"two": np.array(2.0)}),
    "expanded square": (
        REAL,
        "y = MatMul(x, W) a = Add(y, label) h = Shape(a) e = Expand(y, h) f = Expand(label, h) "
        "d = Sub(e, f) g = Sub(e, f) q = Mul(d, g) loss = ReduceMean<keepdims=0>(q)",
        {},
    ),
}  # fmt: skip


def batch(entry, seed=0, n=N):
    rng = np.random.default_rng(seed)
    x, label = (part.strip().split()[0] for part in entry.split(", ")[:2])
    shape = {"double[n,5]": (n, D), "double[n,3,5]": (n, T, D), "double[n,5,3]": (n, D, T)}[x]
    labels = rng.integers(0, C, (n, T) if "3" in label else n)
    if "double" in label:
        labels = rng.random((n, C))  # probabilities, too
    return rng.standard_normal(shape), labels


def truth(file, inputs):
    """The output of the file, and its differences with respect to ``W``."""
    session = onnxruntime.InferenceSession(file.SerializeToString())
    weight = next(i for i in file.graph.initializer if i.name == "W")
    W = numpy_helper.to_array(weight)

    def loss(value):
        weight.CopyFrom(numpy_helper.from_array(value, "W"))
        run = onnxruntime.InferenceSession(file.SerializeToString())
        return np.asarray(run.run(None, inputs)[0])

    step, gradient = 1e-5, np.zeros(W.shape)
    for index in np.ndindex(*W.shape):
        change = np.zeros(W.shape)
        change[index] = step
        gradient[index] = (loss(W + change).sum() - loss(W - change).sum()) / (2 * step)
    weight.CopyFrom(numpy_helper.from_array(W, "W"))
    return np.asarray(session.run(None, inputs)[0]), gradient


@pytest.mark.parametrize("name", RECOGNIZED)
def test_recognized_losses_are_those_of_the_file(name):
    entry, nodes, constants = RECOGNIZED[name]
    file, (x, labels) = model(entry, nodes, **constants), batch(entry)
    expected, gradient = truth(file, {"x": x, "label": labels})
    sample = {"x": x, "label": labels}
    engine = ke.Engine.from_onnx(file, loss="output", sample_inputs=sample, threads=1)
    assert set(engine.parameters) == {"W"}
    assert any(
        "is a loss; it is computed from" in note
        for note in engine.gradients({"x": x}, labels).notes
    )
    result = engine.gradients({"x": x}, labels)
    assert result.loss == pytest.approx(float(expected), rel=1e-9)
    np.testing.assert_allclose(result.gradients["W"], gradient, rtol=1e-6, atol=1e-8)
    # Every part of the engine takes the labels as targets, also under their name.
    assert engine.loss({"x": x}, {"label": labels}) == result.loss
    assert engine.loss(sample) == result.loss
    with pytest.raises(ke.InputError, match="give the labels once"):
        engine.loss(sample, labels)
    result = engine.step({"x": x}, labels)
    assert np.isfinite(result.natural_gradients["W"]).all()
    rows = (slice(0, 2), slice(2, 3), slice(3, N))
    parts = engine.gradients([({"x": x[r]}, labels[r]) for r in rows])
    np.testing.assert_allclose(parts.gradients["W"], gradient, rtol=1e-6, atol=1e-8)


def test_the_distribution_may_be_named():
    entry, nodes, constants = RECOGNIZED["ignored"]
    x, labels = batch(entry)
    expected, _ = truth(model(entry, nodes, **constants), {"x": x, "label": labels})
    for name in ("categorical", "cross_entropy"):
        engine = ke.Engine.from_onnx(model(entry, nodes, **constants), loss=name, threads=1)
        assert engine.loss({"x": x}, labels) == pytest.approx(float(expected), rel=1e-9)
    doubled = loss_named("output", weight=2.0)
    engine = ke.Engine.from_onnx(model(entry, nodes, **constants), loss=doubled, threads=1)
    assert engine.loss({"x": x}, labels) == pytest.approx(2 * float(expected), rel=1e-9)
    with pytest.raises(ke.UnknownNameError, match="'output', which the file computes itself, has"):
        loss_named("output", ignore_index=1)


def test_log_probabilities_beside_a_loss_are_no_loss():
    nodes = "y = MatMul(x, W) loss, p = SoftmaxCrossEntropyLoss(y, label)"
    file, (x, labels) = model(FLAT, nodes), batch(FLAT)
    output = file.graph.output.add()
    output.CopyFrom(file.graph.output[0])
    output.name = "p"
    engine = ke.Engine.from_onnx(file, loss="output", threads=1)
    inputs = {"x": x, "label": labels}
    expected, _ = truth(file, inputs)
    assert engine.loss(inputs) == pytest.approx(float(expected), rel=1e-9)
    engine = ke.Engine.from_onnx(
        file, loss="categorical", output="p", sample_inputs=inputs, threads=1
    )
    result = engine.gradients(inputs, labels)
    assert not any("is a loss" in note for note in result.notes)
    assert result.loss == pytest.approx(float(expected), rel=1e-9)


def test_terms_without_a_reduction_have_that_of_the_engine():
    file = model(FLAT, cross_entropy('<reduction="none", ignore_index=2>'))
    x, labels = batch(FLAT)
    terms, _ = truth(file, {"x": x, "label": labels})
    for reduction, divisor in {"mean": (labels != 2).sum(), "sum": 1}.items():
        engine = ke.Engine.from_onnx(file, loss="output", reduction=reduction, threads=1)
        assert engine.loss({"x": x}, labels) == pytest.approx(terms.sum() / divisor, rel=1e-9)


def test_data_by_name_train_a_file_with_its_loss(tmp_path):
    entry, nodes, constants = RECOGNIZED["weights"]
    x, labels = batch(entry, n=60)
    labels[:7] = -1
    file = model(entry, nodes, **constants)
    (tmp_path / "m.onnx").write_bytes(file.SerializeToString())
    engine = ke.Engine.from_onnx(tmp_path / "m.onnx", loss="output", threads=1)
    history = ke.fit(engine, {"x": x, "label": labels}, batch_size=20, steps=30)
    losses = [record["loss"] for record in history.records]
    assert losses[-1] < losses[0] - 0.1
    # The exported file computes the loss as before, with the trained weight.
    engine.export(tmp_path / "out.onnx")
    run = onnxruntime.InferenceSession(tmp_path / "out.onnx")
    exported = run.run(None, {"x": x, "label": labels})[0]
    assert engine.loss({"x": x}, labels) == pytest.approx(float(exported), rel=1e-9)
    assert float(exported) < float(truth(file, {"x": x, "label": labels})[0])
    assert engine.predict({"x": x}).shape == (60, C)


# -- losses that are not recognized ----------------------------------------------------------------

MASKED = {
    "gathered": (
        "p = LogSoftmax<axis=-1>(y) i = Unsqueeze(label, last) "
        "g = GatherElements<axis=-1>(p, i) s = Squeeze(g, last) terms = Neg(s) "
        "m = Cast<to=11>(mask) q = Mul(terms, m) a = ReduceSum<keepdims=0>(q) "
        "b = ReduceSum<keepdims=0>(m) loss = Div(a, b)"
    ),
    "minus behind": (
        "p = LogSoftmax<axis=-1>(y) i = Unsqueeze(label, last) "
        "g = GatherElements<axis=-1>(p, i) s = Squeeze(g, last) "
        "m = Cast<to=11>(mask) q = Mul(m, s) a = ReduceSum<keepdims=0>(q) "
        "b = ReduceSum<keepdims=0>(m) d = Div(a, b) loss = Neg(d)"
    ),
}


@pytest.mark.parametrize("name", MASKED)
def test_a_mask_in_the_file_has_the_weights_of_the_labels(name):
    entry = f"{SEQUENCES}, int64[n,3] mask"
    file = model(entry, f"y = MatMul(x, W) {MASKED[name]}", last=np.array([-1]))
    x, labels = batch(SEQUENCES)
    mask = np.random.default_rng(3).integers(0, 2, labels.shape)
    data = {"x": x, "label": labels, "mask": mask}
    expected, gradient = truth(file, data)
    engine = ke.Engine.from_onnx(file, loss="output", sample_inputs=data, threads=1)
    for batch_ in [(data,), ({"x": x}, ke.Weighted(labels, mask)), ([({"x": x}, labels, mask)],)]:
        result = engine.gradients(*batch_)
        assert result.loss == pytest.approx(float(expected), rel=1e-9)
        np.testing.assert_allclose(result.gradients["W"], gradient, rtol=1e-6, atol=1e-8)
    assert engine.evaluate(data)["loss"] == pytest.approx(float(expected), rel=1e-9)
    ke.fit(engine, data, batch_size=3, steps=2)
    with pytest.raises(ke.InputError, match="the file weighs its loss by 'mask'"):
        engine.gradients({"x": x}, labels)


UNKNOWN = {
    "mask of another mean": (
        FLAT.replace("label", "label, double[n] mask, double[n] other"),
        'y = MatMul(x, W) terms = SoftmaxCrossEntropyLoss<reduction="none">(y, label) '
        "q = Mul(terms, mask) a = ReduceSum<keepdims=0>(q) b = ReduceSum<keepdims=0>(other) "
        "loss = Div(a, b)",
        {},
    ),
    "sigmoid of another value": (
        REAL,
        "y = MatMul(x, W) c = Sub(one, label) m = Mul(c, y) n = Mul(y, two) s = Sigmoid(n) "
        "g = Log(s) q = Sub(m, g) loss = ReduceMean<keepdims=0>(q)",
        {"one": np.array(1.0), "two": np.array(2.0)},
    ),
    "sigmoid of other labels": (
        REAL,
        "y = MatMul(x, W) s = Sigmoid(y) g = Log(s) r = Sub(one, s) h = Log(r) "
        "c = Sub(one, label) m = Mul(c, g) k = Mul(c, h) a = Add(m, k) q = Neg(a) "
        "loss = ReduceSum<keepdims=0>(q)",
        {"one": np.array(1.0)},
    ),
    # The mean of weighted terms divides by their number, not by their weights.
    "weights, none and mean": (
        FLAT,
        'y = MatMul(x, W) terms = SoftmaxCrossEntropyLoss<reduction="none">(y, label, w) '
        "loss = ReduceMean<keepdims=0>(terms)",
        {"w": WEIGHTS},
    ),
    "cubes": (
        REAL,
        "y = MatMul(x, W) d = Sub(y, label) a = Abs(d) q = Pow(a, three) "
        "loss = ReduceMean<keepdims=0>(q)",
        {"three": np.array(3.0)},
    ),
    "mean over one axis": (
        REAL,
        "y = MatMul(x, W) d = Sub(y, label) q = Mul(d, d) m = ReduceSum<keepdims=0>(q, first) "
        "loss = ReduceMean<keepdims=0>(m)",
        {"first": np.array([0])},
    ),
    "positive sign": (
        FLAT,
        "y = MatMul(x, W) p = LogSoftmax<axis=-1>(y) i = Unsqueeze(label, last) "
        "g = GatherElements<axis=-1>(p, i) loss = ReduceMean<keepdims=0>(g)",
        {"last": np.array([-1])},
    ),
    "labels that the network reads": (
        REAL,
        "h = MatMul(x, W) y = Add(h, label) d = Sub(y, label) q = Mul(d, d) "
        "loss = ReduceMean<keepdims=0>(q)",
        {},
    ),
    "targets of another network": (
        "double[n,5] x, double[n,4] label",
        "y = MatMul(x, W) u = MatMul(label, V) d = Sub(y, u) q = Mul(d, d) "
        "loss = ReduceMean<keepdims=0>(q)",
        {"V": np.eye(C)},
    ),
    "other axis": (
        FLAT,
        "y = MatMul(x, W) p = LogSoftmax<axis=0>(y) i = Unsqueeze(label, last) "
        "g = GatherElements<axis=-1>(p, i) m = ReduceMean<keepdims=0>(g) loss = Neg(m)",
        {"last": np.array([-1])},
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_other_scalars_are_trained_as_they_are(name):
    entry, nodes, constants = UNKNOWN[name]
    file, (x, labels) = model(entry, nodes, **constants), batch(entry)
    inputs = {"x": x, "label": labels}
    others = [entry.name for entry in file.graph.input if entry.name not in inputs]
    inputs |= {other: np.linspace(1.0, 2.0, N) for other in others}
    expected, gradient = truth(file, inputs)
    for reduction in ("mean", "sum"):
        engine = ke.Engine.from_onnx(
            file, loss="output", sample_inputs=inputs, reduction=reduction, threads=1
        )
        result = engine.gradients(inputs)
        assert result.loss == pytest.approx(float(expected), rel=1e-9)
        np.testing.assert_allclose(result.gradients["W"], gradient, rtol=1e-5, atol=1e-7)
    history = ke.fit(engine, inputs, optimizer="adamw", steps=2, batch_size=N)
    assert len(history.records) == 2
    with pytest.raises(ke.UnsupportedError, match="single number for the whole batch"):
        ke.KfacOptimizer(engine).step(inputs)
    with pytest.raises(ke.UnsupportedError, match="single number for the whole batch"):
        engine.gradients([(inputs, None), (inputs, None)])
    mode = {"estimation_mode": "empirical", "sample_inputs": inputs, "threads": 1}
    empirical = ke.Engine.from_onnx(file, loss="output", **mode)
    for refused in (
        lambda: empirical.observe(inputs),
        lambda: ke.verify(file, (inputs, None), loss="output"),
        lambda: ke.curvature(file, (inputs, None), loss="output"),
        lambda: ke.fit(file, inputs, loss="output", steps=1, batch_size=N),
    ):
        with pytest.raises(ke.UnsupportedError, match="single number for the whole batch"):
            refused()


def test_numbers_of_examples_have_an_empirical_fisher_matrix():
    """Closed form: the mean of aᵀa and of the squared gradients of single examples."""
    file = model(
        REAL,
        "y = MatMul(x, W) d = Sub(y, label) a = Abs(d) loss = ReduceSum<keepdims=0>(a, one)",
        one=np.array([1]),
    )
    x, labels = batch(REAL)
    inputs = {"x": x, "label": labels}
    options = {"loss": "output", "sample_inputs": inputs, "threads": 1}
    engine = ke.Engine.from_onnx(file, **options)  # no distribution of targets: empirical
    signs = np.sign(x @ engine.parameters["W"] - labels)
    result = engine.step(inputs)
    assert result.loss == pytest.approx(abs(x @ engine.parameters["W"] - labels).sum() / N)
    np.testing.assert_allclose(result.gradients["W"], x.T @ signs / N, rtol=1e-10)
    inner, outer = (factor.cov for factor in engine.estimator.factors)
    np.testing.assert_allclose(inner, x.T @ x / N, rtol=1e-10)
    np.testing.assert_allclose(outer, signs.T @ signs / N, rtol=1e-10)
    parts = engine.gradients(
        [({k: v[r] for k, v in inputs.items()}, None) for r in (slice(2), slice(2, N))]
    )
    np.testing.assert_allclose(parts.gradients["W"], result.gradients["W"], rtol=1e-10)
    ke.KfacOptimizer(engine).step(inputs)
    exact = ke.Engine.from_onnx(file, estimation_mode="exact", **options)
    with pytest.raises(ke.UnsupportedError, match="estimation_mode 'empirical'"):
        exact.observe(inputs)
    assert all(factor.average.value is None for factor in exact.estimator.factors)
    with pytest.raises(ke.UnsupportedError, match="no distribution of targets"):
        ke.curvature(file, (inputs, None), loss="output", fisher="sampled", sample_inputs=inputs)


def test_a_loss_in_the_file_beside_another_loss_adds_its_empirical_fisher_matrix():
    """Closed form: that of squared errors is twice the identity; the mean of s sᵀ is added."""
    nodes = "y = MatMul(x, W) d = Sub(y, label) a = Abs(d) each = ReduceSum<keepdims=0>(a, one)"
    file = parsed(
        f"file ({REAL}) => (double[n,4] y, double[n] each) {{ {nodes} }}",
        {"W": np.random.default_rng(0).standard_normal((D, C)), "one": np.array([1])},
    )
    x, labels = batch(REAL, n=4000)
    inputs = {"x": x, "label": labels}
    losses = {"y": "normal", "each": loss_named("output", weight=2)}
    engine = ke.Engine.from_onnx(file, loss=losses, sample_inputs=inputs, threads=1)
    engine.observe(inputs)  # the labels are an input, and no loss needs targets here
    signs = np.sign(x @ engine.parameters["W"] - labels)
    outer = engine.estimator.factors[1].cov
    expected = 2 * np.eye(C) + 2 * signs.T @ signs / 4000
    np.testing.assert_allclose(outer, expected, atol=0.15)  # 4,000 draws: about 0.03
    assert abs(expected - 2 * np.eye(C)).max() > 1
    with pytest.raises(ke.UnsupportedError, match="no distribution of targets"):
        ke.curvature(file, (inputs, labels), loss=losses, fisher="sampled", sample_inputs=inputs)


def test_exported_gradients_of_a_loss_in_the_file_need_no_loss():
    with pytest.raises(ke.UnsupportedError, match="differentiate without a loss"):
        ke.differentiate(model(FLAT, cross_entropy()), loss="output")


# -- a number for each example ---------------------------------------------------------------------

DISTANCES = "double[n,5] a, double[n,5] b"
SHAPES = {"each": ("double[n] loss", "loss = Identity(r)"),
          "all": ("double[] loss", "loss = ReduceMean<keepdims=0>(r)")}  # fmt: skip


def distances(kind):
    """A loss of pairs of inputs, without labels, for each example or as their mean."""
    output, last = SHAPES[kind]
    return parsed(
        f"""file ({DISTANCES}) => ({output}) {{
          u = MatMul(a, W)  v = MatMul(b, W)  d = Sub(u, v)
          r = ReduceL2<keepdims=0>(d, one)  {last}
        }}""",
        {"W": np.random.default_rng(0).standard_normal((D, C)), "one": np.array([1])},
    )


def pairs(n=N):
    return {k: np.random.default_rng(i).standard_normal((n, D)) for i, k in enumerate("ab")}


def losses_of(history):
    return [record["loss"] for record in history.records]


def saved(folder):
    np.savez(folder / "pairs.npz", **pairs())
    return folder / "pairs.npz"


FORMS = {
    "arrays": lambda folder: pairs(),
    "pair": lambda folder: (pairs(), None),
    "file": saved,
    "batches": lambda folder: [
        {k: v[r] for k, v in pairs().items()} for r in (slice(3), slice(3, N))
    ],
}


@pytest.mark.parametrize("form", FORMS)
def test_numbers_of_examples_train_as_their_mean(form, tmp_path):
    """The truth is the file that computes the mean itself."""
    results = []
    for kind in SHAPES:
        file, data = distances(kind), FORMS[form](tmp_path)
        size = {} if form == "batches" else {"batch_size": 3}
        history = ke.fit(file, data, loss="output", optimizer="adamw", epochs=2, **size)
        engine = ke.Engine.from_onnx(file, loss="output", threads=1)
        results.append([*losses_of(history), engine.evaluate(pairs())["loss"]])
    np.testing.assert_allclose(results[0], results[1], rtol=1e-9)
    assert results[0][-1] == pytest.approx(truth(distances("all"), pairs())[0], rel=1e-6)


def test_numbers_of_examples_are_verified_and_have_a_curvature():
    file, empirical = distances("each"), {"estimation_mode": "empirical", "threads": 1}
    checks = ke.verify(file, pairs(), loss="output", **empirical)
    assert checks.passed
    assert "no distribution" in str([check.skipped for check in checks.checks])
    assert np.isfinite(losses_of(ke.fit(file, pairs(), loss="output", epochs=2))).all()
    scores = ke.Influence(
        ke.curvature(file, pairs(), loss="output", fisher="empirical"), damping=0.1
    ).self_scores(pairs())
    assert scores.shape == (N,)
    assert (scores > 0).all()


def test_missing_targets_of_another_loss_are_still_refused():
    file = parsed(
        "file (double[n,5] x) => (double[n,4] y) { y = MatMul(x, W) }", {"W": np.eye(D, C)}
    )
    with pytest.raises(ke.InputError, match="the targets are missing"):
        ke.fit(file, {"x": batch(FLAT)[0]}, loss="normal", steps=1, batch_size=N)


# Labels, the shape of which is not that of the predictions (n, 4).
BROADCAST = {
    "a column": ("double[n,5] x, double[n,1] label", (N, 1)),
    "an open column": ("double[n,5] x, double[n,m] label", (N, 1)),
    "a row": ("double[n,5] x, double[4] label", (C,)),
}
ERRORS = {
    "squares": (
        "y = MatMul(x, W) d = Sub(y, label) q = Mul(d, d) loss = ReduceMean<keepdims=0>(q)"
    ),
    "reversed": (
        "y = MatMul(x, W) d = Sub(label, y) q = Mul(d, d) loss = ReduceSum<keepdims=0>(q)"
    ),
}


@pytest.mark.parametrize("nodes", ERRORS)
@pytest.mark.parametrize("name", BROADCAST)
def test_errors_that_broadcast_are_trained_as_they_are(name, nodes):
    entry, shape = BROADCAST[name]
    file, rng = model(entry, ERRORS[nodes]), np.random.default_rng(1)
    inputs = {"x": rng.standard_normal((N, D)), "label": rng.standard_normal(shape)}
    expected, gradient = truth(file, inputs)
    engine = ke.Engine.from_onnx(file, loss="output", sample_inputs=inputs, threads=1)
    result = engine.gradients(inputs)
    assert result.loss == pytest.approx(float(expected), rel=1e-9)
    np.testing.assert_allclose(result.gradients["W"], gradient, rtol=1e-5, atol=1e-7)
    assert len(losses_of(ke.fit(engine, [inputs, inputs], optimizer="adamw", epochs=1))) == 2


@pytest.mark.parametrize("kind", SHAPES)
def test_commands_train_numbers_of_examples(kind, tmp_path, capsys):
    file = tmp_path / "m.onnx"
    file.write_bytes(distances(kind).SerializeToString())
    arguments = ["--loss", "output", "--optimizer", "adamw", "--epochs", "1", "--batch-size", "6"]
    out = str(tmp_path / "out.onnx")
    assert main(["train", str(file), "--data", str(saved(tmp_path)), *arguments, "-o", out]) == 0
    assert f"loss {truth(distances('all'), pairs())[0]:.3f}" in capsys.readouterr().err
    if kind == "each":
        arguments = ["--loss", "output", "--mode", "empirical"]
        assert main(["verify", str(file), "--inputs", str(saved(tmp_path)), *arguments]) == 0
