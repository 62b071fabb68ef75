"""Methods of a loss that return functions of the values of a batch.

A ``vector`` of the input space is an array in the shape of the input, or a tuple with an array for
each input. ``u`` is an array of the inner shape. Results have the same form, and the element type
of the inputs.
"""

from collections.abc import Mapping
from typing import Protocol, TypeAlias

import numpy as np

from kfac_engine._types import Array, Thunk, Values
from kfac_engine.backend.namespace import array_module
from kfac_engine.errors import InputError, ShapeError

# A vector of the input space: an array, or an array for each input.
Vector: TypeAlias = Array | tuple[Array, ...]


class Loss(Protocol):
    """The part of ``LossFunction`` that the mixin calls."""

    inputs: tuple[str, ...]
    seed: int | None

    def read(self, values: Values, *, targets: bool = False) -> dict[str, Array]: ...
    def require_target_name(self) -> str: ...
    def require_ggn(self) -> None: ...
    def value(self, values: Values) -> float: ...
    def value_of(self, values: Values, targets: Array) -> float: ...
    def sample(self, values: Values, rng: np.random.Generator) -> Array: ...
    def inner_shape(self, values: Values) -> tuple[int, ...]: ...
    def fisher(self, values: Values, v: Mapping[str, Array]) -> dict[str, Array]: ...
    def fisher_factor(self, values: Values, u: Array) -> dict[str, Array]: ...
    def fisher_factor_transpose(self, values: Values, v: Mapping[str, Array]) -> Array: ...
    def one_hot(self, values: Values, index: tuple[int, ...]) -> dict[str, Array]: ...

    def multiply_fisher(self, vector: Vector) -> Thunk[Vector]: ...
    def multiply_fisher_factor(self, u: Array) -> Thunk[Vector]: ...
    def multiply_fisher_factor_transpose(self, vector: Vector) -> Thunk[Array]: ...
    def multiply_fisher_factor_replicated_one_hot(
        self, index: tuple[int, ...]
    ) -> Thunk[Vector]: ...
    def fisher_factor_inner_shape(self, values: Values) -> tuple[int, ...]: ...


class LossOperations:
    """Evaluations of a loss, and products with its Fisher and Gauss–Newton matrices.

    Methods with ``ggn`` in their names multiply by the Gauss–Newton matrix. For natural parameters,
    it equals the Fisher matrix. For other parameters, these methods raise an UnsupportedError.
    """

    def evaluate(self: Loss) -> Thunk[float]:
        """Return a function that computes the loss on the data, summed over the batch, in nats."""
        self.require_target_name()
        return lambda values: self.value(self.read(values, targets=True))

    def evaluate_on_sample(self: Loss, seed: int | None = None) -> Thunk[float]:
        """Return a function that computes the loss on sampled targets, equal for equal values."""
        seed = next((s for s in (seed, self.seed) if s is not None), 0)

        def evaluate(values: Values) -> float:
            values = self.read(values)
            return self.value_of(values, self.sample(values, np.random.default_rng(seed)))

        return evaluate

    def multiply_fisher(self: Loss, vector: Vector) -> Thunk[Vector]:
        """Return a function that computes ``F v``, the Fisher matrix times a vector."""

        def multiply(values: Values) -> Vector:
            values = self.read(values)
            return _plain(self, self.fisher(values, _vectors(self, values, vector)))

        return multiply

    def multiply_fisher_factor(self: Loss, u: Array) -> Thunk[Vector]:
        """Return a function that computes ``B u``, a factor of the Fisher matrix times a vector."""

        def multiply(values: Values) -> Vector:
            values = self.read(values)
            inner = _converted(u, values[self.inputs[0]], self.inner_shape(values))
            return _plain(self, self.fisher_factor(values, inner))

        return multiply

    def multiply_fisher_factor_transpose(self: Loss, vector: Vector) -> Thunk[Array]:
        """Return a function that computes ``Bᵀ v``, the transpose of the factor times a vector."""

        def multiply(values: Values) -> Array:
            values = self.read(values)
            return self.fisher_factor_transpose(values, _vectors(self, values, vector))

        return multiply

    def multiply_fisher_factor_replicated_one_hot(
        self: Loss, index: tuple[int, ...]
    ) -> Thunk[Vector]:
        """Return a function that computes the column ``B e_index`` for every example.

        Args:
            index: Index along each inner axis after the batch axis.
        """

        def multiply(values: Values) -> Vector:
            values = self.read(values)
            _check_coordinate(self, values, index)
            return _plain(self, self.one_hot(values, tuple(index)))

        return multiply

    def fisher_factor_inner_shape(self: Loss, values: Values) -> tuple[int, ...]:
        """Return the shape of the vectors that ``B`` multiplies, for a batch."""
        return self.inner_shape(self.read(values))

    def multiply_ggn(self: Loss, vector: Vector) -> Thunk[Vector]:
        """Return a function that computes the Gauss–Newton matrix times a vector."""
        self.require_ggn()
        return self.multiply_fisher(vector)

    def multiply_ggn_factor(self: Loss, u: Array) -> Thunk[Vector]:
        """Return a function that computes the factor of the Gauss–Newton matrix times a vector."""
        self.require_ggn()
        return self.multiply_fisher_factor(u)

    def multiply_ggn_factor_transpose(self: Loss, vector: Vector) -> Thunk[Array]:
        """Return a function that computes the transpose of this factor times a vector."""
        self.require_ggn()
        return self.multiply_fisher_factor_transpose(vector)

    def multiply_ggn_factor_replicated_one_hot(self: Loss, index: tuple[int, ...]) -> Thunk[Vector]:
        """Return a function that computes a column of this factor for every example."""
        self.require_ggn()
        return self.multiply_fisher_factor_replicated_one_hot(index)

    def ggn_factor_inner_shape(self: Loss, values: Values) -> tuple[int, ...]:
        """Return the shape of the vectors that this factor multiplies, for a batch."""
        self.require_ggn()
        return self.fisher_factor_inner_shape(values)


def _vectors(loss: Loss, values: Values, vector: Vector) -> dict[str, Array]:
    """Return the converted arrays of a vector by input, after checks."""
    parts = (vector,) if len(loss.inputs) == 1 else tuple(vector)
    if len(parts) != len(loss.inputs):
        raise ShapeError(
            f"the loss has the inputs {loss.inputs}, so a vector is a tuple of "
            f"{len(loss.inputs)} arrays; got {len(parts)}."
        )
    named = zip(loss.inputs, parts, strict=True)
    return {name: _converted(part, values[name], values[name].shape) for name, part in named}


def _plain(loss: Loss, named: Mapping[str, Array]) -> Vector:
    """Return arrays by name as a vector of the input space."""
    parts = tuple(named[name] for name in loss.inputs)
    return parts[0] if len(parts) == 1 else parts


def _check_coordinate(loss: Loss, values: Values, index: tuple[int, ...]) -> None:
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
