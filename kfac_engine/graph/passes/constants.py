"""Moves constants from nodes of the file to the graph's constants; separates shared constants.

Exporters write equal constants once. In an untrained normalization, scale and running variance are
ones, and shift and running mean are zeros. One array may then be a weight and a statistic, or the
statistic of several normalizations. Training must change them separately, so the statistic becomes
a second constant. Exporters also write the statistics of a normalization that is called again, and
statistics of another type, as results of Identity and Cast.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import AttributeProto, helper

from kfac_engine._types import Array
from kfac_engine.errors import UnsupportedError
from kfac_engine.graph.analysis.declared_constants import merged_buffers
from kfac_engine.graph.analysis.exporter_changes import module_path
from kfac_engine.graph.passes.order import claim, label_of, reads
from kfac_engine.graph.tensors import densified, element_type, filled, to_array

# Readers of the value of a Constant node, by the name of its attribute.
_FORMS: Mapping[str, Callable[[AttributeProto], Array]] = {
    "value": lambda entry: to_array(entry.t),
    "sparse_value": lambda entry: densified(entry.sparse_tensor),
    "value_float": lambda entry: np.asarray(entry.f, np.float32),
    "value_floats": lambda entry: np.asarray(entry.floats, np.float32),
    "value_int": lambda entry: np.asarray(entry.i, np.int64),
    "value_ints": lambda entry: np.asarray(entry.ints, np.int64),
    "value_string": lambda entry: np.asarray(entry.s.decode(), object),
    "value_strings": lambda entry: np.asarray([text.decode() for text in entry.strings], object),
}


def lift_constants(graph: onnx.GraphProto, constants: dict[str, Array]) -> frozenset[str]:
    """Move ``Constant`` nodes, and ``ConstantOfShape`` nodes of known shape, into ``constants``.

    The nodes are in topological order. The result is the names of constants that the file stores as
    a shape and one number.
    """
    nodes, filled_ones = [], set()
    for node in graph.node:
        array = constant_value(node, constants)
        if array is None:
            nodes.append(node)
        else:
            array.flags.writeable = False
            constants[node.output[0]] = array
            if node.op_type == "ConstantOfShape":
                filled_ones.add(node.output[0])
    # The list is replaced at once, because deleting single nodes would take quadratic time.
    if len(nodes) < len(graph.node):
        del graph.node[:]
        graph.node.extend(nodes)
    return frozenset(filled_ones)


def constant_value(node: onnx.NodeProto, constants: Mapping[str, Array]) -> Array | None:
    """Return the value of a node that is a constant; None for all other nodes, even invalid ones.

    ``constants`` has the shape operands of ``ConstantOfShape``. A constant that is not a dense
    tensor raises UnsupportedError.
    """
    if node.domain or len(node.output) != 1 or len(node.attribute) > 1:
        return None
    form = next(iter(node.attribute), None)
    if node.op_type == "ConstantOfShape" and node.input and node.input[0] in constants:
        value = to_array(form.t) if form else None
        return filled(constants[node.input[0]], value, f"the result of the {label_of(node)}")
    if node.op_type != "Constant" or form is None:
        return None
    if form.name not in _FORMS:
        raise UnsupportedError(
            f"the {label_of(node)} contains no dense tensor, so it cannot be used."
        )
    return _FORMS[form.name](form)


# Indices of the operands of BatchNormalization that are statistics, with the suffix of a copy.
_STATISTICS = {3: "running_mean", 4: "running_variance"}
_INITIAL = {3: 0, 4: 1}
# Operators whose result has the entries of their operand in the same order.
_PASSED_ON = frozenset({"Cast", "Identity"})


def settle_statistics(
    template: onnx.ModelProto, constants: dict[str, Array], *, apart: bool
) -> None:
    """Make running statistics constants that nothing else reads, in place.

    ``template`` has no data and receives an initializer for each new constant; ``constants``
    receives the new constants. Normalizations read their statistics directly, not through Identity
    or Cast. A statistic that is a weight as well becomes a constant of its own, like a buffer that
    an exporter merged with a parameter. With ``apart``, a statistic that several normalizations
    share unintentionally does so, too.
    """
    _Statistics(template, constants).settle(apart)


@dataclass(frozen=True)
class _Reader:
    """An operand that is a running statistic of a normalization, or another buffer."""

    node: onnx.NodeProto  # the node that reads it
    index: int  # index of the operand
    operand: str  # name of the operand in the file

    @property
    def name(self) -> str:
        """The present name of the operand."""
        return str(self.node.input[self.index])

    @property
    def suffix(self) -> str:
        """What distinguishes the name of a copy."""
        return _STATISTICS.get(self.index, "buffer")

    def read(self, name: str) -> None:
        """Replace the operand."""
        self.node.input[self.index] = name


class _Statistics:
    """The running statistics of a graph and their readers."""

    def __init__(self, template: onnx.ModelProto, constants: dict[str, Array]) -> None:
        self.graph, self.constants = template.graph, constants
        self.stored = dict(constants)
        self.is_older_exporter = template.producer_name == "pytorch"
        self.readers = [
            _Reader(node, index, node.input[index])
            for node in self.graph.node
            for index in range(len(node.input))
            if _is_statistic(node, index)
        ]

    def settle(self, apart: bool) -> None:
        """See ``settle_statistics``."""
        for node, index, buffer in [*merged_buffers(self.graph, self.stored)]:
            reader = _Reader(node, index, buffer)
            self._store(reader.name, [reader], self.stored[reader.name])
        self._read_directly()
        self._separate_from_weights()
        if apart:
            self._separate_normalizations()

    def _read_directly(self) -> None:
        """Let readers of results of Identity and Cast read the constants."""
        makers = {node.output[0]: node for node in self.graph.node if _passes_on(node)}
        cast: dict[tuple[str, str], tuple[Array, list[_Reader]]] = {}
        for reader in self.readers:
            chain = _chain(reader.operand, makers)
            source = chain[0].input[0] if chain else ""
            if source in self.constants:
                reader.read(source)
                value = _passed_on(self.constants[source], chain)
                if value.dtype != self.constants[source].dtype:
                    key = source, value.dtype.name
                    cast.setdefault(key, (value, []))[1].append(reader)
        self._remove_unread([*makers.values()])
        for (source, _), (value, readers) in cast.items():
            self._store(source, readers, value)

    def _remove_unread(self, nodes: Sequence[onnx.NodeProto]) -> None:
        """Remove the ``nodes`` whose results are not read any more."""
        read = {name for node in self.graph.node for name in reads(node)}
        read.update(entry.name for entry in self.graph.output)
        unread = [node for node in nodes if node.output[0] not in read]
        for node in unread:
            self.graph.node.remove(node)
        if unread:
            self._remove_unread([node for node in nodes if node.output[0] in read])

    def _separate_from_weights(self) -> None:
        """Copy each constant that is both a weight and a running statistic."""
        weights = {
            name
            for node in self.graph.node
            for index, name in enumerate(node.input)
            if not _is_statistic(node, index)
        }
        shared: dict[tuple[str, int, str], list[_Reader]] = {}
        for reader in self.readers:
            if reader.name in self.constants and reader.name in weights:
                key = reader.name, reader.index, reader.operand
                shared.setdefault(key, []).append(reader)
        for (name, _, _), readers in shared.items():
            self._store(name, readers, self.constants[name])

    def _separate_normalizations(self) -> None:
        """Copy each running statistic that several normalizations share unintentionally."""
        users: dict[str, list[list[_Reader]]] = {}
        for reader in self.readers:
            groups = users.setdefault(reader.name, [])
            same = next((group for group in groups if self._are_one(group[0], reader)), None)
            if same is None:
                groups.append([reader])
            else:
                same.append(reader)
        for name, groups in users.items():
            for readers in groups[1:] if name in self.constants else ():
                self._store(name, readers, self.constants[name])

    def _are_one(self, first: _Reader, second: _Reader) -> bool:
        """Return whether two readers of a constant belong to calls of one normalization."""
        if first.index != second.index:
            return False
        paths = {module_path(first.node), module_path(second.node)}
        if "" not in paths and len(paths) == 1:
            return True
        if self._weights(first) != self._weights(second):
            return False
        value = self.constants.get(first.name)
        if value is None or not (value == _INITIAL[first.index]).all():
            return True
        # Untrained normalizations have equal weights and statistics. Nothing was merged if another
        # constant of the file has the same values.
        equal = (name for name, array in self.stored.items() if np.array_equal(array, value))
        if len(list(equal)) > 1:
            return True
        # The older exporter of PyTorch keeps the names of merged constants by Identity nodes.
        return self.is_older_exporter and "" in paths and first.operand == second.operand

    def _weights(self, reader: _Reader) -> list[str]:
        """Return the names of scale and shift; ``""`` for a computed value, not a parameter."""
        return [name if name in self.stored else "" for name in reader.node.input[1:3]]

    def _store(self, old: str, readers: Sequence[_Reader], value: Array) -> None:
        """Let ``readers`` read ``value``, a constant of their own in place of ``old``.

        It takes the name ``old`` if nothing else reads that; otherwise the name of the operand in
        the file, if no node computes this name any more.
        """
        used = {*self.constants, *(name for node in self.graph.node for name in node.output)}
        operand = readers[0].operand
        new = operand if operand not in used else claim(f"{old}.{readers[0].suffix}", used)
        for reader in readers:
            reader.read(new)
        if not any(old in reads(node) for node in self.graph.node):
            for reader in readers:
                reader.read(old)
            new = old
        self.constants[new] = value
        code = helper.np_dtype_to_tensor_dtype(value.dtype)
        for entries in (self.graph.initializer, self.graph.input, self.graph.value_info):
            entry = next((entry for entry in entries if entry.name == old), None)
            if entry is None:
                continue
            if new != old:
                entries.add().CopyFrom(entry)
                entry = entries[-1]
                entry.name = new
                entry.ClearField("metadata_props")  # those of the other constant
            if isinstance(entry, onnx.TensorProto):
                entry.data_type = code
            else:
                entry.type.tensor_type.elem_type = code


def _is_statistic(node: onnx.NodeProto, index: int) -> bool:
    return node.op_type == "BatchNormalization" and not node.domain and index in _STATISTICS


def _passes_on(node: onnx.NodeProto) -> bool:
    return node.op_type in _PASSED_ON and not node.domain and len(node.output) == 1


def _chain(name: str, makers: Mapping[str, onnx.NodeProto]) -> list[onnx.NodeProto]:
    """Return the chain of nodes in ``makers`` that computes a value."""
    chain: list[onnx.NodeProto] = []
    while name in makers and makers[name] not in chain:
        chain.insert(0, makers[name])
        name = chain[0].input[0]
    return chain


def _passed_on(value: Array, chain: Iterable[onnx.NodeProto]) -> Array:
    """Return the result of nodes of Identity and Cast."""
    for node in chain:
        code = next((entry.i for entry in node.attribute if entry.name == "to"), None)
        if code is not None:
            value = value.astype(element_type(code, f"the result of the {label_of(node)}"))
    value.flags.writeable = False
    return value
