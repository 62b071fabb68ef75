"""Measures the curvature of a model on a data set, in passes that are not training."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend.threads import single_threaded_blas
from kfac_engine.curvature.approximations import row
from kfac_engine.curvature.blocks.eigenbasis import EigenbasisFB
from kfac_engine.curvature.estimator import FisherEstimator
from kfac_engine.curvature.factors.base import FisherFactor
from kfac_engine.curvature.factors.eigenbasis import Bases, EigenbasisFactor
from kfac_engine.curvature_result.batches import Batches, Pair, checked_pair, pairs_of
from kfac_engine.curvature_result.blocks import Block, Part
from kfac_engine.curvature_result.curvature import Curvature
from kfac_engine.curvature_result.decomposition import Decomposer
from kfac_engine.curvature_result.layer_choice import check_diagonals, last_layers
from kfac_engine.curvature_result.options import CurvatureOptions
from kfac_engine.curvature_result.parameter_vector import ParameterVector
from kfac_engine.curvature_result.spectrum import Spectrum
from kfac_engine.engine.build import Assembly, build
from kfac_engine.engine.options import by_keyword
from kfac_engine.engine.rollback import quiet
from kfac_engine.engine.trainable_model import TrainableModel
from kfac_engine.errors import InputError
from kfac_engine.graph.load import ModelSource
from kfac_engine.losses.objective import Objective


@by_keyword(CurvatureOptions)
def curvature(model: ModelSource, batches: Batches, options: CurvatureOptions) -> Curvature:
    """Measure the Fisher matrix of a model on a data set.

    The result is the mean over all examples, whatever the sizes of the batches are, of the Fisher
    matrix of the negative log-likelihood, which is summed over the positions of an example. There
    is no decay and no damping.

    Args:
        model: Path, bytes or ``ModelProto``.
        batches: One pair of inputs (input name to array) and targets, or an iterable of such pairs.
            Targets may be None unless ``fisher`` is ``"empirical"``.
        options: The fields of ``CurvatureOptions``, each as a keyword; only ``loss`` is needed.

    Returns:
        The curvature at the parameters of the model.

    Raises:
        InputError: The file, an option or a batch is wrong, or the data have no example.
        UnsupportedError: A parameter has no block of the structure; the message names it.
        NonFiniteError: A batch yields NaN or infinity.
        UnsupportedOpError: An operator between a parameter and the loss has no derivative rule.
    """
    pairs = pairs_of(batches, options.passes)
    assembly, estimator = build(model, options.engine)
    if options.layers == "last":
        only = replace(options.engine, trainable=last_layers(assembly), freeze=None)
        assembly, estimator = build(model, only)
    measurement = _Measurement(TrainableModel(assembly), assembly, estimator, options)
    check_diagonals(assembly, options.structure)
    with single_threaded_blas(), quiet():
        measurement.read_all(pairs)
        return Curvature(
            assembly,
            options,
            tuple(measurement.blocks()),
            measurement.vector,
            measurement.examples,
            measurement.log_likelihood,
        )


@dataclass(slots=True)
class _Measurement:
    """The state of a measurement.

    Attributes:
        model: The model with its losses.
        assembly: Its layers.
        estimator: The statistics.
        options: What is measured.
        examples: Examples so far.
        log_likelihood: Sum of the log-likelihoods of the targets so far; None without targets.
        draws: The draws of the user that are not used yet, by loss input.
    """

    model: TrainableModel
    assembly: Assembly
    estimator: FisherEstimator
    options: CurvatureOptions
    examples: int = 0
    log_likelihood: float | None = 0.0
    draws: dict[str, Array] = field(default_factory=dict)

    @property
    def vector(self) -> ParameterVector:
        """All parameters."""
        shapes = {name: value.shape for name, value in self.assembly.model.parameters.items()}
        return ParameterVector(shapes, self.assembly.discovery.parts)

    @property
    def decomposer(self) -> Decomposer:
        """Converts the blocks of the estimator."""
        to_numpy = self.assembly.collection.backend.to_numpy
        return Decomposer(self.vector, to_numpy, self.options.biases == "separate")

    def read_all(self, pairs: Iterable[Pair]) -> None:
        """Read the data once, or twice for factors that are measured in a basis of all data.

        Args:
            pairs: Inputs and targets.

        Raises:
            InputError: As for ``read``, or the second pass reads other data.
        """
        factors, generator = self.estimator.factors, self.estimator.rng.bit_generator.state
        blocks = [b for b in self.estimator.blocks if isinstance(b, EigenbasisFB)]
        scales = [block.factor for block in blocks]
        self.read(pairs, [factor for factor in factors if factor not in scales])
        if not blocks:
            return
        backend = self.assembly.collection.backend
        for block in blocks:
            dtype = block.factors[0].average.read().dtype
            bases = (backend.asarray(basis.astype(dtype)) for basis in self.decomposer.bases(block))
            assert isinstance(block.factor, EigenbasisFactor)  # by the type of the block
            block.factor.restart(Bases(*bases))
        examples, self.examples, self.log_likelihood = self.examples, 0, 0.0
        self.estimator.rng.bit_generator.state = generator  # the targets of the first pass
        self.read(pairs, scales)
        if self.examples != examples:
            raise InputError(
                f"the first pass over the data had {examples} examples and the second "
                f"{self.examples}; give data that do not change."
            )

    def read(self, pairs: Iterable[Pair], factors: Sequence[FisherFactor]) -> None:
        """Add all batches to the statistics.

        Args:
            pairs: Inputs and targets.
            factors: Factors to update.

        Raises:
            InputError: There is no example, a batch is wrong, or the draws do not fit.
        """
        objective = self.assembly.task.objective
        if self.options.draws is not None:
            self.draws = objective.named_targets(self.options.draws)
        with_targets = None
        for number, pair in enumerate(pairs, 1):
            inputs, targets = checked_pair(pair, number)
            if with_targets not in (None, targets is not None):
                raise InputError(
                    f"batch {number} has {'no ' * (targets is None)}targets, unlike the batches "
                    f"before it; give targets with all batches or with none."
                )
            with_targets = targets is not None
            trace = self.model.trace(inputs, targets)
            examples = objective.examples(trace)
            if not examples:
                raise InputError(f"batch {number} has no example; leave it out.")
            draws = self._draws(objective, trace)
            self.estimator.accumulate(trace, examples, draws=draws, factors=factors)
            self.examples += examples
            if with_targets and self.log_likelihood is not None:
                self.log_likelihood -= examples * objective.value(trace)
        if not self.examples:
            raise InputError("the data have no example; pass one batch at least.")
        if not with_targets:
            self.log_likelihood = None
        self._check_draws()

    def blocks(self) -> Iterator[Block]:
        """Yield all blocks; their places cover every entry of every parameter once."""
        collection, vector, decomposer = self.assembly.collection, self.vector, self.decomposer
        free = np.ones(vector.size, bool)
        for layer in self.assembly.discovery.layers:
            key = layer.parameters if len(layer.parameters) > 1 else layer.parameters[0]
            block = collection.fisher_blocks[key]
            formula = row(layer.kind, collection.approximation_of(key)).formula
            result = decomposer.decompose(block, formula)
            free[result.places] = False
            yield result
        yield from unused_entries(vector, free)

    def _draws(self, objective: Objective, trace: Mapping[str, Array]) -> dict[str, Array] | None:
        """Return the next draws of each loss, one for each prediction of a batch."""
        if self.options.draws is None:
            return None
        batch: dict[str, Array] = {}
        for loss in objective.losses:
            (tower,) = loss.towers
            rows = len(trace[tower.inputs[0]])
            name = str(tower.targets)
            if name not in self.draws or len(self.draws[name]) < rows:
                raise InputError(
                    f"draws have fewer targets than the data on '{tower.inputs[0]}'; give one for "
                    f"each example."
                )
            batch[loss.name], self.draws[name] = self.draws[name][:rows], self.draws[name][rows:]
        return batch

    def _check_draws(self) -> None:
        for name, rest in self.draws.items():
            if len(rest):
                raise InputError(
                    f"draws have {len(rest)} more targets for '{name}' than the data have examples."
                )


def unused_entries(vector: ParameterVector, free: np.ndarray) -> Iterator[Block]:
    """Yield a block of zeros for the entries of each parameter that the loss does not depend on.

    Args:
        vector: All parameters.
        free: Whether an entry is in no other block, ``(size,)``.

    Yields:
        Diagonal blocks.
    """
    for name, start in vector.starts.items():
        places = start + np.flatnonzero(free[start : start + int(np.prod(vector.shapes[name]))])
        if places.size:
            part = Part((name,), f"{name} (unused entries)", slice(None))
            shape = (1, places.size, 1)
            yield Block((part,), places.reshape(shape), Spectrum(np.zeros(shape)), "0")
