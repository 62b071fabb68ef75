"""Token ids: inputs of embeddings, read as one-hot rows without a copy of them."""

from dataclasses import dataclass
from math import prod
from typing import ClassVar

from kfac_engine._types import Array
from kfac_engine.backend.protocol import Backend
from kfac_engine.backend.window import Window
from kfac_engine.errors import InputError, ShapeError
from kfac_engine.layers.views import rows_as_images


@dataclass(frozen=True, slots=True)
class TokenIdView:
    """Token ids, read as rows; a row is the sum of the unit vectors of its ids.

    Attributes:
        vocabulary: Number of rows of the table, which is the number of features.
        rank: 1 for one id in an example, ``(n,)``; 2 for several, ``(n, ids)``.
        positions: Whether each id is a row, ``(n, …positions)``; otherwise the ids of an example
            are one row.
        count_repeats: Whether an id that occurs ``k`` times in a row counts ``k`` times in the
            diagonal of the second moment; otherwise it counts once.
        zeros_outside: Whether an id outside the table is a row of zeros, as in OneHot; otherwise it
            is an error.
    """

    has_rows: ClassVar[bool] = False  # one-hot rows are as long as the table

    vocabulary: int
    rank: int = 2
    positions: bool = False
    count_repeats: bool = False
    zeros_outside: bool = False

    def width(self, shape: tuple[int, ...]) -> int:
        if len(shape) != self.rank and not self.positions:
            raise ShapeError(
                f"token ids need shape {'(n,)' if self.rank == 1 else '(n, ids)'}, got {shape}; "
                f"set positions=True if each id has an output."
            )
        return self.vocabulary

    def count(self, shape: tuple[int, ...]) -> int:
        return prod(shape) if self.positions else shape[0]

    def second_moment(
        self,
        x: Array,
        out: Array,
        backend: Backend,
        *,
        homogeneous: bool,
        alpha: float,
        beta: float,
    ) -> None:
        del x, out, backend, homogeneous, alpha, beta
        raise InputError(
            "the second moment of token ids is diagonal; use an approximation with a diagonal "
            "input factor, such as 'kron_in_diag'."
        )

    def rows(self, x: Array, backend: Backend) -> Array:
        del x, backend
        raise InputError(
            "token ids cannot be read as one-hot rows; use an approximation with a diagonal "
            "input factor, such as 'kron_in_diag'."
        )

    def images(self, x: Array, backend: Backend) -> tuple[Array, Window]:
        return rows_as_images(self.rows(x, backend))

    def counts(self, ids: Array, backend: Backend, weights: Array | None = None) -> Array:
        """Count the rows with each id, ``(vocabulary,)``: the diagonal of ``Σ_rows x xᵀ``.

        Args:
            ids: Checked token ids, ``(n,)`` or ``(n, ids)``.
            backend: Backend of the array.
            weights: Weight of each row; None for ones.

        Returns:
            Integers, or sums of weights; with ``count_repeats`` the number of occurrences.
        """
        xp = backend.xp
        flat = xp.where(ids < 0, ids + self.vocabulary, ids)
        flat = xp.where((flat < 0) | (flat >= self.vocabulary), -1, flat)
        if not (self.count_repeats or self.positions or ids.ndim == 1):
            ordered = xp.sort(flat, axis=1)
            first = xp.ones(ordered.shape, bool)
            first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
            flat = xp.where(first, ordered, -1)
        if weights is None:
            return backend.count_ids(flat, self.vocabulary)
        of_ids = xp.repeat(weights, flat.size // len(weights))
        sums = xp.bincount(flat.reshape(-1) + 1, of_ids, minlength=self.vocabulary + 1)
        counts: Array = sums[1:]
        return counts

    def check(self, name: str, ids: Array) -> None:
        """Check that token ids are rows of the table; negative ids count from its end.

        Raises:
            InputError: The ids are not integers, or are outside the vocabulary without
                ``zeros_outside``.
        """
        if ids.dtype.kind not in "iu":
            raise InputError(f"'{name}' contains token ids and must be integer, not {ids.dtype}.")
        if self.zeros_outside:
            return
        low, high = (int(ids.min()), int(ids.max())) if ids.size else (0, 0)
        if not -self.vocabulary <= low <= high < self.vocabulary:
            raise InputError(
                f"'{name}' contains token ids from {low} to {high}; the vocabulary has "
                f"{self.vocabulary} entries."
            )
