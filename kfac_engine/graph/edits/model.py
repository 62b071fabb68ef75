"""Edits a model and keeps the operator sets, names and element types of its file.

The message has no data of initializers; ``constants`` has them, mapped where they are external.
"""

import os
from collections.abc import Collection, Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar

import onnx
from onnx import helper, shape_inference

from kfac_engine._types import Array
from kfac_engine.graph.files import saved_model
from kfac_engine.graph.load import ModelSource, axis_size, separated_model
from kfac_engine.graph.passes.canonicalize import check_versions, inline_functions, opset
from kfac_engine.graph.passes.constants import constant_value
from kfac_engine.graph.passes.order import claim, reads, sort_nodes, taken_names
from kfac_engine.graph.structure import Input
from kfac_engine.graph.tensors import element_type
from kfac_engine.graph.write import INITIALIZERS_ALONE, ModelProto, tensor, value_info

# Larger constants are not shapes; shape inference needs only their sizes.
_SMALL = 1024


class EditedModel:
    """The nodes and constants of a model, to be changed in place.

    Functions of the file are inlined.

    Args:
        source: Path, bytes or message of the model.

    Attributes:
        message: The message, without nodes and without data of initializers.
        nodes: The nodes, in topological order.
        constants: Values of initializers and ``Constant`` nodes.
        initializers: Names of the initializers, in their order.
        producers: The node that computes each value.
    """

    def __init__(self, source: ModelSource) -> None:
        message, self.constants = separated_model(source)
        check_versions(message)
        message = inline_functions(message)
        sort_nodes(message.graph)
        self.nodes = [deepcopy(node) for node in message.graph.node]
        del message.graph.node[:]
        self.message = message
        self.opset = opset(message)
        path = isinstance(source, str | os.PathLike)
        self.name = Path(source).name if path else str(message.graph.name or "model")  # type: ignore[arg-type] # a path
        self.initializers = [entry.name for entry in message.graph.initializer]
        for node in self.nodes:
            value = constant_value(node, self.constants)
            if value is not None and node.op_type == "Constant":
                self.constants[node.output[0]] = value
        self.producers = {name: node for node in self.nodes for name in node.output if name}
        self._readers: dict[str, list[tuple[onnx.NodeProto, int]]] = {}
        for node in self.nodes:
            self._count(node)
        graph = message.graph
        graph.node.extend(self.nodes)
        self._used = taken_names(graph, self.constants)
        del graph.node[:]

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the outputs."""
        return tuple(entry.name for entry in self.message.graph.output)

    def readers(self, name: str) -> list[tuple[onnx.NodeProto, int]]:
        """Return the nodes that read a value, with the index of the operand; -1 for a body."""
        return self._readers.get(name, [])

    def reader(self, name: str) -> onnx.NodeProto | None:
        """Return the only reader of a value that is not an output; None if there is another use."""
        readers = self.readers(name)
        return readers[0][0] if len(readers) == 1 and name not in self.outputs else None

    def free(self, name: str) -> str:
        """Return a name like ``name`` that no value has, and take it."""
        return claim(name, self._used)

    def add_constant(self, name: str, value: Array, *, overridable: bool = False) -> str:
        """Add an initializer with an unused name, and return the name.

        A caller of ONNX Runtime can replace the value of an ``overridable`` one in each run.
        """
        self.constants[name] = value
        self.initializers.append(name)
        if overridable or self.message.ir_version < INITIALIZERS_ALONE:
            entry = value_info(Input(name, value.dtype, value.shape))
            self.message.graph.input.append(entry)
        return name

    def own_constant(self, name: str, reader: onnx.NodeProto, value: Array) -> str:
        """Add an initializer for one node; return its name, which has a suffix if it is in use.

        An initializer of this name that only ``reader`` reads has the new value instead.
        """
        if name not in self.initializers or any(n is not reader for n, _ in self.readers(name)):
            return self.add_constant(self.free(name), value)
        self.constants[name] = value
        for entry in self.message.graph.input:
            if entry.name == name:
                entry.CopyFrom(value_info(Input(name, value.dtype, value.shape)))
        return name

    def set_constant(self, name: str, value: Array) -> None:
        """Replace the value of an initializer or of a ``Constant`` node, in the same shape."""
        self.constants[name] = value
        node = self.producers.get(name)
        if node is not None:
            del node.attribute[:]
            node.attribute.append(helper.make_attribute("value", tensor(value)))

    def declared(self, output: str) -> Input:
        """Return the declaration of an output."""
        entry = next(entry for entry in self.message.graph.output if entry.name == output)
        form = entry.type.tensor_type
        dtype = element_type(form.elem_type, f"output '{output}'")
        shape = tuple(map(axis_size, form.shape.dim)) if form.HasField("shape") else None
        return Input(output, dtype, shape)

    def declare(self, output: Input) -> None:
        """Replace the declaration of an output."""
        for entry in self.message.graph.output:
            if entry.name == output.name:
                entry.CopyFrom(value_info(output))

    def drop_outputs(self, names: Collection[str]) -> None:
        """Remove outputs from the declarations of the graph."""
        outputs = self.message.graph.output
        _replace(outputs, [entry for entry in outputs if entry.name not in names])

    def insert(self, after: onnx.NodeProto, nodes: Iterable[onnx.NodeProto]) -> None:
        """Insert nodes behind another node."""
        place = next(i for i, node in enumerate(self.nodes) if node is after) + 1
        new = list(nodes)
        self.nodes[place:place] = new
        for node in new:
            self.producers.update(dict.fromkeys(filter(None, node.output), node))
            self._count(node)

    def remove(self, node: onnx.NodeProto) -> None:
        """Remove a node; its results have other producers, or no readers."""
        self.nodes = [other for other in self.nodes if other is not node]
        for name in node.output:
            if self.producers.get(name) is node:
                del self.producers[name]
        for readers in self._readers.values():
            readers[:] = [entry for entry in readers if entry[0] is not node]

    def read(self, node: onnx.NodeProto, index: int, name: str) -> None:
        """Replace an operand of a node."""
        readers = self._readers[node.input[index]]
        readers[:] = [e for e in readers if e[0] is not node or e[1] != index]
        node.input[index] = name
        self._readers.setdefault(name, []).append((node, index))

    def compute(self, node: onnx.NodeProto, old: str, new: str) -> None:
        """Give the result ``old`` of a node another name; its readers still read ``old``."""
        node.output[:] = [new if name == old else name for name in node.output]
        self.producers[new] = node
        if self.producers.get(old) is node:
            del self.producers[old]

    def bypass(self, node: onnx.NodeProto, operand: str) -> None:
        """Remove a node, whose readers read ``operand`` instead of its first result."""
        result = node.output[0]
        self.remove(node)
        if result not in self.outputs:
            for reader, index in tuple(self.readers(result)):
                self.read(reader, index, operand)
            return
        # An output keeps its name, so the operand receives it.
        maker = self.producers[operand]
        self.compute(maker, operand, result)
        for reader, index in tuple(self.readers(operand)):
            self.read(reader, index, result)

    def downstream(self, value: str) -> list[onnx.NodeProto]:
        """Return the nodes whose results depend on a value, in topological order."""
        reached, dependents = {value}, []
        for node in self.nodes:
            if not reached.isdisjoint(reads(node)):
                dependents.append(node)
                reached.update(node.output)
        return dependents

    def prune(self) -> None:
        """Remove nodes, constants and declarations that no output depends on."""
        needed, live = {*self.outputs}, []
        for node in reversed(self.nodes):
            if not needed.isdisjoint(node.output):
                live.append(node)
                needed.update(reads(node))
        self.nodes = live[::-1]
        graph = self.message.graph
        dropped = {name for name in self.initializers if name not in needed}
        self.initializers = [name for name in self.initializers if name not in dropped]
        inputs = [entry for entry in graph.input if entry.name not in dropped]
        _replace(graph.input, inputs)
        values = {name for node in self.nodes for name in node.output}
        _replace(graph.value_info, [e for e in graph.value_info if e.name in values])
        notes = [e for e in graph.quantization_annotation if e.tensor_name in values | needed]
        _replace(graph.quantization_annotation, notes)

    def forget_shapes(self, values: Iterable[str]) -> None:
        """Remove the declared shapes of inner values."""
        changed = set(values)
        entries = self.message.graph.value_info
        _replace(entries, [entry for entry in entries if entry.name not in changed])

    def shapes(self) -> Mapping[str, tuple[int | str | None, ...]]:
        """Return the shapes that follow from the inputs, by name."""
        probe = self._whole()
        graph = probe.graph
        large = []
        for name in self.initializers:
            array = self.constants[name]
            if array.size > _SMALL:
                large.append(value_info(Input(name, array.dtype, array.shape)))
            else:
                graph.initializer.append(tensor(array, name))
        data = [entry for entry in graph.input if entry.name not in self.constants]
        _replace(graph.input, [*data, *large])
        del graph.value_info[:]
        for entry in graph.output:
            entry.type.tensor_type.ClearField("shape")
        inferred = shape_inference.infer_shapes(probe, data_prop=True).graph
        return {
            entry.name: tuple(map(axis_size, entry.type.tensor_type.shape.dim))
            for entry in (*inferred.input, *inferred.value_info, *inferred.output)
            if entry.type.tensor_type.HasField("shape")
        }

    def written(self, path: str | Path | None = None) -> ModelProto:
        """Return the edited model; with a path, also write it, with a second file beyond 2 GB."""
        constants = {name: self.constants[name] for name in self.initializers}
        return saved_model(self._whole(), constants, path)

    def _whole(self) -> ModelProto:
        """Return the message with its nodes, without initializers."""
        model = deepcopy(self.message)
        del model.graph.initializer[:]
        model.graph.node.extend(self.nodes)
        return model

    def _count(self, node: onnx.NodeProto) -> None:
        for index, name in enumerate(node.input):
            if name:
                self._readers.setdefault(name, []).append((node, index))
        for name in dict.fromkeys(reads(node)):
            if name not in node.input:
                self._readers.setdefault(name, []).append((node, -1))


_T = TypeVar("_T", int, float, str, tuple[float, ...])


def attribute(node: onnx.NodeProto, name: str, default: _T) -> _T:
    """Return an attribute of a node, which has the type of its default value."""
    for entry in node.attribute:
        if entry.name == name:
            value: Any = helper.get_attribute_value(entry)
            value = value.decode() if isinstance(value, bytes) else value
            return type(default)(value)
    return default


def operand(node: onnx.NodeProto, index: int) -> str:
    """Return the name of an operand; empty if it is omitted."""
    return str(node.input[index]) if index < len(node.input) else ""


def operator(node: onnx.NodeProto) -> str:
    """Return the name of an operator, with a domain that is not the standard one as a prefix."""
    standard = node.domain in {"", "ai.onnx"}
    return str(node.op_type) if standard else f"{node.domain}::{node.op_type}"


def _replace(entries, remaining) -> None:  # type: ignore[no-untyped-def] # repeated fields have no type
    copies = [type(entry).FromString(entry.SerializeToString()) for entry in remaining]
    del entries[:]
    entries.extend(copies)
