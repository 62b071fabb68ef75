"""Gradients of examples with respect to the parameters of a layer, whole or in factors.

The gradient of an example is a matrix ``G``, ``(d_in, d_out)``, for each cotangent of the loss. For
a layer that is read as rows, ``G = Σ_t a_t ds_tᵀ`` over uses and positions. With one position, most
functions of ``G`` need only its two vectors.
"""

from dataclasses import dataclass

import numpy as np

from kfac_engine.analysis.fisher_matrix.spectrum import Float, Spectrum


@dataclass(frozen=True, slots=True, eq=False)
class WholeGradients:
    """Gradients as stacks of matrices.

    Attributes:
        values: ``(m, k, g, d_in, d_out)`` for ``m`` examples and ``k`` cotangents.
    """

    values: Float

    @property
    def rows(self) -> int:
        """Number of vectors of length ``d_in`` that ``into`` rotates."""
        return self.values[..., 0, :].size

    def into(self, spectrum: Spectrum) -> "WholeGradients":
        """Return the gradients in the basis of the eigenvectors of their block."""
        return WholeGradients(spectrum.into(self.values))

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
    def rows(self) -> int:
        """Number of vectors of length ``d_in`` that ``into`` rotates."""
        return self.inputs[..., 0].size

    def into(self, spectrum: Spectrum) -> "FactoredGradients":
        """Return the gradients in the basis of the eigenvectors of their block."""
        U, W = spectrum.left, spectrum.right
        return FactoredGradients(
            self.inputs if U is None else _times(self.inputs, U[0]),
            self.outputs if W is None else _times(self.outputs, W[0]),
        )

    def matrices(self) -> Float:
        """Return the matrices, ``(m, k, 1, d_in, d_out)``."""
        product: Float = self.inputs.swapaxes(1, 2)[:, None, None] @ self.outputs[:, :, None]
        return product

    def gram(self, weights: Float) -> Float:
        """Return ``Σ w ∘ G_k ∘ G_l``; see ``WholeGradients.gram``."""
        if self.inputs.shape[1] > 1:
            return WholeGradients(self.matrices()).gram(weights)
        ds = self.outputs[:, :, 0]
        product: Float = (ds * (self.inputs[:, 0] ** 2 @ weights[0])[:, None]) @ ds.swapaxes(1, 2)
        return product

    def products(self, vectors: Float) -> Float:
        """Return the inner products with vectors; see ``WholeGradients.products``."""
        if self.inputs.shape[1] > 1:
            return WholeGradients(self.matrices()).products(vectors)
        product: Float = np.einsum(
            "qmo,mko->qmk", self.inputs[:, 0] @ vectors[:, 0], self.outputs[:, :, 0], optimize=True
        )
        return product


def _times(rows: Float, matrix: Float) -> Float:
    """Return rows ``(…, d)`` times a matrix, in one product instead of one for each example."""
    product: Float = rows.reshape(-1, rows.shape[-1]) @ matrix
    return product.reshape(*rows.shape[:-1], -1)


Gradients = WholeGradients | FactoredGradients
