"""``verify`` accuses no sound model: language models, buckets of distances, own likelihoods."""

import warnings

import numpy as np
import onnx
import pytest

import kfac_engine as ke
from tests import models

LENGTH, WIDTH = 8, 6
MODES = ("gradients", "empirical", "curvature_prop", "curvature_prop_GGN", "exact", "exact_GGN")


def language_model(vocabulary, *, tied):
    """A table of tokens and one of positions, a head of causal attention, and a head of logits."""
    net = models.Net()
    table = net.weight("tokens", vocabulary, WIDTH)
    x = net.op("Gather", table, "input", to="rows")
    x = net.op("Add", x, net.weight("positions", LENGTH, WIDTH), to="placed")
    scale, shift = net.positive("norm.weight", WIDTH), net.weight("norm.bias", WIDTH)
    y = net.op("LayerNormalization", x, scale, shift, to="norm", axis=-1, epsilon=1e-5)
    q, k, v = (
        net.op("MatMul", y, net.weight(f"{name}.weight", WIDTH, WIDTH), to=name) for name in "qkv"
    )
    mask = np.triu(np.full((LENGTH, LENGTH), -np.inf, np.float32), 1)
    scores = net.op("MatMul", q, net.op("Transpose", k, to="keys", perm=[0, 2, 1]), to="scores")
    scores = net.op("Add", scores, net.constant("mask", mask), to="masked")
    shares = net.op("Softmax", scores, to="shares", axis=-1)
    x = net.op("Add", x, net.op("MatMul", shares, v, to="mixed"), to="residual")
    x = net.op("Add", x, net.weight("last.bias", WIDTH), to="last")
    head = (
        net.op("Transpose", table, to="columns", perm=[1, 0])
        if tied
        else net.weight("head.weight", WIDTH, vocabulary)
    )
    net.op("MatMul", x, head, to="output")
    return net.model(
        {"input": ["batch", LENGTH]}, {"output": ["batch", LENGTH, vocabulary]}, "int64"
    )


def verified(vocabulary, *, tied=False, reduction="mean", **options):
    rng = np.random.default_rng(0)
    ids, next_ids = rng.integers(0, vocabulary, (2, 3, LENGTH))
    model = language_model(vocabulary, tied=tied)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return ke.verify(
            model, {"input": ids}, next_ids, loss="categorical", reduction=reduction,
            parameters=3, **options,
        )  # fmt: skip


def assert_sound(
    result, checks=("gradients", "curvature products", "blocks", "inverses", "export")
):
    assert result.passed, [(c.name, c.failures) for c in result.checks if c.failures]
    assert {check.name for check in result.checks if check.outcome == "pass"} == set(checks)


# The losses read 96 and 320 numbers for an example: blocks by exact expectations, and by the
# gradient of the data.
@pytest.mark.parametrize(
    ("vocabulary", "options", "mode"),
    [
        *((40, {"estimation_mode": mode}, "empirical") for mode in MODES),
        *((40, {"reduction": reduction}, "empirical") for reduction in ("sum", "batch_mean")),
        (40, {"tied": True}, "empirical"),
        (12, {}, "exact"),
        (12, {"tied": True, "tie_weights": True}, "exact"),
    ],
    ids=str,
)
def test_language_models_pass(vocabulary, options, mode):
    result = verified(vocabulary, **options)
    assert_sound(result)
    assert f"mode {mode}" in result["blocks"].detail
    assert "float64" in result["gradients"].detail


def test_a_wrong_block_of_a_language_model_fails(monkeypatch):
    observe = ke.Engine.precondition
    monkeypatch.setattr(
        ke.Engine,
        "precondition",
        lambda self, v, exp=-1.0, **k: {
            n: a * (LENGTH if exp == 1 else 1) for n, a in observe(self, v, exp=exp, **k).items()
        },
    )
    assert verified(40)["blocks"].outcome == "fail"


# -- integers that float64 rounds otherwise --------------------------------------------------------


DISTANCES = {"input": np.float32([[1, 2, 4, 8], [8, 4, 2, 1]])}


def rounded(nodes, constants):
    """A model that reads rows of a table at the integers ``ids``."""
    nodes += " rows = Gather(table, ids) means = ReduceMean<keepdims=0>(rows, all)"
    return models.written("batch,4 -> batch", f"table(9,2) all=1,2 one=1 {constants}", nodes)


def test_buckets_of_distances_are_those_of_the_model():
    """With a base of 2, the buckets of 2, 4 and 8 are one less in float32 than in float64."""
    base, below = np.log(2.0), np.float32(1 / np.log(2.0))
    below = np.nextafter(below, np.float32(0))
    model = rounded(
        "logs = Log(input) scaled = Mul(logs, scale) ids = Cast<to=7>(scaled)",
        f"scale:{float(below):.9f}",
    )
    model.graph.output[0].name = "means"
    logs = np.log(DISTANCES["input"])
    assert ((logs * below).astype(int) != (logs.astype(float) / base).astype(int)).any()
    result = ke.verify(model, DISTANCES, np.zeros(2, np.float32), loss="normal")
    assert result.passed, [check.failures for check in result.checks]
    assert "float64" in result["gradients"].detail
    assert result["gradients"].outcome == "pass"


def test_integers_of_parameters_that_float64_rounds_otherwise_accuse_nobody():
    model = rounded(
        "sums = MatMul(input, w) large = Mul(sums, scale) whole = Cast<to=7>(large)"
        " ids = Mod(whole, nine)",
        "w(4,1) scale:12345678.0 nine:9",
    )
    for node in ("flat = Squeeze(sums, one)", "output = Add(means, flat)"):
        model.graph.node.append(onnx.parser.parse_node(node))
    result = ke.verify(model, DISTANCES, np.zeros(2, np.float32), loss="normal")
    assert result.passed, [check.failures for check in result.checks]
    assert "'whole' rounds to other integers in float64" in result["gradients"].detail


# -- own likelihoods -------------------------------------------------------------------------------


class Gaussian(ke.ElementwiseLoss):
    """The Gaussian of a mean and the logarithm of a variance."""

    def __init__(self, mean="mean", log_variance="log_variance", targets="targets"):
        super().__init__((mean, log_variance), targets, None, -1)

    def _read(self, values):
        return (values[name] for name in self.inputs)

    def negative_log_probs(self, values, targets):
        m, r = self._read(values)
        return 0.5 * (np.log(2 * np.pi) + r + (targets - m) ** 2 * np.exp(-r))

    def gradient_of(self, values, targets):
        m, r = self._read(values)
        scaled = (m - targets) * np.exp(-r)
        return dict(zip(self.inputs, (scaled, 0.5 - 0.5 * (m - targets) * scaled), strict=True))

    def information(self, values):
        m, r = self._read(values)
        return dict(zip(self.inputs, (np.exp(-r), np.full_like(m, 0.5)), strict=True))

    def sample(self, values, rng):
        m, r = self._read(values)
        return m + np.exp(r / 2) * rng.standard_normal(m.shape)


class Declared(Gaussian):
    """The same, which says that its inputs are not natural parameters."""

    ggn_equals_fisher = False


class Wrong(Declared):
    """A gradient that is none of the log-likelihood."""

    def gradient_of(self, values, targets):
        return {name: 2 * g for name, g in super().gradient_of(values, targets).items()}


def two_heads():
    net = models.Net()
    x = net.op("Tanh", net.dense("body", "input", 3, 4), to="hidden")
    for head in ("mean", "log_variance"):
        net.dense(head, x, 4, 2)
    return net.model({"input": ["n", 3]}, {name: ["n", 2] for name in ("mean", "log_variance")})


@pytest.mark.parametrize("loss", [Gaussian, Declared, Wrong])
def test_a_gaussian_of_a_log_variance_is_compared_with_its_fisher_matrix(loss):
    model, rng = two_heads(), np.random.default_rng(0)
    x, t = rng.standard_normal((2, 6, 3)).astype(np.float32)
    result = ke.verify(model, {"input": x}, t[:, :2], loss=loss())
    products = result["curvature products"]
    if loss is Wrong:
        assert result["gradients"].outcome == "fail"
        return
    assert result.passed, [check.failures for check in result.checks]
    assert products.outcome == "pass"
    notes = [
        reason for reason in products.skipped.values() if "ggn_equals_fisher = False" in reason
    ]
    assert list(products.skipped) == (["Hessian matrix of Gaussian"] if notes else [])
    assert bool(notes) == (loss is Gaussian)


def test_fisher_products_of_the_gaussian_are_those_of_calculus():
    """The Fisher matrix of a mean is ``1 / variance``, that of a log-variance is 1/2."""
    model, rng = two_heads(), np.random.default_rng(0)
    x, t = rng.standard_normal((2, 6, 3)).astype(np.float32)
    engine = ke.Engine.from_onnx(model, loss=Gaussian(), reduction="batch_mean")
    trace = engine.trace({"input": x}, t[:, :2])
    vector = {n: rng.standard_normal(a.shape) for n, a in engine.parameters.items()}
    vector = {n: a * n.endswith(".bias") * (n != "body.bias") for n, a in vector.items()}
    found = engine.curvature_products(trace).multiply_fisher(vector)
    precision = np.exp(-trace["log_variance"].astype(float)).mean(axis=0)
    expected = {"mean.bias": precision, "log_variance.bias": np.full(2, 0.5)}
    for name, information in expected.items():
        np.testing.assert_allclose(found[name], information * vector[name], rtol=1e-5)
