"""Products of an engine's whole curvature matrices, and of its blocks' Cholesky factors."""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.losses.kinds import LossKind
from kfac_engine.losses.objective import REDUCTIONS
from tests import models
from tests.comparing import assert_arrays_equal
from tests.engine.test_engine import random_targets

BATCH = 4
# Central differences of float64 gradients with this step.
STEP, DIFFERENCES = 2.0**-14, 1e-6
LOSSES = {"mlp": "categorical", "token_mlp": "categorical", "tied": "normal"}


def case(name, **options):
    model, loss = models.MODELS[name](dtype="float64"), LOSSES[name]
    options.setdefault("loss", loss)
    inputs = models.random_inputs(model, BATCH)
    targets = random_targets(model, inputs, loss).astype(
        "int64" if loss == "categorical" else "float64"
    )
    engine = ke.Engine.from_onnx(model, threads=1, **options)
    return engine, model, inputs, targets


def draw(engine, seed=0):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(a.shape) for name, a in engine.parameters.items()}


def flat(vector, names):
    return np.concatenate([vector[name].ravel() for name in names])


def test_the_weight_of_a_loss_multiplies_the_matrix():
    vector, forms = draw(case("mlp")[0]), []
    for weight in (1.0, 3.0):
        engine, _, inputs, _ = case("mlp", loss=LossKind(LOSSES["mlp"], weight=weight))
        products = engine.curvature_products(engine.trace(inputs))
        forms.append(float(products.quadratic_forms(vector)[0, 0]))
    assert forms[1] == pytest.approx(3 * forms[0], rel=1e-12)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", ["mlp", "token_mlp"])
def test_hessian_products_are_differences_of_gradients(name, reduction):
    engine, _, inputs, targets = case(name, reduction=reduction)
    vector, names = draw(engine), list(engine.parameters)
    products = engine.curvature_products(engine.trace(inputs, targets))
    found = flat(products.multiply_hessian(vector), names)
    start, gradients = engine.parameters, []
    for sign in (1, -1):
        engine.set_parameters({n: start[n] + sign * STEP * vector[n] for n in names})
        gradients.append(flat(engine.gradients(inputs, targets).gradients, names))
    expected = (gradients[0] - gradients[1]) / (2 * STEP)
    np.testing.assert_allclose(found, expected, atol=DIFFERENCES * abs(expected).max())


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_forms_of_a_part_estimate_those_of_the_batch(reduction):
    """Equal examples: a part has the curvature of the batch, if its scale is that of the batch."""
    engine, _, inputs, _ = case("mlp", reduction=reduction)
    batch = {name: np.repeat(array[:1], 6, axis=0) for name, array in inputs.items()}
    part = {name: array[:2] for name, array in batch.items()}
    vector = draw(engine)
    whole = engine.curvature_products(engine.trace(batch)).quadratic_forms(vector)
    trace = engine.trace(part)
    forms = engine.curvature_products(trace, examples=6).quadratic_forms(vector)
    np.testing.assert_allclose(forms, whole, rtol=1e-12)
    alone = engine.curvature_products(trace).quadratic_forms(vector)
    np.testing.assert_allclose(alone, whole / (3 if reduction == "sum" else 1), rtol=1e-12)
    with pytest.raises(ke.InputError, match="examples must be a whole number of at least 1"):
        engine.curvature_products(trace, examples=0)


def test_absent_parameters_count_as_zeros():
    engine, _, inputs, _ = case("mlp")
    products = engine.curvature_products(engine.trace(inputs))
    part = {"fc1.weight": draw(engine)["fc1.weight"]}
    whole = {name: part.get(name, np.zeros(a.shape)) for name, a in engine.parameters.items()}
    found, expected = products.multiply_fisher(part), products.multiply_fisher(whole)
    assert list(found) == list(engine.parameters)
    assert_arrays_equal(found, expected)
    forms = products.quadratic_forms(part), products.quadratic_forms(whole)
    np.testing.assert_allclose(*forms, rtol=1e-12)


def test_products_refuse_vectors_that_do_not_fit():
    engine, _, inputs, _ = case("mlp")
    products = engine.curvature_products(engine.trace(inputs))
    vector = draw(engine)
    with pytest.raises(ke.ShapeError, match=r"the vector of 'fc0.weight' has shape \(2,\)"):
        products.multiply_fisher({"fc0.weight": np.ones(2)})
    with pytest.raises(ke.UnknownNameError, match="'other' is not a trainable parameter"):
        products.multiply_fisher({"other": np.ones(2)})
    with pytest.raises(ke.NonFiniteError, match=r"the vector of 'fc0\.bias'"):
        products.quadratic_forms({"fc0.bias": np.full(5, np.nan)})
    with pytest.raises(ke.InputError, match="at least one vector"):
        products.quadratic_forms()
    with pytest.raises(ke.InputError, match="the same parameters"):
        products.quadratic_forms(vector, {"fc0.bias": np.ones(5)})
    with pytest.raises(ke.InputError, match="target"):
        products.multiply_hessian(vector)


# -- Cholesky factors of the blocks ----------------------------------------------------------------


@pytest.fixture
def rooted():
    options = {"compute_cholesky": True, "compute_cholesky_inverse": True, "damping": 0.1}
    engine, _, inputs, targets = case("mlp", **options)
    engine.step(inputs, targets)
    return engine


def matrix(engine, product):
    """Return the dense matrix of a linear map of vectors."""
    names = list(engine.parameters)
    shapes = [engine.parameters[name].shape for name in names]
    sizes = np.cumsum([np.prod(shape) for shape in shapes])
    columns = []
    for e in np.eye(sizes[-1]):
        pieces = np.split(e, sizes[:-1])
        arrays = [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]
        columns.append(flat(product(dict(zip(names, arrays, strict=True))), names))
    return np.array(columns).T


def test_cholesky_factors_multiply_to_the_damped_matrix(rooted):
    # A product with the power 1 reads the averages that the factor is of.
    F = matrix(rooted, lambda v: rooted.precondition(v, exp=1))
    B = matrix(rooted, rooted.multiply_cholesky)
    np.testing.assert_allclose(B @ B.T, F, atol=1e-12 * abs(F).max())
    transposed = matrix(rooted, lambda v: rooted.multiply_cholesky(v, transpose=True))
    np.testing.assert_allclose(transposed, B.T, atol=1e-12)
    inverse = matrix(rooted, rooted.multiply_cholesky_inverse)
    np.testing.assert_allclose(inverse @ B, np.eye(len(B)), atol=1e-10)
    both = matrix(rooted, lambda v: rooted.multiply_cholesky_inverse(v, transpose=True))
    np.testing.assert_allclose(both, inverse.T, atol=1e-12)


def test_entries_that_no_layer_reads_have_the_root_of_the_damping():
    model = unread_rows()
    engine = ke.Engine.from_onnx(model, loss="categorical", damping=0.25, compute_cholesky=True,
                                 compute_cholesky_inverse=True)  # fmt: skip
    inputs = models.random_inputs(model, BATCH)
    engine.step(inputs, np.arange(BATCH) % 3)
    vector = {name: np.ones_like(array) for name, array in engine.parameters.items()}
    np.testing.assert_array_equal(engine.multiply_cholesky(vector)["table"][4:], 0.5)
    np.testing.assert_array_equal(engine.multiply_cholesky_inverse(vector)["table"][4:], 2.0)


def unread_rows():
    """Return a dense layer on the first four of six rows of its weight."""
    net = models.Net()
    table = net.weight("table", 6, 3)
    starts, ends = net.constant("starts", np.array([0])), net.constant("ends", np.array([4]))
    weight = net.op("Slice", table, starts, ends, to="weight")
    net.op("MatMul", "input", weight, to="output")
    return net.model({"input": ["batch", 4]}, {"output": ["batch", 3]})


def test_cholesky_products_need_their_option_and_statistics():
    engine, _, inputs, targets = case("mlp")
    vector = draw(engine)
    for call, option in (
        (engine.multiply_cholesky, "compute_cholesky=True"),
        (engine.multiply_cholesky_inverse, "compute_cholesky_inverse=True"),
    ):
        with pytest.raises(ke.UnknownNameError, match=option):
            call(vector)
    engine, *_ = case("mlp", compute_cholesky=True)
    with pytest.raises(ke.NotReadyError, match="no statistics yet"):
        engine.multiply_cholesky(vector)
    engine.step(inputs, targets)
    with pytest.raises(ke.InputError, match="form one block"):
        engine.multiply_cholesky({"fc0.weight": vector["fc0.weight"]})
