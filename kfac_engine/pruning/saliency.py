"""Saliencies: the rise of the loss if a weight becomes zero, in the quadratic model of the loss."""

from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np

from kfac_engine._types import Array
from kfac_engine.curvature_result.curvature import Curvature, Damping, checked_curvature
from kfac_engine.errors import InputError
from kfac_engine.registry import Registry

# Method to the curvature of each weight: ½ θ² times this number is the saliency.
Curvatures: TypeAlias = Callable[[Curvature, Damping], Mapping[str, Array]]


def _alone(curvature: Curvature, damping: Damping) -> Mapping[str, Array]:
    return curvature.diagonal(1.0, damping)


def _compensated(curvature: Curvature, damping: Damping) -> Mapping[str, Array]:
    """Return the reciprocals of the diagonal of the inverse.

    Raises:
        InputError: A block is singular up to the rounding of the parameters.
    """
    types = {name: array.dtype for name, array in curvature.parameters.items()}
    for block in curvature.blocks:
        eigenvalues = block.powers(damping, 1.0)
        rounding = max(np.finfo(types[name]).eps for name in block.parameters)
        if eigenvalues.min() <= rounding * eigenvalues.max():
            raise InputError(
                f"the block of {', '.join(block.parameters)} is singular: its eigenvalues are "
                f"between {eigenvalues.min():.1e} and {eigenvalues.max():.1e}; raise the damping."
            )
    return {name: 1 / array for name, array in curvature.diagonal(-1.0, damping).items()}


def _equal(curvature: Curvature, _: Damping) -> Mapping[str, Array]:
    return {name: np.ones(shape) for name, shape in curvature.vector.shapes.items()}


METHODS: Mapping[str, Curvatures] = Registry(
    "method", {"obd": _alone, "obs": _compensated, "magnitude": _equal}
)


def saliency(curvature: Curvature, method: str = "obd", damping: Damping = 0.0) -> dict[str, Array]:
    """Return the saliency of each weight.

    Args:
        curvature: The curvature of a model at its parameters θ.
        method: ``"obd"``: ``½ θᵢ² (F + λI)ᵢᵢ``, the rise of the loss if this weight alone becomes
            zero (LeCun, Denker & Solla 1990, optimal brain damage). ``"obs"``:
            ``½ θᵢ² / ((F + λI)⁻¹)ᵢᵢ``, the rise if the other weights of its block then minimize the
            loss (Hassibi & Stork 1993, optimal brain surgeon). ``"magnitude"``: ``½ θᵢ²``.
        damping: λ, or λ of each parameter. ``"obs"`` needs a positive damping where ``F`` is
            singular.

    Returns:
        Parameter name to array in float64, in the shape of the parameter. The loss is that of the
        curvature: the negative log-likelihood of an example, in nats.

    Raises:
        UnknownNameError: The method is unknown.
        InputError: The damping is negative, or the damped matrix is singular.
    """
    entries = METHODS[method](checked_curvature(curvature, "saliency"), damping)
    return {
        name: 0.5 * np.square(array, dtype=np.float64) * entries[name]
        for name, array in curvature.parameters.items()
    }
