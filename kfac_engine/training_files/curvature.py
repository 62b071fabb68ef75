"""Records the curvature of a training step: statistics, inverses and natural gradients.

Statistics, estimation modes and packings are the library's own, recorded. Written here are the
order of the work in a step, the relative damping and the product ``A⁻¹ V G⁻¹`` of a block.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial, reduce
from math import sqrt
from typing import Any

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend.namespace import array_module
from kfac_engine.curvature.blocks.base import FisherBlock, uses
from kfac_engine.curvature.blocks.kronecker import relative_level
from kfac_engine.curvature.factors.average import MovingAverage
from kfac_engine.curvature.factors.base import FisherFactor
from kfac_engine.curvature.factors.dense import shrinkage
from kfac_engine.curvature.factors.row_weights import ExampleWeights, LayerRows
from kfac_engine.curvature.factors.statistics import rows_name
from kfac_engine.curvature.refreshes import early_rates, least_period
from kfac_engine.curvature.sources import times_scales
from kfac_engine.engine.build import Assembly
from kfac_engine.engine.engine import Engine
from kfac_engine.errors import UnsupportedError
from kfac_engine.export.target_inputs import TargetInputs
from kfac_engine.graph.analysis.subgraph import dependents
from kfac_engine.graph.structure import Input
from kfac_engine.layers.parameter_slices import join, split
from kfac_engine.losses.base import LossFunction, weights_of
from kfac_engine.losses.kinds import LOSSES
from kfac_engine.losses.objective import Observation
from kfac_engine.recording.functions import identity_like
from kfac_engine.recording.operations import Draws, NoiseInput, Operations, new_tape
from kfac_engine.recording.recorded import Recorded, Size, Symbol, Tape
from kfac_engine.training.curvature_updates import fewest_measured
from kfac_engine.training.feature_bounds import POWERS
from kfac_engine.training.kfac import KfacOptimizer
from kfac_engine.training.predictions import predictions_of
from kfac_engine.training.weight_roles import wide_heads
from kfac_engine.training_files.parts import EvaluationGraph, Writer, forward_nodes, number_of

Values = Mapping[str, Symbol]
_NEVER = -1
_TINY = 1e-30  # least divisor


@dataclass(frozen=True, slots=True)
class Update:
    """The curvature after the updates of a step."""

    state: dict[str, Symbol]  # new state by name; entries that did not change are empty
    # Natural gradients by parameter, or ``Missing`` where the file has none.
    natural: dict[str, Any]
    moment: Callable[[FisherBlock], Any]  # records the mean square of the inputs of a block


class Missing:
    """The natural gradient of a parameter that the file does not precondition."""

    def __init__(self, name: str, like: Symbol) -> None:
        self.__dict__.update(missing=name, shape=like.shape, ndim=like.ndim, dtype=like.dtype)

    def reshape(self, *_: object) -> "Missing":
        return self

    def __getitem__(self, key: object) -> "Missing":
        return self

    def __getattr__(self, name: str) -> Any:
        raise UnsupportedError(
            f"the rule of this optimizer reads the natural gradient of '{self.missing}', whose "
            f"layer has no matrices in a training file; export another optimizer, such as 'muon'."
        )

    def __array_function__(self, *_: object) -> Any:
        return self.entries


class CurvatureSteps:
    """Writes how a ``KfacOptimizer`` updates its curvature.

    ``target_inputs`` says what the targets are, and which of them have weights. ``noise`` receives
    the inputs of random numbers; None if the file draws them.
    """

    def __init__(
        self,
        engine: Engine,
        assembly: Assembly,
        optimizer: KfacOptimizer,
        target_inputs: TargetInputs,
        noise: list[NoiseInput] | None,
    ) -> None:
        self._engine, self._assembly, self._noise = engine, assembly, noise
        self._target_inputs = target_inputs
        self._optimizer, self._options = optimizer, optimizer.options
        self._root = sqrt(float(engine.damping))
        self._sources = engine.fisher.sources
        blocks, by_adam = (
            engine.collection.fisher_blocks.items(),
            wide_heads(engine, predictions_of(engine)),
        )
        self._blocks = {
            key: block
            for key, block in blocks
            if _has_matrices(block) and uses(key)[0] not in by_adam
        }
        self._factors = list(dict.fromkeys(f for b in self._blocks.values() for f in b.factors))

    @cached_property
    def _reads(self) -> Any:
        """The backward graph to the values whose gradients the statistics read."""
        names = [name for factor in self._factors for name in factor.statistic.names()]
        gradients = self._sources.gradients
        wanted = dict.fromkeys(gradients[name] for name in names if name in gradients)
        wanted |= dict.fromkeys(name for layer in self._layers for name in layer.outputs)
        return self._assembly.model.backward(self._engine.objective.inputs, tuple(wanted))

    @cached_property
    def _weighted(self) -> bool:
        """Whether targets have weights; a target that equals ``ignore_index`` has the weight 0."""
        sample = EvaluationGraph(self._assembly, new_tape(""), None, {}, self._target_inputs)
        seen = sample.observe(self._engine.objective)
        return any(observed.weights is not None for observed in seen.terms)

    @cached_property
    def _layers(self) -> tuple[LayerRows, ...]:
        """The layers whose rows may not count; none if all targets count alike."""
        read = {name for factor in self._factors for name in factor.statistic.names()}
        layers = self._sources.layers if self._weighted else ()
        return tuple(layer for layer in layers if not read.isdisjoint(layer.inputs))

    def repeats(self, block: FisherBlock) -> float:
        """Return how many rows an example has in the factors of a block."""
        return max(f.statistic.repeats(self._samples(f)) for f in block.factors)

    @property
    def constants(self) -> Mapping[str, Array]:
        """The constants that the nodes read."""
        return self._reads.constants if self._factors else {}

    @cached_property
    def _early_rates(self) -> tuple[float, float]:
        fisher, collection = self._engine.fisher, self._engine.collection
        return early_rates(collection, fisher.works, self.repeats)

    def initial_state(self) -> dict[str, Array]:
        """Return the state before the first step, by name."""
        state: dict[str, Array] = {
            name: np.array(_NEVER, np.int64) for name in ("last statistics", "last refresh")
        }
        # A factor does not see a batch in which none of its losses has a target that counts.
        several = self._weighted and len(self._engine.objective.terms) > 1
        weights = (len(self._factors),) if several else ()
        state["statistics weight"] = np.zeros(weights, np.float32)
        if self._weighted:
            state["statistics rows"] = np.zeros(len(self._factors), np.float32)
        for index, factor in enumerate(self._factors):
            shape = factor.statistic.shape(self._samples(factor))
            for kind in ("average", "inverse"):
                state[f"{kind}/{index}"] = np.zeros(shape, np.float32)
        return state

    def describe(self) -> dict[str, str]:
        """Return the name of each factor, by its number in the names of the state."""
        return {str(index): factor.name for index, factor in enumerate(self._factors)}

    # -- a step ------------------------------------------------------------------------------------

    def write(
        self,
        batch: EvaluationGraph,
        state: Values,
        vectors: Mapping[str, Symbol],
        step: Symbol,
        random: Writer,
    ) -> Update:
        """Write the updates that a step makes, and the natural gradients of vectors.

        ``batch`` is the evaluation of the whole batch, ``state`` the old state, and ``step`` the
        number of steps so far. ``random`` writes random nodes of the model.
        """
        tape, count = batch.tape, len(self._factors)
        if not count:
            unchanged_state = {name: state[name] for name in self.initial_state()}
            missing = {n: Missing(n, v) for n, v in vectors.items()}
            return Update(unchanged_state, missing, lambda block: 1.0)
        averages = [state[f"average/{i}"] for i in range(count)]
        stored = [state[f"inverse/{i}"] for i in range(count)]
        names = [n for n in ("statistics weight", "statistics rows") if n in state]
        totals = [state[name] for name in names]
        every = (int(self._options[k]) for k in ("statistics_every", "refresh_every"))  # type: ignore[call-overload] # whole numbers
        last = (state["last statistics"], state["last refresh"])
        size: Any = batch.examples.recorded() if batch.examples else batch.assembly.task.batch.size
        least = (1, least_period(self._early_rates, size))
        observes, refreshes = (
            _is_due(step, n, k, m) for n, k, m in zip(last, every, least, strict=True)
        )

        results = tape.branch(
            observes,
            lambda: self._observed(batch, state, averages, totals, step, random),
            lambda: [*map(without_entries, averages), *totals],
        )
        measured, new_totals = results[:count], results[count:]

        def fresh() -> list[Symbol]:
            functions = (partial(self._collected, each) for each in (measured, averages))
            examples = number_of(tape, size).astype(np.float32) * self._share(batch, state)
            examples = np.maximum(examples, 1.0)
            collected = tape.branch(observes, *functions)
            inverses = self._inverses(averages, collected, new_totals[0] * examples)
            return [*inverses, *self._natural(vectors, inverses).values()]

        def old() -> list[Symbol]:
            latest = [*stored]
            lines = [i for i in range(count) if averages[i].ndim == 1]  # they store no inverse
            chosen = (lambda: [measured[i] for i in lines], lambda: [averages[i] for i in lines])
            for i, average in zip(
                lines, tape.branch(observes, *chosen) if lines else (), strict=True
            ):
                latest[i] = self._reciprocals(average)
            return [*map(without_entries, stored), *self._natural(vectors, latest).values()]

        results = tape.branch(refreshes, fresh, old)
        natural: dict[str, Any] = {n: Missing(n, v) for n, v in vectors.items()}
        natural |= dict(zip(self._natural_names(vectors), results[count:], strict=True))
        new = {f"average/{i}": a for i, a in enumerate(measured)}
        new |= {f"inverse/{i}": a for i, a in enumerate(results[:count])}
        new |= dict(zip(names, new_totals, strict=True))
        for name, is_due in (("last statistics", observes), ("last refresh", refreshes)):
            new[name] = np.where(is_due, step, state[name])

        return Update(new, natural, partial(self._moment, tape, observes, (measured, averages)))

    def _moment(
        self,
        tape: Tape,
        observes: Symbol,
        averages: tuple[list[Symbol], list[Symbol]],
        block: FisherBlock,
    ) -> Any:
        """Record the mean square of the inputs of a block; 1 for a block without matrices here.

        ``observes`` says whether the step has measured statistics. ``averages`` are those with
        them, and those without.
        """
        if block not in self._blocks.values():
            return 1.0
        factor, packing = block.factors[0], block.packing
        assert packing is not None, "a layer has a weight"
        i, bias = self._factors.index(factor), float(packing.has_bias)

        def of(average: Any) -> list[Any]:
            side = factor.matrix_side(average.shape)
            trace = average.sum() if average.ndim == 1 else np.trace(average).sum()
            return [(trace - bias) / (side - bias)]

        new, old = averages
        return tape.branch(observes, lambda: of(new[i]), lambda: of(old[i]))[0]

    # -- statistics --------------------------------------------------------------------------------

    def _observed(
        self,
        batch: EvaluationGraph,
        state: Values,
        averages: list[Symbol],
        totals: list[Symbol],
        step: Symbol,
        random: Writer,
    ) -> list[Symbol]:
        """Return the averages after a part of the batch was measured, and their totals."""
        part = self._part(batch, state, step)
        total = MovingAverage(weight=totals[0])
        decay, config = self._engine.fisher.cov_ema_decay, self._engine.collection.config
        coefficients = total.coefficients(decay, 1.0, config)
        new, operations = [average.copy() for average in averages], Operations(batch.tape)
        observation, values = self._measured(batch, part, step, random)
        if not self._weighted:
            for average, factor in zip(new, self._factors, strict=True):
                _add(factor, average, values, operations, coefficients)
            return [*new, total.weight]
        of_part, present = self._counting(batch, observation)
        counts = self._counts(of_part, present)
        weight: Any = np.where(counts, total.weight, totals[0])
        share: Any = np.where(counts, 1.0 / total.weight, 0.0)
        beta, alpha = (
            np.where(counts, c, k) for c, k in zip(coefficients, (1.0, 0.0), strict=True)
        )
        rows, of_rows = self._of_rows(values, observation, totals[1], (share, beta, alpha))
        for i, (average, factor) in enumerate(zip(new, self._factors, strict=True)):
            of_factor = (beta[i], alpha[i]) if beta.ndim and i not in of_rows else (beta, alpha)
            _add(factor, average, values, operations, of_rows.get(i, of_factor))
        return [*new, weight, rows]

    def _of_rows(
        self,
        values: Mapping[str, Any],
        observation: Observation,
        before: Symbol,
        numbers: tuple[Any, Any, Any],
    ) -> tuple[Symbol, dict[int, tuple[Any, Any]]]:
        """Record the mean numbers of rows of an example, as ``MovingAverage`` has them.

        ``before`` are the old ones of all factors, and ``numbers`` the share of the measurement in
        the averages and their coefficients, for each factor or for all. Returned are the new mean
        numbers, and the coefficients of each factor whose rows have weights.
        """
        names = [[rows_name(n) for n in factor.statistic.names()] for factor in self._factors]
        weighted = [i for i, each in enumerate(names) if all(name in values for name in each)]
        if not weighted:
            return before, {}
        sums = [reduce(np.add, [values[name].sum() for name in names[i]]) for i in weighted]
        number: Any = np.concatenate([total.reshape(1) for total in sums])
        number = number / observation.size.examples
        places = np.array(weighted)
        share, beta, alpha = (x[places] if x.ndim else x for x in numbers)
        old = before[places]
        mean = old + share * (number - old)
        divisor = np.maximum(mean, _TINY)
        both = (np.split(x / divisor, len(places)) for x in (beta * old, alpha * number))
        rows = before.copy()
        rows[places] = mean
        return rows, dict(zip(weighted, zip(*both, strict=True), strict=True))

    def _counting(self, batch: EvaluationGraph, observation: Observation) -> tuple[Any, list[Any]]:
        """Record whether a part of a batch counts, and whether each loss has targets in the batch.

        A part changes nothing if no target of a loss counts that has others in the batch.
        """
        totals: Sequence[Any] = observation.size.totals
        whole: Sequence[Any] = totals
        if len(totals) > 1:
            whole = batch.observe(self._engine.objective).size.totals
        present = [np.greater(_recorded(total), 0) for total in whole]
        if len(totals) > 1:
            pairs = zip(present, map(_recorded, totals), strict=True)
            totals = [np.where(counts, total, 1.0) for counts, total in pairs]
        return np.greater(_least(totals), 0.0), present

    def _counts(self, of_part: Any, present: Sequence[Any]) -> Any:
        """Record whether factors see a part of a batch, each of them or all; see ``_counting``."""
        of_factors, known = [], self._sources.losses_of(self._engine.fisher.factors)
        for factor in self._factors:
            numbers = sorted(known[factor])
            divided = numbers and len(numbers) < len(present)
            any_present = (
                reduce(np.logical_or, [present[n] for n in numbers]) if divided else of_part
            )
            of_factors.append(np.logical_and(of_part, any_present) if divided else of_part)
        if all(counts is of_part for counts in of_factors):
            return of_part
        return np.concatenate([counts.reshape(1) for counts in of_factors])

    def _part(self, batch: EvaluationGraph, state: Values, step: Symbol) -> EvaluationGraph:
        """Return an evaluation of another part of the batch in each step.

        ``rotating_part`` chooses the same examples: for a part of ``size`` of n examples, the ones
        at which ``(i + step) · size ÷ n`` grows.
        """
        part, axes = self._share(batch, state), self._engine.example_axes
        graph, prefix, tape = batch.model.extended_graph(), batch.tape.level.prefix, batch.tape
        hidden = () if batch.visible else (n for node in graph.nodes for n in node.outputs if n)
        copied = {name: f"{prefix}{name}" for name in hidden}
        if batch.examples is None or (isinstance(part, float) and part == 1):
            return replace(batch, names={**batch.names, **copied})
        n = batch.examples.number()
        share = n.astype(np.float32) * part
        rounded = share.new("Round", shape=())
        least = fewest_measured(self._engine)
        size = np.maximum(rounded, float(least)).astype(np.int64)
        size = size if least == 1 else np.minimum(size, n)
        step = step + self._later(batch, step, size, n)
        bounds = [tape.constant(0, np.int64), size.name, tape.constant(1, np.int64)]
        examples = Size(size)
        j = Recorded(tape, tape.record("Range", bounds), (examples,), np.int64)
        index = ((j + (step * size) // n + 1) * n + (size - 1)) // size - 1 - step
        names = {**batch.names, **copied, **{name: f"{prefix}{name}" for name in axes.inputs}}
        nodes = (*graph.nodes, *self._reads.nodes)
        moving = dependents(nodes, (*axes.inputs, *self._reads.cotangents.values()))
        moving |= {name for node in self._reads.nodes for name in node.outputs if name}
        names |= {name: f"{prefix}{name}" for name in (*moving, *batch.target_axes)}
        return replace(batch, examples=examples, names=names, selection=index, visible=True)

    def _share(self, batch: EvaluationGraph, state: Values) -> Any:
        """Return the share of the examples that statistics have, a number or a recorded one."""
        part, axes = float(self._options["statistics_part"]), self._engine.example_axes  # type: ignore[arg-type] # a number
        if batch.examples is None or part == 1 or axes.obstacle:
            return 1.0
        powers = state.get(f"{POWERS}/{POWERS}")
        if powers is None:
            return part
        whole = self._optimizer.measures_whole({POWERS: {POWERS: powers}})
        return np.where(whole, 1.0, part).astype(np.float32)

    def _later(self, batch: EvaluationGraph, step: Symbol, size: Symbol, n: Symbol) -> Symbol | int:
        """Return the number of steps after which the part of a step has targets that count.

        It is 0 if all targets count, and for several losses, whose targets may have no common part,
        and where examples and positions share an axis.
        """
        seen = batch.observe(self._engine.objective).terms if self._weighted else ()
        if len(seen) != 1 or seen[0].weights is None:
            return 0
        task = batch.assembly.task
        place = task.batch.places[task.heads[0].output]
        if place.repeats > 1:
            return 0
        weights: Any = seen[0].weights
        rest = tuple(axis for axis in range(weights.ndim) if axis != place.axis)
        counts = (weights > 0).astype(np.int64).sum(axis=rest) > 0
        j = array_module(weights).arange(batch.examples)
        # The part of a step s has the examples j with a remainder below its size.
        remainder = ((j + 1 + step) * size) % n
        steps = np.where(remainder < size, 0, (n - remainder + size - 1) // size)
        return -np.max(np.where(counts, -steps, -n))

    def _measured(
        self, batch: EvaluationGraph, part: EvaluationGraph, step: Symbol, random: Writer
    ) -> tuple[Observation, dict[str, Symbol]]:
        """Write the passes of the statistics; return targets, and the values that they read."""
        mode, objective = self._sources.mode, self._engine.objective
        if mode.needs_targets or not mode.one_source:
            raise UnsupportedError("training files estimate the curvature by sampled targets only.")
        gradients = self._sources.gradients
        reads = dict.fromkeys(n for factor in self._factors for n in factor.statistic.names())
        forward = [name for name in reads if name not in gradients]
        part = self._forward(batch, part, forward, random)
        counted = [name for name in (objective.batch,) if name]
        values: dict[str, Any] = {n: part[n] for n in (*objective.inputs, *forward, *counted)}
        for term in objective.terms:
            weights = part.weights(term)
            if weights is not None:
                values[weights_of(term.require_target_name())] = weights
        observation, prefix = part.observe(objective), batch.tape.level.prefix
        size: Any = observation.size
        examples: Any = batch.examples or size.examples
        observation = observation.within(size.of_examples(examples))
        rng: Any = Draws(batch.tape, step, self._noise)
        try:
            (source,) = mode.sources(objective.losses, values, rng, {})
        except UnsupportedError as failure:
            reason = str(failure).rstrip(".")
            raise UnsupportedError(
                f"K-FAC draws targets from the distributions of the losses, and a training file "
                f"cannot draw those of {' and '.join(map(_spelled, objective.terms))} ({reason}). "
                f"Export optimizer='adamw' or 'muon', or train in Python."
            ) from failure
        scales: dict[str, Any] = dict(objective.fisher_scales(observation))
        scales = {n: k.recorded() if isinstance(k, Size) else k for n, k in scales.items()}
        cotangents: dict[str, Any] = times_scales(source, scales)
        for name, cotangent in cotangents.items():
            result = part.names[self._reads.cotangents[name]]
            batch.tape.level.op("Identity", cotangent.name, result=result)
        part.write(self._reads.nodes, random, prefix)
        arrays: dict[str, Any] = {v: part.value(g, v) for v, g in self._reads.gradients.items()}
        values |= {name: arrays[gradients[name]] for name in reads if name in gradients}
        return observation, values | self._rows(part, observation, arrays)

    def _forward(
        self, batch: EvaluationGraph, part: EvaluationGraph, forward: Sequence[str], random: Writer
    ) -> EvaluationGraph:
        """Write the forward pass of a part of the batch; return the part with all its names."""
        level, index = batch.tape.level, part.selection
        if index is None:
            # Only the backward pass is another one; its values need names of their own.
            results = {n for node in self._reads.nodes for n in node.outputs if n}
            renamed = (*results, *self._reads.cotangents.values())
            names = {**part.names, **{name: f"{level.prefix}{name}" for name in renamed}}
            part = replace(batch, names=names, visible=True)
        else:
            axes = {**self._engine.example_axes.inputs, **batch.target_axes}
            for name, axis in axes.items():
                whole = batch.names.get(name, name)
                level.op("Gather", whole, index.name, axis=axis, result=part.names[name])
        wanted = (*forward, *self._engine.objective.inputs, *self._reads.saved)
        part.write(forward_nodes(batch.model, wanted), random, level.prefix)
        return part

    def _rows(
        self, part: EvaluationGraph, observation: Observation, gradients: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Record how much each row counts, by its name; nothing if all count alike."""
        values: Any = part
        operations: Any = Operations(part.tape)
        rows = [seen.weights for seen in observation.terms]
        pairs = zip(self._engine.objective.terms, rows, strict=True)
        examples = observation.size.examples
        weights = ExampleWeights.of(pairs, values, examples, self._sources.places)
        return {} if weights is None else weights.of_rows(self._layers, gradients, operations)

    # -- inverses ----------------------------------------------------------------------------------

    @cached_property
    def _by_feature(self) -> list[int]:
        """The factors whose features have damping in units of their moments."""
        return [i for i, factor in enumerate(self._factors) if factor.damped_by_feature()]

    def _collected(self, averages: Sequence[Symbol]) -> list[Symbol]:
        """Return what inverses read: matrices of equal size in one stack, diagonals, and units.

        The units are the roots of the moments of features.
        """
        units, times_scales = [], [*averages]
        for i in self._by_feature:
            moments = self._factors[i].moments(averages[i])
            units.append(np.sqrt(np.where(moments > 0, moments, 1.0)))
            times_scales[i] = times_scales[i] / units[-1] / units[-1][:, None]
        lines, sizes = _by_size(averages)
        stacks: list[Any] = []
        for d, places in sizes.items():
            rows: Any = np.concatenate([times_scales[i].reshape(-1, d) for i in places])
            stacks.append(rows.reshape(-1, d, d))
        return [*stacks, *(averages[i] for i in lines), *units]

    def _inverses(
        self, averages: Sequence[Symbol], collected: Sequence[Symbol], rows: Any
    ) -> list[Symbol]:
        """Return the damped inverses; inverses of equal size are computed in one stack.

        ``collected`` is the result of ``_collected`` for averages of the shapes of ``averages``.
        ``rows`` is the number of examples of the averages, or a number for each of them.
        """
        results, (lines, sizes), values = [*averages], _by_size(averages), iter(collected)
        for d, places in sizes.items():
            inverses = self._inverse_stack(next(values), d, places, averages, rows)
            stops = np.cumsum([averages[i].size // d for i in places])[:-1].tolist()
            for i, part in zip(places, np.split(inverses.reshape(-1, d), stops), strict=True):
                results[i] = part.reshape(averages[i].shape)
        for i in lines:
            results[i] = self._reciprocals(next(values))
        for i in self._by_feature:
            unit: Any = next(values)
            results[i] = results[i] / unit / unit[:, None]
        return results

    def _inverse_stack(
        self, stack: Any, d: int, places: Sequence[int], averages: Sequence[Symbol], rows: Any
    ) -> Any:
        """Return the damped inverses of the factors ``places``, whose averages are a stack."""
        counts = [averages[i].size // d**2 for i in places]
        traces = np.trace(stack, axis1=1, axis2=2)[:, None, None]
        # The blocks of a divided factor are filled up to equal sizes.
        sides = [_side(self._factors[i], averages[i].shape) for i in places]
        ranks: Any = np.repeat(sides, counts).astype(np.float32)
        # Before a target has counted, averages are zero, and their inverses are identities.
        means: Any = relative_level(traces, ranks[:, None, None], self._root)
        if not set(self._by_feature).isdisjoint(places):
            times_scales = np.repeat([i in self._by_feature for i in places], counts)
            of_inputs: Any = np.float32(self._root)
            if self._optimizer.shrinks_inputs:
                rows = rows[np.repeat(places, counts)].reshape(-1, 1, 1) if rows.ndim else rows
                squares = (stack * stack).sum(axis=(1, 2), keepdims=True)
                of_inputs = of_inputs + shrinkage(squares, traces, d, rows)
            means = np.where(times_scales[:, None, None], of_inputs, means)
        levels = np.where(traces > 0, means, 1.0)
        smallest = self._root / (d + self._root)
        invert: Any = damped_inverses if stack.nbytes <= _AT_ONCE else _one_by_one
        return invert(stack, levels, traces + levels, smallest)

    def _reciprocals(self, average: Any) -> Symbol:
        """Return the damped inverse of a diagonal."""
        trace = average.sum()
        level = relative_level(trace, average.shape[0], self._root)
        inverse: Symbol = 1.0 / (average + np.where(trace > 0, level, 1.0))
        return inverse

    # -- natural gradients -------------------------------------------------------------------------

    def _natural_names(self, vectors: Mapping[str, Symbol]) -> list[str]:
        """Return the parameters all of whose entries belong to layers with matrices."""
        slices = self._assembly.discovery.parts
        known = {name for key in self._blocks for name in uses(key)}
        return [n for n in vectors if known.issuperset(part.name for part in slices[n])]

    def _natural(self, vectors: Mapping[str, Symbol], inverses: list[Symbol]) -> dict[str, Symbol]:
        """Return ``A⁻¹ V G⁻¹ / c`` of the blocks, by parameter."""
        slices, number = self._assembly.discovery.parts, {f: i for i, f in enumerate(self._factors)}
        parts, products = split(slices, vectors), dict[str, Symbol]()
        for key, block in self._blocks.items():
            names = uses(key)
            if names[0] not in parts:
                continue
            weight, xp = parts[names[0]], array_module(parts[names[0]])
            # A weight alone has zeros for its bias.
            shapes = {name: self._assembly.collection.require_shape(name) for name in names}
            zeros = {n: xp.zeros(s, weight.dtype) for n, s in shapes.items() if n not in parts}
            vector: Any = tuple((parts | zeros)[name] for name in names)
            A, G = (inverses[number[factor]] for factor in block.factors)
            packing: Any = block.packing
            V: Any = packing.pack(vector, key, xp)
            left, right = block.factors
            repeats = right.statistic.repeats(self._samples(right))
            V = _times_symmetric(right, left.times(A, V), G)
            product: Any = packing.unpack(V * (1 / repeats), vector)
            products |= dict(zip(names, product, strict=True))
        chosen = self._natural_names(vectors)
        return {n: join(slices[n], products, vectors[n], 1.0) for n in chosen}

    def _samples(self, factor: FisherFactor) -> dict[str, Array]:
        """Return arrays of the shapes that a statistic reads, without memory."""
        facts, gradients = self._assembly.model.facts, self._sources.gradients
        statistic = factor.statistic
        names = (*statistic.names(), *statistic.lengths())
        shapes = {name: facts[gradients.get(name, name)].shape for name in names}
        return {n: np.broadcast_to(np.zeros((), np.float32), s) for n, s in shapes.items()}


def _by_size(averages: Sequence[Symbol]) -> tuple[list[int], dict[int, list[int]]]:
    """Return the indices of the diagonals, and the indices of the matrices by their size."""
    lines = [i for i, average in enumerate(averages) if average.ndim == 1]
    sizes: dict[int, list[int]] = {}
    for i, average in enumerate(averages):
        if i not in lines:
            sizes.setdefault(average.shape[-1], []).append(i)
    return lines, sizes


def _times_symmetric(factor: FisherFactor, V: Symbol, G: Symbol) -> Symbol:
    """Return ``V G`` for the inverse G of a factor, which is symmetric."""
    if G.ndim > 1 and type(factor).times is FisherFactor.times:
        return V @ G
    product: Symbol = factor.times(G, V.swapaxes(-1, -2)).swapaxes(-1, -2)
    return product


def _has_matrices(block: FisherBlock) -> bool:
    """Return whether a block multiplies by two matrices that a file can compute."""
    return block.is_product and all(factor.statistic.moment for factor in block.factors)


def _side(factor: FisherFactor, shape: tuple[int, ...]) -> float:
    """Return the mean number of rows of a matrix in a factor, or of a block."""
    return factor.matrix_side(shape) / factor.blocks(shape)


def _add(
    factor: FisherFactor,
    average: Symbol,
    values: Values,
    operations: Any,
    coefficients: tuple[Any, Any],
) -> None:
    """Compute ``average ← beta·average + alpha·measurement``."""
    beta, alpha = coefficients
    factor.statistic.add_to(average, values, operations, alpha, beta)


def _least(numbers: Sequence[Any]) -> Any:
    """Return the smallest of numbers, some of which a file knows in a run only."""
    least, *others = map(_recorded, numbers)
    for number in others:
        least = np.minimum(least, number)
    return least


def _recorded(number: Any) -> Any:
    return number.recorded() if isinstance(number, Size) else number


def _spelled(loss: LossFunction) -> str:
    """Return the name and the output of a loss for messages."""
    kind = type(loss)
    name = next((name for name, its in LOSSES.items() if its is kind), kind.__name__)
    return f"the loss '{name}' on '{loss.inputs[0]}'"


def _is_due(step: Symbol, last: Symbol, period: int, least: Any) -> Symbol:
    """Record whether an update is due, as ``GrowingPlanner`` decides it.

    ``last`` is the step of the last update, −1 before the first one. ``period`` and ``least`` bound
    the number of steps between two updates, ``least`` only after the first one.
    """
    grown = np.minimum(np.maximum(step // 2, least), period)
    due: Symbol = step - last >= grown
    return due if isinstance(least, int) and least == 1 else np.logical_or(last < 0, due)


def without_entries(like: Symbol) -> Symbol:
    """Return an array without entries: the old state stays."""
    return like.named(like.tape.constant(np.zeros((0,) * like.ndim, like.dtype)))


# -- inverses of damped matrices by products alone -------------------------------------------------
# A matrix is inverted by halves: with P, B and D its blocks and ``S = D − Bᵀ P⁻¹ B``, the inverse
# consists of products of P⁻¹, S⁻¹ and B. That takes fewer multiplications than one product of two
# matrices of the size, and no decision in a run. The smallest blocks are inverted by Newton's
# iteration, scaled so that the least eigenvalue grows nearly fourfold in a step (Pan & Schreiber
# 1991, "An improved Newton iteration for the generalized inverse of a matrix, with applications").
# The eigenvalues of a Schur complement lie between the eigenvalues of the matrix, so that one bound
# of the condition number determines the number of iterations of every block. Matrices of equal size
# are one stack ``(k, d, d)``. The functions compute with arrays of NumPy and with recorded ones.

# Largest matrices that are not halved, and the residual of their scaled iterations, which two
# further iterations square.
_LEAF, _RESIDUAL = 100, 3e-2


# Bytes of a stack whose matrices are inverted at once. Those of a larger stack are inverted one
# after the other, in the memory of one matrix.
_AT_ONCE = 1 << 22


def _one_by_one(matrices: Symbol, levels: Symbol, norms: Symbol, smallest: float) -> Symbol:
    """Record ``damped_inverses`` of each matrix of a recorded stack by itself."""
    tape, operands = matrices.tape, {"matrix": matrices, "level": levels, "norm": norms}
    with tape.body() as level:
        entries: list[Symbol] = [
            Recorded(tape, f"{level.prefix}{name}", stack.shape[1:], stack.dtype)
            for name, stack in operands.items()
        ]
        matrix, damping, norm = (entry[None] for entry in entries)
        inverse: Any = damped_inverses(matrix, damping, norm, smallest)
        inputs = [Input(entry.name, entry.dtype, entry.shape) for entry in entries]
        body = level.closed([inverse[0]], inputs)
    names = [stack.name for stack in operands.values()]
    (name,) = tape.level.multi("Scan", names, [""], body=body, num_scan_inputs=len(names))
    return matrices.named(name)


def damped_inverses(matrices: Array, levels: Array, norms: Array, smallest: float) -> Array:
    """Return ``(matrix + level·I)⁻¹`` of each symmetric matrix of a stack, ``(k, d, d)``.

    ``levels`` are the dampings, ``(k, 1, 1)``, and ``norms`` bounds of the largest eigenvalue of
    each damped matrix, ``(k, 1, 1)``. ``smallest`` is a bound of the smallest eigenvalue divided by
    that of the largest.

    One eigenvalue often has nearly the whole trace: that of the mean of the inputs, or of the
    gradients of one example. Halves would multiply the error of its direction v, so that the
    inverse is that of the matrix without v, ``Z``, and Sherman and Morrison's
    ``Z − Z v vᵀ Z / (1 + vᵀ Z v)``.
    """
    # Two steps of power iteration; the norms keep small numbers in the range of float32.
    x = matrices @ (matrices.sum(axis=-1, keepdims=True) / norms) / norms
    w = matrices @ x / norms
    squares = np.maximum((x * w).sum(axis=1, keepdims=True), np.float32(_TINY))
    v = w * np.sqrt(norms / squares)
    rest = matrices - v @ v.swapaxes(-1, -2)
    Z = _by_halves(rest + levels * _identity(matrices), norms, smallest)
    p = Z @ v
    inverse: Array = Z - p @ (p / (1 + (v * p).sum(axis=1, keepdims=True))).swapaxes(-1, -2)
    return inverse


def _by_halves(A: Array, norms: Array, smallest: float) -> Array:
    d = A.shape[-1]
    if d <= _LEAF:
        return _by_iteration(A, norms, smallest)
    half = d // 2
    P, B, D = A[:, :half, :half], A[:, :half, half:], A[:, half:, half:]
    inverse = _by_halves(P, norms, smallest)
    W = inverse @ B
    V = W @ (S := _by_halves(D - B.swapaxes(-1, -2) @ W, norms, smallest))
    top = np.concatenate([inverse + V @ W.swapaxes(-1, -2), -V], axis=-1)
    return np.concatenate([top, np.concatenate([-V.swapaxes(-1, -2), S], axis=-1)], axis=-2)


def _by_iteration(A: Array, norms: Array, smallest: float) -> Array:
    """Return the inverse of small matrices whose eigenvalues lie in ``[smallest, 1] · norm``."""
    twice = 2 * _identity(A)
    scale = 2 / (1 + smallest)
    start = scale / norms
    M, X, low = A * start, None, smallest * scale
    while True:
        low = low * (2 - low)
        scale = 2 / (1 + low)
        factor = (twice - M) * scale
        X = factor * start if X is None else X @ factor
        low *= scale
        if 1 - low <= _RESIDUAL:
            break
        M = factor @ M
    for _ in range(2):
        X = _symmetric(X @ (twice - A @ X))
    return X


def _symmetric(X: Array) -> Array:
    return 0.5 * (X + X.swapaxes(-1, -2))


def _identity(A: Any) -> Array:
    symbol = isinstance(A, Recorded)
    identity: Array = identity_like(A) if symbol else np.eye(A.shape[-1], dtype=A.dtype)
    return identity
