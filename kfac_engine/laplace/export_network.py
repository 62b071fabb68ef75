"""Writes a model with the variance of its outputs under uncertain parameters of all layers.

The file has the forward graph and a backward graph for each of the ``k`` outputs of an example, in
standard operators. The backward graph of output ``j`` starts at the unit vector ``e_j`` for every
example. Nodes that do not depend on the cotangent are written once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from kfac_engine.autodiff.differentiate import Backward
from kfac_engine.curvature.blocks.base import FisherBlock, uses
from kfac_engine.curvature.blocks.kronecker import KroneckerProductFB
from kfac_engine.curvature.blocks.scale_shift import ScaleShiftFB
from kfac_engine.curvature.blocks.single import LayerDiagonalFB
from kfac_engine.curvature_result.blocks import Block
from kfac_engine.curvature_result.layout import Layout
from kfac_engine.curvature_result.spectrum import Float
from kfac_engine.errors import InputError, UnsupportedError
from kfac_engine.export.gradient_model import declared_shape, joint_model
from kfac_engine.graph.files import declare, model_files, write_model
from kfac_engine.graph.node_builder import FLOAT_CODES
from kfac_engine.graph.passes.bodies import renamed
from kfac_engine.graph.structure import Input, Node
from kfac_engine.laplace.export_layers import (
    PREFIX,
    Operand,
    Use,
    VarianceBuilder,
    is_readable,
    row_gradients,
    scale_shift_gradients,
)
from kfac_engine.layers.match import LayerMatch
from kfac_engine.layers.views import RowView
from kfac_engine.runtime.batch_axis import find_coupling
from kfac_engine.system.writing import checked_path

OUTPUT = "variance"
_WAY_OUT = "measure the curvature without it (freeze=…), or that of the last layer (layers='last')"


@dataclass(frozen=True, slots=True)
class Network:
    """A model whose variance is written.

    Attributes:
        layout: The model with its layers.
        value: Name of the value that the loss reads.
        backward: The backward graph from the value to the outputs of the layers.
    """

    layout: Layout
    value: str
    backward: Backward

    @property
    def sources(self) -> int:
        """Number ``k`` of outputs of an example."""
        return int(np.prod(self.layout.assembly.model.facts[self.value].shape[1:]))


def export_network(
    layout: Layout, blocks: Sequence[tuple[Block, Float]], path: str | Path, node_limit: int
) -> None:
    """Write the model with the output ``variance``, ``(n, k, k)``.

    Args:
        layout: The model with its layers.
        blocks: The blocks, each with the eigenvalues of the covariance of its parameters.
        path: File to write.
        node_limit: Largest number of nodes of the file.

    Raises:
        UnsupportedError: The gradients of examples cannot be written for a layer or the model.
        InputError: The path is wrong, the file would have more nodes, or it has a value
            ``variance`` already.
    """
    target = checked_path(path)
    value = _checked_value(layout)
    layers = [(layer, block) for layer, block in layout.layers if _is_reached(layout, value, layer)]
    for layer, block in layers:
        _require_readable(layout, layer, block)
    model = layout.assembly.model
    names = tuple(dict.fromkeys(n for layer, _ in layers for n in uses(layer.outputs)))
    network = Network(layout, value, model.backward((value,), names))
    builder = VarianceBuilder(model.facts[value].dtype, network.sources)
    stacked = _unrolled(builder, network, node_limit)
    _write_terms(builder, network, blocks, stacked)
    _write(builder, network, target, node_limit)


# -- what can be written ---------------------------------------------------------------------------


def _checked_value(layout: Layout) -> str:
    """Return the value that the loss reads; an error if its Jacobian matrix cannot be written."""
    task, model = layout.assembly.task, layout.assembly.model
    value, *others = task.objective.inputs
    place = task.batch.places.get(task.objective.outputs.get(value, value))
    if others or (place is not None and not place.comes_first):
        raise UnsupportedError(
            f"the output '{OUTPUT}' needs one value that the loss reads, with the examples alone "
            f"on its first axis; the loss reads {', '.join(task.objective.inputs)}."
        )
    coupled = find_coupling(model.graph, model.facts, (value,), task.batch, task.inputs)
    if model.draws or coupled:
        why = f"{coupled} couples them" if coupled else "the model draws random numbers"
        raise UnsupportedError(
            f"the output '{OUTPUT}' needs examples that do not depend on each other or on chance, "
            f"but {why}; export the model in the form of inference."
        )
    if len(model.facts[value].shape) > 2:
        _require_sizes(layout, f"'{value}' has the shape {model.facts[value].shape} in the sample "
                       f"run, and each entry of an example is an output of its own")  # fmt: skip
    for name in model.graph.values():
        if name == OUTPUT or name.startswith(PREFIX):
            raise InputError(
                f"the file has a value '{name}' already, so it cannot have a new one of this name; "
                f"rename it in the file."
            )
    return value


def _require_sizes(layout: Layout, reason: str) -> None:
    """Raise an error if an axis of an input other than that of the examples has no fixed size."""
    batch = layout.assembly.task.batch
    for entry in layout.assembly.model.graph.inputs:
        for axis, size in enumerate(entry.shape or (None,)):
            if not isinstance(size, int) and axis != batch.inputs.get(entry.name):
                raise UnsupportedError(
                    f"the output '{OUTPUT}' needs inputs of fixed sizes: {reason}, but axis {axis} "
                    f"of the input '{entry.name}' has the size {size}; declare a number in the "
                    f"file."
                )


def _is_reached(layout: Layout, value: str, layer: LayerMatch) -> bool:
    """Return whether the value depends on the parameters of a layer."""
    if layer.outputs:
        return True
    model, owners = layout.assembly.model, layout.vector.owners
    names = tuple(dict.fromkeys(owners[name][0] for name in layer.parameters))
    return bool(model.backward((value,), names).gradients)


def _require_readable(layout: Layout, layer: LayerMatch, block: FisherBlock) -> None:
    """Raise an error if no nodes compute the gradient of each example for a layer."""
    inputs, outputs = uses(layer.inputs), uses(layer.outputs)
    why = ""
    if isinstance(block, ScaleShiftFB):
        pass
    elif not isinstance(block, KroneckerProductFB | LayerDiagonalFB):
        why = f"it is no part of a layer with known inputs ({layer.reason})"
    elif not is_readable(block.form, len(inputs), len(outputs)):
        why = "one tensor has all uses of the layer, or its patches have a mask"
    else:
        views = ((inputs, block.form.input_view), (outputs, block.form.output_view))
        mixed = [n for names, view in views for n in names if not _holds_examples(layout, n, view)]
        why = f"the first axis of '{mixed[0]}' does not begin with the examples" if mixed else ""
    if why:
        raise UnsupportedError(
            f"the output '{OUTPUT}' cannot be written for {', '.join(layer.parameters)} of kind "
            f"{layer.kind}: {why}; {_WAY_OUT}."
        )


def _holds_examples(layout: Layout, name: str, view: object) -> bool:
    """Return whether the first axis of a value has the examples, or a row's positions with them."""
    place = layout.assembly.task.batch.places.get(name)
    batch, shape = layout.assembly.task.batch.size, layout.assembly.model.facts[name].shape
    if place is None or place.comes_first:
        return shape[0] == batch
    if place.axis != 0 or len(shape) != 2 or type(view) is not RowView:
        return False
    _require_sizes(layout, f"the first axis of '{name}' has {place.repeats} rows of each example")
    return True


# -- nodes -----------------------------------------------------------------------------------------


def _unrolled(b: VarianceBuilder, network: Network, node_limit: int) -> dict[str, str]:
    """Write the backward graphs of all outputs.

    Args:
        b: Collects the nodes.
        network: The model with its backward graph.
        node_limit: Largest number of nodes.

    Returns:
        Output of a layer to its gradients for all cotangents, along the first axis.
    """
    backward, shape = network.backward, network.layout.assembly.model.facts[network.value].shape
    shared, copied = _divided(backward, network.value)
    _check_count(network, network.sources * (1 + len(copied)), len(copied), node_limit)
    b.nodes += shared
    b.constants |= backward.constants
    sizes = b.op("Shape", network.value)
    parts: dict[str, list[str]] = {name: [] for name in backward.gradients}
    local = {backward.cotangents[network.value], *(n for node in copied for n in node.outputs)}
    units = np.eye(network.sources).reshape(-1, 1, *shape[1:])
    for j, unit in enumerate(units):
        names = {name: f"{PREFIX}{j}/{name}" for name in local if name}
        start = names[backward.cotangents[network.value]]
        b.op("Expand", b.numbers(unit), sizes, result=start)
        copies = (renamed(node, names) for node in copied)
        b.nodes += (replace(node, name=f"{PREFIX}{j}/{node.name}") for node in copies)
        for name, gradient in backward.gradients.items():
            parts[name].append(names.get(gradient, gradient))
    return {name: b.op("Concat", *gradients, axis=0) for name, gradients in parts.items()}


def _divided(backward: Backward, value: str) -> tuple[list[Node], list[Node]]:
    """Return the nodes of a backward graph that do not depend on the cotangent, and the others."""
    dependent, shared, copied = {backward.cotangents[value]}, [], []
    for node in backward.nodes:
        if dependent.isdisjoint((*node.inputs, *node.captures)):
            shared.append(node)
        else:
            copied.append(node)
            dependent.update(name for name in node.outputs if name)
    return shared, copied


def _write_terms(
    b: VarianceBuilder,
    network: Network,
    blocks: Sequence[tuple[Block, Float]],
    stacked: Mapping[str, str],
) -> None:
    """Write ``R Rᵀ`` for the rows ``R`` of each block, and their sum."""
    layout = network.layout
    full = layout.options.structure == "full"
    rows = []
    for number, (layer, block) in enumerate(layout.layers):
        operands = _uses(b, network, layer, stacked)
        if operands and full:
            places = layout.decomposer.places(block)
            rows.append(_in_root(b, block, operands, *blocks[0], places.reshape(-1)))
        elif operands:
            rows.append(_in_eigenvectors(b, block, operands, *blocks[number]))
    if full and len(rows) > 1:
        rows = [b.op("Sum", *rows)]
    terms = [b.op("MatMul", R, b.op("Transpose", R, perm=(0, 2, 1))) for R in rows]
    b.op("Sum", *terms, result=OUTPUT)


def _in_eigenvectors(
    b: VarianceBuilder, layer: FisherBlock, operands: Sequence[Use], block: Block, variances: Float
) -> str:
    """Return ``R`` of one block, ``(n, k, entries)``."""
    if not isinstance(layer, ScaleShiftFB):
        assert isinstance(layer, KroneckerProductFB | LayerDiagonalFB), "checked before"
        return row_gradients(b, layer.form, operands, block.spectrum, variances)
    gradients, roots = scale_shift_gradients(b, layer, operands), np.sqrt(variances).reshape(-1)
    if block.spectrum.left is None:
        return b.op("Mul", gradients, b.numbers(roots))
    return b.op("MatMul", gradients, b.numbers(block.spectrum.left[0] * roots))


def _in_root(
    b: VarianceBuilder,
    layer: FisherBlock,
    operands: Sequence[Use],
    block: Block,
    variances: Float,
    places: np.ndarray,
) -> str:
    """Return the part of one layer in ``R = J Σ^½`` for a dense covariance ``Σ``."""
    if isinstance(layer, ScaleShiftFB):
        gradients = scale_shift_gradients(b, layer, operands)
    else:
        assert isinstance(layer, KroneckerProductFB | LayerDiagonalFB), "checked before"
        gradients = row_gradients(b, layer.form, operands)
    assert block.spectrum.left is not None, "a dense matrix has eigenvectors"
    root = block.spectrum.left[0][places] * np.sqrt(variances).reshape(-1)
    return b.op("MatMul", gradients, b.numbers(root))


def _uses(
    b: VarianceBuilder,
    network: Network,
    layer: LayerMatch,
    stacked: Mapping[str, str],
) -> list[Use]:
    """Return the tensors of the uses of a layer that the value depends on."""
    assembly = network.layout.assembly
    facts, places = assembly.model.facts, assembly.task.batch.places

    def operand(name: str, value: str) -> Operand:
        repeats = places[name].repeats if name in places else 1
        if facts[name].dtype != b.dtype and facts[name].dtype.kind == "f":
            value = b.op("Cast", value, to=FLOAT_CODES[b.dtype.name])
        return Operand(value, facts[name].shape, repeats)

    inputs = uses(layer.inputs) if layer.inputs else ("",) * len(uses(layer.outputs))
    return [
        Use(operand(a, a) if a else None, operand(s, stacked[s]))
        for a, s in zip(inputs, uses(layer.outputs), strict=True)
        if s in stacked
    ]


# -- the file --------------------------------------------------------------------------------------


def _check_count(network: Network, count: int, repeated: int, node_limit: int) -> None:
    if count > node_limit:
        raise InputError(
            f"the file would have more than {count} nodes, which is above the limit of "
            f"{node_limit}: each of {network.sources} outputs of an example takes {repeated} nodes "
            f"of a backward pass; raise node_limit, or measure the curvature of the last layer "
            f"(layers='last')."
        )


def _write(b: VarianceBuilder, network: Network, target: Path, node_limit: int) -> None:
    """Write the forward graph with the nodes of the variance."""
    model, k = network.layout.assembly.model, network.sources
    graph, loaded, facts = model.extended_graph(), model.loaded, model.facts
    outputs = [
        Input(name, facts[name].dtype, declared_shape(loaded, name, facts[name]))
        for name in graph.outputs
    ]
    joint = replace(
        graph, nodes=(*graph.nodes, *b.nodes), constants={**graph.constants, **b.constants}
    )
    declared = Input(OUTPUT, b.dtype, (None, k, k))
    message, constants = joint_model(joint, graph.inputs, [*outputs, declared], loaded.stored)
    _check_count(network, len(message.graph.node), len(network.backward.nodes), node_limit)
    files = model_files(declare(message, constants), constants, f"{target.name}.data")
    write_model(target, files)
