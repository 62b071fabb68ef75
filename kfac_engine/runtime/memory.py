"""Memory that the sessions of a model take for a batch, in bytes, told from its sample run."""

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
from kfac_engine.runtime.cpu.weight_gradient_session import divided
from kfac_engine.runtime.model import OnnxModel
from kfac_engine.runtime.sample_run import measured_facts, open_run, sample_batch

# What an arena of pieces of many sizes takes over the sum of them: measured 1.09 to 1.19.
_LOST = 1.15

# Peaks of small networks were 0.7 to 4.6 times the sum of all values of the forward pass and the
# gradients of parameters: shifted operands of convolutions are several times as large as images.
_SPARE = 8


def activation_bytes(
    model: OnnxModel, batch: Batch, size: int, inputs: Mapping[str, Array] | None
) -> int:
    """Peak of all values of a forward pass and a backward pass, masks and indices included.

    Results are taken to be freed after their last use unless they are handed over. What an operator
    needs while it runs is not counted.

    Args:
        model: Everything it will be asked for was asked for once.
        batch: Where the examples lie.
        size: Examples.
        inputs: The batch of the sample run; None if it was made up.

    Returns:
        Bytes. Axes other than the batch are as long as in the sample run.
    """
    feeds = sample_batch(model.graph, model.facts, inputs)
    peaks = (
        _pass_bytes(model, backward, _sizes_at(model, backward, batch, size, feeds))
        for backward in model.backwards()
    )
    # Passes run one after the other, in the same memory: the largest decides.
    return ceil(_LOST * max(peaks))


def activation_bound(model: OnnxModel, batch: Batch, size: int) -> int:
    """Bytes that a step's values stay well below, told from the sample run alone: a sum.

    Args:
        model: The model.
        batch: Where the examples lie.
        size: Examples.

    Returns:
        ``_SPARE`` times all values of the forward pass and the gradients of parameters, as if none
        was freed. ``activation_bytes`` knows the peak, but measures it in sessions that take as
        long to build as the engine's own.
    """
    facts = (fact for name, fact in model.facts.items() if name not in model.graph.constants)
    values = sum(value_bytes(fact) for fact in facts) * max(size / batch.size, 1)
    return ceil(_SPARE * (values + sum(array.nbytes for array in model.parameters.values())))


def _sizes_at(
    model: OnnxModel, backward: Backward, batch: Batch, size: int, feeds: Mapping[str, Array]
) -> dict[str, float]:
    """Bytes of every value for a batch of another size: all are linear in it."""
    graph = _joint(model, backward)
    if batch.fixed:
        return _sizes(model, graph, backward, feeds)
    # As few examples as tell the slope: each takes as much memory as it would in a step.
    for fewer in dict.fromkeys((1, batch.size)):
        try:
            few = _sizes(model, graph, backward, _with_examples(feeds, batch, fewer))
            if size == fewer:
                return few
            one_more = _with_examples(feeds, batch, fewer + 1)
            more = _sizes(model, graph, backward, one_more)
        except BackendError:
            continue
        return {name: few[name] + (size - fewer) * (more[name] - few[name]) for name in few}
    raise AssertionError("the sample run itself failed")


def _with_examples(feeds: Mapping[str, Array], batch: Batch, count: int) -> dict[str, Array]:
    """The inputs with so many examples, repeated where there are fewer."""
    return {
        name: array.take(np.arange(count) % batch.size, batch.inputs[name])
        if name in batch.inputs
        else array
        for name, array in feeds.items()
    }


def _pass_bytes(model: OnnxModel, backward: Backward, sizes: Mapping[str, float]) -> float:
    """Peak of a forward pass and a backward pass after it."""
    fetched, graph = model.fetched(), model.extended_graph()
    kept = sum(sizes.get(name, 0) for name in fetched) + sum(
        sizes[entry.name] for entry in model.graph.inputs
    )
    context = model.context()
    laid = to_blocked_layout(context, graph.nodes, fetched, graph.constants)
    forward = _peak_as_run(laid, sizes, fetched)
    # Those of parameters are written into the caller's own arrays, which are counted as gradients.
    own = {gradient for name, gradient in backward.gradients.items() if name in model.parameters}
    if model.memory_space is HOST:
        backward = divided(backward, apart=WEIGHT_GRADIENTS in model.graph_passes).session
    handed = set(backward.gradients.values())
    constants = {**graph.constants, **backward.constants}
    nodes = fused_products(backward, fuse=FUSED_TRANSPOSES in model.graph_passes)
    laid = to_blocked_layout(context, nodes, handed, constants)
    return max(forward, kept + _peak_as_run(laid, {**sizes, **dict.fromkeys(own, 0.0)}, handed))


def _peak_as_run(laid: BlockedGraph, sizes: Mapping[str, float], kept: Collection[str]) -> float:
    """The peak, with values that lie in memory a second time, in blocks."""
    copies = {there: sizes.get(value, 0.0) for there, value in laid.copies.items()}
    return _peak(laid.nodes, {**sizes, **copies}, kept)


def _joint(model: OnnxModel, backward: Backward) -> Graph:
    """Forward graph, all that was added to it, and a backward graph."""
    graph = model.extended_graph()
    added = {node.name for node in backward.forward_nodes}
    kept = tuple(node for node in graph.nodes if node.name not in added)
    return joint_graph(replace(graph, nodes=kept), backward)


def _sizes(
    model: OnnxModel, graph: Graph, backward: Backward, feeds: Mapping[str, Array]
) -> dict[str, float]:
    """Bytes of every value by name; a cotangent is as large as its value."""
    known = open_run(model.graph, model.facts).facts(feeds)
    cotangents = {
        cotangent: np.zeros(known[name].shape, known[name].dtype)
        for name, cotangent in backward.cotangents.items()
    }
    facts = measured_facts(graph, {**feeds, **cotangents})
    return {name: value_bytes(fact) for name, fact in facts.items()}


def value_bytes(fact: Fact) -> int:
    """Bytes of a value in the run that was measured."""
    return fact.dtype.itemsize * prod(fact.shape)


def _peak(nodes: Iterable[Node], sizes: Mapping[str, float], kept: Collection[str]) -> float:
    """Largest sum of results that are still to be read or to be handed over."""
    nodes = tuple(nodes)
    last = {name: i for i, node in enumerate(nodes) for name in (*node.inputs, *node.captures)}
    made: set[str] = set()
    live = peak = 0.0
    for index, node in enumerate(nodes):
        results = [name for name in node.outputs if name]
        live += sum(sizes.get(name, 0) for name in results)
        made.update(results)
        peak = max(peak, live)
        done = {name for name in (*node.inputs, *results) if last.get(name, -1) <= index}
        live -= sum(sizes.get(name, 0) for name in done & made if name not in kept)
        made -= done
    return peak
