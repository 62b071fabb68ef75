"""Writes a model with the variance of its outputs under uncertain parameters of all layers.

The file has the forward graph and a backward graph for each of the ``k`` outputs of an example, in
standard operators. The gradients of each example with respect to a layer follow from its inputs and
output gradients. Parameters for which they do not take a ``Scan`` over the examples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from kfac_engine.curvature.blocks.base import FisherBlock, uses
from kfac_engine.curvature.blocks.kronecker import KroneckerProductFB
from kfac_engine.curvature.blocks.scale_shift import ScaleShiftFB
from kfac_engine.curvature.blocks.single import LayerDiagonalFB
from kfac_engine.curvature_result.blocks import Block
from kfac_engine.curvature_result.layout import Layout
from kfac_engine.curvature_result.packed import packed
from kfac_engine.curvature_result.spectrum import Float
from kfac_engine.errors import InputError, UnsupportedError
from kfac_engine.export.gradient_model import declared_shape, joint_model
from kfac_engine.graph.files import declare, model_files, write_model
from kfac_engine.graph.node_builder import FLOAT_CODES
from kfac_engine.graph.passes.order import all_nodes
from kfac_engine.graph.structure import Input
from kfac_engine.laplace.export_backward import Network, example_gradients, unrolled
from kfac_engine.laplace.export_layers import (
    PREFIX,
    Operand,
    Use,
    VarianceBuilder,
    is_readable,
    packed_gradients,
    row_gradients,
    scale_shift_gradients,
    weighted,
)
from kfac_engine.layers.match import LayerMatch
from kfac_engine.runtime.batch_axis import find_coupling
from kfac_engine.system.writing import checked_path

OUTPUT = "variance"
Layer = tuple[LayerMatch, FisherBlock]


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
        UnsupportedError: Examples depend on each other or on chance, a size that must be fixed is
            not, or a parameter without a layer meets a model of one batch size.
        InputError: The path is wrong, the file would have more nodes, or it has a value
            ``variance`` already.
    """
    target = checked_path(path)
    network = Network(layout, _checked_value(layout), node_limit)
    b = network.builder()
    rows = _rows(b, network, blocks)
    terms = [b.op("MatMul", R, b.op("Transpose", R, perm=(0, 2, 1))) for R in rows]
    b.op("Sum", *terms, result=OUTPUT)
    _write(b, network, target)


# -- what can be written ---------------------------------------------------------------------------


def _checked_value(layout: Layout) -> str:
    """Return the value that the loss reads; an error if its Jacobian matrix cannot be written."""
    task, model = layout.assembly.task, layout.assembly.model
    value, *others = task.objective.inputs
    # The value may be computed from the output of the file, whose examples are at the same place.
    output = task.objective.outputs.get(value, value)
    place = task.batch.places.get(output)
    if others or (place is not None and not place.comes_first):
        raise UnsupportedError(
            f"the output '{OUTPUT}' needs one value that the loss reads, with the examples alone "
            f"on its first axis; the loss reads {', '.join(task.objective.inputs)}."
        )
    coupled = find_coupling(model.graph, model.facts, (output,), task.batch, task.inputs)
    if model.draws or coupled:
        why = f"{coupled} couples them" if coupled else "the model draws random numbers"
        raise UnsupportedError(
            f"the output '{OUTPUT}' needs examples that do not depend on each other or on chance, "
            f"but {why}; export a model without this dependency, such as its form of inference."
        )
    if len(model.facts[value].shape) > 2 and (size := _open_size(layout)):
        raise UnsupportedError(
            f"the output '{OUTPUT}' needs a fixed number of outputs of each example, but '{value}' "
            f"has several axes and {size}; declare a number in the file."
        )
    for name in model.graph.values():
        if name == OUTPUT or name.startswith(PREFIX):
            raise InputError(
                f"the file has a value '{name}' already, so it cannot have a new one of this name; "
                f"rename it in the file."
            )
    return value


def _open_size(layout: Layout) -> str:
    """Return an axis without a fixed size, other than that of the examples; ``""`` for none."""
    batch = layout.assembly.task.batch
    for entry in layout.assembly.model.graph.inputs:
        for axis, size in enumerate(entry.shape or (None,)):
            if not isinstance(size, int) and axis != batch.inputs.get(entry.name):
                return f"axis {axis} of the input '{entry.name}' has the size {size}"
    return ""


def _is_readable(layout: Layout, layer: LayerMatch, block: FisherBlock) -> bool:
    """Return whether the gradients of each example follow from inputs and output gradients."""
    if isinstance(block, ScaleShiftFB):
        return True
    if not isinstance(block, KroneckerProductFB | LayerDiagonalFB):
        return False
    inputs, outputs = uses(layer.inputs), uses(layer.outputs)
    if not is_readable(block.form, len(inputs), len(outputs)):
        return False
    facts, batch = layout.assembly.model.facts, layout.assembly.task.batch
    for name in (*inputs, *outputs):
        place = batch.places.get(name)
        if facts[name].shape[0] != batch.size or (place is not None and not place.comes_first):
            return False
    return True


# -- nodes -----------------------------------------------------------------------------------------


def _rows(b: VarianceBuilder, network: Network, blocks: Sequence[tuple[Block, Float]]) -> list[str]:
    """Write rows ``R``, ``(n, k, entries)``, so that the variance is the sum of their ``R Rᵀ``."""
    layout = network.layout
    stacked, whole = _derivatives(b, network)
    rows = []
    for number, (layer, block) in enumerate(layout.layers):
        operands = _uses(b, network, layer, stacked) if _is_readable(layout, layer, block) else []
        if not operands and layer.parameters[0] not in whole:
            continue  # the value does not depend on the layer
        if layout.options.structure == "full":
            gradients = _gradients(b, layout, (layer, block), operands, whole)
            places = layout.decomposer.places(block).reshape(-1)
            rows.append(b.op("MatMul", gradients, b.numbers(_root(*blocks[0])[places])))
        elif operands and isinstance(block, KroneckerProductFB | LayerDiagonalFB):
            result, variances = blocks[number]
            rows.append(row_gradients(b, block.form, operands, result.spectrum, variances))
        else:
            gradients = _gradients(b, layout, (layer, block), operands, whole)
            result, variances = blocks[number]
            rows.append(weighted(b, gradients, result.spectrum, variances))
    if layout.options.structure == "full" and len(rows) > 1:
        return [b.op("Sum", *rows)]
    return rows


def _derivatives(
    b: VarianceBuilder, network: Network
) -> tuple[dict[str, str], dict[str, tuple[str, int]]]:
    """Write the backward passes.

    Returns:
        Output of a layer to its gradients for all cotangents along the first axis; and parameter to
        its gradients ``(n, k, size)`` with the size, for parameters that take a Scan.
    """
    layout, outputs, others = network.layout, dict[str, None](), list[tuple[str, ...]]()
    for layer, block in layout.layers:
        if _is_readable(layout, layer, block):
            outputs |= dict.fromkeys(uses(layer.outputs))
        else:
            others.append(layer.parameters)
    gradients: dict[str, list[str]] = {}
    if outputs:
        backward = network.model.backward((network.value,), tuple(outputs))
        gradients = unrolled(b, network, backward)
    stacked = {name: b.op("Concat", *parts, axis=0) for name, parts in gradients.items()}
    return stacked, example_gradients(b, network, others) if others else {}


def _gradients(
    b: VarianceBuilder,
    layout: Layout,
    layer: Layer,
    operands: Sequence[Use],
    whole: Mapping[str, tuple[str, int]],
) -> str:
    """Write the gradients of a layer as packed vectors, ``(n, k, entries)``."""
    match, block = layer
    if operands and isinstance(block, ScaleShiftFB):
        return scale_shift_gradients(b, block, operands)
    if operands:
        assert isinstance(block, KroneckerProductFB | LayerDiagonalFB), "it is readable"
        return row_gradients(b, block.form, operands)
    ends = np.cumsum([0, *(whole[name][1] for name in match.parameters)])
    numbers = tuple(
        np.arange(start, end, dtype=np.intp).reshape(layout.vector.places(name).shape)
        for name, start, end in zip(match.parameters, ends, ends[1:], strict=False)
    )
    return packed_gradients(
        b, [whole[name] for name in match.parameters], packed(block, numbers).reshape(-1)
    )


def _root(block: Block, variances: Float) -> Float:
    """Return ``C^½`` of a dense covariance ``C`` of all parameters, ``(P, P)``."""
    assert block.spectrum.left is not None, "a dense matrix has eigenvectors"
    root: Float = block.spectrum.left[0] * np.sqrt(variances).reshape(-1)
    return root


def _uses(
    b: VarianceBuilder, network: Network, layer: LayerMatch, stacked: Mapping[str, str]
) -> list[Use]:
    """Return the tensors of the uses of a layer that the value depends on."""
    facts = network.model.facts

    def operand(name: str, value: str) -> Operand:
        if facts[name].dtype != b.dtype and facts[name].dtype.kind == "f":
            value = b.op("Cast", value, to=FLOAT_CODES[b.dtype.name])
        return Operand(value, facts[name].shape)

    outputs = uses(layer.outputs)
    inputs = uses(layer.inputs) if layer.inputs else ("",) * len(outputs)
    return [
        Use(operand(a, a) if a else None, operand(s, stacked[s]))
        for a, s in zip(inputs, outputs, strict=False)
        if s in stacked
    ]


# -- the file --------------------------------------------------------------------------------------


def _write(b: VarianceBuilder, network: Network, target: Path) -> None:
    """Write the forward graph with the nodes of the variance."""
    model, k = network.model, network.sources
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
    network.check_count(sum(1 for _ in all_nodes(message.graph.node)))
    files = model_files(declare(message, constants), constants, f"{target.name}.data")
    write_model(target, files)
