"""Saves and loads an engine's state; ``system/state_files`` describes the format.

A state contains averages, weights, stored powers, counters, the state of the generator and the
parameters. A resumed run has the same bits as a run without interruption. The inverses are stored,
because between refreshes they belong to older averages.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from kfac_engine._types import Array
from kfac_engine.arguments import check_texts, is_amount, is_count
from kfac_engine.curvature.config import RelativeDamping, show_damping
from kfac_engine.curvature.factors.base import FisherFactor
from kfac_engine.curvature.schedule import is_planner_state
from kfac_engine.errors import InputError, warn
from kfac_engine.system.state_files import ENGINE_STATE, form_of, read_state, write_state


@dataclass(frozen=True, slots=True)
class Extras:
    """Data that a caller stores with the state of an engine, such as the state of an optimizer."""

    values: Mapping[str, Any] = field(default_factory=dict)  # values that JSON can represent
    arrays: Mapping[str, Array] = field(default_factory=dict)  # arrays by name


# Returns the differences between the extras of a file and those that the caller needs, or raises.
Accept: TypeAlias = Callable[[Extras], Sequence[str]]


@dataclass(frozen=True, slots=True)
class State:
    """The state of an engine without its factors."""

    counter: int  # calls of ``observe`` and ``step`` so far
    generator: Mapping[str, object]  # state of the random generator, as NumPy describes it
    parameters: Mapping[str, Array]  # values by parameter name
    buffers: Mapping[str, Array] = field(default_factory=dict)  # values by running statistic
    damping: float | None = None  # damping of the engine; None if it is unknown
    # State of the planner of the schedule; None if it is unknown.
    planner: Mapping[str, object] | None = None
    extras: Extras = field(default_factory=Extras)  # data of the caller
    passes: int = 0  # forward passes that have drawn random numbers


@dataclass(frozen=True, slots=True)
class Expected:
    """Requirements of an engine on a saved state, besides its factors."""

    # Must accept the state's generator; None for no comparison.
    generator: np.random.Generator | None = None
    # Shapes of the averages, by ``id`` of the factor; empty for no comparison.
    shapes: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    # Damping of the engine, which is compared with the damping of the state. A difference yields a
    # warning. None for no comparison.
    damping: float | None = None
    accept: Accept | None = None  # compares the extras, before anything changes


_NOTHING = Expected()


@dataclass(frozen=True, slots=True)
class _Entry:
    """The description of a factor in a state."""

    name: str
    operations: list[str]
    weight: float
    repeats: float | None


def save_state(path: str | Path, factors: Sequence[FisherFactor], state: State) -> None:
    """Write a checkpoint; the file is replaced whole or not at all.

    ``factors`` are all factors in the order of their creation, and ``state`` is the rest.
    """
    tensors = {f"parameter/{name}": value for name, value in state.parameters.items()}
    tensors |= {f"buffer/{name}": value for name, value in state.buffers.items()}
    tensors |= {f"extra/{name}": value for name, value in state.extras.arrays.items()}
    for index, factor in enumerate(factors):
        tensors |= {f"factor/{index}/{key}": array for key, array in factor.arrays().items()}
    damping = state.damping
    header = {
        "counter": state.counter,
        "generator": state.generator,
        "factors": [_description(factor) for factor in factors],
        "damping": [damping] if isinstance(damping, RelativeDamping) else damping,
        "planner": state.planner,
        "extras": state.extras.values,
        "passes": state.passes,
    }
    write_state(path, ENGINE_STATE, header, tensors)


def load_state(
    path: str | Path,
    factors: Sequence[FisherFactor],
    parameters: Mapping[str, Array],
    buffers: Mapping[str, Array] | None = None,
    expected: Expected = _NOTHING,
) -> tuple[State, Callable[[], None]]:
    """Read a checkpoint for factors of the same model and options.

    Returns the state without the factors, and a function that restores the factors.

    Args:
        path: The file.
        factors: All factors, in the order of creation.
        parameters: Arrays of the right shapes, by parameter name.
        buffers: Arrays of the right shapes, by running statistic.
        expected: Further requirements of an engine.

    Raises:
        InputError: The file is missing, damaged or no checkpoint, or does not fit; every difference
            is listed.
    """
    file = read_state(path, ENGINE_STATE)
    saved = [_Entry(**entry) for entry in file.value("factors", _are_entries)]
    arrays = [file.below(f"factor/{index}/") for index in range(len(saved))]
    values, statistics = file.below("parameter/"), file.below("buffer/")
    extras = Extras(file.value("extras", _is_object), file.below("extra/"))
    accept = expected.accept
    of_caller = () if accept is None else check_texts("the result of accept", accept(extras), "[]")
    differences = _factor_differences(factors, saved, arrays)
    differences += _array_differences("parameter", parameters, values)
    differences += (*_array_differences("running statistic", buffers or {}, statistics), *of_caller)
    if differences:
        listed = "; ".join(differences)
        raise InputError(f"state '{path}' belongs to another model or options: {listed}.")
    state = State(
        counter=file.value("counter", is_count),
        generator=file.value("generator", _is_object),
        parameters=values,
        buffers=statistics,
        damping=_damping(file.value("damping", _is_damping)),
        planner=file.value("planner", lambda v: v is None or is_planner_state(v)),
        extras=extras,
        # States of older versions have no number.
        passes=file.value("passes", is_count) if "passes" in file.header else 0,
    )
    faults = [
        f"'{name}' holds NaN or infinity" for name, a in file.arrays.items() if not _finite(a)
    ]
    for factor, entry, its_arrays in zip(factors, saved, arrays, strict=True):
        faults += _factor_faults(factor, entry, its_arrays, expected, state.counter)
    if expected.generator and not _accepts(expected.generator, state.generator):
        faults.append("the state of the random generator is not valid")
    if faults:
        raise InputError(ENGINE_STATE.damaged(path, "; ".join(faults)))
    _warn_of_damping(path, state.damping, expected.damping)

    def restore() -> None:
        for factor, entry, its_arrays in zip(factors, saved, arrays, strict=True):
            factor.restore(its_arrays, entry.weight, entry.repeats)

    return state, restore


def _warn_of_damping(path: str | Path, saved: float | None, known: float | None) -> None:
    """Warn if the saved damping differs from the known one, unless one of the two is None."""
    if known is not None and saved is not None and (known, type(known)) != (saved, type(saved)):
        # A caller may have warnings raised as errors.
        warn(
            f"the state '{path}' was saved with damping {show_damping(saved)}, and this engine has "
            f"{show_damping(known)}: stored inverses have the saved damping until their next "
            f"refresh. Set engine.damping to continue with the saved damping."
        )


def _description(factor: FisherFactor) -> dict[str, object]:
    return {
        "name": factor.name,
        "operations": factor.operations,
        "weight": factor.average.weight,
        "repeats": factor.repeats,
    }


def _are_entries(value: Any) -> bool:
    """Return whether a value describes factors."""
    return isinstance(value, list) and all(
        isinstance(entry, dict)
        and entry.keys() == {"name", "operations", "weight", "repeats"}
        and isinstance(entry["operations"], list)
        and is_amount(entry["weight"])
        and (entry["repeats"] is None or (is_amount(entry["repeats"]) and entry["repeats"] > 0))
        for entry in value
    )


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _damping(value: Any) -> float | None:
    """Return the damping of a JSON value: a number, a list of one if it is relative, or None."""
    return RelativeDamping(value[0]) if isinstance(value, list) else value


def _is_damping(value: Any) -> bool:
    number = value[0] if isinstance(value, list) and len(value) == 1 else value
    return value is None or is_amount(number)


def _finite(array: Array) -> bool:
    return array.dtype.kind != "f" or bool(np.isfinite(array).all())


def _accepts(generator: np.random.Generator, state: Mapping[str, object]) -> bool:
    """Return whether a generator of this kind can have the state."""
    trial = type(generator.bit_generator)()
    try:
        trial.state = state
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
        return False
    return True


def _factor_faults(
    factor: FisherFactor,
    entry: _Entry,
    arrays: Mapping[str, Array],
    expected: Expected,
    counter: int,
) -> list[str]:
    """Return why a factor cannot have a stored state; it is restored in a copy to find out."""
    average = arrays.get("average")
    empty = average is None or not average.any()  # zeros, until targets of its loss count
    if (average is None and entry.weight) or (entry.weight == 0 and not empty):
        having = "without" if average is None else "with"
        return [f"{factor.name} has weight {entry.weight} {having} an average"]
    if expected.shapes and average is not None:
        shape = expected.shapes[id(factor)]
        if average.shape != shape or average.dtype.kind != "f":
            return [f"the average of {factor.name} is {form_of(average)}, not of shape {shape}"]
        if counter and factor.has_inverses and len(arrays) == 1:
            return [f"{factor.name} has no inverse"]
    factor.wait()
    trial = copy(factor)
    try:
        trial.restore(arrays, entry.weight, entry.repeats)
        same = trial.arrays().keys() == arrays.keys()
    except (KeyError, TypeError, ValueError, IndexError):
        same = False
    return [] if same else [f"{factor.name} has other arrays than it stores"]


def _factor_differences(
    factors: Sequence[FisherFactor], saved: Sequence[_Entry], arrays: Sequence[Mapping[str, Array]]
) -> list[str]:
    differences = []
    if len(saved) != len(factors):
        differences.append(f"{len(factors)} factors here and {len(saved)} there")
    for factor, old, its_arrays in zip(factors, saved, arrays, strict=False):
        if factor.name != old.name:
            differences.append(f"a factor is {factor.name} here and {old.name} there")
        elif list(factor.operations) != old.operations:
            differences.append(
                f"{factor.name} is refreshed to {list(factor.operations)} here and "
                f"{old.operations} there"
            )
        here, there = factor.average.value, its_arrays.get("average")
        if here is not None and there is not None and here.shape != there.shape:
            differences.append(f"{factor.name} has shape {here.shape} here and {there.shape} there")
    return differences


def _array_differences(
    what: str, here: Mapping[str, Array], there: Mapping[str, Array]
) -> list[str]:
    """Return a sentence for each array that differs in presence, shape or type."""
    differences = []
    for name in dict.fromkeys((*here, *there)):
        one, other = (form_of(arrays.get(name)) for arrays in (here, there))
        if one != other:
            differences.append(f"{what} '{name}' is {one} here and {other} there")
    return differences
