"""The first few examples of a user's batch: enough to tell shapes, and they cost nothing to run."""

from collections.abc import Mapping, Sequence

from kfac_engine._types import Array
from kfac_engine.graph.structure import Input

# Symbols that exporters and people write for the batch; others begin with "batch".
_BATCH_SYMBOLS = frozenset({"n", "b", "bs"})

# Few, and a length that few other axes have.
_FEW = 5


def says_batch(side: object) -> bool:
    """Whether the declared side of an input is called like a batch."""
    symbol = side.lower().replace("_", "") if isinstance(side, str) else ""
    return symbol in _BATCH_SYMBOLS or symbol.startswith("batch")


def first_examples(declared: Sequence[Input], given: Mapping[str, Array]) -> dict[str, Array]:
    """The inputs with a few examples each, where the declaration says which axis holds them.

    Args:
        declared: The inputs of the model.
        given: Input name to array, checked.

    Returns:
        Views of the arrays; the whole ones unless all inputs with an open axis have one that is
        called like a batch, and as many examples. An axis without a name may be that of time.
    """
    opened = [entry for entry in declared if any(not isinstance(s, int) for s in entry.shape or ())]
    places = [
        (entry.name, axis)
        for entry in opened
        for axis, side in enumerate(entry.shape or ())
        if says_batch(side)
    ]
    axes, sizes = dict(places), {given[name].shape[axis] for name, axis in places}
    unknown = any(entry.shape is None for entry in declared)
    if unknown or not len(axes) == len(places) == len(opened) or len(sizes) != 1:
        return dict(given)
    return {
        name: array[(slice(None),) * axes[name] + (slice(_FEW),)] if name in axes else array
        for name, array in given.items()
    }
