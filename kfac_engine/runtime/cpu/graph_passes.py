"""The table of graph passes for a CPU, which reduce the time or the memory of a session.

A model runs any subset of the passes, with the same results. A pass that saves time must save 5 %
of a step; docs/performance.md lists the measured ratios.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Final

import numpy as np

from kfac_engine._types import Array
from kfac_engine.arguments import texts
from kfac_engine.backend.memory_space import HOST
from kfac_engine.errors import BackendError
from kfac_engine.graph.structure import Input, Node
from kfac_engine.graph.write import compact_model
from kfac_engine.registry import Registry
from kfac_engine.runtime.context import SessionContext
from kfac_engine.runtime.cpu.nchwc_layout import (
    DOMAIN,
    BlockedGraph,
    LayoutContext,
    convert_to_blocked,
)
from kfac_engine.sessions.session import Session

_FLOAT = np.dtype(np.float32)

# A multiple of the block size of ONNX Runtime on every processor.
_CHANNELS = 32


def to_blocked_layout(
    context: SessionContext,
    nodes: Sequence[Node],
    results: Collection[str],
    constants: Mapping[str, Array],
) -> BlockedGraph:
    """Return a graph with the same results whose convolutions use the blocked layout.

    The nodes do not change on a GPU or without the pass. The constants may include parameters.
    """
    if context.memory_space is not HOST or BLOCKED_LAYOUT not in context.graph_passes:
        return BlockedGraph(tuple(nodes), {}, {})
    facts = context.facts
    fixed = {name: array for name, array in constants.items() if name not in context.parameters}
    kernels = {
        name: facts[name].shape
        for name in {name for node in nodes for name in node.inputs}.difference(fixed)
        if name in facts and facts[name].dtype == _FLOAT and context.is_static(name)
    }
    shapes = {name: fact.shape for name, fact in facts.items()}
    return convert_to_blocked(
        nodes, LayoutContext(results, kernels, shapes, fixed), channel_block()
    )


@cache
def channel_block() -> int:
    """Return the number of channels in a block of ONNX Runtime; 0 without a blocked layout."""
    x = np.arange(2 * _CHANNELS, dtype=_FLOAT).reshape(1, _CHANNELS, 1, 2)
    try:
        (reordered,) = _tried([Node("ReorderInput", ("x",), ("y",), {}, "reorder", DOMAIN)], x)
        # The second pixel of the first channel, with the value 1, comes after the first block.
        block = int(np.argmax(reordered.ravel() == 1))
        if block < 2 or _CHANNELS % block:
            return 0
        conv = Node("Conv", ("x", "w"), ("c",), {"pads": (1, 0, 1, 0)}, "conv")
        nodes = [conv, Node("Add", ("c", "c"), ("y",), {}, "add")]
        layout = LayoutContext({"y"}, {"w": _trial_kernel().shape}, {}, {})
        blocked = convert_to_blocked(nodes, layout, block)
        pair = [
            _tried(trial, x, constants)
            for trial, constants in ((nodes, {}), (blocked.nodes, blocked.constants))
        ]
    except BackendError:
        return 0
    return block if np.array_equal(pair[0][0], pair[1][0]) else 0


def _trial_kernel() -> Array:
    """Return a kernel of small integers, for which sums are exact in every order."""
    return (np.arange(_CHANNELS**2 * 3) % 5).astype(_FLOAT).reshape(_CHANNELS, _CHANNELS, 3, 1)


def _tried(
    nodes: Sequence[Node], x: Array, constants: Mapping[str, Array] | None = None
) -> list[Array]:
    inputs = [Input(name, _FLOAT, (None,) * 4) for name in ("x", "w")]
    model = compact_model(nodes, inputs, ("y",), constants or {}, 18, name="trial", once=True)
    session = Session(model, threads=1, once=True, what="a trial of layouts")
    return list(session.run(("y",), {"x": x, "w": _trial_kernel()}).values())


BLOCKED_LAYOUT: Final = "blocked_layout"
FUSED_TRANSPOSES: Final = "fused_transposes"
WEIGHT_GRADIENTS: Final = "weight_gradients"

# Map from the name of a pass to its purpose.
PASSES = Registry(
    "graph pass",
    {
        BLOCKED_LAYOUT: "convolutions on images in ONNX Runtime's blocked layout NCHWc",
        FUSED_TRANSPOSES: "transposes within the products that read them",
        WEIGHT_GRADIENTS: "gradients of convolution kernels by BLAS, outside ONNX Runtime",
    },
)


def chosen_passes(names: Sequence[str] | None) -> frozenset[str]:
    """Return the checked names of the passes that a model runs; all names if ``names`` is None.

    ``InputError`` is raised if ``names`` is not a list of strings, and ``UnknownNameError`` if a
    name is not in ``PASSES``.
    """
    if names is None:
        return frozenset(PASSES)
    texts("graph_passes", names, "['blocked_layout']")
    for name in names:
        PASSES[name]
    return frozenset(names)
