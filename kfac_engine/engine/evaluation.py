"""Predictions of a model in inference form, and their loss and accuracy."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import isfinite
from typing import Any, TypeAlias

from kfac_engine._types import Array, Values
from kfac_engine.arguments import texts
from kfac_engine.engine.build import Assembly
from kfac_engine.engine.model_arrays import ModelArrays
from kfac_engine.engine.validation import check_batch_size
from kfac_engine.errors import InputError, NonFiniteError
from kfac_engine.losses.objective import Objective, Targets
from kfac_engine.registry import Registry
from kfac_engine.runtime.inference import InferenceModel

Pair: TypeAlias = tuple[Mapping[str, Array], Targets]
# Returns a sum over the examples of a batch, and the number of examples that it is divided by:
# 0 where the metric of several batches is the sum of theirs.
Metric: TypeAlias = Callable[[Objective, Values], tuple[float, int]]


class Evaluation:
    """Evaluates a model in inference form.

    Args:
        assembly: The model with its losses.
        arrays: Converts arrays of the model.
    """

    def __init__(self, assembly: Assembly, arrays: ModelArrays) -> None:
        self._model, self._task, self._arrays = assembly.model, assembly.task, arrays
        self._inference = InferenceModel(assembly.model)

    def predict(self, inputs: Mapping[str, Array]) -> Array | dict[str, Array]:
        """Return the outputs of the model; see ``Engine.predict``."""
        names = [name for name in self._model.graph.outputs if name in self._model.facts]
        results = self._arrays.for_backend(self._run(inputs, names))
        outputs = {name: results[name].copy() for name in names}
        return outputs[names[0]] if len(names) == 1 else outputs

    def metrics(self, data: Pair | Iterable[Pair], names: Sequence[str] | None) -> dict[str, float]:
        """Return metrics of data; see ``Engine.evaluate``."""
        if names is None:
            towers = (tower for loss in self._task.objective.losses for tower in loss.towers)
            names = ("loss", "accuracy") if all(tower.discrete for tower in towers) else ("loss",)
        texts("metrics", names, "['loss']")
        rows = {name: METRICS[name] for name in names}
        totals = dict.fromkeys(rows, 0.0)
        divisors = dict.fromkeys(rows, 0)
        batches = 0
        for inputs, targets in _pairs(data):
            values, batches = self._values(inputs, targets), batches + 1
            for name, metric in rows.items():
                total, divisor = metric(self._task.objective, values)
                totals[name] += total
                divisors[name] += divisor
        if not batches:
            raise InputError("the data has no batch; give one (inputs, targets) pair at least.")
        return {name: total / (divisors[name] or 1) for name, total in totals.items()}

    def _values(self, inputs: Mapping[str, Array], targets: Targets) -> dict[str, Array]:
        """Evaluate the values that the objective reads."""
        objective, to_device = self._task.objective, self._model.memory_space.to_device
        named = objective.named_targets(targets)
        names = dict.fromkeys((objective.batch or objective.inputs[0], *objective.inputs))
        return self._run(inputs, tuple(names)) | {n: to_device(a) for n, a in named.items()}

    def _run(self, inputs: Mapping[str, Array], names: Sequence[str]) -> dict[str, Array]:
        check_batch_size(self._task.batch, inputs)
        if isinstance(inputs, Mapping):
            inputs = self._arrays.for_model(inputs)
        return self._inference.run(inputs, names)


def _pairs(data: Pair | Iterable[Pair]) -> Iterator[Pair]:
    """Yield the pairs of data, which may be a single pair.

    Raises:
        InputError: An entry is not a pair.
    """
    if not isinstance(data, Iterable):
        raise InputError(f"data must be pairs of inputs and targets, got {type(data).__name__}.")
    single = isinstance(data, tuple | list) and len(data) == 2 and isinstance(data[0], Mapping)
    pairs: Iterable[Any] = (data,) if single else data
    for pair in pairs:
        if not (isinstance(pair, tuple | list) and len(pair) == 2):
            raise InputError(
                f"data must be one pair ({{'input': x}}, targets) or an iterable of such pairs; an "
                f"entry is {type(pair).__name__}."
            )
        yield pair[0], pair[1]


def _loss(objective: Objective, values: Values) -> tuple[float, int]:
    """The loss times the number of examples; the loss itself under the reduction ``"sum"``."""
    loss = objective.value(values)
    if not isfinite(loss):
        raise NonFiniteError(f"the loss of a batch is {loss:g}; check the data and parameters.")
    examples = objective.examples(values)
    return (loss, 0) if objective.reduction == "sum" else (loss * examples, examples)


def _accuracy(objective: Objective, values: Values) -> tuple[float, int]:
    """The share of predictions that equal their target, times the number of examples."""
    hits = [
        tower.hits(values, tower.check_targets(values))
        for loss in objective.losses
        for tower in loss.towers
    ]
    share = sum(int(hit.sum()) for hit in hits) / sum(hit.size for hit in hits)
    examples = objective.examples(values)
    return share * examples, examples


METRICS: Registry[Metric] = Registry("metric", {"loss": _loss, "accuracy": _accuracy})
