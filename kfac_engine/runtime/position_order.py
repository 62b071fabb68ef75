"""Finds the order of examples and positions on an axis that has both."""

from collections.abc import Mapping, Sequence

import numpy as np

from kfac_engine._types import Array
from kfac_engine.errors import BackendError
from kfac_engine.graph.structure import Fact, Graph
from kfac_engine.runtime.batch_axis import Batch
from kfac_engine.runtime.example_axis import ExampleAxis
from kfac_engine.runtime.sample_run import open_run, sample_batch

# Relative to the largest entry, for the results of a product whose rows have another order.
_ROUNDING = 1e-5


def find_position_orders(
    graph: Graph,
    facts: Mapping[str, Fact],
    names: Sequence[str],
    batch: Batch,
    inputs: Mapping[str, Array] | None = None,
) -> dict[str, bool | None]:
    """Return whether positions come before examples on the axis that has both, for each value.

    The model runs on a batch and on the same examples in reverse order. The answer is True if each
    position has the entries of all examples, one after the other, and False if each example has the
    entries of its positions. It is None if neither or both are possible.
    """
    sampled, run = sample_batch(graph, facts, inputs), open_run(graph)
    for feeds in (_with_ids(sampled), sampled) if inputs is None else (sampled,):
        reverse = {
            name: np.flip(array, batch.inputs[name]) if name in batch.inputs else array
            for name, array in feeds.items()
        }
        try:
            before, after = run.values(feeds, names), run.values(reverse, names)
        except BackendError:  # other identifiers are not valid
            continue
        return {
            name: _order(before[name], after[name], batch.places[name], batch.size)
            for name in names
        }
    return dict.fromkeys(names)


def _with_ids(feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Replace generated identifiers, which are all zero, by different ones."""
    rng = np.random.default_rng(0)
    return {
        name: rng.integers(0, 2, array.shape).astype(array.dtype)
        if array.dtype.kind in "iu"
        else array
        for name, array in feeds.items()
    }


def _order(before: Array, after: Array, place: ExampleAxis, size: int) -> bool | None:
    """Return the order under which the reverse batch has the reverse results."""
    scale = _ROUNDING * float(np.abs(before).max(initial=0))
    fits = [
        np.allclose(_reversed(before, place, size, positions_first), after, rtol=0, atol=scale)
        for positions_first in (False, True)
    ]
    return fits[True] if fits[True] != fits[False] else None


def _reversed(array: Array, place: ExampleAxis, size: int, positions_first: bool) -> Array:
    """Return an array with its examples in reverse order."""
    shape, axis = array.shape, place.axis
    order = (place.repeats, size) if positions_first else (size, place.repeats)
    split = array.reshape(*shape[:axis], *order, *shape[axis + 1 :])
    return np.flip(split, axis + positions_first).reshape(shape)
