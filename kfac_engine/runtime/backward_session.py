"""Opens the session that runs a backward graph."""

from collections.abc import Mapping
from typing import TypeAlias

from kfac_engine._types import DType
from kfac_engine.autodiff.differentiate import Backward
from kfac_engine.backend.memory_space import HOST
from kfac_engine.backend.threads import Workers
from kfac_engine.graph.analysis.subgraph import read_by
from kfac_engine.graph.compact import compact_model
from kfac_engine.graph.structure import Input
from kfac_engine.runtime.context import SessionContext
from kfac_engine.runtime.cpu.graph_passes import to_blocked_layout
from kfac_engine.runtime.cpu.passes import FUSED_TRANSPOSES, WEIGHT_GRADIENTS
from kfac_engine.runtime.cpu.transposed_products import fused_products
from kfac_engine.runtime.cpu.weight_gradient_session import WeightGradientSession, split_backward
from kfac_engine.sessions.device_session import DeviceSession
from kfac_engine.sessions.placement import open_session
from kfac_engine.sessions.session import Session

BackwardSession: TypeAlias = Session | DeviceSession | WeightGradientSession


def open_backward(
    context: SessionContext, backward: Backward, fetched: Mapping[str, DType]
) -> BackwardSession:
    """Return the session of a backward graph; on a CPU, BLAS computes gradients of kernels.

    Args:
        context: Settings of the session.
        backward: A backward graph of the model.
        fetched: Element types of values that the forward session returns.

    Returns:
        A session whose inputs are the values ``context.fed`` and the cotangents.
    """
    if context.memory_space is not HOST:
        return _open(context, backward, fetched)
    parts = split_backward(backward, apart=WEIGHT_GRADIENTS in context.graph_passes)
    session = _open(context, parts.session, fetched) if parts.session.gradients else None
    workers = Workers(context.threads or None)
    return WeightGradientSession(
        session, parts, context.graph.constants, workers, context.scratch_bytes
    )


def _open(
    context: SessionContext, backward: Backward, fetched: Mapping[str, DType]
) -> Session | DeviceSession:
    graph, fed = context.graph, context.fed(backward)
    inputs = [Input(name, dtype, None) for name, dtype in backward.dtypes.items()]
    inputs += [
        Input(name, context.facts[name].dtype if name in context.facts else fetched[name], None)
        for name in fed
    ]
    computed = {name for node in backward.nodes for name in node.outputs}
    constants = {**graph.constants, **backward.constants}
    results = {*backward.gradients.values()}
    nodes = fused_products(backward, fuse=FUSED_TRANSPOSES in context.graph_passes)
    blocked = to_blocked_layout(context, nodes, results, constants)
    message = compact_model(
        blocked.nodes,
        inputs,
        tuple(dict.fromkeys(name for name in backward.gradients.values() if name in computed)),
        read_by(blocked.nodes, {**constants, **blocked.constants}, excluded=frozenset(fed)),
        graph.opset,
        name=f"{graph.name}_backward",
        domains=graph.domains,
    )
    return open_session(
        message,
        threads=context.threads,
        what=f"the backward graph of '{graph.name}'",
        memory_space=context.memory_space,
    )
