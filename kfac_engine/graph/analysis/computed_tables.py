"""Recognizes constants that a formula computed, by their values.

Exporters store values that a model computes once: sines and cosines of positions, frequencies,
masks. Trained weights do not have such values.
"""

from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import product
from typing import TypeAlias

import numpy as np

from kfac_engine._types import Array

# Least number of entries of a table, because fewer entries may match by chance.
_FEWEST = 4
# Files may store tables in float16 or bfloat16.
_ROUNDING = 1e-2
# The sines and cosines of position 0 and of quarter turns, which do not prove a table.
_TRIVIAL = (-1, 0, 1)

# Rounded squares of a few entries. If the squares of two arrays sum to one, their cells match.
_Cells: TypeAlias = tuple[float, ...]


class Tables:
    """Recognizes computed tables among all constants of a graph."""

    def __init__(self, constants: Mapping[str, Array]) -> None:
        self._constants = constants

    def reason(self, name: str) -> str | None:
        """Return the kind of table of a float constant; None if it may be a weight.

        The kind is a phrase that can follow "it is".
        """
        array = self._constants[name]
        if array.size < _FEWEST:
            return None
        if _is_geometric(array):
            return "a geometric series, as of frequencies or slopes"
        if array.ndim < 2 or not _is_bounded(array):
            return None
        if _is_circular(array[..., ::2], array[..., 1::2]) or _is_circular(*_halves(array)):
            return "a table of sines and cosines"
        for other in self._candidates(array):
            if other != name and _is_circular(array, self._constants[other]):
                return f"a table of sines and cosines, with '{other}'"
        return None

    def _candidates(self, array: Array) -> Iterable[str]:
        """Return constants ``b``, in file order, for which ``array² + b² = 1`` may hold."""
        if not _may_be_circular(array):
            return ()
        rest = 1 - _sample_squares(array)
        ends = zip(_cells(rest - _ROUNDING), _cells(rest + _ROUNDING), strict=True)
        cells = product(*(dict.fromkeys(pair) for pair in ends))
        matches = (entry for cell in cells for entry in self._alike.get((array.shape, cell), ()))
        return [name for _, name in sorted(matches)]

    @cached_property
    def _alike(self) -> Mapping[tuple[tuple[int, ...], _Cells], list[tuple[int, str]]]:
        """Names and positions of constants by shape and cells, so that few pairs are compared."""
        alike: dict[tuple[tuple[int, ...], _Cells], list[tuple[int, str]]] = {}
        for place, (name, array) in enumerate(self._constants.items()):
            if _may_be_circular(array):
                key = array.shape, _cells(_sample_squares(array))
                alike.setdefault(key, []).append((place, name))
        return alike


def is_mask(array: Array) -> bool:
    """Return whether an array of at least two axes contains zeros and ones and nothing else."""
    several = array.ndim >= 2 and array.size >= _FEWEST
    return several and _is_binary(array) and bool(array.any()) and not bool(array.all())


def holds_count(array: Array) -> bool:
    """Return whether an array consists of positive integers that are not all one."""
    return bool((array >= 1).all() and (array == np.round(array)).all() and (array > 1).any())


def _is_binary(array: Array) -> bool:
    head = array.reshape(-1)[:_FEWEST]  # the first entries suffice for nearly all weights
    return bool(np.isin(head, (0, 1)).all()) and bool(np.isin(array, (0, 1)).all())


def _is_geometric(array: Array) -> bool:
    """Return whether an array is a positive geometric series along one axis, with a ratio ≠ 1."""
    if max(array.shape) != array.size:
        return False
    values = array.reshape(-1).astype(np.float64)
    if not ((values > 0) & np.isfinite(values)).all():
        return False
    steps = np.diff(np.log(values))
    return bool(abs(steps[0]) > _ROUNDING and np.ptp(steps) < 1e-3 * abs(steps[0]))


def _is_bounded(array: Array) -> bool:
    return bool((np.abs(array[(0,) * (array.ndim - 1)]) <= 1 + _ROUNDING).all())


def _halves(array: Array) -> tuple[Array, Array]:
    middle = array.shape[-1] // 2
    return array[..., :middle], array[..., middle:]


def _may_be_circular(array: Array) -> bool:
    """Return whether a float array has entries other than -1, 0 and 1."""
    if array.dtype.kind != "f" or array.ndim < 2 or array.size < _FEWEST:
        return False
    return not (np.isin(_sample(array), _TRIVIAL).all() and np.isin(array, _TRIVIAL).all())


def _sample(array: Array) -> Array:
    return array.flat[np.linspace(0, array.size - 1, _FEWEST, dtype=np.intp)].astype(np.float64)


def _sample_squares(array: Array) -> Array:
    with np.errstate(over="ignore"):
        return _sample(array) ** 2


def _cells(squares: Array) -> _Cells:
    """Round squares to cells as wide as the tolerance, so that a match is in at most two cells."""
    with np.errstate(invalid="ignore"):  # an infinite entry matches no table
        return tuple((squares // (2 * _ROUNDING)).tolist())


def _is_circular(a: Array, b: Array) -> bool:
    """Return whether ``a² + b² = 1`` everywhere, with entries other than -1, 0 and 1."""
    if a.shape != b.shape or a.dtype.kind != "f" or b.dtype.kind != "f" or a.size < _FEWEST:
        return False
    last = (-1,) * (a.ndim - 1)  # the last row, because position 0 has zeros and ones
    for part in (last, ...):
        x, y = (array[part].astype(np.float64) for array in (a, b))
        if not (np.abs(x**2 + y**2 - 1) < _ROUNDING).all():
            return False
    return not bool(np.isin(x, _TRIVIAL).all())
