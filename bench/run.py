"""The measurements themselves: check the result first, then time."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
from rich.console import Console

from kfac_engine.bench.build import Stage, run_build
from kfac_engine.bench.cases import SUITES, Case
from kfac_engine.bench.report import (
    Row,
    machine,
    print_machine,
    print_suite,
    write_json,
)
from kfac_engine.bench.timing import time_in_turn
from kfac_engine.errors import BackendError
from kfac_engine.registry import Registry

# Measures a suite, prints its table and returns the rows.
Suite: TypeAlias = Callable[[Console, str], Sequence[Row | Stage]]

_ROUNDS = 9
# Of output that does not go to a terminal: wide enough for a table.
_FILE_WIDTH = 120


def run_suites(names: Sequence[str] = (), json_path: str | Path | None = None) -> None:
    """Run suites and print a table for each.

    Args:
        names: Of the suites, in this order; all if empty.
        json_path: Where to write the measurements too.

    Raises:
        UnknownNameError: No suite has this name.
        BackendError: A result is not that of its definition.
    """
    known: Registry[Suite] = Registry("suite", dict.fromkeys(SUITES, _run_contests))
    known.add("build", run_build)
    chosen = {name: known[name] for name in names or known}
    found, console = machine(), Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_FILE_WIDTH)
    print_machine(console, found)
    measured = {name: run(console, name) for name, run in chosen.items()}
    if json_path is not None:
        write_json(Path(json_path), found, measured)


def _run_contests(console: Console, name: str) -> list[Row]:
    rows = [measure(case) for case in SUITES[name]]
    print_suite(console, name, rows)
    return rows


def measure(case: Case, rounds: int = _ROUNDS) -> Row:
    """Check one case and time it.

    Args:
        case: Of ``cases``.
        rounds: How often each way is timed.

    Returns:
        The row of its table.

    Raises:
        BackendError: The result is not that of the definition.
    """
    contest = case.setup()
    truth, result = contest.definition(), contest.ours()
    error = float(np.abs(result - truth).max() / np.abs(truth).max())
    if not error <= case.tolerance:
        raise BackendError(
            f"'{case.name}' is off by {error:.1e} of its largest entry, more than "
            f"{case.tolerance}; its time would mean nothing."
        )
    ways = {"definition": contest.definition, "ours": contest.ours}
    times = time_in_turn(ways, rounds)
    rate = case.multiplications / times["ours"].median
    return Row(case.name, times["definition"], times["ours"], error, rate)
