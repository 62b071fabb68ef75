"""Curvature products of whole networks against dense matrices by brute force."""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.curvature.products import CurvatureMatrixVectorProductComputer
from tests import models, oracle

BATCH = 3
# Jacobians of the oracle are good to 1e-9; products of two of them lose a digit.
DENSE = 1e-7
# Central differences of float64 gradients with this step.
STEP, DIFFERENCES = 2.0**-14, 1e-6


def build(proto, register, parameters=None, **targets):
    """The computer over all parameters of a model, with what it was made of."""
    model = ke.load_model(proto)
    inputs = models.random_inputs(proto, BATCH)
    trace = model.run(inputs, targets)
    collection = ke.LayerCollection()
    register(collection)
    names = list(parameters or model.parameters)
    return CurvatureMatrixVectorProductComputer(collection, names, trace), model, inputs, names


def draw(shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape) for shape in shapes]


def vector(model, names, seed=0):
    return draw([model.parameters[name].shape for name in names], seed)


def flat(arrays):
    return np.concatenate([array.ravel() for array in arrays])


def categorical(output="output", **options):
    return lambda lc: lc.register_categorical_predictive_distribution(output, **options)


def normal(output="output", **options):
    return lambda lc: lc.register_normal_predictive_distribution(output, **options)


def bernoulli(output="output", **options):
    return lambda lc: lc.register_multi_bernoulli_predictive_distribution(output, **options)


def both(*registrations):
    def register(lc):
        for each in registrations:
            each(lc)

    return register


# ONNX Runtime has no Erf in float64: `layer_norm` is differentiated in tests/autodiff.
# Model, registration, and the losses as (name of the oracle, output, coefficient, variance).
CASES = {
    "categorical": ("mlp", categorical(), [("categorical", "output", 1, 1)]),
    "normal": ("mlp", normal(var=0.3), [("normal", "output", 1, 0.3)]),
    "bernoulli": ("tied", bernoulli(), [("multi_bernoulli", "output", 1, 1)]),
    "tokens": ("token_mlp", categorical(), [("categorical", "output", 1, 1)]),
    "embedding": ("embedding", categorical(), [("categorical", "output", 1, 1)]),
    "two_losses": (
        "two_outputs", both(categorical("logits", coeff=0.7), normal("mean", coeff=2.5)),
        [("categorical", "logits", 0.7, 1), ("normal", "mean", 2.5, 0.5)]),
    "two_losses_on_one_output": (
        "mlp", both(categorical(coeff=0.7), bernoulli(coeff=3)),
        [("categorical", "output", 0.7, 1), ("multi_bernoulli", "output", 3, 1)]),
    "two_towers": (
        "two_outputs",
        both(categorical("logits", name="loss"), categorical("mean", name="loss", reuse=True)),
        [("categorical", "logits", 1, 1), ("categorical", "mean", 1, 1)]),
    "coefficient_zero": ("mlp", categorical(coeff=0), [("categorical", "output", 0, 1)]),
}  # fmt: skip
every_case = pytest.mark.parametrize("name", CASES)


def factor(loss, z, var):
    """``B`` of one prediction from its closed form, with ``B Bᵀ`` its Fisher matrix."""
    p = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
    sigmoid = 1 / (1 + np.exp(-z))
    B = {
        "categorical": np.diag(np.sqrt(p)) - np.outer(p, np.sqrt(p)),
        "multi_bernoulli": np.diag(np.sqrt(sigmoid * (1 - sigmoid))),
        "normal": np.eye(len(z)) / np.sqrt(var),
    }[loss]
    np.testing.assert_allclose(B @ B.T, oracle.predictive_fisher(loss, z, var), atol=1e-12)
    return B


def dense_factors(proto, inputs, names, losses):
    """``√k Jᵀ B`` for each loss: ``(P, inner)``."""
    found = []
    for loss, output, k, var in losses:
        (z,) = oracle.evaluate(proto, inputs, output)
        jacobian = oracle.jacobian(proto, inputs, output, names)
        rows = jacobian.reshape(-1, *jacobian.shape[2:])
        predictions = z.reshape(-1, z.shape[-1])
        columns = [j.T @ factor(loss, one, var) for j, one in zip(rows, predictions, strict=True)]
        found.append(np.sqrt(k) * np.concatenate(columns, axis=1))
    return found


def setup(name):
    make, register, losses = CASES[name]
    proto = models.MODELS[make](dtype="float64")
    computer, model, inputs, names = build(proto, register)
    return computer, model, names, dense_factors(proto, inputs, names, losses)


@every_case
def test_fisher_and_gauss_newton_products_equal_the_dense_matrix(name):
    computer, model, names, factors = setup(name)
    v = vector(model, names)
    expected = sum(B @ (B.T @ flat(v)) for B in factors)
    for product in (computer.multiply_fisher(v), computer.multiply_ggn(v)):
        assert [p.shape for p in product] == [a.shape for a in v]
        scale = max(1, np.abs(expected).max())
        np.testing.assert_allclose(flat(product), expected, rtol=0, atol=DENSE * scale)


@every_case
def test_factor_products_equal_the_dense_factor(name):
    computer, model, names, factors = setup(name)
    v = vector(model, names)
    for transpose, multiply, shapes in (
        (computer.multiply_fisher_factor_transpose, computer.multiply_fisher_factor,
         computer.fisher_factor_inner_shapes),
        (computer.multiply_ggn_factor_transpose, computer.multiply_ggn_factor,
         computer.ggn_factor_inner_shapes),
    ):  # fmt: skip
        found = transpose(v)
        assert tuple(u.shape for u in found) == shapes
        for u, B in zip(found, factors, strict=True):
            np.testing.assert_allclose(u.ravel(), B.T @ flat(v), rtol=0, atol=DENSE * 10)
        u = draw(shapes, seed=1)
        expected = sum(B @ part.ravel() for B, part in zip(factors, u, strict=True))
        np.testing.assert_allclose(flat(multiply(u)), expected, rtol=0, atol=DENSE * 10)


def test_fisher_is_the_dense_fisher_of_the_batch_without_its_mean():
    proto = models.mlp(dtype="float64")
    computer, model, inputs, names = build(proto, categorical())
    F = oracle.dense_fisher(proto, inputs, "output", names, "categorical")
    v = vector(model, names)
    np.testing.assert_allclose(flat(computer.multiply_fisher(v)), BATCH * F @ flat(v), atol=DENSE)


# -- Hessian ---------------------------------------------------------------------------------------


def total_gradient(collection, model, inputs, targets, names, parameters):
    """Gradient of the total loss, from the losses' gradients and one backward pass each."""
    trace = model.run(inputs, targets, parameters)
    total = dict.fromkeys(names, 0.0)
    for registered in collection.registered_losses:
        loss, k = registered.function, registered.coefficient
        values = {n: trace[n] for n in (*loss.inputs, loss.targets)}
        cotangents = {n: k * g for n, g in loss.gradient(values).items()}
        for name, g in trace.vjp(cotangents, names).items():
            total[name] = total[name] + g
    return total


def mean_and_variance():
    """A trunk with a head for the mean and one, through Softplus, for the variance."""
    net = models.Net("float64")
    x = net.op("Tanh", net.dense("trunk", "input", 4, 5), to="act")
    net.dense("mean", x, 5, 2)
    net.op("Softplus", net.dense("raw", x, 5, 2), to="variance")
    sides = ["batch", 2]
    return net.model({"input": ["batch", 4]}, {"mean": sides, "variance": sides})


def predicted_variance(lc):
    loss = ke.NormalMeanVarianceNegativeLogProbLoss("mean", "variance", "t")
    lc.register_loss_function(loss, "mean", "normal")


_RNG = np.random.default_rng(8)
_IDS = {"t": _RNG.integers(0, 3, BATCH)}
HESSIANS = {
    "categorical": (models.mlp, categorical(targets="t"), _IDS),
    "normal": (models.mlp, normal(targets="t"), {"t": _RNG.standard_normal((BATCH, 3))}),
    "bernoulli": (models.tied, bernoulli(targets="t"), {"t": _RNG.integers(0, 2, (BATCH, 4))}),
    "coefficient": (models.mlp, categorical(targets="t", coeff=1.7), _IDS),
    "embedding": (models.embedding, categorical(targets="t"), _IDS),
    "two_losses": (
        models.two_outputs,
        both(categorical("logits", targets="t", coeff=0.4), normal("mean", targets="u")),
        {**_IDS, "u": _RNG.standard_normal((BATCH, 2))}),
    "predicted_variance": (
        lambda dtype: mean_and_variance(), predicted_variance,
        {"t": _RNG.standard_normal((BATCH, 2))}),
}  # fmt: skip


@pytest.mark.parametrize("name", HESSIANS)
def test_hessian_product_equals_differences_of_gradients(name):
    make, register, targets = HESSIANS[name]
    proto = make(dtype="float64")
    computer, model, inputs, names = build(proto, register, **targets)
    collection = ke.LayerCollection()
    register(collection)
    v = vector(model, names)
    ends = []
    for sign in (1, -1):
        there = {n: model.parameters[n] + sign * STEP * a for n, a in zip(names, v, strict=True)}
        ends.append(total_gradient(collection, model, inputs, targets, names, there))
    expected = flat([(ends[0][n] - ends[1][n]) / (2 * STEP) for n in names])
    found = flat(computer.multiply_hessian(v))
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=DIFFERENCES * scale)
    # The second derivative of the network takes part: it is not the Fisher matrix again.
    assert np.abs(found - flat(computer.multiply_fisher(v))).max() > 0.01 * scale


def test_hessian_of_a_linear_model_is_its_fisher():
    proto = models.linear(dtype="float64")
    computer, model, _, names = build(proto, categorical(targets="t"), **_IDS)
    v = vector(model, names)
    found, expected = computer.multiply_hessian(v), computer.multiply_fisher(v)
    np.testing.assert_allclose(flat(found), flat(expected), atol=1e-12)


# -- more and other values -------------------------------------------------------------------------


@pytest.mark.nightly
def test_fisher_of_a_convolutional_network_in_single_precision():
    proto = models.cnn()
    computer, model, inputs, names = build(proto, categorical())
    v = [a.astype("float32") for a in vector(model, names)]
    F = oracle.dense_fisher(proto, inputs, "output", names, "categorical")
    expected = BATCH * F @ flat(v)
    found = flat(computer.multiply_fisher(v))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())


def test_values_of_interest_are_independent_variables():
    proto = models.mlp(dtype="float64")
    # The first weight reaches the loss through the activation only, which is held fixed.
    computer, model, _, _ = build(proto, normal(targets="t"), ["fc0.weight", "act0"],
                                  t=np.zeros((BATCH, 3)))  # fmt: skip
    alone, _, _, _ = build(proto, normal(), ["act0"])
    v = draw([model.parameters["fc0.weight"].shape, (BATCH, 5)])
    weight, act = computer.multiply_fisher(v)
    assert not weight.any()
    np.testing.assert_allclose(act, alone.multiply_fisher(v[1:])[0], rtol=1e-12)
    assert not computer.multiply_hessian(v)[0].any()


def test_parameters_that_no_loss_reads_have_no_curvature():
    proto = models.two_outputs(dtype="float64")
    computer, model, _, names = build(proto, categorical("logits"))
    found = dict(zip(names, computer.multiply_fisher(vector(model, names)), strict=True))
    assert not found["mean.weight"].any()
    assert found["trunk.weight"].any()


def _collection(register):
    collection = ke.LayerCollection()
    register(collection)
    return collection


# -- refusals --------------------------------------------------------------------------------------


def test_a_loss_without_gauss_newton_matrix_is_refused():
    computer, model, _, names = build(mean_and_variance(), predicted_variance)
    v = vector(model, names)
    for use in (
        lambda: computer.multiply_ggn(v),
        lambda: computer.multiply_ggn_factor([np.zeros((BATCH, 4))]),
        lambda: computer.multiply_ggn_factor_transpose(v),
        lambda: computer.ggn_factor_inner_shapes,
    ):
        with pytest.raises(ke.UnsupportedError, match="no generalised Gauss-Newton matrix"):
            use()


def test_wrong_vectors_are_refused_with_both_shapes():
    computer, model, _, names = build(models.linear(), categorical())
    v = vector(model, names)
    with pytest.raises(
        ke.ShapeError, match=r"values has the shapes \(4, 3\), \(3,\); got \(4, 3\)"
    ):
        computer.multiply_fisher(v[:1])
    with pytest.raises(ke.ShapeError, match=r"losses has the shapes \(3, 3\); got \(3,\)"):
        computer.multiply_fisher_factor([np.zeros(3)])


def test_a_hessian_without_targets_is_refused():
    computer, model, _, names = build(models.linear(), categorical())
    with pytest.raises(ke.InputError, match="no targets"):
        computer.multiply_hessian(vector(model, names))


def test_what_is_missing_is_named():
    proto = models.linear()
    trace = ke.load_model(proto).run(models.random_inputs(proto, BATCH))
    registered = _collection(categorical())
    for arguments, error, message in (
        ((ke.LayerCollection(), ["fc.weight"], trace), ke.InputError, "at least one registered"),
        ((registered, [], trace), ke.InputError, "wrt_tensors is empty"),
        ((registered, ["nobody"], trace), ke.UnknownNameError, "'nobody' is not a value"),
        ((_collection(categorical("nobody")), ["fc.weight"], trace), ke.UnknownNameError,
         "'nobody' is not a value"),
        ((registered, ["fc.weight"], {"fc.weight": 0, "output": 0}), ke.InputError,
         "dict has no method 'vjp'"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            CurvatureMatrixVectorProductComputer(*arguments)
