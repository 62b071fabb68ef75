"""Writes a model with the variance of its outputs under uncertain parameters of its layers.

The file has the forward graph and a backward graph for each of the ``k`` outputs of an example, in
standard operators. The gradients of each example with respect to a layer follow from the inputs and
output gradients of the layer. For parameters without a layer, a ``Scan`` runs over the examples.
The nodes are recorded: ``example_gradients`` computes the variance from arrays, and writes it from
recorded arrays.

A last dense layer needs no backward graph. With the input φ it has the outputs ``Wᵀ φ̃``,
``φ̃ = (φ, 1)``, so that the covariance of outputs k and l is ``Σ φ̃_i φ̃_j C_(ik)(jl)`` for the
covariance ``C`` of the parameters.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import matmul
from pathlib import Path

import numpy as np

from kfac_engine._types import Array
from kfac_engine.analysis.fisher_matrix.blocks import Block, Float, packed
from kfac_engine.analysis.fisher_matrix.example_gradients import (
    Gradients,
    WholeGradients,
)
from kfac_engine.analysis.fisher_matrix.layout import Layout
from kfac_engine.analysis.laplace.export_backward import (
    PREFIX,
    Network,
    Recording,
    Recordings,
    example_gradients,
    stacked_gradients,
)
from kfac_engine.curvature.blocks.base import FisherBlock, uses
from kfac_engine.errors import InputError, UnsupportedError
from kfac_engine.export.gradient_model import declared_shape, joint_model
from kfac_engine.graph.export import extended_files, file_values
from kfac_engine.graph.files import declare, model_files, write_model
from kfac_engine.graph.node_builder import FLOAT_CODES
from kfac_engine.graph.passes.order import all_nodes
from kfac_engine.graph.structure import AttributeValue, Input, Node
from kfac_engine.layers.match import LayerMatch
from kfac_engine.recording.operations import new_tape
from kfac_engine.recording.recorded import Symbol
from kfac_engine.runtime.batch_axis import find_coupling
from kfac_engine.system.writing import checked_path


def export_variance(
    layout: Layout, blocks: Sequence[tuple[Block, Float]], path: str | Path, node_limit: int
) -> None:
    """Write the model with the output ``variance``, ``(n, k, k)``.

    Each block has the eigenvalues of the covariance of its parameters. The variance under an
    uncertain last layer needs no backward pass. With backward passes, a file of more than
    ``node_limit`` nodes is refused with an InputError, and layers whose gradients cannot be written
    with an UnsupportedError.
    """
    if is_last_layer(layout) and len(blocks) == 1:
        (layer, _), (block, variances) = layout.layers[0], blocks[0]
        export_last_layer(layout, layer, block, variances, path)
    else:
        export_network(layout, blocks, path, node_limit)


OUTPUT = "variance"


def export_network(
    layout: Layout, blocks: Sequence[tuple[Block, Float]], path: str | Path, node_limit: int
) -> None:
    """Write the variance by backward passes through all layers; see ``export_variance``.

    An UnsupportedError says that examples depend on each other or on chance, that a size that must
    be fixed is not, or that a parameter without a layer meets a model of one batch size.
    """
    target, value = checked_path(path), _checked_value(layout)
    tape = new_tape(PREFIX, layout.assembly.model.facts[value].dtype)
    network = Network(layout, value, node_limit, tape)
    tape.graph.op("Identity", _variance(network, blocks).name, result=OUTPUT)
    _write(network, target)


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
    """Describe an axis of an input that has no fixed size and no examples; ``""`` for none."""
    batch = layout.assembly.task.batch
    for entry in layout.assembly.model.graph.inputs:
        for axis, size in enumerate(entry.shape or (None,)):
            if not isinstance(size, int) and axis != batch.inputs.get(entry.name):
                return f"axis {axis} of the input '{entry.name}' has the size {size}"
    return ""


def _recording(layout: Layout, layer: LayerMatch, block: FisherBlock) -> Recording | None:
    """Return how the gradients of each example follow from inputs and output gradients."""
    inputs, outputs = uses(layer.inputs), uses(layer.outputs)
    recording = block.read_examples(Recordings(len(inputs), len(outputs)))
    facts, batch = layout.assembly.model.facts, layout.assembly.task.batch
    for name in (*inputs, *outputs) if recording and recording.needs_first_axis else ():
        place = batch.places.get(name)
        if facts[name].shape[0] != batch.size or (place is not None and not place.comes_first):
            return None
    return recording


# -- nodes -----------------------------------------------------------------------------------------


def _variance(network: Network, blocks: Sequence[tuple[Block, Float]]) -> Symbol:
    """Record ``J C Jᵀ`` for the Jacobian ``J`` of an example and the covariance ``C``."""
    layout = network.layout
    recordings = [_recording(layout, *layer) for layer in layout.layers]
    outputs, others = dict[str, None](), list[tuple[str, ...]]()
    for recording, (layer, _) in zip(recordings, layout.layers, strict=True):
        outputs |= dict.fromkeys(uses(layer.outputs) if recording else ())
        others += [] if recording else [layer.parameters]
    stacked = stacked_gradients(network, tuple(outputs))
    whole = example_gradients(network, others)
    total: Symbol = 0
    pairs = zip(recordings, layout.layers, strict=True)
    for number, (recording, (match, fisher)) in enumerate(pairs):
        if recording:
            gradients = _readable(network, recording, match, stacked)
        else:
            gradients = _packed(layout, match, fisher, whole)
        if gradients is None:
            continue  # the value does not depend on the layer
        if layout.options.structure == "full":
            places = layout.decomposer.places(fisher).reshape(-1)
            G: Symbol = gradients.matrices()
            total = total + G.reshape(*G.shape[:2], -1) @ _root(*blocks[0])[places]
        else:
            block, variances = blocks[number]
            rotated = gradients.into(block.spectrum, times=matmul).compact()
            total = total + rotated.gram(variances)
    return total @ total.swapaxes(1, 2) if layout.options.structure == "full" else total


def _readable(
    network: Network, recording: Recording, layer: LayerMatch, stacked: Mapping[str, str]
) -> Gradients | None:
    """Record the gradients of a layer; None if the value does not depend on the layer."""

    def read(name: str, output: bool) -> Symbol:
        fixed = recording.fixed_axes(output, network.model.facts[name].shape)
        return network.read(name, fixed, stacked[name] if output else "")

    names = uses(layer.outputs)
    inputs = uses(layer.inputs) if layer.inputs else ("",) * len(names)
    pairs = [(x, s) for x, s in zip(inputs, names, strict=False) if s in stacked]
    if not pairs:
        return None
    data = [read(x, output=False) for x, _ in pairs if x]
    return recording.gradients(data, [read(s, output=True) for _, s in pairs], network.sources)


def _packed(
    layout: Layout, match: LayerMatch, block: FisherBlock, whole: Mapping[str, Symbol]
) -> Gradients | None:
    """Return gradients of whole parameters in the form of their block."""
    if match.parameters[0] not in whole:
        return None
    sizes = [whole[name].shape[2] for name in match.parameters]
    ends = np.cumsum([0, *sizes])
    numbers = tuple(
        np.arange(start, end, dtype=np.intp).reshape(layout.vector.places(name).shape)
        for name, start, end in zip(match.parameters, ends, ends[1:], strict=False)
    )
    places = packed(block, numbers)
    joined: Symbol = np.concatenate([whole[name] for name in match.parameters], axis=2)
    if not np.array_equal(places.reshape(-1), np.arange(sum(sizes))):
        joined = joined.take(places.reshape(-1), axis=2)
    return WholeGradients(joined.reshape(*joined.shape[:2], *places.shape))


def _root(block: Block, variances: Float) -> Float:
    """Return ``C^½`` of a dense covariance ``C`` of all parameters, ``(P, P)``."""
    assert block.spectrum.left is not None, "a dense matrix has eigenvectors"
    root: Float = block.spectrum.left[0] * np.sqrt(variances).reshape(-1)
    return root


# -- the file --------------------------------------------------------------------------------------


def _write(network: Network, target: Path) -> None:
    """Write the forward graph with the nodes of the variance."""
    model, k, added = network.model, network.sources, network.tape.graph
    graph, loaded, facts = model.extended_graph(), model.loaded, model.facts
    outputs = [
        Input(name, facts[name].dtype, declared_shape(loaded, name, facts[name]))
        for name in graph.outputs
    ]
    joint = replace(
        graph, nodes=(*graph.nodes, *added.nodes), constants={**graph.constants, **added.constants}
    )
    declared = Input(OUTPUT, network.tape.dtype, (None, k, k))
    message, constants = joint_model(joint, graph.inputs, [*outputs, declared], loaded.stored)
    network.check_count(sum(1 for _ in all_nodes(message.graph.node)))
    files = model_files(declare(message, constants), constants, f"{target.name}.data")
    write_model(target, files)


# The nodes, and the constants that they read by name.
Nodes = tuple[list[Node], dict[str, Array]]


def export_last_layer(
    layout: Layout, layer: LayerMatch, block: Block, variances: Float, path: str | Path
) -> None:
    """Write the variance under the only layer, for which ``is_last_layer`` holds.

    ``variances`` are the eigenvalues of the covariance of its parameters, ``(1, d_in, d_out)``.
    """
    target = checked_path(path)
    model = layout.assembly.model
    facts = model.facts
    name, output = str(layer.inputs), str(layer.outputs)
    dtype, features, k = facts[output].dtype, facts[name].shape[-1], facts[output].shape[-1]
    if layout.options.structure == "full":
        rows = layout.decomposer.places(layout.layers[0][1])
        nodes, constants = _of_matrix(block, variances, rows[0], features)
    else:
        nodes, constants = _of_factors(block, variances, k, features)
    # A file in float16 computes the variance in float32.
    features_name = f"{OUTPUT}/features"
    cast = Node("Cast", (name,), (features_name,), {"to": FLOAT_CODES[dtype.name]}, features_name)
    declared = Input(OUTPUT, dtype, (None, k, k))
    typed = {n: a if a.dtype == np.int64 else a.astype(dtype) for n, a in constants.items()}
    location = f"{target.name}.data"
    write_model(path, extended_files(model.loaded, [cast, *nodes], typed, [declared], location))


def is_last_layer(layout: Layout) -> bool:
    """Return whether the only layer is a dense layer on rows that computes what the loss reads."""
    facts, inputs = layout.assembly.model.facts, layout.assembly.task.objective.inputs
    (layer, block), *others = layout.layers
    if others or layer.kind != "fully_connected" or not isinstance(layer.inputs, str):
        return False
    if block.packing is None or inputs != (layer.outputs,):
        return False
    # The nodes read the features by name, which a rewritten operator or a function may not have.
    if layer.inputs not in file_values(layout.assembly.model.loaded):
        return False
    return all(len(facts[name].shape) == 2 for name in (layer.inputs, inputs[0]))


def _of_factors(block: Block, variances: Float, k: int, features: int) -> Nodes:
    """Return nodes for ``((φ̃ᵀ U)² S) (W ⊗ W)ᵀ``, for ``C = (U ⊗ W) diag(S) (U ⊗ W)ᵀ``."""
    d_in = variances.shape[1]
    U = np.eye(d_in) if block.spectrum.left is None else block.spectrum.left[0]
    W = np.eye(k) if block.spectrum.right is None else block.spectrum.right[0]
    pairs = W.T[:, :, None] * W.T[:, None, :]  # (eigenvector, k, l)
    constants: dict[str, Array] = {
        "variance/U": U[:features],
        "variance/u": U[features:].sum(axis=0),  # the row of the bias; zero without a bias
        "variance/S": variances[0],
        "variance/W": pairs.reshape(len(pairs), -1),
        "variance/shape": np.array([-1, k, k]),
    }
    nodes = [
        _node("MatMul", ["features", "U"], "product"),
        _node("Add", ["product", "u"], "rotated"),
        _node("Mul", ["rotated", "rotated"], "squares"),
        _node("MatMul", ["squares", "S"], "spread"),
        _node("MatMul", ["spread", "W"], "flat"),
        _node("Reshape", ["flat", "shape"], ""),
    ]
    return nodes, constants


def _of_matrix(block: Block, variances: Float, places: Array, features: int) -> Nodes:
    """Return nodes for ``R Rᵀ`` with ``R = φ̃ᵀ C^½``, for a dense covariance of all parameters.

    ``variances`` are its eigenvalues, ``(1, P, 1)``, and ``places`` the place of the parameter of
    each row and column of the layer, ``(d_in, k)``. φ has ``features`` features.
    """
    assert block.spectrum.left is not None, "a dense matrix has eigenvectors"
    root = (block.spectrum.left[0] * np.sqrt(variances[0, :, 0]))[places]  # (d_in, k, P)
    k, size = root.shape[1:]
    constants: dict[str, Array] = {
        "variance/C": root[:features].reshape(features, -1),
        "variance/c": root[features:].sum(axis=0).reshape(-1),
        "variance/shape": np.array([-1, k, size]),
    }
    nodes = [
        _node("MatMul", ["features", "C"], "product"),
        _node("Add", ["product", "c"], "flat"),
        _node("Reshape", ["flat", "shape"], "root"),
        _node("Transpose", ["root"], "transposed", {"perm": (0, 2, 1)}),
        _node("MatMul", ["root", "transposed"], ""),
    ]
    return nodes, constants


def _node(
    op: str, inputs: list[str], output: str, attributes: Mapping[str, AttributeValue] | None = None
) -> Node:
    name = f"{OUTPUT}/{output}" if output else OUTPUT
    operands = tuple(f"{OUTPUT}/{operand}" for operand in inputs)
    return Node(op, operands, (name,), attributes or {}, name)
