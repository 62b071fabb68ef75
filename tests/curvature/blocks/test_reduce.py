"""KFAC-reduce against reduced rows written out, and where it is exact."""

from functools import partial

import numpy as np
import pytest

import kfac_engine as ke
from tests.backend.truths import patches as truth_patches
from tests.lifecycle import Block, damped_block, observe, plain_packing, second_moment

EXACT = 1e-11  # float64 sums of some hundred terms of size one
D_IN, D_OUT, T = 3, 2, 4
KERNEL, SIDE = (2, 2), 4


def tokens(n, seed):
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=(n, T, D_IN)) + 0.5, "ds": rng.normal(size=(n, T, D_OUT))}


def plain(n, seed):
    return {name: value[:, 0] for name, value in tokens(n, seed).items()}


def images(n, seed):
    rng = np.random.default_rng(seed)
    shape = (n, SIDE - 1, SIDE - 1, D_OUT)
    return {"x": rng.normal(size=(n, SIDE, SIDE, D_IN)) + 0.5, "ds": rng.normal(size=shape)}


def rows_of(values):
    """Rows of inputs and gradients, ``(n, t, d)``, float64."""
    x, ds = (values[name].astype(np.float64) for name in ("x", "ds"))
    if x.ndim == 4:
        x = truth_patches(np.moveaxis(x, -1, 1), KERNEL, (1, 1), (1, 1), (0, 0), (0, 0))
    return x.reshape(len(x), -1, x.shape[-1]), ds.reshape(len(ds), -1, D_OUT)


# A batch, the shape of the weight, and the key.
CASES = {
    "tokens": (tokens, (D_IN, D_OUT), ("w", "b")),
    "no-bias": (tokens, (D_IN, D_OUT), "w"),
    "no-positions": (plain, (D_IN, D_OUT), ("w", "b")),
    "convolution": (images, (*KERNEL, D_IN, D_OUT), ("w", "b")),
}


def registered(case, towers=1, approx="kron_reduce"):
    _, shape, key = case
    collection = ke.LayerCollection(graph={"w": shape, "b": (D_OUT,)})
    for tower in range(towers):
        names = [f"{name}{tower}" if towers > 1 else name for name in "xs"]
        if len(shape) == 2:
            collection.register_fully_connected(key, *names, approx=approx)
        else:
            collection.register_conv2d(key, (1, 1, 1, 1), "VALID", *names, approx=approx)
    return collection


def truth(case, values):
    """``A`` of mean inputs and ``G`` of summed gradients."""
    a, ds = rows_of(values)
    means = [sum(rows) / len(rows) for rows in a]
    return second_moment(means, case[2] != "w"), second_moment([sum(rows) for rows in ds])


def block_of(case):
    def batch(n, seed, dtype=np.float64):
        return {name: value.astype(dtype) for name, value in case[0](n, seed).items()}

    return Block(
        batch, partial(registered, case), lambda values: np.kron(*truth(case, values)),
        lambda values, damping: damped_block(*truth(case, values), damping, 1),
        [case[1]] + [(D_OUT,)] * (case[2] != "w"), plain_packing,
    )  # fmt: skip


BLOCKS = {name: block_of(case) for name, case in CASES.items()}


def fisher(values):
    """The second moment of per-example gradients, sums over positions."""
    a, ds = rows_of(values)
    a = np.concatenate([a, np.ones((*a.shape[:2], 1))], axis=2)
    gradients = [(x.T @ d).ravel() for x, d in zip(a, ds, strict=True)]
    return sum(np.outer(v, v) for v in gradients) / len(gradients)


def test_it_is_exact_for_one_example_whose_gradients_are_equal_at_all_positions():
    # The network averages over positions before its loss: the case that KFAC-reduce is made for.
    values = tokens(1, 6)
    values["ds"][:] = values["ds"][:, :1]
    block = observe(registered(CASES["tokens"]), [["ds"]], [values])
    F = fisher(values)
    np.testing.assert_allclose(block.full_fisher_block(), F, atol=EXACT * abs(F).max())
    expand = observe(registered(CASES["tokens"], approx="kron"), [["ds"]], [values])
    assert abs(expand.full_fisher_block() - F).max() > 0.01 * abs(F).max()


def test_without_positions_it_is_the_kronecker_block():
    values = plain(5, 7)
    reduced, expanded = (
        observe(registered(CASES["no-positions"], approx=approx), [["ds"]], [values])
        for approx in ("kron_reduce", "kron")
    )
    np.testing.assert_allclose(
        reduced.full_fisher_block(), expanded.full_fisher_block(), rtol=EXACT
    )


def test_positions_folded_into_the_batch_are_refused():
    collection = registered(CASES["tokens"])
    collection.register_normal_predictive_distribution("y")
    values = {"x": np.ones((6, D_IN)), "ds": np.ones((6, D_OUT)), "y": np.ones((3, 1))}
    with pytest.raises(NotImplementedError, match="positions along axes of their own"):
        observe(collection, [["ds"]], [values])
