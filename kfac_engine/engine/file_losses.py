"""Turns a loss that a file computes itself into a loss on its logits.

The labels of the file become the targets, and the engine computes the logits only. A loss that is
not recognized remains in the graph: ``loss="output"`` trains it as it is.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import pi
from typing import TypeVar, cast

import numpy as np

from kfac_engine._types import Array
from kfac_engine.datasets.examples import Batch
from kfac_engine.engine.loss_bindings import LossOptions
from kfac_engine.errors import InputError, KfacError
from kfac_engine.graph.analysis.file_loss import FileLoss, file_loss
from kfac_engine.graph.load import LoadedModel
from kfac_engine.graph.structure import Fact, Graph
from kfac_engine.losses.kinds import LOSSES, OUTPUT, LossKind
from kfac_engine.losses.objective import Reduction
from kfac_engine.losses.observed import Targets, Weighted
from kfac_engine.runtime.sample_run import open_run, sample_facts

Value = TypeVar("Value")

# The variance for which −log p of a Gaussian distribution is π (z − t)², without a constant.
_VARIANCE = 1 / (2 * pi)


@dataclass(frozen=True, slots=True)
class TakenLoss:
    """A loss that was taken out of a file."""

    loss: FileLoss
    prepare: Callable[[Array], Array]  # computes the targets of the loss from the labels

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence on the values that the loss reads."""
        loss = self.loss
        return (
            f"the output '{loss.output}' of the file is a loss; it is computed from "
            f"'{loss.value}', with '{loss.labels}' as targets",
        )

    def without(self, entries: Mapping[str, Value]) -> dict[str, Value]:
        """Return entries by input name without the labels and their weights."""
        left_out = {self.loss.labels, self.loss.weights}
        return {name: entry for name, entry in entries.items() if name not in left_out}

    def separated(self, inputs: Mapping[str, Array], targets: Targets) -> Batch:
        """Return inputs without the labels, and the labels as targets.

        ``targets`` is None for labels among the inputs. Labels that are given twice, and missing
        weights, raise InputError.
        """
        labels, mask = self.loss.labels, self.loss.weights
        if not isinstance(inputs, Mapping):
            return inputs, targets
        if labels in inputs:
            if targets is not None:
                raise InputError(
                    f"'{labels}' is among the inputs, and there are targets as well; the file "
                    f"computes its loss from '{labels}': give the labels once."
                )
            targets = inputs[labels]
        if mask and mask in inputs and targets is not None:
            targets = Weighted(targets, inputs[mask])  # type: ignore[arg-type] # weights once
        if mask and targets is not None and not isinstance(targets, Weighted):
            raise InputError(
                f"the file weighs its loss by '{mask}'; give '{mask}' among the inputs or the "
                f"data, or weights after the targets."
            )
        return self.without(inputs), targets

    def options(self, chosen: LossOptions) -> LossOptions:
        """Return the options of the loss on the logits."""
        axes, (weight,) = chosen.batch_axes, chosen.coefficients
        return LossOptions(
            self._kind(),
            self.loss.value,
            self.loss.class_axis,
            None if axes is None else self.without(axes),
            weight,
        )

    def weighted(self, options: LossOptions, facts: Mapping[str, Fact]) -> LossOptions:
        """Return the result of ``options`` with the factor that gives the loss of the file.

        Classes on another axis than in the loss of the file raise InputError.
        """
        shape = facts[self.loss.value].shape
        if self.loss.rank and len(shape) != self.loss.rank:
            raise InputError(
                f"the loss '{self.loss.output}' of the file takes the last axis of "
                f"'{self.loss.value}' (shape {shape} in a sample run) as classes in one node and "
                f"axis {self.loss.rank - 1} in another; correct the file."
            )
        if self.loss.distribution == "categorical":
            return options
        # The mean of the file is one over features as well.
        features = shape[-1] if len(shape) > 1 and self.loss.reduction == "mean" else 1
        factor = 1 / (features * (pi if self.loss.distribution == "normal" else 1))
        return replace(options, factor=factor * options.factor)

    def reduction(self, chosen: Reduction) -> Reduction:
        """Return the file's reduction, or the caller's choice if the file lacks a reduction."""
        in_file = self.loss.reduction
        return chosen if in_file == "none" else cast(Reduction, in_file)

    def _kind(self) -> LossKind:
        settings = {"var": _VARIANCE} if self.loss.distribution == "normal" else self.loss.options
        return LossKind(self.loss.distribution, find_logits=False, **settings)


def taken_loss(
    loaded: LoadedModel, options: LossOptions, inputs: Mapping[str, Array] | None
) -> TakenLoss | None:
    """Return the loss of a file, if it is recognized and the caller asks for it.

    The caller asks for it by the name ``"output"``, or by the name of its distribution. ``inputs``
    are those of the sample run; None for generated ones.
    """
    kind, *others = options.choices
    if others or not isinstance(kind, LossKind) or not isinstance(options.output, str | None):
        return None
    if kind.options:  # a loss of the caller, with its own options
        return None
    name = kind.name
    graph = loaded.graph
    outputs = graph.outputs if options.output is None else (options.output,)
    losses = (file_loss(graph, output) for output in outputs if output in graph.outputs)
    loss = next(filter(None, losses), None)
    if loss is None or not (name == OUTPUT or LOSSES[name] is LOSSES[loss.distribution]):
        return None
    if loss.distribution != "categorical" and _broadcasts(graph, loss, inputs):
        return None
    run = open_run(loss.labels_graph(graph))

    def prepare(labels: Array) -> Array:
        if loss.labels == loss.targets:
            return labels
        return np.asarray(run.values({loss.labels: labels}, [loss.targets])[loss.targets])

    return TakenLoss(loss, prepare)


def _broadcasts(graph: Graph, loss: FileLoss, inputs: Mapping[str, Array] | None) -> bool:
    """Return whether predictions and targets have different shapes in a sample run."""
    facts: Mapping[str, Fact] = {}
    of_caller = [inputs] if isinstance(inputs, Mapping) else []
    for feeds in (*of_caller, None):  # the caller's inputs may lack the labels
        with suppress(KfacError):
            facts = sample_facts(graph, feeds)
            break
    shapes = {facts[name].shape for name in (loss.value, loss.targets) if name in facts}
    return len(shapes) > 1
