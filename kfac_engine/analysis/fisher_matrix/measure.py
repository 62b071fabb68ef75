"""Measures the curvature of a model on a data set, without training the model."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np

from kfac_engine._types import Array
from kfac_engine.analysis.fisher_matrix.blocks import Block, Float, Places, Spectrum, eigenbasis
from kfac_engine.analysis.fisher_matrix.curvature import Curvature
from kfac_engine.analysis.fisher_matrix.example_gradients import whole_rows
from kfac_engine.analysis.fisher_matrix.layout import Layout
from kfac_engine.analysis.fisher_matrix.options import CurvatureOptions, assembled
from kfac_engine.backend.threads import single_threaded_blas
from kfac_engine.curvature.blocks.base import FisherBlock, uses
from kfac_engine.curvature.estimation_modes import MODES
from kfac_engine.curvature.factors.base import FisherFactor
from kfac_engine.curvature.fisher import Fisher
from kfac_engine.curvature.sources import times_scales
from kfac_engine.datasets.examples import Batch
from kfac_engine.datasets.first_examples import with_first_examples
from kfac_engine.datasets.forms import Data, batches_of
from kfac_engine.engine.build import Assembly
from kfac_engine.engine.layer_gradients import read_layers
from kfac_engine.engine.memory import require_gradient
from kfac_engine.engine.options import by_keyword
from kfac_engine.engine.rollback import ignore_overflow
from kfac_engine.engine.trainable_model import TrainableModel
from kfac_engine.errors import InputError
from kfac_engine.graph.load import ModelSource
from kfac_engine.losses.base import RegisteredLoss
from kfac_engine.losses.objective import BatchSize
from kfac_engine.runtime.trace import Trace
from kfac_engine.system import memory_limits

# The matrix, a product that is added to it, its eigenvectors and the work space of LAPACK.
_MATRICES_OF_ALL = 5


@dataclass(slots=True)
class ExampleMoments:
    """Sums of products and squares of the gradients of single examples."""

    assembly: Assembly  # the model with its layers
    places: list[Places]  # for each layer, the places of its entries among all parameters
    scratch_bytes: int  # bound of the memory of the gradients of a tile of examples
    # ``Σ g gᵀ`` over all parameters, ``(size, size)``; None if it is not measured.
    matrix: Float | None = None
    # ``Σ g²``, packed, by number of the layer, for the layers that are measured.
    squares: dict[int, Float] = field(default_factory=dict)

    @property
    def active(self) -> bool:
        """Whether anything is measured."""
        return self.matrix is not None or bool(self.squares)

    def add(self, trace: Trace, sources: Iterator[Mapping[str, Array]]) -> None:
        """Add a batch, with the cotangents of each source."""
        for cotangents in sources:
            readers = read_layers(self.assembly, trace, [cotangents])
            for number, total in self.squares.items():
                reader = readers[number]
                for tile in reader.tiles(reader.step(self.scratch_bytes, whole=True)):
                    total += (tile.matrices()[:, 0] ** 2).sum(axis=0)
            if self.matrix is not None:
                for rows in whole_rows(readers, self.places, len(self.matrix), self.scratch_bytes):
                    self.matrix += rows[:, 0].T @ rows[:, 0]


def whole_matrix(shapes: Mapping[str, tuple[int, ...]]) -> Float:
    """Return a matrix of zeros over all parameters, ``(size, size)``, in float64.

    A MemoryLimitError says that it and its eigenvectors do not fit into the available memory.
    """
    size = sum(map(prod, shapes.values()))
    memory_limits.require_memory(
        _MATRICES_OF_ALL * _BYTES * size**2,
        f"structure='full' of {size} parameters",
        "use structure='kron', or fewer parameters by layers='last' or trainable",
    )
    return np.zeros((size, size))


# Averages have float32 at least, eigenvectors float64.
_AVERAGE_BYTES, _BYTES = 4, 8
# Matrices in float64 that the decomposition of a factor needs besides its eigenvectors.
_MATRICES = 3


def require_factor_memory(layout: Layout, factors: Iterable[FisherFactor]) -> int:
    """Return the bytes of the averages of factors, which the first batch allocates.

    A MemoryLimitError says that dense factors and their eigenvectors do not fit into the memory.
    """
    wanted, entries = set(factors), dict[FisherFactor, int]()
    owners: dict[FisherFactor, FisherBlock] = {}
    for layer, block in layout.layers:
        shapes = [layout.vector.places(name).shape for name in layer.parameters]
        for factor, shape in zip(block.factors, block.factor_shapes(shapes), strict=True):
            if factor in wanted and not factor.is_diagonal:
                entries[factor], owners[factor] = prod(shape), block
    if not entries:
        return 0
    largest = max(entries, key=entries.__getitem__)
    total = sum(entries.values())
    need = (_AVERAGE_BYTES + _BYTES) * total + _MATRICES * _BYTES * entries[largest]
    memory_limits.require_memory(
        need,
        f"structure='{layout.options.structure}', with matrices and their eigenvectors, the "
        f"largest for {', '.join(uses(owners[largest].params or ()))},",
        "use structure='diagonal', or exclude these parameters by freeze",
    )
    return _AVERAGE_BYTES * total


@by_keyword(CurvatureOptions)
def curvature(model: ModelSource, batches: Data, options: CurvatureOptions) -> Curvature:
    """Measure the Fisher matrix of a model on a data set.

    The result is the mean of all examples' Fisher matrices, whatever the sizes of the batches are.
    An example's loss is its negative log-likelihood, summed over its positions. The mean has
    neither decay nor damping.

    Args:
        model: Path, bytes or ``ModelProto``.
        batches: Data as for ``fit``. Arrays are one batch; files are read in batches of 128
            examples. Targets may be None or absent unless ``fisher`` is ``"empirical"``.
        options: The fields of ``CurvatureOptions``, each as a keyword; only ``loss`` is needed.

    Returns:
        The curvature at the parameters of the model.

    Raises:
        InputError: The file, an option or a batch is wrong, or the data have no example.
        UnsupportedError: A parameter has no block of the structure; the message names it.
        NonFiniteError: A batch yields NaN or infinity.
        UnsupportedOpError: An operator between a parameter and the loss has no derivative rule.
    """
    data = batches
    if options.sample_inputs is None:
        data, sample = with_first_examples(
            model, data, options.batch_axes, labeled=False, passes=options.passes, divided=False
        )
        options = replace(options, sample_inputs=sample)
    assembly, estimator = assembled(model, options)
    axes = assembly.task.example_axes
    pairs = batches_of(data, axes, passes=options.passes, labeled=False)
    return measured(assembly, estimator, options, pairs)


def measured(
    assembly: Assembly, estimator: Fisher, options: CurvatureOptions, pairs: Iterable[Batch]
) -> Curvature:
    """Return the curvature of an assembled model.

    ``pairs`` are inputs and targets, which are read ``options.passes`` times.
    """
    measurement = _Measurement(TrainableModel(assembly), Layout(assembly, options), estimator)
    with single_threaded_blas(), ignore_overflow():
        measurement.prepare()
        measurement.read_all(pairs)
        return Curvature(
            measurement.layout,
            measurement.blocks(),
            measurement.examples,
            measurement.log_likelihood,
            measurement.predictions,
        )


@dataclass(slots=True)
class _Measurement:
    """The state of a measurement."""

    model: TrainableModel  # the model with its losses
    layout: Layout  # its blocks
    estimator: Fisher  # the statistics of layers
    # Sums over gradients of single examples; ``prepare`` sets them.
    moments: ExampleMoments = field(init=False)
    examples: int = 0  # examples so far
    # Sum of the log-likelihoods of the targets so far; None without targets.
    log_likelihood: float | None = 0.0
    predictions: float = 0  # number of values so far that the losses read, each with its weight
    # The draws of the user that are not used yet, by name of targets.
    draws: dict[str, Array] = field(default_factory=dict)
    # Number of a layer whose basis is set to the eigenvalues of its input factor.
    inputs: dict[int, Float] = field(default_factory=dict)
    averages: int = 0  # bytes of the averages of factors, which the first batch allocates

    def prepare(self) -> None:
        """Allocate the sums over single examples' gradients, or raise a MemoryLimitError."""
        layout, structure = self.layout, self.layout.options.structure
        self.moments = ExampleMoments(
            layout.assembly,
            [layout.decomposer.places(block) for _, block in layout.layers],
            layout.assembly.collection.backend.scratch_bytes,
            whole_matrix(layout.vector.shapes) if structure == "full" else None,
        )
        if structure == "diagonal":
            self.moments.squares = {
                number: np.zeros(layout.frames[number].places.shape)
                for number, (_, block) in enumerate(layout.layers)
                if not all(factor.is_diagonal for factor in block.factors)
            }
        self.averages = require_factor_memory(layout, self.factors)

    @property
    def factors(self) -> list[FisherFactor]:
        """Factors of the blocks that are not measured from gradients of single examples."""
        if self.moments.matrix is not None:
            return []
        blocks = (b for i, (_, b) in enumerate(self.layout.layers) if i not in self.moments.squares)
        return list(dict.fromkeys(factor for block in blocks for factor in block.factors))

    def read_all(self, pairs: Iterable[Batch]) -> None:
        """Read the data once, or twice for factors that are measured in a basis of all data.

        A second pass with other data raises an InputError.
        """
        factors, generator = self.factors, self.estimator.rng.bit_generator.state
        scales = [factor for factor in factors if factor.measures_with_results]
        self._read(pairs, [factor for factor in factors if factor not in scales])
        if not scales:
            return
        for number, (_, block) in enumerate(self.layout.layers):
            if block.basis is not None:
                self.inputs[number], bases = self.layout.decomposer.bases(block, block.basis)
                block.basis.restart(bases)
        examples, self.examples, self.log_likelihood = self.examples, 0, 0.0
        self.predictions = 0
        self.estimator.rng.bit_generator.state = generator  # the targets of the first pass
        self._read(pairs, scales)
        if self.examples != examples:
            raise InputError(
                f"the first pass over the data had {examples} examples and the second "
                f"{self.examples}; give data that do not change."
            )

    def blocks(self) -> tuple[Block, ...]:
        """Return all blocks with their eigenvalues."""
        frames, moments = list(self.layout.frames), self.moments
        if moments.matrix is not None:
            values, vectors = eigenbasis((moments.matrix / self.examples)[None], (slice(None),))
            return (replace(frames[0], spectrum=Spectrum(values[:, :, None], vectors)),)
        for number, (_, block) in enumerate(self.layout.layers):
            if number in moments.squares:
                spectrum = Spectrum(moments.squares[number] / self.examples)
                frames[number] = replace(frames[number], spectrum=spectrum, formula="diag(F)")
            else:
                spectrum, inputs = self.layout.decomposer.decompose(block, self.inputs.get(number))
                frames[number] = replace(frames[number], spectrum=spectrum, inputs=inputs)
        return tuple(frames)

    # -- private ----------------------------------------------------------------------------------

    def _read(self, pairs: Iterable[Batch], factors: Sequence[FisherFactor]) -> None:
        """Add all batches to the statistics of some factors.

        An InputError says that there is no example, that a batch is wrong, or that the draws do not
        fit.
        """
        objective, draws = self.layout.assembly.task.objective, self.layout.options.draws
        self.draws = {} if draws is None else objective.named_targets(draws)
        has_targets = None
        for number, (inputs, targets) in enumerate(pairs, 1):
            if has_targets not in (None, targets is not None):
                raise InputError(
                    f"batch {number} has {'no ' * (targets is None)}targets, unlike the batches "
                    f"before it; give targets with all batches or with none."
                )
            has_targets = targets is not None
            require_gradient(self.layout.assembly, inputs, self.averages)
            trace = self.model.trace(inputs, targets)
            examples = objective.examples(trace)
            with trace.explain():
                self._measure(trace, examples, factors)
            self.examples += examples
            self.predictions += self._number(trace)
            if has_targets and self.log_likelihood is not None:
                seen = objective.observe(trace).as_piece()
                self.log_likelihood -= examples * objective.value(trace, seen)
        if not self.examples:
            raise InputError("the data have no examples; pass at least one batch.")
        objective.require_counts(BatchSize(self.examples, (self.predictions,)))
        if not has_targets:
            self.log_likelihood = None
        for name, rest in self.draws.items():
            if len(rest):
                raise InputError(
                    f"draws have {len(rest)} more targets for '{name}' than the data have examples."
                )

    def _number(self, trace: Trace) -> float:
        """Return the number of values that the losses read, each with the weight of its term."""
        objective, number = self.layout.assembly.task.objective, 0.0
        observed = objective.observe(trace, targets=False).terms
        for term, seen in zip(objective.terms, observed, strict=True):
            mean = 1 if seen.weights is None else float(seen.weights.mean(dtype=np.float64))
            number += mean * sum(trace[name].size for name in term.inputs)
        return int(number) if number == int(number) else number

    def _measure(self, trace: Trace, examples: int, factors: Sequence[FisherFactor]) -> None:
        """Add a batch to factors and to sums over examples, with the same sampled targets."""
        losses, rng = self.layout.assembly.task.objective.losses, self.estimator.rng
        draws, generator = self._draws(losses, trace), rng.bit_generator.state
        if self.moments.active:
            mode = MODES[self.layout.options.engine.estimation_mode]
            scales = self.estimator.sources.scales_of(trace)
            sources = mode(losses, trace, rng, draws)
            self.moments.add(trace, (times_scales(source, scales) for source in sources))
        if factors:
            rng.bit_generator.state = generator
            self.estimator.accumulate(trace, examples, draws=draws, factors=factors)

    def _draws(self, losses: Sequence[RegisteredLoss], trace: Trace) -> dict[str, Array] | None:
        """Return the next draws of each loss, one for each prediction of a batch."""
        if self.layout.options.draws is None:
            return None
        batch: dict[str, Array] = {}
        for loss in losses:
            term = loss.function
            rows, name = len(trace[term.inputs[0]]), str(term.targets)
            if name not in self.draws or len(self.draws[name]) < rows:
                raise InputError(
                    f"draws have fewer targets than the data on '{term.inputs[0]}'; give one for "
                    f"each example."
                )
            batch[loss.name], self.draws[name] = self.draws[name][:rows], self.draws[name][rows:]
        return batch
