"""Fisher matrices from gradients of single examples: the whole matrix, or a diagonal.

A source of an estimation mode is a set of cotangents; the Fisher matrix is the mean over examples
of ``Σ_sources g gᵀ`` with the gradients ``g`` of each example.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

import numpy as np

from kfac_engine._types import Array
from kfac_engine.analysis.fisher_matrix.example_gradients import LayerGradients, whole_rows
from kfac_engine.analysis.fisher_matrix.parameter_vector import Places
from kfac_engine.analysis.fisher_matrix.spectrum import Float
from kfac_engine.runtime.trace import Trace
from kfac_engine.system import memory_limits

_BYTES = 8
# The matrix, a product that is added to it, its eigenvectors and the work space of LAPACK.
_MATRICES = 5


@dataclass(slots=True)
class ExampleMoments:
    """Sums over examples.

    Attributes:
        gradients: Computes gradients of single examples.
        places: For each layer, the places of its entries among all parameters.
        scratch_bytes: Bound of the memory of the gradients of a tile of examples.
        matrix: ``Σ g gᵀ`` over all parameters, ``(size, size)``; None if it is not measured.
        squares: Number of a layer to ``Σ g²``, packed, for the layers that are measured.
    """

    gradients: LayerGradients
    places: list[Places]
    scratch_bytes: int
    matrix: Float | None = None
    squares: dict[int, Float] = field(default_factory=dict)

    @property
    def active(self) -> bool:
        """Whether anything is measured."""
        return self.matrix is not None or bool(self.squares)

    def add(self, trace: Trace, sources: Iterator[Mapping[str, Array]]) -> None:
        """Add a batch.

        Args:
            trace: The batch.
            sources: The cotangents of each source.
        """
        for cotangents in sources:
            readers = self.gradients.read(trace, [cotangents])
            for number, total in self.squares.items():
                reader = readers[number]
                for tile in reader.tiles(reader.step(self.scratch_bytes, whole=True)):
                    total += (tile.matrices()[:, 0] ** 2).sum(axis=0)
            if self.matrix is not None:
                for rows in whole_rows(readers, self.places, len(self.matrix), self.scratch_bytes):
                    self.matrix += rows[:, 0].T @ rows[:, 0]


def whole_matrix(shapes: Mapping[str, tuple[int, ...]]) -> Float:
    """Return a matrix of zeros over all parameters.

    Args:
        shapes: Parameter name to shape.

    Returns:
        ``(size, size)`` in float64.

    Raises:
        MemoryLimitError: The matrix and its eigenvectors do not fit into the available memory.
    """
    size = sum(map(prod, shapes.values()))
    memory_limits.require_memory(
        _MATRICES * _BYTES * size**2,
        f"structure='full' of {size} parameters",
        "use structure='kron', or fewer parameters by layers='last' or trainable",
    )
    return np.zeros((size, size))
