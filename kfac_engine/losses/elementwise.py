"""The base class of distributions with independent entries and a diagonal Fisher matrix."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from kfac_engine._types import Array, Values
from kfac_engine.backend.namespace import array_module
from kfac_engine.losses.base import LossFunction


class ElementwiseLoss(LossFunction):
    """A distribution whose Fisher matrix is ``diag(i)``; ``B = diag(√i)`` is symmetric.

    The inner space of several inputs of one shape is their concatenation along the class axis.
    """

    entrywise: ClassVar[bool] = True

    @abstractmethod
    def information(self, values: Values) -> dict[str, Array]:
        """Return the diagonal of the Fisher matrix by input, in the shapes of the inputs."""

    def expected_squares(self, values: Values, targets: Array | None = None) -> float:
        diagonals = self.information(values).values()
        total: float = sum(diagonal.sum(dtype=np.float64) for diagonal in diagonals)
        return total

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
