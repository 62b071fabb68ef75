"""Defines stacks of small symmetric matrices, one for each channel group, inverted together."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kfac_engine._types import Array, Values
from kfac_engine.backend.namespace import recordable
from kfac_engine.backend.protocol import Accumulation, Backend
from kfac_engine.backend.window import Window
from kfac_engine.curvature.factors.dense import (
    DenseSquareMatrixFactor,
    Wanted,
)
from kfac_engine.curvature.factors.refresh import Damping
from kfac_engine.curvature.factors.statistics import KroneckerMoment, LayerSquare, at_least
from kfac_engine.errors import ShapeError
from kfac_engine.layers.views import View


@dataclass(frozen=True, slots=True)
class GroupedMoment(KroneckerMoment):
    """Mean of ``x xᵀ`` over examples and positions, for each group: ``(groups, d, d)``."""

    groups: int = 1  # number of groups of consecutive channels
    taps: int = 1  # number of kernel entries in a row of features; 1 for outputs

    def shape(self, values: Values) -> tuple[int, ...]:
        d = group_width(self.features(values), self.groups, self.taps) + self.homogeneous
        return self.groups, d, d

    @recordable
    def add_to(
        self, out: Array, values: Values, backend: Backend, alpha: float, beta: float
    ) -> None:
        arrays, weights = self._arrays(values, backend), self._row_weights(values)
        if weights is not None:
            self._add_weighted(out, arrays, weights, backend, alpha, beta)
            return
        rows = sum(self.view.count(x.shape) for x in arrays)
        for x in arrays:
            images, window = group_images(self.view, x, backend, self.groups, self.taps)
            how = Accumulation(self.homogeneous, alpha / rows, beta)
            backend.patch_second_moment(at_least(out.dtype, images), window, out, how)
            beta = 1.0

    def _add_rows(
        self, out: Array, rows: Array, weights: Array, backend: Backend, alpha: float
    ) -> None:
        xp, (n, width) = backend.xp, rows.shape  # n is 0 where nothing counts
        d = width // (self.taps * self.groups)
        grouped = rows.reshape(n, self.taps, self.groups, d).transpose(2, 0, 1, 3)
        x = grouped.reshape(self.groups, n, self.taps * d)
        if self.homogeneous:
            x = xp.concatenate([x, xp.ones((*x.shape[:2], 1), x.dtype)], axis=2)
        x = x * xp.sqrt(weights).astype(x.dtype)[None, :, None]
        out += alpha * (x.transpose(0, 2, 1) @ x)


@dataclass(frozen=True, slots=True)
class GroupedSquare(LayerSquare):
    """Mean over examples of the squared gradient of each group: ``(groups, d_in, d_out)``.

    ``taps`` is the number of kernel entries.
    """

    groups: int = 1
    taps: int = 1

    def shape(self, values: Values) -> tuple[int, ...]:
        rows, outputs = LayerSquare.shape(self, values)
        d_in = group_width(rows - self.homogeneous, self.groups, self.taps)
        return self.groups, d_in + self.homogeneous, group_width(outputs, self.groups, 1)

    def _add_squares(self, out: Array, a: Array, ds: Array, backend: Backend, scale: float) -> None:
        x, window = group_images(self.input_view, a, backend, self.groups, self.taps)
        g, _ = group_images(self.output_view, ds, backend, self.groups, 1)
        backend.squared_gradients(x, window, g, out, Accumulation(self.homogeneous, scale, 1.0))


class StackedSquareFactor(DenseSquareMatrixFactor):
    """A block-diagonal matrix stored as ``(groups, d, d)``, with a damping for each group.

    One batched eigendecomposition inverts all groups. Operands are stacks as well.
    """

    @property
    def side(self) -> int:
        groups, d, _ = self._lower().shape
        return int(groups) * int(d)

    def measured_traces(self) -> Array:
        traces: Array = self.backend.xp.trace(self._lower(), axis1=1, axis2=2)
        return traces

    def get_cov(self) -> Array:
        stack = self._matrix()
        groups, d, _ = stack.shape
        dense: Array = self.backend.xp.zeros((groups * d, groups * d), stack.dtype)
        for group, matrix in enumerate(stack):
            where = slice(group * d, (group + 1) * d)
            dense[where, where] = matrix
        return dense

    def matrices(self) -> Array:
        return self.average.read()

    def eigenvalues(self) -> Array:
        return np.linalg.eigvalsh(self.backend.to_numpy(self._matrix()).astype(np.float64))

    def stored_power(self, exp: float, damping_func: Damping) -> Array | None:
        return None  # the power is a stack

    def _identity(self, like: Array) -> Array:
        eye = self.backend.xp.eye(like.shape[1], dtype=like.dtype)
        identity: Array = self.backend.xp.broadcast_to(eye, like.shape)
        return identity

    def _level(self, damping_func: Damping) -> tuple[float, ...]:
        levels = np.broadcast_to(np.ravel(damping_func()), len(self._lower()))
        return tuple(levels.astype(np.float64).tolist())

    def _takes_eigenvectors(self, powers: Sequence[Wanted]) -> bool:
        return bool(powers)

    def _added(self, x: Array, damping_func: Damping) -> Array:
        levels = self.backend.asarray(damping_func(), self._lower().dtype).reshape(-1, 1, 1)
        product: Array = levels * x
        return product

    def _check_operand(self, x: Array, axis: int) -> None:
        groups, d, _ = self._lower().shape
        if x.ndim != 3 or x.shape[0] != groups or x.shape[axis] != d:
            raise ShapeError(
                f"{self.name} has {groups} matrices {d} × {d}; they cannot multiply an array of "
                f"shape {x.shape} from the {'left' if axis == -2 else 'right'}."
            )


def group_images(
    view: View, x: Array, backend: Backend, groups: int, taps: int
) -> tuple[Array, Window]:
    """Return the images of a view, the channels of each group next to each other."""
    images, window = view.images(x, backend)
    if window.taps == taps:
        return images, window
    # Extracted patches: their features, taps before channels, are the channels of single pixels.
    n, features, *spatial_shape = images.shape
    split = images.reshape(n, taps, groups, features // (taps * groups), *spatial_shape)
    return split.swapaxes(1, 2).reshape(images.shape), window


def group_width(features: int, groups: int, taps: int) -> int:
    """Return the features of a group; a ShapeError if groups do not divide the channels."""
    if features % (groups * taps):
        raise ShapeError(f"{features // taps} channels cannot fall into {groups} groups.")
    return features // groups
