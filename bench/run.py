"""The measurements themselves: check the result first, then time."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console

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
    chosen = {name: SUITES[name] for name in names or SUITES}
    found, console = machine(), Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_FILE_WIDTH)
    print_machine(console, found)
    measured = {}
    for name, cases in chosen.items():
        measured[name] = [measure(case) for case in cases]
        print_suite(console, name, measured[name])
    if json_path is not None:
        write_json(Path(json_path), found, measured)


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
