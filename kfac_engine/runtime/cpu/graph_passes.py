"""What the sessions of a model run on the CPU: its nodes in the forms that are quickest there."""

from collections.abc import Collection, Mapping, Sequence
from functools import cache

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend.memory_space import HOST
from kfac_engine.errors import BackendError
from kfac_engine.graph.compact import compact_model
from kfac_engine.graph.structure import Input, Node
from kfac_engine.runtime.context import SessionContext
from kfac_engine.runtime.cpu.nchwc_layout import (
    DOMAIN,
    BlockedGraph,
    LayoutContext,
    convert_to_blocked,
)
from kfac_engine.runtime.cpu.passes import BLOCKED_LAYOUT
from kfac_engine.sessions.session import Session

_FLOAT = np.dtype(np.float32)

# Sizes of blocks that ONNX Runtime has on any processor divide it.
_CHANNELS = 32


def to_blocked_layout(
    context: SessionContext,
    nodes: Sequence[Node],
    handed: Collection[str],
    constants: Mapping[str, Array],
) -> BlockedGraph:
    """Nodes of a model's forward or backward graph, as its session on the CPU runs them.

    Args:
        context: The model.
        nodes: In topological order.
        handed: Names of results that are handed over.
        constants: Those of the graph; parameters may be among them.

    Returns:
        Nodes with the same results; the given ones on a GPU, and without the pass.
    """
    if context.memory_space is not HOST or BLOCKED_LAYOUT not in context.graph_passes:
        return BlockedGraph(tuple(nodes), {}, {})
    facts = context.facts
    held = {name: array for name, array in constants.items() if name not in context.parameters}
    kernels = {
        name: facts[name].shape
        for name in {name for node in nodes for name in node.inputs}.difference(held)
        if name in facts and facts[name].dtype == _FLOAT and context.is_static(name)
    }
    shapes = {name: fact.shape for name, fact in facts.items()}
    return convert_to_blocked(nodes, LayoutContext(handed, kernels, shapes, held), channel_block())


@cache
def channel_block() -> int:
    """Channels in a block, as a trial shows them; 0 where ONNX Runtime has none, or is wrong."""
    x = np.arange(2 * _CHANNELS, dtype=_FLOAT).reshape(1, _CHANNELS, 1, 2)
    try:
        (turned,) = _tried([Node("ReorderInput", ("x",), ("y",), {}, "turn", DOMAIN)], x)
        # Number one is the second pixel of the first channel; zero if it is nowhere.
        block = int(np.argmax(turned.ravel() == 1))
        if block < 2 or _CHANNELS % block:
            return 0
        conv = Node("Conv", ("x", "w"), ("c",), {"pads": (1, 0, 1, 0)}, "conv")
        nodes = [conv, Node("Add", ("c", "c"), ("y",), {}, "add")]
        scene = LayoutContext({"y"}, {"w": _trial_kernel().shape}, {}, {})
        found = convert_to_blocked(nodes, scene, block)
        pair = [
            _tried(way, x, constants)
            for way, constants in ((nodes, {}), (found.nodes, found.constants))
        ]
    except BackendError:
        return 0
    return block if np.array_equal(pair[0][0], pair[1][0]) else 0


def _trial_kernel() -> Array:
    """Small whole numbers, which every order of summation adds up exactly."""
    return (np.arange(_CHANNELS**2 * 3) % 5).astype(_FLOAT).reshape(_CHANNELS, _CHANNELS, 3, 1)


def _tried(
    nodes: Sequence[Node], x: Array, constants: Mapping[str, Array] | None = None
) -> list[Array]:
    inputs = [Input(name, _FLOAT, (None,) * 4) for name in ("x", "w")]
    model = compact_model(nodes, inputs, ("y",), constants or {}, 18, name="trial", once=True)
    session = Session(model, threads=1, once=True, what="a trial of layouts")
    return list(session.run(("y",), {"x": x, "w": _trial_kernel()}).values())
