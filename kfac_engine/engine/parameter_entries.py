"""Describes in text which entries of a parameter each layer uses."""

from collections.abc import Mapping
from math import prod

from kfac_engine._types import Array, Params
from kfac_engine.curvature.blocks.base import FisherBlock
from kfac_engine.layers.discover import Discovery
from kfac_engine.layers.match import LayerMatch
from kfac_engine.layers.parameter_slices import ParameterSlice, Piece, describe_part


class ParameterEntries:
    """The parameters of layers, with the entries that each layer uses.

    Attributes:
        layers: The layers, in the order of the graph.
        shapes: Shapes by parameter name.
    """

    def __init__(self, discovery: Discovery, parameters: Mapping[str, Array]) -> None:
        self.layers = discovery.layers
        self.shapes = {name: value.shape for name, value in parameters.items()}
        self._parts = discovery.parts
        self._owners = {
            part.name: (name, part) for name, parts in self._parts.items() for part in parts
        }

    def names(self, layer: LayerMatch) -> tuple[str, ...]:
        """Return the names that the parameters of a layer have in the file."""
        return tuple(self._owners[name][0] for name in layer.parameters)

    def extents(self, layer: LayerMatch) -> tuple[str, ...]:
        """Return the entries of each parameter that a layer uses; empty texts for all entries."""
        return tuple(self._extent(*self._owners[name]) for name in layer.parameters)

    def pieces(self, blocks: Mapping[Params, FisherBlock]) -> dict[str, tuple[Piece, ...]]:
        """Return the pieces of each parameter, in the order of its layers.

        A weight has a piece for each part of the outputs that the graph reads apart. ``blocks`` are
        the blocks of the layers, by their parameters.
        """
        pieces: dict[str, tuple[Piece, ...]] = {}
        for layer in self.layers:
            weight, *vectors = layer.parameters
            name, part = self._owners[weight]
            piece = Piece(part, layer.kind, blocks[layer.key].packing, weight)
            pieces[weight] = piece.divided(self.shapes[name], layer.output_parts)
            pieces |= {vector: (Piece(self._owners[vector][1], layer.kind),) for vector in vectors}
        return {
            name: tuple(piece for part in parts for piece in pieces[part.name])
            for name, parts in self._parts.items()
        }

    def _extent(self, name: str, part: ParameterSlice) -> str:
        shape = self.shapes[name]
        whole = part.index is None or part.index.size == prod(shape)
        return "" if whole or part.index is None else describe_part(part.index, shape)
