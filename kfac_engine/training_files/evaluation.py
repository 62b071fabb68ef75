"""Writes the metrics of predictions as one graph: ``evaluate.onnx``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kfac_engine.engine.build import Assembly
from kfac_engine.export.target_inputs import TargetInputs
from kfac_engine.graph.node_builder import TYPE_CODES
from kfac_engine.graph.structure import Input
from kfac_engine.recording.operations import new_tape
from kfac_engine.recording.recorded import Size, Symbol, Tape, size_of
from kfac_engine.training_files.parts import (
    EvaluationGraph,
    declared_value,
    hits_and_count,
    label_errors_and_count,
    number_of,
)

PREFIX = "evaluate/"
METRICS = ("loss", "accuracy", "label_error_rate")
_FLOAT = np.dtype(np.float32)


@dataclass(frozen=True, slots=True)
class Metrics:
    """The recorded metrics of predictions."""

    tape: Tape  # its nodes and constants
    inputs: tuple[Input, ...]  # the predictions, targets and weights
    # Values of the graph by output: ``METRIC sum`` of each metric, and ``METRIC count`` of each one
    # that is a mean. They have an entry for each loss.
    outputs: dict[str, Symbol]
    read: dict[str, str]  # the value of the model that each input with predictions has


def record_metrics(
    assembly: Assembly, target_inputs: TargetInputs, targets: Sequence[Input]
) -> Metrics:
    """Return the metrics of a batch, whose predictions and ``targets`` are inputs of the file.

    A sum is NaN if a target is not a class, or a weight is negative or not finite.
    """
    tape, objective = new_tape(PREFIX), assembly.task.objective
    results = {f"{metric} {part}" for metric in METRICS for part in ("sum", "count")}
    reserved = {*results, *(entry.name for entry in targets)}
    read = {f"output {name}" if name in reserved else name: name for name in objective.inputs}
    names = {name: f"{PREFIX}{name}" for name in objective.inputs}
    declared = [replace(declared_value(assembly, name), name=entry) for entry, name in read.items()]
    for entry, name in read.items():
        tape.level.op("Cast", entry, to=TYPE_CODES[_FLOAT.name], result=names[name])
    examples = _examples(assembly, tape, names)
    batch = EvaluationGraph(assembly, tape, examples, names, target_inputs)
    outputs = _outputs(batch, [head.loss for head in assembly.task.heads])
    return Metrics(tape, (*declared, *targets), outputs, read)


def _examples(assembly: Assembly, tape: Tape, names: Mapping[str, str]) -> Size | None:
    """Record the number of examples; None if the model runs with one number only."""
    batch = assembly.task.batch
    if batch.fixed:
        return None
    for name, value in names.items():
        place = batch.places.get(name)
        if place is not None:
            size: Size = size_of(tape, value, place.axis) / place.repeats
            return size
    return None


def _outputs(batch: EvaluationGraph, losses: Sequence[Any]) -> dict[str, Symbol]:
    """Record the sums of each metric, and what divides them."""
    tape, objective = batch.tape, batch.assembly.task.objective
    values: Any = batch
    seen = batch.observe(objective)
    sums = objective.sums(values, seen)
    outputs = {"loss sum": _vector(tape, [total for total, _ in sums])}
    if objective.reduction != "sum":
        outputs["loss count"] = _vector(tape, [count for _, count in sums])
    first, of_first = objective.terms[0], seen.terms[0]
    of_metric: dict[str, tuple[Any, Any]] = {}
    if len(losses) == 1 and first.discrete:
        of_metric["accuracy"] = hits_and_count(first, batch, of_first, of_first)
    if len(losses) == 1 and first.sequences:
        of_metric["label_error_rate"] = label_errors_and_count(first, batch, of_first)
    for metric, (total, count) in of_metric.items():
        outputs |= {
            f"{metric} sum": _vector(tape, [total]),
            f"{metric} count": _vector(tape, [count]),
        }
    possible = batch.has_possible_targets(objective)
    if possible is None:
        return outputs
    return {
        name: np.where(possible, value, np.nan) if name.endswith("sum") else value
        for name, value in outputs.items()
    }


def _vector(tape: Tape, numbers: Sequence[Any]) -> Symbol:
    """Return numbers, recorded or known, as a vector."""
    entries = [number_of(tape, number).reshape(1) for number in numbers]
    return entries[0] if len(entries) == 1 else np.concatenate(entries)
