"""The job of an MPI launcher: whether this process belongs to one."""

import os

# Number of processes of a job: Open MPI; MPICH, Intel MPI and Slurm with PMI.
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
# A launcher with PMIx sets the number of the process, but not the number of processes; Slurm does.
_PMIX_RANK, _SLURM_SIZE = "PMIX_RANK", "SLURM_STEP_NUM_TASKS"


def launched_by_mpi() -> bool:
    """Return whether an MPI launcher has started several processes, of which this is one.

    The launchers of MPICH, Intel MPI and Open MPI, and ``srun``, are recognized by the environment
    variables that they set. mpi4py is not imported.
    """
    size = next((os.environ[name] for name in _SIZES if name in os.environ), None)
    if size is None and _PMIX_RANK in os.environ:
        size = os.environ.get(_SLURM_SIZE, "several")
    return size not in {None, "1"}
