"""Checks the values that losses read from a batch."""

from typing import Protocol

import numpy as np

from kfac_engine._types import Array
from kfac_engine.arguments import check_int, check_number
from kfac_engine.backend.cpu.reductions import all_finite
from kfac_engine.backend.namespace import array_module, as_array
from kfac_engine.backend.select import owner
from kfac_engine.errors import InputError, NonFiniteError, ShapeError, UnknownNameError


class Named(Protocol):
    """Values by name: a mapping, or an object of the caller with ``[name]`` only."""

    def __getitem__(self, name: str, /) -> Array:
        """Return the value of a name; raise a KeyError for an unknown name."""


def read_input(values: Named, name: str) -> Array:
    """Return the value ``name`` of a batch, an input of a loss.

    The array is of a supported library, or converted to NumPy.
    """
    try:
        return as_array(values[name])
    except KeyError as missing:
        raise UnknownNameError(
            f"the loss reads '{name}', but the batch has no value of that name; "
            f"run the model with '{name}' among its outputs."
        ) from missing


def read_targets(values: Named, name: str, output: str) -> Array:
    """Return the value ``name`` of a batch, the targets of the loss on ``output``.

    The array is of a supported library, or converted to NumPy. A batch without the value raises
    InputError.
    """
    try:
        return as_array(values[name])
    except KeyError as missing:
        raise InputError(
            f"the targets '{name}' of the loss on '{output}' are missing; pass them with the batch."
        ) from missing


def require_class_axis(name: str, shape: tuple[int, ...], class_axis: int) -> None:
    """Check that the input of a loss has the class axis, and that it is not the batch axis.

    A negative axis counts from the end.
    """
    rank = len(shape)
    if not -rank <= class_axis < rank or (rank > 1 and class_axis % rank == 0):
        raise ShapeError(
            f"class_axis={class_axis} is not an axis of '{name}' with shape {shape} other than "
            f"the batch axis 0; choose {', '.join(map(str, range(rank > 1, rank)))} or -1."
        )


def require_predictions(name: str, array: Array, min_rank: int, class_axis: int) -> None:
    """Check that the input of a loss is a finite floating-point array of a sufficient rank.

    ``min_rank`` includes the batch axis. A negative ``class_axis``, the axis of classes or
    features, counts from the end.
    """
    rank = array.ndim
    if rank < min_rank or 0 in array.shape:
        raise ShapeError(
            f"'{name}' has shape {array.shape}, but the loss needs at least {min_rank} non-empty "
            f"axes, the batch first; choose another output of the model."
        )
    require_class_axis(name, array.shape, class_axis)
    if array.dtype.kind != "f":
        raise InputError(
            f"'{name}' has element type {array.dtype}, but a loss needs floating-point numbers; "
            f"choose the output before the conversion."
        )
    what = f"'{name}', an input of the loss,"
    require_finite(what, array, "the weights and inputs of the model")


def require_finite(what: str, array: Array, causes: str, name: str = "") -> None:
    """Check that every entry of an array is finite; a device may be read later.

    The message names ``what`` the array is, the first other index, and the ``causes`` to check;
    ``name`` is the array in the ``place`` of the error.
    """

    def refuse_unless(finite: object) -> None:
        if not finite:
            where = first_index(~array_module(array).isfinite(array))
            raise NonFiniteError(
                f"{what} must be finite, got {array[where]} at {where}; check {causes}."
            ).at(name, where)

    if isinstance(array, np.ndarray):
        refuse_unless(all_finite(array))
    else:
        owner(array).read_later(array_module(array).isfinite(array).all(), refuse_unless)


def require_shape(what: str, shape: tuple[int, ...], expected: tuple[int, ...], why: str) -> None:
    """Check that an array has the expected shape.

    In the message, ``what`` is the subject, and ``why`` is the meaning of the expected shape.
    """
    if tuple(shape) != tuple(expected):
        raise ShapeError(f"{what} has shape {tuple(shape)}, expected {tuple(expected)}: {why}.")


def check_matching_targets(name: str, array: Array, targets: Array) -> None:
    """Check that targets are finite real numbers in the shape of the prediction ``array``."""
    require_shape("targets", targets.shape, array.shape, f"the shape of '{name}'")
    if targets.dtype.kind not in "biuf":
        raise InputError(f"targets of '{name}' must be real numbers, got {targets.dtype}.")
    require_finite(f"the targets of '{name}'", targets, "the data", "targets")


def first_index(mask: Array) -> tuple[int, ...]:
    """Return the index of the first true entry of ``mask``, which must have a true entry."""
    xp = array_module(mask)
    return tuple(int(i) for i in xp.unravel_index(xp.argmax(mask), mask.shape))


def class_numbers(
    name: str, numbers: object
) -> np.ndarray[tuple[int], np.dtype[np.float64]] | None:
    """Return weights of classes or features, a list of numbers ≥ 0, as an array; None for ones.

    The message of an InputError calls the weights ``name``.
    """
    if numbers is None:
        return None
    try:
        array = np.array(numbers, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        array = np.empty((0, 0))
    if array.ndim != 1 or not array.size or not np.isfinite(array).all() or (array < 0).any():
        raise InputError(
            f"{name} must be a list of finite numbers that are not negative, got {numbers!r:.80}."
        )
    return array


def smoothing(value: object) -> float:
    """Return a label smoothing, a number in [0, 1); raise an InputError for another value."""
    check_number("label_smoothing", value, "[0, 1)")
    assert isinstance(value, int | float | np.number)  # checked
    return float(value)


def ignored(value: object) -> int | None:
    """Return an ``ignore_index``, a whole number or None; raise an InputError for another value."""
    if value is not None:
        check_int("ignore_index", value, least=None)
    return value  # type: ignore[return-value] # checked
