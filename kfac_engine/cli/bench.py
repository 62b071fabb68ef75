"""``bench``: measure the speed of the package next to its definition and to other libraries."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import click

from kfac_engine.cli.command import Option, command, count_option, file_option

Entry = TypeVar("Entry")


def _list(convert: Callable[[str], Entry], context: Any, option: Any, text: str) -> list[Entry]:
    """Return the entries of a text with commas; a usage error if one cannot be converted."""
    del context
    try:
        return [convert(entry) for part in text.split(",") if (entry := part.strip())]
    except ValueError as error:
        raise click.BadParameter(f"{error}", param=option) from error


_OPTIONS = (
    file_option("The suite train", "--data-folder", metavar="DIR",
        help="Folder of Fashion-MNIST, for the suite train; by default the folder of Debian's "
        "package dataset-fashion-mnist, or else the bundled digits."),
    Option("The suite train", "--tasks", default="", metavar="NAMES", callback=partial(_list, str),
        help="Tasks of the suite train, separated by commas; NAME@N has batches of N examples. "
        "'tables', 'modern', 'exact' and 'long' are collections of tasks."),
    Option(
        "The suite train", "--methods", default="", metavar="NAMES", callback=partial(_list, str),
        help="Methods of the suite train, separated by commas: kfac, adam, sgd, muon. "
        "NAME:OPTION=VALUE sets an option of the optimizer."),
    Option("The suite train", "--seeds", default="0,1,2", metavar="NUMBERS",
        callback=partial(_list, int),
        help="Seeds of the suite train; rates are tuned with the first seed."),
    Option("The suite train", "--seconds", default="", metavar="NUMBERS",
        callback=partial(_list, float),
        help="CPU seconds of each run of the suite train; by default the budget of each task."),
    file_option("The suite train", "--runs", metavar="FILE",
        help="JSON lines of the runs of the suite train: runs in it are skipped, new ones are "
        "added."),
    Option("The suite train", "--reuse", is_flag=True,
        help="Skip runs in the file of --runs also if the sources have changed since."),
    count_option("The suite train", "--workers", default=1, metavar="N",
        help="Number of runs of the suite train at a time, each on a separate core."),
)  # fmt: skip


@command(
    "Measure the time and the memory of each operation, of whole steps, and of training.",
    "kfac-engine bench --suite inverse --repeats 2 --json results.json",
    Option("Measurements", "--suite", multiple=True, metavar="NAME",
        help="Suite to run; by default all but gpu, models and train. May be repeated. Names: "
        "dense, conv, inverse, power, precondition, step, uses, memory, scaling, gpu, build, "
        "models, train."),
    Option("Measurements", "--compare", default="", metavar="NAMES", callback=partial(_list, str),
        help="Libraries to compare with, in a checkout and if they are installed: torch, "
        "torch-by-example, jax, kfac-jax, curvlinops, laplace-torch, kronfluence. Separated by "
        "commas."),
    file_option("Measurements", "--models", metavar="DIR",
        help="Folder of the suite models, which tests/exporters/real_size.py of a checkout "
        "writes: NAME.onnx, and NAME.npz with an array for each input, and targets."),
    file_option("Measurements", "--tune", metavar="FILE",
        help="With the suite gpu, measure the variants of kernels for each shape instead, and add "
        "the fastest ones to this file; kernels/tuned.json of a checkout has those of the "
        "package."),
    Option("Machine", "--threads", type=int, metavar="N",
        help="Number of threads of each contender; by default the number of usable cores."),
    count_option("Measurements", "--repeats", least=2, metavar="N",
        help="Number of rounds of each job; by default as many as fit into eight seconds, 2 to 7."),
    file_option("Output", "--json", "json_path", metavar="FILE",
        help="Write the measurements into this file, too, after each suite."),
    Option("Output", "--resume", is_flag=True,
        help="Skip the suites that the file of --json has without gaps; refuse a file of another "
        "machine."),
    file_option("Output", "--plot", metavar="DIR",
        help="Draw a chart of each suite into this folder; needs matplotlib."),
    Option("Measurements", "--profile", is_flag=True,
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
