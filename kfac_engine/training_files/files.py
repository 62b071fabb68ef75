"""Defines ``TrainingFiles``, which runs the files of ``export_training`` and loads their states."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from kfac_engine._types import Array, DType
from kfac_engine.arguments import check_at_least_zero, check_int, check_seed
from kfac_engine.backend.namespace import as_array, numeric
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
from kfac_engine.runtime.inputs import spelled_shape
from kfac_engine.sessions.session import Session
from kfac_engine.system.reading import check_file
from kfac_engine.system.state_files import read_tensors, write_tensors
from kfac_engine.system.writing import checked_path
from kfac_engine.training.batches import Batches, RunData, run_data
from kfac_engine.training_files.description import DIFFERENT, Description

TRAINING, INITIAL, PREDICT = "training.onnx", "initial.onnx", "predict.onnx"
EVALUATE = "evaluate.onnx"
FILES = (TRAINING, INITIAL, PREDICT, EVALUATE)
README = "README.md"

State: TypeAlias = Mapping[str, Array]
AnyState: TypeAlias = State | str | Path

_NEW = "new "
_SUM, _COUNT = " sum", " count"


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
        described = {name: self._described(name) for name in FILES}
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
        """Train with only ONNX Runtime, as a device does.

        Args:
            data: Data as for ``fit``; the batches are the same as in ``fit`` with this seed.
            steps: Number of steps.
            batch_size: Number of examples in a batch.
            rate: Value of the schedule: a number, or a function of the number of steps so far.
            state: The state to start from; the initial one if None. The order of the data and
                ``rate`` continue at the step of the state.
            seed: Seed of the order of the examples.

        Returns:
            The state and the losses.

        Raises:
            InputError: The data, an argument or the state is wrong.
        """
        check_int("steps", steps, least=1)
        check_int("batch_size", batch_size, least=1)
        check_seed(seed)
        current = self.initial() if state is None else self.load(state)
        losses: list[float] = []
        skipped, source = 0, self._source(data, batch_size, seed)
        if np.isinf(current.get(DIFFERENT, 0.0)) and source.examples:
            current[DIFFERENT] = np.array(source.examples, np.float32)
        start = int(current["step"])
        for step, batch in enumerate(islice(_batches(source.train, start), steps), start):
            value = rate(step) if callable(rate) else rate
            check_at_least_zero(f"the rate of step {step}", value)
            results = self._call(current, self._named(*batch), np.array(value, np.float32))
            new = {name: results[f"{_NEW}{name}"] for name in current}
            current |= {name: array for name, array in new.items() if array.size}
            losses.append(float(results["loss"]))
            skipped += int(not results["finite"])
        return TrainingRun(_copies(current), losses, skipped)

    def step(
        self, state: State, inputs: Mapping[str, Array], targets: Any, *, rate: float = 1.0
    ) -> dict[str, Array]:
        """Return the outputs of ``training.onnx`` for one batch.

        Args:
            state: The state by name.
            inputs: Arrays by input name; further inputs of the file, such as ``noise``, as well.
            targets: The targets, also ``Weighted``; for several losses, by output. Targets without
                weights have weights of one.
            rate: Value of the schedule, a finite number of at least 0.

        Returns:
            Read-only arrays by output name. A ``new`` state without entries is the old one.

        Raises:
            InputError: An input is missing or has another type, the rate is wrong, or the files
                have no input for weights.
            ShapeError: An input has another shape, or weights are not those that the files were
                written for.
        """
        arrays, rates = self._named(inputs, targets), np.asarray(rate)
        if rates.dtype.kind not in "iuf" or not (np.isfinite(rates) & (rates >= 0)).all():
            raise InputError(f"rate must be a finite number of at least 0, got {rate!r:.80}.")
        return self._call(state, arrays, rates)

    def predict(self, state: AnyState, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return the outputs of ``predict.onnx`` for a state.

        Args:
            state: A state by name, or a file of ``save``; its parameters suffice.
            inputs: Arrays by input name.

        Returns:
            Arrays by output name.

        Raises:
            InputError: An input is missing or has another type.
            ShapeError: An input has another shape.
        """
        results = self._predicted(state, inputs)
        return _copies({name: results[name] for name in self.description.predictions})

    def evaluate(
        self, state: AnyState, batches: Iterable[tuple[Mapping[str, Array], Any]]
    ) -> dict[str, float]:
        """Return the loss, and the accuracy or the label error rate, of the model's predictions.

        The result has the accuracy if targets are classes, and the label error rate if they are
        sequences. Dropouts are off, and batch normalizations use their running statistics.

        Args:
            state: As for ``predict``.
            batches: Pairs of inputs and targets, as for ``step``.

        Returns:
            The metrics of all batches together, by name.

        Raises:
            InputError: There is no batch, no target counts, a target is not a class, a weight is
                negative, or a prediction is not finite.
            ShapeError: An array has another shape.
        """
        weights, totals = self._checked(state, self.parameters), dict[str, Array]()
        for inputs, targets in batches:
            arrays = self._named(inputs, targets)
            results = self._predicted(weights, inputs)
            read = {name: results[source] for name, source in self.description.evaluated.items()}
            for name, value in self._results(EVALUATE, {**arrays, **read}).items():
                totals[name] = totals.get(name, 0.0) + value.astype(np.float64)
        if not totals:
            raise InputError("there is no batch to evaluate; give one pair of inputs and targets.")
        measured = {}
        for name in (name for name in totals if name.endswith(_SUM)):
            metric = name.removesuffix(_SUM)
            count = totals.get(f"{metric}{_COUNT}", np.ones(1))
            if not count.any():
                raise InputError(
                    "no target of the data counts: each is ignored or has the weight 0; give one "
                    "that counts."
                )
            measured[metric] = float((totals[name] / np.where(count, count, 1)).sum())
        if not np.isfinite(list(measured.values())).all():
            raise InputError(
                "the metrics are not finite: a target is not a class, a weight is negative, or a "
                "prediction is not finite; check the data and the state."
            )
        return measured

    def _predicted(self, state: AnyState, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return all outputs of ``predict.onnx``."""
        self._check_names(PREDICT, inputs)
        return self._results(PREDICT, {**inputs, **self.read(state)})

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
            InputError: The model is missing, or it is not the model that was exported.
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

    def _named(self, inputs: Mapping[str, Array], targets: Any) -> dict[str, Array]:
        """Return the arrays of a batch by input of ``training.onnx``, before checks of the arrays.

        Weights that are not given are ones.
        """
        self._check_names(TRAINING, inputs)
        about, targets = self.description, weights_gathered(targets)
        weighted = isinstance(targets, Weighted)
        named = {**inputs, **_by_input(about.outputs, targets.targets if weighted else targets)}
        arrays = {name: as_array(value) for name, value in named.items()}
        if weighted:
            arrays |= self._weights(targets.weights)
        session = self._session(TRAINING)
        sizes = _sizes(session.input_shapes, arrays)
        for name, _ in about.weights.values():
            if name not in arrays:
                shape = [sizes.get(size, size) for size in session.input_shapes[name]]
                arrays[name] = np.ones(shape, session.input_dtypes[name])
        return arrays

    def _check_names(self, file: str, inputs: Mapping[str, Array]) -> None:
        known = {**self._session(file).input_shapes, **self.description.inputs}
        if not isinstance(inputs, Mapping):
            raise InputError(
                f"inputs must be a mapping {{name: array}}, got {type(inputs).__name__}."
            )
        for name in inputs:
            if name not in known:
                raise UnknownNameError(f"'{file}' has no input '{name}'{suggestion(name, known)}.")

    def _call(self, state: State, arrays: Mapping[str, Array], rate: Array) -> dict[str, Array]:
        """Return the outputs of ``training.onnx`` for arrays of ``_named``."""
        return self._results(TRAINING, {**arrays, "rate": rate.astype(np.float32), **state})

    def _results(self, file: str, arrays: Mapping[str, Any]) -> dict[str, Array]:
        """Return the outputs of a file for arrays, which may be more than its inputs."""
        session, feeds = self._session(file), {}
        for name in session.input_shapes:
            if name not in arrays:
                raise InputError(f"'{file}' needs the input '{name}'.")
            feeds[name] = _in_type(name, arrays[name], session.input_dtypes.get(name))
        _check_shapes(session.input_shapes, feeds)
        return session.run(tuple(session.output_dtypes), feeds)

    def _weights(self, weights: Any) -> dict[str, Array]:
        """Return the weights of targets by input, after their ranks were checked."""
        about = self.description
        if not about.weights:
            raise InputError(
                "the files have no input for weights; export the model with weights='examples', "
                "'predictions' or 'targets'."
            )
        by_input = _by_input({output: name for output, (name, _) in about.weights.items()}, weights)
        dtypes, ranks = self._session(TRAINING).input_dtypes, dict(about.weights.values())
        for name, weight in by_input.items():
            array = numeric(f"'{name}'", as_array(weight))
            if name in ranks and array.ndim != ranks[name]:
                raise ShapeError(
                    f"the weights of a batch have the shape {array.shape}, but the input "
                    f"'{name}' has {ranks[name]} axes; give weights in the form for which "
                    f"the files were exported."
                )
            by_input[name] = array
            if dtypes.get(name) == np.bool_:
                if not np.isin(array, (0, 1)).all():
                    raise InputError(
                        f"the input '{name}' says which targets count, but the data have other "
                        f"weights than 0 and 1; export the model with weights= in place of mask=."
                    )
                by_input[name] = array.astype(np.bool_)
        return by_input

    def _described(self, name: str) -> Description:
        path = self.folder / name
        check_file(path)
        self._data[name] = path.read_bytes()
        return Description.read(properties_of(self._data[name]), f"'{path}'")

    def _session(self, name: str) -> Session:
        if name not in self._sessions:
            model = CompactModel(self._data[name], {}, {})
            # Optimizations of the thousands of nodes of a step take longer than the rest of the
            # session, and save no time of a step.
            optimize = name not in (TRAINING, INITIAL)
            self._sessions[name] = Session(model, threads=1, optimize=optimize, what=f"'{name}'")
            del self._data[name]
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


def _batches(train: Batches, start: int) -> Iterator[tuple[Any, Any]]:
    """Yield a run's batches endlessly, starting at the step ``start``."""
    if not train.per_epoch:
        return islice(_endless(train, 0, 0), start, None)
    return _endless(train, *divmod(start, train.per_epoch))


def _endless(train: Batches, epoch: int, first: int) -> Iterator[tuple[Any, Any]]:
    while True:
        count = -1
        for count, (batch,) in enumerate(train.steps(epoch, first)):  # noqa: B007 (counts the batches)
            yield batch
        if count < 0:
            raise InputError("the data have no batch left; pass more of them, or fewer steps.")
        epoch, first = epoch + 1, 0


# -- checks of arrays ------------------------------------------------------------------------------

Declared: TypeAlias = Mapping[str, tuple[int | str | None, ...]]


def _in_type(name: str, value: Any, dtype: DType | None) -> Array:
    """Return an array for an input of a file; numbers keep their kind, and their values.

    ``dtype`` is None for text. Real numbers may be rounded.
    """
    if dtype is None:
        return np.asarray(value, object)
    array = numeric(f"'{name}'", as_array(value))
    if not np.can_cast(array.dtype, dtype, "same_kind"):
        raise InputError(
            f"'{name}' has the type {array.dtype}, the training files need {dtype}; convert it "
            f"with .astype('{dtype}')."
        )
    fed = np.asarray(array, dtype, order="C")
    if dtype.kind in "iu" and not np.can_cast(array.dtype, dtype) and (fed != array).any():
        raise InputError(f"'{name}' holds numbers that {dtype} cannot hold.")
    return fed


def _sizes(declared: Declared, arrays: Mapping[str, Array]) -> dict[int | str | None, int]:
    """Return the size that each symbol of the declared shapes has in arrays."""
    sizes: dict[int | str | None, int] = {}
    for name, shape in declared.items():
        pairs = zip(shape, arrays[name].shape, strict=False) if name in arrays else ()
        sizes |= {symbol: size for symbol, size in pairs if isinstance(symbol, str)}
    return sizes


def _check_shapes(declared: Declared, arrays: Mapping[str, Array]) -> None:
    """Raise a ShapeError for an array of another shape, or with another number of examples."""
    by_symbol: dict[str, tuple[str, int]] = {}
    for name, shape in declared.items():
        sizes = arrays[name].shape
        pairs = [*zip(shape, sizes, strict=False)]
        fixed = [(wanted, size) for wanted, size in pairs if isinstance(wanted, int)]
        if len(sizes) != len(shape) or any(wanted != size for wanted, size in fixed):
            raise ShapeError(
                f"'{name}' has the shape {sizes}, but the training files need "
                f"({spelled_shape(shape)}). The sample_inputs of export_training set each length "
                f"that the model leaves open."
            )
        for symbol, size in pairs:
            first, known = by_symbol.setdefault(str(symbol), (name, size))
            if isinstance(symbol, str) and known != size:
                raise ShapeError(
                    f"axis '{symbol}' has {known} entries in '{first}' and {size} in '{name}'."
                )


def _copies(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return arrays in memory of their own, which a session does not reuse."""
    return {name: np.array(array) for name, array in arrays.items()}
