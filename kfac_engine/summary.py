"""Summarizes objects as terminal lines or notebook tables of bounded length.

Names in a file are untrusted: they are shown in printable form, and escaped in HTML.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.metadata import PackageNotFoundError, version
from itertools import islice

from kfac_engine.printable import shortened

# Rows of a table that are computed and shown.
MOST_ROWS = 20
_MOST_CHARACTERS = 80


@dataclass(frozen=True, slots=True)
class Table:
    """The first rows of a table."""

    heads: Sequence[str]  # heads of the columns
    rows: Iterable[Sequence[object]]  # Cells of each row. Not more rows than are shown are read.
    count: int  # number of all rows
    noun: str  # noun of a row, in the plural

    def cells(self) -> list[list[str]]:
        """Return the rows that are shown, in printable form."""
        return [[_shown(cell) for cell in row] for row in islice(self.rows, MOST_ROWS)]

    def rest(self) -> str:
        """Return the number of rows that are not shown; empty if there is none."""
        more = self.count - MOST_ROWS
        return f"… {more:,} more {self.noun}" if more > 0 else ""


@dataclass(frozen=True, slots=True)
class Summary:
    """A title, facts and a table."""

    title: str  # class and name of the object
    facts: Mapping[str, object]  # values by name
    table: Table | None = None  # the table; None for none

    def lines(self) -> str:
        """Return the title and the facts, one on each line."""
        facts = [[_shown(name), _shown(value)] for name, value in self.facts.items()]
        return "\n".join([_shown(self.title), *_aligned(facts)])

    def page(self) -> str:
        """Return the title, the facts and the table as lines."""
        if self.table is None:
            return self.lines()
        rows = [[_shown(head) for head in self.table.heads], *self.table.cells()]
        rest = self.table.rest()
        return "\n".join([self.lines(), *_aligned(rows), *([f"  {rest}"] if rest else [])])

    def html(self) -> str:
        """Return the title, the facts and the table as HTML, without style or script."""
        facts = "".join(
            f"<tr><th>{_cell(name)}</th><td>{_cell(value)}</td></tr>"
            for name, value in self.facts.items()
        )
        table = "" if self.table is None else _html_table(self.table)
        listed = f"<table>{facts}</table>" if facts else ""
        return f"<div><p><b>{_cell(self.title)}</b></p>{listed}{table}</div>"


class Summarized:
    """A base class of objects with a summary, which ``repr`` and notebooks show."""

    __slots__ = ()

    def _summary(self) -> Summary:
        raise NotImplementedError

    def __repr__(self) -> str:
        """Return the title and the facts of the summary."""
        return self._summary().lines()

    def _repr_html_(self) -> str:
        """Return the whole summary for a notebook."""
        return self._summary().html()


def dimensions(shape: Sequence[int]) -> str:
    """Return a shape such as ``32×16×3×3``, or ``scalar``."""
    return "×".join(str(size) for size in shape) or "scalar"


def binary_size(count: float) -> str:
    """Return a number of bytes with three digits and a binary unit."""
    return scaled(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def scaled(count: float, step: int, units: Sequence[str]) -> str:
    """Return a number with three digits in one of several units, each ``step`` times the last."""
    unit = 0
    # From 999.5 on, three digits are 1000.
    while count >= 999.5 and unit < len(units) - 1:
        count, unit = count / step, unit + 1
    return f"{count:.3g} {units[unit]}"


def counted(count: int, noun: str) -> str:
    """Return a number with a noun in the singular or plural: ``1 array``, ``1,200 arrays``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def installed_version(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _html_table(table: Table) -> str:
    heads = "".join(f"<th>{_cell(head)}</th>" for head in table.heads)
    rows = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in table.cells()
    )
    rest = f'<tr><td colspan="{len(table.heads)}">{table.rest()}</td></tr>' if table.rest() else ""
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}{rest}</tbody></table>"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines, the columns below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  "
        + "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _cell(value: object) -> str:
    return escape(_shown(value))


def _shown(value: object) -> str:
    return shortened(str(value), _MOST_CHARACTERS)
