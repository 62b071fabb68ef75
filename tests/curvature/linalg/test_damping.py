"""The trace-norm correction balances the two halves of the damping."""

import math

import pytest

from kfac_engine.curvature.linalg.kronecker import pi_correction
from kfac_engine.errors import InputError, NonFiniteError

CLOSED_FORM = {
    "equal_scales": ((6.0, 3, 8.0, 4), 1.0),
    "input_four_times_larger": ((8.0, 1, 2.0, 1), 2.0),
    "dimensions_divide_traces": ((4.0, 4, 9.0, 1), 1 / 3),
    "zero_input": ((0.0, 3, 5.0, 2), 1.0),
    "zero_output": ((5.0, 3, 0.0, 2), 1.0),
    "both_zero": ((0.0, 3, 0.0, 2), 1.0),
}


@pytest.mark.parametrize(("arguments", "expected"), CLOSED_FORM.values(), ids=CLOSED_FORM)
def test_pi_of_numbers_worked_out_by_hand(arguments, expected):
    assert math.isclose(pi_correction(*arguments), expected, rel_tol=1e-15)


def test_pi_neither_overflows_nor_vanishes_at_extreme_scales():
    assert math.isclose(pi_correction(1e300, 1, 1e-300, 1), 1e300, rel_tol=1e-12)
    assert math.isclose(pi_correction(1e-300, 1, 1e300, 1), 1e-300, rel_tol=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("other", [0.0, 1.0])
def test_traces_that_are_no_numbers_are_refused(bad, other):
    with pytest.raises(NonFiniteError, match="look for overflow"):
        pi_correction(bad, 2, other, 2)
    with pytest.raises(NonFiniteError, match="look for overflow"):
        pi_correction(other, 2, bad, 2)


@pytest.mark.parametrize(("a", "g"), [(-1.0, 2.0), (2.0, -1.0), (-1.0, -1.0), (-1.0, 0.0)])
def test_negative_traces_are_refused(a, g):
    with pytest.raises(InputError, match="not negative"):
        pi_correction(a, 2, g, 2)
