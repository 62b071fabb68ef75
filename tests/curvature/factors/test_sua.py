"""Convolution input factors without spatial correlation, against the formula written out dense."""

import numpy as np
import pytest

import kfac_engine as ke
from tests.lifecycle import as_matrix, observe, plain_packing, power, second_moment, split

EXACT = 1e-11  # float64, through an inverse whose condition number is about a hundred
SINGLE = 1e-4  # the same in float32
DAMPING = 0.2
KERNEL, CHANNELS, OUTPUTS = (2, 3), 3, 2
TAPS = 6
CENTRINGS = {
    "mean modelled": {},
    "mean subtracted": {"assume_zero_mean_activations": True},
    "not centred": {"assume_zero_mean_activations": True, "subtract_mean_contrib_from_cov": False},
}
every_centring = pytest.mark.parametrize("centring", CENTRINGS)
every_bias = pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])


def batch(seed, n=4, dtype=np.float64):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 4, 5, CHANNELS)) @ rng.normal(size=(CHANNELS, CHANNELS)) + 0.7
    return {"x": x.astype(dtype), "ds": rng.normal(size=(n, 2, 2, OUTPUTS)).astype(dtype)}


def pixel_moments(x, centring):
    """The stored covariance and the modelled mean (zero where there is none)."""
    pixels = x.reshape(-1, x.shape[-1]).astype(np.float64)
    mean = pixels.mean(axis=0)
    second = second_moment(pixels)
    if centring == "not centred":
        return second, 0 * mean
    return second - np.outer(mean, mean), mean * (centring == "mean modelled")


def patch_moment(C, mu, bias, centring, taps=TAPS):
    """``I_κ ⊗ C + m mᵀ``, the bias last: a one in ``m`` where the mean is modelled."""
    A = np.zeros((taps * len(C) + bias,) * 2)
    A[: taps * len(C), : taps * len(C)] = np.kron(np.eye(taps), C)
    m = np.concatenate([np.tile(mu, taps), np.ones(int(bias))])
    return A + np.outer(m, m) * (centring == "mean modelled")


def registered(bias, centring, towers=1, **options):
    config = ke.CollectionConfig(**CENTRINGS[centring])
    collection = ke.LayerCollection(graph={"w": (*KERNEL, CHANNELS, OUTPUTS)}, config=config)
    for tower in range(towers):
        suffix = str(tower) if towers > 1 else ""
        collection.register_conv2d(
            ("w", "b") if bias else "w",
            [1, 2, 2, 1],
            "SAME",
            f"x{suffix}",
            f"s{suffix}",
            approx="kron_sua",
            **options,
        )
    return collection


def shapes(bias):
    return [(*KERNEL, CHANNELS, OUTPUTS)] + [(OUTPUTS,)] * bias


@every_centring
@every_bias
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(np.float64, EXACT), (np.float32, SINGLE)], ids=["double", "single"]
)
def test_products_and_inverse_are_those_of_the_dense_matrix(centring, bias, dtype, tolerance):
    values = batch(1, dtype=dtype)
    block = observe(registered(bias, centring), [["ds"]], [values], damping=DAMPING, exps=(-1,))
    C, mu = pixel_moments(values["x"], centring)
    A = patch_moment(C, mu, bias, centring)
    G = second_moment(values["ds"].reshape(-1, OUTPUTS))
    t = 4  # the gradient has 2 × 2 places, whatever the strides would give
    assert block.repeats == t
    np.testing.assert_allclose(block.input_factor.cov, C, atol=tolerance)
    np.testing.assert_allclose(block.input_factor.mean, mu, atol=tolerance)
    np.testing.assert_allclose(block.full_fisher_block(), t * np.kron(A, G), atol=tolerance * 10)
    a, g = split(A, G, DAMPING, t)
    B = t * np.kron(A + a * np.eye(len(A)), G + g * np.eye(len(G)))
    for product, expected in [(block.multiply, B), (block.multiply_inverse, np.linalg.inv(B))]:
        found = as_matrix(product, shapes(bias), plain_packing, dtype)
        np.testing.assert_allclose(found, expected, atol=tolerance * abs(expected).max())


@every_centring
def test_averages_of_covariance_and_mean_move_apart(centring):
    batches = [batch(seed) for seed in (2, 3, 4)]
    block = observe(registered(True, centring), [["ds"]], batches, decay=0.5)
    weights = np.array([0.25, 0.5, 1.0]) / 1.75
    moments = [pixel_moments(values["x"], centring) for values in batches]
    C = sum(w * cov for w, (cov, _) in zip(weights, moments, strict=True))
    mu = sum(w * mean for w, (_, mean) in zip(weights, moments, strict=True))
    np.testing.assert_allclose(block.input_factor.cov, C, atol=EXACT)
    expected = patch_moment(C, mu, True, centring)
    np.testing.assert_allclose(block.input_factor.get_cov(), expected, atol=EXACT)
    assert block.input_factor.trace() == pytest.approx(np.trace(expected), rel=1e-12)


@every_centring
def test_two_towers_are_one_of_both(centring):
    whole = batch(5)
    values = {f"{k}{i}": v[2 * i : 2 * i + 2] for i in range(2) for k, v in whole.items()}
    block = observe(registered(True, centring, towers=2), [["ds0", "ds1"]], [values])
    expected = patch_moment(*pixel_moments(whole["x"], centring), True, centring)
    np.testing.assert_allclose(block.input_factor.get_cov(), expected, atol=EXACT)


@every_bias
def test_with_one_tap_it_is_the_plain_kronecker_factor(bias):
    found = []
    values = batch(6)
    for approx in ("kron", "kron_sua"):
        collection = ke.LayerCollection(graph={"w": (1, 1, CHANNELS, OUTPUTS)})
        collection.register_conv2d(
            ("w", "b") if bias else "w", [1, 1], "SAME", "x", "s", approx=approx
        )
        found.append(observe(collection, [["ds"]], [values]).full_fisher_block())
    np.testing.assert_allclose(*found, atol=EXACT)


def test_a_symmetric_matrix_is_the_same_from_the_right():
    factor = observe(
        registered(True, "mean modelled"), [["ds"]], [batch(8)], exps=(-1,)
    ).input_factor
    (damping,) = factor._registered.values()
    x = np.random.default_rng(0).normal(size=(3, factor.side))
    dense = power(factor.get_cov() + damping() * np.eye(factor.side), -1)
    np.testing.assert_allclose(
        factor.right_multiply_matpower(x, -1, damping), x @ dense, atol=EXACT
    )


def test_the_named_block_is_the_registered_one():
    collection = ke.LayerCollection(graph={"w": (*KERNEL, CHANNELS, OUTPUTS)})
    block = ke.ConvKFCBasicFB(
        collection, ("w", "b"), "SAME", [2, 2], use_sua_approx_for_input_factor=True
    )
    block.register_additional_tower("x", "s")
    collection.register_block(("w", "b"), block)
    values = batch(9)
    observe(collection, [["ds"]], [values])
    expected = observe(registered(True, "mean modelled"), [["ds"]], [values])
    np.testing.assert_array_equal(block.full_fisher_block(), expected.full_fisher_block())


def test_a_factor_names_each_inverse_that_it_stores():
    """A checkpoint of other inverses is refused by these names."""
    for exps in ((), (-1,)):
        block = observe(registered(True, "mean modelled"), [["ds"]], [batch(1)], exps=exps)
        assert block.input_factor.operations == ("-1.0",) * len(exps)
        stored = [name for name in block.input_factor.arrays() if name.startswith("inverse/")]
        assert bool(stored) == bool(exps)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda b: b.register_matpower(-0.5), ValueError),
        (lambda b: b.register_cholesky(), NotImplementedError),
        (lambda b: b.register_cholesky_inverse(), NotImplementedError),
    ],
    ids=["power", "cholesky", "inverse cholesky"],
)
def test_only_powers_one_and_minus_one_exist(call, error):
    (block,) = registered(True, "mean modelled").get_blocks()
    block.instantiate_factors([["ds"]], DAMPING)
    with pytest.raises(error):
        call(block)


def test_a_bias_without_damping_has_no_inverse():
    with pytest.raises(ke.InputError, match="positive damping"):
        observe(registered(True, "mean modelled"), [["ds"]], [batch(13)], damping=0.0, exps=(-1,))


def test_masked_patches_are_refused():
    with pytest.raises(ke.UnsupportedError, match="kron_sua"):
        registered(True, "mean modelled", patch_mask=np.ones((*KERNEL, CHANNELS)))
