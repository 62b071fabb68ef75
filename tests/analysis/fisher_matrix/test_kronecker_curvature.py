"""Kronecker curvature against the dense Fisher matrix, computed by brute force.

A Kronecker block is the Fisher block for one example, and for a linear network with Gaussian noise.
Elsewhere it is ``t · A ⊗ G``, and the test computes both factors itself: ``A`` from activations,
and ``G`` as the Fisher block of the bias, which is ``Σ ds dsᵀ`` where a layer has one position.
"""

import numpy as np
import pytest

import kfac_engine as ke
from tests import models, oracle
from tests.analysis.fisher_matrix.dense import (
    DOUBLE,
    SINGLE,
    dense,
    exact_fisher,
    measured,
    uneven,
    within,
)
from tests.comparing import assert_near

LABELS = np.array([0, 2, 1, 1, 0, 2, 0])
LAYERS = [(f"fc{i}.weight", f"fc{i}.bias") for i in range(3)]


def mlp(dtype="float64"):
    model = models.mlp(dtype=dtype)
    return model, models.random_inputs(model, batch=7)


def packed(weight, bias):
    """Weight ``(out, in)`` and bias as the packed matrix, bias last, row-major."""
    return np.vstack([weight.T, bias]).ravel()


def block_of(curvature, matrix, weight, bias):
    """The block of a layer in the order of the packed matrix."""
    sizes = {name: value.shape for name, value in curvature.model.parameters.items()}
    starts = dict(zip(sizes, np.cumsum([0, *map(np.prod, sizes.values())]), strict=False))
    places = [
        starts[name] + np.arange(np.prod(sizes[name])).reshape(sizes[name])
        for name in (weight, bias)
    ]
    order = packed(*places)
    return matrix[np.ix_(order, order)]


def input_rows(model, inputs, name):
    (rows,) = oracle.evaluate(model, inputs, name) if name != "input" else [inputs["input"]]
    return np.hstack([rows, np.ones((len(rows), 1))])


@pytest.mark.parametrize("loss", ["categorical", "normal", "multi_bernoulli"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", DOUBLE), ("float32", SINGLE)])
def test_curvature_of_one_example_equals_blocks_of_the_fisher(loss, dtype, tolerance):
    model = models.mlp(dtype=dtype)
    inputs = models.random_inputs(model, batch=1)
    curvature = measured(model, (inputs, None), loss)
    expected = within(exact_fisher(curvature, model, inputs, loss), curvature, *LAYERS)
    assert_near(dense(curvature), expected, tolerance)


def test_curvature_of_linear_gaussian_network_equals_blocks_of_the_fisher_for_uneven_batches():
    model = models.mlp(activation="Identity", dtype="float64")
    inputs = models.random_inputs(model, batch=7)
    curvature = measured(model, uneven(inputs), "normal")
    expected = within(exact_fisher(curvature, model, inputs, "normal"), curvature, *LAYERS)
    assert curvature.examples == 7
    assert_near(dense(curvature), expected, DOUBLE)


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_curvature_weights_each_example_alike_in_uneven_batches(fisher):
    model, inputs = mlp()
    curvature = measured(model, uneven(inputs, LABELS), fisher=fisher)
    targets = LABELS if fisher == "empirical" else None
    F = exact_fisher(curvature, model, inputs, "categorical", targets)
    actual = dense(curvature)
    for (weight, bias), source in zip(LAYERS, ("input", "act0", "act1"), strict=True):
        a = input_rows(model, inputs, source)
        d_out = curvature.model.parameters[bias].size
        G = block_of(curvature, F, weight, bias)[-d_out:, -d_out:]
        assert_near(block_of(curvature, actual, weight, bias), np.kron(a.T @ a / len(a), G), DOUBLE)
    # A mean of the three means would differ by far more than the tolerance.
    parts = [dense(measured(model, pair, fisher=fisher)) for pair in uneven(inputs, LABELS)]
    assert abs(sum(parts) / len(parts) - actual).max() > 0.01 * abs(actual).max()


@pytest.mark.parametrize("power", [-1.0, -0.5, 0.5, 1.0, 2.0])
def test_products_are_exact_powers_of_the_damped_matrix(power):
    model, inputs = mlp()
    curvature = measured(model, uneven(inputs))
    values, vectors = np.linalg.eigh(dense(curvature))
    expected = (vectors * (values.clip(0) + 0.3) ** power) @ vectors.T
    assert_near(dense(curvature, power=power, damping=0.3), expected, DOUBLE)
    diagonal = curvature.diagonal(power, 0.3)
    assert_near(np.concatenate([d.ravel() for d in diagonal.values()]), np.diag(expected), DOUBLE)


def test_spectrum_functions_agree_with_the_dense_matrix():
    model, inputs = mlp()
    curvature = measured(model, uneven(inputs))
    F = dense(curvature)
    values = np.linalg.eigvalsh(F).clip(0)
    together = np.sort(np.concatenate([*curvature.eigenvalues().values()]))
    assert_near(together, values, DOUBLE)
    assert curvature.trace() == pytest.approx(np.trace(F), rel=1e-12)
    sign, log_determinant = np.linalg.slogdet(F + 0.1 * np.eye(len(F)))
    assert sign == 1
    assert curvature.log_determinant(0.1) == pytest.approx(log_determinant, rel=1e-10)
    expected = np.trace(F @ np.linalg.inv(F + 0.1 * np.eye(len(F))))
    assert curvature.effective_dimension(0.1) == pytest.approx(expected, rel=1e-10)


def test_damping_by_parameter_is_added_to_the_block_of_each():
    model, inputs = mlp()
    curvature = measured(model, (inputs, None))
    damping = {name: 0.1 * (1 + i) for i, layer in enumerate(LAYERS) for name in layer}
    sizes = curvature.model.parameters
    levels = np.concatenate([np.full(sizes[name].size, damping[name]) for name in sizes])
    expected = np.linalg.inv(dense(curvature) + np.diag(levels))
    assert_near(dense(curvature, power=-1, damping=damping), expected, DOUBLE)


def test_samples_have_the_inverse_of_the_damped_matrix_as_covariance():
    model, inputs = mlp()
    curvature = measured(model, (inputs, None))
    samples = curvature.sample(20_000, seed=3, damping=1.0)
    rows = np.hstack([samples[name].reshape(20_000, -1) for name in curvature.model.parameters])
    expected = dense(curvature, power=-1, damping=1.0)
    # An entry of the estimate has a standard deviation of at most √2 · max / √20000 = 1 %; 74² of
    # them stay within 5.
    assert_near(rows.T @ rows / 20_000, expected, 0.05)
    assert abs(rows.mean(0)).max() < 5 * np.sqrt(expected.max() / 20_000)
    again = curvature.sample(2, seed=3, damping=1.0)
    assert again["fc0.weight"].shape == (2, 5, 6)


def test_input_moment_is_the_hessian_of_gptq_in_the_order_of_the_file():
    model = models.cnn()
    inputs = models.random_inputs(model, batch=5)
    curvature = measured(model, uneven(inputs, sizes=(1, 3)))
    for node in model.graph.node:
        if node.op_type not in ("Conv", "Gemm"):
            continue
        source, weight = node.input[:2]
        (x,) = oracle.evaluate(model, inputs, source) if source != "input" else [inputs["input"]]
        W = curvature.model.parameters[weight]
        if node.op_type == "Conv":
            options = {a.name: list(a.ints) for a in node.attribute if a.ints}
            pads = options.get("pads", [0, 0, 0, 0])
            rows = oracle.conv_patches(
                x,
                W.shape[2:],
                options.get("strides", [1, 1]),
                options.get("dilations", [1, 1]),
                pads[:2],
                pads[2:],
            )
            n, t, d = rows.shape
            rows = rows.reshape(n * t, *W.shape[2:], W.shape[1])
            rows = np.moveaxis(rows, -1, 1).reshape(n * t, d)
        else:
            rows = x.reshape(len(x), -1)
        assert_near(curvature.input_moment(weight), 2 / 5 * rows.T @ rows, SINGLE)


def test_batches_of_different_lengths_have_one_curvature_in_any_order(tmp_path):
    model, rng = models.token_mlp("tokens", (3, 2), dtype="float64"), np.random.default_rng(0)
    sizes = ((1, 2, 1.0), (4, 5, 2.0))
    batches = [({"input": scale * rng.normal(size=(n, t, 3))}, None) for n, t, scale in sizes]
    rows = np.concatenate([inputs["input"].reshape(-1, 3) for inputs, _ in batches])
    for order in (batches, batches[::-1]):
        curvature = measured(model, order, "normal")
        F = sum(
            len(inputs["input"]) / 5 * exact_fisher(curvature, model, inputs, "normal")
            for inputs, _ in batches
        )
        assert_near(dense(curvature), F, DOUBLE)
        curvature.save(tmp_path / "file")
        loaded = ke.Curvature.load(tmp_path / "file", model, threads=1, backend="numpy")
        for one in (curvature, loaded):
            assert_near(one.input_moment("fc0.weight"), 2 / 5 * rows.T @ rows, DOUBLE)
