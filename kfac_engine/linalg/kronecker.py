"""Products with ``A ⊗ G`` that never form it.

A gradient of a layer is a matrix ``V``, ``(d_in, d_out)``; flattened row by row, ``A ⊗ G`` is the
standard Kronecker product: entry ``[i·d_out + o, j·d_out + p]`` is ``A[i, j]·G[o, p]``.
"""

from kfac_engine._types import Array
from kfac_engine.backend.namespace import array_module
from kfac_engine.errors import ShapeError


def kron_matvec(A: Array, G: Array, V: Array) -> Array:
    """Multiply the matrix form of a gradient by ``A ⊗ G``.

    With row-major flattening ``(A ⊗ G) vec(V) = vec(A V Gᵀ)``. The cheaper of the two orders of
    multiplication is taken.

    Args:
        A: Left factor, ``(m, d_in)``.
        G: Right factor, ``(p, d_out)``.
        V: Gradient, ``(d_in, d_out)``.

    Returns:
        ``A V Gᵀ``, ``(m, p)``; a new array.

    Raises:
        ShapeError: The sides do not fit.

    Source: Van Loan, The ubiquitous Kronecker product, 2000; Martens & Grosse 2015,
    arXiv:1503.05671, section 4.2.
    """
    if V.ndim != 2 or A.shape[1:] != V.shape[:1] or G.shape[1:] != V.shape[1:]:
        raise ShapeError(
            f"a Kronecker product of {A.shape} and {G.shape} cannot multiply a gradient of shape "
            f"{V.shape}; its sides must be those of the factors' columns."
        )
    (m, d_in), (p, d_out) = A.shape, G.shape
    left_first = m * d_out * (d_in + p) <= d_in * p * (d_out + m)
    product: Array = (A @ V) @ G.T if left_first else A @ (V @ G.T)
    return product


def kronecker_product(A: Array, G: Array) -> Array:
    """``A ⊗ G`` as one matrix, for small factors and for tests of what multiplies by it.

    Args:
        A: Left factor, ``(m, d_in)``.
        G: Right factor, ``(p, d_out)``.

    Returns:
        ``(m·p, d_in·d_out)``; a new array.
    """
    product: Array = array_module(A).kron(A, G)
    return product
