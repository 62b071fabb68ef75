"""SOAP: Adam in the eigenbasis of Shampoo's factors, a rival that only the bench has.

Source: N. Vyas et al. 2024, "SOAP: Improving and stabilizing Shampoo using Adam",
arXiv:2409.11321, algorithms 3 and 4.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kfac_engine._types import Array

_DECAY = 0.95  # of the gradients, their squares and the factors: the values of the paper
_EPSILON = 1e-8
_PERIOD = 10  # steps between two updates of the eigenbases


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
        """Return a matrix of eigenvector coordinates in the original coordinates."""
        original: Array = self.left_vectors @ matrix @ self.right_vectors.T
        return original

    def update(self, gradient: Array, *, rotate: bool) -> None:
        """Return the parameters after a step, in new arrays."""
        self.left += (1 - _DECAY) * (gradient @ gradient.T - self.left)
        self.right += (1 - _DECAY) * (gradient.T @ gradient - self.right)
        if rotate:
            self.left_vectors = np.linalg.qr(self.left @ self.left_vectors)[0]
            self.right_vectors = np.linalg.qr(self.right @ self.right_vectors)[0]


class Soap:
    """SOAP for matrices, Adam with the same decays for vectors.

    Arrays of more than two axes become matrices with the first axis as rows. The first gradient
    yields the eigenvectors and moves no parameter, as in the authors' implementation.
    """

    def __init__(self, parameters: Mapping[str, Array]) -> None:
        self._values = dict(parameters)
        self._means = {name: np.zeros_like(_matrix(v)) for name, v in parameters.items()}
        self._squares = {name: np.zeros_like(v) for name, v in self._means.items()}
        self._bases: dict[str, _Basis] | None = None
        self._steps = 0

    def update(self, gradients: Mapping[str, Array], rate: float) -> Mapping[str, Array]:
        """Return the parameters after a step, in new arrays."""
        matrices = {name: _matrix(gradient) for name, gradient in gradients.items()}
        if self._bases is None:
            self._bases = {n: _Basis.of(G) for n, G in matrices.items() if gradients[n].ndim > 1}
            return self._values
        self._steps += 1
        for name, gradient in matrices.items():
            direction = self._direction(name, gradient, self._bases.get(name)).reshape(
                self._values[name].shape
            )
            self._values[name] = self._values[name] - rate * direction
        return self._values

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
