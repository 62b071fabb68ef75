"""Detects whether an MPI launcher started this process, and ends the job at once."""

import os
import sys
import time

# Number of processes of a job: Open MPI; MPICH, Intel MPI and Slurm with PMI.
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
# A launcher with PMIx sets the number of the process, but not the number of processes; Slurm does.
_PMIX_RANK, _SLURM_SIZE = "PMIX_RANK", "SLURM_STEP_NUM_TASKS"
# Time in which a launcher reads the output of a process.
_SECONDS_FOR_OUTPUT = 0.5
# Time in which the first process prints why a signal ends the job.
_SECONDS_FOR_FIRST_RANK = 1.0
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", _PMIX_RANK)


def launched_by_mpi() -> bool:
    """Return whether an MPI launcher has started several processes, of which this is one.

    The launchers of MPICH, Intel MPI and Open MPI, and ``srun``, are recognized by the environment
    variables that they set. mpi4py is not imported.
    """
    size = next((os.environ[name] for name in _SIZES if name in os.environ), None)
    if size is None and _PMIX_RANK in os.environ:
        size = os.environ.get(_SLURM_SIZE, "several")
    return size not in {None, "1"}


def rank_in_job() -> int:
    """Return the number of this process in the job of an MPI launcher; 0 without a launcher."""
    return int(next((os.environ[name] for name in _RANKS if name in os.environ), 0))


def wait_for_first_rank() -> None:
    """Wait in a process until the first process of its job has printed why a signal ends the job.

    A launcher ends all processes as soon as one of them ends without ``MPI_Finalize``. The first
    one waits as well: all of them then end with the exit status of the signal.
    """
    if launched_by_mpi():
        time.sleep(_SECONDS_FOR_FIRST_RANK)


def end_job(status: int) -> None:
    """End all processes of the job at once, after this process has written its output.

    Nothing happens in a process that has not initialized MPI: it has not joined the others.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return
    sys.stdout.flush()
    sys.stderr.flush()
    # A launcher that ends the job does not read what it has not read yet.
    time.sleep(_SECONDS_FOR_OUTPUT)
    mpi.COMM_WORLD.Abort(status)
    os._exit(status)  # MPI may return here before the launcher ends this process
