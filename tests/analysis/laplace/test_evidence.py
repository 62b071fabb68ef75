"""Terms of the evidence whose logarithms are those of products."""

import numpy as np
import pytest

from kfac_engine.analysis.laplace.evidence import ParameterGroup

# Products of sixteen factors and sums of at most 50 logarithms in float64.
TOLERANCE = 1e-13


@pytest.mark.parametrize("size", [1, 15, 16, 17, 50])
@pytest.mark.parametrize("precision", [1e-12, 1.0, 1e15])
@pytest.mark.parametrize("largest", [1e3, 1e30])
def test_term_of_a_group_is_the_sum_of_logarithms(size, precision, largest):
    values = largest * np.random.default_rng(0).random(size) ** 20
    values[0] = 0.0
    group = ParameterGroup(("weight",), values, 0.25)
    logarithms = np.log1p(3.0 * values / precision).sum()
    expected = -0.5 * (logarithms + 0.25 * precision)
    assert group.value(3.0, precision) == pytest.approx(expected, rel=TOLERANCE, abs=1e-13)
    term, slope, determined = group.derivatives(3.0, precision)
    assert term == pytest.approx(expected, rel=TOLERANCE)
    assert determined == pytest.approx((3 * values / (3 * values + precision)).sum(), rel=1e-12)
    assert slope == pytest.approx(0.5 * (determined - 0.25 * precision), rel=1e-12)
