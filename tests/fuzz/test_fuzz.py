"""Whatever the graph, its gradient is right or refused by an error of ours."""

from collections import Counter

import pytest

from tests.fuzz.check import MAKERS, check
from tests.nightly import nightly_but, seeds

EACH = 100
FIRST = [0, *(EACH * (1 + seed) for seed in seeds(14))]


@pytest.mark.filterwarnings("ignore")  # a random graph may divide by zero
@pytest.mark.parametrize("first", nightly_but([0], FIRST))
@pytest.mark.parametrize("kind", MAKERS)
def test_random_graph_has_correct_gradient_or_raises_error(kind, first):
    outcomes = Counter()
    for seed in range(first, first + EACH):
        try:
            outcomes[check(MAKERS[kind](seed))] += 1
        except Exception as failure:
            raise AssertionError(f"seed {seed} of {kind}") from failure
    # Otherwise the test would hold of a library that refuses everything.
    if kind == "valid":
        assert outcomes["right"] >= EACH - 5, outcomes
        assert not outcomes["not for the runtime"], outcomes
