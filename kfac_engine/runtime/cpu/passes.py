"""The table of graph passes, which reduce the time or the memory of a session.

A model runs any subset of the passes, with the same results. A pass that saves time must save 5 %
of a step; docs/performance.md lists the measured ratios.
"""

from collections.abc import Sequence
from typing import Final

from kfac_engine.arguments import texts
from kfac_engine.registry import Registry

BLOCKED_LAYOUT: Final = "blocked_layout"
FUSED_TRANSPOSES: Final = "fused_transposes"
WEIGHT_GRADIENTS: Final = "weight_gradients"

# Map from the name of a pass to its purpose.
PASSES = Registry(
    "graph pass",
    {
        BLOCKED_LAYOUT: "convolutions on images in ONNX Runtime's blocked layout NCHWc",
        FUSED_TRANSPOSES: "transposes within the products that read them",
        WEIGHT_GRADIENTS: "gradients of convolution kernels by BLAS, outside ONNX Runtime",
    },
)


def chosen_passes(names: Sequence[str] | None) -> frozenset[str]:
    """Return the checked names of the passes that a model runs.

    Args:
        names: Names from ``PASSES``; None for all of them, an empty list for none.

    Returns:
        Names of the passes.

    Raises:
        InputError: ``names`` is not a list of strings.
        UnknownNameError: A name is not in the table.
    """
    if names is None:
        return frozenset(PASSES)
    texts("graph_passes", names, "['blocked_layout']")
    for name in names:
        PASSES[name]
    return frozenset(names)
