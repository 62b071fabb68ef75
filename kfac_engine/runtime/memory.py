"""Computes the memory of a model's sessions for a batch, from the sample run."""

from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import replace
from math import ceil, prod
from typing import cast

import numpy as np

from kfac_engine._types import Array
from kfac_engine.autodiff.differentiate import Backward
from kfac_engine.autodiff.second_order import joint_graph
from kfac_engine.backend.memory_space import HOST
from kfac_engine.errors import BackendError
from kfac_engine.graph.analysis.subgraph import of_data
from kfac_engine.graph.structure import ONLY_SHAPES, Fact, Graph, Input, Node
from kfac_engine.runtime.batch_axis import Batch
from kfac_engine.runtime.cpu.graph_passes import (
    WEIGHT_GRADIENTS,
    fused_backward,
    fused_forward,
    to_blocked_layout,
)
from kfac_engine.runtime.cpu.nchwc_layout import BlockedGraph
from kfac_engine.runtime.cpu.weight_gradient_session import split_backward
from kfac_engine.runtime.model import OnnxModel
from kfac_engine.runtime.sample_run import SampleRun

# Memory of an arena divided by the sum of its arrays, measured between 0.95 and 1.17 for networks
# of real size.
_ARENA_OVERHEAD = 1.1

_WHAT = "the sizes"
# Sizes are computed from constants of at most so many entries, and not by operators whose results
# may be large.
_MOST_ENTRIES = 1024
_FILLING = frozenset({"ConstantOfShape", "Expand", "Tile"})

# Upper bound of the peak divided by the sum of forward values and parameter gradients. In small
# networks the ratio is up to 4.6, because shifted operands of convolutions exceed the images.
_PEAK_RATIO = 8


def activation_bytes(model: OnnxModel, batch: Batch, size: int, measured: int) -> int:
    """Return the peak memory of the values of a forward pass and a backward pass, in bytes.

    The backward graphs of the model must have been built. ``measured`` is the number of examples
    whose statistics are computed. The estimate assumes that a value is freed after its last use
    unless the session returns it. It does not include temporary memory within an operator. Axes
    other than the batch are as long as in the sample run.
    """
    backwards = model.backwards()
    alone = [backward.gradients.keys() <= model.parameters.keys() for backward in backwards]
    sizes = [size if of_all or not any(alone) else measured for of_all in alone]
    passes = [entry for entry in zip(backwards, sizes, strict=True) if entry[1]]
    # The passes use the same memory, one after the other.
    return ceil(_ARENA_OVERHEAD * max(_pass_bytes(model, batch, *of_pass) for of_pass in passes))


def activation_bound(model: OnnxModel, batch: Batch, size: int) -> int:
    """Return an upper bound of the memory of a step in bytes, without building sessions.

    The bound is ``_PEAK_RATIO`` times the bytes of all forward values and parameter gradients.
    ``activation_bytes`` is more precise, but builds sessions, which takes as long as building an
    engine.
    """
    ratio = max(size / batch.size, 1)
    values = sum(
        value_bytes(fact) * ratio ** (1 + len(batch.squares.get(name, ())))
        for name, fact in model.facts.items()
        if name not in model.graph.constants
    )
    return ceil(_PEAK_RATIO * (values + sum(array.nbytes for array in model.parameters.values())))


def _sizes_at(model: OnnxModel, backward: Backward, batch: Batch, size: int) -> dict[str, float]:
    """Return the number of bytes of each value of a batch, from shapes alone: nothing is run.

    Sizes of forward values grow from the sample run in proportion to the examples. Sizes of other
    values follow from them by the shape inference of ONNX Runtime. All sizes grow if further axes
    grow with the examples, such as the nodes of graphs.
    """
    size = batch.size if batch.fixed else size
    try:
        if not batch.joint or batch.squares:
            return _bytes_of(model, backward, batch, size)
    except BackendError:  # a size that is not in proportion
        pass
    sampled = _bytes_of(model, backward, batch, batch.size)
    return {name: max(size / batch.size, 1) * nbytes for name, nbytes in sampled.items()}


def _bytes_of(model: OnnxModel, backward: Backward, batch: Batch, size: int) -> dict[str, float]:
    """Return the bytes of each value of a forward and a backward graph, for ``size`` examples."""
    joint = _joint(model, backward)
    facts = {name: _at(fact, name, batch, size) for name, fact in model.facts.items()}
    data = of_data(joint)
    # Values whose size is not in proportion to the batch, and those that losses have added.
    known_facts = {
        name: fact
        for name, fact in facts.items()
        if name in batch.places or name in batch.inputs or name not in data
    }
    # Inputs without an axis of examples, such as rates, are as long as in the sample run.
    known_facts |= {entry.name: facts[entry.name] for entry in model.graph.inputs}
    known_facts |= {cotangent: facts[name] for name, cotangent in backward.cotangents.items()}
    shapes = {
        node.outputs[0]: _shape_of(node, known_facts[node.inputs[0]].shape)
        for node in joint.nodes
        if node.op == "Shape" and node.inputs[0] in known_facts
    }
    nodes = tuple(node for node in joint.nodes if shapes.keys().isdisjoint(node.outputs))
    graph = replace(joint, nodes=nodes, inputs=(), constants={**joint.constants, **shapes})
    computed = _computed(graph, set(model.parameters))
    unknown = tuple(
        node
        for node in nodes
        if not known_facts.keys() >= {*node.outputs} - {""} and node.outputs[0] not in computed
    )
    reads = dict.fromkeys(name for node in unknown for name in (*node.inputs, *node.captures))
    sizes = [name for name in reads if name in computed and name not in graph.constants]
    constants = {**graph.constants, **SampleRun(graph, _WHAT).values({}, sizes)}
    inputs = tuple(
        Input(name, known_facts[name].dtype, known_facts[name].shape)
        for name in reads
        if name in known_facts and name not in constants
    )
    run = SampleRun(
        replace(graph, nodes=unknown, inputs=inputs, outputs=(), constants=constants), _WHAT
    )
    return _completed(unknown, {**constants, **known_facts}, run, facts)


def _completed(
    nodes: Iterable[Node],
    known: Mapping[str, Fact | Array],
    run: SampleRun,
    facts: Mapping[str, Fact],
) -> dict[str, float]:
    """Return the bytes of all values; unknown results share the bytes of the largest input."""
    sizes: dict[str, float] = {
        name: fact.dtype.itemsize * prod(fact.shape) for name, fact in known.items()
    }
    inferred, dtypes = run.inferred_shapes(), run.dtypes
    for node in nodes:
        largest = max((sizes.get(name, 0.0) for name in node.inputs), default=0.0)
        for name in filter(None, node.outputs):
            if name in inferred:
                sizes[name] = dtypes[name].itemsize * prod(inferred[name])
            else:
                fact = facts.get(name)
                sizes[name] = value_bytes(fact) if fact else largest / len(node.outputs)
    return sizes


def _computed(graph: Graph, parameters: Container[str]) -> set[str]:
    """Return the values that follow from small constants, such as sizes."""
    known = {
        name
        for name, array in graph.constants.items()
        if name not in parameters and array.size <= _MOST_ENTRIES
    }
    for node in graph.nodes:
        if node.op not in _FILLING and known.issuperset(
            filter(None, (*node.inputs, *node.captures))
        ):
            known.update(node.outputs)
    return known - {""}


def _at(fact: Fact, name: str, batch: Batch, size: int) -> Fact:
    """Return the shape of a value for a number of examples."""
    shape = [*fact.shape]
    for axis in batch.axes(name):
        shape[axis] = shape[axis] * size // batch.size
    return replace(fact, shape=tuple(shape))


def _shape_of(node: Node, shape: tuple[int, ...]) -> Array:
    """Return the result of a Shape node."""
    start, end = (cast("int | None", node.attributes.get(name)) for name in ("start", "end"))
    return np.array(shape[start:end], np.int64)


def _pass_bytes(model: OnnxModel, batch: Batch, backward: Backward, size: int) -> float:
    """Return the peak memory of a forward pass and the backward pass after it."""
    sizes = _sizes_at(model, backward, batch, size)
    fetched, graph = model.fetched(), model.extended_graph()
    saved_bytes = sum(sizes.get(name, 0) for name in fetched) + sum(
        sizes[entry.name] for entry in model.graph.inputs
    )
    read_by_losses = sum(sizes.get(name, 0) for name in backward.cotangents)
    context = model.context()
    nodes = fused_forward(context, graph.nodes, fetched)
    blocked = to_blocked_layout(context, nodes, fetched, graph.constants)
    forward = _peak_as_run(blocked, sizes, fetched)
    # Parameter gradients are excluded, because the engine counts their arrays separately.
    preallocated = {
        gradient for name, gradient in backward.gradients.items() if name in model.parameters
    }
    if model.memory_space is HOST:
        backward = split_backward(backward, apart=WEIGHT_GRADIENTS in model.graph_passes).session
    results = set(backward.gradients.values())
    constants = {**graph.constants, **backward.constants}
    nodes = fused_backward(context, backward)
    blocked = to_blocked_layout(context, nodes, results, constants)
    sizes = {**sizes, **dict.fromkeys(preallocated, 0.0)}
    # A loss makes an array of the size of the values that it reads, and the cotangents.
    loss = saved_bytes + 2 * read_by_losses
    run = saved_bytes + read_by_losses + _peak_as_run(blocked, sizes, results)
    return max(forward, loss, run)


def _peak_as_run(
    blocked: BlockedGraph, sizes: Mapping[str, float], results: Collection[str]
) -> float:
    """Return the peak memory of a pass with copies of values in the blocked layout."""
    copies = {there: sizes.get(value, 0.0) for there, value in blocked.copies.items()}
    return _peak(blocked.nodes, {**sizes, **copies}, results)


def _joint(model: OnnxModel, backward: Backward) -> Graph:
    """Return the forward and the backward graph as one graph."""
    graph = model.extended_graph()
    added = {node.name for node in backward.forward_nodes}
    nodes = tuple(node for node in graph.nodes if node.name not in added)
    return joint_graph(replace(graph, nodes=nodes), backward)


def value_bytes(fact: Fact) -> int:
    """Return the number of bytes of a value in the sample run."""
    return fact.dtype.itemsize * prod(fact.shape)


def _peak(nodes: Iterable[Node], sizes: Mapping[str, float], returned: Collection[str]) -> float:
    """Return the peak memory of live results while the nodes run in order, in bytes.

    A result is live until its last reader has run. Results in ``returned`` are live until the end.
    """
    # ONNX Runtime computes shapes at once.
    nodes = tuple(node for node in nodes if node.op not in ONLY_SHAPES)
    last = {name: i for i, node in enumerate(nodes) for name in (*node.inputs, *node.captures)}
    computed: set[str] = set()
    live = peak = 0.0
    for index, node in enumerate(nodes):
        results = [name for name in node.outputs if name]
        live += sum(sizes.get(name, 0) for name in results)
        computed.update(results)
        peak = max(peak, live)
        done = {name for name in (*node.inputs, *results) if last.get(name, -1) <= index}
        live -= sum(sizes.get(name, 0) for name in done & computed if name not in returned)
        computed -= done
    return peak
