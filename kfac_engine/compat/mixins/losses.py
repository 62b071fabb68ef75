"""Methods of a loss that return functions of the values of a batch.

A ``vector`` of the input space is an array of the input's shape, or a tuple with an array for each
input. ``u`` is an array of the inner shape. Results have the same form, and the element type of the
inputs.
"""

from collections.abc import Mapping
from typing import Protocol, TypeAlias

import numpy as np

from kfac_engine._types import Array, Thunk, Values
from kfac_engine.backend.namespace import array_module
from kfac_engine.errors import InputError, ShapeError

# A vector of the input space: an array, or one for each input.
Vector: TypeAlias = Array | tuple[Array, ...]


class Loss(Protocol):
    """The part of ``LossFunction`` that the mixin calls; see there."""

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

    The matrices with a ``ggn`` in their name are defined for natural parameters, where they equal
    the Fisher matrix; an UnsupportedError for other parameters.
    """

    def evaluate(self: Loss) -> Thunk[float]:
        """Return a function: the loss of the data, summed over the batch, in nats."""
        self.require_target_name()
        return lambda values: self.value(self.read(values, targets=True))

    def evaluate_on_sample(self: Loss, seed: int | None = None) -> Thunk[float]:
        """Return a function: the loss of sampled targets, the same sample for the same values."""
        seed = next((s for s in (seed, self.seed) if s is not None), 0)

        def evaluate(values: Values) -> float:
            values = self.read(values)
            return self.value_of(values, self.sample(values, np.random.default_rng(seed)))

        return evaluate

    def multiply_fisher(self: Loss, vector: Vector) -> Thunk[Vector]:
        """Return a function: the Fisher matrix times a vector, ``F v``."""

        def multiply(values: Values) -> Vector:
            values = self.read(values)
            return _plain(self, self.fisher(values, _vectors(self, values, vector)))

        return multiply

    def multiply_fisher_factor(self: Loss, u: Array) -> Thunk[Vector]:
        """Return a function: the factor of the Fisher matrix times a vector, ``B u``."""

        def multiply(values: Values) -> Vector:
            values = self.read(values)
            inner = _converted(u, values[self.inputs[0]], self.inner_shape(values))
            return _plain(self, self.fisher_factor(values, inner))

        return multiply

    def multiply_fisher_factor_transpose(self: Loss, vector: Vector) -> Thunk[Array]:
        """Return a function: the transpose of the factor times a vector, ``Bᵀ v``."""

        def multiply(values: Values) -> Array:
            values = self.read(values)
            return self.fisher_factor_transpose(values, _vectors(self, values, vector))

        return multiply

    def multiply_fisher_factor_replicated_one_hot(
        self: Loss, index: tuple[int, ...]
    ) -> Thunk[Vector]:
        """Return a function: column ``B e_index`` for every example.

        Args:
            index: A number for each inner axis after the batch axis.
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
        """Return ``multiply_fisher`` where the Gauss–Newton matrix is defined."""
        self.require_ggn()
        return self.multiply_fisher(vector)

    def multiply_ggn_factor(self: Loss, u: Array) -> Thunk[Vector]:
        """Return ``multiply_fisher_factor`` where the Gauss–Newton matrix is defined."""
        self.require_ggn()
        return self.multiply_fisher_factor(u)

    def multiply_ggn_factor_transpose(self: Loss, vector: Vector) -> Thunk[Array]:
        """Return ``multiply_fisher_factor_transpose`` where the matrix is defined."""
        self.require_ggn()
        return self.multiply_fisher_factor_transpose(vector)

    def multiply_ggn_factor_replicated_one_hot(self: Loss, index: tuple[int, ...]) -> Thunk[Vector]:
        """Return ``multiply_fisher_factor_replicated_one_hot`` where the matrix is defined."""
        self.require_ggn()
        return self.multiply_fisher_factor_replicated_one_hot(index)

    def ggn_factor_inner_shape(self: Loss, values: Values) -> tuple[int, ...]:
        """Return ``fisher_factor_inner_shape`` where the Gauss–Newton matrix is defined."""
        self.require_ggn()
        return self.fisher_factor_inner_shape(values)


def _vectors(loss: Loss, values: Values, vector: Vector) -> dict[str, Array]:
    """Return a vector by the names of the inputs, checked and converted."""
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
    """Return ``vector`` in the library and element type of ``like``, checked for its shape."""
    converted: Array = array_module(like).asarray(vector, dtype=like.dtype)
    if converted.shape != tuple(shape):
        raise ShapeError(
            f"the vector has shape {converted.shape}, expected {tuple(shape)}: one entry per "
            f"coordinate of the loss."
        )
    return converted
