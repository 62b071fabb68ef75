"""What the package is meant to reach on a CPU, beside what was measured.

``bench_tables`` puts the table into ``docs/performance.md``.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from kfac_engine.bench.contenders import ALWAYS, DEFINITION, OURS, OURS_PLAIN
from kfac_engine.bench.jobs import SELDOM
from kfac_engine.bench.scaling_fit import MARGIN

# Not a contender's name: the quickest of all peers that do as their libraries do.
BEST = "the best library"
_NO_LIBRARY = "torch-by-example"
_MEGABYTE = 1e6

# Rows of a suite as JSON has them, and all suites by name.
Rows: TypeAlias = Sequence[Mapping[str, Any]]
Suites: TypeAlias = Mapping[str, Rows]


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound on the time of ours divided by that of another.

    Attributes:
        suite: Name.
        case: Part of the names of its cases.
        other: Contender, or ``BEST``.
        bound: The largest quotient that is good enough.
    """

    suite: str
    case: str
    other: str
    bound: float


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
    # The same engine without curvature, beside it in the same rounds.
    Goal("step", SELDOM, OURS_PLAIN, 1.30),
)
# Scratch memory of the patches in ``_SHORTEST``.
SCRATCH_BOUND = 32 * _MEGABYTE


class Finding(NamedTuple):
    """A goal and what was found."""

    case: str
    beside: str
    bound: float
    found: float


def table(suites: Suites, older: Suites | None = None) -> Iterator[str]:
    """Lines of Markdown: how many goals are reached, and each that was measured.

    Args:
        suites: Of a report of ``bench --json``.
        older: Of one with an older kernel of BLAS, for a column of its own.

    Yields:
        A sentence, head, rule and rows; a goal that is missed is bold.
    """
    findings = list(measured(suites))
    others = {finding[:2]: finding for finding in measured(older or {})}
    reached = sum(finding.found <= finding.bound for finding in findings)
    yield f"{reached} of {len(findings)} are reached."
    yield ""
    columns = ("case", "beside", "at most", "found", *(("older kernel",) if older else ()))
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for finding in findings:
        beside = others.get(finding[:2])
        cells = (
            finding.case, finding.beside, f"{finding.bound:.2f}", _told(finding),
            *([_told(beside) if beside else ""] if older else []),
        )  # fmt: skip
        yield f"| {' | '.join(cells)} |"


def measured(suites: Suites) -> Iterator[Finding]:
    """All goals about what was measured.

    Args:
        suites: Of a report.

    Yields:
        Those of contests in the order of ``GOALS``, then those of memory and growth.
    """
    for goal in GOALS:
        for case, seconds in _times(suites.get(goal.suite, ()), goal.case).items():
            peers = [t for who, t in seconds.items() if who not in {*ALWAYS, _NO_LIBRARY}]
            found = {**seconds, **({BEST: min(peers)} if peers else {})}
            if OURS in found and goal.other in found:
                quotient = found[OURS] / found[goal.other]
                yield Finding(f"{goal.suite}: {case}", goal.other, goal.bound, quotient)
    for suite, findings in _OTHERS.items():
        # Points of one axis say the same.
        yield from dict.fromkeys(found for row in suites.get(suite, ()) for found in findings(row))


def _scratch(row: Mapping[str, Any]) -> Iterator[Finding]:
    if row["contender"] == OURS and any(case in row["case"] for case in _SHORTEST):
        bound, found = SCRATCH_BOUND / _MEGABYTE, row["peak_bytes"] / _MEGABYTE
        yield Finding(f"conv: {row['case']}", "MB of scratch", bound, found)


def _peak(row: Mapping[str, Any]) -> Iterator[Finding]:
    found = row["measured"] / row["announced"]
    yield Finding(f"memory: {row['case']}", "what was announced", 1.0, found)


def _growth(row: Mapping[str, Any]) -> Iterator[Finding]:
    for what, of in (("time", ""), ("memory", "memory_")):
        yield Finding(
            f"scaling: {row['axis']}", f"exponent of {what}", row[f"{of}expected"] + MARGIN,
            row[f"{of}exponent"],
        )  # fmt: skip


# Suite to what its rows say of goals that are no quotients of times.
_OTHERS: Mapping[str, Callable[[Mapping[str, Any]], Iterator[Finding]]] = {
    "conv": _scratch,
    "memory": _peak,
    "scaling": _growth,
}


def _told(finding: Finding) -> str:
    found = f"{finding.found:.2f}"
    return found if finding.found <= finding.bound else f"**{found}**"


def _times(rows: Rows, part: str) -> dict[str, dict[str, float]]:
    """Case to contender to seconds."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        if part in row["case"]:
            found.setdefault(row["case"], {})[row["contender"]] = row["seconds"]["median"]
    return found
