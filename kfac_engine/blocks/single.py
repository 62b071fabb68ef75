"""Blocks with a single factor: the full matrix of a set of parameters, or its diagonal."""

from collections.abc import Sequence
from math import prod

from kfac_engine._types import Array, Vector
from kfac_engine.blocks.base import (
    FactorOwner,
    FisherBlock,
    GradsList,
    TowerNames,
    Towers,
    parts,
    uses,
)
from kfac_engine.errors import InputError, NotReadyError, RegistrationError
from kfac_engine.factors.base import FisherFactor
from kfac_engine.factors.dense import DenseSquareMatrixFactor
from kfac_engine.factors.diagonal import DiagonalFactor
from kfac_engine.factors.statistics import GradientOuter, GradientSquare, LayerSquare
from kfac_engine.layers.forms import LayerForm


class SingleFactorFB(FisherBlock):
    """A block that is one matrix over the concatenated parameters, damped by λ."""

    def __init__(self, collection: FactorOwner) -> None:
        super().__init__(collection)
        self._factor: FisherFactor | None = None

    @property
    def factor(self) -> FisherFactor:
        """The matrix.

        Raises:
            NotReadyError: The factors were not instantiated.
        """
        if self._factor is None:
            raise NotReadyError(f"call instantiate_factors of the block of {self.params} first.")
        return self._factor

    @property
    def factors(self) -> tuple[FisherFactor, ...]:
        return (self.factor,)

    def register_matpower(self, exp: float) -> None:
        self.factor.register_matpower(exp, self._current_damping)

    def register_cholesky(self) -> None:
        self.factor.register_cholesky(self._current_damping)

    def register_cholesky_inverse(self) -> None:
        self.factor.register_cholesky_inverse(self._current_damping)

    def multiply_matpower(self, vector: Vector, exp: float) -> Vector:
        column = self._to_column(vector)
        product = self.factor.left_multiply_matpower(column, exp, self._current_damping)
        return self._from_column(product, vector)

    def multiply_cholesky(self, vector: Vector, transpose: bool = False) -> Vector:
        return self._multiply_root(vector, transpose=transpose, inverse=False)

    def multiply_cholesky_inverse(self, vector: Vector, transpose: bool = False) -> Vector:
        return self._multiply_root(vector, transpose=transpose, inverse=True)

    def full_fisher_block(self) -> Array:
        return self.factor.get_cov()

    def _multiply_root(self, vector: Vector, *, transpose: bool, inverse: bool) -> Vector:
        product = self.factor.left_multiply_cholesky(
            self._to_column(vector), self._current_damping, transpose=transpose, inverse=inverse
        )
        return self._from_column(product, vector)

    def _current_damping(self) -> float:
        return self.damping

    def _to_column(self, vector: Vector) -> Array:
        xp = self._collection.backend.xp
        column: Array = xp.concatenate([part.reshape(-1, 1) for part in parts(vector)])
        if column.size != self.factor.side:
            raise InputError(
                f"the block of {self.params} has {self.factor.side} parameters, the vector "
                f"{column.size}."
            )
        return column

    def _from_column(self, column: Array, like: Vector) -> Vector:
        if not isinstance(like, tuple | list):
            return column.reshape(like.shape).astype(like.dtype)
        pieces, start = [], 0
        for part in like:
            piece = column[start : start + part.size].reshape(part.shape)
            pieces.append(piece.astype(part.dtype))
            start += part.size
        return tuple(pieces)


class NaiveFullFB(SingleFactorFB):
    """The outer product of the batch gradient: any parameters, no structure.

    Args:
        collection: Owner of the factors.
        params: The parameters.
    """

    _statistic: type[GradientSquare] = GradientOuter
    _factor_class: type[FisherFactor] = DenseSquareMatrixFactor

    def __init__(self, collection: FactorOwner, params: TowerNames) -> None:
        super().__init__(collection)
        self._params = uses(params)
        self._batch: list[int | str] = []

    @property
    def num_registered_towers(self) -> int:
        return len(self._batch)

    def register_additional_tower(self, batch_size: int | str) -> None:
        """Add a mini-batch shard: its size, or the name of a value with the batch axis first."""
        self._batch.append(batch_size)

    def tensors_to_compute_grads(self) -> tuple[TowerNames, ...]:
        return self._params

    def factor_shapes(self, shapes: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        size = sum(prod(shape) for shape in shapes)
        return ((size, size),)

    def _make_factors(self, grads_list: GradsList) -> None:
        tensors = tuple((uses(source),) for source in grads_list)  # type: ignore[arg-type]
        if any(len(source[0]) != len(self._params) for source in tensors):
            raise InputError(
                f"the block of {self._params} takes one gradient a parameter in each source."
            )
        statistic = self._statistic(tensors, tuple(self._batch))
        self._factor = self._collection.make_or_get_factor(self._factor_class, (statistic,))


class NaiveDiagonalFB(NaiveFullFB):
    """The squared batch gradient of one parameter.

    Args:
        collection: Owner of the factors.
        params: One parameter.

    Raises:
        RegistrationError: Several parameters were given.
    """

    _statistic = GradientSquare
    _factor_class = DiagonalFactor

    def __init__(self, collection: FactorOwner, params: TowerNames) -> None:
        super().__init__(collection, params)
        if len(self._params) != 1:
            raise RegistrationError(
                f"approximation 'diagonal' takes one parameter, got {self._params}; register them "
                f"one by one, or use 'full'."
            )

    def factor_shapes(self, shapes: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        return tuple(shapes)


class SingleLayerFB(SingleFactorFB):
    """A block with a single factor, of a layer with one input and one output."""

    def __init__(self, collection: FactorOwner) -> None:
        super().__init__(collection)
        self._towers = Towers()

    @property
    def num_registered_towers(self) -> int:
        return len(self._towers)

    def register_additional_tower(self, inputs: TowerNames, outputs: TowerNames) -> None:
        """Add a mini-batch shard: names of the layer's input and output."""
        self._towers.add(inputs, outputs)

    def tensors_to_compute_grads(self) -> tuple[TowerNames, ...]:
        return tuple(names[0] for names in self._towers.outputs)


class LayerDiagonalFB(SingleLayerFB):
    """The diagonal of a layer's block: mean of squared per-example gradients.

    Args:
        collection: Owner of the factors.
        form: How the layer's tensors and parameters are laid out.
    """

    def __init__(self, collection: FactorOwner, form: LayerForm) -> None:
        super().__init__(collection)
        self.form = form

    def factor_shapes(self, shapes: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        return (self.form.packing.matrix_shape(shapes[0]),)

    def _make_factors(self, grads_list: GradsList) -> None:
        statistic = LayerSquare(
            tuple(self._towers.inputs),
            tuple(tuple(uses(tower) for tower in source) for source in grads_list),
            self.form.input_view,
            self.form.output_view,
            self.form.packing.has_bias,
        )
        self._factor = self._collection.make_or_get_factor(DiagonalFactor, (statistic,))

    def _to_column(self, vector: Vector) -> Array:
        return self.form.packing.pack(vector, self.params, self._collection.backend.xp)

    def _from_column(self, column: Array, like: Vector) -> Vector:
        return self.form.packing.unpack(column, like)
