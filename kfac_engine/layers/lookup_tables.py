"""Matches embedding tables, whose rows are selected by token ids or by position ids.

Position ids depend on the shape of the data alone. They and the selected rows are the same for all
examples. The output of the layer is the sum of these rows and the data; its ids are added to the
graph, once for each example.
"""

from math import prod

import numpy as np

from kfac_engine.graph.structure import Fact, Node
from kfac_engine.layers.match import LayerMatch, MatchContext, NewValue

# Operators between the rows of a table and their sum with the data.
_VIEWS = frozenset({"Cast", "Identity", "Reshape", "Unsqueeze"})


def match_gather(context: MatchContext, node: Node, index: int) -> LayerMatch | str:
    """Match a table whose rows Gather selects; return the reason if there is no layer."""
    del index
    table, ids = node.inputs
    if node.attributes.get("axis", 0) != 0 or not context.is_weight(table, 2):
        return f"table of Gather, shape {context.shapes[table]}"
    rows, shape = node.outputs[0], context.shapes[ids]
    if shape and (ids in context.data or (ids in context.loose.data and rows in context.axes)):
        return embedding_match(context, table, ids, rows)
    unknown = "table of Gather whose indices do not depend on the data"
    return (_positions(context, table, ids, rows) if ids in context.loose.data else None) or unknown


def embedding_match(context: MatchContext, table: str, ids: str, rows: str) -> LayerMatch:
    """Return the layer of a table from which ``ids`` select ``rows`` for each example."""
    # Gather refuses ids outside the table. OneHot has a row of zeros for them.
    options = {"zeros_outside": True}
    options |= {"positions": True} if len(context.shapes[ids]) > 1 else {}
    return LayerMatch("embedding", (table,), ids, rows, options)


def find_token_ids(context: MatchContext, value: str) -> str:
    """Return the name of the token ids that ``value`` encodes as one-hot rows, or ``""``."""
    node = context.graph.producers.get(value)
    while node is not None and node.op in ("Cast", "Identity"):
        node = context.graph.producers.get(node.inputs[0])
    if node is None or node.qualified_op != "OneHot":
        return ""
    ids, _, values = node.inputs
    last = node.attributes.get("axis", -1) in (-1, len(context.shapes[ids]))
    off_on = context.graph.constants.get(values)
    fits = last and off_on is not None and off_on.tolist() == [0, 1] and ids in context.data
    fits = fits and context.dtypes[ids].kind in "iu"
    return ids if fits and context.shapes[ids] else ""


def _positions(context: MatchContext, table: str, ids: str, rows: str) -> LayerMatch | None:
    """Return the layer of a position embedding, whose rows are added to the data."""
    value, (user, _) = rows, context.only_user(rows)
    while user is not None and user.op in _VIEWS and not user.domain:
        value = user.outputs[0]
        user, _ = context.only_user(value)
    if user is None or user.op != "Add":
        return None
    y, ids_shape = user.outputs[0], context.shapes[ids]
    shape, features = context.shapes[y][:-1], context.shapes[table][1]
    # The ids must be broadcast like their rows, with new axes first. A single id cannot prove it.
    aligned = (
        _trailing(context.shapes[value]) == _trailing((*ids_shape, features))
        and prod(ids_shape) > 1
    )
    if y not in context.axes or not aligned or context.shapes[y][-1] != features:
        return None
    broadcast_ids = f"token ids of '{table}' in {y}"
    shape_name = f"{broadcast_ids}: shape"
    last = {"start": 0, "end": -1}
    computed = (
        NewValue(
            Node("Shape", (y,), (shape_name,), last, f"make {shape_name}"),
            {},
            Fact(np.dtype(np.int64), (len(shape),)),
        ),
        NewValue(
            Node("Expand", (ids, shape_name), (broadcast_ids,), {}, f"make {broadcast_ids}"),
            {},
            Fact(context.dtypes[ids], shape),
        ),
    )
    return LayerMatch(
        "embedding",
        (table,),
        broadcast_ids,
        y,
        {"zeros_outside": True, "positions": True},
        computed=computed,
    )


def _trailing(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape without its leading ones."""
    first = next((axis for axis, size in enumerate(shape) if size != 1), len(shape))
    return shape[first:]
