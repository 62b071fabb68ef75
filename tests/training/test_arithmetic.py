"""Arithmetic in place: its results, and the memory that it may write to."""

from itertools import combinations

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.engine import profiling
from kfac_engine.training.vectors import _PART, add_multiple, combine, dot, inner_products
from tests import models
from tests.comparing import assert_arrays_equal
from tests.engine.test_engine import random_targets
from tests.training import softmax_net as net

LAYOUTS = {
    "rows": lambda a: a,
    "columns": lambda a: np.asfortranarray(a),
    "every second": lambda a: np.repeat(a, 2, axis=1)[:, ::2],
    "one number": lambda a: np.array(a[0, 0]),
    "empty": lambda a: a[:0],
}


@pytest.mark.parametrize("size", [7, 2 * _PART + 5])
def test_results_of_parts_are_those_of_whole_arrays(size):
    x, y, z = np.random.default_rng(0).standard_normal((3, size)).astype(np.float32)
    exact = [np.vdot(a.astype(float), b) for a, b in ((x, y), (y, y))]
    np.testing.assert_allclose(inner_products([(x, y), (y, y)]), exact, rtol=1e-5, atol=1e-2)
    combine(z, 0.5, x, -3.0, y)
    np.testing.assert_allclose(z, 0.5 * x - 3 * y, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sums_are_those_of_the_formula_in_any_layout(layout, dtype):
    rng = np.random.default_rng(0)
    wide = rng.standard_normal((2, 5, 7)).astype(dtype)
    # Two products of numbers below 4, rounded once or twice.
    close = 4 * np.finfo(dtype).eps * 4
    for left, right in ((layout, "rows"), ("rows", layout), (layout, layout)):
        if np.shape(LAYOUTS[left](wide[0])) != np.shape(LAYOUTS[right](wide[1])):
            continue
        x, y = LAYOUTS[left](wide[0]).copy("K"), LAYOUTS[right](wide[1])
        out, expected = np.empty_like(x), 0.5 * x - 3 * y
        combine(out, 0.5, x, -3.0, y)
        np.testing.assert_allclose(out, expected, atol=close)
        combine(x, 0.5, x, -3.0, y)
        np.testing.assert_array_equal(x, out)
        add_multiple(x, 3.0, y)
        np.testing.assert_allclose(x, expected + 3 * y, atol=close)
        assert dot({"a": x}, {"a": y, "b": y}) == pytest.approx(float((x * y).sum()), rel=1e-4)


_LOSSES = {
    "mlp": "categorical",
    "cnn": "categorical",
    "resnet_block": "categorical",
    "layer_norm": "normal",
    "tied": "normal",
    "embedding": "categorical",
}


@pytest.mark.parametrize("name", _LOSSES)
def test_optimizers_may_write_to_gradients_and_natural_gradients(name):
    """The memory of both becomes that of parameters: each array must be new."""
    model = models.MODELS[name]()
    inputs = models.random_inputs(model, 4)
    loss = _LOSSES[name]
    engine = ke.Engine.from_onnx(model, loss=loss, backend="numpy")
    result = engine.step(inputs, random_targets(model, inputs, loss))
    again = engine.precondition(result.gradients)
    groups = [result.gradients, result.natural_gradients, again, engine.parameters]
    arrays = [array for group in groups for array in group.values()]
    arrays += [array for factor in engine.estimator.factors for array in factor.arrays().values()]
    assert all(array.flags.writeable for group in groups[:3] for array in group.values())
    assert not any(np.shares_memory(one, other) for one, other in combinations(arrays, 2))


def test_parameters_without_a_copy_are_the_arrays_of_the_caller():
    engine = net.engine()
    x, y = net.batch()
    values = {name: 2 * value for name, value in engine.parameters.items()}
    engine.set_parameters(values, copy=False)
    assert all(np.shares_memory(engine.parameters[name], a) for name, a in values.items())
    assert engine.loss({"x": x}, y) == pytest.approx(net.loss(values, x, y), rel=1e-12)
    engine.set_parameters(values)
    assert not any(np.shares_memory(engine.parameters[name], a) for name, a in values.items())
    # Other types and layouts are converted in both cases.
    others = {name: np.asfortranarray(a.astype("float32")) for name, a in values.items()}
    engine.set_parameters(others, copy=False)
    for name, value in engine.parameters.items():
        assert (value.dtype, value.flags.c_contiguous) == (np.float64, True)
        np.testing.assert_array_equal(value, others[name])
    with pytest.raises(ke.NonFiniteError, match="the new value of parameter 'w1'"):
        engine.set_parameters({"w1": np.full_like(values["w1"], np.nan)}, copy=False)
    np.testing.assert_array_equal(engine.parameters["w1"], others["w1"])


@pytest.mark.parametrize("make", [lambda e: ke.SGD(e, 0.1), ke.Adam, ke.KfacOptimizer])
def test_steps_leave_the_parameters_that_a_caller_has_read(make):
    optimizer = make(net.engine(estimation_mode="exact"))
    x, y = net.batch()
    histories = []
    for _ in range(4):
        read = optimizer.engine.parameters
        histories.append((read, {name: value.copy() for name, value in read.items()}))
        optimizer.step({"x": x}, y)
    for read, copies in histories:
        assert_arrays_equal(read, copies)


def test_a_stage_has_the_time_outside_the_stages_inside(monkeypatch):
    times = iter([0.0, 1.0, 3.0, 10.0, 14.0, 20.0])
    monkeypatch.setattr(profiling, "perf_counter", lambda: next(times))
    clock = profiling.StageClock()
    with clock("update"):
        for _ in range(2):
            with clock("precondition"):
                pass
    # Inside: 1 to 3 and 10 to 14; the whole: 0 to 20.
    assert clock.seconds == {"precondition": 6.0, "update": 14.0}


def test_the_stages_of_a_step_add_up_to_its_time():
    optimizer = ke.KfacOptimizer(net.engine(), adapt_damping=ke.DampingAdaptation(interval=1))
    x, y = net.batch()
    report = optimizer.step({"x": x}, y)
    stages = {"gradients", "statistics", "inverses", "precondition", "damping", "update"}
    assert set(report.seconds) == stages
    assert all(seconds > 0 for seconds in report.seconds.values())
