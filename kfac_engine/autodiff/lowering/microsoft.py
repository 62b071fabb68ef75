"""Fused operators of ONNX Runtime's own domain, taken apart into standard ones.

Normalizations are in ``microsoft_norms``, attention in ``microsoft_attention``.
"""

from math import pi, sqrt

from kfac_engine.autodiff.lowering import lowering
from kfac_engine.autodiff.lowering.pen import Pen
from kfac_engine.autodiff.rules.attributes import integer, number, numbers, text
from kfac_engine.graph.structure import AttributeValue, Node

# -- activations -----------------------------------------------------------------------------------


@lowering("com.microsoft::QuickGelu")
def quick_gelu(pen: Pen, node: Node) -> None:
    """``x · sigmoid(α x)``."""
    x = node.inputs[0]
    gate = pen.op("Sigmoid", pen.op("Mul", x, pen.scalar(number(node, "alpha", 1.702), x)))
    pen.op("Mul", x, gate, to=node.outputs[0])


@lowering("com.microsoft::Gelu", "com.microsoft::BiasGelu")
def gelu(pen: Pen, node: Node) -> None:
    """``x (1 + erf(x/√2)) / 2``, of a sum if there are two operands."""
    x, like = _sum(pen, node), node.inputs[0]
    bell = pen.op("Erf", pen.op("Mul", x, pen.scalar(1 / sqrt(2), like)))
    half = pen.op("Mul", x, pen.scalar(0.5, like))
    pen.op("Mul", half, pen.op("Add", bell, pen.scalar(1, like)), to=node.outputs[0])


@lowering("com.microsoft::FastGelu")
def fast_gelu(pen: Pen, node: Node) -> None:
    """``x (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2``, of a sum if there are two operands."""
    x, like = _sum(pen, node), node.inputs[0]
    square = pen.op("Mul", pen.op("Mul", x, x), pen.scalar(0.044715, like))
    inner = pen.op("Mul", x, pen.op("Add", square, pen.scalar(1, like)))
    bell = pen.op("Tanh", pen.op("Mul", inner, pen.scalar(sqrt(2 / pi), like)))
    half = pen.op("Mul", x, pen.scalar(0.5, like))
    pen.op("Mul", half, pen.op("Add", bell, pen.scalar(1, like)), to=node.outputs[0])


def _sum(pen: Pen, node: Node) -> str:
    x, bias = (*node.inputs, "")[:2]
    return pen.op("Add", x, bias) if bias else x


# -- products --------------------------------------------------------------------------------------


@lowering("com.microsoft::FusedMatMul", "com.microsoft::TransposeMatMul")
def fused_matmul(pen: Pen, node: Node) -> None:
    """``α A B``, either transposed: in the last two axes, or with the first axis behind a batch."""
    a, b = node.inputs
    left, right = _turned(pen, node, a, "A"), _turned(pen, node, b, "B")
    _scaled(pen, pen.op("MatMul", left, right), number(node, "alpha", 1.0), a, node.outputs[0])


def _turned(pen: Pen, node: Node, name: str, which: str) -> str:
    axes = list(range(len(pen.facts[name].shape)))
    if len(axes) < 2:
        return name
    if integer(node, f"transBatch{which}", 0):
        axes = [*axes[1:-1], axes[0], axes[-1]]
    if integer(node, f"trans{which}", 0):
        axes[-2:] = axes[-1], axes[-2]
    return name if axes == sorted(axes) else pen.op("Transpose", name, perm=tuple(axes))


def _scaled(pen: Pen, value: str, factor: float, like: str, to: str) -> None:
    """``value`` times ``factor``, under the name ``to``."""
    if factor == 1.0:
        pen.op("Identity", value, to=to)
    else:
        pen.op("Mul", value, pen.scalar(factor, like), to=to)


# Activations that may be fused, and which of the numbers beside them they take.
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
def fused_gemm(pen: Pen, node: Node) -> None:
    """Gemm, then an activation."""
    own = ("alpha", "beta", "transA", "transB")
    product = pen.write("Gemm", node.inputs, ("",), _subset(node, own))[0]
    given = {
        name: number(node, f"activation_{name}", 0.0)
        for name in ("alpha", "beta", "gamma")
        if f"activation_{name}" in node.attributes
    }
    _activate(pen, node, product, given)


@lowering("com.microsoft::FusedConv")
def fused_conv(pen: Pen, node: Node) -> None:
    """Conv, plus a residual, then an activation."""
    x, weight, bias, residual = (*node.inputs, "", "")[:4]
    own = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
    operands = (x, weight, bias) if bias else (x, weight)
    product = pen.write("Conv", operands, ("",), _subset(node, own))[0]
    if residual:
        product = pen.op("Add", product, residual)
    params = numbers(node, "activation_params", ())
    if text(node, "activation", "") == "Clip":
        pen.op("Clip", product, *(pen.scalar(bound, x) for bound in params), to=node.outputs[0])
        return
    names = _ACTIVATIONS.get(text(node, "activation", ""), ())
    _activate(pen, node, product, dict(zip(names, params, strict=False)))


def _subset(node: Node, names: tuple[str, ...]) -> dict[str, AttributeValue]:
    return {name: node.attributes[name] for name in names if name in node.attributes}


def _activate(pen: Pen, node: Node, value: str, given: dict[str, float]) -> None:
    activation = text(node, "activation", "")
    if not activation:
        pen.op("Identity", value, to=node.outputs[0])
        return
    if activation not in _ACTIVATIONS:
        raise pen.refuse(node, f"the activation '{activation}' is not known")
    taken = {name: given[name] for name in _ACTIVATIONS[activation] if name in given}
    pen.write(activation, (value,), node.outputs, taken)


# -- other spellings of standard operators ---------------------------------------------------------


@lowering("com.microsoft::GatherND", "com.microsoft::Trilu")
def renamed(pen: Pen, node: Node) -> None:
    """The standard operator of the same name."""
    pen.write(node.op, node.inputs, node.outputs, node.attributes)


@lowering("com.microsoft::ExpandDims")
def expand_dims(pen: Pen, node: Node) -> None:
    """Unsqueeze with one axis."""
    x, axis = node.inputs
    axes = pen.op("Reshape", pen.cast(axis, "int64"), pen.constant([1]))
    pen.op("Unsqueeze", x, axes, to=node.outputs[0])


@lowering("com.microsoft::GridSample")
def grid_sample(pen: Pen, node: Node) -> None:
    """The standard operator, whose modes have got other names."""
    modes = {"bilinear": "linear", "bicubic": "cubic"} if pen.graph.opset >= 20 else {}
    mode = text(node, "mode", "bilinear")
    attributes = {**node.attributes, "mode": modes.get(mode, mode)}
    pen.write("GridSample", node.inputs, node.outputs, attributes)
