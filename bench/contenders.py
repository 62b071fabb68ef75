"""Who takes part: a module each, run in a process of its own that no other's threads disturb."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from kfac_engine._types import Array
from kfac_engine.bench.environment import environment
from kfac_engine.bench.jobs import PLAIN, SELDOM, STEPS, Job
from kfac_engine.bench.usage import Usage
from kfac_engine.errors import BackendError
from kfac_engine.registry import Registry


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to do the jobs.

    Attributes:
        module: Name of the module with its ``OPERATIONS``.
        operations: What it can do, so that nothing is loaded to find out.
        checks: What it computes as the truth for others, but too slowly to be timed.
        needs: Packages that must be installed.
        networks: Whose steps it can make; empty for all.
        kinds: Of steps that it makes; empty for all.
    """

    module: str
    operations: frozenset[str]
    checks: frozenset[str] = frozenset()
    needs: tuple[str, ...] = ()
    networks: frozenset[str] = frozenset()
    kinds: frozenset[str] = frozenset()

    @property
    def missing(self) -> tuple[str, ...]:
        """Packages that are not installed."""
        return tuple(name for name in self.needs if find_spec(name) is None)

    def can_do(self, job: Job) -> bool:
        """Whether it takes part in the job."""
        network, kind = job.sizes.get("network"), job.sizes.get("kind")
        known = not self.networks or network is None or network in self.networks
        made = not self.kinds or kind is None or kind in self.kinds
        return known and made and job.operation in self.operations

    def can_check(self, job: Job) -> bool:
        """Whether it has a result of the job."""
        return job.operation in self.checks or self.can_do(job)


_PRIMITIVES = frozenset({"dense", "patches", "depthwise", "inverse", "power", "precondition"})
_STEP = frozenset({"step"})
# Steps whose plain gradients are those of another contender.
_CURVATURE = frozenset(STEPS) - {PLAIN}
DEFINITION, OURS, OURS_PLAIN = "definition", "ours", "ours-gradient"
CONTENDERS: Mapping[str, Contender] = Registry(
    "contender",
    {
        DEFINITION: Contender("kfac_engine.bench.definition", _PRIMITIVES, checks=_STEP),
        OURS: Contender("kfac_engine.bench.ours", _PRIMITIVES | _STEP),
        # Beside ours where curvature is to cost little more.
        OURS_PLAIN: Contender("kfac_engine.bench.ours_gradient", _STEP, kinds=frozenset({SELDOM})),
        "torch": Contender("kfac_engine.bench.with_torch", _PRIMITIVES | _STEP, needs=("torch",)),
        "torch-by-example": Contender(
            "kfac_engine.bench.with_torch_by_example",
            frozenset({"patches", "step"}),
            needs=("torch",),
            networks=frozenset({"resnet20"}),
            kinds=_CURVATURE,
        ),
        "jax": Contender("kfac_engine.bench.with_jax", _PRIMITIVES, needs=("jax",)),
        "kfac-jax": Contender(
            "kfac_engine.bench.with_kfac_jax",
            _STEP,
            needs=("jax", "kfac_jax"),
        ),
        "curvlinops": Contender(
            "kfac_engine.bench.with_curvlinops",
            _STEP,
            needs=("torch", "curvlinops"),
            kinds=_CURVATURE,
        ),
    },
)
ALWAYS = (DEFINITION, OURS, OURS_PLAIN)
PEERS = tuple(name for name in CONTENDERS if name not in ALWAYS)


@dataclass(slots=True)
class Process:
    """A running contender.

    Attributes:
        name: Of the contender.
        python: The process; it ends with ``close``.
        folder: For results.
    """

    name: str
    python: "subprocess.Popen[str]" = field(repr=False)
    folder: Path = field(repr=False)

    def prepare(self, job: Job) -> tuple[dict[str, Array], Usage]:
        """Set a job up.

        Args:
            job: One that the contender can do, or check.

        Returns:
            The result of its first run by parts, and what that used.
        """
        path = self.folder / f"{self.name}.npz"
        order = {"setup": job.operation, "sizes": dict(job.sizes), "result": str(path)}
        usage = Usage(**self._ask(order))
        with np.load(path) as parts:
            result = dict(parts)
        path.unlink()
        return result, usage

    def run(self, runs: int, *, warm: int, settle: float) -> Usage:
        """Run the job and say what that used.

        Args:
            runs: How often.
            warm: How many runs before them warm the caches.
            settle: Seconds to wait before them.

        Returns:
            What the runs used.
        """
        return Usage(**self._ask({"runs": runs, "warm": warm, "settle": settle}))

    def close(self, *failure: object) -> None:
        """End the process, in the middle of a run if there was a failure that ends all."""
        if any(failure):
            self.python.kill()
        # Nothing more to read is its sign to end.
        self.python.communicate()

    def _ask(self, order: Mapping[str, object]) -> dict[str, Any]:
        """The answer to an order.

        Raises:
            BackendError: The process ended.
        """
        assert self.python.stdin is not None
        assert self.python.stdout is not None
        # A process that has ended reads nothing: its missing answer tells.
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
    """Processes of these contenders; they end with the context.

    Args:
        names: Of contenders that are installed.
        threads: Of each.

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
                # Interruptions come here first: they end the others without a word of theirs.
                env=environment(threads), start_new_session=True,
            )  # fmt: skip
            processes[name] = Process(name, python, folder)
            stack.push(processes[name].close)
        yield processes
