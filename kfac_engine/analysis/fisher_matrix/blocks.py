"""Describes each block of a curvature by eigenvalues and by entries of the parameter vector.

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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import qr

from kfac_engine._types import Array, Params
from kfac_engine.arguments import check_at_least_zero
from kfac_engine.backend.namespace import as_array, numeric
from kfac_engine.errors import InputError, NonFiniteError, ShapeError, UnknownNameError
from kfac_engine.layers.parameter_slices import ParameterSlice

Float = NDArray[np.float64]
Places = NDArray[np.intp]


@dataclass(frozen=True)
class ParameterVector:
    """The concatenation of all parameters, each in row-major order."""

    # Shapes by parameter name, in the order of the concatenation.
    shapes: Mapping[str, tuple[int, ...]]
    slices: Mapping[str, Sequence[ParameterSlice]]  # the slices that blocks use, by parameter name

    @cached_property
    def starts(self) -> dict[str, int]:
        """Places of the first entries, by parameter name."""
        ends = np.cumsum([0, *map(prod, self.shapes.values())]).tolist()
        return dict(zip(self.shapes, ends, strict=False))

    @cached_property
    def size(self) -> int:
        """Number of entries of all parameters."""
        return sum(map(prod, self.shapes.values()))

    @cached_property
    def owners(self) -> dict[str, tuple[str, ParameterSlice]]:
        """Parameters and slices, by name of the slice."""
        return {
            part.name: (name, part) for name in self.shapes for part in self.slices.get(name, ())
        }

    def places(self, name: str) -> Places:
        """Return the places of the entries of a slice, in the shape of the slice."""
        parameter, part = self.owners[name]
        start, shape = self.starts[parameter], self.shapes[parameter]
        if part.index is not None:
            return start + part.index.astype(np.intp)
        return np.arange(start, start + prod(shape), dtype=np.intp).reshape(shape)

    def parameter_of(self, name: str) -> str:
        """Return the parameter to which a slice belongs."""
        return self.owners[name][0]

    def join(self, vectors: Mapping[str, Array]) -> tuple[Float, bool]:
        """Return vectors by parameter as rows ``(count, size)``, and whether there are several.

        An array has the shape of its parameter, or one more axis in front for several vectors.
        Entries of absent parameters are zero. Unknown names, wrong shapes, different numbers of
        vectors, NaN and infinity raise errors.
        """
        counts: dict[str, int | None] = {}
        arrays = {name: self._checked(name, value, counts) for name, value in vectors.items()}
        if not arrays:
            raise InputError("no vector is given; pass an array for at least one parameter.")
        if len(set(counts.values())) > 1:
            raise ShapeError(
                f"the arrays have different numbers of vectors: {counts}; give every array the "
                f"same number of vectors on its first axis, or a single vector without this axis."
            )
        count = next(iter(counts.values()))
        rows = np.zeros((1 if count is None else count, self.size))
        for name, array in arrays.items():
            start = self.starts[name]
            rows[:, start : start + prod(self.shapes[name])] = array.reshape(len(rows), -1)
        return rows, count is not None

    def split(
        self, rows: Float, names: Sequence[str], dtypes: Mapping[str, np.dtype], several: bool
    ) -> dict[str, Array]:
        """Return rows ``(count, size)`` as new arrays by parameter; the inverse of ``join``.

        Arrays have the axis of the rows in front if there are ``several``.
        """
        vectors: dict[str, Array] = {}
        for name in names:
            start, shape = self.starts[name], self.shapes[name]
            array = rows[:, start : start + prod(shape)].astype(dtypes[name])
            vectors[name] = array.reshape((len(rows), *shape) if several else shape)
        return vectors

    def _checked(self, name: str, value: Array, counts: dict[str, int | None]) -> Float:
        """Return an array of a parameter in float64, and enter its number of vectors."""
        if name not in self.shapes:
            raise UnknownNameError(
                f"'{name}' is not a parameter of this curvature; they are: "
                f"{', '.join(self.shapes)}."
            )
        array = np.asarray(
            numeric(f"the vector of '{name}'", np.asarray(as_array(value))), np.float64
        )
        shape = self.shapes[name]
        if array.shape != shape and array.shape[1:] != shape:
            raise ShapeError(
                f"the vector of '{name}' has shape {array.shape}, not {shape} or (count, *{shape})."
            )
        if not np.isfinite(array).all():
            raise NonFiniteError(f"the vector of '{name}' holds NaN or infinity.")
        counts[name] = None if array.shape == shape else len(array)
        return array


_EPSILON = float(np.finfo(np.float64).eps)
# Random vectors beyond the rank, share of the side below which a rank is low, and largest accepted
# error of the trace in units of the rounding error.
_OVERSAMPLING, _LOW_RANK, _TRACE_ERRORS = 8, 0.25, 64


@dataclass(frozen=True, slots=True, eq=False)
class Spectrum:
    """A block as eigenvalues and eigenvectors."""

    eigenvalues: Float  # ``s ≥ 0``, ``(g, d_in, d_out)``
    # ``U``, ``(g, d_in, d_in)``, eigenvectors as columns; None for the identity.
    left: Float | None = None
    right: Float | None = None  # ``W``, ``(g, d_out, d_out)``; None for the identity

    def into(self, V: Float) -> Float:
        """Return ``Uᵀ V W``: vectors ``(…, g, d_in, d_out)`` in the basis of the eigenvectors."""
        if self.left is not None:
            V = self.left.swapaxes(1, 2) @ V
        return V if self.right is None else V @ self.right

    def back(self, V: Float) -> Float:
        """Return ``U V Wᵀ``, the inverse of ``into``."""
        if self.left is not None:
            V = _left_product(self.left, V)
        return V if self.right is None else V @ self.right.swapaxes(1, 2)

    def multiply(self, V: Float, values: Float) -> Float:
        """Return the block with other eigenvalues times vectors, ``(…, g, d_in, d_out)``."""
        return self.back(values * self.into(V))

    def diagonal(self, values: Float) -> Float:
        """Return the diagonal of the block with other eigenvalues, ``(g, d_in, d_out)``."""
        if self.left is not None:
            values = self.left**2 @ values
        return values if self.right is None else values @ (self.right**2).swapaxes(1, 2)


def _left_product(U: Float, V: Float) -> Float:
    """Return ``U V`` of vectors ``(…, g, d_in, d_out)``; one product for a single group."""
    if len(U) > 1 or V.ndim < 4:
        product: Float = U @ V
        return product
    columns = np.moveaxis(V, -2, 0)
    return np.moveaxis((U[0] @ columns.reshape(len(columns), -1)).reshape(columns.shape), 0, -2)


def eigenbasis(
    matrices: Float, parts: tuple[slice, ...], rows: int | None = None, epsilon: float = _EPSILON
) -> tuple[Float, Float]:
    """Return the eigenvalues and eigenvectors of the diagonal blocks of symmetric matrices.

    The matrices ``(g, d, d)`` are positive semi-definite up to rounding, with a relative error
    ``epsilon``. ``parts`` are the rows of each diagonal block; entries outside are ignored. Each
    matrix is the mean of outer products of ``rows`` vectors, which bounds its rank; None if
    unknown.

    Eigenvalues ``(g, d)`` are not negative, and ascend in each part; those that are only rounding
    are zeros, so that a singular matrix is singular on every processor. Eigenvectors are columns,
    ``(g, d, d)``, zero outside the blocks.
    """
    values = np.empty(matrices.shape[:2])
    vectors = np.zeros(matrices.shape)
    for part in parts:
        for group, matrix in enumerate(matrices[:, part, part]):
            result = _of_low_rank(matrix, rows or len(matrix), epsilon) or np.linalg.eigh(matrix)
            numbers, vectors[group, part, part] = result
            least = len(matrix) * np.finfo(np.float64).eps * numbers.max(initial=0.0)
            values[group, part] = np.where(numbers > least, numbers, 0.0)
    return values, vectors


def _of_low_rank(matrix: Float, rank: int, epsilon: float) -> tuple[Float, Float] | None:
    """Return eigenvalues and eigenvectors of a matrix whose rank is far below its side.

    Products of the matrix ``(d, d)`` with random vectors span its range. The other eigenvalues are
    zeros, which removes rounding errors of the relative size ``epsilon``. The result is None if the
    bound ``rank`` is too large, or not true.

    Source: Halko, Martinsson & Tropp 2011, arXiv:0909.4061, sections 4 and 5.
    """
    side, columns = len(matrix), rank + _OVERSAMPLING
    if columns > side * _LOW_RANK:
        return None
    vectors = np.random.default_rng(0).standard_normal((side, columns))
    span, rest = _completed(matrix @ vectors)
    values, rotation = np.linalg.eigh(span.T @ (matrix @ span))
    if abs(np.trace(matrix) - values.sum()) > _TRACE_ERRORS * epsilon * np.trace(matrix):
        return None
    zeros = np.zeros(side - columns)
    return np.concatenate([zeros, values]), np.hstack([rest, span @ rotation])


def _completed(columns: Float) -> tuple[Float, Float]:
    """Return orthonormal bases of the span of columns ``(d, k)`` and of its complement.

    Householder reflections yield the columns of ``I − V T Vᵀ`` (Schreiber & Van Loan 1989); one
    product is faster than the application of the reflections in blocks.
    """
    (reflectors, scales), _ = qr(columns, mode="raw")
    count = len(scales)
    V = np.tril(reflectors, -1)
    V[np.arange(count), np.arange(count)] = 1.0
    V[:, scales == 0] = 0.0  # reflections of columns that are zero are identities
    inverse = np.diag(1 / np.where(scales == 0, 1.0, scales))
    products = V @ np.linalg.solve(np.triu(V.T @ V, 1) + inverse, V.T)
    basis = np.negative(products, out=products)
    np.einsum("ii->i", basis)[:] += 1.0
    return basis[:, :count], basis[:, count:]


# The formula of a block of entries that the loss does not depend on.
UNUSED = "0"


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Rows of a block whose eigenvectors are zero in all its other rows."""

    parameters: tuple[str, ...]  # names of the parameters of the rows
    # Name of the parameter, or of the slice of it, that has the rows; a tuple for several.
    key: Params
    rows: slice  # rows of the packed matrices


@dataclass(frozen=True, slots=True, eq=False)
class InputMoment:
    """The second moment of the inputs of a layer, in the eigenvectors of its block."""

    # Eigenvalues of the mean of ``a aᵀ`` over examples and positions, ``(g, d_in)``.
    eigenvalues: Float
    positions: float  # mean number of uses × positions of an example


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A block of the Fisher matrix."""

    parts: tuple[Part, ...]  # its parameters, with the rows of each
    # Place of each entry of a packed vector among all parameters, ``(g, d_in, d_out)``.
    places: Places
    spectrum: Spectrum  # eigenvalues and eigenvectors
    formula: str = ""  # the block in a few symbols
    inputs: InputMoment | None = None  # second moment of the inputs; None where it was not measured

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters of the block."""
        return tuple(dict.fromkeys(name for part in self.parts for name in part.parameters))

    @property
    def is_unused(self) -> bool:
        """Whether the loss depends on no entry of the block."""
        return self.formula == UNUSED

    def levels(self, damping: float | Mapping[str, float]) -> Float:
        """Return the damping of each row, ``(1, d_in, 1)``, or of all rows, ``(1, 1, 1)``."""
        if not isinstance(damping, Mapping):
            return np.full((1, 1, 1), damping)
        levels = np.empty((1, self.places.shape[1], 1))
        for part in self.parts:
            numbers = {damping[name] for name in part.parameters}
            if len(numbers) > 1:
                raise InputError(
                    f"{', '.join(part.parameters)} share a block, which has one damping, got "
                    f"{', '.join(str(damping[name]) for name in part.parameters)}."
                )
            levels[:, part.rows] = numbers.pop()
        return levels

    def powers(self, damping: float | Mapping[str, float], power: float) -> Float:
        """Return ``(s + λ)^power`` of all eigenvalues, ``(g, d_in, d_out)``.

        An eigenvalue of zero with a negative power, or an overflow, raises an InputError.
        """
        with np.errstate(divide="ignore", over="ignore"):
            powers = (self.spectrum.eigenvalues + self.levels(damping)) ** power
        if not np.isfinite(powers).all():
            raise InputError(
                f"the block of {', '.join(self.parameters)} has eigenvalues down to "
                f"{self.spectrum.eigenvalues.min():.3g}: with damping {damping} it has no power "
                f"{power:g}; raise the damping."
            )
        return powers

    def log_eigenvalues(self, damping: float | Mapping[str, float]) -> Float:
        """Return ``log(s + λ)``; an InputError if the damped block is singular."""
        self.powers(damping, -1.0)
        logarithms: Float = np.log(self.spectrum.eigenvalues + self.levels(damping))
        return logarithms


def checked_damping(
    damping: float | Mapping[str, float], names: Sequence[str]
) -> float | Mapping[str, float]:
    """Return λ, or λ of each parameter, after a check.

    An InputError names a number that is negative or not finite, or a parameter without one.
    """
    numbers = damping if isinstance(damping, Mapping) else {"": damping}
    for name, value in numbers.items():
        if name and name not in names:
            raise UnknownNameError(
                f"damping is given for '{name}', which is not a parameter of this curvature; they "
                f"are: {', '.join(names)}."
            )
        where = f"damping of '{name}'" if name else "damping"
        check_at_least_zero(where, value)
    missing = [name for name in names if name not in numbers] if "" not in numbers else []
    if missing:
        raise InputError(f"damping has no number for {', '.join(missing)}.")
    # NumPy does not compute with whole numbers of more than 64 bits.
    floats = {name: float(value) for name, value in numbers.items()}
    return floats.get("", floats)
