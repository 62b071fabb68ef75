"""Converts a protobuf model to one operator set, without functions, and checks its nodes.

Each step receives a model without large tensors, so that messages are small and the C++ passes of
onnx are fast.
"""

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy

import onnx
from onnx import checker, defs, helper, inliner, shape_inference, version_converter

from kfac_engine._types import Array
from kfac_engine.errors import ModelError, UnsupportedError
from kfac_engine.graph.failures import model_errors
from kfac_engine.graph.passes.bodies import refuse_unfit_bodies
from kfac_engine.graph.passes.expansions import check_functions
from kfac_engine.graph.passes.order import all_nodes, bodies_of, claim, label_of, taken_names
from kfac_engine.graph.tensors import to_array

# Derivative rules are written for operator set 18 and newer sets.
OLDEST_OPSET = 18
# First operator set in which the body of Scan receives the first operand of Scan.
_CURRENT_BODIES = 9
# First operator set in which operators broadcast like NumPy.
_NUMPY_BROADCAST = 7
# ONNX Runtime 1.31 executes operator sets up to 26.
NEWEST_OPSET = min(26, defs.onnx_opset_version())
# Operators that sets 27 and 28 added have definitions in older operators.
_NEWEST_KNOWN = min(28, defs.onnx_opset_version())

# Operators of the standard domain that ONNX Runtime implements and onnx does not define, with the
# newest operator set for which this is true.
_RUNTIME_OPERATORS = {"SimplifiedLayerNormalization": _NEWEST_KNOWN, "GroupNormalization": 20}

# All names of the standard domain.
_STANDARD_DOMAINS = ("", "ai.onnx")
# Format version of intermediate models. Old versions require initializers among the inputs.
_IR_VERSION = 10


def check_versions(model: onnx.ModelProto) -> None:
    """Raise a ModelError for formats and operator sets newer than the installed libraries."""
    if model.ir_version > onnx.IR_VERSION:
        raise ModelError(
            f"the model has ONNX format version {model.ir_version}, but onnx {onnx.__version__} "
            f"reads versions up to {onnx.IR_VERSION}; export it again or install a newer onnx."
        )
    if not 1 <= opset(model) <= _NEWEST_KNOWN:
        raise ModelError(
            f"the model uses operator set {opset(model)}, but only 1 to {_NEWEST_KNOWN} are known; "
            f"export it with operator set {NEWEST_OPSET} or older."
        )


def opset(model: onnx.ModelProto) -> int:
    """Return the version of the standard operator set; 1 if the file does not state it."""
    versions = (entry.version for entry in model.opset_import if entry.domain in _STANDARD_DOMAINS)
    return next(versions, 1)


def inline_functions(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model in which the bodies of functions replace their calls.

    ``model`` is not changed, and is the result if it has no functions.
    """
    if not model.functions:
        return model
    check_functions(model)
    called = deepcopy(model)
    _add_default_attributes(called)
    with model_errors("the model's functions cannot be inlined"):
        return inliner.inline_local_functions(called, convert_version=True)


def _add_default_attributes(model: onnx.ModelProto) -> None:
    """Add default attributes to the calls of functions, in place.

    The inliner of onnx 1.23 ignores default values.
    """
    functions = {(f.domain, f.name, f.overload): f for f in model.functions}
    bodies = (model.graph.node, *(function.node for function in model.functions))
    for call in (node for body in bodies for node in all_nodes(body)):
        function = functions.get((call.domain, call.op_type, call.overload))
        if function is not None:
            explicit = {entry.name for entry in call.attribute}
            defaults = (entry for entry in function.attribute_proto if entry.name not in explicit)
            call.attribute.extend(defaults)


def unify_standard_domain(model: onnx.ModelProto) -> None:
    """Replace the names of the standard domain at the top level by ``""``, in place."""
    others = [e for e in model.opset_import if e.domain not in _STANDARD_DOMAINS]
    imports = [helper.make_opsetid("", opset(model)), *others]
    del model.opset_import[:]
    model.opset_import.extend(imports)
    model.ir_version = _IR_VERSION
    for node in model.graph.node:
        if node.domain in _STANDARD_DOMAINS:
            node.domain = ""


def check_nodes(model: onnx.ModelProto) -> None:
    """Check the nodes of a model without functions against the schemas of their operators.

    Names and order were checked before. An operator that does not exist, or whose operands or
    attributes do not fit, raises ModelError.
    """
    # Unlike runtimes, the checker requires types and shapes of inputs and outputs. The checked
    # model has the same nodes, and scalars as inputs and outputs.
    version = opset(model)
    others = [
        node for node in model.graph.node if version <= _RUNTIME_OPERATORS.get(node.op_type, 0)
    ]
    known = [node for node in model.graph.node if node not in others]
    probe_inputs = dict.fromkeys(
        entry.name for entry in (*model.graph.input, *model.graph.initializer)
    )
    probe_inputs |= dict.fromkeys(name for node in others for name in node.output if name)
    probe = helper.make_model(
        helper.make_graph(
            known,
            "probe",
            [helper.make_tensor_value_info(name, 1, []) for name in probe_inputs],
            [helper.make_tensor_value_info(entry.name, 1, []) for entry in model.graph.output],
        ),
        opset_imports=model.opset_import,
        ir_version=_IR_VERSION,
    )
    with model_errors("the model is not valid ONNX"):
        checker.check_model(probe)
    for node in all_nodes(model.graph.node):
        _refuse_missing_operands(node, opset(model))
        if opset(model) >= _CURRENT_BODIES:
            refuse_unfit_bodies(node)


def _refuse_missing_operands(node: onnx.NodeProto, version: int) -> None:
    """Raise a ModelError for a missing operand that the checker accepts but ONNX Runtime needs."""
    missing = [index for index, name in enumerate(node.input) if not name]
    if not missing or node.domain or not defs.has(node.op_type, max_inclusive_version=version):
        return
    formal = defs.get_schema(node.op_type, version).inputs
    for index in missing:
        kind = formal[min(index, len(formal) - 1)].option
        if kind != defs.OpSchema.FormalParameterOption.Optional:
            raise ModelError(
                f"operand {index} of the {label_of(node)} has no name, but it is required."
            )


def upgrade(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model in operator set 18 or newer.

    ``model`` is not changed, and is the result if its operator set is new enough. An operator
    without a newer form raises ModelError; a newer form that would compute other values raises
    UnsupportedError.
    """
    old = opset(model)
    if old >= OLDEST_OPSET:
        return model
    _refuse_misread(model, old)
    with model_errors(
        f"the model's operator set {old} cannot be brought to {OLDEST_OPSET}",
        f"export it with operator set {OLDEST_OPSET}",
    ):
        newer = version_converter.convert_version(_closed(model, old), OLDEST_OPSET)
    if old < _NUMPY_BROADCAST:
        del newer.graph.input[:], newer.graph.output[:], newer.graph.value_info[:]
        newer.graph.input.extend(model.graph.input)
        newer.graph.output.extend(model.graph.output)
    if old < 11:
        # Upsample and the first Resize sampled in one way. The converter omits the attributes, and
        # their defaults mean another way.
        for node in all_nodes(newer.graph.node):
            if node.op_type == "Resize":
                _set(node, coordinate_transformation_mode="asymmetric", nearest_mode="floor")
    return newer


def _closed(model: onnx.ModelProto, version: int) -> onnx.ModelProto:
    """Return a model in which every unknown input size is a number, for operator sets up to 6."""
    # The converter of onnx 1.23 requires sizes if operators broadcast by attribute, and uses them
    # only to align axes.
    if version >= _NUMPY_BROADCAST:
        return model
    closed = deepcopy(model)
    for entry in closed.graph.input:
        for dim in entry.type.tensor_type.shape.dim:
            if dim.dim_value <= 0:
                dim.dim_value = 2
    for result in closed.graph.output:
        result.type.tensor_type.ClearField("shape")
    _align(closed)
    return closed


def _align(model: onnx.ModelProto) -> None:
    """Add trailing axes to operands that broadcast along the axes from ``axis``, in place."""
    # The converter of onnx 1.23 adds them at wrong positions.
    inferred = shape_inference.infer_shapes(model).graph
    ranks = {
        entry.name: len(entry.type.tensor_type.shape.dim)
        for entry in (*inferred.input, *inferred.value_info)
        if entry.type.tensor_type.HasField("shape")
    }
    ranks |= {entry.name: len(entry.dims) for entry in inferred.initializer}
    nodes = []
    for node in model.graph.node:
        axis = next((e for e in node.attribute if e.name == "axis" and len(node.input) == 2), None)
        if axis is not None and any(e.name == "broadcast" and e.i for e in node.attribute):
            first, second = (ranks.get(name) for name in node.input)
            if not first or second is None:
                raise UnsupportedError(
                    f"the {label_of(node)} broadcasts from an axis, with operands of unknown "
                    f"shapes; export the model with operator set {OLDEST_OPSET} or newer."
                )
            node.attribute.remove(axis)
            axes = list(range(second, first - axis.i % first))
            if axes:
                lifted = f"{node.input[1]} for {node.output[0]}"
                nodes.append(helper.make_node("Unsqueeze", [node.input[1]], [lifted], axes=axes))
                node.input[1] = lifted
        nodes.append(node)
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def _refuse_misread(model: onnx.ModelProto, version: int) -> None:
    known = {entry.name: to_array(entry) for entry in model.graph.initializer}
    for node in all_nodes(model.graph.node):
        since, affects = _MISREAD.get(node.op_type, (0, None))
        if version < since and affects and affects(node, known):
            raise UnsupportedError(
                f"the {label_of(node)} of operator set {version} has no exact counterpart in newer "
                f"sets; export the model with operator set {OLDEST_OPSET} or newer."
            )


def _shrinks_to_nearest(node: onnx.NodeProto, known: Mapping[str, Array]) -> bool:
    """Return whether a Resize of set 10 may round positions up, as for scales below 1."""
    modes = (entry.s for entry in node.attribute if entry.name == "mode")
    scales = known.get(node.input[1])
    return next(modes, b"nearest") == b"nearest" and (scales is None or bool((scales < 1).any()))


def _has_channel_slopes(node: onnx.NodeProto, known: Mapping[str, Array]) -> bool:
    """Return whether a PRelu of set 6 has slopes along axis 1; newer sets use the last axis."""
    return node.input[1] not in known or known[node.input[1]].size != 1


# Operators that the converter does not change, although their meaning changed. A row has the
# operator set of the change and a test for the affected nodes.
_MISREAD: Mapping[str, tuple[int, Callable[[onnx.NodeProto, Mapping[str, Array]], bool]]] = {
    "Hardmax": (13, lambda node, known: True),  # flattened its operand to a matrix
    "PRelu": (7, _has_channel_slopes),
    "Resize": (11, _shrinks_to_nearest),
}


def _set(node: onnx.NodeProto, **attributes: str) -> None:
    others = [entry for entry in node.attribute if entry.name not in attributes]
    new = [helper.make_attribute(name, value) for name, value in attributes.items()]
    del node.attribute[:]
    node.attribute.extend([*others, *new])


_RECURRENT = frozenset({"LSTM", "GRU", "RNN"})

# Permutations of operands from batch-first to steps-first order, and of results from steps-first to
# batch-first order.
_OPERANDS: Mapping[int, tuple[int, ...]] = {0: (1, 0, 2), 5: (1, 0, 2), 6: (1, 0, 2)}
_RESULTS: Mapping[int, tuple[int, ...]] = {0: (2, 0, 1, 3), 1: (1, 0, 2), 2: (1, 0, 2)}


def put_steps_first(graph: onnx.GraphProto) -> None:
    """Rewrite recurrent nodes of layout 1 as nodes of layout 0 between transpositions, in place.

    Nodes in bodies are rewritten, too.
    """
    if any(_is_batchwise(node) for node in all_nodes(graph.node)):
        _rewrite(graph, taken_names(graph))


def _rewrite(graph: onnx.GraphProto, used: set[str]) -> None:
    nodes = [new for node in graph.node for new in _rewritten(node, used)]
    for node in nodes:
        for body in bodies_of(node):
            _rewrite(body, used)
    del graph.node[:]
    graph.node.extend(nodes)


def _is_batchwise(node: onnx.NodeProto) -> bool:
    recurrent = node.op_type in _RECURRENT and not node.domain
    return recurrent and any(entry.name == "layout" and entry.i == 1 for entry in node.attribute)


def _rewritten(node: onnx.NodeProto, used: set[str]) -> Iterator[onnx.NodeProto]:
    core, after = deepcopy(node), []
    if _is_batchwise(node):
        attributes = [entry for entry in node.attribute if entry.name != "layout"]
        del core.attribute[:]
        core.attribute.extend(attributes)
        for index, perm in _OPERANDS.items():
            name = node.input[index] if len(node.input) > index else ""
            if name:
                core.input[index] = claim(f"{name}, steps first", used)
                yield helper.make_node("Transpose", [name], [core.input[index]], perm=perm)
        for index, perm in _RESULTS.items():
            name = node.output[index] if len(node.output) > index else ""
            if name:
                core.output[index] = claim(f"{name}, steps first", used)
                after.append(helper.make_node("Transpose", [core.output[index]], [name], perm=perm))
    yield core
    yield from after
