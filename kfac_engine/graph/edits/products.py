"""Finds the products with weights in a file, as exporters and ONNX Runtime write them.

A weight may be read through Identity, Cast, Transpose and DequantizeLinear, and a bias may be an
operand or an Add after the product.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import onnx
from onnx import helper

from kfac_engine._types import DType
from kfac_engine.graph.edits.model import EditedModel, attribute, operand, operator
from kfac_engine.graph.passes.order import label_of
from kfac_engine.graph.tensors import FLOATS, element_type

# Activations that may be fused with a product, with the names of their numbers.
ACTIVATIONS: Mapping[str, tuple[str, ...]] = {
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

# What a product does with a weight: it multiplies rows of features, images, images whose result is
# larger, or selects rows by id.
Form = Literal["dense", "conv", "transposed conv", "rows"]


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight as a product reads it."""

    name: str  # name of the constant in the file
    shape: tuple[int, ...]  # shape as the product reads it, inputs first for dense products
    dtype: DType  # element type of the product
    flipped: bool = False  # whether the last two axes of the constant are in the other order
    quantized: bool = False  # whether the constant has integers

    def transposed(self) -> "Weight":
        """Return the same constant, read with its last two axes in the other order."""
        *lead, rows, columns = self.shape
        return replace(self, shape=(*lead, columns, rows), flipped=not self.flipped)


@dataclass(frozen=True, slots=True)
class Product:
    """A product with a weight."""

    form: Form  # what it does with the weight
    node: onnx.NodeProto
    data: str  # name of the operand that is multiplied; of the ids for rows
    weight: Weight
    place: int  # index of the operand for the weight
    last: onnx.NodeProto  # the node with the result: of the bias, if the bias has a node of its own
    bias: str = ""  # name of the bias; empty without one
    bias_place: int = -1  # index of the bias among the operands of ``last``; -1 without one
    factor: float = 1.0  # number by which the product is multiplied
    is_plain: bool = True  # whether the node multiplies floating-point data and weights
    rounds: bool = False  # whether the product rounds its data, so that it has no derivative
    # The node that scales a product of integers; None for products of real numbers.
    scaler: onnx.NodeProto | None = None

    @property
    def end(self) -> onnx.NodeProto:
        """The node with the result before a bias with a node of its own."""
        return self.scaler or self.node

    @property
    def result(self) -> str:
        """Name of the result."""
        return str(self.last.output[0])

    @property
    def sides(self) -> tuple[int, int]:
        """Number of inputs and of outputs; a filter has the entries of a patch as inputs."""
        shape = self.weight.shape
        if self.form == "conv":
            return int(np.prod(shape[1:])), shape[0]
        if self.form == "transposed conv":
            return shape[0], shape[1]
        return shape[-2], shape[-1]

    @property
    def is_image(self) -> bool:
        """Whether the data are images, with the channels on the second axis."""
        return self.form in ("conv", "transposed conv")

    @property
    def description(self) -> str:
        """What messages call it: its node, weight and sides."""
        inputs, outputs = self.sides
        return f"the {label_of(self.node)} ('{self.weight.name}', {inputs} × {outputs})"


def products(model: EditedModel) -> Iterator[Product]:
    """Yield the products of computed values with weights, in the order of the nodes."""
    for node in tuple(model.nodes):
        read = _READERS.get(operator(node))
        product = read(model, node) if read else None
        if product and product.data not in model.constants and not weight_of(model, product.data):
            yield product


def weight_of(model: EditedModel, value: str) -> Weight | None:
    """Return the constant behind a value, if it is read through views, casts or scales only."""
    dtype: DType | None = None
    flips: list[tuple[int, ...]] = []
    quantized = False  # through DequantizeLinear
    while value not in model.constants:
        node = model.producers.get(value)
        kind = operator(node) if node is not None else ""
        if node is None or kind.removeprefix("com.microsoft::") not in _VIEWS:
            return None
        if kind == "Cast":
            dtype = dtype or element_type(int(attribute(node, "to", 1)), label_of(node))
        elif kind == "Transpose":
            flips.append(_permutation(node))
        elif "Dequantize" in kind:
            scale = weight_of(model, node.input[1])
            if scale is None:
                return None
            quantized, dtype = True, dtype or scale.dtype
        value = node.input[0]
    array = model.constants[value]
    quantized = quantized or array.dtype.name not in FLOATS
    weight = Weight(value, array.shape, dtype or array.dtype, quantized=quantized)
    for order in flips:
        axes = len(array.shape)
        if axes < 2 or (order or tuple(range(axes))[::-1]) != _swap(axes):
            return None
        weight = weight.transposed()
    return weight if weight.dtype.name in FLOATS else None


_VIEWS = frozenset({"Cast", "DequantizeLinear", "Identity", "Transpose"})


def _permutation(node: onnx.NodeProto) -> tuple[int, ...]:
    order = next((entry for entry in node.attribute if entry.name == "perm"), None)
    return tuple(order.ints) if order is not None else ()


def _swap(axes: int) -> tuple[int, ...]:
    return (*range(axes - 2), axes - 1, axes - 2)


# -- spellings -------------------------------------------------------------------------------------


def _gemm(model: EditedModel, node: onnx.NodeProto) -> Product | None:
    weight = weight_of(model, node.input[1])
    if weight is None or len(weight.shape) != 2 or attribute(node, "transA", 0):
        return None
    weight = weight.transposed() if attribute(node, "transB", 0) else weight
    product = Product("dense", node, node.input[0], weight, 1, node)
    product = replace(product, factor=float(attribute(node, "alpha", 1.0)))
    if not operand(node, 2):
        return _with_bias(model, product)
    if weight_of(model, node.input[2]) is None:
        return product
    return replace(product, bias=node.input[2], bias_place=2)


def _matmul(model: EditedModel, node: onnx.NodeProto) -> Product | None:
    weight = weight_of(model, node.input[1])
    others = ("transA", "transBatchA", "transBatchB")
    if weight is None or len(weight.shape) < 2 or any(attribute(node, key, 0) for key in others):
        return None
    weight = weight.transposed() if attribute(node, "transB", 0) else weight
    product = Product("dense", node, node.input[0], weight, 1, node)
    product = replace(product, factor=float(attribute(node, "alpha", 1.0)))
    return _with_bias(model, product)


def _conv(model: EditedModel, node: onnx.NodeProto) -> Product | None:
    weight = weight_of(model, node.input[1])
    if weight is None or len(weight.shape) < 3 or weight.flipped or operand(node, 3):
        return None
    if attribute(node, "group", 1) != 1:
        return None
    form: Form = "conv" if operator(node) != "ConvTranspose" else "transposed conv"
    product = Product(form, node, node.input[0], weight, 1, node)
    if not operand(node, 2):
        return _with_bias(model, product)
    return replace(product, bias=node.input[2], bias_place=2)


def _gather(model: EditedModel, node: onnx.NodeProto) -> Product | None:
    weight = weight_of(model, node.input[0])
    if weight is None or len(weight.shape) != 2 or attribute(node, "axis", 0):
        return None
    return Product("rows", node, node.input[1], weight, 0, node)


def _matmul_n_bits(model: EditedModel, node: onnx.NodeProto) -> Product | None:
    scales = model.constants.get(operand(node, 2))
    if node.input[1] not in model.constants or scales is None:
        return None
    sides = int(attribute(node, "K", 0)), int(attribute(node, "N", 0))
    data = model.constants.get(operand(node, 5))
    weight = Weight(node.input[1], sides, scales.dtype, quantized=True)
    product = Product("dense", node, node.input[0], weight, 1, node, is_plain=False)
    if data is not None:
        return replace(product, bias=node.input[5], bias_place=5)
    return _with_bias(model, product)


def _gather_quantized(model: EditedModel, node: onnx.NodeProto) -> Product | None:
    data, scales = (model.constants.get(operand(node, index)) for index in (0, 2))
    if data is None or scales is None or data.ndim != 2 or attribute(node, "gather_axis", 0):
        return None
    columns = data.shape[1] * (8 // int(attribute(node, "bits", 4)) if data.dtype == "uint8" else 1)
    weight = Weight(node.input[0], (data.shape[0], columns), scales.dtype, quantized=True)
    return Product("rows", node, node.input[1], weight, 0, node, is_plain=False)


def _matmul_integer(model: EditedModel, node: onnx.NodeProto) -> Product | None:
    """Read a product of rounded data and integers, whose result two further nodes scale."""
    rounding, weight = model.producers.get(node.input[0]), model.constants.get(node.input[1])
    cast = model.reader(node.output[0])
    scaler = model.reader(cast.output[0]) if cast is not None and operator(cast) == "Cast" else None
    if rounding is None or weight is None or scaler is None or weight.ndim != 2:
        return None
    if (operator(rounding), operator(scaler)) != ("DynamicQuantizeLinear", "Mul"):
        return None
    stored = Weight(node.input[1], weight.shape, np.dtype(np.float32), quantized=True)
    data = rounding.input[0]
    product = Product("dense", node, data, stored, 1, scaler, is_plain=False, rounds=True)
    return _with_bias(model, replace(product, scaler=scaler))


def _dynamic_matmul(model: EditedModel, node: onnx.NodeProto) -> Product | None:
    """Read a product that rounds its data itself."""
    weight = model.constants.get(node.input[1])
    if weight is None or weight.ndim != 2:
        return None
    stored = Weight(node.input[1], weight.shape, np.dtype(np.float32), quantized=True)
    data = node.input[0]
    product = Product("dense", node, data, stored, 1, node, is_plain=False, rounds=True)
    if operand(node, 4) not in model.constants:
        return product if operand(node, 4) else _with_bias(model, product)
    return replace(product, bias=node.input[4], bias_place=4)


def write_unrounded(model: EditedModel, product: Product) -> None:
    """Write a product that rounds its data as one of the data itself and the same integers.

    A product whose scale is not a constant keeps the rounding.
    """
    node, end = product.node, product.end
    zero, bias = operand(node, 3), "" if product.scaler else operand(node, 4)
    scale = _scale_of_integers(model, product)
    if scale not in model.constants:
        return
    weight, result = product.weight.name, end.output[0]
    real = model.free(f"{weight}.real")
    unbiased = model.free(f"{result}.unbiased") if bias else result
    operands = [weight, scale, zero] if zero else [weight, scale]
    nodes = [
        helper.make_node("DequantizeLinear", operands, [real]),
        helper.make_node("MatMul", [product.data, real], [unbiased], name=node.name),
    ]
    if model.constants[scale].size > 1:
        nodes[0].attribute.append(helper.make_attribute("axis", 1))
    if bias:
        nodes.append(helper.make_node("Add", [unbiased, bias], [result]))
    model.insert(end, nodes)
    model.remove(end)


def _scale_of_integers(model: EditedModel, product: Product) -> str:
    """Return the scale of the integers; empty if it is not found."""
    node, scaler = product.node, product.scaler
    if scaler is None:
        return operand(node, 2)
    of_data = model.producers[node.input[0]].output[1]
    for name in scaler.input:
        factors = model.producers.get(name)
        if factors is not None and operator(factors) == "Mul" and of_data in factors.input:
            return next((other for other in factors.input if other != of_data), "")
    return ""


def _with_bias(model: EditedModel, product: Product) -> Product:
    """Return a product with the bias that the only reader of its result adds, if any."""
    before = product.end.output[0]
    adder = model.reader(before)
    if attribute(product.node, "activation", "") or adder is None or operator(adder) != "Add":
        return product
    place = 1 - list(adder.input).index(before)
    bias = weight_of(model, adder.input[place])
    outputs = product.sides[1]
    if bias is None or (product.weight.shape[:-2] and product.form == "dense"):
        return product
    axis = len(bias.shape) - (len(product.weight.shape) - 1 if product.is_image else 1)
    sizes = [size for index, size in enumerate(bias.shape) if index != axis]
    fits = axis >= 0 and bias.shape[axis] == outputs and all(size == 1 for size in sizes)
    if not fits:
        return product
    return replace(product, last=adder, bias=adder.input[place], bias_place=place)


_READERS: Mapping[str, Callable[[EditedModel, onnx.NodeProto], Product | None]] = {
    "Gemm": _gemm,
    "com.microsoft::FusedGemm": _gemm,
    "MatMul": _matmul,
    "com.microsoft::FusedMatMul": _matmul,
    "com.microsoft::TransposeMatMul": _matmul,
    "Conv": _conv,
    "ConvTranspose": _conv,
    "com.microsoft::FusedConv": _conv,
    "Gather": _gather,
    "com.microsoft::MatMulNBits": _matmul_n_bits,
    "com.microsoft::GatherBlockQuantized": _gather_quantized,
    "MatMulInteger": _matmul_integer,
    "com.microsoft::DynamicQuantizeMatMul": _dynamic_matmul,
}
