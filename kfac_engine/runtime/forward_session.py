"""The session that runs the forward graph of a model."""

from collections.abc import Mapping, Sequence

from kfac_engine._types import Array
from kfac_engine.autodiff.random_ops import given_draws
from kfac_engine.graph.analysis.subgraph import read_by
from kfac_engine.graph.compact import compact_model
from kfac_engine.graph.structure import Graph, Input
from kfac_engine.runtime.context import SessionContext
from kfac_engine.runtime.cpu.graph_passes import to_blocked_layout
from kfac_engine.sessions.device_session import DeviceSession
from kfac_engine.sessions.placement import open_session
from kfac_engine.sessions.session import Session


def open_forward(
    context: SessionContext, graph: Graph, asked: Sequence[str], drawn: Mapping[str, Array]
) -> Session | DeviceSession:
    """A session where the model runs, of its graph with the values that were added to it.

    Args:
        context: Settings of the session.
        graph: The graph of the context, with the values that were added to it.
        asked: Names of the values that it computes.
        drawn: Values drawn at random that it is fed instead of drawing them.

    Returns:
        The session; it is fed inputs, parameters, buffers and ``drawn``.
    """
    stored = context.stored
    nodes = given_draws(graph.nodes, drawn)
    laid = to_blocked_layout(context, nodes, asked, graph.constants)
    fed = {**stored, **drawn}
    message = compact_model(
        laid.nodes,
        [*graph.inputs, *(Input(name, array.dtype, None) for name, array in fed.items())],
        asked,
        read_by(laid.nodes, {**graph.constants, **laid.constants}, excluded=stored),
        graph.opset,
        name=graph.name,
        domains=graph.domains,
    )
    what = f"the forward graph of '{graph.name}'"
    return open_session(
        message, threads=context.threads, what=what, memory_space=context.memory_space
    )
