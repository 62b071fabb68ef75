"""The suite ``train``: all runs, the tables of their results and their curves."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Lock

from rich.console import Console

from kfac_engine.bench.training.data import DATA_FOLDER, has_images, load_images, load_text
from kfac_engine.bench.training.methods import METHODS
from kfac_engine.bench.training.plan import Group, all_tasks, final_runs, groups, tuning_runs
from kfac_engine.bench.training.records import Record, Records, revision
from kfac_engine.bench.training.run import Outcome, Run
from kfac_engine.bench.training.summary import (
    COMPARISONS,
    RESULTS,
    Comparison,
    GroupRow,
    compare,
    draw_curves,
    group_row,
)
from kfac_engine.bench.training.tasks import OF_TEXT
from kfac_engine.bench.training.worker import Workers
from kfac_engine.errors import InputError

_STEP = 0.002  # CPU seconds of a step of a table of data


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """Options of the suite; no names mean all tasks of no collection, and all methods.

    Without a data folder, images are those of Debian's package, or the bundled digits if there are
    none. Rates are tuned with the first seed. No ``seconds`` mean the budgets of the suite. With
    ``reuse``, runs of other sources in the file ``runs`` count.
    """

    data_folder: Path | None = None
    tasks: Sequence[str] = ()
    methods: Sequence[str] = ()
    seeds: Sequence[int] = (0, 1, 2)
    seconds: Sequence[float] = ()
    runs: Path | None = None
    reuse: bool = False
    workers: int = 1


TRAINING_DEFAULTS = TrainingOptions()


def run_training(
    console: Console,
    options: TrainingOptions,
    folder: Path | None = None,
    executor: Workers | None = None,
) -> list[GroupRow | Comparison]:
    """Make all runs that the file of runs does not have, and print the tables.

    Without a folder there are no pictures. The ``executor`` replaces a new process for each run.
    """
    if not options.seeds:
        raise InputError("--seeds must name one seed at least.")
    methods = options.methods or list(METHODS)
    chosen = groups(options.tasks or all_tasks(), methods, options.seconds)
    data_folder = _image_folder(console, options.data_folder)
    images = load_images(data_folder)
    if any(group.task.partition("@")[0] in OF_TEXT for group in chosen):
        console.print(f"text: hash {load_text().digest}")
    suite = _Suite(console, options, data_folder, images.source, executor or Workers())
    suite.run_missing(tuning_runs(chosen, options.seeds[0]))
    suite.run_missing(final_runs(chosen, suite.outcomes, options.seeds))
    results = suite.results(chosen)
    rows = [group_row(group, runs) for group, runs in results.items()]
    comparisons = compare(results)
    RESULTS.show(console, "Suite train: validation losses, medians over the seeds", rows)
    title = "Suite train: K-FAC until it reaches the loss of a rival"
    COMPARISONS.show(console, title, comparisons)
    if folder is not None:
        draw_curves(folder, results)
    return [*rows, *comparisons]


def _image_folder(console: Console, choice: Path | None) -> Path | None:
    """Return the folder of Fashion-MNIST, or None for the digits; print which data are used."""
    folder = choice or DATA_FOLDER
    if has_images(folder):
        console.print(f"images: Fashion-MNIST of {folder}")
        return folder
    if choice is not None:
        raise InputError(f"--data-folder: '{choice}' does not contain the images of Fashion-MNIST.")
    console.print(
        f"images: the bundled digits, because {folder} has no images; install Debian's package "
        "dataset-fashion-mnist or use --data-folder."
    )
    return None


class _Suite:
    """Executes runs and stores their records."""

    def __init__(
        self,
        console: Console,
        options: TrainingOptions,
        folder: Path | None,
        source: str,
        executor: Workers,
    ) -> None:
        self._console, self._options, self._folder = console, options, folder
        self._source, self._executor = source, executor
        self._records = Records(options.runs)
        self._lock = Lock()
        self._cores: SimpleQueue[int] = SimpleQueue()
        for core in range(options.workers):
            self._cores.put(core)

    @property
    def outcomes(self) -> dict[Run, Outcome]:
        """Results by settings."""
        return dict(self._records.of(self._source, any_revision=self._options.reuse))

    def run_missing(self, runs: Sequence[Run]) -> None:
        """Execute the runs without a result."""
        missing = [run for run in runs if run not in self.outcomes]
        seconds = sum(run.seconds or _STEP * run.budget_steps for run in missing)
        self._console.print(
            f"{len(runs) - len(missing)} runs are done; {len(missing)} runs of {seconds:.0f} CPU "
            f"seconds follow"
        )
        with ThreadPoolExecutor(self._options.workers) as pool:
            try:
                for future in [pool.submit(self._run, run) for run in missing]:
                    future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self._executor.end()
                raise

    def _run(self, run: Run) -> None:
        """Execute a run on a free core, and store its record at once."""
        core = self._cores.get()
        try:
            outcome = self._executor.execute(run, self._folder, core)
        finally:
            self._cores.put(core)
        with self._lock:
            self._records.add(Record(run, outcome, self._source, revision()))
            self._console.print(_described(run, outcome))

    def results(self, chosen: Sequence[Group]) -> dict[Group, dict[Run, Outcome]]:
        """Return the results of the best settings of each group."""
        outcomes, seeds = self.outcomes, self._options.seeds
        return {
            group: {run: outcomes[run] for run in group.chosen(outcomes, seeds)} for group in chosen
        }


def _described(run: Run, outcome: Outcome) -> str:
    last = (
        f"loss {outcome.curve[-1].loss:.4g}, lowest {outcome.lowest:.4g}" if outcome.curve else ""
    )
    each = 1e3 * outcome.cpu / max(1, outcome.steps)
    died = f"; died: {outcome.died}" if outcome.died else ""
    return f"{run}: {outcome.steps} steps of {each:.1f} ms, {last}{died}"
