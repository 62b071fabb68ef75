"""Defines the first-order update rules, from a parameter's gradient to its direction.

A rule reads the old state arrays and writes the new ones, so that a step that fails has no effect.
The array functions are NumPy's, which CuPy arrays support.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import ClassVar, Protocol, TypeAlias

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend.namespace import array_module
from kfac_engine.layers.parameter_slices import Piece
from kfac_engine.training.vectors import add_multiple, combine

# Slot of a rule (such as "momentum") to the state array of one parameter.
Slots: TypeAlias = Mapping[str, Array]
MatMul: TypeAlias = Callable[[Array, Array], Array]

# Coefficients of the Newton–Schulz polynomial a·X + b·X Xᵀ X + c·(X Xᵀ)² X, and its iterations:
# K. Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks". They move
# singular values in (0, 1] close to 1 in few iterations, and do not converge to 1.
POLYNOMIAL = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_TINY = 1e-7
# Power iterations for the largest singular value.
_POWER_ITERATIONS = 2


class Rule(Protocol):
    """The update rule of one parameter.

    Attributes:
        gain: Bound of the entries of the direction and of its terms, divided by the norm of
            gradient and momentum, or by one if that is larger.
    """

    # Names of the state arrays; each has the shape of the parameter and starts at zero.
    slots: ClassVar[tuple[str, ...]]
    # Whether each entry is updated by itself, so that parts of an array can be updated alone.
    elementwise: ClassVar[bool]

    @property
    def gain(self) -> float:
        """See the attributes."""

    def __call__(self, gradient: Array, old: Slots, new: Slots, step: int) -> Array:
        """Write the new state arrays; return the direction of descent.

        The number of the step counts from 1. The gradient has the shape of the parameter, and may
        be overwritten. ``new`` are the arrays of ``old``, or in the memory of no other argument.
        The direction may be ``gradient`` or an array of ``new``.
        """


@dataclass(frozen=True, slots=True)
class HeavyBall:
    """Gradient descent with momentum: ``v ← μ v + g``; Nesterov's form takes ``g + μ v``."""

    slots: ClassVar[tuple[str, ...]] = ("momentum",)
    elementwise: ClassVar[bool] = True
    momentum: float  # μ in [0, 1)
    nesterov: bool  # whether the direction is ``g + μ v`` in place of ``v``

    @property
    def gain(self) -> float:
        """A bound: ``v' = μ v + g`` and ``g + μ v'`` are at most three times as long as v or g."""
        return 3.0

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
    """

    slots: ClassVar[tuple[str, ...]] = ("momentum", "second_moment")
    elementwise: ClassVar[bool] = True
    beta1: float  # decay of the mean of gradients, in [0, 1)
    beta2: float  # decay of the mean of squared gradients, in [0, 1)
    epsilon: float  # added to the root, positive

    @property
    def gain(self) -> float:
        """``m / (ε √(1 − β₂)) / (1 − β₁)``, the bound for second moments of zero."""
        return 1 / self.epsilon / sqrt(1 - self.beta2) / (1 - self.beta1)

    def __call__(self, gradient: Array, old: Slots, new: Slots, step: int) -> Array:
        """Write the new moments; return the direction of descent."""
        mean, square = new["momentum"], new["second_moment"]
        combine(mean, self.beta1, old["momentum"], 1 - self.beta1, gradient)
        return self.direction(gradient, mean, old["second_moment"], square, step)

    def direction(
        self, gradient: Array, mean: Array, old_square: Array, square: Array, step: int
    ) -> Array:
        """Write the new mean of squares; return ``m̂ / (√v̂ + ε)`` in the memory of the gradient.

        ``mean`` is the new mean of gradients. The number of the step counts from 1.
        """
        out = gradient
        np.multiply(gradient, gradient, out=out)
        combine(square, self.beta2, old_square, 1 - self.beta2, out)
        # m̂ / (√v̂ + ε) = (m / (1 − β₁ᵗ)) r / (√v + ε r) with r = √(1 − β₂ᵗ).
        root = (1 - self.beta2**step) ** 0.5
        np.sqrt(square, out=out)
        out += self.epsilon * root
        np.divide(mean, out, out=out)
        out *= root / (1 - self.beta1**step)
        return out


@dataclass(frozen=True, slots=True)
class Orthogonalized:
    """Muon: the momentum of a matrix with its singular values replaced by numbers close to one.

    The matrices are the matrices of the layer: see ``Piece.matrices``. The direction of each is
    multiplied by ``√max(1, outputs / inputs)``.

    Source: K. Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks".
    """

    slots: ClassVar[tuple[str, ...]] = ("momentum",)
    elementwise: ClassVar[bool] = False
    weight: Piece  # the weight, which has the matrices
    momentum: float  # μ in [0, 1)
    nesterov: bool  # whether ``g + μ v`` is orthogonalized in place of ``v``
    matmul: MatMul = np.matmul  # the product of two matrices

    @property
    def gain(self) -> float:
        """A bound that is larger than the gain of the momentum times ``√outputs``."""
        return 1e6

    def __call__(self, gradient: Array, old: Slots, new: Slots, step: int) -> Array:
        """Write the new velocity; return the direction of descent."""
        direction = HeavyBall(self.momentum, self.nesterov)(gradient, old, new, step)
        matrices = self.weight.matrices(direction)
        count, inputs, outputs = matrices.shape
        # Threads divide the rows of a matrix, or the matrices of a stack.
        operand = matrices[0] if count == 1 else matrices
        scaled = max(1.0, outputs / inputs) ** 0.5 * orthogonalize(operand, self.matmul)
        return self.weight.array(scaled.reshape(matrices.shape), direction)


def orthogonalize(
    matrices: Array,
    matmul: MatMul = np.matmul,
    iterations: "int | Array" = _ITERATIONS,
    *,
    bound: bool = False,
) -> Array:
    """Return matrices with the singular vectors of others and singular values close to one.

    They are the Newton–Schulz iterations of each matrix ``(rows, columns)``, or of a stack, divided
    by the norm; a zero matrix stays zero. Fewer iterations raise small singular values less. An
    array of iterations is a number that is known in a run only, at most five.

    With ``bound``, the iterations start at singular values divided by ``‖X Xᵀ‖^½``, the root of a
    Frobenius norm, in place of ``‖X‖``. Both norms bound the largest singular value, the first one
    more closely, so that one iteration less is needed.
    """
    a, b, c = POLYNOMIAL
    norm = np.linalg.norm(matrices, axis=(-2, -1), keepdims=True)
    X: Array = matrices / (norm + (_TINY if not bound else norm == 0))
    tall = X.shape[-2] > X.shape[-1]
    if tall:
        X = X.swapaxes(-2, -1)
    fixed = isinstance(iterations, int)
    one = array_module(X).eye(X.shape[-2], dtype=X.dtype)
    a_one, b_one = a * one, b * one
    for i in range(iterations if fixed else _ITERATIONS):
        gram = matmul(X, X.swapaxes(-2, -1))
        if bound and i == 0:
            norm = np.linalg.norm(gram, axis=(-2, -1), keepdims=True)
            norm += norm == 0
            gram, X = gram / norm, X / norm**0.5
        # a X + b G X + c G² X with operations on G alone, the smaller matrix.
        inner = c * gram
        inner += b_one
        outer = matmul(gram, inner)
        outer += a_one
        closer = matmul(outer, X)
        X = closer if fixed else np.where(iterations >= i + 1, closer, X)
    return X.swapaxes(-2, -1) if tall else X


def largest_singular_values(matrices: Array, matmul: MatMul = np.matmul) -> Array:
    """Return lower bounds of the largest singular values of a stack ``(count, rows, columns)``.

    Two power iterations from one random vector are close where few singular values are large.
    """
    start = np.random.default_rng(0).standard_normal((1, matrices.shape[-1], 1))
    x = array_module(matrices).asarray(start.astype(np.float32)) + 0 * matrices[:, :1, :1]
    for _ in range(_POWER_ITERATIONS):
        x = matmul(matrices.swapaxes(-2, -1), matmul(matrices, x))
        norms = np.linalg.norm(x, axis=(-2, -1), keepdims=True)
        x = x / (norms + (norms == 0))
    largest: Array = np.linalg.norm(matmul(matrices, x), axis=(-2, -1))
    return largest
