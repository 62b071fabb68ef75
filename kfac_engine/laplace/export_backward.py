"""Writes backward passes whose cotangents are the unit vectors, of a batch or of each example."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kfac_engine.autodiff.differentiate import Backward, needed
from kfac_engine.curvature_result.layout import Layout
from kfac_engine.errors import InputError, UnsupportedError
from kfac_engine.graph.passes.bodies import renamed
from kfac_engine.graph.passes.order import captures
from kfac_engine.graph.structure import Input, Node, Subgraph
from kfac_engine.graph.write import build_model
from kfac_engine.laplace.export_layers import PREFIX, VarianceBuilder
from kfac_engine.runtime.model import OnnxModel

_EXAMPLE = f"{PREFIX}example/"


@dataclass(frozen=True, slots=True)
class Network:
    """A model whose variance is written.

    Attributes:
        layout: The model with its layers.
        value: Name of the value that the loss reads.
        node_limit: Largest number of nodes of the file.
    """

    layout: Layout
    value: str
    node_limit: int

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

    def builder(self, prefix: str = PREFIX) -> VarianceBuilder:
        """Return an empty builder of nodes in the element type of the outputs."""
        return VarianceBuilder(self.model.facts[self.value].dtype, self.sources, prefix)

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


def unrolled(b: VarianceBuilder, network: Network, backward: Backward) -> dict[str, list[str]]:
    """Write a backward graph once for each output of an example.

    Args:
        b: Collects the nodes.
        network: The model.
        backward: Backward graph from the value that the loss reads.

    Returns:
        Name of a differentiated value to its gradient for each of the ``k`` unit vectors.

    Raises:
        InputError: The file would have too many nodes.
    """
    start = backward.cotangents[network.value]
    local = _dependent(backward.nodes, (start,))
    copied = [node for node in backward.nodes if local.intersection(node.outputs)]
    network.check_count(network.sources * (1 + len(copied)))
    b.nodes += (node for node in backward.nodes if not local.intersection(node.outputs))
    b.constants |= backward.constants
    sizes = b.op("Shape", network.value)
    gradients: dict[str, list[str]] = {name: [] for name in backward.gradients}
    for j, unit in enumerate(np.eye(network.sources).reshape(-1, 1, *network.shape)):
        names = {name: f"{b.prefix}{j}/{name}" for name in local}
        b.op("Expand", b.numbers(unit), sizes, result=names[start])
        b.nodes += (_copy(node, names, f"{b.prefix}{j}/") for node in copied)
        for name, gradient in backward.gradients.items():
            gradients[name].append(names.get(gradient, gradient))
    return gradients


def example_gradients(
    b: VarianceBuilder, network: Network, layers: Sequence[tuple[str, ...]]
) -> dict[str, tuple[str, int]]:
    """Write the gradients of each example, by a Scan that runs the model on one example at a time.

    Args:
        b: Collects the nodes.
        network: The model.
        layers: Parameters of each layer.

    Returns:
        Parameter to the name of its gradients, ``(n, k, size)``, and the size. Layers that the
        value does not depend on are absent.

    Raises:
        UnsupportedError: The model runs with one batch size only.
        InputError: The file would have too many nodes.
    """
    task, names = network.layout.assembly.task, tuple(name for layer in layers for name in layer)
    if not task.batch.inputs or (task.batch.fixed and task.batch.size != 1):
        raise UnsupportedError(
            f"the gradients of each example for {', '.join(names)} take a model that runs on one "
            f"example: {task.batch.fixed or 'its inputs have no axis of examples'}."
        )
    inner = network.builder(_EXAMPLE)
    backward = network.model.backward((network.value,), names)
    gradients = unrolled(inner, network, backward)
    reached = [layer for layer in layers if gradients.keys() & set(layer)]
    if not reached:
        return {}
    sizes = {n: int(np.prod(network.model.facts[n].shape)) for layer in reached for n in layer}
    zeros = {name: [inner.numbers(np.zeros(sizes[name]))] * b.sources for name in sizes}
    rows = {
        name: inner.op("Concat", *(inner.reshaped(part, 1, -1) for part in parts), axis=0)
        for name, parts in (zeros | gradients).items()
    }
    outputs = [Input(f"{_EXAMPLE}{row}", b.dtype, (b.sources, sizes[n])) for n, row in rows.items()]
    scanned, body = _body(network, inner, outputs)
    b.constants |= inner.constants
    results = b.multi(
        "Scan",
        [entry.name for entry in scanned],
        [""] * len(rows),
        body=body,
        num_scan_inputs=len(scanned),
        scan_input_axes=tuple(task.batch.inputs[entry.name] for entry in scanned),
    )
    return {name: (result, sizes[name]) for name, result in zip(rows, results, strict=True)}


# -- private ---------------------------------------------------------------------------------------


def _body(
    network: Network, inner: VarianceBuilder, outputs: Sequence[Input]
) -> tuple[list[Input], Subgraph]:
    """Return the inputs that have examples, and a graph that reads one example of each.

    Args:
        network: The model.
        inner: The backward passes.
        outputs: Results of the graph: names of ``inner``, with the prefix of an example.

    Returns:
        The inputs, and the graph. It computes the values of the model that depend on the example,
        and reads all other values outside.
    """
    graph, axes = network.model.extended_graph(), network.layout.assembly.task.batch.inputs
    added = {name for node in inner.nodes for name in node.outputs}
    results = [entry.name.removeprefix(_EXAMPLE) for entry in outputs]
    nodes = needed((*graph.nodes, *inner.nodes), results)
    local = added | _dependent(nodes, axes)
    nodes = tuple(node for node in nodes if local.intersection(node.outputs))
    read = {name for node in nodes for name in (*node.inputs, *node.captures)}
    scanned = [entry for entry in graph.inputs if entry.name in axes and entry.name in read]
    names = {name: f"{_EXAMPLE}{name}" for name in local}
    first: list[Node] = []
    slices: list[Input] = []
    for entry in scanned:
        axis, part = axes[entry.name], f"{_EXAMPLE}{entry.name}/slice"
        shape = entry.shape and (*entry.shape[:axis], *entry.shape[axis + 1 :])
        slices.append(Input(part, entry.dtype, shape))
        place = inner.constant([axis])
        first.append(Node("Unsqueeze", (part, place), (names[entry.name],), name=f"{part}/node"))
    body = [*first, *(_copy(node, names, _EXAMPLE) for node in nodes)]
    model = build_model(body, slices, outputs, {}, graph.opset, name="gradients of one example")
    return scanned, Subgraph(model.graph.SerializeToString(), captures(model.graph))


def _dependent(nodes: Iterable[Node], sources: Iterable[str]) -> set[str]:
    """Return the sources and the values that depend on them."""
    dependent = set(sources)
    for node in nodes:
        if not dependent.isdisjoint((*node.inputs, *node.captures)):
            dependent.update(name for name in node.outputs if name)
    return dependent


def _copy(node: Node, names: dict[str, str], prefix: str) -> Node:
    return replace(renamed(node, names), name=f"{prefix}{node.name}")
