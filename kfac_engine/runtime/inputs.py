"""Checks the inputs and parameters that a user passes to a model."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend.cpu.reductions import all_finite
from kfac_engine.backend.memory_space import HOST, MemorySpace
from kfac_engine.backend.namespace import array_module, as_array, numeric
from kfac_engine.errors import (
    BackendError,
    InputError,
    NonFiniteError,
    ShapeError,
    UnknownNameError,
    suggestion,
)
from kfac_engine.graph.passes.upcast import widened
from kfac_engine.graph.structure import Graph, Input
from kfac_engine.losses.checks import first_index
from kfac_engine.printable import quoted


def check_inputs(graph: Graph, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Return the inputs of a batch as arrays of the declared types and shapes."""
    if not isinstance(inputs, dict | Mapping):
        raise InputError(
            f"inputs must be a mapping {{name: array}}, got {type(inputs).__name__}; the model "
            f"needs: {_names_of(graph)}."
        )
    checked = {}
    for entry in graph.inputs:
        if entry.name in inputs:
            checked[entry.name] = _check_array(entry, inputs[entry.name])
    for name in inputs:
        if name in checked:
            continue
        if name in graph.constants:
            raise UnknownNameError(
                f"'{name}' is a constant of the model, not an input; change trainable constants "
                f"with set_parameters. The inputs are: {_names_of(graph)}."
            )
        near = suggestion(name, [entry.name for entry in graph.inputs])
        raise UnknownNameError(
            f"the model has no input '{name}'{near}; its inputs are: {_names_of(graph)}."
        )
    for entry in graph.inputs:
        if entry.name not in checked:
            raise InputError(
                f"input '{entry.name}' is missing; the model needs: {_names_of(graph)}."
            )
    return checked


def _names_of(graph: Graph) -> str:
    """Return the quoted names of a graph's inputs, for a message."""
    return quoted([entry.name for entry in graph.inputs])


def not_finite(inputs: Mapping[str, Array]) -> dict[str, tuple[int, ...]]:
    """Return the inputs with NaN or infinity, each with the first index of one.

    Such inputs are allowed: a mask of minus infinity or a missing value may have finite results.
    """
    return {
        name: first_index(~array_module(array).isfinite(array))
        for name, array in inputs.items()
        if not finite(array)
    }


@contextmanager
def naming(suspects: Mapping[str, tuple[int, ...]]) -> Iterator[None]:
    """Return a context whose ``NonFiniteError`` names the inputs with NaN or infinity."""
    try:
        yield
    except NonFiniteError as error:
        text = str(error)
        cause = "; ".join(
            f"input '{name}' contains NaN or infinity, first at index {index}"
            for name, index in suspects.items()
        )
        if not cause or cause in text:
            raise
        named = NonFiniteError(f"{cause}. {text[:1].upper()}{text[1:]}")
        raise named.at(*next(iter(suspects.items()))) from error


def disagreements(graph: Graph, inputs: Mapping[str, Array]) -> tuple[str, ...]:
    """Return a clause for each symbol of the file whose axes differ in size.

    ONNX Runtime does not compare their sizes, because exporters may give different axes one symbol.
    """
    sizes: dict[str, dict[int, str]] = {}
    several = False
    for entry in graph.inputs:
        for symbol, size in zip(entry.shape or (), inputs[entry.name].shape, strict=False):
            if isinstance(symbol, str):
                names = sizes.setdefault(symbol, {})
                names.setdefault(size, entry.name)
                several |= len(names) > 1
    if not several:
        return ()
    return tuple(
        f"axis '{symbol}' of the inputs has several sizes: "
        + ", ".join(f"{size} in '{name}'" for size, name in names.items())
        for symbol, names in sizes.items()
        if len(names) > 1
    )


def require_agreement(graph: Graph, inputs: Mapping[str, Array], failure: BackendError) -> None:
    """Raise a ``ShapeError`` if axes of one symbol differ in size, as the cause of a failed run."""
    differing = disagreements(graph, inputs)
    if differing:
        raise ShapeError(f"{failure} {'; '.join(differing)}.") from failure


def fixed_inputs(graph: Graph, inputs: Mapping[str, Array] | None) -> dict[str, Array]:
    """Return the scalar integer inputs of an unchecked batch, such as a number of steps.

    There are none without a batch.
    """
    if not isinstance(inputs, Mapping):
        return {}
    numbers = [entry.name for entry in graph.inputs if entry.is_setting]
    return {name: np.asarray(inputs[name]) for name in numbers if name in inputs}


def check_parameters(
    model: str,
    parameters: Mapping[str, Array],
    values: Mapping[str, Array],
    memory_space: MemorySpace = HOST,
    *,
    copy: bool = True,
) -> dict[str, Array]:
    """Return new values of parameters in the types and the memory space of the parameters.

    ``parameters`` has the current values. Without ``copy``, a value of the right type is not
    copied. Unknown names, other shapes, NaN and infinity raise errors.
    """
    checked = {}
    for name, value in values.items():
        if name not in parameters:
            raise UnknownNameError(
                f"'{name}'{suggestion(name, parameters)} is not a trainable parameter of model "
                f"'{model}'; its parameters are: {', '.join(parameters)}."
            )
        old, array = parameters[name], memory_space.to_device(value)
        if array.dtype != old.dtype:
            with np.errstate(over="ignore"):  # infinity is refused below
                array = numeric(f"parameter '{name}'", array).astype(old.dtype)
        elif copy:
            array = array.copy()
        if array.shape != old.shape:
            raise ShapeError(f"parameter '{name}' has shape {old.shape}, got {array.shape}.")
        checked[name] = array
    finite = memory_space.finite(list(checked.values()))
    for name, good in zip(checked, finite.each, strict=True):
        if not good:
            raise NonFiniteError(f"the new value of parameter '{name}' contains NaN or infinity.")
    return checked


def finite(array: Array) -> bool:
    """Return whether an array of numbers has neither NaN nor infinity."""
    if array.dtype.kind != "f":
        return True
    return all_finite(array) if isinstance(array, np.ndarray) else bool(np.isfinite(array).all())


def spelled_shape(shape: Sequence[int | str | None]) -> str:
    """Return a declared shape as text for messages, with ``?`` for unknown sizes."""
    return ", ".join("?" if size is None else str(size) for size in shape)


def fits(shape: Sequence[int], declared: Sequence[int | str | None]) -> bool:
    """Return whether a shape has the sizes that are declared as numbers."""
    if len(shape) != len(declared):
        return False
    for size, wanted in zip(shape, declared, strict=True):
        if isinstance(wanted, int) and size != wanted:
            return False
    return True


# Kinds of types that are converted: real numbers, whole numbers, and text of NumPy.
_ALIKE = ({"f"}, {"i", "u"}, {"U", "T", "O"})


def _converted(entry: Input, array: Array) -> Array:
    """Return an array in the type of an input.

    Real numbers are rounded. Whole numbers beyond the range of the type, real numbers that become
    infinite, and numbers of another kind raise an InputError.
    """
    kinds = {array.dtype.kind, entry.dtype.kind}
    if not any(kinds <= alike for alike in _ALIKE):
        wanted = f"{entry.stored} or {entry.dtype}" if entry.stored else f"{entry.dtype}"
        raise InputError(
            f"input '{entry.name}' has type {array.dtype}, the model needs {wanted}; convert it "
            f"with .astype('{entry.dtype}')."
        )
    with np.errstate(over="ignore"):
        new = array.astype(entry.dtype)
    if entry.dtype.hasobject:
        return new
    xp = array_module(array)
    lost = xp.isinf(new) & ~xp.isinf(array) if entry.dtype.kind == "f" else new != array
    if bool(lost.any()):
        index = first_index(lost)
        error = InputError(
            f"input '{entry.name}' has the value {array[index]} at index {index}, beyond the range "
            f"of {entry.dtype}, which the model needs."
        )
        raise error.at(entry.name, index)
    return new


def _check_array(entry: Input, value: Array) -> Array:
    array = as_array(value)
    on_host = isinstance(array, np.ndarray)
    array = np.asarray(array) if on_host else array
    if entry.stored is not None and array.dtype == entry.stored:
        array = widened(array) if on_host else array.astype(np.float32)
    if array.dtype != entry.dtype:
        array = _converted(entry, array)
    if entry.shape is not None and not fits(array.shape, entry.shape):
        raise ShapeError(
            f"input '{entry.name}' has shape {array.shape}, the model needs "
            f"({spelled_shape(entry.shape)})."
        )
    if array.shape[:1] == (0,):
        raise ShapeError(f"input '{entry.name}' has shape {array.shape}: the batch is empty.")
    return array
