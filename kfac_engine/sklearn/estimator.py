"""Implements ``fit``, the model and its files for the classifier and the regressor."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any, ClassVar, Self, TypeAlias

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.model_selection import train_test_split
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from kfac_engine._types import Array
from kfac_engine.arguments import check_int, check_list
from kfac_engine.backend.namespace import refuse_mask
from kfac_engine.engine.engine import Engine
from kfac_engine.errors import InputError
from kfac_engine.graph.load import LoadedModel, ModelSource, load_model
from kfac_engine.graph.structure import Input, Node
from kfac_engine.graph.write import ModelProto, build_model
from kfac_engine.sklearn.example_input import ExampleInput, as_rows
from kfac_engine.sklearn.trained_model import TrainedModel
from kfac_engine.training.budget import ScheduleFunction
from kfac_engine.training.callbacks.best import BestWeights, EarlyStop
from kfac_engine.training.hooks import Callback

# A model, or a function that returns one for a number of features and a number of outputs.
ModelChoice: TypeAlias = ModelSource | Callable[[int, int], ModelSource] | None

_LARGEST_SEED = 2**31 - 1


class OnnxEstimator(BaseEstimator, ABC):  # type: ignore[misc] # published without types
    """Base of the estimators; see ``OnnxClassifier`` for the arguments.

    Attributes:
        records_: A dictionary for each step of the last training, as ``kfac_engine.fit`` returns
            them.
        n_features_in_: Number of values of an example.
    """

    _trained: TrainedModel | None = None
    _validation: ClassVar[dict[str, bool]] = {}  # options of validate_data for targets

    def __init__(  # noqa: PLR0913 (scikit-learn reads the arguments from the signature)
        self,
        model: ModelChoice = None,
        *,
        hidden: Sequence[int] = (100,),
        optimizer: str = "kfac",
        optimizer_options: Mapping[str, Any] | None = None,
        engine_options: Mapping[str, Any] | None = None,
        epochs: int = 10,
        batch_size: int = 128,
        accumulate: int = 1,
        schedule: str | ScheduleFunction | None = None,
        early_stop: int | None = None,
        validation_fraction: float = 0.1,
        random_state: Any = 0,
        warm_start: bool = False,
        verbose: bool = False,
    ) -> None:
        self.model = model
        self.hidden = hidden
        self.optimizer = optimizer
        self.optimizer_options = optimizer_options
        self.engine_options = engine_options
        self.epochs = epochs
        self.batch_size = batch_size
        self.accumulate = accumulate
        self.schedule = schedule
        self.early_stop = early_stop
        self.validation_fraction = validation_fraction
        self.random_state = random_state
        self.warm_start = warm_start
        self.verbose = verbose

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train the model on examples.

        Args:
            X: Examples along axis 0: rows ``(n, features)``, also sparse, or an array in the shape
                of the input.
            y: Targets of the examples.
            sample_weight: A number ≥ 0 for each example, how much its target counts; None for ones.

        Returns:
            The estimator itself.

        Raises:
            ValueError: The examples, the targets or an argument are wrong. Errors of scikit-learn's
                validation are no ``KfacError``. The estimator has not changed, except for the
                weights under ``warm_start``.
        """
        with _restored_on_error(self):
            continues = self.warm_start and self.__sklearn_is_fitted__()
            labels = self._known_labels() if continues else None
            model, *arrays = self._prepared(X, y, sample_weight, continues, labels)
            model.renew_optimizer(self.optimizer, self.optimizer_options)
            self._train(model, arrays)
        return self

    def _fit_one_epoch(
        self, X: Any, y: Any, sample_weight: Any, labels: Array | None = None
    ) -> Self:
        with _restored_on_error(self):
            continues = self.__sklearn_is_fitted__()
            model, *arrays = self._prepared(X, y, sample_weight, continues, labels)
            if not model.has_optimizer:
                model.renew_optimizer(self.optimizer, self.optimizer_options)
            self.records_ = model.train(
                tuple(arrays),
                (),
                epochs=1,
                **self._equal_batches(len(arrays[0])),
                schedule="constant",
                seed=self._seed(),
            )
        return self

    def export(self, path: str | Path) -> None:
        """Write the trained model as an ONNX file, with the names and nodes of ``model``.

        Args:
            path: File to write.

        Raises:
            NotFittedError: The estimator is not fitted.
            InputError: The file cannot be written.
        """
        self.engine_.export(path)

    @property
    def engine_(self) -> Engine:
        """The engine with the trained parameters.

        Raises:
            NotFittedError: The estimator is not fitted.
        """
        return self._fitted().engine

    def __sklearn_is_fitted__(self) -> bool:
        """Return whether the estimator has a trained model."""
        return self._trained is not None

    def __sklearn_tags__(self) -> Any:
        """Return what scikit-learn knows about the estimator."""
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    # -- what a kind of estimator defines ---------------------------------------------------------

    @abstractmethod
    def _read_targets(self, y: Any, labels: Array | None) -> int:
        """Check targets; return the number of outputs that they need.

        Args:
            y: The targets.
            labels: All classes; None for those in ``y``.
        """

    @abstractmethod
    def _known_labels(self) -> Array | None:
        """Return the classes of the previous training; None for a regressor."""

    @abstractmethod
    def _loss(self, file: LoadedModel) -> str:
        """Return the name of the loss."""

    @abstractmethod
    def _shaped_targets(self, y: Any, loss: str, output: Array) -> Array:
        """Return targets in the form of a loss, for a model with outputs like ``output``."""

    @abstractmethod
    def _strata(self, targets: Array) -> Array | None:
        """Return the classes whose shares a split of the examples preserves; None for none."""

    # -- private ----------------------------------------------------------------------------------

    def _class_weights(self, y: Any, weights: Array | None) -> Array | None:
        """Return the weight of the class of each target; None for ones.

        ``weights`` are those of the examples, if there are any.
        """
        return None

    def _prepared(
        self, X: Any, y: Any, sample_weight: Any, continues: bool, labels: Array | None
    ) -> tuple[Any, ...]:
        """Check examples; return the model, its inputs, its targets and their weights, if any."""
        rows, shape = as_rows(X)
        refuse_mask(y)
        rows, y = validate_data(
            self, rows, y, reset=not continues, accept_sparse="csr", **self._validation
        )
        weights = self._weights(rows, y, sample_weight)
        outputs = self._read_targets(y, labels)
        model = self._trained if continues else None
        if model is None:
            source = self._source(rows.shape[1], outputs)
            file = load_model(source)
            example = ExampleInput.of(file.graph)
            values = example.values(rows, shape)
            options = {"seed": self._seed(), **(self.engine_options or {})}
            model = TrainedModel(source, example, self._loss(file), options)
        else:
            values = model.example.values(rows, shape)
        size = self._equal_batches(len(values))["batch_size"]
        targets = self._shaped_targets(y, model.loss, model.outputs(values[:size], size))
        self._trained = model
        if weights is None:
            return model, values, targets
        counting = weights > 0  # the others would fill batches in which nothing counts
        return model, values[counting], targets[counting], weights[counting]

    def _weights(self, rows: Array, y: Array, sample_weight: Any) -> Array | None:
        """Return the weights of the examples; None for ones."""
        if sample_weight is None:
            return self._class_weights(y, None)
        weights = np.asarray(_check_sample_weight(sample_weight, rows, dtype=np.float64))
        if (weights < 0).any():
            raise InputError("sample_weight must not be negative.")
        classes = self._class_weights(y, weights)
        return weights if classes is None else weights * classes

    def _train(self, model: TrainedModel, arrays: Sequence[Array]) -> None:
        targets = arrays[1]
        callbacks: list[Callback] = []
        validation, schedule, patience = None, self.schedule, self.early_stop
        if patience is not None:
            callbacks = [EarlyStop(patience=patience), BestWeights()]
            trained, held_out = train_test_split(
                np.arange(len(targets)),
                test_size=self.validation_fraction,
                random_state=self._seed(),
                stratify=self._strata(targets),
            )
            validation = tuple(array[held_out] for array in arrays)
            arrays = [array[trained] for array in arrays]
        if schedule is None:  # a run that stops early does not reach the tail
            schedule = "tail" if patience is None else "constant"
        self.records_ = model.train(
            tuple(arrays),
            callbacks,
            epochs=self.epochs,
            **self._equal_batches(len(arrays[0])),
            validation=validation,
            metrics=None,
            schedule=schedule,
            seed=self._seed(),
            progress=bool(self.verbose),
        )

    def _equal_batches(self, examples: int) -> dict[str, int]:
        """Return sizes of batches of equal size that leave out the fewest examples, for ``fit``."""
        check_int("batch_size", self.batch_size, least=1)
        check_int("accumulate", self.accumulate, least=1)
        batch = examples // ceil(examples / (self.batch_size * self.accumulate))
        parts = ceil(batch / self.batch_size)
        return {"batch_size": batch // parts, "accumulate": parts}

    def _source(self, features: int, outputs: int) -> ModelSource:
        """Return the model before the training."""
        if self.model is None:
            for size in check_list("hidden", self.hidden, "(100,)"):
                check_int("each of hidden", size, least=1)
            return dense_network((features, *self.hidden, outputs), self._seed())
        return self.model(features, outputs) if callable(self.model) else self.model

    def _seed(self) -> int:
        """Return the seed of the weights, the order of the examples and the sampled targets."""
        return int(check_random_state(self.random_state).randint(_LARGEST_SEED))

    def _fitted(self) -> TrainedModel:
        check_is_fitted(self)
        assert self._trained is not None  # by check_is_fitted
        return self._trained

    def _outputs(self, X: Any) -> Array:
        """Return the output of the trained model for examples in the form of ``fit``."""
        model = self._fitted()
        check_int("batch_size", self.batch_size, least=1)
        rows, shape = as_rows(X)
        rows = validate_data(self, rows, reset=False, accept_sparse="csr")
        return model.outputs(model.example.values(rows, shape), self.batch_size)


@contextmanager
def _restored_on_error(estimator: OnnxEstimator) -> Iterator[None]:
    """Return a context that restores the attributes of an estimator after an error."""
    attributes = dict(estimator.__dict__)
    try:
        yield
    except BaseException:
        estimator.__dict__.clear()
        estimator.__dict__.update(attributes)
        raise


# -- the network of an estimator without a model ---------------------------------------------------

_OPSET = 18
_FLOAT = np.dtype(np.float32)


def dense_network(sizes: Sequence[int], seed: int) -> ModelProto:
    """Return a network of dense layers with random weights and biases of zero.

    The variance of the weights is 2 / fan-in, which preserves the scale of activations through a
    ReLU (He et al. 2015).

    Args:
        sizes: Number of features, sizes of the hidden layers, and number of outputs.
        seed: Seed of the weights.

    Returns:
        A model with the input ``X`` ``(batch, sizes[0])`` and the output ``output``
        ``(batch, sizes[-1])`` in float32.
    """
    rng, last = np.random.default_rng(seed), len(sizes) - 1
    nodes: list[Node] = []
    constants: dict[str, Array] = {}
    value = "X"
    for i, (fan_in, fan_out) in enumerate(pairwise(sizes), start=1):
        name = f"dense{i}"
        weight = rng.standard_normal((fan_out, fan_in)) * np.sqrt(2 / fan_in)
        constants[f"{name}.weight"] = weight.astype(_FLOAT)
        constants[f"{name}.bias"] = np.zeros(fan_out, _FLOAT)
        operands = value, f"{name}.weight", f"{name}.bias"
        value = "output" if i == last else f"{name}_out"
        nodes.append(Node("Gemm", operands, (value,), {"transB": 1}, name))
        if i < last:
            nodes.append(Node("Relu", (value,), (f"relu{i}_out",), name=f"relu{i}"))
            value = f"relu{i}_out"
    inputs = [Input("X", _FLOAT, ("batch", sizes[0]))]
    outputs = [Input("output", _FLOAT, ("batch", sizes[-1]))]
    return build_model(nodes, inputs, outputs, constants, _OPSET, name="dense network")
