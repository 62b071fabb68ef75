"""The page of a run: one file of HTML with its style and its drawings."""

from base64 import b64encode
from collections.abc import Iterable, Sequence
from hashlib import sha256
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

import numpy as np

from kfac_engine.errors import InputError
from kfac_engine.html_report.charts import MOST_POINTS, Chart, Series, charts, stages
from kfac_engine.html_report.drawing import drawing, legend
from kfac_engine.html_report.entries import (
    FactorRefreshes,
    SpectrumEntry,
    layer_entries,
    named_texts,
    refreshes,
    spectrum_entries,
)
from kfac_engine.html_report.run_log import Json, RunLog, gathered, read_log
from kfac_engine.html_report.tables import (
    MOST_FACTORS,
    layer_table,
    refresh_table,
    spectrum_table,
    stage_table,
    summary,
    table,
)
from kfac_engine.system.writing import check_outputs, checked_path, write_file
from kfac_engine.training.history import History

_PACKAGE = "kfac_engine.html_report"


def page(log: RunLog) -> str:
    """Return the page of a run.

    The page loads nothing and has no script: its security policy forbids both.
    """
    lines, times, factors = charts(log), stages(log), refreshes(log)
    axes = ["step", "seconds"] if np.isfinite(log.columns["seconds"]).all() else ["step"]
    layers, more_layers = layer_entries(log.run)
    spectra, more_spectra = spectrum_entries(log.spectra)
    notes = [*log.notes, *_left_out(more_layers, "layers"), *_left_out(more_spectra, "factors")]
    notes += _left_out(max(0, len(factors) - MOST_FACTORS), "rows of refreshes")
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
        _section("Refreshes", _refreshes(factors, log)) if factors else "",
        _section("Spectra of the factors", _spectra(spectra)) if spectra else "",
        _section("Layers", layer_table(layers)) if layers else "",
        _section("Settings", _settings(log)) if log.run else "",
    ]
    model = dict(named_texts(log.run)).get("model", "")
    return _document(
        f"Training run: {model}" if model else "Training run",
        f'<dl class="summary">{summary(log, times)}</dl>',
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
    return Template(_asset("page.html")).substitute(
        title=escape(title),
        style=style,
        style_hash=_hash(style),
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


def _refreshes(factors: Sequence[FactorRefreshes], log: RunLog) -> str:
    note = (
        "The factors of a step are refreshed together. The seconds of each are its part of that "
        "time, in proportion to the cube of its size."
    )
    return f"<p>{note}</p>{refresh_table(factors, log.columns['step'])}"


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


def _hash(text: str) -> str:
    """Return the source expression that allows this text in a security policy."""
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"


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
        log = gathered(run.lines())
    elif isinstance(run, str | Path):
        check_outputs({"the page": checked_path(path)}, {"the log": checked_path(run)})
        log = read_log(checked_path(run))
    else:
        raise InputError(f"a report needs a History or the path of a log, got {run!r:.80}.")
    write_file(path, [page(log).encode()])
