"""Returns an operator's definition as a graph of other operators."""

from collections.abc import Mapping
from dataclasses import replace

import onnx
from onnx import helper

from kfac_engine._types import Array
from kfac_engine.graph.definitions import DOMAIN, as_call
from kfac_engine.graph.load import load_graph
from kfac_engine.graph.passes.bodies import rename
from kfac_engine.graph.structure import Fact, Graph, Node
from kfac_engine.graph.write import node_proto, tensor


def definition(
    node: Node,
    facts: Mapping[str, Fact],
    known: Mapping[str, Array],
    versions: Mapping[str, int],
    prefix: str,
) -> Graph:
    """Return the definition of the operator of ``node`` as a canonical graph.

    Its inputs and constants have the names of the operands of ``node``, and its outputs the names
    of its results; all other names start with ``prefix``. Only the rank of the shape in ``facts``
    is used, so the batch size stays dynamic. ``known`` has constant operands, such as sizes and
    axes, on which branches depend. ``versions`` are those of the operator domains; the standard one
    is ``""``.
    """
    operands = [name for name in dict.fromkeys(node.inputs) if name]
    declared = {name: _declaration(name, facts[name]) for name in operands}
    types = [declared[name].type if name else onnx.TypeProto() for name in node.inputs]
    call, function = as_call(node_proto(node, versions), types, versions, node.op)
    renamed = {name: f"{prefix}{name}" for inner in function.node for name in inner.output if name}
    rename(function, renamed)
    function.output[:] = [renamed.get(name, name) for name in function.output]
    graph = helper.make_graph(
        [call],
        node.name,
        list(declared.values()),
        [onnx.ValueInfoProto(name=name) for name in node.outputs if name],
        [tensor(known[name], name) for name in operands if name in known],
    )
    # The model has the operator set of the definition; ``load_graph`` upgrades an older one.
    model = helper.make_model(
        graph,
        functions=[function],
        opset_imports=[*function.opset_import, helper.make_opsetid(DOMAIN, 1)],
        ir_version=onnx.IR_VERSION,
    )
    body = load_graph(model)
    return replace(
        body, nodes=tuple(replace(inner, name=f"{prefix}{inner.name}") for inner in body.nodes)
    )


def _declaration(name: str, fact: Fact) -> onnx.ValueInfoProto:
    code = helper.np_dtype_to_tensor_dtype(fact.dtype)
    return helper.make_tensor_value_info(name, code, [None] * len(fact.shape))
