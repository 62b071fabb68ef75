"""Checks arguments; each check raises an InputError that names the argument.

Numbers of a file are untrusted as well: JSON has integers that no float can hold.
"""

import sys
from collections.abc import Collection, Mapping, Sequence
from math import isfinite
from numbers import Integral, Real
from typing import TypeGuard

from kfac_engine.errors import InputError, suggestion

# Largest size of an axis.
_MOST = 2**63 - 1
# Largest number of threads of a session.
MOST_THREADS = 2**16


def check_choice(name: str, value: object, allowed: Collection[str]) -> None:
    """Raise an InputError unless a value is one of the allowed strings."""
    if not isinstance(value, str) or value not in allowed:
        near = suggestion(value, allowed)
        raise InputError(f"{name} must be one of {', '.join(allowed)}; got {value!r}{near}.").of(
            name
        )


def check_int(name: str, value: object, *, least: int | None, most: int = _MOST) -> None:
    """Raise an InputError unless a value is an integer from ``least`` to ``most``."""
    fits = isinstance(value, int | Integral) and not isinstance(value, bool)
    if not fits or (least is not None and value < least):  # type: ignore[operator] # a number
        bound = "" if least is None else f" of at least {least}"
        raise InputError(f"{name} must be a whole number{bound}, got {value!r:.80}.").of(name)
    if value > most:  # type: ignore[operator] # a number
        raise InputError(f"{name} must be a whole number of at most {most}, got a larger one.").of(
            name
        )


def check_seed(seed: object) -> None:
    """Raise an InputError unless a value is an integer of at least zero, of any size."""
    fits = isinstance(seed, Integral) and not isinstance(seed, bool)
    if not fits or seed < 0:  # type: ignore[operator] # a number
        raise InputError(f"seed must be a whole number of at least 0, got {seed!r:.80}.").of("seed")


def check_number(name: str, value: object, within: str = "") -> None:
    """Raise an InputError unless a value is a finite number, in an interval like ``"[0, 1)"``."""
    if not _is_finite(value):
        raise InputError(f"{name} must be a finite number, got {value!r:.80}.").of(name)
    if within:
        low, high = (float(end) for end in within[1:-1].split(","))
        ends = {low} if within[0] == "[" else set()
        ends |= {high} if within[-1] == "]" else set()
        if not (low < value < high or value in ends):
            raise InputError(f"{name} must lie in {within}, got {value!r:.80}.").of(name)


def check_positive(name: str, value: object) -> None:
    """Raise an InputError unless a value is a positive finite number."""
    if not (_is_finite(value) and value > 0):
        raise InputError(f"{name} must be a positive number, got {value!r:.80}.").of(name)


def _is_finite(value: object) -> TypeGuard[float]:
    """Return whether a value is a number that a float can hold."""
    if not isinstance(value, float | Real) or isinstance(value, bool):
        return False
    try:
        return isfinite(value)
    except OverflowError:  # a whole number of many digits
        return False


def check_at_least_zero(name: str, value: object) -> None:
    """Refuse a value that is not a finite number of at least 0, with an InputError."""
    check_number(name, value)
    if value < 0:  # type: ignore[operator] # a number
        raise InputError(f"{name} must be at least 0, got {value!r}.").of(name)


def check_bool(name: str, value: object) -> bool:
    """Return a value unchanged; raise an InputError unless it is True or False."""
    if not isinstance(value, bool):
        raise InputError(f"{name} must be True or False, got {value!r:.80}.").of(name)
    return value


def check_list(name: str, value: object, like: str) -> Sequence[object]:
    """Return a sequence unchanged; raise an InputError that shows an example for other values."""
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise InputError(f"{name} must be a list, such as {like}, got {value!r:.80}.").of(name)
    return value


def check_texts(name: str, value: object, like: str) -> Sequence[str]:
    """Return a list of strings unchanged; raise an InputError that shows an example otherwise."""
    entries = [entry for entry in check_list(name, value, like) if isinstance(entry, str)]
    if len(entries) < len(check_list(name, value, like)):
        raise InputError(f"{name} must be a list of names, such as {like}, got {value!r:.80}.").of(
            name
        )
    return entries


def check_instance(name: str, value: object, kind: type) -> None:
    """Raise an InputError unless a value is an object of a public class."""
    if not isinstance(value, kind):
        raise InputError(
            f"{name} must be a kfac_engine.{kind.__name__}, got {type(value).__name__}."
        ).of(name)


def check_patterns(name: str, value: object) -> None:
    """Raise an InputError unless a value is None, a string or a list of strings."""
    if not isinstance(value, str | None):
        check_texts(name, value, "['fc*']")


def check_mapping(name: str, value: object, like: str) -> None:
    """Raise an InputError that shows an example unless a value is None or a mapping."""
    if not isinstance(value, Mapping | None):
        raise InputError(f"{name} must be a dictionary, such as {like}, got {value!r:.80}.").of(
            name
        )


def check_arrays(values: object) -> None:
    """Raise an InputError unless values are a mapping, as that of parameters to arrays."""
    if not isinstance(values, dict | Mapping):
        raise InputError(
            f"pass arrays by parameter, as {{name: array}}, got {type(values).__name__}."
        )


# Larger counters are not exact as floats.
_MOST_COUNTED = 2**53


def is_count(value: object) -> bool:
    """Return whether a value of a file is a whole number that a counter can have."""
    return type(value) is int and 0 <= value <= _MOST_COUNTED


def is_amount(value: object) -> bool:
    """Return whether a value of a file is a finite number of at least 0."""
    return type(value) in (int, float) and 0 <= value <= sys.float_info.max  # type: ignore[operator] # a number
