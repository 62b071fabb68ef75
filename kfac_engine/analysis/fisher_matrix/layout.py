"""The blocks of a curvature before they have eigenvalues: parameters, places and formulas."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from kfac_engine.analysis.fisher_matrix.blocks import UNUSED, Block, Part
from kfac_engine.analysis.fisher_matrix.decomposition import Decomposer
from kfac_engine.analysis.fisher_matrix.options import CurvatureOptions
from kfac_engine.analysis.fisher_matrix.parameter_vector import ParameterVector, Places
from kfac_engine.analysis.fisher_matrix.spectrum import Spectrum
from kfac_engine.curvature.approximations import row
from kfac_engine.curvature.blocks.base import FisherBlock
from kfac_engine.engine.build import Assembly
from kfac_engine.layers.match import LayerMatch


@dataclass(frozen=True)
class Layout:
    """The division of the parameters of a model into blocks.

    Attributes:
        assembly: The model with its layers.
        options: What is measured.
    """

    assembly: Assembly
    options: CurvatureOptions

    @cached_property
    def vector(self) -> ParameterVector:
        """All parameters."""
        shapes = {name: value.shape for name, value in self.assembly.model.parameters.items()}
        return ParameterVector(shapes, self.assembly.discovery.parts)

    @cached_property
    def decomposer(self) -> Decomposer:
        """Converts blocks of an estimator."""
        to_numpy = self.assembly.collection.backend.to_numpy
        return Decomposer(self.vector, to_numpy, self.options.biases == "separate")

    @property
    def layers(self) -> tuple[tuple[LayerMatch, FisherBlock], ...]:
        """Each layer with its block."""
        blocks = self.assembly.collection.fisher_blocks
        return tuple(
            (layer, blocks[layer.parameters if len(layer.parameters) > 1 else layer.parameters[0]])
            for layer in self.assembly.discovery.layers
        )

    @cached_property
    def weights(self) -> tuple[Places, ...]:
        """The places of the weight of each layer, ``(groups, inputs, outputs)``: its matrices."""
        return tuple(
            block.packing.matrices(self.vector.places(layer.parameters[0]), np)
            for layer, block in self.layers
            if block.packing is not None
        )

    @cached_property
    def frames(self) -> tuple[Block, ...]:
        """All blocks without eigenvalues; they cover every entry of every parameter once.

        Entries that the loss does not depend on are in blocks of zeros, the last ones. The
        structure ``"full"`` has one block.
        """
        names = tuple(self.vector.shapes)
        if self.options.structure == "full":
            key = names if len(names) > 1 else names[0]
            places = np.arange(self.vector.size, dtype=np.intp).reshape(1, -1, 1)
            return (_frame((Part(names, key, slice(None)),), places, "F"),)
        free, frames = np.ones(self.vector.size, bool), []
        for layer, block in self.layers:
            parts, places = self.decomposer.parts(block), self.decomposer.places(block)
            free[places] = False
            frames.append(_frame(parts, places, self._formula(layer, block)))
        return (*frames, *self._unused(free))

    def _formula(self, layer: LayerMatch, block: FisherBlock) -> str:
        assert block.params is not None, "a registered block has parameters"
        approximation = self.assembly.collection.approximation_of(block.params)
        return row(layer.kind, approximation).formula

    def _unused(self, free: np.ndarray) -> Iterator[Block]:
        """Yield a block for the free entries of each parameter."""
        for name, start in self.vector.starts.items():
            places = start + np.flatnonzero(free[start : start + prod(self.vector.shapes[name])])
            if places.size:
                part = Part((name,), f"{name} (unused entries)", slice(None))
                yield _frame((part,), places.reshape(1, -1, 1), UNUSED)


def _frame(parts: tuple[Part, ...], places: Places, formula: str) -> Block:
    return Block(parts, places, Spectrum(np.broadcast_to(0.0, places.shape)), formula)
