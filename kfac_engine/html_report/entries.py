"""The layers, factors and settings of a log as checked values; a log may be hostile."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, prod
from typing import Any

from kfac_engine.html_report.run_log import Json, RunLog, number
from kfac_engine.printable import printable

_MOST_ENTRIES = 400
_MOST_CHARACTERS = 2000
_MOST_EIGENVALUES = 200


@dataclass(frozen=True, slots=True)
class LayerEntry:
    """A row in the table of layers."""

    parameters: str
    kind: str
    block: str
    factors: str
    numbers: float | None
    bytes: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class SpectrumEntry:
    """The spectrum of a factor.

    Attributes:
        layer: Parameters of the layer.
        factor: Symbol of the factor.
        shape: Shape of its average.
        count: Number of eigenvalues; None if they were not computed.
        ranks: Ranks of the listed eigenvalues, from 1 for the largest.
        eigenvalues: Eigenvalues at these ranks, descending.
        smallest: Smallest eigenvalue.
        largest: Largest eigenvalue.
        resolution: Rounding error of an eigenvalue, relative to the largest.
        damping: Damping of the factor, the smallest of all groups.
        below_damping: Number of eigenvalues below the damping.
        condition: Condition number; None if the factor is singular.
        damped_condition: Condition number with the damping.
    """

    layer: str
    factor: str
    shape: str
    count: int | None
    ranks: list[int]
    eigenvalues: list[float]
    smallest: float | None
    largest: float | None
    resolution: float
    damping: float | None
    below_damping: int | None
    condition: float | None
    damped_condition: float | None


def layer_entries(run: Json) -> tuple[list[LayerEntry], int]:
    """Return the layers of a run, and how many further layers are left out."""
    rows = _objects(run.get("layers"))
    return [
        LayerEntry(
            _names(row.get("parameters")),
            _text(row.get("kind")),
            _text(row.get("block")),
            ", ".join(_shape(shape) for shape in _list(row.get("factors"))),
            _number(row.get("numbers")),
            _number(row.get("bytes")),
            _text(row.get("reason")),
        )
        for row in rows[:_MOST_ENTRIES]
    ], max(0, len(rows) - _MOST_ENTRIES)


def spectrum_entries(spectra: Sequence[Json]) -> tuple[list[SpectrumEntry], int]:
    """Return the spectra of a run, and how many further spectra are left out."""
    entries = [_spectrum(row) for row in spectra[:_MOST_ENTRIES]]
    return entries, max(0, len(spectra) - _MOST_ENTRIES)


def named_texts(values: object) -> list[tuple[str, str]]:
    """Return a mapping of a log as pairs of texts."""
    if not isinstance(values, Mapping):
        return []
    items = list(values.items())[:_MOST_ENTRIES]
    return [(_text(name), _text(value)) for name, value in items]


def _spectrum(row: Json) -> SpectrumEntry:
    pairs = list(_pairs(row.get("eigenvalues")))
    return SpectrumEntry(
        _names(row.get("parameters")),
        _text(row.get("factor")),
        _shape(row.get("shape")),
        _whole(row.get("count")),
        [rank for rank, _ in pairs],
        [value for _, value in pairs],
        _number(row.get("smallest")),
        _number(row.get("largest")),
        _number(row.get("resolution")) or 0.0,
        _number(row.get("damping")),
        _whole(row.get("below_damping")),
        _number(row.get("condition")),
        _number(row.get("damped_condition")),
    )


def _pairs(values: object) -> Iterator[tuple[int, float]]:
    """Yield the pairs (rank, eigenvalue) of a spectrum."""
    for pair in _list(values)[:_MOST_EIGENVALUES]:
        entries = _list(pair)
        if len(entries) == 2:
            rank, value = _whole(entries[0]), _number(entries[1])
            if rank is not None and value is not None:
                yield rank, value


def _objects(values: object) -> list[Json]:
    return [value for value in _list(values) if isinstance(value, Mapping)]


def _list(values: object) -> list[Any]:
    return values if isinstance(values, list) else []


def _names(values: object) -> str:
    return _text(_list(values))


def _shape(values: object) -> str:
    return "×".join(_word(size) for size in _list(values)[:8]) or "scalar"


def _text(value: object) -> str:
    """Return a number, a text or a list of both as printable text of bounded length."""
    if isinstance(value, list):
        return ", ".join(_word(entry) for entry in value[:_MOST_ENTRIES])[:_MOST_CHARACTERS]
    return _word(value)[:_MOST_CHARACTERS]


def _word(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return f"{value:g}" if isinstance(value, float) else str(value)
    return printable(value) if isinstance(value, str) else "…"


def _number(value: object) -> float | None:
    return None if isinstance(value, bool) else number(value)


def _whole(value: object) -> int | None:
    whole = _number(value)
    return None if whole is None else int(whole)


# -- the refreshes of factors: when, how often, and at what cost -----------------------------------

# Fields of a log.
FACTORS = "factors"
_TIME = "seconds/inverses"
# Factors of most models have two axes; a log may be hostile.
_MOST_AXES, _LARGEST_SIZE = 8, 1 << 31


@dataclass(slots=True)
class FactorRefreshes:
    """The refreshes of one factor.

    Attributes:
        name: Name of the factor.
        records: Indices of the records of its refreshes, ascending.
        seconds: Seconds of these refreshes. The factors of a step are refreshed together, so that
            their time is divided in proportion to the cubes of their sizes.
    """

    name: str
    records: list[int] = field(default_factory=list)
    seconds: float = 0.0


def refreshes(log: RunLog) -> list[FactorRefreshes]:
    """Return the refreshes of each factor, in the order of their first refresh."""
    costs, times = _costs(log.run.get(FACTORS)), log.columns.get(_TIME)
    factors: dict[str, FactorRefreshes] = {}
    for index, names in enumerate(log.refreshed):
        time = 0.0 if times is None or not isfinite(times[index]) else float(times[index])
        total = sum(costs.get(name, 1.0) for name in names)
        for name in names:
            entry = factors.setdefault(name, FactorRefreshes(printable(name)))
            entry.records.append(index)
            entry.seconds += time * costs.get(name, 1.0) / total
    return list(factors.values())


def _costs(shapes: object) -> dict[str, float]:
    """Return the number of multiplications in a refresh, for each factor."""
    if not isinstance(shapes, Mapping):
        return {}
    return {
        name: float(prod(shape)) * shape[-1]
        for name, shape in shapes.items()
        if isinstance(shape, list)
        and 0 < len(shape) <= _MOST_AXES
        and all(type(size) is int and 0 < size < _LARGEST_SIZE for size in shape)
    }
