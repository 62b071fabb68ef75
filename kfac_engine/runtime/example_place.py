"""Finds results of an example that depend on the number of examples, or on its place among them.

Such results differ between a batch and a part of it, although a change of one example may change no
other: a division by the size of the batch, a table over the rows, random masks with a seed.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from kfac_engine._types import Array
from kfac_engine.errors import BackendError
from kfac_engine.graph.analysis.rearrangements import ONLY_SHAPES
from kfac_engine.graph.analysis.subgraph import dependents
from kfac_engine.graph.structure import Fact, Graph
from kfac_engine.runtime.batch_axis import Batch
from kfac_engine.runtime.example_axis import rest_changes
from kfac_engine.runtime.sample_run import open_run, sample_batch

# Values that are compared at a time.
_COMPARED = 64


def find_reduction(
    graph: Graph, facts: Mapping[str, Fact], outputs: Sequence[str], batch: Batch
) -> str:
    """Return a node that reduces the examples of a batch to a value which the outputs depend on.

    Such a value, a mean over the examples or their largest entry, has no axis of examples, although
    it is computed from values with one. A sample run may not show its effect.

    Args:
        graph: Graph of the model.
        facts: Element types and shapes from a sample run.
        outputs: Names of values whose examples should be independent.
        batch: Result of ``find_batch``.

    Returns:
        Operator and name of the node; ``""`` if there is none, or if the model runs with one batch
        size only, so that axes of examples are not certain.
    """
    if batch.fixed:
        return ""
    passed_on = dependents(graph.nodes, batch.inputs, ONLY_SHAPES) & _read_by(graph, outputs)
    for node in graph.nodes:
        for name in passed_on.intersection(node.outputs):
            reduced = name in facts and name not in batch.places
            if reduced and facts[name].dtype.kind == "f":
                return f"{node.qualified_op} node '{node.name}'"
    return ""


def _read_by(graph: Graph, outputs: Sequence[str]) -> set[str]:
    """Return the values that outputs depend on, and not on their shapes only."""
    values = set(outputs)
    for node in reversed(graph.nodes):
        if not values.isdisjoint(node.outputs) and node.qualified_op not in ONLY_SHAPES:
            values.update(node.inputs, node.captures)
    return values


def find_place_dependence(
    graph: Graph,
    facts: Mapping[str, Fact],
    outputs: Sequence[str],
    batch: Batch,
    inputs: Mapping[str, Array] | None = None,
) -> str:
    """Return a node whose results for an example depend on the number or places of the examples.

    The model runs on the batch of the sample run, and on this batch without its first example.

    Args:
        graph: Graph of the model.
        facts: Element types and shapes from a sample run on ``inputs``.
        outputs: Names of values whose examples should be independent.
        batch: Result of ``find_batch``.
        inputs: The batch of the sample run; None if it was generated.

    Returns:
        Operator and name of the node; ``""`` if the results are equal, or if the model runs with
        one batch size only.
    """
    if batch.fixed or batch.size == 1:
        return ""
    run, feeds = open_run(graph, facts), sample_batch(graph, facts, inputs)
    rest = {
        name: array.take(np.arange(1, batch.size), batch.inputs[name])
        if name in batch.inputs
        else array
        for name, array in feeds.items()
    }

    def changed(names: Sequence[str]) -> list[str]:
        before, after = run.values(feeds, names), run.values(rest, names)
        places = batch.places
        return [n for n in names if rest_changes(before[n], after[n], batch.size, places[n])]

    try:
        if not changed([name for name in outputs if name in batch.places]):
            return ""
    except BackendError:  # the model runs with more examples only
        return ""
    computed = [name for node in graph.nodes for name in node.outputs if name in batch.places]
    for start in range(0, len(computed), _COMPARED):
        for name in changed(computed[start : start + _COMPARED]):
            node = graph.producers[name]
            return f"{node.qualified_op} node '{node.name}'"
    return "a node"
