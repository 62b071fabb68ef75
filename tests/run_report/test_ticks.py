"""The scales of page.js for extreme numbers: few finite ticks inside the axis, and an end."""

import json
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

import kfac_engine.run_report.page as page

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="no node is installed")

LARGEST, LEAST = 1.7976931348623157e308, 5e-324
NUMBERS = [0.0, LEAST, 3 * LEAST, 1e-310, 1e-300, 1e-17, 0.1, 0.3, 1.0, 1e7, 1e17, 1e300, LARGEST]


def ranges(log):
    """Pairs of all numbers, and numbers that differ from the next in the last bits."""
    signed = NUMBERS if log else [*NUMBERS, *(-x for x in NUMBERS)]
    usable = [x for x in signed if x > 0 or not log]
    pairs = [(a, b) for a in usable for b in usable if a <= b]
    near = [(x, x * (1 + k * 2.0**-52)) for x in usable for k in (1, 2, 100, 10**5, 10**8)]
    return [pair for pair in (*pairs, *map(sorted, near)) if all(abs(x) <= LARGEST for x in pair)]


def drawn(cases, log):
    """The ticks of each range, and the pixels of its ends on an axis from 0 to 100."""
    script = Path(page.__file__).with_name("page.js").read_text(encoding="utf-8")
    scales = script[script.index("function linearTicks") : script.index("// A chart:")]
    loop = (
        f"const cases = {json.dumps(cases)}; console.log(JSON.stringify(cases.map(([a, b]) => {{"
        f" const at = scale(a, b, 0, 100, {str(log).lower()}, 5);"
        f" return [at.ticks, at.ticks.map(at), at(a), at(b)]; }})));"
    )
    done = subprocess.run([NODE, "-e", scales + loop], capture_output=True, timeout=60, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("log", [False, True], ids=["linear", "logarithmic"])
def test_ticks_of_every_range_are_few_and_on_the_axis(log):
    cases = ranges(log)
    assert len(cases) > 100
    for (low, high), (ticks, pixels, first, last) in zip(cases, drawn(cases, log), strict=True):
        where = f"{low} to {high}"
        assert len(ticks) <= 12, where
        assert all(a < b for a, b in pairwise(ticks)), where
        assert all(p is not None and -1 <= p <= 101 for p in (*pixels, first, last)), where
        assert first <= last, where
        if not log and high - low > 1e-9 * max(abs(low), abs(high), 1e-280) < 1e300:
            assert len(ticks) >= 2, where


@pytest.mark.parametrize(
    ("case", "log", "ticks"),
    [
        ((0, 1), False, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        ((-3, 7), False, [-2, 0, 2, 4, 6]),
        ((1e-3, 1e2), True, [1e-3, 1e-2, 1e-1, 1, 10, 100]),
        ((1, 30), True, [1, 2, 5, 10, 20]),
    ],
)
def test_ticks_of_usual_ranges_are_round_numbers(case, log, ticks):
    ((found, *_),) = drawn([case], log)
    assert found == ticks
