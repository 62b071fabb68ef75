"""Blocks against the dense Fisher matrix, in the cases where the approximation is none.

A Kronecker block equals the exact Fisher block for one example (dense layers), for a network that
is linear in everything with Gaussian noise (``G`` is then the same for all examples), and for a
convolution with one output location. Diagonal blocks are the exact diagonal always.
"""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.curvature.estimation_modes import MODES
from tests import models, oracle

# float32 sums of a few hundred terms; the blocks have entries around one.
SINGLE = 1e-5
# float64 throughout: ONNX Runtime computes dense layers in it. The oracle itself is good to 1e-11.
DOUBLE = 1e-9


def packed_order(model, parameters, weight_format):
    """Where the entries of the packed matrix (bias last) lie among the flattened parameters."""
    where = oracle.parameter_slices(model, parameters)
    shapes = {entry.name: tuple(entry.dims) for entry in model.graph.initializer}
    weight, *bias = parameters
    axes = {"OI": (1, 0), "IO": (0, 1), "OIHW": (2, 3, 1, 0)}[weight_format]
    index = np.arange(where[weight].start, where[weight].stop).reshape(shapes[weight])
    parts = [index.transpose(axes).ravel()]
    parts += [np.arange(where[name].start, where[name].stop) for name in bias]
    return np.concatenate(parts)


def exact_block(model, inputs, loss, parameters, weight_format):
    F = oracle.dense_fisher(model, inputs, "output", parameters, loss)
    order = packed_order(model, parameters, weight_format)
    return F[np.ix_(order, order)]


def observed(model, inputs, loss, **options):
    options = {"estimation_mode": "exact", "reduction": "batch_mean"} | options
    engine = ke.Engine.from_onnx(model, loss=loss, **options)
    engine.observe(inputs, options.pop("targets", None))
    return engine


@pytest.mark.parametrize("spelling", models.SPELLINGS)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", SINGLE), ("float64", DOUBLE)])
def test_all_forms_of_linear_gaussian_layer_equal_fisher(spelling, dtype, tolerance):
    model = models.linear(spelling=spelling, dtype=dtype)
    inputs = models.random_inputs(model, batch=6)
    engine = observed(model, inputs, "normal")
    ((key, block),) = engine.collection.fisher_blocks.items()
    parameters = (key,) if isinstance(key, str) else key
    assert len(parameters) == (1 if spelling == "matmul" else 2)
    weight_format = "OI" if spelling == "gemm_transb" else "IO"
    expected = exact_block(model, inputs, "normal", parameters, weight_format)
    np.testing.assert_allclose(block.full_fisher_block(), expected, atol=tolerance)


def test_block_includes_loss_on_product_before_bias():
    """The product is a result of the model and goes on into the sum with the bias."""
    net = models.Net("float64")
    net.op("MatMul", "input", net.weight("w", 4, 3), to="product")
    net.op("Add", "product", net.weight("b", 3), to="output")
    sides = {name: ["batch", 3] for name in ("product", "output")}
    model = net.model({"input": ["batch", 4]}, sides)
    inputs = models.random_inputs(model, batch=5)
    engine = observed(model, inputs, ["normal", "normal"], output=[*sides])
    block = engine.collection.fisher_blocks["w"]
    order = packed_order(model, ["w"], "IO")
    F = sum(oracle.dense_fisher(model, inputs, name, ["w"], "normal") for name in sides)
    np.testing.assert_allclose(block.full_fisher_block(), F[np.ix_(order, order)], atol=DOUBLE)


@pytest.mark.parametrize("strides", [1, 2])
def test_convolution_with_gaussian_loss_differs_from_the_fisher_only_across_locations(strides):
    # Each location's output is a loss input of its own, so output gradients of different
    # locations are uncorrelated and KFC's sum over locations is exact: F = Σ_t E[z zᵀ] ⊗ I/v.
    model = models.conv_linear(side=5, kernel=3, pads=1, strides=strides)
    inputs = models.random_inputs(model, batch=3)
    engine = observed(model, inputs, "normal")
    ((parameters, block),) = engine.collection.fisher_blocks.items()
    expected = exact_block(model, inputs, "normal", parameters, "OIHW")
    np.testing.assert_allclose(block.full_fisher_block(), expected, atol=10 * SINGLE)


@pytest.mark.parametrize("mode", MODES)
def test_first_batch_of_ekfac_is_measured_in_the_basis_of_all_its_sources(mode):
    model = models.mlp((3, 3, 4), dtype="float64")
    inputs, targets = models.random_inputs(model, batch=9), np.arange(9) % 4
    engine = ke.Engine.from_onnx(
        model, loss="categorical", estimation_mode=mode, approximations={"fully_connected": "ekfac"}
    )
    engine.update_statistics(engine.trace(inputs, targets))  # without a refresh
    for parameters, block in engine.collection.fisher_blocks.items():
        *kronecker, factor = block.factors
        bases = factor.bases.input, factor.bases.output
        for part, U in zip(kronecker, bases, strict=True):
            rotated = U.T @ part.cov @ U
            np.testing.assert_allclose(rotated, np.diag(np.diag(rotated)), atol=DOUBLE)
        if mode.startswith("exact"):
            F, Q = exact_block(model, inputs, "categorical", parameters, "OI"), np.kron(*bases)
            expected = (Q * np.diag(Q.T @ F @ Q)) @ Q.T
            np.testing.assert_allclose(block.full_fisher_block(), expected, atol=DOUBLE)
