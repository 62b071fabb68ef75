"""Results of random models do not depend on how a batch or its model is written down.

``python -m tests.identities SEED`` repeats the case of a failure, with a description.
"""

import pytest

from tests.identities.cases import case
from tests.identities.identities import Trial, failures
from tests.nightly import nightly_but, seeds

EACH = 10
GATE = range(0, 50, EACH)
NIGHTLY = [EACH * seed for seed in seeds(200)]


@pytest.mark.parametrize("first", nightly_but(GATE, [*GATE, *NIGHTLY]))
def test_equal_batches_have_equal_results(first, tmp_path):
    found = []
    for seed in range(first, first + EACH):
        folder = tmp_path / str(seed)
        folder.mkdir()
        found += [f"seed {seed}: {line}" for line in failures(Trial(case(seed), folder))]
    repeat = "python -m tests.identities " + " ".join({line.split(":")[0][5:] for line in found})
    assert not found, "\n".join([*found, f"{repeat} repeats this"])
