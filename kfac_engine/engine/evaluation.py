"""Predicts with a model in inference form, and computes metrics of the predictions."""

from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import isclose

import numpy as np

from kfac_engine._types import Array
from kfac_engine.autodiff.training_form import inference_form
from kfac_engine.backend.namespace import array_module
from kfac_engine.datasets.forms import Data, batches_of, converted, refuse_separate_targets
from kfac_engine.distributed.agreement import Agreement
from kfac_engine.engine.build import Assembly
from kfac_engine.engine.metrics import Evaluated, MetricChoice, default_metrics, metrics_of
from kfac_engine.engine.model_arrays import ModelArrays
from kfac_engine.engine.validation import check_batch_size
from kfac_engine.errors import BackendError, InputError, KfacError, NonFiniteError
from kfac_engine.graph.analysis.subgraph import SubGraph
from kfac_engine.losses.observed import Targets
from kfac_engine.runtime.inputs import check_inputs, finite, naming, not_finite, require_agreement
from kfac_engine.runtime.model_sessions import open_forward
from kfac_engine.runtime.sample_run import sample_batch
from kfac_engine.sessions.device_session import DeviceSession
from kfac_engine.sessions.session import Session


class Evaluation:
    """Evaluates a model in inference form; the processes of ``agreement`` divide the data.

    The first request for a set of values builds its session. The model has its current parameters
    and running statistics, and does not move to another memory space.
    """

    def __init__(self, assembly: Assembly, arrays: ModelArrays, agreement: Agreement) -> None:
        self._axes, self._agreement = assembly.task.example_axes, agreement
        self._model, self._task, self._arrays = assembly.model, assembly.task, arrays
        self._sessions: dict[tuple[str, ...], Session | DeviceSession] = {}

    def predict(self, data: Data) -> Array | dict[str, Array]:
        """Return the outputs of the model; see ``Engine.predict``."""
        parts = []
        for inputs, _ in batches_of(data, self._axes, labeled=False):
            results = self._run(inputs, self._outputs)
            parts.append({name: results[name].copy() for name in self._outputs})
        if not parts:
            raise InputError("the data have no examples; give at least one batch.")
        joined = {name: self._joined(name, [p[name] for p in parts]) for name in self._outputs}
        return self._for_caller(joined)

    def metrics(self, data: Data, choices: Sequence[MetricChoice] | None) -> dict[str, float]:
        """Return metrics of data; see ``Engine.evaluate``."""
        refuse_separate_targets(choices, "evaluate((inputs, targets), …)")
        metrics = metrics_of(default_metrics(self._task.objective) if choices is None else choices)
        reads_outputs = any(metric.reads_outputs for metric in metrics.values())
        # Totals and divisors: those of a metric are one pair, or one for each loss function.
        sums = np.zeros((len(metrics), len(self._task.objective.terms), 2))
        batches, counted = 0, 0.0
        for inputs, targets in batches_of(data, self._axes):
            batch, batches = self._evaluated(inputs, targets, reads_outputs), batches + 1
            counted += sum(batch.observation.size.totals)
            for entry, metric in zip(sums, metrics.values(), strict=True):
                pairs = metric.measure(batch)
                entry[: len(pairs)] += pairs
        count, counted, *totals = self._agreement.sum(batches, counted, *map(float, sums.flat))
        sums = np.reshape(totals, sums.shape)
        if not count:
            self._agreement.refuse(
                InputError("the data have no batch; give one pair (inputs, targets) at least.")
            )
        if not counted:
            raise InputError(
                "no target of the data counts: each is ignored or has the weight 0; a metric needs "
                "one at least."
            )
        ratios = sums[..., 0] / np.where(sums[..., 1], sums[..., 1], 1)
        means = dict(zip(metrics, ratios.sum(axis=1).tolist(), strict=True))
        return {name: metric.finish(means[name]) for name, metric in metrics.items()}

    def _evaluated(
        self, inputs: Mapping[str, Array], targets: Targets, reads_outputs: bool
    ) -> Evaluated:
        """Evaluate the values that the objective reads, and the outputs where they are needed."""
        objective, to_device = self._task.objective, self._model.memory_space.to_device
        named = objective.named_targets(targets)
        names = [objective.batch or objective.inputs[0], *objective.inputs]
        results = self._run(inputs, tuple(dict.fromkeys(names + self._outputs * reads_outputs)))
        outputs = {name: results[name] for name in self._outputs} if reads_outputs else {}
        values = results | {name: to_device(array) for name, array in named.items()}
        of_caller = self._for_caller(outputs) if outputs else None
        return Evaluated(objective, values, of_caller, converted(targets), self._added)

    @cached_property
    def _added(self) -> frozenset[str]:
        """Loss inputs in which the file has summed the losses of a batch.

        The number for a batch in which each example comes twice is twice the number for the batch.
        """
        of_batch, batch = sorted(self._task.objective.of_batch), self._task.batch
        if not of_batch or batch.fixed:
            return frozenset()
        once = sample_batch(self._model.graph, self._model.facts, self._task.inputs)
        twice = batch.resized(once, 2 * batch.size)
        try:
            before, after = (self._run(inputs, of_batch) for inputs in (once, twice))
        except KfacError:
            return frozenset()
        same = (name for name in of_batch if isclose(after[name], 2 * before[name], rel_tol=1e-3))
        return frozenset(name for name in same if before[name])

    def _joined(self, name: str, parts: Sequence[Array]) -> Array:
        """Join an output of several batches; without examples, return the first one."""
        place = self._task.batch.places.get(name)
        if len(parts) == 1 or place is None:
            return parts[0]
        if place.repeats > 1:
            raise InputError(
                f"one axis of '{name}' holds examples and positions, so that batches of it cannot "
                f"be joined; predict each batch."
            )
        joined: Array = array_module(parts[0]).concatenate(parts, axis=place.axis)
        return joined

    @property
    def _outputs(self) -> list[str]:
        """Names of the outputs that are tensors."""
        return [name for name in self._model.graph.outputs if name in self._model.facts]

    def _for_caller(self, outputs: Mapping[str, Array]) -> Array | dict[str, Array]:
        """Return outputs by name as the caller's arrays; a lone output without its name."""
        converted = self._arrays.for_backend(outputs)
        return next(iter(converted.values())) if len(converted) == 1 else converted

    def _run(self, inputs: Mapping[str, Array], names: Sequence[str]) -> dict[str, Array]:
        """Return read-only arrays of the values ``names`` for a batch.

        Inputs are checked as those of a trace, and against each other. A value with NaN or infinity
        raises a NonFiniteError if an input has them, too.
        """
        check_batch_size(self._task.batch, inputs)
        if isinstance(inputs, Mapping):
            inputs = self._arrays.for_model(inputs)
        model = self._model
        checked = check_inputs(model.graph, inputs)
        feeds = {name: model.memory_space.as_feed(array) for name, array in checked.items()}
        feeds |= model.inference_feeds()
        known = ChainMap(feeds, model.graph.constants)  # type: ignore[arg-type] # it is not changed
        computed = tuple(name for name in dict.fromkeys(names) if name not in known)
        results: dict[str, Array] = {}
        if computed:
            try:
                results = self._session(computed).run(computed, feeds)
            except BackendError as failure:
                require_agreement(model.graph, checked, failure)
                raise
            suspects = not_finite(checked)
            bad = [name for name in computed if suspects and not finite(results[name])]
            with naming(suspects):
                if bad:
                    raise NonFiniteError(f"'{bad[0]}' holds NaN or infinity.")
        return {name: results[name] if name in results else known[name] for name in names}

    def _session(self, names: tuple[str, ...]) -> Session | DeviceSession:
        """Return a session of these values only, so that activations are released in a run."""
        if names not in self._sessions:
            model = self._model
            graph = inference_form(model.extended_graph(), model.buffers)
            part = replace(graph, nodes=SubGraph(graph, names).nodes)
            self._sessions[names] = open_forward(model.context(), part, names)
        return self._sessions[names]
