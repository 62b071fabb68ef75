"""Defines blocks with one factor: a full matrix, or a diagonal, also in an eigenbasis (EKFAC).

The blocks of parameters that scale and shift the data, as in normalisation layers, are here, too.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import prod

from kfac_engine._types import Array, Rows, Vector
from kfac_engine.curvature.blocks.base import (
    Decomposition,
    ExampleReader,
    FisherBlock,
    Found,
    GradsList,
    Names,
    parts,
    shape_of,
    uses,
)
from kfac_engine.curvature.config import LEAST_EIGENVALUE, RelativeDamping
from kfac_engine.curvature.factors.base import FisherFactor
from kfac_engine.curvature.factors.dense import DenseSquareMatrixFactor
from kfac_engine.curvature.factors.diagonal import DiagonalFactor
from kfac_engine.curvature.factors.eigenbasis import EigenbasisFactor, RotatedSquare
from kfac_engine.curvature.factors.owner import FactorOwner
from kfac_engine.curvature.factors.refresh import Damping, Level
from kfac_engine.curvature.factors.row_weights import LayerRows
from kfac_engine.curvature.factors.statistics import (
    GradientOuter,
    GradientSquare,
    KroneckerMoment,
    LayerSquare,
    ScaleShiftMoment,
    ScaleShiftSquare,
    Statistic,
    Uses,
)
from kfac_engine.errors import InputError, NotReadyError, RegistrationError, ShapeError
from kfac_engine.layers.layer_forms import LayerForm, ScaleShiftForm
from kfac_engine.layers.packing import Packing


class SingleFactorFB(FisherBlock):
    """A block that is a single matrix over the concatenated parameters, damped by λ."""

    def __init__(self, collection: FactorOwner) -> None:
        super().__init__(collection)
        self._factor: FisherFactor | None = None

    @property
    def factor(self) -> FisherFactor:
        """The factor that averages the matrix.

        Raises:
            NotReadyError: The factors were not instantiated.
        """
        if self._factor is None:
            raise NotReadyError(f"call instantiate_factors of the block of {self.params} first.")
        return self._factor

    @property
    def factors(self) -> tuple[FisherFactor, ...]:
        return (self.factor,)

    def decompose(self, decomposition: Decomposition[Found]) -> Found:
        return decomposition.matrix(self.factor)

    def _damped_factors(self) -> Iterable[tuple[FisherFactor, Damping]]:
        return ((self.factor, self._current_damping),)

    def multiply_matpower(self, vector: Vector, exp: float) -> Vector:
        vector = self._operand(vector)
        column = self._to_column(vector)
        product = self.factor.left_multiply_matpower(column, exp, self._current_damping)
        return self._from_column(product, vector)

    def full_fisher_block(self) -> Array:
        return self.factor.get_cov()

    def _multiply_root(self, vector: Vector, *, transpose: bool, inverse: bool) -> Vector:
        vector = self._operand(vector)
        product = self.factor.left_multiply_cholesky(
            self._to_column(vector), self._current_damping, transpose=transpose, inverse=inverse
        )
        return self._from_column(product, vector)

    def _current_damping(self) -> float:
        return self.damping

    def _to_column(self, vector: Vector) -> Array:
        arrays = parts(vector)
        self._check_declared([part.shape for part in arrays])
        xp = self._collection.backend.xp
        column: Array = xp.concatenate([part.reshape(-1, 1) for part in arrays])
        if column.size != self.factor.side:
            raise ShapeError(
                f"the block of {self.params} has {self.factor.side} entries, but the vector has "
                f"{column.size}."
            )
        return column

    def _check_declared(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Check the shapes of arrays against the declared shapes of the parameters."""
        names = () if self.params is None else uses(self.params)
        if names and len(names) != len(shapes):
            raise InputError(
                f"the block of {self.params} takes {len(names)} array(s), got {len(shapes)}."
            )
        for name, shape in zip(names, shapes, strict=bool(names)):
            if self._collection.shape_of(name) not in (None, shape):
                raise ShapeError(
                    f"'{name}' has shape {self._collection.shape_of(name)}, but its vector has "
                    f"shape {shape}."
                )

    def _from_column(self, column: Array, like: Vector) -> Vector:
        assert not isinstance(like, Rows)  # `parts` refused rows
        if not isinstance(like, tuple | list):
            return column.reshape(like.shape).astype(like.dtype)
        pieces, start = [], 0
        for part in like:
            piece = column[start : start + part.size].reshape(part.shape)
            pieces.append(piece.astype(part.dtype))
            start += part.size
        return tuple(pieces)


class NaiveFullFB(SingleFactorFB):
    """The second moment of the gradient of any parameters, without structure.

    Args:
        collection: Owner of the factors.
        params: The parameters.
    """

    of_parameters = True

    _statistic: type[GradientSquare] = GradientOuter
    _factor_class: type[FisherFactor] = DenseSquareMatrixFactor

    def __init__(self, collection: FactorOwner, params: Names) -> None:
        super().__init__(collection)
        self._params = uses(params)
        self._batch: list[int | str] = []

    @property
    def num_parts(self) -> int:
        return len(self._batch)

    def add_part(self, batch_size: int | str) -> None:  # type: ignore[override] # no tensors of a layer
        """Add a part of the batch by its size, or by a value whose first axis has this size."""
        self._batch.append(batch_size)

    def register_additional_tower(self, batch_size: int | str) -> None:  # type: ignore[override] # likewise
        """Add a part of the batch; see ``add_part``."""
        self.add_part(batch_size)

    def tensors_to_compute_grads(self) -> tuple[Names, ...]:
        return self._params

    def factor_shapes(self, shapes: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        size = sum(prod(shape) for shape in shapes)
        return ((size, size),)

    def _make_factors(self, grads_list: GradsList) -> None:
        tensors = [uses(source) for source in grads_list]  # type: ignore[arg-type] # names
        if not tensors or any(len(names) != len(self._params) for names in tensors):
            raise InputError(
                f"the block of {self._params} takes one gradient a parameter in each source."
            )
        sources = tuple((self._statistic(names, tuple(self._batch)),) for names in tensors)
        self._factor = self._make_from(self._factor_class, sources)


class NaiveDiagonalFB(NaiveFullFB):
    """The squared gradient of one parameter.

    Args:
        collection: Owner of the factors.
        params: One parameter.

    Raises:
        RegistrationError: Several parameters were given.
    """

    _statistic = GradientSquare
    _factor_class = DiagonalFactor

    def __init__(self, collection: FactorOwner, params: Names) -> None:
        super().__init__(collection, params)
        if len(self._params) != 1:
            raise RegistrationError(
                f"approximation 'diagonal' takes one parameter, got {self._params}; register them "
                f"one by one, or use 'full'."
            )

    def factor_shapes(self, shapes: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        return tuple(shapes)


class LayerDiagonalFB(SingleFactorFB):
    """The diagonal of a layer's block: mean of squared per-example gradients."""

    def __init__(self, collection: FactorOwner, form: LayerForm) -> None:
        super().__init__(collection)
        self.form = form

    def add_part(self, inputs: Names, outputs: Names) -> None:
        """Add a part of the batch; raise a RegistrationError for several uses."""
        if len(uses(inputs)) != 1 or len(uses(outputs)) != 1:
            raise RegistrationError(
                f"the block of {self.params} takes one use of its layer, got {inputs} and "
                f"{outputs}."
            )
        super().add_part(inputs, outputs)

    @property
    def packing(self) -> Packing:
        return self.form.packing

    def layer_rows(self) -> tuple[LayerRows, ...]:
        return self._layer_rows(self.form)

    def read_examples(self, reader: ExampleReader[Found]) -> Found:
        return reader.rows(self.form)

    def factor_shapes(self, shapes: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        return (self.form.packed_shape(shapes[0]),)

    def _make_factors(self, grads_list: GradsList) -> None:
        self._factor = self._make_factor(DiagonalFactor, self._square, grads_list)

    def _square(self, x: Uses, ds: Uses) -> Statistic:
        """Return the statistic of an input and of gradients."""
        form = self.form
        return LayerSquare(x, ds, form.input_view, form.output_view, form.packing.has_bias)

    @property
    def damping(self) -> float:
        """Damping ``λ·c / c**p``, the multiple of the identity that a Kronecker block adds.

        ``c`` is the number of positions, ``p`` is ``normalize_damping_power`` of the configuration.
        With ``p = 1`` the damping is ``λ``.

        Raises:
            NotReadyError: ``p`` is not 1, and no batch was measured.
        """
        power = self._collection.config.normalize_damping_power
        if power == 1 or isinstance(self._level(), RelativeDamping):
            return super().damping
        if self.factor.repeats is None:
            raise NotReadyError(
                f"the number of positions in the layer of {self.params} is unknown until its "
                f"statistics are updated; update them first."
            )
        excess: float = float(self.factor.repeats) ** (1 - power)
        return super().damping * excess

    def _to_column(self, vector: Vector) -> Array:
        packed = self.packing.pack(vector, self.params, self._collection.backend.xp)
        expected = self.factor.average.read().shape
        if packed.shape != expected:
            raise ShapeError(
                f"the layer of {self.params} has a packed matrix of shape {expected}, but the "
                f"vector's matrix has shape {packed.shape}."
            )
        return packed

    def _from_column(self, column: Array, like: Vector) -> Vector:
        return self.packing.unpack(column, like)


class EigenbasisFB(LayerDiagonalFB):
    """``F ≈ (U_A ⊗ U_G) diag(s) (U_A ⊗ U_G)ᵀ``, damped by λ (George et al. 2018, section 3).

    Powers use the current eigenvalues. The Cholesky factor is the symmetric square root. Positions
    are summed within an example, so that no count multiplies the block.
    """

    symbols = ("A", "G", "s")

    @property
    def basis(self) -> EigenbasisFactor:
        factor = self.factor
        assert isinstance(factor, EigenbasisFactor)  # by _make_factors
        return factor

    @property
    def factors(self) -> tuple[FisherFactor, ...]:
        return (*self.basis.kronecker_factors, self.basis)

    def decompose(self, decomposition: Decomposition[Found]) -> Found:
        return decomposition.rotated(self.basis)

    def factor_shapes(self, shapes: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        d_in, d_out = self.form.packing.matrix_shape(shapes[0])
        return (d_in, d_in), (d_out, d_out), (d_in, d_out)

    def factor_dampings(self) -> tuple[Level | None, ...]:
        return None, None, self.damping

    def mean_eigenvalue(self) -> float:
        return max(self.factor.trace() / self.factor.side, LEAST_EIGENVALUE)

    @property
    def work(self) -> float:
        d_in, d_out = shape_of(self.factor) or (0, 0)
        return 2.0 * d_in * d_out * (d_in + d_out)  # into the basis, and back

    def _make_factors(self, grads_list: GradsList) -> None:
        form, collection = self.form, self._collection
        x_view, ds_view, bias = form.input_view, form.output_view, form.packing.has_bias
        moment = partial(
            KroneckerMoment, batch=collection.batch_value, exact=collection.batch_is_exact
        )
        moments: tuple[Callable[[Uses, Uses], Statistic], ...] = (
            lambda x, ds: moment(x, x_view, bias),
            lambda x, ds: moment(ds, ds_view),
        )
        kronecker_factors = (
            self._make_factor(DenseSquareMatrixFactor, moment, grads_list) for moment in moments
        )

        def squares(x: Uses, ds: Uses) -> Statistic:
            return RotatedSquare(x, ds, x_view, ds_view, bias)

        self._factor = self._make_factor(EigenbasisFactor, squares, grads_list, *kronecker_factors)


# -- scales and shifts -----------------------------------------------------------------------------


class ScaleShiftFB(SingleFactorFB):
    """The block of a scale, a shift or both; vectors are ``[scale, shift]``, each row-major.

    A part of the batch has a list of data, for each use of the parameters.
    """

    _statistic: type[ScaleShiftMoment] = ScaleShiftMoment
    _factor_class: type[FisherFactor] = DenseSquareMatrixFactor

    def __init__(self, collection: FactorOwner, form: ScaleShiftForm) -> None:
        super().__init__(collection)
        self.form = form

    def add_part(self, inputs: Names, outputs: Names) -> None:
        """Add a part of the batch.

        Args:
            inputs: Names of the data before scaling, for each use; empty without a scale.
            outputs: Names of the scaled and shifted data, for each use.

        Raises:
            RegistrationError: Inputs and outputs list different numbers of uses.
        """
        counts = len(uses(inputs)), len(uses(outputs))
        if counts[0] != (counts[1] if self.form.scale else 0):
            raise RegistrationError(
                f"the block of {self.params} has {counts[1]} output(s) and {counts[0]} input(s); a "
                f"block with a scale needs one input for each output, and a block without a scale "
                f"must not have inputs."
            )
        super().add_part(inputs, outputs)

    def read_examples(self, reader: ExampleReader[Found]) -> Found:
        return reader.sums(self.form)

    def factor_shapes(self, shapes: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        size = sum(prod(shape) for shape in shapes)
        return ((size, size),)

    def _make_factors(self, grads_list: GradsList) -> None:
        collection, form, (_, outputs) = self._collection, self.form, self._parts[0]
        sets = tuple(collection.sets[name] for name in outputs) if collection.sets else ()
        batch = (collection.batch_value or "") if sets else ""

        def statistic(x: Uses, ds: Uses) -> Statistic:
            return self._statistic(x, ds, form.scale, form.shift, sets, batch)

        self._factor = self._make_factor(self._factor_class, statistic, grads_list)


class ScaleShiftDiagonalFB(ScaleShiftFB):
    """The diagonal of the block of a scale, a shift or both."""

    _statistic = ScaleShiftSquare
    _factor_class = DiagonalFactor

    def factor_shapes(self, shapes: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        return ((sum(prod(shape) for shape in shapes),),)
