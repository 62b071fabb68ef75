"""Small ONNX models made in code, for all tests.

Every function returns a ``ModelProto`` with operator set 18, a dynamic batch axis ``"batch"``,
random weights of a fixed seed, data input ``"input"`` and result ``"output"`` unless it says
otherwise. Values carry the name of the layer that makes them, weights that name and ``.weight`` or
``.bias``.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import onnx
import onnx.parser
from onnx import helper, numpy_helper

OPSET = 18
IR_VERSION = 10
VOCABULARY = 7  # ids that the embedding model takes

Spelling = Literal["gemm", "gemm_transb", "matmul_add", "add_matmul", "matmul"]
SPELLINGS: tuple[Spelling, ...] = ("gemm", "gemm_transb", "matmul_add", "add_matmul", "matmul")


class Net:
    """Collects nodes and weights of one model.

    Args:
        dtype: Element type of weights and float inputs.
        seed: Of the weights.
    """

    def __init__(self, dtype: str = "float32", seed: int = 0) -> None:
        self.dtype = np.dtype(dtype)
        self._rng = np.random.default_rng(seed)
        self._nodes: list[onnx.NodeProto] = []
        self._constants: dict[str, np.ndarray] = {}

    def weight(self, name: str, *shape: int, mean: float = 0.0, spread: float = 0.5) -> str:
        """A normally distributed weight."""
        values = mean + spread * self._rng.standard_normal(shape)
        return self.constant(name, values.astype(self.dtype))

    def positive(self, name: str, *shape: int) -> str:
        """A weight in [0.5, 1.5): a variance, say."""
        return self.constant(name, (0.5 + self._rng.random(shape)).astype(self.dtype))

    def constant(self, name: str, values: np.ndarray) -> str:
        """An initializer."""
        self._constants[name] = values
        return name

    def op(
        self, op: str, *inputs: str, to: str, further: Sequence[str] = (), **attributes: Any
    ) -> str:
        """A node with a result called ``to``, and ``further`` results."""
        results = [to, *further]
        self._nodes.append(helper.make_node(op, inputs, results, name=f"node_{to}", **attributes))
        return to

    def dense(self, name: str, x: str, d_in: int, d_out: int) -> str:
        """A dense layer as PyTorch exports it: Gemm with a weight ``(d_out, d_in)``."""
        weight = self.weight(f"{name}.weight", d_out, d_in)
        bias = self.weight(f"{name}.bias", d_out)
        return self.op("Gemm", x, weight, bias, to=name, transB=1)

    def conv(self, name: str, x: str, c_in: int, c_out: int, kernel: int, **attributes: Any) -> str:
        """A convolution with bias; weight ``(c_out, c_in, kernel, kernel)``."""
        weight = self.weight(f"{name}.weight", c_out, c_in, kernel, kernel, spread=0.3)
        bias = self.weight(f"{name}.bias", c_out)
        return self.op(
            "Conv", x, weight, bias, to=name, kernel_shape=[kernel, kernel], **attributes
        )

    def model(
        self,
        inputs: Mapping[str, Sequence[int | str]],
        outputs: Mapping[str, Sequence[int | str]],
        input_dtype: str | None = None,
    ) -> onnx.ModelProto:
        """What was collected, checked."""
        own = helper.np_dtype_to_tensor_dtype(self.dtype)
        fed = helper.np_dtype_to_tensor_dtype(np.dtype(input_dtype or self.dtype))
        graph = helper.make_graph(
            self._nodes,
            "test_model",
            [helper.make_tensor_value_info(name, fed, shape) for name, shape in inputs.items()],
            [helper.make_tensor_value_info(name, own, shape) for name, shape in outputs.items()],
            [numpy_helper.from_array(values, name) for name, values in self._constants.items()],
        )
        domains = sorted({node.domain for node in self._nodes} - {""})
        opset = [helper.make_opsetid("", OPSET), *(helper.make_opsetid(d, 1) for d in domains)]
        model = helper.make_model(graph, opset_imports=opset, ir_version=IR_VERSION)
        onnx.checker.check_model(model, full_check=True)
        return model


def written(sides: str, constants: str, nodes: str, fed: str = "float") -> onnx.ModelProto:
    """A model whose nodes are text, as onnx's parser reads it.

    Args:
        sides: Of the input; behind an arrow, those of the output, if they are others.
        constants: ``w(3,4)`` is a weight, ``axis=1,2`` a vector of numbers and ``one:1`` a number.
            They are integers unless they have a point.
        nodes: From ``input`` to ``output``.
        fed: Element type of the input. Those of weights and output are floats unless this is
            ``"double"``.
    """
    number = "double" if fed == "double" else "float"
    before, _, after = sides.partition(" -> ")
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": {OPSET}]>
        test_model ({fed}[{before}] input) => ({number}[{after or before}] output) {{ {nodes} }}"""
    )
    rng = np.random.default_rng(0)
    for name, form, text in re.findall(r"(\w+)([(=:])([-.\d,]+)", constants):
        numbers = [float(n) if "." in n else int(n) for n in text.split(",")]
        weight = "float32" if number == "float" else "float64"
        kind = weight if "." in text or form == "(" else "int64"
        values = 0.5 * rng.standard_normal(numbers) if form == "(" else numbers
        array = np.array(values[0] if form == ":" else values, kind)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model


def with_constants(model: onnx.ModelProto, arrays: Mapping[str, Any]) -> onnx.ModelProto:
    """The model with other values of some initializers."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    for entry in result.graph.initializer:
        if entry.name in arrays:
            entry.CopyFrom(numpy_helper.from_array(arrays[entry.name], entry.name))
    return result


def parsed(
    graph: str, constants: Mapping[str, Any], opsets: str = f'"": {OPSET}'
) -> onnx.ModelProto:
    """The graph of a text, as onnx's parser reads it, with more constants."""
    model = onnx.parser.parse_model(f"<ir_version: {IR_VERSION}, opset_import: [{opsets}]> {graph}")
    for name, array in constants.items():
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
    return model


def network(
    entry: str, weights: str, nodes: str, result: str = "[batch, 3] output"
) -> onnx.ModelProto:
    """A model of text, whose numbers have the type of the input, or else are in float64.

    Args:
        entry: The input, such as ``float[batch, 3] input``.
        weights: Random weights such as ``w(3,4) b(4)``; ``variance`` is positive.
        nodes: From the input to the output.
        result: The output, without its type.
    """
    number, dtype = ("float", "f4") if entry.startswith("float[") else ("double", "f8")
    rng, arrays = np.random.default_rng(0), {}
    for name, sides in re.findall(r"(\w+)\(([\d,]+)\)", weights):
        array = rng.standard_normal([int(side) for side in sides.split(",")]).astype(dtype)
        arrays[name] = abs(array) if name == "variance" else array
    return parsed(f"net ({entry}) => ({number}{result}) {{ {nodes} }}", arrays, '"": 21')


def one_operator(
    op: str,
    inputs: Mapping[str, str],
    constants: Mapping[str, Any] = MappingProxyType({}),
    results: Sequence[str] = ("y",),
    opsets: str = f'"": {OPSET}',
    **attributes: Any,
) -> onnx.ModelProto:
    """A model of one node, called ``node``, with the output ``y``.

    Args:
        op: Its operator.
        inputs: Types of the data inputs by name, such as ``"float[n,3]"``.
        constants: Its other operands.
        results: Names of its results.
        opsets: Versions by domain, as onnx's parser reads them.
        attributes: Of the node, and its ``domain``.
    """
    sides = ", ".join(f"{form} {name}" for name, form in inputs.items())
    model = parsed(f"{op} ({sides}) => (float[] y) {{}}", constants, opsets)
    node = helper.make_node(op, [*inputs, *constants], results, name="node", **attributes)
    model.graph.node.append(node)
    return model


def random_inputs(model: onnx.ModelProto, batch: int = 3, seed: int = 0) -> dict[str, np.ndarray]:
    """Normal numbers, or ids below ``VOCABULARY``, for every data input of ``model``."""
    rng = np.random.default_rng(seed)
    constants = {entry.name for entry in model.graph.initializer}
    feeds = {}
    for entry in model.graph.input:
        if entry.name in constants:
            continue
        form = entry.type.tensor_type
        shape = [side.dim_value or batch for side in form.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(form.elem_type)
        normal, ids = rng.standard_normal(shape), rng.integers(0, VOCABULARY, shape)
        feeds[entry.name] = (normal if dtype.kind == "f" else ids).astype(dtype)
    return feeds


def linear(
    d_in: int = 4,
    d_out: int = 3,
    bias: bool = True,
    spelling: Spelling = "gemm",
    dtype: str = "float32",
) -> onnx.ModelProto:
    """One dense layer ``fc`` in each way exporters write it (``"matmul"`` has no bias)."""
    net = Net(dtype)
    transposed = spelling == "gemm_transb"
    w = net.weight("fc.weight", *((d_out, d_in) if transposed else (d_in, d_out)))
    b = [net.weight("fc.bias", d_out)] if bias and spelling != "matmul" else []
    if spelling.startswith("gemm"):
        net.op("Gemm", "input", w, *b, to="output", transB=int(transposed))
    elif not b:
        net.op("MatMul", "input", w, to="output")
    else:
        product = net.op("MatMul", "input", w, to="product")
        operands = (product, *b) if spelling == "matmul_add" else (*b, product)
        net.op("Add", *operands, to="output")
    return net.model({"input": ["batch", d_in]}, {"output": ["batch", d_out]})


def mlp(
    widths: Sequence[int] = (6, 5, 4, 3), activation: str = "Tanh", dtype: str = "float32"
) -> onnx.ModelProto:
    """Dense layers ``fc0``, ``fc1``, … with ``activation`` between them; the last is ``output``."""
    net, x = Net(dtype), "input"
    last = len(widths) - 2
    for index, (d_in, d_out) in enumerate(pairwise(widths)):
        w = net.weight(f"fc{index}.weight", d_out, d_in)
        b = net.weight(f"fc{index}.bias", d_out)
        x = net.op("Gemm", x, w, b, to="output" if index == last else f"fc{index}", transB=1)
        if index != last:
            x = net.op(activation, x, to=f"act{index}")
    return net.model({"input": ["batch", widths[0]]}, {"output": ["batch", widths[-1]]})


def token_mlp(
    tokens: int = 4, widths: Sequence[int] = (5, 6, 3), dtype: str = "float32"
) -> onnx.ModelProto:
    """Two dense layers on every token of ``(batch, tokens, d)``: MatMul with Add."""
    net, x = Net(dtype), "input"
    last = len(widths) - 2
    for index, (d_in, d_out) in enumerate(pairwise(widths)):
        if index > 0:
            x = net.op("Relu", x, to=f"act{index}")
        w = net.weight(f"fc{index}.weight", d_in, d_out)
        b = net.weight(f"fc{index}.bias", d_out)
        product = net.op("MatMul", x, w, to=f"fc{index}.product")
        x = net.op("Add", product, b, to="output" if index == last else f"fc{index}")
    return net.model(
        {"input": ["batch", tokens, widths[0]]}, {"output": ["batch", tokens, widths[-1]]}
    )


def cnn(
    channels: int = 2, side: int = 8, classes: int = 3, dtype: str = "float32"
) -> onnx.ModelProto:
    """Conv (padded), Relu, MaxPool, Conv (stride 2), Relu, GlobalAveragePool, Flatten, Gemm."""
    net = Net(dtype)
    x = net.conv("conv0", "input", channels, 4, 3, pads=[1, 1, 1, 1])
    x = net.op("Relu", x, to="act0")
    x = net.op("MaxPool", x, to="pool0", kernel_shape=[2, 2], strides=[2, 2])
    x = net.conv("conv1", x, 4, 5, 3, pads=[1, 1, 1, 1], strides=[2, 2])
    x = net.op("Relu", x, to="act1")
    x = net.op("GlobalAveragePool", x, to="pool1")
    x = net.op("Flatten", x, to="flat")
    net.dense("output", x, 5, classes)
    return net.model({"input": ["batch", channels, side, side]}, {"output": ["batch", classes]})


def conv_linear(
    c_in: int = 2,
    c_out: int = 3,
    side: int = 5,
    kernel: int = 3,
    strides: int = 1,
    pads: int = 1,
    bias: bool = True,
    dtype: str = "float32",
) -> onnx.ModelProto:
    """One convolution ``conv`` and Flatten: linear in its weights."""
    net = Net(dtype)
    operands = ["input", net.weight("conv.weight", c_out, c_in, kernel, kernel)]
    operands += [net.weight("conv.bias", c_out)] if bias else []
    net.op("Conv", *operands, to="conv", strides=[strides] * 2, pads=[pads] * 4)
    net.op("Flatten", "conv", to="output")
    features = c_out * ((side + 2 * pads - kernel) // strides + 1) ** 2
    return net.model({"input": ["batch", c_in, side, side]}, {"output": ["batch", features]})


def resnet_block(
    channels: int = 3, side: int = 6, classes: int = 4, dtype: str = "float32"
) -> onnx.ModelProto:
    """Two Conv + BatchNormalization (inference form) around a skip connection, then Gemm."""
    net, x = Net(dtype), "input"
    for index in range(2):
        weight = net.weight(f"conv{index}.weight", channels, channels, 3, 3, spread=0.3)
        x = net.op("Conv", x, weight, to=f"conv{index}", pads=[1, 1, 1, 1])
        statistics = (
            net.positive(f"bn{index}.weight", channels),
            net.weight(f"bn{index}.bias", channels),
            net.weight(f"bn{index}.running_mean", channels),
            net.positive(f"bn{index}.running_var", channels),
        )
        x = net.op("BatchNormalization", x, *statistics, to=f"bn{index}", epsilon=1e-5)
        if index == 0:
            x = net.op("Relu", x, to="act0")
    x = net.op("Add", x, "input", to="sum")
    x = net.op("Relu", x, to="act1")
    x = net.op("GlobalAveragePool", x, to="pool")
    x = net.op("Flatten", x, to="flat")
    net.dense("output", x, channels, classes)
    return net.model({"input": ["batch", channels, side, side]}, {"output": ["batch", classes]})


def layer_norm(d: int = 5, classes: int = 3, dtype: str = "float32") -> onnx.ModelProto:
    """Gemm, LayerNormalization, Gelu (spelled with Erf), Gemm."""
    net = Net(dtype)
    x = net.dense("fc0", "input", d, d)
    scale, shift = net.positive("norm.weight", d), net.weight("norm.bias", d)
    x = net.op("LayerNormalization", x, scale, shift, to="norm", axis=-1, epsilon=1e-5)
    root = net.constant("sqrt_two", np.asarray(np.sqrt(2.0), net.dtype))
    one = net.constant("one", np.asarray(1.0, net.dtype))
    half = net.constant("half", np.asarray(0.5, net.dtype))
    erf = net.op("Erf", net.op("Div", x, root, to="gelu.scaled"), to="gelu.erf")
    gate = net.op("Add", erf, one, to="gelu.gate")
    x = net.op("Mul", net.op("Mul", x, gate, to="gelu.twice"), half, to="gelu")
    net.dense("output", x, d, classes)
    return net.model({"input": ["batch", d]}, {"output": ["batch", classes]})


def tied(d: int = 4, dtype: str = "float32") -> onnx.ModelProto:
    """``output = tanh(input · W) · W``: one weight ``shared.weight`` used twice."""
    net = Net(dtype)
    w = net.weight("shared.weight", d, d)
    x = net.op("Tanh", net.op("MatMul", "input", w, to="first"), to="act")
    net.op("MatMul", x, w, to="output")
    return net.model({"input": ["batch", d]}, {"output": ["batch", d]})


def embedding(
    d: int = 4, length: int = 3, classes: int = 3, dtype: str = "float32"
) -> onnx.ModelProto:
    """Gather from ``table``, the mean over positions, Gemm; ``input`` is int64 ids."""
    net = Net(dtype)
    x = net.op("Gather", net.weight("table", VOCABULARY, d), "input", to="rows")
    axes = net.constant("axes", np.asarray([1], np.int64))
    x = net.op("ReduceMean", x, axes, to="mean", keepdims=0)
    net.dense("output", x, d, classes)
    return net.model({"input": ["batch", length]}, {"output": ["batch", classes]}, "int64")


def tied_table(d: int = 4, length: int = 3, dtype: str = "float32") -> onnx.ModelProto:
    """Gather from ``table``, ``x = tanh(rows · W)``, logits ``x · tableᵀ``; ``input`` has ids."""
    net = Net(dtype)
    table = net.weight("table", VOCABULARY, d)
    rows = net.op("Gather", table, "input", to="rows")
    x = net.op("Tanh", net.op("MatMul", rows, net.weight("W", d, d), to="product"), to="x")
    net.op("MatMul", x, net.op("Transpose", table, to="columns", perm=[1, 0]), to="output")
    return net.model(
        {"input": ["batch", length]}, {"output": ["batch", length, VOCABULARY]}, "int64"
    )


def two_outputs(d: int = 5, dtype: str = "float32") -> onnx.ModelProto:
    """A shared trunk with heads ``logits`` (3) and ``mean`` (2)."""
    net = Net(dtype)
    x = net.op("Tanh", net.dense("trunk", "input", d, 4), to="act")
    net.dense("logits", x, 4, 3)
    net.dense("mean", x, 4, 2)
    return net.model({"input": ["batch", d]}, {"logits": ["batch", 3], "mean": ["batch", 2]})


def sigmoid_output(d: int = 4, d_out: int = 2, dtype: str = "float32") -> onnx.ModelProto:
    """Gemm ``logits``, then Sigmoid: probabilities come out."""
    net = Net(dtype)
    net.op("Sigmoid", net.dense("logits", "input", d, d_out), to="output")
    return net.model({"input": ["batch", d]}, {"output": ["batch", d_out]})


def odd_ops(d: int = 3, dtype: str = "float32") -> onnx.ModelProto:
    """Gemm, ``QuantizeLinear`` (an operator without derivative) and back, Gemm."""
    net = Net(dtype)
    x = net.dense("fc0", "input", d, 4)
    scale = net.constant("scale", np.asarray(0.1, np.float32))
    zero = net.constant("zero", np.asarray(3, np.uint8))
    x = net.op("QuantizeLinear", x, scale, zero, to="whole")
    x = net.op("DequantizeLinear", x, scale, zero, to="rounded")
    net.dense("output", x, 4, 2)
    return net.model({"input": ["batch", d]}, {"output": ["batch", 2]})


MODELS: Mapping[str, Callable[..., onnx.ModelProto]] = {
    "mlp": mlp,
    **{f"linear_{spelling}": partial(linear, spelling=spelling) for spelling in SPELLINGS},
    "token_mlp": token_mlp,
    "cnn": cnn,
    "conv_linear": conv_linear,
    "resnet_block": resnet_block,
    "layer_norm": layer_norm,
    "tied": tied,
    "embedding": embedding,
    "tied_table": tied_table,
    "two_outputs": two_outputs,
    "sigmoid_output": sigmoid_output,
    "odd_ops": odd_ops,
}
