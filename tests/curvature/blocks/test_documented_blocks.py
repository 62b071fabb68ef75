"""The blocks that have a page of their own, made and used by each method that their page lists."""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.errors import UnknownNameError
from tests.lifecycle import as_matrix, damped_block, plain_packing, power, second_moment

EXACT = 1e-10  # float64 through inverses of condition about a hundred
SINGLE = 1e-4  # float32 through the same
PRECISIONS = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(np.float64, EXACT), (np.float32, SINGLE)], ids=["double", "single"]
)
either_bias = pytest.mark.parametrize("has_bias", [False, True], ids=["weight", "pair"])
DAMPING = 0.2
N = 6  # examples, in two towers


def use(collection, block, params, batches, decay):
    """Everything from the towers to the refreshed inverses, as the pages have it."""
    block.register_additional_tower(inputs="x0", outputs="s0")
    block.register_additional_tower("x1", "s1")
    assert collection.register_block(params, block) is block
    block.instantiate_factors(grads_list=[["d0", "d1"]], damping=DAMPING)
    block.register_inverse()
    block.register_matpower(exp=-0.25)
    factors = collection.get_factors()
    for factor in factors:
        factor.instantiate_cov_variables()
        factor.instantiate_inv_variables()
    for values in batches:
        for factor in factors:
            factor.make_covariance_update_op(decay)(values)
    for factor in factors:
        for refresh in factor.make_inverse_update_ops():
            refresh()
    return block


def cut(x, ds, dtype):
    """A batch in two towers."""
    values = {f"x{i}": part for i, part in enumerate(np.split(x, 2))}
    values |= {f"d{i}": part for i, part in enumerate(np.split(ds, 2))}
    return {name: array.astype(dtype) for name, array in values.items()}


def averaged(batches, decay, moments):
    weights = decay ** np.arange(len(batches) - 1, -1, -1)
    found = [moments(x.astype(float), ds.astype(float)) for x, ds in batches]
    return [
        sum(w * M for w, M in zip(weights, side, strict=True)) / weights.sum()
        for side in zip(*found, strict=True)
    ]


def check(block, shapes, A, G, locations, dtype, tolerance):
    """Every product against the dense matrix it stands for."""
    assert block.num_registered_towers == 2
    assert block.tensors_to_compute_grads() == ("s0", "s1")
    np.testing.assert_allclose(block.full_fisher_block(), locations * np.kron(A, G), atol=tolerance)
    F = damped_block(A, G, DAMPING, locations)
    products = {
        1: [block.multiply, lambda v: block.multiply_matpower(v, exp=1)],
        -1: [block.multiply_inverse, lambda v: block.multiply_matpower(vector=v, exp=-1)],
        -0.25: [lambda v: block.multiply_matpower(v, -0.25)],
    }
    for exp, multiplied in products.items():
        for product in multiplied:
            found = as_matrix(product, shapes, plain_packing, dtype)
            expected = power(F, exp)
            np.testing.assert_allclose(found, expected, atol=tolerance * abs(expected).max())
    vector = [np.ones(shape, dtype) for shape in shapes]
    with pytest.raises(UnknownNameError, match="not registered"):
        block.multiply_matpower(tuple(vector) if len(vector) > 1 else vector[0], 0.5)


# -- dense layers ----------------------------------------------------------------------------------


@either_bias
@PRECISIONS
def test_the_fully_connected_block_does_what_its_page_says(has_bias, dtype, tolerance):
    rng = np.random.default_rng(0)
    batches = [(rng.normal(size=(N, 4)) + 0.5, rng.normal(size=(N, 3))) for _ in range(2)]
    params, shapes = (("w", "b"), [(4, 3), (3,)]) if has_bias else ("w", [(4, 3)])

    collection = ke.LayerCollection()
    block = ke.FullyConnectedKFACBasicFB(collection, has_bias=has_bias)
    assert isinstance(block, ke.KroneckerProductFB)
    use(collection, block, params, [cut(x, ds, dtype) for x, ds in batches], decay=0.5)

    def moments(x, ds):
        return second_moment(x, has_bias), second_moment(ds)

    check(block, shapes, *averaged(batches, 0.5, moments), 1, dtype, tolerance)


def test_a_fully_connected_block_has_no_bias_unless_told():
    collection = ke.LayerCollection()
    block = ke.FullyConnectedKFACBasicFB(collection)
    block.register_additional_tower("x", "s")
    collection.register_block("w", block)
    block.instantiate_factors([["d"]], DAMPING)
    for factor in collection.get_factors():
        factor.instantiate_cov_variables()
        factor.make_covariance_update_op(0.9)({"x": np.ones((2, 4)), "d": np.ones((2, 3))})
    assert block.full_fisher_block().shape == (12, 12)


def test_gradients_of_several_sources_are_summed():
    rng = np.random.default_rng(1)
    values = {name: rng.normal(size=(N, 3)) for name in ("x", "first", "second")}
    collection = ke.LayerCollection()
    block = ke.FullyConnectedKFACBasicFB(collection)
    block.register_additional_tower("x", "s")
    collection.register_block("w", block)
    block.instantiate_factors([["first"], ["second"]], DAMPING)
    for factor in collection.get_factors():
        factor.instantiate_cov_variables()
        factor.make_covariance_update_op(0.9)(values)
    A = second_moment(values["x"])
    G = second_moment(values["first"]) + second_moment(values["second"])
    np.testing.assert_allclose(block.full_fisher_block(), np.kron(A, G), atol=EXACT)


# -- convolutions ----------------------------------------------------------------------------------

SIDES, CHANNELS, OUTPUTS, KERNEL = (5, 4), 2, 3, (2, 3)
GEOMETRIES = {
    "valid": ("VALID", None, None, "spatial"),
    "same": ("SAME", [1, 2], [1, 1], "spatial"),
    "dilated": ("SAME", [1, 1, 1, 1], [1, 2, 1, 1], "all axes"),
    "strided": ("VALID", [1, 2, 1, 1], [1, 1, 1, 1], "all axes"),
}


def spatial(entries):
    """The entries of the two spatial axes."""
    return (1, 1) if entries is None else tuple(entries)[-3:-1] if len(entries) == 4 else entries


def outputs_and_pads(padding, strides, rates):
    """Sides of the output, and padding before and after, by TensorFlow's definition."""
    sides, pads = [], []
    for side, k, s, d in zip(SIDES, KERNEL, strides, rates, strict=True):
        reach = (k - 1) * d + 1
        out = -(-side // s) if padding == "SAME" else -(-(side - reach + 1) // s)
        total = max((out - 1) * s + reach - side, 0) if padding == "SAME" else 0
        sides.append(out)
        pads.append((total // 2, total - total // 2))
    return sides, pads


def patches(x, padding, strides, rates):
    """Patches by loops over locations and taps, ``(n, t, kh·kw·channels)``."""
    (height, width), pads = outputs_and_pads(padding, strides, rates)
    x = np.pad(x, [(0, 0), *pads, (0, 0)])
    taps = [(i * rates[0], j * rates[1]) for i in range(KERNEL[0]) for j in range(KERNEL[1])]
    rows = [
        [x[:, r * strides[0] + i, c * strides[1] + j] for i, j in taps]
        for r in range(height)
        for c in range(width)
    ]
    return np.concatenate([np.concatenate(row, axis=1)[:, None] for row in rows], axis=1)


@either_bias
@pytest.mark.parametrize("data_format", [None, "NHWC", "NCHW"])
@pytest.mark.parametrize("name", GEOMETRIES)
@PRECISIONS
def test_the_convolution_block_does_what_its_page_says(
    name, data_format, has_bias, dtype, tolerance
):
    padding, strides, rates, entries = GEOMETRIES[name]
    steps = spatial(strides), spatial(rates)
    (height, width), _ = outputs_and_pads(padding, *steps)
    rng = np.random.default_rng(2)
    batches = [
        (rng.normal(size=(N, *SIDES, CHANNELS)), rng.normal(size=(N, height, width, OUTPUTS)))
        for _ in range(2)
    ]
    first = data_format == "NCHW"
    if first and entries == "all axes":
        strides, rates = ([1, 1, *spatial(part)] for part in (strides, rates))
    shapes = [(*KERNEL, CHANNELS, OUTPUTS), (OUTPUTS,)][: 1 + has_bias]
    params = ("w", "b") if has_bias else "w"

    collection = ke.LayerCollection(graph={"w": shapes[0]})
    block = ke.ConvKFCBasicFB(
        collection,
        params,
        padding,
        strides=strides,
        dilation_rate=rates,
        data_format=data_format,
        extract_patches_fn="extract_convolution_patches" if entries == "spatial" else None,
    )
    assert isinstance(block, ke.KroneckerProductFB)
    fed = [cut(*((np.moveaxis(a, -1, 1) if first else a) for a in pair), dtype) for pair in batches]
    use(collection, block, params, fed, decay=0.5)

    def moments(x, ds):
        a = patches(x, padding, *steps)
        G = second_moment(ds.reshape(-1, OUTPUTS))
        return second_moment(a.reshape(-1, a.shape[-1]), has_bias), G

    A, G = averaged(batches, 0.5, moments)
    check(block, shapes, A, G, height * width, dtype, tolerance)
