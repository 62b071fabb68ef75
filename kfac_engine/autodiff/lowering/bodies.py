"""Writes the nodes of the bodies of If, Loop and Scan to the outer graph."""

from collections.abc import Mapping
from dataclasses import replace

from kfac_engine.autodiff.lowering.builder import LoweringBuilder
from kfac_engine.graph.passes.bodies import Body, renamed


def constants_of(b: LoweringBuilder, body: Body) -> dict[str, str]:
    """Add the constants of a body to the graph; return a map from old to new names."""
    return {name: b.constant(array) for name, array in body.graph.constants.items()}


def write_body(b: LoweringBuilder, body: Body, outer: Mapping[str, str]) -> tuple[str, ...]:
    """Write the nodes of one iteration of a body; return the names of its outputs.

    Args:
        b: Receives the nodes.
        body: The body. The names of captured values do not change.
        outer: Map from each input and constant of the body to the value that replaces it.

    Returns:
        The values that replace the outputs of the body.
    """
    names = dict(outer)
    for node in body.graph.nodes:
        if node.qualified_op == "Identity":
            names[node.outputs[0]] = names.get(node.inputs[0], node.inputs[0])
            continue
        results = b.multi(node.op, node.inputs, ("",) * len(node.outputs))
        names.update((old, new) for old, new in zip(node.outputs, results, strict=True) if old)
        b.nodes[-1] = replace(renamed(node, names), name=b.nodes[-1].name)
    return tuple(names.get(name, name) for name in body.graph.outputs)
