"""Writes the tables of measurements next to each JSON file, to the README and to the docs.

    python -m scripts.bench_tables

Reads ``bench/results/*.json``. The README and ``docs/performance.md`` show the newest
``*-cpu.json``; ``bench/results/goals.md`` compares it with the newest ``*-cpu-haswell.json``.
The section about training shows the newest ``*-train.json``, and the section about uses of
curvature the newest ``*-uses.json``.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from kfac_engine.bench import build, gpu, memory, models, scaling
from kfac_engine.bench.contenders import OURS, OURS_PLAIN
from kfac_engine.bench.measure import DISTURBING_SHARE
from kfac_engine.bench.report import Form, milliseconds, spread_cells
from kfac_engine.bench.roofline import Roofline, SuiteConditions
from kfac_engine.bench.training import summary as training
from scripts import bench_goals, training_tables
from scripts.markdown import table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
README = ROOT / "README.md"
PERFORMANCE, GPU_PAGE = ROOT / "docs" / "performance.md", ROOT / "docs" / "gpu.md"
MODELS = ROOT / "docs" / "models.md"
GOALS = RESULTS / "goals.md"
NEWEST, OLDER_KERNEL, TRAINING = "*-cpu.json", "*-cpu-haswell.json", "*-train.json"
# Sections of pages by the name of their marks: file, and lines from its suites.
SECTIONS: Mapping[str, tuple[str, Callable[[Any], Iterable[str]]]] = {
    "training": (TRAINING, lambda suites: training_tables.comparisons(suites["train"])),
    "tables": ("*-tables.json", lambda suites: training_tables.quotients(suites["train"])),
    "modern": ("*-modern.json", lambda suites: training_tables.quotients(suites["train"])),
    "exact": ("*-exact.json", lambda suites: training_tables.quotients(suites["train"])),
    "uses": ("*-uses.json", lambda suites: _uses_section(suites)),
    "models": ("*-models.json", lambda suites: _table(suites["models"])),
    "gpu": ("*-gpu.json", lambda suites: _gpu_section(suites["gpu"])),
}

# Rows of the README about training, as label, task and rival of ``*-train.json``.
SHOWN_TRAINING = (
    ("autoencoder, Fashion-MNIST", "autoencoder", "adam"),
    ("ResNet, Fashion-MNIST", "resnet", "adam"),
    ("transformer, text", "transformer", "adam"),
)
# Rows of the README about steps, as label, suite, and a part of the name of the case.
SHOWN = (
    ("MLP 784-1024-512-256-10, batch 512", "step", "mlp, batch 512, factors 1,"),
    ("ResNet-20, batch 128", "step", "resnet20, batch 128, factors 1,"),
    ("transformer, 4 layers of 256, batch 32", "step", "transformer, batch 32, factors 1,"),
)
_USE_HEADS = "use", "CPU ms", "peer", "its CPU ms", "ours ÷ peer", "peak MB", "its peak MB"
# Columns of the README, each with the contenders whose fastest time it shows.
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "PyTorch": ("torch", "torch-by-example", "curvlinops"),
    "JAX": ("jax", "kfac-jax"),
}


def main() -> None:
    """Write all tables."""
    for path in sorted(RESULTS.glob("*.json")):
        path.with_suffix(".md").write_text(page(load(path)), encoding="utf-8")
    GOALS.write_text(goals(), encoding="utf-8")
    pages = (
        (README, readme),
        (PERFORMANCE, performance),
        (GPU_PAGE, with_sections),
        (MODELS, with_sections),
    )
    for page_with_table, renewed in pages:
        text = page_with_table.read_text(encoding="utf-8")
        page_with_table.write_text(renewed(text), encoding="utf-8")


def load(path: Path) -> Mapping[str, Any]:
    """Return a report of ``bench --json``."""
    report: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return report


def readme(text: str) -> str:
    """Return the README with the newest measurements between its marks."""
    newest = _newest(NEWEST)
    assert newest is not None, "no measurements"
    report = load(newest)
    suites = {name: list(_cases(rows)) for name, rows in report["suites"].items()}
    chosen = [
        (words, times)
        for words, suite, part in SHOWN
        for case, times in suites.get(suite, ())
        if part in case
    ]
    texts = [(words, *_beside_columns(times)) for words, times in chosen]
    lines = [
        *_training_summary(),
        "The second table has the milliseconds of a step. Each step updates the factors, and every "
        "tenth step updates the inverses. The other columns have the time of the fastest "
        "implementation in each library, divided by ours.",
        "",
        *table(("network", "ours, ms", *COLUMNS), texts),
        "",
        _extremes(suites),
        "",
        f"{_machine_line(report)} All measurements: "
        f"[{newest.stem}](bench/results/{newest.stem}.md).",
    ]
    return _between_marks(text, lines)


def _training_summary() -> list[str]:
    """Return the lines of the README about the newest measurements of training."""
    newest = _newest(TRAINING)
    if newest is None:
        return []
    return [
        "The first table has the CPU seconds that training takes on one thread until it reaches "
        "the lowest validation loss of tuned Adam. K-FAC has its default settings. The numbers are "
        "medians of three seeds, from "
        f"[{newest.stem}](bench/results/{newest.stem}.md).",
        "",
        *training_tables.summary(load(newest)["suites"]["train"], SHOWN_TRAINING),
        "",
    ]


def performance(text: str) -> str:
    """Return ``docs/performance.md`` with the newest measurements between its marks."""
    newest = _newest(NEWEST)
    assert newest is not None, "no measurements"
    report = load(newest)
    steps = [
        (case, *list(_beside_columns(times))[:1], *_beside_libraries(times))
        for case, times in _cases(report["suites"]["step"])
    ]
    lines = [
        *table(("step", "ms", "PyTorch", "kfac-jax", "curvlinops"), steps),
        "",
        *bench_goals.table(report["suites"], missed=True),
        "",
        f"From [{newest.stem}](../bench/results/{newest.stem}.md): {_machine_line(report)}",
    ]
    return with_sections(_between_marks(text, lines))


def with_sections(text: str) -> str:
    """Return a page with the newest measurements of its ``SECTIONS``."""
    for name, (pattern, section) in SECTIONS.items():
        newest = _newest(pattern)
        if newest is not None:
            report = load(newest)
            source = f"From [{newest.stem}](../bench/results/{newest.stem}.md): "
            lines = [*section(report["suites"]), "", f"{source}{_hardware(report)}."]
            text = _between_marks(text, lines, name)
    return text


def _gpu_section(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Return a table of the work of a GPU, without single layers."""
    lines = []
    for case, alike in groupby(rows, key=lambda row: row["case"]):
        ours, *others = alike
        if case.startswith("A: "):
            continue
        beside = ", ".join(f"{1e3 * row['seconds']['median']:.2f}" for row in others)
        milli = f"{1e3 * ours['seconds']['median']:.3g}"
        lines.append((case, ours["contender"], milli, f"{ours['fraction']:.0%}", beside))
    return table(("work", "backend", "ms", "of floor", "torch, ms"), lines)


def _beside_libraries(times: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the times of libraries divided by the time of the package."""
    ours = times[OURS]["seconds"]["median"]
    rows = (times.get(name) for name in ("torch", "kfac-jax", "curvlinops"))
    return [f"{row['seconds']['median'] / ours:.1f} ×" if row else "" for row in rows]


def goals() -> str:
    """Return a page with all goals, measured with two kernels of BLAS."""
    newest, older = _newest(NEWEST), _newest(OLDER_KERNEL)
    assert newest is not None, "no measurements"
    report = load(newest)
    lines = [
        "# Goals of the package on a CPU",
        "",
        "Each row divides the time of the package by the time of another contender, or names the "
        "measured quantity. Values above the bound are bold. Written by "
        "`python -m scripts.bench_tables`.",
        "",
        *bench_goals.table(report["suites"], load(older)["suites"] if older else None),
        "",
        f"From [{newest.stem}]({newest.stem}.md): {_machine_line(report)}",
    ]
    if older is not None:
        lines[-1] += f" Older kernel: [{older.stem}]({older.stem}.md)."
    return "\n".join(lines) + "\n"


def _newest(pattern: str) -> Path | None:
    return max(RESULTS.glob(pattern), default=None)


def _between_marks(text: str, lines: Sequence[str], name: str = "measurements") -> str:
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    marked = "\n".join([begin, "", *lines, end])
    return re.sub(f"{re.escape(begin)}.*{re.escape(end)}", lambda _: marked, text, flags=re.S)


def page(report: Mapping[str, Any]) -> str:
    """Return every row of a report as Markdown."""
    machine = report["machine"]
    facts = [f"- {name}: {_as_text(value)}" for name, value in machine.items() if value]
    courses = report.get("course", {})
    tables = [
        line
        for name, rows in report["suites"].items()
        for line in (f"## {name}\n", *_course(courses.get(name)), *_table(rows), "")
    ]
    return "\n".join(["# Measurements", "", *facts, "", *tables]).rstrip() + "\n"


def _course(course: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield a sentence about the run of a suite."""
    if course is not None:
        run = _restored(course)
        gaps = f" Not measured: {'; '.join(run.missing)}." if run.missing else ""
        yield (
            f"Took {run.seconds:.0f} s. Ceiling before it {run.before}, after it "
            f"{run.after}, at best {run.best}.{gaps}\n"
        )


def _restored(course: Mapping[str, Any]) -> SuiteConditions:
    ceilings = {when: Roofline(**course[when]) for when in ("before", "after", "best")}
    return SuiteConditions(seconds=course["seconds"], missing=tuple(course["missing"]), **ceilings)


def _beside_columns(times: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield the time of the package, and the ratio of the fastest contender of each column."""
    disturbed = any(row["others"] > DISTURBING_SHARE for row in times.values())
    seconds = {who: row["seconds"]["median"] for who, row in times.items()}
    ours = seconds[OURS]
    yield f"{milliseconds(ours)}{' !' if disturbed else ''}"
    for group in COLUMNS.values():
        others = [seconds[who] for who in group if who in seconds]
        yield f"{min(others) / ours:.1f} ×" if others else ""


def _extremes(suites: Mapping[str, Sequence[tuple[str, Mapping[str, Mapping[str, Any]]]]]) -> str:
    """Return a sentence about the best and the worst ratio over all cases."""
    quotients = []
    for suite, cases in suites.items():
        for case, times in cases:
            seconds = {
                who: row["seconds"]["median"] for who, row in times.items() if who != OURS_PLAIN
            }
            ours = seconds.pop(OURS, None)
            if ours is not None and seconds:
                other = min(seconds, key=lambda who: seconds[who])
                quotients.append((seconds[other] / ours, f"{suite}, {case}: *{other}*"))
    (worst, where), (best, there) = min(quotients), max(quotients)
    ahead = sum(quotient > 1 for quotient, _ in quotients)
    return (
        f"kfac_engine is the fastest in {ahead} of {len(quotients)} cases; the ratios range from "
        f"{worst:.2f} × ({where}) to {best:.1f} × ({there})."
    )


def _table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for number, (mark, alike) in enumerate(groupby(rows, key=_mark)):
        kind = list(alike)
        form = FORMS.get(mark, Form(list(kind[0]), (), _any))
        if number:
            yield ""
        yield from table((*form.texts, *form.numbers), map(form.cells, kind))


def _mark(row: Mapping[str, Any]) -> str:
    """Return the key of ``FORMS`` for a row; empty for a row without a key."""
    return next((mark for mark in FORMS if mark in row), "")


def _comparison(row: Mapping[str, Any]) -> list[str]:
    rate = row["rate"]
    return [
        row["case"], row["contender"], *spread_cells(row["seconds"]), str(row["runs"]),
        milliseconds(row["cpu_seconds"]), f"{row['ratio']:.2f}",
        f"{2e-9 * rate:.0f}" if rate else "", f"{row['fraction']:.0%}" if rate else "",
        f"{row['peak_bytes'] / 1e6:.0f}",
        " / ".join(f"{error:.0e}" for error in row["errors"].values()),
        f"{row['others']:.0%}{' !' if row['others'] > DISTURBING_SHARE else ''}",
    ]  # fmt: skip


_COMPARISON = Form(
    ("case", "contender"),
    (
        "ms", "quartiles", "runs", "cpu ms", "ours ÷ this", "GFLOP/s", "of ceiling", "peak MB",
        "error", "others",
    ),
    _comparison,
)  # fmt: skip
# Map from a field that only rows of one kind have to the form of its table.
FORMS: Mapping[str, Form] = {
    "optimizer": models.FORM,
    "cpu_seconds": _COMPARISON,
    "floor": gpu.FORM,
    "announced": memory.FORM,
    "exponent": scaling.FORM,
    "stage": build.FORM,
    "losses": training.RESULTS,
    training_tables.RIVAL: training.COMPARISONS,
}


def _any(row: Mapping[str, Any]) -> list[str]:
    return [_as_text(value) for value in row.values()]


def _as_text(value: Any) -> str:
    """Return a value of JSON as text."""
    texts: dict[type, Callable[[], str]] = {
        dict: lambda: ", ".join(f"{key} {_as_text(item)}" for key, item in value.items()),
        list: lambda: "; ".join(map(_as_text, value)),
        float: lambda: f"{value:.3g}",
    }
    return texts.get(type(value), lambda: str(value))()


def _cases(
    rows: Sequence[Mapping[str, Any]],
) -> Iterator[tuple[str, dict[str, Mapping[str, Any]]]]:
    """Yield each case with its rows by contender."""
    compared = [row for row in rows if "contender" in row]
    for case, group in groupby(compared, key=lambda row: row["case"]):
        yield case, {row["contender"]: row for row in group}


def _machine_line(report: Mapping[str, Any]) -> str:
    disturbed = any(
        row.get("others", 0) > DISTURBING_SHARE
        for rows in report["suites"].values()
        for row in rows
    )
    mark = " At `!`, other processes ran, so the times are too long." if disturbed else ""
    courses = report.get("course", {})
    slow = [name for name, course in courses.items() if _restored(course).slowed]
    if slow:
        mark += f" The host slowed the machine down during {', '.join(slow)}: all times are longer."
    return (
        f"{_hardware(report)}; {report['machine']['threads']} threads for each contender. Medians "
        f"of `kfac-engine bench`, each result checked first.{mark}"
    )


def _hardware(report: Mapping[str, Any]) -> str:
    """Return the processor and the libraries of a report."""
    machine = report["machine"]
    kernels = ", ".join(sorted({library["kernel"] or "?" for library in machine["blas"]}))
    versions = ", ".join(f"{name} {number}" for name, number in machine["packages"].items())
    blas = f"BLAS kernel {kernels}, " if kernels else ""
    return f"{machine['processor']}, {machine['cores']} cores, {blas}{versions}"


def _uses_section(suites: bench_goals.Suites) -> Iterator[str]:
    """Yield the table of the uses, and the goals that they miss."""
    yield from _uses(suites["uses"])
    yield ""
    yield from bench_goals.table(suites, missed=True)


def _uses(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
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
    return table(_USE_HEADS, lines)


if __name__ == "__main__":
    main()
