"""Stacks of dense layers with separate weights, such as experts or attention heads.

The weight is ``(stack, d_in, d_out)``, the input is ``(n, …positions, stack, d_in)``.
"""

from dataclasses import dataclass
from math import prod
from types import ModuleType
from typing import ClassVar

from kfac_engine._types import Array, Rows, Vector
from kfac_engine.backend.protocol import Backend
from kfac_engine.backend.window import Window
from kfac_engine.errors import InputError, ShapeError
from kfac_engine.layers.grouped import GroupedForm
from kfac_engine.layers.layer_forms import LayerForm
from kfac_engine.layers.packing import Packing
from kfac_engine.layers.views import rows_as_images

_LEAST_RANK = 3


@dataclass(frozen=True, slots=True)
class StackedDenseView:
    """A tensor ``(n, …positions, stack, d)``, read as rows of ``stack · d`` features."""

    has_rows: ClassVar[bool] = True

    @property
    def rank(self) -> None:
        """None, because any number of axes from three on is valid."""
        return

    def width(self, shape: tuple[int, ...]) -> int:
        if len(shape) < _LEAST_RANK:
            raise ShapeError(
                f"a tensor of stacked dense layers needs at least 3 axes, got shape {shape}."
            )
        return shape[-2] * shape[-1]

    def count(self, shape: tuple[int, ...]) -> int:
        return prod(shape[:-2])

    def second_moment(
        self,
        x: Array,
        out: Array,
        backend: Backend,
        *,
        homogeneous: bool,
        alpha: float,
        beta: float,
    ) -> None:
        del x, out, backend, homogeneous, alpha, beta
        raise InputError(
            "stacked dense layers have no common second moment; choose 'kron' or 'diagonal'."
        )

    def rows(self, x: Array, backend: Backend) -> Array:
        del backend
        return x.reshape(len(x), -1, self.width(x.shape))

    def images(self, x: Array, backend: Backend) -> tuple[Array, Window]:
        return rows_as_images(self.rows(x, backend))


@dataclass(frozen=True, slots=True)
class StackedDensePacking(Packing):
    """The map from a weight ``(stack, d_in, d_out)`` and a bias to matrices."""

    one_matrix: ClassVar[bool] = False

    def pack(self, vector: Vector, where: object, xp: ModuleType) -> Array:
        parts = self.arrays(vector, where)
        weight = parts[0]
        if weight.ndim != _LEAST_RANK:
            raise ShapeError(f"the weight of {where} needs 3 axes, got shape {weight.shape}.")
        stack, _, d_out = weight.shape
        if not self.has_bias:
            return weight.copy()
        if parts[1].size != stack * d_out:
            raise ShapeError(
                f"the bias of {where} has shape {parts[1].shape}, not ({stack}, {d_out})."
            )
        packed: Array = xp.concatenate([weight, parts[1].reshape(stack, 1, d_out)], axis=1)
        return packed

    def unpack(self, matrix: Array, like: Vector) -> Vector:
        assert not isinstance(like, Rows)  # ``pack`` refuses them
        parts = like if isinstance(like, tuple | list) else (like,)
        rows = matrix[:, :-1] if self.has_bias else matrix
        weight = rows.astype(parts[0].dtype, order="C")
        if not self.has_bias:
            return (weight,) if isinstance(like, tuple | list) else weight
        return weight, matrix[:, -1].reshape(parts[1].shape).astype(parts[1].dtype)


def stacked_dense_form(weight_shape: tuple[int, ...], *, has_bias: bool) -> GroupedForm:
    """Return the form of stacked dense layers.

    Args:
        weight_shape: ``(stack, d_in, d_out)``.
        has_bias: Whether the layers have a bias, ``(stack, d_out)``.

    Returns:
        The form.

    Raises:
        ShapeError: The weight does not have three axes.
    """
    if len(weight_shape) != _LEAST_RANK:
        raise ShapeError(
            f"the weight of stacked dense layers has shape {weight_shape}; (stack, d_in, d_out) is "
            f"needed."
        )
    stack, d_in, d_out = weight_shape
    layer = LayerForm(StackedDenseView(), StackedDenseView(), StackedDensePacking("IO", has_bias))
    return GroupedForm(layer, 1, (stack, d_in + has_bias, d_out))
