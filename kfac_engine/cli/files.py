"""Reads the inputs, targets and data sets of commands, and writes their results."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np

from kfac_engine._types import Array
from kfac_engine.cli.display import progress
from kfac_engine.datasets.examples import TARGETS, WEIGHTS, Batch, ExampleAxes
from kfac_engine.datasets.files import first_shard
from kfac_engine.datasets.first_examples import with_first_examples
from kfac_engine.datasets.forms import FILE_BATCH, batches_of
from kfac_engine.engine.build import Assembly
from kfac_engine.errors import InputError, UnknownNameError, suggestion
from kfac_engine.graph.load import load_graph
from kfac_engine.system.arrays import read_arrays
from kfac_engine.system.reading import names_folder
from kfac_engine.system.state_files import read_tensors, write_tensors
from kfac_engine.system.writing import write_file

# Returns the arrays of a file by name, a lone array under None.
Reader: TypeAlias = Callable[[Path], dict[str | None, Array]]

GRADIENT = "gradient/"
NATURAL_GRADIENT = "natural_gradient/"


def read_inputs(path: Path | None, model: Path) -> dict[str, Array] | None:
    """Return the batch in a file without targets, or the first shard of a folder of shards.

    The file is an ``.npz`` with inputs by name, or an ``.npy`` for a model with one input. The
    engine checks the names. ``InputError`` is raised if the file is missing or broken, or if it has
    a lone array for several inputs.
    """
    return None if path is None else read_data(path, None, model)[0]


def data_of(files: SimpleNamespace) -> Any:
    """Return the data in the files of ``labeled_data``, as for ``fit``."""
    return files.data if files.targets is None else (files.data, files.targets)


def read_sample(
    files: SimpleNamespace, model: Path, options: Mapping[str, Any]
) -> dict[str, Array] | None:
    """Return the batch of ``--inputs``, or the first examples of the data where they are needed."""
    if files.inputs is not None:
        return read_inputs(files.inputs, model)
    return with_first_examples(model, data_of(files), options["batch_axes"])[1]


def read_data(
    inputs: Path, targets: Path | None, model: Path, read: Reader = read_arrays
) -> tuple[dict[str, Array], Any]:
    """Read input files; return the inputs by name, and inputs and targets as data for ``fit``.

    A file is opened once, because it may be a pipe.

    Args:
        inputs: The inputs: ``.npz`` keyed by input name, ``.npy`` for a model with one input, or a
            folder of shards, whose first shard is returned; a file may have targets, too.
        targets: The targets; None if ``inputs`` has them, or if there are none.
        model: The model's file, which names the input of a lone array.
        read: Reads the arrays, or maps them.
    """
    graph = load_graph(model)
    names = [entry.name for entry in graph.inputs]
    labels = {TARGETS, WEIGHTS, *graph.outputs} - {*names}
    data: Any = inputs
    if names_folder(inputs):
        arrays = first_shard(inputs, (*names, *labels))
    else:
        opened = read(inputs)
        if None in opened and len(names) != 1:
            raise InputError(
                f"'{inputs}' holds one array, but the model has {len(names)} inputs: "
                f"{', '.join(names)}. Give an .npz file keyed by input name."
            )
        data = arrays = {names[0] if n is None else n: array for n, array in opened.items()}
    sample = {name: array for name, array in arrays.items() if name not in labels}
    return sample, data if targets is None else (data, targets)


def read_gradients(path: Path, known: Mapping[str, Array]) -> dict[str, Array]:
    """Return the gradients in a safetensors file by parameter.

    Keys are ``<parameter>`` or ``gradient/<parameter>``. Natural gradients, which ``precondition``
    writes into the same file, are ignored. ``known`` are the parameters of the model.
    """
    arrays = read_tensors(path, f"'{path}' as safetensors")[1]
    gradients = {}
    for key, array in arrays.items():
        if key.startswith(NATURAL_GRADIENT):
            continue
        name = key if key in known else key.removeprefix(GRADIENT)
        if name not in known:
            raise UnknownNameError(
                f"'{key}'{suggestion(name, known)} in '{path}' is not a trainable parameter; they "
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
    """Write gradients and natural gradients to a file; a failure leaves an old file unchanged."""
    arrays = {GRADIENT + name: array for name, array in gradients.items()}
    arrays |= {NATURAL_GRADIENT + name: array for name, array in natural_gradients.items()}
    write_tensors(path, arrays)


def write_npz(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write arrays by name to a file of NumPy; a failure leaves an older file unchanged."""
    content = BytesIO()
    np.savez(content, **dict[str, Any](arrays))
    write_file(path, [content.getbuffer()])


def file_batches(
    assembly: Assembly, data: Any, size: int | None, passes: int = 1, *, labeled: bool = False
) -> "ShownBatches":
    """Return data as for ``fit`` as batches with a bar.

    ``passes`` is the number of times that the data are read. ``InputError`` is raised if the data
    are wrong, or if the model runs with another number of examples only.
    """
    axes = assembly.task.example_axes
    if axes.obstacle and size not in (None, axes.fixed_size):
        raise InputError(f"--batch-size is {size}, but {axes.obstacle}; leave it out.")
    batches = batches_of(data, axes, labeled=labeled, size=size or FILE_BATCH)
    return ShownBatches(batches, axes, passes)


class ShownBatches:
    """Batches that can be read several times, with a bar on stderr over each time.

    ``passes`` is the number of times.
    """

    def __init__(self, batches: Iterable[Batch], axes: ExampleAxes, passes: int) -> None:
        self._batches, self._axes, self._passes = batches, axes, passes
        self._reads = 0

    def __iter__(self) -> Iterator[Batch]:
        self._reads += 1
        name = f"pass {self._reads} of {self._passes}" if self._passes > 1 else "measuring"
        with progress() as bar:
            task = bar.add_task(name, total=getattr(self._batches, "total", None))
            for batch in self._batches:
                yield batch
                bar.advance(task, self._axes.count(batch[0]))
