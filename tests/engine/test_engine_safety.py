"""What an engine refuses to do in silence: unknown options, overflows, writes past its checks."""

import copy
import pickle
import warnings
from itertools import product

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.data import demo_model, digits
from tests import models
from tests.comparing import assert_arrays_equal

IMAGES, LABELS = digits()
X, Y = {"image": IMAGES[:16]}, LABELS[:16]
HUGE = {"image": X["image"] * np.float32(1e38)}


def engine_of(**options):
    return ke.Engine.from_onnx(demo_model("mlp"), **{"loss": "categorical", "threads": 1} | options)


def state_of(engine):
    """Everything that a step moves, copied."""
    arrays = [
        {name: array.copy() for name, array in factor.arrays().items()}
        for factor in engine.estimator.factors
    ]
    weights = [factor.average.weight for factor in engine.estimator.factors]
    return arrays, weights, engine.counter, engine.estimator.rng.bit_generator.state


def assert_same(one, other):
    assert one[1:] == other[1:]
    for old, new in zip(one[0], other[0], strict=True):
        assert old.keys() == new.keys()
        for name, array in old.items():
            assert array.dtype == new[name].dtype
            np.testing.assert_array_equal(array, new[name])


# -- attributes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dampng", "did you mean 'damping'"),
        ("exps", "takes 'exps' in its constructor"),
        ("reduction", "takes 'reduction' in its constructor"),
        ("layers", "only damping and schedule can be set"),
        ("gradients", "only damping and schedule can be set"),
        ("anything", "no attribute 'anything'"),
    ],
)
def test_an_attribute_that_changes_nothing_cannot_be_set(name, message):
    engine = engine_of()
    with pytest.raises(ke.UnknownAttributeError, match=message):
        setattr(engine, name, 1)


def test_damping_set_on_an_engine_is_that_of_one_made_with_it():
    changed, made = engine_of(), engine_of(damping=0.5)
    changed.damping = 0.5
    assert changed.damping == 0.5
    found, expected = (engine.step(X, Y).natural_gradients for engine in (changed, made))
    assert_arrays_equal(found, expected)


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), None, "1", True, 5e-324])
def test_a_damping_that_is_no_positive_number_is_refused_and_the_old_one_stays(value):
    engine = engine_of()
    with pytest.raises(ke.InputError, match="damping"):
        engine.damping = value
    assert engine.damping == 1e-3


def test_a_schedule_that_is_set_is_followed_and_checked():
    engine = engine_of(schedule=ke.Schedule(refresh_every=10))
    engine.step(X, Y)
    before = state_of(engine)
    engine.schedule = ke.Schedule(covariance_every=5, refresh_every=10)
    engine.step(X, Y)
    for old, new in zip(before[0], state_of(engine)[0], strict=True):
        assert_arrays_equal(new, old)
    with pytest.raises(ke.InputError, match="Schedule"):
        engine.schedule = "round_robin"


# -- numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2])
def test_a_step_whose_natural_gradient_overflows_changes_nothing(threads):
    engine = engine_of(threads=threads)
    engine.step(X, Y)
    before = state_of(engine)
    with pytest.raises(ke.NonFiniteError, match="overflows"):
        engine.step(HUGE, Y)
    assert_same(before, state_of(engine))
    other = engine_of(threads=threads)
    other.step(X, Y)
    found, expected = (one.step(X, Y).natural_gradients for one in (engine, other))
    assert_arrays_equal(found, expected)


@pytest.mark.parametrize("exp", [50, -1000])
@pytest.mark.parametrize("threads", [1, 2])
def test_powers_that_overflow_are_an_error_and_warn_of_nothing(exp, threads):
    engine = engine_of(exps=(exp,), damping=1.0, threads=threads)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ke.NonFiniteError, match="overflows"):
            engine.step(X, Y)
    assert engine.counter == 0


def test_gradients_whose_product_overflows_are_refused():
    engine = engine_of()
    engine.step(X, Y)
    huge = {name: np.full(array.shape, 1e37, "f") for name, array in engine.parameters.items()}
    with pytest.raises(ke.NonFiniteError, match="overflows"):
        engine.precondition(huge)


@pytest.mark.parametrize("options", [{"exps": (-1000,)}, {"damping": 5e-324}])
def test_a_power_of_the_damping_that_overflows_is_refused_at_once(options):
    with pytest.raises(ke.InputError, match="more than a number can hold"):
        engine_of(**options)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_that_overflows_is_refused_though_its_gradient_is_finite(reduction):
    model = models.mlp()
    engine = ke.Engine.from_onnx(model, loss="normal", reduction=reduction, threads=1)
    inputs, targets = models.random_inputs(model, 4), np.full((4, 3), 1e25, np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for call in (engine.step, engine.gradients):
            with pytest.raises(ke.NonFiniteError, match="the loss of the batch is inf"):
                call(inputs, targets)
    assert engine.counter == 0
    assert all(factor.average.value is None for factor in engine.estimator.factors)


def test_a_step_is_undone_though_the_refresh_that_it_began_fails_too():
    engine = engine_of()
    engine.step(X, Y)
    before = state_of(engine)
    estimator, gradients = engine.estimator, {"w": np.full(3, 1e37, np.float32)}

    def fail():
        raise ke.InputError("no inverse")

    def step():
        with engine.transaction("step") as undo:
            undo.protect(gradients, -1)
            for factor in estimator.factors:
                factor.average.value *= 2
                factor.set_pending(fail)
            raise ke.NonFiniteError("product")

    with pytest.raises(ke.NonFiniteError, match="product"):
        step()
    assert_same(before, state_of(engine))


# -- arrays ----------------------------------------------------------------------------------------


def test_parameters_cannot_be_written_past_their_check():
    engine = engine_of()
    for _ in range(2):
        for name, array in engine.parameters.items():
            with pytest.raises(ValueError, match="read-only"):
                array[...] = np.nan
            assert np.isfinite(engine.parameters[name]).all()
        engine.set_parameters(engine.parameters)


def test_what_is_given_to_set_parameters_stays_the_callers():
    engine = engine_of()
    given = {name: array.copy() for name, array in engine.parameters.items()}
    engine.set_parameters(given)
    for array in given.values():
        array[...] = 7
    assert all((array != 7).any() for array in engine.parameters.values())


class Tensor:
    """A tensor that refuses to be exported while it has a graph, as PyTorch's do."""

    def __init__(self, array, requires_grad):
        self.array, self.requires_grad = array, requires_grad

    def __dlpack__(self, **options):
        if self.requires_grad:
            raise BufferError("Can't export tensors that require gradient, use tensor.detach()")
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def detach(self):
        return Tensor(self.array, requires_grad=False)


def test_tensors_that_require_gradients_are_taken():
    engine = engine_of()
    wanted = {name: array + 1 for name, array in engine.parameters.items()}
    engine.set_parameters({name: Tensor(array, True) for name, array in wanted.items()})
    assert_arrays_equal(wanted, engine.parameters)


# What cannot be copied because it has an engine or a session, and the remedy.
UNCOPIED = {
    "engine": (lambda e: e, r"engine\.save"),
    "optimizer": (lambda e: ke.Adam(e, 0.1), r"optimizer\.save"),
    "optimizer with curvature": (ke.KfacOptimizer, r"optimizer\.save"),
    "trace": (lambda e: e.trace(X), "make another one from the model"),
    "products": (lambda e: e.curvature_products(e.trace(X)), "another one from the model|engine"),
    "factors": (lambda e: e.factors, "another one from the model"),
    "estimator": (lambda e: e.estimator, "another one from the model"),
    "matches": (lambda e: ke.match_parameters(e, e.parameters), r"engine\.save"),
}


@pytest.mark.parametrize(
    ("name", "duplicate"),
    [
        *product(UNCOPIED, [copy.deepcopy, pickle.dumps]),
        *product(["engine", "optimizer", "optimizer with curvature"], [copy.copy]),
    ],
)
def test_copies_are_refused_with_the_way_to_make_one(name, duplicate):
    engine = engine_of()
    engine.observe(X)
    make, words = UNCOPIED[name]
    with pytest.raises(ke.UnsupportedError, match=words):
        duplicate(make(engine))


def test_products_before_any_statistics_say_what_to_call():
    engine = engine_of()
    with pytest.raises(ke.NotReadyError, match=r"call observe\(\) or step\(\) first"):
        engine.precondition({name: array.copy() for name, array in engine.parameters.items()})
