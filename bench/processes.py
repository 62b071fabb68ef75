"""Processes of contenders: each runs alone, undisturbed by the threads of the others."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kfac_engine._types import Array
from kfac_engine.bench.contenders import CONTENDERS
from kfac_engine.bench.environment import environment
from kfac_engine.bench.jobs import Job
from kfac_engine.bench.resource_usage import Usage
from kfac_engine.errors import BackendError


@dataclass(slots=True)
class Process:
    """A running contender.

    Attributes:
        name: Name of the contender.
        python: The process; ``close`` ends it.
        folder: Folder of the results.
    """

    name: str
    python: "subprocess.Popen[str]" = field(repr=False)
    folder: Path = field(repr=False)

    def prepare(self, job: Job) -> tuple[dict[str, Array], Usage]:
        """Prepare a job and run it once.

        Args:
            job: A job that the contender can do or check.

        Returns:
            The parts of the result by name, and the resources of the run.
        """
        path = self.folder / f"{self.name}.npz"
        order = {"setup": job.operation, "sizes": dict(job.sizes), "result": str(path)}
        usage = Usage(**self._ask(order))
        with np.load(path) as parts:
            result = dict(parts)
        path.unlink()
        return result, usage

    def run(self, runs: int, *, warm: int, settle: float) -> Usage:
        """Run the prepared job.

        Args:
            runs: Number of runs.
            warm: Number of earlier runs that warm the caches.
            settle: Seconds to wait before the runs.

        Returns:
            Resources of the runs.
        """
        return Usage(**self._ask({"runs": runs, "warm": warm, "settle": settle}))

    def close(self, *failure: object) -> None:
        """End the process; after a failure, also in the middle of a run."""
        if any(failure):
            self.python.kill()
        # The process ends when its input is closed.
        self.python.communicate()

    def _ask(self, order: Mapping[str, object]) -> dict[str, Any]:
        """Return the answer to an order.

        Raises:
            BackendError: The process ended.
        """
        assert self.python.stdin is not None
        assert self.python.stdout is not None
        # A process that has ended reads nothing; its answer is missing then.
        with suppress(BrokenPipeError):
            self.python.stdin.write(json.dumps(order) + "\n")
            self.python.stdin.flush()
        line = self.python.stdout.readline()
        if not line:
            raise BackendError(
                f"contender '{self.name}' ended with status {self.python.wait()} while it did "
                f"{order or 'a run'}; its own message is above."
            )
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def running(names: Sequence[str], threads: int) -> Iterator[dict[str, Process]]:
    """Start processes of contenders; they end with the context.

    Args:
        names: Names of contenders that are installed.
        threads: Number of threads of each.

    Yields:
        Name to process.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        processes = {}
        for name in names:
            module = CONTENDERS[name].module
            command = [sys.executable, "-m", "kfac_engine.bench.worker", module, str(threads)]
            python = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                # Signals reach only this process, which ends the others.
                env=environment(threads), start_new_session=True,
            )  # fmt: skip
            processes[name] = Process(name, python, folder)
            stack.push(processes[name].close)
        yield processes
