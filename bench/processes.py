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
    """A running contender, with the folder of its results; ``close`` ends it."""

    name: str
    python: "subprocess.Popen[str]" = field(repr=False)
    folder: Path = field(repr=False)

    def prepare(self, job: Job) -> tuple[dict[str, Array], Usage]:
        """Prepare a job and run it once."""
        path = self.folder / f"{self.name}.npz"
        order = {"setup": job.operation, "sizes": dict(job.sizes), "result": str(path)}
        usage = Usage(**self._ask(order))
        with np.load(path) as parts:
            result = dict(parts)
        path.unlink()
        return result, usage

    def run(self, runs: int, *, warm: int, settle: float) -> Usage:
        """Wait ``settle`` seconds, warm the caches by some runs, and run the prepared job."""
        return Usage(**self._ask({"runs": runs, "warm": warm, "settle": settle}))

    def close(self, *failure: object) -> None:
        """End the process; after a failure, also in the middle of a run."""
        if any(failure):
            self.python.kill()
        # The process ends when its input is closed.
        self.python.communicate()

    def _ask(self, order: Mapping[str, object]) -> dict[str, Any]:
        """Return the answer to an order."""
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
    """Start processes of contenders; they end with the context."""
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
