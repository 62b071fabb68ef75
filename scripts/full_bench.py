"""Runs all suites on this machine and writes their tables.

    python -m scripts.full_bench                      bench/results/<date>-cpu.json and .md
    python -m scripts.full_bench --kernel Haswell     bench/results/<date>-cpu-haswell.json and .md

All installed peers take part. An older kernel of BLAS is measured in suites with contenders only.
Each suite is written when it ends. After an interruption, the same command with ``--resume``
continues with the next suite. A run takes 16 minutes on an otherwise idle machine.
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

# Environment variable that selects a kernel of OpenBLAS.
_KERNEL = "OPENBLAS_CORETYPE"


def main() -> int:
    """Measure, then write all tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--kernel", default="", help="kernel of OpenBLAS")
    parser.add_argument("--resume", action="store_true", help="skip the measured suites")
    parser.add_argument("--suite", action="append", default=[], help="a suite; may be repeated")
    chosen = parser.parse_args()
    status = subprocess.run(
        command(chosen.kernel, chosen.suite, resume=chosen.resume),
        env=environment(chosen.kernel), check=False,
    ).returncode  # fmt: skip
    if status == 0:
        bench_tables.main()
    return status


def command(kernel: str, suites: list[str], *, resume: bool) -> list[str]:
    """Return the command line of ``bench``.

    Without suites, it has all, or the suites with contenders if a kernel is named.
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
    """Return the environment of this process with the kernel, or without a forced kernel."""
    variables = {name: value for name, value in os.environ.items() if name != _KERNEL}
    return {**variables, _KERNEL: kernel} if kernel else variables


if __name__ == "__main__":
    raise SystemExit(main())
