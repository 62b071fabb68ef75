"""Finds weights with equal values that an exporter wrote as two constants.

An exporter may write an embedding table and the transposed output matrix as two constants. The file
does not state whether they must remain equal, so the user decides.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kfac_engine._types import Array
from kfac_engine.errors import InputError
from kfac_engine.graph.structure import Graph, Node


@dataclass(frozen=True, slots=True)
class Tie:
    """A weight and its copy.

    Attributes:
        first: Name of the weight that is first in the file.
        copy: Name of the later weight with equal values.
        transposed: Whether the copy is the transpose of the weight.
    """

    first: str
    copy: str
    transposed: bool = False

    def as_copy(self, array: Array) -> Array:
        """Convert an array from the layout of the weight to the layout of the copy, or back."""
        return array.T if self.transposed else array


def find_ties(constants: Mapping[str, Array], names: Iterable[str]) -> tuple[Tie, ...]:
    """Return a tie for each weight that equals an earlier weight or its transpose.

    Only weights with at least two axes are tied. Arrays of one repeated number are not tied,
    because different weights are initialized with ones or zeros.
    """
    alike: dict[object, list[str]] = {}
    ties: list[Tie] = []
    for name in names:
        array = constants[name]
        if array.ndim < 2 or _is_one_number(array):
            continue
        # Shape, first entry and last entry distinguish nearly all arrays without a full comparison.
        ends = array[(0,) * array.ndim].tobytes(), array[(-1,) * array.ndim].tobytes()
        firsts = alike.setdefault((array.dtype, tuple(sorted(array.shape)), ends), [])
        candidates = (tie for first in firsts for tie in _ties_of(constants, first, name))
        tie = next(candidates, None)
        ties += [tie] if tie else []
        if not tie:
            firsts.append(name)
    return tuple(ties)


def tied(graph: Graph, ties: Sequence[Tie]) -> Graph:
    """Return a graph in which every copy is computed from its original weight."""
    copies = {tie.copy for tie in ties}
    views = tuple(
        Node(
            "Transpose" if tie.transposed else "Identity",
            (tie.first,),
            (tie.copy,),
            name=f"tie {tie.copy}",
        )
        for tie in ties
    )
    constants = {name: array for name, array in graph.constants.items() if name not in copies}
    return replace(graph, nodes=(*views, *graph.nodes), constants=constants)


def spread(ties: Iterable[Tie], values: Mapping[str, Array]) -> dict[str, Array]:
    """Return the arrays together with arrays for the copies, in the layout of the copies."""
    copies = {tie.copy: tie.as_copy(values[tie.first]) for tie in ties if tie.first in values}
    return {**values, **copies}


def gathered(ties: Iterable[Tie], values: Mapping[str, Array]) -> dict[str, Array]:
    """Return arrays of the original weights in place of the arrays of copies.

    An array for a weight or for one of its copies suffices. Different arrays for a weight and its
    copy raise InputError.
    """
    if not isinstance(values, dict | Mapping):
        raise InputError(
            f"pass arrays by parameter, as {{name: array}}, got {type(values).__name__}."
        )
    merged = dict(values)
    for tie in ties:
        if tie.copy in merged:
            array = tie.as_copy(merged.pop(tie.copy))
            first = merged.setdefault(tie.first, array)
            if first.shape != array.shape or not bool((first == array).all()):
                raise InputError(
                    f"'{tie.copy}' is tied to '{tie.first}' and cannot have another value; pass "
                    f"one of them, or omit tie_weights."
                )
    return merged


def _ties_of(constants: Mapping[str, Array], first: str, name: str) -> Iterable[Tie]:
    a, b = constants[first], constants[name]
    if a.shape == b.shape and np.array_equal(a, b):
        yield Tie(first, name)
    elif a.ndim == b.ndim == 2 and a.shape == b.shape[::-1] and np.array_equal(a, b.T):
        yield Tie(first, name, transposed=True)


def _is_one_number(array: Array) -> bool:
    return array.size == 0 or bool((array == array.flat[0]).all())
