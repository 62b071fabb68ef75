"""Whatever bytes are given for a model, arrays, gradients or a state, they work or are refused."""

import sys
from collections import Counter

import pytest

from tests.fuzz.attacks import ATTACKS
from tests.fuzz.campaign import FINE, campaign

SEED, EACH = 7, 60


@pytest.mark.skipif(sys.platform == "win32", reason="limits the memory of a process")
def test_attacks_end_in_result_or_kfac_error():
    outcomes = Counter()
    for kind, seed, found in campaign(SEED, seconds=600):
        assert found in FINE, f"{kind}, seed {seed}: {found}"
        outcomes[kind, found] += 1
        if outcomes.total() == EACH * len(ATTACKS):
            break
    # Otherwise the test would hold of a library that refuses everything, or nothing.
    for kind in ATTACKS:
        assert outcomes[kind, "done"] > 0, outcomes
        assert outcomes[kind, "refused"] > EACH // 4, outcomes


def test_attacks_are_reproducible_from_seed():
    for kind, (make, _) in ATTACKS.items():
        assert make(3) == make(3), kind
        assert len({make(seed) for seed in range(20)}) > 15, kind
