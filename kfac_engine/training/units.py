"""Divides the parameters into the units of matrix optimizers: layer weights and the rest."""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace

from kfac_engine._types import Array
from kfac_engine.engine.engine import Engine
from kfac_engine.layers import parameter_slices
from kfac_engine.layers.parameter_slices import ParameterSlice, Piece
from kfac_engine.training.vectors import Vector


class Units:
    """A division of parameters into units.

    A parameter is one unit, unless a file joins a weight with other weights or with vectors in it:
    then the entries of each layer are a unit, which has the name of the value that the layer reads.

    Args:
        engine: The engine.
        names: The parameters.
        is_matrix: Whether the optimizer treats a weight as matrices.

    Attributes:
        weights: Weights by unit, for the units that are matrices.
        divided: Whether a parameter has several units.
    """

    def __init__(
        self, engine: Engine, names: Sequence[str], is_matrix: Callable[[Piece], bool]
    ) -> None:
        self.weights: dict[str, Piece] = {}
        self._parts: dict[str, tuple[ParameterSlice, ...]] = {}
        self.divided = False
        trained = frozenset(names)
        for name, pieces in engine.pieces.items():
            weights = [piece for piece in pieces if piece.packing is not None and is_matrix(piece)]
            divided = len(pieces) > 1 and bool(weights)
            whole = (ParameterSlice(name),)
            if name in trained:
                self._parts[name] = tuple(piece.part for piece in pieces) if divided else whole
                self.divided |= divided
                for piece in weights:
                    unit = piece.part.name if divided else name
                    part = ParameterSlice(unit) if divided else piece.part
                    self.weights[unit] = replace(piece, part=part)

    def is_whole(self, name: str) -> bool:
        """Return whether a parameter is one unit, with all its entries in their order."""
        piece = self.weights.get(name)
        whole = parameter_slices.is_whole(self._parts[name])
        return whole and (piece is None or piece.part.index is None)

    def stacked(
        self, members: Mapping[str, Sequence[str]], weights: Mapping[str, Piece]
    ) -> "Units":
        """Return the units of stacks in place of parameters that are whole.

        ``members`` are the parameters of each stack, and ``weights`` the stacks that are matrices.
        """
        known, stacked = {name for names in members.values() for name in names}, copy(self)
        left = {name: piece for name, piece in self.weights.items() if name not in known}
        parts = {name: parts for name, parts in self._parts.items() if name not in known}
        stacked.weights = {**left, **weights}
        stacked._parts = {**parts, **{stack: (ParameterSlice(stack),) for stack in members}}
        return stacked

    def split(self, arrays: Vector) -> dict[str, Array]:
        """Return arrays by unit from arrays by parameter; other parameters are left out."""
        if not self.divided and arrays.keys() <= self._parts.keys():
            return dict(arrays)
        known = {name: array for name, array in arrays.items() if name in self._parts}
        return parameter_slices.split(self._parts, known) if self.divided else known

    def join(self, units: Vector, like: Vector) -> dict[str, Array]:
        """Return arrays by parameter; entries that belong to no unit are as in ``like``."""
        if not self.divided:
            return dict(zip(like, map(units.__getitem__, like), strict=True))
        return {
            name: parameter_slices.join(self._parts[name], units, array, rest=1.0)
            for name, array in like.items()
        }
