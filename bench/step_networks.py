"""The networks whose steps are timed: an MLP, a ResNet-20 and a transformer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from kfac_engine._types import Array
from kfac_engine.bench.networks import OPSET
from kfac_engine.graph.structure import AttributeValue, Input, Node
from kfac_engine.graph.write import build_model, serialize
from kfac_engine.registry import Registry

MLP = (784, 1024, 512, 256, 10)
# A ResNet-20 for 32×32 images without normalization, which not every peer can precondition:
# channels and stride of the first block of each stage.
RESNET_STAGES, RESNET_BLOCKS = ((16, 1), (32, 2), (64, 2)), 3
# The transformer: layers, features, heads, features of the inner layer, tokens, positions.
LAYERS, WIDTH, HEADS, INNER, VOCABULARY, POSITIONS = 4, 256, 4, 1024, 256, 64
CLASSES = 10

_F32, _I64 = np.dtype(np.float32), np.dtype(np.int64)


@dataclass(frozen=True, slots=True)
class Network:
    """A classifier: its nodes in order, constants, weights, and the bytes of its file.

    ``result`` is the value with the predictions. ``tokens`` is the size of the vocabulary; 0
    without texts. ``positions`` is the number of predictions for each example; 0 without such an
    axis.
    """

    data: bytes = field(repr=False)
    nodes: Sequence[Node] = field(repr=False)
    result: str
    constants: Mapping[str, Array] = field(repr=False)
    weights: Mapping[str, Array] = field(repr=False)
    input_shape: tuple[int, ...]
    tokens: int = 0
    positions: int = 0
    classes: int = CLASSES

    @property
    def compared(self) -> tuple[str, ...]:
        """Names of the parameters in the order in which contenders return gradients."""
        return tuple(sorted(self.weights))

    @property
    def preconditioned(self) -> tuple[str, ...]:
        """Names of weights and biases of dense layers and convolutions, in the same order."""
        stems = {name.rpartition(".")[0] for name, w in self.weights.items() if w.ndim > 1}
        return tuple(name for name in self.compared if name.rpartition(".")[0] in stems - {""})

    def inputs(self, batch: int) -> dict[str, Array]:
        """Return a random batch."""
        rng = np.random.default_rng(1)
        if self.tokens:
            return {"x": rng.integers(0, self.tokens, (batch, *self.input_shape))}
        return {"x": rng.standard_normal((batch, *self.input_shape), dtype=np.float32)}

    def targets(self, batch: int) -> Array:
        """Return random labels."""
        shape = (batch, self.positions) if self.positions else (batch,)
        return np.random.default_rng(2).integers(0, self.classes, shape)


class _Net:
    """A builder that collects nodes and weights."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.weights: dict[str, Array] = {}
        self.constants: dict[str, Array] = {}
        self._rng = np.random.default_rng(0)

    def op(self, op: str, *inputs: str, to: str, **attributes: AttributeValue) -> str:
        self.nodes.append(Node(op, inputs, (to,), attributes, name=f"/{to}"))
        return to

    def drawn(self, name: str, *shape: int, fan_in: int) -> str:
        scale = np.float32(fan_in**-0.5)
        self.weights[name] = scale * self._rng.standard_normal(shape, dtype=np.float32)
        return name

    def flat(self, name: str, size: int, value: float) -> str:
        self.weights[name] = np.full(size, value, np.float32)
        return name

    def dense(self, name: str, x: str, d_in: int, d_out: int) -> str:
        """Append ``x @ weight + bias``."""
        weight = self.drawn(f"{name}.weight", d_in, d_out, fan_in=d_in)
        product = self.op("MatMul", x, weight, to=f"{name}/product")
        return self.op("Add", product, self.flat(f"{name}.bias", d_out, 0.0), to=name)

    def conv(self, name: str, x: str, c_in: int, c_out: int, kernel: int, stride: int) -> str:
        weight = self.drawn(f"{name}.weight", c_out, c_in, kernel, kernel, fan_in=c_in * kernel**2)
        bias = self.flat(f"{name}.bias", c_out, 0.0)
        return self.op(
            "Conv", x, weight, bias, to=name, kernel_shape=(kernel,) * 2, strides=(stride,) * 2,
            pads=(kernel // 2,) * 4,
        )  # fmt: skip

    def norm(self, name: str, x: str) -> str:
        scale, shift = self.flat(f"{name}.weight", WIDTH, 1.0), self.flat(f"{name}.bias", WIDTH, 0)
        return self.op("LayerNormalization", x, scale, shift, to=name, axis=-1, epsilon=1e-5)

    def heads(self, name: str, x: str, perm: tuple[int, ...]) -> str:
        y = self.op("Reshape", self.dense(name, x, WIDTH, WIDTH), "split", to=f"{name}/split")
        return self.op("Transpose", y, to=f"{name}/heads", perm=perm)

    def network(
        self, result: str, source: Input, shape: tuple[int | str, ...], **facts: int
    ) -> Network:
        known = {**self.weights, **self.constants}
        output = Input(result, _F32, shape)
        data = serialize(build_model(self.nodes, [source], [output], known, OPSET))
        sides = tuple(side for side in (source.shape or ())[1:] if isinstance(side, int))
        return Network(data, self.nodes, result, self.constants, self.weights, sides, **facts)


def mlp() -> Network:
    """Return four dense layers: 784-1024-512-256-10."""
    return classifier(MLP)


def classifier(widths: Sequence[int]) -> Network:
    """Return dense layers with ReLU in between.

    ``widths`` are the features of the input and of each layer, and the number of classes.
    """
    net, x = _Net(), "x"
    for i, (d_in, d_out) in enumerate(pairwise(widths)):
        weight = net.drawn(f"{i}.weight", d_in, d_out, fan_in=d_in)
        x = net.op("Gemm", x, weight, net.flat(f"{i}.bias", d_out, 0.0), to=f"s{i}")
        if i < len(widths) - 2:
            x = net.op("Relu", x, to=f"a{i}")
    return net.network(
        x, Input("x", _F32, ("batch", widths[0])), ("batch", widths[-1]), classes=widths[-1]
    )


def filters(channels: int, layers: int, side: int, classes: int) -> Network:
    """Return 3 × 3 convolutions with ReLU in between, a mean and a dense layer.

    The images are square; they and every layer have the same number of channels.
    """
    net, x = _Net(), "x"
    for i in range(layers):
        x = net.op("Relu", net.conv(f"{i}", x, channels, channels, 3, 1), to=f"a{i}")
    x = net.op("Flatten", net.op("GlobalAveragePool", x, to="mean"), to="flat", axis=1)
    x = net.dense("head", x, channels, classes)
    source = Input("x", _F32, ("batch", channels, side, side))
    return net.network(x, source, ("batch", classes), classes=classes)


def small_cnn() -> Network:
    """Return three 3 × 3 convolutions and a dense layer of 2048 features: 34,826 parameters."""
    net, x, c_in = _Net(), "x", 3
    for i, (c_out, stride) in enumerate(((16, 2), (32, 2), (32, 1))):
        x = net.op("Relu", net.conv(f"{i}", x, c_in, c_out, 3, stride), to=f"a{i}")
        c_in = c_out
    x = net.op("Flatten", x, to="flat", axis=1)
    x = net.dense("head", x, c_in * 8 * 8, CLASSES)
    return net.network(x, Input("x", _F32, ("batch", 3, 32, 32)), ("batch", CLASSES))


def resnet20(side: int = 32) -> Network:
    """Return a ResNet-20: nineteen convolutions, two shortcuts and a dense layer.

    ``side`` is the side of its images.
    """
    net = _Net()
    channels = RESNET_STAGES[0][0]
    x = net.op("Relu", net.conv("conv", "x", 3, channels, 3, 1), to="a")
    for stage, (width, first_stride) in enumerate(RESNET_STAGES):
        for block in range(RESNET_BLOCKS):
            name, stride = f"{stage}.{block}", first_stride if block == 0 else 1
            y = net.op("Relu", net.conv(f"{name}.0", x, channels, width, 3, stride), to=f"{name}a")
            y = net.conv(f"{name}.1", y, width, width, 3, 1)
            if channels != width:
                x = net.conv(f"{name}.short", x, channels, width, 1, stride)
            x = net.op("Relu", net.op("Add", x, y, to=f"{name}+"), to=f"{name}b")
            channels = width
    x = net.op("Flatten", net.op("GlobalAveragePool", x, to="mean"), to="flat", axis=1)
    x = net.dense("head", x, channels, CLASSES)
    return net.network(x, Input("x", _F32, ("batch", 3, side, side)), ("batch", CLASSES))


def transformer() -> Network:
    """Return four encoder layers over 64 tokens, which predict a token at each position."""
    net = _Net()
    net.constants["split"] = np.array([0, 0, HEADS, WIDTH // HEADS])
    net.constants["joined"] = np.array([0, 0, WIDTH])
    net.constants["scale"] = np.array((WIDTH // HEADS) ** -0.5, np.float32)
    x = net.op("Gather", net.drawn("tokens", VOCABULARY, WIDTH, fan_in=1), "x", to="embedded")
    for layer in range(LAYERS):
        x = _encoder(net, f"{layer}", x)
    x = net.dense("head", net.norm("last", x), WIDTH, VOCABULARY)
    return net.network(
        x, Input("x", _I64, ("batch", POSITIONS)), ("batch", POSITIONS, VOCABULARY),
        tokens=VOCABULARY, positions=POSITIONS, classes=VOCABULARY,
    )  # fmt: skip


def _encoder(net: _Net, name: str, x: str) -> str:
    y = net.norm(f"{name}.norm0", x)
    q, v = (net.heads(f"{name}.{part}", y, (0, 2, 1, 3)) for part in "qv")
    k = net.heads(f"{name}.k", y, (0, 2, 3, 1))
    scores = net.op("Mul", net.op("MatMul", q, k, to=f"{name}/qk"), "scale", to=f"{name}/scores")
    seen = net.op("MatMul", net.op("Softmax", scores, to=f"{name}/p", axis=-1), v, to=f"{name}/pv")
    seen = net.op("Transpose", seen, to=f"{name}/back", perm=(0, 2, 1, 3))
    seen = net.op("Reshape", seen, "joined", to=f"{name}/joined")
    x = net.op("Add", x, net.dense(f"{name}.out", seen, WIDTH, WIDTH), to=f"{name}+")
    y = net.dense(f"{name}.up", net.norm(f"{name}.norm1", x), WIDTH, INNER)
    y = net.dense(f"{name}.down", net.op("Relu", y, to=f"{name}/relu"), INNER, WIDTH)
    return net.op("Add", x, y, to=f"{name}++")


NETWORKS: Mapping[str, Callable[[], Network]] = Registry(
    "network of a step", {"mlp": mlp, "resnet20": resnet20, "transformer": transformer}
)
