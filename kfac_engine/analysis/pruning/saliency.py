"""Saliencies: the rise of the loss if a weight becomes zero, in the quadratic model of the loss."""

from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np

from kfac_engine._types import Array
from kfac_engine.analysis.fisher_matrix.blocks import Block
from kfac_engine.analysis.fisher_matrix.curvature import Curvature, Damping, checked_curvature
from kfac_engine.analysis.fisher_matrix.spectrum import Float
from kfac_engine.arguments import one_of
from kfac_engine.errors import InputError
from kfac_engine.registry import Registry

# Method to the curvature of each weight: ½ θ² times this number is the saliency.
Curvatures: TypeAlias = Callable[[Curvature, Damping, str], Mapping[str, Array]]

BLOCKS = ("measured", "layer")


def _alone(curvature: Curvature, damping: Damping, _: str) -> Mapping[str, Array]:
    return curvature.diagonal(1.0, damping)


def _compensated(curvature: Curvature, damping: Damping, blocks: str) -> Mapping[str, Array]:
    """Return the reciprocals of the diagonal of the inverse."""
    layers = _layers(curvature) if blocks == "layer" else np.zeros(curvature.vector.size, np.intp)
    row = np.empty((1, curvature.vector.size))
    for block in curvature.blocks:
        for chosen in (layers[block.places] == layer for layer in np.unique(layers[block.places])):
            places = block.places if chosen.all() else block.places[chosen]
            inverse = _inverse_diagonal(curvature, block, damping, None if chosen.all() else chosen)
            row[:, places] = 1 / inverse
    shapes = tuple(curvature.vector.shapes)
    types = dict.fromkeys(shapes, np.dtype(np.float64))
    return curvature.vector.split(row, shapes, types, several=False)


def _layers(curvature: Curvature) -> Array:
    """Return the number of the layer of each entry of all parameters; −1 for unused entries."""
    numbers = np.full(curvature.vector.size, -1, np.intp)
    for number, (_, block) in enumerate(curvature.layout.layers):
        numbers[curvature.layout.decomposer.places(block)] = number
    return numbers


def _inverse_diagonal(
    curvature: Curvature, block: Block, damping: Damping, chosen: Array | None
) -> Float:
    """Return the diagonal of the inverse of a damped block, or of its principal submatrix.

    Args:
        curvature: The curvature.
        block: The block.
        damping: λ, or λ of each parameter.
        chosen: Mask of the entries of the submatrix in a block of one column; None for all.

    Raises:
        InputError: The matrix is singular up to the rounding of the parameters.
    """
    eigenvalues = block.powers(damping, 1.0)
    if chosen is not None:
        assert block.spectrum.left is not None, "only a dense matrix has several layers"
        rows = block.spectrum.left[0][chosen[0, :, 0]]
        eigenvalues, U = np.linalg.eigh((rows * eigenvalues[0, :, 0]) @ rows.T)
    types = {name: array.dtype for name, array in curvature.parameters.items()}
    rounding = max(np.finfo(types[name]).eps for name in block.parameters)
    if eigenvalues.min() <= rounding * eigenvalues.max():
        raise InputError(
            f"the block of {', '.join(block.parameters)} is singular: its eigenvalues are "
            f"between {eigenvalues.min():.1e} and {eigenvalues.max():.1e}; raise the damping."
        )
    if chosen is None:
        return block.spectrum.diagonal(block.powers(damping, -1.0))
    diagonal: Float = U**2 @ (1 / eigenvalues)
    return diagonal


def _equal(curvature: Curvature, _: Damping, __: str) -> Mapping[str, Array]:
    return {name: np.ones(shape) for name, shape in curvature.vector.shapes.items()}


METHODS: Mapping[str, Curvatures] = Registry(
    "method", {"obd": _alone, "obs": _compensated, "magnitude": _equal}
)


def saliency(
    curvature: Curvature, method: str = "obd", damping: Damping = 0.0, *, blocks: str = "measured"
) -> dict[str, Array]:
    """Return the saliency of each weight.

    Args:
        curvature: The curvature of a model at its parameters θ.
        method: ``"obd"``: ``½ θᵢ² (F + λI)ᵢᵢ``, the rise of the loss if this weight alone becomes
            zero (LeCun, Denker & Solla 1990, optimal brain damage). ``"obs"``:
            ``½ θᵢ² / ((F + λI)⁻¹)ᵢᵢ``, the rise if the other weights of its block then minimize the
            loss (Hassibi & Stork 1993, optimal brain surgeon). ``"magnitude"``: ``½ θᵢ²``.
        damping: λ, or λ of each parameter. ``"obs"`` needs a positive damping where ``F`` is
            singular.
        blocks: With ``"obs"``, the weights that make up for a zero: ``"measured"`` for the weights
            of its block of the curvature, ``"layer"`` for the weights of its layer. The two differ
            for a curvature of ``structure="full"``, whose only block has all layers.

    Returns:
        Arrays by parameter name, in float64, in the shape of the parameter. The loss is the loss of
        the curvature: the negative log-likelihood of an example, in nats.

    Raises:
        UnknownNameError: The method is unknown.
        InputError: The damping is negative, or the damped matrix is singular.
    """
    one_of("blocks", blocks, BLOCKS)
    entries = METHODS[method](checked_curvature(curvature, "saliency"), damping, blocks)
    return {
        name: 0.5 * np.square(array, dtype=np.float64) * entries[name]
        for name, array in curvature.parameters.items()
    }
