"""Gradients of examples with respect to the parameters of a layer, whole or in factors.

The gradient of an example is a matrix ``G``, ``(d_in, d_out)``, for each cotangent of the loss. For
a layer that is read as rows, ``G = Σ_t a_t ds_tᵀ`` over uses and positions. With one position, most
functions of ``G`` need only its two vectors.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from kfac_engine.analysis.fisher_matrix.spectrum import Float, Spectrum

Times: TypeAlias = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True, eq=False)
class WholeGradients:
    """Gradients as stacks of matrices.

    Attributes:
        values: ``(m, k, g, d_in, d_out)`` for ``m`` examples and ``k`` cotangents.
    """

    values: Float

    @property
    def arrays(self) -> tuple[Float, ...]:
        """All numbers; the first axis of each array has the examples."""
        return (self.values,)

    @property
    def rows(self) -> int:
        """Number of vectors of length ``d_in`` that ``into`` rotates."""
        return self.values[..., 0, :].size

    def into(self, spectrum: Spectrum, times: Times | None = None) -> "WholeGradients":
        """Return the gradients in the basis of the eigenvectors of their block."""
        del times
        return WholeGradients(spectrum.into(self.values))

    def compact(self) -> "WholeGradients":
        """Return these gradients: they are matrices already."""
        return self

    def matrices(self) -> Float:
        """Return the matrices, ``(m, k, g, d_in, d_out)``."""
        return self.values

    def gram(self, weights: Float) -> Float:
        """Return ``Σ w ∘ G_k ∘ G_l`` of each example.

        Args:
            weights: ``(g, d_in, d_out)``.

        Returns:
            ``(m, k, k)``.
        """
        rows = self.values.reshape(*self.values.shape[:2], -1)
        product: Float = (rows * weights.reshape(-1)) @ rows.swapaxes(1, 2)
        return product

    def products(self, vectors: Float) -> Float:
        """Return the inner products with vectors of the block.

        Args:
            vectors: ``(q, g, d_in, d_out)``.

        Returns:
            ``(q, m, k)``.
        """
        m, k = self.values.shape[:2]
        flat = vectors.reshape(len(vectors), -1) @ self.values.reshape(m * k, -1).T
        product: Float = flat.reshape(-1, m, k)
        return product


@dataclass(frozen=True, slots=True, eq=False)
class FactoredGradients:
    """Gradients ``Σ_t a_t ds_tᵀ`` as their rows.

    Attributes:
        inputs: ``a``, ``(m, t, d_in)``.
        outputs: ``ds`` of each cotangent, ``(m, k, t, d_out)``.
    """

    inputs: Float
    outputs: Float

    @property
    def arrays(self) -> tuple[Float, ...]:
        """All numbers; the first axis of each array has the examples."""
        return self.inputs, self.outputs

    @property
    def rows(self) -> int:
        """Number of vectors of length ``d_in`` that ``into`` rotates."""
        return self.inputs[..., 0].size

    def into(self, spectrum: Spectrum, times: Times | None = None) -> "FactoredGradients":
        """Return the gradients in the basis of the eigenvectors of their block.

        Args:
            spectrum: The block.
            times: Computes products of rows ``(…, d)`` and a matrix; None for one product.
        """
        U, W, times = spectrum.left, spectrum.right, times or _times
        return FactoredGradients(
            self.inputs if U is None else times(self.inputs, U[0]),
            self.outputs if W is None else times(self.outputs, W[0]),
        )

    def compact(self) -> "WholeGradients | FactoredGradients":
        """Return whole matrices, unless each example has a single row."""
        return self if self.inputs.shape[1] == 1 else WholeGradients(self.matrices())

    def matrices(self) -> Float:
        """Return the matrices, ``(m, k, 1, d_in, d_out)``."""
        product: Float = self.inputs.swapaxes(1, 2)[:, None, None] @ self.outputs[:, :, None]
        return product

    def gram(self, weights: Float) -> Float:
        """Return ``Σ w ∘ G_k ∘ G_l``; see ``WholeGradients.gram``."""
        if self.inputs.shape[1] > 1:
            return self.compact().gram(weights)
        ds = self.outputs[:, :, 0]
        product: Float = (ds * (self.inputs[:, 0] ** 2 @ weights[0])[:, None]) @ ds.swapaxes(1, 2)
        return product

    def products(self, vectors: Float) -> Float:
        """Return the inner products with vectors; see ``WholeGradients.products``."""
        if self.inputs.shape[1] > 1:
            return self.compact().products(vectors)
        product: Float = np.einsum(
            "qmo,mko->qmk", self.inputs[:, 0] @ vectors[:, 0], self.outputs[:, :, 0], optimize=True
        )
        return product


def _times(rows: Float, matrix: Float) -> Float:
    """Return rows ``(…, d)`` times a matrix, in one product instead of one for each example."""
    product: Float = rows.reshape(-1, rows.shape[-1]) @ matrix
    return product.reshape(*rows.shape[:-1], -1)


Gradients = WholeGradients | FactoredGradients
