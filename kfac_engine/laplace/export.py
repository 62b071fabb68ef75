"""Writes a model that computes the variance of its outputs, by nodes of standard operators.

A last layer with the input φ has the outputs ``Wᵀ φ̃`` with ``φ̃ = (φ, 1)``, so that the covariance
of outputs k and l is ``Σ φ̃_i φ̃_j C_(ik)(jl)`` for the covariance ``C`` of the parameters.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from kfac_engine._types import Array
from kfac_engine.curvature.blocks.kronecker import KroneckerProductFB
from kfac_engine.curvature.blocks.single import LayerDiagonalFB
from kfac_engine.curvature_result.blocks import Block
from kfac_engine.curvature_result.curvature import Curvature
from kfac_engine.curvature_result.spectrum import Float
from kfac_engine.errors import UnsupportedError
from kfac_engine.graph.export import extended_files
from kfac_engine.graph.files import write_model
from kfac_engine.graph.node_builder import FLOAT_CODES
from kfac_engine.graph.structure import AttributeValue, Input, Node
from kfac_engine.layers.match import LayerMatch
from kfac_engine.system.writing import checked_path

OUTPUT = "variance"
# The nodes, and the constants that they read by name.
Nodes = tuple[list[Node], dict[str, Array]]


def export_variance(
    curvature: Curvature, blocks: Sequence[tuple[Block, Float]], path: str | Path
) -> None:
    """Write the model with the output ``variance``, ``(n, k, k)``.

    Args:
        curvature: The curvature of the last layer.
        blocks: Its blocks, with the eigenvalues of the covariance of the parameters.
        path: File to write.

    Raises:
        UnsupportedError: The layer is not a dense layer on rows, or its output is not the value
            that the loss reads.
        InputError: The path is wrong, or the file has a value ``variance`` already.
    """
    target = checked_path(path)
    layer = _dense_layer(curvature)
    model = curvature.layout.assembly.model
    facts = model.facts
    name, output = str(layer.inputs), str(layer.outputs)
    dtype = facts[output].dtype
    (block, variances), places = blocks[0], curvature.layout.frames[0].places
    if curvature.options.structure == "full":
        rows = curvature.layout.decomposer.places(curvature.layout.layers[0][1])
        nodes, constants = _of_matrix(block, variances, rows[0], facts[name].shape[-1])
    else:
        nodes, constants = _of_factors(block, variances, places.shape[2], facts[name].shape[-1])
    # A file in float16 computes the variance in float32.
    features = f"{OUTPUT}/features"
    cast = Node("Cast", (name,), (features,), {"to": FLOAT_CODES[dtype.name]}, features)
    k = facts[output].shape[-1]
    declared = Input(OUTPUT, dtype, (None, k, k))
    typed = {n: a if a.dtype == np.int64 else a.astype(dtype) for n, a in constants.items()}
    location = f"{target.name}.data"
    write_model(path, extended_files(model.loaded, [cast, *nodes], typed, [declared], location))


def _dense_layer(curvature: Curvature) -> LayerMatch:
    """Return the only layer; an UnsupportedError if its variance has no such nodes."""
    layout = curvature.layout
    (layer, block), *others = layout.layers
    facts, (name, *more) = layout.assembly.model.facts, layout.assembly.task.objective.inputs
    if others or len(curvature.blocks) > 1:
        raise UnsupportedError(
            f"a model with the output '{OUTPUT}' is written for the last layer alone, but the "
            f"curvature has {len(curvature.blocks)} blocks; measure it with layers='last'."
        )
    is_dense = layer.kind == "fully_connected" and isinstance(layer.inputs, str)
    is_dense = is_dense and isinstance(block, KroneckerProductFB | LayerDiagonalFB)
    if more or layer.outputs != name or not is_dense:
        raise UnsupportedError(
            f"a model with the output '{OUTPUT}' needs a dense layer that computes the value that "
            f"the loss reads; the last layer is {', '.join(layer.parameters)} of kind "
            f"{layer.kind}, which computes '{layer.outputs}', and the loss reads '{name}'."
        )
    if len(facts[str(layer.inputs)].shape) != 2 or len(facts[name].shape) != 2:
        raise UnsupportedError(
            f"a model with the output '{OUTPUT}' needs one row of features for each example; "
            f"'{layer.inputs}' has the shape {facts[str(layer.inputs)].shape} in the sample run."
        )
    return layer


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

    Args:
        block: The block of all parameters.
        variances: Eigenvalues of the covariance, ``(1, P, 1)``.
        places: Place of the parameter of each row and column of the layer, ``(d_in, k)``.
        features: Number of features of φ.

    Returns:
        The nodes with their constants.
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
