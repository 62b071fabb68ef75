"""Small models of the kinds that people train: Llama, ViT, MobileNet, a GRU and a U-Net.

Nodes are those that exporters of PyTorch write. Images have one channel and ``side × side`` pixels.
"""

from collections.abc import Callable

import numpy as np

from kfac_engine.bench.training.models import (
    CLASSES,
    I64,
    INPUT,
    OUTPUT,
    POSITIONS,
    SYMBOLS,
    Model,
    ModelBuilder,
    attended,
    gelu,
    scalars,
    small_normal,
)
from kfac_engine.graph.structure import Node

# The language models: features, layers, heads, heads of keys and values, inner features.
WIDTH, LAYERS, HEADS, PAIRS, INNER = 96, 3, 4, 2, 256
SIZE = WIDTH // HEADS
_EPSILON, _BASE = 1e-6, 10_000.0
# The ViT: patches along an axis, features, layers, heads, inner features.
PATCHES, TOKEN, VIT_LAYERS, VIT_HEADS, VIT_INNER = 4, 64, 3, 4, 128
# Channels and stride of the blocks of the MobileNet, and the factor of their inner channels.
MOBILE_BLOCKS, EXPANSION = ((16, 1), (32, 2), (32, 1), (64, 2)), 4
EMBEDDING, STATE = 64, 128
CHANNELS, GROUPS = 16, 4

Normalization = Callable[[str, str], str]


def llama(seed: int, *, classic: bool = False) -> Model:
    """Return a causal language model over characters with an embedding that is also its head.

    Rotary positions; two heads of queries read each head of keys and values. The ``classic`` layers
    have biases, LayerNorm and GELU in place of RMSNorm and gates.
    """
    net = ModelBuilder(seed)
    scalars(net, scale=SIZE**-0.5, lowest=-1e9, epsilon=_EPSILON, two=2.0)
    net.constant("future", np.triu(np.ones((POSITIONS, POSITIONS), bool), 1))
    angles = np.arange(POSITIONS)[:, None] * _BASE ** -(np.arange(0, SIZE, 2) / SIZE)
    for name, values in (("cos", np.cos(angles)), ("sin", np.sin(angles))):
        net.constant(name, np.tile(values, 2).astype(np.float32))
    shapes = {
        "heads": [0, 0, HEADS, SIZE], "pairs": [0, 0, PAIRS, SIZE], "joined": [0, 0, WIDTH],
        "repeated": [1, 1, HEADS // PAIRS, 1, 1], "all": [0, HEADS, POSITIONS, SIZE],
        "from": [0], "half": [SIZE // 2], "to": [SIZE], "last": [-1], "third": [2],
    }  # fmt: skip
    for name, shape in shapes.items():
        net.constant(f"shape/{name}", np.array(shape))

    def normed(name: str, x: str) -> str:
        y: str = net.layer_norm(name, x, WIDTH) if classic else _rms_norm(net, name, x)
        return y

    def layer(name: str, x: str, d_in: int = WIDTH, d_out: int = WIDTH) -> str:
        y: str = net.product(name, x, d_in, d_out, draw=small_normal, bias=classic)
        return y

    table = net.drawn("symbols", (SYMBOLS, WIDTH), 0.02)
    x = net.op("Gather", table, INPUT, to="embedded")
    for i in range(LAYERS):
        x = net.op("Add", x, _grouped(net, i, normed(f"{i}.norm0", x), layer), to=f"{i}/attended")
        y = normed(f"{i}.norm1", x)
        if classic:
            y = gelu(net, f"{i}/gelu", layer(f"{i}.up", y, WIDTH, INNER))
        else:
            y = net.op("Mul", _silu(net, layer(f"{i}.gate", y, WIDTH, INNER)),
                       layer(f"{i}.up", y, WIDTH, INNER), to=f"{i}/gated")  # fmt: skip
        x = net.op("Add", x, layer(f"{i}.down", y, INNER, WIDTH), to=f"{i}/sum")
    head = net.op("Transpose", table, to="head", perm=(1, 0))
    net.op("MatMul", normed("norm", x), head, to=OUTPUT)
    return net.model((POSITIONS,), (POSITIONS, SYMBOLS), I64)


def _silu(net: ModelBuilder, x: str) -> str:
    y: str = net.op("Mul", x, net.op("Sigmoid", x, to=f"{x}/sigmoid"), to=f"{x}/silu")
    return y


def _rms_norm(net: ModelBuilder, name: str, x: str) -> str:
    square = net.op("Pow", x, "two", to=f"{name}/square")
    mean = net.op("ReduceMean", square, "shape/last", to=f"{name}/mean", keepdims=1)
    root = net.op("Sqrt", net.op("Add", mean, "epsilon", to=f"{name}/moment"), to=f"{name}/root")
    y = net.op("Mul", x, net.op("Reciprocal", root, to=f"{name}/inverse"), to=f"{name}/normed")
    scaled: str = net.op("Mul", net.weight(f"{name}.weight", np.ones(WIDTH)), y, to=name)
    return scaled


def _grouped(net: ModelBuilder, i: int, x: str, layer: Callable[..., str]) -> str:
    """Append attention whose heads of keys and values are read by several heads of queries."""
    name, parts = f"{i}.attention", {}
    for part, shape in (("q", "heads"), ("k", "pairs"), ("v", "pairs")):
        outputs = SIZE * (HEADS if shape == "heads" else PAIRS)
        y = layer(f"{name}.{part}", x, WIDTH, outputs)
        y = net.op("Reshape", y, f"shape/{shape}", to=f"{name}/{part}/split")
        y = net.op("Transpose", y, to=f"{name}/{part}", perm=(0, 2, 1, 3))
        y = y if part == "v" else _rotated(net, y)
        parts[part] = y if part == "q" else _repeated(net, y)
    keys = net.op("Transpose", parts["k"], to=f"{name}/k/t", perm=(0, 1, 3, 2))
    y = attended(net, name, parts["q"], keys, parts["v"], "future", "shape/joined")
    return layer(f"{name}.out", y)


def _rotated(net: ModelBuilder, x: str) -> str:
    """Append the rotation of pairs of features by angles that grow with the position."""
    first, second = (
        net.op("Slice", x, f"shape/{a}", f"shape/{b}", "shape/last", to=f"{x}/{a}")
        for a, b in (("from", "half"), ("half", "to"))
    )
    rotated = net.op("Concat", net.op("Neg", second, to=f"{x}/negative"), first, to=f"{x}/turned",
                    axis=-1)  # fmt: skip
    along = net.op("Mul", x, "cos", to=f"{x}/cos")
    across = net.op("Mul", rotated, "sin", to=f"{x}/sin")
    y: str = net.op("Add", along, across, to=f"{x}/rotated")
    return y


def _repeated(net: ModelBuilder, x: str) -> str:
    y = net.op("Unsqueeze", x, "shape/third", to=f"{x}/wide")
    y = net.op("Expand", y, "shape/repeated", to=f"{x}/copies")
    result: str = net.op("Reshape", y, "shape/all", to=f"{x}/all")
    return result


def vit(side: int, seed: int) -> Model:
    """Return a transformer over 4 × 4 patches of an image, with the mean of all patches behind."""
    net, patch = ModelBuilder(seed), side // PATCHES
    scalars(net, scale=(TOKEN // VIT_HEADS) ** -0.5)
    for name, shape in (("row", [0, TOKEN, -1]), ("joined", [0, 0, TOKEN]), ("second", [1]),
                        ("heads", [0, 0, VIT_HEADS, TOKEN // VIT_HEADS])):  # fmt: skip
        net.constant(f"shape/{name}", np.array(shape))
    x = net.conv("patches", INPUT, (1, TOKEN), patch, patch, pad=0)
    x = net.op("Reshape", x, "shape/row", to="rows")
    x = net.op("Transpose", x, to="tokens", perm=(0, 2, 1))
    x = net.op("Add", x, net.drawn("positions", (PATCHES**2, TOKEN), 0.02), to="placed")
    for i in range(VIT_LAYERS):
        y = net.layer_norm(f"{i}.norm0", x, TOKEN)
        parts = []
        for part, perm in (("q", (0, 2, 1, 3)), ("k", (0, 2, 3, 1)), ("v", (0, 2, 1, 3))):
            z = net.product(f"{i}.{part}", y, TOKEN, TOKEN)
            z = net.op("Reshape", z, "shape/heads", to=f"{i}/{part}/split")
            parts.append(net.op("Transpose", z, to=f"{i}/{part}", perm=perm))
        y = attended(net, f"{i}", *parts, "", "shape/joined")
        x = net.op("Add", x, net.product(f"{i}.out", y, TOKEN, TOKEN), to=f"{i}/attended")
        y = net.product(f"{i}.up", net.layer_norm(f"{i}.norm1", x, TOKEN), TOKEN, VIT_INNER)
        y = net.product(f"{i}.down", gelu(net, f"{i}/gelu", y), VIT_INNER, TOKEN)
        x = net.op("Add", x, y, to=f"{i}/sum")
    x = net.op("ReduceMean", net.layer_norm("norm", x, TOKEN), "shape/second", to="mean",
               keepdims=0)  # fmt: skip
    net.linear("head", x, TOKEN, CLASSES, to=OUTPUT)
    return net.model((1, side, side), (CLASSES,))


def mobilenet(side: int, seed: int) -> Model:
    """Return a MobileNet: depthwise convolutions between two of 1 × 1, all with normalizations."""
    net, channels = ModelBuilder(seed), MOBILE_BLOCKS[0][0]

    def block(name: str, x: str, sizes: tuple[int, int], kernel: int, stride: int = 1, *,
              groups: int = 1, relu: bool = True) -> str:  # fmt: skip
        x = net.conv(name, x, sizes, kernel, stride, bias=False, groups=groups)
        x = net.batch_norm(f"{name}.norm", x, sizes[1])
        y: str = net.op("Relu", x, to=f"{name}/relu") if relu else x
        return y

    x = block("stem", INPUT, (1, channels), 3, 2)
    for i, (width, stride) in enumerate(MOBILE_BLOCKS):
        inner = EXPANSION * channels
        y = block(f"{i}.expand", x, (channels, inner), 1)
        y = block(f"{i}.depth", y, (inner, inner), 3, stride, groups=inner)
        y = block(f"{i}.project", y, (inner, width), 1, relu=False)
        x = net.op("Add", x, y, to=f"{i}/sum") if (width, stride) == (channels, 1) else y
        channels = width
    x = net.op("Flatten", net.op("GlobalAveragePool", x, to="mean"), to="flat", axis=1)
    net.linear("head", x, channels, CLASSES, to=OUTPUT)
    return net.model((1, side, side), (CLASSES,))


def character_gru(seed: int) -> Model:
    """Return a GRU over characters with a dense layer behind each state."""
    net = ModelBuilder(seed)
    x = net.op("Gather", net.drawn("symbols", (SYMBOLS, EMBEDDING)), INPUT, to="embedded")
    x = net.op("Transpose", x, to="rows", perm=(1, 0, 2))
    shapes = {
        "input": (1, 3 * STATE, EMBEDDING),
        "state": (1, 3 * STATE, STATE),
        "bias": (1, 6 * STATE),
    }
    operands = [
        net.weight(f"gru.{name}", net.rng.uniform(-(STATE**-0.5), STATE**-0.5, shape))
        for name, shape in shapes.items()
    ]
    attributes = {"hidden_size": STATE, "linear_before_reset": 1}
    net.nodes.append(Node("GRU", (x, *operands), ("states",), attributes, name="/gru"))
    x = net.op("Squeeze", "states", net.constant("axis", np.array([1])), to="by_position")
    x = net.op("Transpose", x, to="by_text", perm=(1, 0, 2))
    net.product("head", x, STATE, SYMBOLS, to=OUTPUT)
    return net.model((POSITIONS,), (POSITIONS, SYMBOLS), I64)


def unet(side: int, seed: int) -> Model:
    """Return a U-Net of two resolutions with GroupNorm and SiLU, from an image to a flat image."""
    net, wide = ModelBuilder(seed), 2 * CHANNELS
    ones = net.constant("ones", np.ones(GROUPS, np.float32))
    zeros = net.constant("zeros", np.zeros(GROUPS, np.float32))
    grouped = net.constant("shape/grouped", np.array([0, GROUPS, -1]))

    def block(name: str, x: str, sizes: tuple[int, int], stride: int = 1) -> str:
        d, pixels = sizes[1], side // 2 if sizes[1] == wide else side
        x = net.op("Reshape", net.conv(name, x, sizes, 3, stride), grouped, to=f"{name}/groups")
        x = net.op("InstanceNormalization", x, ones, zeros, to=f"{name}/normed", epsilon=1e-5)
        shape = net.constant(f"shape/{name}", np.array([0, d, pixels, pixels]))
        x = net.op("Reshape", x, shape, to=f"{name}/channels")
        x = net.op("Mul", x, net.weight(f"{name}.scale", np.ones((d, 1, 1))), to=f"{name}/scaled")
        x = net.op("Add", x, net.weight(f"{name}.shift", np.zeros((d, 1, 1))), to=f"{name}/norm")
        return _silu(net, x)

    fine = block("fine", INPUT, (1, CHANNELS))
    x = block("middle", block("coarse", fine, (CHANNELS, wide), 2), (wide, wide))
    up = net.transposed_conv("up", x, (wide, CHANNELS), 2)
    x = block("merged", net.op("Concat", fine, up, to="both", axis=1), (wide, CHANNELS))
    net.op("Flatten", net.conv("last", x, (CHANNELS, 1), 3), to=OUTPUT, axis=1)
    return net.model((1, side, side), (side**2,))
