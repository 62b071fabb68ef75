"""Layers used at successive steps, against moments counted in loops and dense sums over lags."""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.curvature.blocks.series import SeriesFB
from tests.comparing import assert_near
from tests.curvature.blocks.test_multi_use import named
from tests.lifecycle import as_matrix, observe, plain_packing, split

EXACT = 1e-10  # float64, through inverse square roots; entries relative to the largest
SINGLE = 2e-3  # float32 averages, through inverses whose condition number is about a thousand
USES, BATCH, D_IN, D_OUT = 4, 6, 3, 2
DAMPING = 0.3
LAGS = 400  # of an infinite sequence; the damped terms fall below 1e-30 long before
SHAPES = [(D_IN, D_OUT), (D_OUT,)]
every_option = pytest.mark.parametrize("option", [1, 2])


def sequences(d, seed, batch=BATCH, dtype=np.float64):
    """``(u, n, d)``: each step remembers the one before it."""
    rng = np.random.default_rng(seed)
    carry = 0.8 * np.eye(d) + 0.2 * rng.normal(size=(d, d))
    steps = [rng.normal(size=(batch, d))]
    for _ in range(USES - 1):
        steps.append(steps[-1] @ carry + 0.5 * rng.normal(size=(batch, d)))
    return np.array(steps).astype(dtype)


def moments(x, has_bias):
    """``C₀`` and ``C₁``, pair by pair."""
    x = x.astype(np.float64)
    if has_bias:
        x = np.concatenate([x, np.ones((*x.shape[:2], 1))], axis=2)
    uses, batch, _ = x.shape
    c0 = sum(np.outer(x[u, b], x[u, b]) for u in range(uses) for b in range(batch))
    c1 = sum(np.outer(x[u + 1, b], x[u, b]) for u in range(uses - 1) for b in range(batch))
    return c0 / (uses * batch), c1 / (uses * batch)


def roots(c0):
    values, Q = np.linalg.eigh(c0)
    return (Q * np.sqrt(values)) @ Q.T, (Q / np.sqrt(values)) @ Q.T


def lag_moment(c0, c1, d, option):
    """``A_d`` of a linear recursion; option 1 symmetrises and takes eigenvalues absolute."""
    S, R = roots(c0)
    psi = R @ c1 @ R
    if option == 1:
        values, Q = np.linalg.eigh((psi + psi.T) / 2)
        psi = (Q * abs(values)) @ Q.T
    return S @ np.linalg.matrix_power(psi, d) @ S


def dense_block(A, G, option, dampings=(0.0, 0.0)):
    """The sum over lags, every term written out."""
    damped = [
        (c0 + damping * np.eye(len(c0)), c1)
        for (c0, c1), damping in zip((A, G), dampings, strict=True)
    ]
    weights = [USES - d for d in range(USES)] if option == 1 else [USES] * LAGS
    total = 0
    for d, weight in enumerate(weights):
        term = [lag_moment(*side, d, option) for side in damped]
        total = total + weight * np.kron(*term)
        if d:
            total = total + weight * np.kron(*(matrix.T for matrix in term))
    return total


def infinite_inverse(A, G, dampings):
    """Option 2's inverse by the specification's formula, on the dense Kronecker products."""
    (c0_a, c1_a), (c0_g, c1_g) = A, G
    _, inverse_a = roots(c0_a + dampings[0] * np.eye(len(c0_a)))
    _, inverse_g = roots(c0_g + dampings[1] * np.eye(len(c0_g)))
    P = np.kron(inverse_a @ c1_a @ inverse_a, inverse_g @ c1_g @ inverse_g)
    eye = np.eye(len(P))
    middle = np.linalg.inv(eye - P.T @ P)
    R = np.kron(inverse_a, inverse_g)
    return R @ (eye - P) @ middle @ (eye - P.T) @ R / USES


def observed(a, ds, option, form="stacked", exps=(-1,), config=None, **options):
    collection = ke.LayerCollection(config=config)
    inputs, x_values = named("x", a, form)
    gradients, d_values = named("d", ds, form)
    outputs, _ = named("s", ds, form)
    collection.register_fully_connected_multi(
        ("w", "b"), inputs, outputs, num_uses=USES, approx=f"kron_series_{option}"
    )
    values = x_values | d_values
    return observe(collection, [[gradients]], [values], damping=DAMPING, exps=exps, **options)


@every_option
@pytest.mark.parametrize("form", ["list", "folded", "stacked"])
def test_a_block_is_the_sum_over_lags(option, form):
    a, ds = sequences(D_IN, seed=0), sequences(D_OUT, seed=1)
    block = observed(a, ds, option, form)
    A, G = moments(a, has_bias=True), moments(ds, has_bias=False)
    np.testing.assert_allclose(block.input_factor.cov, A[0], atol=1e-12)
    np.testing.assert_allclose(block.input_factor.cov_dt1, A[1], atol=1e-12)
    np.testing.assert_allclose(block.output_factor.cov_dt1, G[1], atol=1e-12)
    assert_near(block.full_fisher_block(), dense_block(A, G, option), EXACT)


@every_option
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(np.float64, EXACT), (np.float32, SINGLE)], ids=["double", "single"]
)
def test_products_and_inverse_are_those_of_the_damped_sum(option, dtype, tolerance):
    a, ds = sequences(D_IN, seed=2, dtype=dtype), sequences(D_OUT, seed=3, dtype=dtype)
    block = observed(a, ds, option)
    A, G = moments(a, has_bias=True), moments(ds, has_bias=False)
    dampings = split(A[0], G[0], DAMPING, USES)
    B = dense_block(A, G, option, dampings)
    assert block.damping == pytest.approx(DAMPING / USES)
    assert_near(as_matrix(block.multiply, SHAPES, plain_packing, dtype), B, tolerance)
    inverse = as_matrix(block.multiply_inverse, SHAPES, plain_packing, dtype)
    assert_near(inverse, np.linalg.inv(B), tolerance)
    if option == 2:
        assert_near(inverse, infinite_inverse(A, G, dampings), tolerance)


def test_two_uses_with_symmetric_lags_need_no_model():
    """Option 1 for u = 2: ``2·A₀ ⊗ G₀ + 2·A₁ ⊗ G₁`` as measured, where no eigenvalue is negative.

    Both uses are the same here, up to a factor: the lag moment is then symmetric and positive.
    """
    rng = np.random.default_rng(4)
    a, ds = (np.stack([x, 0.5 * x]) for x in (rng.normal(size=(BATCH, d)) for d in (D_IN, D_OUT)))
    collection = ke.LayerCollection()
    collection.register_fully_connected_multi("w", "x", "s", num_uses=2, approx="kron_series_1")
    block = observe(collection, [["d"]], [{"x": a, "d": ds}])
    (a0, a1), (g0, g1) = moments(a, has_bias=False), moments(ds, has_bias=False)
    assert_near(block.full_fisher_block(), 2 * np.kron(a0, g0) + 2 * np.kron(a1, g1), EXACT)


@every_option
def test_two_towers_are_one_of_both(option):
    a, ds = sequences(D_IN, seed=6), sequences(D_OUT, seed=7)
    collection = ke.LayerCollection()
    values = {}
    for tower, part in enumerate((slice(0, 3), slice(3, 6))):
        collection.register_fully_connected_multi(
            ("w", "b"), f"x{tower}", f"s{tower}", num_uses=USES, approx=f"kron_series_{option}"
        )
        values |= {f"x{tower}": a[:, part], f"d{tower}": ds[:, part]}
    block = observe(collection, [["d0", "d1"]], [values])
    A, G = moments(a, has_bias=True), moments(ds, has_bias=False)
    assert_near(block.full_fisher_block(), dense_block(A, G, option), EXACT)


def test_positions_are_sequences_of_their_own():
    """Listed uses of five positions: five times the block of five times as many examples."""
    rng = np.random.default_rng(8)
    a, ds = rng.normal(size=(2, 3, 5, D_IN)), rng.normal(size=(2, 3, 5, D_OUT))
    found = []
    for x, d in [(a, ds), (a.reshape(2, 15, D_IN), ds.reshape(2, 15, D_OUT))]:
        collection = ke.LayerCollection()
        collection.register_fully_connected_multi(
            "w", ["x0", "x1"], ["s0", "s1"], approx="kron_series_1"
        )
        values = {"x0": x[0], "x1": x[1], "d0": d[0], "d1": d[1]}
        found.append(observe(collection, [[["d0", "d1"]]], [values]).full_fisher_block())
    assert_near(found[0], 5 * found[1], EXACT)


def test_independent_and_successive_uses_share_their_factors():
    collection = ke.LayerCollection()
    for name, approx in (("w", "kron_indep"), ("v", "kron_series_2")):
        collection.register_fully_connected_multi(name, "x", "s", num_uses=USES, approx=approx)
    for block in collection.get_blocks():
        block.instantiate_factors([["d"]], DAMPING)
        block.register_inverse()
    values = {"x": sequences(D_IN, seed=16), "d": sequences(D_OUT, seed=17)}
    assert len(collection.get_factors()) == 2
    for factor in collection.get_factors():
        factor.update(values, 0.9)
    for factor in collection.get_factors():
        factor.refresh()
    A, G = moments(values["x"], False), moments(values["d"], False)
    plain, series = collection.get_blocks()
    assert_near(plain.full_fisher_block(), USES * np.kron(A[0], G[0]), EXACT)
    assert_near(series.full_fisher_block(), dense_block(A, G, 2), EXACT)
    vector = np.ones((D_IN, D_OUT))
    dampings = split(A[0], G[0], DAMPING, USES)
    expected = np.linalg.solve(dense_block(A, G, 2, dampings), vector.ravel())
    assert_near(series.multiply_inverse(vector).ravel(), expected, EXACT)


def test_the_named_block_takes_option_2_unless_told():
    collection = ke.LayerCollection()
    block = ke.FullyConnectedSeriesFB(collection, has_bias=True, num_uses=USES)
    assert isinstance(block, SeriesFB)
    block.register_additional_tower("x", "s")
    collection.register_block(("w", "b"), block)
    a, ds = sequences(D_IN, seed=18), sequences(D_OUT, seed=19)
    observe(collection, [["d"]], [{"x": a, "d": ds}])
    assert_near(block.full_fisher_block(), observed(a, ds, 2).full_fisher_block(), EXACT)


@pytest.mark.parametrize(
    "call",
    [
        lambda block: block.register_matpower(-0.5),
        lambda block: block.register_cholesky(),
        lambda block: block.register_cholesky_inverse(),
        lambda block: block.multiply_matpower(np.ones((D_IN, D_OUT)), 2),
        lambda block: block.multiply_cholesky(np.ones((D_IN, D_OUT))),
        lambda block: block.multiply_cholesky_inverse(np.ones((D_IN, D_OUT))),
    ],
    ids=["power", "cholesky", "inverse", "product", "by cholesky", "by inverse"],
)
def test_only_powers_one_and_minus_one_exist(call):
    collection = ke.LayerCollection()
    collection.register_fully_connected_multi("w", "x", "s", num_uses=2, approx="kron_series_1")
    (block,) = collection.get_blocks()
    block.instantiate_factors([["d"]], DAMPING)
    with pytest.raises(NotImplementedError, match="kron_indep"):
        call(block)


def test_an_inverse_is_not_read_before_its_refresh():
    collection = ke.LayerCollection()
    collection.register_fully_connected_multi("w", "x", "s", num_uses=USES, approx="kron_series_2")
    (block,) = collection.get_blocks()
    block.instantiate_factors([["d"]], DAMPING)
    block.register_inverse()
    for factor in block.factors:
        factor.update({"x": sequences(D_IN, 20), "d": sequences(D_OUT, 21)}, 0.9)
    with pytest.raises(ke.NotReadyError, match="refresh"):
        block.multiply_inverse(np.ones((D_IN, D_OUT)))


def test_an_unknown_option_is_refused():
    with pytest.raises(ke.InputError, match="option"):
        ke.FullyConnectedSeriesFB(ke.LayerCollection(), option=3)
