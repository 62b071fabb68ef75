"""Lists the blocks of a curvature with their parameters and formulas, and decomposes them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod

import numpy as np

from kfac_engine._types import Array
from kfac_engine.analysis.fisher_matrix.blocks import (
    UNUSED,
    Block,
    Float,
    InputMoment,
    ParameterVector,
    Part,
    Places,
    Spectrum,
    eigenbasis,
)
from kfac_engine.analysis.fisher_matrix.options import CurvatureOptions
from kfac_engine.curvature.approximations import row
from kfac_engine.curvature.blocks.base import FisherBlock, uses
from kfac_engine.curvature.factors.base import FisherFactor
from kfac_engine.curvature.factors.eigenbasis import EigenbasisFactor
from kfac_engine.engine.build import Assembly
from kfac_engine.engine.layer_gradients import packed
from kfac_engine.layers.match import LayerMatch


@dataclass(frozen=True, slots=True)
class Decomposer:
    """Converts blocks of an estimator to blocks of a curvature."""

    vector: ParameterVector  # all parameters
    to_numpy: Callable[[Array], Array]  # copies an array of the backend to the host
    separate: bool  # whether the parameters of a block are uncorrelated

    def decompose(
        self, block: FisherBlock, inputs: Float | None = None
    ) -> tuple[Spectrum, InputMoment | None]:
        """Return the eigenvalues and eigenvectors of a block with statistics.

        They are in float64 on the host. The second result is the second moment of the inputs of the
        layer, None if it was not measured. ``inputs`` are the eigenvalues of the input factor, for
        a block whose basis is set. A block whose eigenvalues have no closed form raises an
        UnsupportedError.
        """
        return block.decompose(_Spectra(self, block, inputs))

    def bases(
        self, block: FisherBlock, scale: EigenbasisFactor
    ) -> tuple[Float, tuple[Float, Float]]:
        """Return the eigenvalues of the input factor, and the eigenvectors of both factors."""
        A, G = scale.kronecker_factors
        rows = _rows(A, G.repeats)
        a, left = self.side(A, tuple(part.rows for part in self.parts(block)), rows)
        _, right = self.side(G, (slice(None),))
        assert left is not None  # both factors are dense
        assert right is not None
        return a, (left[0], right[0])

    def places(self, block: FisherBlock) -> Places:
        """Return the place of each entry of a packed vector of a block, ``(g, d_in, d_out)``."""
        return packed(block, tuple(self.vector.places(name) for name in _names(block)))

    def parts(self, block: FisherBlock) -> tuple[Part, ...]:
        """Return the parameters of a block, each with its rows if they are uncorrelated."""
        names = _names(block)
        owners = tuple(self.vector.parameter_of(name) for name in names)
        if not self.separate or len(names) == 1:
            key = names[0] if len(names) == 1 else names
            return (Part(owners, key, slice(None)),)
        if block.packing is not None:  # the bias is the last row
            rows = [slice(0, -1), slice(-1, None)]
        else:
            ends = np.cumsum([0, *(self.vector.places(name).size for name in names)]).tolist()
            rows = [slice(*pair) for pair in pairwise(ends)]
        return tuple(
            Part((owner,), name, row) for owner, name, row in zip(owners, names, rows, strict=True)
        )

    def side(
        self, factor: FisherFactor, parts: tuple[slice, ...], rows: int | None = None
    ) -> tuple[Float, Float | None]:
        """Return eigenvalues ``(g, d)`` and eigenvectors of a factor, None for the identity.

        ``parts`` are rows that are decomposed together. The average is the mean of outer products
        of ``rows`` vectors; None if unknown.
        """
        if factor.is_diagonal:
            return self.read(factor.diagonal())[None].clip(min=0.0), None
        accuracy = float(np.finfo(factor.average.read().dtype).eps)
        return eigenbasis(self.read(factor.matrices()), parts, rows, accuracy)

    def read(self, array: Array) -> Float:
        """Return an array of the backend in float64 on the host."""
        return np.asarray(self.to_numpy(array), np.float64)


@dataclass(frozen=True, slots=True)
class _Spectra:
    """Eigenvalues and eigenvectors of a block of each form."""

    decomposer: Decomposer  # reads the factors
    block: FisherBlock
    inputs: Float | None  # eigenvalues of the input factor, for a block whose basis is set

    def product(
        self, A: FisherFactor, G: FisherFactor, scale: float
    ) -> tuple[Spectrum, InputMoment | None]:
        """Return the spectrum of ``c · A ⊗ G``, and ``A`` if it is the moment of the inputs."""
        measured = A.statistic.moment == "matrix"
        rows = _rows(A, scale) if measured else None
        a, left = self.decomposer.side(A, self._parts, rows)
        g, right = self.decomposer.side(G, (slice(None),))
        spectrum = Spectrum(scale * a[:, :, None] * g[:, None, :], left, right)
        return spectrum, InputMoment(a, scale) if measured and left is not None else None

    def rotated(self, factor: EigenbasisFactor) -> tuple[Spectrum, InputMoment]:
        """Return the spectrum of measured eigenvalues, and the second moment of the inputs."""
        assert factor.bases is not None  # the measurement has set it
        assert self.inputs is not None  # of the basis
        read, bases = self.decomposer.read, factor.bases
        left, right = (read(basis)[None] for basis in (bases.input, bases.output))
        eigenvalues = read(factor.average.read())[None].clip(min=0.0)
        _, G = factor.kronecker_factors
        return Spectrum(eigenvalues, left, right), InputMoment(self.inputs, G.repeats or 1)

    def matrix(self, F: FisherFactor) -> tuple[Spectrum, None]:
        """Return the spectrum of a diagonal, or of one dense matrix."""
        read = self.decomposer.read
        if F.is_diagonal:
            shape = self.decomposer.places(self.block).shape
            return Spectrum(read(F.diagonal()).reshape(shape).clip(min=0.0)), None
        values, vectors = eigenbasis(read(F.matrices()), self._parts)
        return Spectrum(values[:, :, None], vectors), None

    @property
    def _parts(self) -> tuple[slice, ...]:
        return tuple(part.rows for part in self.decomposer.parts(self.block))


def _rows(factor: FisherFactor, repeats: float | None) -> int:
    """Return the number of vectors whose outer products a factor averages."""
    return round(factor.average.weight * (repeats or 1))


def _names(block: FisherBlock) -> tuple[str, ...]:
    """Return the names of the parameters of a block, as the block calls them."""
    assert block.params is not None, "a registered block has parameters"
    return uses(block.params)


@dataclass(frozen=True)
class Layout:
    """The division of the parameters of a model into blocks."""

    assembly: Assembly  # the model with its layers
    options: CurvatureOptions  # what is measured

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
        return tuple((layer, blocks[layer.key]) for layer in self.assembly.discovery.layers)

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
