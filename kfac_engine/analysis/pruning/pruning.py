"""Pruning: weights with small saliencies become zero; others may move to make up for them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray
from scipy.sparse.linalg import LinearOperator, cg

from kfac_engine._types import Array
from kfac_engine.analysis.fisher_matrix.blocks import Block
from kfac_engine.analysis.fisher_matrix.curvature import Curvature, Damping
from kfac_engine.analysis.fisher_matrix.parameter_vector import Places
from kfac_engine.analysis.fisher_matrix.spectrum import Float
from kfac_engine.analysis.pruning.saliency import saliency
from kfac_engine.arguments import number, texts, whole
from kfac_engine.errors import InputError
from kfac_engine.graph.analysis.trainable import matching

# Method whose other weights move.
_SURGEON = "obs"
# Numbers of a pattern, which have few digits: Python reads no number of thousands of digits.
_PATTERN = r"([1-9]\d{0,8}):([1-9]\d{0,8})"
# Relative residual and number of iterations of conjugate gradients.
_RESIDUAL, _ITERATIONS = 1e-8, 1000
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Pattern:
    """At most ``nonzeros`` of ``size`` consecutive weights of an output differ from zero.

    Attributes:
        nonzeros: Largest number of weights that differ from zero.
        size: Number of consecutive weights, in the order of the inputs of a layer.
    """

    nonzeros: int
    size: int

    @classmethod
    def parsed(cls, text: str) -> "Pattern":
        """Return the pattern of a text such as ``"2:4"``; an InputError if it has another form."""
        match = re.fullmatch(_PATTERN, text, re.ASCII) if isinstance(text, str) else None
        if match is None or int(match[1]) >= int(match[2]):
            raise InputError(
                f"pattern must be a text such as '2:4', for at most 2 nonzero weights of 4 "
                f"consecutive ones, got {text!r:.80}."
            )
        return cls(int(match[1]), int(match[2]))


def prune(
    curvature: Curvature,
    *,
    sparsity: float | None = None,
    count: int | None = None,
    pattern: str | None = None,
    method: str = "obd",
    damping: Damping = 0.0,
    parameters: Sequence[str] | None = None,
) -> dict[str, Array]:
    """Return the parameters of a model with weights of small saliency set to zero.

    One of ``sparsity``, ``count`` and ``pattern`` determines the number of zeros. The first two
    select the smallest saliencies of all chosen parameters together.

    Args:
        curvature: The curvature of the model at its parameters.
        sparsity: Fraction of the chosen weights to set to zero, in [0, 1).
        count: Number of weights to set to zero.
        pattern: ``"2:4"``: of 4 consecutive inputs of a layer, the 2 with the largest saliency
            remain for each output. The inputs of a convolution are ordered by pixel of the window,
            then by channel. Other numbers have the same form.
        method: A method of ``saliency``. With ``"obs"``, the remaining weights of each block move
            to the minimum of the damped quadratic model of the loss; the other methods do not
            change them.
        damping: λ, or λ of each parameter.
        parameters: Names of the parameters to prune, or patterns such as ``"*.weight"``; by default
            the weights of all layers, without biases, scales and parameters without a layer.

    Returns:
        A new array for every parameter, by name, with its shape and type, for
        ``Engine.set_parameters``.

    Raises:
        UnknownNameError: The method or a parameter is unknown.
        InputError: The number of zeros is not determined or out of range, a pattern does not divide
            the inputs of a layer, a chosen parameter has no inputs, or the damping is negative or
            too small.
    """
    _check_one(sparsity=sparsity, count=count, pattern=pattern)
    scores = saliency(curvature, method, damping)
    chosen = _chosen(curvature, parameters)
    row, _ = curvature.vector.join(scores)
    if pattern is not None:
        removed = _by_pattern(curvature, row[0], chosen, Pattern.parsed(pattern))
    else:
        removed = _smallest(row[0], chosen, sparsity, count)
    start, _ = curvature.vector.join(curvature.parameters)
    result = np.where(removed, 0.0, start[0])
    if method == _SURGEON:
        for block in curvature.blocks:
            result[block.places] = _compensated(block, start[0], removed, damping)
    dtypes = {name: array.dtype for name, array in curvature.parameters.items()}
    return curvature.vector.split(result[None], tuple(dtypes), dtypes, several=False)


def _check_one(**options: object) -> None:
    if sum(value is not None for value in options.values()) != 1:
        raise InputError(
            f"pass one of {', '.join(options)}, for example sparsity=0.5; got "
            f"{', '.join(n for n, value in options.items() if value is not None) or 'none'}."
        )


def _chosen(curvature: Curvature, parameters: Sequence[str] | None) -> Mask:
    """Return a mask of the entries to prune, in the vector of all parameters."""
    vector, mask = curvature.vector, np.zeros(curvature.vector.size, bool)
    if parameters is None:
        for places in curvature.layout.weights:
            mask[places] = True
        return mask
    texts("parameters", parameters, "['fc1.weight']")
    for name in matching(parameters, list(vector.shapes), "parameter"):
        start = vector.starts[name]
        mask[start : start + prod(vector.shapes[name])] = True
    return mask


def _smallest(scores: Float, chosen: Mask, sparsity: float | None, count: int | None) -> Mask:
    """Return a mask of the smallest scores of the chosen entries; earlier ones win ties."""
    candidates = np.flatnonzero(chosen)
    if sparsity is not None:
        number("sparsity", sparsity)
        if not 0 <= sparsity < 1:
            raise InputError(f"sparsity must be in [0, 1), got {sparsity}.")
        count = round(sparsity * candidates.size)
    whole("count", count, least=0)
    assert count is not None
    if count > candidates.size:
        raise InputError(
            f"count is {count}, but the chosen parameters have {candidates.size} weights; lower it."
        )
    removed = np.zeros(scores.size, bool)
    removed[candidates[np.argsort(scores[candidates], kind="stable")[:count]]] = True
    return removed


def _by_pattern(curvature: Curvature, scores: Float, chosen: Mask, pattern: Pattern) -> Mask:
    """Return a mask of the smallest scores of each group of inputs of a layer."""
    removed, left = np.zeros(scores.size, bool), chosen.copy()
    for matrices in curvature.layout.weights:
        if not chosen[matrices].all():
            continue
        left[matrices] = False
        count, inputs, outputs = matrices.shape
        if inputs % pattern.size:
            raise InputError(
                f"{_name_at(curvature, matrices)} has {inputs} inputs for each output, "
                f"and {inputs} is not a multiple of {pattern.size}; leave it out of parameters=."
            )
        groups = matrices.reshape(count, -1, pattern.size, outputs)
        order = np.argsort(scores[groups], axis=2, kind="stable")
        smallest = order[:, :, : pattern.size - pattern.nonzeros]
        removed[np.take_along_axis(groups, smallest, axis=2)] = True
    if left.any():
        raise InputError(
            f"{_name_at(curvature, np.flatnonzero(left))} is not only the weight of a layer: a "
            f"bias or a scale has no inputs, and pattern= groups inputs; leave it out of "
            f"parameters=."
        )
    return removed


def _name_at(curvature: Curvature, places: Places) -> str:
    """Return the name of the parameter that has the first of some entries."""
    starts = curvature.vector.starts
    return [name for name, start in starts.items() if start <= places.flat[0]][-1]


def _compensated(block: Block, start: Float, removed: Mask, damping: Damping) -> Float:
    """Return the packed weights of a block that minimize its quadratic model, given the zeros.

    The step ``δ`` from the weights θ minimizes ``δᵀ(F + λI)δ`` with ``δ = −θ`` at the zeros.
    Conjugate gradients solve the equations of the other weights, preconditioned by the inverse of
    the block.

    Args:
        block: The block.
        start: All parameters θ.
        removed: Whether a parameter becomes zero.
        damping: λ, or λ of each parameter.

    Returns:
        The weights, in the shape of ``block.places``.

    Raises:
        InputError: The iteration does not converge.
    """
    theta, zero = start[block.places], removed[block.places]
    if not zero.any() or zero.all():
        return np.where(zero, 0.0, theta)
    forward, inverse = (block.powers(damping, power) for power in (1.0, -1.0))

    def masked(eigenvalues: Float) -> LinearOperator:
        def product(vector: Float) -> Float:
            free = np.where(zero, 0.0, vector.reshape(zero.shape))
            image = block.spectrum.multiply(free, eigenvalues)
            # The identity on the zeros keeps the operator regular; their entries stay zero.
            return np.where(zero, vector.reshape(zero.shape), image).ravel()

        return LinearOperator((zero.size, zero.size), matvec=product, dtype=np.float64)

    force = block.spectrum.multiply(np.where(zero, theta, 0.0), forward)
    step, failure = cg(
        masked(forward), np.where(zero, 0.0, force).ravel(), rtol=_RESIDUAL, atol=0.0,
        maxiter=_ITERATIONS, M=masked(inverse),
    )  # fmt: skip
    if failure:
        raise InputError(
            f"the weights of {', '.join(block.parameters)} that make up for the zeros are not "
            f"determined after {_ITERATIONS} iterations; raise the damping."
        )
    return np.where(zero, 0.0, theta + step.reshape(zero.shape))
