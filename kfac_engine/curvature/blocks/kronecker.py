"""Defines Kronecker-factored blocks: ``F ≈ c · A ⊗ G``.

``A`` is the second moment of the inputs of a layer, and ``G`` the second moment of its output
gradients. Both are means over uses, examples and positions. ``c`` is the mean number of uses ×
positions of an example. One block serves dense layers (c = 1), convolutions (c = output locations;
KFC) and layers with independent uses.

Sources: Martens & Grosse 2015, arXiv:1503.05671, section 3 and 6.3 (damping); Grosse & Martens
2016, arXiv:1602.01407, equation 23; Martens, Ba & Johnson 2018, section 3.2 (independent uses).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod, sqrt

import numpy as np

from kfac_engine._types import Array, Vector
from kfac_engine.backend.namespace import recordable
from kfac_engine.curvature.blocks.base import (
    Decomposition,
    ExampleReader,
    FisherBlock,
    Found,
    GradsList,
    Names,
    shape_of,
    uses,
)
from kfac_engine.curvature.config import LEAST_EIGENVALUE, CollectionConfig, RelativeDamping
from kfac_engine.curvature.factors.base import FisherFactor
from kfac_engine.curvature.factors.dense import DenseSquareMatrixFactor
from kfac_engine.curvature.factors.diagonal import DiagonalFactor
from kfac_engine.curvature.factors.divided import (
    LARGEST_BLOCK,
    DividedFactor,
    DividedMoment,
    block_shape,
)
from kfac_engine.curvature.factors.owner import FactorOwner
from kfac_engine.curvature.factors.refresh import Damping, Level
from kfac_engine.curvature.factors.row_weights import LayerRows
from kfac_engine.curvature.factors.sampled import SampledFactor, SampledMoment
from kfac_engine.curvature.factors.statistics import (
    KroneckerDiagonal,
    KroneckerMoment,
    ReducedMoment,
    Statistic,
    Uses,
)
from kfac_engine.curvature.factors.sua import PixelCovariance, SpatiallyUncorrelatedFactor
from kfac_engine.curvature.linalg.kronecker import pi_correction, symmetric_product
from kfac_engine.errors import InputError, NotReadyError, RegistrationError, UnsupportedError
from kfac_engine.layers.layer_forms import LayerForm
from kfac_engine.layers.packing import Packing
from kfac_engine.layers.views import PatchView, RowView, View, rows_per_example

# Factors whose powers are stored matrices of the size of their side.
_MATRICES = (DenseSquareMatrixFactor, SampledFactor)


def _square(d: int) -> tuple[int, ...]:
    return d, d


def _line(d: int) -> tuple[int, ...]:
    return (d,)


@dataclass(frozen=True, slots=True)
class Side:
    """The form of a factor of a Kronecker block."""

    # Creates the statistic; takes the arguments of ``KroneckerMoment``.
    statistic: Callable[..., KroneckerMoment]
    factor: type[FisherFactor]  # class of the factor
    # Returns the shape of the average for a matrix of a given size.
    shape: Callable[[int], tuple[int, ...]] = _square
    # Returns the form for a matrix of a given size, of which a given number of rows stays whole;
    # None for one form of all sizes.
    sized: "Callable[[int, int], Side] | None" = None

    def of(self, d: int, whole: int = LARGEST_BLOCK) -> "Side":
        """Return the form for a matrix of ``d`` rows; up to ``whole`` rows are not divided."""
        return self if self.sized is None else self.sized(d, whole)


DENSE = Side(KroneckerMoment, DenseSquareMatrixFactor)
DIAGONAL = Side(KroneckerDiagonal, DiagonalFactor, _line)
# Largest number of rows that stay whole if they are features of the data, which are damped one by
# one: 1,024 features, and the row of a bias.
LARGEST_OF_DATA = 1025
# Largest number of rows of a side that ``BY_SIZE`` divides into blocks; a wider one is diagonal.
LARGEST_DIVIDED = 8192


def _by_size(d: int, whole: int) -> Side:
    """Return the form of a side of ``d`` rows: dense, block-diagonal or diagonal."""
    if d <= whole:
        return DENSE
    if d <= LARGEST_DIVIDED:
        return Side(partial(DividedMoment, side=d), DividedFactor, block_shape)
    return DIAGONAL


BY_SIZE = replace(DENSE, sized=_by_size)


class KroneckerProductFB(FisherBlock):
    """A Kronecker block of a layer.

    If a layer has several uses, its tensors are a list with a tensor for each use, or one tensor
    ``(u·n, …)`` or ``(u, n, …)``. Inputs, outputs and gradients may have different forms.

    Args:
        collection: Owner of the factors.
        form: Layout of the tensors and parameters of one use, with the number of uses.
        input_side: Form of ``A``.
        output_side: Form of ``G``.
    """

    symbols = ("A", "G")
    is_product = True

    def __init__(
        self,
        collection: FactorOwner,
        form: LayerForm,
        *,
        input_side: Side = DENSE,
        output_side: Side = DENSE,
    ) -> None:
        super().__init__(collection)
        self.form = form
        self._sides = input_side, output_side
        self._factors: tuple[FisherFactor, ...] = ()
        # Evaluated at each refresh; equal methods are the same registration.
        self._dampings = self._input_damping, self._output_damping

    @property
    def packing(self) -> Packing:
        return self.form.packing

    # -- registration ---------------------------------------------------------------------------

    def layer_rows(self) -> tuple[LayerRows, ...]:
        return self._layer_rows(self.form)

    def _make_factors(self, grads_list: GradsList) -> None:
        if self.form.num_uses > 1:
            for source in grads_list:
                count_uses(self.form.num_uses, *source)
        form, collection = self.form, self._collection
        input_side, output_side = self._sides
        if input_side.sized or output_side.sized:
            weight = collection.require_shape(uses(self.params or ())[0])
            input_side, output_side = self._formed(weight)
        in_batch = {"batch": collection.batch_value, "exact": collection.batch_is_exact}
        options = {"num_uses": form.num_uses, **in_batch}

        def of_inputs(x: Uses, ds: Uses) -> Statistic:
            del ds
            has_bias = form.packing.has_bias
            return input_side.statistic(x, form.input_view, homogeneous=has_bias, **options)

        def of_gradients(x: Uses, ds: Uses) -> Statistic:
            del x
            return output_side.statistic(ds, form.output_view, **options)

        A = self._make_factor(input_side.factor, of_inputs, grads_list)
        G = self._make_factor(output_side.factor, of_gradients, grads_list)
        self._factors = A, G
        if type(A) is DenseSquareMatrixFactor and self._reads_data():
            A.damped_by_feature = self._is_relative

    def _reads_data(self) -> bool:
        """Return whether the features of the inputs are those of an input of the model."""
        return all(self._collection.data.issuperset(inputs) for inputs, _ in self._parts)

    def _formed(self, weight: tuple[int, ...]) -> list[Side]:
        """Return the forms of both sides for a weight of a given shape."""
        whole = LARGEST_OF_DATA if self._reads_data() else LARGEST_BLOCK, LARGEST_BLOCK
        sizes = self.packing.matrix_shape(weight)
        return [s.of(d, most) for s, d, most in zip(self._sides, sizes, whole, strict=True)]

    # -- factors --------------------------------------------------------------------------------

    @property
    def input_factor(self) -> FisherFactor:
        """The input factor ``A``."""
        return self.factors[0]

    @property
    def output_factor(self) -> FisherFactor:
        """The output factor ``G``."""
        return self.factors[1]

    @property
    def factors(self) -> tuple[FisherFactor, ...]:
        if not self._factors:
            raise NotReadyError(f"call instantiate_factors of the block of {self.params} first.")
        return self._factors

    def decompose(self, decomposition: Decomposition[Found]) -> Found:
        return decomposition.product(self.input_factor, self.output_factor, self.repeats)

    def read_examples(self, reader: ExampleReader[Found]) -> Found:
        return reader.rows(self.form)

    def factor_shapes(self, shapes: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        sides = zip(self._formed(shapes[0]), self.packing.matrix_shape(shapes[0]), strict=True)
        return tuple(side.shape(d) for side, d in sides)

    @property
    def repeats(self) -> float:
        """Mean number ``c`` of uses × positions of an example, over the averaged batches.

        Raises:
            NotReadyError: No batch was measured, and the shape of the output was not declared.
        """
        measured = self.factors[1].average.repeats
        if measured is not None:
            return measured
        shapes = [self._collection.shape_of(name) for name in self._parts[0][1]]
        if not shapes or any(shape is None for shape in shapes):
            raise NotReadyError(
                f"the number of positions in the layer of {self.params} is unknown until its "
                f"statistics are updated; update them first."
            )
        declared = [shape for shape in shapes if shape is not None]
        return rows_per_example(declared, self.form.output_view, self.form.num_uses)

    @property
    def damping(self) -> float:
        """Damping ``λ / c**p`` of the Kronecker product.

        The exponent ``p`` is ``normalize_damping_power`` of the configuration. With ``p = 1``, the
        damping adds ``λ·I`` to ``c·A ⊗ G``.
        """
        relative = isinstance(self._level(), RelativeDamping)
        power = 1.0 if relative else self._collection.config.normalize_damping_power
        normalizer: float = float(self.repeats) ** power
        return super().damping / normalizer

    def mean_eigenvalue(self) -> float:
        return self.repeats * super().mean_eigenvalue()

    def split_damping(self) -> tuple[Level, Level]:
        """Split ``damping`` between the factors by the traces of their current averages.

        A relative damping ε adds ``√ε`` times the mean eigenvalue to each factor, and more to an
        average of inputs that shrinks (``RelativeDamping.examples``).

        Returns:
            ``(λ_A, λ_G)`` with ``λ_A·λ_G = damping``; arrays over groups if factors are stacks.

        Source: Martens & Grosse 2015, section 6.3.
        """
        return self._input_damping(), self._output_damping()

    def _is_relative(self) -> bool:
        return isinstance(self._level(), RelativeDamping)

    def _absolute_split(self) -> tuple[Level, Level]:
        root = float(np.sqrt(self.damping))
        if self._collection.config.pi_type == "off":
            return root, root
        A, G = self.factors
        pi = pi_correction(A.trace(), A.side, G.trace(), G.side)
        return root * pi, root / pi

    def factor_dampings(self) -> tuple[Level | None, ...]:
        return self.split_damping()

    def _input_damping(self) -> Level:
        level, A = self._level(), self.factors[0]
        if not isinstance(level, RelativeDamping):
            return self._absolute_split()[0]
        return _relative_level(A, sqrt(level) + A.shrinkage(level.examples))

    def _output_damping(self) -> Level:
        level = self._level()
        if not isinstance(level, RelativeDamping):
            return self._absolute_split()[1]
        return _relative_level(self.factors[1], sqrt(level))

    def _damped_factors(self) -> Iterable[tuple[FisherFactor, Damping]]:
        return zip(self.factors, self._dampings, strict=True)

    # -- products -------------------------------------------------------------------------------

    @property
    def work(self) -> float:
        A, G = self.factors
        a, g = shape_of(A), shape_of(G)
        sizes = (a[-1] if len(a) > 1 else 0) + (g[-1] if len(g) > 1 else 0)
        return float(prod(a[:-1] or a)) * prod(g[-1:]) * max(sizes, 1)

    def multiply_matpower(self, vector: Vector, exp: float) -> Vector:
        vector = self._operand(vector)
        (A, G), (damping_a, damping_g) = self.factors, self._dampings
        V = self._pack(vector)
        V = G.right_multiply_matpower(A.left_multiply_matpower(V, exp, damping_a), exp, damping_g)
        scale = float(self.repeats) ** exp
        return self.packing.unpack(V if scale == 1.0 else scale * V, vector)

    def multiply_weight(self, weight: Array, exp: float) -> Array:
        (A, G), (damping_a, damping_g) = self.factors, self._dampings
        left, right = A.stored_power(exp, damping_a), G.stored_power(exp, damping_g)
        if left is None or right is None:
            return super().multiply_weight(weight, exp)
        packing, backend = self.form.packing, self._collection.backend
        left = left[:-1, :-1] if packing.has_bias else left
        scale, matmul = float(self.repeats) ** exp, backend.matmul
        if backend.many is not None and (V := packing.rows_in_place(weight)) is not None:
            natural: Array = backend.xp.empty_like(weight)
            out = packing.rows_in_place(natural)
            assert out is not None, "it has the strides of the weight"
            if backend.many.multiply_between(left, V, right, out, scale):
                return natural
        V = packing.rows(weight, self.params)
        # Both powers are symmetric: columns in a row of memory are rows of the transposed product.
        if V.flags.c_contiguous:
            product = matmul(symmetric_product(left, V, backend), right)
        else:
            product = matmul(matmul(right, V.T), left).T
        if scale != 1.0:
            product *= scale
        return packing.from_rows(product, weight)

    def full_fisher_block(self) -> Array:
        xp = self._collection.backend.xp
        A, G = self.input_factor.get_cov(), self.output_factor.get_cov()
        block: Array = self.repeats * xp.kron(A, G)
        return block

    # -- private ----------------------------------------------------------------------------------

    def _multiply_root(self, vector: Vector, *, transpose: bool, inverse: bool) -> Vector:
        """Return ``√c·L_A V L_Gᵀ``, or the product with the inverse, the transpose or both."""
        vector = self._operand(vector)
        (A, G), (damping_a, damping_g) = self.factors, self._dampings
        V = self._pack(vector)
        V = A.left_multiply_cholesky(V, damping_a, transpose=transpose, inverse=inverse)
        V = G.right_multiply_cholesky(V, damping_g, transpose=not transpose, inverse=inverse)
        scale = float(self.repeats) ** (-0.5 if inverse else 0.5)
        return self.packing.unpack(scale * V, vector)

    def _pack(self, vector: Vector) -> Array:
        return self.packing.pack(vector, self.params, self._collection.backend.xp)


@recordable
def relative_level(traces: Array, rows: float, root: float) -> Array:
    """Return ``root`` times the mean eigenvalue of matrices with these traces and sizes."""
    level: Array = root * np.maximum(traces / rows, LEAST_EIGENVALUE)
    return level


def _relative_level(factor: FisherFactor, root: float) -> Level:
    """Return the relative damping of a factor, or of each matrix of a stack."""
    traces = factor.traces()
    levels = relative_level(traces, factor.side / max(traces.size, 1), root)
    return levels if levels.ndim else float(levels)


# -- KFAC-reduce: layers whose positions are averaged ----------------------------------------------
#
# A layer with positions has two Kronecker approximations. ``kron`` (KFAC-expand) treats each
# position as an example, which is exact if the loss sums over positions. KFAC-reduce replaces the
# gradient of an example, ``Σ_t a_t ds_tᵀ``, by ``(mean_t a_t) (Σ_t ds_t)ᵀ``, which is exact if the
# network averages over positions before its loss. Without positions both are K-FAC. Source:
# Eschenhagen et al. 2023, arXiv:2311.00636, section 3.3.

_MEAN = Side(partial(ReducedMoment, mean=True), DenseSquareMatrixFactor)
_SUM = Side(ReducedMoment, DenseSquareMatrixFactor)


class ReducedKroneckerFB(KroneckerProductFB):
    """``F ≈ A ⊗ G`` with A of mean inputs and G of summed gradients."""

    def __init__(self, collection: FactorOwner, form: LayerForm) -> None:
        super().__init__(collection, form, input_side=_MEAN, output_side=_SUM)

    @property
    def repeats(self) -> float:
        """Number of rows for each example, 1: positions are reduced."""
        return 1


# -- input factors of convolutions -----------------------------------------------------------------


def patches_side(form: LayerForm, side: Side = DENSE) -> Side:
    """Return the form of an input factor; a factor that samples a part of a batch is dense."""
    if not form.sampling.active:
        return side
    return Side(partial(SampledMoment, sampling=form.sampling), SampledFactor)


def uncorrelated_side(form: LayerForm, config: CollectionConfig) -> Side:
    """Return an input factor of single pixels, uncorrelated between positions (SUA).

    Strides and padding have no effect on it. The configuration decides whether the mean of pixels
    is modelled. ``UnsupportedError`` is raised if patches are masked, because the pixels of
    different positions then differ.
    """
    patches = form.input_view
    if not isinstance(patches, PatchView):
        raise UnsupportedError("approximation 'kron_sua' cannot mask patches; use 'kron'.")
    pixels = RowView(patches.feature_axis, rank=patches.rank)
    taps, has_bias = patches.window.taps, form.packing.has_bias
    modelled = not config.assume_zero_mean_activations

    def statistic(
        tensors: Uses,
        view: View,
        *,
        homogeneous: bool,
        num_uses: int,
        batch: str | None,
        exact: bool,
    ) -> PixelCovariance:
        del view  # patches are not extracted
        return PixelCovariance.configured(
            config,
            tensors=tensors,
            view=pixels,
            homogeneous=homogeneous,
            taps=taps,
            num_uses=num_uses,
            batch=batch,
            exact=exact,
        )

    def shape(d: int) -> tuple[int, ...]:
        channels = (d - has_bias) // taps
        return channels + modelled, channels

    return Side(statistic, SpatiallyUncorrelatedFactor, shape)


# -- independent uses ------------------------------------------------------------------------------


def count_uses(num_uses: int | None, *tensors: Names) -> int:
    """Return the number of uses, at least one, from a number and from lists of names.

    A list in ``tensors`` has a name for each use. ``num_uses`` is None if the caller gave no
    number. If the number and the lengths of lists differ, the error is a RegistrationError.
    """
    counts = {len(names) for names in tensors if not isinstance(names, str)}
    if num_uses is not None:
        counts.add(num_uses)
    if not counts:
        raise InputError(
            "You must supply a value for the num_uses argument when the uses of a layer are not "
            "given as a list."
        )
    if len(counts) > 1:
        raise RegistrationError(
            f"the uses of one layer are counted differently: {sorted(counts)}; num_uses and the "
            f"lengths of all lists must be equal."
        )
    (uses,) = counts
    if uses < 1:
        raise InputError(f"a layer must be used at least once, got num_uses={uses}.")
    return uses
