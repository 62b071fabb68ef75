"""Opens the sessions that run a model's forward graph and backward graphs."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from kfac_engine._types import Array, DType
from kfac_engine.autodiff.differentiate import Backward
from kfac_engine.backend.cpu.backend import SCRATCH_BYTES
from kfac_engine.backend.memory_space import HOST
from kfac_engine.backend.threads import Workers
from kfac_engine.graph.analysis.subgraph import read_by
from kfac_engine.graph.passes.decompose import DecompositionBuilder
from kfac_engine.graph.structure import Fact, Graph, Input, Node
from kfac_engine.graph.write import compact_model
from kfac_engine.runtime.context import SessionContext
from kfac_engine.runtime.cpu.graph_passes import (
    WEIGHT_GRADIENTS,
    fused_backward,
    fused_forward,
    to_blocked_layout,
)
from kfac_engine.runtime.cpu.weight_gradient_session import WeightGradientSession, split_backward
from kfac_engine.runtime.draws import start_input, with_hashes
from kfac_engine.sessions.device_session import DeviceSession, open_session
from kfac_engine.sessions.session import Session


def for_gpu(
    nodes: Sequence[Node], facts: Mapping[str, Fact]
) -> tuple[tuple[Node, ...], dict[str, Array]]:
    """Return nodes that ONNX Runtime can compute on a GPU, with the constants they add.

    ONNX Runtime 1.31 refuses ``BatchNormalization`` in training form there.
    """
    result: list[Node] = []
    constants: dict[str, Array] = {}
    for node in nodes:
        if node.qualified_op == "BatchNormalization" and node.attributes.get("training_mode", 0):
            builder = DecompositionBuilder(node)
            _normalization_by_batch(builder, facts[node.inputs[0]])
            result += builder.nodes
            constants |= builder.constants
        else:
            result.append(node)
    return tuple(result), constants


def _normalization_by_batch(b: DecompositionBuilder, data: Fact) -> None:
    x, scale, shift, *running = b.node.inputs
    rank = len(data.shape)
    axes = b.constant([axis for axis in range(rank) if axis != 1])
    along = b.constant([-1] + [1] * (rank - 2))

    def number(value: float) -> str:
        return b.constant(np.asarray(value, data.dtype))

    mean = b.op("ReduceMean", x, axes, keepdims=1)
    centred = b.op("Sub", x, mean)
    variance = b.op("ReduceMean", b.op("Mul", centred, centred), axes, keepdims=1)
    deviation = b.op("Sqrt", b.op("Add", variance, number(b.number("epsilon", 1e-5))))
    scaled = b.op("Mul", b.op("Div", centred, deviation), b.op("Reshape", scale, along))
    b.op("Add", scaled, b.op("Reshape", shift, along), result=b.node.outputs[0])
    momentum = b.number("momentum", 0.9)
    for old, new, name in zip(running, (mean, variance), b.node.outputs[1:], strict=False):
        if name:
            decayed = b.op("Mul", old, number(momentum))
            share = b.op("Mul", b.op("Reshape", new, b.constant([-1])), number(1 - momentum))
            b.op("Add", decayed, share, result=name)


def open_forward(
    context: SessionContext, graph: Graph, outputs: Sequence[str]
) -> Session | DeviceSession:
    """Return the session of the forward graph.

    Its inputs are the inputs, parameters and buffers of the model, and the start of its random
    numbers if it draws any. ``graph`` is the graph of the context with the values that were added
    to it.
    """
    stored, start = context.stored, context.start
    nodes, constants = graph.nodes, graph.constants
    if context.memory_space is not HOST:
        nodes, added = for_gpu(nodes, context.facts)
        constants = {**constants, **added}
    nodes = fused_forward(context, nodes, outputs)
    blocked = to_blocked_layout(context, nodes, outputs, constants)
    nodes, constants = blocked.nodes, {**constants, **blocked.constants}
    fed = [Input(name, array.dtype, None) for name, array in stored.items()]
    if start:
        nodes, added = with_hashes(nodes, context.graph, context.facts, start)
        constants |= added
        fed.append(start_input(start))
    message = compact_model(
        nodes,
        [*graph.inputs, *fed],
        outputs,
        read_by(nodes, constants, excluded=stored),
        graph.opset,
        name=graph.name,
        domains=graph.domains,
    )
    what = f"the forward graph of '{graph.name}'"
    return open_session(
        message, threads=context.threads, what=what, memory_space=context.memory_space
    )


BackwardSession: TypeAlias = Session | DeviceSession | WeightGradientSession


def open_backward(
    context: SessionContext, backward: Backward, fetched: Mapping[str, DType]
) -> BackwardSession:
    """Return the session of a backward graph; on a CPU, BLAS computes gradients of kernels.

    Its inputs are the values ``context.fed`` and the cotangents. ``fetched`` has the element types
    of the values that the forward session returns.
    """
    if context.memory_space is not HOST:
        return _open(context, backward, fetched)
    parts = split_backward(backward, apart=WEIGHT_GRADIENTS in context.graph_passes)
    session = _open(context, parts.session, fetched) if parts.session.gradients else None
    fed = (*parts.session.gradients, *backward.dtypes, *context.fed(backward))
    if session and not parts.finished and set(fed).issuperset(backward.gradients.values()):
        return session
    workers = Workers(context.threads or None)
    return WeightGradientSession(session, parts, context.graph.constants, workers, SCRATCH_BYTES)


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
    nodes = fused_backward(context, backward)
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
