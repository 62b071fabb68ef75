"""Statistics that square the gradient of a whole batch."""

from dataclasses import dataclass
from math import prod
from typing import ClassVar

from kfac_engine._types import Array, DType, Values
from kfac_engine.backend.protocol import Backend
from kfac_engine.curvature.factors.statistics import Tensors, the_same
from kfac_engine.errors import InputError, UnknownNameError


@dataclass(frozen=True, slots=True)
class GradientSquare:
    """Square of the gradient summed over the batch, divided by the batch size.

    It is the square of a sum, not a sum of squares: unbiased for independent examples whose
    gradients have mean zero, with a large variance.

    Attributes:
        tensors: Names of parameter gradients, ``[source][0]``, a tuple over parameters.
        batch: Number of examples, or name of a value whose first axis is the batch, ``[tower]``.
    """

    over_rows: ClassVar[bool] = False

    tensors: Tensors
    batch: tuple[int | str, ...]

    def names(self) -> tuple[str, ...]:
        return tuple(name for source in self.tensors for name in source[0])

    def lengths(self) -> tuple[str, ...]:
        return tuple(batch for batch in self.batch if isinstance(batch, str))

    def products(self) -> tuple[tuple[str, str], ...]:
        return ()

    def shape(self, values: Values) -> tuple[int, ...]:
        if len(self.tensors[0][0]) != 1:
            raise InputError("the naive diagonal takes one parameter; use 'full' for several.")
        return the_same("shapes", {name: values[name].shape for name in self.names()})

    def batch_size(self, values: Values) -> int:
        missing = [name for name in self.lengths() if name not in values]
        if missing:
            raise UnknownNameError(f"the batch size is read from {missing}, which are missing.")
        return sum(len(values[n]) if isinstance(n, str) else n for n in self.batch)

    def repeats(self, values: Values) -> int:
        del values
        return 1

    def add_to(
        self, out: Array, values: Values, backend: Backend, alpha: float, beta: float
    ) -> None:
        for name in self.names():
            g = backend.asarray(values[name]).astype(out.dtype, copy=False)
            self._add_square(out, g, backend, alpha / self.batch_size(values), beta)
            beta = 1.0

    def sums(self, values: Values, dtype: DType, backend: Backend) -> Array:
        """Return the mean gradient of each source, ``(sources, entries)``."""
        xp = backend.xp
        parts = ([backend.asarray(values[n]).reshape(-1) for n in s[0]] for s in self.tensors)
        rows: Array = xp.stack([xp.concatenate(source) for source in parts])
        return rows.astype(dtype) / self.batch_size(values)

    def add_sums(
        self, out: Array, sums: Array, examples: int, backend: Backend, alpha: float, beta: float
    ) -> None:
        """Add the squares of the mean gradients, times the number of examples."""
        for mean in sums:
            self._add_square(out, mean, backend, alpha * examples, beta)
            beta = 1.0

    def _add_square(
        self, out: Array, g: Array, backend: Backend, alpha: float, beta: float
    ) -> None:
        g = g.reshape(out.shape)
        backend.add_scaled(out, g * g, alpha, beta)


@dataclass(frozen=True, slots=True)
class GradientOuter(GradientSquare):
    """Outer product of the gradient summed over the batch, divided by the batch size."""

    def shape(self, values: Values) -> tuple[int, ...]:
        sizes = {
            names: sum(prod(values[name].shape) for name in names) for names, *_ in self.tensors
        }
        size = the_same("entries", sizes)
        return size, size

    def add_to(
        self, out: Array, values: Values, backend: Backend, alpha: float, beta: float
    ) -> None:
        xp = backend.xp
        for names, *_ in self.tensors:
            parts = [backend.asarray(values[name]).reshape(-1) for name in names]
            g = xp.concatenate(parts).astype(out.dtype, copy=False)
            self._add_square(out, g, backend, alpha / self.batch_size(values), beta)
            beta = 1.0

    def _add_square(
        self, out: Array, g: Array, backend: Backend, alpha: float, beta: float
    ) -> None:
        backend.second_moment(g[None], out, alpha=alpha, beta=beta)
