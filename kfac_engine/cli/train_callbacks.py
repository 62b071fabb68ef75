"""The options of ``train`` that choose callbacks of ``fit``."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kfac_engine.cli.command import Group

if TYPE_CHECKING:
    from kfac_engine.training.hooks import Callback


@dataclass(frozen=True, slots=True)
class Choices:
    """The callbacks of a run; None for none."""

    early_stop: int | None
    best: bool
    best_metric: str
    average: float | str | None
    tensorboard: Path | None

    def callbacks(self) -> "Iterator[Callback]":
        """Yield the callbacks."""
        import kfac_engine as ke

        if self.early_stop is not None:
            yield ke.EarlyStop(self.best_metric, self.early_stop)
        if self.average is not None:
            yield ke.WeightAverage(self.average)
        if self.best:
            yield ke.BestWeights(self.best_metric)
        if self.tensorboard is not None:
            yield ke.TensorBoard(self.tensorboard)


def _number_or_text(_: click.Context, __: click.Parameter, value: str | None) -> float | str | None:
    try:
        return None if value is None else float(value)
    except ValueError:
        return value


OPTIONS = (
    Group.LENGTH.count(
        "--early-stop", metavar="N",
        help="End the run after N validations in a row without an improvement."),
    Group.VALIDATION.option(
        "--best", is_flag=True, help="Write the weights of the best validation, not of the last "
        "step."),
    Group.VALIDATION.option(
        "--best-metric", metavar="NAME", default="validation_loss",
        help="Metric that --early-stop and --best compare."),
    Group.VALIDATION.option(
        "--average", metavar="DECAY|tail", callback=_number_or_text,
        help="Evaluate and write an average of the weights: an exponential one with a decay such "
        "as 0.99, or the mean over the last 40 % of the run."),
    Group.OUTPUT.file(
        "--tensorboard", metavar="DIR",
        help="Folder for event files of TensorBoard; needs the extra tensorboard."),
)  # fmt: skip
