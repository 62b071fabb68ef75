"""Checks that all ranks train the same model, and that its examples can be divided among them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from zlib import crc32

import numpy as np

from kfac_engine._types import Array
from kfac_engine.autodiff.random_ops import draws
from kfac_engine.engine.batch_shards import BatchShards, parameter_checksums
from kfac_engine.engine.build import Assembly
from kfac_engine.engine.options import EngineOptions
from kfac_engine.errors import UnsupportedError
from kfac_engine.graph.structure import Graph, Subgraph
from kfac_engine.runtime.batch_axis import find_coupling
from kfac_engine.runtime.example_place import find_place_dependence, find_reduction

# Options that may differ between ranks.
_LOCAL = ("communicator", "scratch_bytes", "sample_inputs")


def check_ranks(shards: BatchShards, assembly: Assembly, parameters: Mapping[str, Array]) -> None:
    """Check that all ranks have the same model, options and parameters.

    Args:
        shards: The ranks.
        assembly: The model of this rank.
        parameters: Its parameters on the host.

    Raises:
        RankError: They differ.
        UnsupportedError: The results of an example depend on other examples, which other ranks may
            have.
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
    """Refuse a model whose results for an example are others in another batch."""
    task, model = assembly.task, assembly.model
    graph = model.graph
    for node in graph.nodes:
        label = f"{node.qualified_op} node '{node.name}'"
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
