"""Lists the derivative rules: one function for each operator, one file for each family.

A rule receives a node, the cotangents of its outputs, and the indices of the operands that need a
cotangent. It adds the cotangents of these operands to a ``VjpBuilder``::

    @vjp_rule("Tanh")
    def tanh(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
        y = node.outputs[0]
        ...
        return {0: b.op("Mul", g[0], slope)}

Conventions:

- ``g[i]`` is the name of the cotangent of output ``i``; outputs without one are absent.
- ``wanted`` has the indices of operands that need a cotangent; others may be absent.
- If a wanted operand is absent from the result, its derivative is zero by definition.
- Graphs are at opset 18 or newer, so rules read the opset-18 form of every operator.
"""

from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib import import_module
from typing import TypeAlias

from kfac_engine.autodiff.vjp_builder import VjpBuilder
from kfac_engine.graph.structure import Node
from kfac_engine.registry import Registry

Cotangents: TypeAlias = Mapping[int, str]
Wanted: TypeAlias = frozenset[int]
Gradients: TypeAlias = Mapping[int, str]
Rule: TypeAlias = Callable[[VjpBuilder, Node, Cotangents, Wanted], Gradients]
# Writes a derivative from the names of the operand and of the result.
Slope: TypeAlias = Callable[[VjpBuilder, str, str], str]

_FAMILIES = (
    "activation", "convolution", "elementwise", "fourier", "indexing", "linear_algebra",
    "normalization", "pooling", "reduction", "resize", "shape",
)  # fmt: skip

RULES: Registry[Rule] = Registry("derivative rule")

# Piecewise constant operators, at which the reverse sweep stops because the derivative is zero
# wherever it exists.
ZERO_DERIVATIVE: frozenset[str] = frozenset(
    """
    And ArgMax ArgMin Bernoulli BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Ceil Constant
    ConstantOfShape Equal EyeLike Floor Greater GreaterOrEqual Hardmax IsInf IsNaN Less LessOrEqual
    MelWeightMatrix Multinomial NonMaxSuppression NonZero Not Or RandomNormal RandomNormalLike
    RandomUniform RandomUniformLike Round Shape Sign Size Xor
    ai.onnx.ml::Binarizer ai.onnx.ml::LabelEncoder ai.onnx.ml::TreeEnsemble
    ai.onnx.ml::TreeEnsembleClassifier ai.onnx.ml::TreeEnsembleRegressor
    """.split()  # noqa: SIM905 (a list literal would be forty lines)
)

# Operators that round real numbers to integers. Their derivative is zero, too, but users of
# quantized models expect another derivative, so these operators raise an error.
QUANTIZERS: frozenset[str] = frozenset(
    {
        "DynamicQuantizeLinear", "QLinearConv", "QLinearMatMul", "QuantizeLinear",
        "com.microsoft::DynamicQuantizeLSTM", "com.microsoft::DynamicQuantizeMatMul",
        "com.microsoft::QuantizeLinear",
    }
)  # fmt: skip


# Decorates the rule of some operators, such as ``"Op"`` and ``"domain::Op"``.
vjp_rule = RULES.register


def add_slopes(slopes: Mapping[str, tuple[str, Slope]]) -> None:
    """Register operators of one operand whose cotangents are a product or a quotient.

    An entry has ``"Mul"`` or ``"Div"``, with a minus if the result is negated, and a function that
    writes the second operand. The first operand is the cotangent of the result.
    """
    for op, (form, slope) in slopes.items():
        RULES.add(op, partial(_sloped, form, slope))


def _sloped(
    form: str, slope: Slope, b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted
) -> Gradients:
    result = b.op(form.removeprefix("-"), g[0], slope(b, node.inputs[0], node.outputs[0]))
    return {0: b.op("Neg", result) if form.startswith("-") else result}


@cache
def load_rules() -> Registry[Rule]:
    """Return the table of rules, after an import of every family."""
    for family in _FAMILIES:
        import_module(f"{__name__}.{family}")
    return RULES


_WHOLE = "it computes with whole numbers that stand for rounded ones"
_TEXT = "it reads text"

REFUSED: Mapping[str, str] = {
    "BitCast": "it reads the bits of a number as those of another type",
    "ConvInteger": _WHOLE,
    "ImageDecoder": "it reads the bytes of a picture",
    "MatMulInteger": _WHOLE,
    "OptionalHasElement": "it asks whether there is a value",
    "RegexFullMatch": _TEXT,
    "StringConcat": _TEXT,
    "StringNormalizer": _TEXT,
    "StringSplit": _TEXT,
    "TfIdfVectorizer": "it counts words",
}

_OPTIMIZED = (
    "ONNX Runtime writes it into files that it saves after optimization, for one kind of "
    "processor; use the file from before, or save with ORT_ENABLE_BASIC as "
    "graph_optimization_level"
)

REFUSED_DOMAINS: Mapping[str, str] = {
    "com.microsoft.nchwc": _OPTIMIZED,
    "com.ms.internal.nhwc": _OPTIMIZED,
}
