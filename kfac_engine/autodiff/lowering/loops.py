"""Unrolls If, Loop and Scan: writes the nodes of a body once for each iteration.

Constants and sizes must determine the number of iterations and the branch. The graph checks the
sizes in each run.
"""

from collections.abc import Sequence

import numpy as np

from kfac_engine.autodiff.lowering import lowering
from kfac_engine.autodiff.lowering.bodies import constants_of, write_body
from kfac_engine.autodiff.lowering.builder import LoweringBuilder
from kfac_engine.autodiff.lowering.known import KnownValues, Origin, gated, gated_reads
from kfac_engine.autodiff.lowering.steps import split_steps, stacked
from kfac_engine.autodiff.lowering.trips import trip_count
from kfac_engine.autodiff.rules.attributes import integer, integers
from kfac_engine.graph.passes.bodies import body_of
from kfac_engine.graph.structure import Node


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
    results = write_body(b, body, reads | constants_of(b, body))
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
    outer = gated_reads(b, node, known) | constants_of(b, body)
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
    outer = constants_of(b, body)
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
