"""Provides layer blocks and their factors under the names of TensorFlow's K-FAC library.

The page docs/building_blocks.md has the arguments that several of them share.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Unpack

import numpy as np
import numpy.typing as npt

from kfac_engine._types import Array, Params
from kfac_engine.backend.protocol import Backend
from kfac_engine.compat.convolution_factors import check_extraction
from kfac_engine.compat.factors import InTowers, of_towers
from kfac_engine.curvature.blocks.base import FisherBlock, GradsList, Names, uses
from kfac_engine.curvature.blocks.embedding import EmbeddingKroneckerFB
from kfac_engine.curvature.blocks.grouped import (
    GroupedDiagonalFB,
    GroupedKroneckerFB,
    single_filter,
)
from kfac_engine.curvature.blocks.kronecker import (
    DENSE,
    DIAGONAL,
    KroneckerProductFB,
    count_uses,
    patches_side,
    uncorrelated_side,
)
from kfac_engine.curvature.blocks.series import USES, SeriesFB
from kfac_engine.curvature.blocks.single import LayerDiagonalFB, ScaleShiftDiagonalFB, ScaleShiftFB
from kfac_engine.curvature.config import CollectionConfig
from kfac_engine.curvature.factors.base import FactorOptions
from kfac_engine.curvature.factors.dense import DenseSquareMatrixFactor
from kfac_engine.curvature.factors.diagonal import DiagonalFactor
from kfac_engine.curvature.factors.owner import FactorOwner
from kfac_engine.curvature.factors.statistics import ScaleShiftMoment, ScaleShiftSquare
from kfac_engine.curvature.factors.tables import IdCounts, VocabularyFactor
from kfac_engine.errors import InputError, ShapeError
from kfac_engine.layers.grouped import depthwise_form
from kfac_engine.layers.layer_forms import (
    BroadcastShape,
    LayerForm,
    ScaleShiftForm,
    convolution_form,
    dense_form,
    embedding_form,
)
from kfac_engine.layers.views import Padding, TokenIdView


@dataclass(frozen=True, slots=True)
class SummedAxes(BroadcastShape):
    """The broadcast axes as the caller lists them."""

    shape: tuple[int, ...] = ()
    axes: tuple[int, ...] = ()  # positive numbers of axes; the batch is axis 0

    def __post_init__(self) -> None:
        """Check that the axes are positive and different."""
        if len(set(self.axes)) < len(self.axes) or any(axis < 1 for axis in self.axes):
            raise InputError(
                f"broadcast axes {self.axes} must be different and positive: axis 0 is the batch."
            )

    def summed(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if self.axes and max(self.axes) >= len(shape):
            raise ShapeError(f"broadcast axes {self.axes} do not exist in data of shape {shape}.")
        return self.axes


class _OfScaleAndShift(InTowers):
    """Base of the factors that average per-example gradients of a scale and a shift."""

    _formula: ClassVar[type[ScaleShiftMoment | ScaleShiftSquare]]

    def __init__(
        self,
        inputs: Sequence[str],
        outputs_grads: Sequence[Sequence[str]],
        broadcast_dims_scale: Sequence[int],
        broadcast_dims_shift: Sequence[int] | None = None,
        has_shift: bool = True,
        **options: Unpack[FactorOptions],
    ) -> None:
        sums = summed_axes(broadcast_dims_scale, broadcast_dims_shift, has_shift)
        formula = partial(self._formula, scale=sums[0], shift=sums[1])
        super().__init__(of_towers(formula, outputs_grads, inputs), **options)


class ScaleAndShiftFullFactor(_OfScaleAndShift, DenseSquareMatrixFactor):
    """The second moment of the per-example gradients of a scale and a shift.

    Args:
        inputs: Name of the data before scaling, for each tower.
    """

    _formula = ScaleShiftMoment


class ScaleAndShiftDiagonalFactor(_OfScaleAndShift, DiagonalFactor):
    """The mean squares of the per-example gradients of a scale and a shift."""

    _formula = ScaleShiftSquare


class _OnAxes(ScaleShiftFB):
    """Base of the blocks of a scale and a shift, whose broadcast axes the caller lists."""

    def __init__(
        self,
        layer_collection: FactorOwner,
        broadcast_dims_scale: Sequence[int],
        broadcast_dims_shift: Sequence[int] | None = None,
        has_shift: bool = True,
    ) -> None:
        sums = summed_axes(broadcast_dims_scale, broadcast_dims_shift, has_shift)
        super().__init__(layer_collection, ScaleShiftForm(*sums))


class ScaleAndShiftFullFB(_OnAxes):
    """The full second moment of per-example gradients of a scale and a shift."""


class ScaleAndShiftDiagonalFB(_OnAxes, ScaleShiftDiagonalFB):
    """The mean squares of per-example gradients of a scale and a shift."""


def summed_axes(
    scale: Sequence[int], shift: Sequence[int] | None, has_shift: bool
) -> tuple[SummedAxes, SummedAxes | None]:
    """Return the broadcast axes of scale and shift as reductions."""
    of_scale = SummedAxes(axes=tuple(scale))
    if not has_shift:
        return of_scale, None
    return of_scale, of_scale if shift is None else SummedAxes(axes=tuple(shift))


class _OptionalUses(KroneckerProductFB):
    """A Kronecker block whose number of uses may follow from its towers."""

    _num_uses: int | None = None

    def add_part(self, inputs: Names, outputs: Names) -> None:
        if not isinstance(inputs, str) or not isinstance(outputs, str):
            self._num_uses = count_uses(self._num_uses, inputs, outputs)
        super().add_part(inputs, outputs)

    @property
    def num_uses(self) -> int:
        """Number of uses of the layer.

        Raises:
            InputError: The number was not given.
        """
        return count_uses(self._num_uses)

    def _make_factors(self, grads_list: GradsList) -> None:
        for source in grads_list:
            count_uses(self.num_uses, *source)
        self.form = self.form.with_uses(self.num_uses)
        super()._make_factors(grads_list)


class EmbeddingInputKroneckerFactor(InTowers, VocabularyFactor):
    """The mean count of each token id, ``(1/n) Σ_i diag(n_hot(ids_i)²)``.

    Args:
        input_ids: Name of the token ids of each tower, ``(n, ids)`` or ``(n,)``.
        dtype: Floating-point type of the statistics; float32 by default.

    Raises:
        InputError: The vocabulary is empty or the type is not floating point.
    """

    def __init__(
        self,
        input_ids: Sequence[str],
        vocab_size: int,
        dtype: npt.DTypeLike | None = None,
        *,
        count_repeats: bool = False,
        backend: Backend | None = None,
        config: CollectionConfig | None = None,
    ) -> None:
        chosen = np.dtype(np.float32 if dtype is None else dtype)
        if chosen.kind != "f" or vocab_size < 1:
            raise InputError(
                f"an embedding's factor needs a vocabulary of at least one entry and a floating "
                f"point type, got {vocab_size} and {chosen}."
            )
        view = TokenIdView(int(vocab_size), count_repeats=count_repeats)
        statistics = of_towers(partial(IdCounts, view=view), [input_ids])
        super().__init__(statistics, backend=backend, config=config)
        self.narrowest = chosen


class EmbeddingKFACFB(EmbeddingKroneckerFB):
    """``F ≈ diag(A) ⊗ G`` for an embedding."""

    def __init__(
        self,
        layer_collection: FactorOwner,
        vocab_size: int,
        count_repeats: bool = False,
        positions: bool = False,
    ) -> None:
        form = embedding_form(vocab_size, count_repeats=count_repeats, positions=positions)
        super().__init__(layer_collection, form)


class EmbeddingKFACMultiIndepFB(_OptionalUses, EmbeddingKroneckerFB):
    """``F ≈ u · diag(A) ⊗ G`` for an embedding used several times."""

    def __init__(
        self,
        layer_collection: FactorOwner,
        vocab_size: int,
        num_uses: int | None = None,
        count_repeats: bool = False,
        positions: bool = False,
    ) -> None:
        form = embedding_form(vocab_size, count_repeats=count_repeats, positions=positions)
        super().__init__(layer_collection, form)
        self._num_uses = num_uses


class _OfDepthwiseFilter(FisherBlock):
    """Base of the blocks of a depthwise convolution, with the layout of its tensors."""

    def __init__(
        self,
        layer_collection: FactorOwner,
        params: Params,
        strides: Sequence[int],
        padding: Padding,
        rate: Sequence[int] | None = None,
        data_format: str | None = None,
    ) -> None:
        shape = layer_collection.require_shape(single_filter(params))
        form = depthwise_form(shape, padding, strides, rate, data_format)
        super().__init__(layer_collection, form)  # type: ignore[call-arg] # of a block of a layer


class DepthwiseConvKFCBasicFB(_OfDepthwiseFilter, GroupedKroneckerFB):
    """One Kronecker pair for each channel of a depthwise convolution.

    Args:
        params: The filter, ``(kh, kw, channels, multiplier)``.
    """


class DepthwiseConvDiagonalFB(_OfDepthwiseFilter, GroupedDiagonalFB):
    """The diagonal of a depthwise convolution's block."""


class FullyConnectedKFACBasicFB(KroneckerProductFB):
    """``F ≈ A ⊗ G`` for a dense layer (Martens & Grosse 2015, section 3)."""

    def __init__(
        self,
        layer_collection: FactorOwner,
        has_bias: bool = False,
        diagonal_approx_for_input: bool = False,
        diagonal_approx_for_output: bool = False,
        weight_format: str = "IO",
    ) -> None:
        super().__init__(
            layer_collection,
            dense_form(weight_format, has_bias),
            input_side=DIAGONAL if diagonal_approx_for_input else DENSE,
            output_side=DIAGONAL if diagonal_approx_for_output else DENSE,
        )


class FullyConnectedDiagonalFB(LayerDiagonalFB):
    """The diagonal of a dense layer's block."""

    def __init__(
        self, layer_collection: FactorOwner, has_bias: bool = False, weight_format: str = "IO"
    ) -> None:
        super().__init__(layer_collection, dense_form(weight_format, has_bias))


class ConvKFCBasicFB(KroneckerProductFB):
    """``F ≈ #locations · A ⊗ G`` for a convolution (Grosse & Martens 2016, equation 23).

    Args:
        params: The filter, or ``(filter, bias)``.
        extract_patches_fn: Name of an extraction in ``compat.convolution_factors``. All extractions
            return the same patches, and each is restricted to some layers.
        use_sua_approx_for_input_factor: Whether pixels of different positions are assumed to be
            uncorrelated, so that ``A`` follows from single pixels.
    """

    def __init__(  # noqa: PLR0913 (the specification's signature)
        self,
        layer_collection: FactorOwner,
        params: Params,
        padding: Padding,
        strides: Sequence[int] | None = None,
        dilation_rate: Sequence[int] | None = None,
        data_format: str | None = None,
        extract_patches_fn: str | None = None,
        sub_sample_inputs: bool | None = None,
        sub_sample_patches: bool | None = None,
        use_sua_approx_for_input_factor: bool = False,
        patch_mask: Array | None = None,
        weight_format: str | None = None,
    ) -> None:
        geometry = padding, strides, dilation_rate, data_format, weight_format
        sampling = layer_collection.config.sampling(sub_sample_inputs, sub_sample_patches)
        form = _form(layer_collection, params, *geometry, mask=patch_mask, sampling=sampling)
        check_extraction(extract_patches_fn, form, strides, dilation_rate)
        side = (
            uncorrelated_side(form, layer_collection.config)
            if use_sua_approx_for_input_factor
            else patches_side(form)
        )
        super().__init__(layer_collection, form, input_side=side)


class FullyConnectedMultiIndepFB(_OptionalUses):
    """``F ≈ u · A ⊗ G`` for a dense layer used several times (Martens, Ba & Johnson 2018)."""

    def __init__(
        self,
        layer_collection: FactorOwner,
        has_bias: bool = False,
        num_uses: int | None = None,
        diagonal_approx_for_input: bool = False,
        diagonal_approx_for_output: bool = False,
        weight_format: str = "IO",
    ) -> None:
        super().__init__(
            layer_collection,
            dense_form(weight_format, has_bias),
            input_side=DIAGONAL if diagonal_approx_for_input else USES,
            output_side=DIAGONAL if diagonal_approx_for_output else USES,
        )
        self._num_uses = num_uses


class FullyConnectedSeriesFB(_OptionalUses, SeriesFB):
    """The sum over lags between the uses of a dense layer (Martens, Ba & Johnson 2018).

    Args:
        option: 1 or 2; see ``SeriesFB``.
    """

    def __init__(
        self,
        layer_collection: FactorOwner,
        has_bias: bool = False,
        num_uses: int | None = None,
        option: int = 2,
        weight_format: str = "IO",
    ) -> None:
        super().__init__(layer_collection, dense_form(weight_format, has_bias), option)
        self._num_uses = num_uses


class ConvKFCBasicMultiIndepFB(_OptionalUses):
    """``F ≈ u · #locations · A ⊗ G`` for a convolution used several times."""

    def __init__(  # noqa: PLR0913 (the specification's signature)
        self,
        layer_collection: FactorOwner,
        params: Params,
        padding: Padding,
        strides: Sequence[int] | None = None,
        dilation_rate: Sequence[int] | None = None,
        data_format: str | None = None,
        extract_patches_fn: str | None = None,
        num_uses: int | None = None,
        sub_sample_inputs: bool | None = None,
        sub_sample_patches: bool | None = None,
        weight_format: str | None = None,
    ) -> None:
        geometry = padding, strides, dilation_rate, data_format, weight_format
        sampling = layer_collection.config.sampling(sub_sample_inputs, sub_sample_patches)
        form = _form(layer_collection, params, *geometry, sampling=sampling)
        check_extraction(extract_patches_fn, form, strides, dilation_rate)
        super().__init__(layer_collection, form, input_side=patches_side(form))
        self._num_uses = num_uses


class ConvDiagonalFB(LayerDiagonalFB):
    """The diagonal of a convolution's block: the mean squared gradient of an example.

    Args:
        params: The filter, or ``(filter, bias)``.
    """

    def __init__(  # noqa: PLR0913 (the specification's signature)
        self,
        layer_collection: FactorOwner,
        params: Params,
        strides: Sequence[int],
        padding: Padding,
        data_format: str | None = None,
        dilations: Sequence[int] | None = None,
        patch_mask: Array | None = None,
        weight_format: str | None = None,
    ) -> None:
        geometry = padding, strides, dilations, data_format, weight_format
        form = _form(layer_collection, params, *geometry, mask=patch_mask)
        super().__init__(layer_collection, form)


def _form(
    layer_collection: FactorOwner, params: Params, *geometry: Any, **options: Any
) -> LayerForm:
    """Return the form of a convolution by its parameters; see ``convolution_form``."""
    shape = layer_collection.require_shape(uses(params)[0])
    return convolution_form(shape, *geometry, has_bias=not isinstance(params, str), **options)
