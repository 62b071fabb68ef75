"""EKFAC blocks against the dense Fisher matrix of per-example gradients and its eigenvectors."""

from functools import partial

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.curvature.factors.eigenbasis import begin_bases
from kfac_engine.curvature.factors.readers import Readers, Update
from tests import models, oracle
from tests.backend.truths import patches as truth_patches
from tests.lifecycle import Block, observe, plain_packing, power

EXACT = 1e-10  # float64, through an eigendecomposition of well separated eigenvalues
DAMPING = 0.3
D_IN, D_OUT, SIDE = 3, 2, 4
KERNEL = (2, 2)


def dense_batch(n, seed, positions=()):
    rng = np.random.default_rng(seed)
    mix = rng.normal(size=(D_IN, D_IN))
    x = rng.normal(size=(n, *positions, D_IN)) @ mix + 0.3
    # Gradients that depend on the inputs: otherwise eigenvalues are nearly products.
    ds = rng.normal(size=(n, *positions, D_OUT)) * (1 + abs(x[..., :1]))
    return {"x": x, "ds": ds}


def image_batch(n, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, SIDE, SIDE, D_IN)) * np.arange(1, D_IN + 1) + 0.3
    return {"x": x, "ds": rng.normal(size=(n, SIDE - 1, SIDE - 1, D_OUT)) * x[:, 1:, 1:, :1]}


def dense_rows(values):
    return tuple(values[k].reshape(len(values[k]), -1, values[k].shape[-1]) for k in ("x", "ds"))


def image_rows(values):
    x = truth_patches(np.moveaxis(values["x"], -1, 1), KERNEL, (1, 1), (1, 1), (0, 0), (0, 0))
    return x, values["ds"].reshape(len(x), -1, D_OUT)


def dense(collection, key, suffix=""):
    collection.register_fully_connected(key, f"x{suffix}", f"s{suffix}", approx="ekfac")


def convolution(collection, key, suffix=""):
    collection.register_conv2d(
        key, (1, 1, 1, 1), "VALID", f"x{suffix}", f"s{suffix}", approx="ekfac"
    )


# How the layer is registered, a batch, its rows (n, t, d), the shape of the weight, and the key.
CASES = {
    "dense": (dense, dense_batch, dense_rows, (D_IN, D_OUT), ("w", "b")),
    "no-bias": (dense, dense_batch, dense_rows, (D_IN, D_OUT), "w"),
    "positions": (
        dense, lambda n, seed: dense_batch(n, seed, (3,)), dense_rows, (D_IN, D_OUT), ("w", "b")),
    "convolution": (convolution, image_batch, image_rows, (*KERNEL, D_IN, D_OUT), ("w", "b")),
}  # fmt: skip
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def registered(case, towers=1):
    register, _, _, shape, key = case
    collection = ke.LayerCollection(graph={"w": shape, "b": (D_OUT,)})
    for tower in range(towers):
        register(collection, key, str(tower) if towers > 1 else "")
    return collection


def prepared(case):
    """The block with its factors, before any batch."""
    (block,) = registered(case).get_blocks()
    block.instantiate_factors([["ds"]], DAMPING)
    return block


def moments(case, values):
    """``A``, ``G`` and the dense second moment ``F`` of per-example gradients, by loops."""
    a, ds = (part.astype(np.float64) for part in case[2](values))
    if case[4] != "w":
        a = np.concatenate([a, np.ones((*a.shape[:2], 1))], axis=2)
    flat_a, flat_ds = a.reshape(-1, a.shape[2]), ds.reshape(-1, D_OUT)
    A = sum(np.outer(row, row) for row in flat_a) / len(flat_a)
    G = sum(np.outer(row, row) for row in flat_ds) / len(flat_ds)
    gradients = [(x.T @ d).ravel() for x, d in zip(a, ds, strict=True)]
    return A, G, sum(np.outer(v, v) for v in gradients) / len(a)


def basis(A, G):
    return np.kron(np.linalg.eigh(A)[1], np.linalg.eigh(G)[1])


def diagonal_in(U, F):
    """The matrix with eigenvectors ``U`` nearest to ``F``."""
    return U @ np.diag(np.diag(U.T @ F @ U)) @ U.T


def block_of(case):
    def batch(n, seed, dtype=np.float64):
        return {name: value.astype(dtype) for name, value in case[1](n, seed).items()}

    def matrix(values):
        A, G, F = moments(case, values)
        return diagonal_in(basis(A, G), F)

    def damped(values, damping):
        B = matrix(values)
        return B + damping * np.eye(len(B))

    return Block(
        batch, partial(registered, case), matrix, damped,
        [case[3]] + [(D_OUT,)] * (case[4] != "w"), plain_packing, exact=EXACT,
        sides=lambda values: moments(case, values)[:2], summed=False,
        root=lambda B: power(B, 0.5),
    )  # fmt: skip


BLOCKS = {name: block_of(case) for name, case in CASES.items()}


@every_case
def test_eigenvalues_are_averaged_in_the_current_basis_and_move_with_it(case):
    first, second = case[1](6, 5), case[1](6, 6)
    block = observe(registered(case), [["ds"]], [first], decay=0.5)
    A, G, F = moments(case, first)
    for factor in block.factors:
        factor.update(second, 0.5)
    average = [(0.5 * x + y) / 1.5 for x, y in zip((A, G, F), moments(case, second), strict=True)]
    before = diagonal_in(basis(A, G), average[2])
    np.testing.assert_allclose(block.full_fisher_block(), before, atol=EXACT * abs(before).max())
    block.factor.refresh()
    after = diagonal_in(basis(*average[:2]), before)
    np.testing.assert_allclose(block.full_fisher_block(), after, atol=EXACT * abs(after).max())
    assert block.factor.trace() == pytest.approx(np.trace(average[2]))


@every_case
def test_streamed_sources_add_up_in_the_basis_of_their_sum(case):
    values, other = case[1](6, 8), case[1](6, 9)["ds"]
    block = prepared(case)
    streamed = values | {"ds": other}
    readers = Readers(block.factors, block.factor.backend, {"ds": "s"})
    assert readers.parts_of_bases == block.factors[:2]
    sources = values, streamed
    of_bases = Readers(readers.parts_of_bases, block.factor.backend, {"ds": "s"})
    found = of_bases.measure_sum((dict(source) for source in sources), joined=True)
    begin_bases([block.factor], found)
    sums = readers.measure_sum((dict(source) for source in sources), joined=False)
    Update(sums).commit(0.9)
    assert not readers.parts_of_bases
    A, G, F = moments(case, values)
    _, H, more = moments(case, streamed)
    B = diagonal_in(basis(A, G + H), F + more)
    for _ in range(2):
        np.testing.assert_allclose(block.full_fisher_block(), B, atol=EXACT * abs(B).max())
        block.factor.refresh()


@every_case
def test_pieces_of_a_batch_add_up(case, monkeypatch):
    values = case[1](5, 10)
    collection = registered(case)
    monkeypatch.setattr(collection.backend, "scratch_bytes", 1)  # one example at a time
    block = observe(collection, [["ds"]], [values])
    A, G, F = moments(case, values)
    B = diagonal_in(basis(A, G), F)
    np.testing.assert_allclose(block.full_fisher_block(), B, atol=EXACT * abs(B).max())


def test_a_checkpoint_brings_basis_and_eigenvalues_back():
    case = CASES["dense"]
    old = observe(registered(case), [["ds"]], [case[1](6, 11)])
    for factor in old.factors:
        factor.update(case[1](6, 12), 0.5)
    new = prepared(case)
    for factor, source in zip(new.factors, old.factors, strict=True):
        factor.restore(source.arrays(), source.average.weight, source.repeats)
    np.testing.assert_array_equal(new.full_fisher_block(), old.full_fisher_block())
    for block in (old, new):
        for factor in block.factors:
            factor.update(case[1](6, 13), 0.5)
        block.factor.refresh()
    np.testing.assert_array_equal(new.full_fisher_block(), old.full_fisher_block())


def test_vectors_may_be_columns_or_rows():
    case = CASES["dense"]
    values = case[1](6, 14)
    factor = observe(registered(case), [["ds"]], [values]).factor
    A, G, F = moments(case, values)
    B = diagonal_in(basis(A, G), F) + np.eye(len(F))
    x = np.random.default_rng(15).normal(size=(len(B), 3))
    atol = EXACT * abs(B).max()
    np.testing.assert_allclose(factor.left_multiply_matpower(x, 1, lambda: 1), B @ x, atol=atol)
    column = factor.left_multiply_matpower(x[:, 0], 1, lambda: 1)
    np.testing.assert_allclose(column, B @ x[:, 0], atol=atol)
    rows = factor.right_multiply_matpower(x.T, 1, lambda: 1)
    np.testing.assert_allclose(rows, x.T @ B, atol=atol)
    with pytest.raises(ke.ShapeError, match="from the left"):
        factor.left_multiply_matpower(x[1:], 1, lambda: 1)


def test_reading_before_the_first_batch_is_refused():
    block = prepared(CASES["dense"])
    with pytest.raises(ke.NotReadyError, match="no statistics yet"):
        block.multiply((np.ones((D_IN, D_OUT)), np.ones(D_OUT)))
    with pytest.raises(ke.NotReadyError, match="no basis yet"):
        block.full_fisher_block()


EKFAC_EVERYWHERE = {"fully_connected": "ekfac", "conv2d": "ekfac"}


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_the_trace_is_that_of_the_exact_fisher_matrix_whatever_the_basis(name):
    model = getattr(models, name)()
    inputs = models.random_inputs(model, batch=3)
    engine = ke.Engine.from_onnx(
        model,
        loss="categorical",
        estimation_mode="exact",
        reduction="batch_mean",
        approximations=EKFAC_EVERYWHERE,
    )
    engine.observe(inputs)
    for parameters, block in engine.collection.fisher_blocks.items():
        names = [parameters] if isinstance(parameters, str) else list(parameters)
        F = oracle.dense_fisher(model, inputs, "output", names, "categorical")
        trace = sum(np.trace(F[where, where]) for where in _slices(model, names))
        # float32 statistics of a few hundred terms
        assert sum(factor.trace() for factor in block.factors[-1:]) == pytest.approx(trace, 1e-4)


def _slices(model, names):
    return oracle.parameter_slices(model, names).values()
