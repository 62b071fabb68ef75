"""Tables whose rows are selected by identifiers: of the data, or positions that are counted.

Identifiers that the shape of the data tells are the same for all examples, and so are the rows that
they pick, up to where these meet the data. There the layer has its outputs; its identifiers are
added to the graph, once for each example.
"""

from math import prod

import numpy as np

from kfac_engine.graph.structure import Fact, Node
from kfac_engine.layers.match import LayerMatch, MatchContext, NewValue

# What may lie between the rows of a table and the data.
_VIEWS = frozenset({"Cast", "Identity", "Reshape", "Unsqueeze"})


def match_gather(scene: MatchContext, node: Node, index: int) -> LayerMatch | str:
    """The layer of a table whose rows Gather selects, or the reason why there is none."""
    del index
    table, ids = node.inputs
    if node.attributes.get("axis", 0) != 0 or not scene.is_weight(table, 2):
        return f"table of Gather, shape {scene.shapes[table]}"
    rows, shape = node.outputs[0], scene.shapes[ids]
    if shape and (ids in scene.data or (ids in scene.loose.data and rows in scene.axes)):
        return picked(scene, table, ids, rows)
    unknown = "table of Gather whose indices do not depend on the data"
    return (_positions(scene, table, ids, rows) if ids in scene.loose.data else None) or unknown


def picked(scene: MatchContext, table: str, ids: str, rows: str) -> LayerMatch:
    """The layer of a table from which ``ids`` select ``rows`` for each example."""
    options = {"positions": True} if len(scene.shapes[ids]) > 1 else {}
    return LayerMatch("embedding", (table,), ids, rows, options)


def identifiers(scene: MatchContext, value: str) -> str:
    """The identifiers that ``value`` encodes as one-hot rows on its last axis, or None."""
    maker = scene.graph.producers.get(value)
    while maker is not None and maker.op in ("Cast", "Identity"):
        maker = scene.graph.producers.get(maker.inputs[0])
    if maker is None or maker.qualified_op != "OneHot":
        return ""
    ids, _, values = maker.inputs
    last = maker.attributes.get("axis", -1) in (-1, len(scene.shapes[ids]))
    known = scene.graph.constants.get(values)
    fits = last and known is not None and known.tolist() == [0, 1] and ids in scene.data
    return ids if fits and scene.shapes[ids] else ""


def _positions(scene: MatchContext, table: str, ids: str, rows: str) -> LayerMatch | None:
    """The layer of a table whose rows are the same for all examples, from where they are added."""
    value, (user, _) = rows, scene.only_user(rows)
    while user is not None and user.op in _VIEWS and not user.domain:
        value = user.outputs[0]
        user, _ = scene.only_user(value)
    if user is None or user.op != "Add":
        return None
    y, numbers = user.outputs[0], scene.shapes[ids]
    sides, features = scene.shapes[y][:-1], scene.shapes[table][1]
    # Identifiers are broadcast as their rows are: new axes come first. Of one they do not tell.
    aligned = (
        _trailing(scene.shapes[value]) == _trailing((*numbers, features)) and prod(numbers) > 1
    )
    if y not in scene.axes or not aligned or scene.shapes[y][-1] != features:
        return None
    made = f"identifiers of '{table}' in {y}"
    shape = f"{made}: shape"
    last = {"start": 0, "end": -1}
    computed = (
        NewValue(
            Node("Shape", (y,), (shape,), last, f"make {shape}"),
            {},
            Fact(np.dtype(np.int64), (len(sides),)),
        ),
        NewValue(
            Node("Expand", (ids, shape), (made,), {}, f"make {made}"),
            {},
            Fact(scene.dtypes[ids], sides),
        ),
    )
    return LayerMatch("embedding", (table,), made, y, {"positions": True}, computed=computed)


def _trailing(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without ones before the first longer side."""
    first = next((axis for axis, side in enumerate(shape) if side != 1), len(shape))
    return shape[first:]
