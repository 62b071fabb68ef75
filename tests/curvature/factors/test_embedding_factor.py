"""The embedding's input factor alone, through the life cycle of its documentation."""

import numpy as np
import pytest

import kfac_engine as ke

IDS = {"a": np.array([[0, 1, 1], [3, 0, 1]], np.int32), "b": np.array([[2, 2, 2], [0, 1, 2]])}
# n_hot(ids)²: rows of "a" hold {0, 1} and {0, 1, 3}, those of "b" {2} and {0, 1, 2}.
COV = {"a": [1, 1, 0, 0.5, 0], "b": [0.5, 0.5, 1, 0, 0]}
COUNTS = {"a": [1, 1.5, 0, 0.5, 0], "b": [0.5, 0.5, 2, 0, 0]}
ROUNDING = 1e-6  # float32, the documented default


def averaged(names, batches=(IDS,), decay=0.9, **options):
    factor = ke.EmbeddingInputKroneckerFactor(names, 5, **options)
    factor.register_matpower(-1, lambda: 0.5)
    factor.instantiate_cov_variables()
    update = factor.make_covariance_update_op(decay)
    factor.instantiate_inv_variables()
    for values in batches:
        update(values)
    assert list(factor.make_inverse_update_ops()) == []
    return factor


@pytest.mark.parametrize("name", ["a", "b"])
def test_an_identifier_counts_once_a_row_unless_repeats_count(name):
    np.testing.assert_allclose(averaged([name]).cov, COV[name], rtol=ROUNDING)
    repeated = averaged([name], count_repeats=True)
    np.testing.assert_allclose(repeated.get_cov(), np.diag(COUNTS[name]), rtol=ROUNDING)


def test_towers_are_averaged():
    expected = (np.array(COV["a"]) + COV["b"]) / 2
    np.testing.assert_allclose(averaged(["a", "b"]).get_cov_var(), expected, rtol=ROUNDING)


def test_batches_are_averaged_with_decay():
    batches = [{"x": IDS["a"]}, {"x": IDS["b"]}]
    expected = (0.25 * np.array(COV["a"]) + COV["b"]) / 1.25
    np.testing.assert_allclose(averaged(["x"], batches, 0.25).cov, expected, rtol=ROUNDING)


@pytest.mark.parametrize(("dtype", "expected"), [(None, np.float32), (np.float64, np.float64)])
def test_statistics_have_the_type_asked_for(dtype, expected):
    assert averaged(["a"], dtype=dtype).cov.dtype == expected


@pytest.mark.parametrize("exp", [1, -1, -0.5])
def test_powers_multiply_dense_arrays_and_rows(exp):
    factor = averaged(["a"], dtype=np.float64)
    power = (np.array(COV["a"]) + 0.5) ** exp
    x = np.random.default_rng(0).normal(size=(5, 3))
    left = factor.left_multiply_matpower(x, exp, lambda: 0.5)
    np.testing.assert_allclose(left, power[:, None] * x, rtol=1e-12)
    right = factor.right_multiply_matpower(x.T, exp, lambda: 0.5)
    np.testing.assert_allclose(right, x.T * power, rtol=1e-12)
    rows = factor.left_multiply_matpower(ke.Rows(np.array([4, 0]), x[:2], 5), exp, lambda: 0.5)
    np.testing.assert_allclose(rows.values, power[[4, 0], None] * x[:2], rtol=1e-12)


@pytest.mark.parametrize(("size", "dtype"), [(0, None), (5, np.int64)])
def test_a_vocabulary_has_entries_and_statistics_are_floating_point(size, dtype):
    with pytest.raises(ke.InputError, match="vocabulary of at least one"):
        ke.EmbeddingInputKroneckerFactor(["a"], size, dtype)
