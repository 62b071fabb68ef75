"""Provides dense-layer factors with the constructors of TensorFlow's K-FAC library.

The page docs/building_blocks.md has the arguments that several of them share. Two classes are for
parameters without a layer. Blocks create the general factors directly.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, TypeAlias, Unpack

import numpy as np
import numpy.typing as npt

from kfac_engine._types import DType
from kfac_engine.curvature.blocks.base import uses
from kfac_engine.curvature.factors.base import FactorOptions, FisherFactor
from kfac_engine.curvature.factors.dense import DenseSquareMatrixFactor
from kfac_engine.curvature.factors.diagonal import DiagonalFactor
from kfac_engine.curvature.factors.lagged import LaggedFactor
from kfac_engine.curvature.factors.statistics import (
    Formula,
    GradientOuter,
    GradientSquare,
    KroneckerDiagonal,
    KroneckerMoment,
    LayerSquare,
    Statistic,
)
from kfac_engine.errors import InputError, RegistrationError
from kfac_engine.layers.views import RowView

# Names of a tower: one tensor, or a tensor for each use.
Tower: TypeAlias = str | Sequence[str]
# Names by source and tower.
Gradients: TypeAlias = Sequence[Sequence[Tower]]

_DENSE_LAYER = RowView()
_MATRIX = RowView(rank=2)


class InTowers(FisherFactor):
    """A factor of statistics whose tensors have names ``[source][tower]``."""

    def __init__(self, statistics: Sequence[Sequence[Statistic]], **options: Any) -> None:
        super().__init__(statistics[0][0], **options)
        self.set_sources(statistics)


class _OfGradients(InTowers):
    """Base of the factors of parameters without a layer."""

    _formula: ClassVar[type[GradientSquare]]

    def __init__(
        self, params_grads: Sequence[Tower], batch_size: int | str, **options: Unpack[FactorOptions]
    ) -> None:
        statistics = [(self._formula(uses(s), (batch_size,)),) for s in params_grads]
        super().__init__(statistics, **options)


class NaiveFullFactor(_OfGradients, DenseSquareMatrixFactor):
    """The outer product of the summed gradient of a batch, divided by the batch size.

    Args:
        params_grads: Names of the gradients of one or several parameters, for each source.
    """

    _formula = GradientOuter


class NaiveDiagonalFactor(_OfGradients, DiagonalFactor):
    """The square of the summed gradient of one parameter, divided by the batch size.

    Args:
        params_grads: Name of the gradient for each source.
    """

    _formula = GradientSquare


class FullyConnectedKroneckerFactor(InTowers, DenseSquareMatrixFactor):
    """The second moment of a dense layer's inputs, or of its output gradients."""

    def __init__(
        self, tensors: Gradients, has_bias: bool = False, **options: Unpack[FactorOptions]
    ) -> None:
        moment = partial(KroneckerMoment, view=_DENSE_LAYER, homogeneous=has_bias)
        super().__init__(of_towers(moment, tensors), **options)


class DiagonalKroneckerFactor(InTowers, DiagonalFactor):
    """The mean squares of a dense layer's inputs, or of its output gradients."""

    def __init__(
        self,
        tensors: Gradients,
        has_bias: bool = False,
        dtype: npt.DTypeLike | None = None,
        **options: Unpack[FactorOptions],
    ) -> None:
        squares = partial(KroneckerDiagonal, view=_MATRIX, homogeneous=has_bias)
        super().__init__(of_towers(squares, tensors), **options)
        self.narrowest = average_type(dtype)


class FullyConnectedMultiKF(InTowers, LaggedFactor):
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
        count = uses_in(tensors, num_uses)
        moment = partial(KroneckerMoment, view=_DENSE_LAYER, homogeneous=has_bias, num_uses=count)
        super().__init__(of_towers(moment, tensors), **options)


class DiagonalMultiKF(InTowers, DiagonalFactor):
    """The mean squares of a dense layer's inputs, or of its output gradients, over all uses."""

    def __init__(
        self,
        tensors: Gradients,
        num_uses: int | None = None,
        has_bias: bool = False,
        dtype: npt.DTypeLike | None = None,
        **options: Unpack[FactorOptions],
    ) -> None:
        count = uses_in(tensors, num_uses)
        squares = partial(
            KroneckerDiagonal, view=_DENSE_LAYER, homogeneous=has_bias, num_uses=count
        )
        super().__init__(of_towers(squares, tensors), **options)
        self.narrowest = average_type(dtype)


class FullyConnectedDiagonalFactor(InTowers, DiagonalFactor):
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
        view = _DENSE_LAYER
        squares = partial(LayerSquare, input_view=view, output_view=view, homogeneous=has_bias)
        super().__init__(of_towers(squares, outputs_grads, inputs), **options)


def of_towers(
    statistic: Callable[..., Formula], names: Gradients, inputs: Sequence[Tower] | None = None
) -> list[list[Formula]]:
    """Return statistics ``[source][tower]`` from names of tensors ``[source][tower]``.

    ``inputs`` are the names of the layer's input, ``[tower]``, for a statistic that reads it as
    well. There is at least one tower, and all sources have equal numbers of towers.
    """
    if len({len(source) for source in names}) != 1 or not names[0]:
        raise InputError(
            f"a factor needs names [source][tower], at least one, with equal numbers of towers; "
            f"got {names!r}."
        )
    if inputs is None:
        return [[statistic(uses(tower)) for tower in source] for source in names]
    return [
        [statistic(uses(x), uses(ds)) for x, ds in zip(inputs, source, strict=True)]
        for source in names
    ]


def uses_in(tensors: Gradients, num_uses: int | None) -> int:
    """Return the number of uses, which the caller passed as a number or as lists of names.

    An InputError says that there is neither, or that the number is below one. A RegistrationError
    says that the number and the lengths of lists differ.
    """
    towers = (uses(tower) for source in tensors for tower in source)
    counts = {len(tower) for tower in towers if len(tower) > 1}
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
