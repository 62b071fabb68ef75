"""A command over the processes that an MPI launcher has started."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from click import IntRange

from kfac_engine.cli.command import Choice, Group, Option
from kfac_engine.distributed.job import launched_by_mpi

_DISTRIBUTION = "distribution"


def distribution_option() -> Option:
    """Return the option of ``divided_among_processes``."""
    return Option(
        [f"--{_DISTRIBUTION}"],
        type=Choice(("replicate", "shard")),
        group=Group.MACHINE,
        help="Division of the curvature among the processes of mpirun: each stores all inverses, "
        "or the inverses of its layers. By default replicate.",
    )


def layer_owners_option() -> Option:
    """Return the option for the field ``layer_owners`` of the options of an engine."""
    return Option(
        ["--layer-owners"],
        type=IntRange(min=1),
        default=1,
        group=Group.MACHINE,
        help="Largest number of processes that own a large dense layer or convolution with the "
        "distribution shard.",
    )


@contextmanager
def divided_among_processes(options: dict[str, Any]) -> Iterator[None]:
    """Return a context in which a command is one of the processes of an MPI job.

    An error of one process becomes an error of all. Only the first process prints. ``options`` has
    the distribution and receives the communicator.
    """
    distribution = options.pop(_DISTRIBUTION)
    if distribution is None and not launched_by_mpi():
        yield
        return
    from kfac_engine.distributed.agreement import Agreement
    from kfac_engine.distributed.mpi import over_mpi

    communicator = over_mpi()
    options |= {"communicator": communicator, "distribution": distribution or "replicate"}
    silence = _silent() if communicator.rank else nullcontext()
    with Agreement(communicator).operation("command"), silence:
        yield


@contextmanager
def _silent() -> Iterator[None]:
    with (
        Path(os.devnull).open("w", encoding="utf-8") as nowhere,
        redirect_stdout(nowhere),
        redirect_stderr(nowhere),
    ):
        yield
