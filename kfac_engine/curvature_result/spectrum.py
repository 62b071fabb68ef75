"""The eigenvalues and eigenvectors of one block of a Fisher matrix, and exact functions of it.

Every block has one form. A vector of a block is a stack of matrices ``V``, ``(g, d_in, d_out)``,
and the block is ``⊕_g (U ⊗ W) diag(s) (U ⊗ W)ᵀ`` with orthonormal ``U`` and ``W``:

=====================  =====  =======  ==========  ==========
block                  ``g``  ``U``    ``W``       ``d_out``
=====================  =====  =======  ==========  ==========
Kronecker, EKFAC       1      dense    dense
of groups              groups dense    dense
of token ids           1      identity dense
diagonal               any    identity identity
dense matrix           1      dense    identity    1
=====================  =====  =======  ==========  ==========

A function ``f`` of the block is the block with the eigenvalues ``f(s)``. With ``f(s) = (s + λ)^p``,
damping is exact.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Spectrum:
    """A block as eigenvalues and eigenvectors.

    Attributes:
        eigenvalues: ``s ≥ 0``, ``(g, d_in, d_out)``.
        left: ``U``, ``(g, d_in, d_in)``, eigenvectors as columns; None for the identity.
        right: ``W``, ``(g, d_out, d_out)``; None for the identity.
    """

    eigenvalues: Float
    left: Float | None = None
    right: Float | None = None

    def into(self, V: Float) -> Float:
        """Return ``Uᵀ V W``: vectors ``(…, g, d_in, d_out)`` in the basis of the eigenvectors."""
        if self.left is not None:
            V = self.left.swapaxes(1, 2) @ V
        return V if self.right is None else V @ self.right

    def back(self, V: Float) -> Float:
        """Return ``U V Wᵀ``, the inverse of ``into``."""
        if self.left is not None:
            V = self.left @ V
        return V if self.right is None else V @ self.right.swapaxes(1, 2)

    def multiply(self, V: Float, values: Float) -> Float:
        """Return the block with other eigenvalues times vectors.

        Args:
            V: Vectors, ``(…, g, d_in, d_out)``.
            values: Eigenvalues, ``(g, d_in, d_out)``.

        Returns:
            Vectors, in the shape of ``V``.
        """
        return self.back(values * self.into(V))

    def diagonal(self, values: Float) -> Float:
        """Return the diagonal of the block with other eigenvalues, ``(g, d_in, d_out)``."""
        if self.left is not None:
            values = self.left**2 @ values
        return values if self.right is None else values @ (self.right**2).swapaxes(1, 2)


def eigenbasis(matrices: Float, parts: tuple[slice, ...]) -> tuple[Float, Float]:
    """Return the eigenvalues and eigenvectors of the diagonal blocks of symmetric matrices.

    Args:
        matrices: Positive semi-definite up to rounding, ``(g, d, d)``.
        parts: Rows of each diagonal block. Entries outside these blocks are ignored.

    Returns:
        Eigenvalues ``(g, d)``, not negative, in the order of the parts and ascending in each; and
        eigenvectors as columns, ``(g, d, d)``, zero outside the blocks.
    """
    values = np.empty(matrices.shape[:2])
    vectors = np.zeros(matrices.shape)
    for part in parts:
        values[:, part], vectors[:, part, part] = np.linalg.eigh(matrices[:, part, part])
    return values.clip(min=0.0), vectors
