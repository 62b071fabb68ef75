"""Wrong arguments of Laplace approximations have one clear error."""

import re
from functools import partial

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.analysis.laplace.predictive import LINKS, LogitPrediction
from tests import models
from tests.analysis.fisher_matrix.dense import dense, measured
from tests.analysis.laplace.linear_regression import linear, regression

N = 7


@pytest.fixture(scope="module")
def curvature():
    model = models.mlp((4, 3, 3), dtype="float64")
    inputs = models.random_inputs(model, batch=N)
    return measured(model, (inputs, np.arange(N) % 3))


EXTREMES = [1e-320, 1e-300, 1e-160, 1e160, 1e300]


@pytest.fixture(scope="module")
def numbers():
    x, y = regression()
    return measured(linear(), ({"input": x}, y), "normal")


@pytest.mark.parametrize("value", EXTREMES)
@pytest.mark.parametrize("option", ["prior_precision", "temperature", "noise"])
def test_results_are_finite_or_refused(curvature, numbers, option, value):
    chosen, links = (numbers, ["probit"]) if option == "noise" else (curvature, LINKS)
    inputs = {"input": np.ones((2, 3 if option == "noise" else 4))}
    posterior = ke.Laplace(chosen, **{option: value})
    calls = [posterior.log_determinant, posterior.log_marginal_likelihood, posterior.eigenvalues]
    calls += [partial(predicted, posterior, inputs, link) for link in links]
    results = []
    for call in [*calls, partial(posterior.sample, 2)]:
        try:
            found = call()
        except (ke.InputError, ke.NonFiniteError) as error:
            results.append(str(error))
        else:
            arrays = found.values() if isinstance(found, dict) else [found]
            assert all(np.isfinite(array).all() for array in arrays)
    assert all(re.search("nearer to 1|NaN or infinity", message) for message in results)


def predicted(posterior, inputs, link):
    prediction = posterior.predict(inputs, link, samples=5)
    arrays = {"mean": prediction.mean, "variance": prediction.variance}
    return arrays | ({} if prediction.probabilities is None else {"p": prediction.probabilities})


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e300])
@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("k", [2, 3, 5])
def test_the_bridge_is_its_formula_at_every_scale(k, normalized, scale):
    rng = np.random.default_rng(k)
    mean, root = rng.standard_normal((4, k)), rng.standard_normal((4, k, k))
    covariance = root @ root.swapaxes(1, 2) + np.eye(k)
    found = LINKS["bridge_norm" if normalized else "bridge"](
        LogitPrediction(mean, covariance * scale, True), 1, rng
    )
    for row, mu, S in zip(found, mean, covariance, strict=True):
        a = S.sum(axis=1) / S.sum()
        m, v = mu - a * mu.sum(), np.diag(S) - a * S.sum(axis=1)
        if normalized:
            c = v.mean() * scale / np.sqrt(k / 2)
            m, v = m / np.sqrt(c), v / c
        alpha = (1 - 2 / k + np.exp(m) * np.exp(-m).sum() / k**2) / v
        np.testing.assert_allclose(row, alpha / alpha.sum(), rtol=1e-10)


def test_several_losses_have_a_posterior_but_no_predictions():
    model = models.two_outputs()
    inputs = models.random_inputs(model, batch=3)
    outputs = [entry.name for entry in model.graph.output]
    curvature = measured(model, (inputs, None), ["normal", "normal"], output=outputs)
    posterior = ke.Laplace(curvature)
    P = 3 * 0.5 * dense(curvature) + np.eye(curvature.vector.size)
    assert posterior.log_determinant() == pytest.approx(np.linalg.slogdet(P)[1], rel=1e-4)
    with pytest.raises(ke.UnsupportedError, match="one loss"):
        posterior.predict(inputs)


def test_evidence_without_a_maximum_is_refused():
    """Parameters of zero: the evidence grows with the precision of the prior."""
    model = linear(bias=False)
    (weight,) = model.graph.initializer
    weight.CopyFrom(models.onnx.numpy_helper.from_array(np.zeros((3, 2)), "w"))
    x, y = regression()
    posterior = ke.Laplace(measured(model, ({"input": x}, y), "normal"))
    with pytest.raises(ke.InputError, match="no maximum: all entries of w are zero"):
        posterior.fit_prior()


def test_model_without_error_has_no_noise():
    x, _ = regression()
    model = linear(bias=False)
    (weight,) = model.graph.initializer
    y = x @ models.onnx.numpy_helper.to_array(weight)
    curvature = measured(model, ({"input": x}, y), "normal")
    curvature.log_likelihood = -0.5 * y.size * np.log(np.pi)  # without rounding errors
    with pytest.raises(ke.InputError, match="predicts these targets exactly"):
        ke.Laplace(curvature).fit_prior(noise=True)


def test_parameter_without_effect_has_no_best_prior():
    net = models.Net("float64")
    net.op("MatMul", "input", net.weight("w", 3, 2), to="p")
    net.op(
        "Mul",
        net.op("Add", "p", net.weight("b", 2), to="s"),
        net.constant("zero", np.zeros(2)),
        to="output",
    )
    model = net.model({"input": ["batch", 3]}, {"output": ["batch", 2]})
    x, y = regression()
    posterior = ke.Laplace(measured(model, ({"input": x}, y), "normal", freeze="zero"))
    with pytest.raises(ke.InputError, match="the loss does not depend on"):
        posterior.fit_prior()


@pytest.mark.parametrize("loss", ["l1", "huber", "poisson"])
def test_other_losses_have_no_likelihood_of_validation_data(loss):
    model = models.mlp((4, 3, 3), dtype="float64")
    data = models.random_inputs(model, batch=N), np.ones((N, 3))
    posterior = ke.Laplace(measured(model, data, loss))
    with pytest.raises(ke.UnsupportedError, match="leave validation out"):
        posterior.fit_prior(validation=data)
    assert posterior.prior_precision == 1
    assert posterior.fit_prior().prior_precision > 0
