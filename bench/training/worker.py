"""The process of one run: reads its settings as JSON and writes its result as JSON.

    echo '{"task": "mlp", "method": "kfac", …}' | python -m kfac_engine.bench.training.worker 0 DIR

The arguments are the number of a core and the folder of the images, or nothing for the digits. Each
run has a process of its own, without memory and warm caches from an earlier run.
"""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from kfac_engine.bench.environment import environment, keep_to_cores
from kfac_engine.bench.training.run import Outcome, Run, train
from kfac_engine.errors import BackendError


class Workers:
    """Processes of runs, which several threads may start."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[str]] = set()

    def execute(self, run: Run, folder: Path | None, core: int) -> Outcome:
        """Train in a new process with one thread."""
        command = [sys.executable, "-m", "kfac_engine.bench.training.worker", str(core)]
        process = subprocess.Popen(
            command if folder is None else [*command, str(folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment(1),
        )  # fmt: skip
        self._running.add(process)
        try:
            output, errors = process.communicate(json.dumps(asdict(run)))
        finally:
            self._running.discard(process)
        if process.returncode:
            last = (errors.strip().splitlines() or ["no message"])[-1]
            raise BackendError(f"the run '{run}' failed: {last}")
        return Outcome.parse(json.loads(output))

    def end(self) -> None:
        """End the processes that run."""
        for process in tuple(self._running):
            process.kill()


def main(core: int, folder: Path | None) -> None:
    """Train with the settings of the standard input; write the result to the standard output."""
    keep_to_cores(1, core)
    outcome = train(Run(**json.load(sys.stdin)), folder)
    print(json.dumps(asdict(outcome)))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
