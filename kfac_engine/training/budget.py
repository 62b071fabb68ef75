"""Ends a training run when its epochs, steps or seconds are spent, whichever comes first.

A schedule of the learning rate is its factor as a function of the part of the budget spent.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import cos, pi
from typing import TypeAlias

from kfac_engine.arguments import check_int, check_positive
from kfac_engine.errors import InputError
from kfac_engine.registry import Registry

EPOCHS = 10  # without a budget


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a run."""

    epoch: int = 0  # number of complete epochs
    batch: int = 0  # number of batches of the present epoch
    steps: int = 0  # number of batches in total
    seconds: float = 0.0  # wall time of the run


@dataclass(frozen=True, slots=True)
class Budget:
    """The bounds of a run; None for no bound."""

    epochs: int | None  # number of epochs
    steps: int | None  # number of batches
    seconds: float | None  # wall time

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            InputError: A bound is not positive.
        """
        for name in ("epochs", "steps"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), least=1)
        if self.seconds is not None:
            check_positive("seconds", self.seconds)

    def spent(self, position: Position, per_epoch: int | None) -> float:
        """Return the part of the budget that is spent, in [0, 1].

        Args:
            position: The position of the run.
            per_epoch: Batches in an epoch; None if it is not known.

        Returns:
            The largest of the parts of epochs, steps and seconds.
        """
        parts = [0.0]
        if self.epochs is not None:
            within = min(1.0, position.batch / per_epoch) if per_epoch else 0.0
            parts.append((position.epoch + within) / self.epochs)
        if self.steps is not None:
            parts.append(position.steps / self.steps)
        if self.seconds is not None:
            parts.append(position.seconds / self.seconds)
        return min(1.0, max(parts))


def budget_of(epochs: int | None, steps: int | None, seconds: float | None) -> Budget:
    """Return the budget of a run: ten epochs where no bound is given."""
    unbounded = epochs is None and steps is None and seconds is None
    return Budget(EPOCHS if unbounded else epochs, steps, seconds)


# The part of the budget that is spent, in [0, 1], to the factor of the learning rate.
ScheduleFunction: TypeAlias = Callable[[float], float]

# -- schedules of the learning rate ----------------------------------------------------------------

_TAIL = 0.4  # part of the budget in which "tail" falls


def _constant(spent: float) -> float:
    del spent
    return 1.0


def _cosine(spent: float) -> float:
    return 0.5 * (1 + cos(pi * spent))


def _tail(spent: float) -> float:
    return min(1.0, (1 - spent) / _TAIL)


SCHEDULES: Registry[ScheduleFunction] = Registry(
    "learning rate schedule", {"constant": _constant, "cosine": _cosine, "tail": _tail}
)


def schedule_function(schedule: str | ScheduleFunction) -> ScheduleFunction:
    """Return the function of a schedule.

    Args:
        schedule: A name of ``SCHEDULES`` or a function.

    Returns:
        The function.

    Raises:
        InputError: The argument is neither a name nor a function.
        UnknownNameError: No schedule has this name.
    """
    if isinstance(schedule, str):
        return SCHEDULES[schedule]
    if not callable(schedule):
        raise InputError(
            f"schedule must be one of {', '.join(SCHEDULES)}, or a function, got {schedule!r}."
        )
    return schedule
