"""Adapters change nothing at first, add low-rank updates, and are folded into weights."""

from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

import kfac_engine as ke
from tests.comparing import assert_near
from tests.graph.edits.spellings import ROWS, X, run, weights
from tests.models import with_constants

# float32 products of a few dozen terms, in another order.
CLOSE = 1e-6
RANK, ALPHA = 3, 6.0
# Products that round their data.
ROUNDED = ["dynamic integers", "dynamic product", "columns of dynamic integers"]
WITHOUT = "transposed convolution"  # products that have no adapters
# Rows with a float weight ``w``, and with integers ``q``.
PLAIN = [
    name
    for name, row in ROWS.items()
    if name != WITHOUT and "q" not in (row.whole or {}) and row.old > RANK
]
QUANTIZED = [name for name, row in ROWS.items() if "q" in (row.whole or {})]


def trained(model, seed=5):
    """A model whose adapters have random matrices."""
    rng = np.random.default_rng(seed)
    return with_constants(model, {
        name: rng.normal(size=array.shape).astype(array.dtype)
        for name, array in weights(model).items()
        if "lora" in name
    })  # fmt: skip


def update(model, layer):
    """The change of the weight of a layer, inputs by outputs, in float64."""
    A, B = (weights(model)[f"{layer}.lora_{part}"].astype(np.float64) for part in "AB")
    if A.ndim > 2 and A.shape[-1] == 1:  # filters
        return ALPHA / RANK * (B[..., 0, 0] @ A[..., 0, 0]).T
    return ALPHA / RANK * (A @ B)


@pytest.mark.parametrize("name", [name for name in ROWS if name not in (WITHOUT, *ROUNDED)])
def test_new_adapters_change_no_bit(name):
    row = ROWS[name]
    old = row.model
    layer = "q" if name in QUANTIZED else "w"
    adapted = ke.add_adapters(old, rank=1, layers=layer)
    onnx.checker.check_model(adapted)
    np.testing.assert_array_equal(run(adapted, {"x": X})[0], run(old, {"x": X})[0])
    added = weights(adapted).keys() - weights(old).keys()
    assert added == {f"{layer}.lora_A", f"{layer}.lora_B", "adapter_scale"}


@pytest.mark.parametrize("name", PLAIN)
def test_adapted_and_merged_files_compute_with_the_sum_of_weights(name):
    old = ROWS[name].model
    adapted = trained(ke.add_adapters(old, RANK, "w", ALPHA))
    w, change = weights(old)["w"], update(adapted, "w")
    change = (change if change.shape == w.shape else change.T).reshape(w.shape)
    truth = with_constants(old, {"w": (w + change).astype(np.float32)})
    (y,), (z,) = run(truth, {"x": X}), run(adapted, {"x": X})
    assert_near(z, y, 3 * CLOSE)
    merged = ke.merge_adapters(adapted)
    onnx.checker.check_model(merged)
    assert_near(run(merged, {"x": X})[0], z, 3 * CLOSE)
    assert_near(weights(merged)["w"], w + change, CLOSE)
    assert merged.graph.node == old.graph.node
    assert merged.graph.input == old.graph.input
    assert len(merged.SerializeToString()) == len(old.SerializeToString())


@pytest.mark.parametrize("name", ["dequantized", "four bits", "eight bits, bias"])
def test_adapter_of_quantized_weight_is_added_and_not_merged(name):
    old = ROWS[name].model
    adapted = trained(ke.add_adapters(old, RANK, "q", ALPHA))
    h, before = run(old, {"x": X}, "h", "y")
    truth = before + h @ update(adapted, "q")
    assert_near(run(adapted, {"x": X})[0], truth, CLOSE)
    with pytest.raises(ke.UnsupportedError, match=r"'q.lora_A' cannot be folded into .*integers"):
        ke.merge_adapters(adapted)


@pytest.mark.parametrize("layer", ["body", "q"])
@pytest.mark.parametrize("name", ROUNDED)
def test_products_behind_an_adapter_do_not_round_their_data(name, layer):
    """The truth is the product of real numbers; an adapter in front of it needs its derivative."""
    old = ROWS[name].model
    adapted = trained(ke.add_adapters(old, RANK, layer, ALPHA))
    onnx.checker.check_model(adapted)
    stored, dtype = weights(old), np.float64
    q, s, p, b = (stored[key].astype(dtype) for key in "qspb")
    body, w = stored["body"].astype(dtype), (q - p) * s
    body, w = (
        (body + update(adapted, layer), w)
        if layer == "body"
        else (body, w + update(adapted, layer))
    )
    engine = ke.Engine.from_onnx(adapted, loss="categorical", trainable="*lora*")
    assert_near(engine.predict({"x": X}), np.tanh(X @ body) @ w + b, CLOSE)
    assert not [node.op_type for node in adapted.graph.node if "Dynamic" in node.op_type]


def test_a_product_before_all_adapters_rounds_its_data_as_before():
    nodes = f"{ROWS['dynamic product'].nodes.replace('y =', 'z =')}  y = MatMul (z, v)"
    row = replace(
        ROWS["dynamic product"], nodes=nodes, weights={"s": (), "b": (10,), "v": (10, 10)}
    )
    adapted = ke.add_adapters(row.model, 1, "v")
    np.testing.assert_array_equal(run(adapted, {"x": X})[0], run(row.model, {"x": X})[0])


def test_other_products_have_no_adapters():
    with pytest.raises(ke.UnknownNameError, match="no layer matches 'w'"):
        ke.add_adapters(ROWS[WITHOUT].model, 2, "w")


def spelled(nodes, weights, inputs="float[N,5] x", ir=9):
    """A file of nodes that compute ``y``."""
    model = parser.parse_model(
        f'<ir_version: {ir}, opset_import: ["": 18, "com.microsoft": 1]> '
        f"m ({inputs}) => (y) {{ {nodes} }}"
    )
    model.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    for name, array in weights.items():
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
        if ir < 4:
            kind = onnx.helper.np_dtype_to_tensor_dtype(np.asarray(array).dtype)
            entry = onnx.helper.make_tensor_value_info(name, kind, np.shape(array))
            model.graph.input.append(entry)
    return model


def normal(*shape, seed=0, dtype="float32"):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


# Other layers that a pattern names: the nodes, their weights, and the data input with its value.
IMAGE = {"x": normal(2, 3, 7, 6)}
IDS = {"x": np.array([[0, 3], [1, 3]])}
LAYERS = {
    "tokens": ("z = MatMul (x, w) y = Add (z, b)", {"w": normal(5, 7), "b": normal(7)},
               "float[N,t,5] x", {"x": normal(2, 3, 5)}),
    "stack of experts": ("y = MatMul (x, w)", {"w": normal(4, 5, 6)}, "float[4,N,5] x",
                         {"x": normal(4, 3, 5)}),
    "embedding": ("y = Gather (w, x)", {"w": normal(9, 5)}, "int64[N,t] x", IDS),
    "scaled Gemm": ("y = Gemm <alpha = 0.5, transB = 1> (x, w, b)",
                    {"w": normal(7, 5), "b": normal(7)}, "float[N,5] x", {"x": X}),
    "wide filters": ("y = Conv <strides = [2, 1], pads = [1, 0, 0, 1], dilations = [1, 2]> (x, w)",
                     {"w": normal(6, 3, 3, 2)}, "float[N,3,7,6] x", IMAGE),
    "fused filters": ('y = com.microsoft.FusedConv <activation = "Relu"> (x, w, b)',
                      {"w": normal(6, 3, 1, 1), "b": normal(6)}, "float[N,3,7,6] x", IMAGE),
    "clipped filters": (
        'y = com.microsoft.FusedConv <activation = "Clip", activation_params = [0.0, 6.0]> (x, w)',
        {"w": normal(6, 3, 1, 1)}, "float[N,3,7,6] x", IMAGE),
    "fused product": (
        'y = com.microsoft.FusedGemm <activation = "LeakyRelu", activation_alpha = 0.5> (x, w, b)',
        {"w": normal(5, 7), "b": normal(7)}, "float[N,5] x", {"x": X}),
    "weight of two layers": ("h = MatMul (x, w) g = Tanh (h) y = MatMul (g, w)",
                             {"w": normal(5, 5)}, "float[N,5] x", {"x": X}),
    "dense before rows": (
        "t = Transpose (w) h = MatMul (x, t) i = ArgMax <axis = 1, keepdims = 0> (h) "
        "g = Gather (w, i) y = Add (g, x)", {"w": normal(7, 5)}, "float[N,5] x", {"x": X}),
    "Constant": ("w = Constant <value = float[2,3] {1, 2, 3, 4, 5, 6}> () v = Identity (w) "
                 "y = MatMul (x, v)", {}, "float[N,2] x", {"x": X[:, :2]}),
}  # fmt: skip


@pytest.mark.parametrize("case", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("ir", [3, 9])
def test_layers_of_all_kinds_have_adapters_that_are_folded_in(case, ir):
    nodes, arrays, inputs, feeds = case
    old = spelled(nodes, arrays, inputs, ir)
    adapted = ke.add_adapters(old, 2, "w", seed=1)
    np.testing.assert_array_equal(run(adapted, feeds)[0], run(old, feeds)[0])
    changed = trained(adapted)
    merged = ke.merge_adapters(changed)
    # A Clip that was fused has its bounds as operands.
    assert {name for name in weights(merged) if ".bound" not in name} == weights(old).keys()
    (z,) = run(changed, feeds)
    assert np.abs(z - run(old, feeds)[0]).max() > 0.1, "random adapters change the result"
    assert_near(run(merged, feeds)[0], z, 3 * CLOSE)


def test_products_of_one_weight_that_is_read_elsewhere_have_copies():
    arrays = {"w": normal(5, 5), "zero": np.array([0])}
    old = spelled("f = Gather (w, zero)  g = Add (x, f)  y = MatMul (g, w)", arrays)
    adapted = trained(ke.add_adapters(old, 2, "w"))
    merged = ke.merge_adapters(adapted)
    np.testing.assert_array_equal(weights(merged)["w"], arrays["w"])
    assert_near(run(merged, {"x": X})[0], run(adapted, {"x": X})[0], 3 * CLOSE)


def test_adapters_with_generated_weights_are_known_by_their_nodes():
    arrays = {"w": normal(5, 7), "onnx::MatMul_1": normal(5, 2), "onnx::MatMul_2": normal(2, 7)}
    adapted = spelled(
        "[base] h = MatMul (x, w)  [first] low = MatMul (x, first) "
        "[second] up = MatMul (low, second)  y = Add (h, up)",
        dict(zip(("w", "first", "second"), arrays.values(), strict=True)),
    )
    for place, name in enumerate(list(arrays)[1:], 1):
        adapted.graph.node[place].input[1] = name
        adapted.graph.node[place].name = f"/q_proj/lora_{'AB'[place - 1]}/MatMul"
        adapted.graph.initializer[place].name = name
    merged = ke.merge_adapters(adapted)
    assert weights(merged).keys() == {"w"}
    assert_near(run(merged, {"x": X})[0], run(adapted, {"x": X})[0], CLOSE)


TORCH = {
    "of dense layers": (
        "base = Gemm <transB = 1> (x, w, b)  t = Transpose (lora_A)  low = MatMul (x, t) "
        "u = Transpose (lora_B)  up = MatMul (low, u)  s = Mul (up, two) "
        "y = Add (base, s)",
        {"w": normal(7, 5), "b": normal(7), "two": np.float32(2)}, (2, 5), (7, 2)),
    "divided, Gemm": (
        "base = Gemm <transB = 1> (x, w, b)  low = Gemm <transB = 1> (x, lora_A) "
        "s = Div (low, two)  up = Gemm <transB = 1> (s, lora_B)  y = Add (up, base)",
        {"w": normal(7, 5), "b": normal(7), "two": np.float32(2)}, (2, 5), (7, 2)),
}  # fmt: skip


@pytest.mark.parametrize("case", TORCH.values(), ids=TORCH)
def test_adapters_that_an_exporter_wrote_are_folded_in(case):
    nodes, arrays, first, second = case
    matrices = {"lora_A": normal(*first, seed=1), "lora_B": normal(*second)}
    adapted = spelled(nodes, {**arrays, **matrices})
    merged = ke.merge_adapters(adapted)
    assert weights(merged).keys() == {"w", "b"}
    assert_near(run(merged, {"x": X})[0], run(adapted, {"x": X})[0], CLOSE)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_adapters_have_the_element_type_of_the_weight(dtype):
    kind = {"float16": "float16", "float64": "double"}[dtype]
    old = spelled("y = MatMul (x, w)", {"w": normal(5, 6, dtype=dtype)}, f"{kind}[N,5] x")
    code = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    old.graph.output[0].type.tensor_type.elem_type = code
    adapted = trained(ke.add_adapters(old, 2))
    assert {array.dtype.name for array in weights(adapted).values()} == {dtype}
    merged = ke.merge_adapters(adapted)
    feeds = {"x": X.astype(dtype)}
    tolerance = {"float16": 4 * 2.0**-11, "float64": 1e-14}[dtype]
    assert_near(run(merged, feeds)[0], run(adapted, feeds)[0], tolerance)


BAD = {
    "unknown layer": ({"layers": "v*"}, ke.UnknownNameError, "no layer matches 'v\\*'"),
    "near layer": ({"layers": "heed"}, ke.UnknownNameError, "did you mean 'head'"),
    "rank above a side": ({"rank": 5, "layers": "head"}, ke.InputError,
                          r"rank is 5, above a side of .*'head', 6 × 4.* at most 4"),
    "rank above all sides": ({"rank": 9}, ke.ModelError, "smaller side .* at most 5"),
    "no rank": ({"rank": 0}, ke.InputError, "rank must be a whole number of at least 1"),
    "no factor": ({"alpha": 0}, ke.InputError, "alpha must be a positive number"),
    "a number as layers": ({"layers": 3}, ke.InputError, "layers must be a list"),
    "a seed": ({"seed": 0.5}, ke.InputError, "seed"),
}  # fmt: skip
DENSE = {"w": normal(5, 6), "head": normal(6, 4)}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_wrong_options_are_named(case):
    options, error, message = case
    with pytest.raises(error, match=message):
        ke.add_adapters(spelled("h = MatMul (x, w)  y = MatMul (h, head)", DENSE), **options)


def test_layer_that_has_an_adapter_does_not_get_another():
    adapted = ke.add_adapters(spelled("y = MatMul (x, w)", {"w": DENSE["w"]}), 2)
    with pytest.raises(ke.InputError, match=r"has an adapter already, 'w.lora_A'"):
        ke.add_adapters(adapted, 2)


def test_files_without_adapters_and_other_adapters_are_refused():
    with pytest.raises(ke.ModelError, match="has no adapter"):
        ke.merge_adapters(spelled("y = MatMul (x, w)", {"w": DENSE["w"]}))
    adapted = ke.add_adapters(spelled("y = MatMul (x, w)", {"w": DENSE["w"]}), 2)
    adapted.graph.node.append(onnx.helper.make_node("Abs", ["w.lora_A"], ["other"]))
    adapted.graph.output.append(onnx.ValueInfoProto(name="other"))
    with pytest.raises(ke.ModelError, match=r"'w.lora_A' of an adapter cannot be folded in"):
        ke.merge_adapters(adapted)
