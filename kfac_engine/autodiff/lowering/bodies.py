"""Writes the bodies of If, Loop and Scan into the outer graph."""

from collections.abc import Mapping
from dataclasses import replace

from kfac_engine.autodiff.lowering.builder import LoweringBuilder
from kfac_engine.graph.passes.bodies import Body, renamed


def constants_of(b: LoweringBuilder, body: Body) -> dict[str, str]:
    """Add the constants of a body to the graph; return their new names by their old ones."""
    return {name: b.constant(array) for name, array in body.graph.constants.items()}


def write_body(b: LoweringBuilder, body: Body, outer: Mapping[str, str]) -> tuple[str, ...]:
    """Write the nodes of a body once.

    Args:
        b: Writes them.
        body: Read, not changed; what it captures keeps its name.
        outer: Name of each input and constant of the body to the value that stands for it.

    Returns:
        The values that stand for its outputs.
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
