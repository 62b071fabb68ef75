"""Converts rows of features to the input of a model."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Any

import numpy as np
from scipy.sparse import issparse

from kfac_engine._types import Array, DType
from kfac_engine.backend.namespace import refuse_mask
from kfac_engine.errors import InputError, NonFiniteError, ShapeError, UnsupportedError
from kfac_engine.graph.structure import Graph
from kfac_engine.printable import quoted
from kfac_engine.runtime.inputs import fits

Shape = tuple[int, ...]


def as_rows(X: Any) -> tuple[Any, Shape | None]:
    """Return examples as rows of features, and the shape of an example.

    Args:
        X: Examples along axis 0: rows in any form that scikit-learn accepts, also sparse, or an
            array of more axes.

    Returns:
        ``X`` itself and None for rows; ``(n, features)`` and the shape of an example otherwise.

    Raises:
        InputError: The array has a mask.
    """
    refuse_mask(X)
    if issparse(X) or getattr(X, "ndim", 2) <= 2:
        return X, None
    array = np.asarray(X)
    return array.reshape(len(array), -1), array.shape[1:]


@dataclass(frozen=True, slots=True)
class ExampleInput:
    """The input of a model that receives the examples."""

    name: str  # name of the input
    dtype: DType  # element type
    # Sizes of the axes of an example; a text or None for an axis of any size. None in place of the
    # tuple if the rank is unknown.
    sizes: tuple[int | str | None, ...] | None

    @classmethod
    def of(cls, graph: Graph) -> "ExampleInput":
        """Return the input of a graph.

        Raises:
            UnsupportedError: The graph has several inputs, or takes no numbers.
        """
        if len(graph.inputs) != 1:
            listed = quoted(entry.name for entry in graph.inputs) or "none"
            raise UnsupportedError(
                f"an estimator needs a model with one input; '{graph.name}' has: {listed}. Train "
                f"it with kfac_engine.fit."
            )
        (entry,) = graph.inputs
        if entry.dtype.kind not in "fiub":
            raise UnsupportedError(f"input '{entry.name}' takes {entry.dtype}, not numbers.")
        return cls(entry.name, entry.dtype, None if entry.shape is None else entry.shape[1:])

    def values(self, rows: Any, shape: Shape | None) -> "Array | SparseRows":
        """Return examples in the shape and element type of the input.

        Args:
            rows: Finite numbers, ``(n, features)``; or a sparse array of rows (CSR).
            shape: Shape of an example in the array of the caller; None for rows.

        Returns:
            The array, ``(n, …)``; sparse rows remain sparse.

        Raises:
            ShapeError: The examples do not have the shape of the input, or rows do not determine
                it.
            InputError: The element type of the input cannot represent a value.
        """
        if shape is None:
            shape = self._shape_of_row(rows.shape[1])
        elif self.sizes is not None and not fits(shape, self.sizes):
            raise ShapeError(f"X has examples of shape {shape}, but {self._described()}.")
        if issparse(rows):
            self._cast(rows.data)
            return SparseRows(rows, self.dtype, shape)
        return self._cast(rows).reshape(len(rows), *shape)

    def _shape_of_row(self, features: int) -> Shape:
        """Return the shape of an example that a row contains."""
        if self.sizes is None:
            return (features,)
        known = prod(size for size in self.sizes if isinstance(size, int))
        free = sum(not isinstance(size, int) for size in self.sizes)
        if free > 1:
            raise ShapeError(
                f"rows of X do not determine the shape of an example, because "
                f"{self._described()}; pass X in the shape (n, …) of the input."
            )
        fits = known > 0 and features % known == 0 if free else features == known
        if not fits:
            raise ShapeError(f"X has {features} features, but {self._described()}.")
        rest = features // known if free else 0
        return tuple(size if isinstance(size, int) else rest for size in self.sizes)

    def _cast(self, rows: Array) -> Array:
        with np.errstate(over="ignore", invalid="ignore"):
            values = rows.astype(self.dtype)
        if self.dtype.kind == "f":
            if not np.isfinite(values).all():
                raise NonFiniteError(
                    f"X has values beyond the range of {self.dtype}, which input '{self.name}' "
                    f"takes; scale X."
                )
        elif not np.array_equal(values, rows):
            raise InputError(
                f"X has values such as {rows[values != rows][0]!s}, but input '{self.name}' takes "
                f"{self.dtype}; convert X."
            )
        return values

    def _described(self) -> str:
        sizes = ", ".join("?" if size is None else str(size) for size in self.sizes or ())
        return f"input '{self.name}' takes examples of shape ({sizes})"


@dataclass(frozen=True, slots=True)
class SparseRows:
    """Examples in a sparse table, of which ``dense`` converts a few."""

    rows: Any  # a table of CSR, ``(n, features)``, with a row for each example
    dtype: DType  # element type of the input
    shape: Shape  # shape of an example in the input

    def __len__(self) -> int:
        return int(self.rows.shape[0])

    def __getitem__(self, chosen: Any) -> "SparseRows":
        """Return some examples, by a slice, a mask or numbers."""
        return replace(self, rows=self.rows[chosen])

    def dense(self) -> Array:
        """Return the examples as an array of the input, ``(n, …)``."""
        array: Array = self.rows.toarray().astype(self.dtype, copy=False)
        return array.reshape(len(array), *self.shape)


class SparseBatches:
    """Batches of sparse examples, each of which becomes dense when it is read.

    Args:
        arrays: Examples and targets, and weights of the targets if there are any.
        batch_size: Examples in a batch.
        seed: Seed of the orders of the epochs, which are those of arrays in ``kfac_engine.fit``;
            None for the order of the examples. An order leaves out the examples that do not fill a
            batch.
    """

    def __init__(self, arrays: Sequence[Any], batch_size: int, seed: int | None = None) -> None:
        self._arrays, self._size, self._seed, self._epoch = arrays, batch_size, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch."""
        self._epoch = epoch

    def __len__(self) -> int:
        count = len(self._arrays[0])
        return ceil(count / self._size) if self._seed is None else count // self._size

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        order = np.arange(len(self._arrays[0]))
        if self._seed is not None:
            order = np.random.default_rng([self._seed, self._epoch, 0]).permutation(order)
        for start in range(0, len(self) * self._size, self._size):
            chosen = order[start : start + self._size]
            rows, *others = (array[chosen] for array in self._arrays)
            yield (rows.dense(), *others)
