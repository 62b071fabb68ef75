"""Update rules of first-order optimizers: the direction of one parameter from its gradient.

A rule is a function of arrays. It returns new state arrays and leaves its arguments unchanged, so
that a step that fails has no effect. The array functions are NumPy's, which CuPy arrays support.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeAlias

import numpy as np

from kfac_engine._types import Array

# Slot of a rule (such as "momentum") to the state array of one parameter.
Slots: TypeAlias = Mapping[str, Array]

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

    def __call__(self, gradient: Array, slots: Slots, step: int) -> tuple[Array, dict[str, Array]]:
        """Return the direction of descent and the new state arrays.

        Args:
            gradient: Gradient of the loss, in the parameter's shape.
            slots: The state arrays.
            step: Number of the step, from 1.
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

    def __call__(self, gradient: Array, slots: Slots, step: int) -> tuple[Array, dict[str, Array]]:
        """Return the direction of descent and the new velocity."""
        del step
        velocity = self.momentum * slots["momentum"] + gradient
        direction = gradient + self.momentum * velocity if self.nesterov else velocity
        return direction, {"momentum": velocity}


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

    def __call__(self, gradient: Array, slots: Slots, step: int) -> tuple[Array, dict[str, Array]]:
        """Return the direction of descent and the new moments."""
        mean = self.beta1 * slots["momentum"] + (1 - self.beta1) * gradient
        square = self.beta2 * slots["second_moment"] + (1 - self.beta2) * gradient**2
        direction = self.direction(mean, square, step)
        return direction, {"momentum": mean, "second_moment": square}

    def direction(self, mean: Array, square: Array, step: int) -> Array:
        """Return ``m̂ / (√v̂ + ε)`` for the moments ``m`` and ``v`` after ``step`` steps."""
        root = np.sqrt(square * (1 / (1 - self.beta2**step))) + self.epsilon
        direction: Array = mean * (1 / (1 - self.beta1**step)) / root
        return direction


@dataclass(frozen=True, slots=True)
class Orthogonalized:
    """Muon: the momentum of a matrix with its singular values replaced by numbers close to one.

    Arrays of more than two axes become matrices with the first axis as rows. The direction is
    multiplied by ``√max(1, rows / columns)``.

    Source: K. Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks".

    Attributes:
        momentum: μ in [0, 1).
        nesterov: Whether ``g + μ v`` is orthogonalized in place of ``v``.
    """

    slots: ClassVar[tuple[str, ...]] = ("momentum",)
    momentum: float
    nesterov: bool

    def __call__(self, gradient: Array, slots: Slots, step: int) -> tuple[Array, dict[str, Array]]:
        """Return the direction of descent and the new velocity."""
        direction, moved = HeavyBall(self.momentum, self.nesterov)(gradient, slots, step)
        matrix = direction.reshape(len(direction), -1)
        rows, columns = matrix.shape
        scaled = max(1.0, rows / columns) ** 0.5 * orthogonalize(matrix)
        return scaled.reshape(gradient.shape), moved


def orthogonalize(matrix: Array) -> Array:
    """Return a matrix with the singular vectors of another and singular values close to one.

    Args:
        matrix: ``(rows, columns)``; a zero matrix stays zero.

    Returns:
        Five Newton–Schulz iterations of the matrix divided by its Frobenius norm.
    """
    a, b, c = _POLYNOMIAL
    X: Array = matrix / (np.linalg.norm(matrix) + _TINY)
    tall = len(X) > X.shape[1]
    if tall:
        X = X.T
    for _ in range(_ITERATIONS):
        gram = X @ X.T
        X = a * X + (b * gram + c * gram @ gram) @ X
    return X.T if tall else X
