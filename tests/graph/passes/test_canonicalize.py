"""Old operator sets, as real files use them, keep their meaning."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from kfac_engine.errors import UnsupportedError
from kfac_engine.graph.load import load_graph
from tests import models
from tests.graph.running import (
    CARRIED,
    CLOSE,
    assert_same,
    relabelled,
    run_graph,
    run_model,
    simple_model,
)
from tests.nightly import nightly_but

# What onnx stored beside its models came from PyTorch in float32.
STORED_CLOSE = 1e-4


@pytest.mark.parametrize("opset", [9, 11, 13, 16, 18, 21, 24, 26])
@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet_block"])
def test_all_operator_sets_compute_equal_results(name, opset):
    model = relabelled(models.MODELS[name](), opset)
    feeds = models.random_inputs(model)
    graph = load_graph(model)
    assert graph.opset == max(opset, 18)
    assert_same(run_graph(graph, feeds), run_model(model.SerializeToString(), feeds), CLOSE)


OLD_FORMS = {
    "softmax_flattens": (11, "y = Softmax <axis=1> (x)"),
    "log_softmax_flattens": (11, "y = LogSoftmax <axis=1> (x)"),
    "reduce_axes": (13, "y = ReduceMean <axes=[1], keepdims=0> (x)"),
    "reduce_sum_axes": (11, "y = ReduceSum <axes=[-1]> (x)"),
    "squeeze_axes": (11, "u = Unsqueeze <axes=[0]> (x)  y = Squeeze <axes=[0]> (u)"),
    "slice_attributes": (9, "y = Slice <axes=[2], starts=[1], ends=[3]> (x)"),
    "pad_attributes": (9, "y = Pad <pads=[0,0,1,0,0,2], value=0.5> (x)"),
    "clip_bounds": (9, "y = Clip <min=-0.5, max=0.5> (x)"),
    "dropout_ratio": (9, "y = Dropout <ratio=0.5> (x)"),
    "split_sizes": (11, "y, z = Split <axis=2, split=[1,3]> (x)"),
    "split_equal": (13, "y, z = Split <axis=2> (x)"),
    "upsample": (8, "y = Upsample <scales=[1.0, 1.0, 2.0]> (x)"),
    "flatten": (9, "y = Flatten <axis=1> (x)"),
    "upsample_linear": (7, 'y = Upsample <mode="linear", scales=[1.0, 1.0, 2.0]> (x)'),
    "resize_by_fraction": (
        10, 'y = Resize <mode="nearest"> (x, s)', "<float[3] s = {1, 1.5, 1.6}>"),
    "resize_linear": (10, 'y = Resize <mode="linear"> (x, s)', "<float[3] s = {1, 1, 0.6}>"),
    "roi_align": (
        10, "u = Unsqueeze <axes=[0]> (x)  y = RoiAlign <output_width=2> (u, r, b)",
        "<float[1,4] r = {0, 0, 2, 1}, int64[1] b = {0}>"),
    "top_k": (9, "y, i = TopK <k=2> (x)"),
    "batch_norm_first_form": (
        7, "y = BatchNormalization <spatial=1> (x, s, s, s, v)",
        "<float[3] s = {1, 2, 3}, float[3] v = {3, 2, 1}>"),
}  # fmt: skip


@pytest.mark.parametrize("form", OLD_FORMS.values(), ids=OLD_FORMS)
def test_upgraded_operator_computes_equal_results(form):
    opset, body, *constants = form
    model = parser.parse_model(
        f'<ir_version: 7, opset_import: ["": {opset}]> '
        f"m (float[2,3,4] x) => (float[] y) {''.join(constants)} {{ {body} }}"
    )
    x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
    graph = load_graph(model)
    assert graph.opset == 18
    expected = run_model(model.SerializeToString(), {"x": x})
    assert_same(run_graph(graph, {"x": x}), expected, CLOSE)


WEIGHT = np.arange(12, dtype=np.float32).reshape(4, 3) / 8
SQUARE = np.array([[1, 2], [3, 4]], np.float32)
BIAS, PAIR = np.array([1, 2, 3], np.float32), np.array([4, 5], np.float32)
# Operators of set 6, which ONNX Runtime has no longer, and what they compute.
BROADCAST_FORMS = {
    "bias_of_gemm": (
        "f = Flatten (x)  y = Gemm <broadcast=1> (f, w, b)",
        lambda x: x.reshape(-1, 4) @ WEIGHT + BIAS),
    "channels": ("y = Add <broadcast=1, axis=1> (x, c)", lambda x: x + PAIR[:, None]),
    "axis_from_the_end": ("y = Add <broadcast=1, axis=-2> (x, c)", lambda x: x + PAIR[:, None]),
    "middle_axis": (
        "u = Unsqueeze <axes=[2, 4]> (x)  y = Sub <broadcast=1, axis=1> (u, c)",
        lambda x: (x - PAIR[:, None])[:, :, None, :, None]),
    "two_axes": (
        "u = Unsqueeze <axes=[3]> (x)  y = Mul <broadcast=1, axis=1> (u, s)",
        lambda x: (x * SQUARE)[..., None]),
    "last_axis": ("h = Mul <broadcast=1> (x, c)  y = Sub (h, x)", lambda x: x * PAIR - x),
}  # fmt: skip


@pytest.mark.parametrize(("body", "expected"), BROADCAST_FORMS.values(), ids=BROADCAST_FORMS)
def test_upgraded_broadcast_keeps_dynamic_batch(body, expected):
    model = parser.parse_model(
        f'<ir_version: 7, opset_import: ["": 6]> m (float[N,2,2] x) => (float[] y) {{ {body} }}'
    )
    for name, array in {"w": WEIGHT, "b": BIAS, "c": PAIR, "s": SQUARE}.items():
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    graph = load_graph(model)
    assert graph.inputs[0].shape == ("N", 2, 2)
    for batch in (1, 2, 5):
        x = np.random.default_rng(0).standard_normal((batch, 2, 2)).astype(np.float32)
        assert_same(run_graph(graph, {"x": x}), {"y": expected(x)}, CLOSE)


# These have one slope a channel in a form that newer operators read differently.
CHANNEL_SLOPES = {f"test_PReLU_{rank}d_multiparam" for rank in (1, 2, 3)}

CONVERTED = [
    path.parent
    for family in ("pytorch-converted", "pytorch-operator")
    for path in sorted((CARRIED / family).glob("*/model.onnx"))
    if path.parent.name not in CHANNEL_SLOPES
]


@pytest.mark.parametrize("folder", CONVERTED, ids=lambda folder: folder.name)
def test_stored_model_has_stored_outputs(folder):
    graph = load_graph(folder / "model.onnx")
    data = folder / "test_data_set_0"
    arrays = [numpy_helper.to_array(onnx.load_tensor(p)) for p in sorted(data.glob("input_*.pb"))]
    feeds = dict(zip((entry.name for entry in graph.inputs), arrays, strict=True))
    stored = [numpy_helper.to_array(onnx.load_tensor(p)) for p in sorted(data.glob("output_*.pb"))]
    found = run_graph(graph, feeds, stored[0].dtype.name)
    assert_same(found, dict(zip(graph.outputs, stored, strict=True)), STORED_CLOSE)


@pytest.mark.parametrize("name", sorted(CHANNEL_SLOPES))
def test_prelu_slopes_with_changed_meaning_raise_error(name):
    with pytest.raises(UnsupportedError, match=r"PRelu .* no exact counterpart"):
        load_graph(CARRIED / "pytorch-converted" / name / "model.onnx")


@pytest.mark.parametrize(
    ("opset", "op", "operands"),
    [(11, "Hardmax", "x"), (10, "Resize", "x, halves"), (10, "Resize", "x, x")],
    ids=["hardmax", "shrinking", "scales-from-data"],
)
def test_operator_form_with_changed_meaning_raises_error(opset, op, operands):
    model = simple_model(f"y = {op} ({operands})", halves=np.full(2, 0.5, np.float32))
    with pytest.raises(UnsupportedError, match=rf"{op} .* no exact counterpart"):
        load_graph(relabelled(model, opset))


LIGHT = ["squeezenet", "shufflenet", "inception_v1"]
# VGG-19 and ZFNet have no operator that these have not, and half a gigabyte of weights.
HEAVY = ["bvlc_alexnet", "densenet121", "inception_v2", "resnet50"]


@pytest.mark.parametrize("name", nightly_but(LIGHT, HEAVY))
def test_network_with_constant_node_weights_computes_equal_results(name):
    path = CARRIED / "light" / f"light_{name}.onnx"
    graph = load_graph(path)
    shape = [side or 1 for side in graph.inputs[0].shape]
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    feeds = {graph.inputs[0].name: x}
    assert_same(run_graph(graph, feeds), run_model(path.read_bytes(), feeds), CLOSE)
