"""Defines ``Curvature``, the block-diagonal Fisher matrix at a model's parameters."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from kfac_engine._types import Array, Params
from kfac_engine.analysis.fisher_matrix.blocks import (
    Block,
    Float,
    ParameterVector,
    Places,
    checked_damping,
)
from kfac_engine.analysis.fisher_matrix.example_gradients import (
    gradient_sources,
    jacobian_sources,
    numbered_tiles,
)
from kfac_engine.analysis.fisher_matrix.files import (
    NUMBERS,
    CurvatureFile,
    save_curvature,
    weight_hashes,
)
from kfac_engine.analysis.fisher_matrix.layout import Layout
from kfac_engine.analysis.fisher_matrix.options import assembled
from kfac_engine.arguments import check_int, check_number, check_seed
from kfac_engine.backend.namespace import on_host
from kfac_engine.backend.threads import single_threaded_blas
from kfac_engine.engine.layer_gradients import read_layers
from kfac_engine.engine.rollback import ignore_overflow
from kfac_engine.engine.trainable_model import TrainableModel
from kfac_engine.errors import InputError, UnknownNameError, UnsupportedError
from kfac_engine.graph.load import ModelSource
from kfac_engine.losses.observed import Targets
from kfac_engine.runtime.trace import Trace

Damping = float | Mapping[str, float]


@dataclass(frozen=True, slots=True, eq=False)
class ExampleTile:
    """Derivatives of consecutive examples with respect to the parameters of one layer."""

    examples: slice  # numbers of the examples in the batch
    # Derivatives by parameter name, in float64. Gradients are ``(m, *shape)`` for ``m`` examples,
    # rows of Jacobians ``(m, k, *shape)`` for ``k`` values of an example. If several layers have
    # parts of a parameter, the entries of other layers are zero. ``Curvature.multiply`` needs all
    # parameters of a block, so that such a tile has the parameters of the other layers as well, as
    # zeros.
    arrays: Mapping[str, Array]


class Curvature:
    """The mean Fisher matrix ``F`` of a data set; ``kfac_engine.curvature`` returns it.

    All functions of ``F`` are exact functions of its blocks: damping is added to the eigenvalues,
    not to factors. A damping is a number λ ≥ 0, or a mapping with a number for each parameter.
    Arrays have the shapes of the parameters in the file.

    Attributes:
        model: The model with its losses: ``parameters``, ``predict``, ``trace``.
        layout: The model with its layers and blocks.
        options: What was measured.
        blocks: The blocks with their eigenvalues and eigenvectors.
        vector: All parameters as one vector.
        examples: Number of examples.
        log_likelihood: Sum over all examples of the log-likelihood of the targets, in nats; None
            for data without targets.
        predictions: Number of values of all examples that the losses read, such as logits or
            means; with weights, their sum.
    """

    def __init__(
        self,
        layout: Layout,
        blocks: Sequence[Block],
        examples: int,
        log_likelihood: float | None,
        predictions: float,
    ) -> None:
        self.model = TrainableModel(layout.assembly)
        self.options = layout.options
        self.blocks = tuple(blocks)
        self.vector = layout.vector
        self.examples = examples
        self.log_likelihood = log_likelihood
        self.predictions = predictions
        self.layout = layout
        self._backend = layout.assembly.collection.backend

    def __repr__(self) -> str:
        """Return structure, numbers of examples and parameters."""
        return (
            f"Curvature({self.options.structure}, {self.options.fisher}, {self.examples} examples, "
            f"{len(self.blocks)} blocks, {self.vector.size} parameters)"
        )

    @property
    def parameters(self) -> dict[str, Array]:
        """Present values as NumPy arrays, by parameter name."""
        return self.on_host(self.model.parameters)

    def on_host(self, vectors: Mapping[str, Array]) -> dict[str, Array]:
        """Convert arrays of any library to NumPy arrays; raise an InputError for other values."""
        if not isinstance(vectors, Mapping):
            raise InputError(
                f"vectors must be a mapping from parameter to array, got {type(vectors).__name__}."
            )
        return dict(on_host(vectors, self._backend))

    # -- spectrum ---------------------------------------------------------------------------------

    def eigenvalues(self) -> dict[Params, Array]:
        """Return the eigenvalues of each block without damping, ascending.

        Returns:
            float64 eigenvalues by block, one for each entry of its parameters. The key of a block
            is its parameter's name, or a tuple of names.
        """
        return {
            part.key: np.sort(block.spectrum.eigenvalues[:, part.rows], axis=None)
            for block in self.blocks
            for part in block.parts
        }

    def trace(self) -> float:
        """Return the sum of all eigenvalues."""
        return float(sum(block.spectrum.eigenvalues.sum() for block in self.blocks))

    def log_determinant(self, damping: Damping = 0.0) -> float:
        """Return ``log det(F + λI)``.

        Args:
            damping: λ, or λ of each parameter.

        Returns:
            The sum of ``log(s + λ)`` over all eigenvalues ``s``.

        Raises:
            InputError: The damping is negative, or the damped matrix is singular.
        """
        level = self._checked(damping)
        return float(sum(block.log_eigenvalues(level).sum() for block in self.blocks))

    def effective_dimension(self, damping: Damping) -> float:
        """Return the trace of ``F (F + λI)⁻¹``, the number of directions that the data determine.

        Args:
            damping: λ, or λ of each parameter.

        Returns:
            The sum of ``s / (s + λ)`` over all eigenvalues ``s``.

        Raises:
            InputError: The damping is negative, or the damped matrix is singular.
        """
        level = self._checked(damping)
        parts = (block.spectrum.eigenvalues * block.powers(level, -1.0) for block in self.blocks)
        return float(sum(part.sum() for part in parts))

    def diagonal(self, power: float = 1.0, damping: Damping = 0.0) -> dict[str, Array]:
        """Return the diagonal of ``(F + λI)^power``.

        Args:
            power: Any real number; −1 gives the variances of N(0, (F + λI)⁻¹).
            damping: λ, or λ of each parameter.

        Returns:
            Arrays by parameter name, in float64, in the shape of the parameter.

        Raises:
            InputError: The damping is negative, or the power does not exist.
        """
        check_number("power", power)
        level, row = self._checked(damping), np.zeros((1, self.vector.size))
        for block in self.blocks:
            row[:, block.places] = block.spectrum.diagonal(block.powers(level, power))
        return self._split(row, several=False)

    # -- products ---------------------------------------------------------------------------------

    def multiply(
        self, vectors: Mapping[str, Array], *, power: float = 1.0, damping: Damping = 0.0
    ) -> dict[str, Array]:
        """Return ``(F + λI)^power`` times vectors.

        Args:
            vectors: Arrays by parameter name, from any library, in the shape of the parameter, or
                ``(count, *shape)`` for several vectors at once. A block needs the arrays of all its
                parameters; blocks without arrays are left out.
            power: Any real number.
            damping: λ, or λ of each parameter.

        Returns:
            New arrays by parameter name, in the vector's shape. They have the vector's type if it
            is a floating-point type, else float64.

        Raises:
            UnknownNameError: A name is not a parameter.
            InputError: A parameter of a block is missing, the damping is negative, or the power
                does not exist, because an eigenvalue of the damped matrix is zero.
            ShapeError: An array has another shape.
            NonFiniteError: An array contains NaN or infinity.
        """
        check_number("power", power)
        level, arrays = self._checked(damping), self.on_host(vectors)
        rows, several = self.vector.join(arrays)
        product = np.zeros_like(rows)
        for block in self._blocks_of(arrays):
            vector = rows[:, block.places]
            product[:, block.places] = block.spectrum.multiply(vector, block.powers(level, power))
        dtypes = {name: _floating(array.dtype) for name, array in arrays.items()}
        return self.vector.split(product, tuple(arrays), dtypes, several)

    def sample(self, count: int, seed: int = 0, *, damping: Damping = 0.0) -> dict[str, Array]:
        """Return samples of the normal distribution N(0, (F + λI)⁻¹).

        Args:
            count: Number of samples.
            seed: Seed of the generator.
            damping: λ, or λ of each parameter.

        Returns:
            Arrays ``(count, *shape)`` in float64, by parameter name.

        Raises:
            InputError: An argument is wrong, or the damped matrix is singular.
        """
        check_int("count", count, least=1)
        check_seed(seed)
        level, generator = self._checked(damping), np.random.default_rng(seed)
        rows = np.empty((count, self.vector.size))
        for block in self.blocks:
            noise = generator.standard_normal((count, *block.places.shape))
            rows[:, block.places] = block.spectrum.back(block.powers(level, -0.5) * noise)
        return self._split(rows, several=True)

    def input_moment(self, name: str) -> Array:
        """Return ``2/n Σ x xᵀ`` over a layer's inputs x at all positions of the n examples.

        This is the Hessian matrix of the squared error of the layer's outputs with respect to the
        weights of one output, as GPTQ uses it (Frantar et al. 2023, arXiv:2210.17323).

        Args:
            name: Name of the weight.

        Returns:
            ``(d, d)``, or ``(groups, d, d)`` for a layer of several groups. Inputs have the order
            of the weight's axes in the file without its output axis, as in ``weight.reshape(out,
            -1)``. The bias has no coordinate.

        Raises:
            UnknownNameError: The name is not a parameter.
            UnsupportedError: The moment was not measured.
        """
        block = self._block_of_weight(name)
        inputs, U = block.inputs, block.spectrum.left
        if inputs is None or U is None:
            raise UnsupportedError(
                f"the second moment of the inputs of '{name}' was not measured: structure "
                f"'{self.options.structure}' has the block {block.formula}; use structure='kron' "
                f"and a layer whose inputs are numbers."
            )
        A = (U * inputs.eigenvalues[:, None]) @ U.swapaxes(1, 2)
        # Rows in the order of the file; the row of a bias has a place outside the weight.
        start, size = self.vector.starts[name], int(np.prod(self.vector.shapes[name]))
        moments = []
        for matrix, column in zip(A, block.places[:, :, 0], strict=True):
            order = np.argsort(column)
            order = order[(start <= column[order]) & (column[order] < start + size)]
            moments.append(2.0 * inputs.positions * matrix[np.ix_(order, order)])
        return moments[0] if len(moments) == 1 else np.stack(moments)

    # -- single examples --------------------------------------------------------------------------

    def example_gradients(
        self, inputs: Mapping[str, Array], targets: Targets
    ) -> Iterator[ExampleTile]:
        """Yield the gradient of the negative log-likelihood of each example, layer by layer.

        The method needs the memory of one backward pass and of one tile of examples: at most 64
        MiB, or one example. It never stores the gradients of all examples together. A parameter
        without a layer takes a backward pass for each example.

        Args:
            inputs: Arrays by input name.
            targets: The targets of the loss, also ``Weighted``; for several losses, by output.

        Yields:
            Tiles of consecutive examples; a layer's tiles precede those of the next layer. An
            example's gradient is the weighted sum over its positions, without a divisor.

        Raises:
            InputError: Inputs or targets are wrong.
            UnsupportedError: The examples of a parameter without a layer cannot be separated; the
                message names it.
        """
        with single_threaded_blas(), ignore_overflow():
            for tile in _tiles(self.layout, *gradient_sources(self.layout, inputs, targets)):
                gradients = {name: each.sum(axis=1) for name, each in tile.arrays.items()}
                yield ExampleTile(tile.examples, gradients)

    def example_jacobians(self, inputs: Mapping[str, Array]) -> Iterator[ExampleTile]:
        """Yield the rows of the Jacobian matrix of each example, layer by layer.

        The rows are the derivatives of the values that the loss reads, such as logits or means, in
        row-major order for values with positions. A value takes a backward pass. Memory and tiles
        are as for ``example_gradients``, with a backward pass for each value.

        Args:
            inputs: Arrays by input name.

        Yields:
            Tiles of consecutive examples, with arrays ``(m, k, *shape)`` for ``k`` values.

        Raises:
            InputError: The inputs are wrong.
            UnsupportedError: Several losses read several values, or the examples are not on the
                first axis of the value.
        """
        with single_threaded_blas(), ignore_overflow():
            yield from _tiles(self.layout, *jacobian_sources(self.layout, inputs))

    # -- files ------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the curvature to a file, which ``load`` reads with the same model.

        Args:
            path: File to write, in the safetensors format.

        Raises:
            InputError: The file cannot be written.
        """
        about = {name: getattr(self, name) for name in NUMBERS}
        save_curvature(path, self.layout, self.blocks, about)

    @classmethod
    def load(cls, path: str | Path, model: ModelSource, **options: Any) -> "Curvature":
        """Read a curvature that ``save`` wrote.

        Args:
            path: The file.
            model: The model whose curvature it is, with the same weights.
            options: Options of ``CurvatureOptions`` that the file does not store: ``threads``,
                ``backend``, ``sample_inputs``, and ``loss`` if it was an object.

        Returns:
            The curvature.

        Raises:
            InputError: The file is missing, damaged or not a curvature file, or the model has other
                weights; the message names them.
        """
        file = CurvatureFile(path)
        assembly, _ = assembled(model, file.options(options))
        file.check_weights(weight_hashes(assembly))
        layout = Layout(assembly, file.options(options))
        blocks = file.read(layout.frames)
        return cls(layout, blocks, **file.about)

    # -- private ----------------------------------------------------------------------------------

    def _checked(self, damping: Damping) -> Damping:
        return checked_damping(damping, tuple(self.vector.shapes))

    def _split(self, rows: Float, *, several: bool) -> dict[str, Array]:
        names = tuple(self.vector.shapes)
        return self.vector.split(rows, names, dict.fromkeys(names, np.dtype(np.float64)), several)

    def _blocks_of(self, names: Mapping[str, Array]) -> Iterator[Block]:
        """Yield the blocks of parameters.

        Raises:
            InputError: A block has some of the parameters only.
        """
        for block in self.blocks:
            missing = [name for name in block.parameters if name not in names]
            if not missing:
                yield block
            elif len(missing) < len(block.parameters):
                raise InputError(
                    f"the block of {', '.join(block.parameters)} needs an array for each of them; "
                    f"missing: {', '.join(missing)}."
                )

    def _block_of_weight(self, name: str) -> Block:
        for block in self.blocks:
            if isinstance(name, str) and name == block.parameters[0]:
                return block
        raise UnknownNameError(
            f"'{name}' is not the weight of a layer; weights are: "
            f"{', '.join(block.parameters[0] for block in self.blocks)}."
        )


def _floating(dtype: np.dtype) -> np.dtype:
    return dtype if dtype.kind == "f" else np.dtype(np.float64)


def checked_curvature(value: object, use: str) -> Curvature:
    """Return a curvature; an InputError that names its use if the value is something else."""
    if not isinstance(value, Curvature):
        raise InputError(
            f"{use} needs the result of kfac_engine.curvature, got {type(value).__name__}."
        )
    return value


def _tiles(
    layout: Layout, trace: Trace, sources: Sequence[Mapping[str, Array]]
) -> Iterator[ExampleTile]:
    """Yield the derivatives of a batch, layer by layer and in tiles of examples.

    ``sources`` are the cotangents of each row of a Jacobian. Derivatives have an axis for them
    after that of the examples.
    """
    vector, scratch_bytes = layout.vector, layout.assembly.collection.backend.scratch_bytes
    readers = read_layers(layout.assembly, trace, sources)
    groups = _groups(layout)
    for (layer, block), reader in zip(layout.layers, readers, strict=True):
        places = layout.decomposer.places(block)
        owner = vector.parameter_of(layer.parameters[0])
        names = next(group for group in groups if owner in group)
        whole = sum(prod(vector.shapes[name]) for name in names)
        part_bytes = scratch_bytes * places.size // max(whole, 1)
        for examples, tile in numbered_tiles(reader, part_bytes, whole=True):
            yield ExampleTile(examples, _by_parameter(vector, names, places, tile.matrices()))


def _groups(layout: Layout) -> list[tuple[str, ...]]:
    """Return groups of parameters, such that no layer has parameters of two groups."""
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
