"""Laplace approximations and influence scores against laplace-torch and kronfluence in float64.

The conventions of the libraries are those of ``test_curvature_of_peers``; ``ke.Laplace`` has the
noise, the prior and the temperature of laplace-torch, and ``ke.Influence`` the sign and the scale
of kronfluence.
"""

import pytest

import kfac_engine as ke
from tests.comparing import assert_near
from tests.uses_of_peers.cases import DAMPINGS, LINKS, settings
from tests.uses_of_peers.test_curvature_of_peers import (
    CASES,
    POSTERIORS,
    STRATEGIES,
    TOLERANCE,
    influence_of,
    posterior_of,
)

CLASSIFIERS = [name for name in CASES if CASES[name].loss == "categorical"]


def queries_of(name):
    return {"input": CASES[name].queries}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("subset", "structure"), POSTERIORS)
def test_posterior_equals_that_of_laplace_torch(name, subset, structure):
    curvature, expected = posterior_of(name, subset, structure)
    for number, (prior, noise) in enumerate(settings(CASES[name].loss)):
        posterior = ke.Laplace(curvature, prior, **_noise_of(name, noise))
        tolerance = TOLERANCE[name]
        actual = posterior.log_determinant()
        assert actual == pytest.approx(float(expected["log_determinant"][number]), rel=tolerance)
        actual = posterior.log_marginal_likelihood()
        assert actual == pytest.approx(float(expected["evidence"][number]), rel=tolerance)
        predictive = posterior.predict(queries_of(name))
        assert_near(predictive.mean, expected["mean"], tolerance)
        assert_near(predictive.variance, expected["variance"][number], tolerance)
    joint = posterior.predict(queries_of(name), joint=True).covariance
    assert_near(joint, expected["covariance"], tolerance)


def _noise_of(name, noise):
    """The noise of a regression; a classification has none."""
    return {"noise": noise} if CASES[name].loss == "normal" else {}


@pytest.mark.parametrize("name", CLASSIFIERS)
@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize(("subset", "structure"), POSTERIORS)
def test_probabilities_equal_those_of_laplace_torch(name, link, subset, structure):
    curvature, expected = posterior_of(name, subset, structure)
    for number, (prior, _) in enumerate(settings("categorical")):
        predictive = ke.Laplace(curvature, prior).predict(queries_of(name), link=link)
        assert_near(predictive.probabilities, expected[link][number], TOLERANCE[name])


@pytest.mark.parametrize("name", CLASSIFIERS)
@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_best_prior_and_temperature_equal_those_of_laplace_torch(name, subset):
    curvature, expected = posterior_of(name, subset, "kron")
    tolerance = TOLERANCE[name]
    fitted = ke.Laplace(curvature).fit_prior().prior_precision
    # The evidence is flat at its maximum: a search finds its place to the root of its precision.
    assert fitted == pytest.approx(float(expected["best_prior"]), rel=1e-3)
    cold = ke.Laplace(curvature, 1.0, temperature=0.5)
    evidence = float(expected["evidence.temperature=0.5"])
    assert cold.log_marginal_likelihood() == pytest.approx(evidence, rel=tolerance)
    variance = cold.predict(queries_of(name)).variance
    assert_near(variance, expected["variance.temperature=0.5"], tolerance)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_priors_of_single_parameters_equal_those_of_laplace_torch(name):
    curvature, expected = posterior_of(name, "all", "kron")
    priors = {parameter: 1.0 + i for i, parameter in enumerate(CASES[name].parameters)}
    posterior = ke.Laplace(curvature, priors)
    evidence = float(expected["evidence.priors"])
    assert posterior.log_marginal_likelihood() == pytest.approx(evidence, rel=TOLERANCE[name])
    variance = posterior.predict(queries_of(name)).variance
    assert_near(variance, expected["variance.priors"], TOLERANCE[name])


# The K-FAC eigenvalues of kronfluence leave the number of positions out.
SCORES = [
    (name, *pair) for name in CASES for pair in STRATEGIES if (name, pair[0]) != ("cnn", "kfac")
]


@pytest.mark.parametrize(("name", "strategy", "fisher"), SCORES)
def test_scores_equal_those_of_kronfluence(name, strategy, fisher):
    curvature, expected = influence_of(name, strategy, fisher)
    case = CASES[name]
    train, queries = ({"input": case.inputs}, case.targets), (queries_of(name), case.query_targets)
    for number, damping in enumerate(DAMPINGS):
        influence = ke.Influence(curvature, damping=damping)
        scores = influence.scores(queries, train)
        assert_near(scores, expected["scores"][number], TOLERANCE[name])
        selves = influence.self_scores(train)
        assert_near(selves, expected["self_scores"][number], TOLERANCE[name])
