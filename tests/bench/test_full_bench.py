"""The script that measures everything names its files, its peers and its kernel."""

from datetime import date
from itertools import pairwise
from pathlib import Path

import pytest

from kfac_engine.bench.contenders import CONTENDERS, PEERS
from scripts import full_bench


@pytest.mark.parametrize(("kernel", "stem"), [("", "cpu"), ("Haswell", "cpu-haswell")])
def test_measurements_are_named_after_day_and_kernel(kernel, stem):
    command = full_bench.command(kernel, ["dense"], resume=True)
    path = Path(command[command.index("--json") + 1])
    assert path.parent == full_bench.bench_tables.RESULTS
    assert path.name == f"{date.today()}-{stem}.json"
    assert command[-3:] == ["--resume", "--suite", "dense"]


def test_an_older_kernel_is_measured_where_there_are_contenders():
    command = full_bench.command("Haswell", [], resume=False)
    chosen = [after for word, after in pairwise(command) if word == "--suite"]
    assert chosen == ["dense", "conv", "inverse", "power", "precondition", "step", "uses"]
    assert "--suite" not in full_bench.command("", [], resume=False)


def test_peers_that_are_installed_take_part(monkeypatch):
    installed = {"torch"}
    monkeypatch.setattr(
        "kfac_engine.bench.contender.find_spec", lambda name: name in installed or None
    )
    command = full_bench.command("", [], resume=False)
    expected = [name for name in PEERS if set(CONTENDERS[name].needs) <= installed]
    assert "torch" in expected
    assert command[command.index("--compare") + 1] == ",".join(expected)


def test_no_kernel_but_the_chosen_one_is_forced(monkeypatch):
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Prescott")
    assert "OPENBLAS_CORETYPE" not in full_bench.environment("")
    assert full_bench.environment("Haswell")["OPENBLAS_CORETYPE"] == "Haswell"
