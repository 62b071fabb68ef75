"""Identifiers that pick rows of a table: inputs of embeddings, never written out as 0/1 rows."""

from dataclasses import dataclass
from math import prod

from kfac_engine._types import Array
from kfac_engine.backend.protocol import Backend
from kfac_engine.backend.window import Window
from kfac_engine.errors import InputError, ShapeError
from kfac_engine.layers.views import rows_as_images


@dataclass(frozen=True, slots=True)
class TokenIdView:
    """Integers below a vocabulary's size; a row of features is the sum of their unit vectors.

    Attributes:
        vocabulary: Features of a row: entries of the table.
        rank: 1 for one identifier an example, ``(n,)``; 2 for some, ``(n, ids)``.
        positions: Whether each identifier is a row of its own, ``(n, …positions)``; otherwise those
            of an example are one row.
        count_repeats: Whether an identifier that comes ``k`` times in a row counts ``k`` times in
            the diagonal of the second moment; otherwise once, the row being 0/1.
    """

    vocabulary: int
    rank: int = 2
    positions: bool = False
    count_repeats: bool = False

    def width(self, shape: tuple[int, ...]) -> int:
        if len(shape) != self.rank and not self.positions:
            raise ShapeError(
                f"identifiers have shape {shape}; {'(n,)' if self.rank == 1 else '(n, ids)'} is "
                f"needed, or positions=True where each has an output of its own."
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
            "identifiers have a diagonal second moment only; use an approximation with a diagonal "
            "input factor, such as 'kron_in_diag'."
        )

    def rows(self, x: Array, backend: Backend) -> Array:
        del x, backend
        raise InputError(
            "identifiers are not written out as rows; use an approximation with a diagonal input "
            "factor, such as 'kron_in_diag'."
        )

    def images(self, x: Array, backend: Backend) -> tuple[Array, Window]:
        return rows_as_images(self.rows(x, backend))

    def counts(self, ids: Array, backend: Backend) -> Array:
        """Rows that have each identifier, ``(vocabulary,)``: the diagonal of ``Σ_rows x xᵀ``.

        Args:
            ids: Checked identifiers, ``(n,)`` or ``(n, ids)``.
            backend: Array library.

        Returns:
            Integers, or multiplicities where repeats count.
        """
        xp = backend.xp
        flat = xp.where(ids < 0, ids + self.vocabulary, ids)
        if not (self.count_repeats or self.positions or ids.ndim == 1):
            ordered = xp.sort(flat, axis=1)
            first = xp.ones(ordered.shape, bool)
            first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
            flat = xp.where(first, ordered, -1)
        return backend.count_ids(flat, self.vocabulary)

    def check(self, name: str, ids: Array) -> None:
        """Refuse what picks no row of the table; negative numbers count from its end.

        Raises:
            InputError: They are no integers, or lie outside the vocabulary.
        """
        if ids.dtype.kind not in "iu":
            raise InputError(f"'{name}' holds identifiers and must be integer, not {ids.dtype}.")
        low, high = (int(ids.min()), int(ids.max())) if ids.size else (0, 0)
        if not -self.vocabulary <= low <= high < self.vocabulary:
            raise InputError(
                f"'{name}' holds identifiers from {low} to {high}; the vocabulary has "
                f"{self.vocabulary} entries."
            )
