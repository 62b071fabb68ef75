"""Defines the base class of losses: a predictive distribution, its score and Fisher matrix.

The argument ``values`` maps names to arrays. The first axis of an input is the batch. Every other
axis except ``class_axis`` is an axis of positions, which are independent predictions. A vector
``v`` of the input space maps names of inputs to arrays of their shapes. A vector ``u`` of the inner
space is one array. The loss is the sum over the batch and its positions.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from math import isfinite, prod
from numbers import Real
from typing import Any, ClassVar, NoReturn, Self, TypeAlias

import numpy as np

from kfac_engine._types import Array, OfValues, Values
from kfac_engine.arguments import check_at_least_zero
from kfac_engine.backend.namespace import array_module, as_array, on_device, recordable
from kfac_engine.backend.select import owner
from kfac_engine.errors import InputError, RegistrationError, ShapeError, UnsupportedError
from kfac_engine.losses.checks import (
    Named,
    check_matching_targets,
    ignored,
    read_input,
    read_targets,
    require_class_axis,
    require_predictions,
    require_shape,
)
from kfac_engine.losses.observed import Observed, checked_weights, times, total_weight

# A vector of the space of the inputs: an array, or an array for each input.
Vector: TypeAlias = Array | tuple[Array, ...]

# Kinds of element types of real numbers.
_REAL = "biuf"
# Most targets that the host checks before they are copied to a device. A device checks more targets
# faster, but the host waits for it.
_CHECKED_ON_HOST = 1 << 16


def checked_weight(weight: float) -> float:
    """Return the factor of a loss; an InputError unless it is a finite number of at least 0."""
    check_at_least_zero("weight", weight)
    return float(weight)


class LossFunction(ABC):
    """A distribution of targets given outputs of a model, with its score and Fisher matrix.

    ``F`` is the Fisher matrix of an example with respect to the inputs. ``B`` is a factor with
    ``B Bᵀ = F``. It multiplies vectors of the *inner shape*. Methods take the inputs by name,
    ``values``, and ``targets`` that were checked.

    Args:
        inputs: Names of the model outputs that parametrise the distribution.
        targets: Name of the observed targets; None without targets.
        seed: Seed of ``evaluate_on_sample``; None counts as 0.
        class_axis: Axis of the classes or features; a negative number counts from the last axis.
        ignore_index: Target that does not count; None for none.

    Attributes:
        min_rank: Smallest rank of the inputs.
        discrete: Whether the targets are discrete, so that ``hits`` is defined.
        entrywise: Whether each entry of an input has its own target.
        links: Operators of ONNX that convert the inputs to probabilities.
        ggn_equals_fisher: Whether the inputs are natural parameters, so that the generalised
            Gauss–Newton matrix equals the Fisher matrix.
        has_products: Whether products with the Fisher matrix have a closed form.
        ordered: Whether the positions have an order, so that the loss needs their axis.
        predicts_inputs: Whether the targets are token ids that the model reads, too.
        sequences: Whether an example is one prediction, a sequence along the axis of positions, so
            that its target has a length of its own.
        weight: Factor of the loss of an engine; see ``times``.
    """

    min_rank: ClassVar[int] = 1
    discrete: ClassVar[bool] = False
    entrywise: ClassVar[bool] = False
    links: ClassVar[frozenset[str]] = frozenset()
    ggn_equals_fisher: ClassVar[bool] = True
    has_products: ClassVar[bool] = True
    ordered: ClassVar[bool] = False
    predicts_inputs: ClassVar[bool] = False
    sequences: ClassVar[bool] = False
    weight: float = 1.0

    def __init__(
        self,
        inputs: tuple[str, ...],
        targets: str | None,
        seed: int | None,
        class_axis: int,
        ignore_index: int | None = None,
    ) -> None:
        if not all(isinstance(name, str) for name in inputs):
            raise InputError(
                f"the inputs of a loss are names of model outputs, got "
                f"{', '.join(map(repr, inputs))}."
            )
        self.inputs = inputs
        self.targets = targets
        self.seed = seed
        self.class_axis = class_axis
        self.ignore_index = ignored(ignore_index)
        self.of_residuals = False

    def __repr__(self) -> str:
        """Return class, inputs and targets."""
        names = [f"{name!r:.80}" for name in self.inputs]
        targets = [] if self.targets is None else [f"targets={self.targets!r:.80}"]
        return f"{type(self).__name__}({', '.join(names + targets)})"

    def times(self, weight: float) -> Self:
        """Return a copy of the loss whose value an engine multiplies by a factor ≥ 0.

        Raises:
            InputError: The factor is another number.
        """
        loss = copy(self)
        loss.weight = checked_weight(weight)
        return loss

    # -- defined by each distribution ------------------------------------------------------------

    @abstractmethod
    def negative_log_probs(self, values: Values, targets: Array) -> Array:
        """Return the terms −log p of the loss in nats, an array that broadcasts to an input.

        A sum over the axis of the classes has the length 1 there.
        """

    @abstractmethod
    def gradient_of(self, values: Values, targets: Array) -> dict[str, Array]:
        """Return the gradient of the loss with respect to each input."""

    @abstractmethod
    def sample(self, values: Values, rng: np.random.Generator) -> Array:
        """Draw targets from the distribution, independently for each example and position.

        Over several processes, ``rng`` has the methods ``random``, ``integers`` and
        ``standard_normal`` only, for arrays with the axes of an input; the class axis may be
        missing. Each process receives the numbers of its examples.
        """

    def sampled_gradient(self, values: Values, rng: np.random.Generator) -> dict[str, Array]:
        """Return the gradient of each example for targets drawn from the model, by input."""
        return self.gradient_of(values, self.sample(values, rng))

    @abstractmethod
    def fisher(self, values: Values, v: Mapping[str, Array]) -> dict[str, Array]:
        """Return ``F v`` for every example, in the shape of each input."""

    @abstractmethod
    def fisher_factor(self, values: Values, u: Array) -> dict[str, Array]:
        """Return ``B u`` for every example, in the shape of each input."""

    @abstractmethod
    def fisher_factor_transpose(self, values: Values, v: Mapping[str, Array]) -> Array:
        """Return ``Bᵀ v`` for every example, in the inner shape."""

    def solve_fisher_factor(self, values: Values, gradient: Mapping[str, Array]) -> Array:
        """Return ``u``, in the inner shape, with ``B u`` equal to the result of ``gradient_of``.

        Raises:
            UnsupportedError: The loss does not implement this method.
        """
        raise UnsupportedError(
            f"{type(self).__name__} on '{self.inputs[0]}' does not solve for residuals, which the "
            f"sample space needs; implement solve_fisher_factor, or use KfacOptimizer."
        )

    @abstractmethod
    def one_hot(self, values: Values, index: tuple[int, ...]) -> dict[str, Array]:
        """Return a column of ``B`` for every example, in the shape of each input.

        ``index`` is its coordinate in the inner shape without the batch axis.
        """

    @abstractmethod
    def check_target_array(self, values: Values, targets: Array) -> None:
        """Raise an InputError unless ``targets`` are possible observations for ``values``."""

    def static_inner_shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """Return the shape of the vectors that ``B`` multiplies, from the shapes of the inputs."""
        return shapes[self.inputs[0]]

    def hessian(self, values: Values, v: Mapping[str, Array]) -> dict[str, Array]:
        """Return the Hessian of ``value`` times ``v``; for natural parameters this is ``F v``."""
        assert self.ggn_equals_fisher, "a distribution of other parameters overrides this method"
        return self.fisher(values, v)

    def hits(self, values: Values, targets: Array) -> Array:
        """Return whether the most probable target of each prediction equals its target.

        Raises:
            UnsupportedError: The targets are not discrete.
        """
        raise UnsupportedError(
            f"{type(self).__name__} on {', '.join(self.inputs)} has no accuracy, because its "
            f"targets are not discrete; leave 'accuracy' out of the metrics."
        )

    def ranks(self, values: Values, targets: Array) -> Array:
        """Return the number of classes that are more probable than the target.

        Of classes with equal probabilities, the first one counts as the most probable. The number
        is 0 where ``hits`` is True.

        Raises:
            UnsupportedError: The targets are not classes.
        """
        raise UnsupportedError(
            f"{type(self).__name__} on {', '.join(self.inputs)} has no ranks, because its targets "
            f"are not classes; leave the top-k metrics out."
        )

    def label_errors(self, values: Values, targets: Array) -> tuple[Array, Array]:
        """Return the edit distance of each predicted sequence to its target, and their lengths.

        The distance is the least number of insertions, deletions and substitutions of labels
        between the two; the length is the number of labels of the target.

        Raises:
            UnsupportedError: The targets are not sequences.
        """
        raise UnsupportedError(
            f"{type(self).__name__} on {', '.join(self.inputs)} has no label error rate, because "
            f"its targets are not sequences; use the metric 'loss' or 'accuracy'."
        )

    def errors(self, values: Values, targets: Array) -> Array:
        """Return each predicted mean minus its target, with the targets' shape.

        Raises:
            UnsupportedError: The distribution does not predict means.
        """
        raise UnsupportedError(
            f"{type(self).__name__} on {', '.join(self.inputs)} has no mean error, because it "
            f"predicts no means; use the metric 'loss' or 'accuracy'."
        )

    def expected_squares(self, values: Values, weights: Array | None = None) -> float:
        """Return the expected squared norm of the gradients if predictions are least certain.

        It is the trace of the Fisher matrix of all predictions: its largest value if it has a
        bound, otherwise its value at the present predictions. ``weights`` of the predictions
        broadcast to an input; None stands for ones.
        """
        inner = self.inner_shape(values)[1:]
        columns = (c for i in np.ndindex(*inner) for c in self.one_hot(values, i).values())
        squares = (times(column * column, weights) for column in columns)
        return sum(float(array.sum(dtype=np.float64)) for array in squares)

    def target_sums(
        self, values: Values, observed: Observed, gradients: Values, centre: Any = 0.0
    ) -> tuple[Any, ...]:
        """Return the sums from which the spreads of the targets and errors of a batch follow.

        The sums of the parts of a batch add up to those of the batch.

        Args:
            values: The predictions.
            observed: Result of ``observe``.
            gradients: Gradients of the loss, times the weights of the targets.
            centre: Result of ``target_centre`` for the whole batch; zero if it is not known.

        Returns:
            For predictions that have the unit of their targets, with weights w of the targets: the
            sum of ``w g²`` if all predictions are off by 1, where g is the gradient of the loss;
            for each feature the sums of w, ``w g`` and ``w g²`` for gradients g, without their
            sign, at the prediction ``centre``; and those of the ``gradients`` and of the targets,
            times w and divided by the variance. A loss of other errors has the sums of squared
            errors with a variance of 1, and those of w times the squared errors, the absolute
            errors, and the errors times g. Otherwise nothing.
        """
        return ()

    def rate_sums(self, values: Values, observed: Observed, gradients: Values) -> tuple[Any, ...]:
        """Return the sums from which the rates of targets and of predictions follow.

        The arguments, and the weights w, are as for ``target_sums``.

        Returns:
            For a loss of independent probabilities, for each feature: the number of targets that
            count, and the sums of w, of the ``gradients`` and of the targets t times w. Counts have
            those of ``w t log t`` as well. For a loss of classes: an array of the number of targets
            that count and the sum of the ``gradients`` times the logits, and for each class the
            sums of the ``gradients`` and of its probability in the targets times w. Otherwise
            nothing.
        """
        return ()

    def target_centre(self, observed: Observed) -> Any:
        """Return the prediction at which ``target_sums`` have little rounding: their mean.

        It is divided by the variance of the loss. Arguments are as for ``target_sums``.
        """
        return 0.0

    # -- derived ---------------------------------------------------------------------------------

    def value(self, values: Values, observed: Observed | None = None) -> float:
        """Return the weighted sum of −log p of the targets in nats.

        ``observed`` is the result of ``observe`` for the values of a batch, if it is known.
        """
        observed = self.observe(values) if observed is None else observed
        assert observed.targets is not None, "observe has read the targets"
        terms = self.negative_log_probs(values, observed.targets)
        value: float = times(terms, observed.weights).sum(dtype=np.float64).item()
        return value

    def value_of(self, values: Values, targets: Array) -> float:
        """Return the sum of −log p of ``targets``, accumulated in float64."""
        return float(self.negative_log_probs(values, targets).sum(dtype=np.float64))

    def terms_and_gradient(self, values: Values, targets: Array) -> tuple[Array, dict[str, Array]]:
        """Return ``negative_log_probs`` and ``gradient_of``, which may share their computation."""
        return self.negative_log_probs(values, targets), self.gradient_of(values, targets)

    def value_and_gradient(
        self, values: Values, observed: Observed | None = None
    ) -> tuple[Any, dict[str, Array]]:
        """Return the loss, a number or a device array ``()``, and its gradient by input name."""
        observed = self.observe(values) if observed is None else observed
        assert observed.targets is not None, "observe has read the targets"
        terms, gradient = self.terms_and_gradient(values, observed.targets)
        total = times(terms, observed.weights).sum(dtype=np.float64)
        value = total if on_device(total) else total.item()
        return value, {name: times(array, observed.weights) for name, array in gradient.items()}

    def gradient(self, values: Values) -> dict[str, Array]:
        """Return the gradient of ``value`` in the shape and type of each input."""
        return self.value_and_gradient(values)[1]

    def inner_shape(self, values: Values) -> tuple[int, ...]:
        """Return the shape of the vectors that ``B`` multiplies, the batch axis first."""
        return self.static_inner_shape({name: values[name].shape for name in self.inputs})

    def positions(self, values: Values) -> int:
        """Return the number of predictions of an example; 1 for inputs of rank 2."""
        shape = read_input(values, self.inputs[0]).shape
        require_class_axis(self.inputs[0], shape, self.class_axis)
        return prod(shape[1:]) // shape[self.class_axis] if len(shape) > 1 else 1

    def of_predictions(self, values: Values, counts: Array) -> Array:
        """Return the weights of predictions, from the weights of a batch in the inputs' rank."""
        return counts

    def placed(self, axis: int) -> "LossFunction":
        """Return the loss for inputs with the examples on an axis.

        Only an ``ordered`` loss needs to tell examples from positions.
        """
        return self

    # -- checks ---------------------------------------------------------------------------------

    def check_inputs(self, values: Values) -> None:
        """Check that the inputs are finite floating-point arrays of one shape.

        Args:
            values: The values of a batch.

        Raises:
            UnknownNameError: An input is missing.
            ShapeError: Rank, class axis or shapes do not fit.
            InputError: An input is not a floating-point array.
            NonFiniteError: An input contains NaN or infinity.
        """
        shape: tuple[int, ...] | None = None
        for name in self.inputs:
            array = read_input(values, name)
            require_predictions(name, array, self.min_rank, self.class_axis)
            if shape is None:
                shape = array.shape
            else:
                require_shape(f"'{name}'", array.shape, shape, f"the shape of '{self.inputs[0]}'")

    def observe(self, values: Values, *, targets: bool = True) -> Observed:
        """Check inputs and targets of a batch; return how much each target counts.

        Args:
            values: The values of a batch, with targets and weights by their names.
            targets: Whether targets are needed; otherwise they are read if there are any.

        Returns:
            The targets with their weights.

        Raises:
            InputError: Targets are missing, or not possible observations for the inputs, or weights
                are wrong.
        """
        self.check_inputs(values)
        name, counts = self.inputs[0], self._given_weights(values)
        known = self.targets is not None and self.targets in values
        if not known and self.of_residuals:
            return self.weigh(values, array_module(values[name]).zeros_like(values[name]), counts)
        if not (targets or known):
            return self.weigh(values, None, counts)
        labels, counts = self._that_count(
            values, read_targets(values, self.require_target_name(), name), counts
        )
        return self.weigh(values, labels, counts)

    @recordable
    def weigh(self, values: Values, labels: Array | None, counts: Array | None) -> Observed:
        """Return the targets, and a weight for each term of the loss.

        ``labels`` are checked targets, or None, and ``counts`` the weights of the predictions,
        which a loss with weights of classes multiplies by them.
        """
        shape = values[self.inputs[0]].shape
        return Observed(
            labels, counts, labels, counts, total_weight(counts, shape, self._axis(values))
        )

    @property
    def weighs_classes(self) -> bool:
        """Whether the weight of a prediction depends on its target."""
        return False

    def may_observe(self, values: Values, target: int) -> bool:
        """Return whether a number is a possible target, so that ``ignore_index`` hides it."""
        return True

    def _that_count(
        self, values: Values, targets: Array, counts: Array | None
    ) -> tuple[Array, Array | None]:
        """Return checked targets, with zeros where they do not count, and weights.

        Targets of the host are checked there, if they are few, and then moved to the predictions.
        """
        shape, axis = values[self.inputs[0]].shape, self._axis(values)
        rows = targets.ndim < len(shape)  # a target for each prediction, not for each entry
        hidden, original = self._hidden(values, targets), targets
        targets = self._moved(values, targets)
        checked = original if original.size <= _CHECKED_ON_HOST else targets
        if hidden is None and counts is None:
            self.check_target_array(values, checked)
            return targets, counts
        if hidden is None or not self.may_observe(values, hidden):
            try:
                with owner(checked).shared_reads():  # an error is raised at its end
                    self.check_target_array(values, checked)
            except InputError:
                fits = targets.shape == (shape[:axis] + shape[axis + 1 :] if rows else shape)
                if not fits or targets.dtype.kind not in _REAL:
                    raise
            else:
                return targets, counts
        targets, counts = self.masked(values, targets, counts)
        self.check_target_array(values, targets)
        return targets, counts

    @recordable
    def masked(
        self, values: Values, targets: Array, counts: Array | None
    ) -> tuple[Array, Array | None]:
        """Return targets with zeros where they do not count, and their weights.

        Targets that do not count may be anything. The weights of predictions, ``counts`` or ones,
        become zero where targets equal ``ignore_index``.
        """
        shape, axis = values[self.inputs[0]].shape, self._axis(values)
        rows, hidden = targets.ndim < len(shape), self._hidden(values, targets)
        xp = array_module(targets)
        if hidden is not None:
            counting = targets != hidden
            counting = xp.expand_dims(counting, axis) if rows else counting
            counts = counting if counts is None else times(counts, counting)
        if counts is None:
            return targets, None
        left_out = xp.squeeze(counts, axis) == 0 if rows else counts == 0
        dummy = 0 if rows or self.entrywise else 1 / shape[axis]
        return xp.where(left_out, dummy, targets), counts

    def _hidden(self, values: Values, targets: Array) -> int | None:
        """Return the target that does not count; None if targets are rows of probabilities."""
        rows = targets.ndim < values[self.inputs[0]].ndim
        return self.ignore_index if rows or self.entrywise else None

    def _moved(self, values: Values, array: Array) -> Array:
        """Return an array in the library of the predictions."""
        moved: Array = array_module(values[self.inputs[0]]).asarray(array)
        return moved

    def _given_weights(self, values: Values) -> Array | None:
        """Return the weights of the caller, after checks; None if there are none."""
        if self.targets is None or weights_of(self.targets) not in values:
            return None
        like = values[self.inputs[0]]
        weights = self._moved(values, values[weights_of(self.targets)])
        return checked_weights(
            self.inputs[0], weights, like.shape, self._axis(values), entries=self.entrywise
        )

    def read(self, values: Named, *, targets: bool = False) -> dict[str, Array]:
        """Return the inputs of a batch, and its targets if requested, after all checks.

        The arrays may be of any array library.

        Args:
            values: The values of a batch.
            targets: Whether the targets are read and checked as well.

        Returns:
            The inputs by name, and the targets if requested.

        Raises:
            KfacError: ``check_inputs`` or ``observe`` refuses a value.
        """
        arrays = {name: read_input(values, name) for name in self.inputs}
        if targets:
            name = self.require_target_name()
            with suppress(*([InputError] if self.of_residuals else [])):
                arrays[name] = read_targets(values, name, self.inputs[0])
            with suppress(KeyError):
                arrays[weights_of(name)] = as_array(values[weights_of(name)])
            self.observe(arrays)
        else:
            self.check_inputs(arrays)
        return arrays

    def row_weights(self, values: Named) -> Array | None:
        """Return the weights of the predictions, from targets and weights if a batch has them.

        Args:
            values: The values of a batch, of any array library.

        Returns:
            An array that broadcasts to an input; None if all weights are 1.

        Raises:
            KfacError: ``observe`` refuses a value.
        """
        arrays = {name: read_input(values, name) for name in self.inputs}
        for name in () if self.targets is None else (self.targets, weights_of(self.targets)):
            with suppress(KeyError):
                arrays[name] = as_array(values[name])
        if len(arrays) == len(self.inputs) and not self.weighs_classes:
            return None
        return self.observe(arrays, targets=False).weights

    def require_target_name(self) -> str:
        """Return the name of the targets; raise an InputError if the loss has none."""
        if self.targets is None:
            names = ", ".join(f"{name!r:.80}" for name in self.inputs)
            raise InputError(
                f"the loss on '{self.inputs[0]}' has no targets to evaluate; name them in the loss "
                f"object, {type(self).__name__}({names}, targets='…'), or use an estimation mode "
                f"that needs none."
            )
        return self.targets

    def require_ggn(self) -> None:
        """Check that the generalised Gauss–Newton matrix is defined.

        It is the Fisher matrix if the inputs are natural parameters (Martens 2014,
        arXiv:1412.1193, section 9.2).

        Raises:
            UnsupportedError: The inputs are not natural parameters.
        """
        if not self.ggn_equals_fisher:
            raise UnsupportedError(
                f"{type(self).__name__} on {', '.join(self.inputs)} has no generalised "
                f"Gauss-Newton matrix: its inputs are not natural parameters; use the Fisher."
            )

    # -- functions of the values of a batch ----------------------------------------------------

    def evaluate(self) -> OfValues[float]:
        """Return a function that computes the loss on the data, summed over the batch, in nats."""
        self.require_target_name()
        return lambda values: self.value(self.read(values, targets=True))

    def evaluate_on_sample(self, seed: int | None = None) -> OfValues[float]:
        """Return a function that computes the loss on sampled targets, equal for equal values."""
        seed = next((s for s in (seed, self.seed) if s is not None), 0)

        def evaluate(values: Values) -> float:
            values = self.read(values)
            return self.value_of(values, self.sample(values, np.random.default_rng(seed)))

        return evaluate

    def multiply_fisher(self, vector: Vector) -> OfValues[Vector]:
        """Return a function that computes ``F v``, the Fisher matrix times a vector."""

        def multiply(values: Values) -> Vector:
            values = self.read(values)
            return _plain(self, self.fisher(values, _vectors(self, values, vector)))

        return multiply

    def multiply_fisher_factor(self, u: Array) -> OfValues[Vector]:
        """Return a function that computes ``B u``, a factor of the Fisher matrix times a vector."""

        def multiply(values: Values) -> Vector:
            values = self.read(values)
            inner = _converted(u, values[self.inputs[0]], self.inner_shape(values))
            return _plain(self, self.fisher_factor(values, inner))

        return multiply

    def multiply_fisher_factor_transpose(self, vector: Vector) -> OfValues[Array]:
        """Return a function that computes ``Bᵀ v``, the transpose of the factor times a vector."""

        def multiply(values: Values) -> Array:
            values = self.read(values)
            return self.fisher_factor_transpose(values, _vectors(self, values, vector))

        return multiply

    def multiply_fisher_factor_replicated_one_hot(self, index: tuple[int, ...]) -> OfValues[Vector]:
        """Return a function that computes the column ``B e_index`` for every example.

        Args:
            index: Index along each inner axis after the batch axis.
        """

        def multiply(values: Values) -> Vector:
            values = self.read(values)
            _check_coordinate(self, values, index)
            return _plain(self, self.one_hot(values, tuple(index)))

        return multiply

    def fisher_factor_inner_shape(self, values: Values) -> tuple[int, ...]:
        """Return the shape of the vectors that ``B`` multiplies, for a batch."""
        return self.inner_shape(self.read(values))

    def multiply_ggn(self, vector: Vector) -> OfValues[Vector]:
        """Return a function that computes the Gauss–Newton matrix times a vector."""
        self.require_ggn()
        return self.multiply_fisher(vector)

    def multiply_ggn_factor(self, u: Array) -> OfValues[Vector]:
        """Return a function that computes the factor of the Gauss–Newton matrix times a vector."""
        self.require_ggn()
        return self.multiply_fisher_factor(u)

    def multiply_ggn_factor_transpose(self, vector: Vector) -> OfValues[Array]:
        """Return a function that computes the transpose of this factor times a vector."""
        self.require_ggn()
        return self.multiply_fisher_factor_transpose(vector)

    def multiply_ggn_factor_replicated_one_hot(self, index: tuple[int, ...]) -> OfValues[Vector]:
        """Return a function that computes a column of this factor for every example."""
        self.require_ggn()
        return self.multiply_fisher_factor_replicated_one_hot(index)

    def ggn_factor_inner_shape(self, values: Values) -> tuple[int, ...]:
        """Return the shape of the vectors that this factor multiplies, for a batch."""
        self.require_ggn()
        return self.fisher_factor_inner_shape(values)

    def _axis(self, values: Values) -> int:
        return self.class_axis % values[self.inputs[0]].ndim


def _vectors(loss: LossFunction, values: Values, vector: Vector) -> dict[str, Array]:
    """Return the converted arrays of a vector by input, after checks."""
    parts = (vector,) if len(loss.inputs) == 1 else tuple(vector)
    if len(parts) != len(loss.inputs):
        raise ShapeError(
            f"the loss has the inputs {loss.inputs}, so a vector is a tuple of "
            f"{len(loss.inputs)} arrays; got {len(parts)}."
        )
    named = zip(loss.inputs, parts, strict=True)
    return {name: _converted(part, values[name], values[name].shape) for name, part in named}


def _plain(loss: LossFunction, named: Mapping[str, Array]) -> Vector:
    """Return arrays by name as a vector of the input space."""
    parts = tuple(named[name] for name in loss.inputs)
    return parts[0] if len(parts) == 1 else parts


def _check_coordinate(loss: LossFunction, values: Values, index: tuple[int, ...]) -> None:
    shape = loss.inner_shape(values)[1:]
    if len(index) != len(shape) or not all(
        0 <= i < size for i, size in zip(index, shape, strict=True)
    ):
        raise InputError(
            f"index {index} is not a coordinate of the inner shape {shape} "
            f"(without the batch axis) of the loss on '{loss.inputs[0]}'."
        )


def _converted(vector: Array, like: Array, shape: tuple[int, ...]) -> Array:
    """Return ``vector`` in the library and element type of ``like``, after a check of its shape."""
    converted: Array = array_module(like).asarray(vector, dtype=like.dtype)
    if converted.shape != tuple(shape):
        raise ShapeError(
            f"the vector has shape {converted.shape}, expected {tuple(shape)}: one entry per "
            f"coordinate of the loss."
        )
    return converted


def weights_of(targets: str) -> str:
    """Return the name under which a batch has the weights of ``targets``."""
    return f"weights of {targets}"


@dataclass(frozen=True, slots=True)
class RegisteredLoss:
    """A loss function with its name and its weight in the objective.

    The loss functions of several parts of a batch have one name.
    """

    name: str  # name of the loss
    function: LossFunction  # the loss function
    coefficient: float = 1.0  # weight k ≥ 0 of the loss

    def __post_init__(self) -> None:
        real = isinstance(self.coefficient, Real) and isfinite(self.coefficient)
        if not (real and self.coefficient >= 0):
            raise RegistrationError(
                f"loss '{self.name}' has the coefficient {self.coefficient}; a coefficient must be "
                f"finite and not negative."
            )


# -- no products with the Fisher matrix ------------------------------------------------------------


class LossWithoutProducts(LossFunction):
    """A loss whose Fisher matrix has no closed form, or that has no distribution."""

    has_products: ClassVar[bool] = False

    def fisher(self, values: Values, v: Mapping[str, Array]) -> dict[str, Array]:
        self._refuse()

    def fisher_factor(self, values: Values, u: Array) -> dict[str, Array]:
        self._refuse()

    def fisher_factor_transpose(self, values: Values, v: Mapping[str, Array]) -> Array:
        self._refuse()

    def one_hot(self, values: Values, index: tuple[int, ...]) -> dict[str, Array]:
        self._refuse()

    @abstractmethod
    def _refuse(self) -> NoReturn:
        """Raise an UnsupportedError that says why there are no products, and what to do."""


# -- independent entries, a diagonal Fisher matrix -------------------------------------------------


class ElementwiseLoss(LossFunction):
    """A distribution whose Fisher matrix is ``diag(i)``; ``B = diag(√i)`` is symmetric.

    The inner space of several inputs of one shape is their concatenation along the class axis.
    """

    entrywise: ClassVar[bool] = True

    def check_target_array(self, values: Values, targets: Array) -> None:
        check_matching_targets(self.inputs[0], values[self.inputs[0]], targets)

    @abstractmethod
    def information(self, values: Values) -> dict[str, Array]:
        """Return the diagonal of the Fisher matrix by input, in the shapes of the inputs."""

    def expected_squares(self, values: Values, weights: Array | None = None) -> float:
        diagonals = (times(diagonal, weights) for diagonal in self.information(values).values())
        total: float = sum(diagonal.sum(dtype=np.float64) for diagonal in diagonals)
        return total

    def sums_of_rates(self, observed: Observed, gradient: Array, *more: Array) -> tuple[Array, ...]:
        """Return ``rate_sums`` of probabilities or counts.

        Args:
            observed: Result of ``observe``.
            gradient: Gradient of the loss, times the weights of the targets.
            more: Further arrays in the shape of the targets. Their weighted sums are the last ones.
        """
        assert observed.targets is not None, "observe has read the targets"
        t = observed.targets.astype(gradient.dtype, copy=False)
        axis = self.class_axis % t.ndim if t.ndim > 1 else None
        over = tuple(k for k in range(t.ndim) if k != axis)
        weights = times(array_module(gradient).ones_like(gradient), observed.weights)
        arrays = (weights > 0, weights, gradient, *(times(x, observed.weights) for x in (t, *more)))
        return tuple(x.sum(axis=over, dtype=np.float64).reshape(-1) for x in arrays)

    def static_inner_shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        shape = shapes[self.inputs[0]]
        if len(self.inputs) == 1:
            return shape
        axis = self.class_axis % len(shape)
        return (*shape[:axis], len(self.inputs) * shape[axis], *shape[axis + 1 :])

    def fisher(self, values: Values, v: Mapping[str, Array]) -> dict[str, Array]:
        return {name: i * v[name] for name, i in self.information(values).items()}

    def fisher_factor(self, values: Values, u: Array) -> dict[str, Array]:
        xp, axis = array_module(u), self._axis(values)
        parts = xp.split(u, len(self.inputs), axis=axis)
        information = self.information(values)
        return {
            name: xp.sqrt(information[name]) * part
            for name, part in zip(self.inputs, parts, strict=True)
        }

    def fisher_factor_transpose(self, values: Values, v: Mapping[str, Array]) -> Array:
        information = self.information(values)
        xp = array_module(v[self.inputs[0]])
        parts = [xp.sqrt(information[name]) * v[name] for name in self.inputs]
        joined: Array = xp.concatenate(parts, axis=self._axis(values))
        return joined

    def solve_fisher_factor(self, values: Values, gradient: Mapping[str, Array]) -> Array:
        information = self.information(values)
        xp = array_module(gradient[self.inputs[0]])
        parts = []
        for name in self.inputs:
            root = xp.sqrt(information[name])
            parts.append(xp.where(root > 0, gradient[name] / xp.where(root > 0, root, 1), 0))
        solved: Array = xp.concatenate(parts, axis=self._axis(values))
        return solved

    def one_hot(self, values: Values, index: tuple[int, ...]) -> dict[str, Array]:
        information = self.information(values)
        xp = array_module(information[self.inputs[0]])
        result = {name: xp.zeros_like(information[name]) for name in self.inputs}
        which, local = self._locate(values, index)
        at: tuple[slice | int, ...] = (slice(None), *local)
        result[which][at] = xp.sqrt(information[which][at])
        return result

    def _locate(self, values: Values, index: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
        """Return the input of an inner coordinate, and the coordinate in that input."""
        if len(self.inputs) == 1:
            return self.inputs[0], index
        axis = self._axis(values)
        which, local = divmod(index[axis - 1], values[self.inputs[0]].shape[axis])
        return self.inputs[which], (*index[: axis - 1], local, *index[axis:])
