"""The count of different examples, and the weight decay that follows from it."""

from dataclasses import replace

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.backend.cpu.backend import NumpyBackend
from kfac_engine.data import demo_model, digits
from kfac_engine.distributed.protocol import Alone
from kfac_engine.training.seen_examples import SeenExamples, fingerprints
from tests import models

NONE = SeenExamples().saved()


class Axes:
    inputs = {"x": 0, "ids": 1}  # noqa: RUF012 (a stand-in for ExampleAxes)
    joint = ""

    @staticmethod
    def arrays(inputs, targets):
        return ((name, array, 0) for name, array in (targets or {}).items())


def of(targets=None, **inputs):
    return fingerprints([(inputs, targets)], Axes, NumpyBackend(), Alone(), [])


@pytest.mark.parametrize(
    ("different", "repeats"), [(3, 3), (1000, 2), (1024, 3), (5000, 2), (60_000, 2)]
)
def test_different_examples_are_counted(different, repeats):
    rng = np.random.default_rng(different)
    x = rng.standard_normal((different, 7)).astype(np.float32)
    seen, own = SeenExamples(), of(x=x)
    assert seen.scarcity == 0
    for epoch in range(repeats):
        for rows in np.array_split(rng.permutation(different), max(1, different // 500)):
            seen = seen.after(own[rows])
            assert epoch or seen.scarcity == 0  # nothing comes again in the first epoch
    assert seen.count == repeats * different
    assert seen.scarcity == pytest.approx((1 - 1 / repeats) / different)


def test_draws_with_replacement_are_counted():
    rng = np.random.default_rng(0)
    seen, own, drawn = SeenExamples(), of(x=np.arange(20_000)[:, None]), np.empty(0)
    for _ in range(300):
        rows = rng.integers(0, 20_000, 100)
        seen, drawn = seen.after(own[rows]), np.append(drawn, rows)
    different = len(np.unique(drawn))
    expected = (1 - different / 30_000) / different
    assert seen.scarcity == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, np.int32, np.uint8, bool])
def test_equal_examples_have_equal_fingerprints(dtype):
    x = np.arange(24).reshape(8, 3).astype(dtype)
    x[5] = x[1]
    own = of(x=x)
    assert own.dtype == np.float64
    assert (own > 0).all()
    assert (own < 1).all()
    assert own[5] == own[1]
    assert len(set(own)) == len(np.unique(x, axis=0))
    np.testing.assert_array_equal(of(x=x[::-1]), own[::-1])


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int64, bool])
@pytest.mark.parametrize("width", [1, 2, 301, 4096, 10_000])
def test_every_entry_counts(width, dtype):
    """Rows of a sparse table differ in one entry, at any place."""
    x = np.zeros((33, width), dtype)
    places = np.linspace(0, width - 1, 32).astype(int)
    x[np.arange(32), places] = 1
    assert len(set(of(x=x))) == len(np.unique(x, axis=0)) == len(np.unique(places)) + 1


def test_texts_have_fingerprints():
    texts = np.array([["a", "b"], ["b", "a"], ["a", "b"], ["a", "ba"]], object)
    of_texts = of(x=texts)
    assert of_texts[0] == of_texts[2]
    assert len(set(of_texts)) == 3


def test_all_inputs_and_their_axes_count():
    x, ids = np.zeros((4, 2)), np.array([[1, 2, 1, 2], [3, 3, 3, 4]])
    first = of(x=x, ids=ids)
    assert first[0] == first[2]
    assert first[1] != first[3]
    assert first[0] != first[1]
    x[2, 1] = 1e-300
    assert of(x=x, ids=ids)[2] != first[2]
    assert len(of(mask=x)) == 0  # no input has examples


def test_examples_with_other_targets_or_weights_are_different():
    x = np.array([[1.0], [2.0], [1.0], [1.0], [1.0]])
    alone = of(x=x)
    for name in ("targets", "weights"):
        given = {"targets": np.ones(5), "weights": np.ones(5)}
        equal = of(given, x=x)
        given[name] = np.array([1.0, 1.0, 1.0, 3.0, 4.0])
        own = of(given, x=x)
        assert own[0] == own[2] == equal[0] == equal[3]
        assert len(set(own)) == 4
        # The inputs alone choose the sample of the different examples.
        assert np.abs(own - alone).max() < 2.0**-32
    others = np.random.default_rng(0).random((999, 1))
    np.testing.assert_array_equal(
        np.argsort(of({"targets": others[::-1]}, x=others)), np.argsort(of(x=others))
    )


def test_rows_with_several_noisy_targets_are_fitted_at_their_means():
    """The noise is not taken for errors that more decay would lessen."""
    rng, model = np.random.default_rng(0), models.mlp((2, 32, 1))
    places = rng.standard_normal((14, 2)).astype(np.float32)
    values = np.sin(2 * places[:, :1]) + places[:, 1:] ** 2
    rows = rng.integers(14, size=640)
    noisy = values[rows] + 0.5 * rng.standard_normal((640, 1)).astype(np.float32)
    history = ke.fit(
        model, ({"input": places[rows]}, noisy), loss="normal", epochs=20, batch_size=64, seed=0
    )
    error = np.mean((history.engine.predict({"input": places}) - values) ** 2)
    assert error < 0.1 * values.var()


def test_state_contains_the_examples(tmp_path):
    engine = ke.Engine.from_onnx(demo_model("mlp"), loss="categorical", seed=0)
    optimizer = ke.KfacOptimizer(engine)
    images, labels = digits()
    for _ in range(4):
        optimizer.step({"image": images[:64]}, labels[:64])
    optimizer.save(tmp_path / "state")
    other = ke.KfacOptimizer(ke.Engine.from_onnx(demo_model("mlp"), loss="categorical", seed=0))
    other.load(tmp_path / "state")
    one, two = (o.state().arrays["examples"] for o in (optimizer, other))
    assert one["count"] == two["count"] == 4 * 64
    np.testing.assert_array_equal(one["fingerprints"], two["fingerprints"])
    assert "examples" not in ke.KfacOptimizer(engine, 0.1).state().arrays


@pytest.mark.parametrize(("decay", "of_new"), [(0.5, 1.0), (None, 0.25)])
@pytest.mark.parametrize("second", [slice(0, 64), slice(32, 96), slice(64, 128)])
def test_examples_that_come_again_raise_the_decay(second, decay, of_new):
    """The change of weights with and without a memory of the first batch."""
    images, labels = digits()
    values = []
    for forgets in (False, True):
        engine = ke.Engine.from_onnx(demo_model("mlp"), loss="categorical", seed=0)
        optimizer = ke.KfacOptimizer(engine, weight_decay=decay)
        optimizer.step({"image": images[:64]}, labels[:64])
        first = dict(engine.parameters)
        state = optimizer.state()
        if forgets:
            optimizer.restore(replace(state, arrays={**state.arrays, "examples": NONE}))
        rate = optimizer.step({"image": images[second]}, labels[second]).learning_rate
        values.append(dict(engine.parameters))
    again = max(0, 64 - second.start)
    more = min(6000 * (again / 128) / (128 - again), 19) + (1 - of_new) * min(again / 64, 1)
    assert rate == 0.03  # far from the targets: no update is shortened
    for name, value in first.items():
        own = rate if value.ndim > 1 else 0.004
        shrunk = own * (decay or 0.05) * more * value
        np.testing.assert_allclose(values[1][name] - values[0][name], shrunk, rtol=1e-3, atol=1e-6)


def test_the_decay_of_an_epoch_has_a_bound():
    """The change of weights after few and after many different examples."""
    images, labels = digits()
    values, rows = [], slice(64, 128)
    for count in (64, 100_000):
        engine = ke.Engine.from_onnx(demo_model("mlp"), loss="categorical", seed=0)
        optimizer = ke.KfacOptimizer(engine)
        optimizer.step({"image": images[:64]}, labels[:64])
        first, state = dict(engine.parameters), optimizer.state()
        seen = {**state.arrays["examples"], "count": np.array(float(count))}
        optimizer.restore(replace(state, arrays={**state.arrays, "examples": seen}))
        optimizer.step({"image": images[rows]}, labels[rows])
        values.append(dict(engine.parameters))
    less = 0.25 * (1 - 200 * 64 / (100_000 + 64))
    for name, value in first.items():
        own = 0.03 if value.ndim > 1 else 0.004
        expected = own * 0.05 * less * value
        np.testing.assert_allclose(
            values[1][name] - values[0][name], expected, rtol=1e-2, atol=1e-7
        )
