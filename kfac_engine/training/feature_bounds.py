"""Bounds the lengths of a layer's updates along single features.

A rare feature is zero in most rows, and often in all rows of the sample from which statistics are
computed. The natural gradient is then far too long along this feature, and an update changes the
outputs of the rows with the feature many times as much as those of other rows. Where most features
are rare, as in one-hot columns and counts of words, each row has few of them, and an update of the
usual norm changes the outputs of every row too little.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import reduce
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend.namespace import array_module, is_recorded
from kfac_engine.backend.protocol import Backend
from kfac_engine.curvature.blocks.base import FisherBlock
from kfac_engine.engine.engine import Engine
from kfac_engine.graph.analysis.subgraph import dependents, of_data
from kfac_engine.graph.structure import ONLY_SHAPES
from kfac_engine.layers.feature_powers import LayerInput, inner
from kfac_engine.layers.parameter_slices import Piece
from kfac_engine.runtime.model import OnnxModel
from kfac_engine.training.kfac_updates import StepInputs
from kfac_engine.training.vectors import Vector, combine

# The square of a rare feature in its active rows is at least this multiple of its mean square. The
# multiple is 3 for normal numbers, and 6 for these after a rectifier.
_RARE = 10.0
# Decay of the powers of the features in a step.
_MEMORY = 0.99
# Share of the examples above which a batch counts as whole; the sum of shares is rounded.
_WHOLE = 0.999
# The bounds of features depend on one another; this many iterations come close to the solution.
_PASSES = 4
_LEAST = 1e-30  # least divisor
# If more than this part of a table's features is rare, statistics have whole batches.
_MOST = 0.5

# The slot of the powers, which has one array.
POWERS = "feature_powers"


@dataclass(frozen=True, slots=True)
class FeatureBounds:
    """Shortens directions along rare features whose rows they would move too far.

    A direction with the rows ``p_j``, one for each feature, changes the outputs of a layer by
    ``Σ x_j p_j`` on a row x of its inputs. The mean square of that change is about
    ``m = Σ E[x_j²] |p_j|²``. In the rows in which feature j is active, its square is about ``a_j =
    E[x_j⁴] / E[x_j²]``, so that the square of their change is ``a_j |p_j|²``. A feature is rare if
    ``a_j > 10 E[x_j²]``. The direction is shortened along rare features with ``a_j |p_j|² > m``.
    Its length counts what it changes: see ``Shortened``. Means are over the rows of all steps, with
    a decay of 0.99; batches in which a target does not count are left out.
    """

    weights: Mapping[str, Piece] = field(default_factory=dict)  # weights by unit
    inputs: tuple[LayerInput, ...] = ()  # the inputs of the layers
    # Places of the features of each weight among the features of all inputs; where weights are
    # stacked for a file, a tuple with a place for each matrix.
    places: Mapping[str, Any] = field(default_factory=dict)
    # Weights whose layer has one row for each example, such as a layer that reads a table.
    of_tables: Collection[str] = ()

    def new_slots(self, arrays: Vector) -> dict[str, Array]:
        """Return a host array in the shape of the powers, ``(3, features)``, at least float32."""
        if not self.places:
            return {}
        every = [p if isinstance(p, tuple) else (p,) for p in self.places.values()]
        size = max(place.stop for places in every for place in places)
        like = arrays[next(iter(self.places))]
        dtype = np.result_type(like.dtype, np.float32)
        return {POWERS: np.empty((3, size), dtype)}

    def shortened(
        self, directions: Mapping[str, Array], step: StepInputs, backend: Backend
    ) -> "Shortened":
        """Write the new powers of the features; return the directions within their bounds."""
        bounded = dict(directions)
        if not self.places or step.features is None:
            return Shortened(bounded, bounded)
        powers = step.new_slots[POWERS][POWERS]
        share = step.features / step.examples
        # The shares of the power 0 are one, unless parts of the batch have been left out.
        share = np.where(share[:1] > _WHOLE, share, 0.0)
        combine(powers, _MEMORY, step.slots[POWERS][POWERS], 1 - _MEMORY, share)
        rare, means, limits = _activity(powers)
        known = not is_recorded(rare)
        if known and not rare.any():
            return Shortened(bounded, bounded)
        active = dict(bounded)
        for name, place in self.places.items():
            if known and not rare[place].any():
                continue
            weight, direction = self.weights[name], directions[name]
            matrices = weight.matrices(direction, copy=False)
            count, _, outputs = matrices.shape
            arrays = []
            for each in (rare, limits, means):
                array = _at(place, each).reshape(count, -1)
                arrays.append(backend.asarray(array) if known else array)
            # The rows of a convolution are taps of each channel.
            taps: Any = matrices.reshape(count, -1, arrays[0].shape[1], outputs)
            shares = _shares(inner(taps, "gtfo,gtfo->gf"), *arrays)
            shorter = taps * shares.astype(taps.dtype, copy=False)[:, None, :, None]
            bounded[name] = weight.array(shorter.reshape(matrices.shape), direction)
            squares = np.where(arrays[0], np.minimum(arrays[2], 1.0), 1.0)
            weighted = shorter * squares.astype(taps.dtype, copy=False)[:, None, :, None]
            active[name] = weight.array(weighted.reshape(matrices.shape), direction)
        return Shortened(bounded, active)

    def most_are_rare(self, slots: Mapping[str, Mapping[str, Any]]) -> Any:
        """Return whether more than half of the features of a table are rare.

        The result is a truth value, or a recorded one. Layers with several rows for each example
        are not counted, because a part of the batch has enough rows for them.
        """
        if not self.of_tables:
            return False
        rare, *_ = _activity(slots[POWERS][POWERS])
        parts = [rare[self.places[name]].astype(np.float32).mean() for name in self.of_tables]
        return reduce(np.maximum, parts) > _MOST


class Shortened(NamedTuple):
    """Directions within their bounds, and the same directions for the lengths of updates.

    In ``active``, row j of a direction is multiplied by ``min(1, E[x_j²])`` if feature j is rare.
    The inner product of ``directions`` and ``active`` replaces the squared norm of a direction. It
    is the mean square of the outputs' change for rare features, and the squared norm for others.
    """

    directions: dict[str, Array]
    active: dict[str, Array]


def _at(place: slice | tuple[slice, ...], numbers: Any) -> Any:
    """Return the numbers of the features of a weight, or of each matrix of a stack."""
    if isinstance(place, slice):
        return numbers[place]
    xp, size = array_module(numbers), place[0].stop - place[0].start
    starts = xp.asarray(np.array([[each.start] for each in place]))
    return numbers[starts + np.arange(size)]


def _activity(powers: Array) -> tuple[Any, Any, Any]:
    """Return whether features are rare, their mean squares, and ``1 / a_j`` for rare features."""
    squares, fourths = powers[1], powers[2]
    means = squares / np.maximum(powers[0], _LEAST)
    rare = fourths > _RARE * means * squares
    return rare, means, squares / np.where(rare, fourths, 1.0)


def _shares(norms: Any, rare: Any, limits: Any, means: Any) -> Any:
    """Return the factors of a direction along features, ``(count, features)``.

    Args:
        norms: Squared norms of the rows of each matrix.
        rare: Whether features are rare.
        limits: ``1 / a_j`` of rare features: see ``FeatureBounds``.
        means: Mean squares of the features.
    """
    bounded = norms
    for _ in range(_PASSES):
        most = limits * (means * bounded).sum(axis=-1, keepdims=True)
        bounded = np.where(rare, np.minimum(bounded, most), bounded)
    return (bounded / (norms + (norms == 0))) ** 0.5


def feature_bounds(
    engine: Engine, weights: Mapping[str, Piece], blocks: Mapping[str, FisherBlock], arrays: Vector
) -> FeatureBounds:
    """Return the bounds of weights, by unit, whose layers have these blocks.

    A layer has bounds if data reach it along a path without another of these layers, such as a
    layer that reads embedded, normalized or gated columns. These layers mix features, so that
    single features behind them are not rare in the same way.
    """
    mixed = _mixed(engine, blocks)
    sizes: dict[LayerInput, int] = {}
    sources: dict[str, LayerInput] = {}
    facts = model_of(engine).facts
    for name, weight in weights.items():
        count, rows, _ = weight.matrices(arrays[name], copy=False).shape
        tensors, packing = blocks[name].layer_rows(), blocks[name].packing
        if len(tensors) == 1 and packing is not None:
            source = LayerInput(tensors[0].inputs, tensors[0].input_view)
            features = rows // prod(packing.kernel(engine.collection.require_shape(weight.weight)))
            if source.is_readable and features > 1 and mixed.isdisjoint(source.names):
                sources[name], sizes[source] = source, count * features
    stops = accumulate(sizes.values())
    places = {s: slice(k - sizes[s], k) for s, k in zip(sizes, stops, strict=True)}
    of_tables = [n for n, s in sources.items() if all(len(facts[t].shape) == 2 for t in s.names)]
    by_unit = {name: places[source] for name, source in sources.items()}
    return FeatureBounds(weights, tuple(sizes), by_unit, of_tables)


def _mixed(engine: Engine, blocks: Mapping[str, FisherBlock]) -> frozenset[str]:
    """Return the values that data reach only through the matrices of layers."""
    graph = model_of(engine).graph
    layers = [rows for block in blocks.values() for rows in block.layer_rows()]
    outputs = {name for rows in layers for name in rows.outputs}
    inputs = [entry.name for entry in graph.inputs]
    return of_data(graph) - dependents(graph.nodes, inputs, ONLY_SHAPES, outputs)


def model_of(engine: Engine) -> OnnxModel:
    """Return the model of an engine."""
    model = engine.collection.graph
    assert isinstance(model, OnnxModel), "an engine has a model"
    return model
