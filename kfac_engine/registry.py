"""Defines tables of named rows, such as derivative rules, approximations and losses."""

from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

from kfac_engine.errors import UnknownNameError, suggestion

Row = TypeVar("Row")


class Registry(Mapping[str, Row], Generic[Row]):
    """A mapping from names to rows, whose error for an unknown name lists the known names.

    Messages call a row ``kind``, a noun in the singular, such as "loss".
    """

    def __init__(self, kind: str, rows: Mapping[str, Row] | None = None) -> None:
        self.kind = kind
        self._rows: dict[str, Row] = dict(rows or {})

    def __getitem__(self, name: str) -> Row:
        if name not in self:
            raise UnknownNameError(
                f"unknown {self.kind} '{name!s:.80}'{suggestion(name, self._rows)}; choose one of: "
                f"{', '.join(sorted(self._rows))}."
            )
        return self._rows[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._rows

    def register(self, *names: str) -> Callable[[Row], Row]:
        """Return a decorator that adds a row under new names."""

        def enter(row: Row) -> Row:
            for name in names:
                self.add(name, row)
            return row

        return enter

    def add(self, name: str, row: Row) -> None:
        """Add a row under a new name."""
        assert name not in self._rows, f"{self.kind} '{name}' is defined twice"
        self._rows[name] = row
