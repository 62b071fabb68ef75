"""Gradients and Jacobians of single examples by parameter, layer by layer."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod

import numpy as np

from kfac_engine._types import Array
from kfac_engine.analysis.fisher_matrix.example_gradients import LayerGradients, numbered
from kfac_engine.analysis.fisher_matrix.layout import Layout
from kfac_engine.analysis.fisher_matrix.parameter_vector import ParameterVector, Places
from kfac_engine.analysis.fisher_matrix.spectrum import Float
from kfac_engine.runtime.trace import Trace


@dataclass(frozen=True, slots=True, eq=False)
class ExampleTile:
    """Derivatives of consecutive examples with respect to the parameters of one layer.

    Attributes:
        examples: Numbers of the examples in the batch.
        arrays: Parameter name to derivatives in float64. Gradients are ``(m, *shape)`` for ``m``
            examples, rows of Jacobians ``(m, k, *shape)`` for ``k`` values of an example. If
            several layers have parts of a parameter, the entries of other layers are zero.
            ``Curvature.multiply`` needs all parameters of a block, so that such a tile has the
            parameters of the other layers as well, as zeros.
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
    vector, scratch_bytes = layout.vector, layout.assembly.collection.backend.scratch_bytes
    readers = LayerGradients(layout.assembly).read(trace, sources)
    groups = _groups(layout)
    for (layer, block), reader in zip(layout.layers, readers, strict=True):
        places = layout.decomposer.places(block)
        owner = vector.parameter_of(layer.parameters[0])
        names = next(group for group in groups if owner in group)
        whole = sum(prod(vector.shapes[name]) for name in names)
        part_bytes = scratch_bytes * places.size // max(whole, 1)
        for examples, tile in numbered(reader, part_bytes, whole=True):
            yield ExampleTile(examples, _by_parameter(vector, names, places, tile.matrices()))


def _groups(layout: Layout) -> list[tuple[str, ...]]:
    """Return the parameters that share layers: the blocks of a group have all its parameters."""
    groups: list[tuple[str, ...]] = []
    for layer, _ in layout.layers:
        names = tuple(map(layout.vector.parameter_of, layer.parameters))
        joined = [group for group in groups if not set(names).isdisjoint(group)]
        groups = [group for group in groups if group not in joined]
        groups.append(tuple(dict.fromkeys(chain(*joined, names))))
    return groups


def _by_parameter(
    vector: ParameterVector, names: Sequence[str], places: Places, rows: Float
) -> dict[str, Array]:
    """Return packed vectors ``(m, k, g, d_in, d_out)`` as arrays ``(m, k, *shape)``."""
    arrays: dict[str, Array] = {}
    for name in names:
        start, shape = vector.starts[name], vector.shapes[name]
        inside = (start <= places) & (places < start + prod(shape))
        flat = np.zeros((*rows.shape[:2], prod(shape)))
        flat[:, :, places[inside] - start] = rows[:, :, inside]
        arrays[name] = flat.reshape(*rows.shape[:2], *shape)
    return arrays
