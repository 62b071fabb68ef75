"""Statistics of parameters that scale and shift the data: ``s = x ∘ scale + shift``.

An example's gradient is ``[Σ x∘ds, Σ ds]``, each sum over the axes along which the parameter is
broadcast. It is short, so its second moment is taken in full or of its entries.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kfac_engine._types import Array, Values
from kfac_engine.backend.protocol import Backend
from kfac_engine.config import CollectionConfig
from kfac_engine.errors import ShapeError
from kfac_engine.factors.dense import DenseSquareMatrixFactor
from kfac_engine.factors.diagonal import DiagonalFactor
from kfac_engine.factors.statistics import LayerPairs, one_use, the_same
from kfac_engine.layers.broadcast import Reduction, SummedAxes, entries, per_example


@dataclass(frozen=True, slots=True)
class ScaleShiftMoment(LayerPairs):
    """Mean over examples of ``v vᵀ`` with ``v = [scale's gradient, shift's gradient]``.

    Attributes:
        inputs: Names of the data before scaling, ``[tower]``.
        tensors: Names of output gradients, ``[source][tower]``.
        scale: Sums for the scale.
        shift: Sums for the shift; None without one.
    """

    scale: Reduction
    shift: Reduction | None

    def entries(self, values: Values) -> int:
        """Entries of ``v``; a ShapeError where inputs and gradients do not fit each other."""
        sizes = {}
        for _, x_name, ds_name in self.pairs():
            x, ds = values[x_name].shape, values[ds_name].shape
            if len(x) != len(ds) or any(a not in (1, b) for a, b in zip(x, ds, strict=True)):
                raise ShapeError(
                    f"'{x_name}' has shape {x} and '{ds_name}' {ds}: data before scaling has as "
                    f"many axes, each as long or of length one."
                )
            shift = entries(ds, self.shift) if self.shift else 0
            sizes[ds_name] = entries(ds, self.scale) + shift
        return the_same("entries", sizes)

    def shape(self, values: Values) -> tuple[int, ...]:
        side = self.entries(values)
        return side, side

    def repeats(self, values: Values) -> int:
        del values
        return 1  # positions are summed within an example

    def add_to(
        self, out: Array, values: Values, backend: Backend, alpha: float, beta: float
    ) -> None:
        for towers, x, ds in self.pairs():
            v = self._gradients(out, values[x], values[ds], backend)
            backend.second_moment(v, out, alpha=alpha / (len(v) * towers), beta=beta)
            beta = 1.0

    def _gradients(self, out: Array, x: Array, ds: Array, backend: Backend) -> Array:
        """``v`` of each example, in the type of the average."""
        ds = ds.astype(out.dtype, copy=False)
        if self.shift and self.scale.summed(ds.shape) == self.shift.summed(ds.shape):
            sides = x.astype(out.dtype, copy=False), ds
            return backend.example_sums(*sides, tuple(self.scale.summed(ds.shape)))
        columns = [per_example(x * ds, self.scale)]
        if self.shift:
            columns.append(per_example(ds, self.shift))
        joined: Array = backend.xp.concatenate(columns, axis=1)
        return joined


@dataclass(frozen=True, slots=True)
class ScaleShiftSquare(ScaleShiftMoment):
    """Mean over examples of ``v²``."""

    def shape(self, values: Values) -> tuple[int, ...]:
        return (self.entries(values),)

    def add_to(
        self, out: Array, values: Values, backend: Backend, alpha: float, beta: float
    ) -> None:
        for towers, x, ds in self.pairs():
            v = self._gradients(out, values[x], values[ds], backend)
            squares = backend.xp.einsum("ni,ni->i", v, v)
            backend.add_scaled(out, squares, alpha / (len(v) * towers), beta)
            beta = 1.0


class ScaleAndShiftFullFactor(DenseSquareMatrixFactor):
    """The second moment of a scale's and a shift's per-example gradients.

    Args:
        inputs: Names of the data before scaling, one a tower.
        outputs_grads: Names of output gradients, ``[source][tower]``.
        broadcast_dims_scale: Axes along which the scale is broadcast; empty sums nothing.
        broadcast_dims_shift: Likewise for the shift; those of the scale when left out.
        has_shift: Whether there is a shift.
        backend: Array library; NumPy when left out.
        config: How averages and powers are taken; the defaults when left out.
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
    """The mean squares of a scale's and a shift's per-example gradients.

    Args:
        inputs: As in ``ScaleAndShiftFullFactor``.
        outputs_grads: As in ``ScaleAndShiftFullFactor``.
        broadcast_dims_scale: As in ``ScaleAndShiftFullFactor``.
        broadcast_dims_shift: As in ``ScaleAndShiftFullFactor``.
        has_shift: Whether there is a shift.
        backend: Array library; NumPy when left out.
        config: How averages are taken; the defaults when left out.
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


def summed_axes(
    scale: Sequence[int], shift: Sequence[int] | None, has_shift: bool
) -> tuple[SummedAxes, SummedAxes | None]:
    """The sums for scale and shift, from axes named by the caller."""
    own = SummedAxes(tuple(scale))
    if not has_shift:
        return own, None
    return own, own if shift is None else SummedAxes(tuple(shift))
