"""The job of an MPI launcher: whether this process belongs to one, and its sudden end."""

import os
import sys
from types import SimpleNamespace

import pytest

from kfac_engine.distributed import job
from kfac_engine.distributed.job import end_job, launched_by_mpi, rank_in_job, wait_for_first_rank

LAUNCHERS = {
    "mpich": {"PMI_RANK": "0", "PMI_SIZE": "3"},
    "open mpi": {"OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "1"},
    "slurm with pmix": {"PMIX_RANK": "0", "SLURM_STEP_NUM_TASKS": "4"},
    "another launcher with pmix": {"PMIX_RANK": "0"},
}
SINGLE = {
    "a shell": {},
    "mpich, one process": {"PMI_RANK": "0", "PMI_SIZE": "1"},
    "open mpi, one process": {"OMPI_COMM_WORLD_SIZE": "1", "PMIX_RANK": "0"},
    "slurm with pmix, one process": {"PMIX_RANK": "0", "SLURM_STEP_NUM_TASKS": "1"},
    "a batch script": {"SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4"},
}


def environment(monkeypatch, variables):
    for name in list(os.environ):
        if name.startswith(("PMI", "OMPI", "SLURM")):
            monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_process_of_a_launcher_is_recognized(launcher, monkeypatch):
    environment(monkeypatch, LAUNCHERS[launcher])
    assert launched_by_mpi()


@pytest.mark.parametrize("start", SINGLE)
def test_a_single_process_is_not_started_by_a_launcher(start, monkeypatch):
    environment(monkeypatch, SINGLE[start])
    assert not launched_by_mpi()


@pytest.mark.parametrize(
    ("variables", "rank"),
    [
        ({}, 0),
        ({"PMI_RANK": "2", "PMI_SIZE": "3"}, 2),
        ({"OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, 1),
        ({"PMIX_RANK": "3"}, 3),
    ],
)
def test_launchers_number_the_processes(variables, rank, monkeypatch):
    environment(monkeypatch, variables)
    assert rank_in_job() == rank


@pytest.mark.parametrize(("initialized", "finalized"), [(False, False), (True, True)])
def test_a_process_without_mpi_ends_no_job(initialized, finalized, monkeypatch):
    ended = []
    mpi = SimpleNamespace(
        Is_initialized=lambda: initialized,
        Is_finalized=lambda: finalized,
        COMM_WORLD=SimpleNamespace(Abort=ended.append),
    )
    monkeypatch.setattr(job.os, "_exit", ended.append)
    monkeypatch.setattr(job.time, "sleep", ended.append)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
    end_job(2)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI")
    end_job(2)
    assert not ended


@pytest.mark.parametrize(
    ("variables", "waits"),
    [
        ({}, 0),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, 0),
        ({"PMI_RANK": "0", "PMI_SIZE": "3"}, 1),
        ({"PMI_RANK": "2", "PMI_SIZE": "3"}, 1),
    ],
)
def test_processes_of_a_job_wait_for_the_message_of_the_first(variables, waits, monkeypatch):
    environment(monkeypatch, variables)
    slept = []
    monkeypatch.setattr(job.time, "sleep", slept.append)
    wait_for_first_rank()
    assert len(slept) == waits
