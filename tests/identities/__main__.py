"""Repeat the random cases of seeds: ``python -m tests.identities 7 12``, or ``0:500``."""

import sys
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path

from tests.identities.cases import case
from tests.identities.identities import Trial, failures


def seeds(argument: str) -> Iterable[int]:
    first, _, end = argument.partition(":")
    return range(int(first), int(end or int(first) + 1))


def main(arguments: list[str]) -> None:
    warnings.simplefilter("error")
    chosen = [seed for argument in arguments for seed in seeds(argument)]
    for seed in chosen:
        with tempfile.TemporaryDirectory() as folder:
            trial = Trial(case(seed), Path(folder))
            found = list(failures(trial))
        if found or len(chosen) == 1:
            print(f"seed {seed}: {trial.case.description()}", *found, sep="\n  ", flush=True)
    print(f"{len(chosen)} cases")


if __name__ == "__main__":
    main(sys.argv[1:])
