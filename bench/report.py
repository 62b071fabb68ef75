"""How measurements look: a table for people, JSON for programs, and the machine beside both."""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy
from rich import box
from rich.console import Console
from rich.table import Table
from threadpoolctl import threadpool_info

from kfac_engine.bench.timing import Spread


@dataclass(frozen=True, slots=True)
class Row:
    """What was found for one case.

    Attributes:
        case: Its name.
        definition: Times of the plain way.
        ours: Times of the backend.
        error: Largest difference of the results relative to the largest entry.
        rate: Multiplications of the definition a second, as ours gets through them.
    """

    case: str
    definition: Spread
    ours: Spread
    error: float
    rate: float

    @property
    def gain(self) -> float:
        """How many times faster ours is, by medians."""
        return float(self.definition.median / self.ours.median)


def machine() -> dict[str, object]:
    """What the times depend on besides the code."""
    return {
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "scipy": scipy.__version__,
        # NumPy and SciPy may each bring their own.
        "blas": [
            {
                "library": library["internal_api"],
                "version": library["version"],
                "kernel": library.get("architecture"),
                "threads": library["num_threads"],
            }
            for library in threadpool_info()
            if library["user_api"] == "blas"
        ],
    }


def print_machine(console: Console, found: dict[str, object]) -> None:
    """Print the facts of ``machine``, one a line."""
    for name, value in found.items():
        for item in value if isinstance(value, list) else [value]:
            text = ", ".join(map(str, item.values())) if isinstance(item, dict) else item
            console.print(f"{name}: {text}")


def print_suite(console: Console, name: str, rows: Sequence[Row]) -> None:
    """Print the table of one suite."""
    table = Table(title=f"Suite {name}", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("case")
    for head in ("definition ms", "ours ms", "quartiles ms", "times faster", "Gmult/s", "error"):
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(
            row.case,
            f"{1e3 * row.definition.median:.2f}",
            f"{1e3 * row.ours.median:.2f}",
            f"{1e3 * row.ours.low:.2f} – {1e3 * row.ours.high:.2f}",
            f"{row.gain:.2f}",
            f"{row.rate / 1e9:.1f}",
            f"{row.error:.0e}",
        )
    console.print(table)


def write_json(path: Path, found: dict[str, object], suites: Mapping[str, Sequence[Any]]) -> None:
    """Write machine and measurements, which are dataclasses; times are in seconds."""
    report = {
        "machine": found,
        "suites": {name: [asdict(row) for row in rows] for name, rows in suites.items()},
    }
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
