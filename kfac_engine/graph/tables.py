"""Constants that were computed, not trained: told from their values.

Exporters store what a model computes once: sines and cosines of positions, their frequencies,
masks. Training leaves no weight in such a form.
"""

from collections.abc import Mapping

import numpy as np

from kfac_engine._types import Array

# Fewer numbers may lie so by chance.
_FEWEST = 4
# Tables are rounded to float16 or bfloat16 before they are stored, at worst.
_ROUNDING = 1e-2


def table_reason(constants: Mapping[str, Array], name: str) -> str | None:
    """What kind of table a float constant is; None for what may be a weight.

    Args:
        constants: All constants of the graph.
        name: Of one of them.

    Returns:
        Words that can follow "it is".
    """
    array = constants[name]
    if array.size < _FEWEST:
        return None
    if _is_geometric(array):
        return "a geometric series, as of frequencies or slopes"
    if array.ndim < 2 or not _is_bounded(array):
        return None
    if _is_circular(array[..., ::2], array[..., 1::2]) or _is_circular(*_halves(array)):
        return "a table of sines and cosines"
    for other, partner in constants.items():
        if other != name and partner.shape == array.shape and _is_circular(array, partner):
            return f"a table of sines and cosines, with '{other}'"
    return None


def is_mask(array: Array) -> bool:
    """Whether an array with two axes or more holds zeros and ones, both, and nothing else."""
    several = array.ndim >= 2 and array.size >= _FEWEST
    return several and _is_binary(array) and bool(array.any()) and not bool(array.all())


def is_count(array: Array) -> bool:
    """Whether an array holds positive whole numbers, and more than ones."""
    return bool((array >= 1).all() and (array == np.round(array)).all() and (array > 1).any())


def _is_binary(array: Array) -> bool:
    head = array.reshape(-1)[:_FEWEST]  # nearly all weights end here
    return bool(np.isin(head, (0, 1)).all()) and bool(np.isin(array, (0, 1)).all())


def _is_geometric(array: Array) -> bool:
    """Whether the numbers lie along one axis, are positive and have one ratio, which is not 1."""
    if max(array.shape) != array.size:
        return False
    values = array.reshape(-1).astype(np.float64)
    if not (values > 0).all():
        return False
    steps = np.diff(np.log(values))
    return bool(abs(steps[0]) > _ROUNDING and np.ptp(steps) < 1e-3 * abs(steps[0]))


def _is_bounded(array: Array) -> bool:
    return bool((np.abs(array[(0,) * (array.ndim - 1)]) <= 1 + _ROUNDING).all())


def _halves(array: Array) -> tuple[Array, Array]:
    middle = array.shape[-1] // 2
    return array[..., :middle], array[..., middle:]


def _is_circular(a: Array, b: Array) -> bool:
    """Whether ``a² + b² = 1`` everywhere, other than by zeros and ones."""
    if a.shape != b.shape or a.dtype.kind != "f" or b.dtype.kind != "f" or a.size < _FEWEST:
        return False
    last = (-1,) * (a.ndim - 1)  # the last row: that of position 0 is zeros and ones
    for part in (last, ...):
        x, y = (side[part].astype(np.float64) for side in (a, b))
        if not (np.abs(x**2 + y**2 - 1) < _ROUNDING).all():
            return False
    return not bool(np.isin(x, (-1, 0, 1)).all())
