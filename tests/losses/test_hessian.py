"""The second derivative of every loss in its inputs."""

import numpy as np
import pytest

from tests.losses.loss_cases import CASES, by_name

# Central differences of the gradient: the square of the step times a third derivative.
STEP, DIFFERENCES = 2.0**-14, 1e-6


@pytest.mark.parametrize("case", CASES, ids=by_name)
def test_hessian_equals_finite_differences_of_gradient(case):
    values = case.values()
    rng = np.random.default_rng(3)
    v = {name: rng.standard_normal(case.shape) for name in case.loss.inputs}
    found = case.loss.hessian(values, v)
    ahead, behind = (
        case.loss.gradient({**values, **{n: values[n] + sign * STEP * v[n] for n in v}})
        for sign in (1, -1)
    )
    for name in v:
        expected = (ahead[name] - behind[name]) / (2 * STEP)
        np.testing.assert_allclose(found[name], expected, rtol=0, atol=DIFFERENCES)
