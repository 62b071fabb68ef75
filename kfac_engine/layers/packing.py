"""Packs the parameters of a layer into one matrix: rows are inputs, columns are outputs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from types import ModuleType
from typing import ClassVar

from kfac_engine._types import Array, Rows, Vector
from kfac_engine.arguments import check_choice
from kfac_engine.backend.namespace import recordable
from kfac_engine.errors import InputError, ShapeError, UnsupportedError

# Weight format to the permutation of axes to (*spatial, in, out).
_AXES: dict[str, tuple[int, ...]] = {
    "IO": (0, 1),
    "OI": (1, 0),
    "WIO": (0, 1, 2),
    "OIW": (2, 1, 0),
    "HWIO": (0, 1, 2, 3),
    "OIHW": (2, 3, 1, 0),
    "DHWIO": (0, 1, 2, 3, 4),
    "OIDHW": (2, 3, 4, 1, 0),
}
# Formats of transposed convolutions, to (in, *spatial, out): rows are input channels.
_TRANSPOSED_AXES: dict[str, tuple[int, ...]] = {
    "WOI": (2, 0, 1),
    "IOW": (0, 2, 1),
    "HWOI": (3, 0, 1, 2),
    "IOHW": (0, 2, 3, 1),
    "DHWOI": (4, 0, 1, 2, 3),
    "IODHW": (0, 2, 3, 4, 1),
}


@dataclass(frozen=True, slots=True)
class _Layout:
    """How the axes of a weight format become rows and columns."""

    axes: tuple[int, ...]  # the permutation of the axes to ``(*rows, *columns)``
    row_axes: int  # number of axes that are rows
    outputs_first: bool  # whether the outputs are the first axis
    # The permutation in which ``Packing.parts`` reads a weight, without a copy if possible:
    # ``axes``, or ``(*columns, *rows)`` if outputs are first.
    read: tuple[int, ...]
    back: tuple[int, ...]  # the inverse of ``read``


def _layout(axes: tuple[int, ...], row_axes: int) -> _Layout:
    first = axes[row_axes] == 0
    read = (*axes[row_axes:], *axes[:row_axes]) if first else axes
    back = tuple(sorted(range(len(read)), key=read.__getitem__))
    return _Layout(axes, row_axes, first, read, back)


_LAYOUTS = {name: _layout(axes, len(axes) - 1) for name, axes in _AXES.items()} | {
    name: _layout(axes, 1) for name, axes in _TRANSPOSED_AXES.items()
}


@dataclass(frozen=True, slots=True)
class Packing:
    """The map from a weight and a bias to the packed matrix ``V``, ``(d_in (+ 1), d_out)``."""

    one_matrix: ClassVar[bool] = True  # whether packed vectors are one matrix, or a stack

    # Axes of the weight: ``"IO"``, ``"OI"``, ``"HWIO"``, ``"OIHW"``, …; ``"HWOI"``, ``"IOHW"``, …
    # for a transposed convolution.
    weight_format: str
    has_bias: bool  # whether a bias is the last row

    def __post_init__(self) -> None:
        """Check that the format is known."""
        check_choice("weight_format", self.weight_format, _LAYOUTS)

    @property
    def axes(self) -> tuple[int, ...]:
        """The permutation of the weight's axes to ``(*rows, *columns)``."""
        return _LAYOUTS[self.weight_format].axes

    @property
    def row_axes(self) -> int:
        """Number of axes of the weight that are rows: all but one, or one if transposed."""
        return _LAYOUTS[self.weight_format].row_axes

    @property
    def column_axis(self) -> int | None:
        """The axis of the weight that has the outputs; None if several axes have them."""
        columns = self.axes[self.row_axes :]
        return columns[0] if len(columns) == 1 else None

    def kernel(self, weight_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the spatial shape of a filter; empty for a dense weight."""
        sizes = zip(self.weight_format, weight_shape, strict=False)
        return tuple(size for letter, size in sizes if letter not in "IO")

    def matrix_shape(self, weight_shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the shape of the packed matrix, with the row of the bias."""
        permuted = [weight_shape[axis] for axis in self.axes]
        rows = prod(permuted[: self.row_axes]) + self.has_bias
        return rows, prod(permuted[self.row_axes :])

    def arrays(self, vector: Vector, where: object) -> Sequence[Array]:
        """Return the arrays of the weight and, if the layer has one, of the bias.

        A wrong number of arrays raises InputError, and ``Rows`` raise UnsupportedError. The errors
        name the parameters by ``where``.
        """
        if isinstance(vector, Rows):
            raise UnsupportedError(f"the block of {where} multiplies whole arrays, not rows.")
        parts = vector if isinstance(vector, tuple | list) else (vector,)
        if len(parts) != 1 + self.has_bias:
            raise InputError(
                f"the block of {where} needs {1 + self.has_bias} array(s), got {len(parts)}."
            )
        return parts

    def parts(self, vector: Vector, where: object) -> tuple[Array, ...]:
        """Return the packed matrix in two parts: the rows of the weight, and the row of the bias.

        The arrays of ``vector`` have the shapes of the parameters; the bias may have axes of size
        1. The parts are ``(d_in, d_out)``, and ``(d_out,)`` for a bias; they are views if the order
        of the entries allows. Columns are contiguous if the outputs are the first axis of the
        weight.
        """
        parts = self.arrays(vector, where)
        matrix = self.rows(parts[0], where)
        if not self.has_bias:
            return (matrix,)
        d_out = matrix.shape[1]
        if parts[1].size != d_out:
            raise ShapeError(f"the bias of {where} has shape {parts[1].shape}, not ({d_out},).")
        return matrix, parts[1].reshape(d_out)

    def rows(self, weight: Array, where: object) -> Array:
        """Return the rows of a weight, the first of ``parts``."""
        layout = _LAYOUTS[self.weight_format]
        if weight.ndim != len(layout.axes):
            raise ShapeError(
                f"the weight of {where} has the shape {weight.shape}, but its format "
                f"{self.weight_format} has {len(layout.axes)} axes."
            )
        if weight.ndim > 2:
            d_out = prod([weight.shape[axis] for axis in layout.axes[layout.row_axes :]])
            shape = (d_out, -1) if layout.outputs_first else (-1, d_out)
            weight = weight.transpose(layout.read).reshape(shape)
        return weight.T if layout.outputs_first else weight

    def rows_in_place(self, weight: Array) -> Array | None:
        """Return ``rows`` as a view with one or two axes of rows; None if no view exists."""
        plain = self.plain_matrix(weight)
        if plain is None or weight.ndim == 2 or not _LAYOUTS[self.weight_format].outputs_first:
            return plain if plain is None or weight.ndim > 2 else self.rows(weight, "")
        view: Array = weight.reshape(*weight.shape[:2], -1).transpose(2, 1, 0)
        return view

    def plain_matrix(self, weight: Array) -> Array | None:
        """Return the only matrix of a weight or its transpose, as a view, with inputs in any order.

        There is none for several matrices, for columns of several axes, and for other strides.
        """
        axes = _LAYOUTS[self.weight_format]
        if not self.one_matrix or self.column_axis is None or not weight.flags.c_contiguous:
            return None
        plain: Array = (
            weight.reshape(len(weight), -1)
            if axes.outputs_first
            else weight.reshape(-1, weight.shape[-1])
        )
        return plain

    def from_rows(self, rows: Array, like: Array) -> Array:
        """Convert rows to a contiguous weight in the shape and type of ``like``; see ``joined``."""
        layout, shape = _LAYOUTS[self.weight_format], like.shape
        weight = rows.T if layout.outputs_first else rows
        if like.ndim > 2:
            weight = weight.reshape([shape[axis] for axis in layout.read]).transpose(layout.back)
        return weight.astype(like.dtype, order="C", copy=False)

    @recordable
    def pack(self, vector: Vector, where: object, xp: ModuleType) -> Array:
        """Return the packed matrix of a weight or a ``(weight, bias)`` pair.

        The result is ``(d_in (+ 1), d_out)``, a new array. Shapes and errors are as for ``parts``.
        """
        matrix, *bias = self.parts(vector, where)
        if not bias:
            return matrix.copy(order="K")
        packed: Array = xp.concatenate([matrix, bias[0][None]])
        return packed

    def matrices(self, weight: Array, xp: ModuleType, *, copy: bool = True) -> Array:
        """Return the matrices of a weight, with a column for each output and no row of a bias.

        The matrix of a transposed convolution has the taps in its rows, as the matrix of a
        convolution; the packed matrix has them in its columns. The result is ``(groups, inputs,
        outputs)``, a new array, or a view of the weight if the order of its entries allows and
        ``copy`` is false.
        """
        if self.one_matrix and self.weight_format not in _TRANSPOSED_AXES:
            matrices = self.rows(weight, self.weight_format)[None]
            return matrices.copy() if copy else matrices
        plain, weight = self._with_taps_in_rows(weight)
        packed = plain.pack(weight, self.weight_format, xp)
        return packed.reshape(-1, *packed.shape[-2:])

    def from_matrices(self, matrices: Array, like: Array) -> Array:
        """Convert matrices to a weight in the shape and type of ``like``, a view where possible."""
        if self.one_matrix and self.weight_format not in _TRANSPOSED_AXES:
            return self.from_rows(matrices.reshape(matrices.shape[-2:]), like)
        plain, exchanged = self._with_taps_in_rows(like)
        weight: Array = plain.unpack(matrices, exchanged)  # type: ignore[assignment] # an array
        _, result = self._with_taps_in_rows(weight)
        return result.astype(like.dtype, order="C", copy=False)

    def _with_taps_in_rows(self, weight: Array) -> tuple["Packing", Array]:
        """Return the packing without a bias, and the weight, with axes exchanged if needed."""
        alone = replace(self, has_bias=False)
        if self.weight_format not in _TRANSPOSED_AXES:
            return alone, weight
        inputs, outputs = (self.weight_format.index(letter) for letter in "IO")
        adjoint = self.weight_format.translate({ord("I"): "O", ord("O"): "I"})
        return replace(alone, weight_format=adjoint), weight.swapaxes(inputs, outputs)

    @recordable
    def unpack(self, matrix: Array, like: Vector) -> Vector:
        """Convert a packed matrix to the shapes and types of ``like``, to a view where possible."""
        assert not isinstance(like, Rows)  # ``pack`` refuses them
        parts = like if isinstance(like, tuple | list) else (like,)
        weight = self.from_rows(matrix[:-1] if self.has_bias else matrix, parts[0])
        if not self.has_bias:
            return (weight,) if isinstance(like, tuple | list) else weight
        return weight, matrix[-1].reshape(parts[1].shape).astype(parts[1].dtype)
