"""Stores the engine, the optimizer and the callbacks of a training run in one file.

The file is a state of the engine (see ``engine/checkpoint``) whose extras are the numbers and the
arrays of each part: the optimizer, and the callbacks of ``fit`` that have a state.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from math import inf
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeAlias

from kfac_engine._types import Array
from kfac_engine.arguments import is_amount, is_count
from kfac_engine.engine.checkpoint import Extras
from kfac_engine.engine.engine import Engine
from kfac_engine.errors import InputError
from kfac_engine.system.state_files import TRAINING_STATE, form_of
from kfac_engine.system.writing import checked_path

OPTIMIZER = "optimizer"
# The number of a state that may be absent: the learning rate may be a function.
LEARNING_RATE = "learning_rate"
# The values of a counter; larger ones are not exact as floats.
COUNTER = (0, 2**53)

# Arrays by group, then by name, mostly the name of a parameter.
Arrays: TypeAlias = Mapping[str, Mapping[str, Array]]


@dataclass(frozen=True, slots=True)
class SavedState:
    """The state of an object of a run, such as an optimizer.

    Attributes:
        numbers: Numbers, texts, or lists of them, by name.
        arrays: Arrays by group, then by name. The shapes and types do not change during a run.
        bounds: The smallest and the largest value of each number in a file, by name.
    """

    numbers: Mapping[str, Any] = field(default_factory=dict)
    arrays: Arrays = field(default_factory=dict)
    bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)


Parts: TypeAlias = Mapping[str, SavedState]


@dataclass(frozen=True, slots=True)
class Number:
    """A number of a state, or a list of numbers, which an attribute of its owner has."""

    place: str  # name of the attribute, after the attributes that lead to it, with dots between
    bounds: tuple[float, float] | None = None  # smallest and largest value in a file; None for any
    # Called with the owner and the value of a file; refuses a value by an InputError.
    check: Callable[[Any, Any], object] | None = None
    is_constant: bool = False  # whether files must have the value of the owner, which never changes


# The numbers of a state by name. A function in the place of a number is not part of the state.
Numbers: TypeAlias = Mapping[str, Number]


def saved(owner: object, table: Numbers, arrays: Arrays | None = None) -> SavedState:
    """Return the state of an object whose numbers a table lists."""
    values = {name: attrgetter(number.place)(owner) for name, number in table.items()}
    numbers = {
        name: float(value) if isinstance(value, float) else value
        for name, value in values.items()
        if not callable(value)
    }
    bounds = {name: number.bounds for name, number in table.items() if number.bounds is not None}
    return SavedState(numbers, arrays or {}, bounds)


def set_numbers(owner: object, table: Numbers, values: Mapping[str, Any]) -> None:
    """Give an object the numbers of a state; states of older versions may lack some."""
    for name, number in table.items():
        if name in values and not number.is_constant:
            *path, attribute = number.place.split(".")
            target, value = reduce(getattr, path, owner), values[name]
            present = getattr(target, attribute)
            if not callable(present):
                is_float = isinstance(present, float)
                setattr(target, attribute, float(value) if is_float else value)


def check_numbers(owner: object, table: Numbers, values: Mapping[str, Any]) -> None:
    """Refuse numbers of a file by an InputError; the bounds have been compared."""
    for name, number in table.items():
        if number.check is not None:
            number.check(owner, values[name])


@dataclass(frozen=True, slots=True)
class TrainingState:
    """The state of a training run without the state of the engine."""

    optimizer: str  # class of the optimizer
    parts: Parts  # the parts by name; the optimizer is ``"optimizer"``
    # The position of ``fit``; empty in a file of ``Optimizer.save``.
    run: Mapping[str, Any] = field(default_factory=dict)


# Refuses the position of a run, or the numbers of a part, by an InputError.
Check: TypeAlias = Callable[[Mapping[str, Any]], None]


def write_training(path: str | Path, engine: Engine, saved: TrainingState) -> None:
    """Write the state of a training run; the file is replaced whole or not at all.

    Args:
        path: The file.
        engine: The engine.
        saved: The rest of the state.
    """
    to_numpy = engine.collection.backend.to_numpy
    arrays = {
        f"{part}/{group}/{name}": to_numpy(array)
        for part, state in saved.parts.items()
        for group, members in state.arrays.items()
        for name, array in members.items()
    }
    values = {
        "format": TRAINING_STATE.version,
        "optimizer": saved.optimizer,
        "parts": {part: dict(state.numbers) for part, state in saved.parts.items()},
        "run": dict(saved.run),
    }
    engine.save(checked_path(path), Extras(values, arrays))


def read_training(
    path: str | Path,
    engine: Engine,
    expected: TrainingState,
    check: Check,
    check_optimizer: Check,
) -> TrainingState:
    """Read the state of a training run into an engine; return the rest of the state.

    Args:
        path: A file of ``write_training``.
        engine: The engine of the same model; changed only when the whole file fits.
        expected: The present state, with the same parts, numbers and arrays.
        check: Called with the position of ``fit`` before anything changes; may raise.
        check_optimizer: Called with the numbers of the optimizer, if there is no difference.

    Returns:
        The state without the state of the engine.

    Raises:
        InputError: The file is missing, damaged, or of another model or optimizer; every
            difference is listed.
    """
    read: list[Extras] = []

    def accept(extras: Extras) -> list[str]:
        _check_values(path, extras.values, expected)
        check(extras.values["run"])
        differences = _differences(extras, expected)
        if not differences:
            check_optimizer(extras.values["parts"][OPTIMIZER])
        read.append(extras)
        return differences

    engine.load(path, accept=accept)
    values, arrays = read[0].values, read[0].arrays
    asarray = engine.collection.backend.asarray
    parts = {
        part: SavedState(
            values["parts"][part],
            {
                group: {name: asarray(arrays[f"{part}/{group}/{name}"]) for name in members}
                for group, members in state.arrays.items()
            },
        )
        for part, state in expected.parts.items()
    }
    return TrainingState(expected.optimizer, parts, values["run"])


def _check_values(path: str | Path, values: Mapping[str, Any], expected: TrainingState) -> None:
    """Refuse a file that does not have the state of an optimizer of this class."""
    if values.get("format") != TRAINING_STATE.version:
        raise InputError(TRAINING_STATE.another(path))
    parts, run = values.get("parts"), values.get("run")
    if not (isinstance(parts, dict) and isinstance(run, dict)) or not all(
        isinstance(numbers, dict) for numbers in parts.values()
    ):
        raise InputError(TRAINING_STATE.damaged(path, "its parts are not valid"))
    if values.get("optimizer") != expected.optimizer:
        raise InputError(
            f"'{path}' is a state of {values.get('optimizer')}, and this optimizer is "
            f"{expected.optimizer}; make an optimizer of the same class."
        )


def _differences(extras: Extras, expected: TrainingState) -> list[str]:
    """Return a sentence for each part, number or array that differs."""
    there = extras.values["parts"]
    differences = [
        f"the state of '{part}' is {'here' if part in expected.parts else 'there'} only"
        for part in expected.parts.keys() ^ there.keys()
    ]
    arrays = dict(extras.arrays)
    for part in expected.parts.keys() & there.keys():
        here = expected.parts[part]
        differences += _number_differences(part, here, there[part])
        for group, members in here.arrays.items():
            for name, array in members.items():
                one, other = form_of(array), form_of(arrays.pop(f"{part}/{group}/{name}", None))
                if one != other:
                    label = group.replace("_", " ")
                    differences.append(
                        f"the {label} of '{name}' ({part}) is {one} here and {other} there"
                    )
    differences += [
        f"the {part} has the array '{rest}' there only"
        for part, _, rest in (key.partition("/") for key in arrays)
        if part in expected.parts
    ]
    return sorted(differences)


def _number_differences(part: str, state: SavedState, there: Mapping[str, Any]) -> list[str]:
    here = state.numbers
    differences = [
        f"the {part} has '{name}' {'here' if name in here else 'there'} only"
        for name in here.keys() ^ there.keys()
        # A roll-back has the numbers of its snapshot, with a prefix.
        if name.rpartition("/")[2] != LEARNING_RATE
    ]
    for name in here.keys() & there.keys():
        least, most = state.bounds.get(name, (-inf, inf))
        value = there[name]
        if not (_fits(value, here[name]) and (name not in state.bounds or least <= value <= most)):
            differences.append(f"'{name}' of the {part} cannot be {value!r:.40}, as in the file")
    return differences


def _fits(value: Any, like: Any) -> bool:
    """Return whether a value of a file can take the place of another value."""
    if isinstance(like, float):
        return type(value) in (int, float) and (abs(value) == inf or is_amount(abs(value)))
    if isinstance(like, list):
        return isinstance(value, list) and all(_fits(entry, 0.0) for entry in value)
    return type(value) is type(like) and (type(value) is not int or is_count(abs(value)))
