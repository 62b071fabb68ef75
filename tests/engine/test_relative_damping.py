"""A damping relative to the mean eigenvalue of each block, against dense matrices."""

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import kfac_engine as ke

EPSILON = 0.3
# Rounding of float32 (6e-8) times condition numbers of at most 1 + rows / √EPSILON < 100, and sums.
ROUNDING = 2e-5


def network(scale=1.0, dead=False):
    """Return a model: a convolution of two groups, tanh, two dense layers."""
    rng = np.random.default_rng(3)
    values = {
        "filter": rng.standard_normal((4, 1, 2, 2)),
        "first": rng.standard_normal((5, 36)) / 6,
        "bias": rng.standard_normal(5),
        "last": np.zeros((3, 5)) if dead else rng.standard_normal((3, 5)),
        "scale": np.array(scale),
    }
    nodes = [
        helper.make_node("Conv", ["x", "filter"], ["s"], group=2),
        helper.make_node("Tanh", ["s"], ["a"]),
        helper.make_node("Flatten", ["a"], ["rows"]),
        helper.make_node("Gemm", ["rows", "first", "bias"], ["hidden"], transB=1),
        helper.make_node("Tanh", ["hidden"], ["b"]),
        helper.make_node("Gemm", ["b", "last"], ["y"], transB=1),
        helper.make_node("Mul", ["y", "scale"], ["out"]),
    ]
    graph = helper.make_graph(
        nodes,
        "network",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2, 4, 4])],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, ["n", 3])],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in values.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def observed(damping, approximation="kron", scale=1.0, dead=False):
    """Return an engine after one batch, and the result of the batch."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((7, 2, 4, 4)).astype(np.float32)
    y = rng.standard_normal((7, 3)).astype(np.float32)
    approximations = {"fully_connected": approximation}
    engine = ke.Engine.from_onnx(
        network(scale, dead),
        loss="normal",
        damping=damping,
        approximations=approximations,
        freeze=["scale"],
        estimation_mode="exact",
    )
    return engine, engine.step({"x": x}, y)


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


@pytest.mark.parametrize("damping", [ke.RelativeDamping(EPSILON), EPSILON], ids=["relative", "λ"])
def test_only_a_relative_damping_keeps_the_direction_when_the_output_is_scaled(damping):
    vector = np.ones((5, 36)), np.ones(5)
    directions = []
    for scale in (1.0, 1e-3):
        engine, _ = observed(damping, scale=scale)
        block = engine.collection.fisher_blocks[("first", "bias")]
        product = np.concatenate([part.ravel() for part in block.multiply_inverse(vector)])
        directions.append(product / np.linalg.norm(product))
    equal = 1 - np.vdot(*directions) < ROUNDING
    assert equal == isinstance(damping, ke.RelativeDamping)


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


def test_an_engine_returns_the_relative_damping_that_was_set():
    engine, _ = observed(1e-3)
    engine.damping = ke.RelativeDamping(0.5)
    assert isinstance(engine.damping, ke.RelativeDamping)
    assert engine.damping == 0.5
    block = engine.collection.fisher_blocks["last"]
    expected = 0.5 * np.trace(block.full_fisher_block()) / 15
    np.testing.assert_allclose(
        block.damping * block.repeats, expected, rtol=ROUNDING, atol=ROUNDING
    )
