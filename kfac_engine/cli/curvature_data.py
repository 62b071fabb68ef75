"""The data of ``curvature``: arrays that are read in batches, once or twice, with a bar."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from kfac_engine._types import Array
from kfac_engine.cli.display import progress
from kfac_engine.cli.files import read_inputs, read_targets, read_targets_by_output
from kfac_engine.engine.build import Assembly
from kfac_engine.engine.trainable_model import TrainableModel
from kfac_engine.errors import InputError
from kfac_engine.graph.load import load_graph
from kfac_engine.losses.objective import Targets
from kfac_engine.suggestions import suggestion
from kfac_engine.system.arrays import map_arrays
from kfac_engine.training.examples import Batch, ExampleAxes

# Examples in a batch, and in the batch from which shapes are inferred.
_BATCH, _SAMPLE = 128, 8


class CurvatureData:
    """The inputs and targets of a measurement, mapped where their files allow it.

    Args:
        model: File of the model.
        inputs: File of the inputs.
        targets: File of the targets, or None.
        several: Whether the targets are those of several losses.

    Attributes:
        inputs: Input name to array.
        targets: The targets.
    """

    def __init__(self, model: Path, inputs: Path, targets: Path | None, *, several: bool) -> None:
        read = read_targets_by_output if several else read_targets
        self.inputs = read_inputs(inputs, model, map_arrays)
        self.targets: Targets = None if targets is None else read(targets, map_arrays)
        self._model, self._path = model, inputs

    def sample(self, axes: Mapping[str, int], size: int | None) -> dict[str, Array] | None:
        """Return the first examples, from which shapes are inferred.

        Args:
            axes: Axis of the examples of an input, where the user names it; else the first.
            size: Number of examples; None for a few.

        Returns:
            Inputs; None where examples cannot be told from the declared shapes.
        """
        places = {name: axes.get(name, 0) for name in self.inputs}
        declared = {entry.name: entry.shape for entry in load_graph(self._model).inputs}
        lengths = set()
        for name, array in self.inputs.items():
            shape, axis = declared.get(name) or (), places[name]
            if not 0 <= axis < min(len(shape), array.ndim) or isinstance(shape[axis], int):
                return None
            lengths.add(array.shape[axis])
        if len(lengths) != 1:
            return None
        return {
            name: array[(slice(None),) * places[name] + (slice(size or _SAMPLE),)]
            for name, array in self.inputs.items()
        }

    def batches(self, assembly: Assembly, size: int | None, passes: int) -> "Batches":
        """Return the data in batches.

        Args:
            assembly: The model.
            size: Examples in a batch; None for a default.
            passes: Number of times that the data are read.

        Returns:
            The batches.

        Raises:
            InputError: An input is missing, or the model runs with another number of examples only.
            ShapeError: The arrays differ in their number of examples.
        """
        axes = ExampleAxes(TrainableModel(assembly))
        for name in axes.inputs:
            if name not in self.inputs:
                present = ", ".join(f"'{entry}'" for entry in self.inputs) or "none"
                raise InputError(
                    f"'{self._path}' has no array '{name}'{suggestion(name, self.inputs)}, which "
                    f"the model reads; its arrays are: {present}."
                )
        batch = assembly.task.batch
        # A model that folds positions into the axis of the examples has no parts of its targets.
        only = batch.size if batch.fixed else None
        if axes.obstacle and size not in (None, only):
            raise InputError(f"--batch is {size}, but {axes.obstacle}; leave out --batch.")
        if axes.obstacle and only is None:
            return Batches(None, self.inputs, self.targets, axes.count(self.inputs), passes)
        return Batches(axes, self.inputs, self.targets, only or size or _BATCH, passes)


class Batches:
    """Batches that can be read several times, with a bar on stderr over all times.

    Args:
        axes: The axes of the examples; None for a single batch.
        inputs: Input name to array.
        targets: The targets.
        size: Examples in a batch.
        passes: Number of times that the batches are read.

    Raises:
        ShapeError: The arrays differ in their number of examples.
    """

    def __init__(
        self,
        axes: ExampleAxes | None,
        inputs: Mapping[str, Array],
        targets: Targets,
        size: int,
        passes: int,
    ) -> None:
        self._axes, self._whole, self._size, self._passes = axes, (inputs, targets), size, passes
        self._count = size if axes is None else axes.check(inputs, targets)
        self._reads = 0

    def __iter__(self) -> Iterator[Batch]:
        self._reads += 1
        name = f"pass {self._reads} of {self._passes}" if self._passes > 1 else "measuring"
        with progress() as bar:
            task = bar.add_task(name, total=self._count)
            for start in range(0, self._count, self._size):
                yield self._part(start)
                bar.update(task, completed=start + self._size)

    def _part(self, start: int) -> Batch:
        if self._axes is None:
            return self._whole
        return self._axes.part(*self._whole, slice(start, start + self._size))
