"""Pieces of parameters: the entries that one layer uses, and the matrices of a weight among them.

The axes of an array in a file have no meaning by themselves: a weight may be transposed, reshaped
or joined with other weights. The layer that reads the entries knows which of them compute one
output. A formula that treats weights as matrices asks their pieces.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kfac_engine._types import Array
from kfac_engine.backend.namespace import array_module
from kfac_engine.layers.grouped import StackedDensePacking
from kfac_engine.layers.packing import Packing
from kfac_engine.layers.parameter_slices import ParameterSlice, all_entries


@dataclass(frozen=True, slots=True)
class Piece:
    """The entries of a parameter that one layer uses; for a weight, only one part of its outputs.

    Attributes:
        part: The entries.
        kind: Kind of the layer; ``"generic"`` without a layer.
        packing: Packing of the layer, for its weight; None for biases, scales and parameters
            without a layer, which are vectors.
        weight: Name of the weight of the layer; empty for vectors.
    """

    part: ParameterSlice
    kind: str
    packing: Packing | None = None
    weight: str = ""

    def matrices(self, array: Array) -> Array:
        """Return the matrices of the weight in ``array``, which has the shape of the parameter.

        The result is ``(groups, inputs, outputs)``, a new array: a matrix for each map from inputs
        to outputs, such as a group of a convolution or an expert. The inputs of a convolution,
        transposed or not, are ordered by tap, then by channel; the outputs are channels.
        """
        assert self.packing is not None, "vectors have no matrices"
        return self.packing.matrices(self.part.read(array), array_module(array))

    def divided(self, shape: tuple[int, ...], columns: Sequence[Array]) -> tuple["Piece", ...]:
        """Divide the matrices of the weight, a parameter of ``shape``, by columns.

        ``columns`` are the columns of each new piece; without columns there is one piece. The
        arrays of the new pieces are their matrices.
        """
        if self.packing is None or not columns:
            return (self,)
        matrices = self.matrices(all_entries(shape))
        packing = StackedDensePacking("IO", has_bias=False)
        return tuple(
            Piece(
                ParameterSlice(f"{self.part.name} part {i}", matrices[..., c]),
                self.kind,
                packing,
                self.weight,
            )
            for i, c in enumerate(columns)
        )

    def array(self, matrices: Array, like: Array) -> Array:
        """Return an array in the shape and type of ``like``; the inverse of ``matrices``.

        Entries of the parameter that are not in the piece are zero.
        """
        assert self.packing is not None, "vectors have no matrices"
        weight = self.packing.from_matrices(matrices, self.part.read(like))
        if self.part.index is None:
            return weight
        whole: Array = array_module(like).zeros(like.size, like.dtype)
        self.part.write(whole, weight)
        return whole.reshape(like.shape)
