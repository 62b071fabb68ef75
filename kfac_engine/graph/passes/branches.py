"""``If`` nodes whose condition the file fixes: the branch taken moves into the graph."""

from collections.abc import Iterable, Iterator, Mapping

import onnx
from onnx import helper

from kfac_engine._types import Array
from kfac_engine.errors import ModelError
from kfac_engine.graph.names import claim, taken_names
from kfac_engine.graph.passes.order import describe


def fold_constant_ifs(graph: onnx.GraphProto, constants: Mapping[str, Array]) -> bool:
    """Replace each ``If`` on a constant by the nodes of the branch it takes, in place.

    Args:
        graph: Its nodes are in topological order, and stay so. Values of the branch get the name of
            the ``If``'s first result in front of their own.
        constants: Value names to arrays, the initializers of branches among them.

    Returns:
        Whether there was one; its branch may hold further ones.

    Raises:
        ModelError: A branch does not make as many results as its ``If`` has.
    """
    if not any(_taken_branch(node, constants) for node in graph.node):
        return False
    nodes = list(_folded(graph.node, constants, taken_names(graph, constants)))
    del graph.node[:]
    graph.node.extend(nodes)
    return True


def _folded(
    nodes: Iterable[onnx.NodeProto], constants: Mapping[str, Array], taken: set[str]
) -> Iterator[onnx.NodeProto]:
    for node in nodes:
        branch = _taken_branch(node, constants)
        if branch is None:
            copy = onnx.NodeProto()
            copy.CopyFrom(node)
            yield copy
            continue
        outer = _outer_names(branch, f"{node.output[0]}.", taken)
        rename(branch, outer)
        yield from branch.node
        for result, target in zip(branch.output, node.output, strict=True):
            yield helper.make_node("Identity", [outer.get(result.name, result.name)], [target])


def _taken_branch(node: onnx.NodeProto, constants: Mapping[str, Array]) -> onnx.GraphProto | None:
    """A copy of the branch that an ``If`` on a constant takes; None for all other nodes."""
    if node.op_type != "If" or node.domain or node.input[0] not in constants:
        return None
    wanted = "then_branch" if constants[node.input[0]].all() else "else_branch"
    branch = onnx.GraphProto()
    branch.CopyFrom(next(entry.g for entry in node.attribute if entry.name == wanted))
    if len(branch.output) != len(node.output):
        raise ModelError(
            f"the {describe(node)} has {len(node.output)} results, but its {wanted} makes "
            f"{len(branch.output)}."
        )
    return branch


def _outer_names(branch: onnx.GraphProto, prefix: str, taken: set[str]) -> dict[str, str]:
    """Names for the branch's own values that are free in the graph; adds them to ``taken``."""
    results = [name for node in branch.node for name in node.output if name]
    return {name: claim(prefix + name, taken) for name in results}


def rename(graph: onnx.GraphProto | onnx.FunctionProto, names: Mapping[str, str]) -> None:
    """Apply ``names`` to every operand and result in ``graph``, bodies inside it included."""
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
        for attribute in node.attribute:
            for body in (attribute.g, *attribute.graphs):
                rename(body, names)
                for result in body.output:
                    result.name = names.get(result.name, result.name)
