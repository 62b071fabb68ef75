"""Sets weights with small saliencies to zero, and can adjust the remaining weights."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.sparse.linalg import LinearOperator, cg

from kfac_engine._types import Array
from kfac_engine.analysis.fisher_matrix.blocks import Block, Float, Places
from kfac_engine.analysis.fisher_matrix.curvature import Curvature, Damping, checked_curvature
from kfac_engine.arguments import check_choice, check_int, check_number, check_texts
from kfac_engine.errors import InputError
from kfac_engine.graph.analysis.trainable import matching
from kfac_engine.registry import Registry

# Method to the curvature of each weight: ½ θ² times this number is the saliency.
Curvatures: TypeAlias = Callable[[Curvature, Damping, str], Mapping[str, Array]]

BLOCKS = ("measured", "layer")


def _alone(curvature: Curvature, damping: Damping, _: str) -> Mapping[str, Array]:
    return curvature.diagonal(1.0, damping)


def _compensated_rises(curvature: Curvature, damping: Damping, blocks: str) -> Mapping[str, Array]:
    """Return the reciprocals of the diagonal of the inverse."""
    layers = _layers(curvature) if blocks == "layer" else np.zeros(curvature.vector.size, np.intp)
    row = np.empty((1, curvature.vector.size))
    for block in curvature.blocks:
        for chosen in (layers[block.places] == layer for layer in np.unique(layers[block.places])):
            places = block.places if chosen.all() else block.places[chosen]
            inverse = _inverse_diagonal(curvature, block, damping, None if chosen.all() else chosen)
            row[:, places] = 1 / inverse
    shapes = tuple(curvature.vector.shapes)
    types = dict.fromkeys(shapes, np.dtype(np.float64))
    return curvature.vector.split(row, shapes, types, several=False)


def _layers(curvature: Curvature) -> Array:
    """Return the number of the layer of each entry of all parameters; −1 for unused entries."""
    numbers = np.full(curvature.vector.size, -1, np.intp)
    for index, (_, block) in enumerate(curvature.layout.layers):
        numbers[curvature.layout.decomposer.places(block)] = index
    return numbers


def _inverse_diagonal(
    curvature: Curvature, block: Block, damping: Damping, chosen: Array | None
) -> Float:
    """Return the diagonal of the inverse of a damped block, or of its principal submatrix.

    ``chosen`` masks the entries of the submatrix in a block of one column; None for all. A matrix
    that is singular up to the rounding of the parameters raises an InputError.
    """
    eigenvalues = block.powers(damping, 1.0)
    if chosen is not None:
        assert block.spectrum.left is not None, "only a dense matrix has several layers"
        rows = block.spectrum.left[0][chosen[0, :, 0]]
        eigenvalues, U = np.linalg.eigh((rows * eigenvalues[0, :, 0]) @ rows.T)
    types = {name: array.dtype for name, array in curvature.parameters.items()}
    rounding = max(np.finfo(types[name]).eps for name in block.parameters)
    if eigenvalues.min() <= rounding * eigenvalues.max():
        raise InputError(
            f"the block of {', '.join(block.parameters)} is singular: its eigenvalues are "
            f"between {eigenvalues.min():.1e} and {eigenvalues.max():.1e}; raise the damping."
        )
    if chosen is None:
        return block.spectrum.diagonal(block.powers(damping, -1.0))
    diagonal: Float = U**2 @ (1 / eigenvalues)
    return diagonal


def _equal(curvature: Curvature, _: Damping, __: str) -> Mapping[str, Array]:
    return {name: np.ones(shape) for name, shape in curvature.vector.shapes.items()}


METHODS: Mapping[str, Curvatures] = Registry(
    "method", {"obd": _alone, "obs": _compensated_rises, "magnitude": _equal}
)


def saliency(
    curvature: Curvature, method: str = "obd", damping: Damping = 0.0, *, blocks: str = "measured"
) -> dict[str, Array]:
    """Return the saliency of each weight.

    Args:
        curvature: The curvature of a model at its parameters θ.
        method: ``"obd"``: ``½ θᵢ² (F + λI)ᵢᵢ``, the rise of the loss if this weight alone becomes
            zero (LeCun, Denker & Solla 1990, optimal brain damage). ``"obs"``:
            ``½ θᵢ² / ((F + λI)⁻¹)ᵢᵢ``, the rise if the other weights of its block then minimize the
            loss (Hassibi & Stork 1993, optimal brain surgeon). ``"magnitude"``: ``½ θᵢ²``.
        damping: λ, or λ of each parameter. ``"obs"`` needs a positive damping where ``F`` is
            singular.
        blocks: With ``"obs"``, the weights that make up for a zero: ``"measured"`` for the weights
            of its block of the curvature, ``"layer"`` for the weights of its layer. The two differ
            for a curvature of ``structure="full"``, whose only block has all layers.

    Returns:
        Arrays by parameter name, in float64, in the shape of the parameter. The loss is the loss of
        the curvature: the negative log-likelihood of an example, in nats.

    Raises:
        UnknownNameError: The method is unknown.
        InputError: The damping is negative, or the damped matrix is singular.
    """
    check_choice("blocks", blocks, BLOCKS)
    entries = METHODS[method](checked_curvature(curvature, "saliency"), damping, blocks)
    return {
        name: 0.5 * np.square(array, dtype=np.float64) * entries[name]
        for name, array in curvature.parameters.items()
    }


# Method whose other weights move.
_SURGEON = "obs"
# Numbers of a pattern, which have few digits: Python reads no number of thousands of digits.
_PATTERN = r"([1-9]\d{0,8}):([1-9]\d{0,8})"
# Relative residual and number of iterations of conjugate gradients.
_RESIDUAL, _ITERATIONS = 1e-8, 1000
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Pattern:
    """At most ``nonzeros`` of ``size`` consecutive weights of an output differ from zero."""

    nonzeros: int  # largest number of weights that differ from zero
    size: int  # number of consecutive weights, in the order of the inputs of a layer

    @classmethod
    def parsed(cls, text: str) -> "Pattern":
        """Return the pattern of a text such as ``"2:4"``; an InputError if it has another form."""
        match = re.fullmatch(_PATTERN, text, re.ASCII) if isinstance(text, str) else None
        if match is None or int(match[1]) >= int(match[2]):
            raise InputError(
                f"pattern must be a text such as '2:4', for at most 2 nonzero weights among 4 "
                f"consecutive weights, got {text!r:.80}."
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
    check_texts("parameters", parameters, "['fc1.weight']")
    for name in matching(parameters, list(vector.shapes), "parameter"):
        start = vector.starts[name]
        mask[start : start + prod(vector.shapes[name])] = True
    return mask


def _smallest(scores: Float, chosen: Mask, sparsity: float | None, count: int | None) -> Mask:
    """Return a mask of the smallest scores of the chosen entries; earlier ones win ties."""
    candidates = np.flatnonzero(chosen)
    if sparsity is not None:
        check_number("sparsity", sparsity, "[0, 1)")
        count = round(sparsity * candidates.size)
    check_int("count", count, least=0)
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

    The step ``δ`` from the weights ``start`` θ minimizes ``δᵀ(F + λI)δ`` with ``δ = −θ`` at the
    zeros. Conjugate gradients solve the equations of the other weights, preconditioned by the
    inverse of the block. An iteration that does not converge raises an InputError.
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
            f"the changes of {', '.join(block.parameters)} that compensate for the zeros did not "
            f"converge in {_ITERATIONS} iterations; raise the damping."
        )
    return np.where(zero, 0.0, theta + step.reshape(zero.shape))
