"""Kronecker blocks of dense layers against dense matrices."""

from itertools import product

import numpy as np
import pytest
from scipy.linalg import fractional_matrix_power

import kfac_engine as ke
from tests.lifecycle import as_matrix, observe, plain_packing, second_moment

DOUBLE = 1e-10  # relative: float64 through a condition number of a hundred
SINGLE = 1e-4  # relative: float32 products of float32 powers, the same

N, D_IN, D_OUT = 8, 4, 3
DAMPING = 0.3
PARAMS = {True: ("w", "b"), False: "w"}
SHAPES = {True: [(D_IN, D_OUT), (D_OUT,)], False: [(D_IN, D_OUT)]}

either_bias = pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])


def batch(seed=0, dtype=np.float64, between=(), n=N):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, *between, D_IN)) + 0.3
    ds = rng.normal(size=(n, *between, D_OUT)) * [1.0, 2.0, 0.5]
    return {"x": x.astype(dtype), "ds": ds.astype(dtype)}


def registered(bias=True, *, approx="kron", config=None, **options):
    collection = ke.LayerCollection(config=config)
    collection.register_fully_connected(PARAMS[bias], "x", "s", approx=approx, **options)
    return collection


def sides(values, bias):
    """``A`` and ``G`` of one batch, the mean over every row."""
    x, ds = values["x"], values["ds"]
    A = second_moment(x.reshape(-1, x.shape[-1]), bias)
    return A, second_moment(ds.reshape(-1, ds.shape[-1]))


def dampings(A, G, damping):
    """How a damping is split: in the ratio of the mean traces, the bias's one included."""
    pi = np.sqrt((np.trace(A) * len(G)) / (np.trace(G) * len(A)))
    return np.sqrt(damping) * pi, np.sqrt(damping) / pi


def damped(matrix, damping):
    return matrix + damping * np.eye(len(matrix))


def block_power(A, G, exp, damping=DAMPING, c=1):
    """``(c · (A + λ_A) ⊗ (G + λ_G)) ** exp`` with ``λ_A·λ_G = λ/c``, by dense powers."""
    a, g = dampings(A, G, damping / c)
    return fractional_matrix_power(c * np.kron(damped(A, a), damped(G, g)), exp)


# -- the published example -------------------------------------------------------------------------


def test_the_published_steps_give_the_published_products():
    rng = np.random.default_rng(0)
    vw, vb = rng.normal(size=(4, 3)), rng.normal(size=3)
    batches = [{"x": rng.normal(size=(8, 4)), "ds": rng.normal(size=(8, 3))} for _ in range(3)]

    shapes = {"w": (4, 3), "b": (3,), "x": (8, 4), "s": (8, 3), "ds": (8, 3)}
    lc = ke.LayerCollection(graph=shapes)
    lc.register_fully_connected(params=("w", "b"), inputs="x", outputs="s", approx="kron")
    block = lc.fisher_blocks[("w", "b")]
    block.instantiate_factors(grads_list=[["ds"]], damping=1e-2)
    block.register_inverse()
    block.register_matpower(-0.5)
    block.register_cholesky()
    block.register_cholesky_inverse()
    factors = lc.get_factors()
    for f in factors:
        f.instantiate_cov_variables()
    updates = [f.make_covariance_update_op(0.95) for f in factors]
    for f in factors:
        f.instantiate_inv_variables()
    refreshes = [op for f in factors for op in f.make_inverse_update_ops()]
    for values in batches:
        for op in updates:
            op(values)
    for op in refreshes:
        op()
    found = [
        block.multiply((vw, vb)),
        block.multiply_inverse((vw, vb)),
        block.multiply_matpower((vw, vb), -0.5),
        block.multiply_cholesky((vw, vb), transpose=False),
        block.multiply_cholesky_inverse((vw, vb), transpose=False),
    ]
    fisher, tensors = block.full_fisher_block(), block.tensors_to_compute_grads()

    weights = 0.95 ** np.arange(2, -1, -1)
    A, G = (
        sum(w * M for w, M in zip(weights, moments, strict=True)) / weights.sum()
        for moments in zip(*(sides(values, True) for values in batches), strict=True)
    )
    np.testing.assert_allclose(fisher, np.kron(A, G), rtol=DOUBLE, atol=DOUBLE)
    assert tensors == ("s",)
    assert block.num_registered_towers == 1
    assert block.damping == 1e-2
    a, g = dampings(A, G, 1e-2)
    L = np.kron(np.linalg.cholesky(damped(A, a)), np.linalg.cholesky(damped(G, g)))
    powers = [block_power(A, G, exp, 1e-2) for exp in (1, -1, -0.5)]
    v = np.concatenate([vw.ravel(), vb])
    for result, matrix in zip(found, [*powers, L, np.linalg.inv(L)], strict=True):
        assert isinstance(result, tuple)
        flat = np.concatenate([part.ravel() for part in result])
        np.testing.assert_allclose(flat, matrix @ v, rtol=DOUBLE, atol=DOUBLE)


# -- products --------------------------------------------------------------------------------------


@either_bias
@pytest.mark.parametrize("between", [(), (3,), (2, 2)], ids=["dense", "tokens", "images"])
def test_powers_are_those_of_the_dense_damped_product(bias, between):
    values = batch(between=between)
    block = observe(registered(bias), [["ds"]], [values], damping=DAMPING, exps=(-1, -0.5, 0.3))
    A, G = sides(values, bias)
    c = int(np.prod(between, dtype=int))
    np.testing.assert_allclose(block.full_fisher_block(), c * np.kron(A, G), rtol=DOUBLE)
    for exp in (1, -1, -0.5, 0.3):
        found = as_matrix(
            lambda v, p=exp: block.multiply_matpower(v, p), SHAPES[bias], plain_packing
        )
        expected = block_power(A, G, exp, c=c)
        np.testing.assert_allclose(found, expected, atol=DOUBLE * abs(expected).max())
    assert block.repeats == c
    assert block.damping == pytest.approx(DAMPING / c)


@either_bias
def test_roots_are_the_product_of_the_sides_roots_and_their_transposes(bias):
    values = batch(between=(2,))
    block = observe(registered(bias), [["ds"]], [values], damping=DAMPING, cholesky=True)
    A, G = sides(values, bias)
    a, g = dampings(A, G, DAMPING / 2)
    L = np.sqrt(2) * np.kron(np.linalg.cholesky(damped(A, a)), np.linalg.cholesky(damped(G, g)))
    for multiply, matrix in [
        (block.multiply_cholesky, L),
        (block.multiply_cholesky_inverse, np.linalg.inv(L)),
    ]:
        for transpose in (False, True):
            found = as_matrix(
                lambda v, f=multiply, t=transpose: f(v, transpose=t), SHAPES[bias], plain_packing
            )
            expected = matrix.T if transpose else matrix
            np.testing.assert_allclose(found, expected, atol=DOUBLE * abs(expected).max())


@pytest.mark.parametrize(
    ("approx", "diagonal"),
    [
        ("kron_in_diag", (True, False)),
        ("kron_out_diag", (False, True)),
        ("kron_both_diag", (True, True)),
    ],
)
@either_bias
def test_a_diagonal_side_is_a_dense_side_without_what_lies_off_its_diagonal(approx, diagonal, bias):
    values = batch()
    block = observe(
        registered(bias, approx=approx),
        [["ds"]],
        [values],
        damping=DAMPING,
        exps=(-1, -0.5),
        cholesky=True,
    )
    A, G = (
        np.diag(np.diag(M)) if flat else M
        for M, flat in zip(sides(values, bias), diagonal, strict=True)
    )
    np.testing.assert_allclose(block.full_fisher_block(), np.kron(A, G), atol=DOUBLE)
    for exp in (1, -1, -0.5):
        found = as_matrix(
            lambda v, p=exp: block.multiply_matpower(v, p), SHAPES[bias], plain_packing
        )
        np.testing.assert_allclose(found, block_power(A, G, exp), atol=DOUBLE * abs(found).max())
    root = as_matrix(block.multiply_cholesky, SHAPES[bias], plain_packing)
    np.testing.assert_allclose(root @ root.T, block_power(A, G, 1), rtol=DOUBLE, atol=DOUBLE)


def test_the_inverse_undoes_the_block_and_two_halves_make_a_whole():
    block = observe(registered(), [["ds"]], [batch()], damping=DAMPING, exps=(-1, -0.5))
    rng = np.random.default_rng(1)
    v = rng.normal(size=(D_IN, D_OUT)), rng.normal(size=D_OUT)
    for found, given in zip(block.multiply(block.multiply_inverse(v)), v, strict=True):
        np.testing.assert_allclose(found, given, rtol=DOUBLE, atol=DOUBLE)
    halves = block.multiply_matpower(block.multiply_matpower(v, -0.5), -0.5)
    for found, whole in zip(halves, block.multiply_inverse(v), strict=True):
        np.testing.assert_allclose(found, whole, rtol=DOUBLE, atol=DOUBLE)


@pytest.mark.parametrize("weight_format", ["IO", "OI"])
def test_the_layout_of_the_weight_changes_nothing_but_the_layout(weight_format):
    values, v = batch(), np.random.default_rng(1).normal(size=(D_IN, D_OUT))
    collection = registered(False, weight_format=weight_format)
    block = observe(collection, [["ds"]], [values], damping=DAMPING, exps=(-1,))
    inverse = block_power(*sides(values, False), -1)
    expected = (inverse @ v.ravel()).reshape(D_IN, D_OUT)
    if weight_format == "OI":
        found = block.multiply_inverse(np.ascontiguousarray(v.T)).T
    else:
        found = block.multiply_inverse(v)
    np.testing.assert_allclose(found, expected, rtol=DOUBLE, atol=DOUBLE)


def test_data_may_have_its_features_before_its_positions():
    values = batch(between=(3,))
    turned = {name: array.swapaxes(1, 2) for name, array in values.items()}
    block = observe(registered(feature_axis=-2), [["ds"]], [turned])
    A, G = sides(values, True)
    np.testing.assert_allclose(block.full_fisher_block(), 3 * np.kron(A, G), rtol=DOUBLE)


# -- damping ---------------------------------------------------------------------------------------


def test_without_pi_both_sides_get_the_root_of_the_damping():
    values = batch()
    config = ke.CollectionConfig(pi_type="off")
    block = observe(registered(config=config), [["ds"]], [values], damping=DAMPING, exps=(-1,))
    A, G = sides(values, True)
    root = np.sqrt(DAMPING)
    expected = np.linalg.inv(np.kron(damped(A, root), damped(G, root)))
    found = as_matrix(block.multiply_inverse, SHAPES[True], plain_packing)
    np.testing.assert_allclose(found, expected, rtol=DOUBLE, atol=DOUBLE)


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_the_damping_is_divided_by_a_power_of_the_positions(power):
    values = batch(between=(4,))
    config = ke.CollectionConfig(normalize_damping_power=power)
    block = observe(registered(config=config), [["ds"]], [values], damping=DAMPING)
    assert block.damping == pytest.approx(DAMPING / 4**power)
    A, G = sides(values, True)
    a, g = dampings(A, G, DAMPING / 4**power)
    expected = 4 * np.kron(damped(A, a), damped(G, g))
    found = as_matrix(block.multiply, SHAPES[True], plain_packing)
    np.testing.assert_allclose(found, expected, rtol=DOUBLE, atol=DOUBLE)
    # The multiple of the identity that the two dampings add to the block.
    assert 4 * a * g == pytest.approx(DAMPING * 4 ** (1 - power))


@pytest.mark.parametrize("zero", ["x", "ds"])
def test_a_side_without_any_signal_leaves_the_damping_even(zero):
    values = batch()
    values[zero] = np.zeros_like(values[zero])
    block = observe(registered(False), [["ds"]], [values], damping=DAMPING, exps=(-1,))
    A, G = sides(values, False)
    root = np.sqrt(DAMPING)
    expected = np.linalg.inv(np.kron(damped(A, root), damped(G, root)))
    found = as_matrix(block.multiply_inverse, SHAPES[False], plain_packing)
    np.testing.assert_allclose(found, expected, rtol=DOUBLE, atol=DOUBLE)


def test_the_split_is_by_the_moments_at_refresh_and_fresh_for_power_one():
    collection, batches = registered(), [batch(0), batch(1)]
    block = observe(collection, [["ds"]], batches[:1], damping=DAMPING, exps=(-1,), decay=1.0)
    v = np.ones((D_IN, D_OUT)), np.ones(D_OUT)
    flat = np.ones((D_IN + 1) * D_OUT)
    stale = block_power(*sides(batches[0], True), -1) @ flat
    for factor in collection.get_factors():
        factor.make_covariance_update_op(1.0)(batches[1])
    A, G = (
        (first + second) / 2
        for first, second in zip(sides(batches[0], True), sides(batches[1], True), strict=True)
    )
    inverse, fresh = (plain_packing(f(v)).ravel() for f in (block.multiply_inverse, block.multiply))
    np.testing.assert_allclose(inverse, stale, rtol=DOUBLE, atol=DOUBLE)
    np.testing.assert_allclose(fresh, block_power(A, G, 1) @ flat, rtol=DOUBLE, atol=DOUBLE)


def test_an_adaptive_damping_is_read_at_refresh_and_fresh_for_power_one():
    lam, values, collection = {"value": DAMPING}, batch(), registered()
    damping = lambda: lam["value"]  # noqa: E731 (a damping that changes)
    block = observe(collection, [["ds"]], [values], damping=damping, exps=(-1,))
    v, flat = (np.ones((D_IN, D_OUT)), np.ones(D_OUT)), np.ones((D_IN + 1) * D_OUT)
    lam["value"] = 2.0
    moments = sides(values, True)
    for multiply, expected in [
        (block.multiply_inverse, block_power(*moments, -1, DAMPING)),
        (block.multiply, block_power(*moments, 1, 2.0)),
    ]:
        found = plain_packing(multiply(v)).ravel()
        np.testing.assert_allclose(found, expected @ flat, rtol=DOUBLE, atol=DOUBLE)
    for factor in collection.get_factors():
        factor.refresh()
    found = plain_packing(block.multiply_inverse(v)).ravel()
    expected = block_power(*moments, -1, 2.0) @ flat
    np.testing.assert_allclose(found, expected, rtol=DOUBLE, atol=DOUBLE)


# -- towers, sources, shared factors ---------------------------------------------------------------


def test_two_towers_are_one_tower_of_both_and_sources_are_summed():
    whole = [batch(seed) for seed in (0, 1)]
    collection = ke.LayerCollection()
    for tower in range(2):
        collection.register_fully_connected(("w", "b"), f"x{tower}", f"s{tower}")
    halves = {f"x{t}": whole[0]["x"][4 * t : 4 * t + 4] for t in range(2)}
    for source, t in product(range(2), range(2)):
        halves[f"d{source}{t}"] = whole[source]["ds"][4 * t : 4 * t + 4]
    grads = [["d00", "d01"], ["d10", "d11"]]
    block = observe(collection, grads, [halves], damping=DAMPING, exps=(-1,))
    A = sides(whole[0], True)[0]
    G = sides(whole[0], True)[1] + sides(whole[1], True)[1]
    np.testing.assert_allclose(block.full_fisher_block(), np.kron(A, G), rtol=DOUBLE, atol=DOUBLE)
    found = as_matrix(block.multiply_inverse, SHAPES[True], plain_packing)
    np.testing.assert_allclose(found, block_power(A, G, -1), rtol=DOUBLE, atol=DOUBLE)
    assert block.tensors_to_compute_grads() == ("s0", "s1")
    assert block.num_registered_towers == 2


def test_layers_of_one_input_share_its_factor_and_keep_their_own_dampings():
    values = batch() | {"dt": 3 * batch(2)["ds"]}
    collection = ke.LayerCollection()
    collection.register_fully_connected("w", "x", "s")
    collection.register_fully_connected("v", "x", "t")
    first, second = collection.get_blocks()
    first.instantiate_factors([["ds"]], DAMPING)
    second.instantiate_factors([["dt"]], 0.01)
    factors = collection.get_factors()
    assert len(factors) == 3
    assert first.input_factor is second.input_factor
    assert factors == (first.input_factor, first.output_factor, second.output_factor)
    for block in (first, second):
        block.register_inverse()
    for factor in factors:
        factor.instantiate_cov_variables()
        factor.make_covariance_update_op(0.9)(values)
    for factor in factors:
        factor.refresh()
    A, G = sides(values, False)
    for block, gradient, damping in [(first, G, DAMPING), (second, None, 0.01)]:
        moment = second_moment(values["dt"]) if gradient is None else gradient
        found = as_matrix(block.multiply_inverse, SHAPES[False], plain_packing)
        expected = block_power(A, moment, -1, damping)
        np.testing.assert_allclose(found, expected, rtol=DOUBLE, atol=DOUBLE * abs(expected).max())


# -- the form of results ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_results_have_the_type_and_form_of_the_vector(dtype):
    block = observe(registered(), [["ds"]], [batch(dtype=dtype)], damping=DAMPING, exps=(-1,))
    rng = np.random.default_rng(1)
    pair = [rng.normal(size=shape).astype(dtype) for shape in SHAPES[True]]
    expected = block_power(*sides(batch(dtype=dtype), True), -1) @ np.concatenate(
        [part.ravel().astype(np.float64) for part in pair]
    )
    tolerance = {np.float16: 1e-2, np.float32: SINGLE, np.float64: DOUBLE}[dtype]
    for vector in (tuple(pair), pair):
        found = block.multiply_inverse(vector)
        assert isinstance(found, tuple)
        assert [(part.dtype, part.shape) for part in found] == [(dtype, s) for s in SHAPES[True]]
        flat = np.concatenate([part.ravel() for part in found])
        np.testing.assert_allclose(flat, expected, rtol=tolerance, atol=tolerance)
    kept = np.float64 if dtype is np.float64 else np.float32
    assert block.full_fisher_block().dtype == kept


def test_a_vector_of_whole_numbers_is_not_answered_in_whole_numbers():
    block = observe(registered(False), [["ds"]], [batch()], damping=DAMPING, exps=(-1,))
    whole = np.arange(D_IN * D_OUT).reshape(D_IN, D_OUT)
    found = block.multiply_inverse(whole)
    np.testing.assert_array_equal(found, block.multiply_inverse(whole.astype(np.float64)))


def test_results_are_new_arrays_that_nothing_later_changes():
    collection = registered()
    block = observe(collection, [["ds"]], [batch()], damping=DAMPING, exps=(-1,), cholesky=True)
    v = np.ones((D_IN, D_OUT)), np.ones(D_OUT)
    results = [block.full_fisher_block()]
    for multiply in (
        block.multiply,
        block.multiply_inverse,
        block.multiply_cholesky,
        block.multiply_cholesky_inverse,
    ):
        results += multiply(v)
    kept = [array.copy() for array in results]
    for factor in collection.get_factors():
        factor.make_covariance_update_op(0.5)(batch(3))
        factor.refresh()
    block.multiply_inverse(v)
    for array, before in zip(results, kept, strict=True):
        np.testing.assert_array_equal(array, before)
        assert not any(np.shares_memory(array, part) for part in v)
        assert array.flags.writeable
    np.testing.assert_array_equal(v[0], 1)


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("damping", [-0.1, np.nan, np.inf])
def test_a_damping_that_is_none_is_refused(damping):
    (block,) = registered().get_blocks()
    with pytest.raises(ValueError, match=r"damping .* must not be negative"):
        block.instantiate_factors([["ds"]], damping)


@pytest.mark.parametrize("damping", [-0.1, np.nan, np.inf])
def test_a_damping_that_becomes_none_is_refused_when_it_is_read(damping):
    lam, collection = {"value": 0.1}, registered(False)
    read = lambda: lam["value"]  # noqa: E731 (a damping that changes)
    block = observe(collection, [["ds"]], [batch()], damping=read, exps=(-1,))
    before = block.multiply_inverse(np.ones((D_IN, D_OUT)))
    lam["value"] = damping
    with pytest.raises(ValueError, match="must not be negative"):
        collection.get_factors()[0].refresh()
    np.testing.assert_array_equal(block.multiply_inverse(np.ones((D_IN, D_OUT))), before)


@pytest.mark.parametrize("grads_list", [[], ["ds"], [[]], [["ds", "dt"]], [["ds"], []]], ids=str)
def test_gradients_that_do_not_match_the_towers_are_refused(grads_list):
    (block,) = registered().get_blocks()
    with pytest.raises(ValueError, match="grads_list needs"):
        block.instantiate_factors(grads_list, 0.1)


def test_a_block_without_towers_or_factors_or_statistics_says_what_is_missing():
    collection = ke.LayerCollection()
    block = ke.FullyConnectedKFACBasicFB(collection, has_bias=True)
    collection.register_block(("w", "b"), block)
    with pytest.raises(ke.NotReadyError, match="register a tower"):
        block.instantiate_factors([["ds"]], 0.1)
    block.register_additional_tower(inputs="x", outputs="s")
    for read in (
        lambda: block.damping,
        lambda: block.factors,
        block.register_inverse,
        lambda: block.multiply((np.ones((D_IN, D_OUT)), np.ones(D_OUT))),
    ):
        with pytest.raises(ke.NotReadyError, match="instantiate_factors of the block of"):
            read()
    block.instantiate_factors([["ds"]], 0.1)
    with pytest.raises(ke.NotReadyError, match=r"first update|no statistics"):
        block.multiply((np.ones((D_IN, D_OUT)), np.ones(D_OUT)))


def test_a_declared_output_gives_the_damping_before_the_first_batch():
    collection = ke.LayerCollection(graph={"s": (8, 5, D_OUT)})
    collection.register_fully_connected(("w", "b"), "x", "s")
    (block,) = collection.get_blocks()
    block.instantiate_factors([["ds"]], 0.1)
    assert block.damping == pytest.approx(0.1 / 5)


def test_products_that_were_not_prepared_are_refused():
    block = observe(registered(), [["ds"]], [batch()], exps=(-1,))
    v = np.ones((D_IN, D_OUT)), np.ones(D_OUT)
    with pytest.raises(KeyError, match="not registered"):
        block.multiply_matpower(v, -0.5)
    with pytest.raises(KeyError, match="not registered"):
        block.multiply_cholesky(v)
    (fresh,) = registered().get_blocks()
    fresh.instantiate_factors([["ds"]], 0.1)
    fresh.register_inverse()
    for factor in fresh.factors:
        factor.instantiate_cov_variables()
        factor.make_covariance_update_op(0.9)(batch())
    with pytest.raises(RuntimeError, match="refresh the inverses"):
        fresh.multiply_inverse(v)


@pytest.mark.parametrize(
    ("vector", "error"),
    [
        (np.ones((D_IN, D_OUT)), ke.InputError),
        ((np.ones((D_OUT, D_IN)), np.ones(D_IN)), ke.ShapeError),
        ((np.ones((D_IN, D_OUT)), np.ones(D_IN)), ke.ShapeError),
        ((np.ones(D_IN * D_OUT), np.ones(D_OUT)), ke.ShapeError),
    ],
    ids=["no bias", "transposed", "bias", "flat"],
)
def test_vectors_of_another_layer_are_refused(vector, error):
    block = observe(registered(), [["ds"]], [batch()])
    with pytest.raises(error):
        block.multiply(vector)
