"""Gradients of single examples, layer by layer, in tiles of examples.

The gradient of an example is a sum over its uses and positions: ``Σ a dsᵀ`` for a layer that is
read as rows, ``[Σ x∘ds, Σ ds]`` for scales and shifts. One backward pass over the batch computes
``ds`` for all of these layers, and the tiles bound the memory of the products. Other parameters
take a backward pass for each example.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice, repeat

import numpy as np

from kfac_engine._types import Array
from kfac_engine.analysis.fisher_matrix.gradient_forms import (
    FactoredGradients,
    Gradients,
    WholeGradients,
)
from kfac_engine.analysis.fisher_matrix.packed import packed
from kfac_engine.analysis.fisher_matrix.parameter_vector import Places
from kfac_engine.analysis.fisher_matrix.spectrum import Float
from kfac_engine.backend.cpu.reductions import all_finite
from kfac_engine.curvature.blocks.base import FisherBlock, uses
from kfac_engine.curvature.blocks.kronecker import KroneckerProductFB
from kfac_engine.curvature.blocks.scale_shift import ScaleShiftFB
from kfac_engine.curvature.blocks.single import LayerDiagonalFB
from kfac_engine.engine.build import Assembly
from kfac_engine.engine.example_gradients import ExampleGradients
from kfac_engine.errors import NonFiniteError, UnsupportedError
from kfac_engine.layers.batched_dense import StackedDensePacking
from kfac_engine.layers.broadcast import per_example
from kfac_engine.layers.grouped import GroupedPacking
from kfac_engine.layers.layer_forms import LayerForm
from kfac_engine.layers.match import LayerMatch
from kfac_engine.layers.token_ids import TokenIdView
from kfac_engine.runtime.trace import Trace

_BYTES = 8
Cotangents = Sequence[Mapping[str, Array]]


@dataclass(frozen=True, slots=True)
class LayerReader:
    """Reads the gradients of a layer.

    Attributes:
        tiles: Yields the gradients of as many examples as its argument says, in the order of the
            batch.
        numbers: Numbers of an example in their form.
        entries: Numbers of an example as whole matrices.
    """

    tiles: Callable[[int], Iterator[Gradients]]
    numbers: int
    entries: int

    def step(self, scratch_bytes: int, *, whole: bool) -> int:
        """Return how many examples have gradients below a number of bytes, at least one."""
        return max(1, scratch_bytes // (_BYTES * max(1, self.entries if whole else self.numbers)))


@dataclass(frozen=True, slots=True)
class LayerGradients:
    """Computes gradients of single examples with respect to the parameters of each layer.

    Attributes:
        assembly: The model with its layers.
    """

    assembly: Assembly

    def read(self, trace: Trace, sources: Cotangents) -> list[LayerReader]:
        """Return the gradients of ``Σ ⟨cotangent, value⟩``.

        Args:
            trace: The batch.
            sources: For each gradient of an example, loss input to cotangent.

        Returns:
            A reader for each layer of the model. Its tiles raise a ``NonFiniteError`` for an
            example whose gradient holds NaN or infinity.
        """
        layers = self.assembly.discovery.layers
        values = [
            name for layer in layers if self._form(layer, trace) for name in uses(layer.outputs)
        ]
        wrt = tuple(dict.fromkeys(values))
        gradients = [trace.vjp(cotangents, wrt) if wrt else {} for cotangents in sources]
        readers = [self._reader(layer, trace, sources, gradients) for layer in layers]
        return [_checked(*pair, trace) for pair in zip(layers, readers, strict=True)]

    # -- private ----------------------------------------------------------------------------------

    def _block_of(self, layer: LayerMatch) -> FisherBlock:
        key = layer.parameters if len(layer.parameters) > 1 else layer.parameters[0]
        return self.assembly.collection.fisher_blocks[key]

    def _form(self, layer: LayerMatch, trace: Trace) -> "LayerForm | ScaleShiftFB | None":
        """Return how a layer is read from one backward pass; None if it cannot be."""
        block = self._block_of(layer)
        if isinstance(block, ScaleShiftFB):
            return block
        if not isinstance(block, KroneckerProductFB | LayerDiagonalFB):
            return None
        form, inputs, outputs = block.form, uses(layer.inputs), uses(layer.outputs)
        is_plain = not isinstance(form.packing, GroupedPacking | StackedDensePacking)
        is_plain = is_plain and not isinstance(form.input_view, TokenIdView)
        folded = form.num_uses > 1 and len(outputs) == 1
        if not is_plain or folded or len(inputs) != len(outputs):
            return None
        examples = self.assembly.task.objective.examples(trace)
        moved = any(not self._is_first(name) for name in (*inputs, *outputs))
        return None if moved or any(len(trace[name]) != examples for name in inputs) else form

    def _is_first(self, name: str) -> bool:
        """Return whether the first axis of a value holds the examples and nothing else."""
        place = self.assembly.task.batch.places.get(name)
        return place is None or place.comes_first

    def _reader(
        self,
        layer: LayerMatch,
        trace: Trace,
        sources: Cotangents,
        gradients: Sequence[Mapping[str, Array]],
    ) -> LayerReader:
        form = self._form(layer, trace)
        if form is None:
            block = self._block_of(layer)
            shapes = [self.assembly.collection.require_shape(name) for name in layer.parameters]
            entries = len(sources) * sum(int(np.prod(shape)) for shape in shapes)
            each = lambda step: self._one_by_one(layer, block, trace, sources, step)  # noqa: E731
            return LayerReader(each, entries, entries)
        backend = self.assembly.collection.backend
        inputs = [backend.asarray(trace[name]) for name in uses(layer.inputs) if name]
        outputs = [
            [backend.asarray(arrays[name]) for arrays in gradients] for name in uses(layer.outputs)
        ]
        if isinstance(form, ScaleShiftFB):
            values = self._sums(form, inputs, outputs)
            size = values[0].size
            return LayerReader(lambda step: _slices(values, step), size, size)
        first = self._rows(form, inputs, outputs, slice(0, 1))
        (positions, d_in), (k, _, d_out) = first.inputs.shape[1:], first.outputs.shape[1:]
        rows, entries = positions * (d_in + k * d_out), k * d_in * d_out
        examples = len(inputs[0])

        def tiles(step: int) -> Iterator[FactoredGradients]:
            for start in range(0, examples, step):
                yield self._rows(form, inputs, outputs, slice(start, start + step))

        return LayerReader(tiles, rows if positions == 1 else max(rows, entries), entries)

    def _rows(
        self,
        form: LayerForm,
        inputs: Sequence[Array],
        outputs: Sequence[Sequence[Array]],
        tile: slice,
    ) -> FactoredGradients:
        """Return the rows of all uses of a layer.

        Args:
            form: How the layer is read.
            inputs: The input of each use.
            outputs: The output gradients of each use, for each source.
            tile: The examples.
        """
        backend = self.assembly.collection.backend
        a = [self._read(form.input_view.rows(x[tile], backend)) for x in inputs]
        if form.packing.has_bias:
            a = [np.concatenate([x, np.ones((*x.shape[:-1], 1))], axis=-1) for x in a]
        ds = [
            np.stack([self._read(form.output_view.rows(g[tile], backend)) for g in use], axis=1)
            for use in outputs
        ]
        return FactoredGradients(np.concatenate(a, axis=1), np.concatenate(ds, axis=2))

    def _sums(
        self, block: ScaleShiftFB, inputs: Sequence[Array], outputs: Sequence[Sequence[Array]]
    ) -> Float:
        """Return ``[Σ x∘ds, Σ ds]`` over uses, ``(n, k, 1, entries, 1)``."""
        scaled: Sequence[Array | None] = inputs or [None] * len(outputs)
        total: Float | float = 0.0
        for x, use in zip(scaled, outputs, strict=True):
            rows = []
            for ds in use:
                columns = []
                if block.form.scale and x is not None:
                    columns.append(self._read(per_example(x * ds, block.form.scale)))
                if block.form.shift:
                    columns.append(self._read(per_example(ds, block.form.shift)))
                rows.append(np.concatenate(columns, axis=1))
            total = total + np.stack(rows, axis=1)
        return np.asarray(total)[:, :, None, :, None]

    def _one_by_one(
        self,
        layer: LayerMatch,
        block: FisherBlock,
        trace: Trace,
        sources: Cotangents,
        step: int,
    ) -> Iterator[WholeGradients]:
        """Yield gradients from a backward pass for each example."""
        task, names = self.assembly.task, layer.parameters
        each = ExampleGradients(self.assembly.model, task.objective, task.batch, task.inputs)
        examples = task.objective.examples(trace)
        reached = self.assembly.model.backward(tuple(sources[0]), names).gradients
        passes = zip(*(each(trace, cotangents, names) for cotangents in sources), strict=True)
        rows: Iterator[Float] = (
            np.stack([packed(block, tuple(self._read(g[name]) for name in names)) for g in source])
            for source in passes
        )
        try:
            if not reached:  # there is one gradient of the whole batch, zero
                rows = repeat(next(rows))
            for start in range(0, examples, step):
                yield WholeGradients(np.stack(list(islice(rows, min(step, examples - start)))))
        except UnsupportedError as failure:
            raise UnsupportedError(f"{', '.join(names)}: {failure}") from failure

    def _read(self, array: Array) -> Float:
        backend = self.assembly.collection.backend
        return np.asarray(backend.to_numpy(backend.asarray(array)), np.float64)


def _checked(layer: LayerMatch, reader: LayerReader, trace: Trace) -> LayerReader:
    """Return a reader that refuses gradients with NaN or infinity."""

    def tiles(step: int) -> Iterator[Gradients]:
        for start, tile in zip(count(0, step), reader.tiles(step), strict=False):
            arrays = (
                (tile.values,) if isinstance(tile, WholeGradients) else (tile.inputs, tile.outputs)
            )
            for array in arrays:
                if not all_finite(array):
                    example = start + int(np.argwhere(~np.isfinite(array))[0][0])
                    with trace.explain():
                        raise NonFiniteError(
                            f"the derivative of example {example} with respect to "
                            f"{', '.join(layer.parameters)} holds NaN or infinity."
                        )
            yield tile

    return replace(reader, tiles=tiles)


def _slices(values: Float, step: int) -> Iterator[WholeGradients]:
    """Yield tiles of gradients."""
    for start in range(0, len(values), step):
        yield WholeGradients(values[start : start + step])


def whole_rows(
    readers: Sequence[LayerReader], places: Sequence[Places], size: int, scratch_bytes: int
) -> Iterator[Float]:
    """Yield the gradients of tiles of examples with respect to all parameters.

    Args:
        readers: Reader of each layer.
        places: For each layer, the places of its entries among all parameters.
        size: Number of entries of all parameters.
        scratch_bytes: Bound of the memory of a tile.

    Yields:
        ``(m, k, size)``.
    """
    largest = max(reader.entries for reader in readers)
    sources = max(1, largest // max(place.size for place in places))
    step = max(1, scratch_bytes // (_BYTES * sources * max(size, 1)))
    for parts in zip(*(reader.tiles(step) for reader in readers), strict=True):
        matrices = [part.matrices() for part in parts]
        rows = np.zeros((*matrices[0].shape[:2], size))
        for place, part in zip(places, matrices, strict=True):
            rows[:, :, place] = part
        yield rows


def numbered(
    reader: LayerReader, scratch_bytes: int, *, whole: bool
) -> Iterator[tuple[slice, Gradients]]:
    """Yield the tiles of a reader with the numbers of their examples."""
    start, step = 0, reader.step(scratch_bytes, whole=whole)
    for tile in reader.tiles(step):
        size = len(tile.inputs if isinstance(tile, FactoredGradients) else tile.values)
        yield slice(start, start + size), tile
        start += size
