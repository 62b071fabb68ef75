"""``laplace`` and ``influence``: the library's results, and one error for bad input."""

import json

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.__main__ import main
from kfac_engine.cli.influence import highest_scores
from tests.cli.test_pruning_commands import EXAMPLES, folder

__all__ = ["folder"]  # the fixture of two classifiers


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


def stored():
    return ke.Curvature.load("c.st", "a.onnx")


def pairs(inputs, targets):
    return {"input": np.load(inputs)}, np.load(targets)


def laplace(*words):
    return main(["laplace", "a.onnx", "--curvature=c.st", *words])


def influence(*words):
    train = ["--inputs=a.npy", "--targets=y.npy"]
    return main(["influence", "a.onnx", "--curvature=c.st", *train, "-o", "s.npz", *words])


def test_predictions_are_those_of_the_library(data, capsys):
    assert laplace("--inputs=q.npy", "-o", "p.npz", "--prior=0.5", "--json") == 0
    posterior = ke.Laplace(stored(), 0.5)
    expected = posterior.predict({"input": np.load("q.npy")})
    arrays, report = np.load("p.npz"), json.loads(capsys.readouterr().out)
    for name in ("mean", "variance", "probabilities"):
        np.testing.assert_allclose(arrays[name], getattr(expected, name), rtol=1e-6)
    assert report["log_marginal_likelihood"] == pytest.approx(posterior.log_marginal_likelihood())
    assert report["log_determinant"] == pytest.approx(posterior.log_determinant())
    assert report["queries"] == 6
    spread = np.sqrt(np.diagonal(expected.variance, axis1=1, axis2=2))
    assert report["largest_standard_deviation"] == pytest.approx(spread.max())
    assert report["median_standard_deviation"] == pytest.approx(np.median(spread))


def test_prior_by_evidence_is_that_of_the_library(data, capsys):
    assert laplace("--export", "u.onnx", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    posterior = ke.Laplace(stored()).fit_prior()
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


def test_scores_are_those_of_the_library(data, capsys):
    queries = ["--queries=q.npy", "--query-targets=yq.npy", "--damping=0.1", "--batch-size=7"]
    assert influence(*queries, "--json") == 0
    train = pairs("a.npy", "y.npy")
    expected = ke.Influence(stored(), 0.1).scores(pairs("q.npy", "yq.npy"), train)
    np.testing.assert_allclose(np.load("s.npz")["scores"], expected, rtol=1e-4, atol=1e-6)
    report = json.loads(capsys.readouterr().out)
    assert report["shape"] == [6, EXAMPLES]
    assert report["highest"] == np.argsort(-expected, axis=1)[:, :5].tolist()
    assert report["lowest"] == np.argsort(expected, axis=1)[:, :5].tolist()
    assert influence("--damping=0.1") == 0  # without queries, scores for themselves
    expected = ke.Influence(stored(), 0.1).self_scores(train)
    np.testing.assert_allclose(np.load("s.npz")["self_scores"], expected, rtol=1e-4, atol=1e-6)
    assert f"\n  {expected.argmax()}" in capsys.readouterr().out


@pytest.mark.parametrize("count", [1, 3, 9, 20])
@pytest.mark.parametrize("ties", [False, True])
def test_extremes_are_those_of_a_stable_sort(count, ties):
    for seed in range(10):
        rng = np.random.default_rng(seed)
        scores = rng.integers(0, 4, 9).astype(float) if ties else rng.standard_normal(9)
        order = sorted(range(9), key=lambda place: (-scores[place], place))
        assert highest_scores(scores, count) == (order[:count], order[::-1][:count])


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
