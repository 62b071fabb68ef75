"""Statistics of parameters that scale and shift the data: ``s = x ∘ scale + shift``.

An example's gradient is ``[Σ x∘ds, Σ ds]``, each sum over the axes along which the parameter is
broadcast, and over the uses of the parameter. The statistic is its full second moment, or the
second moment of each entry.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kfac_engine._types import Array, Values
from kfac_engine.backend.protocol import Backend
from kfac_engine.curvature.factors.statistics import LayerPairs, the_same
from kfac_engine.errors import ShapeError
from kfac_engine.layers.broadcast import Reduction, entries, per_example


@dataclass(frozen=True, slots=True)
class ScaleShiftMoment(LayerPairs):
    """Mean over examples of ``v vᵀ`` with ``v = [scale's gradient, shift's gradient]``.

    The gradient of an example is summed over the uses of the parameters.

    Attributes:
        inputs: Names of the data before scaling, ``[tower]``; empty without a scale.
        tensors: Names of output gradients, ``[source][tower]``.
        scale: Sums for the scale; None without a scale.
        shift: Sums for the shift; None without a shift.
    """

    scale: Reduction | None
    shift: Reduction | None

    def entries(self, values: Values) -> int:
        """Return the size of ``v``; raise a ShapeError if inputs and gradients differ in shape."""
        for x_name, ds_name in self.products():
            x, ds = values[x_name].shape, values[ds_name].shape
            if len(x) != len(ds) or any(a not in (1, b) for a, b in zip(x, ds, strict=True)):
                raise ShapeError(
                    f"'{x_name}' has shape {x} and '{ds_name}' {ds}: data before scaling has as "
                    f"many axes, each as long or of length one."
                )
        sums = [reduction for reduction in (self.scale, self.shift) if reduction]
        sizes = {
            name: sum(entries(values[name].shape, reduction) for reduction in sums)
            for name in self._gradient_names()
        }
        return the_same("entries", sizes)

    def shape(self, values: Values) -> tuple[int, ...]:
        size = self.entries(values)
        return size, size

    def products(self) -> tuple[tuple[str, str], ...]:
        return tuple(
            pair
            for source in self.tensors
            for xs, gradients in zip(self.inputs, source, strict=True)
            for pair in zip(xs, gradients, strict=False)
        )

    def batch_size(self, values: Values) -> int:
        reduction = self.scale or self.shift
        axis = reduction.batch_axis if reduction else 0
        sizes = {name: values[name].shape[axis] for name in self._gradient_names()}
        examples: int = the_same("examples", sizes)
        return examples * len(self.inputs)

    def repeats(self, values: Values) -> int:
        del values
        return 1  # positions are summed within an example

    def add_to(
        self, out: Array, values: Values, backend: Backend, alpha: float, beta: float
    ) -> None:
        for towers, v in self._gradients(out, values, backend):
            backend.second_moment(v, out, alpha=alpha / (len(v) * towers), beta=beta)
            beta = 1.0

    def _gradient_names(self) -> Iterator[str]:
        return (name for source in self.tensors for tower in source for name in tower)

    def _gradients(
        self, out: Array, values: Values, backend: Backend
    ) -> Iterator[tuple[int, Array]]:
        """Yield ``v`` of each example, for every tower of every source, in the average's type."""
        for source in self.tensors:
            for xs, gradients in zip(self.inputs, source, strict=True):
                v: Array | None = None
                for use, name in enumerate(gradients):
                    ds = values[name].astype(out.dtype, copy=False)
                    x = values[xs[use]].astype(out.dtype, copy=False) if xs else None
                    term = self._of_use(x, ds, backend)
                    v = term if v is None else v + term
                assert v is not None, "a tower has at least one use"
                yield len(source), v

    def _of_use(self, x: Array | None, ds: Array, backend: Backend) -> Array:
        """Return the contribution of a use to ``v``."""
        if self.scale and self.shift and not self.scale.batch_axis and x is not None:
            axes = self.scale.summed(ds.shape)
            if axes == self.shift.summed(ds.shape):
                return backend.example_sums(x, ds, tuple(axes))
        columns = []
        if self.scale and x is not None:
            columns.append(per_example(x * ds, self.scale))
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
        for towers, v in self._gradients(out, values, backend):
            squares = backend.xp.einsum("ni,ni->i", v, v)
            backend.add_scaled(out, squares, alpha / (len(v) * towers), beta)
            beta = 1.0
