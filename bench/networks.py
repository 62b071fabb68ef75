"""A ResNet-50 and a BERT-base as exporters write them, with random weights.

Sizes and nodes are those of the published networks; nothing is downloaded.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from kfac_engine._types import Array
from kfac_engine.graph.structure import AttributeValue, Input, Node
from kfac_engine.graph.write import build_model, serialize
from kfac_engine.registry import Registry

OPSET = 18
_FLOAT = 1  # TensorProto.FLOAT
_DRAWS = 1 << 16

# Stages of a ResNet-50: blocks, inner channels, stride of the first block.
_RESNET_STAGES = ((3, 64, 1), (4, 128, 2), (6, 256, 2), (3, 512, 2))

# A BERT-base: layers, features, heads, features of the inner layer, tokens known, positions.
_LAYERS, _WIDTH, _HEADS, _INNER, _TOKENS, _POSITIONS = 12, 768, 12, 3072, 30522, 512


class _Net:
    """A builder that collects nodes and weights."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.constants: dict[str, Array] = {}
        self._draws = np.random.default_rng(0).standard_normal(_DRAWS, np.float32)

    def op(self, op: str, *inputs: str, to: str, **attributes: AttributeValue) -> str:
        self.nodes.append(Node(op, inputs, (to,), attributes, name=f"/{to}"))
        return to

    def cast(self, x: str, *, to: str, code: int) -> str:
        """Append a Cast of ``x`` to an element type of ``TensorProto.DataType``."""
        self.nodes.append(Node("Cast", (x,), (to,), {"to": code}, name=f"/{to}"))
        return to

    def weight(self, name: str, *shape: int, mean: float = 0.0, spread: float = 0.02) -> str:
        # The same random numbers are repeated: a hundred million new ones would take seconds.
        self.constants[name] = np.resize(np.float32(mean) + np.float32(spread) * self._draws, shape)
        return name

    def constant(self, name: str, value: float | Sequence[int]) -> str:
        """Add a constant: a float, or integers."""
        self.constants[name] = np.asarray(value, np.float32 if type(value) is float else np.int64)
        return name

    def dense(self, name: str, x: str, d_in: int, d_out: int) -> str:
        """Append ``x @ weight + bias`` in the form of transformers."""
        weight = self.weight(f"{name}.weight", d_in, d_out)
        product = self.op("MatMul", x, weight, to=f"{name}/product")
        return self.op("Add", self.weight(f"{name}.bias", d_out), product, to=name)

    def model(self, inputs: Sequence[Input], output: Input) -> bytes:
        return serialize(build_model(self.nodes, inputs, [output], self.constants, OPSET))


def resnet50() -> bytes:
    """Return a ResNet-50 with normalizations in inference form: 25.6 million parameters."""
    net = _Net()
    x = _normalized(net, "conv1", "input", 3, 64, 7, 2)
    x = net.op("MaxPool", x, to="pool", kernel_shape=(3, 3), strides=(2, 2), pads=(1, 1, 1, 1))
    channels = 64
    for stage, (blocks, inner, first_stride) in enumerate(_RESNET_STAGES, 1):
        for block in range(blocks):
            name, stride = f"layer{stage}.{block}", first_stride if block == 0 else 1
            y = _normalized(net, f"{name}.conv1", x, channels, inner, 1, 1)
            y = _normalized(net, f"{name}.conv2", y, inner, inner, 3, stride)
            y = _normalized(net, f"{name}.conv3", y, inner, 4 * inner, 1, 1, relu=False)
            if block == 0:
                x = _normalized(net, f"{name}.down", x, channels, 4 * inner, 1, stride, relu=False)
            channels = 4 * inner
            x = net.op("Relu", net.op("Add", y, x, to=f"{name}/sum"), to=f"{name}/out")
    x = net.op("Flatten", net.op("GlobalAveragePool", x, to="mean"), to="flat", axis=1)
    weight, bias = net.weight("fc.weight", 1000, channels), net.weight("fc.bias", 1000)
    net.op("Gemm", x, weight, bias, to="output", transB=1)
    f32 = np.dtype(np.float32)
    return net.model(
        [Input("input", f32, ("batch", 3, 224, 224))], Input("output", f32, ("batch", 1000))
    )


def _normalized(  # noqa: PLR0913 (a convolution has that many sizes)
    net: _Net,
    name: str,
    x: str,
    c_in: int,
    c_out: int,
    kernel: int,
    stride: int,
    *,
    relu: bool = True,
) -> str:
    weight = net.weight(f"{name}.weight", c_out, c_in, kernel, kernel)
    attributes = {
        "kernel_shape": (kernel,) * 2,
        "strides": (stride,) * 2,
        "pads": (kernel // 2,) * 4,
    }
    x = net.op("Conv", x, weight, to=f"{name}/conv", **attributes)
    statistics = (
        net.weight(f"{name}.bn.weight", c_out, mean=1.0),
        net.weight(f"{name}.bn.bias", c_out),
        net.weight(f"{name}.bn.running_mean", c_out),
        net.weight(f"{name}.bn.running_var", c_out, mean=1.0),
    )
    x = net.op("BatchNormalization", x, *statistics, to=f"{name}/norm", epsilon=1e-5)
    return net.op("Relu", x, to=f"{name}/relu") if relu else x


def bert_base() -> bytes:
    """Return a BERT-base classifier with sizes computed at run time: 109 million parameters."""
    net = _Net()
    sizes = net.op("Shape", "ids", to="sizes")
    one, two = net.constant("one", [1]), net.constant("two", [2])
    length = net.op("Slice", sizes, one, two, to="length")
    positions = net.op(
        "Slice", net.constant("all_positions", range(_POSITIONS)), net.constant("zero", [0]),
        length, to="positions",
    )  # fmt: skip
    words = net.op("Gather", net.weight("words", _TOKENS, _WIDTH), "ids", to="words/rows")
    places = net.op("Gather", net.weight("places", _POSITIONS, _WIDTH), positions, to="places/rows")
    x = net.op("Add", words, places, to="embedded")
    x = _layer_norm(net, "embeddings.norm", x)
    mask = net.op("Unsqueeze", "mask", net.constant("axes", [1, 2]), to="mask/wide")
    mask = net.cast(mask, to="mask/float", code=_FLOAT)
    mask = net.op("Sub", net.constant("unit", 1.0), mask, to="mask/off")
    mask = net.op("Mul", mask, net.constant("lowest", float(np.finfo(np.float32).min)), to="barred")
    net.constant("scale", 8.0)
    net.constant("heads", [0, 0, _HEADS, _WIDTH // _HEADS])
    net.constant("joined", [0, 0, _WIDTH])
    for layer in range(_LAYERS):
        x = _encoder(net, f"layer.{layer}", x, mask)
    first = net.op("Gather", x, net.constant("first", 0), to="first/token", axis=1)
    weight, bias = net.weight("pooler.weight", _WIDTH, _WIDTH), net.weight("pooler.bias", _WIDTH)
    x = net.op("Tanh", net.op("Gemm", first, weight, bias, to="pooler", transB=1), to="pooled")
    weight, bias = net.weight("head.weight", 2, _WIDTH), net.weight("head.bias", 2)
    net.op("Gemm", x, weight, bias, to="output", transB=1)
    i64, f32 = np.dtype(np.int64), np.dtype(np.float32)
    inputs = [Input(name, i64, ("batch", "length")) for name in ("ids", "mask")]
    return net.model(inputs, Input("output", f32, ("batch", 2)))


def _encoder(net: _Net, name: str, x: str, mask: str) -> str:
    q, k, v = (
        _heads(net, f"{name}.{part}", x, part == "key") for part in ("query", "key", "value")
    )
    scores = net.op("MatMul", q, k, to=f"{name}/products")
    scores = net.op("Div", scores, "scale", to=f"{name}/scaled")
    scores = net.op("Add", scores, mask, to=f"{name}/masked")
    seen = net.op(
        "MatMul", net.op("Softmax", scores, to=f"{name}/p", axis=-1), v, to=f"{name}/seen"
    )
    seen = net.op("Transpose", seen, to=f"{name}/back", perm=(0, 2, 1, 3))
    seen = net.op("Reshape", seen, "joined", to=f"{name}/joined")
    y = net.dense(f"{name}.attention", seen, _WIDTH, _WIDTH)
    x = _layer_norm(net, f"{name}.norm1", net.op("Add", y, x, to=f"{name}/sum1"))
    y = _gelu(net, f"{name}/gelu", net.dense(f"{name}.inner", x, _WIDTH, _INNER))
    y = net.dense(f"{name}.outer", y, _INNER, _WIDTH)
    return _layer_norm(net, f"{name}.norm2", net.op("Add", y, x, to=f"{name}/sum2"))


def _heads(net: _Net, name: str, x: str, transposed: bool) -> str:
    split = net.op("Reshape", net.dense(name, x, _WIDTH, _WIDTH), "heads", to=f"{name}/heads")
    return net.op(
        "Transpose", split, to=f"{name}/t", perm=(0, 2, 3, 1) if transposed else (0, 2, 1, 3)
    )


def _layer_norm(net: _Net, name: str, x: str) -> str:
    scale = net.weight(f"{name}.weight", _WIDTH, mean=1.0)
    shift = net.weight(f"{name}.bias", _WIDTH)
    return net.op("LayerNormalization", x, scale, shift, to=name, axis=-1, epsilon=1e-12)


def _gelu(net: _Net, name: str, x: str) -> str:
    erf = net.op(
        "Erf", net.op("Div", x, net.constant("root", 2.0**0.5), to=f"{name}/x"), to=f"{name}/erf"
    )
    gate = net.op("Add", erf, "unit", to=f"{name}/gate")
    twice = net.op("Mul", x, gate, to=f"{name}/twice")
    return net.op("Mul", twice, net.constant("half", 0.5), to=name)


NETWORKS: Mapping[str, Callable[[], bytes]] = Registry(
    "network", {"ResNet-50": resnet50, "BERT-base": bert_base}
)
