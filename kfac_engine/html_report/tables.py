"""The tables of the run report as HTML; every text from the log is escaped."""

from collections.abc import Callable, Sequence
from html import escape
from math import isnan
from typing import TypeAlias

import numpy as np

from kfac_engine._types import Array
from kfac_engine.html_report.charts import CURVATURE_STAGES, VALIDATION, Stages, constants
from kfac_engine.html_report.entries import FactorRefreshes, LayerEntry, SpectrumEntry
from kfac_engine.html_report.run_log import RunLog

# A head; heads that start with a blank belong to numbers.
Cells: TypeAlias = Sequence[str]
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")
_NONE = "–"
# Rows of the table of refreshes.
MOST_FACTORS = 400


def summary(log: RunLog, stages: Stages | None) -> str:
    """Return the most important numbers of a run as a list of terms."""
    columns = log.columns
    last = {name: column[-1] for name, column in columns.items()}
    pairs = [("steps", f"{int(last['step']):,}")]
    if "epoch" in last and not isnan(last["epoch"]):
        pairs.append(("epochs begun", f"{int(last['epoch']) + 1:,}"))
    if not isnan(last["seconds"]):
        pairs.append(("time", duration(last["seconds"])))
    if "loss" in columns:
        pairs.append(("last loss of a batch", number(_last(columns["loss"]))))
    if VALIDATION in columns:
        validation = columns[VALIDATION]
        pairs.append(("last validation loss", number(_last(validation))))
        if np.isfinite(validation).any():
            best = int(np.nanargmin(validation))
            where = f"{number(validation[best])} at step {int(columns['step'][best]):,}"
            pairs.append(("lowest validation loss", where))
    pairs += [(title.lower(), number(value)) for title, value in constants(log).items()]
    share = _curvature_share(stages)
    if share is not None:
        pairs.append(("time for curvature", f"{100 * share:.1f} %"))
    skipped = int(np.nansum(columns.get("skipped", np.zeros(1))))
    if skipped:
        pairs.append(("skipped batches", f"{skipped:,}"))
    return "".join(
        f"<div><dt>{escape(term)}</dt><dd>{escape(value)}</dd></div>" for term, value in pairs
    )


def stage_table(stages: Stages, steps: int) -> str:
    """Return the time of the run by stage."""
    total = sum(stages.totals.values()) or 1.0
    rows = [
        (name, f"{seconds:.3f}", f"{1e3 * seconds / steps:.3f}", f"{100 * seconds / total:.1f}")
        for name, seconds in stages.totals.items()
    ]
    heads = ("stage", " seconds", " mean of a step, ms", " share, %")
    return table("Time of the run by stage", heads, rows)


def refresh_table(factors: Sequence[FactorRefreshes], steps: Array) -> str:
    """Return the number and the cost of the refreshes of each factor."""
    total = sum(factor.seconds for factor in factors) or 1.0
    rows = [
        (
            f"{row}", factor.name, f"{len(factor.records)}",
            f"{np.diff(steps[factor.records]).mean():.1f}" if len(factor.records) > 1 else _NONE,
            f"{steps[factor.records[-1]]:.0f}", f"{factor.seconds:.4f}",
            f"{100 * factor.seconds / total:.1f}",
        )
        for row, factor in enumerate(factors[:MOST_FACTORS], start=1)
    ]  # fmt: skip
    heads = (
        " number", "factor", " refreshes", " mean interval, steps", " last step", " seconds",
        " share, %",
    )  # fmt: skip
    return table("Refreshes of the factors", heads, rows)


def layer_table(layers: Sequence[LayerEntry]) -> str:
    """Return the layers with their blocks."""
    rows = [
        (
            layer.parameters,
            layer.kind,
            f"{layer.block}, {layer.reason}" if layer.reason else layer.block,
            layer.factors,
            _or_none(layer.numbers, lambda n: f"{int(n):,}"),
            _or_none(layer.bytes, size),
        )
        for layer in layers
    ]
    heads = ("parameters", "kind", "approximation", "factors", " numbers", " memory of the factors")
    return table("Layers", heads, rows)


def spectrum_table(spectra: Sequence[SpectrumEntry]) -> str:
    """Return the condition numbers of the factors."""
    heads = (
        "layer", "factor", "shape", " largest eigenvalue", " smallest", " damping",
        " below the damping", " condition", " condition with damping",
    )  # fmt: skip
    return table("Factors", heads, [_spectrum_row(entry) for entry in spectra])


def table(title: str, heads: Cells, rows: Sequence[Cells]) -> str:
    """Return an HTML table in a region that can be scrolled; texts of cells are escaped.

    Columns whose heads start with a blank have numbers.
    """
    classes = [' class="number"' if head.startswith(" ") else "" for head in heads]
    head = "".join(
        f'<th scope="col"{kind}>{escape(text.strip())}</th>'
        for text, kind in zip(heads, classes, strict=True)
    )
    body = "".join(f"<tr>{_cells(row, classes)}</tr>\n" for row in rows)
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(title)}">'
        f"<table><caption>{escape(title)}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>\n{body}</tbody></table></div>"
    )


def number(value: float | None) -> str:
    """Return a number with four digits."""
    return _NONE if value is None or isnan(value) else f"{value:.4g}"


def duration(seconds: float) -> str:
    """Return a time in the units of a clock."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def size(count: float) -> str:
    """Return a number of bytes with a binary unit."""
    unit = 0
    while count >= 1000 and unit < len(_BINARY) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.3g} {_BINARY[unit]}"


def _cells(row: Cells, classes: Sequence[str]) -> str:
    first, *others = [escape(text) for text in row]
    cells = zip(others, classes[1:], strict=True)
    return f'<th scope="row">{first}</th>' + "".join(f"<td{kind}>{c}</td>" for c, kind in cells)


def _spectrum_row(entry: SpectrumEntry) -> Cells:
    where = entry.layer, entry.factor, entry.shape
    if entry.count is None:
        return (*where, "not computed", *[_NONE] * 5)
    below = _or_none(entry.below_damping, lambda n: f"{int(n):,} of {entry.count:,}")
    condition = "singular" if entry.condition is None else number(entry.condition)
    return (
        *where, number(entry.largest), number(entry.smallest), number(entry.damping),
        below, condition, number(entry.damped_condition),
    )  # fmt: skip


def _curvature_share(stages: Stages | None) -> float | None:
    """Return the share of the time that a run spends on curvature; None without curvature."""
    times = {} if stages is None else stages.totals
    spent = [times[stage] for stage in CURVATURE_STAGES if stage in times]
    return sum(spent) / sum(times.values()) if spent and sum(times.values()) else None


def _last(values: object) -> float:
    """Return the last finite value; NaN if there is none."""
    array = np.asarray(values)
    defined = array[np.isfinite(array)]
    return float(defined[-1]) if len(defined) else float("nan")


def _or_none(value: float | None, show: Callable[[float], str]) -> str:
    return _NONE if value is None else show(value)
