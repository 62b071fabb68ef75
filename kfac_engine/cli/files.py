"""Files of the commands: inputs and targets by name, gradients, and results."""

from collections.abc import Callable, Collection, Iterable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from kfac_engine._types import Array
from kfac_engine.errors import InputError, UnknownNameError
from kfac_engine.graph.load import external_files, load_graph
from kfac_engine.suggestions import suggestion
from kfac_engine.system.arrays import read_arrays
from kfac_engine.system.reading import check_file, exists
from kfac_engine.system.writing import check_outputs, write_file

# Returns the arrays of a file by name, a lone array under None.
Reader: TypeAlias = Callable[[Path], dict[str | None, Array]]

TARGETS = "targets"
GRADIENT = "gradient/"
NATURAL_GRADIENT = "natural_gradient/"


def check_files(
    outputs: Mapping[str, Path | None],
    inputs: Mapping[str, Path | Iterable[Path] | None],
    model: Path,
    appended: Collection[str] = (),
) -> None:
    """Refuse to write over a file that is read, or in vain, before anything is computed.

    Args:
        outputs: Name in messages to file, for the files that are written.
        inputs: Name in messages to file or folder, for what is read besides the model.
        model: File of the model; its external data count as inputs.
        appended: As for ``check_outputs``.

    Raises:
        InputError: An output is the same file as an input or another output, or cannot be written.
    """
    read: dict[str, Path | Iterable[Path] | None] = {**inputs, "the model": model}
    if any(path is not None and exists(path) for path in outputs.values()):
        read |= {f"the weights '{path.name}'": path for path in external_files(model)}
    check_outputs(outputs, read, appended)


def with_weights(name: str, path: Path) -> dict[str, Path | None]:
    """Return the files of a model to write: the model, and the weights of a large one beside it.

    Args:
        name: Name in messages.
        path: File of the model.

    Returns:
        Outputs for ``check_files``.
    """
    weights = path.with_name(f"{path.name}.data") if path.name else None
    return {name: path, f"the weights of {name}": weights}


def read_inputs(path: Path, model: Path, read: Reader = read_arrays) -> dict[str, Array]:
    """Return the batch in a file.

    Args:
        path: ``.npz`` keyed by input name, or ``.npy`` for a model with one input.
        model: The model's file, which names the input of a lone array.
        read: Reads the arrays, or maps them.

    Returns:
        Input name to array; the engine checks the names.

    Raises:
        InputError: The file is missing, broken, or a lone array for several inputs.
    """
    arrays = read(path)
    if None not in arrays:
        return {name: array for name, array in arrays.items() if name is not None}
    names = [entry.name for entry in load_graph(model).inputs]
    if len(names) != 1:
        raise InputError(
            f"'{path}' holds one array, but the model has {len(names)} inputs: "
            f"{', '.join(names)}. Give an .npz file keyed by input name."
        )
    return {names[0]: arrays[None]}


def read_targets_by_output(path: Path, read: Reader = read_arrays) -> dict[str, Array]:
    """Return the targets of several losses.

    Args:
        path: ``.npz`` keyed by output.
        read: Reads the arrays, or maps them.

    Returns:
        Output to targets.

    Raises:
        InputError: The file is missing, broken or a lone array.
    """
    arrays = {name: array for name, array in read(path).items() if name is not None}
    if not arrays:
        raise InputError(
            f"'{path}' must be an .npz file with the targets of each loss, keyed by output."
        )
    return arrays


def read_targets(path: Path, read: Reader = read_arrays) -> Array:
    """Return the array ``targets`` of a file, or its only array.

    Args:
        path: ``.npz`` or ``.npy``.
        read: Reads the arrays, or maps them.

    Returns:
        The array.

    Raises:
        InputError: The file is missing, broken, or has several arrays and none of that name.
    """
    arrays = read(path)
    if TARGETS in arrays:
        return arrays[TARGETS]
    if len(arrays) != 1:
        listed = ", ".join(f"'{name}'" for name in arrays) or "none"
        raise InputError(
            f"'{path}' must hold one array or one named '{TARGETS}'; it holds {listed}."
        )
    return next(iter(arrays.values()))


def read_gradients(path: Path, known: Mapping[str, Array]) -> dict[str, Array]:
    """Return the gradients in a file.

    Args:
        path: ``.safetensors`` with keys ``<parameter>`` or ``gradient/<parameter>``; natural
            gradients, which ``precondition`` writes into the same file, are ignored.
        known: The model's parameters.

    Returns:
        Parameter name to gradient.

    Raises:
        InputError: The file is missing or broken, has no gradient, or two of one parameter.
        UnknownNameError: A key names no parameter.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    check_file(path)
    try:
        arrays = load_file(path)
    except (OSError, SafetensorError, KeyError, TypeError) as error:
        raise InputError(f"cannot read '{path}' as safetensors: {error}.") from error
    gradients = {}
    for key, array in arrays.items():
        if key.startswith(NATURAL_GRADIENT):
            continue
        name = key if key in known else key.removeprefix(GRADIENT)
        if name not in known:
            raise UnknownNameError(
                f"'{key}'{suggestion(name, known)} in '{path}' is no trainable parameter; they "
                f"are: {', '.join(known)}."
            )
        if name in gradients:
            raise InputError(
                f"'{path}' holds two gradients of '{name}', under '{name}' and '{GRADIENT}{name}'; "
                f"leave one out."
            )
        gradients[name] = array
    if not gradients:
        raise InputError(f"'{path}' holds no gradient; its keys must be the parameters' names.")
    return gradients


def write_result(
    path: Path, gradients: Mapping[str, Array], natural_gradients: Mapping[str, Array]
) -> None:
    """Write both in one safetensors file; a failure leaves an older file unchanged."""
    arrays = {GRADIENT + name: array for name, array in gradients.items()}
    arrays |= {NATURAL_GRADIENT + name: array for name, array in natural_gradients.items()}
    write_arrays(path, arrays)


def write_arrays(
    path: Path, arrays: Mapping[str, Array], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file; a failure leaves an older file unchanged.

    Args:
        path: The file.
        arrays: Arrays by name.
        metadata: Texts by name, for the header.
    """
    from safetensors.numpy import save

    # A view's strides would be ignored: the format stores C order.
    ordered = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    write_file(path, [save(ordered, None if metadata is None else dict(metadata))])


def write_npz(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write arrays by name to a file of NumPy; a failure leaves an older file unchanged."""
    content = BytesIO()
    np.savez(content, **dict[str, Any](arrays))
    write_file(path, [content.getbuffer()])
