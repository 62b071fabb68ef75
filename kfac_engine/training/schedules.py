"""Schedules of the learning rate: its factor as a function of the part of the budget spent."""

from collections.abc import Callable
from math import cos, pi
from typing import TypeAlias

from kfac_engine.errors import InputError
from kfac_engine.registry import Registry

# The part of the budget that is spent, in [0, 1], to the factor of the learning rate.
ScheduleFunction: TypeAlias = Callable[[float], float]

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
