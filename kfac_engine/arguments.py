"""Checks of arguments; each raises an InputError that names the argument.

Numbers of a file are untrusted as well: JSON has integers that no float can hold.
"""

import sys
from collections.abc import Collection, Sequence
from math import inf, isfinite
from numbers import Integral, Real

from kfac_engine.errors import InputError
from kfac_engine.suggestions import suggestion


def one_of(name: str, value: object, allowed: Collection[str]) -> None:
    """Raise an InputError unless a value is one of the allowed strings."""
    if not isinstance(value, str) or value not in allowed:
        near = suggestion(value, allowed)
        raise InputError(f"{name} must be one of {', '.join(allowed)}; got {value!r}{near}.")


def whole(name: str, value: object, *, least: int | None) -> None:
    """Raise an InputError unless a value is an integer, not below ``least``."""
    fits = isinstance(value, Integral) and not isinstance(value, bool)
    if not fits or (least is not None and value < least):  # type: ignore[operator] # a number
        bound = "" if least is None else f" of at least {least}"
        raise InputError(f"{name} must be a whole number{bound}, got {value!r}.")


def number(name: str, value: object) -> None:
    """Raise an InputError unless a value is a finite real number."""
    fits = isinstance(value, Real) and not isinstance(value, bool)
    if not fits or not isfinite(value):  # type: ignore[arg-type] # a number
        raise InputError(f"{name} must be a finite number, got {value!r}.")


def positive(name: str, value: object) -> None:
    """Raise an InputError unless a value is a positive finite number."""
    fits = isinstance(value, Real) and not isinstance(value, bool)
    if not fits or not 0 < value < inf:  # type: ignore[operator] # a number
        raise InputError(f"{name} must be a positive number, got {value!r}.")


def flag(name: str, value: object) -> None:
    """Raise an InputError unless a value is True or False."""
    if value is not True and value is not False:
        raise InputError(f"{name} must be True or False, got {value!r}.")


def listed(name: str, value: object, like: str) -> Sequence[object]:
    """Return a sequence unchanged; raise an InputError that shows an example for other values."""
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise InputError(f"{name} must be a list, such as {like}, got {value!r}.")
    return value


def texts(name: str, value: object, like: str) -> None:
    """Raise an InputError that shows an example unless a value is a list of strings."""
    if not all(isinstance(entry, str) for entry in listed(name, value, like)):
        raise InputError(f"{name} must be a list of names, such as {like}, got {value!r}.")


# Larger counters are not exact as floats.
_MOST = 2**53


def is_count(value: object, least: int = 0) -> bool:
    """Return whether a value of a file is a whole number that a counter can have."""
    return type(value) is int and least <= value <= _MOST


def is_amount(value: object) -> bool:
    """Return whether a value of a file is a finite number of at least 0."""
    return type(value) in (int, float) and 0 <= value <= sys.float_info.max  # type: ignore[operator] # a number
