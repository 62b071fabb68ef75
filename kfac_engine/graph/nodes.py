"""Converts protobuf nodes to ``Node`` values with plain Python attributes."""

from collections.abc import Callable, Iterable, Iterator, Mapping

import onnx
from onnx import AttributeProto

from kfac_engine.errors import UnsupportedError
from kfac_engine.graph.passes.order import captures, label_of
from kfac_engine.graph.structure import AttributeValue, Node, Subgraph
from kfac_engine.graph.tensors import to_array


def canonical_nodes(protos: Iterable[onnx.NodeProto]) -> Iterator[Node]:
    """Yield the nodes in the same order, converted and with unique names.

    ONNX Runtime requires unique names. An attribute of a type that no supported operator uses
    raises UnsupportedError.
    """
    used: set[str] = set()
    for index, proto in enumerate(protos):
        name = proto.name or f"{proto.op_type}_{index}"
        while name in used:
            name = f"{name}_{index}"
        used.add(name)
        yield Node(
            op=proto.op_type,
            inputs=tuple(proto.input),
            outputs=tuple(proto.output),
            attributes={entry.name: _value(entry, proto) for entry in proto.attribute},
            name=name,
            domain="" if proto.domain == "ai.onnx" else proto.domain,
        )


_ATTRIBUTE_VALUES: Mapping[int, Callable[[AttributeProto], AttributeValue]] = {
    AttributeProto.INT: lambda entry: entry.i,
    AttributeProto.FLOAT: lambda entry: entry.f,
    AttributeProto.STRING: lambda entry: entry.s.decode(),
    AttributeProto.INTS: lambda entry: tuple(entry.ints),
    AttributeProto.FLOATS: lambda entry: tuple(entry.floats),
    AttributeProto.STRINGS: lambda entry: tuple(text.decode() for text in entry.strings),
    AttributeProto.TENSOR: lambda entry: to_array(entry.t),
    AttributeProto.GRAPH: lambda entry: Subgraph(entry.g.SerializeToString(), captures(entry.g)),
}


def _value(entry: AttributeProto, node: onnx.NodeProto) -> AttributeValue:
    if entry.type not in _ATTRIBUTE_VALUES:
        kind = AttributeProto.AttributeType.Name(entry.type)
        raise UnsupportedError(
            f"attribute '{entry.name}' of the {label_of(node)} has the type {kind}, which is not "
            f"supported."
        )
    return _ATTRIBUTE_VALUES[entry.type](entry)
