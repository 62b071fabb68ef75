"""The models that are trained: dense and convolutional networks and a transformer.

Images have one channel and ``side × side`` pixels: 28 for Fashion-MNIST, 8 for the digits.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from kfac_engine.bench.training.layers import (
    I64,
    INPUT,
    OUTPUT,
    Model,
    ModelBuilder,
    glorot_normal,
    he_normal,
)

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
