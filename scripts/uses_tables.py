"""The Markdown table of the suite ``uses``: CPU time and memory next to the library of a use."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from kfac_engine.bench.contenders import OURS
from kfac_engine.bench.report import milliseconds
from scripts import bench_goals, markdown

HEADS = ["use", "CPU ms", "peer", "its CPU ms", "ours ÷ peer", "peak MB", "its peak MB"]


def section(suites: bench_goals.Suites) -> Iterator[str]:
    """Yield the table of a report, and the goals that it misses."""
    yield from table(suites["uses"])
    yield ""
    yield from bench_goals.table(suites, missed=True)


def table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Return the lines of the table: a line for each use that was compared."""
    lines = []
    for case, group in groupby(rows, key=lambda row: row["case"]):
        by_contender = {row["contender"]: row for row in group}
        ours = by_contender.pop(OURS)
        for peer, other in by_contender.items():
            lines.append((
                case, milliseconds(ours["cpu_seconds"]), peer, milliseconds(other["cpu_seconds"]),
                f"{ours['cpu_seconds'] / other['cpu_seconds']:.3f}",
                *(f"{row['peak_bytes'] / 1e6:.0f}" for row in (ours, other)),
            ))  # fmt: skip
    return markdown.table(HEADS, lines)
