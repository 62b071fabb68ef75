"""Update rules of first-order optimizers: the direction of one parameter from its gradient.

A rule reads the old state arrays and writes the new ones, so that a step that fails has no effect.
The array functions are NumPy's, which CuPy arrays support.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import ClassVar, Protocol, TypeAlias

import numpy as np

from kfac_engine._types import Array
from kfac_engine.training.vectors import add_multiple, combine

# Slot of a rule (such as "momentum") to the state array of one parameter.
Slots: TypeAlias = Mapping[str, Array]
MatMul: TypeAlias = Callable[[Array, Array], Array]

# Coefficients of the Newton–Schulz polynomial a·X + b·X Xᵀ X + c·(X Xᵀ)² X, and its iterations:
# K. Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks". They move
# singular values in (0, 1] close to 1 in few iterations, and do not converge to 1.
_POLYNOMIAL = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_TINY = 1e-7


class Rule(Protocol):
    """The update rule of one parameter.

    Attributes:
        slots: Names of the state arrays; each has the shape of the parameter and starts at zero.
    """

    slots: ClassVar[tuple[str, ...]]

    def __call__(self, gradient: Array, old: Slots, new: Slots, step: int) -> Array:
        """Write the new state arrays; return the direction of descent.

        Args:
            gradient: Gradient of the loss, in the parameter's shape; it may be overwritten.
            old: The state arrays.
            new: Arrays for the new state, in the memory of no other argument.
            step: Number of the step, from 1.

        Returns:
            The direction. It may be ``gradient`` or an array of ``new``.
        """


@dataclass(frozen=True, slots=True)
class HeavyBall:
    """Gradient descent with momentum: ``v ← μ v + g``; Nesterov's form takes ``g + μ v``.

    Attributes:
        momentum: μ in [0, 1).
        nesterov: Whether the direction is ``g + μ v`` in place of ``v``.
    """

    slots: ClassVar[tuple[str, ...]] = ("momentum",)
    momentum: float
    nesterov: bool

    def __call__(self, gradient: Array, old: Slots, new: Slots, step: int) -> Array:
        """Write the new velocity; return the direction of descent."""
        del step
        velocity = new["momentum"]
        combine(velocity, self.momentum, old["momentum"], 1.0, gradient)
        if not self.nesterov:
            return velocity
        add_multiple(gradient, self.momentum, velocity)
        return gradient


@dataclass(frozen=True, slots=True)
class AdaptiveMoments:
    """Adam: the debiased mean of gradients divided by the root of the debiased mean of squares.

    Source: Kingma & Ba 2015, "Adam: A method for stochastic optimization", algorithm 1.

    Attributes:
        beta1: Decay of the mean of gradients, in [0, 1).
        beta2: Decay of the mean of squared gradients, in [0, 1).
        epsilon: Added to the root, positive.
    """

    slots: ClassVar[tuple[str, ...]] = ("momentum", "second_moment")
    beta1: float
    beta2: float
    epsilon: float

    def __call__(self, gradient: Array, old: Slots, new: Slots, step: int) -> Array:
        """Write the new moments; return the direction of descent."""
        mean, square = new["momentum"], new["second_moment"]
        combine(mean, self.beta1, old["momentum"], 1 - self.beta1, gradient)
        np.multiply(gradient, gradient, out=gradient)
        combine(square, self.beta2, old["second_moment"], 1 - self.beta2, gradient)
        return self._direction(mean, square, step, out=gradient)

    def _direction(self, mean: Array, square: Array, step: int, out: Array) -> Array:
        """Return ``m̂ / (√v̂ + ε)`` in the array ``out``."""
        # m̂ / (√v̂ + ε) = (m / (1 − β₁ᵗ)) r / (√v + ε r) with r = √(1 − β₂ᵗ).
        root = sqrt(1 - self.beta2**step)
        np.sqrt(square, out=out)
        out += self.epsilon * root
        np.divide(mean, out, out=out)
        out *= root / (1 - self.beta1**step)
        return out


@dataclass(frozen=True, slots=True)
class Orthogonalized:
    """Muon: the momentum of a matrix with its singular values replaced by numbers close to one.

    Arrays of more than two axes become matrices with the first axis as rows. The direction is
    multiplied by ``√max(1, rows / columns)``.

    Source: K. Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks".

    Attributes:
        momentum: μ in [0, 1).
        nesterov: Whether ``g + μ v`` is orthogonalized in place of ``v``.
        matmul: The product of two matrices.
    """

    slots: ClassVar[tuple[str, ...]] = ("momentum",)
    momentum: float
    nesterov: bool
    matmul: MatMul = np.matmul

    def __call__(self, gradient: Array, old: Slots, new: Slots, step: int) -> Array:
        """Write the new velocity; return the direction of descent."""
        direction = HeavyBall(self.momentum, self.nesterov)(gradient, old, new, step)
        matrix = direction.reshape(len(direction), -1)
        rows, columns = matrix.shape
        scaled: Array = max(1.0, rows / columns) ** 0.5 * orthogonalize(matrix, self.matmul)
        return scaled.reshape(gradient.shape)


def orthogonalize(matrix: Array, matmul: MatMul = np.matmul) -> Array:
    """Return a matrix with the singular vectors of another and singular values close to one.

    Args:
        matrix: ``(rows, columns)``; a zero matrix stays zero.
        matmul: The product of two matrices.

    Returns:
        Five Newton–Schulz iterations of the matrix divided by its Frobenius norm.
    """
    a, b, c = _POLYNOMIAL
    X: Array = matrix / (np.linalg.norm(matrix) + _TINY)
    tall = len(X) > X.shape[1]
    if tall:
        X = X.T
    for _ in range(_ITERATIONS):
        gram = matmul(X, X.T)
        X = a * X + matmul(b * gram + c * matmul(gram, gram), X)
    return X.T if tall else X
