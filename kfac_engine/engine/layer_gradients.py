"""Computes gradients of single examples, layer by layer, for a few examples at a time.

The gradient of an example is a sum over its uses and positions: ``G = Σ a dsᵀ``, ``(d_in, d_out)``,
for a layer that is read as rows, ``[Σ x∘ds, Σ ds]`` for scales and shifts. One backward pass over
the batch computes ``ds`` for all of these layers, and the tiles bound the memory of the products.
Other parameters take a backward pass for each example. With one position, most functions of ``G``
need only its two vectors.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice, repeat
from math import prod
from typing import Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from kfac_engine._types import Array
from kfac_engine.backend.cpu.reductions import all_finite
from kfac_engine.curvature.blocks.base import FisherBlock, uses
from kfac_engine.engine.build import Assembly
from kfac_engine.engine.example_gradients import ExampleGradients
from kfac_engine.errors import NonFiniteError, UnsupportedError
from kfac_engine.layers.layer_forms import LayerForm, ScaleShiftForm, per_example
from kfac_engine.layers.match import LayerMatch
from kfac_engine.runtime.trace import Trace

Float: TypeAlias = Array
Number = TypeVar("Number", np.float64, np.intp)


class Rotation(Protocol):
    """Eigenvectors of a block: ``U`` and ``W``, None for the identity."""

    @property
    def left(self) -> Float | None:
        """``U``, ``(g, d_in, d_in)``, eigenvectors as columns."""

    @property
    def right(self) -> Float | None:
        """``W``, ``(g, d_out, d_out)``."""

    def into(self, V: Float, /) -> Float:
        """Return matrices ``(…, g, d_in, d_out)`` in the basis of the eigenvectors."""


def packed(block: FisherBlock, arrays: tuple[NDArray[Number], ...]) -> NDArray[Number]:
    """Return arrays in the shapes of the parameters of a block as a stack, ``(g, d_in, d_out)``.

    A block of concatenated parameters has ``(1, entries, 1)``.
    """
    if block.packing is None:
        return np.concatenate([array.reshape(-1) for array in arrays]).reshape(1, -1, 1)
    stack = block.packing.pack(arrays, block.params, np)
    return stack.reshape(-1, *stack.shape[-2:])


@dataclass(frozen=True, slots=True, eq=False)
class WholeGradients:
    """Gradients as stacks of matrices."""

    values: Float  # ``(m, k, g, d_in, d_out)`` for ``m`` examples and ``k`` cotangents

    @property
    def arrays(self) -> tuple[Float, ...]:
        """All numbers; the first axis of each array has the examples."""
        return (self.values,)

    @property
    def rows(self) -> int:
        """Number of vectors of length ``d_in`` that ``into`` rotates."""
        return self.values[..., 0, :].size

    def into(self, spectrum: Rotation) -> "WholeGradients":
        """Return the gradients in the basis of the eigenvectors of their block."""
        return WholeGradients(spectrum.into(self.values))

    def compact(self) -> "WholeGradients":
        """Return these gradients: they are matrices already."""
        return self

    def matrices(self) -> Float:
        """Return the matrices, ``(m, k, g, d_in, d_out)``."""
        return self.values

    def gram(self, weights: Float) -> Float:
        """Return ``Σ w ∘ G_k ∘ G_l`` of each example, ``(m, k, k)``.

        The weights are ``(g, d_in, d_out)``.
        """
        rows = self.values.reshape(*self.values.shape[:2], -1)
        product: Float = (rows * weights.reshape(-1)) @ rows.swapaxes(1, 2)
        return product

    def products(self, vectors: Float) -> Float:
        """Return inner products ``(q, m, k)`` with q vectors ``(q, g, d_in, d_out)``."""
        m, k = self.values.shape[:2]
        flat = vectors.reshape(len(vectors), -1) @ self.values.reshape(m * k, -1).T
        product: Float = flat.reshape(-1, m, k)
        return product

    def image(self, V: Float) -> Float:
        """Return the inner products ``(m, k)`` with one vector ``(g · d_in · d_out,)``."""
        m, k = self.values.shape[:2]
        product: Float = (self.values.reshape(m * k, -1) @ V).reshape(m, k)
        return product

    def combine(self, u: Float) -> Float:
        """Return the sum of all gradients times ``u``, ``(m, k)``, as one vector."""
        total: Float = u.reshape(-1) @ self.values.reshape(u.size, -1)
        return total

    def sums(self, numbers: NDArray[np.intp], signs: Float) -> Float:
        """Return the sums ``(q, entries)`` of q groups of gradients, each times a sign.

        Args:
            numbers: Numbers of the gradients of each group, ``(q, size)``; gradients count example
                by example.
            signs: Their signs ``(q, size)``.
        """
        gradients = self.values.reshape(-1, prod(self.values.shape[2:]))[numbers]
        sums: Float = (signs[:, None] @ gradients)[:, 0]
        return sums


@dataclass(frozen=True, slots=True, eq=False)
class FactoredGradients:
    """Gradients ``Σ_t a_t ds_tᵀ`` as their rows."""

    inputs: Float  # ``a``, ``(m, t, d_in)``
    outputs: Float  # ``ds`` of each cotangent, ``(m, k, t, d_out)``

    @property
    def arrays(self) -> tuple[Float, ...]:
        """All numbers; the first axis of each array has the examples."""
        return self.inputs, self.outputs

    @property
    def rows(self) -> int:
        """Number of vectors of length ``d_in`` that ``into`` rotates."""
        return self.inputs[..., 0].size

    def into(self, spectrum: Rotation) -> "FactoredGradients":
        """Return the gradients in the basis of the eigenvectors of their block."""
        U, W = spectrum.left, spectrum.right
        return FactoredGradients(
            self.inputs if U is None else _times(self.inputs, U[0]),
            self.outputs if W is None else _times(self.outputs, W[0]),
        )

    def compact(self) -> "WholeGradients | FactoredGradients":
        """Return whole matrices, unless each example has a single row."""
        return self if self.inputs.shape[1] == 1 else WholeGradients(self.matrices())

    def matrices(self) -> Float:
        """Return the matrices, ``(m, k, 1, d_in, d_out)``."""
        product: Float = self.inputs.swapaxes(1, 2)[:, None, None] @ self.outputs[:, :, None]
        return product

    def gram(self, weights: Float) -> Float:
        """Return ``Σ w ∘ G_k ∘ G_l``; see ``WholeGradients.gram``."""
        if self.inputs.shape[1] > 1:
            return self.compact().gram(weights)
        ds = self.outputs[:, :, 0]
        product: Float = (ds * (self.inputs[:, 0] ** 2 @ weights[0])[:, None]) @ ds.swapaxes(1, 2)
        return product

    def products(self, vectors: Float) -> Float:
        """Return the inner products with vectors; see ``WholeGradients.products``."""
        if self.inputs.shape[1] > 1:
            return self.compact().products(vectors)
        product: Float = np.einsum(
            "qmo,mko->qmk", self.inputs[:, 0] @ vectors[:, 0], self.outputs[:, :, 0], optimize=True
        )
        return product

    def image(self, V: Float) -> Float:
        """Return the inner products ``(m, k)`` with a vector ``(d_in · d_out,)``."""
        (m, k, t, d_out), d_in = self.outputs.shape, self.inputs.shape[2]
        images = _times(self.inputs, V.reshape(d_in, d_out)).reshape(m, t * d_out)
        product: Float = np.einsum("mi,mki->mk", images, self.outputs.reshape(m, k, t * d_out))
        return product

    def combine(self, u: Float) -> Float:
        """Return the sum of all gradients times ``u``, ``(m, k)``, as one vector."""
        (m, k, t, d_out), d_in = self.outputs.shape, self.inputs.shape[2]
        outputs = np.einsum("mk,mki->mi", u, self.outputs.reshape(m, k, t * d_out))
        total: Float = self.inputs.reshape(m * t, d_in).T @ outputs.reshape(m * t, d_out)
        return total.reshape(-1)

    def sums(self, numbers: NDArray[np.intp], signs: Float) -> Float:
        """Return the sums of groups of gradients; see ``WholeGradients.sums``."""
        (_, k, t, d_out), (q, size) = self.outputs.shape, numbers.shape
        outputs = self.outputs.reshape(-1, t, d_out)[numbers] * signs[:, :, None, None]
        inputs = self.inputs[numbers // k].reshape(q, size * t, -1)
        product: Float = inputs.swapaxes(1, 2) @ outputs.reshape(q, size * t, d_out)
        return product.reshape(q, -1)


def _times(rows: Float, matrix: Float) -> Float:
    """Return rows ``(…, d)`` times a matrix, in one product instead of one for each example."""
    product: Float = rows.reshape(-1, rows.shape[-1]) @ matrix
    return product.reshape(*rows.shape[:-1], -1)


Gradients = WholeGradients | FactoredGradients


ENTRY_BYTES = 8
Cotangents = Sequence[Mapping[str, Array]]


@dataclass(frozen=True, slots=True)
class LayerReader:
    """Reads the gradients of a layer."""

    # Yields the gradients of tiles of examples, in the order of the batch. The argument is the
    # number of examples in a tile.
    tiles: Callable[[int], Iterator[Gradients]]
    numbers: int  # number of floating-point numbers that an example takes in the form of ``tiles``
    entries: int  # number of floating-point numbers that an example takes as whole matrices
    # Number of floating-point numbers that an example takes in a tile; None if a tile needs a
    # backward pass for each of its examples.
    read: int | None = None
    is_zero: bool = False  # whether the losses do not depend on the layer

    def step(self, scratch_bytes: int, *, whole: bool) -> int:
        """Return the number of examples whose gradients fit into ``scratch_bytes``; at least 1."""
        return max(
            1, scratch_bytes // (ENTRY_BYTES * max(1, self.entries if whole else self.numbers))
        )


# The outputs of a layer whose gradients are read, and a function that returns the reader from the
# cotangents of each source and the gradients of these outputs for each source.
_Reading: TypeAlias = tuple[
    tuple[str, ...], Callable[[Cotangents, Sequence[Mapping[str, Array]]], LayerReader]
]


def read_layers(
    assembly: Assembly,
    trace: Trace,
    sources: Cotangents,
    *,
    examples: int | None = None,
    chosen: NDArray[np.intp] | None = None,
    wide: bool = True,
) -> list[LayerReader]:
    """Return readers of the gradients of ``Σ ⟨cotangent, value⟩``, one for each layer of the model.

    For each gradient of an example, ``sources`` map the inputs of losses to cotangents. The tiles
    of a reader raise a ``NonFiniteError`` for an example whose gradient holds NaN or infinity.

    ``examples`` is the number of examples of these losses, if others have other numbers. The tiles
    have the examples ``chosen`` only, if they are given. They are in float64 if ``wide``, else in
    the types of the trace.
    """
    layers = assembly.discovery.layers
    every = (name for layer in layers for name in (*uses(layer.outputs), *layer.parameters))
    names = tuple(dict.fromkeys(filter(None, every)))
    reached = frozenset(assembly.model.backward(tuple(sources[0]), names).gradients)
    if examples is None:
        examples = assembly.task.objective.examples(trace)
    readings = [
        assembly.collection.fisher_blocks[layer.key].read_examples(
            _Readings(assembly, layer, trace, examples, chosen, reached, wide)
        )
        for layer in layers
    ]
    wrt = tuple(dict.fromkeys(name for outputs, _ in readings for name in outputs))
    gradients = [trace.vjp(cotangents, wrt) if wrt else {} for cotangents in sources]
    return [
        replace(
            _checked(layer, reader(sources, gradients), trace, chosen),
            is_zero=reached.isdisjoint((*uses(layer.outputs), *layer.parameters)),
        )
        for layer, (_, reader) in zip(layers, readings, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _Readings:
    """Reads the gradients of a layer, in the way that its block chooses."""

    assembly: Assembly  # the model with its layers
    layer: LayerMatch
    trace: Trace  # the batch
    examples: int  # number of examples
    chosen: NDArray[np.intp] | None  # numbers of the examples that are read; None for all
    reached: frozenset[str]  # outputs of layers on which the losses depend
    wide: bool  # whether gradients are read in float64

    def rows(self, form: LayerForm) -> _Reading:
        """Read rows, if the first axes of the tensors are the examples of one matrix."""
        inputs, outputs = uses(self.layer.inputs), uses(self.layer.outputs)
        folded = form.num_uses > 1 and len(outputs) == 1
        plain = form.packing.one_matrix and form.input_view.has_rows
        if not plain or folded or len(inputs) != len(outputs):
            return self.one_by_one()
        inputs, outputs = self._reached()
        moved = any(not self._is_first(name) for name in (*inputs, *outputs))
        if not outputs or moved or any(len(self.trace[n]) != self.examples for n in inputs):
            return self.one_by_one()

        def reader(_: Cotangents, gradients: Sequence[Mapping[str, Array]]) -> LayerReader:
            tensors = self._tensors(inputs, outputs, gradients)
            first = self._rows(form, *tensors, slice(0, 1))
            (positions, d_in), (k, _, d_out) = first.inputs.shape[1:], first.outputs.shape[1:]
            rows, entries = positions * (d_in + k * d_out), k * d_in * d_out

            def tiles(step: int) -> Iterator[FactoredGradients]:
                for start in range(0, len(tensors[0][0]), step):
                    yield self._rows(form, *tensors, slice(start, start + step))

            numbers = rows if positions == 1 else max(rows, entries)
            return LayerReader(tiles, numbers, entries, rows)

        return outputs, reader

    def sums(self, form: ScaleShiftForm) -> _Reading:
        """Read sums over the entries that a parameter is broadcast to."""
        inputs, outputs = self._reached()
        if not outputs:
            return self.one_by_one()

        def reader(_: Cotangents, gradients: Sequence[Mapping[str, Array]]) -> LayerReader:
            values = self._sums(form, *self._tensors(inputs, outputs, gradients))

            def tiles(step: int) -> Iterator[WholeGradients]:
                for start in range(0, len(values), step):
                    yield WholeGradients(values[start : start + step])

            return LayerReader(tiles, values[0].size, values[0].size, values[0].size)

        return outputs, reader

    def one_by_one(self) -> _Reading:
        """Return a reading that runs the backward pass once for each example."""

        def reader(sources: Cotangents, _: Sequence[Mapping[str, Array]]) -> LayerReader:
            shape_of = self.assembly.collection.require_shape
            shapes = [shape_of(name) for name in self.layer.parameters]
            entries = len(sources) * sum(int(np.prod(shape)) for shape in shapes)
            return LayerReader(lambda step: self._tiles(sources, step), entries, entries)

        return (), reader

    def _is_first(self, name: str) -> bool:
        """Return whether the first axis of a value holds the examples and nothing else."""
        batch = self.assembly.task.batch
        place = batch.places.get(name)
        return place.comes_first if place else not batch.joint

    def _reached(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return inputs and outputs of the uses on which the losses depend."""
        inputs, outputs = uses(self.layer.inputs), uses(self.layer.outputs)
        chosen = [index for index, name in enumerate(outputs) if name in self.reached]
        named = [inputs[index] for index in chosen] if len(inputs) == len(outputs) else inputs
        return tuple(named), tuple(outputs[index] for index in chosen)

    def _tensors(
        self,
        inputs: Sequence[str],
        outputs: Sequence[str],
        gradients: Sequence[Mapping[str, Array]],
    ) -> tuple[list[Array], list[list[Array]]]:
        """Return the input of each use, and the output gradients of each use and source."""
        values = [self._of_chosen(self.trace[name]) for name in inputs if name]
        return values, [[self._of_chosen(each[name]) for each in gradients] for name in outputs]

    def _of_chosen(self, array: Array) -> Array:
        array = self.assembly.collection.backend.asarray(array)
        return array if self.chosen is None else array[self.chosen]

    def _read(self, array: Array) -> Float:
        backend = self.assembly.collection.backend
        dtype = np.float64 if self.wide else None
        return np.asarray(backend.to_numpy(backend.asarray(array)), dtype)

    def _rows(
        self,
        form: LayerForm,
        inputs: Sequence[Array],
        outputs: Sequence[Sequence[Array]],
        tile: slice,
    ) -> FactoredGradients:
        """Return the rows of all uses of the layer, for some examples."""
        backend = self.assembly.collection.backend
        a = [self._read(form.input_view.rows(x[tile], backend)) for x in inputs]
        if form.packing.has_bias:
            a = [np.concatenate([x, np.ones((*x.shape[:-1], 1), x.dtype)], axis=-1) for x in a]
        ds = [
            np.stack([self._read(form.output_view.rows(g[tile], backend)) for g in use], axis=1)
            for use in outputs
        ]
        return FactoredGradients(np.concatenate(a, axis=1), np.concatenate(ds, axis=2))

    def _sums(
        self, form: ScaleShiftForm, inputs: Sequence[Array], outputs: Sequence[Sequence[Array]]
    ) -> Float:
        """Return the sums of all examples, ``(n, k, 1, entries, 1)``."""
        scaled: Sequence[Array | None] = inputs or [None] * len(outputs)
        total: Float | float = 0.0
        for x, use in zip(scaled, outputs, strict=True):
            rows = []
            for ds in use:
                columns = []
                if form.scale and x is not None:
                    columns.append(self._read(per_example(x * ds, form.scale)))
                if form.shift:
                    columns.append(self._read(per_example(ds, form.shift)))
                rows.append(np.concatenate(columns, axis=1))
            total = total + np.stack(rows, axis=1)
        return np.asarray(total)[:, :, None, :, None]

    def _tiles(self, sources: Cotangents, step: int) -> Iterator[WholeGradients]:
        task, names, trace = self.assembly.task, self.layer.parameters, self.trace
        block = self.assembly.collection.fisher_blocks[self.layer.key]
        each = ExampleGradients(self.assembly.model, task.objective, task.batch, task.inputs)
        chosen = range(self.examples) if self.chosen is None else self.chosen
        reached = self.reached.intersection(names)
        passes = zip(*(each(trace, c, names, self.chosen) for c in sources), strict=True)
        rows: Iterator[Float] = (
            np.stack([packed(block, tuple(self._read(g[name]) for name in names)) for g in source])
            for source in passes
        )
        try:
            if not reached:  # there is one gradient of the whole batch, zero
                rows = repeat(next(rows))
            for start in range(0, len(chosen), step):
                yield WholeGradients(np.stack(list(islice(rows, min(step, len(chosen) - start)))))
        except UnsupportedError as failure:
            raise UnsupportedError(f"{', '.join(names)}: {failure}") from failure


def _checked(
    layer: LayerMatch, reader: LayerReader, trace: Trace, chosen: NDArray[np.intp] | None
) -> LayerReader:
    """Return a reader that refuses gradients with NaN or infinity."""

    def tiles(step: int) -> Iterator[Gradients]:
        for start, tile in zip(count(0, step), reader.tiles(step), strict=False):
            for array in tile.arrays:
                if not all_finite(array):
                    example = start + int(np.argwhere(~np.isfinite(array))[0][0])
                    example = example if chosen is None else int(chosen[example])
                    with trace.explain():
                        raise NonFiniteError(
                            f"the derivative of example {example} with respect to "
                            f"{', '.join(layer.parameters)} holds NaN or infinity."
                        )
            yield tile

    return replace(reader, tiles=tiles)
