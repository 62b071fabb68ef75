"""Every block of a layer against the dense matrix that it stands for."""

import numpy as np
import pytest

from tests.comparing import assert_near
from tests.curvature.blocks import (
    test_convolution,
    test_depthwise,
    test_ekfac,
    test_embedding,
    test_grouped,
    test_reduce,
    test_scale_shift,
)
from tests.lifecycle import as_matrix, assert_products, observe

DAMPING = 0.3
# Of powers and roots: through an eigendecomposition of the damped matrix.
PRODUCTS = 1e-9
LAYERS = {
    "convolution": test_convolution.BLOCKS,
    "depthwise": test_depthwise.BLOCKS,
    "grouped": test_grouped.BLOCKS,
    "reduce": test_reduce.BLOCKS,
    "ekfac": test_ekfac.BLOCKS,
    "embedding": test_embedding.BLOCKS,
    "scale and shift": test_scale_shift.BLOCKS,
}
CASES = {f"{kind} {name}": case for kind, cases in LAYERS.items() for name, case in cases.items()}


def every(cases):
    return pytest.mark.parametrize("case", cases.values(), ids=cases)


@every(CASES)
@pytest.mark.parametrize("dtype", [np.float64, np.float32], ids=["double", "single"])
def test_block_and_its_inverse_are_those_of_the_dense_matrix(case, dtype):
    batches = [case.batch(6, seed, dtype) for seed in (1, 2)[: 1 + case.linear]]
    block = observe(case.registered(1), [["ds"]], batches, damping=DAMPING, exps=(-1,), decay=1.0)
    tolerance = case.exact if dtype == np.float64 else case.single
    F = sum(case.matrix(values) for values in batches) / len(batches)
    assert_near(block.full_fisher_block(), F, tolerance)
    damped = sum(case.damped(values, DAMPING) for values in batches) / len(batches)
    inverse = as_matrix(block.multiply_inverse, case.shapes, case.pack, dtype)
    assert_near(inverse, np.linalg.inv(damped), tolerance)
    assert block.damping == pytest.approx(DAMPING / case.locations)
    for factor, side in zip(block.factors, case.sides(batches[0]), strict=False):
        assert_near(factor.get_cov(), side, tolerance)


@every(CASES)
def test_powers_and_roots_are_those_of_the_dense_matrix(case):
    values = case.batch(6, 2)
    block = observe(
        case.registered(1), [["ds"]], [values], damping=DAMPING, exps=(-0.5, 0.3), cholesky=True
    )
    B = case.damped(values, DAMPING)
    assert_products(block, B, case.shapes, case.pack, PRODUCTS, exps=(-0.5, 0.3))
    if case.root:
        root = as_matrix(block.multiply_cholesky, case.shapes, case.pack)
        assert_near(root, case.root(B), PRODUCTS)


@every(CASES)
def test_two_towers_are_one_of_both(case):
    whole = case.batch(6, 3)
    values = {f"{k}{i}": v[3 * i : 3 * i + 3] for i in range(2) for k, v in whole.items()}
    block = observe(case.registered(2), [["ds0", "ds1"]], [values])
    assert_near(block.full_fisher_block(), case.matrix(whole), case.exact)
    assert block.num_registered_towers == 2
    assert block.tensors_to_compute_grads() == ("s0", "s1")


@every({name: case for name, case in CASES.items() if case.summed})
def test_sources_and_pieces_of_a_batch_add_up(case, monkeypatch):
    values = case.batch(5, 4)
    values["e"] = case.batch(5, 5)["ds"]
    collection = case.registered(1)
    monkeypatch.setattr(collection.backend, "scratch_bytes", 1)  # one example at a time
    block = observe(collection, [["ds"], ["e"]], [values])
    expected = case.matrix(values) + case.matrix(values | {"ds": values["e"]})
    assert_near(block.full_fisher_block(), expected, case.exact)
