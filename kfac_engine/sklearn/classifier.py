"""Implements scikit-learn's classifier interface."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
from scipy.special import expit, softmax
from sklearn.base import ClassifierMixin
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets

from kfac_engine._types import Array
from kfac_engine.backend.namespace import refuse_mask
from kfac_engine.errors import InputError, ShapeError
from kfac_engine.graph.load import LoadedModel
from kfac_engine.sklearn.estimator import ModelChoice, OnnxEstimator
from kfac_engine.training.budget import ScheduleFunction

_CATEGORICAL, _BERNOULLI = "categorical", "multi_bernoulli"


class OnnxClassifier(ClassifierMixin, OnnxEstimator):  # type: ignore[misc] # without types
    """A classifier that trains an ONNX model with K-FAC or another optimizer.

    The model returns logits or probabilities: a column for each class, or for two classes a single
    column with the second class. The columns belong to the sorted labels of ``y``. The loss is
    softmax cross-entropy, or sigmoid cross-entropy for a single column.

    Args:
        model: Path, bytes or ``ModelProto`` of a model with one input, whose weights are the start
            of the training; or a function ``(features, outputs)`` that returns one. None for a
            network of dense layers.
        hidden: Sizes of the hidden layers of this network.
        optimizer: ``"kfac"``, ``"adam"``, ``"adamw"``, ``"muon"`` or ``"sgd"``.
        optimizer_options: Options of the optimizer, such as ``{"learning_rate": 0.01}``.
        engine_options: Options of ``Engine.from_onnx``, such as ``{"trainable": "head*"}``.
        epochs: Number of epochs.
        batch_size: Largest number of examples in a batch. Batches have equal sizes.
        accumulate: Largest number of parts of a step, each of at most ``batch_size`` examples.
        schedule: Schedule of the learning rate, as for ``kfac_engine.fit``; None for ``"tail"``, or
            ``"constant"`` with ``early_stop``.
        early_stop: Number of epochs in a row without a lower validation loss after which the
            training ends, with the weights of the lowest one; None to train all epochs.
        validation_fraction: Part of the examples that is split off for ``early_stop``.
        random_state: Seed or generator of the weights, the order of the examples and the sampled
            targets. None for another seed in each call.
        warm_start: Whether ``fit`` continues with the weights of the previous call.
        verbose: Whether to show the progress on stderr.
        class_weight: Dictionary from a label to the weight of its examples; ``"balanced"`` for
            weights with equal sums of all classes, which count ``sample_weight``; None for ones.

    Attributes:
        classes_: The labels, sorted.
        n_features_in_: Number of values of an example.
        records_: A dictionary for each step of the last training, as ``kfac_engine.fit`` returns
            them.
        engine_: The engine with the trained parameters.
    """

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
        class_weight: Mapping[Any, float] | str | None = None,
    ) -> None:
        super().__init__(
            model, hidden=hidden, optimizer=optimizer, optimizer_options=optimizer_options,
            engine_options=engine_options, epochs=epochs, batch_size=batch_size,
            accumulate=accumulate, schedule=schedule, early_stop=early_stop,
            validation_fraction=validation_fraction, random_state=random_state,
            warm_start=warm_start, verbose=verbose,
        )  # fmt: skip
        self.class_weight = class_weight

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:
        """Train the model for one epoch; the first call begins with ``model``.

        Args:
            X: Examples, as for ``fit``.
            y: Labels.
            classes: All labels; the first call needs them.
            sample_weight: As for ``fit``.

        Returns:
            The classifier itself.

        Raises:
            InputError: The first call has no ``classes``, or a later call has others.
            ValueError: See ``fit``.
        """
        continues = self.__sklearn_is_fitted__()
        refuse_mask(classes)
        labels = None if classes is None else np.unique(classes)
        if not continues and labels is None:
            raise InputError("the first call of partial_fit needs classes, the labels of all data.")
        if continues and labels is not None and not np.array_equal(labels, self.classes_):
            raise InputError(f"classes is {labels}, but the first call had {self.classes_}.")
        if self.class_weight == "balanced":
            raise InputError(
                "class_weight='balanced' needs the labels of all data, which partial_fit does not "
                "have; give a dictionary of class weights, or sample_weight."
            )
        return self._fit_one_epoch(X, y, sample_weight, self.classes_ if continues else labels)

    def predict_proba(self, X: Any) -> Array:
        """Return the probabilities of the classes.

        Args:
            X: Examples, as for ``fit``.

        Returns:
            ``(n, classes)`` in float64, in the order of ``classes_``.

        Raises:
            NotFittedError: The classifier is not fitted.
            ValueError: The examples are wrong.
        """
        model = self._fitted()
        output = self._outputs(X).astype(np.float64)
        if model.loss == _CATEGORICAL:
            return output if model.returns_probabilities else softmax(output, axis=1)
        second = output.reshape(len(output))
        second = second if model.returns_probabilities else expit(second)
        return np.stack([1 - second, second], axis=1)

    def predict(self, X: Any) -> Array:
        """Return the most probable class of each example.

        Args:
            X: Examples, as for ``fit``.

        Returns:
            Labels, ``(n,)``.

        Raises:
            NotFittedError: The classifier is not fitted.
            ValueError: The examples are wrong.
        """
        probabilities = self.predict_proba(X)
        return np.asarray(self.classes_[probabilities.argmax(axis=1)])

    def _read_targets(self, y: Any, labels: Array | None) -> int:
        check_classification_targets(y)
        present = np.unique(y)
        if labels is not None and not np.isin(present, labels).all():
            unknown = present[~np.isin(present, labels)]
            raise InputError(
                f"y has the labels {unknown}, which are not among the classes {labels}."
            )
        self.classes_ = present if labels is None else labels
        if len(self.classes_) < 2:
            raise InputError(
                f"y has one class, {self.classes_[0]!r:.80}; a classifier needs two at least."
            )
        return len(self.classes_)

    def _class_weights(self, y: Any, weights: Array | None) -> Array | None:
        if self.class_weight is None:
            return None
        if self.class_weight == "balanced" and weights is not None:
            labels, codes = np.unique(y, return_inverse=True)
            sums = np.bincount(codes, weights)
            # The weight of a class without weight multiplies zeros only.
            balanced: Array = sums.sum() / (len(labels) * np.where(sums > 0, sums, 1))
            return balanced[codes]
        each: Array = compute_sample_weight(self.class_weight, y)
        return each

    def _known_labels(self) -> Array | None:
        return self.classes_

    def _loss(self, file: LoadedModel) -> str:
        """Return the loss: for two classes and a declared single column, that on sigmoid."""
        output = (self.engine_options or {}).get("output") or next(iter(file.float_outputs), "")
        shape = file.output_shapes.get(output)
        single = shape is not None and shape[1:] in ((), (1,))
        return _BERNOULLI if single and len(self.classes_) == 2 else _CATEGORICAL

    def _shaped_targets(self, y: Any, loss: str, output: Array) -> Array:
        codes = np.searchsorted(self.classes_, y)
        if loss == _BERNOULLI:
            return np.asarray(codes, output.dtype).reshape(-1, *output.shape[1:])
        if output.shape[1:] != (len(self.classes_),):
            raise ShapeError(
                f"y has {len(self.classes_)} classes, but the model returns values of shape "
                f"{output.shape[1:]} for an example; it must return one for each class. If y lacks "
                f"classes of the model, call partial_fit(X, y, classes=…)."
            )
        return np.asarray(codes)

    def _strata(self, targets: Array) -> Array | None:
        return targets.reshape(len(targets))
