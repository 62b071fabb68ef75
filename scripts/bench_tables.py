"""Writes the tables of measurements: beside each JSON file, into the README and into the docs.

    python -m scripts.bench_tables

Reads ``bench/results/*.json``; README and ``docs/performance.md`` show the newest ``*-cpu.json``.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from scripts import bench_goals

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
README = ROOT / "README.md"
PERFORMANCE = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- measurements: begin -->", "<!-- measurements: end -->"
OURS = "ours"
# The README's choice: suite to a part of the names of its cases.
SHOWN = {
    "dense": "4096 rows of 1024",
    "conv": "stride 1",
    "inverse": "1024 × 1024",
    "precondition": "ResNet-50",
    "step": "factors 1,",
}
# As bench marks it: other processes took more than this share of the wall time.
DISTURBING_SHARE = 0.1


def main() -> None:
    """Write all tables."""
    for path in sorted(RESULTS.glob("*.json")):
        path.with_suffix(".md").write_text(page(load(path)), encoding="utf-8")
    for page_with_table, renewed in ((README, readme), (PERFORMANCE, performance)):
        text = page_with_table.read_text(encoding="utf-8")
        page_with_table.write_text(renewed(text), encoding="utf-8")


def load(path: Path) -> Mapping[str, Any]:
    """A report of ``bench --json``."""
    report: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return report


def readme(text: str) -> str:
    """The README with the newest measurements between its marks."""
    newest = _newest()
    report = load(newest)
    lines = [
        "| job | ours, ms | times as fast as |",
        "|---|---|---|",
        *(line for suite in SHOWN for line in _summary(suite, report)),
        "",
        _machine_line(report),
        f"All of it: [bench/results/{newest.stem}.md](bench/results/{newest.stem}.md).",
    ]
    return _between_marks(text, lines)


def performance(text: str) -> str:
    """``docs/performance.md`` with the newest measurements beside the goals between its marks."""
    newest = _newest()
    report = load(newest)
    source = f"From [{newest.stem}](../bench/results/{newest.stem}.md): {_machine_line(report)}"
    return _between_marks(text, [*bench_goals.table(report["suites"]), "", source])


def _newest() -> Path:
    return max(RESULTS.glob("*-cpu.json"))


def _between_marks(text: str, lines: Sequence[str]) -> str:
    marked = "\n".join([BEGIN, "", *lines, END])
    return re.sub(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: marked, text, flags=re.S)


def page(report: Mapping[str, Any]) -> str:
    """Every row of a report as Markdown."""
    machine = report["machine"]
    facts = [f"- {name}: {_told(value)}" for name, value in machine.items() if value]
    tables = [line for name, rows in report["suites"].items() for line in _table(name, rows)]
    return "\n".join(["# Measurements", "", *facts, "", *tables]).rstrip() + "\n"


def _summary(suite: str, report: Mapping[str, Any]) -> Iterator[str]:
    for case, rows in _cases(report["suites"].get(suite, ())):
        if SHOWN[suite] not in case:
            continue
        disturbed = any(row["others"] > DISTURBING_SHARE for row in rows)
        # Wall times of a busy machine say little; what processors spent says more.
        times = [row["cpu_seconds"] if disturbed else row["seconds"]["median"] for row in rows]
        taken = dict(zip([row["contender"] for row in rows], times, strict=True))
        own = taken.pop(OURS)
        others = ", ".join(f"{name} {seconds / own:.1f}" for name, seconds in taken.items())
        yield f"| {suite}: {case} | {1e3 * own:.1f}{' !' if disturbed else ''} | {others} |"


def _table(name: str, rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield f"## {name}\n"
    known = (form for mark, form in FORMS.items() if rows and mark in rows[0])
    heads, cells = next(known, (list(rows[0]) if rows else [], _any))
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    for row in rows:
        yield f"| {' | '.join(cells(row))} |"
    yield ""


CONTEST = [
    "case", "contender", "ms", "quartiles", "cpu ms", "ours ÷ this", "GFLOP/s", "of ceiling",
    "peak MB", "error", "others",
]  # fmt: skip


def _contest(row: Mapping[str, Any]) -> list[str]:
    times = row["seconds"]
    rate = row["rate"]
    return [
        row["case"], row["contender"], f"{1e3 * times['median']:.2f}",
        f"{1e3 * times['low']:.2f} – {1e3 * times['high']:.2f}",
        f"{1e3 * row['cpu_seconds']:.2f}", f"{row['ratio']:.2f}",
        f"{2e-9 * rate:.0f}" if rate else "", f"{row['fraction']:.0%}" if rate else "",
        f"{row['peak_bytes'] / 1e6:.0f}",
        " / ".join(f"{error:.0e}" for error in row["errors"].values()),
        f"{row['others']:.0%}{' !' if row['others'] > DISTURBING_SHARE else ''}",
    ]  # fmt: skip


GPU = [
    "case", "contender", "ms", "quartiles", "floor ms", "of floor", "ours ÷ this", "error",
    "pool MB", "device",
]  # fmt: skip


def _gpu(row: Mapping[str, Any]) -> list[str]:
    times = row["seconds"]
    return [
        row["case"], row["contender"], f"{1e3 * times['median']:.3f}",
        f"{1e3 * times['low']:.3f} – {1e3 * times['high']:.3f}", f"{1e3 * row['floor']:.3f}",
        f"{row['fraction']:.0%}", f"{row['ratio']:.2f}",
        "" if row["error"] is None else f"{row['error']:.0e}",
        f"{row['pool_bytes'] / 1e6:.0f}", row["device"],
    ]  # fmt: skip


# A field that only rows of one kind have: their heads and cells.
FORMS: Mapping[str, tuple[list[str], Callable[[Mapping[str, Any]], list[str]]]] = {
    "cpu_seconds": (CONTEST, _contest),
    "floor": (GPU, _gpu),
}


def _any(row: Mapping[str, Any]) -> list[str]:
    return [_told(value) for value in row.values()]


def _told(value: Any) -> str:
    """A value of JSON for people."""
    told: dict[type, Callable[[], str]] = {
        dict: lambda: ", ".join(f"{key} {_told(item)}" for key, item in value.items()),
        list: lambda: "; ".join(map(_told, value)),
        float: lambda: f"{value:.3g}",
    }
    return told.get(type(value), lambda: str(value))()


def _cases(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    for case, found in groupby(rows, key=lambda row: row["case"]):
        yield case, list(found)


def _machine_line(report: Mapping[str, Any]) -> str:
    machine = report["machine"]
    kernels = ", ".join(sorted({library["kernel"] or "?" for library in machine["blas"]}))
    versions = ", ".join(f"{name} {number}" for name, number in machine["packages"].items())
    disturbed = any(
        row.get("others", 0) > DISTURBING_SHARE
        for rows in report["suites"].values()
        for row in rows
    )
    mark = " `!`: other processes ran; these are times on processors." if disturbed else ""
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['threads']} threads for each "
        f"contender, BLAS kernel {kernels}; {versions}. Medians of `kfac-engine bench`, each "
        f"result checked first.{mark}"
    )


if __name__ == "__main__":
    main()
