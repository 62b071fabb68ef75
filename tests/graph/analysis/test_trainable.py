"""Parameters are told from settings by the operand they are."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from kfac_engine.errors import ModelError, NonFiniteError, UnknownNameError
from kfac_engine.graph.analysis.trainable import excluded_reason, trainable_parameters
from kfac_engine.graph.load import load_graph
from kfac_engine.graph.structure import Graph
from tests import models

LOWEST = np.finfo(np.float32).min


def graph_of(body, inputs="float[N,3] x", **constants):
    """Operator set 18 with input ``x``, output ``y`` and these constants: float32 or int64."""
    model = parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 18]> m ({inputs}) => (float[] y) {{ {body} }}'
    )
    for name, value in constants.items():
        array = np.asarray(value)
        array = array.astype(np.float32) if array.dtype == np.float64 else array
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return load_graph(model)


# -- what the models of the tests train -----------------------------------------------------------

SETTINGS = {
    "resnet_block": {f"bn{i}.running_{kind}" for i in range(2) for kind in ("mean", "var")},
    "layer_norm": {"sqrt_two", "one", "half"},
    "embedding": {"axes"},
    "odd_ops": {"scale", "zero"},
}


@pytest.mark.parametrize("name", models.MODELS)
def test_parameters_are_exactly_weights(name):
    model = models.MODELS[name]()
    stored = [entry.name for entry in model.graph.initializer]
    expected = [entry for entry in stored if entry not in SETTINGS.get(name, set())]
    assert list(trainable_parameters(load_graph(model))) == expected


# -- operand by operand ---------------------------------------------------------------------------

# A weight of eight bits, cast.
WHOLE = "q = Constant <value = int8[3,2] {4, -7, 9, 100, -3, 5}> ()  k = Cast <to=1> (q)"

# Body, its constants, and what the reason for leaving "c" out says.
EXCLUDED = {
    "clip_bound": ("y = Clip (x, c)", {"c": 0.0}, "bound"),
    "exponent": ("y = Pow (x, c)", {"c": [2.0, 2.0, 3.0]}, "exponent"),
    "dropout_ratio": ("y = Dropout (x, c)", {"c": 0.3}, "ratio"),
    "fill_value": ("y = Pad (x, p, c)", {"c": 1.0, "p": [0, 0, 1, 1]}, "fill value"),
    "resize_scales": ("y = Resize (x, , c)", {"c": [1.0, 2.0]}, "scale"),
    "running_mean": ("y = BatchNormalization (x, s, s, c, s)", {"c": [0.0] * 3, "s": [1.0] * 3},
                     "running mean"),
    "running_variance": ("y = BatchNormalization (x, s, s, s, c)", {"c": [1.0] * 3, "s": [1.0] * 3},
                         "running variance"),
    "counts": ("y = Div (x, c)", {"c": [2.0, 3.0, 2.0]}, "count"),
    "mask_of_ones": ("y = Mul (x, c)", {"c": [[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]]}, "mask"),
    "frequencies": ("m = Mul (x, c)  y = Sin (m)", {"c": [1.0, 0.1, 0.01, 0.001]}, "geometric"),
    "group_scale": ("r = Reshape (x, g)  i = InstanceNormalization (r, c, z)  y = Reshape (i, g)",
                    {"c": [1.0, 1.0], "z": [0.0, 0.0], "g": [0, 2, -1]}, "group normalization"),
    "threshold": ("m = Greater (x, c)  y = Where (m, x, x)", {"c": [0.1, 0.2, 0.3]}, "threshold"),
    "shape_only": ("s = Shape (c)  y = Expand (x, s)", {"c": [[1.0, 2.0, 3.0]]}, "shape only"),
    "epsilon": ("y = Add (x, c)", {"c": 1e-5}, "single number"),
    "epsilon_of_one_axis": ("y = Add (x, c)", {"c": [1e-5]}, "single number"),
    "temperature": ("y = Div (x, c)", {"c": [8.0]}, "single number"),
    "number_before_layer_result": ("p = MatMul (x, w)  y = Add (p, c)",
                                   {"c": 1.0, "w": np.ones((3, 1))}, "single number"),
    "epsilon_of_a_distance": (
        "h = MatMul (x, w)  g = Transpose (h)  p = MatMul (h, g)  q = MatMul (x, w)  r = Mul (q, q)"
        "  s = Sub (r, p)  y = Add (s, c)",
        {"c": [1e-6], "w": np.ones((3, 1))}, "single number"),
    "epsilon_behind_a_function_of_layers": (
        "p = MatMul (x, w)  q = Mul (p, p)  s = Add (q, q)  y = Add (s, c)",
        {"c": [1e-5], "w": np.ones((3, 1))}, "single number"),
    "zero_of_a_product": ("y = Gemm <beta = 0.0> (x, w, c)", {"c": 0.0, "w": np.ones((3, 2))},
                          "a layer without bias"),
    "zero_of_two_products": ("h = Gemm (x, w, c)  y = Gemm (h, w, c)",
                             {"c": 0.0, "w": np.ones((3, 3))}, "a layer without bias"),
    "number_added_by_sum": ("y = Sum (x, x, c)", {"c": [1.0]}, "single number"),
    "lowest_mask": ("y = Add (x, c)", {"c": [0.0, LOWEST, 0.0]}, "mask"),
    "infinite_mask": ("y = Add (x, c)", {"c": [0.0, -np.inf, 0.0]}, "mask"),
    "large_mask": ("y = Add (x, c)", {"c": [0.0, -1e9, 0.0]}, "mask"),
    "where_mask": ("m = IsNaN (x)  y = Where (m, c, x)", {"c": [-np.inf] * 3}, "mask"),
    "mask_in_another_shape": ("m = Unsqueeze (c, p)  y = Add (x, m)",
                              {"c": [0.0, LOWEST, 0.0], "p": [0]}, "mask"),
    "number_made_wide": ("m = Expand (c, p)  y = Clip (x, m)", {"c": 0.0, "p": [1]}, "bound"),
    "number_and_step_of_a_range": (
        "r = Sqrt (c)  h = Mul (x, r)  s = Range (z, n, c)  y = MatMul (h, s)",
        {"c": 1.0, "z": 0.0, "n": 3.0}, "the step of a range"),
    "number_and_fill_value": ("h = Pad (x, p, c)  r = Exp (c)  y = Mul (h, r)",
                              {"c": 1.0, "p": [0, 0, 1, 1]}, "fill value"),
    "number_of_one_axis_and_size": (
        "i = Cast <to=7> (c)  h = Expand (x, i)  r = Exp (c)  y = Mul (h, r)",
        {"c": [1.0]}, "a whole number"),
    "read_as_a_size": ("i = Cast <to=7> (c)  y = Expand (x, i)", {"c": [2.0, 3.0]},
                       "a whole number"),
    "read_as_truth_values": ("i = Cast <to=9> (c)  y = Where (i, x, x)", {"c": [0.0, 1.0, 1.0]},
                             "a truth value"),
    "two_settings": ("h = Clip (x, c)  y = Pow (h, c)", {"c": 2.0}, "bound"),
    "scale": (f"{WHOLE} w = Mul (k, c)  y = MatMul (x, w)", {"c": [0.1, 0.2]}, "quantized"),
    "scale_of_shifted": (f"{WHOLE} s = Sub (k, z)  w = Mul (s, c)  y = MatMul (x, w)",
                         {"c": [0.1, 0.2], "z": [3.0, 1.0]}, "quantized"),
    "zero_point": (f"{WHOLE} s = Sub (k, c)  w = Mul (s, z)  y = MatMul (x, w)",
                   {"c": [3.0, 1.0], "z": [0.1, 0.2]}, "quantized"),
    "scale_of_rows": (f"{WHOLE} i = Cast <to=7> (x)  r = Gather (k, i)  g = Gather (c, i)"
                      "  y = Mul (r, g)", {"c": [[0.1], [0.2], [0.3]]}, "quantized"),
    "integer": ("y = Gather (x, c)", {"c": [0, 0]}, "int64"),
    "unread": ("y = Neg (x)", {"c": [1.0, 2.0]}, "read by nothing"),
    "empty": ("y = Resize (x, c, s)", {"c": np.zeros(0), "s": [1.0, 2.0]}, "empty"),
}  # fmt: skip

KEPT = {
    "scale_of_a_float_weight": ("s = Mul (w, c)  y = MatMul (x, s)",
                                {"c": [0.1, 0.2], "w": np.ones((3, 2))}),
    "scale_of_a_mask_of_whole_numbers": (
        "q = Constant <value = int8[2] {0, 1}> ()  k = Cast <to=1> (q)  w = Mul (k, c)"
        "  y = MatMul (x, w)", {"c": np.ones((3, 2))}),
    "rows_beside_whole_numbers": (f"{WHOLE} i = Cast <to=7> (x)  g = Gather (c, i)  y = Add (g, k)",
                                  {"c": np.ones((3, 2))}),
    "scale_of_data_that_was_cast": ("i = Cast <to=3> (x)  k = Cast <to=1> (i)  y = Mul (k, c)",
                                    {"c": [0.1, 0.2, 0.3]}),
    "matrix": ("y = MatMul (x, c)", {"c": np.ones((3, 2))}),
    "matrix_of_one": ("y = Gemm (x, c)", {"c": np.ones((3, 1))}),
    "bias_of_one": ("y = Gemm (x, w, c)", {"c": [0.5], "w": np.ones((3, 1))}),
    "bias_of_zero": ("y = Gemm (x, w, c)", {"c": [0.0], "w": np.ones((3, 1))}),
    "number_of_a_product": ("y = Gemm (x, w, c)", {"c": 0.5, "w": np.ones((3, 2))}),
    "zero_of_a_product_and_factor": ("h = Gemm (x, w, c)  f = Exp (c)  y = Mul (h, f)",
                                     {"c": 0.0, "w": np.ones((3, 2))}),
    "added_bias_of_one": ("p = MatMul (x, w)  y = Add (p, c)", {"c": [0.5], "w": np.ones((3, 1))}),
    "bias_of_one_in_front": ("p = MatMul (x, w)  y = Add (c, p)",
                             {"c": [0.5], "w": np.ones((3, 1))}),
    "bias_of_a_sum_of_layers": (
        "p = MatMul (x, w)  q = Gemm (x, w)  s = Sub (p, q)  y = Add (s, c)",
        {"c": [0.5], "w": np.ones((3, 1))}),
    "bias_of_a_residual_sum": (
        "p = MatMul (x, w)  q = Squeeze (p, a)  s = Sum (b, q, x)  t = Mean (s, s)  y = Add (c, t)",
        {"c": [[0.5]], "w": np.ones((3, 1)), "a": [1], "b": [0.1, 0.2]}),
    "vector_in_arithmetic": ("y = Mul (x, c)", {"c": [1.0, 2.0, 3.0]}),
    "offsets_with_negative_entries": ("y = Add (x, c)", {"c": [0.0, -900.0, 0.0]}),
    "slope": ("y = PRelu (x, c)", {"c": [0.25]}),
    "scale_of_norm": ("y = LayerNormalization (x, c)", {"c": [1.0, 1.0, 1.0]}),
    "weight_behind_views": ("v = Transpose (c)  u = Identity (v)  y = MatMul (x, u)",
                            {"c": np.ones((2, 3))}),
    "part_of_a_whole": ("v = Concat <axis=1> (w, c)  y = MatMul (x, v)",
                        {"c": np.ones((3, 2)), "w": np.ones((3, 1))}),
    "weight_and_shape": ("s = Shape (c)  h = Expand (x, s)  y = MatMul (h, c)",
                         {"c": np.ones((3, 3))}),
    "weight_and_scales_of_a_resize": (
        "r = Resize (x, , c)  h = MatMul (r, w)  y = Mul (h, c)",
        {"c": [1.0, 2.0], "w": np.ones((6, 2))}),
    "exponent_and_its_inverse": ("h = Pow (x, c)  i = Reciprocal (c)  y = Pow (h, i)", {"c": 3.0}),
    "threshold_and_shift": ("m = Greater (x, c)  s = Sub (x, c)  y = Where (m, s, x)",
                            {"c": [0.1, 0.2, 0.3]}),
    "rows_at_places_of_its_own": ("i = Cast <to=7> (w)  r = Gather (c, i)  y = Add (x, r)",
                                  {"c": np.ones((4, 3)), "w": [0.0]}),
    "table": ("i = Cast <to=7> (x)  y = Gather (c, i)", {"c": np.ones((4, 2))}),
    "replacement_token": ("m = IsNaN (x)  y = Where (m, c, x)", {"c": [0.1, 0.2, 0.3]}),
}  # fmt: skip


@pytest.mark.parametrize(("body", "constants", "words"), EXCLUDED.values(), ids=EXCLUDED)
def test_setting_has_excluded_reason(body, constants, words):
    assert words in excluded_reason(graph_of(body, **constants), "c")


@pytest.mark.parametrize(("body", "constants"), KEPT.values(), ids=KEPT)
def test_weight_is_parameter(body, constants):
    assert excluded_reason(graph_of(body, **constants), "c") is None


# -- numbers of exporters of PyTorch ---------------------------------------------------------------

# The scale of an attention, as the exporter writes it without optimize.
ATTENTION = """r = Sqrt ({0})  q = Mul (x, r)  s = Sqrt ({0})  t = Mul (x, s)  k = Transpose (t)
    y = MatMul (q, k)"""


def in_a_file(body, name, value):
    """A file with this constant, whose name the parser of texts would refuse."""
    model = parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 18]> m (float[N,3] x) => (float[] y)'
        f" {{ {body.format('c')} }}"
    )
    for node in model.graph.node:
        node.input[:] = [name if entry == "c" else entry for entry in node.input]
    array = np.asarray(value, np.float32)
    model.graph.initializer.append(numpy_helper.from_array(array, name))
    return load_graph(model)


@pytest.mark.parametrize(
    "name", ["val_240", "lifted_tensor_0", "c_lifted_tensor_12", "/block/Constant_3_output_0"]
)
@pytest.mark.parametrize(
    "body",
    [
        ATTENTION,
        "r = Exp ({0})  y = Mul (x, r)",
        "r = Sqrt ({0})  h = Pow (x, {0})  y = Mul (h, r)",
        "r = Sqrt ({0})  h = Mul (x, {0})  y = Mul (h, r)",
    ],
)
def test_number_of_exporter_is_not_a_parameter(name, body):
    graph = in_a_file(body, name, 0.125)
    assert "a number of the exporter (" in excluded_reason(graph, name)
    assert trainable_parameters(graph, [name]) == (name,)


@pytest.mark.parametrize(
    ("name", "body", "value"),
    [
        *((name, ATTENTION, 0.125) for name in ("scale", "attention.val_240", "layers.0.val_2.s")),
        ("logit_scale", "r = Exp ({0})  y = Mul (x, r)", 0.125),  # of CLIP
        ("temperature", "r = Softplus ({0})  y = Mul (x, r)", 0.125),
        ("val_1", "y = PRelu (x, {0})", 0.25),  # a slope in another shape
        ("val_1", "y = PRelu (x, {0})", [[0.25]]),
        ("val_1", "r = Exp ({0})  y = Mul (x, r)", [0.1, 0.2, 0.3]),
        ("val_1", "r = Exp ({0})  y = Mul (x, r)", [0.1]),
        ("val_1", "r = Exp ({0})  p = PRelu (x, {0})  y = Mul (p, r)", 0.25),
    ],
)
def test_number_of_a_module_is_a_parameter(name, body, value):
    assert excluded_reason(in_a_file(body, name, value), name) is None


SCATTERED = """h = ConstantOfShape <value = float[1] {{{0}}}> (n)
    k = ScatterElements (h, at, w)  c = Reshape (k, side)  y = MatMul (x, c)"""


@pytest.mark.parametrize("number", [0, 1])
def test_constant_filled_with_zeros_or_ones_is_not_parameter(number):
    """A sparse matrix whose entries the file stores, as of a bank of filters."""
    constants = {"n": [9], "at": [0, 4, 8], "w": [0.5, 0.25, 0.125], "side": [3, 3]}
    graph = graph_of(SCATTERED.format(number), **constants)
    assert "filled with" in excluded_reason(graph, "h")
    assert trainable_parameters(graph) == ("w",)
    assert trainable_parameters(graph, ["h"]) == ("h",)


def test_filled_weight_of_stripped_file_is_parameter():
    body = "c = ConstantOfShape <value = float[1] {0.02}> (n)  y = MatMul (x, c)"
    assert trainable_parameters(graph_of(body, n=[3, 2])) == ("c",)


def test_weight_read_in_branch_is_parameter():
    graph = graph_of(
        "y = If (b) <then_branch = t () => (float[] a) { a = Mul (x, c) },"
        "            else_branch = e () => (float[] a) { a = Identity (x) }>",
        inputs="float[N,3] x, bool b",
        c=[1.0, 2.0, 3.0],
    )
    assert excluded_reason(graph, "c") is None


def test_settings_table_ignores_other_domains():
    model = parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18, "own": 1]>'
        "m (float[3] x) => (float[] y) <float[3] c = {1, 2, 3}> { y = own.Clip (x, c) }"
    )
    assert excluded_reason(load_graph(model), "c") is None


def test_excluded_reason_of_unknown_name_raises_error():
    with pytest.raises(UnknownNameError, match="'ghost'"):
        excluded_reason(load_graph(models.mlp()), "ghost")


# -- patterns -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["*.weight"], ("fc0.weight", "fc1.weight", "fc2.weight")),
        (["fc2.bias", "fc0.*"], ("fc0.weight", "fc0.bias", "fc2.bias")),
        (["fc[01].bias"], ("fc0.bias", "fc1.bias")),
    ],
)
def test_patterns_select_in_graph_order(patterns, expected):
    assert trainable_parameters(load_graph(models.mlp()), patterns) == expected


def test_patterns_override_excluded_reasons():
    graph = load_graph(models.resnet_block())
    assert trainable_parameters(graph, ["bn0.running_mean"]) == ("bn0.running_mean",)


def test_name_with_brackets_matches_itself():
    graph = graph_of("y = MatMul (x, c)", c=np.ones((3, 2)))
    renamed = Graph(graph.nodes, graph.inputs, graph.outputs, {"w[0]": graph.constants["c"]}, 18)
    assert trainable_parameters(renamed, ["w[0]"]) == ("w[0]",)


@pytest.mark.parametrize("pattern", ["ghost", "*.gamma", "axes"], ids=["name", "glob", "integers"])
def test_unmatched_pattern_error_lists_names(pattern):
    with pytest.raises(UnknownNameError, match=r"'.*'.*3: table, output\.weight, output\.bias"):
        trainable_parameters(load_graph(models.embedding()), [pattern])


def test_model_without_parameters_raises_error():
    with pytest.raises(ModelError, match="no trainable parameter"):
        trainable_parameters(graph_of("y = Clip (x, c)", c=0.0))


def test_empty_patterns_raise_error():
    with pytest.raises(ModelError, match="no trainable parameter"):
        trainable_parameters(load_graph(models.mlp()), [])


# -- values ---------------------------------------------------------------------------------------


# A mask that is gathered, fill values that are chosen, offsets that nobody could train.
NOT_FINITE = {
    "gathered": ("i = Cast <to=7> (x)  g = Gather (c, i)  y = Add (g, w)", [[0.0], [-np.inf]]),
    "chosen": ("m = IsNaN (x)  h = Where (m, c, x)  y = Mul (h, w)", [np.nan] * 3),
    "added": ("h = Add (x, c)  y = Mul (h, w)", [0.0, np.nan, 0.0]),
    "matrix": ("i = Cast <to=7> (x)  g = Gather (c, i)  y = Mul (g, w)",
               [[-np.inf] * 3, [0.3, 0.4, np.inf], [0.5, 0.6, np.nan]]),
    "series": ("i = Cast <to=7> (x)  g = Gather (c, i)  y = Mul (g, w)", [np.inf] * 5),
}  # fmt: skip


@pytest.mark.parametrize(("body", "values"), NOT_FINITE.values(), ids=NOT_FINITE)
def test_nonfinite_constants_are_not_parameters(body, values):
    graph = graph_of(body, c=values, w=[1.0, 2.0, 3.5])
    assert "c" not in trainable_parameters(graph)
    with pytest.raises(NonFiniteError, match=r"'c' contains NaN or infinity .*freeze"):
        trainable_parameters(graph, ["c"])


@pytest.mark.parametrize(
    ("freeze", "expected"),
    [
        ("fc1.*", ("fc0.weight", "fc0.bias", "fc2.weight", "fc2.bias")),
        (["*.bias", "fc[01].weight"], ("fc2.weight",)),
        ([], ("fc0.weight", "fc0.bias", "fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")),
    ],
)
def test_frozen_names_are_excluded(freeze, expected):
    assert trainable_parameters(load_graph(models.mlp()), freeze=freeze) == expected


def test_frozen_names_are_excluded_from_patterns():
    found = trainable_parameters(load_graph(models.mlp()), ["fc1.*", "fc2.*"], "*.bias")
    assert found == ("fc1.weight", "fc2.weight")


@pytest.mark.parametrize(
    ("freeze", "error", "words"),
    [
        ("head.*", UnknownNameError, r"'head\.\*'.*fc0\.weight"),
        ("*", ModelError, "no parameter .* is left to train"),
    ],
)
def test_freeze_of_nothing_or_everything_raises_error(freeze, error, words):
    with pytest.raises(error, match=words):
        trainable_parameters(load_graph(models.mlp()), freeze=freeze)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["FLOAT16", "BFLOAT16", "FLOAT", "DOUBLE"])
def test_nonfinite_weight_error_names_weight(value, dtype):
    code = onnx.TensorProto.DataType.Value(dtype)
    weight = np.asarray([[1.0], [value], [2.0]]).astype(onnx.helper.tensor_dtype_to_np_dtype(code))
    graph = graph_of("y = MatMul (x, c)", c=np.ones((3, 1)))
    broken = Graph(graph.nodes, graph.inputs, graph.outputs, {"c": weight}, graph.opset)
    with pytest.raises(NonFiniteError, match=r"'c' contains NaN or infinity \(1 of"):
        trainable_parameters(broken)


def test_check_of_filled_weight_allocates_no_copy():
    graph = graph_of("y = MatMul (x, c)", c=np.ones((3, 1)))
    huge = np.broadcast_to(np.float32(0.1), (1 << 40, 1 << 10))
    filled = Graph(graph.nodes, graph.inputs, graph.outputs, {"c": huge}, graph.opset)
    assert trainable_parameters(filled) == ("c",)


def test_pattern_selects_parameters_and_a_name_any_constant():
    row = [1.0, 2.0, 3.0]
    body = "y = BatchNormalization (x, n_scale, n_bias, n_mean, n_var)"
    graph = graph_of(body, n_scale=row, n_bias=row, n_mean=row, n_var=row)
    for patterns, chosen in {
        ("n_*",): ("n_scale", "n_bias"),
        ("n_mean",): ("n_mean",),
        ("n_[mv]*",): ("n_mean", "n_var"),
        ("n_v*", "n_b*"): ("n_bias", "n_var"),
    }.items():
        assert trainable_parameters(graph, patterns) == chosen
