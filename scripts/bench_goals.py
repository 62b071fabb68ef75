"""Compares the measurements on a CPU with the goals of the package.

``bench_tables`` writes all goals into ``bench/results/goals.md`` and the missed goals into
``docs/performance.md``.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from kfac_engine.bench.contenders import ALWAYS, DEFINITION, OURS, OURS_PLAIN
from kfac_engine.bench.jobs import SELDOM
from kfac_engine.bench.scaling import MARGIN
from scripts import markdown

# The name of the fastest peer that is a library, instead of a contender.
BEST = "the best library"
_NO_LIBRARY = "torch-by-example"
_MEGABYTE = 1e6

# The rows of a suite in a JSON report, and all suites by name.
Rows: TypeAlias = Sequence[Mapping[str, Any]]
Suites: TypeAlias = Mapping[str, Rows]


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound on a quantity of the package divided by that of another contender.

    ``case`` is a part of the names of the cases, ``quantity`` a key of ``QUANTITIES``.
    """

    suite: str
    case: str
    other: str
    bound: float
    quantity: str = "time"


# Name of a quantity to its value in a row. CPU time is that of one thread, which other processes
# hardly change.
QUANTITIES: Mapping[str, Callable[[Mapping[str, Any]], float]] = {
    "time": lambda row: float(row["seconds"]["median"]),
    "CPU time": lambda row: float(row["cpu_seconds"]),
    "memory": lambda row: float(row["peak_bytes"]),
}

_SHORTEST = ("64×56×56, 3×3, stride 1", "128×28×28, 3×3", "256×14×14, 3×3", "512×7×7, 3×3")
_OTHER_PATCHES = ("3×3, stride 2", "7×7, stride 2", "1×1, stride 1")
_DENSE = ("256 rows of 1024", "4096 rows of 1024", "256 rows of 2048", "4096 rows of 2048")
_INVERSES = ("512 × 512", "1024 × 1024", "2048 × 2048", "4096 × 4096")
GOALS = (
    *(Goal("conv", case, "torch", 0.30) for case in _SHORTEST),
    *(Goal("conv", case, DEFINITION, 0.50) for case in _SHORTEST),
    *(Goal("conv", case, "torch", 0.70) for case in _OTHER_PATCHES),
    *(Goal("conv", case, DEFINITION, 1.00) for case in _OTHER_PATCHES),
    Goal("conv", "depthwise", "torch", 0.10),
    *(Goal("dense", case, "torch", 0.60) for case in _DENSE),
    *(Goal("dense", case, "jax", 1.00) for case in _DENSE),
    *(Goal("inverse", case, "torch", 1.00) for case in _INVERSES),
    *(Goal("inverse", case, DEFINITION, 0.40) for case in _INVERSES),
    Goal("precondition", "ResNet-50", DEFINITION, 0.80),
    Goal("step", "mlp, batch 512, factors 1,", BEST, 0.80),
    Goal("step", "resnet20, batch 128, factors 1,", BEST, 0.35),
    Goal("step", "transformer, batch 32, factors 1,", BEST, 0.70),
    # The engine without curvature, timed in the same rounds.
    Goal("step", SELDOM, OURS_PLAIN, 1.30),
    Goal("uses", "Laplace fit", "laplace-torch", 1.00, "CPU time"),
    Goal("uses", "variance", "laplace-torch", 0.10, "CPU time"),
    Goal("uses", "variance", "laplace-torch", 0.35, "memory"),
    Goal("uses", "evidence", "laplace-torch", 0.50, "CPU time"),
    Goal("uses", "EKFAC fit", "kronfluence", 1.00, "CPU time"),
    Goal("uses", "scores", "kronfluence", 1.00, "CPU time"),
    Goal("uses", "self-influence", "kronfluence", 0.70, "CPU time"),
)
# Scratch memory of the patches in ``_SHORTEST``.
SCRATCH_BOUND = 32 * _MEGABYTE


class Finding(NamedTuple):
    """A goal with the measured value."""

    case: str
    beside: str
    bound: float
    value: float

    @property
    def met(self) -> bool:
        """Whether the value is within the bound."""
        return self.value <= self.bound


def table(suites: Suites, older: Suites | None = None, *, missed: bool = False) -> Iterator[str]:
    """Yield a sentence and a table of goals in Markdown; the value of a missed goal is bold.

    ``older`` has the suites with an older kernel of BLAS, for an additional column. With
    ``missed``, the table has only the goals that the newest report misses.
    """
    findings = list(measured(suites))
    others = {finding[:2]: finding for finding in measured(older or {})}
    yield f"{sum(f.met for f in findings)} of {len(findings)} goals are met."
    shown = [finding for finding in findings if not (missed and finding.met)]
    if not shown:
        return
    yield ""
    columns = ["case", "compared with", "at most", "measured", *["older kernel"] * bool(older)]
    rows = []
    for finding in shown:
        beside = others.get(finding[:2])
        rows.append((
            finding.case, finding.beside, f"{finding.bound:.2f}", _shown(finding),
            *([_shown(beside) if beside else ""] if older else []),
        ))  # fmt: skip
    yield from markdown.table(columns, rows)


def measured(suites: Suites) -> Iterator[Finding]:
    """Yield every goal whose case was measured: comparisons, then memory and scaling."""
    for goal in GOALS:
        for case, values in _values(suites.get(goal.suite, ()), goal).items():
            peers = [value for who, value in values.items() if who not in {*ALWAYS, _NO_LIBRARY}]
            known = {**values, **({BEST: min(peers)} if peers else {})}
            if OURS in known and known.get(goal.other):
                ratio = known[OURS] / known[goal.other]
                unit = "" if goal.quantity == "time" else f", {goal.quantity}"
                yield Finding(f"{goal.suite}: {case}", f"{goal.other}{unit}", goal.bound, ratio)
    for suite, findings in _OTHERS.items():
        # The points of one axis have the same exponents.
        yield from dict.fromkeys(
            finding for row in suites.get(suite, ()) for finding in findings(row)
        )


def _scratch(row: Mapping[str, Any]) -> Iterator[Finding]:
    if row["contender"] == OURS and any(case in row["case"] for case in _SHORTEST):
        bound, value = SCRATCH_BOUND / _MEGABYTE, row["peak_bytes"] / _MEGABYTE
        yield Finding(f"conv: {row['case']}", "temporary memory, MB", bound, value)


def _peak(row: Mapping[str, Any]) -> Iterator[Finding]:
    value = row["measured"] / row["announced"]
    yield Finding(f"memory: {row['case']}", "announced memory", 1.0, value)


def _growth(row: Mapping[str, Any]) -> Iterator[Finding]:
    for quantity, prefix in (("time", ""), ("memory", "memory_")):
        yield Finding(
            f"scaling: {row['axis']}", f"exponent of {quantity}", row[f"{prefix}expected"] + MARGIN,
            row[f"{prefix}exponent"],
        )  # fmt: skip


# Map from a suite to the goals of its rows that are not ratios of times.
_OTHERS: Mapping[str, Callable[[Mapping[str, Any]], Iterator[Finding]]] = {
    "conv": _scratch,
    "memory": _peak,
    "scaling": _growth,
}


def _shown(finding: Finding) -> str:
    value = f"{finding.value:.2f}"
    return value if finding.met else f"**{value}**"


def _values(rows: Rows, goal: Goal) -> dict[str, dict[str, float]]:
    """Return the quantity of a goal for each case and contender."""
    values: dict[str, dict[str, float]] = {}
    for row in rows:
        if goal.case in row["case"]:
            value = QUANTITIES[goal.quantity](row)
            values.setdefault(row["case"], {})[row["contender"]] = value
    return values
