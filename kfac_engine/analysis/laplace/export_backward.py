"""Records backward passes whose cotangents are the unit vectors, of a batch or of each example."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kfac_engine.analysis.fisher_matrix.layout import Layout
from kfac_engine.autodiff.differentiate import Backward, needed
from kfac_engine.errors import InputError, UnsupportedError
from kfac_engine.graph.analysis.subgraph import dependents
from kfac_engine.graph.passes.bodies import renamed
from kfac_engine.graph.structure import Input, Node
from kfac_engine.recording.operations import Operations, new_tape
from kfac_engine.recording.recorded import Level, Recorded, Symbol, Tape, size_of
from kfac_engine.runtime.model import OnnxModel

PREFIX = "variance/"
_EXAMPLE = f"{PREFIX}example/"


@dataclass(frozen=True, slots=True)
class Network:
    """A model whose variance is written.

    Attributes:
        layout: The model with its layers.
        value: Name of the value that the loss reads.
        node_limit: Largest number of nodes of the file.
        tape: Receives the nodes.
    """

    layout: Layout
    value: str
    node_limit: int
    tape: Tape

    @property
    def model(self) -> OnnxModel:
        """The model."""
        return self.layout.assembly.model

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the outputs of an example."""
        return self.model.facts[self.value].shape[1:]

    @property
    def sources(self) -> int:
        """Number ``k`` of outputs of an example."""
        return int(np.prod(self.shape))

    def read(self, name: str, fixed: Collection[int], stacked: str = "") -> Symbol:
        """Return a value of the model, or its gradients for the ``k`` outputs of an example.

        Args:
            name: The value.
            fixed: Axes that have the sizes of the sample run in every run.
            stacked: Name of its gradients, one after the other along the first axis.
        """
        fact, tape = self.model.facts[name], self.tape
        axes = enumerate(fact.shape)
        shape: list[Any] = [s if i in fixed else size_of(tape, name, i) for i, s in axes]
        if stacked:
            shape[0] = shape[0] * self.sources
        array: Symbol = Recorded(tape, stacked or name, tuple(shape), fact.dtype)
        return array.astype(tape.dtype) if fact.dtype.kind == "f" else array

    def check_count(self, count: int) -> None:
        """Check a number of nodes.

        Raises:
            InputError: The number is above the limit.
        """
        if count > self.node_limit:
            # The last layer has no backward pass if an example has one row of outputs.
            last = ", or measure the curvature of the last layer (layers='last')"
            raise InputError(
                f"the file would have at least {count} nodes, which is above the limit of "
                f"{self.node_limit}, because it has a backward pass for each of {self.sources} "
                f"outputs of an example; raise node_limit{last if len(self.shape) == 1 else ''}."
            )

    def unrolled(self, level: Level, backward: Backward) -> dict[str, list[str]]:
        """Write a backward graph once for each output of an example.

        Args:
            level: Receives the nodes.
            backward: Backward graph from the value that the loss reads.

        Returns:
            The gradients of each differentiated value for the ``k`` unit vectors, by name.

        Raises:
            InputError: The file would have too many nodes.
        """
        start = backward.cotangents[self.value]
        local = dependents(backward.nodes, (start,))
        copied = [node for node in backward.nodes if local.intersection(node.outputs)]
        self.check_count(self.sources * (1 + len(copied)))
        level.nodes += (node for node in backward.nodes if not local.intersection(node.outputs))
        self.tape.graph.constants |= backward.constants
        sizes = level.op("Shape", self.value)
        gradients: dict[str, list[str]] = {name: [] for name in backward.gradients}
        units = np.eye(self.sources, dtype=self.model.facts[self.value].dtype)
        for j, unit in enumerate(units.reshape(-1, 1, *self.shape)):
            names = {name: f"{level.prefix}{j}/{name}" for name in local}
            level.op("Expand", level.constant(unit), sizes, result=names[start])
            level.nodes += (_copy(node, names, f"{level.prefix}{j}/") for node in copied)
            for name, gradient in backward.gradients.items():
                gradients[name].append(names.get(gradient, gradient))
        return gradients


def stacked_gradients(network: Network, outputs: Sequence[str]) -> dict[str, str]:
    """Return the name of the gradients of outputs of layers for all outputs of an example."""
    if not outputs:
        return {}
    level = network.tape.graph
    gradients = network.unrolled(level, network.model.backward((network.value,), tuple(outputs)))
    return {name: level.op("Concat", *parts, axis=0) for name, parts in gradients.items()}


def example_gradients(network: Network, layers: Sequence[tuple[str, ...]]) -> dict[str, Symbol]:
    """Record the gradients of each example, by a Scan that runs the model on one example at a time.

    Args:
        network: The model.
        layers: Parameters of each layer.

    Returns:
        Gradients by parameter, ``(n, k, size)``. Layers that the value does not depend on are
        absent.

    Raises:
        UnsupportedError: The model runs with one batch size only.
        InputError: The file would have too many nodes.
    """
    task, model = network.layout.assembly.task, network.model
    names = tuple(name for layer in layers for name in layer)
    if not names:
        return {}
    if not task.batch.inputs or (task.batch.fixed and task.batch.size != 1):
        raise UnsupportedError(
            f"the gradients of each example for {', '.join(names)} take a model that runs on one "
            f"example: {task.batch.fixed or 'its inputs have no axis of examples'}."
        )
    inner = new_tape(_EXAMPLE, network.tape.dtype)
    gradients = network.unrolled(inner.graph, model.backward((network.value,), names))
    rows: dict[str, Symbol] = {}
    for layer in layers:
        for name in layer if gradients.keys() & set(layer) else ():
            shape, zeros = model.facts[name].shape, Operations(inner).xp.zeros
            parts: list[Symbol] = [
                Recorded(inner, part, shape, model.facts[name].dtype).reshape(1, -1)
                for part in gradients.get(name, ())
            ] or [zeros((network.sources, *shape))]
            rows[name] = np.concatenate(parts, axis=0).reshape(network.sources, -1)
    if not rows:
        return {}
    scanned, slices = _move_into_body(network, inner.graph, rows.values())
    results = network.tape.graph.multi(
        "Scan",
        scanned,
        [""] * len(rows),
        body=inner.graph.closed([*rows.values()], slices),
        num_scan_inputs=len(scanned),
        scan_input_axes=tuple(task.batch.inputs[name] for name in scanned),
    )
    n = size_of(network.tape, results[0], 0)
    return {
        name: Recorded(network.tape, result, (n, *row.shape), row.dtype)
        for (name, row), result in zip(rows.items(), results, strict=True)
    }


# -- private ---------------------------------------------------------------------------------------


def _move_into_body(
    network: Network, level: Level, results: Iterable[Symbol]
) -> tuple[list[str], list[Input]]:
    """Add the forward pass of one example to a body; all other values come from outside of it.

    Args:
        network: The model.
        level: The body, with the backward passes.
        results: What it computes.

    Returns:
        The inputs of the model that have examples, and the inputs of the body.
    """
    graph, axes = network.model.extended_graph(), network.layout.assembly.task.batch.inputs
    added = {name for node in level.nodes for name in node.outputs}
    nodes = needed((*graph.nodes, *level.nodes), [value.name for value in results])
    local = added | dependents(nodes, axes)
    nodes = tuple(node for node in nodes if local.intersection(node.outputs))
    read = {name for node in nodes for name in (*node.inputs, *node.captures)}
    names = {n: n if n.startswith(_EXAMPLE) else f"{_EXAMPLE}{n}" for n in local}
    scanned = [entry for entry in graph.inputs if entry.name in axes and entry.name in read]
    level.nodes, slices = [], []
    for entry in scanned:
        axis, part = axes[entry.name], f"{_EXAMPLE}{entry.name}/slice"
        shape = entry.shape and (*entry.shape[:axis], *entry.shape[axis + 1 :])
        slices.append(Input(part, entry.dtype, shape))
        level.op("Unsqueeze", part, level.constant([axis]), result=names[entry.name])
    level.nodes += (_copy(node, names, _EXAMPLE) for node in nodes)
    for value in results:
        value.name = names[value.name]
    return [entry.name for entry in scanned], slices


def _copy(node: Node, names: dict[str, str], prefix: str) -> Node:
    return replace(renamed(node, names), name=f"{prefix}{node.name}")
