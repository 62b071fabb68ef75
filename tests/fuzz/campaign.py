"""Attacks one after the other in a process with bounded memory, which is watched from another.

``python -m tests.fuzz.campaign --seconds 3600 --seed 1`` runs for an hour; what failed is kept in
``.fuzz``, and ``python -m tests.fuzz.campaign --repeat .fuzz/NAME`` tries it again.
"""

import argparse
import os
import queue
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Thread

from tests.fuzz.attacks import ATTACKS, outcome

CORPUS = Path(".fuzz")
# Longest time of one attack, a busy machine included, and memory of the process.
MOST_SECONDS = 60
MOST_BYTES = 6 << 30
PROGRAM = ("-m", "tests.fuzz.campaign", "--work")
FINE = ("done", "refused")


def work(seed: int) -> None:
    """Attack for ever from a seed on: a line before each attack, and one after it."""
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    with tempfile.TemporaryDirectory() as folder:
        while True:
            for kind in ATTACKS:
                print(f"begin\t{kind}\t{seed}", flush=True)
                data = ATTACKS[kind][0](seed)
                try:
                    found = outcome(kind, data, Path(folder))
                except Exception as failure:  # whatever comes out is to be told
                    where = traceback.extract_tb(failure.__traceback__)[-1]
                    found = (
                        f"{type(failure).__name__} in {Path(where.filename).name}:{where.lineno}"
                    )
                print(f"end\t{found}", flush=True)
            seed += 1


class Worker:
    """A process that works, and the lines that it writes."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )  # fmt: skip
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        Thread(target=self._read, daemon=True).start()

    def line(self) -> list[str]:
        """The fields of the next line; none where the process ended, or takes too long."""
        try:
            return self.lines.get(timeout=MOST_SECONDS).split("\t")
        except queue.Empty:
            return []

    def end(self) -> None:
        """End the process, whatever it does."""
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()

    def _read(self) -> None:
        try:
            for line in self.process.stdout:
                self.lines.put(line.rstrip("\n"))
        except ValueError:  # it was closed
            pass
        self.lines.put("over")


def campaign(
    seed: int, seconds: float, program: Sequence[str] = PROGRAM
) -> Iterator[tuple[str, int, str]]:
    """Kind, seed and outcome of attacks, until the time is over; a program makes them."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        worker = Worker([*program, str(seed)])
        try:
            while time.monotonic() < end:
                begun = worker.line()
                if len(begun) != 3:
                    return  # it could not even start
                kind, seed = begun[1], int(begun[2])
                found = worker.line()
                if found and found[0] == "end":
                    yield kind, seed, found[1]
                    continue
                status = worker.process.wait() if found else None
                yield kind, seed, "hang" if status is None else f"crash with status {status}"
                seed += 1
                break
        finally:
            worker.end()


def keep(kind: str, seed: int, found: str) -> Path:
    """Write the bytes of an attack that went wrong into the corpus."""
    CORPUS.mkdir(exist_ok=True)
    path = CORPUS / f"{kind.replace(' ', '-')}_{seed}"
    path.write_bytes(ATTACKS[kind][0](seed))
    print(f"{kind}, seed {seed}: {found}; again: python -m tests.fuzz.campaign --repeat {path}")
    return path


def main() -> int:
    """Run a campaign; print what went wrong, and counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeat", type=Path)
    parser.add_argument("--work", type=int)
    options = parser.parse_args()
    if options.work is not None:
        work(options.work)
    if options.repeat is not None:
        kind = options.repeat.name.rpartition("_")[0].replace("-", " ")
        with tempfile.TemporaryDirectory() as folder:
            print(outcome(kind, options.repeat.read_bytes(), Path(folder)))
        return 0
    counts: Counter[tuple[str, str]] = Counter()
    for kind, seed, found in campaign(options.seed, options.seconds):
        counts[kind, found if found in FINE else "WRONG"] += 1
        if found not in FINE:
            keep(kind, seed, found)
    for (kind, found), count in sorted(counts.items()):
        print(f"{kind:14} {found:8} {count:8}")
    return int(any(found == "WRONG" for _, found in counts) or not counts)


if __name__ == "__main__":
    sys.exit(main())
