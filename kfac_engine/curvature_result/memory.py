"""The memory of the dense factors of a measurement, which is checked before the data are read."""

from collections.abc import Iterable
from math import prod

from kfac_engine.curvature.blocks.base import FisherBlock, uses
from kfac_engine.curvature.factors.base import FisherFactor
from kfac_engine.curvature.factors.diagonal import DiagonalFactor
from kfac_engine.curvature_result.layout import Layout
from kfac_engine.errors import MemoryLimitError
from kfac_engine.system.memory_limits import available_memory

# Averages have float32 at least, eigenvectors float64.
_AVERAGE_BYTES, _BYTES = 4, 8
# Matrices in float64 that the decomposition of a factor needs besides its eigenvectors.
_MATRICES = 3


def require_memory(layout: Layout, factors: Iterable[FisherFactor]) -> None:
    """Raise an error if dense factors and their eigenvectors do not fit into the memory.

    Args:
        layout: The model with its layers.
        factors: The factors that are measured.

    Raises:
        MemoryLimitError: They need more than the available memory.
    """
    wanted, entries = set(factors), dict[FisherFactor, int]()
    owners: dict[FisherFactor, FisherBlock] = {}
    for layer, block in layout.layers:
        shapes = [layout.vector.places(name).shape for name in layer.parameters]
        for factor, shape in zip(block.factors, block.factor_shapes(shapes), strict=True):
            if factor in wanted and not isinstance(factor, DiagonalFactor):
                entries[factor], owners[factor] = prod(shape), block
    if not entries:
        return
    largest = max(entries, key=entries.__getitem__)
    total = sum(entries.values())
    need = (_AVERAGE_BYTES + _BYTES) * total + _MATRICES * _BYTES * entries[largest]
    free = available_memory()
    if need > free:
        raise MemoryLimitError(
            f"structure='{layout.options.structure}' needs {need / 2**30:.3g} GiB for matrices and "
            f"their eigenvectors, the largest for {', '.join(uses(owners[largest].params or ()))}, "
            f"but {free / 2**30:.3g} GiB are available; use structure='diagonal', or exclude these "
            f"parameters by freeze."
        )
