"""Gradients and Jacobians of single examples by parameter, layer by layer."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from kfac_engine._types import Array
from kfac_engine.curvature.blocks.base import FisherBlock
from kfac_engine.curvature_result.example_gradients import LayerGradients, numbered
from kfac_engine.curvature_result.layout import Layout
from kfac_engine.curvature_result.packed import packed
from kfac_engine.curvature_result.spectrum import Float
from kfac_engine.runtime.trace import Trace


@dataclass(frozen=True, slots=True, eq=False)
class ExampleTile:
    """Derivatives of consecutive examples with respect to the parameters of one layer.

    Attributes:
        examples: Numbers of the examples in the batch.
        arrays: Parameter name to derivatives in float64. Gradients are ``(m, *shape)`` for ``m``
            examples, rows of Jacobians ``(m, k, *shape)`` for ``k`` values of an example. If
            several layers have parts of a parameter, the name and the shape are those of the part.
    """

    examples: slice
    arrays: Mapping[str, Array]

    def without_sources(self) -> "ExampleTile":
        """Return the sum over the axis of the sources."""
        return ExampleTile(self.examples, {n: a.sum(axis=1) for n, a in self.arrays.items()})


def tiles(
    layout: Layout, trace: Trace, sources: Sequence[Mapping[str, Array]]
) -> Iterator[ExampleTile]:
    """Yield the derivatives of a batch, layer by layer and in tiles of examples.

    Args:
        layout: The model with its layers.
        trace: The batch.
        sources: Cotangents of each row of a Jacobian.

    Yields:
        Derivatives with an axis for the sources after that of the examples.
    """
    readers = LayerGradients(layout.assembly).read(trace, sources)
    scratch_bytes = layout.assembly.collection.backend.scratch_bytes
    for (layer, block), reader in zip(layout.layers, readers, strict=True):
        shapes = {name: layout.vector.places(name).shape for name in layer.parameters}
        for examples, tile in numbered(reader, scratch_bytes, whole=True):
            yield ExampleTile(examples, _unpacked(block, tile.matrices(), shapes))


def _unpacked(
    block: FisherBlock, rows: Float, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Array]:
    """Return packed vectors ``(m, k, g, d_in, d_out)`` as arrays ``(m, k, *shape)``."""
    ends = np.cumsum([0, *map(prod, shapes.values())]).tolist()
    numbers = np.arange(ends[-1], dtype=np.intp)
    arrays = (
        numbers[start:end].reshape(shape)
        for start, end, shape in zip(ends, ends[1:], shapes.values(), strict=False)
    )
    flat = np.empty((*rows.shape[:2], ends[-1]))
    flat[:, :, packed(block, tuple(arrays))] = rows
    return {
        name: flat[:, :, start:end].reshape(*rows.shape[:2], *shape)
        for start, end, (name, shape) in zip(ends, ends[1:], shapes.items(), strict=False)
    }
