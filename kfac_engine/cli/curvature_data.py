"""The data of ``curvature``: files that are read in batches, once or twice, with a bar."""

from collections.abc import Iterable, Iterator
from typing import Any

from kfac_engine.cli.display import progress
from kfac_engine.datasets.examples import Batch, ExampleAxes
from kfac_engine.datasets.forms import FILE_BATCH, batches_of
from kfac_engine.engine.build import Assembly
from kfac_engine.errors import InputError


def file_batches(
    assembly: Assembly,
    data: Any,
    size: int | None,
    passes: int = 1,
    *,
    labeled: bool = False,
) -> "ShownBatches":
    """Return data in a form of ``fit`` as batches with a bar.

    ``passes`` is the number of times that the data are read. ``InputError`` is raised if the data
    are wrong, or if the model runs with another number of examples only.
    """
    axes = assembly.task.example_axes
    if axes.obstacle and size not in (None, axes.fixed_size):
        raise InputError(f"--batch is {size}, but {axes.obstacle}; leave out --batch.")
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
