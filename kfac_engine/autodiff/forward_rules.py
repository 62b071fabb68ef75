"""Lists the forward rules, which classify each operator as a function of its operands.

An operator is a row of one table only. Operators without a row are differentiated by two
applications of their reverse rule (``forward_mode``), as are normalizations, softmax and maxima.
"""

from collections.abc import Callable, Collection, Mapping

from kfac_engine.autodiff.rules.attributes import text
from kfac_engine.graph.structure import Node

# Operators of sums, with the sign of each operand after the first.
SUMS: Mapping[str, int] = {"Add": 1, "Mean": 1, "Sub": -1, "Sum": 1}

# Operators that are linear in some operands together: the operator of the tangents of these
# operands is the tangent of the result. Other operands do not change; None means all operands.
LINEAR: Mapping[str, tuple[int, ...] | None] = {
    **dict.fromkeys(
        (
            "AveragePool", "Cast", "CastLike", "Col2Im", "Compress", "CumSum", "DFT",
            "DepthToSpace", "Expand", "Flatten", "Gather", "GatherElements", "GatherND",
            "GlobalAveragePool", "Identity", "MaxUnpool", "Neg", "ReduceMean", "ReduceSum",
            "Reshape", "Resize", "ReverseSequence", "Slice", "SpaceToDepth", "Split", "Squeeze",
            "Tile", "Transpose", "Trilu", "Unsqueeze",
        ),
        (0,),
    ),
    "Concat": None,
    "OneHot": (2,),
    "Pad": (0, 2),
    "ScatterElements": (0, 2),
    "ScatterND": (0, 2),
    "TensorScatter": (0, 1),
    "Where": (1, 2),
}  # fmt: skip

# Operators that are linear in each of their factors: the number of factors, None for all operands.
# An operand after the factors is added to the product.
PRODUCTS: Mapping[str, int | None] = {
    "Conv": 2, "ConvTranspose": 2, "Einsum": None, "Gemm": 2, "MatMul": 2, "Mul": 2,
}  # fmt: skip

# Operators whose results depend, entry by entry, on the same entries of their operands. The
# reverse rule of such an operator multiplies by slopes, so it is the forward rule, too.
ELEMENTWISE = frozenset(
    """
    Abs Acos Acosh Asin Asinh Atan Atanh Celu Clip Cos Cosh Div Dropout Elu Erf Exp Gelu HardSigmoid
    HardSwish LeakyRelu Log Max Min Mod PRelu Pow Reciprocal Relu Selu Sigmoid Sin Sinh Softplus
    Softsign Sqrt Tan Tanh
    """.split()  # noqa: SIM905 (a list literal would be thirty lines)
)


def linear_operands(node: Node) -> tuple[int, ...]:
    """Return the operands in which a node is linear together; none if it has no such row."""
    op = node.qualified_op
    if op not in LINEAR or not _FORMS.get(op, _always)(node):
        return ()
    positions = LINEAR[op]
    operands = range(len(node.inputs)) if positions is None else positions
    return tuple(i for i in operands if i < len(node.inputs) and node.inputs[i])


def _always(node: Node) -> bool:
    return True


def _adds(node: Node) -> bool:
    return text(node, "reduction", "none") in {"none", "add"}


# Operators that are linear in some forms only.
_FORMS: Mapping[str, Callable[[Node], bool]] = {
    "Resize": lambda node: text(node, "coordinate_transformation_mode", "") != "tf_crop_and_resize",
    "ScatterElements": _adds,
    "ScatterND": _adds,
}


def factors(node: Node) -> range:
    """Return the operands that are factors of a product; none if a node is not a product."""
    op = node.qualified_op
    count = PRODUCTS.get(op, 0)
    return range(len(node.inputs) if count is None else count)


def is_elementwise(node: Node, operands: Collection[int]) -> bool:
    """Return whether a node is elementwise in the given operands, which a bound of Clip is not."""
    return node.qualified_op in ELEMENTWISE and (node.op != "Clip" or set(operands) <= {0})
