"""Decomposes operators that ONNX Runtime cannot execute or train.

Linear models, which exports of scikit-learn contain, have their weights as attributes; these become
constants, which can be trained.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from kfac_engine._types import Array
from kfac_engine.errors import ModelError, UnsupportedError
from kfac_engine.graph.node_builder import NodeBuilder
from kfac_engine.graph.structure import Node


class DecompositionBuilder(NodeBuilder):
    """Collects the nodes that replace one node, and reads its attributes.

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


DECOMPOSITIONS = {**_LINEAR_MODELS, "BatchNormalization": _normalization}


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
