"""Results of measurements: quartiles, tables on the terminal, JSON in files."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from textwrap import wrap
from typing import Any, TypeVar

from rich import box
from rich.console import Console
from rich.table import Table

from kfac_engine.errors import InputError
from kfac_engine.system.writing import write_file

Kind = TypeVar("Kind")

# Wider than any table.
_ANY_WIDTH = 10_000
# Facts that must be equal for measurements in one file.
_SAME = ("processor", "packages", "blas", "threads")


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles of the wall times of one contender, in seconds."""

    median: float
    low: float
    high: float


def spread(times: Sequence[float]) -> Spread:
    """Return the median and the quartiles of times; of a single time, all three equal it."""
    low, _, high = quantiles(times, n=4, method="inclusive") if len(times) > 1 else [*times] * 3
    return Spread(median(times), low, high)


def milliseconds(seconds: float) -> str:
    """Return milliseconds as text with three digits, or all digits before the point."""
    milliseconds = 1e3 * seconds
    return f"{milliseconds:.{0 if milliseconds >= 100 else 1 if milliseconds >= 10 else 2}f}"


@dataclass(frozen=True, slots=True)
class Form:
    """The table of a kind of rows, on a terminal and in Markdown.

    Columns of numbers follow the columns of text. ``cells`` returns the cells of a row, which is a
    dictionary as in a JSON file.
    """

    texts: Sequence[str]
    numbers: Sequence[str]
    cells: Callable[[Mapping[str, Any]], Sequence[str]]

    def show(self, console: Console, title: str, rows: Sequence[Any]) -> None:
        """Print rows, which are dataclasses."""
        cells = [self.cells(asdict(row)) for row in rows]
        print_table(console, title, (self.texts, self.numbers), cells)


def spread_cells(seconds: Mapping[str, float]) -> tuple[str, str]:
    """Return the median and the quartiles of a spread in milliseconds."""
    middle, low, high = (milliseconds(seconds[which]) for which in ("median", "low", "high"))
    return middle, f"{low} – {high}"


def print_table(
    console: Console,
    title: str,
    heads: tuple[Sequence[str], Sequence[str]],
    rows: Sequence[Sequence[str]],
) -> None:
    """Print a table, or a block of lines for each row if the console is too narrow for the table.

    ``heads`` has the heads of the columns of text, then of the columns of numbers.
    """
    texts, numbers = heads
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for head in texts:
        table.add_column(head, no_wrap=True)
    for head in numbers:
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    unbounded = console.options.update(width=_ANY_WIDTH)
    if console.measure(table, options=unbounded).maximum <= console.width:
        console.print(table)
        return
    console.print(title)
    for row in rows:
        named, counted = row[: len(texts)], row[len(texts) :]
        pairs = [f"{head}\u00a0{cell}" for head, cell in zip(numbers, counted, strict=True) if cell]
        if any(named):
            console.print("  " + ", ".join(filter(None, named)), soft_wrap=True)
        cells = "  ".join(pair.replace(" ", "\u00a0") for pair in pairs)
        for line in wrap(cells, console.width - 4, break_long_words=False, break_on_hyphens=False):
            console.print(f"    {line}".replace("\u00a0", " "), soft_wrap=True)


def write_json(path: Path, report: Mapping[str, Any]) -> None:
    """Write machine and measurements; times are in seconds, rates in multiplications a second.

    ``report`` has the facts ``machine``, and for each suite the record of its run in ``course`` and
    its rows in ``suites``.
    """
    text = json.dumps(report, indent=1, ensure_ascii=False) + "\n"
    write_file(path, [text.encode()])


def read_report(path: Path, machine: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the complete suites that an earlier run on the same machine has written.

    The result has ``course`` and ``suites`` as in ``write_json``; it is empty without a file.
    ``InputError`` is raised if the file comes from other hardware, libraries or threads, or is no
    report.
    """
    if not path.is_file():
        return {}
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        before = report["machine"]
        whole = [name for name, course in report["course"].items() if not course["missing"]]
        entries = {part: {n: report[part][n] for n in whole} for part in ("course", "suites")}
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(
            f"{path} is no report of bench --json: name another file, or leave out --resume."
        ) from error
    now = json.loads(json.dumps(machine))
    for fact in _SAME:
        if before.get(fact) != now.get(fact):
            raise InputError(
                f"{path} was measured with {fact} {_told(before.get(fact))}, here it is "
                f"{_told(now.get(fact))}: name another file, or leave out --resume."
            )
    return entries


def _told(fact: Any) -> str:
    """Return a fact about a machine as text."""
    if isinstance(fact, dict):
        return " ".join(f"{name} {value}" for name, value in fact.items())
    return ", ".join(map(_told, fact)) if isinstance(fact, list) else str(fact)


def restored(kind: type[Kind], rows: Sequence[Mapping[str, Any]]) -> list[Kind]:
    """Return rows of a file as instances of the dataclass ``kind``, which has ``seconds``."""
    return [kind(**{**row, "seconds": Spread(**row["seconds"])}) for row in rows]
