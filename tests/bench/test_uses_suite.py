"""The truth of the suite ``uses``: a dense layer by brute force, gradients of convolutions."""

import numpy as np
import pytest

from kfac_engine.bench import jobs, uses
from kfac_engine.bench.contenders import DEFINITION, OURS
from kfac_engine.bench.measure import measure
from kfac_engine.bench.processes import running
from kfac_engine.bench.reference_uses import OPERATIONS
from kfac_engine.bench.roofline import Roofline
from kfac_engine.bench.step_networks import classifier

SIZES = {"network": "tiny", "examples": 7, "queries": 2}
# Dense linear algebra of 15 × 15 matrices in float64.
TOLERANCE = 1e-9


@pytest.fixture
def layer(monkeypatch):
    """Rows with a one, and gradients of all classes, of the examples and queries of one layer."""
    monkeypatch.setattr(uses, "_NETWORKS", {"tiny": lambda: classifier((4, 3))})
    data = uses.study(**SIZES)
    W = data.network.weights["0.weight"].astype(float)
    rows = np.c_[data.inputs.astype(float), np.ones(9)]
    z = rows @ np.vstack([W, np.zeros(3)])
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    return rows, p, p - np.eye(3)[data.targets], W


def precision(rows, p, prior=1.0):
    """``n A ⊗ G + prior`` of the weight, and ``n G + prior`` of the bias, as one matrix."""
    H = np.zeros((15, 15))
    G = np.mean([np.diag(q) - np.outer(q, q) for q in p], axis=0)
    H[:12, :12] = 7 * np.kron(rows[:, :4].T @ rows[:, :4] / 7, G)
    H[12:, 12:] = 7 * G
    return H + prior * np.eye(15)


def test_log_determinant_is_that_of_the_dense_precision(layer):
    rows, p, *_ = layer
    result = OPERATIONS["Laplace fit"](**SIZES)()
    expected = np.linalg.slogdet(precision(rows[:7], p[:7]))[1]
    assert result[uses.LOG_DETERMINANT] == pytest.approx(expected, rel=TOLERANCE)


def test_variance_is_that_of_the_dense_covariance(layer):
    rows, p, *_ = layer
    covariance = np.linalg.inv(precision(rows[:7], p[:7]))
    jacobians = np.stack([np.kron(row[None], np.eye(3)) for row in rows[7:]])
    expected = jacobians @ covariance @ jacobians.swapaxes(1, 2)
    np.testing.assert_allclose(OPERATIONS["variance"](**SIZES)(), expected, rtol=TOLERANCE)


def test_evidence_is_that_of_the_dense_precision(layer):
    rows, p, ds, W = layer
    fit = np.log(p[:7][ds[:7] < 0]).sum()
    expected = [
        fit - 0.5 * (prior * (W**2).sum() - 15 * np.log(prior)
                     + np.linalg.slogdet(precision(rows[:7], p[:7], prior))[1])
        for prior in uses.PRIORS
    ]  # fmt: skip
    np.testing.assert_allclose(OPERATIONS["evidence"](**SIZES)(), expected, rtol=TOLERANCE)


def test_ekfac_has_the_squares_of_gradients_in_the_eigenbasis(layer):
    rows, _, ds, _ = layer
    a, g = rows[:7], ds[:7]
    Q = np.kron(np.linalg.eigh(a.T @ a)[1], np.linalg.eigh(g.T @ g)[1])
    gradients = np.einsum("ni,nj->nij", rows, ds).reshape(9, 15)
    scales = ((gradients[:7] @ Q) ** 2).mean(0)
    fit = OPERATIONS["EKFAC fit"](**SIZES)()
    expected = (scales / (scales + uses.DAMPING)).sum()
    assert fit[uses.EFFECTIVE_DIMENSION] == pytest.approx(expected, rel=TOLERANCE)
    inverse = (Q / (scales + uses.SHARE * scales.mean())) @ Q.T
    scores = gradients[7:] @ inverse @ gradients[:7].T
    np.testing.assert_allclose(OPERATIONS["scores"](**SIZES)(), scores, rtol=TOLERANCE)
    selves = np.diag(gradients[:7] @ inverse @ gradients[:7].T)
    np.testing.assert_allclose(OPERATIONS["self-influence"](**SIZES)(), selves, rtol=TOLERANCE)


@pytest.fixture(scope="module")
def processes():
    with running([DEFINITION, OURS], threads=1) as contenders:
        yield contenders


@pytest.mark.parametrize("use", [*jobs.LAPLACE, *jobs.INFLUENCE])
@pytest.mark.parametrize("network", jobs.USES)
def test_use_of_curvature_gives_the_result_of_the_definition(network, use, processes, monkeypatch):
    monkeypatch.setattr("kfac_engine.bench.measure._SETTLING", 0.0)
    ceiling = Roofline(threads=1, multiplications=1e9, copied_bytes=1e9)
    job = jobs.use(use, network, 8, 2)
    (row,) = measure(job, processes, ceiling, repeats=2)  # the definition is not timed
    assert row.contender == OURS
    assert all(error <= job.tolerance for error in row.errors.values())
