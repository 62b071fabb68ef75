"""Parts of batches along the axis of the examples, where it is not the first one."""

import numpy as np
import pytest

import kfac_engine as ke
from tests.models import parsed
from tests.training import softmax_net as net

T, N, D, K = 5, 12, 3, 4  # time steps, examples, features, classes


def time_first(batch="batch"):
    """Mean over time of a dense layer of ``x`` ``(T, batch, D)``, plus an offset input ``(K,)``."""
    weight = np.random.default_rng(0).standard_normal((D, K)).astype(np.float32)
    return parsed(
        f"""net (float[{T},{batch},{D}] x, float[{K}] offset) => (float[{batch},{K}] z)
        {{ s = MatMul (x, w)  m = ReduceMean <keepdims = 0> (s, axes)  z = Add (m, offset) }}""",
        {"w": weight, "axes": [0]},
    )


@pytest.fixture
def data():
    rng = np.random.default_rng(1)
    x = rng.standard_normal((T, N, D)).astype(np.float32)
    offset = rng.standard_normal(K).astype(np.float32)
    return {"x": x, "offset": offset}, rng.integers(0, K, N)


def engine(**options):
    model = time_first(**options)
    return ke.Engine.from_onnx(model, loss="categorical", backend="numpy", batch_axes={"x": 1})


def test_a_part_is_taken_along_the_axis_of_the_examples(data):
    inputs, targets = data
    axes = engine().example_axes
    assert axes.inputs == {"x": 1}
    assert axes.check(inputs, targets) == N
    chosen = np.array([7, 2, 5])
    part, its_targets = axes.part(inputs, targets, chosen)
    assert np.array_equal(part["x"], inputs["x"][:, chosen])
    assert np.array_equal(part["offset"], inputs["offset"])
    assert np.array_equal(its_targets, targets[chosen])


def test_fit_cuts_arrays_along_the_axis_of_the_examples(data):
    inputs, targets = data
    history = ke.fit(engine(), data, optimizer="sgd", steps=1, batch_size=4)
    order = np.random.default_rng([0, 0]).permutation(N)[:4]
    batch = {"x": inputs["x"][:, order], "offset": inputs["offset"]}
    assert history.records[0]["loss"] == engine().loss(batch, targets[order])


def test_a_model_of_one_batch_size_takes_whole_batches_only(data):
    fixed = engine(batch=N)
    assert fixed.example_axes.obstacle
    with pytest.raises(ke.InputError, match="arrays cannot be cut into batches"):
        ke.fit(fixed, data, epochs=1)
    history = ke.fit(fixed, [data], epochs=3, validation=data)
    assert len(history.records) == 3


def test_inputs_with_different_numbers_of_examples_are_refused(data):
    inputs, targets = data
    with pytest.raises(ke.ShapeError, match="the inputs have 12 examples"):
        engine().example_axes.check(inputs, targets[:-1])
    with pytest.raises(ke.ShapeError, match="same number of examples; found: none"):
        engine().example_axes.count({"offset": inputs["offset"]})


def test_a_lone_array_is_the_only_input():
    x, _ = net.batch()
    assert net.engine().example_axes.named(x) == {"x": x}
