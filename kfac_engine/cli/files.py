"""Reads the inputs, targets and data sets of commands, and writes their results."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kfac_engine._types import Array
from kfac_engine.cli.display import progress
from kfac_engine.datasets.examples import TARGETS, WEIGHTS, Batch
from kfac_engine.datasets.files import first_shard
from kfac_engine.datasets.forms import FILE_BATCH, batches_of
from kfac_engine.engine.build import Assembly
from kfac_engine.errors import InputError
from kfac_engine.graph.load import load_graph
from kfac_engine.system.arrays import map_arrays, read_arrays
from kfac_engine.system.reading import names_folder


def read_inputs(path: Path | None, model: Path) -> dict[str, Array] | None:
    """Return the batch in a file without targets, or the first shard of a folder of shards.

    The file is an ``.npz`` with inputs by name, or an ``.npy`` for a model with one input. The
    engine checks the names. ``InputError`` is raised if the file is missing or broken, or if it has
    a lone array for several inputs.
    """
    return None if path is None else read_data(path, None, model)[0]


def read_data(
    inputs: Path, targets: Path | None, model: Path, *, mapped: bool = False
) -> tuple[dict[str, Array], Any]:
    """Read input files; return the inputs by name, and inputs and targets as data for ``fit``.

    A file is opened once, because it may be a pipe.

    Args:
        inputs: The inputs: ``.npz`` keyed by input name, ``.npy`` for a model with one input, or a
            folder of shards, whose first shard is returned; a file may have targets, too.
        targets: The targets; None if ``inputs`` has them, or if there are none.
        model: The model's file, which names the input of a lone array.
        mapped: Whether the arrays of an input file are mapped, not read.
    """
    graph = load_graph(model)
    names = [entry.name for entry in graph.inputs]
    labels = {TARGETS, WEIGHTS, *graph.outputs} - {*names}
    data: Any = inputs
    if names_folder(inputs):
        arrays = first_shard(inputs, (*names, *labels))
    else:
        opened = map_arrays(inputs) if mapped else read_arrays(inputs)
        if None in opened and len(names) != 1:
            raise InputError(
                f"'{inputs}' holds one array, but the model has {len(names)} inputs: "
                f"{', '.join(names)}. Give an .npz file keyed by input name."
            )
        data = arrays = {names[0] if n is None else n: array for n, array in opened.items()}
    sample = {name: array for name, array in arrays.items() if name not in labels}
    return sample, data if targets is None else (data, targets)


class ShownBatches:
    """Batches of data as for ``fit``, which can be read several times, each time with a bar.

    ``passes`` is the number of times. ``InputError`` is raised if the data are wrong, or if the
    model runs with another number of examples only.
    """

    def __init__(
        self, assembly: Assembly, data: Any, size: int | None, passes: int = 1, *, labeled: bool
    ) -> None:
        self._axes = axes = assembly.task.example_axes
        if axes.obstacle and size not in (None, axes.fixed_size):
            raise InputError(f"--batch-size is {size}, but {axes.obstacle}; leave it out.")
        self._batches = batches_of(data, axes, labeled=labeled, size=size or FILE_BATCH)
        self._passes, self._reads = passes, 0

    def __iter__(self) -> Iterator[Batch]:
        self._reads += 1
        name = f"pass {self._reads} of {self._passes}" if self._passes > 1 else "measuring"
        with progress() as bar:
            task = bar.add_task(name, total=getattr(self._batches, "total", None))
            for batch in self._batches:
                yield batch
                bar.advance(task, self._axes.count(batch[0]))
