"""Inverts Kronecker blocks of stationary sequences, which are sums over lags of ``A_d ⊗ G_d``.

The block of a layer used at ``u`` successive steps, whose moments depend on the lag only, is

    ``F = Σ_{|d| < u} (u − |d|) · A_d ⊗ G_d``

If inputs and gradients follow a linear recursion, ``A_d = S Ψ^d S`` with ``S = A_0^{1/2}`` and
``Ψ = S⁻¹ A_1 S⁻¹`` (``Ψᵀ`` for negative lags). The inverse has two closed forms.
*Option 1* assumes that ``Ψ`` is symmetric. *Option 2* allows any ``Ψ`` and assumes an infinite
sequence: every weight is ``u``, and with ``P = Ψ_A ⊗ Ψ_G``

    ``Σ_d P^d = (I − P)⁻¹ + (I − Pᵀ)⁻¹ − I = (I − Pᵀ)⁻¹ (I − PᵀP) (I − P)⁻¹``.

Source: Martens, Ba & Johnson 2018, Kronecker-factored curvature approximations for recurrent neural
networks, section 3.5 and appendix.
"""

from dataclasses import dataclass

from kfac_engine._types import Array
from kfac_engine.backend.namespace import array_module
from kfac_engine.backend.protocol import Backend
from kfac_engine.curvature.linalg.spectral import eigh_power
from kfac_engine.errors import UnsupportedError

# A spectral radius of 1 − 1e-9 needs 36 doublings to fall below the rounding of float64.
_DOUBLINGS = 40
_NEGLIGIBLE = 1e-17
_DIVERGED = 1e12


@dataclass(frozen=True, slots=True)
class Whitened:
    """A factor of the block in coordinates in which its moment is the identity.

    ``root`` is ``S``, ``(d, d)``, ``inverse_root`` is ``S⁻¹``, and ``lag`` is ``Ψ = S⁻¹ C₁ S⁻¹``.
    """

    root: Array
    inverse_root: Array
    lag: Array


@dataclass(frozen=True, slots=True)
class Symmetric:
    """A factor of the closed form with a symmetric ``Ψ``, option 1."""

    basis: Array  # ``S⁻¹ Q`` with ``Q diag(ψ) Qᵀ = Ψ``, ``(d, d)``
    values: Array  # ``|ψ|``, ``(d,)``


@dataclass(frozen=True, slots=True)
class Infinite:
    """A factor of the closed form for an infinite sequence, option 2."""

    shift: Array  # ``C₁ᵀ (C₀ + λ)⁻¹ = S Ψᵀ S⁻¹``, ``(d, d)``
    basis: Array  # ``S⁻¹ Q`` with ``Q diag(μ) Qᵀ = ΨᵀΨ``, ``(d, d)``
    values: Array  # ``μ``, at most one, ``(d,)``


def whiten(
    eigenvalues: Array, eigenvectors: Array, lag: Array, damping: float, clip: float = 0.0
) -> Whitened:
    """Whiten a factor by its moment ``C₀`` and its lag moment ``C₁ = E[x_{τ+1} x_τᵀ]``, ``(d, d)``.

    ``C₀`` has the eigenvalues ``(d,)`` and the eigenvectors, which are columns. ``clip`` is the
    least eigenvalue before damping. ``InputError`` is raised if a damped eigenvalue is not
    positive.
    """
    root = eigh_power(eigenvalues, eigenvectors, damping, 0.5, clip=clip)
    inverse_root = eigh_power(eigenvalues, eigenvectors, damping, -0.5, clip=clip)
    return Whitened(root, inverse_root, inverse_root @ lag @ inverse_root)


def whiten_undamped(
    eigenvalues: Array, eigenvectors: Array, lag: Array, rounding: float
) -> Whitened:
    """Whiten a factor without damping, on the range of ``C₀``, which contains the range of ``C₁``.

    ``eigenvalues``, ``eigenvectors`` and ``lag`` are as in ``whiten``. Eigenvalues below
    ``rounding`` times the largest count as zero. The inverse root is a pseudo-inverse.
    """
    xp = array_module(eigenvalues)
    roots = xp.sqrt(xp.maximum(eigenvalues, 0.0))
    positive = eigenvalues > rounding * eigenvalues[-1]
    inverses = xp.where(positive, 1.0 / xp.where(positive, roots, 1.0), 0.0)
    root = (eigenvectors * roots) @ eigenvectors.T
    inverse_root = (eigenvectors * inverses) @ eigenvectors.T
    return Whitened(root, inverse_root, inverse_root @ lag @ inverse_root)


def symmetric(side: Whitened, backend: Backend) -> Symmetric:
    """Return a factor of option 1, from absolute eigenvalues of the symmetrized lag moment."""
    values, Q = backend.linalg.eighs([(side.lag + side.lag.T) / 2])[0]
    return Symmetric(side.inverse_root @ Q, abs(values))


def infinite(side: Whitened, backend: Backend) -> Infinite:
    """Return a factor of option 2; rounding can leave singular values above 1, which become 1."""
    xp = array_module(side.lag)
    values, Q = backend.linalg.eighs([side.lag.T @ side.lag])[0]
    shift = side.root @ side.lag.T @ side.inverse_root
    return Infinite(shift, side.inverse_root @ Q, xp.clip(values, 0.0, 1.0))


def lag_weights(x: Array, uses: int) -> Array:
    """Return ``Σ_{|d| < u} (u − |d|) x^|d| = (u(1 − x²) − 2x(1 − x^u)) / (1 − x)²``.

    It is evaluated as a polynomial, which has no singularity at 1. ``x`` are products of the
    eigenvalues of the two factors, and ``u`` is the number of uses. The result is the inverse of γ
    in the paper.
    """
    # 2x·(1·x^(u−2) + 2·x^(u−3) + … + (u−1)) + u, by Horner's rule.
    total = 0 * x
    for weight in range(1, uses):
        total = total * x + weight
    weights: Array = 2 * x * total + uses
    return weights


def solve_symmetric(V: Array, A: Symmetric, G: Symmetric, uses: int) -> Array:
    """Multiply ``V``, ``(d_in, d_out)``, by the inverse of the block of option 1."""
    Z = A.basis.T @ V @ G.basis / lag_weights(A.values[:, None] * G.values, uses)
    solution: Array = A.basis @ Z @ G.basis.T
    return solution


def solve_infinite(V: Array, A: Infinite, G: Infinite, uses: int) -> Array:
    """Multiply ``V``, ``(d_in, d_out)``, by the inverse of the block of option 2."""
    xp = array_module(V)
    V = V - A.shift @ V @ G.shift.T
    scales = 1.0 - A.values[:, None] * G.values
    # Zero only if a sequence repeats exactly; as in the code of the paper, divide by 1 then.
    V = A.basis.T @ V @ G.basis / xp.where(scales == 0.0, 1.0, scales)
    V = A.basis @ V @ G.basis.T
    solution: Array = (V - A.shift.T @ V @ G.shift) / uses
    return solution


def multiply_symmetric(V: Array, A: Whitened, G: Whitened, uses: int, backend: Backend) -> Array:
    """Multiply ``V``, ``(…, d_in, d_out)``, by the block of option 1."""
    (psi_a, basis_a), (psi_g, basis_g) = (
        backend.linalg.eighs([(factor.lag + factor.lag.T) / 2])[0] for factor in (A, G)
    )
    basis_a, basis_g = A.root @ basis_a, G.root @ basis_g
    weights = lag_weights(abs(psi_a)[:, None] * abs(psi_g), uses)
    product: Array = basis_a @ ((basis_a.T @ V @ basis_g) * weights) @ basis_g.T
    return product


def multiply_infinite(V: Array, A: Whitened, G: Whitened, uses: int, backend: Backend) -> Array:
    """Multiply ``V``, ``(…, d_in, d_out)``, by the block of option 2, an infinite sequence.

    The backend is not used; the signature is as for ``multiply_symmetric``. ``UnsupportedError`` is
    raised if the sum over lags does not converge.
    """
    del backend
    Z = A.root @ V @ G.root
    total = _sum_of_powers(A.lag, G.lag, Z) + _sum_of_powers(A.lag.T, G.lag.T, Z) - Z
    product: Array = uses * (A.root @ total @ G.root)
    return product


def _sum_of_powers(A: Array, G: Array, Z: Array) -> Array:
    """Return ``Σ_{d ≥ 0} A^d Z (Gᵀ)^d``; each step doubles the number of terms."""
    xp = array_module(Z)
    for _ in range(_DOUBLINGS):
        Z = Z + A @ Z @ G.T
        A, G = A @ A, G @ G
        size = float(xp.linalg.norm(A)) * float(xp.linalg.norm(G))
        if size < _NEGLIGIBLE:
            return Z
        if not size < _DIVERGED:
            break
    raise UnsupportedError(
        "the sum over lags of an infinite sequence does not converge: inputs or gradients repeat "
        "themselves from use to use. Use option 1, or a larger damping."
    )
