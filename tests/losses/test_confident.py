"""Losses of predictions that are nearly certain, in float32 against float64."""

import numpy as np
import pytest
from scipy import special

from tests.losses.loss_cases import BERNOULLI, CASES, by_name

CONFIDENT = 2e-5  # A few roundings of float32, and those of exp, whose argument is up to 60.


def confident(case, gap):
    """Return float32 logits with the largest one ``gap`` above the others, or far from zero."""
    z = case.values("float32")["z"]
    if isinstance(case.loss, BERNOULLI):
        return z + np.float32(gap) * np.sign(z)
    return z + np.float32(gap) * (z == z.max(axis=case.loss.class_axis, keepdims=True))


@pytest.mark.parametrize("gap", [0, 8, 15, 18, 60], ids=str)
@pytest.mark.parametrize("case", [case for case in CASES if case.loss.discrete], ids=by_name)
def test_confident_predictions_have_full_relative_precision(case, gap):
    """For a gap of 15, p is 1 − 6e-7; for 18, the nearest number to p in float32 is one."""
    rng, loss, z = np.random.default_rng(0), case.loss, confident(case, gap)
    u = rng.standard_normal(loss.inner_shape({"z": z})).astype(z.dtype)

    def results(targets, dtype):
        values, v = {"z": z.astype(dtype), "t": targets}, u.astype(dtype)
        yield "value", loss.negative_log_probs(values, targets)
        yield "gradient", loss.gradient(values)["z"]
        yield "Fisher", loss.fisher(values, {"z": v})["z"]
        yield "factor", loss.fisher_factor(values, v)["z"]
        yield "transposed factor", loss.fisher_factor_transpose(values, {"z": v})
        for index in np.ndindex(case.shape[1:]):
            yield f"column {index}", loss.one_hot(values, index)["z"]

    for targets in (case.values()["t"], loss.sample({"z": z}, rng)):
        truth = dict(results(targets, "float64"))
        for name, found in results(targets, "float32"):
            np.testing.assert_allclose(found, truth[name], rtol=CONFIDENT, atol=0, err_msg=name)


@pytest.mark.parametrize("gap", [0, 15, 40], ids=str)
def test_soft_targets_near_one_have_full_relative_precision(gap):
    case = next(case for case in CASES if case.name == "one-hot")
    z = confident(case, gap)
    for rest in (0.1, 1e-3, 1e-7):
        t = np.full(z.shape, rest / 3, np.float32)
        t[:, 0] = 1 - rest
        p, wide = special.softmax(z.astype(float), axis=1), t.astype(float)
        # This is p · Σt − t, the derivative of −Σ t log p, with p = 1 − q.
        q = np.stack([np.delete(p, k, axis=1).sum(axis=1) for k in range(4)], axis=1)
        expected = p * (wide.sum(axis=1, keepdims=True) - wide) - wide * q
        found = case.loss.gradient({"z": z, "t": t})["z"]
        np.testing.assert_allclose(found, expected, rtol=CONFIDENT, atol=0)
