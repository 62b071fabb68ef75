"""``multi_bernoulli`` on outputs that hold probabilities which no plain Sigmoid makes.

The truth is the binary cross-entropy of the probabilities, in float64 from its definition, and its
central differences.
"""

from math import erf

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator

import kfac_engine as ke
from tests import models, oracle

PIECES, FEATURES, ANSWERS = 3, 4, 2


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


# Operators behind the logits z of shape (n, pieces, answers), each as (op, operands, attributes)
# with "_" for the result so far, and the same in NumPy.
ENDINGS = {
    "mean over pieces": (
        [("Sigmoid", ["_"], {}), ("ReduceMean", ["_", "one"], {"keepdims": 0})],
        lambda z: sigmoid(z).mean(1)),
    "largest piece": (
        [("Sigmoid", ["_"], {}), ("ReduceMax", ["_", "one"], {"keepdims": 0})],
        lambda z: sigmoid(z).max(1)),
    "clipped": (
        [("Sigmoid", ["_"], {}), ("Clip", ["_", "0.2", "0.7"], {})],
        lambda z: np.clip(sigmoid(z), 0.2, 0.7)),
    "joined": (
        [("Sigmoid", ["_"], {}), ("Concat", ["_", "_"], {"axis": 1})],
        lambda z: np.concatenate([sigmoid(z)] * 2, 1)),
    "chosen": (
        [("Sigmoid", ["_"], {}), ("Where", ["mask", "_", "0.7"], {})],
        lambda z: np.where([True, False], sigmoid(z), 0.7)),
    "of any piece": (
        [
            ("Sigmoid", ["_"], {}),
            ("Sub", ["1.0", "_"], {}),
            ("ReduceProd", ["_", "one"], {}),
            ("Sub", ["1.0", "_"], {}),
        ],
        lambda z: 1 - (1 - sigmoid(z)).prod(1, keepdims=True),
    ),
    "from Tanh": (
        [("Tanh", ["_"], {}), ("Add", ["_", "1.0"], {}), ("Mul", ["_", "0.5"], {})],
        lambda z: (np.tanh(z) + 1) / 2),
    "from Erf": (
        [("Erf", ["_"], {}), ("Add", ["1.0", "_"], {}), ("Div", ["_", "2.0"], {})],
        lambda z: (np.vectorize(erf)(z) + 1) / 2),
}  # fmt: skip


def network(operators, output_rank=2):
    net = models.Net(seed=1)
    for name, value in [("0.2", 0.2), ("0.5", 0.5), ("0.7", 0.7), ("1.0", 1), ("2.0", 2)]:
        net.constant(name, np.float32(value))
    net.constant("one", np.array([1]))
    net.constant("mask", np.array([True, False]))
    z = net.op("MatMul", "input", net.weight("w", FEATURES, ANSWERS), to="z")
    for index, (op, operands, attributes) in enumerate(operators):
        last = index == len(operators) - 1
        inputs = [z if name == "_" else name for name in operands]
        z = net.op(op, *inputs, to="output" if last else f"end{index}", **attributes)
    sides = ["batch", *(f"side{i}" for i in range(1, output_rank))]
    return net.model({"input": ["batch", PIECES, FEATURES]}, {"output": sides})


def weight_of(model):
    from onnx import numpy_helper

    return next(numpy_helper.to_array(t) for t in model.graph.initializer if t.name == "w")


def made(name):
    operators, function = ENDINGS[name]
    rank = np.ndim(function(np.zeros((5, PIECES, ANSWERS))))
    rng = np.random.default_rng(2)
    x = rng.uniform(0.1, 0.8, (5, PIECES, FEATURES))
    model = network(operators, rank)
    targets = rng.random(function(x @ weight_of(model)).shape)
    return model, x, targets, function


def cross_entropy(p, t):
    return float(-(t * np.log(p) + (1 - t) * np.log1p(-p)).sum(-1).mean())


@pytest.mark.parametrize("name", ENDINGS)
def test_probability_output_has_cross_entropy_loss_and_gradient(name):
    model, x, targets, function = made(name)
    weight = weight_of(model).astype(np.float64)

    def loss(w):
        return cross_entropy(function(x @ w), targets)

    engine = ke.Engine.from_onnx(model, loss="multi_bernoulli")
    found = engine.step({"input": x.astype(np.float32)}, targets.astype(np.float32))
    # Sums of tens of float32 products, through a logarithm and its exponential.
    assert found.loss == pytest.approx(loss(weight), rel=1e-5)
    step = 1e-6 * np.eye(weight.size).reshape(weight.size, *weight.shape)
    expected = [(loss(weight + d) - loss(weight - d)) / 2e-6 for d in step]
    gradient = found.gradients["w"].reshape(-1)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-6)
    (note,) = found.notes
    assert "logarithm of the odds" in note
    assert engine.losses[0].reads == "logarithm of the odds of output"


def test_mean_of_one_probability_has_natural_gradient_of_logits():
    """A mean over one piece changes nothing: the plain logits are the truth."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((6, 1, FEATURES)).astype(np.float32)
    t = rng.integers(0, 2, (6, 1, ANSWERS)).astype(np.float32)
    mean = [("Sigmoid", ["_"], {}), ("ReduceMean", ["_", "one"], {})]
    options = {"loss": "multi_bernoulli", "damping": 0.1}
    pieces = [network(ending, 3) for ending in (mean, [("Identity", ["_"], {})])]
    for model in pieces:
        model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 1
    found, expected = (ke.precondition(m, {"input": x}, t, **options) for m in pieces)
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)
    np.testing.assert_allclose(
        found.natural_gradients["w"], expected.natural_gradients["w"], rtol=1e-3, atol=1e-5
    )


def test_probabilities_zero_and_one_have_finite_losses():
    model, _, _, _ = made("mean over pieces")
    both_one = np.linalg.pinv(weight_of(model)).sum(0)  # logits of one each
    signs = np.array([1, -1, 1, -1])[:, None, None]
    x = np.tile(1000 * signs * both_one, (1, PIECES, 1)).astype(np.float32)
    p = np.repeat(np.float32([[1], [0], [1], [0]]), ANSWERS, 1)  # of logits of ±1000, in float32
    engine = ke.Engine.from_onnx(model, loss="multi_bernoulli", sample_inputs={"input": x})
    right = engine.gradients({"input": x}, p)
    # −log of the largest float32 below one.
    assert 0 <= right.loss < 1e-7
    wrong = engine.gradients({"input": x}, 1 - p)
    tiny, most = np.finfo(np.float32).tiny, 1 - np.finfo(np.float32).epsneg
    log_odds = np.where(p == 1, np.log(most / (1 - np.float64(most))), np.log(tiny))
    assert wrong.loss == pytest.approx(np.logaddexp(0, abs(log_odds)).sum(-1).mean(), rel=1e-5)
    for found in (right, wrong):
        assert np.isfinite(found.gradients["w"]).all()


@pytest.mark.parametrize(
    "operators",
    [
        [("Sigmoid", ["_"], {}), ("Mul", ["_", "2.0"], {})],
        [("Clip", ["_", "0.2", "2.0"], {})],
        [("Relu", ["_"], {})],
        [("Tanh", ["_"], {})],
        [("Sigmoid", ["_"], {}), ("Sub", ["_", "1.0"], {})],
        [("Sigmoid", ["_"], {}), ("Concat", ["_", "z"], {"axis": 1})],
        [("Sigmoid", ["_"], {}), ("Where", ["mask", "_", "2.0"], {})],
        [("Sigmoid", ["_"], {}), ("Max", ["_", "z"], {})],
    ],
    ids=lambda operators: "-".join(op for op, _, _ in operators),
)
def test_outputs_outside_unit_interval_are_logits(operators):
    model = network(operators, 3)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((6, PIECES, FEATURES)).astype(np.float32)
    z = ReferenceEvaluator(model).run(None, {"input": x})[0]
    t = rng.random(z.shape).astype(np.float32)
    found = ke.precondition(model, {"input": x}, t, "multi_bernoulli")
    assert found.loss == pytest.approx(float((np.logaddexp(0, z) - t * z).sum(-1).mean()), rel=1e-5)
    assert not any("logarithm" in note for note in found.notes)


def test_logits_in_unit_interval_remain_logits_with_note():
    model = network([("Mul", ["_", "0.2"], {}), ("Add", ["_", "0.5"], {})], 3)
    rng = np.random.default_rng(0)
    x = rng.uniform(-0.3, 0.3, (6, PIECES, FEATURES)).astype(np.float32)
    t = rng.random((6, PIECES, ANSWERS)).astype(np.float32)
    engine = ke.Engine.from_onnx(model, loss="multi_bernoulli", sample_inputs={"input": x})
    found = engine.gradients({"input": x}, t)
    value, gradients = oracle.loss_and_gradient(
        model, {"input": x}, "output", ["w"], "multi_bernoulli", t
    )
    assert found.loss == pytest.approx(value, rel=1e-5)
    np.testing.assert_allclose(found.gradients["w"], gradients["w"], rtol=1e-4, atol=1e-6)
    (note,) = found.notes
    assert note.startswith("'output' is read as logits, but all its entries were between 0 and 1")
    assert engine.losses[0].doubts == (note,)


def test_find_logits_false_reads_probabilities():
    model, x, targets, function = made("mean over pieces")
    p = function(x @ weight_of(model).astype(np.float64))
    found = ke.precondition(
        model,
        {"input": x.astype(np.float32)},
        targets.astype(np.float32),
        ke.MultiBernoulli(find_logits=False),
    )
    expected = float((np.logaddexp(0, p) - targets * p).sum(-1).mean())
    assert found.loss == pytest.approx(expected, rel=1e-5)
    assert found.notes == ()


def test_gradient_model_reads_same_logits():
    model, x, targets, function = made("mean over pieces")
    gradient = ke.differentiate(model, "multi_bernoulli")
    feeds = {"input": x.astype(np.float32), "targets": targets.astype(np.float32)}
    (loss,) = ReferenceEvaluator(gradient).run(["loss"], feeds)
    p = function(x @ weight_of(model).astype(np.float64))
    assert float(loss) == pytest.approx(cross_entropy(p, targets), rel=1e-5)
