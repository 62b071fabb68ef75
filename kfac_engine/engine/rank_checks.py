"""Checks that all ranks train the same model, and that they can divide its examples.

Results of an example may depend on the number of examples, or on its place among them, although a
change of one example changes no other: a division by the size of the batch, a table over the rows,
random masks with a seed. Such results differ between a batch and a part of it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from zlib import crc32

import numpy as np

from kfac_engine._types import Array
from kfac_engine.autodiff.training_form import draws
from kfac_engine.engine.batch_shards import BatchShards, parameter_checksums
from kfac_engine.engine.build import Assembly
from kfac_engine.engine.options import EngineOptions
from kfac_engine.errors import BackendError, UnsupportedError
from kfac_engine.graph.analysis.subgraph import dependents
from kfac_engine.graph.structure import ONLY_SHAPES, Fact, Graph, Subgraph
from kfac_engine.runtime.batch_axis import Batch, find_coupling
from kfac_engine.runtime.example_axis import rest_changes
from kfac_engine.runtime.sample_run import open_run, sample_batch

# Options that may differ between ranks.
_LOCAL = ("communicator", "sample_inputs")


def check_ranks(shards: BatchShards, assembly: Assembly, parameters: Mapping[str, Array]) -> None:
    """Check that all ranks have the same model, options and parameters (arrays on the host).

    A difference raises RankError. A model whose results for an example depend on other examples,
    which other ranks may have, raises UnsupportedError.
    """
    if shards.alone:
        return
    model = "\n".join(_spelled_graph(assembly.model.graph, parameters))
    options = _spelled(assembly.options)
    shards.agreement.require_equal({"models": model, "options": options})
    shards.agreement.require_equal(parameter_checksums(parameters))
    _check_coupling(assembly)


def _spelled_graph(graph: Graph, parameters: Mapping[str, Array]) -> Iterator[str]:
    """Yield lines that are equal for equal nodes, constants and shapes of parameters."""
    for node in graph.nodes:
        attributes = {key: _spelled_value(value) for key, value in sorted(node.attributes.items())}
        yield f"{node.op} {node.inputs} {node.outputs} {attributes}"
    for name, array in graph.constants.items():
        if name in parameters:
            yield f"{name} {array.shape}"
        else:
            yield f"{name} {_spelled_value(array.flat[:1] if name in graph.filled else array)}"


def _spelled_value(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape} {crc32(value.tobytes())}"
    if isinstance(value, Subgraph):
        return f"{crc32(value.proto)}"
    return repr(value)


def _check_coupling(assembly: Assembly) -> None:
    """Refuse a model whose results for an example depend on the rest of the batch."""
    task, model = assembly.task, assembly.model
    graph = model.graph
    for node in graph.nodes:
        label = node.title
        if node.qualified_op == "BatchNormalization" and node.attributes.get("training_mode"):
            raise _refused(f"depend on other examples, by {label}")
        if draws(graph, node):
            raise _refused(f"depend on random numbers, by {label}")
    values = [head.output for head in task.heads]
    sample = graph, model.facts, values, task.batch, task.inputs
    if coupling := find_coupling(*sample) or find_reduction(*sample[:4]):
        raise _refused(f"depend on other examples, first by {coupling}")
    if dependence := find_place_dependence(*sample):
        raise _refused(
            f"depend on the number of examples, or on its place among them, first by {dependence}"
        )


def _refused(reason: str) -> UnsupportedError:
    return UnsupportedError(
        f"the results of an example {reason}; several ranks would compute other results than one. "
        f"Export the model in inference form, or train it in one process."
    )


def _spelled(value: object) -> str:
    """Return a text that is equal for equal options."""
    if is_dataclass(value) and not isinstance(value, type):
        names = (field.name for field in fields(value))
        chosen = (n for n in names if not (isinstance(value, EngineOptions) and n in _LOCAL))
        parts = (f"{name}={_spelled(getattr(value, name))}" for name in chosen)
        return f"{type(value).__name__}({', '.join(parts)})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_spelled(value[key])}' for key in sorted(value))}}}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(map(_spelled, value))}]"
    if value is None or isinstance(value, str | int | float):
        return repr(value)
    return type(value).__name__


# -- results that depend on the other examples -----------------------------------------------------

# Values that are compared at a time.
_COMPARED = 64


def find_reduction(
    graph: Graph, facts: Mapping[str, Fact], outputs: Sequence[str], batch: Batch
) -> str:
    """Return a node that reduces the examples of a batch to a value which the outputs depend on.

    Such a value, a mean over the examples or their largest entry, has no axis of examples, although
    it is computed from values with one. A sample run may not show its effect. The result is the
    operator and name of the node; ``""`` if there is none, or if the model runs with one batch size
    only, so that axes of examples are not certain. ``batch`` is the result of ``find_batch``.
    """
    if batch.fixed:
        return ""
    passed_on = dependents(graph.nodes, batch.inputs, ONLY_SHAPES) & _read_by(graph, outputs)
    for node in graph.nodes:
        for name in passed_on.intersection(node.outputs):
            reduced = name in facts and name not in batch.places
            if reduced and facts[name].dtype.kind == "f":
                return node.title
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

    The model runs on the batch of the sample run, and on this batch without its first example. The
    result is the operator and name of the node; ``""`` if the results are equal, or if the model
    does not run with another number of examples. ``batch`` is the result of ``find_batch``;
    ``inputs`` is None for a generated batch.
    """
    if batch.fixed or batch.joint or batch.size == 1:
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
            return node.title
    return "a node"
