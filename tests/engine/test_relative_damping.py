"""A damping relative to the mean eigenvalue of each block, against dense matrices."""

import copy
import pickle
import warnings

import numpy as np
import pytest
from onnx import numpy_helper

import kfac_engine as ke
from tests import models
from tests.training.kfac_reference import oracle

EPSILON = 0.3
# Rounding of float32 (6e-8) times condition numbers of at most 1 + rows / √EPSILON < 100, and sums.
ROUNDING = 2e-5


def network(dead=False):
    """Return a model: a convolution of two groups, tanh, two dense layers."""
    model = models.written(
        "n,2,4,4 -> n,3",
        "last(3,5) filter(4,1,2,2) first(5,36) bias(5)",
        """s = Conv<group=2>(input, filter)  a = Tanh(s)  rows = Flatten(a)
           hidden = Gemm<transB=1>(rows, first, bias)  b = Tanh(hidden)
           output = Gemm<transB=1>(b, last)""",
    )
    if dead:
        zeros = numpy_helper.from_array(np.zeros((3, 5), np.float32), "last")
        model.graph.initializer[0].CopyFrom(zeros)
    return model


def observed(damping, approximation="kron", dead=False):
    """Return an engine after one batch, and the result of the batch."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((7, 2, 4, 4)).astype(np.float32)
    y = rng.standard_normal((7, 3)).astype(np.float32)
    approximations = {"fully_connected": approximation}
    engine = ke.Engine.from_onnx(
        network(dead),
        loss="normal",
        damping=damping,
        approximations=approximations,
        estimation_mode="exact",
    )
    return engine, engine.step({"input": x}, y)


def mean_eigenvalue(matrix):
    return np.trace(matrix) / len(matrix)


def test_each_factor_of_a_dense_layer_is_damped_by_its_own_mean_eigenvalue():
    engine, result = observed(ke.RelativeDamping(EPSILON))
    block = engine.collection.fisher_blocks[("first", "bias")]
    A, G = (
        factor.get_cov().astype(float)
        + np.sqrt(EPSILON) * mean_eigenvalue(factor.get_cov()) * np.eye(n)
        for factor, n in zip(block.factors, (37, 5), strict=True)
    )
    V = np.vstack([result.gradients["first"].T, result.gradients["bias"]])
    expected = np.linalg.solve(A, V) @ np.linalg.inv(G)
    assert block.repeats == 1
    np.testing.assert_allclose(
        result.natural_gradients["first"], expected[:-1].T, rtol=ROUNDING, atol=ROUNDING
    )
    np.testing.assert_allclose(
        result.natural_gradients["bias"], expected[-1], rtol=ROUNDING, atol=ROUNDING
    )


def test_each_group_of_a_convolution_is_damped_by_its_own_mean_eigenvalues():
    engine, result = observed(ke.RelativeDamping(EPSILON))
    block = engine.collection.fisher_blocks["filter"]
    A, G = (factor.average.read().astype(float) for factor in block.factors)
    for group in range(2):
        outputs = slice(2 * group, 2 * group + 2)
        inverses = [
            np.linalg.inv(M + np.sqrt(EPSILON) * mean_eigenvalue(M) * np.eye(len(M)))
            for M in (A[group], G[group])
        ]
        V = result.gradients["filter"][outputs].reshape(2, 4).T
        expected = inverses[0] @ V @ inverses[1] / block.repeats
        actual = result.natural_gradients["filter"][outputs].reshape(2, 4).T
        np.testing.assert_allclose(actual, expected, rtol=ROUNDING, atol=ROUNDING)


def test_a_diagonal_block_is_damped_by_its_mean_entry():
    engine, result = observed(ke.RelativeDamping(EPSILON), "diagonal")
    block = engine.collection.fisher_blocks[("first", "bias")]
    F = np.diag(block.full_fisher_block())
    V = np.vstack([result.gradients["first"].T, result.gradients["bias"]]).ravel()
    expected = (V / (F + EPSILON * F.mean())).reshape(37, 5)
    np.testing.assert_allclose(
        result.natural_gradients["first"], expected[:-1].T, rtol=ROUNDING, atol=ROUNDING
    )


def measured(units, damping, biased, exps):
    """An engine after one batch of columns that have units of their own, and the block of W."""
    rng = np.random.default_rng(8)
    x, y = rng.standard_normal((9, 6)) * units, rng.standard_normal((9, 2))
    model = models.written(
        "n,6 -> n,2",
        "V(5,2) b(5)" if biased else "V(5,2)",
        f"s = Gemm(input, W{', b' * biased})  a = Tanh(s)  output = MatMul(a, V)",
    )
    W = (rng.standard_normal((6, 5)) / units[:, None]).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(W, "W"))
    engine = ke.Engine.from_onnx(
        model, loss="normal", damping=damping, estimation_mode="exact", exps=exps
    )
    result = engine.step({"input": x.astype(np.float32)}, y.astype(np.float32))
    key = ("W", "b") if biased else "W"
    return engine, engine.collection.fisher_blocks[key], result


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("exp", [-1.0, -0.5, 1.0])
def test_a_feature_of_an_input_is_damped_by_its_own_second_moment(exp, biased):
    units = np.array([100, 1, 2, 1e-3, 0.5, 1.0])
    engine, block, result = measured(units, ke.RelativeDamping(EPSILON), biased, (exp,))
    A, G = (factor.get_cov().astype(float) for factor in block.factors)
    features = np.diag(A)[:6]
    moments = np.maximum(features, 0.3 * np.median(features))
    assert moments[3] > features[3]  # one of them is far below the median
    A += np.sqrt(EPSILON) * np.diag([*moments, 1.0][: len(A)])
    G += np.sqrt(EPSILON) * mean_eigenvalue(G) * np.eye(5)
    names = ["W", "b"][: 1 + biased]
    V = np.vstack([result.gradients[name] for name in names])
    powers = []
    for M in (A, G):
        values, vectors = np.linalg.eigh(M)
        powers.append(vectors * values**exp @ vectors.T)
    expected = powers[0] @ V @ powers[1]
    actual = engine.precondition(result.gradients, exp=exp)
    actual = np.vstack([actual[name] for name in names])
    scale = np.abs(expected).max(axis=1, keepdims=True)
    np.testing.assert_allclose(actual / scale, expected / scale, rtol=0, atol=1e-3)


@pytest.mark.parametrize("examples", [9, 60, 300])
def test_an_average_of_few_inputs_shrinks_as_its_oracle_does(examples):
    units = np.array([100, 1, 2, 1e-3, 0.5, 1.0])
    engine, block, _ = measured(units, ke.RelativeDamping(EPSILON), True, (-1.0,))
    A = block.input_factor.get_cov().astype(float)
    moments = np.append(np.maximum(np.diag(A)[:6], 0.3 * np.median(np.diag(A)[:6])), 1.0)
    part = oracle(A / np.sqrt(np.outer(moments, moments)), examples)
    more = min(part, 0.9) / (1 - min(part, 0.9))
    assert (part > 0.9) == (examples == 9)
    engine.damping = ke.RelativeDamping(EPSILON).with_more({}, examples)
    of_inputs, of_outputs = block.factor_dampings()
    G = block.factors[1].get_cov()
    assert of_outputs == pytest.approx(np.sqrt(EPSILON) * mean_eigenvalue(G))
    level = np.sqrt(EPSILON) + more
    assert of_inputs == pytest.approx(level * mean_eigenvalue(A), rel=1e-3)
    engine.estimator.update_inverses()
    x = np.random.default_rng(1).standard_normal((7, 5))
    found = block.input_factor.left_multiply_matpower(x, -1, block._input_damping)
    expected = np.linalg.solve(A + level * np.diag(moments), x)
    scale = np.abs(expected).max(axis=1, keepdims=True)
    np.testing.assert_allclose(found / scale, expected / scale, rtol=0, atol=2e-3)


@pytest.mark.parametrize("approximation", ["kron", "ekfac", "diagonal"])
def test_the_damping_of_a_block_is_relative_to_the_trace_of_the_dense_block(approximation):
    engine, _ = observed(ke.RelativeDamping(EPSILON), approximation)
    block = engine.collection.fisher_blocks[("first", "bias")]
    F = block.full_fisher_block()
    np.testing.assert_allclose(block.damping, EPSILON * mean_eigenvalue(F), rtol=ROUNDING)


def test_a_layer_without_gradients_has_finite_inverses():
    _, result = observed(ke.RelativeDamping(EPSILON), dead=True)
    assert not np.any(result.gradients["first"])
    assert not np.any(result.natural_gradients["first"])
    assert np.any(result.natural_gradients["last"])


ARITHMETIC = {
    "times": lambda d, k: d * k,
    "times, from the right": lambda d, k: k * d,
    "divided": lambda d, k: d / k,
    "plus": lambda d, k: d + k,
    "plus, from the right": lambda d, k: k + d,
    "minus": lambda d, k: d - k,
    "power": lambda d, k: d**k,
}


@pytest.mark.parametrize("number", [2, 0.25, np.float64(0.25), np.float32(0.25), np.int64(2)])
@pytest.mark.parametrize("operation", ARITHMETIC)
def test_a_relative_damping_is_relative_after_arithmetic(operation, number):
    result = ARITHMETIC[operation](ke.RelativeDamping(3), number)
    assert type(result) is ke.RelativeDamping
    assert result == ARITHMETIC[operation](3.0, float(number))


def test_a_relative_damping_is_a_plain_number_where_a_block_or_an_array_takes_it():
    damping = ke.RelativeDamping(0.5)
    assert type(damping.of(3.0)) is float
    assert type(float(damping)) is float
    np.testing.assert_array_equal(damping * np.arange(3), [0, 0.5, 1])
    assert np.log2(damping) == -1
    engine, _ = observed(damping)
    blocks = [block.damping for block in engine.collection.get_blocks()]
    taken = [*blocks, engine.estimator.identity_damping, engine.estimator.least_damping]
    assert {type(value) for value in taken} == {float}


def test_the_damping_of_an_engine_remains_relative_when_it_is_multiplied():
    engine, _ = observed(ke.RelativeDamping(0.1))
    engine.damping *= 2
    engine.damping = np.float64(2) * engine.damping / 2
    assert "0.2 of the mean eigenvalue" in repr(engine)
    same, _ = observed(ke.RelativeDamping(0.2))
    other, _ = observed(0.2)
    dampings = [
        [block.damping for block in e.collection.get_blocks()] for e in (engine, same, other)
    ]
    assert dampings[0] == dampings[1] != dampings[2]


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda d: pickle.loads(pickle.dumps(d))]
)
def test_copies_of_a_relative_damping_are_relative(copied):
    assert repr(copied(ke.RelativeDamping(0.1))) == "RelativeDamping(0.1)"


@pytest.mark.parametrize(
    ("saved", "present", "warns"),
    [
        (ke.RelativeDamping(0.25), ke.RelativeDamping(0.25), False),
        (ke.RelativeDamping(0.25), ke.RelativeDamping(0.5), True),
        (ke.RelativeDamping(0.25), 0.25, True),
        (0.25, ke.RelativeDamping(0.25), True),
        (0.25, 0.25, False),
    ],
)
def test_a_state_distinguishes_relative_from_absolute_damping(saved, present, warns, tmp_path):
    observed(saved)[0].save(tmp_path / "state")
    engine = observed(present)[0]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.load(tmp_path / "state")
    assert bool(caught) == warns
    assert (repr(engine.damping), type(engine.damping)) == (repr(present), type(present))


@pytest.mark.parametrize("rate", ["auto", 0.1])
def test_an_optimizer_keeps_a_relative_damping(rate, tmp_path):
    x, y = np.ones((2, 2, 4, 4), np.float32), np.ones((2, 3), np.float32)
    made = [
        ke.KfacOptimizer(
            ke.Engine.from_onnx(network(), loss="normal", damping=1.0),
            rate,
            damping=ke.RelativeDamping(0.25),
        )
        for _ in range(2)
    ]
    made[0].damping *= 2
    report = made[0].step({"input": x}, y)
    assert type(report.damping) is float
    made[0].save(tmp_path / "state")
    made[1].load(tmp_path / "state")
    for optimizer in made:
        for damping in (optimizer.damping, optimizer.engine.damping):
            assert repr(damping) == "RelativeDamping(0.5)"


@pytest.mark.parametrize(
    "options", [{"learning_rate": "quadratic"}, {"learning_rate": 0.1, "adapt_damping": True}]
)
def test_an_optimizer_that_needs_an_absolute_damping_refuses_a_relative_one(options):
    engine = ke.Engine.from_onnx(network(), loss="normal")
    with pytest.raises(ke.InputError, match="absolute damping"):
        ke.KfacOptimizer(engine, **options, damping=ke.RelativeDamping(0.1))
    optimizer = ke.KfacOptimizer(engine, **options, damping=0.1)
    with pytest.raises(ke.InputError, match="absolute damping"):
        optimizer.damping = ke.RelativeDamping(0.1)
    assert (optimizer.damping, type(engine.damping)) == (0.1, float)
