"""Adds low-rank updates to weights (``add_adapters``), and merges them (``merge_adapters``).

An adapter adds ``(alpha / rank) · x A B`` to a product ``x W``. ``B`` is zero at first, so the
adapter changes nothing until it is trained. Products that share a weight share its adapter.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
from onnx import helper

from kfac_engine._types import Array
from kfac_engine.arguments import check_int, check_patterns, check_positive, check_seed
from kfac_engine.errors import InputError, ModelError, UnsupportedError
from kfac_engine.graph.analysis.exporter_changes import is_generated, module_path
from kfac_engine.graph.analysis.trainable import matching
from kfac_engine.graph.edits.model import EditedModel, attribute, operand, operator
from kfac_engine.graph.edits.products import ACTIVATIONS, Form, Product, products, write_unrounded
from kfac_engine.graph.load import ModelSource
from kfac_engine.graph.write import ModelProto

# Part of the names of the matrices of an adapter.
MARK = "lora"
SCALE = "adapter_scale"
# Largest rank of an adapter.
_MOST_RANK = 2**16
# Numbers of a weight that are merged at once.
_MOST_NUMBERS = 2**22
# First operator set in which two operands of Mul and Add have the shapes of NumPy.
_BROADCASTS = 7
# What exporters and quantizers append to the name of a layer.
_SUFFIX = re.compile(r"(\.q?weight)?(_DQ|_quant(ized)?)?(_Q\d+\w*)?$")


def add_adapters(
    model: ModelSource,
    rank: int = 8,
    layers: str | Sequence[str] | None = None,
    alpha: float = 16,
    seed: int = 0,
    *,
    path: str | Path | None = None,
) -> ModelProto:
    """Return a model with a low-rank update of each chosen layer, which changes nothing at first.

    The update of a product ``x W`` is ``(alpha / rank) · x A B`` (LoRA, Hu et al. 2021,
    arXiv:2106.09685). ``A`` and ``B`` are the initializers ``<layer>.lora_A`` and
    ``<layer>.lora_B`` in the element type of the product, so ``trainable="*lora*"`` trains only
    them. They are inputs with default values as well: a caller of ONNX Runtime may replace them in
    each run, by ``LoraAdapter`` for example. All other nodes and weights are unchanged, except
    products of dynamic quantization (``MatMulInteger``, ``DynamicQuantizeMatMul``) that have an
    adapter or come after one: they multiply by the same integers without rounding their operand,
    because rounding is not differentiable.

    Args:
        model: Path, bytes or ``ModelProto``.
        rank: Number of columns of ``A`` and of rows of ``B``.
        layers: Pattern of the names of weights or nodes, or several: dense layers (``Gemm``,
            ``MatMul``, also with a stack of weights), convolutions without groups, embeddings
            (``Gather``), and these products with integer weights (``MatMulNBits``,
            ``GatherBlockQuantized``, ``MatMulInteger``, ``DynamicQuantizeMatMul``, and weights
            behind ``DequantizeLinear``). By default all dense layers and 1 × 1 convolutions that
            are wide enough for the rank.
        alpha: The update is multiplied by ``alpha / rank``.
        seed: Seed of ``A``, which is uniform within ``±1/√inputs``, and within ±1 for embeddings.
        path: Path of a file for the result. Required for more than 2 GB of weights.

    Returns:
        The edited model.

    Raises:
        InputError: An option is wrong, the rank is above a side of a named layer, or a named layer
            has an adapter already.
        UnknownNameError: A pattern matches no layer; the message names the nearest one.
        ModelError: The model has no layer that is wide enough.
        UnsupportedError: The operator set is older than 7.
    """
    check_int("rank", rank, least=1, most=_MOST_RANK)
    check_patterns("layers", layers)
    check_positive("alpha", alpha)
    check_seed(seed)
    edited = EditedModel(model)
    if edited.opset < _BROADCASTS:
        raise UnsupportedError(
            f"model '{edited.name}' has operator set {edited.opset}, but adapters need 7; convert "
            f"it with onnx.version_converter."
        )
    chosen = _chosen(edited, _known(edited), layers, rank)
    rounded = [product for product in products(edited) if product.rounds]
    if rounded:
        weights = {product.weight.name for product in chosen}
        changed = {id(node) for p in chosen for node in (p.node, *edited.downstream(p.result))}
        for product in rounded:
            if id(product.node) in changed:
                write_unrounded(edited, product)
        edited.prune()
        chosen = [product for product in _known(edited) if product.weight.name in weights]
    writer = _Writer(
        edited, rank, alpha / rank, np.random.default_rng(seed), frozenset(edited.constants)
    )
    for product in chosen:
        writer.add(product)
    return edited.written(path)


def _known(edited: EditedModel) -> list[Product]:
    """Return the products that may have adapters."""
    return [p for p in products(edited) if p.form != "transposed conv" and not _is_marked(p)]


def _chosen(
    edited: EditedModel, known: Sequence[Product], layers: str | Sequence[str] | None, rank: int
) -> list[Product]:
    """Return the products of all weights that are to have an adapter."""
    if layers is None:
        default = [product for product in known if _by_default(product)]
        wide = {product.weight.name for product in default if min(product.sides) >= rank}
        if not wide:
            least = max((min(product.sides) for product in default), default=0)
            raise ModelError(
                f"model '{edited.name}' has no layer for an adapter of rank {rank}: the smaller "
                f"side of its {len(default)} layers with a stored weight is at most {least}."
            )
    else:
        names = {id(product): _names(product) for product in known}
        every = list(dict.fromkeys(name for entry in names.values() for name in entry))
        matched = set(matching([layers] if isinstance(layers, str) else layers, every, "layer"))
        wide = {p.weight.name for p in known if not matched.isdisjoint(names[id(p)])}
    chosen = [product for product in known if product.weight.name in wide]
    narrow = next((product for product in chosen if min(product.sides) < rank), None)
    if narrow is not None:
        raise InputError(
            f"rank is {rank}, above a side of {narrow.description}; choose a rank of at most "
            f"{min(narrow.sides)}, or leave this layer out of layers=…."
        )
    return chosen


def _by_default(product: Product) -> bool:
    pointwise = set(product.weight.shape[2:]) <= {1}
    return product.form == "dense" or (product.form == "conv" and pointwise)


def _names(product: Product) -> tuple[str, ...]:
    """Return the names by which a pattern may name a product."""
    return product.weight.name, layer_name(product), str(product.node.name)


def _is_marked(product: Product) -> bool:
    """Return whether the names of a product say that it belongs to an adapter."""
    return any(MARK in name.lower() for name in (product.weight.name, layer_name(product)))


def layer_name(product: Product) -> str:
    """Return the name of a layer: that of its weight, its module, its bias or its node."""
    stem = _SUFFIX.sub("", product.weight.name)
    if not is_generated(stem):
        return stem
    # An exporter that computes weights may also share equal biases, so the module comes first.
    bias = product.bias.removesuffix(".bias")
    named = "" if is_generated(bias) else bias
    node = str(product.node.name).strip("/").replace("/", ".")
    called = node.removesuffix(product.node.op_type).removesuffix(".")
    return module_path(product.node) or named or called or stem


@dataclass
class _Writer:
    """Writes adapters into a model."""

    edited: EditedModel  # the model
    rank: int  # rank of the adapters
    scale: float  # factor of the updates
    rng: np.random.Generator  # generator of the entries of ``A``
    stored: frozenset[str]  # names of the constants of the file
    # The matrices of each weight, and whether its first product reads it flipped.
    written: dict[str, tuple[str, str, bool]] = field(default_factory=dict)
    # The constant with the factor, by element type.
    factors: dict[str, str] = field(default_factory=dict)

    def add(self, product: Product) -> None:
        """Add the update to the result of a product."""
        edited = self.edited
        last = _without_activation(edited, product)
        result = last.output[0]
        base, low, scaled, update = (
            edited.free(f"{result}.{part}") for part in ("base", "low", "scaled", "update")
        )
        edited.compute(last, result, base)
        A, B, nodes = self._matrices(product)
        nodes.append(_first(product, A, low))
        if self.scale != 1:
            factor = self._factor(product)
            nodes.append(helper.make_node("Mul", [low, factor], [scaled]))
            low = scaled
        kind = "Conv" if product.form == "conv" else "MatMul"
        nodes.append(helper.make_node(kind, [low, B], [update]))
        nodes.append(helper.make_node("Add", [base, update], [result]))
        edited.insert(last, nodes)

    def _matrices(self, product: Product) -> tuple[str, str, list[onnx.NodeProto]]:
        """Return the names of ``A`` and ``B`` as a product reads them, and nodes that make them."""
        edited, weight = self.edited, product.weight
        if weight.name not in self.written:
            layer = layer_name(product)
            if f"{layer}.{MARK}_A" in self.stored:
                raise InputError(
                    f"{product.description} has an adapter already, '{layer}.{MARK}_A'; fold it in "
                    f"with merge_adapters, or leave this layer out of layers=…."
                )
            A, B = (
                edited.add_constant(edited.free(f"{layer}.{MARK}_{part}"), array, overridable=True)
                for part, array in zip("AB", self._initial(product), strict=True)
            )
            self.written[weight.name] = (A, B, weight.flipped)
        A, B, flipped = self.written[weight.name]
        if flipped == weight.flipped:
            return A, B, []
        # The product reads the weight in the other order, so its update is (A B)ᵀ = Bᵀ Aᵀ.
        axes = len(weight.shape)
        order = [*range(axes - 2), axes - 1, axes - 2]
        views = [edited.free(f"{name}.transposed") for name in (B, A)]
        nodes = [
            helper.make_node("Transpose", [name], [view], perm=order)
            for name, view in zip((B, A), views, strict=True)
        ]
        return views[0], views[1], nodes

    def _initial(self, product: Product) -> tuple[Array, Array]:
        """Return the first values of ``A`` and ``B``."""
        shape, rank = product.weight.shape, self.rank
        inputs, _ = product.sides
        if product.form == "conv":
            first, second = (rank, *shape[1:]), (shape[0], rank, *(1,) * (len(shape) - 2))
        else:
            first, second = (*shape[:-1], rank), (*shape[:-2], rank, shape[-1])
        bound = 1.0 if product.form == "rows" else inputs**-0.5
        A = self.rng.uniform(-bound, bound, first).astype(product.weight.dtype)
        return A, np.zeros(second, product.weight.dtype)

    def _factor(self, product: Product) -> str:
        """Return the constant with the factor of the updates, in the type of a product."""
        dtype = product.weight.dtype
        if dtype.name not in self.factors:
            value = np.asarray(self.scale, dtype)
            self.factors[dtype.name] = self.edited.add_constant(self.edited.free(SCALE), value)
        return self.factors[dtype.name]


def _first(product: Product, A: str, low: str) -> onnx.NodeProto:
    """Return the node that multiplies the operand of a product by ``A``."""
    if product.form == "rows":
        return helper.make_node("Gather", [A, product.data], [low])
    if product.form == "dense":
        return helper.make_node("MatMul", [product.data, A], [low])
    node = helper.make_node("Conv", [product.data, A], [low])
    node.attribute.extend(e for e in product.node.attribute if e.name not in _ACTIVATION)
    return node


# Attributes of the activation of a fused product.
_ACTIVATION = frozenset(
    {"activation", "activation_alpha", "activation_beta", "activation_gamma", "activation_params"}
)


def _without_activation(edited: EditedModel, product: Product) -> onnx.NodeProto:
    """Return the node with the result of a product, which gives its activation to a new node."""
    node, kind = product.node, attribute(product.node, "activation", "")
    if not kind:
        return product.last
    if kind not in ACTIVATIONS and kind != "Clip":
        raise UnsupportedError(
            f"{product.description} applies {kind} to its result, which cannot be separated; leave "
            f"it out of layers=…."
        )
    result = node.output[0]
    linear = edited.free(f"{result}.linear")
    plain = helper.make_node(node.op_type.removeprefix("Fused"), node.input, [linear])
    plain.name = node.name
    plain.attribute.extend(entry for entry in node.attribute if entry.name not in _ACTIVATION)
    params = attribute(node, "activation_params", ())
    if kind == "Clip":
        bounds = [
            edited.add_constant(edited.free(f"{result}.bound"), np.asarray(bound, np.float32))
            for bound in params
        ]
        after = helper.make_node("Clip", [linear, *bounds], [result])
    else:
        after = helper.make_node(kind, [linear], [result])
        values = dict(zip(ACTIVATIONS[kind], params, strict=False))
        values |= {
            entry.name.removeprefix("activation_"): entry.f
            for entry in node.attribute
            if entry.name in {f"activation_{name}" for name in ACTIVATIONS[kind]}
        }
        after.attribute.extend(helper.make_attribute(key, value) for key, value in values.items())
    edited.insert(node, [plain, after])
    edited.remove(node)
    return plain


# -- merging ---------------------------------------------------------------------------------------


def merge_adapters(model: ModelSource, *, path: str | Path | None = None) -> ModelProto:
    """Return a model whose weights contain its adapters, without the adapters' nodes.

    An adapter multiplies an operand by two matrices whose names contain ``lora``, and is added to a
    product of the same operand. ``add_adapters`` writes this form, and an exporter writes it for an
    adapter of PyTorch.

    Args:
        model: Path, bytes or ``ModelProto``.
        path: Path of a file for the result. Required for more than 2 GB of weights.

    Returns:
        The edited model, as large as the model without adapters.

    Raises:
        ModelError: The model has no adapter, or one in a form that cannot be folded in.
        UnsupportedError: An adapter belongs to a quantized weight.
    """
    edited = EditedModel(model)
    known = [product for product in products(edited) if product.form != "transposed conv"]
    adapters = list(_adapters(edited, known))
    if not adapters:
        raise ModelError(
            f"model '{edited.name}' has no adapter: no product with two matrices whose names "
            f"contain '{MARK}' is added to another product of the same value."
        )
    for name in dict.fromkeys(adapter.product.weight.name for adapter in adapters):
        _fold(edited, [adapter for adapter in adapters if adapter.product.weight.name == name])
    for adapter in adapters:
        edited.remove(adapter.adder)
        edited.compute(adapter.product.last, adapter.product.result, adapter.adder.output[0])
    edited.prune()
    rest = adapter_names(edited)
    if rest:
        raise ModelError(
            f"the matrix '{rest[0]}' of an adapter cannot be folded in, because its product is not "
            f"added to a product of the same value with a stored weight."
        )
    return edited.written(path)


def adapter_names(edited: EditedModel) -> list[str]:
    """Return the initializers that are matrices of adapters."""
    return [name for name in edited.initializers if MARK in name.lower()]


@dataclass(frozen=True, slots=True)
class _Adapter:
    """An adapter in a file."""

    product: Product  # the product that it is added to
    A: Product  # the product with its first matrix
    B: Product  # the product with its second matrix
    scale: float  # factor of ``A B``, relative to the weight
    adder: onnx.NodeProto  # the node that adds it

    def merged(self, edited: EditedModel) -> Array:
        """Return the weight with its update, as the product reads it."""
        W, A, B = (_oriented(edited, entry) for entry in (self.product, self.A, self.B))
        total = np.empty(W.shape, W.dtype)
        for part in _parts(W):
            # Sums are rounded once, from float64.
            change = _product(self.product.form, A, B, part)
            total[part] = W[part].astype(np.float64) + self.scale * change
        return total


def _parts(array: Array) -> Iterator[slice]:
    """Yield parts of the first axis, of at most some million numbers each."""
    step = max(1, _MOST_NUMBERS * len(array) // array.size)
    yield from (slice(start, start + step) for start in range(0, len(array), step))


def _product(form: Form, A: Array, B: Array, part: slice) -> Array:
    """Return a part of the update of a weight, in float64."""
    if form == "conv":
        B = B[part].reshape(-1, B.shape[1])
    else:
        A, B = A[part], B[part] if B.ndim > 2 else B
    A, B = A.astype(np.float64), B.astype(np.float64)
    return np.asarray(np.tensordot(B, A, axes=1) if form == "conv" else A @ B)


def _oriented(edited: EditedModel, product: Product) -> Array:
    """Return a weight as its product reads it."""
    array = edited.constants[product.weight.name]
    return array.swapaxes(-1, -2) if product.weight.flipped else array


def _adapters(edited: EditedModel, known: Sequence[Product]) -> Iterator[_Adapter]:
    results = {product.result: product for product in known}
    for adder in edited.nodes:
        if operator(adder) != "Add":
            continue
        for base, update in (adder.input, adder.input[::-1]):
            adapter = _adapter(edited, results, adder, (base, update))
            if adapter is not None:
                yield adapter
                break


def _adapter(
    edited: EditedModel,
    results: Mapping[str, Product],
    adder: onnx.NodeProto,
    operands: tuple[str, str],
) -> _Adapter | None:
    """Return the adapter that a node adds; ``operands`` are a product and its update."""
    product = results.get(operands[0])
    value, scale = _unscaled(edited, operands[1])
    B = results.get(value)
    if product is None or B is None or edited.reader(product.result) is not adder:
        return None
    value, further = _unscaled(edited, B.data)
    A = results.get(value)
    if A is None or any(entry.bias or not _is_marked(entry) for entry in (A, B)):
        return None
    second = "dense" if product.form == "rows" else product.form
    same = A.data == product.data and (A.form, B.form) == (product.form, second)
    if not same or _moves(A) != _moves(product) or set(attribute(B.node, "strides", ())) - {1}:
        return None
    # A filter has the shape of its patches, and a stack of weights the number of them.
    part = slice(1, None) if product.form == "conv" else slice(-2)
    if A.weight.shape[part] != product.weight.shape[part]:
        return None
    if (A.sides[0], B.sides[1]) != product.sides or A.sides[1] != B.sides[0]:
        return None
    scale *= further * A.factor * B.factor / product.factor
    return _Adapter(product, A, B, scale, adder)


def _unscaled(edited: EditedModel, value: str) -> tuple[str, float]:
    """Return the value behind factors, and their product."""
    scale = 1.0
    while (node := edited.producers.get(value)) is not None:
        kind, first = operator(node), operand(node, 0)
        if kind in {"Dropout", "Identity"}:
            value = first
            continue
        if kind not in {"Div", "Mul"}:
            break
        # A divisor comes second, a factor first or second.
        value, number = (first, node.input[1])
        if kind == "Mul" and first in edited.constants:
            value, number = number, first
        if edited.constants.get(number, np.empty(0)).size != 1:
            value = node.output[0]
            break
        factor = float(edited.constants[number].reshape(()))
        scale *= 1 / factor if kind == "Div" else factor
    return value, scale


def _moves(product: Product) -> tuple[str, Sequence[tuple[float, ...]]]:
    """Return how a convolution moves over its image."""
    keys = ("dilations", "pads", "strides")
    return attribute(product.node, "auto_pad", ""), [attribute(product.node, k, ()) for k in keys]


def _fold(edited: EditedModel, adapters: Sequence[_Adapter]) -> None:
    """Add the updates of one weight to it, or to copies for products whose updates differ."""
    first = adapters[0]
    if first.product.weight.quantized:
        raise UnsupportedError(
            f"the adapter '{first.A.weight.name}' cannot be folded into "
            f"{first.product.description}, whose weight has integers; keep the adapter in the "
            f"file, or merge it with the model before quantization."
        )
    name = first.product.weight.name
    pairs = {(frozenset({a.A.weight.name, a.B.weight.name}), a.scale) for a in adapters}
    readers = {(id(a.product.node), a.product.place) for a in adapters}
    if len(pairs) == 1 and set(_readers(edited, name)) == readers:
        edited.set_constant(name, _sum(edited, first, flipped=first.product.weight.flipped))
        return
    for adapter in adapters:
        product = adapter.product
        flipped = product.form == "dense" and bool(attribute(product.node, "transB", 0))
        copy = edited.free(f"{name}.merged")
        edited.add_constant(copy, _sum(edited, adapter, flipped=flipped))
        edited.read(product.node, product.place, copy)


def _sum(edited: EditedModel, adapter: _Adapter, *, flipped: bool) -> Array:
    """Return a weight with its update, with its last two axes in the other order if flipped."""
    total = adapter.merged(edited)
    return np.ascontiguousarray(total.swapaxes(-1, -2) if flipped else total)


def _readers(edited: EditedModel, name: str) -> Iterator[tuple[int, int]]:
    """Yield the operands that read a constant, also through views: node and place."""
    for node, place in edited.readers(name):
        if operator(node) in {"Cast", "Identity", "Transpose"}:
            yield from _readers(edited, node.output[0])
        else:
            yield id(node), place
    if name in edited.outputs:
        yield 0, 0
