"""Computes the trip count of a Loop that does not depend on data."""

from collections.abc import Iterator
from itertools import count

import numpy as np

from kfac_engine._types import Array
from kfac_engine.autodiff.lowering.builder import LoweringBuilder
from kfac_engine.autodiff.lowering.known import KnownValues, Origin
from kfac_engine.autodiff.lowering.steps import MOST_STEPS
from kfac_engine.graph.compact import compact_model
from kfac_engine.graph.passes.bodies import Body
from kfac_engine.graph.structure import Input, Node
from kfac_engine.sessions.session import Session


def trip_count(b: LoweringBuilder, node: Node, body: Body, known: KnownValues) -> int:
    """Return the number of iterations of a Loop.

    Each iteration computes only the values that the condition depends on.

    Args:
        b: Builder, for errors.
        node: The loop.
        body: Body of the loop.
        known: Values that constants and sizes determine; it records the used values.

    Returns:
        The number of iterations, at most ``MOST_STEPS``.

    Raises:
        UnsupportedOpError: The number depends on data, or is too large to unroll.
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
    name = node.inputs[index] if len(node.inputs) > index else ""
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
