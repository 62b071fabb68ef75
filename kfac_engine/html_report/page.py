"""Writes a run's report as one HTML file with its style, drawings and tables."""

from base64 import b64encode
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from html import escape
from importlib.resources import files
from math import isnan
from pathlib import Path
from string import Template
from typing import TypeAlias

import numpy as np

from kfac_engine.errors import InputError
from kfac_engine.html_report.charts import (
    CURVATURE_STAGES,
    MOST_POINTS,
    VALIDATION,
    Chart,
    Series,
    Stages,
    charts,
    constants,
    drawing,
    legend,
    stage_times,
)
from kfac_engine.html_report.run_log import (
    Json,
    LayerEntry,
    RunLog,
    SpectrumEntry,
    layer_entries,
    log_of_lines,
    named_texts,
    read_log,
    spectrum_entries,
)
from kfac_engine.summary import binary_size
from kfac_engine.system.writing import check_outputs, checked_path, write_file
from kfac_engine.training.history import History

# A head; heads that start with a blank belong to numbers.
Cells: TypeAlias = Sequence[str]
_NONE = "–"


def summary_terms(log: RunLog, stages: Stages | None) -> str:
    """Return the most important numbers of a run as a list of terms."""
    columns = log.columns
    last = {name: column[-1] for name, column in columns.items()}
    pairs = [("steps", f"{int(last['step']):,}")]
    if "epoch" in last and not isnan(last["epoch"]):
        pairs.append(("epochs begun", f"{int(last['epoch']) + 1:,}"))
    if not isnan(last["seconds"]):
        pairs.append(("time", duration(last["seconds"])))
    if "loss" in columns:
        pairs.append(("last loss of a batch", shown_number(_last(columns["loss"]))))
    if VALIDATION in columns:
        validation = columns[VALIDATION]
        pairs.append(("last validation loss", shown_number(_last(validation))))
        if np.isfinite(validation).any():
            best = int(np.nanargmin(validation))
            where = f"{shown_number(validation[best])} at step {int(columns['step'][best]):,}"
            pairs.append(("lowest validation loss", where))
    pairs += [(title.lower(), shown_number(value)) for title, value in constants(log).items()]
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


def layer_table(layers: Sequence[LayerEntry]) -> str:
    """Return the layers with their blocks."""
    rows = [
        (
            layer.parameters,
            layer.kind,
            f"{layer.block}, {layer.reason}" if layer.reason else layer.block,
            layer.factors,
            _or_none(layer.numbers, lambda n: f"{int(n):,}"),
            _or_none(layer.bytes, binary_size),
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


def shown_number(value: float | None) -> str:
    """Return a number with four digits."""
    return _NONE if value is None or isnan(value) else f"{value:.4g}"


def duration(seconds: float) -> str:
    """Return a time in the units of a clock."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _cells(row: Cells, classes: Sequence[str]) -> str:
    first, *others = [escape(text) for text in row]
    cells = zip(others, classes[1:], strict=True)
    return f'<th scope="row">{first}</th>' + "".join(f"<td{kind}>{c}</td>" for c, kind in cells)


def _spectrum_row(entry: SpectrumEntry) -> Cells:
    where = entry.layer, entry.factor, entry.shape
    if entry.count is None:
        return (*where, "not computed", *[_NONE] * 5)
    below = _or_none(entry.below_damping, lambda n: f"{int(n):,} of {entry.count:,}")
    condition = "singular" if entry.condition is None else shown_number(entry.condition)
    return (
        *where, shown_number(entry.largest), shown_number(entry.smallest),
        shown_number(entry.damping), below, condition, shown_number(entry.damped_condition),
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


_PACKAGE = "kfac_engine.html_report"


def page(log: RunLog) -> str:
    """Return the page of a run.

    The page loads nothing and has no script: its security policy forbids both.
    """
    lines, times = charts(log), stage_times(log)
    axes = ["step", "seconds"] if np.isfinite(log.columns["seconds"]).all() else ["step"]
    layers, more_layers = layer_entries(log.run)
    spectra, more_spectra = spectrum_entries(log.spectra)
    notes = [*log.notes, *_left_out(more_layers, "layers"), *_left_out(more_spectra, "factors")]
    if log.steps > MOST_POINTS:
        notes.append(
            f"The charts have at most {MOST_POINTS:,} points a line. Each shortened line has the "
            f"smallest and the largest value of ranges of equal length."
        )
    sections = [
        _section("Course of the run", _grid(_figure(chart, axes) for chart in lines)),
        _section("Time", f"{_grid([_figure(times.chart, axes)])}{stage_table(times, log.steps)}")
        if times
        else "",
        _section("Spectra of the factors", _spectra(spectra)) if spectra else "",
        _section("Layers", layer_table(layers)) if layers else "",
        _section("Settings", _settings(log)) if log.run else "",
    ]
    model = dict(named_texts(log.run)).get("model", "")
    return _document(
        f"Training run: {model}" if model else "Training run",
        f'<dl class="summary">{summary_terms(log, times)}</dl>',
        notes,
        sections,
    )


def spectrum_page(title: str, spectra: Sequence[Json]) -> str:
    """Return a page with the spectra of factors."""
    entries, more = spectrum_entries(spectra)
    sections = [_section("Spectra of the factors", _spectra(entries))]
    return _document(title, "", _left_out(more, "factors"), sections)


def _document(title: str, head: str, notes: Sequence[str], sections: Sequence[str]) -> str:
    """Return a page; ``head`` and ``sections`` are HTML."""
    style = _asset("page.css")
    # The source expression that allows this style in the security policy of the page.
    style_hash = f"sha256-{b64encode(sha256(style.encode()).digest()).decode()}"
    return Template(_asset("page.html")).substitute(
        title=escape(title),
        style=style,
        style_hash=style_hash,
        head=head,
        notes="".join(f'<p class="note">{escape(note)}</p>' for note in notes),
        sections="\n".join(filter(None, sections)),
    )


def _left_out(number: int, what: str) -> list[str]:
    return [f"{number:,} more {what} are not shown."] if number else []


def _by_layer(spectra: Sequence[SpectrumEntry]) -> Sequence[Sequence[SpectrumEntry]]:
    """Return the computed spectra, grouped by layer."""
    layers: dict[str, list[SpectrumEntry]] = {}
    for entry in spectra:
        if entry.count:
            layers.setdefault(entry.layer, []).append(entry)
    return list(layers.values())


def _grid(figures: Iterable[str]) -> str:
    return f'<div class="charts">{"".join(figures)}</div>'


def _spectra(spectra: Sequence[SpectrumEntry]) -> str:
    note = (
        "Eigenvalues of the factors, next to the damping that is added to "
        "them. Along eigenvectors whose eigenvalues are far below the damping, the damping alone "
        "is inverted. Eigenvalues below their rounding errors are not drawn."
    )
    figures = _grid(map(_spectrum, _by_layer(spectra)))
    return f'<p class="note">{note}</p>{figures}{spectrum_table(spectra)}'


def _spectrum(layer: Sequence[SpectrumEntry]) -> str:
    """Return the eigenvalues of a layer's factors that are above their rounding errors."""
    lines = []
    for entry in layer:
        floor = max(0.0, entry.resolution * (entry.largest or 0.0))
        rows = zip(entry.ranks, entry.eigenvalues, strict=True)
        last = max(1, (entry.count or 1) - 1)
        pairs = [(100 * (rank - 1) / last, value) for rank, value in rows if value > floor]
        parts, values = [part for part, _ in pairs], [value for _, value in pairs]
        lines.append(Series(entry.factor, "line", parts, [], values))
    dampings = [(e.damping, f"damping of {e.factor}") for e in layer if e.damping and e.damping > 0]
    chart = Chart(layer[0].layer, "", "", True, lines, dampings)
    return _figure(chart, ["step"], "% of the eigenvalues, from the largest")


def _settings(log: RunLog) -> str:
    titles = {"settings": "Settings", "versions": "Versions"}
    return '<div class="pairs">{}</div>'.format(
        "".join(
            table(title, ("name", "value"), named_texts(log.run.get(key)))
            for key, title in titles.items()
            if named_texts(log.run.get(key))
        )
    )


def _figure(chart: Chart, axes: Sequence[str], label: str = "") -> str:
    """Return a figure: a drawing for each axis, of which the style shows one, and its points."""
    text = f"<p>{escape(chart.note)}</p>" if chart.note else ""
    plots = "".join(
        f'<div class="plot {axis if len(axes) > 1 else ""}">'
        f"{drawing(chart, axis, label or axis)}</div>"
        for axis in axes
    )
    ends = [(line.name, line.value[-1]) for line in chart.series if line.value]
    last = " · ".join(f"{name} {value:.5g}" for name, value in ends if value is not None)
    tables = "".join(
        table(
            f"{chart.title}: {line.name}",
            [*(label or axis for axis in axes), f"value, {chart.unit}" if chart.unit else "value"],
            [
                ["" if value is None else f"{value:.8g}" for value in row]
                for row in zip(*(getattr(line, axis) for axis in axes), line.value, strict=True)
            ],
        )
        for line in chart.series
    )
    return (
        f"<figure><figcaption><h3>{escape(chart.title)}</h3>{text}</figcaption>"
        f'{legend(chart.series)}{plots}<p class="readout">last: {escape(last)}</p>'
        f"<details><summary>Table of the points</summary>{tables}</details></figure>"
    )


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>\n{content}\n</section>"


def _asset(name: str) -> str:
    return files(_PACKAGE).joinpath(name).read_text(encoding="utf-8")


def report(run: History | str | Path, path: str | Path) -> None:
    """Write the report of a training run: one HTML page, which loads nothing.

    The page shows losses, metrics, learning rate, damping and reduction ratio against steps and
    seconds, the time of each stage, the spectra of the factors, the layers and the settings.

    Args:
        run: The result of ``fit``, or the path of its log.
        path: File of the page, which is replaced whole or not at all.

    Raises:
        InputError: The log is missing or damaged, or the page cannot be written.
    """
    if isinstance(run, History):
        log = log_of_lines(run.lines())
    elif isinstance(run, str | Path):
        check_outputs({"the page": checked_path(path)}, {"the log": checked_path(run)})
        log = read_log(checked_path(run))
    else:
        raise InputError(f"a report needs a History or the path of a log, got {run!r:.80}.")
    write_file(path, [page(log).encode()])
