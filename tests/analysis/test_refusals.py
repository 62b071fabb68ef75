"""Wrong arguments of curvatures and of their uses have one clear error each."""

from functools import cache, partial

import numpy as np
import pytest

import kfac_engine as ke
from tests import models
from tests.analysis.fisher_matrix.dense import measured as measured_on
from tests.analysis.pruning.linear import linear_curvature

N = 7
MODEL = models.mlp((4, 3, 3), dtype="float64")
INPUTS = models.random_inputs(MODEL, batch=N)
LABELS = np.arange(N) % 3
DATA, ALONE = (INPUTS, LABELS), (INPUTS, None)
NAN = {"input": np.full((N, 4), np.nan)}
VECTOR = {"fc0.weight": np.ones((3, 4)), "fc0.bias": np.ones(3)}
SPECTRUM = np.diag(np.arange(1.0, 61))

measured = partial(measured_on, MODEL)


@cache
def curvature():
    return measured(DATA)


@cache
def linear():
    """A curvature with the weight W of 4 inputs and 3 outputs, and the bias b."""
    return linear_curvature()[0]


def multiplied(change):
    return curvature().multiply(VECTOR | change, damping=1.0)


def determinant(damping):
    return curvature().log_determinant(damping)


def laplace(**options):
    return ke.Laplace(curvature(), **options)


def without_targets():
    return ke.Laplace(measured(ALONE))


def influence(damping=1.0):
    return ke.Influence(curvature(), damping)


def pruned(**options):
    return ke.prune(linear(), **options)


def operator(batches=ALONE, matrix="ggn", **options):
    options = {"loss": "categorical", "threads": 1, "backend": "numpy"} | options
    return ke.curvature_operator(MODEL, batches, matrix, **options)


def multiplied_by(batches, matrix="ggn", entry=1.0):
    A = operator(batches, matrix)
    return A @ np.full(A.shape[0], entry)


def apart(value):
    """A number for each parameter, another for the bias of the first layer."""
    return dict.fromkeys(curvature().parameters, 1.0) | {"fc0.bias": value}


def tied_series():
    model = models.tied(dtype="float64")
    inputs = models.random_inputs(model)
    return measured_on(
        model, (inputs, None), "normal", approximations={"fully_connected_multi": "kron_series_1"}
    )


OTHER = r"result of kfac_engine\.curvature, got "
ROWS = [
    # Batches.
    (lambda: measured([]), ke.InputError, "no example"),
    (lambda: measured(3), ke.InputError, "iterable of batches, got int"),
    (lambda: measured({"inputs": 1}), ke.InputError, "no input 'inputs'|'input' is missing"),
    (lambda: measured([INPUTS, INPUTS, 3]), ke.InputError, "batch 3 is int"),
    (lambda: measured([DATA, ALONE]), ke.InputError, "batch 2 has no targets"),
    (lambda: measured([ALONE, DATA]), ke.InputError, "batch 2 has targets"),
    (lambda: measured([({"input": np.zeros((4, 5))}, None)]), ke.InputError, "shape"),
    (lambda: measured([({"input": np.zeros((0, 4))}, None)]), ke.InputError, "empty"),
    (lambda: measured([(NAN, None)]), ke.InputError, "NaN"),
    (lambda: measured([(INPUTS, 7 * (LABELS > 0))]), ke.InputError, "7"),
    # Options of a curvature.
    (
        lambda: measured(ALONE, structure="block"), ke.InputError,
        "structure must be one of kron, ekfac, diagonal, full"),
    (lambda: measured(ALONE, fisher="type-2"), ke.InputError, "fisher must be one of"),
    (lambda: measured(ALONE, biases="none"), ke.InputError, "biases must be one of"),
    (lambda: measured(ALONE, layers="first"), ke.InputError, "layers must be one of"),
    (lambda: measured(ALONE, draws=LABELS), ke.InputError, "draws are targets of fisher='sampled'"),
    (
        lambda: measured(ALONE, fisher="sampled", draws=LABELS[:3]), ke.InputError,
        "fewer targets than the data"),
    (
        lambda: measured(ALONE, fisher="sampled", draws=np.zeros(9, int)), ke.InputError,
        "2 more targets"),
    (lambda: measured(ALONE, fisher="empirical"), ke.InputError, "target"),
    (lambda: measured(ALONE, structur="kron"), ke.UnknownNameError, "did you mean 'structure'"),
    (tied_series, ke.UnsupportedError, r"shared.weight.*kron_indep"),
    # Vectors and dampings.
    (lambda: curvature().multiply({}, damping=1.0), ke.InputError, "no vector"),
    (lambda: curvature().multiply(np.ones(3), damping=1.0), ke.InputError, "must be a mapping"),
    (
        lambda: curvature().multiply({"fc9.weight": np.ones(3)}, damping=1.0),
        ke.UnknownNameError, "fc9.weight.*they are: fc0.weight"),
    (
        lambda: curvature().multiply({"fc0.weight": np.ones((3, 4))}, damping=1.0),
        ke.InputError, "missing: fc0.bias"),
    (lambda: multiplied({"fc0.bias": np.ones(6)}), ke.ShapeError, "fc0.bias.*shape"),
    (
        lambda: multiplied({"fc0.bias": np.ones((2, 3))}), ke.ShapeError,
        "different numbers of vectors"),
    (lambda: multiplied({"fc0.bias": np.full(3, np.inf)}), ke.NonFiniteError, "fc0.bias"),
    (lambda: multiplied({"fc0.bias": np.array(list("abc"))}), ke.InputError, "numbers"),
    (lambda: determinant(-1.0), ke.InputError, "must be at least 0"),
    (lambda: determinant(np.nan), ke.InputError, "finite"),
    (lambda: determinant(0.0), ke.InputError, "raise the damping"),
    (lambda: determinant({"fc0.weight": 1.0}), ke.InputError, "no number for fc0.bias"),
    (lambda: determinant({"w": 1.0}), ke.UnknownNameError, "'w'"),
    (lambda: determinant(apart(2.0)), ke.InputError, "fc0.weight, fc0.bias share a block"),
    (
        lambda: curvature().input_moment("fc0.bias"), ke.UnknownNameError,
        "'fc0.bias' is not the weight"),
    # Laplace approximations.
    (lambda: ke.Laplace("model.onnx"), ke.InputError, OTHER + "str"),
    (lambda: laplace(prior_precision=0.0), ke.InputError, "prior_precision must be a positive"),
    (lambda: laplace(prior_precision=np.nan), ke.KfacError, "prior_precision|damping"),
    (
        lambda: laplace(prior_precision={"fc0.weight": 1.0}), ke.KfacError,
        "no number for fc0.bias"),
    (
        lambda: laplace(prior_precision={"fc9.weight": 1.0}), ke.KfacError,
        "'fc9.weight', which is not a parameter"),
    (lambda: laplace(prior_precision=apart(2.0)), ke.InputError, "fc0.bias share a block"),
    (lambda: laplace(temperature=-1.0), ke.KfacError, "temperature must be a positive"),
    (lambda: laplace(noise=0.5), ke.KfacError, "normal loss"),
    (lambda: laplace(noise="loud"), ke.KfacError, "noise"),
    (lambda: laplace().fit_prior(noise=True), ke.InputError, "only targets of a normal loss"),
    (
        lambda: laplace().fit_prior(noise=True, validation=({}, None)), ke.InputError,
        "leave validation out"),
    (lambda: laplace().predict({}, "probbit"), ke.UnknownNameError, "did you mean 'probit'"),
    (lambda: laplace().predict({"x": np.ones((2, 4))}), ke.KfacError, "input"),
    (lambda: without_targets().log_marginal_likelihood(), ke.InputError, "without targets"),
    (lambda: without_targets().fit_prior(), ke.InputError, "measured without targets"),
    (
        lambda: ke.Laplace(measured(ALONE, ke.Categorical(weight=2.0))), ke.UnsupportedError,
        "give a temperature"),
    # Influence.
    (lambda: ke.Influence("model.onnx"), ke.InputError, OTHER + "str"),
    (lambda: influence(-1.0), ke.InputError, "must be at least 0"),
    (lambda: influence({"fc0.weight": 1.0}), ke.InputError, "no number for"),
    (lambda: influence(np.nan), ke.InputError, "damping"),
    (
        lambda: influence().scores(ALONE, DATA), ke.InputError,
        "batch 1 of the queries has no targets"),
    (
        lambda: influence().self_scores(ALONE), ke.InputError,
        "batch 1 of the training data has no targets"),
    (lambda: influence().scores([], DATA), ke.InputError, "have no example"),
    (lambda: influence().scores(DATA, []), ke.InputError, "have no example"),
    (lambda: influence().scores(DATA, iter([DATA])), ke.InputError, "read 2 times"),
    (lambda: influence().self_scores((NAN, LABELS)), ke.NonFiniteError, "input"),
    # Pruning.
    (lambda: ke.saliency({"weight": np.ones(3)}), ke.InputError, OTHER + "dict"),
    (lambda: ke.prune({"weight": np.ones(3)}, sparsity=0.5), ke.InputError, OTHER + "dict"),
    # A softmax ignores a number that is added to all logits: the matrix is singular.
    (lambda: ke.saliency(linear(), "obs"), ke.InputError, "damping"),
    (
        lambda: ke.saliency(linear(), blocks="row"), ke.InputError,
        "blocks must be one of measured, layer"),
    (lambda: ke.saliency(linear(), "magnitud"), ke.UnknownNameError, "did you mean 'magnitude'"),
    (
        lambda: pruned(pattern="2:4", parameters=["*"]), ke.KfacError,
        "b is not only the weight of a layer"),
    (pruned, ke.KfacError, "pass one of sparsity, count, pattern"),
    (lambda: pruned(sparsity=0.5, count=3), ke.KfacError, "pass one of"),
    (lambda: pruned(sparsity=1.0), ke.KfacError, r"sparsity must lie in \[0, 1\)"),
    (lambda: pruned(sparsity=np.nan), ke.KfacError, "sparsity must be a finite number"),
    (lambda: pruned(count=13), ke.KfacError, "have 12 weights"),
    (lambda: pruned(count=-1), ke.KfacError, "count must be a whole number"),
    (lambda: pruned(pattern="4:2"), ke.KfacError, "pattern must be a text such as '2:4'"),
    (lambda: pruned(pattern="3:3"), ke.KfacError, "pattern must be"),
    (lambda: pruned(pattern=f"1:{'9' * 5000}"), ke.KfacError, "pattern must be"),
    (lambda: pruned(pattern=f"{'9' * 5000}:{'9' * 5001}"), ke.KfacError, "pattern must be"),
    (lambda: pruned(pattern="١:٤"), ke.KfacError, "pattern must be"),
    (lambda: pruned(pattern="1:3"), ke.KfacError, "W has 4 inputs for each output"),
    (lambda: pruned(count=1, parameters="W"), ke.KfacError, "parameters must be a list"),
    (lambda: pruned(count=1, parameters=["V"]), ke.KfacError, "no parameter matches 'V'"),
    (lambda: pruned(count=1, method="obs"), ke.KfacError, "damping"),
    # Operators and spectra.
    (lambda: operator(matrix="hesian"), ke.KfacError, "did you mean 'hessian'"),
    (lambda: operator(speed=1), ke.KfacError, "speed"),
    (lambda: operator(reduction="sum"), ke.KfacError, "reduction"),
    (lambda: operator(iter([ALONE])), ke.KfacError, "read 2 times"),
    (lambda: operator(5), ke.KfacError, "iterable of batches, got int"),
    (lambda: ke.curvature_operator(MODEL, ALONE), ke.InputError, "needs loss="),
    (lambda: multiplied_by(ALONE, "hessian"), ke.InputError, "batch 1 has no targets"),
    (lambda: multiplied_by([]), ke.InputError, "no example"),
    (lambda: multiplied_by(ALONE, entry=np.nan), ke.NonFiniteError, "NaN"),
    (lambda: ke.estimate_spectrum(SPECTRUM, vectors=0), ke.KfacError, "vectors"),
    (lambda: ke.estimate_spectrum(SPECTRUM, steps=2.5), ke.KfacError, "steps"),
    (lambda: ke.estimate_spectrum(SPECTRUM[:3]), ke.KfacError, "square"),
    (lambda: ke.estimate_spectrum(np.full((3, 3), np.nan)), ke.KfacError, "NaN"),
    (lambda: ke.estimate_spectrum(SPECTRUM).density([0.0], width=0.0), ke.KfacError, "width"),
    (
        lambda: ke.estimate_spectrum(SPECTRUM).log_determinant(np.nan), ke.KfacError,
        "damping|definite"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), ROWS)
def test_wrong_arguments_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ke.estimate_spectrum(SPECTRUM), "50 Lanczos vectors of 60 entries"),
        (
            lambda: laplace().predict({"input": np.ones((5, 4))}, joint=True),
            "joint covariance of 15 outputs",
        ),
    ],
)
def test_results_that_do_not_fit_into_the_memory_are_refused(call, message, monkeypatch):
    curvature()
    monkeypatch.setattr("kfac_engine.system.memory_limits.available_memory", lambda: 1000)
    with pytest.raises(ke.MemoryLimitError, match=message):
        call()
