"""The scales of drawings for extreme numbers: few finite ticks inside the axis, and an end."""

from itertools import pairwise
from math import isfinite

import pytest

from kfac_engine.html_report.charts import axis_scale

# Logs have numbers up to 1e150.
LARGEST, LEAST = 1e150, 5e-324
NUMBERS = [0.0, LEAST, 3 * LEAST, 1e-310, 1e-300, 1e-17, 0.1, 0.3, 1.0, 1e7, 1e17, 1e149, LARGEST]


def ranges(log):
    """Pairs of all numbers, and numbers that differ from the next in the last bits."""
    signed = NUMBERS if log else [*NUMBERS, *(-x for x in NUMBERS)]
    usable = [x for x in signed if x > 0 or not log]
    pairs = [(a, b) for a in usable for b in usable if a <= b]
    near = [(x, x * (1 + k * 2.0**-52)) for x in usable for k in (1, 2, 100, 10**5, 10**8)]
    return [*pairs, *map(sorted, near)]


@pytest.mark.parametrize("log", [False, True], ids=["linear", "logarithmic"])
def test_ticks_of_every_range_are_few_and_on_the_axis(log):
    cases = ranges(log)
    assert len(cases) > 100
    for low, high in cases:
        place, ticks = axis_scale(low, high, 0, 100, logarithmic=log)
        where = f"{low} to {high}"
        assert len(ticks) <= 12, where
        assert all(a < b for a, b in pairwise(ticks)), where
        pixels = [place(x) for x in (low, *ticks, high)]
        assert all(isfinite(p) and -1 <= p <= 101 for p in pixels), where
        assert pixels[0] <= pixels[-1], where
        if not log and high - low > 1e-9 * max(abs(low), abs(high), 1e-280):
            assert len(ticks) >= 2, where
