"""The table of contenders: its own, and the peers of a checkout."""

import pytest

from kfac_engine.bench import jobs
from kfac_engine.bench.contenders import (
    CONTENDERS,
    DEFINITION,
    OURS,
    OURS_PLAIN,
    PEERS,
    select_contenders,
)
from kfac_engine.bench.jobs import Contender
from kfac_engine.errors import BackendError, InputError, UnknownNameError


def test_a_peer_that_is_not_installed_is_refused_by_name(monkeypatch):
    assert select_contenders([]) == [DEFINITION, OURS, OURS_PLAIN]
    monkeypatch.setattr(Contender, "missing", ("torch",))
    with pytest.raises(BackendError, match="cannot compare with torch: torch is not installed"):
        select_contenders(["torch"])
    with pytest.raises(UnknownNameError, match="unknown peer 'ours'; choose one of: curvlinops"):
        select_contenders([OURS])


def test_without_the_package_of_peers_a_comparison_is_refused(monkeypatch):
    monkeypatch.setattr("kfac_engine.bench.contenders.find_spec", lambda name: None)
    assert select_contenders([]) == [DEFINITION, OURS, OURS_PLAIN]
    with pytest.raises(InputError, match=r"cannot compare with torch, caffe: .* in a checkout"):
        select_contenders(["torch", "caffe"])


def test_every_contender_can_do_only_operations_that_are_measured():
    operations = {job.operation for suite in jobs.SUITES.values() for job in suite}
    assert CONTENDERS[DEFINITION].operations | CONTENDERS[DEFINITION].checks == operations
    assert all(contender.operations <= operations for contender in CONTENDERS.values())
    assert {"torch", "jax"} <= set(PEERS)
