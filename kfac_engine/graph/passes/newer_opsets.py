"""Converts models from operator sets that are too new for ONNX Runtime."""

from collections.abc import Iterator, Mapping
from copy import deepcopy

import onnx
from onnx import helper, inliner, shape_inference

from kfac_engine.errors import ModelError
from kfac_engine.graph.definitions import DOMAIN, as_call, is_defined, schema_of
from kfac_engine.graph.failures import model_errors
from kfac_engine.graph.passes.canonicalize import NEWEST_OPSET, opset
from kfac_engine.graph.passes.order import label_of

# First version of an operator that has no kernel in ONNX Runtime 1.31.
_WITHOUT_KERNEL: Mapping[tuple[str, str], int] = {
    ("", "Attention"): 25,
    ("", "Swish"): 24,
    ("ai.onnx.preview", "FlexAttention"): 1,
}
# Operators that sets 27 and 28 extended by element types, or by modes of a new attribute.
_WIDENED = frozenset(
    """
    BitShift Cast Celu Compress DepthToSpace DequantizeLinear Einsum Mod OneHot Optional
    OptionalGetElement OptionalHasElement QuantizeLinear Range ReduceLogSum ReduceLogSumExp
    ReverseSequence SpaceToDepth Unique
    """.split()  # noqa: SIM905 (a list literal would be twenty lines)
)


def executable(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model in an operator set that ONNX Runtime can execute.

    Definitions replace the operators that are too new; the result is ``model`` if there are none.
    The model has no functions, and its standard domain is ``""``.
    """
    versions = {entry.domain: entry.version for entry in model.opset_import}
    with model_errors(
        f"an operator newer than set {NEWEST_OPSET} cannot be replaced by its definition"
    ):
        while any(_is_new(node, versions) for node in model.graph.node):
            model = _expanded(model, versions)
    if opset(model) > NEWEST_OPSET:
        others = [entry for entry in model.opset_import if entry.domain]
        del model.opset_import[:]
        model.opset_import.extend([helper.make_opsetid("", NEWEST_OPSET), *others])
    return model


def _is_new(node: onnx.NodeProto, versions: Mapping[str, int]) -> bool:
    schema = schema_of(node.op_type, node.domain, versions)
    if schema is None:
        return False
    missing = _WITHOUT_KERNEL.get((node.domain, node.op_type))
    if missing is not None and schema.since_version >= missing:
        return True
    if node.domain or schema.since_version <= NEWEST_OPSET:
        return False
    older = schema_of(node.op_type, "", {"": NEWEST_OPSET})
    same = node.op_type in _WIDENED and older is not None
    return not same or any(entry.name not in older.attributes for entry in node.attribute)


def _expanded(model: onnx.ModelProto, versions: Mapping[str, int]) -> onnx.ModelProto:
    """Return a model in which each new operator is replaced by its definition.

    A definition may contain operators that are new themselves.
    """
    types = dict(_types(model))
    result = deepcopy(model)
    for index, node in enumerate(result.graph.node):
        if not _is_new(node, versions):
            continue
        if not is_defined(node.op_type, node.domain, versions):
            raise ModelError(
                f"the {label_of(node)} is of operator set {versions[node.domain]}, but only sets "
                f"up to {NEWEST_OPSET} can be executed; export the model with one of these sets."
            )
        operands = [types.get(name, onnx.TypeProto()) for name in node.input]
        call, function = as_call(node, operands, versions, f"{node.op_type}_{index}")
        node.CopyFrom(call)
        # The definition is read in the operator set of the model.
        del function.opset_import[:]
        function.opset_import.extend(model.opset_import)
        result.functions.append(function)
    result.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    result = inliner.inline_local_functions(result)
    imports = [entry for entry in result.opset_import if entry.domain != DOMAIN]
    del result.opset_import[:]
    result.opset_import.extend(imports)
    return result


def _types(model: onnx.ModelProto) -> Iterator[tuple[str, onnx.TypeProto]]:
    inferred = shape_inference.infer_shapes(model).graph
    for entry in (*inferred.input, *inferred.value_info, *inferred.output):
        yield entry.name, entry.type
    for tensor in inferred.initializer:
        yield tensor.name, helper.make_tensor_type_proto(tensor.data_type, tensor.dims)
