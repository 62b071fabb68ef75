"""Classes for scales and shifts with the names and constructors of TensorFlow's library."""

from collections.abc import Sequence

from kfac_engine.backend.protocol import Backend
from kfac_engine.curvature.blocks.base import FactorOwner
from kfac_engine.curvature.blocks.scale_shift import ScaleShiftFB, ScaleShiftForm
from kfac_engine.curvature.config import CollectionConfig
from kfac_engine.curvature.factors.dense import DenseSquareMatrixFactor
from kfac_engine.curvature.factors.diagonal import DiagonalFactor
from kfac_engine.curvature.factors.scale_shift import ScaleShiftMoment, ScaleShiftSquare
from kfac_engine.curvature.factors.statistics import one_use
from kfac_engine.layers.broadcast import SummedAxes


class ScaleAndShiftFullFactor(DenseSquareMatrixFactor):
    """The second moment of the per-example gradients of a scale and a shift.

    Args:
        inputs: Name of the data before scaling, for each tower.
        outputs_grads: Names of output gradients, ``[source][tower]``.
        broadcast_dims_scale: Axes along which the scale is broadcast; may be empty.
        broadcast_dims_shift: The same for the shift; by default the axes of the scale.
        has_shift: Whether there is a shift.
        backend: Array library; NumPy by default.
        config: Options of averages and powers; the defaults if omitted.
    """

    def __init__(
        self,
        inputs: Sequence[str],
        outputs_grads: Sequence[Sequence[str]],
        broadcast_dims_scale: Sequence[int],
        broadcast_dims_shift: Sequence[int] | None = None,
        has_shift: bool = True,
        *,
        backend: Backend | None = None,
        config: CollectionConfig | None = None,
    ) -> None:
        sums = summed_axes(broadcast_dims_scale, broadcast_dims_shift, has_shift)
        tensors = tuple(one_use(source) for source in outputs_grads)
        statistic = ScaleShiftMoment(one_use(inputs), tensors, *sums)
        super().__init__(statistic, backend=backend, config=config)


class ScaleAndShiftDiagonalFactor(DiagonalFactor):
    """The mean squares of the per-example gradients of a scale and a shift.

    Args:
        inputs: As in ``ScaleAndShiftFullFactor``.
        outputs_grads: As in ``ScaleAndShiftFullFactor``.
        broadcast_dims_scale: As in ``ScaleAndShiftFullFactor``.
        broadcast_dims_shift: As in ``ScaleAndShiftFullFactor``.
        has_shift: Whether there is a shift.
        backend: Array library; NumPy by default.
        config: Options of averages; the defaults if omitted.
    """

    def __init__(
        self,
        inputs: Sequence[str],
        outputs_grads: Sequence[Sequence[str]],
        broadcast_dims_scale: Sequence[int],
        broadcast_dims_shift: Sequence[int] | None = None,
        has_shift: bool = True,
        *,
        backend: Backend | None = None,
        config: CollectionConfig | None = None,
    ) -> None:
        sums = summed_axes(broadcast_dims_scale, broadcast_dims_shift, has_shift)
        tensors = tuple(one_use(source) for source in outputs_grads)
        statistic = ScaleShiftSquare(one_use(inputs), tensors, *sums)
        super().__init__(statistic, backend=backend, config=config)


class ScaleAndShiftFullFB(ScaleShiftFB):
    """The full second moment of per-example gradients of a scale and a shift.

    Args:
        layer_collection: Owner of the factor.
        broadcast_dims_scale: Axes of the data (the batch is 0) along which the scale is broadcast.
        broadcast_dims_shift: The same for the shift; by default the axes of the scale.
        has_shift: Whether there is a shift.
    """

    def __init__(
        self,
        layer_collection: FactorOwner,
        broadcast_dims_scale: Sequence[int],
        broadcast_dims_shift: Sequence[int] | None = None,
        has_shift: bool = True,
    ) -> None:
        sums = summed_axes(broadcast_dims_scale, broadcast_dims_shift, has_shift)
        super().__init__(layer_collection, ScaleShiftForm(*sums))


class ScaleAndShiftDiagonalFB(ScaleShiftFB):
    """The mean squares of per-example gradients of a scale and a shift.

    Args:
        layer_collection: Owner of the factor.
        broadcast_dims_scale: As in ``ScaleAndShiftFullFB``.
        broadcast_dims_shift: As in ``ScaleAndShiftFullFB``.
        has_shift: Whether there is a shift.
    """

    def __init__(
        self,
        layer_collection: FactorOwner,
        broadcast_dims_scale: Sequence[int],
        broadcast_dims_shift: Sequence[int] | None = None,
        has_shift: bool = True,
    ) -> None:
        sums = summed_axes(broadcast_dims_scale, broadcast_dims_shift, has_shift)
        form = ScaleShiftForm(*sums)
        super().__init__(layer_collection, form, statistic=ScaleShiftSquare, factor=DiagonalFactor)


def summed_axes(
    scale: Sequence[int], shift: Sequence[int] | None, has_shift: bool
) -> tuple[SummedAxes, SummedAxes | None]:
    """Return the broadcast axes of scale and shift as reductions."""
    of_scale = SummedAxes(tuple(scale))
    if not has_shift:
        return of_scale, None
    return of_scale, of_scale if shift is None else SummedAxes(tuple(shift))
