"""Products that threads share are those of NumPy, entry by entry."""

import numpy as np
import pytest

from kfac_engine.backend.cpu.blas import matmul
from kfac_engine.backend.threads import WORTH_WAKING, Workers

# Sums of at most 2000 products of order one, in float64; threads cut none of them.
ROUNDING = 1e-11

SHAPES = {
    "small": ((3, 4), (4, 5)),
    "vector_and_matrix": ((4,), (4, 5)),
    "matrix_and_vector": ((3, 4), (4,)),
    "many_rows": ((3000, 300), (300, 100)),
    "many_columns": ((100, 300), (300, 3000)),
    "stack": ((7, 200, 300), (7, 300, 210)),
    "one_left_operand_for_a_stack": ((400, 300), (5, 300, 210)),
    "one_right_operand_for_a_stack": ((5, 210, 300), (300, 400)),
    "stack_with_one_left_operand_within": ((1, 400, 300), (5, 300, 210)),
}


def room(shape, seed):
    return np.random.default_rng(seed).standard_normal(shape)


def test_cases_include_threaded_and_single_products():
    work = [np.prod(x) * y[-1] for x, y in SHAPES.values()]
    assert min(work) < WORTH_WAKING < max(work)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(("left", "right"), SHAPES.values(), ids=SHAPES)
def test_matmul_equals_einsum(left, right, count):
    x, y = room(left, 0), room(right, 1)
    a = "k" if x.ndim == 1 else "...ik"
    b = "k" if y.ndim == 1 else "...kj"
    out = "..." + "i" * (x.ndim > 1) + "j" * (y.ndim > 1)
    expected = np.einsum(f"{a},{b}->{out}", x, y, optimize=True)
    np.testing.assert_allclose(matmul(x, y, None, Workers(count)), expected, atol=ROUNDING)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("left", "right"), [((900, 500), (500, 400)), ((400, 500), (500, 900))])
def test_matmul_writes_to_views_of_any_order(left, right, turned):
    x, y = room(left, 0), room(right, 1)
    shape = left[0], right[1]
    whole = (
        np.full((shape[1] + 1, shape[0]), 7.0).T
        if turned
        else np.full((shape[0], shape[1] + 1), 7.0)
    )
    out = whole[:, :-1]
    assert matmul(x, y, out, Workers(2)) is out
    np.testing.assert_allclose(out, np.einsum("ik,kj->ij", x, y, optimize=True), atol=ROUNDING)
    assert (whole[:, -1] == 7.0).all()


def test_matmul_of_two_types_has_wider_type():
    x, y = room((900, 500), 0).astype(np.float32), room((500, 400), 1)
    assert matmul(x, y, None, Workers(2)).dtype == np.float64
