"""What moments hold above the diagonal reaches nobody: with NaN there all results are the same."""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.backend.cpu.backend import NumpyBackend
from tests.curvature.blocks.test_ekfac import CASES as EKFAC, registered as ekfac
from tests.curvature.blocks.test_grouped import CASES as GROUPED, registered as grouped
from tests.curvature.factors.test_named_factors import CASES, VALUES, draw, run
from tests.lifecycle import observe

PRIMITIVES = ("second_moment", "patch_second_moment")
EXPONENTS = (1, -1, -0.5)


@pytest.fixture
def poison(monkeypatch):
    """From now on, moments have NaN above the diagonal."""

    def start():
        for name in PRIMITIVES:
            monkeypatch.setattr(NumpyBackend, name, poisoned(getattr(NumpyBackend, name)))

    return start


def poisoned(primitive):
    def measure(self, x, *others, **options):
        primitive(self, x, *others, **options)
        out = next(array for array in others if isinstance(array, np.ndarray))
        out[..., np.triu(np.ones(out.shape[-2:], bool), 1)] = np.nan

    return measure


def damping():
    return 0.3


def of_factor(make):
    """Everything a factor can be asked for, once updated twice and refreshed."""
    factor = make()
    dense = not isinstance(factor, ke.ConvInputSUAKroneckerFactor)
    for exp in EXPONENTS if dense else (1, -1):
        factor.register_matpower(exp, damping)
    if dense:
        factor.register_cholesky(damping)
        factor.register_cholesky_inverse(damping)
    run(factor, VALUES, batches=2)
    factor.instantiate_inv_variables()
    yield "trace", factor.trace()
    for refresh in factor.make_inverse_update_ops():
        refresh()
    x = draw(factor.side, 2, seed=20)
    for exp in EXPONENTS if dense else (1, -1):
        yield f"power {exp}", factor.left_multiply_matpower(x, exp, damping)
    for inverse in (False, True) if dense else ():
        yield (
            "cholesky",
            factor.left_multiply_cholesky(x, damping, transpose=False, inverse=inverse),
        )
    yield "average", factor.cov
    yield "matrix", factor.get_cov()
    yield from factor.arrays().items()


def of_sources(make):
    """An average of a sum over two sources that were measured one by one."""
    factor = make()
    measurement = factor.add_source(factor.measure(VALUES), VALUES)
    factor.commit(measurement, 0.9)
    single = factor.measure(VALUES)
    assert single.array.any()  # computed before the average moves
    factor.commit(single, 0.9)
    yield "average", factor.cov
    yield from factor.arrays().items()


def of_block(collection, batches, shapes):
    """A block in full and its products, after two batches."""
    block = observe(collection, [["ds"]], batches, exps=EXPONENTS)
    parts = tuple(draw(*shape, seed=21) for shape in shapes)
    for exp in EXPONENTS:
        found = block.multiply_matpower(parts if len(parts) > 1 else parts[0], exp)
        yield from ((f"power {exp}", part) for part in (found if len(parts) > 1 else (found,)))
    yield "block", block.full_fisher_block()


def assert_the_same(found, expected):
    found, expected = list(found), list(expected)
    assert [name for name, _ in found] == [name for name, _ in expected]
    for (name, ours), (_, theirs) in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs, err_msg=name)


@pytest.mark.parametrize("ask", [of_factor, of_sources], ids=["averaged", "summed"])
@pytest.mark.parametrize("make", [make for make, _ in CASES.values()], ids=CASES)
def test_no_result_of_a_factor_depends_on_an_upper_triangle(make, ask, poison):
    expected = list(ask(make))
    poison()
    assert_the_same(ask(make), expected)


@pytest.mark.parametrize("case", EKFAC.values(), ids=EKFAC)
def test_no_eigenbasis_depends_on_an_upper_triangle(case, poison):
    _, batch, _, shape, key = case
    batches, shapes = [batch(9, 0), batch(9, 1)], (shape, shape[-1:])[: len(key)]
    expected = list(of_block(ekfac(case), batches, shapes))
    poison()
    assert_the_same(of_block(ekfac(case), batches, shapes), expected)


@pytest.mark.parametrize("case", GROUPED.values(), ids=GROUPED)
def test_no_stack_depends_on_upper_triangles(case, poison):
    batches = [case.batch(9, 0), case.batch(9, 1)]
    expected = list(of_block(grouped(case), batches, case.shapes))
    poison()
    assert_the_same(of_block(grouped(case), batches, case.shapes), expected)
