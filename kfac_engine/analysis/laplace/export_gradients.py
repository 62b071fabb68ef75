"""Records the gradients of each example with respect to one layer, for all outputs at once.

The values are recorded arrays (``recording``). The gradients of a layer's output for the ``k``
outputs of an example are one array ``(kn, …)``: one after the other along the first axis.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from kfac_engine.analysis.fisher_matrix.gradient_forms import (
    FactoredGradients,
    Gradients,
    WholeGradients,
)
from kfac_engine.backend.channel_groups import split_features
from kfac_engine.curvature.blocks.base import FisherBlock
from kfac_engine.curvature.blocks.embedding import TiedTableFB
from kfac_engine.curvature.blocks.kronecker import KroneckerProductFB
from kfac_engine.curvature.blocks.scale_shift import ScaleShiftFB, ScaleShiftForm
from kfac_engine.curvature.blocks.single import LayerDiagonalFB
from kfac_engine.layers.broadcast import Reduction, per_example
from kfac_engine.layers.grouped import GroupedPacking
from kfac_engine.layers.layer_forms import LayerForm
from kfac_engine.layers.token_ids import TokenIdView
from kfac_engine.layers.views import PatchView, RowView, View
from kfac_engine.recording.operations import Operations
from kfac_engine.recording.recorded import Symbol

Form: TypeAlias = LayerForm | ScaleShiftForm


def form_of(block: FisherBlock, inputs: int, outputs: int) -> Form | None:
    """Return how a layer is read; None if its inputs and output gradients do not suffice.

    Args:
        block: The block of the layer.
        inputs: Number of its inputs.
        outputs: Number of its outputs.
    """
    if isinstance(block, ScaleShiftFB):
        return block.form
    if not isinstance(block, KroneckerProductFB | LayerDiagonalFB):
        return None
    if isinstance(block, TiedTableFB):  # its uses are read in two ways
        return None
    form = block.form
    views = form.input_view, form.output_view
    windows = [view.window for view in views if isinstance(view, PatchView)]
    known = type(views[0]) in (RowView, PatchView, TokenIdView)
    known = known and type(views[1]) in (RowView, PatchView)
    crops = any(min(window.begins + window.ends) < 0 for window in windows)
    several = form.num_uses == 1 or outputs > 1
    return form if known and not crops and inputs == outputs and several else None


def fixed_axes(form: Form, output: bool, shape: tuple[int, ...]) -> set[int]:
    """Return the axes of a tensor of a layer whose sizes are those of its parameters.

    Args:
        form: How the layer is read.
        output: Whether the tensor is an output, or an input.
        shape: Shape of the tensor in the sample run.
    """
    rank = len(shape)
    if isinstance(form, ScaleShiftForm):
        parts = [reduction for reduction in (form.scale, form.shift) if reduction]
        entries = {i for part in parts for i in range(rank) if i not in part.summed(shape)}
        return entries - {part.batch_axis % rank for part in parts}
    view = form.output_view if output else form.input_view
    if isinstance(view, PatchView):
        return {1 if view.channels_first else rank - 1}
    return {view.feature_axis % rank} if isinstance(view, RowView) else set()


def layer_gradients(
    form: Form, inputs: Sequence[Symbol], outputs: Sequence[Symbol], sources: int
) -> Gradients:
    """Return the gradients of each example.

    Args:
        form: How the layer is read.
        inputs: The input of each use; empty for a shift, which has none.
        outputs: The gradients of the output of each use.
        sources: Number ``k`` of outputs of an example.
    """
    if isinstance(form, ScaleShiftForm):
        return _sums(form, inputs, outputs, sources)
    return _of_rows(form, inputs, outputs, sources)


def _of_rows(
    form: LayerForm, inputs: Sequence[Symbol], outputs: Sequence[Symbol], sources: int
) -> Gradients:
    """Return the sums ``Σ_t a_t ds_tᵀ`` over uses and positions."""
    backend = Operations(outputs[0].tape)
    a: Symbol = np.concatenate([_rows(form.input_view, x, backend) for x in inputs], axis=1)
    ds: Symbol = np.concatenate([_rows(form.output_view, x, backend) for x in outputs], axis=1)
    if isinstance(form.packing, GroupedPacking):
        views, groups = (form.input_view, form.output_view), form.packing.groups
        taps = [v.window.taps if isinstance(v, PatchView) else 1 for v in views]
        a, ds = (split_features(x, groups, t) for x, t in zip((a, ds), taps, strict=True))
    if form.packing.has_bias:
        a = backend.homogeneous(a)
    ds = _by_source(ds, sources).swapaxes(0, 1)
    if isinstance(form.packing, GroupedPacking):
        return WholeGradients(a.swapaxes(2, 3)[:, None] @ ds)
    return FactoredGradients(a, ds)


def _sums(
    form: ScaleShiftForm, inputs: Sequence[Symbol], outputs: Sequence[Symbol], sources: int
) -> Gradients:
    """Return the sums ``[Σ x∘ds, Σ ds]`` over uses and positions."""
    total: Symbol = 0
    for number, stacked in enumerate(outputs):
        ds, columns = _by_source(stacked, sources), []
        if form.scale and inputs:
            columns.append(_per_example(inputs[number] * ds, form.scale))
        if form.shift:
            columns.append(_per_example(ds, form.shift))
        total = total + np.concatenate(columns, axis=2)
    return WholeGradients(total[:, :, None, :, None])


def _by_source(x: Symbol, sources: int) -> Symbol:
    """Divide the first axis by outputs of an example, ``(k, n, …)``."""
    return x.reshape(sources, x.shape[0] // sources, *x.shape[1:])


@dataclass(frozen=True, slots=True)
class _AfterSources:
    """A reduction of data behind an axis of sources, which stays.

    Attributes:
        reduction: The reduction of the data.
        rank: Number of axes of the data.
    """

    reduction: Reduction
    rank: int

    @property
    def batch_axis(self) -> int:
        return 1 + self.reduction.batch_axis % self.rank

    def summed(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(axis + 1 for axis in self.reduction.summed(shape[1:]))


def _per_example(gradients: Symbol, reduction: Reduction) -> Symbol:
    """Return the gradients of a parameter that is broadcast, ``(n, k, entries)``."""
    rows: Symbol = per_example(gradients, _AfterSources(reduction, gradients.ndim - 1))
    return rows.reshape(rows.shape[0], gradients.shape[0], -1)


def _rows(view: View, x: Symbol, backend: Operations) -> Symbol:
    """Return the rows of a tensor, ``(n, t, d)``, for every size of images."""
    library: Symbol = backend
    if isinstance(view, PatchView):
        images = x if view.channels_first else np.moveaxis(x, -1, 1)
        return backend.patches(images, view.window)
    if not isinstance(view, TokenIdView):
        return view.rows(x, library)
    ids = x.reshape(x.shape[0], -1)
    depth = x.tape.constant(view.vocabulary, np.int64)
    levels, shape = x.tape.constant([0, 1], x.tape.dtype), (*ids.shape, view.vocabulary)
    units = ids.new("OneHot", depth, levels, shape=shape, dtype=x.tape.dtype)
    return units if view.positions else units.sum(axis=1, keepdims=True)
