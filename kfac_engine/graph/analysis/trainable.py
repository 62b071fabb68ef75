"""Determines which constants of a graph are parameters.

In a file, weights, running statistics, masks, epsilons and interpolation factors are all float
initializers. Their uses distinguish them. A constant is not a parameter if every use, followed
through views such as ``Transpose``, is in a table below, if it is a number that an operator reads
like an attribute, if its values form a computed table (see ``computed_tables``), if it is a number
of an exporter (see ``exporter_changes``), or if the file states it (see ``declared_constants``).
"""

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import islice

import numpy as np

from kfac_engine._types import Array
from kfac_engine.errors import ModelError, NonFiniteError, UnknownNameError, suggestion
from kfac_engine.graph.analysis.computed_tables import holds_count, is_mask
from kfac_engine.graph.analysis.exporter_changes import is_computed
from kfac_engine.graph.node_builder import FLOAT_CODES
from kfac_engine.graph.passes.bodies import body_of
from kfac_engine.graph.structure import RELAYS, Graph, Node, Subgraph
from kfac_engine.graph.tensors import FLOATS, distinct

# Descriptions of operands that are settings, not weights, by operator and operand index.
_SETTINGS: Mapping[tuple[str, int], str] = {
    ("BatchNormalization", 3): "a running mean, which is estimated from data, not trained",
    ("BatchNormalization", 4): "a running variance, which is estimated from data, not trained",
    ("CastLike", 1): "read for its element type only",
    ("Clip", 1): "a bound",
    ("Clip", 2): "a bound",
    ("Dropout", 1): "a dropout ratio",
    ("GRU", 5): "an initial state",
    ("LSTM", 5): "an initial state",
    ("LSTM", 6): "an initial state",
    ("RNN", 5): "an initial state",
    ("OneHot", 2): "a pair of fill values",
    ("Pad", 2): "a fill value",
    ("Pow", 1): "an exponent",
    ("Range", 0): "a bound of a range",
    ("Range", 1): "a bound of a range",
    ("Range", 2): "the step of a range",
    ("Resize", 1): "a region of interest",
    ("Resize", 2): "a scale of resizing",
    ("DequantizeLinear", 1): "a quantisation scale",
    ("QuantizeLinear", 1): "a quantisation scale",
    **{
        (op, 0): "read for its shape only"
        for op in ("Shape", "Size", "EyeLike", "RandomNormalLike", "RandomUniformLike")
    },
    **{
        (op, index): "a threshold of a comparison"
        for op in ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")
        for index in (0, 1)
    },
}

# Settings that a module may learn: they are parameters where the file states it.
_LEARNED = frozenset(
    {("Clip", 1), ("Clip", 2), ("GRU", 5), ("LSTM", 5), ("LSTM", 6), ("Pow", 1), ("RNN", 5)}
)

# Operands that are read like attributes. A number that is one of them anywhere is not a parameter:
# the model would fail or change its shapes when the number moves.
_LIKE_ATTRIBUTES = frozenset(
    {("Dropout", 1), ("OneHot", 2), ("Pad", 2), ("Range", 0), ("Range", 1), ("Range", 2)}
    | {("Cast", 0), ("Resize", 1), ("Resize", 2)}
)

# Parts of the names of operators that compute with integers. Their float operands are scales.
_QUANTIZED = (
    "BlockQuantized", "DequantizeLinear", "IntegerToFloat", "MatMulBnb4", "MatMulFpQ4",
    "MatMulNBits", "QAttention", "QLinear", "QMoE", "QuantizeLSTM", "QuantizeLinear",
    "QuantizeMatMul",
)  # fmt: skip
_INTEGERS = ("int2", "int4", "int8", "uint2", "uint4", "uint8")

# Attributes in which operators of classical models store weights.
_WEIGHT_ATTRIBUTES = frozenset(
    {"coefficients", "nodes_values", "nodes_splits", "prob_a", "support_vectors", "target_weights"}
)

# Operators whose scalar operands are epsilons, temperatures or factors such as 0.5 in Gelu.
_ARITHMETIC = frozenset({"Add", "Div", "Max", "Mean", "Min", "Mod", "Mul", "Sub", "Sum", "Where"})
# Operators of layers: a single number that is added to their outputs is a bias.
_LAYERS = frozenset({"Conv", "ConvTranspose", "Einsum", "Gemm", "MatMul"})
# Sums whose addends may be the outputs of layers.
_SUMS = frozenset({"Add", "Mean", "Sub", "Sum"})

# Upper bound of the entries of an attention mask, which are -inf, the lowest float or -1e9. Trained
# offsets are smaller.
_MASKED = -3e4

# For operators that execute a body repeatedly: the index of the first state operand, and the
# difference between the index of a state and of the result of the body that replaces it.
_ITERATIONS: Mapping[str, tuple[int, int]] = {"Loop": (2, 1), "Scan": (0, 0)}

# Operators whose results consist of entries of their operand.
_ROWS = RELAYS | {"Gather"}
_SCALES = frozenset({"Div", "Mul", "Sub"})
_VIEWS = RELAYS | {"Concat", "Expand", "Slice", "Split", "Tile"}


def trainable_parameters(
    graph: Graph, patterns: Sequence[str] | None = None, freeze: Sequence[str] | None = None
) -> tuple[str, ...]:
    """Return the names of the constants to train, at least one, in the order of the graph.

    ``patterns`` is a name or ``fnmatch`` pattern such as ``"*.weight"``, or several; only matching
    constants are trained. None selects all constants without an ``excluded_reason``, and so does a
    pattern among its matches, unless all of them have one. Constants that match ``freeze`` are not
    trained. A pattern that matches no float constant raises an UnknownNameError.
    """
    floats = [name for name, array in graph.constants.items() if _is_float(array)]
    chosen = _parameters(graph, floats) if patterns is None else _matching(graph, patterns, floats)
    if not chosen:
        raise ModelError(f"model '{graph.name}' has no trainable parameter: {_why_none(graph)}.")
    frozen = matching(freeze or (), floats)
    trained = tuple(name for name in chosen if name not in frozen)
    if not trained:
        raise ModelError(
            f"no parameter of model '{graph.name}' is left to train: freeze={freeze!r} matches all "
            f"{len(chosen)}."
        )
    for name in trained:
        _refuse_non_finite(name, graph.constants[name])
    return trained


def _parameters(graph: Graph, names: Sequence[str]) -> list[str]:
    return [name for name in names if excluded_reason(graph, name) is None]


def _matching(graph: Graph, patterns: Sequence[str], floats: Sequence[str]) -> list[str]:
    """Return the constants that patterns select, without statistics beside the weights."""
    selected: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        matches = matching([pattern], floats)
        selected |= set([pattern] if pattern in floats else _parameters(graph, matches) or matches)
    return [name for name in floats if name in selected]


def matching(
    patterns: Sequence[str], names: Sequence[str], what: str = "float constant"
) -> list[str]:
    """Return the names that match at least one name or ``fnmatch`` pattern, in their order.

    A pattern that matches no name raises an UnknownNameError, whose message uses ``what`` as the
    word for a name.
    """
    selected: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        # A name may contain brackets, which a pattern reads as a set of characters.
        matches = [name for name in names if name == pattern or fnmatchcase(name, pattern)]
        if not matches:
            examples = ", ".join(islice(names, 8)) or "none"
            raise UnknownNameError(
                f"no {what} matches '{pattern}'{suggestion(pattern, names)}; the model has "
                f"{len(names)}: "
                f"{examples}{', …' if len(names) > 8 else ''}."
            )
        selected.update(matches)
    return [name for name in names if name in selected]


def excluded_reason(graph: Graph, name: str) -> str | None:
    """Return the reason why a constant is not a parameter by default; None for a parameter.

    The reason is a phrase that can follow "it is".
    """
    if name not in graph.constants:
        raise UnknownNameError(f"'{name}' is not a constant of model '{graph.name}'.")
    array = graph.constants[name]
    if not _is_float(array):
        return f"not floating-point but {array.dtype}" if array.size else "empty"
    # A file without its weights fills them with numbers other than zero and one, so they are
    # parameters.
    if name in graph.filled and array.flat[0] in (0, 1):
        return f"filled with {array.flat[0]:g} by ConstantOfShape, not stored in the file"
    return graph.tables.reason(name) or _reason_of_uses(graph, name, array)


def _reason_of_uses(graph: Graph, name: str, array: Array) -> str | None:
    """Return the reason that the readers of a float constant, or the file, give."""
    uses = list(_uses(graph, name))
    stated = graph.declared.get(name)
    reasons = [_setting(scope, array, node, i, learned=stated == "") for scope, node, i in uses]
    if not reasons:
        return "read by nothing"
    # A module has a vector as its bias. A number that a module learns is stated where it is zero.
    if stated != "" and not (array.ndim or array) and all(_is_bias(n, i) for _, n, i in uses):
        return "the zero of a layer without bias"
    if None not in reasons:
        return reasons[0]
    if stated:
        return stated
    return _reason_of_number(name, array, uses, reasons) or _reason_of_values(array, uses)


def _reason_of_number(
    name: str, array: Array, uses: Sequence[tuple[Graph, Node, int]], reasons: Sequence[str | None]
) -> str | None:
    """Return the reason why one number with several uses is not a parameter."""
    like_attributes = (
        reason
        for (_, node, index), reason in zip(uses, reasons, strict=True)
        if (node.qualified_op, index) in _LIKE_ATTRIBUTES
    )
    setting = next(like_attributes, None) if array.size == 1 else None
    # The scale of an attention is a number of the exporter, and the file computes its root. A
    # function of a parameter that the exporter computed meets the data instead.
    others = [node for (_, node, _), why in zip(uses, reasons, strict=True) if why is None]
    is_function = all(len(node.inputs) == 1 for node in others)
    if not setting and array.ndim == 0 and is_computed(name) and is_function:
        return f"a number of the exporter ({others[0].op} node '{others[0].name}')"
    return setting


def _reason_of_values(array: Array, uses: Sequence[tuple[Graph, Node, int]]) -> str | None:
    # Masks and fill values may be non-finite and are not parameters. A non-finite weight of a layer
    # is an error, which is raised later.
    of_layer = any(node.op in _LAYERS for _, node, _ in uses)
    return None if of_layer or not _non_finite(array) else "an array with NaN or infinity"


def _is_bias(node: Node, index: int) -> bool:
    return node.qualified_op in {"Conv", "ConvTranspose", "Gemm"} and index == 2


def _uses(graph: Graph, name: str) -> Iterator[tuple[Graph, Node, int]]:
    """Yield the uses of a constant as ``(graph, node, operand index)``.

    The readers of a view replace the view. For a node with bodies, the readers inside the bodies
    are uses, and their graph is the body.
    """
    seen = {name}
    waiting = [name]
    while waiting:
        value = waiting.pop()
        for node, index in graph.consumers.get(value, ()):
            inner = list(_names_inside(graph, node, index, value))
            view = node.qualified_op in _VIEWS and (index == 0 or node.op == "Concat")
            if view and not _is_cast_to_whole(node):
                waiting += [output for output in node.outputs if output not in seen]
                seen.update(node.outputs)
            elif not inner:
                yield graph, node, index
            for body, inner_name in inner:
                yield from _uses(body, inner_name)


def _is_cast_to_whole(node: Node) -> bool:
    return node.qualified_op == "Cast" and node.attributes.get("to") not in FLOAT_CODES.values()


def _names_inside(graph: Graph, node: Node, index: int, name: str) -> Iterator[tuple[Graph, str]]:
    """Yield the bodies of ``node`` that read its operand ``index``, with its name in the body.

    A state that changes between iterations is only an initial value and is not included.
    """
    if index < 0:
        for key, value in node.attributes.items():
            if isinstance(value, Subgraph) and name in value.captures:
                yield body_of(node, key, graph.opset).graph, name
    elif node.qualified_op in _ITERATIONS:
        body = body_of(node, "body", graph.opset)
        first, shift = _ITERATIONS[node.qualified_op]
        sequences = node.attributes.get("num_scan_inputs", 0)
        assert isinstance(sequences, int)
        is_state = first <= index < len(node.inputs) - sequences
        value = body.inputs[index]
        after = body.graph.outputs[index - shift] if is_state else value
        if body.graph.source(after, {"Identity"}) == value:
            yield body.graph, value


def _why_none(graph: Graph) -> str:
    whole = {
        name
        for name, array in graph.constants.items()
        if array.dtype.name.startswith(_INTEGERS) and array.size > 1
    }
    for node in graph.nodes:
        weights = [key for key in node.attributes if key in _WEIGHT_ATTRIBUTES]
        if node.domain == "ai.onnx.ml" and weights:
            return (
                f"the {node.op} node '{node.name}' stores its weights in its attribute "
                f"'{weights[0]}', which has no gradient"
            )
        quantized = [name for name in node.inputs if name in whole]
        if quantized and any(part in node.op for part in (*_QUANTIZED, "Integer")):
            return (
                f"its weights are quantized ('{quantized[0]}' is "
                f"{graph.constants[quantized[0]].dtype}), which cannot be trained; use the model "
                f"as it was before quantization"
            )
    buffers = [n for n, a in graph.constants.items() if graph.declared.get(n) and _is_float(a)]
    if buffers:
        return (
            f"'{buffers[0]}' is {graph.declared[buffers[0]]}; name the constants to train with "
            f"trainable=… or --trainable"
        )
    return (
        f"none of its {len(graph.constants)} constants is a float weight of a layer; export it "
        f"with its weights as initializers"
    )


def _setting(graph: Graph, array: Array, node: Node, index: int, *, learned: bool) -> str | None:
    """Return the reason why an operand is a setting; ``learned`` if the file states a parameter."""
    where = f"({node.op} node '{node.name}')"
    known = not node.domain and not (learned and (node.op, index) in _LEARNED)
    setting = _SETTINGS.get((node.op, index)) if known else None
    if index >= 0 and node.qualified_op in _ITERATIONS:
        setting = "an initial value of a loop"
    setting = setting or _setting_of_kind(node, index)
    if _is_neutral_in_group_norm(graph, array, node, index):
        setting = "the neutral scale or shift inside a group normalization"
    if not node.domain and _scales_whole(graph, node, index):
        setting = "a scale or zero point of quantized integers, which are not trained"
    if setting:
        return f"{setting} {where}"
    if learned or node.domain or node.op not in _ARITHMETIC:
        return None
    if array.size == 1 and not (array.ndim and node.op == "Add" and _has_layer(graph, node)):
        return f"a single number in arithmetic {where}"
    if node.op == "Div" and index == 1 and holds_count(array):
        return f"a count {where}"
    if is_mask(array) or (node.op in {"Add", "Where"} and (distinct(array) < _MASKED).any()):
        return f"a mask {where}"
    return None


def _setting_of_kind(node: Node, index: int) -> str | None:
    if _is_cast_to_whole(node):
        return "read as a whole number or a truth value"
    if index > 0 and any(part in node.op for part in _QUANTIZED):
        return "part of a quantized layer, which is not trained"
    return None


def _is_neutral_in_group_norm(graph: Graph, array: Array, node: Node, index: int) -> bool:
    """Return whether an operand is the neutral scale or shift inside a group normalization."""
    # Exporters write group normalization as a Reshape to groups, an InstanceNormalization with ones
    # and zeros, and a Reshape back. The trained scale and shift come after these nodes.
    neutral = {1: 1, 2: 0}.get(index)
    if node.qualified_op != "InstanceNormalization" or neutral is None:
        return False
    around = [graph.producers.get(node.inputs[0])]
    around += [user for user, _ in graph.consumers.get(node.outputs[0], ())]
    shaped = all(other is not None and other.op == "Reshape" for other in around)
    return shaped and bool((array == neutral).all())


def _scales_whole(graph: Graph, node: Node, index: int) -> bool:
    """Return whether an operand scales or shifts stored integers, as a dequantization does."""
    uses = [(node, index)]
    for user, place in uses:  # the loop appends to the list
        if user.op in _ROWS and place == 0:
            readers = graph.consumers.get(user.outputs[0], ())
            if not readers:
                return False
            uses += readers
        else:
            others = [name for at, name in enumerate(user.inputs) if at != place]
            if user.op not in _SCALES or not any(_is_whole(graph, name) for name in others):
                return False
    return True


def _is_whole(graph: Graph, name: str) -> bool:
    """Return whether a value is a view, cast or shift of an integer constant of few bits."""
    array = graph.constants.get(graph.source(name, {*_ROWS, "Sub"}))
    if array is None or array.dtype.name not in _INTEGERS:
        return False
    return bool((np.abs(array.astype(np.int64)) > 1).any())  # zeros and ones are a mask


def _has_layer(graph: Graph, total: Node) -> bool:
    """Return whether an addend of a sum, which may be a sum itself, is the output of a layer.

    In an inner sum, the layer must have a constant weight: in the distance of two activations, ``Σ
    h² − h · g + ε``, the product is no layer.
    """
    sums = [total]
    for node in sums:  # the loop appends to the list
        sources = (graph.source(name, RELAYS) for name in node.inputs)
        makers = [maker for name in sources if (maker := graph.producers.get(name))]
        layers = (maker for maker in makers if maker.op in _LAYERS)
        if any(node is total or _reads_constant(graph, layer) for layer in layers):
            return True
        sums += [m for m in makers if m.op in _SUMS and all(m is not other for other in sums)]
    return False


def _reads_constant(graph: Graph, node: Node) -> bool:
    """Return whether an operand is a constant, or a view of one."""
    return any(graph.source(name, RELAYS) in graph.constants for name in node.inputs)


def _is_float(array: Array) -> bool:
    return array.dtype.name in FLOATS and array.size > 0


def _refuse_non_finite(name: str, array: Array) -> None:
    bad = _non_finite(array)
    if bad:
        raise NonFiniteError(
            f"parameter '{name}' contains NaN or infinity ({bad} of its values); repair the model, "
            f"or exclude the parameter with freeze=… or --freeze."
        )


def _non_finite(array: Array) -> int:
    """Return the number of NaN and infinite entries of an array."""
    with np.errstate(over="ignore", invalid="ignore"):
        # A sum with a non-finite term is not finite. It needs one pass and no temporary array.
        if np.isfinite(distinct(array).sum()):
            return 0
    return int(np.count_nonzero(~np.isfinite(distinct(array))))
