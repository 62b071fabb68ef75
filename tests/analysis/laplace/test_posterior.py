"""Posterior, evidence, prior and predictions against dense matrices and Bayesian regression."""

import numpy as np
import pytest
from scipy.special import expit, softmax
from scipy.stats import multivariate_normal

import kfac_engine as ke
from kfac_engine.analysis.laplace.likelihood import Outputs
from tests import models, oracle
from tests.analysis.fisher_matrix.dense import (
    DOUBLE,
    MODELS,
    STRUCTURES,
    dense,
    example,
    measured,
    uneven,
)
from tests.analysis.laplace.linear_regression import linear, regression
from tests.comparing import assert_near

N = 7


@pytest.fixture(scope="module", params=MODELS)
def case(request):
    model, tolerance, inputs, output, labels = example(MODELS[request.param], N)
    return model, tolerance, inputs, output, labels


def jacobian(curvature, model, inputs):
    names = list(curvature.model.parameters)
    jac = oracle.jacobian(model, inputs, "output", names)
    return jac.reshape(len(jac), -1, jac.shape[-1])


def theta(curvature):
    return np.concatenate([np.ravel(a) for a in curvature.parameters.values()]).astype(float)


# -- against dense matrices ------------------------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES)
def test_posterior_equals_that_of_the_dense_matrix(case, structure):
    model, tolerance, inputs, output, labels = case
    batches = uneven(inputs, labels, sizes=(1, 4))
    curvature = measured(model, batches, structure=structure, scratch_bytes=4096)
    posterior = ke.Laplace(curvature, prior_precision=0.7, temperature=1.5)
    P = N / 1.5 * dense(curvature) + 0.7 * np.eye(curvature.vector.size)
    jac = jacobian(curvature, model, inputs)

    assert posterior.log_determinant() == pytest.approx(np.linalg.slogdet(P)[1], rel=tolerance)
    log_p = np.log(softmax(output, axis=-1)).reshape(-1, output.shape[-1])
    likelihood = log_p[np.arange(len(log_p)), labels.ravel()].sum()
    w = theta(curvature)
    evidence = likelihood / 1.5 - 0.5 * (
        np.linalg.slogdet(P)[1] - len(w) * np.log(0.7) + 0.7 * w @ w
    )
    assert posterior.log_marginal_likelihood() == pytest.approx(evidence, rel=tolerance)

    prediction = posterior.predict(inputs, joint=True)
    assert_near(prediction.mean, output, tolerance)
    assert_near(prediction.variance, jac @ np.linalg.inv(P) @ jac.swapaxes(1, 2), tolerance)
    flat = jac.reshape(-1, jac.shape[-1])
    assert_near(prediction.covariance, flat @ np.linalg.inv(P) @ flat.T, tolerance)


def test_probit_probabilities_are_those_of_each_position(case):
    model, tolerance, inputs, output, labels = case
    curvature = measured(model, (inputs, labels))
    prediction = ke.Laplace(curvature).predict(inputs)
    spread = np.diagonal(prediction.variance, axis1=1, axis2=2).reshape(output.shape)
    expected = softmax(output / np.sqrt(1 + np.pi / 8 * spread), axis=-1)
    assert_near(prediction.probabilities, expected, tolerance)


def test_samples_have_the_mean_and_covariance_of_the_posterior():
    model = models.mlp((3, 2, 2), dtype="float64")
    inputs = models.random_inputs(model, batch=N)
    curvature = measured(model, (inputs, None))
    posterior = ke.Laplace(curvature, prior_precision=2.0)
    samples = posterior.sample(40_000, seed=3)
    rows = np.concatenate([samples[n].reshape(40_000, -1) for n in curvature.parameters], axis=1)
    C = np.linalg.inv(N * dense(curvature) + 2 * np.eye(rows.shape[1]))
    # Five standard errors: of a mean √(C_ii / 40000), of a covariance below √(2 C_ii C_jj / 40000).
    assert (abs(rows.mean(axis=0) - theta(curvature)) < 5 * np.sqrt(np.diag(C) / 40_000)).all()
    bound = 5 * np.sqrt(2 * np.outer(np.diag(C), np.diag(C)) / 40_000)
    assert (abs(np.cov(rows.T, bias=True) - C) < bound).all()
    again = posterior.sample(3, seed=3)
    np.testing.assert_array_equal(again["fc0.weight"], posterior.sample(3, seed=3)["fc0.weight"])
    assert (again["fc0.weight"] != posterior.sample(3, seed=4)["fc0.weight"]).all()


def test_prior_of_each_parameter_is_on_the_diagonal():
    model = models.mlp((4, 3, 3), dtype="float64")
    inputs = models.random_inputs(model, batch=N)
    curvature = measured(model, (inputs, None), biases="separate")
    prior = {name: 0.1 * (i + 1) for i, name in enumerate(curvature.parameters)}
    posterior = ke.Laplace(curvature, prior)
    diagonal = np.concatenate(
        [np.full(a.size, prior[name]) for name, a in curvature.parameters.items()]
    )
    P = N * dense(curvature) + np.diag(diagonal)
    assert posterior.log_determinant() == pytest.approx(np.linalg.slogdet(P)[1], rel=1e-10)
    values = np.concatenate(list(posterior.eigenvalues().values()))
    assert_near(np.sort(values), np.linalg.eigvalsh(P), DOUBLE)


# -- Bayesian linear regression --------------------------------------------------------------------


def at_mean(x, y, prior, noise):
    """The model at the posterior mean of its weights, and their covariance for each output."""
    model = linear(x.shape[1], y.shape[1], bias=False)
    P = x.T @ x / noise**2 + prior * np.eye(x.shape[1])
    mean = np.linalg.solve(P, x.T @ y / noise**2)
    (weight,) = model.graph.initializer
    weight.CopyFrom(models.onnx.numpy_helper.from_array(mean, "w"))
    return model, np.linalg.inv(P)


def true_evidence(x, y, prior, noise):
    """Log density of the targets, which are normal with the covariance x Xᵀ/λ + σ² I."""
    K = x @ x.T / prior + noise**2 * np.eye(len(x))
    return sum(multivariate_normal.logpdf(column, np.zeros(len(x)), K) for column in y.T)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("var", [0.5, 2.0])
def test_linear_regression_is_exact(structure, var):
    x, y = regression()
    model, C = at_mean(x, y, prior=0.5, noise=0.4)
    loss = ke.NormalMeanNegativeLogProbLoss("output", var=var, targets="targets")
    data = uneven({"input": x}, y, sizes=(3, 10))
    if structure == "diagonal":
        x = x * 0 + np.eye(3)[np.arange(30) % 3]  # uncorrelated inputs
        model, C = at_mean(x, y, prior=0.5, noise=0.4)
        data = uneven({"input": x}, y, sizes=(3, 10))
    posterior = ke.Laplace(measured(model, data, loss, structure=structure), 0.5, noise=0.4)
    evidence = posterior.log_marginal_likelihood()
    assert evidence == pytest.approx(true_evidence(x, y, 0.5, 0.4), rel=1e-10)
    queries = np.random.default_rng(5).standard_normal((4, 3))
    prediction = posterior.predict({"input": queries})
    expected = np.einsum("ni,ij,nj->n", queries, C, queries)[:, None, None] * np.eye(2)
    assert_near(prediction.variance, expected, DOUBLE)
    assert prediction.probabilities is None


def test_evidence_has_its_maximum_at_the_fitted_prior_and_noise():
    """For the parameters of the file, a grid around the result has no larger evidence."""
    x, y = regression()
    model, _ = at_mean(x, y, prior=0.5, noise=0.4)
    curvature = measured(model, ({"input": x}, y), "normal")
    posterior = ke.Laplace(curvature)
    assert posterior.fit_prior(noise=True) is posterior
    prior, noise = posterior.prior_precision, posterior.noise
    best = posterior.log_marginal_likelihood()
    for factor in (0.9, 0.99, 1.01, 1.1):
        assert posterior.log_marginal_likelihood(prior_precision=factor * prior) < best
        assert posterior.log_marginal_likelihood(noise=factor * noise) < best
    # MacKay's fixed point: λ θᵀθ = γ, σ² (m − γ) = squared errors, with γ determined parameters.
    values = curved(curvature, noise)
    gamma = (values / (values + prior)).sum()
    W = curvature.parameters["w"]
    assert prior * (W**2).sum() == pytest.approx(gamma, rel=1e-5)
    errors = ((y - x @ W) ** 2).sum()
    assert noise**2 * (y.size - gamma) == pytest.approx(errors, rel=1e-5)
    assert 0.3 < noise < 0.5


def curved(curvature, noise):
    """Eigenvalues of the Hessian of the likelihood."""
    values = np.concatenate(list(curvature.eigenvalues().values()))
    return values * curvature.examples * 0.5 / noise**2


def test_evidence_is_maximal_in_each_block():
    model = models.mlp((4, 3, 3), dtype="float64")
    inputs = models.random_inputs(model, batch=40)
    labels = np.random.default_rng(1).integers(0, 3, 40)
    curvature = measured(model, (inputs, labels))
    prior = dict.fromkeys(curvature.parameters, 1.0)
    posterior = ke.Laplace(curvature, prior).fit_prior()
    best, fitted = posterior.log_marginal_likelihood(), posterior.prior_precision
    assert fitted["fc0.weight"] == fitted["fc0.bias"] != fitted["fc1.weight"]
    assert best > ke.Laplace(curvature).fit_prior().log_marginal_likelihood()
    for names in (("fc0.weight", "fc0.bias"), ("fc1.weight", "fc1.bias")):
        for factor in (0.95, 1.05):
            other = fitted | {name: factor * fitted[name] for name in names}
            assert posterior.log_marginal_likelihood(other) < best


def test_validation_chooses_the_precision_with_the_best_likelihood():
    x, y = regression()
    model, _ = at_mean(x[:8], y[:8], prior=0.5, noise=0.2)
    curvature = measured(model, ({"input": x[:8]}, y[:8]), "normal")
    validation = ({"input": x[8:]}, y[8:])
    # The noise is too small, so that a larger variance of the parameters is better.
    posterior = ke.Laplace(curvature, noise=0.2).fit_prior(validation=validation)
    chosen = posterior.prior_precision

    def likelihood(precision):
        prediction = ke.Laplace(curvature, precision, noise=0.2).predict({"input": x[8:]})
        spread = np.diagonal(prediction.variance, axis1=1, axis2=2) + 0.2**2
        error = y[8:] - prediction.mean
        return (-0.5 * (error**2 / spread + np.log(2 * np.pi * spread))).mean()

    assert likelihood(chosen) >= max(map(likelihood, np.logspace(-4, 6, 41))) - 1e-4
    assert likelihood(chosen) > likelihood(1e3) + 0.01


@pytest.mark.parametrize(
    ("loss", "smoothing"),
    [("categorical", 0), ("one-hot", 0.1), ("multi_bernoulli", 0), ("multi_bernoulli", 0.1)],
)
def test_validation_of_classes_has_the_best_likelihood_of_probit(loss, smoothing):
    model = models.mlp((4, 3, 3), dtype="float64")
    inputs = models.random_inputs(model, batch=60)
    output = oracle.evaluate(model, inputs, "output")[0]
    ids = output.argmax(axis=1)
    labels = {"categorical": ids, "one-hot": np.eye(3)[ids]}.get(loss, (output > 0).astype(float))
    labels[:6] = labels[6:12]  # some of them wrong
    if loss == "one-hot":
        labels = (1 - smoothing) * labels + smoothing / 3
        loss = ke.OnehotCategoricalLogitsNegativeLogProbLoss("output", "targets")
    elif loss == "multi_bernoulli":
        labels = (1 - smoothing) * labels + smoothing / 2
    curvature = measured(model, (inputs, labels), loss)
    chosen = ke.Laplace(curvature).fit_prior(validation=(inputs, labels)).prior_precision

    def likelihood(precision):
        p = ke.Laplace(curvature, precision).predict(inputs).probabilities
        if loss == "categorical":
            return np.log(p[np.arange(60), labels]).mean()
        if loss == "multi_bernoulli":
            return (labels * np.log(p) + (1 - labels) * np.log1p(-p)).mean()
        return (labels * np.log(p)).sum(axis=1).mean()

    assert likelihood(chosen) >= max(map(likelihood, np.logspace(-4, 6, 41))) - 1e-4
    assert likelihood(chosen) > likelihood(1e-3) + 0.01


def test_binary_targets_have_the_likelihood_of_the_complement_for_any_logit():
    """The nearest number to the probability of a logit of 40 is one."""
    model = models.mlp((4, 3, 3), dtype="float64")
    curvature = measured(model, (models.random_inputs(model), np.ones((3, 3))), "multi_bernoulli")
    mean, targets = np.array([[40.0, -40.0, 2.0]]), np.array([[0.0, 1.0, 0.25]])
    found = Outputs.of(curvature).log_likelihood(mean, np.zeros((1, 3, 3)), (targets, None), 1.0)
    softplus = np.log1p(np.exp(-2.0))
    assert found == pytest.approx(-(40 + 40 + softplus + 0.75 * 2) / 3, rel=1e-12)


# -- links -----------------------------------------------------------------------------------------


def test_links_agree_with_samples_of_the_logits():
    model = models.mlp((4, 3, 3), dtype="float64")
    inputs = models.random_inputs(model, batch=N)
    posterior = ke.Laplace(measured(model, (inputs, None)), prior_precision=3.0)
    prediction = posterior.predict(inputs, "monte_carlo", samples=20_000, seed=1)
    rng, expected = np.random.default_rng(9), []
    for mean, covariance in zip(prediction.mean, prediction.variance, strict=True):
        z = rng.multivariate_normal(mean, covariance, 20_000)
        expected.append(softmax(z, axis=1).mean(axis=0))
    # Standard errors of two means of 20,000 numbers between 0 and 1 are below 0.0036 each.
    np.testing.assert_allclose(prediction.probabilities, expected, atol=0.018)
    for link in ("probit", "bridge", "bridge_norm"):
        other = posterior.predict(inputs, link).probabilities
        np.testing.assert_allclose(other.sum(axis=1), 1, rtol=1e-12)
    assert (posterior.predict(inputs, "monte_carlo", seed=2).probabilities
            == posterior.predict(inputs, "monte_carlo", seed=2).probabilities).all()  # fmt: skip


def test_independent_classes_have_probabilities_each():
    model = models.mlp((4, 3, 3), dtype="float64")
    inputs = models.random_inputs(model, batch=N)
    posterior = ke.Laplace(measured(model, (inputs, None), "multi_bernoulli"))
    prediction = posterior.predict(inputs)
    spread = np.diagonal(prediction.variance, axis1=1, axis2=2)
    assert_near(
        prediction.probabilities, expit(prediction.mean / np.sqrt(1 + np.pi / 8 * spread)), DOUBLE
    )
    with pytest.raises(ke.UnsupportedError, match="exclusive classes; use 'probit'"):
        posterior.predict(inputs, "bridge")
