"""Recorded arrays compute what NumPy computes."""

import numpy as np
import onnxruntime as ort
import pytest
from scipy import special

from kfac_engine.backend.namespace import array_module
from kfac_engine.errors import UnsupportedError
from kfac_engine.graph.structure import Input
from kfac_engine.graph.write import build_model, serialize
from kfac_engine.recording.operations import Draws, new_tape
from kfac_engine.recording.recorded import OPSET, Recorded, Size, size_of

RNG = np.random.default_rng(0)
X, Y = (RNG.standard_normal((3, 4)).astype(np.float32) for _ in range(2))
IDS = RNG.integers(0, 4, 3)
INDEX = np.array([[1, 0], [5, 7]])


def computed(function, *arrays):
    """The results of a recorded function in ONNX Runtime; the first axis may have any length."""
    tape, feeds, values, inputs = new_tape("t/"), {}, [], []
    for number, array in enumerate(map(np.asarray, arrays)):
        name = f"x{number}"
        feeds[name] = array
        values.append(Recorded(tape, name, array.shape, array.dtype))
        inputs.append(Input(name, array.dtype, array.shape))
    return run(tape, function(*values), inputs, feeds)


def run(tape, result, inputs, feeds):
    level = tape.graph
    level.op("Identity", result.name, result="result")
    outputs = [Input("result", result.dtype, (None,) * result.ndim)]
    model = build_model(level.nodes, inputs, outputs, level.constants, OPSET)
    found = ort.InferenceSession(serialize(model)).run(None, feeds)[0]
    assert found.dtype == result.dtype
    known = tuple(size for size in result.shape if not isinstance(size, Size))
    assert len(found.shape) == result.ndim
    assert len(known) < result.ndim or found.shape == known
    return found


def by_places(x, y):
    x = x.copy()
    places = y.argmax(axis=1) + 4 * np.arange(3)
    x.put(places, x.take(places) * 2)
    x.put(np.array([1, 6]), 0)
    x.put(places, y[:, :1])
    return x


def in_place(x, y):
    x += y
    x[...] = 2 * x
    np.multiply(x, y, out=x)
    return x


def parts(x, y):
    x = x.copy()
    x[1:] *= y[1:]
    x[:, :2] = 0.5
    return x


def view(x, y):
    x = x.copy()
    x.reshape(-1)[...] = y.reshape(-1)
    np.ravel(x)[INDEX] = 3.0
    return x


FUNCTIONS = {
    "arithmetic": lambda x, y: (x + 2 * y - 1) / (1 + abs(y)) - x * y + 1 / (y * y + 1),
    "powers": lambda x, y: abs(x) ** 0.5 + y**2 + 2.0**x + abs(y) ** 1.5,
    "functions": lambda x, y: np.exp(x) + np.log(abs(y) + 1) + np.sqrt(abs(x)) + np.tanh(y),
    "comparisons": lambda x, y: (x > y) & (x >= 0) | ~(x < y) & (x != y) | (x <= -1),
    "extremes": lambda x, y: np.maximum(x, 0) + np.minimum(y, x),
    "bounds": lambda x, y: np.clip(x, -0.5, 0.5) + y.clip(-1, 1) + x.clip(0),
    "choice": lambda x, y: np.where(x > 0, x, 0) + np.where(y > 0, 1, y),
    "norms": lambda x, y: np.linalg.norm(x) + np.linalg.norm(y, axis=(-2, -1), keepdims=True),
    "products": lambda x, y: x @ y.T + np.matmul(y, x.swapaxes(0, 1)),
    "inner product": lambda x, y: np.vdot(x, y),
    "sums": lambda x, y: x.sum(axis=1, keepdims=True) + y.mean(axis=0) + x.max(axis=-1)[:, None],
    "counts": lambda x, y: (x > y).sum(axis=1, dtype=np.int64),
    "largest": lambda x, y: x.argmax(axis=1) + np.argmax(y, axis=1),
    "cumulative": lambda x, y: (x * y).cumsum(axis=1).take([-1], axis=1),
    "shapes": lambda x, y: (
        np.expand_dims(x, 1).reshape(3, 2, -1).transpose(2, 0, 1) * y[:2, :3, None]
    ),
    "new axes": lambda x, y: x[None, :, :, None] + y[:, None, None, :, None].squeeze(4)[0],
    "slices": lambda x, y: x[1:, -3:] + y[:-1, 1:4] * x[0, 1] + y[2][:3],
    "entries": lambda x, y: x.reshape(-1)[INDEX] + np.ravel(y)[INDEX.T],
    "joined": lambda x, y: np.concatenate([x, y[:, :1], np.stack([x[:, 0], y[:, 1]], 1)], axis=1),
    "rolled": lambda x, y: np.roll(x, -1, 1) + np.roll(y, -2, axis=0),
    "moved": lambda x, y: np.moveaxis(x, 0, -1) + np.transpose(y),
    "trace": lambda x, y: np.trace((x @ y.T)[None], axis1=1, axis2=2),
    "like": lambda x, y: np.full_like(x, 2) + np.zeros_like(y) + np.ones_like(x),
    "in place": lambda x, y: in_place(x.copy(), y),
    "parts in place": parts,
    "views": view,
    "places": by_places,
    "logarithms": lambda x, y: np.log1p(np.exp(-30 * abs(x))) + np.expm1(0.01 * y),
    "whole numbers": lambda x, y: (x > 0).astype(np.int64) * 7 // 2 % 3,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_equal_those_of_numpy(name):
    function = FUNCTIONS[name]
    expected = function(X.copy(), Y.copy())
    found = computed(function, X, Y)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)
    assert found.shape == np.shape(expected)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_logarithms_and_exponentials_near_zero_keep_their_digits(dtype):
    x = np.concatenate([k * np.logspace(-20, -0.1, 90) for k in (1, -1)]).astype(dtype)
    for function in (np.log1p, np.expm1):
        tape = new_tape("t/", dtype)
        value = Recorded(tape, "x", x.shape, x.dtype)
        found = run(tape, function(value), [Input("x", x.dtype, x.shape)], {"x": x})
        np.testing.assert_allclose(found, function(x), rtol=100 * np.finfo(dtype).eps)


def test_normal_quantiles_equal_those_of_scipy():
    u = np.concatenate([np.logspace(-30, -1, 60), np.linspace(0.01, 0.99, 99), [1 - 1e-6]])
    u = u.astype(np.float32)
    np.testing.assert_allclose(computed(special.ndtri, u), special.ndtri(u), rtol=2e-5, atol=1e-6)


def test_entries_along_an_axis_equal_those_of_numpy():
    def chosen(x, ids):
        return np.take_along_axis(x, np.expand_dims(ids, 1), axis=1)

    np.testing.assert_array_equal(computed(chosen, X, IDS), chosen(X, IDS))


@pytest.mark.parametrize("step", [1, 2, 20, 1000, 100000])
def test_bias_corrections_keep_their_digits(step):
    found = computed(lambda t: 1 - 0.999**t, np.array(step, np.float32))
    np.testing.assert_allclose(found, 1 - 0.999**step, rtol=1e-5)


def test_only_the_branch_that_is_taken_is_computed():
    def chosen(x):
        tape = x.tape
        (result,) = tape.branch(x.sum() > 0, lambda: [x * 2], lambda: [x - 1])
        return result

    for x in (abs(X), -abs(X)):
        expected = x * 2 if x.sum() > 0 else x - 1
        np.testing.assert_allclose(computed(chosen, x), expected)


def test_equal_operations_are_recorded_once():
    tape = new_tape("t/")
    x = Recorded(tape, "x", (3,), np.float32)
    first, second = np.exp(x * 2), np.exp(x * 2)
    assert first.name == second.name
    assert [node.op for node in tape.graph.nodes] == ["Mul", "Exp"]


def test_what_is_not_known_is_refused():
    tape = new_tape("t/")
    x = Recorded(tape, "x", (3,), np.float32)
    for read in (float, bool, np.asarray, lambda v: v.tolist()[0] > 0 and 1):
        with pytest.raises(UnsupportedError):
            read(x[0])
    with pytest.raises(UnsupportedError, match="cbrt"):
        np.cbrt(x)
    with pytest.raises(UnsupportedError, match="fft"):
        np.fft.fft(x)
    with pytest.raises(UnsupportedError):
        _ = x + np.zeros(4, np.float32)


@pytest.mark.parametrize("n", [1, 3, 7])
def test_sizes_follow_the_number_of_examples(n):
    tape = new_tape("t/")
    size = size_of(tape, "x", 0)
    x = Recorded(tape, "x", (size, 4), np.float32)
    assert (6 * size) // 3 == 2 * size
    assert (6 * size) % 3 == 0
    assert size / size == 1
    total = x.reshape(-1, 2).sum(axis=0) / (2 * size) + 1 / size
    array = RNG.standard_normal((n, 4)).astype(np.float32)
    found = run(tape, total, [Input("x", x.dtype, ("n", 4))], {"x": array})
    np.testing.assert_allclose(found, array.reshape(-1, 2).sum(axis=0) / (2 * n) + 1 / n, rtol=1e-5)


@pytest.mark.parametrize("shape", [(1, 4, 6), (3, 2, 6), (2, 5, 6)])
def test_several_sizes_of_a_value_are_open(shape):
    tape = new_tape("t/", np.float64)
    n, t = (size_of(tape, "x", axis) for axis in (0, 1))
    assert (6 * n * t) // (2 * n) == 3 * t
    assert (n + t) != 2 * n
    x = Recorded(tape, "x", (n, t, 6), np.float64)
    parts = np.concatenate([x, x * 2], axis=1).reshape(2, -1, *x.shape[1:]).swapaxes(0, 1)
    total = parts.reshape(n, 2, -1, 6).sum(axis=1) / (n * t)
    array = RNG.standard_normal(shape)
    feeds, entries = {"x": array}, [Input("x", x.dtype, ("n", "t", 6))]
    joined = np.concatenate([array, array * 2], axis=1).reshape(2, -1, *shape[1:]).swapaxes(0, 1)
    expected = joined.sum(axis=1) / (shape[0] * shape[1])
    np.testing.assert_allclose(run(tape, total, entries, feeds), expected, rtol=1e-12)


def test_a_size_that_does_not_divide_is_refused():
    size = size_of(new_tape("t/"), "x", 0)
    with pytest.raises(UnsupportedError):
        _ = size // 2
    with pytest.raises(UnsupportedError):
        _ = size + 1
    with pytest.raises(UnsupportedError):
        _ = size // size_of(size.number().tape, "y", 0)


def test_recorded_arrays_bring_their_functions():
    x = Recorded(new_tape("t/"), "x", (3,), np.float32)
    assert isinstance(array_module(x).asarray([1.0]), Recorded)


@pytest.mark.parametrize("kind", ["random", "standard_normal"])
def test_random_numbers_fill_their_range(kind):
    values = []
    for step in range(40):
        tape = new_tape("t/")
        size, counter = size_of(tape, "x", 0), Recorded(tape, "step", (), np.int64)
        numbers = getattr(Draws(tape, counter, None), kind)((size, 5))
        inputs = [Input("x", np.dtype(np.float32), ("n",)), Input("step", np.dtype(np.int64), ())]
        feeds = {"x": np.zeros(8, np.float32), "step": np.array(step)}
        values.append(run(tape, numbers, inputs, feeds))
    found = np.stack(values)
    assert found.shape == (40, 8, 5)
    if kind == "random":
        assert 0 < found.min() < found.max() < 1
        counts, _ = np.histogram(found, 8, (0, 1))
        assert abs(counts / found.size - 1 / 8).max() < 0.02
    else:
        assert abs(found.mean()) < 0.1
        assert abs(found.std() - 1) < 0.1
        np.testing.assert_allclose((found**4).mean(), 3, atol=0.8)


def test_masks_follow_no_pattern():
    values = []
    for step in range(30):
        tape = new_tape("t/")
        size, counter = size_of(tape, "x", 0), Recorded(tape, "step", (), np.int64)
        numbers = Draws(tape, counter, None).uniform((size, 40), "mask")
        inputs = [Input("x", np.dtype(np.float32), ("n",)), Input("step", np.dtype(np.int64), ())]
        feeds = {"x": np.zeros(25, np.float32), "step": np.array(step)}
        values.append(run(tape, numbers, inputs, feeds))
    numbers = np.stack(values)
    assert 0 < numbers.min() < numbers.max() < 1
    counts, _ = np.histogram(numbers, 10, (0, 1))
    expected = numbers.size / 10
    assert ((counts - expected) ** 2 / expected).sum() < 30  # χ² of nine degrees of freedom
    centred = numbers - 0.5
    for axis in range(3):
        for lag in (1, 2, 7):
            a = np.take(centred, range(lag, numbers.shape[axis]), axis)
            b = np.take(centred, range(numbers.shape[axis] - lag), axis)
            assert abs((a * b).mean() * 12) < 5 / np.sqrt(a.size)
