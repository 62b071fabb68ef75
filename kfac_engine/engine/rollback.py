"""Restores an engine's state after a failed step; see ``Engine.transaction``.

A natural gradient can be checked only after the averages have changed in place. A copy of all
averages in every step would double their memory. For a power between −1 and 0, the norm of the
natural gradient is at most the norm of the gradient times ``damping ** exp``. Averages are
therefore copied only if this bound, the norm of the gradient, or another power, allows an overflow.
"""

from collections.abc import Callable, Mapping
from math import fsum, sqrt

import numpy as np

from kfac_engine._types import Array, DType
from kfac_engine.curvature.factors.base import FisherFactor
from kfac_engine.curvature.fisher import Fisher
from kfac_engine.runtime.model import OnnxModel

# Intermediate products may be larger than the result.
_MARGIN = 1e-6


def _saved(factor: FisherFactor) -> Callable[[], None]:
    """Copy the state of a factor; return a function that restores it."""
    factor.wait()
    narrowest, divided, traces = factor.narrowest, factor.average.divided, factor.traces_of_average
    factor.average.divided = False
    arrays = {name: np.array(array) for name, array in factor.arrays().items()}
    factor.average.divided = divided
    weight, repeats = factor.average.weight, factor.repeats

    def restore() -> None:
        factor.restore(arrays, weight, repeats)
        factor.narrowest, factor.traces_of_average = narrowest, traces
        factor.average.divided = divided

    return restore


class Undo:
    """What an engine restores after an error.

    These are the generator and the element types of ``fisher``, the running statistics and the
    count of random passes of ``model``, protected averages, and what the caller adds.
    """

    def __init__(self, fisher: Fisher, model: OnnxModel) -> None:
        self._fisher, self._model = fisher, model
        self._buffers, self._passes = dict(model.buffers), model.passes.count
        self._restore_draws = fisher.snapshot()
        self._restores: list[Callable[[], None]] = []

    def add(self, restore: Callable[[], None]) -> None:
        """Call a function after an error, before the functions that were added earlier."""
        self._restores.append(restore)

    def protect(
        self,
        gradients: Mapping[str, Array],
        exp: float,
        norm: float | None = None,
        types: Mapping[str, DType] | None = None,
    ) -> None:
        """Store copies of averages and inverses if a product of gradients may overflow.

        ``exp`` is the power of the damped Fisher matrix. ``norm`` is an upper bound of the norm of
        the gradient, which is computed if it is None; several processes pass one bound, so that
        they decide equally. ``types`` has the element types of products where they differ from the
        gradients.
        """
        if not _may_overflow(self._fisher, gradients, types or {}, exp, norm):
            return
        saved = [_saved(factor) for factor in self._fisher.factors]
        restore_division = self._fisher.division.snapshot()

        def restore() -> None:
            # A pending refresh reads averages that are replaced below.
            for moved in self._fisher.factors:
                moved.set_pending(None)
            for restore_factor in saved:
                restore_factor()
            restore_division()

        self.add(restore)

    def restore(self) -> None:
        """Restore the stored values."""
        self._model.buffers.update(self._buffers)
        self._model.passes.count = self._passes
        for restore in reversed(self._restores):
            restore()
        self._restore_draws()  # averages were stored after the batch had widened their types


def ignore_overflow() -> np.errstate:
    """Return a context without NumPy's warnings, for products that are checked for overflow."""
    return np.errstate(over="ignore", invalid="ignore")


def _may_overflow(
    fisher: Fisher,
    gradients: Mapping[str, Array],
    types: Mapping[str, DType],
    exp: float,
    norm: float | None,
) -> bool:
    """Return whether products may overflow their element types; False excludes an overflow."""
    if not -1 <= exp <= 0 or not fisher.factors:
        return True
    if norm is None:
        squares = fisher.factors[0].backend.squared_norms(list(gradients.values()))
        norm = sqrt(fsum(squares))
    dtypes = {types.get(name, array.dtype) for name, array in gradients.items()}
    # NumPy does not know bfloat16, whose largest number is about that of float32.
    limits = [np.finfo(dtype if dtype.kind == "f" else np.float32).max for dtype in dtypes]
    largest, damping = float(min(limits, default=1.0)), fisher.least_damping
    return not (damping and norm * max(1.0, damping**exp) < _MARGIN * largest)
