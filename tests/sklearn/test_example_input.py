"""Rows of features become the input of a model, or one clear error."""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.sklearn import OnnxClassifier
from kfac_engine.sklearn.example_input import ExampleInput, as_rows
from tests.sklearn.networks import checked, network

FLOAT, INTEGER = np.dtype("float32"), np.dtype("int64")
ROWS = np.arange(24.0).reshape(2, 12)


def converted(X, sizes, dtype=FLOAT):
    return ExampleInput("x", dtype, sizes).values(*as_rows(X))


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ((12,), (2, 12)),
        ((3, 4), (2, 3, 4)),
        ((1, "h", 4), (2, 1, 3, 4)),
        ((None,), (2, 12)),
        (None, (2, 12)),
    ],
)
def test_rows_are_reshaped_where_one_shape_fits(sizes, shape):
    values = converted(ROWS, sizes)
    assert values.shape == shape
    assert values.dtype == FLOAT
    np.testing.assert_array_equal(values.ravel(), ROWS.ravel())


@pytest.mark.parametrize(
    "sizes", [(11,), (3, 5), (5, "h"), (), (0, "h"), ("h", "w"), (1, None, None)]
)
def test_rows_that_fit_no_shape_or_several_are_refused(sizes):
    with pytest.raises(ke.ShapeError, match="input 'x' takes examples of shape"):
        converted(ROWS, sizes)


def test_arrays_of_more_axes_need_the_shape_of_the_input():
    images = ROWS.reshape(2, 3, 4)
    np.testing.assert_array_equal(converted(images, ("h", 4)), images)
    np.testing.assert_array_equal(converted(images, None), images)
    for sizes in ((4, 3), (12,), (1, 3, 4)):
        with pytest.raises(ke.ShapeError, match=r"X has examples of shape \(3, 4\)"):
            converted(images, sizes)


def test_integer_inputs_refuse_fractions_and_large_numbers():
    assert converted(ROWS, (12,), INTEGER).dtype == INTEGER
    with pytest.raises(ke.InputError, match=r"values such as 0\.5.*takes int64"):
        converted(ROWS + 0.5, (12,), INTEGER)
    with pytest.raises(ke.InputError, match="takes int8"):
        converted(ROWS + 300, (12,), np.dtype("int8"))


def test_a_network_of_tokens_learns_which_token_appears():
    rng = np.random.default_rng(0)
    table, w = (rng.standard_normal(sides).astype(np.float32) for sides in ((5, 3), (3, 2)))
    model = checked(
        """tokens (int64[n,t] x) => (float[n,2] z)
        { e = Gather (table, x)  m = ReduceMean <keepdims = 0> (e, axes)  z = MatMul (m, w) }""",
        {"table": table, "w": w, "axes": [1]},
    )
    tokens = rng.integers(0, 4, (200, 6))
    labels = (tokens == 3).any(axis=1)
    classifier = OnnxClassifier(model, epochs=40)
    assert classifier.fit(tokens, labels).score(tokens, labels) > 0.9
    assert classifier.classes_.dtype == bool


def test_models_of_several_inputs_are_refused():
    ends = "network (float[n,6] x, float[n,6] y) => (float[n,2] z)"
    model = checked(
        f"{ends} {{ s = Add (x, y)  z = MatMul (s, w) }}", {"w": np.ones((6, 2), np.float32)}
    )
    with pytest.raises(ke.UnsupportedError, match="one input; 'network' has: 'x', 'y'"):
        OnnxClassifier(model).fit(np.ones((4, 6)), [0, 1, 0, 1])


def test_models_with_examples_on_another_axis_are_refused():
    graph = "turned (float[6,n] x) => (float[n,2] z) { xt = Transpose (x)  z = MatMul (xt, w) }"
    model = checked(graph, {"w": np.eye(6, 2, dtype=np.float32)})
    with pytest.raises(ke.UnsupportedError, match="examples on axis 0"):
        OnnxClassifier(model).fit(np.ones((4, 4)), [0, 1, 0, 1])


def test_a_model_function_receives_the_numbers_of_features_and_outputs():
    calls = []

    def build(features, outputs):
        calls.append((features, outputs))
        return network(features, outputs, shape=(2, 3))

    X = np.random.default_rng(0).standard_normal((30, 2, 3))
    OnnxClassifier(build, epochs=1).fit(X, np.arange(30) % 4)
    assert calls == [(6, 4)]
