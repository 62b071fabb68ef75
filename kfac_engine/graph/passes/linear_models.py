"""Linear models of ``ai.onnx.ml``, whose weights are attributes: in operators with operands.

scikit-learn's models come in these. Their weights become constants, and so parameters.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from kfac_engine.errors import ModelError, UnsupportedError
from kfac_engine.graph.passes.decomposition import Spelled
from kfac_engine.graph.structure import Node

_FLOAT = 1  # TensorProto.FLOAT


def _scaler(s: Spelled) -> None:
    """``(x − offset) · scale``."""
    offset = s.constant("offset", s.numbers("offset"))
    scale = s.constant("scale", s.numbers("scale"))
    s.op("Mul", s.op("Sub", _floats(s), offset), scale, made=s.node.outputs[0])


def _linear_regressor(s: Spelled) -> None:
    """``x Wᵀ + b``."""
    targets = s.node.attributes.get("targets", 1)
    _transformed(s, _product(s, int(str(targets))), s.node.outputs[0])


def _linear_classifier(s: Spelled) -> None:
    """Scores ``x Wᵀ + b``, of each class one, and an output function."""
    labels, scores = s.node.outputs
    if not _has_score_for_each_class(s.node):
        s.nodes.append(s.node)
        return
    # What finds the labels stays; its scores are read by nobody.
    s.nodes.append(replace(s.node, outputs=(labels, f"{scores}.unread")))
    _transformed(s, _product(s, s.numbers("intercepts").size), scores)


def _has_score_for_each_class(node: Node) -> bool:
    """Where there is one score for two classes, the output function makes the other."""
    given = (node.attributes.get(f"classlabels_{kind}", ()) for kind in ("ints", "strings"))
    classes = sum(len(labels) for labels in given if isinstance(labels, tuple))
    intercepts = node.attributes.get("intercepts", ())
    return isinstance(intercepts, tuple) and len(intercepts) == classes


def _normalizer(s: Spelled) -> None:
    """Rows over their largest entry, their sum of sizes or their length; rows of zeros stay."""
    x = _floats(s)
    axis = s.constant("axis", np.array([1]))
    norm = str(s.node.attributes.get("norm", "MAX"))
    measure = s.op(_NORMS[norm], x, axis, keepdims=1)
    zero, one = (s.constant(name, np.array(n, np.float32)) for name, n in (("zero", 0), ("one", 1)))
    divisor = s.op("Where", s.op("Equal", measure, zero), one, measure)
    s.op("Div", x, divisor, made=s.node.outputs[0])


_NORMS = {"MAX": "ReduceMax", "L1": "ReduceL1", "L2": "ReduceL2"}


def _array_feature_extractor(s: Spelled) -> None:
    """Columns, chosen by number."""
    x, places = s.node.inputs
    flat = s.op("Reshape", places, s.constant("flat", np.array([-1])))
    s.op("Gather", x, flat, made=s.node.outputs[0], axis=-1)


def _product(s: Spelled, rows: int) -> str:
    numbers = s.numbers("coefficients")
    if rows < 1 or numbers.size % rows:
        raise ModelError(
            f"node '{s.node.name}' ({s.node.qualified_op}) has {numbers.size} coefficients, which "
            f"make no {rows} rows."
        )
    weights = s.constant("coefficients", numbers.reshape(rows, -1))
    intercepts = s.numbers("intercepts")
    operands = [_floats(s), weights]
    operands += [s.constant("intercepts", intercepts)] if intercepts.size else []
    return s.op("Gemm", *operands, transB=1)


def _transformed(s: Spelled, scores: str, made: str) -> None:
    transform = str(s.node.attributes.get("post_transform", "NONE"))
    if transform not in _TRANSFORMS:
        raise UnsupportedError(
            f"node '{s.node.name}' ({s.node.qualified_op}) has post_transform '{transform}'; only "
            f"{', '.join(_TRANSFORMS)} are covered."
        )
    s.op(_TRANSFORMS[transform], scores, made=made)


_TRANSFORMS = {"NONE": "Identity", "SOFTMAX": "Softmax", "LOGISTIC": "Sigmoid"}


def _floats(s: Spelled) -> str:
    return s.op("Cast", s.node.inputs[0], to=_FLOAT)


SPELLINGS: Mapping[str, Callable[[Spelled], None]] = {
    "ai.onnx.ml::ArrayFeatureExtractor": _array_feature_extractor,
    "ai.onnx.ml::LinearClassifier": _linear_classifier,
    "ai.onnx.ml::LinearRegressor": _linear_regressor,
    "ai.onnx.ml::Normalizer": _normalizer,
    "ai.onnx.ml::Scaler": _scaler,
}
