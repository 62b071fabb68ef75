"""Finds the node at which a batch's values or gradients stop being finite."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from kfac_engine._types import Array
from kfac_engine.autodiff.differentiate import differentiate
from kfac_engine.autodiff.second_order import joint_graph
from kfac_engine.backend.namespace import array_module
from kfac_engine.graph.structure import Graph, Node
from kfac_engine.runtime.model import OnnxModel
from kfac_engine.runtime.model_sessions import open_forward
from kfac_engine.runtime.trace import Trace

# Operators with a result or a derivative that is infinite at some operand.
_STEEP = frozenset(
    {"Acos", "Acosh", "Asin", "Atanh", "Div", "Log", "Pow", "Reciprocal", "ReduceLogSum", "Sqrt"}
)
# Values that are computed at a time.
_COMPARED = 64


def first_nonfinite(
    model: OnnxModel, trace: Trace, cotangents: Mapping[str, Array] | None, wrt: Sequence[str]
) -> str:
    """Return a sentence on the first node with a result or a derivative that is not finite.

    The forward and the backward pass are repeated in parts. ``cotangents`` are the gradients of the
    loss by the name of its inputs; None if there are none. The sentence follows an error message.
    It is empty if all values are finite.
    """
    graph = model.graph
    computed = [name for node in graph.nodes for name in node.outputs if _is_real(model, name)]
    for name in _bad(model, trace, graph, dict(zip(computed, computed, strict=True)), {}):
        node = graph.producers[name]
        return f"The first value that is not a number is a result of {node.title}{_cure(node)}"
    if cotangents is None:
        return ""
    backward = differentiate(graph, model.facts, tuple(cotangents), (*wrt, *computed))
    order = [name for name in (*wrt, *computed) if name in backward.gradients]
    gradients = {name: backward.gradients[name] for name in reversed(order)}
    feeds = {backward.cotangents[name]: array for name, array in cotangents.items()}
    for name in _bad(model, trace, joint_graph(graph, backward), gradients, feeds):
        readers = [node for node, _ in graph.consumers.get(name, ())]
        readers.sort(key=lambda node: node.op not in _STEEP)
        if readers:
            return f"The first derivative that is not finite belongs to {_of(name, readers[0])}"
    return ""


def _bad(
    model: OnnxModel,
    trace: Trace,
    graph: Graph,
    values: Mapping[str, str],
    feeds: Mapping[str, Array],
) -> Iterator[str]:
    """Yield the names of the first values of a graph that are not finite.

    ``values`` maps names to values of the graph. A value of the model may be infinite, as scores of
    masked tokens are, but a gradient may not.
    """
    context = replace(model.context(), graph_passes=frozenset())
    fed = (*(entry.name for entry in model.graph.inputs), *context.stored)
    fed += (context.start,) if context.start else ()
    named = {**{name: trace[name] for name in fed}, **feeds}
    names = list(values)
    for start in range(0, len(names), _COMPARED):
        few = names[start : start + _COMPARED]
        outputs = tuple(dict.fromkeys(values[name] for name in few if values[name] not in named))
        results = dict(named)
        if outputs:
            results |= open_forward(context, graph, outputs).run(outputs, named)
        for name in few:
            array = results[values[name]]
            xp = array_module(array)
            if xp.isnan(array).any() or (feeds and not xp.isfinite(array).all()):
                yield name


def _is_real(model: OnnxModel, name: str) -> bool:
    return name in model.facts and model.facts[name].dtype.kind == "f"


def _of(name: str, node: Node) -> str:
    return f"{node.title} with respect to '{name}'{_cure(node)}"


def _cure(node: Node) -> str:
    if node.op not in _STEEP:
        return "; check the weights and inputs for huge numbers."
    return (
        "; the result or derivative of this operator is infinite at some operands, such as zero: "
        "add a small number to the operand, or replace the operand by a Where before the node. A "
        "Where after the node does not help."
    )
