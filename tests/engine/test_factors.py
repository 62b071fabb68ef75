"""Factors by parameter, against matrices built by hand from the activations of the oracle."""

from dataclasses import dataclass, field
from functools import cache

import numpy as np
import pytest
from onnx import numpy_helper

import kfac_engine as ke
from tests import models, oracle
from tests.models import Net

# Averages of float32 activations and gradients, relative to the largest eigenvalue. Rounding of a
# matrix of 30 rows moves its eigenvalues by at most 30 · 6e-8 of its norm.
FLOAT32 = 1e-5
DAMPING = 0.03
N = 12
TARGETS = np.arange(N) % 3


def with_one(rows):
    return np.concatenate([rows, np.ones((*rows.shape[:-1], 1))], axis=-1)


def moment(rows):
    """Mean of ``x xᵀ`` over all rows."""
    flat = rows.reshape(-1, rows.shape[-1])
    return flat.T @ flat / len(flat)


def fisher(model, inputs, *parameters):
    return oracle.dense_fisher(model, inputs, "output", parameters, "categorical")


def empirical_fisher(model, inputs, *parameters):
    args = (model, inputs, "output", parameters, "categorical", TARGETS)
    return oracle.dense_empirical_fisher(*args)


def packed_fisher(model, inputs, layer, fisher=fisher):
    """Fisher matrix of a weight ``(d_out, d_in)`` and its bias in the order of ``V``."""
    weight, bias = (dict(initializers(model))[f"{layer}.{part}"] for part in ("weight", "bias"))
    positions = np.arange(weight.size).reshape(weight.shape).T
    order = np.vstack([positions, weight.size + np.arange(bias.size)]).ravel()
    return fisher(model, inputs, f"{layer}.weight", f"{layer}.bias")[np.ix_(order, order)]


def initializers(model):
    return (
        (entry.name, numpy_helper.to_array(entry).astype(np.float64))
        for entry in model.graph.initializer
    )


# -- a model with convolutions, whose output gradients have a closed form --------------------------


def conv_net(groups):
    """A convolution of 4 channels with bias, padded, then a dense layer on its 16 positions."""
    net = Net()
    weight = net.weight("conv.weight", 4, 4 // groups, 3, 3)
    operands = ("input", weight, net.weight("conv.bias", 4))
    net.op("Conv", *operands, to="conv", pads=[1] * 4, group=groups)
    net.op("Flatten", "conv", to="flat")
    net.op("MatMul", "flat", net.weight("fc.weight", 64, 3), to="output")
    return net.model({"input": ["batch", 4, 4, 4]}, {"output": ["batch", 3]})


def conv_moments(model, inputs, groups):
    """``A`` and ``G`` of each group of the convolution of ``conv_net``."""
    x = inputs["input"].astype(np.float64)
    patches = oracle.conv_patches(x, (3, 3), (1, 1), (1, 1), (1, 1), (1, 1))
    taps = patches.reshape(N, 16, 9, groups, 4 // groups).transpose(3, 0, 1, 2, 4)
    A = [moment(with_one(rows.reshape(N, 16, -1))) for rows in taps]
    W = dict(initializers(model))["fc.weight"].reshape(4, 16, 3)
    (z,) = oracle.evaluate(model, inputs, "output")
    F = sum(oracle.predictive_fisher("categorical", row) for row in z) / N
    # ds = W dz at each position; its second moment is a mean over the positions.
    G = np.einsum("cta,ab,dtb->cd", W, F, W) / 16
    d = 4 // groups
    return A, [G[g * d : (g + 1) * d, g * d : (g + 1) * d] for g in range(groups)]


# -- cases -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Model, a parameter, and functions for its factors: symbol to matrix or list of matrices."""

    model: object
    parameter: str
    factors: object
    shapes: tuple = ()
    repeats: int = 1
    options: dict = field(default_factory=dict)


def dense(model, inputs):
    (a,) = oracle.evaluate(model, inputs, "act0")
    return {"A": moment(with_one(a)), "G": fisher(model, inputs, "fc1.bias")}


def rotated(model, inputs):
    # The mode has one source: the basis of the first batch is that of its own factors.
    factors = dense(model, inputs) | {"G": empirical_fisher(model, inputs, "fc1.bias")}
    basis = np.kron(*(np.linalg.eigh(factor)[1] for factor in factors.values()))
    F = packed_fisher(model, inputs, "fc1", empirical_fisher)
    return factors | {"s": np.diag(basis.T @ F @ basis)}


def table(model, inputs):
    ids = inputs["input"]
    (z,) = oracle.evaluate(model, inputs, "output")
    W = dict(initializers(model))["output.weight"]
    F = sum(oracle.predictive_fisher("categorical", row) for row in z) / N
    return {"A": np.bincount(ids.ravel(), minlength=7) / ids.size, "G": W.T @ F @ W / 9}


def successive(model, inputs):
    (a,) = oracle.evaluate(model, inputs, "act")
    return {"A": moment(np.concatenate([inputs["input"], a]))}


def shifted():
    """A dense layer after ``input + tanh(offset)``: the offset has no layer."""
    net = Net()
    offset = net.op("Sin", net.weight("offset", 5), to="sine")
    product = net.op("Mul", "input", offset, to="product")
    net.dense("output", net.op("Mul", product, offset, to="shifted"), 5, 3)
    return net.model({"input": ["batch", 5]}, {"output": ["batch", 3]})


CASES = {
    "dense": Case(models.mlp(), "fc1.weight", dense, ((6, 6), (4, 4))),
    "bias": Case(models.mlp(), "fc1.bias", dense, ((6, 6), (4, 4))),
    "convolution": Case(
        conv_net(1), "conv.weight",
        lambda m, x: {k: v[0] for k, v in zip("AG", conv_moments(m, x, 1), strict=True)},
        ((37, 37), (4, 4)), 16),
    "convolution in groups": Case(
        conv_net(2), "conv.weight",
        lambda m, x: dict(zip("AG", conv_moments(m, x, 2), strict=True)), ((2, 19, 19), (2, 2, 2)),
        16),
    "embedding": Case(models.embedding(), "table", table, ((7,), (4, 4)), 3),
    "EKFAC": Case(
        models.mlp(),
        "fc1.weight",
        rotated,
        ((6, 6), (4, 4), (6, 4)),
        options={
            "approximations": {"fully_connected": "ekfac"},
            "estimation_mode": "empirical",
        },
    ),
    "diagonal": Case(
        models.mlp(), "fc1.weight", lambda m, x: {"F": np.diag(packed_fisher(m, x, "fc1"))},
        ((6, 4),), options={"approximations": {"fully_connected": "diagonal"}}),
    "diagonal input factor": Case(
        models.mlp(), "fc1.weight", lambda m, x: dense(m, x) | {"A": np.diag(dense(m, x)["A"])},
        ((6,), (4, 4)), options={"approximations": {"fully_connected": "kron_in_diag"}}),
    "full": Case(
        models.layer_norm(), "norm.bias",
        lambda m, x: {"F": fisher(m, x, "norm.weight", "norm.bias")}, ((10, 10),)),
    "parameter without a layer": Case(
        shifted(), "offset", lambda m, x: {"F": np.diag(fisher(m, x, "offset"))}, ((5,),)),
    "successive uses": Case(
        models.tied(), "shared.weight", successive, ((2, 4, 4), (2, 4, 4)), 2,
        {"approximations": {"fully_connected_multi": "kron_series_2"}}),
}  # fmt: skip


@cache
def observed(case, damping=DAMPING):
    case = CASES[case]
    engine = ke.Engine.from_onnx(
        case.model,
        loss="categorical",
        backend="numpy",
        damping=damping,
        **{"estimation_mode": "exact"} | case.options,
    )
    inputs = models.random_inputs(case.model, N)
    engine.observe(inputs, TARGETS if engine.options.estimation_mode == "empirical" else None)
    return engine, {
        n: x.astype(np.float64) if x.dtype.kind == "f" else x for n, x in inputs.items()
    }


@cache
def by_hand(case):
    return CASES[case].factors(CASES[case].model, observed(case)[1])


def eigenvalues_by_hand(matrices):
    if isinstance(matrices, list):
        return np.stack([np.linalg.eigvalsh(matrix) for matrix in matrices])
    return np.sort(matrices) if matrices.ndim == 1 else np.linalg.eigvalsh(matrices)


def by_symbol(case, damping=DAMPING):
    engine, _ = observed(case, damping)
    return {view.symbol: view for view in engine.factors[CASES[case].parameter]}


@pytest.mark.parametrize("case", CASES)
def test_eigenvalues_are_those_of_factors_built_by_hand(case):
    views = by_symbol(case)
    assert tuple(view.shape for view in views.values()) == CASES[case].shapes
    for symbol, matrices in by_hand(case).items():
        view, expected = views[symbol], eigenvalues_by_hand(matrices)
        values = view.eigenvalues()
        assert values.dtype == np.float64
        assert view.value.shape == view.shape
        np.testing.assert_allclose(values, expected, rtol=0, atol=FLOAT32 * expected.max())
        assert view.trace == pytest.approx(expected.sum(), rel=FLOAT32)


def mean_eigenvalues(matrices):
    """Mean eigenvalue of each matrix."""
    return eigenvalues_by_hand(matrices).mean(-1)


def dampings_by_hand(case):
    """Symbol to damping, by the closed form of docs/conventions.md with ``p = 1``."""
    factors = by_hand(case)
    if "A" not in factors or "s" in factors:
        return {"A": None, "G": None, list(factors)[-1]: DAMPING}
    a, g = (mean_eigenvalues(factors[symbol]) for symbol in "AG")
    pi, level = np.sqrt(a / g), DAMPING / CASES[case].repeats
    return {"A": pi * np.sqrt(level), "G": np.sqrt(level) / pi}


@pytest.mark.parametrize("case", [case for case in CASES if case != "successive uses"])
def test_dampings_are_those_of_the_conventions(case):
    expected = dampings_by_hand(case)
    for symbol, view in by_symbol(case).items():
        if expected[symbol] is None:
            assert view.damping is None
        else:
            np.testing.assert_allclose(view.damping, expected[symbol], rtol=FLOAT32)


@pytest.mark.parametrize("case", ["dense", "convolution", "convolution in groups"])
def test_relative_damping_is_a_multiple_of_the_mean_eigenvalue(case):
    views = by_symbol(case, ke.RelativeDamping(0.09))
    for symbol, matrices in by_hand(case).items():
        expected = 0.3 * mean_eigenvalues(matrices)
        np.testing.assert_allclose(views[symbol].damping, expected, rtol=FLOAT32)


@pytest.mark.parametrize("case", CASES)
def test_condition_is_that_of_the_damped_matrix(case):
    for symbol, matrices in by_hand(case).items():
        view, values = by_symbol(case)[symbol], eigenvalues_by_hand(matrices)
        damping = 0.0 if view.damping is None else view.damping
        ratios = (values[..., -1] + damping) / (values[..., 0] + damping)
        assert view.condition == pytest.approx(ratios.max(), rel=1e-3)


def test_condition_of_a_singular_factor_without_damping_is_infinite():
    model = models.mlp()
    engine = ke.Engine.from_onnx(
        model, loss="categorical", backend="numpy", approximations={"fully_connected": "ekfac"}
    )
    engine.observe(models.random_inputs(model, 3))  # fewer examples than rows
    assert np.isinf(engine.factors["fc1.weight"].input.condition)


def test_damping_follows_the_engine():
    engine, _ = observed("dense", 0.5)
    before = engine.factors["fc1.weight"].input.damping
    engine.damping = 2.0
    assert engine.factors["fc1.weight"].input.damping == pytest.approx(2 * before)


def test_value_is_a_copy_of_the_average():
    engine, _ = observed("dense", 0.4)
    view = engine.factors["fc1.weight"].output
    np.testing.assert_array_equal(view.value, view.factor.get_cov())
    view.value[:] = 0
    assert view.trace > 0
    assert view.value.any()
