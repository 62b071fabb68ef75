"""What a run over the corpus gave, as a table and as a part of the documentation."""

import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version

BEGIN, END = "<!-- results: written by the tests -->", "<!-- end of results -->"
PACKAGES = ("torch", "transformers", "scikit-learn", "skl2onnx", "onnx", "onnxruntime", "numpy")


@dataclass(frozen=True)
class Row:
    """One exported model."""

    family: str  # of the corpus
    exporter: str  # that wrote it
    name: str  # of the case
    outcome: str  # ``"passed"``, ``"refused"`` or ``"failed"``
    worst: float  # largest relative error of a gradient
    reason: str  # why it was refused


def table(rows: Sequence[Row]) -> str:
    """A line for each family and exporter, then every model that did not pass."""
    lines = [
        "| family | exporter | models | passed | refused | failed | largest error |",
        "|---|---|---|---|---|---|---|",
    ]
    groups = sorted({(row.family, row.exporter) for row in rows}, key=_order(rows))
    lines += [
        _line(key, [row for row in rows if (row.family, row.exporter) == key]) for key in groups
    ]
    lines.append(_line(("all", ""), rows))
    refused = sorted({(row.name, row.exporter, row.reason) for row in rows if row.reason})
    if refused:
        lines += ["", "| refused | exporter | the error |", "|---|---|---|"]
        lines += [f"| {name} | {exporter} | {reason} |" for name, exporter, reason in refused]
    return "\n".join(lines)


def page(text: str, rows: Sequence[Row]) -> str:
    """``text`` with the results of this run in place of those of the last."""
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    header = f"Python {platform.python_version()}; {versions}."
    written = f"{BEGIN}\n{header}\n\n{table(rows)}\n{END}"
    return re.sub(f"{BEGIN}.*{END}", lambda _: written, text, flags=re.S)


def _order(rows: Sequence[Row]):  # type: ignore[no-untyped-def]
    first = {}
    for place, row in enumerate(rows):
        first.setdefault(row.family, place)
    return lambda key: (first[key[0]], key[1])


def _line(key: tuple[str, str], rows: Sequence[Row]) -> str:
    counts = [
        sum(row.outcome == outcome for row in rows) for outcome in ("passed", "refused", "failed")
    ]
    worst = max(row.worst for row in rows)
    cells = [*key, len(rows), *counts, f"{worst:.0e}"]
    return f"| {' | '.join(map(str, cells))} |"
