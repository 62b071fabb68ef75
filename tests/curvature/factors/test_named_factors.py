"""The specification's factor classes, each made alone, against its formula in loops."""

import numpy as np
import pytest

import kfac_engine as ke
from tests.backend.truths import patches
from tests.lifecycle import second_moment

EXACT = 1e-12  # float64 sums of a few dozen terms of size one
SINGLE = 1e-5  # the same in float32
B, D_IN, D_OUT, USES = 5, 3, 2, 2
FILTER = (2, 2, 3, 2)  # kernel 2 × 2, three channels, two outputs


def draw(*shape, seed):
    return np.random.default_rng(seed).normal(size=shape) + 0.2


def with_one(x):
    return np.concatenate([x, np.ones((*x.shape[:-1], 1))], axis=-1)


X = draw(B, D_IN, seed=0)
D = [draw(B, D_OUT, seed=seed) for seed in (1, 2)]
U = draw(USES, B, D_IN, seed=3)
GRADS = [(draw(3, 2, seed=seed), draw(2, seed=seed + 9)) for seed in (4, 5)]
IMAGES = draw(B, 4, 5, 3, seed=6)
PIXEL_GRADS = [draw(B, 3, 4, 2, seed=seed) for seed in (7, 8)]  # VALID: 3 × 4 locations
MASK = np.random.default_rng(9).integers(0, 3, FILTER[:3]).astype(float)
PATCHES = patches(np.moveaxis(IMAGES, -1, 1), (2, 2), (1, 1), (1, 1), (0, 0), (0, 0))
VALUES = {
    "x": X,
    "x_a": X[:2],
    "x_b": X[2:4],
    "d0": D[0],
    "d1": D[1],
    "d0_a": D[0][:2],
    "d0_b": D[0][2:4],
    "u": U,
    "u_folded": U.reshape(-1, D_IN),
    "u0": U[0],
    "u1": U[1],
    "gw0": GRADS[0][0],
    "gb0": GRADS[0][1],
    "gw1": GRADS[1][0],
    "gb1": GRADS[1][1],
    "images": IMAGES,
    "planes": np.moveaxis(IMAGES, -1, 1),
    "two": np.stack([IMAGES, 2 * IMAGES]),
    "p0": PIXEL_GRADS[0],
    "p1": PIXEL_GRADS[1],
    "p0_first": np.moveaxis(PIXEL_GRADS[0], -1, 1),
    "p_uses": np.stack(PIXEL_GRADS),
}


def squares(rows):
    return (rows**2).mean(axis=0)


def per_example(inputs, gradients):
    """Mean over examples of the squared sum over positions; rows ``(n, t, d)``."""
    return sum((x.T @ d) ** 2 for x, d in zip(inputs, gradients, strict=True)) / len(inputs)


def flat(source):
    return np.concatenate([source[0].ravel(), source[1].ravel()])


def pixels(images):
    rows = images.reshape(-1, 3)
    return second_moment(rows) - np.outer(rows.mean(axis=0), rows.mean(axis=0))


def flat_patches(rows):
    return rows.reshape(-1, rows.shape[-1])


D_POSITIONS = [d.reshape(B, -1, 2) for d in PIXEL_GRADS]
CASES = {
    "naive full": (
        lambda **o: ke.NaiveFullFactor([("gw0", "gb0"), ("gw1", "gb1")], B, **o),
        sum(np.outer(flat(g), flat(g)) for g in GRADS) / B),
    "naive diagonal": (
        lambda **o: ke.NaiveDiagonalFactor(["gw0", "gw1"], "x", **o),
        sum(g[0] ** 2 for g in GRADS) / B),
    "dense": (
        lambda **o: ke.FullyConnectedKroneckerFactor([["x"]], has_bias=True, **o),
        second_moment(X, has_bias=True)),
    "dense, two sources": (
        lambda **o: ke.FullyConnectedKroneckerFactor([["d0"], ["d1"]], **o),
        second_moment(D[0]) + second_moment(D[1])),
    "dense, two towers": (
        lambda **o: ke.FullyConnectedKroneckerFactor([["x_a", "x_b"]], **o), second_moment(X[:4])),
    "diagonal": (
        lambda **o: ke.DiagonalKroneckerFactor([["x"]], has_bias=True, **o),
        np.append(squares(X), 1.0)),
    "multi, listed": (
        lambda **o: ke.FullyConnectedMultiKF([[["u0", "u1"]]], has_bias=True, **o),
        second_moment(U.reshape(-1, D_IN), has_bias=True)),
    "multi, stacked": (
        lambda **o: ke.FullyConnectedMultiKF([["u"]], 2, **o), second_moment(U.reshape(-1, D_IN))),
    "multi diagonal": (
        lambda **o: ke.DiagonalMultiKF([["u_folded"]], num_uses=2, has_bias=True, **o),
        np.append(squares(U.reshape(-1, D_IN)), 1.0)),
    "layer diagonal": (
        lambda **o: ke.FullyConnectedDiagonalFactor(["x"], [["d0"], ["d1"]], has_bias=True, **o),
        sum(per_example(with_one(X)[:, None], d[:, None]) for d in D)),
    "layer diagonal, two towers": (
        lambda **o: ke.FullyConnectedDiagonalFactor(["x_a", "x_b"], [["d0_a", "d0_b"]], **o),
        per_example(X[:4, None], D[0][:4, None])),
    "patches": (
        lambda **o: ke.ConvInputKroneckerFactor(["images"], FILTER, "VALID", has_bias=True, **o),
        second_moment(flat_patches(PATCHES), has_bias=True)),
    "patches, channels first": (
        lambda **o: ke.ConvInputKroneckerFactor(
            ["planes"], FILTER, "VALID", [1, 1, 1, 1], data_format="NCHW", **o
        ),
        second_moment(flat_patches(PATCHES)),
    ),
    "patches, masked": (
        lambda **o: ke.ConvInputKroneckerFactor(
            ["images"], FILTER, "VALID", patch_mask=MASK, sub_sample_inputs=False, **o
        ),
        second_moment(flat_patches(PATCHES) * MASK.ravel()),
    ),
    "patches over uses": (
        lambda **o: ke.ConvInputMultiKF(["two"], FILTER, "VALID", num_uses=2, **o),
        second_moment(flat_patches(np.concatenate([PATCHES, 2 * PATCHES])))),
    "pixels": (
        lambda **o: ke.ConvInputSUAKroneckerFactor(["images"], FILTER, has_bias=True, **o),
        pixels(IMAGES)),
    "outputs": (
        lambda **o: ke.ConvOutputKroneckerFactor([["p0"], ["p1"]], **o),
        sum(second_moment(d.reshape(-1, 2)) for d in PIXEL_GRADS)),
    "outputs, channels first": (
        lambda **o: ke.ConvOutputKroneckerFactor([["p0_first"]], "NCHW", **o),
        second_moment(PIXEL_GRADS[0].reshape(-1, 2))),
    "outputs over uses": (
        lambda **o: ke.ConvOutputMultiKF([["p_uses"]], num_uses=2, **o),
        second_moment(np.stack(PIXEL_GRADS).reshape(-1, 2))),
    "convolution diagonal": (
        lambda **o: ke.ConvDiagonalFactor(
            ["images"], [["p0"], ["p1"]], FILTER, [1, 1, 1, 1], "VALID", has_bias=True, **o
        ),
        sum(per_example(with_one(PATCHES), d) for d in D_POSITIONS),
    ),
    "convolution diagonal, masked": (
        lambda **o: ke.ConvDiagonalFactor(
            ["images"], [["p0"]], FILTER, [1, 1, 1, 1], "VALID", patch_mask=MASK, **o
        ),
        per_example(PATCHES * MASK.ravel(), D_POSITIONS[0]),
    ),
}  # fmt: skip
every_case = pytest.mark.parametrize(("make", "expected"), CASES.values(), ids=CASES)


def run(factor, values, batches=1):
    factor.instantiate_cov_variables()
    update = factor.make_covariance_update_op(0.9)
    for _ in range(batches):
        update(values)
    return factor


@every_case
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(np.float64, EXACT), (np.float32, SINGLE)], ids=["double", "single"]
)
def test_a_factor_averages_its_formula(make, expected, dtype, tolerance):
    values = {name: value.astype(dtype) for name, value in VALUES.items()}
    factor = run(make(), values, batches=2)
    np.testing.assert_allclose(factor.cov, expected, atol=tolerance * abs(expected).max())
    assert factor.cov.dtype == dtype


@pytest.mark.parametrize(
    ("cls", "args"),
    [
        (ke.FullyConnectedKroneckerFactor, ((("x",),), True)),
        (ke.ConvInputKroneckerFactor, (("images",), FILTER, "VALID")),
        (ke.ConvInputSUAKroneckerFactor, (("images",), FILTER)),
    ],
    ids=["dense", "patches", "pixels"],
)
def test_a_collection_makes_a_factor_once_for_each_choice_of_arguments(cls, args):
    collection = ke.LayerCollection(config=ke.CollectionConfig(seed=7))
    factor = collection.make_or_get_factor(cls, args)
    assert collection.make_or_get_factor(cls, args) is factor
    assert factor.config.seed == 7
    assert collection.get_factors() == (factor,)


def test_the_average_of_a_diagonal_may_be_more_exact_than_its_data():
    factor = ke.DiagonalKroneckerFactor([["x"]], dtype=np.float64)
    run(factor, {"x": X.astype(np.float32)})
    assert factor.cov.dtype == np.float64


def test_sub_sampling_may_be_asked_for():
    config = ke.CollectionConfig(inputs_to_extract_patches_factor=0.2)
    x = np.zeros((5, 2, 2, 5))
    x[np.arange(5), :, :, np.arange(5)] = 1
    factor = ke.ConvInputKroneckerFactor(
        ["x"], (1, 1, 5, 1), "SAME", sub_sample_inputs=True, config=config
    )
    assert sorted(np.diag(run(factor, {"x": x}).cov)) == [0, 0, 0, 0, 1]


@pytest.mark.parametrize(
    "make",
    [
        lambda: ke.FullyConnectedMultiKF([["x"]]),
        lambda: ke.FullyConnectedMultiKF([[["a", "b"]]], num_uses=3),
        lambda: ke.DiagonalMultiKF([["x"]], num_uses=0),
        lambda: ke.ConvOutputMultiKF([[["a", "b"], ["a", "b", "c"]]]),
        lambda: ke.ConvInputMultiKF(["x"], FILTER, "SAME"),
        lambda: ke.ConvOutputKroneckerFactor([["x"]], "NHCW"),
        lambda: ke.ConvInputKroneckerFactor(["x"], (3, 2), "SAME"),
        lambda: ke.ConvInputKroneckerFactor(["x"], FILTER, "SAME", [1, 1, 1]),
        lambda: ke.ConvDiagonalFactor(["x"], [["d"]], FILTER, [1], "SAME"),
        lambda: ke.FullyConnectedKroneckerFactor([]),
        lambda: ke.FullyConnectedKroneckerFactor([["a"], ["b", "c"]]),
        lambda: ke.DiagonalKroneckerFactor([["x"]], dtype=np.int32),
    ],
    ids=[
        "uses unknown",
        "uses differ",
        "no use",
        "lists differ",
        "image uses unknown",
        "format",
        "filter",
        "strides",
        "diagonal strides",
        "no source",
        "towers differ",
        "dtype",
    ],
)
def test_arguments_that_do_not_fit_are_value_errors(make):
    with pytest.raises(ValueError, match=r"\S"):
        make()
