"""Eigenvalues and eigenvectors of the blocks of a Fisher estimator."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from kfac_engine._types import Array
from kfac_engine.analysis.fisher_matrix.blocks import InputMoment, Part
from kfac_engine.analysis.fisher_matrix.packed import packed
from kfac_engine.analysis.fisher_matrix.parameter_vector import ParameterVector, Places
from kfac_engine.analysis.fisher_matrix.spectrum import Float, Spectrum, eigenbasis
from kfac_engine.curvature.blocks.base import FisherBlock, uses
from kfac_engine.curvature.blocks.eigenbasis import EigenbasisFB
from kfac_engine.curvature.blocks.kronecker import KroneckerProductFB
from kfac_engine.curvature.blocks.series import SeriesFB
from kfac_engine.curvature.blocks.single import SingleFactorFB
from kfac_engine.curvature.factors.base import FisherFactor
from kfac_engine.curvature.factors.diagonal import DiagonalFactor
from kfac_engine.curvature.factors.eigenbasis import EigenbasisFactor
from kfac_engine.curvature.factors.stacked import GroupedMoment, StackedSquareFactor
from kfac_engine.curvature.factors.statistics import KroneckerMoment
from kfac_engine.errors import UnsupportedError

# Statistics whose matrix is the mean of the outer products of inputs, and nothing else.
_INPUT_MOMENTS = (KroneckerMoment, GroupedMoment)


@dataclass(frozen=True, slots=True)
class Decomposer:
    """Converts blocks of an estimator to blocks of a curvature.

    Attributes:
        vector: All parameters.
        to_numpy: Copies an array of the backend to the host.
        separate: Whether the parameters of a block are uncorrelated.
    """

    vector: ParameterVector
    to_numpy: Callable[[Array], Array]
    separate: bool

    def decompose(
        self, block: FisherBlock, inputs: Float | None = None
    ) -> tuple[Spectrum, InputMoment | None]:
        """Return the eigenvalues and eigenvectors of a block.

        Args:
            block: A block with statistics.
            inputs: Eigenvalues of the input factor, for a block whose basis is set.

        Returns:
            In float64 on the host; and the second moment of the inputs of the layer, None if it was
            not measured.

        Raises:
            UnsupportedError: The block is a sum of Kronecker products.
        """
        if isinstance(block, SeriesFB):
            raise UnsupportedError(
                f"the block of {block.params} is a sum over lags, which has no eigenvalues in "
                f"closed form; use approximation 'kron_indep'."
            )
        if isinstance(block, KroneckerProductFB):
            return self._kronecker(block, self.parts(block))
        if isinstance(block, EigenbasisFB):
            assert inputs is not None  # of the basis
            return self._eigenbasis(block, inputs)
        assert isinstance(block, SingleFactorFB)  # the other branch of the class tree
        return self._single(block.factor, self.places(block), self.parts(block)), None

    def bases(self, block: EigenbasisFB) -> tuple[Float, tuple[Float, Float]]:
        """Return the eigenvalues of the input factor, and the eigenvectors of both factors."""
        A, G, _ = block.factors
        rows = _rows(A, G.repeats)
        a, left = self._side(A, tuple(part.rows for part in self.parts(block)), rows)
        _, right = self._side(G, (slice(None),))
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

    # -- private ----------------------------------------------------------------------------------

    def _kronecker(
        self, block: KroneckerProductFB, parts: tuple[Part, ...]
    ) -> tuple[Spectrum, InputMoment | None]:
        """Return the spectrum of ``c · A ⊗ G``, and ``A`` if it is the moment of the inputs."""
        A, G = block.factors
        measured = type(A.statistic) in _INPUT_MOMENTS
        rows = _rows(A, block.repeats) if measured else None
        a, left = self._side(A, tuple(part.rows for part in parts), rows)
        g, right = self._side(G, (slice(None),))
        spectrum = Spectrum(block.repeats * a[:, :, None] * g[:, None, :], left, right)
        return spectrum, InputMoment(a, block.repeats) if measured and left is not None else None

    def _eigenbasis(self, block: EigenbasisFB, a: Float) -> tuple[Spectrum, InputMoment]:
        """Return the spectrum of measured eigenvalues, and the second moment of the inputs."""
        _, G, scale = block.factors
        assert isinstance(scale, EigenbasisFactor)
        assert scale.bases is not None  # the measurement has set it
        left, right = (self._read(basis)[None] for basis in (scale.bases.input, scale.bases.output))
        eigenvalues = self._read(scale.average.read())[None].clip(min=0.0)
        return Spectrum(eigenvalues, left, right), InputMoment(a, G.repeats or 1)

    def _side(
        self, factor: FisherFactor, parts: tuple[slice, ...], rows: int | None = None
    ) -> tuple[Float, Float | None]:
        """Return eigenvalues ``(g, d)`` and eigenvectors of a factor, None for the identity."""
        average = factor.average.read()
        if isinstance(factor, DiagonalFactor):
            return self._read(factor.diagonal())[None].clip(min=0.0), None
        stack = isinstance(factor, StackedSquareFactor)
        matrices = self._read(average) if stack else self._read(factor.get_cov())[None]
        return eigenbasis(matrices, parts, rows, float(np.finfo(average.dtype).eps))

    def _single(self, factor: FisherFactor, places: Places, parts: tuple[Part, ...]) -> Spectrum:
        """Return the spectrum of a diagonal, or of one dense matrix."""
        average = self._read(factor.average.read())
        if isinstance(factor, DiagonalFactor):
            return Spectrum(average.reshape(places.shape).clip(min=0.0))
        values, vectors = eigenbasis(average[None], tuple(part.rows for part in parts))
        return Spectrum(values[:, :, None], vectors)

    def _read(self, array: Array) -> Float:
        return np.asarray(self.to_numpy(array), np.float64)


def _rows(factor: FisherFactor, repeats: float | None) -> int:
    """Return the number of vectors whose outer products the average of a factor is the mean of."""
    return round(factor.average.weight * (repeats or 1))


def _names(block: FisherBlock) -> tuple[str, ...]:
    """Return the names of the parameters of a block, as the block calls them."""
    assert block.params is not None, "a registered block has parameters"
    return uses(block.params)
