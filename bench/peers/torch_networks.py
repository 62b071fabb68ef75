"""The networks of the suite ``step`` in PyTorch, with the same weights."""

from collections.abc import Callable, Mapping
from itertools import pairwise

import torch
from torch import nn
from torch.nn.functional import relu, scaled_dot_product_attention

from kfac_engine._types import Array
from kfac_engine.bench import step_networks as sizes


class Perceptron(nn.Sequential):
    """Dense layers with ReLU in between, named by their number."""

    def __init__(self) -> None:
        super().__init__()
        for i, (d_in, d_out) in enumerate(pairwise(sizes.MLP)):
            self.add_module(str(i), nn.Linear(d_in, d_out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in list(self)[:-1]:
            x = relu(layer(x))
        logits: torch.Tensor = self[-1](x)
        return logits


class ResidualBlock(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.add_module("0", nn.Conv2d(c_in, c_out, 3, stride, 1))
        self.add_module("1", nn.Conv2d(c_out, c_out, 3, 1, 1))
        self.short = nn.Conv2d(c_in, c_out, 1, stride) if c_in != c_out else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.get_submodule("0"), self.get_submodule("1")
        return relu(self.short(x) + second(relu(first(x))))


class ResidualNetwork(nn.Module):
    """A ResNet-20: convolution, blocks, mean, dense layer."""

    def __init__(self) -> None:
        super().__init__()
        channels = sizes.RESNET_STAGES[0][0]
        self.conv = nn.Conv2d(3, channels, 3, 1, 1)
        for stage, (width, stride) in enumerate(sizes.RESNET_STAGES):
            blocks = nn.Sequential()
            for block in range(sizes.RESNET_BLOCKS):
                blocks.append(ResidualBlock(channels, width, stride if block == 0 else 1))
                channels = width
            self.add_module(str(stage), blocks)
        self.head = nn.Linear(channels, sizes.CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = relu(self.conv(x))
        for stage in range(len(sizes.RESNET_STAGES)):
            x = self.get_submodule(str(stage))(x)
        logits: torch.Tensor = self.head(x.mean((2, 3)))
        return logits


class Encoder(nn.Module):
    """Attention and a two-layer network, each with a normalization before it and a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.norm0, self.norm1 = nn.LayerNorm(sizes.WIDTH), nn.LayerNorm(sizes.WIDTH)
        for name in ("q", "k", "v", "out"):
            self.add_module(name, nn.Linear(sizes.WIDTH, sizes.WIDTH))
        self.up = nn.Linear(sizes.WIDTH, sizes.INNER)
        self.down = nn.Linear(sizes.INNER, sizes.WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm0(x)
        q, k, v = (
            self.get_submodule(name)(y).unflatten(2, (sizes.HEADS, -1)).transpose(1, 2)
            for name in "qkv"
        )
        seen = scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.get_submodule("out")(seen)
        added: torch.Tensor = self.down(relu(self.up(self.norm1(x))))
        return x + added


class Transformer(nn.Module):
    """Token embeddings, encoders, a prediction at each position."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.empty(sizes.VOCABULARY, sizes.WIDTH))
        for layer in range(sizes.LAYERS):
            self.add_module(str(layer), Encoder())
        self.last = nn.LayerNorm(sizes.WIDTH)
        self.head = nn.Linear(sizes.WIDTH, sizes.VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.tokens[x]
        for layer in range(sizes.LAYERS):
            y = self.get_submodule(str(layer))(y)
        logits: torch.Tensor = self.head(self.last(y))
        return logits


MODULES: Mapping[str, Callable[[], nn.Module]] = {
    "mlp": Perceptron,
    "resnet20": ResidualNetwork,
    "transformer": Transformer,
}


def with_weights(network: str, weights: Mapping[str, Array]) -> nn.Module:
    """Return a network with the weights of the ONNX file, ``(d_in, d_out)`` for dense layers."""
    module = MODULES[network]()
    module.load_state_dict({name: transposed(name, torch.tensor(w)) for name, w in weights.items()})
    return module


def transposed(name: str, value: torch.Tensor) -> torch.Tensor:
    """Convert a parameter between the layouts of ONNX and PyTorch: transpose dense weights."""
    return value.T if value.ndim == 2 and name.endswith(".weight") else value
