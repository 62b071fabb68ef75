"""Computes the memory of the sessions of a model for a batch, from its sample run."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from math import ceil, prod

import numpy as np

from kfac_engine._types import Array
from kfac_engine.autodiff.differentiate import Backward
from kfac_engine.autodiff.second_order import joint_graph
from kfac_engine.backend.memory_space import HOST
from kfac_engine.errors import BackendError
from kfac_engine.graph.structure import Fact, Graph, Node
from kfac_engine.runtime.batch_axis import Batch
from kfac_engine.runtime.cpu.graph_passes import to_blocked_layout
from kfac_engine.runtime.cpu.nchwc_layout import BlockedGraph
from kfac_engine.runtime.cpu.passes import FUSED_TRANSPOSES, WEIGHT_GRADIENTS
from kfac_engine.runtime.cpu.transposed_products import fused_products
from kfac_engine.runtime.cpu.weight_gradient_session import split_backward
from kfac_engine.runtime.model import OnnxModel
from kfac_engine.runtime.sample_run import measured_facts, open_run, sample_batch

# Memory of an arena divided by the sum of its arrays, measured between 1.09 and 1.19.
_ARENA_OVERHEAD = 1.15

# Upper bound of the peak divided by the sum of forward values and parameter gradients. In small
# networks the ratio is up to 4.6, because shifted operands of convolutions exceed the images.
_PEAK_RATIO = 8


def activation_bytes(
    model: OnnxModel, batch: Batch, size: int, inputs: Mapping[str, Array] | None
) -> int:
    """Return the peak memory of the values of a forward pass and a backward pass, in bytes.

    The estimate assumes that a value is freed after its last use unless the session returns it. It
    does not include temporary memory within an operator.

    Args:
        model: A model whose backward graphs have been built.
        batch: Batch axes of inputs and values.
        size: Number of examples.
        inputs: The batch of the sample run; None if it was generated.

    Returns:
        Number of bytes, for axes other than the batch as long as in the sample run.
    """
    feeds = sample_batch(model.graph, model.facts, inputs)
    peaks = (
        _pass_bytes(model, backward, _sizes_at(model, backward, batch, size, feeds))
        for backward in model.backwards()
    )
    # The passes use the same memory, one after the other.
    return ceil(_ARENA_OVERHEAD * max(peaks))


def activation_bound(model: OnnxModel, batch: Batch, size: int) -> int:
    """Return an upper bound of the memory of a step in bytes, without building sessions.

    Args:
        model: The model.
        batch: Batch axes of inputs and values.
        size: Number of examples.

    Returns:
        ``_PEAK_RATIO`` times the bytes of all forward values and parameter gradients.
        ``activation_bytes`` is more precise, but builds sessions, which takes as long as building
        an engine.
    """
    facts = (fact for name, fact in model.facts.items() if name not in model.graph.constants)
    values = sum(value_bytes(fact) for fact in facts) * max(size / batch.size, 1)
    return ceil(_PEAK_RATIO * (values + sum(array.nbytes for array in model.parameters.values())))


def _sizes_at(
    model: OnnxModel, backward: Backward, batch: Batch, size: int, feeds: Mapping[str, Array]
) -> dict[str, float]:
    """Return the number of bytes of each value for a batch size, by linear extrapolation."""
    graph = _joint(model, backward)
    if batch.fixed:
        return _sizes(model, graph, backward, feeds)
    # Two small batches suffice, because each example takes as much memory as in a step.
    for fewer in dict.fromkeys((1, batch.size)):
        try:
            few = _sizes(model, graph, backward, with_examples(feeds, batch, fewer))
            if size == fewer:
                return few
            one_more = with_examples(feeds, batch, fewer + 1)
            more = _sizes(model, graph, backward, one_more)
        except BackendError:
            continue
        return {name: few[name] + (size - fewer) * (more[name] - few[name]) for name in few}
    raise AssertionError("the sample run failed")


def with_examples(feeds: Mapping[str, Array], batch: Batch, count: int) -> dict[str, Array]:
    """Return the inputs with ``count`` examples, repeated if the batch has fewer."""
    return {
        name: array.take(np.arange(count) % batch.size, batch.inputs[name])
        if name in batch.inputs
        else array
        for name, array in feeds.items()
    }


def _pass_bytes(model: OnnxModel, backward: Backward, sizes: Mapping[str, float]) -> float:
    """Return the peak memory of a forward pass and the backward pass after it."""
    fetched, graph = model.fetched(), model.extended_graph()
    saved_bytes = sum(sizes.get(name, 0) for name in fetched) + sum(
        sizes[entry.name] for entry in model.graph.inputs
    )
    context = model.context()
    blocked = to_blocked_layout(context, graph.nodes, fetched, graph.constants)
    forward = _peak_as_run(blocked, sizes, fetched)
    # Parameter gradients are excluded, because the engine counts their arrays separately.
    preallocated = {
        gradient for name, gradient in backward.gradients.items() if name in model.parameters
    }
    if model.memory_space is HOST:
        backward = split_backward(backward, apart=WEIGHT_GRADIENTS in model.graph_passes).session
    results = set(backward.gradients.values())
    constants = {**graph.constants, **backward.constants}
    nodes = fused_products(backward, fuse=FUSED_TRANSPOSES in model.graph_passes)
    blocked = to_blocked_layout(context, nodes, results, constants)
    sizes = {**sizes, **dict.fromkeys(preallocated, 0.0)}
    return max(forward, saved_bytes + _peak_as_run(blocked, sizes, results))


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


def _sizes(
    model: OnnxModel, graph: Graph, backward: Backward, feeds: Mapping[str, Array]
) -> dict[str, float]:
    """Return the number of bytes of each value by name."""
    known = open_run(model.graph, model.facts).facts(feeds)
    cotangents = {
        cotangent: np.zeros(known[name].shape, known[name].dtype)
        for name, cotangent in backward.cotangents.items()
    }
    facts = measured_facts(graph, {**feeds, **cotangents})
    return {name: value_bytes(fact) for name, fact in facts.items()}


def value_bytes(fact: Fact) -> int:
    """Return the number of bytes of a value in the sample run."""
    return fact.dtype.itemsize * prod(fact.shape)


def _peak(nodes: Iterable[Node], sizes: Mapping[str, float], returned: Collection[str]) -> float:
    """Return the peak memory of live results while the nodes run in order, in bytes.

    A result is live until its last reader has run. Results in ``returned`` are live until the end.
    """
    nodes = tuple(nodes)
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
