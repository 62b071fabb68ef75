"""Opens the session that runs the forward graph of a model."""

from collections.abc import Mapping, Sequence

from kfac_engine._types import Array
from kfac_engine.autodiff.random_ops import given_draws
from kfac_engine.backend.memory_space import HOST
from kfac_engine.graph.analysis.subgraph import read_by
from kfac_engine.graph.compact import compact_model
from kfac_engine.graph.structure import Graph, Input
from kfac_engine.runtime.context import SessionContext
from kfac_engine.runtime.cpu.graph_passes import to_blocked_layout
from kfac_engine.runtime.gpu_operators import for_gpu
from kfac_engine.sessions.device_session import DeviceSession
from kfac_engine.sessions.placement import open_session
from kfac_engine.sessions.session import Session


def open_forward(
    context: SessionContext, graph: Graph, outputs: Sequence[str], drawn: Mapping[str, Array]
) -> Session | DeviceSession:
    """Return the session of the forward graph.

    Args:
        context: Settings of the session.
        graph: The graph of the context, with the values that were added to it.
        outputs: Names of the values that the session computes.
        drawn: Random values that the session reads as inputs instead of drawing them.

    Returns:
        The session, whose inputs are the inputs, parameters and buffers of the model, and
        ``drawn``.
    """
    stored = context.stored
    nodes, constants = given_draws(graph.nodes, drawn), graph.constants
    if context.memory_space is not HOST:
        nodes, added = for_gpu(nodes, context.facts)
        constants = {**constants, **added}
    blocked = to_blocked_layout(context, nodes, outputs, constants)
    fed = {**stored, **drawn}
    message = compact_model(
        blocked.nodes,
        [*graph.inputs, *(Input(name, array.dtype, None) for name, array in fed.items())],
        outputs,
        read_by(blocked.nodes, {**constants, **blocked.constants}, excluded=stored),
        graph.opset,
        name=graph.name,
        domains=graph.domains,
    )
    what = f"the forward graph of '{graph.name}'"
    return open_session(
        message, threads=context.threads, what=what, memory_space=context.memory_space
    )
