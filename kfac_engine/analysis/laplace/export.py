"""Writes a model that also computes the output variance due to an uncertain last layer.

A last dense layer with the input φ has the outputs ``Wᵀ φ̃``, ``φ̃ = (φ, 1)``, so that the covariance
of outputs k and l is ``Σ φ̃_i φ̃_j C_(ik)(jl)`` for the covariance ``C`` of the parameters. The file
has a few nodes more than the model.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from kfac_engine._types import Array
from kfac_engine.analysis.fisher_matrix.blocks import Block, Float
from kfac_engine.analysis.fisher_matrix.layout import Layout
from kfac_engine.errors import UnsupportedError
from kfac_engine.graph.export import extended_files, file_values
from kfac_engine.graph.files import write_model
from kfac_engine.graph.node_builder import FLOAT_CODES
from kfac_engine.graph.structure import AttributeValue, Input, Node
from kfac_engine.system.writing import checked_path

OUTPUT = "variance"

# The nodes, and the constants that they read by name.
Nodes = tuple[list[Node], dict[str, Array]]


def export_variance(
    layout: Layout, blocks: Sequence[tuple[Block, Float]], path: str | Path
) -> None:
    """Write the model with the output ``variance``, ``(n, k, k)``.

    Each block has the eigenvalues of the covariance of its parameters, ``(1, d_in, d_out)``. An
    UnsupportedError says that the parameters are not those of a last dense layer alone.
    """
    target = checked_path(path)
    if not (_is_last_layer(layout) and len(blocks) == 1):
        names = ", ".join(layout.vector.shapes)
        raise UnsupportedError(
            f"export writes the variance under an uncertain last layer, a dense layer on rows that "
            f"computes what the loss reads; the curvature covers {names:.200}. Measure it with "
            f"layers='last', or compute variances by predict."
        )
    (layer, _), (block, variances) = layout.layers[0], blocks[0]
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


def _is_last_layer(layout: Layout) -> bool:
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
