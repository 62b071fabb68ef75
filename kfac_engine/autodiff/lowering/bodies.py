"""Bodies of If, Loop and Scan, written into the graph around them."""

from collections.abc import Mapping
from dataclasses import replace

from kfac_engine.autodiff.lowering.pen import Pen
from kfac_engine.graph.bodies import Body, with_names
from kfac_engine.graph.structure import AttributeValue, Subgraph


def constants_of(pen: Pen, body: Body) -> dict[str, str]:
    """The constants of a body as constants of the graph: their old names to their new ones."""
    return {name: pen.constant(array) for name, array in body.graph.constants.items()}


def write_body(pen: Pen, body: Body, outer: Mapping[str, str]) -> tuple[str, ...]:
    """Write the nodes of a body once.

    Args:
        pen: Writes them.
        body: Read, not changed; what it captures keeps its name.
        outer: Name of each input and constant of the body to the value that stands for it.

    Returns:
        The values that stand for its outputs.
    """
    names = dict(outer)
    for node in body.graph.nodes:
        inputs = tuple(names.get(name, name) for name in node.inputs)
        if node.qualified_op == "Identity":
            names[node.outputs[0]] = inputs[0]
            continue
        made = pen.multi(node.op, inputs, ("",) * len(node.outputs))
        outputs = tuple(new if old else "" for old, new in zip(node.outputs, made, strict=True))
        names.update(zip(node.outputs, outputs, strict=True))
        pen.nodes[-1] = replace(
            pen.nodes[-1],
            outputs=outputs,
            domain=node.domain,
            attributes={key: _renamed(value, names) for key, value in node.attributes.items()},
        )
    return tuple(names.get(name, name) for name in body.graph.outputs)


def _renamed(value: AttributeValue, names: Mapping[str, str]) -> AttributeValue:
    return with_names(value, names) if isinstance(value, Subgraph) else value
