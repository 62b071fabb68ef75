"""The exported variance of each kind of layer, and of inputs of other sizes than in the file."""

import numpy as np
import onnx
import pytest

import kfac_engine as ke
from tests import models
from tests.analysis.fisher_matrix.dense import assert_close, measured
from tests.analysis.fisher_matrix.test_example_gradients import stacked
from tests.analysis.laplace.test_export import run
from tests.analysis.laplace.test_export_network import (
    EXAMPLES,
    PRECISION,
    TOLERANCES,
    precision,
    variance_of,
)
from tests.analysis.laplace.test_posterior import jacobian


def pooled(net, value, channels, shape):
    """The mean over positions of images, and a dense layer."""
    value = net.op("Tanh", value, to="act")
    axes = net.constant("axes", np.arange(2, len(shape)))
    value = net.op("ReduceMean", value, axes, to="pool", keepdims=0)
    net.dense("output", value, channels, 2)
    return net.model({"input": shape}, {"output": ["batch", 2]})


def convolution(*weight, shape=(3, 4, 5), op="Conv", **attributes):
    net = models.Net()
    outputs = weight[1 if op == "ConvTranspose" else 0]
    if attributes.get("group", 1) > 1 and op == "Conv":
        outputs = weight[0]
    operands = ["input", net.weight("w", *weight), net.weight("b", outputs)]
    value = net.op(op, *operands, to="conv", **attributes)
    return pooled(net, value, outputs, ["batch", *shape])


def attention(tokens):
    """Self-attention with one matrix for queries, keys and values; LayerNorm and a mean."""
    net, d = models.Net("float64"), 3
    product = net.op("MatMul", "input", net.weight("qkv.weight", d, 3 * d), to="product")
    net.op("Add", product, net.weight("qkv.bias", 3 * d), to="qkv")
    for index, name in enumerate("qkv"):
        bounds = (net.constant(f"{name}{i}", np.array([(index + i) * d])) for i in (0, 1))
        net.op("Slice", "qkv", *bounds, net.constant(f"{name}2", np.array([2])), to=name)
    scores = net.op("MatMul", "q", net.op("Transpose", "k", to="kt", perm=[0, 2, 1]), to="scores")
    mixed = net.op("MatMul", net.op("Softmax", scores, to="soft", axis=-1), "v", to="mixed")
    value = net.op("Add", mixed, "input", to="sum")
    scale, shift = net.positive("norm.weight", d), net.weight("norm.bias", d)
    value = net.op("LayerNormalization", value, scale, shift, to="norm", axis=-1)
    axes = net.constant("axes", np.array([1]))
    net.dense("output", net.op("ReduceMean", value, axes, to="mean", keepdims=0), d, 2)
    return net.model({"input": ["batch", tokens, d]}, {"output": ["batch", 2]})


def positional():
    """A position embedding, which is a shift, and a gain of features."""
    net = models.Net("float64")
    value = net.op("Add", "input", net.weight("position", 1, 3, 4), to="shifted")
    value = net.op("Mul", net.op("Tanh", value, to="act"), net.weight("gain", 4), to="gained")
    axes = net.constant("axes", np.array([1]))
    net.dense("output", net.op("ReduceMean", value, axes, to="mean", keepdims=0), 4, 2)
    return net.model({"input": ["batch", 3, 4]}, {"output": ["batch", 2]})


def recurrent():
    """An Elman network, whose weights have a use for each time step."""
    net = models.Net("float64")
    w, r = net.weight("W", 4, 2), net.weight("R", 2, 2)
    state = None
    for step in range(3):
        place = net.constant(f"step{step}", np.array(step))
        value = net.op("Gather", "input", place, to=f"x{step}", axis=1)
        value = net.op("MatMul", value, w, to=f"in{step}")
        if state:
            product = net.op("MatMul", state, r, to=f"re{step}")
            value = net.op("Add", value, product, to=f"sum{step}")
        state = net.op("Tanh", value, to=f"state{step}")
    net.dense("output", state, 2, 2)
    return net.model({"input": ["batch", 3, 4]}, {"output": ["batch", 2]})


def token_sum():
    """An embedding of one id for each example, and a table row added to features."""
    net = models.Net()
    value = net.op("Gather", net.weight("table", models.VOCABULARY, 3), "input", to="row")
    net.dense("output", net.op("Tanh", value, to="act"), 3, 2)
    return net.model({"input": ["batch"]}, {"output": ["batch", 2]}, "int64")


LAYERS = {
    "grouped": lambda: convolution(
        4, 2, 3, 2, shape=(4, 5, 4), group=2, pads=[1, 0, 2, 1], strides=[2, 1], dilations=[1, 2]
    ),
    "depthwise": lambda: convolution(6, 1, 2, 2, group=3, pads=[0, 1, 0, 1]),
    "transposed": lambda: convolution(3, 2, 2, 3, op="ConvTranspose", strides=[2, 2]),
    "same upper": lambda: convolution(2, 3, 2, 3, auto_pad="SAME_UPPER", strides=[2, 2]),
    "same lower": lambda: convolution(2, 3, 2, 3, auto_pad="SAME_LOWER", strides=[2, 2]),
    "one axis": lambda: convolution(2, 3, 3, shape=(3, 5), pads=[2, 0]),
    "three axes": lambda: convolution(2, 1, 2, 1, 2, shape=(1, 3, 2, 3)),
    "attention": lambda: attention(3),
    "positional": positional,
    "recurrent": recurrent,
    "token ids": token_sum,
    "stacked": stacked,
}


@pytest.mark.parametrize("layer", LAYERS)
def test_exported_variance_of_a_layer_equals_the_dense_product(tmp_path, layer):
    model, path = LAYERS[layer](), tmp_path / "uncertain.onnx"
    batch, jac = models.random_inputs(model, batch=3, seed=5), None
    for structure in ("kron", "diagonal", "full"):
        examples = models.random_inputs(model, batch=EXAMPLES)
        curvature = measured(model, (examples, None), structure=structure)
        assert all(layer.kind != "generic" for layer, _ in curvature.layout.layers)
        jac = jacobian(curvature, model, batch) if jac is None else jac
        posterior = ke.Laplace(curvature, prior_precision=PRECISION)
        posterior.export(path)
        onnx.checker.check_model(str(path), full_check=True)
        variance = variance_of(jac, precision(posterior))
        for part in (slice(3), slice(1, 2)):
            results = run(path, {name: array[part] for name, array in batch.items()})["variance"]
            assert_close(results, variance[part], TOLERANCES[results.dtype.name])


@pytest.mark.parametrize(
    ("model", "shapes"),
    [
        (attention("tokens"), [(EXAMPLES, 3, 3), (2, 5, 3), (1, 1, 3)]),
        (
            convolution(2, 3, 2, 3, shape=(3, "height", "width"), auto_pad="SAME_UPPER"),
            [(EXAMPLES, 3, 4, 5), (2, 3, 3, 7), (1, 3, 6, 2)],
        ),
    ],
    ids=["tokens", "images"],
)
def test_exported_variance_holds_for_inputs_of_other_sizes(tmp_path, model, shapes):
    path, rng = tmp_path / "uncertain.onnx", np.random.default_rng(1)
    dtype = onnx.helper.tensor_dtype_to_np_dtype(model.graph.input[0].type.tensor_type.elem_type)
    first, *others = ({"input": rng.standard_normal(shape).astype(dtype)} for shape in shapes)
    posterior = ke.Laplace(measured(model, (first, None)), prior_precision=PRECISION)
    posterior.export(path)
    P = precision(posterior)
    for inputs in others:
        expected = variance_of(jacobian(posterior.curvature, model, inputs), P)
        variance = run(path, inputs)["variance"]
        assert_close(variance, expected, TOLERANCES[variance.dtype.name])
