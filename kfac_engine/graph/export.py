"""Writes new weights into the user's model, and keeps its nodes, names and element types."""

from collections.abc import Mapping, Sequence
from copy import deepcopy

import numpy as np
import onnx
from onnx import helper

from kfac_engine._types import Array
from kfac_engine.errors import InputError, ShapeError, UnknownNameError, UnsupportedError
from kfac_engine.graph.files import ModelFiles, model_files
from kfac_engine.graph.load import LoadedModel
from kfac_engine.graph.passes.order import all_nodes
from kfac_engine.graph.passes.upcast import in_types
from kfac_engine.graph.structure import Input, Node
from kfac_engine.graph.tensors import nested_initializers
from kfac_engine.graph.write import INITIALIZERS_ALONE, node_proto, tensor, value_info


def export_files(model: LoadedModel, values: Mapping[str, Array], location: str) -> ModelFiles:
    """Return the files of a model in its original form, with new values of constants.

    Values are cast to the element types of the file, and other constants are unchanged. A weight
    that the file writes as ``ConstantOfShape`` becomes a ``Constant`` node. ``location`` names a
    second file, for weights that exceed the limit of one message. A constant inside a function of
    the file, or with the name of another, raises an UnsupportedError.
    """
    return model_files(*_with_nodes(model, values), location)


def extended_files(
    model: LoadedModel,
    nodes: Sequence[Node],
    constants: Mapping[str, Array],
    outputs: Sequence[Input],
    location: str,
) -> ModelFiles:
    """Return the files of a model with more nodes, constants and outputs at its end.

    The nodes read names of ``file_values`` or their own results and constants. A new name that the
    file already has raises InputError. ``location`` is as for ``export_files``.
    """
    result, values = _with_nodes(model, {})
    names = file_values(model)
    for name in (*constants, *(name for node in nodes for name in node.outputs)):
        if name in names:
            raise InputError(
                f"the file has a value '{name}' already, so a new value cannot have this name; "
                f"rename the value in the file."
            )
        names.add(name)
    read = {name for node in nodes for name in node.inputs}
    assert read <= names, "the nodes read values of the file"
    versions = {entry.domain: entry.version for entry in result.opset_import}
    result.graph.node.extend(node_proto(node, versions) for node in nodes)
    result.graph.output.extend(map(value_info, outputs))
    result.graph.initializer.extend(onnx.TensorProto(name=name) for name in constants)
    if result.ir_version < INITIALIZERS_ALONE:
        entries = (Input(name, array.dtype, array.shape) for name, array in constants.items())
        result.graph.input.extend(map(value_info, entries))
    return model_files(result, {**values, **constants}, location)


def file_values(model: LoadedModel) -> set[str]:
    """Return the names of all values in the graph of a file, except inside functions."""
    graph = model.template.graph
    names = {entry.name for entry in (*graph.input, *graph.initializer)}
    names.update(name for node in graph.node for name in node.output)
    return names


def _with_nodes(
    model: LoadedModel, values: Mapping[str, Array]
) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """Return the message with new values in its nodes, and the values of its initializers."""
    constants = in_types({**model.graph.constants, **_checked(model, values)}, model.stored)
    result = deepcopy(model.template)
    written = {entry.name for entry in result.graph.initializer}
    for node in all_nodes(result.graph.node):
        names = [name for name in node.output if name in values]
        if names:
            _become_constant(node, constants[names[0]])
            written.update(names)
    for entry in nested_initializers(result.graph.node):
        if entry.name in values:
            entry.CopyFrom(tensor(constants[entry.name], entry.name))
            written.add(entry.name)
    inner = [name for name in values if name not in written]
    if inner:
        raise UnsupportedError(
            f"'{inner[0]}' is inside a function of the file, or several bodies have a constant of "
            f"this name, so its new value cannot be written; export the model without functions."
        )
    return result, constants


def _checked(model: LoadedModel, values: Mapping[str, Array]) -> dict[str, Array]:
    """Return ``values`` in the element types of the model, after checks of names and shapes."""
    constants = model.graph.constants
    for name, value in values.items():
        if name not in constants:
            raise UnknownNameError(f"'{name}' is not a constant of model '{model.graph.name}'.")
        if np.shape(value) != constants[name].shape:
            raise ShapeError(
                f"the new value of '{name}' has shape {np.shape(value)}, but the model has "
                f"{constants[name].shape}."
            )
    return {name: np.asarray(value, constants[name].dtype) for name, value in values.items()}


def _become_constant(node: onnx.NodeProto, value: Array) -> None:
    # An initializer would be wrong, because old format versions require it among the graph inputs.
    node.op_type = "Constant"
    del node.input[:], node.attribute[:]
    node.attribute.append(helper.make_attribute("value", tensor(value)))
