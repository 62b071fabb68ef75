"""Estimates the spectrum of a symmetric operator by stochastic Lanczos quadrature.

For a random vector ``z`` with ``E z zᵀ = I``, ``zᵀ f(A) z`` is an unbiased estimate of the trace of
``f(A)``. The Lanczos process with ``z`` as first vector yields a tridiagonal matrix, whose
eigenvalues θ and the squares w of the first entries of its eigenvectors are a quadrature rule:
``zᵀ f(A) z ≈ ‖z‖² Σ w f(θ)`` (Ubaru, Chen & Saad 2017; Ghorbani, Krishnan & Xiao 2019).
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, sqrt

import numpy as np
from scipy.linalg import eigh_tridiagonal
from scipy.sparse.linalg import LinearOperator, aslinearoperator

from kfac_engine.analysis.fisher_matrix.blocks import Float
from kfac_engine.arguments import check_int, check_number, check_positive, check_seed
from kfac_engine.errors import InputError
from kfac_engine.system import memory_limits

_BYTES = 8
# Lanczos vectors below this norm, relative to the matrix, are rounding errors.
_TINY = 1e-12


@dataclass(frozen=True, slots=True)
class Estimate:
    """An estimate from several random vectors."""

    value: float  # their mean
    standard_error: float  # standard deviation of the mean; infinite for a single random vector


@dataclass(frozen=True, slots=True, eq=False)
class SpectrumEstimate:
    """An estimated spectrum: a quadrature rule for each of several random vectors.

    Attributes:
        size: Number of rows of the matrix.
        nodes: Eigenvalues θ of the tridiagonal matrix of each random vector, ascending.
        weights: Weight w of each node; the weights of a random vector have the sum 1.
    """

    size: int
    nodes: tuple[Float, ...]
    weights: tuple[Float, ...]

    def __repr__(self) -> str:
        """Return the size, the number of random vectors and the bounds of the spectrum."""
        return (
            f"SpectrumEstimate({self.size} eigenvalues, {len(self.nodes)} random vectors, between "
            f"{self.smallest:.4g} and {self.largest:.4g})"
        )

    @property
    def smallest(self) -> float:
        """The smallest eigenvalue θ; the smallest eigenvalue of the matrix is at most θ."""
        return min(float(nodes[0]) for nodes in self.nodes)

    @property
    def largest(self) -> float:
        """The largest eigenvalue θ; the largest eigenvalue of the matrix is at least θ."""
        return max(float(nodes[-1]) for nodes in self.nodes)

    def trace(self) -> Estimate:
        """Return the sum of all eigenvalues."""
        return self.trace_of(lambda values: values)

    def log_determinant(self, damping: float) -> Estimate:
        """Return ``log det (A + λI)``.

        Args:
            damping: λ, larger than the absolute value of each negative eigenvalue.

        Raises:
            InputError: The damped matrix is not positive definite.
        """
        self._require_positive(damping)
        return self.trace_of(lambda values: np.log(values + damping))

    def effective_dimension(self, damping: float) -> Estimate:
        """Return the trace of ``A (A + λI)⁻¹``.

        Args:
            damping: λ, larger than the absolute value of each negative eigenvalue.

        Raises:
            InputError: The damped matrix is not positive definite.
        """
        self._require_positive(damping)
        return self.trace_of(lambda values: values / (values + damping))

    def trace_of(self, function: Callable[[Float], Float]) -> Estimate:
        """Return the sum of a function over all eigenvalues.

        Args:
            function: Maps an array of eigenvalues to numbers, entry by entry.
        """
        pairs = zip(self.nodes, self.weights, strict=True)
        sums = self.size * np.array([float(weights @ function(nodes)) for nodes, weights in pairs])
        error = inf if len(sums) == 1 else float(sums.std(ddof=1)) / sqrt(len(sums))
        return Estimate(float(sums.mean()), error)

    def density(self, points: Float, width: float) -> Float:
        """Return the density of eigenvalues, with each eigenvalue as a normal distribution.

        Args:
            points: Where the density is evaluated.
            width: Standard deviation of the normal distributions.

        Returns:
            The density at the points; its integral over all numbers is 1.

        Raises:
            InputError: The width is not positive.
        """
        check_positive("width", width)
        nodes, weights = np.concatenate(self.nodes), np.concatenate(self.weights) / len(self.nodes)
        distances = (np.asarray(points)[..., None] - nodes) / width
        result: Float = np.exp(-0.5 * distances**2) @ weights / (sqrt(2 * np.pi) * width)
        return result

    def _require_positive(self, damping: float) -> None:
        check_number("damping", damping)
        if not self.smallest + damping > 0:
            raise InputError(
                f"the matrix has eigenvalues down to {self.smallest:.4g}, so that it is not "
                f"positive definite with the damping {damping:g}; raise the damping, or use the "
                f"generalized Gauss-Newton matrix in place of a Hessian matrix."
            )


def estimate_spectrum(
    operator: LinearOperator | Float, vectors: int = 10, steps: int = 50, seed: int = 0
) -> SpectrumEstimate:
    """Estimate the spectrum of a symmetric matrix from products with vectors.

    Args:
        operator: A symmetric operator, such as a ``CurvatureOperator``, or a matrix.
        vectors: Number of random vectors, with entries ±1.
        steps: Lanczos steps, each a product, for each random vector. The rules are exact for
            polynomials up to the degree ``2·steps − 1``.
        seed: Seed of the random vectors.

    Returns:
        The estimate.

    Raises:
        InputError: An argument is wrong, or the operator is not square or yields NaN or
            infinity.
        MemoryLimitError: The Lanczos vectors do not fit into the memory.
    """
    check_int("vectors", vectors, least=1)
    check_int("steps", steps, least=1)
    check_seed(seed)
    A = _operator(operator)
    if A.shape[0] != A.shape[1]:
        raise InputError(f"the matrix must be square, got the shape {A.shape}.")
    size, count = A.shape[0], min(steps, A.shape[0])
    memory_limits.require_memory(
        _BYTES * size * (count + 3),
        f"a sequence of {count} Lanczos vectors of {size} entries",
        "use fewer steps",
    )
    generator = np.random.default_rng(seed)
    rules = [_rule(A, generator.choice([-1.0, 1.0], size), count) for _ in range(vectors)]
    return SpectrumEstimate(size, *map(tuple, zip(*rules, strict=True)))


def _operator(operator: object) -> LinearOperator:
    """Return a matrix or an operator as an operator."""
    try:
        A = aslinearoperator(operator)
    except (TypeError, ValueError) as failure:
        raise InputError(
            f"the operator must be a matrix or a LinearOperator, got {operator!r:.80}."
        ) from failure
    if A.dtype is None or A.dtype.kind not in "biuf":
        raise InputError(f"the operator must have real numbers, got {A.dtype}.")
    return A


def _rule(A: LinearOperator, start: Float, steps: int) -> tuple[Float, Float]:
    """Return nodes and weights from the Lanczos process, with full reorthogonalization."""
    basis = np.zeros((steps, len(start)))
    basis[0] = start / np.linalg.norm(start)
    diagonal, beside, scale = [], [], 0.0
    for step in range(steps):
        product = np.asarray(A.matvec(basis[step]), np.float64)
        if not np.isfinite(product).all():
            raise InputError("a product with the operator holds NaN or infinity.")
        diagonal.append(float(basis[step] @ product))
        known = basis[: step + 1]
        for _ in range(2):  # once more for the rounding errors of the first time
            product -= known.T @ (known @ product)
        norm = float(np.linalg.norm(product))
        scale = max(scale, abs(diagonal[-1]), norm)
        if step + 1 == steps or norm <= _TINY * scale:
            break
        beside.append(norm)
        basis[step + 1] = product / norm
    values, vectors = eigh_tridiagonal(np.array(diagonal), np.array(beside))
    return values, vectors[0] ** 2
