"""The factor of successive uses, made alone."""

import numpy as np
import pytest

import kfac_engine as ke

USES, BATCH, WIDTH = 3, 4, 2
X = np.random.default_rng(0).normal(size=(USES, BATCH, WIDTH))
VALUES = {"stacked": X, "folded": X.reshape(-1, WIDTH), **{f"x{u}": X[u] for u in range(USES)}}
EXACT = 1e-12  # float64 sums of a dozen terms


def fixed_damping():
    return 0.4


def lagged(names, has_bias=False, option=None):
    factor = ke.FullyConnectedMultiKF([[names]], USES, has_bias)
    factor.register_cov_dt1()
    if option:
        factor.register_series(option, fixed_damping)
    return factor


def lag_moment(x, has_bias):
    if has_bias:
        x = np.concatenate([x, np.ones((*x.shape[:2], 1))], axis=2)
    pairs = [(x[u + 1, b], x[u, b]) for u in range(USES - 1) for b in range(BATCH)]
    return sum(np.outer(future, present) for future, present in pairs) / (USES * BATCH)


def test_a_classical_average_starts_from_independent_uses():
    config = ke.CollectionConfig(debias=False, initial_covariance="identity")
    factor = ke.FullyConnectedMultiKF([["stacked"]], USES, config=config)
    factor.register_cov_dt1()
    factor.update(VALUES, 0.75)
    rows = VALUES["folded"]
    expected = 0.75 * np.eye(WIDTH) + 0.25 * rows.T @ rows / len(rows)
    np.testing.assert_allclose(factor.cov, expected, atol=EXACT)
    np.testing.assert_allclose(factor.cov_dt1, 0.25 * lag_moment(X, False), atol=EXACT)


def test_the_options_do_not_disturb_each_other():
    """Option 1 symmetrises the lag moment: option 2 must not see that."""
    both = lagged("stacked", option=1)
    both.register_series(2, fixed_damping)
    alone = lagged("stacked", option=2)
    for factor in (both, alone):
        factor.update(VALUES, 0.9)
        factor.refresh()
    found, expected = (f.series(2, fixed_damping) for f in (both, alone))
    np.testing.assert_array_equal(found.shift, expected.shift)
    inverse = np.linalg.inv(alone.cov + 0.4 * np.eye(WIDTH))
    np.testing.assert_allclose(expected.shift, alone.cov_dt1.T @ inverse, atol=EXACT)


def test_a_plain_factor_measures_no_lag():
    factor = ke.FullyConnectedMultiKF([["stacked"]], USES)
    factor.update(VALUES, 0.9)
    with pytest.raises(ke.InputError, match="register_cov_dt1"):
        _ = factor.cov_dt1
    with pytest.raises(ke.InputError, match="before its first batch"):
        factor.register_cov_dt1()


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda f: f.register_series(3, fixed_damping), ValueError),
        (lambda f: f.series(2, fixed_damping), KeyError),
        (lambda f: f.series(1, fixed_damping), ke.NotReadyError),
    ],
    ids=["unknown", "not registered", "not computed"],
)
def test_what_was_not_prepared_is_not_read(call, error):
    factor = lagged("stacked", option=1)
    factor.update(VALUES, 0.9)
    with pytest.raises(error):
        call(factor)


def test_options_are_registered_before_inverses_are_made():
    factor = lagged("stacked")
    factor.instantiate_inv_variables()
    with pytest.raises(ke.InputError, match="before instantiate_inv_variables"):
        factor.register_series(1, fixed_damping)
