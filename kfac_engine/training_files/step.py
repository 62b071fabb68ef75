"""Writes an optimizer's training step as one graph: ``training.onnx``."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from kfac_engine._types import Array
from kfac_engine.autodiff.training_form import joined_statistics
from kfac_engine.curvature.blocks.base import FisherBlock
from kfac_engine.engine.build import Assembly
from kfac_engine.engine.engine import Engine
from kfac_engine.errors import InputError
from kfac_engine.export.target_inputs import TargetInputs
from kfac_engine.graph.structure import Input
from kfac_engine.layers.feature_powers import FeaturePowers, LayerInput
from kfac_engine.losses.objective import Observation, Residuals
from kfac_engine.recording.operations import Draws, NoiseInput, Operations, new_tape
from kfac_engine.recording.random_nodes import OF_NODES
from kfac_engine.recording.recorded import Recorded, Shape, Size, Symbol, Tape, size_of
from kfac_engine.training.kfac import KfacOptimizer
from kfac_engine.training.optimizer import Optimizer, trained_names
from kfac_engine.training.seen_examples import scarcity
from kfac_engine.training_files.curvature import CurvatureSteps, without_entries
from kfac_engine.training_files.description import DIFFERENT, SEEN
from kfac_engine.training_files.parts import (
    EvaluationGraph,
    RandomNodes,
    Writer,
    constants_of,
    forward_nodes,
    hits_and_count,
    number_of,
)

PREFIX = "step/"
NEW = "new "
# Names of the inputs and outputs of every file, besides the state.
OWN = ("rate", "loss", "accuracy", "finite")
_FLOAT, _INTEGER = np.dtype(np.float32), np.dtype(np.int64)

# Names of the powers of the features of a batch, and the beginning of those of its residuals, among
# its metrics until the rule has read them.
_FEATURES, _RESIDUALS, _WEIGHTED = "features", "residuals", "weighted"


@dataclass(frozen=True, slots=True)
class StepGraph:
    """A recorded training step."""

    tape: Tape  # its nodes and constants
    data: tuple[Input, ...]  # the inputs that change from step to step
    state: dict[str, Array]  # values of the states before the first step, by name
    parameters: tuple[str, ...]  # the states that are parameters or running statistics of the model
    metrics: tuple[str, ...]  # the outputs that are not state
    outputs: dict[str, Symbol]  # values of the graph, by output
    # Inputs with random numbers: see ``Description``.
    noise: dict[str, tuple[int, ...]] = field(default_factory=dict)
    # The layer of each factor of the curvature, by number of the factor.
    factors: dict[str, str] = field(default_factory=dict)
    # Inputs with weights of targets: see ``Description``.
    weights: dict[str, tuple[str, int]] = field(default_factory=dict)
    targets: tuple[Input, ...] = ()  # the targets of one step and their weights


class StepRecorder:
    """Records the step of an optimizer that has taken no step.

    ``assembly`` has the engine's model, losses and layers. With ``noise_is_input``, the random
    numbers of the step are inputs of the file. A step divides the batch into ``parts``, one after
    the other.
    """

    def __init__(
        self,
        engine: Engine,
        assembly: Assembly,
        optimizer: Optimizer,
        target_inputs: TargetInputs,
        *,
        noise_is_input: bool,
        parts: int,
    ) -> None:
        self._engine, self._assembly, self._optimizer = engine, assembly, optimizer
        self._model, self._names = assembly.model, trained_names(engine)
        self._noise: list[NoiseInput] | None = [] if noise_is_input else None
        self._target_inputs = target_inputs
        self._curvature, self._parts = None, parts
        if isinstance(optimizer, KfacOptimizer):
            self._curvature = CurvatureSteps(
                engine, assembly, optimizer, target_inputs, self._noise
            )

    def record(self) -> StepGraph:
        """Return the recorded step."""
        tape, state = new_tape(PREFIX), self._initial_state()
        data = [*self._inputs(), *self._targets(), Input("rate", _FLOAT, ())]
        outputs = self._outputs(tape, state)
        noise = self._noise or ()
        # The nodes of the model draw for the whole batch, the statistics for their part of it.
        symbols = ["batch" if n.name.startswith(OF_NODES) else "part" for n in noise]
        pairs = zip(noise, symbols, strict=True)
        data += [Input(n.name, _FLOAT, _declared(n.shape, symbol)) for n, symbol in pairs]
        return StepGraph(
            tape,
            tuple(data),
            state,
            (*self._names, *self._model.new_buffers),
            tuple(name for name in outputs if not name.startswith(NEW)),
            outputs,
            {n.name: tuple(-1 if isinstance(s, Size) else s for s in n.shape) for n in noise},
            self._curvature.describe() if self._curvature else {},
            self._weights(),
            tuple(self._targets()),
        )

    def _outputs(self, tape: Tape, state: Mapping[str, Array]) -> dict[str, Symbol]:
        """Record a step; return its metrics and the new state by name.

        ``state`` has the first value of each state.
        """
        values = {name: Recorded(tape, name, a.shape, a.dtype) for name, a in state.items()}
        batch = self._evaluation(tape, self._renamed(state))
        step, rate = values["step"], Recorded(tape, "rate", (), _FLOAT)
        random = RandomNodes(Draws(tape, step, self._noise)).write
        if self._parts > 1:
            loss, metrics, gradients, buffers = self._accumulated(batch, step)
            batch = replace(batch, visible=False)
        else:
            loss, metrics, gradients = self._pass(batch, step, random)
            buffers = {old: batch[latest] for old, latest in self._model.new_buffers.items()}
        finite = self._finite(loss, gradients) & np.isfinite(rate) & (rate >= 0)
        residuals = Residuals()
        tables: dict[str, dict[Any, Any]]
        tables = {_RESIDUALS: residuals.sums, _WEIGHTED: residuals.weighted}
        for name in [name for name in metrics if name.split(" ")[0] in tables]:
            table, _, k, of_loss = name.split(" ", 3)
            known = tables[table].get(key := (int(k), of_loss), ())
            tables[table][key] = (*known, metrics.pop(name))
        measured = _Measured(loss, residuals, metrics.pop(_FEATURES, None))

        def updated() -> list[Symbol]:
            new = self._updated(batch, values, gradients, measured, rate, random)
            new |= buffers
            new["step"] = step + 1
            return [new[name] for name in state]

        def unchanged() -> list[Symbol]:
            # An output without entries keeps the old state; a copy of it would cost time.
            return [without_entries(v) if v.ndim else v for v in values.values()]

        results = dict(zip(state, tape.branch(finite, updated, unchanged), strict=True))
        new_state = {f"{NEW}{name}": value for name, value in results.items()}
        return {"loss": loss, **metrics, "finite": finite, **new_state}

    def _accumulated(
        self, batch: EvaluationGraph, step: Symbol
    ) -> tuple[Symbol, dict[str, Symbol], dict[str, Symbol], dict[str, Symbol]]:
        """Record the passes over parts of the batch; return sums, and new running statistics."""
        tape, buffers = batch.tape, self._model.new_buffers
        assert batch.examples is not None, "the caller checks it"
        count: Symbol = np.minimum(batch.examples.number(), self._parts)
        whole = batch.observe(self._engine.objective)
        with tape.body() as level:
            index, go = (f"{level.prefix}{name}" for name in ("index", "go"))
            number = Recorded(tape, index, (), _INTEGER)
            part = self._part(batch, number, count)
            # Each part has random numbers of its own.
            draws = Draws(tape, step * self._parts + number, self._noise)
            loss, metrics, gradients = self._pass(part, step, RandomNodes(draws).write, whole)
            values = [loss, *metrics.values(), *gradients.values()]
            sums = [v.named(f"{level.prefix}sum {i}") for i, v in enumerate(values)]
            new = [old + value for old, value in zip(sums, values, strict=True)]
            # Each part starts from the running statistics before the step; the loop returns all.
            assert part.examples is not None, "a part of the batch"
            after = [part.examples.number(), *(part[latest] for latest in buffers.values())]
            counters = [Input(index, _INTEGER, ()), Input(go, np.dtype(np.bool_), ())]
            inputs = [Input(v.name, v.dtype, v.shape) for v in sums]
            condition = Recorded(tape, go, (), np.bool_)
            body = level.closed([condition, *new, *after], [*counters, *inputs])
        first, count_of_results = [np.zeros_like(v).name for v in sums], len(sums) + len(after)
        operands = [count.name, "", *first]
        names = iter(tape.level.multi("Loop", operands, [""] * count_of_results, body=body))
        results = (value.named(next(names)) for value in sums)
        total = next(results)
        metrics = {name: next(results) for name in metrics}
        gradients = {name: next(results) for name in gradients}
        sizes: Any
        sizes, *stacks = (
            Recorded(tape, next(names), (Size(count), *v.shape), v.dtype) for v in after
        )
        stacked: dict[str, Any] = dict(zip(buffers, stacks, strict=True))
        joined: dict[str, Symbol] = joined_statistics(self._model.loaded.graph, sizes, stacked)
        return total, metrics, gradients, joined

    def _part(self, batch: EvaluationGraph, number: Symbol, count: Symbol) -> EvaluationGraph:
        """Record the inputs and targets of one of ``count`` parts of the batch."""
        tape, n = batch.tape, batch.examples
        assert n is not None, "the caller checks it"
        axes = {**self._assembly.task.batch.inputs, **batch.target_axes}
        names = {**batch.names, **{name: f"{tape.level.prefix}{name}" for name in axes}}
        start, stop = ((number + k) * n.number() // count for k in (0, 1))
        for name, axis in axes.items():
            bounds = (start.reshape(1).name, stop.reshape(1).name, tape.integers(axis))
            source = batch.names.get(name, name)
            tape.level.op("Slice", source, *bounds, result=names[name])
        return replace(batch, examples=Size(stop - start), names=names)

    def _evaluation(self, tape: Tape, names: Mapping[str, str]) -> EvaluationGraph:
        """Return the evaluation of a batch."""
        examples = self._examples(tape)
        return EvaluationGraph(self._assembly, tape, examples, names, self._target_inputs)

    def _renamed(self, state: Mapping[str, Array]) -> dict[str, str]:
        """Return new names for values of the model whose names the file itself needs.

        An input or a weight of the model with such a name raises InputError.
        """
        graph, names = self._model.extended_graph(), {*state, *OWN, *(f"{NEW}{n}" for n in state)}
        fixed = {entry.name for entry in graph.inputs} | {*self._model.parameters}
        fixed |= {*self._model.buffers, *graph.constants}
        names -= {*self._names, *self._model.buffers}
        names |= {entry.name for entry in self._targets()}
        for name in sorted(names & fixed):
            raise InputError(
                f"the model has an input or a weight '{name}', which is the name of an input or an "
                f"output of training files; give it another name."
            )
        results = {name for node in graph.nodes for name in node.outputs}
        return {name: f"{PREFIX}model/{name}" for name in sorted(names & results)}

    # -- the parts of a step -----------------------------------------------------------------------

    @cached_property
    def _slots(self) -> Mapping[str, Mapping[str, Array]]:
        """The arrays of the optimizer's state, without the records of its batches."""
        if self._curvature is None:
            return self._optimizer.state().arrays
        assert isinstance(self._optimizer, KfacOptimizer), "it has a curvature"
        return self._optimizer.recorded(self._curvature.repeats).new_slots()

    def _initial_state(self) -> dict[str, Array]:
        """Return the first value of each state, in the order of the file."""
        model, slots = self._model, self._slots
        state = {name: np.asarray(model.parameters[name]) for name in self._names}
        state |= {name: np.asarray(array) for name, array in model.buffers.items()}
        for slot, arrays in slots.items():
            state |= {f"{slot}/{name}": np.asarray(a, _FLOAT) for name, a in arrays.items()}
        state["step"] = np.zeros((), _INTEGER)
        if isinstance(self._optimizer, KfacOptimizer) and self._optimizer.counts_examples:
            state |= {SEEN: np.zeros((), _INTEGER), DIFFERENT: np.array(np.inf, _FLOAT)}
        return state | (self._curvature.initial_state() if self._curvature else {})

    def _examples(self, tape: Tape) -> Size | None:
        """Record the number of examples; None if the model runs with one number only."""
        batch = self._assembly.task.batch
        if batch.fixed or not batch.inputs:
            return None
        name, axis = next(iter(batch.inputs.items()))
        return size_of(tape, name, axis)

    def _pass(
        self,
        batch: EvaluationGraph,
        step: Symbol,
        random: Writer,
        whole: Observation | None = None,
    ) -> tuple[Symbol, dict[str, Symbol], dict[str, Symbol]]:
        """Record the passes of a step of a number; return loss, metrics and gradients.

        If ``batch`` is a part of a batch, ``whole`` has the targets of the whole batch, and each
        result is a share of its result for the whole batch. ``random`` writes random nodes.
        """
        tape, model, objective = batch.tape, self._model, self._engine.objective
        backward = model.backward(objective.inputs, self._names)
        tape.graph.constants.update(constants_of(model, backward))
        if self._curvature:
            tape.graph.constants.update(self._curvature.constants)
        read = dict.fromkeys(name for source in self._feature_inputs for name in source.names)
        wanted = (*backward.saved, *objective.inputs, *read, *model.new_buffers.values())
        batch.write(forward_nodes(model, wanted), random)
        values: Any = batch
        seen = batch.observe(objective)
        of_batch = seen if whole is None else whole
        residuals = None
        if self._curvature:
            pairs = zip(objective.terms, of_batch.terms, strict=True)
            # Sums in float32 need small numbers.
            centres = [term.target_centre(its) for term, its in pairs]
            residuals = Residuals(centres=centres, is_first=step == 0)
        value, gradients_of_losses = objective.value_and_cotangents(
            values,
            observation=seen if whole is None else seen.within(whole.size),
            residuals=residuals,
        )
        possible = batch.has_possible_targets(objective)
        loss: Symbol = value if possible is None else np.where(possible, value, np.nan)
        cotangents: dict[str, Any] = gradients_of_losses
        for name, cotangent in cotangents.items():
            tape.level.op("Identity", cotangent.name, result=backward.cotangents[name])
        batch.write(backward.nodes, random)
        metrics = self._read_by_rule(batch, seen, residuals)
        if self._has_accuracy:
            metrics["accuracy"] = self._accuracy(batch, seen, of_batch)
        gradients: dict[str, Symbol] = {}
        for name in self._names:
            shape, result = model.parameters[name].shape, backward.gradients.get(name)
            if result is None:  # the loss does not depend on the parameter
                gradients[name] = Recorded(tape, tape.constant(0, _FLOAT), (), _FLOAT)
                gradients[name] = gradients[name].broadcast(shape)
            else:
                gradients[name] = Recorded(tape, result, shape, _FLOAT)
        return loss, metrics, gradients

    @property
    def _feature_inputs(self) -> tuple[LayerInput, ...]:
        optimizer = self._optimizer
        return optimizer.feature_inputs if isinstance(optimizer, KfacOptimizer) else ()

    def _read_by_rule(
        self, batch: EvaluationGraph, seen: Observation, residuals: Residuals | None
    ) -> dict[str, Symbol]:
        """Record the residuals and the powers of features that the rule reads, by name."""
        values: Any = batch
        operations: Any = Operations(batch.tape)
        features = FeaturePowers(self._feature_inputs, operations)
        weights: Any = [observed.weights for observed in seen.terms]
        features.add(values, batch.examples or self._assembly.task.batch.size, weights)
        read = {} if features.sums is None else {_FEATURES: features.sums}
        measured = residuals or Residuals()
        tables: dict[str, Any] = {_RESIDUALS: measured.sums, _WEIGHTED: measured.weighted}
        for table, entries in tables.items():
            for (k, name), numbers in entries.items():
                for i, number in enumerate(numbers):
                    read[f"{table} {i} {k} {name}"] = number_of(batch.tape, number)
        return read

    def _accuracy(self, batch: EvaluationGraph, seen: Observation, whole: Observation) -> Symbol:
        """Record the share of targets in the whole batch that the model finds most probable.

        ``batch`` is a part of the batch, with the targets ``seen``. The method records the part's
        hits divided by the number of targets in the whole batch.
        """
        (term,) = self._engine.objective.terms
        hits, count = hits_and_count(term, batch, seen.terms[0], whole.terms[0])
        return hits / count

    @staticmethod
    def _finite(loss: Symbol, gradients: Mapping[str, Symbol]) -> Symbol:
        """Record whether the loss and the gradients are finite."""
        sums = [gradient.sum().name for gradient in gradients.values()]
        return np.isfinite(loss.new("Sum", *sums, shape=()))

    def _updated(
        self,
        batch: EvaluationGraph,
        values: Mapping[str, Symbol],
        gradients: Mapping[str, Symbol],
        measured: "_Measured",
        rate: Symbol,
        random: Writer,
    ) -> dict[str, Symbol]:
        """Record the optimizer's own rule; return the new state by name."""
        old: dict[str, dict[str, Symbol]] = {
            slot: {name: values[f"{slot}/{name}"] for name in arrays}
            for slot, arrays in self._slots.items()
        }
        new = {slot: {n: v.copy() for n, v in arrays.items()} for slot, arrays in old.items()}
        parameters = {name: values[name] for name in self._names}
        cells = {name: gradient.copy() for name, gradient in gradients.items()}
        steps = values["step"].astype(_FLOAT)
        state: dict[str, Symbol] = {}
        optimizer = self._optimizer
        if self._curvature is None:
            moved = optimizer.moved(cells, parameters, (old, new), steps, rate)  # type: ignore[attr-defined] # of first order
        else:
            curvature = _RecordedCurvature(self._curvature, batch, values, measured, random, state)
            arguments = (old, new), steps, rate, measured.residuals, curvature
            moved = optimizer.moved(cells, parameters, *arguments)  # type: ignore[attr-defined] # checked
        state |= moved
        for slot, arrays in new.items():
            state |= {f"{slot}/{name}": value for name, value in arrays.items()}
        return state

    # -- declarations ------------------------------------------------------------------------------

    def _inputs(self) -> list[Input]:
        """Return the inputs of the model that the step reads."""
        axes = self._assembly.task.batch.inputs
        declared = []
        for entry in self._model.graph.inputs:
            shape: list[int | str] = list(self._model.facts[entry.name].shape)
            if entry.name in axes and not self._assembly.task.batch.fixed:
                shape[axes[entry.name]] = "batch"
            declared.append(Input(entry.name, entry.dtype, tuple(shape)))
        return declared

    @property
    def _has_accuracy(self) -> bool:
        terms = self._engine.objective.terms
        return len(terms) == 1 and terms[0].discrete

    def _weights(self) -> dict[str, tuple[str, int]]:
        """Return the name and the rank of the weights for each output that has weights."""
        batch = self._evaluation(new_tape(""), {})
        pairs = ((head.output, batch.weights(head.loss)) for head in self._assembly.task.heads)
        return {output: (value.name, value.ndim) for output, value in pairs if value is not None}

    def _targets(self) -> list[Input]:
        tape = new_tape("")
        batch, terms = self._evaluation(tape, {}), self._engine.objective.terms
        values = [*map(batch.targets, terms), *map(batch.weights, terms)]
        return [
            Input(v.name, v.dtype, _declared(v.shape, "batch")) for v in values if v is not None
        ]


class _Measured(NamedTuple):
    """The values of a batch, besides the gradients, that a rule reads."""

    loss: Symbol
    residuals: Residuals
    features: Symbol | None


class _RecordedCurvature:
    """The engine of a rule that is recorded: it preconditions in the graph."""

    def __init__(
        self,
        curvature: CurvatureSteps,
        batch: EvaluationGraph,
        values: Mapping[str, Symbol],
        measured: "_Measured",
        random: Writer,
        state: dict[str, Symbol],
    ) -> None:
        step = values["step"]
        self._arguments, self._state = (curvature, batch, values, step, random), state
        self.loss, self.features = measured.loss, measured.features
        self.repeats = curvature.repeats
        size = batch.assembly.task.batch.size
        self.examples = size if batch.examples is None else number_of(batch.tape, batch.examples)
        self.scarcity: Any = 0.0
        self.share: Any = 0.0
        self.different: Any = 1.0
        if SEEN in values:
            examples, different = number_of(batch.tape, self.examples), values[DIFFERENT]
            count = values[SEEN] + examples.astype(_INTEGER)
            state |= {SEEN: count, DIFFERENT: different}
            seen = count.astype(_FLOAT)
            # The examples come in epochs: at first, all of them are different.
            number: Any = np.minimum(np.maximum(different, 1.0), seen)
            self.scarcity = scarcity(seen, seen, number)
            self.share, self.different = 1 - number / seen, number

    def precondition(self, vectors: Mapping[str, Symbol]) -> dict[str, Symbol]:
        """Return natural gradients; the new state of the curvature is written."""
        curvature, batch, values, step, random = self._arguments
        update = curvature.write(batch, values, vectors, step, random)
        self._state |= update.state
        self._moment = update.moment
        return update.natural

    def moment(self, block: FisherBlock) -> Any:
        """Return the mean square of the inputs of a block, after ``precondition``."""
        return self._moment(block)


def _declared(shape: Shape, name: str) -> tuple[int | str, ...]:
    """Return a shape as it is declared in the file."""
    return tuple(_symbol(size, name) if isinstance(size, Size) else size for size in shape)


def _symbol(size: Size, name: str) -> str:
    return name if size.factor == 1 else f"{size.factor:g} {name}"
