"""The memory of the dense factors of a measurement, which is checked before the data are read."""

from collections.abc import Iterable
from math import prod

from kfac_engine.analysis.fisher_matrix.layout import Layout
from kfac_engine.curvature.blocks.base import FisherBlock, uses
from kfac_engine.curvature.factors.base import FisherFactor
from kfac_engine.curvature.factors.diagonal import DiagonalFactor
from kfac_engine.system import memory_limits

# Averages have float32 at least, eigenvectors float64.
_AVERAGE_BYTES, _BYTES = 4, 8
# Matrices in float64 that the decomposition of a factor needs besides its eigenvectors.
_MATRICES = 3


def require_memory(layout: Layout, factors: Iterable[FisherFactor]) -> int:
    """Raise an error if dense factors and their eigenvectors do not fit into the memory.

    Args:
        layout: The model with its layers.
        factors: The factors that are measured.

    Returns:
        Bytes of the averages, which are allocated with the first batch.

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
        return 0
    largest = max(entries, key=entries.__getitem__)
    total = sum(entries.values())
    need = (_AVERAGE_BYTES + _BYTES) * total + _MATRICES * _BYTES * entries[largest]
    memory_limits.require_memory(
        need,
        f"structure='{layout.options.structure}', with matrices and their eigenvectors, the "
        f"largest for {', '.join(uses(owners[largest].params or ()))},",
        "use structure='diagonal', or exclude these parameters by freeze",
    )
    return _AVERAGE_BYTES * total
