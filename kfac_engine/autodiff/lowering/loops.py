"""Unrolls If, Loop and Scan: writes the nodes of a body once for each iteration.

Constants and sizes must determine the number of iterations and the branch. The graph checks the
sizes in each run.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count

import numpy as np

from kfac_engine._types import Array
from kfac_engine.autodiff.lowering import lowering
from kfac_engine.autodiff.lowering.builder import MOST_STEPS, LoweringBuilder, split_steps, stacked
from kfac_engine.autodiff.lowering.known import KnownValues, Origin, gated, gated_reads
from kfac_engine.autodiff.rules.attributes import integer, integers
from kfac_engine.graph.passes.bodies import Body, body_of, with_new_names
from kfac_engine.graph.structure import Input, Node
from kfac_engine.graph.write import compact_model
from kfac_engine.sessions.session import Session


def trip_count(b: LoweringBuilder, node: Node, body: Body, known: KnownValues) -> int:
    """Return the number of iterations of a Loop; only the nodes of its condition are computed.

    A number that depends on data, or that is larger than ``MOST_STEPS``, raises UnsupportedOpError.
    ``known`` records the values that the number was computed from.
    """
    limit, going = (_operand(b, node, known, index) for index in (0, 1))
    most = MOST_STEPS + 1 if limit is None else int(limit.item())
    if going is not None and not going.all():
        return 0
    trips = 0
    if most > 0:
        condition = _condition(b, node, body, known)
        trips = next(trip for trip, more in enumerate(condition, 1) if not more or trip >= most)
    if trips > MOST_STEPS:
        raise b.refuse(
            node, f"it runs more than {MOST_STEPS} times, which is the limit for unrolling"
        )
    return trips


def _operand(b: LoweringBuilder, node: Node, known: KnownValues, index: int) -> Array | None:
    """Return the limit or the first condition; None if the node has none."""
    name = node.operand(index)
    return _known(b, node, known, name) if name else None


def _known(b: LoweringBuilder, node: Node, known: KnownValues, name: str) -> Array:
    value = known.get(name)
    if value is None:
        why = Origin(b.graph, b.facts, name).why_undecided()
        raise b.refuse(node, f"its number of iterations is not fixed, as {why}")
    return value


def _condition(b: LoweringBuilder, node: Node, body: Body, known: KnownValues) -> Iterator[bool]:
    """Yield the condition of the loop after each iteration."""
    nodes, states = _deciding(body)
    constants = dict(body.graph.constants)
    feeds = {body.inputs[0]: np.asarray(0), body.inputs[1]: np.asarray(True)}
    feeds |= {body.inputs[i]: _known(b, node, known, node.inputs[i]) for i in states}
    results = {body.inputs[i]: body.graph.outputs[i - 1] for i in (1, *states)}
    internal = {name for entry in nodes for name in entry.outputs}
    reads = {name for entry in nodes for name in (*entry.inputs, *entry.captures) if name}
    outer = reads.union(results.values()) - internal - constants.keys() - feeds.keys()
    constants |= {name: _known(b, node, known, name) for name in sorted(outer)}
    after = {name: f"{name} after" for name in results}
    copies = [Node("Identity", (results[name],), (new,), name=new) for name, new in after.items()]
    model = compact_model(
        [*nodes, *copies],
        [Input(name, array.dtype, None) for name, array in feeds.items()],
        list(after.values()),
        constants,
        body.graph.opset,
        domains=b.graph.domains,
    )
    session = Session(model, threads=1, what=f"the condition of '{node.name}'")
    for trip in count():
        feeds[body.inputs[0]] = np.asarray(trip)
        values = session.run(list(after.values()), feeds)
        feeds |= {name: values[new] for name, new in after.items()}
        yield bool(feeds[body.inputs[1]].all())


def _deciding(body: Body) -> tuple[list[Node], list[int]]:
    """Return the nodes that the condition depends on, and the indices of its states."""
    carried = {i: body.inputs[i] for i in range(2, len(body.inputs))}
    wanted, states = {body.graph.outputs[0]}, list[int]()
    while True:
        for entry in reversed(body.graph.nodes):
            if wanted.intersection(entry.outputs):
                wanted.update((*entry.inputs, *entry.captures))
        new = [i for i, name in carried.items() if name in wanted and i not in states]
        if not new:
            break
        states += new
        wanted.update(body.graph.outputs[i - 1] for i in new)
    nodes = [entry for entry in body.graph.nodes if wanted.intersection(entry.outputs)]
    return nodes, states


@lowering("If")
def if_(b: LoweringBuilder, node: Node) -> None:
    """Write one branch of an If; constants and sizes must determine the condition."""
    known = KnownValues(b)
    condition = known.get(node.inputs[0])
    if condition is None:
        why = Origin(b.graph, b.facts, node.inputs[0]).why_undecided()
        raise b.refuse(node, f"its branch is not fixed, as {why}")
    body = body_of(node, "then_branch" if condition.all() else "else_branch", b.graph.opset)
    reads = gated_reads(b, node, known)
    results = write_body(b, body, reads | loop_constants(b, body))
    for value, result in zip(results, node.outputs, strict=True):
        if result:
            gated(b, node, value, known, result)


@lowering("Loop")
def loop(b: LoweringBuilder, node: Node) -> None:
    """Write the body of a Loop for each iteration, whose number constants and sizes determine."""
    body = body_of(node, "body", b.graph.opset)
    known = KnownValues(b)
    count = trip_count(b, node, body, known)
    known.zeros(node)
    outer = gated_reads(b, node, known) | loop_constants(b, body)
    states, carried = [outer.get(name, name) for name in node.inputs[2:]], len(node.inputs) - 2
    outer[body.inputs[1]] = b.constant(np.asarray(True))
    rows: list[Sequence[str]] = []
    for trip in range(count):
        outer |= zip(body.inputs[2:], states, strict=True)
        outer[body.inputs[0]] = b.constant(trip)
        _, *results = write_body(b, body, outer)
        states, scanned = results[:carried], results[carried:]
        rows.append(scanned)
    for value, result in zip(states, node.outputs[:carried], strict=True):
        if result:
            gated(b, node, value, known, result)
    for index, result in enumerate(node.outputs[carried:]):
        if result and not rows:
            raise b.refuse(node, f"it runs no iteration, so '{result}' has no element type")
        if result:
            joined = stacked(b, [row[index] for row in rows], axis=0)
            gated(b, node, joined, known, result)


@lowering("Scan")
def scan(b: LoweringBuilder, node: Node) -> None:
    """Write the body of a Scan for each slice of the sample run."""
    body = body_of(node, "body", b.graph.opset)
    count = integer(node, "num_scan_inputs", 0)
    states, sequences = list(node.inputs[:-count]), node.inputs[-count:]
    carried = len(states)
    axes = _listed(node, "scan_input_axes", count)
    signs = _signs(node, "scan_input_directions", count)
    slices = [
        split_steps(b, node, value, axis % len(b.facts[value].shape))[::sign]
        for value, axis, sign in zip(sequences, axes, signs, strict=True)
    ]
    outer = loop_constants(b, body)
    rows: list[Sequence[str]] = []
    for row in zip(*slices, strict=True):
        outer |= zip(body.inputs, (*states, *row), strict=True)
        results = write_body(b, body, outer)
        states, scanned = list(results[:carried]), results[carried:]
        rows.append(scanned)
    for value, result in zip(states, node.outputs[:carried], strict=True):
        if result:
            gated(b, node, value, KnownValues(b), result)
    axes = _listed(node, "scan_output_axes", len(node.outputs) - carried)
    signs = _signs(node, "scan_output_directions", len(node.outputs) - carried)
    for index, result in enumerate(node.outputs[carried:]):
        if result:
            axis = axes[index] % len(b.facts[result].shape)
            stacked(b, [row[index] for row in rows[:: signs[index]]], axis, result=result)


def _listed(node: Node, name: str, count: int) -> tuple[int, ...]:
    """Return the entry of an attribute for each sequence; zeros if the attribute is not set."""
    return integers(node, name, (0,) * count)


def _signs(node: Node, name: str, count: int) -> list[int]:
    """Return 1 for each forward sequence and -1 for each backward sequence."""
    return [-1 if backward else 1 for backward in _listed(node, name, count)]


# -- bodies, whose nodes are written to the outer graph --------------------------------------------


def loop_constants(b: LoweringBuilder, body: Body) -> dict[str, str]:
    """Add the constants of a body to the graph; return a map from old to new names."""
    return {name: b.constant(array) for name, array in body.graph.constants.items()}


def write_body(b: LoweringBuilder, body: Body, outer: Mapping[str, str]) -> tuple[str, ...]:
    """Write the nodes of one iteration of a body; return the names of its outputs.

    ``outer`` maps each input and constant of the body to the value that replaces it. The names of
    captured values do not change.
    """
    names = dict(outer)
    for node in body.graph.nodes:
        if node.qualified_op == "Identity":
            names[node.outputs[0]] = names.get(node.inputs[0], node.inputs[0])
            continue
        results = b.multi(node.op, node.inputs, ("",) * len(node.outputs))
        names.update((old, new) for old, new in zip(node.outputs, results, strict=True) if old)
        b.nodes[-1] = replace(with_new_names(node, names), name=b.nodes[-1].name)
    return tuple(names.get(name, name) for name in body.graph.outputs)
