"""A model with losses and blocks: its layers, its factors and the memory of a step."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kfac_engine.arguments import whole
from kfac_engine.curvature.estimator import FisherEstimator
from kfac_engine.engine.batch_parts import Inputs, parts_of
from kfac_engine.engine.build import Assembly
from kfac_engine.engine.factors import Factors
from kfac_engine.engine.memory import Footprint, MemoryReport, unchecked
from kfac_engine.engine.parameter_entries import ParameterEntries
from kfac_engine.engine.report import LayerReport, layer_reports
from kfac_engine.engine.trainable_model import TrainableModel
from kfac_engine.layers.pieces import Piece


class MeasuredModel(TrainableModel):
    """A model with losses and blocks; ``Engine`` adds steps.

    Args:
        assembly: The model, its losses and its layers.
        estimator: Statistics and products over the collection.
        exps: Powers to precondition with.

    Attributes:
        collection: Layers, losses and blocks.
        estimator: Statistics and products.
    """

    def __init__(
        self, assembly: Assembly, estimator: FisherEstimator, exps: Sequence[float]
    ) -> None:
        super().__init__(assembly)
        self.collection = assembly.collection
        self.estimator = estimator
        self._discovery = assembly.discovery
        self._exps = tuple(exps)
        self._entries = ParameterEntries(self._discovery, self._model.parameters)
        self._factors = Factors(self._entries, self.collection)

    @property
    def files(self) -> tuple[Path, ...]:
        """The files of the model and of its external weights; empty for a model from memory."""
        return self._model.loaded.files

    @property
    def factors(self) -> Factors:
        """The factors of each parameter by name: averages, eigenvalues and dampings."""
        return self._factors

    @property
    def layers(self) -> tuple[LayerReport, ...]:
        """A report for each layer with its block, and for each parameter without a layer."""
        return tuple(self._layer_reports())

    @property
    def pieces(self) -> dict[str, tuple[Piece, ...]]:
        """Parameter to the pieces that layers use: weights as matrices, and vectors."""
        return self._entries.pieces(self.collection.fisher_blocks)

    def memory(self, batch_size: int = 1, accumulate: int = 1) -> MemoryReport:
        """Return a bound of the peak memory of a step, without running the model.

        Args:
            batch_size: Number of examples, of a part if a batch has several.
            accumulate: Number of parts of a batch.

        Returns:
            Bytes of each part of a step. Inputs and targets are not among them.

        Raises:
            InputError: An argument is not a positive whole number.
        """
        whole("batch_size", batch_size, least=1)
        whole("accumulate", accumulate, least=1)
        return self._footprint(accumulate).peak(batch_size)

    def require_memory(
        self,
        inputs: Inputs,
        *,
        statistics: bool = True,
        more: Callable[[], int] = lambda: 0,
    ) -> None:
        """Refuse a batch that does not fit into the available memory, before it is computed.

        Args:
            inputs: Input name to array, or a list of the parts of the batch.
            statistics: Whether the batch updates statistics and inverses; if not, only its gradient
                is computed.
            more: Returns the bytes of further arrays that are allocated for the batch.

        Raises:
            MemoryLimitError: The batch does not fit; the message names what would fit.
        """
        parts = parts_of(inputs)
        sizes = (unchecked(self._assembly, part, statistics=statistics) for part, _ in parts)
        if largest := max(sizes):
            footprint = self._footprint(len(parts)) if statistics else Footprint(self._assembly)
            footprint.require(largest, more())

    def _layer_reports(self) -> Iterator[LayerReport]:
        return layer_reports(self._entries, self.collection, self._model, self._exps)

    def _footprint(self, parts: int = 1) -> Footprint:
        sums = self.estimator.sums_sources + (parts > 1)
        return Footprint(self._assembly, self.layers, self._exps, sums)
