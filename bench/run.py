"""Run the suites in order, print their tables and write their measurements."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any, TypeAlias

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from kfac_engine.bench.build import run_build
from kfac_engine.bench.charts import chart_folder, draw
from kfac_engine.bench.contenders import CONTENDERS, select_contenders
from kfac_engine.bench.environment import checked_threads
from kfac_engine.bench.gpu import run_gpu
from kfac_engine.bench.jobs import SUITES
from kfac_engine.bench.machine import machine, print_machine
from kfac_engine.bench.measure import Row, measure
from kfac_engine.bench.memory import run_memory
from kfac_engine.bench.models import run_models
from kfac_engine.bench.processes import running
from kfac_engine.bench.report import read_report, restored, write_json
from kfac_engine.bench.roofline import Roofline, SuiteConditions, ceiling, ceilings, higher
from kfac_engine.bench.scaling import Point, run_scaling
from kfac_engine.bench.stages import run_stages
from kfac_engine.bench.suite_table import SuiteTable
from kfac_engine.bench.training.suite import TRAINING_DEFAULTS, TrainingOptions, run_training
from kfac_engine.errors import BackendError, InputError
from kfac_engine.registry import Registry
from kfac_engine.system.writing import check_outputs

# Width of output that does not go to a terminal: wide enough for a table.
_FILE_WIDTH = 160
# Suites that run only if the user names them: one raises an error without a GPU, one without files
# of models, and one takes hours.
_ON_REQUEST = ("gpu", "models", "train")


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a run besides the names of the suites."""

    compare: Sequence[str] = ()  # names of peers; they must be installed
    # Number of threads of each contender; None for the number of usable cores.
    threads: int | None = None
    # Number of rounds of each job; None for as many as fit into the time.
    repeats: int | None = None
    profile: bool = False  # whether the suite ``step`` also prints the time of each stage
    plot: str | Path | None = None  # folder for a chart of each suite that compares contenders
    resume: bool = False  # whether to skip the suites that the JSON file has already
    models: Path | None = None  # folder of the suite ``models``
    # File for the fastest variants of kernels, which the suite ``gpu`` measures instead.
    tune: Path | None = None
    training: TrainingOptions = TRAINING_DEFAULTS  # options of the suite ``train``


DEFAULTS = Options()


@dataclass(frozen=True, slots=True)
class Setting:
    """What every suite receives.

    ``ceiling`` has the best rates of the machine so far, ``latest`` the rates after the last suite.
    ``folder`` is for charts. ``failures`` has the names of jobs and suites that failed so far.
    """

    console: Console
    contenders: Sequence[str]
    ceiling: Roofline
    latest: Roofline
    threads: int
    options: Options
    folder: Path | None = None
    failures: list[str] = field(default_factory=list)


# Measures a suite, prints its table and returns its rows, which are dataclasses.
Suite: TypeAlias = Callable[[Setting, str], Sequence[Any]]


def run_suites(
    names: Sequence[str] = (), json_path: str | Path | None = None, *, options: Options = DEFAULTS
) -> None:
    """Run suites and print a table for each.

    Without names, all suites run but ``gpu``, ``models`` and ``train``. The file is written after
    each suite. ``BackendError`` is raised at the end if a result differed from its definition, or a
    suite lacked a device or a package.
    """
    suites = known_suites()
    todo = {name: suites[name] for name in names or [n for n in suites if n not in _ON_REQUEST]}
    contenders, threads = select_contenders(options.compare), checked_threads(options.threads)
    facts = machine(threads)
    path = None if json_path is None else Path(json_path)
    check_outputs({"--json": path, "--tune": options.tune})
    folder = None if options.plot is None else chart_folder(Path(options.plot))
    if options.resume and path is None:
        raise InputError("--resume continues a file of measurements: name it with --json.")
    report: dict[str, dict[str, Any]] = {"machine": facts, "course": {}, "suites": {}}
    if options.resume and path is not None:
        report.update(read_report(path, facts))
    setting = replace(_prepared(facts, contenders, options), folder=folder)
    for name, run in todo.items():
        if name in report["suites"]:
            setting.console.print(f"{name}: skipped, {path} has it")
            continue
        rows, course = _measured(setting, name, run)
        _print_course(setting.console, name, course)
        setting = replace(setting, ceiling=course.best, latest=course.after)
        report["course"][name] = asdict(course)
        report["suites"][name] = [asdict(row) for row in rows]
        if path is not None:
            write_json(path, report)
    if folder is not None:
        _draw_all(folder, report["suites"])
    if setting.failures:
        raise BackendError(
            f"not measured: {'; '.join(setting.failures)}. The reasons are printed above; all "
            "other jobs are measured."
        )


def new_console() -> Console:
    """Return a console of the terminal's width, or a wide one for a file or a pipe."""
    # Brackets in messages are not markup.
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=_FILE_WIDTH)
    return console


def _prepared(facts: dict[str, Any], contenders: Sequence[str], options: Options) -> Setting:
    """Print the facts about the machine, and measure its rates."""
    console = new_console()
    print_machine(console, facts)
    limits = ceilings(facts["threads"])
    facts["ceilings"] = [asdict(limit) for limit in limits]
    for limit in limits:
        plural = "s" if limit.threads > 1 else ""
        console.print(f"ceiling with {limit.threads} thread{plural}: {limit}")
    best = limits[-1]
    return Setting(console, contenders, best, best, facts["threads"], options)


def _measured(setting: Setting, name: str, run: Suite) -> tuple[Sequence[Any], SuiteConditions]:
    """Return the rows and the conditions of a suite; print its error if it fails."""
    start, failed, rows = perf_counter(), len(setting.failures), list[Any]()
    try:
        rows.extend(run(setting, name))
    except BackendError as error:
        setting.failures.append(name)
        setting.console.print(f"error: {error}")
    seconds, after = perf_counter() - start, ceiling(setting.threads)
    return rows, SuiteConditions(
        seconds, setting.latest, after, higher(setting.ceiling, after),
        missing=tuple(setting.failures[failed:]),
    )  # fmt: skip


def _draw_all(folder: Path, suites: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    comparisons = {name: restored(Row, suites[name]) for name in SUITES if suites.get(name)}
    draw(folder, comparisons, restored(Point, suites.get("scaling", ())))


def _print_course(console: Console, name: str, course: SuiteConditions) -> None:
    console.print(
        f"{name} took {course.seconds:.0f} s; ceiling before it: {course.before}; after it: "
        f"{course.after}"
    )
    if course.slowed:
        console.print(
            f"! the machine was slower than at its best, {course.best}: times are too long, "
            "ratios of contenders remain valid"
        )
    console.print()


def known_suites() -> Registry[Suite]:
    """Return the suites by name: comparisons, then suites without contenders."""
    suites: Registry[Suite] = Registry("suite", dict.fromkeys(SUITES, _run_comparisons))
    for name, run in _ALONE.items():
        suites.add(name, run)
    return suites


def _run_comparisons(setting: Setting, name: str) -> list[Row]:
    """Measure the jobs of a suite, and print the rows of each job, or its error, at once."""
    rows: list[Row] = []
    table = SuiteTable(setting.console, name, setting.contenders)
    table.start()
    with _progress(setting.console) as progress:
        for job in progress.track(SUITES[name], description=name):
            able = [who for who in setting.contenders if CONTENDERS[who].can_check(job)]
            table.case(job.name)
            try:
                # New processes for each job: no memory remains from the previous job.
                with running(able, setting.threads) as processes:
                    measured = measure(job, processes, setting.ceiling, setting.options.repeats)
            except BackendError as error:
                setting.failures.append(f"{name}: {job.name}")
                setting.console.print(f"error: {error}")
            else:
                table.rows(measured)
                rows += measured
    table.end()
    if setting.options.profile and name == "step":
        run_stages(setting.console, setting.threads)
    return rows


def _progress(console: Console) -> Progress:
    """Return a bar with the elapsed and the remaining time, on a terminal only."""
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("elapsed,"), TimeRemainingColumn(), TextColumn("remaining"),
        console=console, transient=True, disable=not console.is_terminal,
    )  # fmt: skip


_ALONE: Mapping[str, Suite] = {
    "memory": lambda setting, name: run_memory(setting.console, name),
    "scaling": lambda setting, name: run_scaling(setting.console, name, setting.threads),
    "gpu": lambda setting, name: run_gpu(
        setting.console, name, setting.failures, setting.options.tune
    ),
    "build": lambda setting, name: run_build(setting.console, name),
    "models": lambda setting, name: run_models(
        setting.console, name, setting.options.models, with_torch="torch" in setting.contenders
    ),
    "train": lambda setting, name: run_training(
        setting.console, setting.options.training, setting.folder
    ),
}
