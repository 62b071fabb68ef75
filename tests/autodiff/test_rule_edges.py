"""Derivative rules where finite differences do not exist or do not reach: closed forms."""

from math import prod

import numpy as np
import pytest

from kfac_engine.autodiff.second_order import joint_graph
from kfac_engine.errors import UnsupportedOpError
from kfac_engine.runtime.model import load_model
from kfac_engine.runtime.sample_run import measured_facts
from tests import models
from tests.autodiff.harness import DTYPES, bench, case, distinct, finite_differences, flags, k, p, x

RUNTIMES = ("reference", "ort")
# Each result is one or two multiplications: a rounding of float32.
ROUNDING = 1e-6


def gradient(case, runtime, values, cotangent, operand=0):
    """The gradient of one operand, at given values of all fed ones."""
    made = bench(case, runtime, batch=2)
    feeds = dict(made.sample)
    for name, value in values.items():
        feeds[name] = np.asarray(value, feeds[name].dtype)
    g = np.asarray(cotangent, made.facts["result_0"].dtype)
    return made.gradients(feeds, {"result_0": g})[f"operand_{operand}"]


# -- kinks and ties --------------------------------------------------------------------------------

_POOL = {"kernel_shape": (1, 2), "strides": (1, 2)}
_TIES = [
    (case("MaxPool", "tied", x(1, 1, 1, 4), **_POOL), [[[[3, 3, 1, 2]]]], [[[[5, 7]]]],
     [[[[2.5, 2.5, 0, 7]]]]),
    (case("MaxPool", "tied_overlap", x(1, 1, 1, 3), kernel_shape=(1, 2)), [[[[3, 3, 3]]]],
     [[[[5, 7]]]], [[[[5, 7, 0]]]]),
    (case("GlobalMaxPool", "tied", x(1, 1, 4)), [[[3, 1, 3, 3]]], [[[6]]], [[[2, 0, 2, 2]]]),
    (case("ReduceMax", "tied", x(4), keepdims=0), [3, 1, 3, 3], 6, [2, 0, 2, 2]),
    (case("ReduceMin", "tied", x(4), keepdims=0), [1, 1, 3, 1], 6, [2, 2, 0, 2]),
    (case("ScatterElements", "tied", x(3), k([1, 1, 2]), k([5, 5, 1], "float32"), reduction="max"),
     [4, 5, 2], [7, 6, 8], [7, 2, 8]),
    (case("LpNormalization", "at_zero", x(2, 2)), [[0, 0], [3, 4]], [[1, 2], [25, 0]],
     [[0, 0], [3.2, -2.4]]),
    (case("Max", "tied", x(3), k([1, 2, 3], "float32")), [1, 5, 2], [4, 6, 8], [2, 6, 0]),
    (case("ReduceL2", "at_zero", x(3), keepdims=0), [0, 0, 0], 2, [0, 0, 0]),
    (case("Relu", "at_zero", x(2)), [0, -0.0], [3, 3], [0, 0]),
    (case("Abs", "at_zero", x(1)), [0], [3], [0]),
    (case("Clip", "at_the_bounds", x(2), k(-1, "float32"), k(1, "float32")), [-1, 1], [3, 4],
     [3, 4]),
    (case("Pow", "zero_to_the_zeroth", x(1), k(0, "float32")), [0], [3], [0]),
    (case("Pow", "zero_to_the_first", x(1), k(1, "float32")), [0], [3], [3]),
    (case("Pow", "zero_squared", x(1), k(2, "float32")), [0], [3], [0]),
]  # fmt: skip


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize(
    ("tested", "value", "cotangent", "expected"), _TIES, ids=[str(row[0]) for row in _TIES]
)
def test_gradient_at_kink_is_finite_subgradient(runtime, tested, value, cotangent, expected):
    found = gradient(tested, runtime, {"operand_0": value}, cotangent)
    np.testing.assert_allclose(found, expected, atol=ROUNDING)


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("base", [-2.0, 0.0])
def test_exponent_gradient_is_zero_for_nonpositive_base(runtime, base):
    tested = case("Pow", "exponent", x(1), p(1))
    values = {"operand_0": [base], "operand_1": [2.0]}
    assert gradient(tested, runtime, values, [3.0], operand=1) == 0


@pytest.mark.parametrize("op", ["Exp", "Sigmoid", "Softplus", "Tanh", "LogSoftmax", "Elu"])
def test_large_arguments_give_finite_gradients(op):
    tested = case(op, "large", x(1, 3))
    found = gradient(tested, "ort", {"operand_0": [[-200, 0, 50]]}, [[1, 1, 1]])
    assert np.isfinite(found).all()


def test_unsorted_top_k_gradient_follows_indices():
    # The order of the results is the runtime's own.
    tested = case("TopK", "unsorted", x(2, 7, draw=distinct), k([3]), outputs=2, sorted=0)
    made = bench(tested, "ort", batch=2)
    values = made.sample["operand_0"]
    found = made.forward(made.sample, ("result_0",))(made.sample)["result_0"]
    g = np.float32([[1, 2, 3], [4, 5, 6]])
    expected = ((values[:, :, None] == found[:, None, :]) * g[:, None, :]).sum(axis=2)
    gradients = made.gradients(made.sample, {"result_0": g})
    np.testing.assert_array_equal(gradients["operand_0"], expected)


@pytest.mark.parametrize("sides", [(20, 20), (3, 17, 17)], ids=str)
def test_gradient_of_large_determinant_is_determinant_times_inverse(sides):
    rng = np.random.default_rng(0)
    matrices = np.eye(sides[-1]) + rng.normal(scale=0.1, size=sides)
    g = rng.normal(size=sides[:-2])
    inverse = np.linalg.inv(matrices).swapaxes(-1, -2)
    expected = (g * np.linalg.det(matrices))[..., None, None] * inverse
    tested = case("Det", "large", x(*sides))
    found = gradient(tested, "ort", {"operand_0": matrices}, g)
    # Float32, through an inverse of matrices with condition numbers below ten.
    np.testing.assert_allclose(found, expected, atol=1e-4)


# -- float64 ---------------------------------------------------------------------------------------


def test_layer_normalization_statistics_may_have_lower_precision(monkeypatch):
    # ONNX Runtime gives Mean and InvStdDev in float32, whatever the type of the operand.
    monkeypatch.setitem(DTYPES, "ort", "float64")
    tested = case("LayerNormalization", "wide", x(1, 4), p(4), outputs=3, seen=(1, 2))
    made = bench(tested, "ort", batch=2)
    value = np.array([[1.0, 2.0, 4.0, 9.0]])
    cotangents = {"result_1": np.float32([[3]]), "result_2": np.float32([[5]])}
    found = made.gradients({**made.sample, "operand_0": value}, cotangents)["operand_0"]
    centred, variance = value - value.mean(), value.var() + 1e-5
    np.testing.assert_allclose(found, 3 / 4 - 5 * centred / (4 * variance**1.5), rtol=1e-12)


# -- dropout in training ---------------------------------------------------------------------------


def test_dropout_gradient_is_zero_for_dropped_elements():
    # Given a seed, the reference draws the same mask in every run.
    tested = case("Dropout", "training", x(4, 5), k(0.25, "float32"), k(True, "bool"),
                  outputs=2, seed=3)  # fmt: skip
    made = bench(tested, "reference", batch=2)
    cotangents = {"result_0": np.random.default_rng(0).normal(size=(4, 5))}
    expected = finite_differences(made, made.sample, cotangents, 2.0**-10)["operand_0"]
    found = made.gradients(made.sample, cotangents)["operand_0"]
    assert 0 < np.count_nonzero(found) < found.size
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("training", [True, False])
def test_dropout_gradient_follows_fed_training_mode(training):
    tested = case("Dropout", "fed", x(2, 3), k(0.5, "float32"), flags(), outputs=2, seed=3)
    made = bench(tested, "reference", batch=2)
    feeds = {**made.sample, "operand_2": np.array(training)}
    ones = np.ones((2, 3))
    found = made.gradients(feeds, {"result_0": ones})["operand_0"]
    assert set(np.unique(found)) == ({0.0, 2.0} if training else {1.0})


# -- forms without a rule --------------------------------------------------------------------------

_REFUSED = [
    case("Dropout", "hidden_mask", x(2, 3), k(0.5, "float32"), k(True, "bool")),
    case("ReduceL2", "over_no_axes", x(2, 3), noop_with_empty_axes=1),
    case("BatchNormalization", "running_mean", x(3, 2), p(2), p(2), k([0, 0], "float32"),
         k([1, 1], "float32"), outputs=3, seen=(1,), training_mode=1),
    case("AveragePool", "same_and_strides_over_kernel", x(2, 1, 6), kernel_shape=(1,),
         strides=(3,), auto_pad="SAME_UPPER"),
    case("AveragePool", "same_and_dilations", x(2, 1, 6), kernel_shape=(2,), dilations=(2,),
         auto_pad="SAME_LOWER", opset=19),
]  # fmt: skip


@pytest.mark.parametrize("refused", _REFUSED, ids=str)
def test_unsupported_form_error_names_operator_and_node(refused):
    with pytest.raises(UnsupportedOpError, match=rf"{refused.op}.*'tested'|'tested'.*{refused.op}"):
        _ = bench(refused, "reference", batch=2).backward


STACKS = {
    "one_row": ("batch,3,1,16 -> batch,3,1,8", "w(3,16,8)", "MatMul(input, w)"),
    "under_positions": ("batch,2,3,1,16 -> batch,2,3,1,8", "w(3,16,8)", "MatMul(input, w)"),
    "axis_of_one": ("batch,3,1,16 -> batch,3,1,8", "w(1,3,16,8)", "MatMul(input, w)"),
    "on_left": ("batch,3,16,1 -> batch,3,8,1", "w(3,8,16)", "MatMul(w, input)"),
    "einsum": ("batch,3,16 -> batch,3,8", "w(3,16,8)", 'Einsum<equation="nsi,sio->nso">(input, w)'),
}  # fmt: skip


@pytest.mark.parametrize("name", STACKS)
def test_gradient_of_a_stack_forms_no_weight_for_each_example(name):
    shapes, weight, call = STACKS[name]
    model = load_model(models.written(shapes, weight, f"output = {call}"))
    backward = model.backward(["output"], ["w"])
    feeds = {
        name: np.ones((20, *model.facts[like].shape[1:]), np.float32)
        for name, like in (("input", "input"), (backward.cotangents["output"], "output"))
    }
    facts = measured_facts(joint_graph(model.graph, backward), feeds)
    largest = max(prod(facts[name].shape) for node in backward.nodes for name in node.outputs)
    # Data of the 20 examples are smaller than six weights.
    assert largest < 6 * model.parameters["w"].size
