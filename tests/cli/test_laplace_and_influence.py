"""``laplace`` and ``influence``: files of closed forms, and one error for bad input."""

import json

import numpy as np
import pytest
from scipy.special import softmax

import kfac_engine as ke
from kfac_engine.__main__ import main
from kfac_engine.cli.influence import highest_scores
from tests.cli.test_pruning_commands import EXAMPLES, fisher, folder, weights_of
from tests.comparing import assert_near

__all__ = ["folder"]  # the fixture of two classifiers
# Rounding of a float32 forward pass; closed forms are float64.
ROUNDING = 1e-4


@pytest.fixture
def data(folder):
    """Labels, queries, and a curvature of classifier ``a`` with targets."""
    rng = np.random.default_rng(5)
    np.save("y.npy", rng.integers(0, 3, EXAMPLES))
    np.save("q.npy", rng.standard_normal((6, 4)).astype(np.float32))
    np.save("yq.npy", rng.integers(0, 3, 6))
    pair = ({"input": np.load("a.npy")}, np.load("y.npy"))
    ke.curvature("a.onnx", pair, loss="categorical", layers="last").save("c.st")
    return folder


def features(name):
    """The features of a file with a one for the bias, and the probabilities of classifier ``a``."""
    x, weights = np.load(name).astype(float), weights_of("a.onnx")
    z = x @ weights["fc.weight"] + weights["fc.bias"]
    return np.hstack([x, np.ones((len(x), 1))]), z, softmax(z, axis=1)


def gradients(name, labels):
    """Gradients of −log p of the labels with respect to weight and bias, row by row."""
    a, _, p = features(name)
    ds = p - np.eye(3)[np.load(labels)]
    return np.einsum("ni,nk->nik", a, ds).reshape(len(a), -1)


def laplace(*words):
    return main(["laplace", "a.onnx", "--curvature=c.st", *words])


def influence(*words):
    train = ["--inputs=a.npy", "--targets=y.npy"]
    return main(["influence", "a.onnx", "--curvature=c.st", *train, "-o", "s.npz", *words])


# -- laplace


def test_predictions_equal_their_closed_forms(data, capsys):
    assert laplace("--inputs=q.npy", "-o", "p.npz", "--prior=0.5", "--json") == 0
    theta, F = fisher("a")
    P = EXAMPLES * F + 0.5 * np.eye(15)
    a, z, _ = features("q.npy")
    jacobian = np.einsum("ni,kl->nkil", a, np.eye(3)).reshape(18, 15)
    C = jacobian @ np.linalg.inv(P) @ jacobian.T
    arrays = np.load("p.npz")
    assert_near(arrays["mean"], z, ROUNDING)
    blocks = np.stack([C[3 * i : 3 * i + 3, 3 * i : 3 * i + 3] for i in range(6)])
    assert_near(arrays["variance"], blocks, ROUNDING)
    spread = np.diagonal(blocks, axis1=1, axis2=2)
    assert_near(
        arrays["probabilities"], softmax(z / np.sqrt(1 + np.pi / 8 * spread), axis=1), ROUNDING
    )
    report = json.loads(capsys.readouterr().out)
    _, _, p = features("a.npy")
    likelihood = np.log(p[np.arange(EXAMPLES), np.load("y.npy")]).sum()
    determinant = np.linalg.slogdet(P)[1]
    evidence = likelihood - 0.5 * (determinant - 15 * np.log(0.5) + 0.5 * theta @ theta)
    assert report["log_marginal_likelihood"] == pytest.approx(evidence, rel=ROUNDING)
    assert report["log_determinant"] == pytest.approx(determinant, rel=ROUNDING)
    assert report["queries"] == 6
    assert report["largest_standard_deviation"] == pytest.approx(np.sqrt(spread.max()), rel=1e-4)


def test_prior_by_evidence_is_that_of_the_library(data, capsys):
    assert laplace("--export", "u.onnx", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    posterior = ke.Laplace(ke.Curvature.load("c.st", "a.onnx")).fit_prior()
    assert report["prior_precision"] == pytest.approx(posterior.prior_precision, rel=1e-6)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name a file with --out, --export or both"),
        (["-o", "p.npz"], "--out predicts for the queries in --inputs"),
        (["--inputs=q.npy", "-o", "p.npz", "--prior=often"], "neither a number nor 'evidence'"),
        (["--inputs=q.npy", "-o", "p.npz", "--prior=-1"], "--prior must be a positive number"),
        (["--inputs=q.npy", "-o", "p.npz", "--noise=0.3"], "normal loss"),
        (["--export=u.onnx", "--prior=1", "--noise=evidence"], "--prior evidence"),
        (["--inputs=no.npy", "-o", "p.npz"], "no.npy"),
        (["--export=a.onnx"], "a.onnx"),
    ],
)
def test_wrong_arguments_of_laplace_have_one_error(data, words, message, capsys):
    before = sorted(path.name for path in data.iterdir())
    assert laplace(*words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert sorted(path.name for path in data.iterdir()) == before


# -- influence


def test_scores_equal_their_closed_form(data, capsys):
    queries = ["--queries=q.npy", "--query-targets=yq.npy", "--damping=0.1", "--batch-size=7"]
    assert influence(*queries, "--json") == 0
    _, F = fisher("a")
    inverse = np.linalg.inv(F + 0.1 * np.eye(15))
    expected = gradients("q.npy", "yq.npy") @ inverse @ gradients("a.npy", "y.npy").T
    assert_near(np.load("s.npz")["scores"], expected, ROUNDING)
    report = json.loads(capsys.readouterr().out)
    assert report["shape"] == [6, EXAMPLES]
    assert report["highest"] == np.argsort(-expected, axis=1)[:, :5].tolist()
    assert report["lowest"] == np.argsort(expected, axis=1)[:, :5].tolist()


def test_examples_without_queries_have_scores_for_themselves(data, capsys):
    assert influence("--damping=0.1") == 0
    _, F = fisher("a")
    g = gradients("a.npy", "y.npy")
    expected = np.einsum("np,pq,nq->n", g, np.linalg.inv(F + 0.1 * np.eye(15)), g)
    assert_near(np.load("s.npz")["self_scores"], expected, ROUNDING)
    assert f"\n  {expected.argmax()}" in capsys.readouterr().out


@pytest.mark.parametrize("count", [1, 3, 9, 20])
@pytest.mark.parametrize("ties", [False, True])
def test_extremes_are_those_of_a_stable_sort(count, ties):
    for seed in range(10):
        rng = np.random.default_rng(seed)
        scores = rng.integers(0, 4, 9).astype(float) if ties else rng.standard_normal(9)
        order = np.argsort(-scores, kind="stable").tolist()
        assert highest_scores(scores, count) == (order[:count], order[::-1][:count])


def test_table_of_queries_fits_80_columns(data, capsys):
    assert influence("--queries=q.npy", "--query-targets=yq.npy") == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.lstrip().startswith(tuple("012345")) for line in lines) >= 6


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--queries=q.npy"], "the targets are missing"),
        (["--queries=q.npy", "--query-targets=y.npy"], "20"),
        (["--queries=no.npy", "--query-targets=yq.npy"], "no.npy"),
        (["--damping=-1"], "--damping"),
        (["-o", "a.npy"], "a.npy"),
    ],
)
def test_wrong_arguments_of_influence_have_one_error(data, words, message, capsys):
    before = np.load("a.npy")
    assert influence(*words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    np.testing.assert_array_equal(np.load("a.npy"), before)
