"""Computes the peak memory of a step in advance, and refuses a step that does not fit."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod

from kfac_engine._types import Array
from kfac_engine.backend.cpu.grouped_gram import CACHE_BYTES
from kfac_engine.backend.memory_space import HOST
from kfac_engine.backend.protocol import Backend
from kfac_engine.curvature.approximations import row
from kfac_engine.curvature.blocks.base import uses
from kfac_engine.engine.build import Assembly
from kfac_engine.engine.report import LayerReport
from kfac_engine.engine.validation import batch_size
from kfac_engine.errors import MemoryLimitError
from kfac_engine.graph.write import MOST_COPIED_BYTES
from kfac_engine.layers.match import LayerMatch
from kfac_engine.runtime.memory import activation_bound, activation_bytes, value_bytes
from kfac_engine.system import memory_limits
from kfac_engine.system.memory_limits import spelled

# Resident after a step of one example, without arrays: 12 MB for a network of few nodes; 5.6 kB
# more a node for an LSTM of 400 steps (33,000 nodes), 7.8 for one of 50, 11 for a ResNet-20.
_LIBRARIES = 12 << 20
_NODE = 8 << 10
# Work memory of OpenBLAS; small products touch a part of it.
_BLAS = 32 << 20
# Sizes of arrays that the C library (glibc) takes from its heap and whose freed memory smaller
# arrays divide: each step replaces them. Smaller gaps are filled again, and larger arrays are
# returned to the system.
_LEAST_GAP, _LARGEST_GAP = 5_000_000, 32 << 20

_FLOAT = 4


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Peak memory of a step by part, in bytes.

    Attributes:
        parameters: Trainable parameters and frozen constants.
        gradients: Gradients of parameters, and natural gradients.
        activations: Peak of values and their gradients in the sessions, for the given batch size.
        factors: Moving averages and stored powers.
        scratch: Peak of temporary arrays.
        sessions: Memory of ONNX Runtime, BLAS and graphs, copies of frozen constants, plans of
            grouped moments, and gaps in the heap between large arrays.
        optimizer: The state of an optimizer, for its own ``memory`` only.
        device: Bytes of the parts above that are in the memory of a GPU: factors and scratch, and
            all parts but sessions if the model runs on the GPU.
    """

    parameters: int
    gradients: int
    activations: int
    factors: int
    scratch: int
    sessions: int = 0
    optimizer: int = 0
    device: int = 0

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return (
            self.parameters
            + self.gradients
            + self.activations
            + self.factors
            + self.scratch
            + self.sessions
            + self.optimizer
        )

    @property
    def on_host(self) -> int:
        """Bytes in the memory of the host."""
        return self.total - self.device


def unchecked_examples(
    assembly: Assembly, inputs: Mapping[str, Array], *, statistics: float
) -> int:
    """Return the number of examples of a batch; 0 if the memory of as many was checked before.

    The inputs are unchecked. ``statistics`` is the part of the examples that statistics measure.
    """
    batch = assembly.task.batch
    examples = batch_size(batch, inputs) or batch.size
    return examples if examples > assembly.checked.get(statistics, 0) else 0


def require_gradient(assembly: Assembly, inputs: Mapping[str, Array], more: int = 0) -> None:
    """Refuse a batch whose gradient does not fit into the available memory.

    The inputs are unchecked. ``more`` counts the bytes of further arrays that are allocated for the
    batch.
    """
    examples = unchecked_examples(assembly, inputs, statistics=False)
    if examples:
        Footprint(assembly).require(examples, more)


@dataclass(frozen=True, slots=True)
class Footprint:
    """The memory of a step of one engine, or of gradients alone."""

    assembly: Assembly  # model, losses and layers
    # Reports of all blocks; none for gradients without statistics. A shared factor counts for each
    # block, an upper bound.
    layers: Sequence[LayerReport] = ()
    exps: Sequence[float] = ()  # powers that are stored
    # How many measurements of each statistic are in memory before they are averaged: sums over
    # several sources, and over several parts of a batch.
    sums: int = 0
    statistics: float = 0.0  # part of the examples that statistics measure

    def peak(self, examples: int) -> MemoryReport:
        """Return the peak memory of a step on a batch of ``examples``, in bytes for each part.

        Sessions are built to measure sizes.
        """
        task, model = self.assembly.task, self.assembly.model
        measured = self._measured(examples)
        return self._report(examples, activation_bytes(model, task.batch, examples, measured))

    def require(self, examples: int, more: int = 0) -> None:
        """Raise an error for a batch that does not fit; reserve the memory of a GPU.

        ``more`` counts the bytes of further arrays that are allocated for the batch, such as the
        state of an optimizer. The message of the MemoryLimitError names what would fit.
        """
        task, checked = self.assembly.task, self.assembly.checked
        # The peak itself takes sessions to measure: only where a generous bound does not fit.
        bound = activation_bound(self.assembly.model, task.batch, examples)
        report, free = self._report(examples, bound), memory_limits.available_memory()
        # What is allocated already is not free any more.
        allocated = self._stored(report) + (report.parameters + report.sessions if checked else 0)
        if report.on_host + more > free + allocated:
            report = self.peak(examples)
        if report.on_host + more > free + allocated:
            raise MemoryLimitError(
                f"{'a step' if self.layers else 'a gradient'} needs "
                f"{spelled(report.on_host + more - allocated)} and {spelled(free)} are free; "
                f"{self._cure(examples, report, free + allocated - more)}."
            )
        if self.layers:
            self._backend.reserve(report.factors)
        for statistics in {0.0, self.statistics}:
            checked[statistics] = max(examples, checked.get(statistics, 0))

    def _cure(self, examples: int, report: MemoryReport, free: int) -> str:
        """Return advice that makes a step fit: a smaller batch only if one example fits."""
        whole = report.on_host
        least = examples if self.assembly.task.batch.fixed else 1
        one = self.peak(least).on_host if least < examples else whole
        if one <= free:
            # The peak is a convex function of the number of examples: it lies below its chord.
            slope = max(whole - one, 1) / (examples - least)
            advice = (
                f"the values of {examples} examples are too large: use a smaller batch, of at most "
                f"{least + int((free - one) / slope)} examples"
            )
            # Parts of a batch add one measurement of each statistic.
            of_part = least + int((free - one - self._averages()) / slope)
            parts = ceil(examples / max(of_part, 1))
            return advice + (f", or accumulate={parts} parts" if of_part >= least else "")
        values = self.assembly.model.parameters
        name = max(values, key=lambda name: values[name].nbytes)
        saved = values[name].nbytes * report.gradients // sum(a.nbytes for a in values.values())
        freeze = f"freeze={name!r} saves {spelled(saved)} of gradients"
        if not self.layers:
            return f"one example does not fit: train fewer parameters: {freeze}"
        largest = max(self.layers, key=lambda layer: layer.factor_bytes)
        return (
            f"the block of {', '.join(largest.parameters)} takes {spelled(largest.factor_bytes)}: "
            f"choose approximation 'diagonal' for {largest.kind}, or train fewer parameters: "
            f"{freeze}"
        )

    def _stored(self, report: MemoryReport) -> int:
        """Return the bytes of the averages and powers that are on the host already."""
        factors = self.assembly.collection.get_factors() if self.layers else ()
        are_stored = any(factor.average.value is not None for factor in factors)
        return report.factors if are_stored and not report.device else 0

    @property
    def _backend(self) -> Backend:
        return self.assembly.collection.backend

    def _report(self, examples: int, activations: int) -> MemoryReport:
        model = self.assembly.model
        nodes = (model.extended_graph().nodes, *(backward.nodes for backward in model.backwards()))
        factors = sum(layer.factor_bytes for layer in self.layers)
        more = max(self._measured(examples) / self.assembly.task.batch.size, 1)
        work, on_device = self._backend.working_bytes(
            ceil(more * self._copied()),
            self._numbers(decomposed=False),
            self._numbers(decomposed=True),
        )
        # Sums over sources and parts are as large as the averages.
        scratch = work + self.sums * self._averages()
        constants = model.graph.constants
        parameters = sum(array.nbytes for array in constants.values())
        frozen = sum(constants[name].nbytes for name in constants.keys() - model.parameters.keys())
        copies = 2 * frozen if frozen <= MOST_COPIED_BYTES else 0  # in both sessions
        vectors = 2 if self.layers else 1  # gradients, and natural gradients
        gradients = vectors * sum(array.nbytes for array in model.parameters.values())
        sizes = (array.nbytes for array in model.parameters.values())
        gaps = vectors * sum(size for size in sizes if _LEAST_GAP <= size <= _LARGEST_GAP)
        blas = min(_BLAS, parameters + activations)
        shapes = (shape for layer in self.layers for shape in layer.factor_shapes)
        plans = CACHE_BYTES if any(len(shape) == 3 for shape in shapes) else 0  # of groups
        moved = 0 if model.memory_space is HOST else parameters + gradients + activations
        return MemoryReport(
            parameters=parameters,
            gradients=gradients,
            activations=activations,
            factors=factors,
            scratch=scratch,
            sessions=_LIBRARIES + blas + _NODE * sum(map(len, nodes)) + copies + gaps + plans,
            device=factors + scratch + moved if on_device else 0,
        )

    def _measured(self, examples: int) -> int:
        """Return the number of examples that statistics measure; a batch may be indivisible."""
        whole = self.statistics and self.assembly.task.example_axes.obstacle
        return examples if whole else ceil(self.statistics * examples)

    def _copied(self) -> int:
        """Return how many bytes the largest operand of a statistic takes in the sample run."""
        layers = self.assembly.discovery.layers if self.layers else ()
        return max(map(self._operand, layers, self.layers), default=0)

    def _operand(self, layer: LayerMatch, report: LayerReport) -> int:
        """Return the bytes of the largest input of a layer, as patches for a convolution."""
        if not layer.inputs:
            return 0
        if row(layer.kind, report.approximation).fills_scratch:
            return sys.maxsize
        collection, facts = self.assembly.collection, self.assembly.model.facts
        packing = collection.fisher_blocks[layer.key].packing
        shape = collection.require_shape(layer.parameters[0])
        taps = prod(packing.kernel(shape)) if packing else 1
        return max(taps * value_bytes(facts[name]) for name in uses(layer.inputs))

    def _numbers(self, *, decomposed: bool) -> int:
        """Return the entries of the largest matrix or stack that is inverted or decomposed."""
        inverts = all(exp == -1 for exp in self.exps)
        shapes = (
            shape
            for layer in self.layers
            if layer.inverse_flops
            and decomposed == (not inverts or row(layer.kind, layer.approximation).eigenvectors)
            for shape in layer.factor_shapes
        )
        # A mean may lie below a covariance.
        square = (prod(s) for s in shapes if len(s) > 1 and s[-2] - s[-1] in (0, 1))
        return max(square, default=0)

    def _averages(self) -> int:
        """Return the bytes of the averages."""
        averages = (prod(shape) for layer in self.layers for shape in layer.factor_shapes)
        return _FLOAT * sum(averages)
