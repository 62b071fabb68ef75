"""Rewrites of a model in protobuf form until one spelling is left.

Each step takes a model whose large tensors were taken out, so that protobuf stays small and the C++
passes of onnx are quick.
"""

import onnx
from onnx import checker, defs, helper, inliner, version_converter

from kfac_engine.errors import ModelError

# Derivative rules read the forms of operator set 18; newer models keep theirs.
OLDEST_OPSET = 18
# ONNX Runtime 1.31 executes operator sets up to 26.
NEWEST_OPSET = min(26, defs.onnx_opset_version())

# Two spellings of one domain.
_STANDARD_DOMAINS = ("", "ai.onnx")
# A format version of our own choice: old ones want initializers among the inputs.
_IR_VERSION = 10


def check_versions(model: onnx.ModelProto) -> None:
    """Refuse formats and operator sets that the installed libraries do not know.

    Args:
        model: As read.

    Raises:
        ModelError: A version is too new.
    """
    if model.ir_version > onnx.IR_VERSION:
        raise ModelError(
            f"the model has ONNX format version {model.ir_version}, but onnx {onnx.__version__} "
            f"reads versions up to {onnx.IR_VERSION}; export it again or install a newer onnx."
        )
    if not 1 <= opset(model) <= NEWEST_OPSET:
        raise ModelError(
            f"the model uses operator set {opset(model)}, but only 1 to {NEWEST_OPSET} can be "
            f"executed; export it with operator set {NEWEST_OPSET} or older."
        )


def opset(model: onnx.ModelProto) -> int:
    """Version of the standard operator set; 1 for the oldest files, which do not state it."""
    versions = (entry.version for entry in model.opset_import if entry.domain in _STANDARD_DOMAINS)
    return next(versions, 1)


def inline_functions(model: onnx.ModelProto) -> onnx.ModelProto:
    """``model`` with calls of its own functions replaced by their bodies.

    Args:
        model: Unchanged.

    Returns:
        A model without functions; the given one if it has none.

    Raises:
        ModelError: A function is malformed.
    """
    if not model.functions:
        return model
    try:
        return inliner.inline_local_functions(model, convert_version=True)
    except (RuntimeError, ValueError, IndexError) as failure:
        raise ModelError(f"the model's functions cannot be inlined: {failure}.") from failure


def unify_standard_domain(model: onnx.ModelProto) -> None:
    """Write the standard domain as ``""`` everywhere at the top level of ``model``, in place."""
    others = [e for e in model.opset_import if e.domain not in _STANDARD_DOMAINS]
    imports = [helper.make_opsetid("", opset(model)), *others]
    del model.opset_import[:]
    model.opset_import.extend(imports)
    model.ir_version = _IR_VERSION
    for node in model.graph.node:
        if node.domain in _STANDARD_DOMAINS:
            node.domain = ""


def check_nodes(model: onnx.ModelProto) -> None:
    """Compare each node with the definition of its operator; other domains are let through.

    Args:
        model: Without functions, names and order checked.

    Raises:
        ModelError: An operator does not exist, or its operands or attributes do not fit.
    """
    # The checker wants types and shapes at the border that runtimes do not ask for: hand it a model
    # with the same nodes and a border of numbers.
    given = dict.fromkeys(entry.name for entry in (*model.graph.input, *model.graph.initializer))
    probe = helper.make_model(
        helper.make_graph(
            model.graph.node,
            "probe",
            [helper.make_tensor_value_info(name, 1, []) for name in given],
            [helper.make_tensor_value_info(entry.name, 1, []) for entry in model.graph.output],
        ),
        opset_imports=model.opset_import,
        ir_version=_IR_VERSION,
    )
    try:
        checker.check_model(probe)
    except checker.ValidationError as failure:
        raise ModelError(f"the model is not valid ONNX: {_first_line(failure)}") from failure


def upgrade(model: onnx.ModelProto) -> onnx.ModelProto:
    """``model`` in operator set 18 if its own is older.

    Args:
        model: Unchanged.

    Returns:
        The same function in the newer operators; the given model if it is new enough.

    Raises:
        ModelError: An operator has no newer form.
    """
    if opset(model) >= OLDEST_OPSET:
        return model
    try:
        return version_converter.convert_version(model, OLDEST_OPSET)
    except (RuntimeError, ValueError, IndexError, version_converter.ConvertError) as failure:
        raise ModelError(
            f"the model's operator set {opset(model)} cannot be brought to {OLDEST_OPSET}: "
            f"{_first_line(failure)}; export it with operator set {OLDEST_OPSET}."
        ) from failure


def _first_line(failure: Exception) -> str:
    """What onnx's C++ says, without the path of its source file."""
    text = next((line for line in str(failure).splitlines() if line.strip()), "no reason given")
    return text.strip().rstrip(".")
