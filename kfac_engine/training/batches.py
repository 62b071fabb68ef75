"""Cuts a run's arrays or files into batches, or reads batches from an iterable."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol

from kfac_engine.arguments import check_number
from kfac_engine.datasets.examples import Batch, ExampleAxes
from kfac_engine.datasets.forms import Data, GivenBatches, as_batches, examples_of
from kfac_engine.datasets.shards import (
    WHOLE,
    Examples,
    OrderedBatches,
    Share,
    ShuffledBatches,
    split_examples,
)
from kfac_engine.errors import InputError


class Batches(Protocol):
    """A source of batches."""

    per_epoch: int | None  # number of steps in an epoch; None if it is not known

    def steps(self, number: int, start: int = 0) -> Iterator[list[Batch]]:
        """Return the batches of an epoch from the step ``start`` on, each as a list of its parts.

        Epochs and steps count from 0.
        """


@dataclass(frozen=True, slots=True)
class RunData:
    """The data of a run."""

    train: Batches  # the batches to train on
    # Batches to evaluate, which can be iterated again; None for no validation.
    validation: Iterable[Batch] | None
    source: Examples | None = None  # the examples before a split; None for an iterable of batches
    # Fraction of the examples that is split off for the validation; None for none.
    fraction: float | None = None

    @property
    def examples(self) -> int | None:
        """Number of examples before a split; None for an iterable of batches."""
        return None if self.source is None else self.source.total

    def contents(self) -> dict[str, str | float | None]:
        """Return texts that are equal for equal data: of ``data`` and of ``validation``.

        Iterables of batches are not read: their texts are equal.
        """
        held_out = self.validation
        if self.fraction is not None:
            return {"data": _contents(self.source), "validation": self.fraction}
        examples = held_out.examples if isinstance(held_out, OrderedBatches) else None
        validation = None if held_out is None else _contents(examples)
        return {"data": _contents(self.source), "validation": validation}


def run_data(
    data: Data,
    validation: Data | float | None,
    axes: ExampleAxes,
    batch_size: int,
    seed: int,
    share: Share = WHOLE,
    accumulate: int = 1,
) -> RunData:
    """Return the batches of a run.

    Args:
        data: Training data.
        validation: Data to evaluate; or a fraction of the examples, which are split off.
        axes: The axes of the examples.
        batch_size: Examples in a batch, where data are not batches already.
        seed: Seed of the orders and of the split.
        share: The examples of each batch that this process has.
        accumulate: Number of parts of a step; ``batch_size`` is the size of a part.

    Returns:
        The batches.

    Raises:
        InputError: The data have another form, or do not fit the model.
    """
    if share.size > 1 and axes.obstacle:
        raise InputError(
            f"the batches cannot be divided among {share.size} processes: {axes.obstacle}; call "
            f"optimizer.step with the examples of each process."
        )
    data = as_batches(data, axes)
    examples = examples_of(data, axes)
    if examples is None:
        if isinstance(validation, Real):
            raise InputError(
                "validation as a fraction splits arrays or files, but data are batches; pass "
                "separate validation data."
            )
        held_out_batches = _ordered(validation, axes, batch_size, share)
        return RunData(GivenBatches(data, axes, share, parts=accumulate), held_out_batches)
    whole_size = batch_size * accumulate
    if isinstance(validation, Real):
        check_number("validation", validation, "(0, 1)")
        used, held_out = split_examples(examples.counts, float(validation), seed)
        ordered = OrderedBatches(examples, batch_size, held_out, share)
        shuffled = ShuffledBatches(examples, whole_size, seed, used, share, accumulate)
        return RunData(shuffled, ordered, examples, float(validation))
    shuffled = ShuffledBatches(examples, whole_size, seed, share=share, parts=accumulate)
    return RunData(shuffled, _ordered(validation, axes, batch_size, share), examples)


def _contents(examples: Examples | None) -> str:
    return "batches" if examples is None else examples.contents()


def _ordered(data: Any, axes: ExampleAxes, batch_size: int, share: Share) -> Iterable[Batch] | None:
    """Return the batches of validation data; None for none."""
    if data is None:
        return None
    data = as_batches(data, axes)
    examples = examples_of(data, axes)
    if examples is None:
        return GivenBatches(data, axes, share)
    return OrderedBatches(examples, batch_size, share=share)
