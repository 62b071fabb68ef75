"""Applies functions of a damped Fisher matrix to the gradients of single examples.

The functions are sums over eigenvalues in the eigenvectors of each block, such as the variance
``Σ G_k ∘ G_l / (s + λ)`` of predictions.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from kfac_engine._types import Array
from kfac_engine.analysis.fisher_matrix.blocks import Block, Float, Places
from kfac_engine.analysis.fisher_matrix.layout import Layout
from kfac_engine.engine.layer_gradients import (
    ENTRY_BYTES,
    Gradients,
    LayerReader,
    WholeGradients,
    read_layers,
)
from kfac_engine.engine.memory import require_gradient
from kfac_engine.engine.trainable_model import TrainableModel
from kfac_engine.errors import UnsupportedError
from kfac_engine.losses.observed import Targets
from kfac_engine.runtime.trace import Trace


def whole_rows(
    readers: Sequence[LayerReader], places: Sequence[Places], size: int, scratch_bytes: int
) -> Iterator[Float]:
    """Yield the gradients of tiles of examples with respect to all parameters, ``(m, k, size)``.

    ``places`` are the places of the entries of each layer among all parameters. ``scratch_bytes``
    bounds the memory of a tile.
    """
    largest = max(reader.entries for reader in readers)
    sources = max(1, largest // max(place.size for place in places))
    step = max(1, scratch_bytes // (ENTRY_BYTES * sources * max(size, 1)))
    for parts in zip(*(reader.tiles(step) for reader in readers), strict=True):
        matrices = [part.matrices() for part in parts]
        rows = np.zeros((*matrices[0].shape[:2], size))
        for place, part in zip(places, matrices, strict=True):
            rows[:, :, place] = part
        yield rows


def numbered_tiles(
    reader: LayerReader, scratch_bytes: int, *, whole: bool
) -> Iterator[tuple[slice, Gradients]]:
    """Yield the tiles of a reader with the numbers of their examples."""
    start, step = 0, reader.step(scratch_bytes, whole=whole)
    for tile in reader.tiles(step):
        size = len(tile.arrays[0])
        yield slice(start, start + size), tile
        start += size


# A batch, and for each gradient of an example, loss input to cotangent.
Sources = tuple[Trace, list[Mapping[str, Array]]]


def gradient_sources(layout: Layout, inputs: Mapping[str, Array], targets: Targets) -> Sources:
    """Return the batch and the cotangents of the negative log-likelihood of each example.

    Its terms have the weights of their targets. The gradient of an example is the sum over the
    cotangents.
    """
    require_gradient(layout.assembly, inputs)
    trace = TrainableModel(layout.assembly).trace(inputs, targets)
    objective = layout.assembly.task.objective
    # Those of the sum over the batch: the reduction of a curvature divides by the examples.
    seen = objective.observe(trace).as_piece()
    return trace, [objective.cotangents(trace, objective.examples(trace), seen)]


def jacobian_sources(layout: Layout, inputs: Mapping[str, Array]) -> Sources:
    """Return the batch, and cotangents that select each value of an example that the loss reads.

    The cotangents are in the row-major order of the values. An UnsupportedError says that several
    losses read several values, or that the examples are not on the first axis of the value.
    """
    task = layout.assembly.task
    name, *others = task.objective.inputs
    place = task.batch.places.get(task.objective.outputs.get(name, name))
    if others or (place is not None and not place.comes_first):
        raise UnsupportedError(
            f"the Jacobian matrix of '{name}' needs one value that the loss reads, with the "
            f"examples alone on its first axis."
        )
    require_gradient(layout.assembly, inputs)
    trace = TrainableModel(layout.assembly).trace(inputs)
    value, sources = trace[name], list[Mapping[str, Array]]()
    for index in np.ndindex(value.shape[1:]):
        cotangent = value * 0
        cotangent[(slice(None), *index)] = 1
        sources.append({name: cotangent})
    return trace, sources


def block_tiles(
    layout: Layout, blocks: Sequence[Block], batch: Sources, rotated: bool = True
) -> Iterator[tuple[Block, slice, Gradients]]:
    """Yield the derivatives of a batch in the eigenvectors of each block.

    The blocks are in the order of ``layout.frames``, and all examples of a block come before the
    next block. Each tile is a block, the numbers of its examples, and their gradients: in the basis
    of the block if ``rotated``, else as they are. Blocks of entries that the loss does not depend
    on are absent.
    """
    readers = read_layers(layout.assembly, *batch)
    scratch_bytes = layout.assembly.collection.backend.scratch_bytes
    if layout.options.structure == "full":
        (block,), start = blocks, 0
        places = [layout.decomposer.places(part) for _, part in layout.layers]
        for rows in whole_rows(readers, places, layout.vector.size, scratch_bytes):
            whole = WholeGradients(rows[:, :, None, :, None])
            examples = slice(start, start + len(rows))
            yield block, examples, whole.into(block.spectrum) if rotated else whole
            start += len(rows)
        return
    for block, reader in zip(blocks, readers, strict=False):  # the last blocks are of zeros
        for examples, tile in numbered_tiles(reader, scratch_bytes, whole=False):
            yield block, examples, tile.into(block.spectrum) if rotated else tile
