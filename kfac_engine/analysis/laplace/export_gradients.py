"""Records the gradients of each example with respect to one layer, for all outputs at once.

The values are recorded arrays (``recording``). The gradients of a layer's output for the ``k``
outputs of an example are one array ``(kn, …)``: one after the other along the first axis.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kfac_engine.analysis.fisher_matrix.gradient_forms import (
    FactoredGradients,
    Gradients,
    WholeGradients,
)
from kfac_engine.backend.channel_groups import split_features
from kfac_engine.layers.broadcast import BroadcastShape, ScaleShiftForm, per_example
from kfac_engine.layers.grouped import GroupedPacking
from kfac_engine.layers.layer_forms import LayerForm
from kfac_engine.layers.views import PatchView, RowView, TokenIdView, View
from kfac_engine.recording.operations import Operations
from kfac_engine.recording.recorded import Symbol


class Recording(Protocol):
    """Records the gradients of a layer.

    Attributes:
        needs_first_axis: Whether the examples must be alone on the first axis of each tensor.
    """

    @property
    def needs_first_axis(self) -> bool: ...

    def fixed_axes(self, output: bool, shape: tuple[int, ...]) -> set[int]:
        """Return the axes of a tensor of a layer whose sizes the parameters determine.

        Args:
            output: Whether the tensor is an output, or an input.
            shape: Shape of the tensor in the sample run.
        """

    def gradients(
        self, inputs: Sequence[Symbol], outputs: Sequence[Symbol], sources: int
    ) -> Gradients:
        """Return the gradients of each example.

        Args:
            inputs: The input of each use; empty for a shift, which has none.
            outputs: The gradients of the output of each use.
            sources: Number ``k`` of outputs of an example.
        """


@dataclass(frozen=True, slots=True)
class Recordings:
    """Chooses how the gradients of a layer are recorded, by the form of its block.

    Attributes:
        inputs: Number of inputs of the layer.
        outputs: Number of its outputs.
    """

    inputs: int
    outputs: int

    def rows(self, form: LayerForm) -> Recording | None:
        """Return a recording of rows; None if a view is unknown or an output has no own input."""
        views, packing = (form.input_view, form.output_view), form.packing
        known = all(type(view) in _VIEWS for view in views) and form.output_view.has_rows
        known = known and (packing.one_matrix or type(packing) in _PACKINGS)
        if not known or any(_VIEWS[type(view)].crops(view) for view in views):
            return None
        folded = form.num_uses > 1 and self.outputs == 1
        return None if folded or self.inputs != self.outputs else _RecordedRows(form)

    def sums(self, form: ScaleShiftForm) -> Recording | None:
        """Record sums over the entries that a parameter is broadcast to."""
        return _RecordedSums(form)

    def one_by_one(self) -> Recording | None:
        """Return None: inputs and output gradients do not suffice."""
        return None


@dataclass(frozen=True, slots=True)
class _RecordedRows:
    """Records gradients of a layer: the sums ``Σ_t a_t ds_tᵀ`` over uses and positions."""

    form: LayerForm

    @property
    def needs_first_axis(self) -> bool:
        return True

    def fixed_axes(self, output: bool, shape: tuple[int, ...]) -> set[int]:
        view = self.form.output_view if output else self.form.input_view
        return _VIEWS[type(view)].feature_axes(view, len(shape))

    def gradients(
        self, inputs: Sequence[Symbol], outputs: Sequence[Symbol], sources: int
    ) -> Gradients:
        form, views = self.form, (self.form.input_view, self.form.output_view)
        backend = Operations(outputs[0].tape)
        a, ds = (
            np.concatenate([_VIEWS[type(view)].rows(view, x, backend) for x in tensors], axis=1)
            for view, tensors in zip(views, (inputs, outputs), strict=True)
        )
        split = _PACKINGS.get(type(form.packing))
        if split is not None:
            taps = [_VIEWS[type(view)].taps(view) for view in views]
            a, ds = (split(form.packing, *pair) for pair in zip((a, ds), taps, strict=True))
        if form.packing.has_bias:
            a = backend.homogeneous(a)
        ds = _by_source(ds, sources).swapaxes(0, 1)
        if split is not None:
            return WholeGradients(a.swapaxes(2, 3)[:, None] @ ds)
        return FactoredGradients(a, ds)


@dataclass(frozen=True, slots=True)
class _RecordedSums:
    """Records gradients of scale and shift: the sums ``[Σ x∘ds, Σ ds]`` over uses and positions."""

    form: ScaleShiftForm

    @property
    def needs_first_axis(self) -> bool:
        return False

    def fixed_axes(self, output: bool, shape: tuple[int, ...]) -> set[int]:
        del output
        rank, parts = len(shape), [part for part in (self.form.scale, self.form.shift) if part]
        entries = {i for part in parts for i in range(rank) if i not in part.summed(shape)}
        return entries - {part.batch_axis % rank for part in parts}

    def gradients(
        self, inputs: Sequence[Symbol], outputs: Sequence[Symbol], sources: int
    ) -> Gradients:
        total: Symbol = 0
        for number, stacked in enumerate(outputs):
            ds, columns = _by_source(stacked, sources), []
            if self.form.scale and inputs:
                columns.append(_per_example(inputs[number] * ds, self.form.scale))
            if self.form.shift:
                columns.append(_per_example(ds, self.form.shift))
            total = total + np.concatenate(columns, axis=2)
        return WholeGradients(total[:, :, None, :, None])


def _by_source(x: Symbol, sources: int) -> Symbol:
    """Split the first axis into the ``k`` outputs of an example and the examples, ``(k, n, …)``."""
    return x.reshape(sources, x.shape[0] // sources, *x.shape[1:])


class _AfterSources(BroadcastShape):
    """The broadcast of a parameter to data that has an axis of sources before its other axes."""

    __slots__ = ()

    def summed(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(axis for axis in BroadcastShape.summed(self, shape) if axis)


def _per_example(gradients: Symbol, of: BroadcastShape) -> Symbol:
    """Return the gradients of a parameter that is broadcast, ``(n, k, entries)``."""
    rank = gradients.ndim - 1
    feature_axis, batch_axis = of.feature_axis % rank - rank, 1 + of.batch_axis % rank
    rows: Symbol = per_example(gradients, _AfterSources(of.shape, feature_axis, batch_axis))
    return rows.reshape(rows.shape[0], gradients.shape[0], -1)


# -- views and packings ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _RecordedView:
    """How a view is recorded.

    Attributes:
        feature_axes: Return the axes of the features of a tensor, from its number of axes.
        rows: Record the rows of a tensor, ``(n, t, d)``.
        taps: Return the number of features of a channel.
        crops: Return whether the window removes pixels, which is not recorded.
    """

    feature_axes: Callable[[Any, int], set[int]]
    rows: Callable[[Any, Symbol, Operations], Symbol]
    taps: Callable[[Any], int] = lambda _: 1
    crops: Callable[[Any], bool] = lambda _: False


def _patches(view: PatchView, x: Symbol, backend: Operations) -> Symbol:
    images = x if view.channels_first else np.moveaxis(x, -1, 1)
    return backend.patches(images, view.window)


def _one_hot(view: TokenIdView, x: Symbol, backend: Operations) -> Symbol:
    del backend
    ids = x.reshape(x.shape[0], -1)
    depth = x.tape.constant(view.vocabulary, np.int64)
    levels, shape = x.tape.constant([0, 1], x.tape.dtype), (*ids.shape, view.vocabulary)
    units = ids.new("OneHot", depth, levels, shape=shape, dtype=x.tape.dtype)
    return units if view.positions else units.sum(axis=1, keepdims=True)


# The views that can be recorded.
_VIEWS: Mapping[type[View], _RecordedView] = {
    RowView: _RecordedView(
        feature_axes=lambda view, rank: {view.feature_axis % rank},
        rows=lambda view, x, backend: view.rows(x, backend),
    ),
    PatchView: _RecordedView(
        feature_axes=lambda view, rank: {view.feature_axis % rank},
        rows=_patches,
        taps=lambda view: view.window.taps,
        crops=lambda view: min(view.window.begins + view.window.ends) < 0,
    ),
    TokenIdView: _RecordedView(feature_axes=lambda view, rank: set(), rows=_one_hot),
}


def _by_group(packing: GroupedPacking, x: Symbol, taps: int) -> Symbol:
    groups: Symbol = split_features(x, packing.groups, taps)
    return groups


# The packings with several matrices that can be recorded.
_PACKINGS: Mapping[type, Callable[[Any, Symbol, int], Symbol]] = {GroupedPacking: _by_group}
