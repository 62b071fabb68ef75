"""Measures everything on this machine and writes the tables of it.

    python -m scripts.full_bench                      bench/results/<date>-cpu.json and .md
    python -m scripts.full_bench --kernel Haswell     bench/results/<date>-cpu-haswell.json and .md

Every peer that this Python has takes part; an older kernel is measured in suites with contenders
only. Each suite is written when it is done: after an interruption the same command with
``--resume`` goes on with the next one. Takes 16 minutes; let nothing else run meanwhile.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping
from datetime import date

from kfac_engine.bench.contenders import CONTENDERS, PEERS
from kfac_engine.bench.jobs import SUITES
from scripts import bench_tables

# What OpenBLAS takes in place of the kernel for this processor.
_KERNEL = "OPENBLAS_CORETYPE"


def main() -> int:
    """Measure, then write all tables.

    Returns:
        The exit status of ``bench``.
    """
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--kernel", default="", help="of OpenBLAS; by default the processor's own")
    parser.add_argument("--resume", action="store_true", help="keep the suites already measured")
    parser.add_argument("--suite", action="append", default=[], help="only this; may be repeated")
    chosen = parser.parse_args()
    status = subprocess.run(
        command(chosen.kernel, chosen.suite, resume=chosen.resume),
        env=environment(chosen.kernel), check=False,
    ).returncode  # fmt: skip
    if status == 0:
        bench_tables.main()
    return status


def command(kernel: str, suites: list[str], *, resume: bool) -> list[str]:
    """The command line of ``bench``.

    Args:
        kernel: Of OpenBLAS; empty for the processor's own.
        suites: Which; empty for all, or for those with contenders where a kernel is chosen.
        resume: Whether suites in the file are kept.

    Returns:
        Program and arguments.
    """
    name = "-".join([f"{date.today()}-cpu", *([kernel.lower()] if kernel else [])])
    peers = [name for name in PEERS if not CONTENDERS[name].missing]
    return [
        sys.executable, "-m", "kfac_engine", "bench", "--profile",
        "--json", str(bench_tables.RESULTS / f"{name}.json"),
        *(["--compare", ",".join(peers)] if peers else []),
        *(["--resume"] if resume else []),
        *(part for suite in suites or (SUITES if kernel else ()) for part in ("--suite", suite)),
    ]  # fmt: skip


def environment(kernel: str) -> Mapping[str, str]:
    """This process's, with the kernel chosen, and no other one forced."""
    found = {name: value for name, value in os.environ.items() if name != _KERNEL}
    return {**found, _KERNEL: kernel} if kernel else found


if __name__ == "__main__":
    raise SystemExit(main())
