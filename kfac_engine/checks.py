"""Refusals of an engine, before anything is computed: options, batch sizes, gradients given."""

from collections.abc import Mapping, Sequence

import numpy as np

from kfac_engine._types import Array
from kfac_engine.autodiff.axes import Batch
from kfac_engine.autodiff.model import OnnxModel
from kfac_engine.backend.place import HOST, Place
from kfac_engine.backend.protocol import Backend
from kfac_engine.errors import (
    InputError,
    NonFiniteError,
    ShapeError,
    UnknownNameError,
    UnsupportedError,
)
from kfac_engine.graph.widen import in_single
from kfac_engine.heads import Head


def check_batch_size(batch: Batch, inputs: Mapping[str, Array]) -> None:
    """Refuse a number of examples that the model cannot be run with.

    Args:
        batch: What was found out of the batch.
        inputs: Input name to array.

    Raises:
        ShapeError: There are more or fewer examples than the model fixes.
    """
    for name, axis in batch.inputs.items() if batch.fixed else ():
        shape = np.shape(inputs.get(name, ()))
        if axis < len(shape) and shape[axis] != batch.size:
            raise ShapeError(f"input '{name}' has {shape[axis]} examples, but {batch.fixed}.")


def check_mode(estimation_mode: str, heads: Sequence[Head], batch: Batch) -> None:
    """Refuse modes that tell positions apart where an axis holds positions and examples alike.

    Args:
        estimation_mode: A row of ``MODES``.
        heads: The losses.
        batch: Where the examples lie.

    Raises:
        UnsupportedError: One axis does, or the first one is not that of the examples.
    """
    for head in heads:
        place = batch.places[head.output]
        if estimation_mode.startswith("exact") and not place.comes_first:
            raise UnsupportedError(
                f"estimation_mode '{estimation_mode}' needs the examples alone on the first "
                f"axis of '{head.output}', but they lie on axis {place.axis}"
                f"{' together with positions' if place.repeats > 1 else ''}; choose another mode."
            )


def check_options(
    damping: float,
    ema_decay: float,
    exps: Sequence[float],
    threads: int | None,
    scratch_bytes: int | None,
) -> None:
    """Refuse options outside their range.

    Args:
        damping: Must be positive.
        ema_decay: Must lie in [0, 1).
        exps: One or more numbers.
        threads: At least one, if given.
        scratch_bytes: At least one, if given.

    Raises:
        InputError: One is not.
    """
    if not (np.isfinite(damping) and damping > 0):
        raise InputError(f"damping must be a positive number, got {damping}.")
    if not 0 <= ema_decay < 1:
        raise InputError(f"ema_decay must lie in [0, 1), got {ema_decay}.")
    if not exps or not all(np.isfinite(exp) for exp in exps):
        raise InputError(f"exps must be one or more numbers, got {exps}.")
    if threads is not None and threads < 1:
        raise InputError(f"threads must be at least 1, got {threads}.")
    if scratch_bytes is not None and scratch_bytes < 1:
        raise InputError(f"scratch_bytes must be at least 1, got {scratch_bytes}.")


def checked_gradients(
    model: OnnxModel, backend: Backend, gradients: Mapping[str, Array]
) -> dict[str, Array]:
    """Gradients that a caller gives, by parameter, as arrays of the backend in single precision.

    Args:
        model: Knows the parameters.
        backend: Array library.
        gradients: Parameter name to array, from any library.

    Returns:
        Parameter name to array.

    Raises:
        UnknownNameError: A name is not a parameter.
        InputError: Weights that are tied have different gradients.
        ShapeError: A gradient has another shape than its parameter.
        NonFiniteError: A gradient holds NaN or infinity.
    """
    checked: dict[str, Array] = {}
    for name, value in model.take_in(gradients).items():
        parameter = model.parameters.get(name)
        if parameter is None:
            raise UnknownNameError(
                f"'{name}' is not a trainable parameter; they are: {', '.join(model.parameters)}."
            )
        checked[name] = array = in_single(backend.asarray(value))
        if array.shape != parameter.shape:
            raise ShapeError(
                f"the gradient of '{name}' has shape {array.shape}, not {parameter.shape}."
            )
    found = backend.download([backend.are_finite(list(checked.values()))])[0]
    for name, finite in zip(checked, found, strict=True):
        if not finite:
            raise NonFiniteError(f"the gradient of '{name}' holds NaN or infinity.")
    return checked


def check_finite(gradients: Mapping[str, Array], place: Place = HOST) -> None:
    """Refuse gradients that no step may be made of.

    Args:
        gradients: Parameter name to contiguous array.
        place: Where they lie.

    Raises:
        NonFiniteError: One holds NaN or infinity.
    """
    for name, finite in zip(gradients, place.finite(list(gradients.values())), strict=True):
        if not finite:
            raise NonFiniteError(f"the gradient of '{name}' holds NaN or infinity.")
