"""Optimizers that only the bench has: SOAP, and steps ahead of the parameters (EMA-Nesterov)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

import kfac_engine as ke
from kfac_engine._types import Array

# Changes the parameters of an engine by one batch; returns the loss before the change. The last
# argument is the factor of the learning rate.
Step: TypeAlias = Callable[[Mapping[str, Array], Array, float], float]

_DECAY = 0.95  # of the gradients, their squares and the factors: the values of the paper
_EPSILON = 1e-8
_PERIOD = 10  # steps between two updates of the eigenvectors


@dataclass(slots=True)
class _Basis:
    """Averages of ``G Gᵀ`` and ``Gᵀ G``, and their approximate eigenvectors as columns."""

    left: Array
    right: Array
    left_vectors: Array
    right_vectors: Array

    @classmethod
    def of(cls, gradient: Array) -> "_Basis":
        """Return the factors of a first gradient, with exact eigenvectors."""
        left, right = gradient @ gradient.T, gradient.T @ gradient
        return cls(left, right, np.linalg.eigh(left)[1], np.linalg.eigh(right)[1])

    def project(self, matrix: Array) -> Array:
        """Return a matrix in the coordinates of the eigenvectors."""
        projected: Array = self.left_vectors.T @ matrix @ self.right_vectors
        return projected

    def project_back(self, matrix: Array) -> Array:
        """Return the matrix whose coordinates are given."""
        original: Array = self.left_vectors @ matrix @ self.right_vectors.T
        return original

    def update(self, gradient: Array, *, rotate: bool) -> None:
        """Average the factors; with ``rotate``, move the eigenvectors by a power iteration."""
        self.left += (1 - _DECAY) * (gradient @ gradient.T - self.left)
        self.right += (1 - _DECAY) * (gradient.T @ gradient - self.right)
        if rotate:
            self.left_vectors = np.linalg.qr(self.left @ self.left_vectors)[0]
            self.right_vectors = np.linalg.qr(self.right @ self.right_vectors)[0]


class Soap:
    """SOAP, Adam in the eigenvectors of Shampoo's factors, for matrices; Adam for vectors.

    Arrays of more than two axes are matrices with the first axis as rows. The first gradient yields
    the eigenvectors and moves no parameter, as in the authors' implementation.

    Source: N. Vyas et al. 2024, "SOAP: Improving and stabilizing Shampoo using Adam",
    arXiv:2409.11321, algorithms 3 and 4.
    """

    def __init__(self, parameters: Mapping[str, Array]) -> None:
        self._means = {name: np.zeros_like(_matrix(v)) for name, v in parameters.items()}
        self._squares = {name: np.zeros_like(v) for name, v in self._means.items()}
        self._bases: dict[str, _Basis] | None = None
        self._steps = 0

    def directions(self, gradients: Mapping[str, Array]) -> dict[str, Array]:
        """Return the directions of descent of a step, and write the new averages."""
        matrices = {name: _matrix(gradient) for name, gradient in gradients.items()}
        if self._bases is None:
            self._bases = {n: _Basis.of(G) for n, G in matrices.items() if gradients[n].ndim > 1}
            return {name: np.zeros_like(gradient) for name, gradient in gradients.items()}
        self._steps += 1
        return {
            name: self._direction(name, matrix, self._bases.get(name)).reshape(
                gradients[name].shape
            )
            for name, matrix in matrices.items()
        }

    def _direction(self, name: str, gradient: Array, basis: _Basis | None) -> Array:
        mean, square = self._means[name], self._squares[name]
        mean += (1 - _DECAY) * (gradient - mean)
        projected = gradient if basis is None else basis.project(gradient)
        square += (1 - _DECAY) * (projected**2 - square)
        weight = 1 - _DECAY**self._steps
        numerator = (mean if basis is None else basis.project(mean)) / weight
        direction: Array = numerator / (np.sqrt(square / weight) + _EPSILON)
        if basis is None:
            return direction
        direction = basis.project_back(direction)
        basis.update(gradient, rotate=self._steps % _PERIOD == 0)
        return direction


def _matrix(array: Array) -> Array:
    """Return an array as a matrix; vectors and numbers as one row."""
    return array.reshape(len(array), -1) if array.ndim > 1 else array.reshape(1, -1)


def soap(engine: ke.Engine, rate: float) -> Step:
    """Return the step of SOAP with a learning rate."""
    rule = Soap(engine.parameters)

    def step(inputs: Mapping[str, Array], targets: Array, scale: float) -> float:
        result = engine.gradients(inputs, targets, update_buffers=True)
        values, directions = engine.parameters, rule.directions(result.gradients)
        engine.set_parameters({n: values[n] - rate * scale * d for n, d in directions.items()})
        return result.loss

    return step


def ahead(engine: ke.Engine, step: Step, distance: float = 0.6, decay: float = 0.99) -> Step:
    """Return the step of another rule from a point ahead of the parameters x (EMA-Nesterov).

    ``x' = A(x + β m)``, ``m ← γ m + (1 − γ) (x' − x)`` with the step A, the ``decay`` γ, and
    β = ``distance`` times the factor of the learning rate.

    Source: arXiv:2605.25395; the constants are those of its authors for Muon on a GPT-2.
    """
    change = {name: np.zeros_like(value) for name, value in engine.parameters.items()}

    def from_ahead(inputs: Mapping[str, Array], targets: Array, scale: float) -> float:
        last = engine.parameters
        far = distance * scale
        engine.set_parameters({name: x + far * change[name] for name, x in last.items()})
        loss = step(inputs, targets, scale)
        for name, x in engine.parameters.items():
            change[name] += (1 - decay) * (x - last[name] - change[name])
        return loss

    return from_ahead
