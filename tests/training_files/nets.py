"""Small networks with a layer of each kind, for training files; three classes."""

from collections.abc import Callable

import numpy as np
import onnx

from tests.models import VOCABULARY, Net, random_inputs

CLASSES, ROWS = 3, 12


def _tail(net: Net, x: str, width: int) -> None:
    net.dense("head", x, width, CLASSES)
    net.op("Identity", "head", to="output")


def _images(net: Net, x: str, channels: int) -> onnx.ModelProto:
    """A network on images of one or more spatial axes, whose mean over pixels is classified."""
    net.op("Tanh", x, to="act")
    net.op("GlobalAveragePool", "act", to="pooled")
    net.op("Flatten", "pooled", to="flat", axis=1)
    _tail(net, "flat", channels)
    return net


def dense() -> tuple[Net, list[int]]:
    net = Net()
    net.dense("fc", "input", 5, 6)
    net.op("Tanh", "fc", to="act")
    _tail(net, "act", 6)
    return net, [5]


def tokens() -> tuple[Net, list[int]]:
    """A dense layer on each position, whose weight is the second operand of MatMul."""
    net = Net()
    net.weight("fc.weight", 4, 6)
    net.weight("fc.bias", 6)
    net.op("MatMul", "input", "fc.weight", to="product")
    net.op("Add", "product", "fc.bias", to="fc")
    net.op("Tanh", "fc", to="act")
    net.weight("head.weight", 6, CLASSES)
    net.op("MatMul", "act", "head.weight", to="output")
    return net, [5, 4]


def _convolution(sides: int, groups: int = 1, **attributes: object) -> tuple[Net, list[int]]:
    net = Net()
    net.weight("conv.weight", 4, 4 // groups, *[3] * sides, spread=0.3)
    net.weight("conv.bias", 4)
    pads = [1] * (2 * sides)
    options = {"kernel_shape": [3] * sides, "pads": pads, "group": groups, **attributes}
    net.op("Conv", "input", "conv.weight", "conv.bias", to="conv", **options)
    return _images(net, "conv", 4), [4, *[5] * sides]


def transposed() -> tuple[Net, list[int]]:
    net = Net()
    net.weight("up.weight", 4, 3, 3, 3, spread=0.3)
    net.weight("up.bias", 3)
    net.op("ConvTranspose", "input", "up.weight", "up.bias", to="up", strides=[2, 2])
    return _images(net, "up", 3), [4, 4, 4]


def embedding() -> tuple[Net, list[int]]:
    net = Net()
    net.weight("table", VOCABULARY, 4)
    net.op("Gather", "table", "input", to="rows", axis=0)
    net.weight("fc.weight", 4, 5)
    net.op("MatMul", "rows", "fc.weight", to="fc")
    net.op("Tanh", "fc", to="act")
    net.op("ReduceMean", "act", net.constant("axes", np.array([1])), to="mean", keepdims=0)
    _tail(net, "mean", 5)
    return net, [6]


def recurrent(op: str = "GRU", gates: int = 3) -> tuple[Net, list[int]]:
    """A recurrence over the second axis, after a Transpose to the order of ONNX."""
    net = Net()
    net.op("Transpose", "input", to="by_time", perm=[1, 0, 2])
    net.weight("cell.W", 1, gates * 4, 3)
    net.weight("cell.R", 1, gates * 4, 4)
    net.weight("cell.B", 1, 2 * gates * 4)
    operands = ["by_time", "cell.W", "cell.R", "cell.B"]
    net.op(op, *operands, to="", further=["last"], hidden_size=4)
    net.op("Squeeze", "last", net.constant("first", np.array([0])), to="state")
    _tail(net, "state", 4)
    return net, [5, 3]


def attention() -> tuple[Net, list[int]]:
    """Queries, keys and values of one product, a residual and a layer normalization."""
    net = Net()
    net.weight("ln.scale", 4, mean=1.0)
    net.weight("ln.bias", 4)
    net.op("LayerNormalization", "input", "ln.scale", "ln.bias", to="normal")
    net.weight("qkv.weight", 4, 12)
    net.op("MatMul", "normal", "qkv.weight", to="qkv")
    net.op("Split", "qkv", to="q", further=["k", "v"], axis=2, num_outputs=3)
    net.op("Transpose", "k", to="keys", perm=[0, 2, 1])
    net.op("MatMul", "q", "keys", to="scores")
    net.op("Softmax", "scores", to="shares", axis=-1)
    net.op("MatMul", "shares", "v", to="mixed")
    net.op("Add", "input", "mixed", to="sum")
    net.op("ReduceMean", "sum", net.constant("axes", np.array([1])), to="mean", keepdims=0)
    _tail(net, "mean", 4)
    return net, [5, 4]


def batch_normalization() -> tuple[Net, list[int]]:
    net = Net()
    # A bias before the normalization would have no gradient but rounding.
    net.weight("conv.weight", 4, 2, 3, 3, spread=0.3)
    net.op("Conv", "input", "conv.weight", to="conv", kernel_shape=[3, 3], pads=[1] * 4)
    net.weight("bn.scale", 4, mean=1.0)
    net.weight("bn.bias", 4)
    net.constant("bn.mean", np.zeros(4, np.float32))
    net.constant("bn.var", np.ones(4, np.float32))
    operands = ["conv", "bn.scale", "bn.bias", "bn.mean", "bn.var"]
    further = ["bn.new mean", "bn.new var"]
    net.op("BatchNormalization", *operands, to="bn", further=further, training_mode=1)
    return _images(net, "bn", 4), [2, 5, 5]


def experts() -> tuple[Net, list[int]]:
    """Dense layers with separate weights for three slots, on two positions."""
    net = Net()
    net.weight("experts.weight", 3, 4, 5)
    net.weight("experts.bias", 3, 1, 5)
    net.op("MatMul", "input", "experts.weight", to="product")
    net.op("Add", "product", "experts.bias", to="experts")
    net.op("Tanh", "experts", to="act")
    net.op("ReduceMean", "act", net.constant("axes", np.array([2])), to="slots", keepdims=0)
    net.op("Flatten", "slots", to="flat", axis=1)
    _tail(net, "flat", 15)
    return net, [3, 2, 4]


def slots_first() -> tuple[Net, list[int]]:
    """A stack of dense layers without bias, whose slots come before the examples."""
    net = Net()
    net.weight("experts.weight", 3, 4, 5)
    net.op("Transpose", "input", to="by_slot", perm=[1, 0, 2])
    net.op("MatMul", "by_slot", "experts.weight", to="product")
    net.op("Tanh", "product", to="act")
    net.op("Transpose", "act", to="by_example", perm=[1, 0, 2])
    net.op("Flatten", "by_example", to="flat", axis=1)
    _tail(net, "flat", 15)
    return net, [3, 4]


def wide_and_deep() -> tuple[Net, list[int]]:
    """The sum of a layer and of a network with a hidden layer, in another unit."""
    net = Net()
    net.dense("wide", "input", 5, CLASSES)
    net.dense("fc", "input", 5, 6)
    net.op("Tanh", "fc", to="act")
    net.dense("deep", "act", 6, CLASSES)
    net.op("Add", "wide", "deep", to="sum")
    net.op("Mul", "sum", net.constant("unit", np.array([2.0, 3.0, 4.0], "float32")), to="output")
    return net, [5]


def tied() -> tuple[Net, list[int]]:
    """One weight that two layers read."""
    net = Net()
    net.weight("fc.weight", 5, 5)
    net.op("MatMul", "input", "fc.weight", to="first")
    net.op("Tanh", "first", to="act")
    net.op("MatMul", "act", "fc.weight", to="second")
    net.op("Tanh", "second", to="again")
    _tail(net, "again", 5)
    return net, [5]


NETS: dict[str, Callable[[], tuple[Net, list[int]]]] = {
    "dense": dense,
    "tokens": tokens,
    "conv1d": lambda: _convolution(1),
    "conv2d": lambda: _convolution(2),
    "conv3d": lambda: _convolution(3),
    "strided": lambda: _convolution(2, strides=[2, 2]),
    "grouped": lambda: _convolution(2, groups=2),
    "depthwise": lambda: _convolution(2, groups=4),
    "transposed": transposed,
    "embedding": embedding,
    "gru": recurrent,
    "lstm": lambda: recurrent("LSTM", 4),
    "attention": attention,
    "batch normalization": batch_normalization,
    "experts": experts,
    "slots first": slots_first,
    "tied": tied,
    "wide and deep": wide_and_deep,
}


def network(name: str) -> onnx.ModelProto:
    """The model of a row of ``NETS``."""
    net, shape = NETS[name]()
    output = ["batch", 5, CLASSES] if name == "tokens" else ["batch", CLASSES]
    ids = "int64" if name == "embedding" else None
    return net.model({"input": ["batch", *shape]}, {"output": output}, ids)


def data(model, seed=0, n=ROWS):
    """Random inputs of a model, and classes."""
    return random_inputs(model, n, seed), np.random.default_rng(seed).integers(0, CLASSES, n)


def names(path):
    """The names of the inputs and outputs of a file."""
    graph = onnx.load(path).graph
    return [e.name for e in graph.input], [e.name for e in graph.output]


def updated(state, results):
    """What a step changes of a state."""
    return {n: results[f"new {n}"] for n in state if results[f"new {n}"].size}


def unchanged(results, state):
    return all(np.array_equal(array, state[n]) for n, array in updated(state, results).items())
