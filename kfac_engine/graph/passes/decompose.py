"""Decomposes operators that ONNX Runtime cannot execute or train.

Fused operators run on accelerators only. Linear models, which exports of scikit-learn contain, have
their weights as attributes; these become constants, which can be trained.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import pi, sqrt

import numpy as np

from kfac_engine._types import Array
from kfac_engine.errors import ModelError, UnsupportedError
from kfac_engine.graph.node_builder import NodeBuilder
from kfac_engine.graph.structure import Node


class DecompositionBuilder(NodeBuilder):
    """Collects the nodes that replace one node, and reads its operands and attributes.

    The node has a name.
    """

    def __init__(self, node: Node) -> None:
        super().__init__(f"{node.name}.")
        self.node = node

    def value_name(self, op: str, index: int) -> str:
        """Return a new value name that begins with the first result of the replaced node."""
        return f"{self.node.outputs[0]}.{op}_{len(self.nodes)}"

    def node_name(self, op: str, results: Sequence[str]) -> str:
        """Return a new node name that begins with the name of the replaced node."""
        return f"{self.prefix}{op}_{len(self.nodes)}"

    def operands(self, least: int, most: int) -> list[str]:
        """Return all operands, with empty names for omitted ones at the end.

        Fewer than ``least`` or more than ``most`` operands raise ModelError.
        """
        names = [*self.node.inputs, *[""] * most][: max(most, len(self.node.inputs))]
        if len(self.node.inputs) > most or not all(names[:least]):
            raise ModelError(f"{self.node.title} needs {least} to {most} operands, all with names.")
        return names

    def number(self, name: str, default: float) -> float:
        """Return an attribute that is a number."""
        value = self.node.attributes.get(name, default)
        if not isinstance(value, int | float):
            raise ModelError(
                f"attribute '{name}' of {self.node.title} is {value!r}, but not a number."
            )
        return value

    def numbers(self, name: str) -> Array:
        """Return an attribute that lists numbers as a float32 array; empty if it is absent."""
        return np.array(self.node.attributes.get(name, ()), np.float32)

    def halves(self, value: str) -> tuple[str, str]:
        """Add a Split of ``value`` into two halves of its last axis; return their names."""
        first = self.op("Split", value, axis=-1, num_outputs=2)
        self.nodes[-1] = replace(self.nodes[-1], outputs=(first, f"{first}.second"))
        return first, f"{first}.second"


# -- fused operators -------------------------------------------------------------------------------


def _bias_add(b: DecompositionBuilder) -> None:
    """Write ``x + bias + skip``."""
    x, bias, skip = b.operands(3, 3)
    b.op("Add", b.op("Add", x, bias), skip, result=b.node.outputs[0])


def _bias_split_gelu(b: DecompositionBuilder) -> None:
    """Write the first half of the features of ``x + bias`` times Gelu of the second half."""
    x, bias = b.operands(2, 2)
    value, gate = b.halves(b.op("Add", x, bias))
    bell = b.op("Erf", b.op("Mul", gate, _like(b, gate, 1 / sqrt(2))))
    half = b.op("Mul", gate, _like(b, gate, 0.5))
    gelu = b.op("Mul", half, b.op("Add", bell, _like(b, gate, 1)))
    b.op("Mul", value, gelu, result=b.node.outputs[0])


def _gemm_fast_gelu(b: DecompositionBuilder) -> None:
    """Write Gelu of ``x W + bias``, in its approximation by tanh."""
    x, weights, bias = b.operands(2, 3)
    y = b.op("MatMul", x, weights)
    y = b.op("Add", y, bias) if bias else y
    square = b.op("Mul", b.op("Mul", y, y), _like(b, y, 0.044715))
    inner = b.op("Mul", y, b.op("Add", square, _like(b, y, 1)))
    bell = b.op("Tanh", b.op("Mul", inner, _like(b, y, sqrt(2 / pi))))
    half = b.op("Mul", y, _like(b, y, 0.5))
    b.op("Mul", half, b.op("Add", bell, _like(b, y, 1)), result=b.node.outputs[0])


def _group_norm(b: DecompositionBuilder) -> None:
    """Write GroupNormalization, by default with channels last, and an optional Swish."""
    x, scale, shift = b.operands(3, 3)
    _normalized(b, x, scale, shift)


def _skip_group_norm(b: DecompositionBuilder) -> None:
    """Write ``GroupNorm`` of a sum, with the sum as an optional second result."""
    x, scale, shift, skip, bias = b.operands(4, 5)
    summed = b.op("Add", x, b.op("Add", skip, bias) if bias else skip)
    if len(b.node.outputs) > 1 and b.node.outputs[1]:
        b.op("Identity", summed, result=b.node.outputs[1])
    _normalized(b, summed, scale, shift)


def _normalized(b: DecompositionBuilder, x: str, scale: str, shift: str) -> None:
    last = b.number("channels_last", 1)
    groups = int(b.number("groups", 1))
    image = b.op("Transpose", x, perm=(0, 3, 1, 2)) if last else x
    apart = b.op("Reshape", image, b.constant(np.array([0, groups, -1]), label="apart"))
    ones, zeros = (_like(b, scale, n, (groups,)) for n in (1, 0))
    epsilon = b.number("epsilon", 1e-5)
    even = b.op("InstanceNormalization", apart, ones, zeros, epsilon=epsilon)
    even = b.op("Reshape", even, b.op("Shape", image))
    axes = b.constant(np.array([1, 2]), label="axes")
    scaled = b.op("Mul", even, b.op("Unsqueeze", scale, axes))
    y = b.op("Add", scaled, b.op("Unsqueeze", shift, axes))
    y = b.op("Mul", y, b.op("Sigmoid", y)) if b.number("activation", 0) else y
    if last:
        b.op("Transpose", y, result=b.node.outputs[0], perm=(0, 2, 3, 1))
    else:
        b.op("Identity", y, result=b.node.outputs[0])


def _like(b: DecompositionBuilder, value: str, number: float, shape: tuple[int, ...] = ()) -> str:
    """Add a constant and its Cast to the element type of ``value``; return the result's name."""
    label = f"number_{len(b.constants)}"
    return b.op("CastLike", b.constant(np.full(shape, number), label=label), value)


_FUSED: Mapping[str, Callable[[DecompositionBuilder], None]] = {
    "com.microsoft::BiasAdd": _bias_add,
    "com.microsoft::BiasSplitGelu": _bias_split_gelu,
    "com.microsoft::GemmFastGelu": _gemm_fast_gelu,
    "com.microsoft::GroupNorm": _group_norm,
    "com.microsoft::SkipGroupNorm": _skip_group_norm,
}


# -- linear models of ai.onnx.ml -------------------------------------------------------------------


_FLOAT = 1  # TensorProto.FLOAT


def _scaler(b: DecompositionBuilder) -> None:
    """Write ``(x − offset) · scale``."""
    offset = b.constant(b.numbers("offset"), label="offset")
    scale = b.constant(b.numbers("scale"), label="scale")
    b.op("Mul", b.op("Sub", _floats(b), offset), scale, result=b.node.outputs[0])


def _linear_regressor(b: DecompositionBuilder) -> None:
    """Write ``x Wᵀ + b``."""
    targets = b.node.attributes.get("targets", 1)
    _transformed(b, _product(b, int(str(targets))), b.node.outputs[0])


def _linear_classifier(b: DecompositionBuilder) -> None:
    """Write one score ``x Wᵀ + b`` for each class, and an output function."""
    labels, scores = b.node.outputs
    if not _has_score_for_each_class(b.node):
        b.nodes.append(b.node)
        return
    # The original node still computes the labels, and no node reads its scores.
    b.nodes.append(replace(b.node, outputs=(labels, f"{scores}.unread")))
    _transformed(b, _product(b, b.numbers("intercepts").size), scores)


def _has_score_for_each_class(node: Node) -> bool:
    """Return whether a classifier has a score for each class, not a single score for two."""
    lists = (node.attributes.get(f"classlabels_{kind}", ()) for kind in ("ints", "strings"))
    classes = sum(len(labels) for labels in lists if isinstance(labels, tuple))
    intercepts = node.attributes.get("intercepts", ())
    return isinstance(intercepts, tuple) and len(intercepts) == classes


def _normalizer(b: DecompositionBuilder) -> None:
    """Write rows divided by their max, L1 or L2 norm; rows of zeros remain zero."""
    x = _floats(b)
    axis = b.constant(np.array([1]), label="axis")
    norm = str(b.node.attributes.get("norm", "MAX"))
    measure = b.op(_NORMS[norm], x, axis, keepdims=1)
    zero, one = (
        b.constant(np.array(n, np.float32), label=name) for name, n in (("zero", 0), ("one", 1))
    )
    divisor = b.op("Where", b.op("Equal", measure, zero), one, measure)
    b.op("Div", x, divisor, result=b.node.outputs[0])


_NORMS = {"MAX": "ReduceMax", "L1": "ReduceL1", "L2": "ReduceL2"}


def _array_feature_extractor(b: DecompositionBuilder) -> None:
    """Write the columns of the first operand at the indices in the second operand."""
    x, places = b.node.inputs
    flat = b.op("Reshape", places, b.constant(np.array([-1]), label="flat"))
    b.op("Gather", x, flat, result=b.node.outputs[0], axis=-1)


def _product(b: DecompositionBuilder, rows: int) -> str:
    numbers = b.numbers("coefficients")
    if rows < 1 or numbers.size % rows:
        raise ModelError(
            f"node '{b.node.name}' ({b.node.qualified_op}) has {numbers.size} coefficients, which "
            f"cannot be divided into {rows} rows."
        )
    weights = b.constant(numbers.reshape(rows, -1), label="coefficients")
    intercepts = b.numbers("intercepts")
    operands = [_floats(b), weights]
    operands += [b.constant(intercepts, label="intercepts")] if intercepts.size else []
    return b.op("Gemm", *operands, transB=1)


def _transformed(b: DecompositionBuilder, scores: str, result: str) -> None:
    transform = str(b.node.attributes.get("post_transform", "NONE"))
    if transform not in _TRANSFORMS:
        raise UnsupportedError(
            f"node '{b.node.name}' ({b.node.qualified_op}) has post_transform '{transform}'; only "
            f"{', '.join(_TRANSFORMS)} are supported."
        )
    b.op(_TRANSFORMS[transform], scores, result=result)


_TRANSFORMS = {"NONE": "Identity", "SOFTMAX": "Softmax", "LOGISTIC": "Sigmoid"}


def _floats(b: DecompositionBuilder) -> str:
    return b.op("Cast", b.node.inputs[0], to=_FLOAT)


_LINEAR_MODELS: Mapping[str, Callable[[DecompositionBuilder], None]] = {
    "ai.onnx.ml::ArrayFeatureExtractor": _array_feature_extractor,
    "ai.onnx.ml::LinearClassifier": _linear_classifier,
    "ai.onnx.ml::LinearRegressor": _linear_regressor,
    "ai.onnx.ml::Normalizer": _normalizer,
    "ai.onnx.ml::Scaler": _scaler,
}


# Constants of these operators that are measured from data and not trained, by label. Of an operator
# without an entry, all constants are weights or settings.
_STATISTICS: Mapping[str, Mapping[str, str]] = {
    "ai.onnx.ml::Scaler": {
        "offset": "an offset of features, which is measured from data, not trained",
        "scale": "a scale of features, which is measured from data, not trained",
    }
}


# -- all operators ---------------------------------------------------------------------------------


def _normalization(b: DecompositionBuilder) -> None:
    """Name all three results of a normalization in training form.

    ONNX Runtime 1.31 crashes if a result has no name.
    """
    node = b.node
    if b.number("training_mode", 0):
        spare = (f"{node.outputs[0]}.{what}" for what in ("result", "mean", "variance"))
        outputs = (*node.outputs, "", "")
        named = tuple(name or other for name, other in zip(outputs, spare, strict=False))
        node = replace(node, outputs=named)
    b.nodes.append(node)


DECOMPOSITIONS = {**_LINEAR_MODELS, **_FUSED, "BatchNormalization": _normalization}


def decompose(
    nodes: Iterable[Node], constants: dict[str, Array]
) -> tuple[tuple[Node, ...], dict[str, str]]:
    """Return nodes with operators that ONNX Runtime executes and whose weights are constants.

    The nodes are in topological order. ``constants`` receives weights that were attributes, with
    names such as ``<node>.coefficients``. The second result has the reason why a new constant is
    not a parameter, by name.
    """
    result: list[Node] = []
    reasons: dict[str, str] = {}
    for node in nodes:
        write = DECOMPOSITIONS.get(node.qualified_op)
        if write is None:
            result.append(node)
            continue
        builder = DecompositionBuilder(node)
        write(builder)
        result += builder.nodes
        for array in builder.constants.values():
            array.flags.writeable = False
        constants |= builder.constants
        measured = _STATISTICS.get(node.qualified_op, {})
        reasons |= {
            f"{builder.prefix}{label}": f"{why} ({node.op} node '{node.name}')"
            for label, why in measured.items()
        }
    return tuple(result), reasons
