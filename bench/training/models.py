"""The models that are trained: dense and convolutional networks and a transformer.

Images have one channel and ``side × side`` pixels: 28 for Fashion-MNIST, 8 for the digits.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from kfac_engine._types import Array
from kfac_engine.bench.networks import OPSET
from kfac_engine.graph.structure import AttributeValue, Input, Node
from kfac_engine.graph.write import build_model, serialize

INPUT, OUTPUT = "x", "y"
F32, I64 = np.dtype(np.float32), np.dtype(np.int64)


@dataclass(frozen=True, slots=True)
class Model:
    """The bytes of a model with input ``x`` and output ``y``, and its initial weights."""

    data: bytes = field(repr=False)
    weights: Mapping[str, Array] = field(repr=False)


# Draws an array of a shape; ``fan_in`` and ``fan_out`` are those of the layer.
Initializer: TypeAlias = Callable[[np.random.Generator, tuple[int, ...], int, int], Array]


def glorot_normal(
    rng: np.random.Generator, shape: tuple[int, ...], fan_in: int, fan_out: int
) -> Array:
    """Return normal numbers of variance ``2 / (fan_in + fan_out)``; Glorot & Bengio 2010."""
    values: Array = (rng.standard_normal(shape) * np.sqrt(2 / (fan_in + fan_out))).astype(
        np.float32
    )
    return values


def he_normal(rng: np.random.Generator, shape: tuple[int, ...], fan_in: int, fan_out: int) -> Array:
    """Return normal numbers of variance ``2 / fan_in``; He et al. 2015."""
    del fan_out
    values: Array = (rng.standard_normal(shape) * np.sqrt(2 / fan_in)).astype(np.float32)
    return values


def uniform(rng: np.random.Generator, shape: tuple[int, ...], fan_in: int, fan_out: int) -> Array:
    """Return uniform numbers in ``±1/√fan_in``, the default of PyTorch's layers."""
    del fan_out
    bound = fan_in**-0.5
    return rng.uniform(-bound, bound, shape).astype(np.float32)


def small_normal(
    rng: np.random.Generator, shape: tuple[int, ...], fan_in: int, fan_out: int
) -> Array:
    """Return normal numbers of deviation 0.02, as language models of transformers have."""
    del fan_in, fan_out
    return (0.02 * rng.standard_normal(shape)).astype(np.float32)


class ModelBuilder:
    """Collects nodes, weights and constants of a model."""

    def __init__(self, seed: int) -> None:
        self.nodes: list[Node] = []
        self.rng = np.random.default_rng(seed)
        self.weights: dict[str, Array] = {}
        self.constants: dict[str, Array] = {}

    def op(self, op: str, *inputs: str, to: str, **attributes: AttributeValue) -> str:
        """Append a node with one output; return the name ``to`` of this output."""
        self.nodes.append(Node(op, inputs, (to,), attributes, name=f"/{to}"))
        return to

    def weight(self, name: str, value: Array) -> str:
        """Add a parameter with its initial value; return its name."""
        self.weights[name] = np.asarray(value, np.float32)
        return name

    def constant(self, name: str, value: Array) -> str:
        """Add a constant that is not trained; return its name."""
        self.constants[name] = value
        return name

    def drawn(self, name: str, shape: tuple[int, ...], scale: float = 1.0) -> str:
        """Add a parameter of normal numbers with a standard deviation; return its name."""
        return self.weight(name, scale * self.rng.standard_normal(shape))

    def gemm(self, name: str, x: str, sizes: tuple[int, int], draw: Initializer, *, to: str) -> str:
        """Append ``x weightᵀ + bias`` with a weight of shape (outputs, inputs) and a zero bias."""
        d_in, d_out = sizes
        weight = self.weight(f"{name}.weight", draw(self.rng, (d_out, d_in), d_in, d_out))
        bias = self.weight(f"{name}.bias", np.zeros(d_out))
        return self.op("Gemm", x, weight, bias, to=to, transB=1)

    def linear(self, name: str, x: str, d_in: int, d_out: int, *, to: str = "") -> str:
        """Append a dense layer with PyTorch's initial weights and bias, for two axes."""
        weight = self.weight(f"{name}.weight", uniform(self.rng, (d_out, d_in), d_in, d_out))
        bias = self.weight(f"{name}.bias", uniform(self.rng, (d_out,), d_in, d_out))
        return self.op("Gemm", x, weight, bias, to=to or name, transB=1)

    def product(
        self,
        name: str,
        x: str,
        d_in: int,
        d_out: int,
        *,
        to: str = "",
        draw: Initializer = uniform,
        bias: bool = True,
    ) -> str:
        """Append a dense layer as PyTorch exports it for three axes: ``x weight + bias``.

        Biases are zero, but for the default initializer, PyTorch's.
        """
        weight = self.weight(f"{name}.weight", draw(self.rng, (d_in, d_out), d_in, d_out))
        if not bias:
            return self.op("MatMul", x, weight, to=to or name)
        drawn = draw(self.rng, (d_out,), d_in, d_out) if draw is uniform else np.zeros(d_out)
        return self.op("Add", self.op("MatMul", x, weight, to=f"{name}/product"),
                       self.weight(f"{name}.bias", drawn), to=to or name)  # fmt: skip

    def conv(  # noqa: PLR0913 (sizes and forms of a layer)
        self,
        name: str,
        x: str,
        channels: tuple[int, int],
        kernel: int,
        stride: int = 1,
        *,
        bias: bool = True,
        pad: int | None = None,
        groups: int = 1,
        to: str = "",
    ) -> str:
        """Append a convolution, initialized as PyTorch's; by default ``kernel // 2`` zeros pad."""
        c_in, c_out = channels
        fan_in = c_in // groups * kernel**2
        shape = (c_out, c_in // groups, kernel, kernel)
        operands = [self.weight(f"{name}.weight", uniform(self.rng, shape, fan_in, c_out))]
        if bias:
            operands.append(self.weight(f"{name}.bias", uniform(self.rng, (c_out,), fan_in, c_out)))
        return self.op(
            "Conv", x, *operands, to=to or name, kernel_shape=(kernel,) * 2, strides=(stride,) * 2,
            pads=(kernel // 2 if pad is None else pad,) * 4, group=groups,
        )  # fmt: skip

    def transposed_conv(self, name: str, x: str, channels: tuple[int, int], stride: int) -> str:
        """Append a transposed convolution that writes ``stride × stride`` pixels for each pixel."""
        c_in, c_out = channels
        fan = c_out * stride**2
        operands = (
            self.weight(f"{name}.weight", uniform(self.rng, (c_in, c_out, stride, stride), fan, 0)),
            self.weight(f"{name}.bias", uniform(self.rng, (c_out,), fan, 0)),
        )
        sizes = (stride,) * 2
        return self.op("ConvTranspose", x, *operands, to=name, kernel_shape=sizes, strides=sizes)

    def batch_norm(self, name: str, x: str, channels: int) -> str:
        """Append a normalization in training form; its running statistics decay by 0.9."""
        operands = (
            self.weight(f"{name}.weight", np.ones(channels)),
            self.weight(f"{name}.bias", np.zeros(channels)),
            self.constant(f"{name}.mean", np.zeros(channels, np.float32)),
            self.constant(f"{name}.variance", np.ones(channels, np.float32)),
        )
        results = name, f"{name}.new_mean", f"{name}.new_variance"
        attributes = {"training_mode": 1, "epsilon": 1e-5, "momentum": 0.9}
        self.nodes.append(
            Node("BatchNormalization", (x, *operands), results, attributes, name=f"/{name}")
        )
        return name

    def layer_norm(self, name: str, x: str, width: int) -> str:
        """Append a normalization of the last axis."""
        scale = self.weight(f"{name}.weight", np.ones(width))
        shift = self.weight(f"{name}.bias", np.zeros(width))
        return self.op("LayerNormalization", x, scale, shift, to=name, axis=-1, epsilon=1e-5)

    def model(
        self, shape: tuple[int | str, ...], result: tuple[int | str, ...], dtype: np.dtype = F32
    ) -> Model:
        """Return the model; the shapes are of an example of the input and of the output."""
        source = Input(INPUT, dtype, ("N", *shape))
        output = Input(OUTPUT, F32, ("N", *result))
        constants = {**self.weights, **self.constants}
        data = serialize(build_model(self.nodes, [source], [output], constants, OPSET))
        return Model(data, self.weights)


CLASSES = 10
# Widths of the encoder of the autoencoders; the decoder mirrors them.
CODES = (400, 200, 100, 30)
# Channels and stride of the residual blocks.
RESNET_BLOCKS = ((16, 1), (32, 2), (64, 2))
# The transformer: symbols, positions, features, layers, heads, features of the inner layers.
SYMBOLS, POSITIONS, WIDTH, LAYERS, HEADS, INNER = 96, 64, 96, 2, 4, 384


def dense(widths: Sequence[int], activations: Sequence[str], seed: int) -> Model:
    """Return dense layers with an operator behind each, or an empty text for none.

    Weights before a ReLU are He's, all others Glorot's normal numbers; biases are zero.
    """
    net, x = ModelBuilder(seed), INPUT
    last = len(widths) - 2
    for i, (sizes, activation) in enumerate(zip(pairwise(widths), activations, strict=True)):
        draw = he_normal if activation == "Relu" else glorot_normal
        x = net.gemm(f"{i}", x, sizes, draw, to=OUTPUT if i == last else f"s{i}")
        if activation:
            x = net.op(activation, x, to=f"a{i}")
    return net.model(tuple(widths[:1]), tuple(widths[-1:]))


def autoencoder(side: int, seed: int) -> Model:
    """Return an autoencoder of flat images with a code of 30 numbers."""
    widths = (side**2, *CODES, *CODES[-2::-1], side**2)
    half = ["Tanh"] * (len(CODES) - 1) + [""]
    return dense(widths, half * 2, seed)


def perceptron(widths: Sequence[int], activation: str, seed: int) -> Model:
    """Return dense layers with an activation between them."""
    return dense(widths, [activation] * (len(widths) - 2) + [""], seed)


def resnet(side: int, seed: int) -> Model:
    """Return a convolution, three residual blocks with normalizations, and a dense layer."""
    net, channels = ModelBuilder(seed), RESNET_BLOCKS[0][0]
    x = net.conv("stem", INPUT, (1, channels), 3, 2, bias=False)
    x = net.op("Relu", net.batch_norm("stem.norm", x, channels), to="stem/relu")
    for i, (width, stride) in enumerate(RESNET_BLOCKS):
        y = net.conv(f"{i}.0", x, (channels, width), 3, stride, bias=False)
        y = net.op("Relu", net.batch_norm(f"{i}.0.norm", y, width), to=f"{i}.0/relu")
        y = net.conv(f"{i}.1", y, (width, width), 3, bias=False)
        y = net.batch_norm(f"{i}.1.norm", y, width)
        if (width, stride) != (channels, 1):
            x = net.conv(f"{i}.short", x, (channels, width), 1, stride, bias=False)
        x, channels = net.op("Relu", net.op("Add", y, x, to=f"{i}/sum"), to=f"{i}/relu"), width
    x = net.op("Flatten", net.op("GlobalAveragePool", x, to="mean"), to="flat", axis=1)
    net.linear("head", x, channels, CLASSES, to=OUTPUT)
    return net.model((1, side, side), (CLASSES,))


def lenet(side: int, seed: int) -> Model:
    """Return two convolutions of 5 × 5 with stride 2 and two dense layers, with tanh."""
    net = ModelBuilder(seed)
    x = net.op("Tanh", net.conv("conv0", INPUT, (1, 8), 5, 2), to="a0")
    x = net.op("Tanh", net.conv("conv1", x, (8, 16), 5, 2), to="a1")
    return _classified(net, x, 16 * (side // 4) ** 2, "Tanh", side)


def cnn(side: int, seed: int) -> Model:
    """Return three convolutions of 3 × 3 and two dense layers, with ReLU."""
    net, x = ModelBuilder(seed), INPUT
    for i, (channels, stride) in enumerate((((1, 16), 2), ((16, 32), 2), ((32, 32), 1))):
        x = net.op("Relu", net.conv(f"conv{i}", x, channels, 3, stride), to=f"a{i}")
    return _classified(net, x, 32 * (side // 4) ** 2, "Relu", side)


def allconv(side: int, seed: int) -> Model:
    """Return three convolutions of 3 × 3 and two of 1 × 1, with ReLU, and the mean of all pixels.

    Source: Springenberg et al. 2015, "Striving for simplicity: The all convolutional net".
    """
    net, x, inputs = ModelBuilder(seed), INPUT, 1
    layers = ((16, 3, 2), (32, 3, 1), (64, 3, 2), (64, 1, 1), (CLASSES, 1, 1))
    for i, (channels, kernel, stride) in enumerate(layers):
        x = net.op("Relu", x, to=f"a{i}") if i else x
        x, inputs = net.conv(f"conv{i}", x, (inputs, channels), kernel, stride), channels
    net.op("Flatten", net.op("GlobalAveragePool", x, to="mean"), to=OUTPUT, axis=1)
    return net.model((1, side, side), (CLASSES,))


def _classified(net: ModelBuilder, x: str, features: int, activation: str, side: int) -> Model:
    """Append two dense layers to images, and return the model."""
    x = net.linear("dense", net.op("Flatten", x, to="flat", axis=1), features, 64)
    net.linear("head", net.op(activation, x, to="dense/a"), 64, CLASSES, to=OUTPUT)
    return net.model((1, side, side), (CLASSES,))


def restorer(side: int, seed: int) -> Model:
    """Return three convolutions from a blurred image to a flat sharp image, with ReLU."""
    net = ModelBuilder(seed)
    x = net.op("Relu", net.conv("conv0", INPUT, (1, 12), 5), to="a0")
    x = net.op("Relu", net.conv("conv1", x, (12, 12), 3), to="a1")
    net.op("Flatten", net.conv("conv2", x, (12, 1), 5), to=OUTPUT, axis=1)
    return net.model((1, side, side), (side**2,))


def scalars(net: ModelBuilder, **values: float) -> None:
    """Add numbers that are not trained, and those of the GELU."""
    for name, value in {"root": 2**0.5, "one": 1.0, "half": 0.5, **values}.items():
        net.constant(name, np.array(value, np.float32))


def transformer(seed: int) -> Model:
    """Return a causal transformer over characters with normalizations before its layers."""
    net = ModelBuilder(seed)
    net.constant("split", np.array([0, 0, HEADS, WIDTH // HEADS]))
    net.constant("joined", np.array([0, 0, WIDTH]))
    net.constant("future", np.triu(np.ones((POSITIONS, POSITIONS), bool), 1))
    scalars(net, scale=(WIDTH // HEADS) ** -0.5, lowest=-1e9)
    x = net.op("Gather", net.drawn("symbols", (SYMBOLS, WIDTH), 0.1), INPUT, to="embedded")
    x = net.op("Add", x, net.drawn("positions", (POSITIONS, WIDTH), 0.02), to="placed")
    for i in range(LAYERS):
        y = _attention(net, f"{i}.attention", net.layer_norm(f"{i}.norm0", x, WIDTH))
        x = net.op("Add", x, y, to=f"{i}/attended")
        y = net.product(f"{i}.up", net.layer_norm(f"{i}.norm1", x, WIDTH), WIDTH, INNER)
        y = net.product(f"{i}.down", gelu(net, f"{i}/gelu", y), INNER, WIDTH)
        x = net.op("Add", x, y, to=f"{i}/sum")
    net.product("head", net.layer_norm("norm", x, WIDTH), WIDTH, SYMBOLS, to=OUTPUT)
    return net.model((POSITIONS,), (POSITIONS, SYMBOLS), I64)


def _attention(net: ModelBuilder, name: str, x: str) -> str:
    parts = {"q": (0, 2, 1, 3), "k": (0, 2, 3, 1), "v": (0, 2, 1, 3)}
    for part, perm in parts.items():
        y = net.product(f"{name}.{part}", x, WIDTH, WIDTH)
        y = net.op("Reshape", y, "split", to=f"{name}/{part}/split")
        net.op("Transpose", y, to=f"{name}/{part}", perm=perm)
    y = attended(net, name, f"{name}/q", f"{name}/k", f"{name}/v", "future", "joined")
    result: str = net.product(f"{name}.out", y, WIDTH, WIDTH)
    return result


def attended(net: ModelBuilder, name: str, q: str, k: str, v: str, unread: str, joined: str) -> str:
    """Append attention of ``(examples, heads, positions, features)``, and join the heads.

    The keys have their last two axes exchanged. The constant ``scale`` of the builder multiplies
    the scores. ``unread`` is true for the keys that a query does not read; empty if it reads all.
    ``joined`` names the shape of the result, ``(examples, positions, features)``.
    """
    scores = net.op("MatMul", q, k, to=f"{name}/products")
    scores = net.op("Mul", scores, "scale", to=f"{name}/scores")
    if unread:
        scores = net.op("Where", unread, "lowest", scores, to=f"{name}/masked")
    shares = net.op("Softmax", scores, to=f"{name}/shares", axis=-1)
    y = net.op("MatMul", shares, v, to=f"{name}/mixed")
    y = net.op("Transpose", y, to=f"{name}/back", perm=(0, 2, 1, 3))
    result: str = net.op("Reshape", y, joined, to=f"{name}/joined")
    return result


def gelu(net: ModelBuilder, name: str, x: str) -> str:
    """Append the GELU of ``scalars``."""
    erf = net.op("Erf", net.op("Div", x, "root", to=f"{name}/x"), to=f"{name}/erf")
    gate = net.op("Add", erf, "one", to=f"{name}/gate")
    twice = net.op("Mul", x, gate, to=f"{name}/twice")
    result: str = net.op("Mul", twice, "half", to=name)
    return result
