"""Provides dense-layer factors with the constructors of TensorFlow's K-FAC library.

The page docs/building_blocks.md has the arguments that several of them share. Two classes are for
parameters without a layer. Blocks create the general factors directly.
"""

from collections.abc import Sequence
from typing import TypeAlias, TypedDict, Unpack

import numpy as np
import numpy.typing as npt

from kfac_engine._types import DType
from kfac_engine.backend.protocol import Backend
from kfac_engine.curvature.config import CollectionConfig
from kfac_engine.curvature.factors.dense import DenseSquareMatrixFactor
from kfac_engine.curvature.factors.diagonal import DiagonalFactor
from kfac_engine.curvature.factors.lagged import LaggedFactor
from kfac_engine.curvature.factors.statistics import (
    GradientOuter,
    GradientSquare,
    KroneckerDiagonal,
    KroneckerMoment,
    LayerSquare,
    Tensors,
    Uses,
)
from kfac_engine.errors import InputError, RegistrationError
from kfac_engine.layers.views import RowView

# Names of a tower: one tensor, or a tensor for each use.
Tower: TypeAlias = str | Sequence[str]
# Names by source and tower.
Gradients: TypeAlias = Sequence[Sequence[Tower]]

_DENSE_LAYER = RowView()
_MATRIX = RowView(rank=2)


class FactorOptions(TypedDict, total=False):
    """The keyword arguments of every factor."""

    backend: Backend | None  # array library; NumPy by default
    config: CollectionConfig | None  # options of averages and powers; the defaults if omitted


class NaiveFullFactor(DenseSquareMatrixFactor):
    """The outer product of the summed gradient of a batch, divided by the batch size.

    Args:
        params_grads: Names of the gradients of one or several parameters, for each source.
    """

    def __init__(
        self,
        params_grads: Sequence[Tower],
        batch_size: int | str,
        **options: Unpack[FactorOptions],
    ) -> None:
        tensors = tuple((uses_of(source),) for source in params_grads)
        super().__init__(GradientOuter(tensors, (batch_size,)), **options)


class NaiveDiagonalFactor(DiagonalFactor):
    """The square of the summed gradient of one parameter, divided by the batch size.

    Args:
        params_grads: Name of the gradient for each source.
    """

    def __init__(
        self,
        params_grads: Sequence[Tower],
        batch_size: int | str,
        **options: Unpack[FactorOptions],
    ) -> None:
        tensors = tuple((uses_of(source),) for source in params_grads)
        super().__init__(GradientSquare(tensors, (batch_size,)), **options)


class FullyConnectedKroneckerFactor(DenseSquareMatrixFactor):
    """The second moment of a dense layer's inputs, or of its output gradients."""

    def __init__(
        self, tensors: Gradients, has_bias: bool = False, **options: Unpack[FactorOptions]
    ) -> None:
        statistic = KroneckerMoment(tensors_of(tensors), _DENSE_LAYER, homogeneous=has_bias)
        super().__init__(statistic, **options)


class DiagonalKroneckerFactor(DiagonalFactor):
    """The mean squares of a dense layer's inputs, or of its output gradients."""

    def __init__(
        self,
        tensors: Gradients,
        has_bias: bool = False,
        dtype: npt.DTypeLike | None = None,
        **options: Unpack[FactorOptions],
    ) -> None:
        statistic = KroneckerDiagonal(tensors_of(tensors), _MATRIX, homogeneous=has_bias)
        super().__init__(statistic, **options)
        self.narrowest = average_type(dtype)


class FullyConnectedMultiKF(LaggedFactor):
    """The second moment over all uses of a dense layer, and cross moments of successive uses.

    Args:
        num_uses: Number ``u`` of uses; optional if a tower lists them.
    """

    def __init__(
        self,
        tensors: Gradients,
        num_uses: int | None = None,
        has_bias: bool = False,
        **options: Unpack[FactorOptions],
    ) -> None:
        names = tensors_of(tensors)
        statistic = KroneckerMoment(
            names, _DENSE_LAYER, homogeneous=has_bias, num_uses=uses_in(names, num_uses)
        )
        super().__init__(statistic, **options)


class DiagonalMultiKF(DiagonalFactor):
    """The mean squares of a dense layer's inputs, or of its output gradients, over all uses."""

    def __init__(
        self,
        tensors: Gradients,
        num_uses: int | None = None,
        has_bias: bool = False,
        dtype: npt.DTypeLike | None = None,
        **options: Unpack[FactorOptions],
    ) -> None:
        names = tensors_of(tensors)
        statistic = KroneckerDiagonal(
            names, _DENSE_LAYER, homogeneous=has_bias, num_uses=uses_in(names, num_uses)
        )
        super().__init__(statistic, **options)
        self.narrowest = average_type(dtype)


class FullyConnectedDiagonalFactor(DiagonalFactor):
    """The mean squared per-example gradient of a dense layer, ``(d_in (+ 1), d_out)``.

    Args:
        inputs: Name of an ``(n, d_in)`` array for each tower.
    """

    def __init__(
        self,
        inputs: Sequence[str],
        outputs_grads: Gradients,
        has_bias: bool = False,
        **options: Unpack[FactorOptions],
    ) -> None:
        names = tuple(uses_of(tower) for tower in inputs)
        view = _DENSE_LAYER
        statistic = LayerSquare(names, tensors_of(outputs_grads), view, view, has_bias)
        super().__init__(statistic, **options)


def uses_of(names: Tower) -> Uses:
    """Return the names over the uses of a tower as a tuple; a single name is one use."""
    return (names,) if isinstance(names, str) else tuple(names)


def tensors_of(names: Gradients) -> Tensors:
    """Return names ``[source][tower]`` as nested tuples, with the names of the uses of each tower.

    There is at least one tower, and all sources have equal numbers of towers.
    """
    tensors = tuple(tuple(uses_of(tower) for tower in source) for source in names)
    if len({len(source) for source in tensors}) != 1 or not tensors[0]:
        raise InputError(
            f"a factor needs names [source][tower], at least one, with equal numbers of towers; "
            f"got {names!r}."
        )
    return tensors


def uses_in(tensors: Tensors, num_uses: int | None) -> int:
    """Return the number of uses, which the caller passed as a number or as lists of names.

    An InputError says that there is neither, or that the number is below one. A RegistrationError
    says that the number and the lengths of lists differ.
    """
    counts = {len(tower) for source in tensors for tower in source if len(tower) > 1}
    if num_uses is not None:
        counts.add(num_uses)
    if len(counts) > 1:
        raise RegistrationError(
            f"the numbers of uses of a layer differ: {sorted(counts)}; num_uses and the lengths of "
            f"all lists must be equal."
        )
    if not counts or min(counts) < 1:
        raise InputError(
            f"You must supply a value for the num_uses argument, at least one; got {num_uses}."
        )
    return counts.pop()


def average_type(dtype: npt.DTypeLike | None) -> DType:
    """Return the least precise type of an average, float32 for None; others are refused."""
    chosen: DType = np.dtype(np.float32 if dtype is None else dtype)
    if chosen not in (np.float32, np.float64):
        raise InputError(f"the type of an average must be float32 or float64, got {chosen}.")
    return chosen
