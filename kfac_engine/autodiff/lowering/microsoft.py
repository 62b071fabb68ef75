"""Writes fused operators of the domain ``com.microsoft`` as standard operators.

Normalizations are in ``microsoft_norms``, attention in ``microsoft_attention``.
"""

from math import pi, sqrt

from kfac_engine.autodiff.lowering import lowering
from kfac_engine.autodiff.lowering.builder import LoweringBuilder
from kfac_engine.autodiff.rules.attributes import integer, number, numbers, text
from kfac_engine.graph.structure import AttributeValue, Node

# -- activations -----------------------------------------------------------------------------------


@lowering("com.microsoft::QuickGelu")
def quick_gelu(b: LoweringBuilder, node: Node) -> None:
    """Write ``x · sigmoid(α x)``."""
    x = node.inputs[0]
    gate = b.op("Sigmoid", b.op("Mul", x, b.scalar(number(node, "alpha", 1.702), x)))
    b.op("Mul", x, gate, result=node.outputs[0])


@lowering("com.microsoft::Gelu", "com.microsoft::BiasGelu")
def gelu(b: LoweringBuilder, node: Node) -> None:
    """Write ``x (1 + erf(x/√2)) / 2``; ``x`` is the sum of the operands."""
    x, like = _sum(b, node), node.inputs[0]
    bell = b.op("Erf", b.op("Mul", x, b.scalar(1 / sqrt(2), like)))
    half = b.op("Mul", x, b.scalar(0.5, like))
    b.op("Mul", half, b.op("Add", bell, b.scalar(1, like)), result=node.outputs[0])


@lowering("com.microsoft::FastGelu")
def fast_gelu(b: LoweringBuilder, node: Node) -> None:
    """Write ``x (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2``; ``x`` is the sum of the operands."""
    x, like = _sum(b, node), node.inputs[0]
    square = b.op("Mul", b.op("Mul", x, x), b.scalar(0.044715, like))
    inner = b.op("Mul", x, b.op("Add", square, b.scalar(1, like)))
    bell = b.op("Tanh", b.op("Mul", inner, b.scalar(sqrt(2 / pi), like)))
    half = b.op("Mul", x, b.scalar(0.5, like))
    b.op("Mul", half, b.op("Add", bell, b.scalar(1, like)), result=node.outputs[0])


def _sum(b: LoweringBuilder, node: Node) -> str:
    x, bias = (*node.inputs, "")[:2]
    return b.op("Add", x, bias) if bias else x


# -- products --------------------------------------------------------------------------------------


@lowering("com.microsoft::FusedMatMul", "com.microsoft::TransposeMatMul")
def fused_matmul(b: LoweringBuilder, node: Node) -> None:
    """Write ``α A B``, with the transpositions of the attributes."""
    x, y = node.inputs
    left, right = _transposed(b, node, x, "A"), _transposed(b, node, y, "B")
    _scaled(b, b.op("MatMul", left, right), number(node, "alpha", 1.0), x, node.outputs[0])


def _transposed(b: LoweringBuilder, node: Node, name: str, which: str) -> str:
    axes = list(range(len(b.facts[name].shape)))
    if len(axes) < 2:
        return name
    if integer(node, f"transBatch{which}", 0):
        axes = [*axes[1:-1], axes[0], axes[-1]]
    if integer(node, f"trans{which}", 0):
        axes[-2:] = axes[-1], axes[-2]
    return name if axes == sorted(axes) else b.op("Transpose", name, perm=tuple(axes))


def _scaled(b: LoweringBuilder, value: str, factor: float, like: str, result: str) -> None:
    """Write ``value`` times ``factor``."""
    if factor == 1.0:
        b.op("Identity", value, result=result)
    else:
        b.op("Mul", value, b.scalar(factor, like), result=result)


# Activations that may be fused, with the names of their parameters.
_ACTIVATIONS = {
    "Elu": ("alpha",),
    "HardSigmoid": ("alpha", "beta"),
    "LeakyRelu": ("alpha",),
    "Relu": (),
    "Selu": ("alpha", "gamma"),
    "Sigmoid": (),
    "Softplus": (),
    "Softsign": (),
    "Tanh": (),
}


@lowering("com.microsoft::FusedGemm")
def fused_gemm(b: LoweringBuilder, node: Node) -> None:
    """Write a Gemm followed by an activation."""
    copied = ("alpha", "beta", "transA", "transB")
    product = b.write("Gemm", node.inputs, ("",), _subset(node, copied))[0]
    values = {
        name: number(node, f"activation_{name}", 0.0)
        for name in ("alpha", "beta", "gamma")
        if f"activation_{name}" in node.attributes
    }
    _activate(b, node, product, values)


@lowering("com.microsoft::FusedConv")
def fused_conv(b: LoweringBuilder, node: Node) -> None:
    """Write a Conv plus a residual, followed by an activation."""
    x, weight, bias, residual = (*node.inputs, "", "")[:4]
    copied = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
    operands = (x, weight, bias) if bias else (x, weight)
    product = b.write("Conv", operands, ("",), _subset(node, copied))[0]
    if residual:
        product = b.op("Add", product, residual)
    params = numbers(node, "activation_params", ())
    if text(node, "activation", "") == "Clip":
        b.op("Clip", product, *(b.scalar(bound, x) for bound in params), result=node.outputs[0])
        return
    names = _ACTIVATIONS.get(text(node, "activation", ""), ())
    _activate(b, node, product, dict(zip(names, params, strict=False)))


def _subset(node: Node, names: tuple[str, ...]) -> dict[str, AttributeValue]:
    return {name: node.attributes[name] for name in names if name in node.attributes}


def _activate(b: LoweringBuilder, node: Node, value: str, values: dict[str, float]) -> None:
    activation = text(node, "activation", "")
    if not activation:
        b.op("Identity", value, result=node.outputs[0])
        return
    if activation not in _ACTIVATIONS:
        raise b.refuse(node, f"the activation '{activation}' is not known")
    known = {name: values[name] for name in _ACTIVATIONS[activation] if name in values}
    b.write(activation, (value,), node.outputs, known)


# -- other forms of standard operators ---------------------------------------------------------


@lowering("com.microsoft::GatherND", "com.microsoft::Trilu")
def renamed(b: LoweringBuilder, node: Node) -> None:
    """Write the standard operator of the same name."""
    b.write(node.op, node.inputs, node.outputs, node.attributes)


@lowering("com.microsoft::ExpandDims")
def expand_dims(b: LoweringBuilder, node: Node) -> None:
    """Write Unsqueeze with one axis."""
    x, axis = node.inputs
    axes = b.op("Reshape", b.cast(axis, "int64"), b.constant([1]))
    b.op("Unsqueeze", x, axes, result=node.outputs[0])


@lowering("com.microsoft::GridSample")
def grid_sample(b: LoweringBuilder, node: Node) -> None:
    """Write the standard GridSample, whose modes have other names."""
    modes = {"bilinear": "linear", "bicubic": "cubic"} if b.graph.opset >= 20 else {}
    mode = text(node, "mode", "bilinear")
    attributes = {**node.attributes, "mode": modes.get(mode, mode)}
    b.write("GridSample", node.inputs, node.outputs, attributes)
