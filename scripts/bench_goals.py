"""What the package is meant to reach on a CPU, beside what was measured.

``bench_tables`` puts the table into ``docs/performance.md``.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

OURS, DEFINITION = "ours", "definition"
# Not a contender's name: the quickest of all that are not ours.
BEST = "the best peer"
_PLAIN = "gradient"
_MEGABYTE = 1e6


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
)
# A step with factors every tenth and inverses every hundredth time, divided by a plain gradient.
SELDOM, SELDOM_BOUND = "factors 10, inverses 100", 1.30
# Scratch memory of the patches in ``_SHORTEST``.
SCRATCH_BOUND = 32 * _MEGABYTE


def table(suites: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[str]:
    """Lines of Markdown: every goal that was measured.

    Args:
        suites: Of a report of ``bench --json``.

    Yields:
        Head, rule and rows; a goal that is missed is bold.
    """
    yield "| case | beside | at most | found |"
    yield "|---|---|---|---|"
    for case, beside, bound, found in _measured(suites):
        told = f"{found:.2f}" if found <= bound else f"**{found:.2f}**"
        yield f"| {case} | {beside} | {bound:.2f} | {told} |"


def _measured(
    suites: Mapping[str, Sequence[Mapping[str, Any]]],
) -> Iterator[tuple[str, str, float, float]]:
    for goal in GOALS:
        for case, seconds in _times(suites.get(goal.suite, ()), goal.case).items():
            peers = {who: time for who, time in seconds.items() if who not in {OURS, DEFINITION}}
            best = {BEST: min(peers.values())} if peers else {}
            found = {**seconds, **best}
            if goal.other in found:
                quotient = seconds[OURS] / found[goal.other]
                yield f"{goal.suite}: {case}", goal.other, goal.bound, quotient
    steps = _times(suites.get("step", ()), "")
    for case, seconds in steps.items():
        plain = case.replace(SELDOM, _PLAIN)
        if SELDOM in case and plain in steps:
            quotient = seconds[OURS] / steps[plain][OURS]
            yield f"step: {case}", "its plain gradient", SELDOM_BOUND, quotient
    for row in suites.get("conv", ()):
        if row["contender"] == OURS and any(case in row["case"] for case in _SHORTEST):
            megabytes = row["peak_bytes"] / _MEGABYTE
            yield f"conv: {row['case']}", "MB of scratch", SCRATCH_BOUND / _MEGABYTE, megabytes


def _times(rows: Sequence[Mapping[str, Any]], part: str) -> dict[str, dict[str, float]]:
    """Case to contender to seconds."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        if part in row["case"]:
            found.setdefault(row["case"], {})[row["contender"]] = row["seconds"]["median"]
    return found
