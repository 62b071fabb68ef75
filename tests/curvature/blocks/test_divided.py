"""Layers with wide sides against dense matrices: factors in blocks, diagonals of the widest."""

from itertools import pairwise

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.curvature import refreshes
from kfac_engine.curvature.blocks import kronecker
from kfac_engine.curvature.factors import divided
from kfac_engine.curvature.factors.divided import DividedFactor, block_shape
from tests import models
from tests.backend.truths import patches
from tests.distributed.test_distributions import assert_equal_to_one_process
from tests.lifecycle import (
    as_matrix,
    assert_products,
    damped_block,
    observe,
    plain_packing,
    second_moment,
)
from tests.training_files.parity import differences

EXACT = 1e-11  # float64 sums of some dozen terms of size one
SINGLE = 2e-4  # float32, relative to the largest entry of an inverse of condition about a hundred
DAMPING = 0.2
BLOCK, WIDEST, N = 3, 11, 9


@pytest.fixture
def narrow(monkeypatch):
    """Sides of more than 3 rows (data: 9) are divided, and of more than 11 rows diagonal."""
    monkeypatch.setattr(divided, "LARGEST_BLOCK", BLOCK)
    monkeypatch.setattr(divided, "LARGEST_PART", BLOCK)
    monkeypatch.setattr(kronecker, "LARGEST_BLOCK", BLOCK)
    monkeypatch.setattr(kronecker, "LARGEST_OF_DATA", 3 * BLOCK)
    monkeypatch.setattr(kronecker, "LARGEST_DIVIDED", WIDEST)


def number_of_block(d):
    """The block of each row: blocks of equal numbers of rows, but for the last one."""
    if d > WIDEST:
        return np.arange(d)
    return np.arange(d) // -(-d // -(-d // BLOCK))


def blocks_of(matrix):
    block = number_of_block(len(matrix))
    return np.where(block[:, None] == block, matrix, 0.0)


def dense(d_in, d_out, bias, dtype, rng):
    collection = ke.LayerCollection({"w": (d_in, d_out), "b": (d_out,)})
    collection.register_fully_connected(("w", "b") if bias else "w", "x", "s", approx="kron_blocks")
    x, ds = rng.normal(size=(N, d_in)) + 0.4, rng.normal(size=(N, d_out))
    values = {"x": x.astype(dtype), "ds": ds.astype(dtype)}
    return collection, values, second_moment(x, bias), second_moment(ds), 1


def uses(d_in, d_out, bias, dtype, rng):
    collection = ke.LayerCollection({"w": (d_in, d_out), "b": (d_out,)})
    collection.register_fully_connected_multi(
        ("w", "b") if bias else "w", "x", "s", num_uses=3, approx="kron_indep_blocks"
    )
    x, ds = rng.normal(size=(3, N, d_in)) + 0.4, rng.normal(size=(3, N, d_out))
    values = {"x": x.astype(dtype), "ds": ds.astype(dtype)}
    A, G = second_moment(x.reshape(-1, d_in), bias), second_moment(ds.reshape(-1, d_out))
    return collection, values, A, G, 3


def convolution(d_in, d_out, bias, dtype, rng):
    assert d_in % 2 == 0
    collection = ke.LayerCollection({"w": (1, 2, d_in // 2, d_out), "b": (d_out,)})
    collection.register_conv2d(
        ("w", "b") if bias else "w", (1, 1), "VALID", "x", "s", approx="kron_blocks"
    )
    x, ds = rng.normal(size=(N, 2, 3, d_in // 2)) + 0.4, rng.normal(size=(N, 2, 2, d_out))
    rows = patches(np.moveaxis(x, -1, 1), (1, 2), (1, 1), (1, 1), (0, 0), (0, 0))
    values = {"x": x.astype(dtype), "ds": ds.astype(dtype)}
    A, G = second_moment(rows.reshape(-1, d_in), bias), second_moment(ds.reshape(-1, d_out))
    return collection, values, A, G, 4


LAYERS = pytest.mark.parametrize("layer", [dense, uses, convolution])
SIDES = pytest.mark.parametrize("sides", [(8, 7), (2, 10), (12, 2), (4, 12)], ids=str)


@LAYERS
@SIDES
@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("bias", [False, True], ids=["weight", "pair"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, EXACT), (np.float32, SINGLE)])
def test_products_are_those_of_the_dense_blocks(layer, sides, bias, dtype, tolerance):
    collection, values, A, G, c = layer(*sides, bias, dtype, np.random.default_rng(0))
    block = observe(collection, [["ds"]], [values], damping=DAMPING, exps=(-1, -0.5), cholesky=True)
    F = damped_block(blocks_of(A), blocks_of(G), DAMPING, c)
    shapes = [collection.require_shape("w"), sides[1:]][: 1 + bias]
    assert_products(block, F, shapes, plain_packing, tolerance, exps=(-1, -0.5), dtype=dtype)
    np.testing.assert_allclose(
        block.full_fisher_block(), c * np.kron(blocks_of(A), blocks_of(G)), atol=10 * tolerance
    )
    # Entries outside of the blocks are left out, and they are not small.
    assert abs(F - damped_block(A, G, DAMPING, c)).max() > 1e-2


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("of_data", [False, True], ids=["divided", "whole"])
def test_a_relative_damping_is_that_of_each_block_or_feature(of_data):
    collection, values, A, G, _ = dense(8, 9, True, np.float64, np.random.default_rng(1))
    collection.data = frozenset({"x"} if of_data else ())
    values["x"][:, :3] *= 10.0
    A = second_moment(values["x"], has_bias=True)
    block = observe(collection, [["ds"]], [values], damping=ke.RelativeDamping(0.04), exps=(-1,))
    assert block.factor_shapes([(8, 9), (9,)]) == ((9, 9) if of_data else (3, 3, 3), (3, 3, 3))
    A, G = A if of_data else blocks_of(A), blocks_of(G)
    levels = moments_of_features(A) if of_data else means_of_blocks(A)
    damped = A + 0.2 * np.diag(levels), G + 0.2 * np.diag(means_of_blocks(G))
    inverse = np.linalg.inv(np.kron(*damped))
    found = as_matrix(block.multiply_inverse, [(8, 9), (9,)], plain_packing)
    np.testing.assert_allclose(found, inverse, atol=EXACT * abs(inverse).max())


def means_of_blocks(matrix):
    """The mean eigenvalue of the block of each row."""
    number = number_of_block(len(matrix))
    return np.array([np.diagonal(matrix)[number == b].mean() for b in number])


def moments_of_features(matrix):
    """The second moments, at least 0.3 times the median of those of the features."""
    moments = np.diagonal(matrix)
    return np.append(np.maximum(moments[:-1], 0.3 * np.median(moments[:-1])), moments[-1])


@pytest.mark.parametrize(
    ("side", "shape"), [(577, (1, 577)), (578, (2, 289)), (1027, (3, 343)), (8192, (16, 512))]
)
def test_the_least_number_of_blocks_of_equal_size(side, shape):
    assert block_shape(side) == (*shape, shape[1])


@pytest.mark.usefixtures("narrow")
def test_a_state_comes_back():
    collection, values, *_ = dense(8, 7, True, np.float64, np.random.default_rng(2))
    block = observe(collection, [["ds"]], [values], damping=DAMPING, exps=(-1,))
    vector = np.ones((8, 7)), np.ones(7)
    before = block.multiply_inverse(vector)
    for factor in block.factors:
        assert isinstance(factor, DividedFactor)
        state, average = factor.arrays(), factor.average
        factor.restore({k: v.copy() for k, v in state.items()}, average.weight, average.repeats)
        spectrum = np.linalg.eigvalsh(factor.get_cov())
        np.testing.assert_allclose(factor.eigenvalues(), spectrum, atol=EXACT)
    for found, expected in zip(block.multiply_inverse(vector), before, strict=True):
        np.testing.assert_array_equal(found, expected)


# -- in an engine ----------------------------------------------------------------------------------

BLOCKS = {"approximations": dict.fromkeys(("conv2d", "fully_connected"), "kron_blocks")}


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("name", ["cnn", "token_mlp"])
def test_whole_weights_of_targets_repeat_examples(name):
    model = models.MODELS[name]()
    inputs, weights = models.random_inputs(model, batch=5), np.array([2, 1, 0, 3, 1])
    again = np.repeat(np.arange(5), weights)
    one, two = (
        ke.Engine.from_onnx(model, loss="categorical", estimation_mode="exact", **BLOCKS)
        for _ in range(2)
    )
    z = one.trace(inputs)["output"]
    targets = np.random.default_rng(1).integers(0, z.shape[-1], z.shape[:-1])
    one.step(inputs, ke.Weighted(targets, weights))
    two.step({k: x[again] for k, x in inputs.items()}, targets[again])
    assert any(isinstance(factor, DividedFactor) for factor in one.estimator.factors)
    for factor, other in zip(one.estimator.factors, two.estimator.factors, strict=True):
        scale = abs(other.cov).max()
        np.testing.assert_allclose(factor.cov / scale, other.cov / scale, rtol=0, atol=3e-5)


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("distribution", ["replicate", "shard"])
def test_steps_of_several_processes_equal_those_of_one(distribution):
    assert_equal_to_one_process("cnn", 3, distribution=distribution, **BLOCKS)


def test_the_defaults_of_wide_layers_in_a_training_file(tmp_path, monkeypatch):
    monkeypatch.setattr(refreshes, "_CHEAP", 0)  # the first refreshes wait
    net, x, sides = models.Net(), "input", (580, 590, 3, 8200, 3)
    for i, (d_in, d_out) in enumerate(pairwise(sides)):
        w = net.weight(f"w{i}", d_in, d_out, spread=d_in**-0.5)
        product = net.op("MatMul", x, w, to=f"product{i}")
        sums = net.op("Add", product, net.weight(f"b{i}", d_out), to=f"sum{i}")
        x = net.op("Tanh", sums, to=f"x{i}") if i < len(sides) - 2 else sums
    model = net.model({"input": ["batch", sides[0]]}, {x: ["batch", 3]})
    layers = ke.Engine.from_onnx(model, loss="categorical").layers
    assert [layer.approximation for layer in layers] == ["kron_blocks"] * 4
    blocks, diagonals = [layer.factor_shapes for layer in layers[:2]], layers[2:]
    assert blocks == [((581, 581), block_shape(590)), (block_shape(591), (3, 3))]
    shapes = [layer.factor_shapes for layer in diagonals]
    assert shapes == [((4, 4), (8200,)), ((8201,), (3, 3))]
    draw = lambda rng, n: rng.integers(0, 3, n)  # noqa: E731
    found = differences(model, "kfac", tmp_path / "files", draw, steps=6)
    assert found[0] < 3e-5
    assert found[-1] < 1e-3
