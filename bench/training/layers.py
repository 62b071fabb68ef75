"""Layers of the models that are trained, with seeded initial weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
        self,
        shape: tuple[int | str, ...],
        result: tuple[int | str, ...],
        dtype: np.dtype = F32,
    ) -> Model:
        """Return the model; the shapes are of an example of the input and of the output."""
        source = Input(INPUT, dtype, ("N", *shape))
        output = Input(OUTPUT, F32, ("N", *result))
        constants = {**self.weights, **self.constants}
        data = serialize(build_model(self.nodes, [source], [output], constants, OPSET))
        return Model(data, self.weights)
