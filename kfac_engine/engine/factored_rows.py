"""Holds all rows of a batch's Fisher matrix as the inputs and output gradients of the layers.

A row is the gradient of a number that a loss predicts. A layer's part of it is ``Σ a dsᵀ`` over
its t uses and positions: ``t (d_in + d_out)`` numbers in place of ``d_in d_out``. Products with
the rows take two matrix products for each layer, and no pass over the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kfac_engine.engine.layer_gradients import Gradients, LayerReader

# Groups of rows that are added at a time, so that copies of their factors are small.
_GROUPS = 32


class LossRows(NamedTuple):
    """The rows of a loss for all examples of a part of a batch.

    ``layers`` has the gradients of each layer in the type of the model, None for a layer on which
    the loss does not depend.
    """

    examples: int
    of_example: int  # number of rows of an example
    layers: Sequence[Gradients | None]
    edges: Sequence[int]  # the first column of each layer, and the number of columns
    numbers: int  # number of floating-point numbers, of all processes

    def sums(self, numbers: NDArray[np.intp], signs: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the sums ``(q, columns)`` of q groups of rows, each times a sign.

        ``numbers`` are those of the rows of each group, ``(q, size)``, and ``signs`` their signs.
        """
        result = np.zeros((len(numbers), self.edges[-1]))
        for layer, (start, stop) in zip(self.layers, pairwise(self.edges), strict=True):
            if layer is None:
                continue
            of_type = signs.astype(layer.arrays[0].dtype)
            for first in range(0, len(numbers), _GROUPS):
                groups = slice(first, first + _GROUPS)
                result[groups, start:stop] = layer.sums(numbers[groups], of_type[groups])
        return result


def rows_of_loss(
    readers: Sequence[LayerReader], examples: int, of_example: int, count: int, most: int
) -> LossRows | None:
    """Return the rows of a loss; None if they take more than ``most`` numbers, or more passes.

    ``count`` is the number of examples of all processes, to which ``most`` refers.
    """
    numbers = [0 if reader.is_zero else reader.read for reader in readers]
    known = [number for number in numbers if number is not None]
    if len(known) < len(numbers) or count * sum(known) > most:
        return None
    layers = [None if reader.is_zero else next(reader.tiles(examples)) for reader in readers]
    edges = [*accumulate((reader.entries // of_example for reader in readers), initial=0)]
    return LossRows(examples, of_example, layers, edges, count * sum(known))


@dataclass(frozen=True, slots=True)
class FactoredRows:
    """All rows of a batch, and products with them.

    Vectors over the parameters are ``(P,)`` in float64, those over the rows ``(rows,)``.
    """

    losses: Sequence[LossRows]  # of all parts of the batch
    places: NDArray[np.intp]  # the parameter of each column
    size: int  # number of parameters P

    def image(self, flat: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return ``R v``, ``(rows,)``."""
        vector, images = flat[self.places], []
        for rows in self.losses:
            image = np.zeros((rows.examples, rows.of_example))
            for layer, (start, stop) in zip(rows.layers, pairwise(rows.edges), strict=True):
                if layer is not None:
                    image += layer.image(vector[start:stop].astype(layer.arrays[0].dtype))
            images.append(image.reshape(-1))
        return np.concatenate(images)

    def combine(self, u: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return ``Rᵀ u``, ``(P,)``."""
        columns, first = np.zeros(len(self.places)), 0
        for rows in self.losses:
            last = first + rows.examples * rows.of_example
            part = u[first:last].reshape(rows.examples, rows.of_example)
            for layer, (start, stop) in zip(rows.layers, pairwise(rows.edges), strict=True):
                if layer is not None:
                    columns[start:stop] += layer.combine(part.astype(layer.arrays[0].dtype))
            first = last
        result = np.zeros(self.size)
        result[self.places] = columns
        return result
