"""Weights the rows of a layer in the factor of the layer's inputs.

The rows of an example have the weight of the example: the mean weight of its predictions that
count, and 0 if none counts. If some of its predictions do not count, such as predictions at
padding, its rows without a gradient are left out, because the loss does not depend on them. Such a
row adds nothing to the Fisher matrix, ``Σ_rows a aᵀ ⊗ ds dsᵀ``, whatever ``a`` is. This holds
behind an attention as well: a token that is read by a token that counts has a gradient.

Factors of gradients need no weights of rows: sources are multiplied by the roots of the weights of
their predictions.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kfac_engine._types import Array, Values
from kfac_engine.backend.namespace import array_module, as_array, recordable
from kfac_engine.backend.protocol import Backend
from kfac_engine.curvature.factors.statistics import Uses, rows_name
from kfac_engine.errors import UnsupportedError
from kfac_engine.layers.views import RowView, View, folded_shape
from kfac_engine.losses.base import LossFunction
from kfac_engine.losses.checks import Named


@dataclass(frozen=True, slots=True)
class LayerRows:
    """The tensors of a layer; rows of inputs and outputs correspond."""

    inputs: Uses  # names of the input, over uses
    outputs: Uses  # names of the output, over uses
    view: View  # reads an output as rows
    input_view: View  # reads an input as rows
    num_uses: int  # number of uses


@dataclass(frozen=True, slots=True)
class ExamplePlaces:
    """Where values have the examples."""

    # Axes of the examples, by name of a value; 0 where absent.
    axes: Mapping[str, int] = field(default_factory=dict)
    # Values whose rows belong to unknown examples, such as the nodes of graphs.
    unplaced: Collection[str] = ()
    # Returns the values on whose axis of examples each position has the entries of all examples,
    # one after the other.
    positions_first: Callable[[], Collection[str]] = frozenset


@dataclass(frozen=True, slots=True)
class ExampleWeights:
    """The weights of the examples of a batch whose targets have weights."""

    weights: Array | None  # a number ≥ 0 for each example; None for ones
    # Whether an example has predictions that count and others that do not; None if it is not known,
    # because examples and positions share an axis.
    partial: Array | None
    places: ExamplePlaces  # where values have the examples

    @classmethod
    @recordable
    def of(
        cls,
        losses: Iterable[tuple[LossFunction, Array | None]],
        values: Named,
        examples: int,
        places: ExamplePlaces,
    ) -> "ExampleWeights | None":
        """Return the weights of the examples of a batch; None if no target has a weight.

        ``losses`` has the weights of the predictions of each loss; None means ones.
        ``UnsupportedError`` is raised if examples with different weights share an axis with
        positions.
        """
        pairs = [(as_array(values[loss.inputs[0]]), loss, weights) for loss, weights in losses]
        if all(weights is None for _, _, weights in pairs):
            return None
        rows = []
        for like, loss, weights in pairs:
            xp, axis = array_module(like), places.axes.get(loss.inputs[0], 0)
            if like.shape[axis] != examples:
                if weights is None or weights.dtype.kind == "b":
                    return cls(None, None, places)
                raise UnsupportedError(
                    f"an axis of '{loss.inputs[0]}' holds examples and positions, or one of "
                    f"several sets of examples, so examples cannot have weights other than 0 and "
                    f"1; give the examples an axis of their own, use a mask, or multiply a "
                    f"residual by the roots of its weights."
                )
            counts = xp.ones((1,) * like.ndim) if weights is None else weights
            counts = xp.moveaxis(xp.broadcast_to(counts, like.shape), axis, 0)
            rows.append(counts.reshape(examples, -1).astype(np.float64))
        joined = xp.concatenate(rows, axis=1)
        counting = (joined > 0).sum(axis=1)
        means = joined.sum(axis=1) / xp.maximum(counting, 1)
        return cls(means, (counting > 0) & (counting < joined.shape[1]), places)

    @property
    def by_gradient(self) -> bool:
        """Whether gradients decide which rows are left out."""
        return self.partial is None or bool(self.places.unplaced) or bool(self.partial.any())

    @property
    def by_ratio(self) -> bool:
        """Whether rows of unknown examples have other weights than 0 and 1."""
        if not self.places.unplaced or self.weights is None:
            return False
        return bool(((self.weights != 0) & (self.weights != 1)).any())

    def times_roots(self, cotangents: Values) -> dict[str, Array]:
        """Return cotangents of the losses times the roots of the weights of their examples."""
        products = {}
        for name, array in cotangents.items():
            xp, axis = array_module(array), self.places.axes.get(name, 0)
            roots = xp.sqrt(xp.asarray(self.weights)).astype(array.dtype)
            products[name] = array * roots.reshape([-1, *[1] * (array.ndim - 1 - axis)])
        return products

    @recordable
    def of_rows(
        self,
        layers: Sequence[LayerRows],
        gradients: Values,
        b: Backend,
        weighted: Values | None = None,
    ) -> dict[str, Array]:
        """Return a weight for each row of the inputs of layers, by the name that factors read.

        ``gradients`` are the gradients of outputs. A row that several layers read has a weight if
        one of them has a gradient there. ``weighted`` are the gradients for the cotangents of
        ``times_roots``, which ``by_ratio`` needs: a row of one example has the root of its weight
        as the ratio of both.
        """
        weights_of_rows: dict[str, Array] = {}
        for layer in layers:
            rows = [
                self._of_output(
                    layer, name, gradients[name], b, weighted[name] if weighted else None
                )
                for name in layer.outputs
            ]
            if len(layer.inputs) < len(rows):
                rows = [b.xp.concatenate(rows)]
            elif len(layer.inputs) > len(rows):
                rows = b.xp.split(rows[0], len(layer.inputs))
            for name, weights in zip(layer.inputs, rows, strict=True):
                key = rows_name(name)
                known = weights_of_rows.get(key)
                weights_of_rows[key] = weights if known is None else b.xp.maximum(known, weights)
        return weights_of_rows

    def _of_output(
        self, layer: LayerRows, name: str, ds: Array, b: Backend, weighted: Array | None
    ) -> Array:
        """Return a weight for each row of a layer's output."""
        folded = layer.num_uses if len(layer.outputs) == 1 else 1

        def in_rows(array: Array) -> Array:
            shape = folded_shape(array.shape, layer.view, folded)
            return layer.view.rows(array.reshape(shape), b)

        def of_rows(array: Array) -> Array:
            rows: Array = in_rows(array).max(axis=-1).reshape(-1)
            return rows

        def spread(numbers: Array) -> Array:
            axis, v = self.places.axes.get(name, 0), b.asarray(numbers).astype(ds.dtype)
            copies = ds.shape[axis] // v.shape[0]
            if copies > 1:  # all uses or positions, one after the other, or those of each example
                apart = folded > 1 or name in self.places.positions_first()
                v = b.xp.tile(v, copies) if apart else b.xp.repeat(v, copies)
            # One feature says as much as all of them.
            shape = [*ds.shape]
            if isinstance(layer.view, RowView):
                shape[layer.view.feature_axis] = 1
            zeros = b.xp.zeros(tuple(shape), ds.dtype)
            return of_rows(zeros + v.reshape([-1, *[1] * (ds.ndim - 1 - axis)]))

        reached: Array = np.sign(np.abs(in_rows(ds)).max(axis=-1)).reshape(-1)
        if self.weights is None or self.partial is None:
            return reached
        if name in self.places.unplaced:
            if weighted is None:
                return reached
            norms, others = ((in_rows(x) ** 2).sum(axis=-1).reshape(-1) for x in (ds, weighted))
            ratios: Array = others / (norms + (norms == 0))
            return ratios
        counts: Array = spread(self.weights) * b.xp.maximum(reached, spread(~self.partial))
        return counts
