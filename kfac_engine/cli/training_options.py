"""The options of the suite ``train`` of ``bench``."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import click

from kfac_engine.cli.command import Group

Command = TypeVar("Command", bound=Callable[..., Any])
Entry = TypeVar("Entry")


def separated(text: str) -> list[str]:
    """Return the entries of a text, without blanks around them and without empty entries."""
    return [entry for part in text.split(",") if (entry := part.strip())]


def _list(convert: Callable[[str], Entry], context: Any, option: Any, text: str) -> list[Entry]:
    """Return the entries of an option; a usage error if one cannot be converted."""
    del context
    try:
        return [convert(entry) for entry in separated(text)]
    except ValueError as error:
        raise click.BadParameter(f"{error}", param=option) from error


_OPTIONS = (
    Group.TRAINING_SUITE.file(
        "--data-folder",
        metavar="DIR",
        help="Folder of Fashion-MNIST, for the suite train; by default that of Debian's package "
        "dataset-fashion-mnist, or else the bundled digits.",
    ),
    Group.TRAINING_SUITE.option(
        "--tasks",
        default="",
        metavar="NAMES",
        callback=partial(_list, str),
        help="Tasks of the suite train, separated by commas; NAME@N has batches of N examples. "
        "'tables' and 'modern' are collections of tasks.",
    ),
    Group.TRAINING_SUITE.option(
        "--methods",
        default="",
        metavar="NAMES",
        callback=partial(_list, str),
        help="Methods of the suite train, separated by commas: kfac, adam, sgd, muon, soap, "
        "torch-adam. NAME:OPTION=VALUE sets an option of the optimizer.",
    ),
    Group.TRAINING_SUITE.option(
        "--seeds",
        default="0,1,2",
        metavar="NUMBERS",
        callback=partial(_list, int),
        help="Seeds of the suite train; rates are tuned with the first one.",
    ),
    Group.TRAINING_SUITE.option(
        "--seconds",
        default="",
        metavar="NUMBERS",
        callback=partial(_list, float),
        help="CPU seconds of each run of the suite train; by default those of the table of tasks.",
    ),
    Group.TRAINING_SUITE.file(
        "--runs",
        metavar="FILE",
        help="JSON lines of the runs of the suite train: runs in it are skipped, new ones are "
        "added.",
    ),
    Group.TRAINING_SUITE.option(
        "--reuse",
        is_flag=True,
        help="Skip runs in the file of --runs also if the sources have changed since.",
    ),
    Group.TRAINING_SUITE.count(
        "--workers",
        default=1,
        metavar="N",
        help="Number of runs of the suite train at a time, each on a core of its own.",
    ),
)


def training_options(command: Command) -> Command:
    """Add the options of the suite ``train`` to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
