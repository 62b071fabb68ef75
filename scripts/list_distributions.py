"""Writes the tables of docs/distributed.md from the cost model and the measured CPU times.

Run from the repository root after a change of the model, and after a measurement
by ``scripts.measure_ranks``: ``python -m scripts.list_distributions``. A test compares the tables.
"""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from kfac_engine.distributed.cost import DISTRIBUTIONS, rank_cost
from kfac_engine.distributed.sizes import Periods
from scripts.markdown import table
from tests.distributed.known_models import MODELS, model_size

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "distributed.md"
MEASURED = ROOT / "bench" / "results" / "2026-11-25-ranks.jsonl"
PERIODS = (Periods(10, 1), Periods(100, 10))
SIZES = {name: model_size(name) for name in MODELS}
_MANY = 1_000_000


def page(text: str) -> str:
    """Return the page with the tables that follow from the cost model, between their comments."""
    for name, lines in _tables():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        pattern = re.compile(rf"{re.escape(begin)}\n.*?{re.escape(end)}", re.S)
        body = "".join(f"{line}\n" for line in lines)
        text, count = pattern.subn(f"{begin}\n{body}{end}", text)
        assert count == 1, f"the page needs one table '{name}'"
    return text


def _tables() -> Iterator[tuple[str, Iterable[str]]]:
    """Yield the name and the lines of each table."""
    yield "traffic", table(("model", "refresh, statistics every", *DISTRIBUTIONS), _traffic())
    yield "memory", table(("model", "replicate", "shard"), _memory())
    heads = (
        "distribution", "ranks", "layer owners", "slowest rank, ms", "mean, ms", "plain ÷ slowest",
    )  # fmt: skip
    yield "measured", table(heads, _measured())


def _traffic() -> Iterator[tuple[str, ...]]:
    """Yield the megabytes that a rank sends in a step, among many ranks."""
    for name, size in SIZES.items():
        for periods in PERIODS:
            costs = (rank_cost(size, kind, _MANY, periods) for kind in DISTRIBUTIONS)
            times = f"{periods.refresh_every}, {periods.covariance_every}"
            yield name, times, *(f"{cost.traffic / 1e6:.0f}" for cost in costs)


def _memory() -> Iterator[tuple[str, ...]]:
    """Yield the gigabytes of averages and inverses on the rank that has most, of 64."""
    for name, size in SIZES.items():
        costs = (rank_cost(size, kind, 64) for kind in ("replicate", "shard"))
        yield name, *(f"{cost.memory / 1e9:.2f}" for cost in costs)


def _measured() -> Iterator[tuple[str, ...]]:
    """Yield the CPU time of a step of one rank, outside of collectives."""
    lines = MEASURED.read_text(encoding="utf-8").splitlines()
    _, plain, *rows = map(json.loads, lines)  # the first line describes the machine
    for row in (plain, *rows):
        times = (f"{row[key]:.1f}" for key in ("slowest", "mean"))
        ratio = plain["slowest"] / row["slowest"]
        name = row["distribution"] or "no communicator"
        yield name, f"{row['ranks']}", f"{row['layer_owners']}", *times, f"{ratio:.2f}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
