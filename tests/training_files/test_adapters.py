"""Adapters of layers with integer weights: gradients, optimizers, and a state of adapters alone."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

import kfac_engine as ke
from tests.models import mlp
from tests.training_files.parity import differences

INPUTS, WIDTH, CLASSES, BLOCK = 32, 16, 4, 16
SIDES = {"up": (INPUTS, WIDTH), "down": (WIDTH, CLASSES)}
KINDS = ("four bits", "eight bits", "dequantized")
RNG = np.random.default_rng(0)
X = RNG.normal(size=(96, INPUTS)).astype(np.float32)
LABELS = RNG.integers(0, CLASSES, 96)


def integers(kind, name):
    """The integers of a layer around zero, inputs by outputs, and their scales in blocks."""
    rows, columns = SIDES[name]
    rng = np.random.default_rng(rows)
    most = 128 if kind == "eight bits" else 8
    q = rng.integers(-most, most, (rows, columns))
    return q, (rng.uniform(0.5, 1.5, (rows // BLOCK, columns)) / most / 2).astype(np.float32)


def quantized(kind):
    """Two layers with integer weights and Tanh between them."""
    nodes, arrays = [], {}
    for name, x, y in (("up", "x", "s"), ("down", "h", "y")):
        q, scales = integers(kind, name)
        rows, columns = q.shape
        if kind == "dequantized":
            arrays |= {f"{name}.weight_quantized": q.astype(np.int8), f"{name}.scale": scales}
            wide = helper.make_node(
                "DequantizeLinear", [*arrays][-2:], [f"{name}.w"], block_size=BLOCK, axis=0
            )
            nodes += [wide, helper.make_node("MatMul", [x, f"{name}.w"], [y])]
        else:
            bits = 8 if kind == "eight bits" else 4
            whole = (q + 2 ** (bits - 1)).T.reshape(columns, -1, BLOCK).astype(np.uint8)
            if bits == 4:
                whole = whole[..., ::2] | (whole[..., 1::2] << 4)
            arrays |= {f"{name}.weight_Q{bits}": whole, f"{name}.scales": scales.T.ravel()}
            nodes.append(
                helper.make_node(
                    "MatMulNBits", [x, *[*arrays][-2:]], [y], domain="com.microsoft",
                    K=rows, N=columns, bits=bits, block_size=BLOCK,
                )
            )  # fmt: skip
    nodes.insert(-1 if kind != "dequantized" else -2, helper.make_node("Tanh", ["s"], ["h"]))
    graph = helper.make_graph(
        nodes,
        "quantized",
        [helper.make_tensor_value_info("x", 1, ["N", INPUTS])],
        [helper.make_tensor_value_info("y", 1, ["N", CLASSES])],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def loss(kind, matrices):
    """The mean cross-entropy of the adapted model, in float64."""
    value = X.astype(np.float64)
    for name in SIDES:
        q, scales = integers(kind, name)
        A, B = (matrices[f"{name}.lora_{part}"].astype(np.float64) for part in "AB")
        W = q * np.repeat(scales.astype(np.float64), BLOCK, axis=0) + 4.0 * A @ B
        value = np.tanh(value @ W) if name == "up" else value @ W
    largest = value.max(axis=1)
    sums = np.log(np.exp(value - largest[:, None]).sum(axis=1)) + largest
    return float(np.mean(sums - value[np.arange(len(value)), LABELS]))


def adapted(kind):
    return ke.add_adapters(quantized(kind), rank=2, alpha=8)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_through_integers_equal_differences(kind):
    engine = ke.Engine.from_onnx(adapted(kind), loss="categorical", trainable="*lora*")
    rng = np.random.default_rng(1)
    matrices = {
        name: rng.normal(0, 0.2, array.shape).astype(np.float32)
        for name, array in engine.parameters.items()
    }
    assert set(matrices) == {f"{name}.lora_{part}" for name in SIDES for part in "AB"}
    engine.set_parameters(matrices)
    result = engine.gradients({"x": X}, LABELS)
    # MatMulNBits rounds activations to 8 bits on some processors, in its forward pass only.
    np.testing.assert_allclose(result.loss, loss(kind, matrices), rtol=1e-5)
    for name, gradient in result.gradients.items():
        direction, step = rng.normal(size=gradient.shape), 1e-5
        ahead, behind = (
            loss(kind, {**matrices, name: matrices[name] + sign * step * direction})
            for sign in (1, -1)
        )
        slope = (ahead - behind) / (2 * step)
        # float32 against float64: relative to the largest possible slope.
        scale = np.linalg.norm(gradient) * np.linalg.norm(direction)
        assert abs(float((gradient * direction).sum()) - slope) < 1e-5 * scale


@pytest.mark.parametrize("optimizer", ["kfac", "muon", "adamw"])
@pytest.mark.parametrize("kind", KINDS)
def test_optimizers_train_adapters_alone_in_python_and_in_files(kind, optimizer, tmp_path):
    model = adapted(kind)
    options = {"learning_rate": 0.03} if optimizer == "adamw" else {}
    engine = ke.Engine.from_onnx(model, loss="categorical", trainable="*lora*")
    before = engine.loss({"x": X}, LABELS)
    ke.fit(engine, (X, LABELS), optimizer=optimizer, steps=20, batch_size=96, **options)
    assert engine.loss({"x": X}, LABELS) < 0.8 * before
    files = ke.export_training(
        model, loss="categorical", optimizer=optimizer, trainable="*lora*", path=tmp_path, **options
    )
    run = files.run((X, LABELS), steps=20, batch_size=96)
    assert run.losses[-1] < 0.8 * run.losses[0]
    step = onnx.load(tmp_path / "training.onnx")
    fused = [node.op_type for node in step.graph.node if node.domain == "com.microsoft"]
    assert fused == ([] if kind == "dequantized" else ["MatMulNBits"] * 2)
    frozen = {entry.name for entry in model.graph.initializer if "lora" not in entry.name}
    assert not [name for name in run.state if any(entry in name for entry in frozen)]
    files.export(run.state, tmp_path / "trained.onnx")
    ke.save_adapter(tmp_path / "trained.onnx", tmp_path / "a.onnx_adapter")
    loaded = ke.load_adapter(model, tmp_path / "a.onnx_adapter")
    arrays = {e.name: numpy_helper.to_array(e) for e in loaded.graph.initializer}
    for name in engine.parameters:
        np.testing.assert_array_equal(arrays[name], run.state[name])


def test_adapters_of_one_shape_take_the_steps_of_the_optimizer(tmp_path):
    model = ke.add_adapters(mlp((12, 12, 12, 12, 3)), rank=2, layers=["*0*", "*1*", "*2*"])
    draw = lambda rng, n: rng.integers(0, 3, n)  # noqa: E731 (one line)
    found = differences(model, "kfac", tmp_path / "files", draw, steps=12, trainable="*lora*")
    assert found[0] < 1e-5
    assert found[-1] < 1e-3


def test_adapters_of_one_shape_share_the_arrays_of_the_optimizer(tmp_path):
    def arrays(layers):
        model = ke.add_adapters(mlp((*[12] * (layers + 1), 3)), rank=2)
        files = ke.export_training(model, trainable="*lora*", path=tmp_path / str(layers))
        return [
            name for name in files.description.state if name.startswith(("momentum/", "slope/"))
        ]

    assert len(arrays(4)) == len(arrays(2))


@pytest.mark.parametrize("kind", KINDS)
def test_no_session_of_a_training_file_stores_the_weights_as_real_numbers(kind, tmp_path):
    ke.export_training(
        adapted(kind), loss="categorical", optimizer="adamw", trainable="*lora*", path=tmp_path
    )
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    ort.InferenceSession(tmp_path / "training.onnx", options)
    optimized = onnx.load(tmp_path / "optimized.onnx")
    numbers = {
        entry.name: int(np.prod(entry.dims))
        for entry in optimized.graph.initializer
        if entry.data_type == onnx.TensorProto.FLOAT
    }
    assert max(numbers.values()) < min(rows * columns for rows, columns in SIDES.values())


def test_derivatives_are_of_the_product_without_rounded_activations():
    model = quantized("four bits")
    for node in model.graph.node:
        if node.op_type == "MatMulNBits":
            node.attribute.append(helper.make_attribute("accuracy_level", 4))
    gradient = ke.differentiate(model, output="y", wrt="x")
    levels = [
        entry.i
        for node in gradient.graph.node
        for entry in node.attribute
        if entry.name == "accuracy_level"
    ]
    assert levels == [1, 1]
