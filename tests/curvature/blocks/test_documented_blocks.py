"""The fully connected block, made and used by each method that its page lists."""

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
