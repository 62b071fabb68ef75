"""``TrainingFiles``: the files of ``export_training`` in Python, and states that come back."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from kfac_engine._types import Array
from kfac_engine.arguments import check_seed, whole
from kfac_engine.datasets.examples import ExampleAxes
from kfac_engine.datasets.forms import Data
from kfac_engine.errors import InputError, ShapeError, UnknownNameError, suggestion
from kfac_engine.graph.analysis.exporter_changes import Tie, spread
from kfac_engine.graph.export import export_files
from kfac_engine.graph.files import write_model
from kfac_engine.graph.load import ModelSource, load_model
from kfac_engine.graph.write import CompactModel, properties_of
from kfac_engine.losses.observed import Weighted, weights_gathered
from kfac_engine.runtime.batch_axis import Batch
from kfac_engine.runtime.example_axis import ExampleAxis
from kfac_engine.sessions.session import Session
from kfac_engine.system.reading import check_file
from kfac_engine.system.state_files import read_tensors, write_tensors
from kfac_engine.system.writing import checked_path
from kfac_engine.training.batches import Batches, RunData, run_data
from kfac_engine.training_files.description import DIFFERENT, Description

TRAINING, INITIAL, PREDICT = "training.onnx", "initial.onnx", "predict.onnx"
README = "README.md"

State: TypeAlias = Mapping[str, Array]
AnyState: TypeAlias = State | str | Path

_NEW = "new "


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """The result of ``TrainingFiles.run``.

    Attributes:
        state: The state after the last step.
        losses: The loss of each step, before its update.
        skipped: Number of steps whose loss or gradients were not finite; they changed nothing.
    """

    state: dict[str, Array]
    losses: list[float]
    skipped: int


class TrainingFiles:
    """The files of ``export_training`` in a folder.

    Args:
        folder: The folder.
        model: The model that was exported; ``export`` needs it.

    Raises:
        InputError: A file is missing, damaged, or belongs to another export.
    """

    def __init__(self, folder: str | Path, model: ModelSource | None = None) -> None:
        self.folder, self._model = checked_path(folder), model
        self._data: dict[str, bytes] = {}
        self._sessions: dict[str, Session] = {}
        described = {name: self._described(name) for name in (TRAINING, INITIAL, PREDICT)}
        self.description = described[TRAINING]
        other = next(
            (n for n, d in described.items() if d.identity != self.description.identity), None
        )
        if other is not None:
            raise InputError(
                f"'{TRAINING}' and '{other}' in '{self.folder}' belong to different exports; "
                f"export the model again."
            )

    def __repr__(self) -> str:
        """Return the folder, the model and the optimizer."""
        about = self.description
        return f"<TrainingFiles '{self.folder}': {about.model!r:.80} with {about.optimizer}>"

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the states that are weights or running statistics of the model."""
        return self.description.parameters

    def initial(self) -> dict[str, Array]:
        """Return the state before the first step, by name."""
        session = self._session(INITIAL)
        return _copies(session.run(tuple(session.output_dtypes), {}))

    def run(
        self,
        data: Data,
        *,
        steps: int,
        batch_size: int = 128,
        rate: float | Callable[[int], float] = 1.0,
        state: AnyState | None = None,
        seed: int = 0,
    ) -> TrainingRun:
        """Train with ONNX Runtime alone, as a device does.

        Args:
            data: Data in a form of ``fit``; the batches are the same as in ``fit`` with this seed.
            steps: Number of steps.
            batch_size: Number of examples in a batch.
            rate: Value of the schedule: a number, or a function of the number of steps so far.
            state: The state to start from; the initial one if None.
            seed: Seed of the order of the examples.

        Returns:
            The state and the losses.

        Raises:
            InputError: The data, an argument or the state is wrong.
        """
        whole("steps", steps, least=1)
        whole("batch_size", batch_size, least=1)
        check_seed(seed)
        current = self.initial() if state is None else self.load(state)
        losses: list[float] = []
        skipped, source = 0, self._source(data, batch_size, seed)
        if np.isinf(current.get(DIFFERENT, 0.0)) and source.examples:
            current[DIFFERENT] = np.array(source.examples, np.float32)
        batches = _batches(source.train)
        for group in _groups(batches, steps, self.description.steps_per_call):
            first = len(losses)
            values = [rate(first + k) if callable(rate) else rate for k in range(len(group))]
            if self.description.steps_per_call == 1:
                ((inputs, targets),) = group
                results = self.step(current, inputs, targets, rate=values[0])
            else:
                inputs, targets = _stacked([i for i, _ in group]), _stacked([t for _, t in group])
                results = self.step(current, inputs, targets, rate=np.array(values))
            new = {name: results[f"{_NEW}{name}"] for name in current}
            current |= {name: array for name, array in new.items() if array.size}
            losses += np.ravel(results["loss"]).tolist()
            skipped += int(np.sum(~results["finite"]))
        return TrainingRun(_copies(current), losses, skipped)

    def step(
        self, state: State, inputs: Mapping[str, Array], targets: Any, *, rate: float | Array = 1.0
    ) -> dict[str, Array]:
        """Return the outputs of ``training.onnx`` for one batch.

        With several steps in a call, inputs, targets, weights and rate have a first axis of steps.

        Args:
            state: The state by name.
            inputs: Arrays by input name; further inputs of the file, such as ``noise``, as well.
            targets: The targets, also ``Weighted``; for several losses, by output.
            rate: Value of the schedule.

        Returns:
            Read-only arrays by output name. A ``new`` state without entries is the old one.

        Raises:
            InputError: An input is missing, or the files have no input for weights.
            ShapeError: Weights are not those that the files were written for.
        """
        targets = weights_gathered(targets)
        outputs, weighted = self.description.outputs, isinstance(targets, Weighted)
        named = _by_input(outputs, targets.targets if weighted else targets)
        if weighted:
            named |= self._weights(targets.weights)
        session = self._session(TRAINING)
        arrays = {**inputs, **named, "rate": np.asarray(rate, np.float32), **state}
        feeds = {}
        for name, dtype in session.input_dtypes.items():
            if name not in arrays:
                raise InputError(f"'{TRAINING}' needs the input '{name}'.")
            feeds[name] = np.asarray(arrays[name], dtype, order="C")
        return session.run(tuple(session.output_dtypes), feeds)

    def predict(self, state: AnyState, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return the outputs of ``predict.onnx`` for a state.

        Args:
            state: A state by name, or a file of ``save``; its parameters suffice.
            inputs: Arrays by input name.

        Returns:
            Arrays by output name.
        """
        session = self._session(PREDICT)
        arrays = {**inputs, **self.read(state)}
        dtypes = session.input_dtypes
        feeds = {name: np.asarray(arrays[name], t, order="C") for name, t in dtypes.items()}
        return _copies(session.run(tuple(session.output_dtypes), feeds))

    # -- states ------------------------------------------------------------------------------------

    def load(self, state: AnyState) -> dict[str, Array]:
        """Return a whole state, checked.

        Args:
            state: A state by name, or a safetensors file with one.

        Raises:
            InputError: The file cannot be read, or a state is missing.
            ShapeError: A state has another shape.
        """
        return self._checked(state, tuple(self.description.state))

    def read(self, state: AnyState) -> dict[str, Array]:
        """Return the weights and running statistics of a state, by the names of the model.

        ``Engine.set_parameters`` and ``set_buffers`` take them.

        Args:
            state: As for ``load``; other entries than parameters may be missing.
        """
        ties = (Tie(*entry) for entry in self.description.ties)
        return spread(ties, self._checked(state, self.parameters))

    def save(self, state: AnyState, path: str | Path) -> None:
        """Write a state to a safetensors file, from which ``run`` and a device continue.

        Args:
            state: As for ``load``.
            path: The file.
        """
        write_tensors(path, self.load(state), {"identity": self.description.identity})

    def export(self, state: AnyState, path: str | Path, model: ModelSource | None = None) -> None:
        """Write the model of the user with the weights of a state.

        Args:
            state: As for ``read``.
            path: File of the model.
            model: The model that was exported; by default the argument of the constructor.

        Raises:
            InputError: There is no model, or it is another one.
        """
        source = self._model if model is None else model
        if source is None:
            raise InputError(
                "the weights are written into the model that was exported; pass it as model=…."
            )
        loaded = load_model(source)
        arrays = self.read(state)
        missing = [name for name in arrays if name not in loaded.graph.constants]
        if missing:
            raise InputError(
                f"the model has no weight '{missing[0]}' of the state; pass the model that was "
                f"exported."
            )
        location = f"{checked_path(path).name}.data"
        write_model(path, export_files(loaded, arrays, location))

    def _checked(self, state: AnyState, names: tuple[str, ...]) -> dict[str, Array]:
        arrays: Mapping[str, Array]
        arrays = (
            state if isinstance(state, Mapping) else read_tensors(state, f"the state '{state}'")[1]
        )
        shapes, checked = self.description.state, {}
        for name in names:
            if name not in arrays:
                raise InputError(f"the state has no '{name}'; it belongs to other training files.")
            array = np.asarray(arrays[name])
            if array.shape != shapes[name]:
                raise ShapeError(
                    f"'{name}' has the shape {array.shape} in the state, and {shapes[name]} in the "
                    f"training files."
                )
            checked[name] = array
        for name in arrays:
            if name not in shapes:
                raise UnknownNameError(
                    f"the training files have no state '{name}'{suggestion(name, shapes)}."
                )
        return checked

    # -- private -----------------------------------------------------------------------------------

    def _weights(self, weights: Any) -> dict[str, Array]:
        """Return the weights of targets by input, after their ranks were checked."""
        about = self.description
        if not about.weights:
            raise InputError(
                "the files have no input for weights; export the model with weights='examples', "
                "'predictions' or 'targets'."
            )
        by_input = _by_input({output: name for output, (name, _) in about.weights.items()}, weights)
        dtypes, several = self._session(TRAINING).input_dtypes, about.steps_per_call > 1
        for name, rank in about.weights.values():
            array = np.asarray(by_input.get(name, 1.0))
            if array.ndim and array.ndim != rank + several:
                raise ShapeError(
                    f"the weights of a batch have the shape {array.shape[several:]}, but the input "
                    f"'{name}' has {rank} axes; give what the files were exported for."
                )
            if dtypes[name] == np.bool_ and not np.isin(array, (0, 1)).all():
                raise InputError(
                    f"the input '{name}' says which targets count, but the data have other weights "
                    f"than 0 and 1; export the model with weights= in place of mask=."
                )
        return by_input

    def _described(self, name: str) -> Description:
        path = self.folder / name
        check_file(path)
        self._data[name] = path.read_bytes()
        return Description.read(properties_of(self._data[name]), f"'{path}'")

    def _session(self, name: str) -> Session:
        if name not in self._sessions:
            model = CompactModel(self._data[name], {}, {})
            self._sessions[name] = Session(model, threads=1, what=f"'{name}'")
        return self._sessions[name]

    def _source(self, data: Data, batch_size: int, seed: int) -> RunData:
        about = self.description
        size = about.batch_size or 1
        places = {o: ExampleAxis(about.targets[name], 1) for o, name in about.outputs.items()}
        inputs = {name: axis for name, axis in about.inputs.items() if axis >= 0}
        fixed = f"the model takes {size} examples" if about.batch_size else ""
        axes = ExampleAxes(Batch(size, inputs, places, fixed), list(about.outputs))
        return run_data(data, None, axes, batch_size, seed)


def _by_input(inputs: Mapping[str, str], arrays: Any) -> dict[str, Array]:
    """Return arrays by input of the file.

    ``inputs`` maps outputs of the model to inputs of the file. ``arrays`` has the same keys, or is
    one array for all of them.
    """
    by_output = arrays if isinstance(arrays, Mapping) else dict.fromkeys(inputs, arrays)
    return {inputs.get(name, name): array for name, array in by_output.items()}


def _batches(train: Batches) -> Iterator[tuple[Any, Any]]:
    epoch = 0
    while True:
        count = -1
        for count, (batch,) in enumerate(train.steps(epoch)):  # noqa: B007 (counts the batches)
            yield batch
        if count < 0:
            raise InputError("the data have no batch left; pass more of them, or fewer steps.")
        epoch += 1


def _groups(
    batches: Iterator[tuple[Any, Any]], steps: int, size: int
) -> Iterator[list[tuple[Any, Any]]]:
    """Yield the batches of each call; within a call, all have the same number of examples."""
    group: list[tuple[Any, Any]] = []
    for _ in range(steps):
        batch = next(batches)
        if group and (len(group) == size or _sizes(batch) != _sizes(group[0])):
            yield group
            group = []
        group.append(batch)
    yield group


def _sizes(batch: tuple[Any, Any]) -> dict[str, tuple[int, ...]]:
    return {name: np.shape(array) for name, array in batch[0].items()}


def _stacked(arrays: Sequence[Any]) -> Any:
    """Return entries stacked along a new first axis: arrays, arrays by name, weighted targets."""
    arrays = [weights_gathered(entry) for entry in arrays]
    if isinstance(arrays[0], Weighted):
        return Weighted(
            _stacked([a.targets for a in arrays]), _stacked([a.weights for a in arrays])
        )
    if isinstance(arrays[0], Mapping):
        return {name: np.stack([entry[name] for entry in arrays]) for name in arrays[0]}
    return np.stack(arrays)


def _copies(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return arrays in memory of their own, which a session does not reuse."""
    return {name: np.array(array) for name, array in arrays.items()}
