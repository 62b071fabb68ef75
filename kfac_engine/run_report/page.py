"""The page of a run: one file of HTML with its style, its script and its data."""

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from kfac_engine.run_report.charts import MOST_POINTS, Chart, Stages, charts, stages
from kfac_engine.run_report.entries import (
    SpectrumEntry,
    layer_entries,
    named_texts,
    spectrum_entries,
)
from kfac_engine.run_report.refreshes import FactorRefreshes, refreshes
from kfac_engine.run_report.run_log import Json, RunLog
from kfac_engine.run_report.tables import (
    MOST_FACTORS,
    layer_table,
    pair_table,
    refresh_table,
    spectrum_table,
    stage_table,
    summary,
)

_PACKAGE = "kfac_engine.run_report"


def page(log: RunLog) -> str:
    """Return the page of a run.

    The page loads nothing: its security policy forbids requests, and scripts other than its own.
    """
    lines, times, factors = charts(log), stages(log), refreshes(log)
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
        _section("Course of the run", _figures(lines)),
        _section("Time", _stage_figure(times, log.steps)) if times else "",
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
        _data(lines, times, spectra),
    )


def spectrum_page(title: str, spectra: Sequence[Json]) -> str:
    """Return a page with the spectra of factors.

    Args:
        title: Title of the page.
        spectra: Entries of the log.

    Returns:
        HTML that loads nothing.
    """
    entries, more = spectrum_entries(spectra)
    sections = [_section("Spectra of the factors", _spectra(entries))]
    return _document(title, "", _left_out(more, "factors"), sections, _data([], None, entries))


def _document(
    title: str, head: str, notes: Sequence[str], sections: Sequence[str], data: Mapping[str, Any]
) -> str:
    """Return a page; ``head`` and ``sections`` are HTML."""
    style, script = _asset("page.css"), _asset("page.js")
    return Template(_asset("page.html")).substitute(
        title=escape(title),
        style=style,
        style_hash=_hash(style),
        script=script,
        script_hash=_hash(script),
        head=head,
        notes="".join(f'<p class="note">{escape(note)}</p>' for note in notes),
        sections="\n".join(filter(None, sections)),
        data=_embedded(data),
    )


def _left_out(number: int, what: str) -> list[str]:
    return [f"{number:,} more {what} are not shown."] if number else []


def _data(
    lines: Sequence[Chart], times: Stages | None, spectra: Sequence[SpectrumEntry]
) -> dict[str, Any]:
    """Return the data of the charts for the script."""
    return {
        "charts": [asdict(chart) for chart in lines],
        "stages": None if times is None else asdict(times),
        "spectra": [
            {"title": layer[0].layer, "factors": [_curve(entry) for entry in layer]}
            for layer in _by_layer(spectra)
        ],
    }


def _curve(entry: SpectrumEntry) -> dict[str, Any]:
    """Return the eigenvalues of a factor that are above their rounding errors."""
    floor = entry.resolution * (entry.largest or 0.0)
    points = [
        (100 * (rank - 1) / max(1, (entry.count or 1) - 1), value)
        for rank, value in zip(entry.ranks, entry.eigenvalues, strict=True)
        if value > max(floor, 0.0)
    ]
    return {
        "name": entry.factor,
        "damping": entry.damping,
        "parts": [part for part, _ in points],
        "eigenvalues": [value for _, value in points],
    }


def _by_layer(spectra: Sequence[SpectrumEntry]) -> Sequence[Sequence[SpectrumEntry]]:
    """Return the computed spectra, those of one layer together."""
    layers: dict[str, list[SpectrumEntry]] = {}
    for entry in spectra:
        if entry.count:
            layers.setdefault(entry.layer, []).append(entry)
    return list(layers.values())


def _figures(lines: Sequence[Chart]) -> str:
    figures = (
        _figure(f"chart-{index}", chart.title, chart.note, wide=index == 0)
        for index, chart in enumerate(lines)
    )
    return f'<div class="charts">{"".join(figures)}</div>'


def _stage_figure(times: Stages, steps: int) -> str:
    note = (
        f"Mean time of a step over {len(times.last)} ranges of steps. The stage “other” is the "
        f"time between two steps, such as validation and reading of data."
    )
    figure = _figure("chart-stages", "Time of a step by stage", note, wide=True)
    return f'<div class="charts">{figure}</div>{stage_table(times, steps)}'


def _refreshes(factors: Sequence[FactorRefreshes], log: RunLog) -> str:
    note = (
        "The factors of a step are refreshed together. The seconds of each are its part of that "
        "time, in proportion to the cube of its size."
    )
    return f"<p>{note}</p>{refresh_table(factors, log.columns['step'])}"


def _spectra(spectra: Sequence[SpectrumEntry]) -> str:
    note = (
        "Eigenvalues of the factors, next to the damping that is added to "
        "them. Along eigenvectors of eigenvalues far below the damping, the damping alone is "
        "inverted. Eigenvalues below their rounding errors are not drawn."
    )
    figures = (
        _figure(f"spectrum-{index}", layer[0].layer, "")
        for index, layer in enumerate(_by_layer(spectra))
    )
    return (
        f'<p class="note">{note}</p><div class="charts small">{"".join(figures)}</div>'
        f"{spectrum_table(spectra)}"
    )


def _settings(log: RunLog) -> str:
    titles = {"settings": "Settings", "versions": "Versions"}
    return '<div class="pairs">{}</div>'.format(
        "".join(
            pair_table(title, ("name", "value"), named_texts(log.run.get(key)))
            for key, title in titles.items()
            if named_texts(log.run.get(key))
        )
    )


def _figure(key: str, title: str, note: str, *, wide: bool = False) -> str:
    kind = ' class="wide"' if wide else ""
    text = f"<p>{escape(note)}</p>" if note else ""
    return (
        f'<figure id="{key}"{kind}><figcaption><h3>{escape(title)}</h3>{text}</figcaption></figure>'
    )


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>\n{content}\n</section>"


def _asset(name: str) -> str:
    return files(_PACKAGE).joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """Return the source expression that allows this text in a security policy."""
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"


def _embedded(data: object) -> str:
    """Return JSON that cannot end the element that contains it, or begin a comment in it."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return "".join(_ESCAPES.get(character, character) for character in text)


_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}
