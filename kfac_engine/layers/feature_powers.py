"""Measures how often, and how strongly, each input feature of a layer is active.

The mean square and the mean fourth power of a feature over rows tell the square that it has in its
active rows: ``Σ x⁴ / Σ x²`` is the mean square of the rows, each weighted by its own square. A
feature that is 1 in one row of thousands, and 0 in the others, has a mean square near 0 and this
square 1. For a Gaussian feature, the second one is three times the first.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kfac_engine._types import Array, Values
from kfac_engine.backend.namespace import array_module, is_recorded, on_device, recordable
from kfac_engine.backend.protocol import Backend
from kfac_engine.layers.grouped import StackedDenseView
from kfac_engine.layers.views import PatchView, RowView, View

# Mean squares above this number count as the number, and fourth powers as its square, so that no
# product of them overflows.
_LARGEST = 1e18
_LEAST_BYTES = np.dtype(np.float32).itemsize


@dataclass(frozen=True, slots=True)
class LayerInput:
    """The input of a layer, whose rows have features.

    The channels of images are features. An image is one row, with the mean square of its pixels.
    """

    names: tuple[str, ...]  # names of the tensors, over uses
    view: View  # reads a tensor as rows

    @property
    def is_readable(self) -> bool:
        """Whether the features of the view have powers."""
        return isinstance(self.view, RowView | PatchView | StackedDenseView)

    def squares(self, values: Values, backend: Backend) -> Array:
        """Return the squares of the features, ``(rows, features)``."""
        of_uses: list[Array] = []
        for name in self.names:
            x: Any = backend.asarray(values[name])
            if x.dtype.itemsize < _LEAST_BYTES:
                x = x.astype(np.float32)
            if isinstance(self.view, StackedDenseView):
                rows = x.reshape(-1, x.shape[-2] * x.shape[-1])
                of_uses.append(rows * rows)
            elif self.view.feature_axis not in (-1, x.ndim - 1):
                pixels = x.reshape(*x.shape[:2], -1)
                of_uses.append(inner(pixels, "ncp,ncp->nc") / pixels.shape[2])
            elif isinstance(self.view, PatchView):
                pixels = x.reshape(x.shape[0], -1, x.shape[-1])
                of_uses.append(inner(pixels, "npc,npc->nc") / pixels.shape[1])
            else:
                rows = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
                of_uses.append(rows * rows)
        return _together(of_uses, axis=0)


class FeaturePowers:
    """The powers of the features of several layers in a batch; they add up over its parts.

    ``sums`` are the means of the powers 0, 2 and 4 of all features, one input after the other,
    ``(3, features)``, times the number of examples; None before the first part.
    """

    def __init__(self, inputs: Sequence[LayerInput], backend: Backend) -> None:
        self._inputs, self._backend = inputs, backend
        self.sums: Array | None = None

    @recordable
    def add(self, values: Values, examples: Any, weights: Iterable[Array | None] = ()) -> None:
        """Add a part of a batch with a number of examples.

        ``weights`` are those of the targets of each loss; None for ones. A part in which a target
        does not count adds zeros: it is not known which rows belong to the target.
        """
        if not self._inputs:
            return
        means: list[Array] = []
        for source in self._inputs:
            with np.errstate(over="ignore"):
                squares: Any = source.squares(values, self._backend)
                rows = squares.shape[0] or 1
                second = np.minimum(squares.sum(axis=0) / rows, _LARGEST)
                fourth = np.minimum(inner(squares, "nc,nc->c") / rows, _LARGEST**2)
            powers = [np.ones_like(second)[None], second[None], fourth[None]]
            # It takes a third of the time of ``stack``.
            means.append(array_module(squares).concatenate(powers))
        sums = _together(means, axis=1) * examples
        for of_loss in weights:
            if of_loss is not None:
                hidden = np.logical_not(of_loss > 0).astype(np.int64).sum() > 0
                zeros = np.zeros_like(sums)
                if is_recorded(hidden):
                    sums = np.where(hidden, zeros, sums)
                elif hidden:  # weights may be on the host, and sums on a device
                    sums = zeros
        self.sums = sums if self.sums is None else self.sums + sums

    def read_later(self) -> None:
        """Move the sums to the host; see ``Backend.read_later``."""
        if self.sums is not None and on_device(self.sums):
            self._backend.read_later(self.sums, self._set)

    def _set(self, sums: Array) -> None:
        assert self.sums is not None, "they were read"
        self.sums = sums.astype(self.sums.dtype, copy=False)


def _together(arrays: Sequence[Array], axis: int) -> Array:
    """Return arrays one after the other along an axis; a single array itself."""
    if len(arrays) == 1:
        return arrays[0]
    together: Array = array_module(arrays[0]).concatenate(arrays, axis=axis)
    return together


def inner(x: Any, subscripts: str) -> Array:
    """Return sums of squares over some axes, as ``einsum`` of an array with itself.

    A file has no such operator.
    """
    if not is_recorded(x):
        result: Array = array_module(x).einsum(subscripts, x, x)
        return result
    before, after = subscripts.split(",")[0], subscripts.split(">")[1]
    axes = tuple(i for i, letter in enumerate(before) if letter not in after)
    summed: Array = (x * x).sum(axis=axes)
    return summed
