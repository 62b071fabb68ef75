"""Rewrites the bodies of If, Loop and Scan, and replaces an If with a constant condition."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache

import onnx
from onnx import helper

from kfac_engine._types import Array
from kfac_engine.errors import ModelError
from kfac_engine.graph.nodes import canonical_nodes
from kfac_engine.graph.passes.constants import constant_value, lift_constants
from kfac_engine.graph.passes.order import (
    all_nodes,
    bodies_of,
    captures,
    claim,
    label_of,
    taken_names,
)
from kfac_engine.graph.structure import Graph, Node, Subgraph
from kfac_engine.graph.tensors import FLOATS, to_array


@dataclass(frozen=True)
class Body:
    """A body in canonical form."""

    graph: Graph  # nodes, constants and output names of the body; nodes may read outer values
    inputs: tuple[str, ...]  # names of the inputs of the body, in order


def body_of(node: Node, attribute: str, opset: int) -> Body:
    """Return the body in an attribute of an If, Loop or Scan node.

    ``opset`` is the version of the standard operator set in the outer graph.
    """
    subgraph = node.attributes[attribute]
    assert isinstance(subgraph, Subgraph), attribute
    return _parsed(subgraph.proto, opset)


# The cache avoids that a body is parsed again for each constant that it reads.
@lru_cache(maxsize=8)
def _parsed(data: bytes, opset: int) -> Body:
    proto = onnx.GraphProto.FromString(data)
    constants = {entry.name: to_array(entry) for entry in proto.initializer}
    lift_constants(proto, constants)
    graph = Graph(
        nodes=tuple(canonical_nodes(proto.node)),
        inputs=(),
        outputs=tuple(entry.name for entry in proto.output),
        constants=constants,
        opset=opset,
        name=proto.name,
    )
    return Body(graph, tuple(entry.name for entry in proto.input))


def refuse_unfit_bodies(node: onnx.NodeProto) -> None:
    """Raise a ModelError for a body whose operands or results do not match its node."""
    operands, results = len(node.input), len(node.output)
    # The number of operands of a body, and the least number of its results.
    fits = {
        ("If", "then_branch"): (0, results),
        ("If", "else_branch"): (0, results),
        ("Loop", "body"): (max(operands, 2), 1 + max(results, operands - 2)),
        ("Scan", "body"): (operands, results),
    }
    for entry in node.attribute:
        wanted = fits.get((node.op_type, entry.name))
        if wanted is None:
            continue
        counts = len(entry.g.input), len(entry.g.output)
        if counts[0] != wanted[0] or counts[1] < wanted[1]:
            raise ModelError(
                f"the {label_of(node)} has a {entry.name} of {counts[0]} operands and {counts[1]} "
                f"results, but {wanted[0]} and {wanted[1]} are needed."
            )
    scanned = next((e.i for e in node.attribute if e.name == "num_scan_inputs"), 1)
    if node.op_type == "Scan" and not 0 < scanned <= operands:
        raise ModelError(f"the {label_of(node)} scans {scanned} of its {operands} operands.")


def operators_inside(node: Node) -> frozenset[str]:
    """Return the names of operators in the bodies of ``node``, with non-standard domains."""
    bodies = (value for value in node.attributes.values() if isinstance(value, Subgraph))
    nodes = (inner for body in bodies for inner in onnx.GraphProto.FromString(body.proto).node)
    return frozenset(
        f"{entry.domain}::{entry.op_type}" if entry.domain else entry.op_type
        for entry in all_nodes(nodes)
    )


def with_new_names(node: Node, names: Mapping[str, str]) -> Node:
    """Return ``node`` with new names of operands, results and values that its bodies read."""
    return replace(
        node,
        inputs=tuple(names.get(name, name) for name in node.inputs),
        outputs=tuple(names.get(name, name) for name in node.outputs),
        attributes={
            key: with_names(value, names) if isinstance(value, Subgraph) else value
            for key, value in node.attributes.items()
        },
    )


def with_names(subgraph: Subgraph, names: Mapping[str, str]) -> Subgraph:
    """Return ``subgraph`` with new names of the outer values that it reads."""
    if not set(names).intersection(subgraph.captures):
        return subgraph
    proto = onnx.GraphProto.FromString(subgraph.proto)
    _rename(proto, {name: names[name] for name in subgraph.captures if name in names})
    return Subgraph(proto.SerializeToString(), captures(proto))


def hoist_weights(graph: onnx.GraphProto, constants: dict[str, Array]) -> frozenset[str]:
    """Move the constants of bodies into ``constants``, so that their weights can be trained.

    The initializers and floating-point Constant nodes of bodies are removed in place, and the
    bodies read outer values instead. The result is the names of the moved constants. A name that
    occurs twice in the file gets the name of the first result of the node and a dot as prefix.
    """
    definitions = Counter((*constants, *(entry.name for entry in graph.input)))
    definitions.update(_defined(graph.node))
    unique = {name for name, count in definitions.items() if count == 1}
    used = {*definitions, *taken_names(graph, constants)}
    moved: list[str] = []

    def hoist(body: onnx.GraphProto, prefix: str) -> None:
        names, results = {}, {entry.name for entry in body.output}
        for inner, array in _pop_constants(body):
            # A body must compute its results, whose names do not change.
            unchanged = inner in unique and inner not in results
            name = inner if unchanged else claim(prefix + inner, used)
            constants[name] = array
            names[inner] = name
        moved.extend(names.values())
        rename(body, {inner: name for inner, name in names.items() if inner != name})
        for result in results.intersection(names):
            body.node.add(op_type="Identity", input=[names[result]], output=[result])
        hoist_all(body.node, prefix)

    def hoist_all(nodes: Iterable[onnx.NodeProto], prefix: str) -> None:
        for node in nodes:
            # The node is not checked yet and may have no results.
            label = next(iter(node.output), node.name)
            for body in bodies_of(node):
                hoist(body, f"{prefix}{label}.")

    hoist_all(graph.node, "")
    return frozenset(moved)


def _defined(nodes: Iterable[onnx.NodeProto]) -> Iterator[str]:
    """Yield the names of values that nodes and their bodies define, with repetitions."""
    for node in nodes:
        yield from filter(None, node.output)
        for body in bodies_of(node):
            yield from (entry.name for entry in (*body.input, *body.initializer))
            yield from _defined(body.node)


def _pop_constants(body: onnx.GraphProto) -> Iterator[tuple[str, Array]]:
    """Yield the initializers and floating-point constants of a body, and remove them from it."""
    yield from ((entry.name, to_array(entry)) for entry in body.initializer)
    del body.initializer[:]
    for index in reversed(range(len(body.node))):
        node = body.node[index]
        array = constant_value(node, {})
        if array is not None and array.dtype.name in FLOATS:
            yield node.output[0], array
            del body.node[index]


def _rename(body: onnx.GraphProto, names: Mapping[str, str]) -> None:
    rename(body, names)
    for result in body.output:
        result.name = names.get(result.name, result.name)


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
            yield deepcopy(node)
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
    branch: onnx.GraphProto = deepcopy(
        next(entry.g for entry in node.attribute if entry.name == wanted)
    )
    if len(branch.output) != len(node.output):
        raise ModelError(
            f"the {label_of(node)} has {len(node.output)} results, but its {wanted} has "
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
        for body in bodies_of(node):
            _rename(body, names)
