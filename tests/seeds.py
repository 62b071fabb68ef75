"""Seeds of `make test-all`, which draws other numbers each time; the gate draws the same ones."""

import os

# ``TEST_SEED`` in the environment, which all processes of a run share; `make test-all` prints it.
SEED = int(os.environ["TEST_SEED"]) if os.environ.get("TEST_SEED") else None


def seeds(count: int) -> range:
    """Return ``count`` seeds: from zero on, or of this run of `make test-all`."""
    start = 0 if SEED is None else SEED * count
    return range(start, start + count)
