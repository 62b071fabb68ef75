"""What `make test-all` runs and the gate does not: the marker nightly, and new seeds."""

import os
from collections.abc import Collection, Iterable
from typing import Any

import pytest

# ``TEST_SEED`` in the environment, which all processes of a run share; `make test-all` sets it.
SEED = int(os.environ["TEST_SEED"]) if os.environ.get("TEST_SEED") else None


def nightly_but(gate: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Return the parameters of a test; all but those in ``gate`` are nightly."""
    others = [value for value in values if value not in gate]
    return [
        *(pytest.param(value, id=str(value)) for value in gate),
        *(pytest.param(value, id=str(value), marks=pytest.mark.nightly) for value in others),
    ]


def seeds(count: int) -> range:
    """Return ``count`` seeds: from zero on, or of this run of `make test-all`."""
    start = 0 if SEED is None else SEED % 1_000_000 * count  # below 2³² for all counts
    return range(start, start + count)
