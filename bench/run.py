"""The suites in order: what is asked for is run, printed, and written down."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console

from kfac_engine.bench.build import run_build
from kfac_engine.bench.ceiling import Ceiling, measure_ceiling
from kfac_engine.bench.charts import draw
from kfac_engine.bench.contenders import running
from kfac_engine.bench.gpu import run_gpu
from kfac_engine.bench.jobs import SUITES
from kfac_engine.bench.machine import machine, print_machine
from kfac_engine.bench.measure import Row, chosen, measure
from kfac_engine.bench.memory import run_memory
from kfac_engine.bench.report import print_suite, write_json
from kfac_engine.bench.scaling import run_scaling
from kfac_engine.bench.stages import run_stages
from kfac_engine.registry import Registry

# Of output that does not go to a terminal: wide enough for a table.
_FILE_WIDTH = 140


@dataclass(frozen=True, slots=True)
class Setting:
    """What every suite is given.

    Attributes:
        console: Where to print.
        contenders: Names.
        ceiling: Of the machine.
        profile: Whether steps are taken apart.
    """

    console: Console
    contenders: Sequence[str]
    ceiling: Ceiling
    profile: bool = False


# Measures a suite, prints its table and returns its rows, which are dataclasses.
Suite: TypeAlias = Callable[[Setting, str], Sequence[Any]]


def run_suites(
    names: Sequence[str] = (),
    json_path: str | Path | None = None,
    *,
    compare: Sequence[str] = (),
    plot: str | Path | None = None,
    profile: bool = False,
) -> None:
    """Run suites and print a table for each.

    Args:
        names: Of the suites, in this order; all but ``gpu`` if empty.
        json_path: Where to write the measurements too.
        compare: Peers that take part; they must be installed.
        plot: Folder for a chart of each suite that compares contenders.
        profile: Whether the suite ``step`` also prints where its time goes.

    Raises:
        UnknownNameError: No suite or peer has this name.
        BackendError: A result is not that of its definition, or a peer is not installed.
    """
    suites = known_suites()
    # Where there is a GPU is for the user to say: without one that suite only raises.
    todo = {name: suites[name] for name in names or [n for n in suites if n != "gpu"]}
    contenders = chosen(compare)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_FILE_WIDTH)
    found = machine()
    print_machine(console, found)
    setting = Setting(console, contenders, measure_ceiling(), profile)
    console.print(
        f"ceiling: {2e-9 * setting.ceiling.multiplications:.0f} GFLOP/s (sgemm), "
        f"{1e-9 * setting.ceiling.copied_bytes:.1f} GB/s (copy)"
    )
    measured: dict[str, Sequence[Any]] = {}
    for name, run in todo.items():
        measured[name] = run(setting, name)
        # After each suite: all of them take long enough to be interrupted.
        if json_path is not None:
            write_json(Path(json_path), found, setting.ceiling, measured)
    if plot is not None:
        contests = {name: rows for name, rows in measured.items() if name in SUITES}
        draw(Path(plot), contests)


def known_suites() -> Registry[Suite]:
    """Name to suite: the contests, then those that have no contenders."""
    suites: Registry[Suite] = Registry("suite", dict.fromkeys(SUITES, _run_contests))
    for name, run in _ALONE.items():
        suites.add(name, run)
    return suites


def _run_contests(setting: Setting, name: str) -> list[Row]:
    rows: list[Row] = []
    with running(setting.contenders) as processes:
        for job in SUITES[name]:
            rows += measure(job, processes, setting.ceiling)
    print_suite(setting.console, name, rows)
    if setting.profile and name == "step":
        run_stages(setting.console)
    return rows


_ALONE: Mapping[str, Suite] = {
    "memory": lambda setting, name: run_memory(setting.console, name),
    "scaling": lambda setting, name: run_scaling(setting.console, name),
    "gpu": lambda setting, name: run_gpu(setting.console, name),
    "build": lambda setting, name: run_build(setting.console, name),
}
