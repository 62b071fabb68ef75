"""Rewrites operators that ONNX Runtime's WebGPU provider lacks or computes wrongly.

onnxruntime-web 1.30 computes a convolution in groups wrongly on WebGPU if a group has more than 4
outputs and their number is not a multiple of 4: 14 to 42 % of the result. Such a convolution gets
further outputs, whose filters are zero, up to a multiple of 4; they are cut off again.

A ``Split`` binds a buffer for its input and for each output. WebGPU guarantees 8 in a shader, so
that a ``Split`` into many parts, such as the steps of a recurrence, becomes a tree of them.
"""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import onnx
from onnx import helper, numpy_helper, shape_inference

from kfac_engine.errors import UnsupportedError
from kfac_engine.graph.passes.order import all_nodes, bodies_of, claim, taken_names

# Where a file is to run: on any provider of ONNX Runtime, or also on WebGPU.
Provider: TypeAlias = Literal["any", "webgpu"]
PROVIDERS: tuple[str, ...] = get_args(Provider)

_RIGHT = 4  # up to this number of outputs in a group, and for multiples of it
_PARTS = 7  # of a Split, at most


def for_webgpu(model: onnx.ModelProto) -> onnx.ModelProto:
    """Rewrite the nodes of a model and its bodies in place; return the model.

    The model was written here, with its constants inside. A convolution in groups with an unknown
    number of outputs raises UnsupportedError.
    """
    shapes = dict(_shapes(shape_inference.infer_shapes(model).graph))
    names = taken_names(model.graph, (entry.name for entry in model.graph.initializer))
    _rewrite(model.graph, shapes, {}, names)
    read = {name for node in all_nodes(model.graph.node) for name in node.input}
    _drop_unread(model.graph, read)
    return model


def _drop_unread(graph: onnx.GraphProto, read: set[str]) -> None:
    """Remove the filters that wider filters replace."""
    entries = [entry for entry in graph.initializer if entry.name in read]
    del graph.initializer[:]
    graph.initializer.extend(entries)
    for node in graph.node:
        for body in bodies_of(node):
            _drop_unread(body, read)


def _shapes(graph: onnx.GraphProto) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the shapes of values; an unknown size is zero."""
    for entry in (*graph.input, *graph.output, *graph.value_info):
        if entry.type.tensor_type.HasField("shape"):
            yield entry.name, tuple(side.dim_value for side in entry.type.tensor_type.shape.dim)
    yield from ((entry.name, tuple(entry.dims)) for entry in graph.initializer)
    for node in graph.node:
        for body in bodies_of(node):
            yield from _shapes(body)


def _rewrite(
    graph: onnx.GraphProto,
    shapes: Mapping[str, tuple[int, ...]],
    outer: Mapping[str, onnx.TensorProto],
    names: set[str],
) -> None:
    constants = {**outer, **{entry.name: entry for entry in graph.initializer}}
    nodes = []
    for node in graph.node:
        for body in bodies_of(node):
            _rewrite(body, shapes, constants, names)
        if node.op_type == "Split" and not node.domain and len(node.output) > _PARTS:
            nodes += _tree(graph, node, constants, names)
            continue
        groups = next((a.i for a in node.attribute if a.name == "group"), 1)
        if node.op_type != "Conv" or node.domain or groups == 1:
            nodes.append(node)
            continue
        filters = shapes.get(node.input[1], ())
        if not filters or not all(filters):
            raise UnsupportedError(
                f"the convolution in {groups} groups at node '{node.name}' computes with filters "
                f"of a shape that is not known before a run, so that it cannot be written for "
                f"WebGPU; freeze its layer, or leave provider out."
            )
        width = filters[0] // groups
        if width <= _RIGHT or width % _RIGHT == 0:
            nodes.append(node)
        else:
            nodes += _padded(graph, node, (groups, width, filters), constants, names)
    del graph.node[:]
    graph.node.extend(nodes)


def _tree(
    graph: onnx.GraphProto,
    node: onnx.NodeProto,
    constants: Mapping[str, onnx.TensorProto],
    names: set[str],
) -> list[onnx.NodeProto]:
    """Return Splits of at most 7 parts for a Split of more; unchanged if its sizes are unknown."""
    if len(node.input) < 2 or node.input[1] not in constants:
        return [node]
    label = claim(f"{node.name} for WebGPU", names)

    def split(value: str, outputs: list[str], sizes: list[int]) -> list[onnx.NodeProto]:
        inner, widths, whole = [], sizes, outputs
        if len(outputs) > _PARTS:
            step = -(-len(outputs) // _PARTS)
            cuts = [slice(k, k + step) for k in range(0, len(outputs), step)]
            widths = [sum(sizes[cut]) for cut in cuts]
            whole = [claim(f"{label}: part", names) for _ in cuts]
            for name, cut in zip(whole, cuts, strict=True):
                inner += split(name, outputs[cut], sizes[cut])
        lengths = claim(f"{label}: sizes", names)
        graph.initializer.append(numpy_helper.from_array(np.array(widths, np.int64), lengths))
        outer = deepcopy(node)
        outer.name = claim(f"{label}: node", names)
        outer.input[:], outer.output[:] = [value, lengths], whole
        return [outer, *inner]

    sizes = numpy_helper.to_array(constants[node.input[1]]).tolist()
    return split(node.input[0], list(node.output), sizes)


def _padded(
    graph: onnx.GraphProto,
    node: onnx.NodeProto,
    sizes: tuple[int, int, tuple[int, ...]],
    constants: Mapping[str, onnx.TensorProto],
    names: set[str],
) -> list[onnx.NodeProto]:
    """Return the nodes of a convolution with additional outputs, and cut these outputs off."""
    groups, width, filters = sizes
    padded = -(-width // _RIGHT) * _RIGHT
    nodes: list[onnx.NodeProto] = []
    label = claim(f"{node.output[0]} for WebGPU", names)

    def constant(what: str, array: object) -> str:
        name = claim(f"{label}: {what}", names)
        graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def op(kind: str, *inputs: str, to: str = "", **attributes: Any) -> str:
        result = to or claim(f"{label}: {kind}", names)
        nodes.append(helper.make_node(kind, inputs, [result], f"node of {result}", **attributes))
        return result

    def widened(value: str, shape: tuple[int, ...]) -> str:
        """Return filters, or a bias, with zeros at the end of each group."""
        if value in constants:
            array = numpy_helper.to_array(constants[value]).reshape(groups, width, -1)
            zeros = ((0, 0), (0, padded - width), (0, 0))
            return constant("filters", np.pad(array, zeros).reshape(groups * padded, *shape))
        split = op("Reshape", value, constant("groups", [groups, width, -1]))
        pads = constant("pads", [0, 0, 0, 0, padded - width, 0])
        target = constant("joined", [groups * padded, *shape])
        return op("Reshape", op("Pad", split, pads), target)

    inputs = [node.input[0], widened(node.input[1], filters[1:])]
    if len(node.input) > 2 and node.input[2]:
        inputs.append(widened(node.input[2], ()))
    wide, computed = claim(f"{label}: wide", names), deepcopy(node)
    computed.input[:], computed.output[:] = inputs, [wide]
    nodes.append(computed)
    split = op("Reshape", wide, constant("by group", [0, groups, padded, -1]))
    bounds = [constant(what, [k]) for what, k in (("start", 0), ("stop", width), ("axis", 2))]
    cut = op("Slice", split, *bounds)
    batch, pixels = op("Shape", wide, end=1), op("Shape", wide, start=2)
    outputs = constant("outputs", [groups * width])
    target = op("Concat", batch, outputs, pixels, axis=0)
    op("Reshape", cut, target, to=node.output[0])
    return nodes
