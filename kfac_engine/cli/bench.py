"""``bench``: measure the speed of the package next to its definition and to other libraries."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import click

from kfac_engine.cli.command import Group, command

Entry = TypeVar("Entry")


def _list(convert: Callable[[str], Entry], context: Any, option: Any, text: str) -> list[Entry]:
    """Return the entries of a text with commas; a usage error if one cannot be converted."""
    del context
    try:
        return [convert(entry) for part in text.split(",") if (entry := part.strip())]
    except ValueError as error:
        raise click.BadParameter(f"{error}", param=option) from error


_OPTIONS = (
    Group.TRAINING_SUITE.file(
        "--data-folder", metavar="DIR",
        help="Folder of Fashion-MNIST, for the suite train; by default the folder of Debian's "
        "package dataset-fashion-mnist, or else the bundled digits."),
    Group.TRAINING_SUITE.option(
        "--tasks", default="", metavar="NAMES", callback=partial(_list, str),
        help="Tasks of the suite train, separated by commas; NAME@N has batches of N examples. "
        "'tables', 'modern', 'exact' and 'long' are collections of tasks."),
    Group.TRAINING_SUITE.option(
        "--methods", default="", metavar="NAMES", callback=partial(_list, str),
        help="Methods of the suite train, separated by commas: kfac, adam, sgd, muon. "
        "NAME:OPTION=VALUE sets an option of the optimizer."),
    Group.TRAINING_SUITE.option(
        "--seeds", default="0,1,2", metavar="NUMBERS", callback=partial(_list, int),
        help="Seeds of the suite train; rates are tuned with the first seed."),
    Group.TRAINING_SUITE.option(
        "--seconds", default="", metavar="NUMBERS", callback=partial(_list, float),
        help="CPU seconds of each run of the suite train; by default the budget of each task."),
    Group.TRAINING_SUITE.file(
        "--runs", metavar="FILE",
        help="JSON lines of the runs of the suite train: runs in it are skipped, new ones are "
        "added."),
    Group.TRAINING_SUITE.option(
        "--reuse", is_flag=True,
        help="Skip runs in the file of --runs also if the sources have changed since."),
    Group.TRAINING_SUITE.count(
        "--workers", default=1, metavar="N",
        help="Number of runs of the suite train at a time, each on a separate core."),
)  # fmt: skip


@command(
    "Measure the time and the memory of each operation, of whole steps, and of training.",
    "kfac-engine bench --suite inverse --repeats 2 --json results.json",
    Group.MEASUREMENTS.option(
        "--suite", multiple=True, metavar="NAME",
        help="Suite to run; by default all but gpu, models and train. May be repeated. Names: "
        "dense, conv, inverse, power, precondition, step, uses, memory, scaling, gpu, build, "
        "models, train."),
    Group.MEASUREMENTS.option(
        "--compare", default="", metavar="NAMES", callback=partial(_list, str),
        help="Libraries to compare with, in a checkout and if they are installed: torch, "
        "torch-by-example, jax, kfac-jax, curvlinops, laplace-torch, kronfluence. Separated by "
        "commas."),
    Group.MEASUREMENTS.file(
        "--models", metavar="DIR",
        help="Folder of the suite models, which tests/exporters/real_size.py of a checkout "
        "writes: NAME.onnx, and NAME.npz with an array for each input, and targets."),
    Group.MEASUREMENTS.file(
        "--tune", metavar="FILE",
        help="With the suite gpu, measure the variants of kernels for each shape instead, and add "
        "the fastest ones to this file; kernels/tuned.json of a checkout has those of the "
        "package."),
    Group.MACHINE.option(
        "--threads", type=int, metavar="N",
        help="Number of threads of each contender; by default the number of usable cores."),
    Group.MEASUREMENTS.count(
        "--repeats", least=2, metavar="N",
        help="Number of rounds of each job; by default as many as fit into eight seconds, 2 to 7."),
    Group.OUTPUT.file(
        "--json", "json_path", metavar="FILE",
        help="Write the measurements into this file, too, after each suite."),
    Group.OUTPUT.option(
        "--resume", is_flag=True,
        help="Skip the suites that the file of --json has without gaps; refuse a file of another "
        "machine."),
    Group.OUTPUT.file(
        "--plot", metavar="DIR",
        help="Draw a chart of each suite into this folder; needs matplotlib."),
    Group.MEASUREMENTS.option(
        "--profile", is_flag=True,
        help="Show the time and the memory of each stage of a step, with the suite step."),
    training=_OPTIONS,
)  # fmt: skip
def bench(
    suite: tuple[str, ...], json_path: Path | None, training: SimpleNamespace, **options: Any
) -> None:
    from kfac_engine.bench.run import Options, run_suites
    from kfac_engine.bench.training.suite import TrainingOptions

    chosen = Options(training=TrainingOptions(**vars(training)), **options)
    run_suites(suite, json_path, options=chosen)
