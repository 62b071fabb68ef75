"""Replaces a model's last dense layer, for other classes (``replace_head``).

Operators after the head remain if they compute the same of another number of outputs.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TypeAlias

import numpy as np
import onnx
from onnx import helper

from kfac_engine._types import DType
from kfac_engine.arguments import check_int, check_seed
from kfac_engine.errors import (
    InputError,
    ModelError,
    UnknownNameError,
    UnsupportedError,
    suggestion,
)
from kfac_engine.graph.edits.model import EditedModel, attribute, operand, operator
from kfac_engine.graph.edits.products import Product, products
from kfac_engine.graph.load import ModelSource
from kfac_engine.graph.passes.order import label_of
from kfac_engine.graph.structure import Input
from kfac_engine.graph.tensors import FLOATS
from kfac_engine.graph.write import ModelProto

# Operators that compute the same of any number of classes.
_NEUTRAL = frozenset({
    "Abs", "ArgMax", "ArgMin", "AveragePool", "Cast", "Clip", "Dropout", "Elu", "Exp", "Expand",
    "Flatten", "GlobalAveragePool", "GlobalMaxPool", "HardSigmoid", "Hardmax", "Identity",
    "LeakyRelu", "Log", "LogSoftmax", "MaxPool", "Neg", "ReduceL2", "ReduceLogSumExp", "ReduceMax",
    "ReduceMean", "ReduceMin", "ReduceSum", "Relu", "Reshape", "Selu", "Shape", "Sigmoid",
    "Softmax", "Softplus", "Sqrt", "Squeeze", "Tanh", "TopK", "Transpose", "Unsqueeze",
})  # fmt: skip
# These compute the same if their other operands are numbers.
_ARITHMETIC = frozenset({"Add", "Div", "Max", "Min", "Mul", "Pow", "Sub"})
# The sizes of their results are an operand.
_SIZED = frozenset({"Expand", "Reshape"})
# The scales of quantization belong to the results of the old head.
_ROUNDING = frozenset({"DequantizeLinear", "QuantizeLinear"})
_PROBABILITIES = frozenset({"LogSoftmax", "Sigmoid", "Softmax"})

# Largest number of outputs of a head.
_MOST_OUTPUTS = 2**24
# Largest number of candidates in a message.
_MOST_NAMES = 6


Shape: TypeAlias = tuple[int | str | None, ...] | None


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The numbers of outputs of the old and the new head, and the element type of the new one."""

    old: int
    new: int
    dtype: DType


def replace_head(
    model: ModelSource,
    classes: int | None = None,
    outputs: int | None = None,
    at: str | None = None,
    *,
    seed: int = 0,
    path: str | Path | None = None,
) -> ModelProto:
    """Return a model whose last dense layer has new weights, for other classes or numbers.

    The head is the last product with a stored weight before an output: ``Gemm``, ``MatMul``,
    ``Conv``, ``ConvTranspose``, ``MatMulNBits``, or a product with integers. Its weights are the
    initializers ``head.weight`` and, if the old head has a bias, ``head.bias``, in floating point.
    Other weights are unchanged. If an embedding shares the old head's weight, the embedding keeps
    it. Weights that no operator reads any more are removed.

    Args:
        model: Path, bytes or ``ModelProto``.
        classes: Number of classes. Operators after the head remain, so an output of probabilities
            has probabilities of the new classes; losses find the logits. The Sigmoid of a head with
            one output is removed if there are more classes.
        outputs: Number of real outputs, in place of ``classes``. Softmax, LogSoftmax and Sigmoid
            after the head are removed.
        at: Name of the value that the head reads, or of the head's result if several layers read
            the value; needed if the model has several heads or none. If an operator after this
            head needs the old number of outputs, all operators after the head are removed, and the
            new head's result replaces the first floating-point output that depended on it.
        seed: Seed of ``head.weight``, which is uniform within ``±1/√inputs``. The bias is zero.
        path: Path of a file for the result. Required for more than 2 GB of weights.

    Returns:
        The edited model.

    Raises:
        InputError: The number of classes or outputs is missing or wrong.
        UnknownNameError: No product with a stored weight reads the value ``at``.
        ModelError: The model has no head or several heads; the message names candidates.
        UnsupportedError: An operator after the head needs the old number of outputs.
    """
    count = _count(classes, outputs)
    check_seed(seed)
    if not isinstance(at, str | None):
        raise InputError(f"at must be the name of a value, got {at!r:.80}.")
    edited = EditedModel(model)
    known = [product for product in products(edited) if _may_be_head(product)]
    head = _found(edited, known) if at is None else _named(edited, known, at)
    sizes = _Sizes(head.sides[1], count, head.weight.dtype)
    last = _renewed(edited, head, count, np.random.default_rng(seed))
    binary = frozenset({"Sigmoid"}) if sizes.old == 1 < count else frozenset()
    _follow(edited, last, sizes, at, binary if outputs is None else _PROBABILITIES)
    edited.prune()
    _declare(edited, last, sizes)
    return edited.written(path)


def _count(classes: int | None, outputs: int | None) -> int:
    """Return the number of outputs of the new head."""
    if (classes is None) == (outputs is None):
        raise InputError(
            "pass either classes=N, for a classifier of N classes, or outputs=N, for N real "
            "numbers."
        )
    name, count = ("outputs", outputs) if classes is None else ("classes", classes)
    check_int(name, count, least=1, most=_MOST_OUTPUTS)
    assert count is not None
    return int(count)


# -- the head --------------------------------------------------------------------------------------


def _may_be_head(product: Product) -> bool:
    return product.is_image or (product.form == "dense" and len(product.weight.shape) == 2)


def _named(edited: EditedModel, known: Sequence[Product], at: str) -> Product:
    """Return the product that reads or computes a value."""
    readers = [product for product in known if at in (product.data, product.result)]
    if not readers:
        values = [name for product in known for name in (product.data, product.result)]
        near = suggestion(at, values)
        raise UnknownNameError(
            f"no product with a stored weight reads '{at}'{near} in model '{edited.name}'; "
            f"{_candidates(known)}."
        )
    if len(readers) > 1:
        listed = ", ".join(product.description for product in readers)
        raise ModelError(f"'{at}' belongs to several products: {listed}; {_candidates(known)}.")
    return readers[0]


def _found(edited: EditedModel, known: Sequence[Product]) -> Product:
    """Return the only product from which neutral operators lead to an output."""
    results = {product.result: product for product in known}
    heads: dict[str, Product] = {}
    for output in edited.outputs:
        heads |= _behind(edited, output, results)
    if len(heads) == 1:
        return next(iter(heads.values()))
    listed = ", ".join(product.description for product in heads.values())
    finding = f"several heads: {listed}" if heads else "no dense layer right before an output"
    raise ModelError(f"model '{edited.name}' has {finding}; {_candidates(known)}.")


def _candidates(known: Sequence[Product]) -> str:
    """Return the advice to name a head, with the last products of the file."""
    uses = Counter(product.data for product in known)
    last = list(islice(reversed(known), _MOST_NAMES))
    if not last:
        return "the file has no product with a weight that it stores"
    names = (
        f"'{product.data if uses[product.data] == 1 else product.result}' for {product.description}"
        for product in last
    )
    return f"name a value that only the head reads, or its result, with at=…: {', '.join(names)}"


def _behind(edited: EditedModel, output: str, results: Mapping[str, Product]) -> dict[str, Product]:
    """Return the products of whose results neutral operators compute an output, by result.

    The result is empty if the output depends on another value as well.
    """
    heads: dict[str, Product] = {}
    waiting, seen = [output], {output}
    while waiting:
        value = waiting.pop()
        if value in results:
            heads[value] = results[value]
            continue
        node = edited.producers.get(value)
        kind = operator(node) if node is not None else ""
        if node is None or kind not in _NEUTRAL | _ARITHMETIC | _ROUNDING:
            return {}
        operands = node.input if kind in _ARITHMETIC else node.input[:1]
        new = [name for name in operands if name not in edited.constants and name not in seen]
        waiting += new
        seen.update(new)
    return heads


# -- its weights -----------------------------------------------------------------------------------


def _renewed(
    edited: EditedModel, head: Product, count: int, rng: np.random.Generator
) -> onnx.NodeProto:
    """Give a head new weights; return the node with its result."""
    inputs, _ = head.sides
    if head.form == "dense" and operand(head.node, 2) and head.is_plain and not head.bias:
        raise UnsupportedError(
            f"{head.description} adds the computed value '{head.node.input[2]}', which has the "
            f"size of the old head; name another head with at=…."
        )
    shape = (inputs, count, *head.weight.shape[2:])
    if head.form == "conv":
        shape = (count, *head.weight.shape[1:])
    bound = inputs**-0.5
    array = rng.uniform(-bound, bound, shape).astype(head.weight.dtype)
    if head.is_plain:
        flipped = head.form == "dense" and attribute(head.node, "transB", 0)
        array = np.ascontiguousarray(array.T) if flipped else array
        weight = edited.own_constant("head.weight", head.node, array)
        edited.read(head.node, head.place, weight)
        last = head.last
    else:
        weight = edited.own_constant("head.weight", head.node, array)
        last = _as_matmul(edited, head, weight)
    if head.bias:
        is_image = head.is_image and last is not head.node
        ones = (1,) * (len(shape) - 2) if is_image else ()
        zeros = np.zeros((count, *ones), head.weight.dtype)
        place = head.bias_place if last is head.last else 1
        edited.read(last, place, edited.own_constant("head.bias", last, zeros))
    return last


def _as_matmul(edited: EditedModel, head: Product, weight: str) -> onnx.NodeProto:
    """Replace the node of a fused product by MatMul, and Add for a bias that was its operand."""
    end = head.end
    (result,) = end.output
    fused = bool(head.bias) and head.last is end
    product = edited.free("head.product") if fused else result
    nodes = [helper.make_node("MatMul", [head.data, weight], [product], name=head.node.name)]
    if fused:
        nodes.append(helper.make_node("Add", [product, head.bias], [result]))
    edited.insert(end, nodes)
    edited.remove(end)
    return nodes[-1] if head.last is end else head.last


# -- what follows ----------------------------------------------------------------------------------


def _follow(
    edited: EditedModel,
    last: onnx.NodeProto,
    sizes: _Sizes,
    at: str | None,
    removed: Collection[str],
) -> None:
    """Fit the nodes after the head to its new size, or remove them.

    ``last`` has the result of the head, and ``removed`` are operators to remove.
    """
    after = edited.downstream(last.output[0])
    changed = {last.output[0], *(name for node in after for name in node.output)}
    unfit = [node for node in after if not _fits(edited, node, changed, sizes)]
    if unfit and at is None:
        raise UnsupportedError(
            f"after the head, the {label_of(unfit[0])} needs its old number of outputs, "
            f"{sizes.old}; name the value that the head reads with at=…, so that what follows the "
            f"head is removed."
        )
    if unfit:
        _cut(edited, last, after, sizes.dtype)
        return
    for node in after:
        kind = operator(node)
        if kind in _SIZED:
            _resize(edited, node, sizes)
        elif kind in _ROUNDING or kind in removed:
            edited.bypass(node, node.input[0])


def _fits(
    edited: EditedModel, node: onnx.NodeProto, changed: Collection[str], sizes: _Sizes
) -> bool:
    """Return whether a node after the head computes the same of another number of outputs."""
    kind = operator(node)
    if sizes.old == sizes.new and kind != "QuantizeLinear":
        return True
    if kind in _SIZED:
        return _sizes_of(edited, node, sizes) is not None
    if kind == "Squeeze":
        return sizes.old != 1
    if kind == "TopK":
        count = edited.constants.get(operand(node, 1), np.asarray(attribute(node, "k", 1)))
        return bool(count.max() <= sizes.new)
    if kind == "QuantizeLinear":
        readers = edited.readers(node.output[0])
        return bool(readers) and all(operator(n) == "DequantizeLinear" for n, _ in readers)
    if kind in _ARITHMETIC:
        others = [edited.constants.get(name) for name in node.input if name not in changed]
        return all(array is not None and array.size == 1 for array in others)
    return kind in _NEUTRAL or kind == "DequantizeLinear"


def _cut(
    edited: EditedModel, last: onnx.NodeProto, after: Sequence[onnx.NodeProto], dtype: DType
) -> None:
    """Remove the nodes after the head, whose result becomes the first of their outputs."""
    result, computed = last.output[0], {name for node in after for name in node.output}
    lost = [name for name in edited.outputs if name in computed]
    for node in after:
        edited.remove(node)
    if result in edited.outputs:
        edited.drop_outputs(lost)
        return
    output = next((name for name in lost if edited.declared(name).dtype.name in FLOATS), lost[0])
    edited.drop_outputs([name for name in lost if name != output])
    edited.declare(Input(output, dtype, None))
    edited.compute(last, result, output)


def _sizes_of(
    edited: EditedModel, node: onnx.NodeProto, sizes: _Sizes
) -> list[tuple[onnx.NodeProto, int, int]] | None:
    """Return where the shape of a Reshape or Expand has the old size: node, operand and entry.

    The node is the Reshape, or the Concat that computes its shape. The list is empty if the sizes
    hold for any number of outputs, and None if that cannot be said.
    """
    shape = node.input[1] if len(node.input) > 1 else ""
    maker = edited.producers.get(shape)
    while maker is not None and operator(maker) == "Cast":
        maker = edited.producers.get(maker.input[0])
    if shape in edited.constants:
        places = [(node, 1)]
    elif maker is not None and operator(maker) == "Concat":
        places = [(maker, i) for i, name in enumerate(maker.input) if name in edited.constants]
    else:
        return None
    entries = [
        (reader, index, entry, size)
        for reader, index in places
        for entry, size in enumerate(edited.constants[reader.input[index]].ravel().tolist())
    ]
    places_of_old = [
        (reader, index, entry) for reader, index, entry, size in entries if size == sizes.old
    ]
    is_open = all(size in {-1, 0, 1} for *_, size in entries) and sizes.old != 1
    if not places_of_old and is_open and (len(entries) > 1 or shape not in edited.constants):
        return []
    return places_of_old if len(places_of_old) == 1 else None


def _resize(edited: EditedModel, node: onnx.NodeProto, sizes: _Sizes) -> None:
    """Write the new size into the shape of a Reshape."""
    for reader, index, entry in _sizes_of(edited, node, sizes) or ():
        value = edited.constants[reader.input[index]].copy()
        value.flat[entry] = sizes.new
        if reader is node:
            edited.read(node, index, edited.own_constant("head.shape", node, value))
            return
        name = edited.add_constant(edited.free("head.shape"), value)
        shape = edited.free("head.shape")
        operands = [name if i == index else other for i, other in enumerate(reader.input)]
        edited.insert(reader, [helper.make_node("Concat", operands, [shape], axis=0)])
        edited.read(node, 1, shape)


def _declare(edited: EditedModel, last: onnx.NodeProto, sizes: _Sizes) -> None:
    """Declare shapes of outputs that depend on the head; remove the shapes of inner values."""
    result = last.output[0]
    changed = {result, *(name for node in edited.downstream(result) for name in node.output)}
    edited.forget_shapes(changed)
    inferred = edited.shapes()
    for name in edited.outputs:
        if name in changed:
            entry = edited.declared(name)
            shape = _size_by_size(entry.shape, inferred.get(name), sizes)
            edited.declare(replace(entry, shape=shape))


def _size_by_size(declared: Shape, inferred: Shape, sizes: _Sizes) -> Shape:
    """Return the shape of an output from its old declaration and from shape inference."""
    if declared is None or (inferred is not None and len(declared) != len(inferred)):
        return inferred
    stays = [None if size == sizes.old else size for size in declared]
    if inferred is None:
        # Fused operators have no inference; the last axis of the old size is that of the classes.
        last = max((i for i, size in enumerate(stays) if size is None), default=-1)
        return (*stays[:last], sizes.new, *stays[last + 1 :]) if last >= 0 else tuple(stays)
    return tuple(
        new if isinstance(new, int) else old or new
        for old, new in zip(stays, inferred, strict=True)
    )
