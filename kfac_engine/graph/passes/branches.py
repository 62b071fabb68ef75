"""Replaces ``If`` nodes with a constant condition by the nodes of one branch."""

from collections.abc import Iterable, Iterator, Mapping

import onnx
from onnx import helper

from kfac_engine._types import Array
from kfac_engine.errors import ModelError
from kfac_engine.graph.passes.order import claim, describe, taken_names


def fold_constant_ifs(graph: onnx.GraphProto, constants: Mapping[str, Array]) -> bool:
    """Replace each ``If`` with a constant condition by the nodes of a branch, in place.

    The nodes are in topological order. The name of the first result of the ``If`` becomes the
    prefix of the names of the branch. Return whether an ``If`` was replaced; the branch may contain
    more of them.
    """
    if not any(_selected_branch(node, constants) for node in graph.node):
        return False
    nodes = list(_folded(graph.node, constants, taken_names(graph, constants)))
    del graph.node[:]
    graph.node.extend(nodes)
    return True


def _folded(
    nodes: Iterable[onnx.NodeProto], constants: Mapping[str, Array], used: set[str]
) -> Iterator[onnx.NodeProto]:
    for node in nodes:
        branch = _selected_branch(node, constants)
        if branch is None:
            copy = onnx.NodeProto()
            copy.CopyFrom(node)
            yield copy
            continue
        outer = _outer_names(branch, f"{node.output[0]}.", used)
        rename(branch, outer)
        yield from branch.node
        for result, target in zip(branch.output, node.output, strict=True):
            yield helper.make_node("Identity", [outer.get(result.name, result.name)], [target])


def _selected_branch(
    node: onnx.NodeProto, constants: Mapping[str, Array]
) -> onnx.GraphProto | None:
    """Return a copy of the selected branch of an ``If``; None without a constant condition."""
    if node.op_type != "If" or node.domain or node.input[0] not in constants:
        return None
    wanted = "then_branch" if constants[node.input[0]].all() else "else_branch"
    branch = onnx.GraphProto()
    branch.CopyFrom(next(entry.g for entry in node.attribute if entry.name == wanted))
    if len(branch.output) != len(node.output):
        raise ModelError(
            f"the {describe(node)} has {len(node.output)} results, but its {wanted} has "
            f"{len(branch.output)}."
        )
    return branch


def _outer_names(branch: onnx.GraphProto, prefix: str, used: set[str]) -> dict[str, str]:
    """Return unused names for the values of a branch, and add them to ``used``."""
    results = [name for node in branch.node for name in node.output if name]
    return {name: claim(prefix + name, used) for name in results}


def rename(graph: onnx.GraphProto | onnx.FunctionProto, names: Mapping[str, str]) -> None:
    """Rename operands and results in ``graph`` and in its bodies, in place."""
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
        for attribute in node.attribute:
            for body in (attribute.g, *attribute.graphs):
                rename(body, names)
                for result in body.output:
                    result.name = names.get(result.name, result.name)
