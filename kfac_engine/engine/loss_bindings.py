"""Determines which model values the losses read, and the axis of the examples in them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from kfac_engine._types import Array
from kfac_engine.arguments import check_int, check_texts
from kfac_engine.errors import InputError, ShapeError, UnknownNameError, suggestion
from kfac_engine.graph.analysis.subgraph import final_outputs
from kfac_engine.graph.analysis.trainable import matching
from kfac_engine.graph.structure import Fact, Graph
from kfac_engine.losses import LOSSES, LossKind
from kfac_engine.losses.base import LossFunction
from kfac_engine.losses.checks import require_class_axis
from kfac_engine.losses.kinds import OUTPUT, loss_named
from kfac_engine.losses.logits import (
    Logits,
    find_class_axis,
    logits_before,
    logits_of_probabilities,
    possible_probabilities,
)
from kfac_engine.losses.output import OutputLoss
from kfac_engine.runtime.batch_axis import Batch, find_batch
from kfac_engine.runtime.example_axis import Axes, ExampleAxis
from kfac_engine.runtime.sample_run import open_run, sample_batch

LossChoice: TypeAlias = str | LossKind | LossFunction
# A loss, a loss for each output, or a map from outputs and patterns of outputs to losses.
LossChoices: TypeAlias = LossChoice | Sequence[LossChoice] | Mapping[str, LossChoice]
# The reason for the choice of an output among several.
_FINAL = (
    "has the loss, because other outputs are only on the way to it; output=… (--output) names "
    "another"
)
# Operators that choose rows of a table, and the usual names of the ids and of their mask.
_TABLES = ("Gather", "GatherBlockQuantized")
_IDS, _MASK = "input_ids", "attention_mask"
# Gives a value of the model in a sample run.
Sampled: TypeAlias = Callable[[str], Array]


@dataclass(frozen=True, slots=True)
class LossBinding:
    """A loss on an output."""

    loss: LossFunction  # the loss, a function of ``logits.value`` or, without logits, of the output
    output: str  # the model output, or the first input of a loss object
    logits: Logits | None = None  # the value that the loss reads in place of the output
    # A sentence on why the output may not be the operand of the loss; empty without evidence.
    doubt: str = ""
    # The input that has the targets if none are given, and the input that says which of them count;
    # empty without one.
    default_targets: tuple[str, str] = ("", "")


@dataclass(frozen=True, slots=True)
class LossOptions:
    """The options of the losses."""

    # A name of ``LOSSES``, a loss with options such as ``Categorical(…)`` or a loss object, a list
    # with a loss for each output, or a map from outputs to losses.
    loss: LossChoices
    # Output of each loss that is a name; by default the outputs from which no other output is
    # computed.
    output: str | Sequence[str] | None = None
    # Axis of the classes, for losses given by name; -1 finds it, or is the last axis.
    class_axis: int = -1
    # Axes of the examples, by input name; found by sample runs when left out.
    batch_axes: Axes | None = None
    factor: float = 1.0  # factor of all losses, next to their weights

    def __post_init__(self) -> None:
        """Check the types of the options."""
        for choice in self._listed():
            if not isinstance(choice, LossChoice):
                raise InputError(
                    f"loss must be a name ({', '.join((*LOSSES, OUTPUT))}), a loss with options "
                    f"such as kfac_engine.Categorical(label_smoothing=0.1), a loss object such as "
                    f"NormalMeanNegativeLogProbLoss('output'), a list of them, or a map from "
                    f"outputs to them, got {choice!r}."
                )
        if isinstance(self.loss, Mapping):
            self._check_map(self.loss)
        self.choices  # noqa: B018 (they check themselves)
        if not isinstance(self.output, str | None):
            check_texts("output", self.output, "['logits']")
        check_int("class_axis", self.class_axis, least=None)

    @property
    def choices(self) -> list[LossKind | LossFunction]:
        """The losses as a list, losses by name as objects."""
        return [loss_named(c) if isinstance(c, str) else c for c in self._listed()]

    def _listed(self) -> list[LossChoice]:
        """Return the losses as a list."""
        if isinstance(self.loss, Mapping) and self.loss:
            return list(self.loss.values())
        several = isinstance(self.loss, list | tuple) and self.loss
        return list(self.loss) if several else [self.loss]  # type: ignore[arg-type,list-item] # checked

    def _check_map(self, losses: Mapping[str, LossChoice]) -> None:
        """Check a map from outputs to losses; a loss object reads the output that it is put on."""
        check_texts("the outputs of loss", list(losses), "{'boxes': 'normal'}")
        if self.output is not None:
            raise InputError(
                f"loss={losses!r} names the outputs already; leave output={self.output!r} out."
            )
        for output, choice in losses.items():
            if isinstance(choice, LossFunction) and output != choice.inputs[0]:
                raise InputError(
                    f"the loss of '{output}' is a loss object that reads '{choice.inputs[0]}'; put "
                    f"it on '{choice.inputs[0]}', or create it with '{output}'."
                )

    def on(self, graph: Graph) -> "LossOptions":
        """Return the options with a loss for each output of a model.

        The outputs are compared with the patterns of a map. The loss of a pattern is repeated. A
        pattern without an output raises UnknownNameError; two entries for one output raise
        InputError.
        """
        if not isinstance(self.loss, Mapping):
            return self
        losses: dict[str, LossChoice] = {}
        values = frozenset(graph.values())
        for pattern, choice in self.loss.items():
            inner = pattern in values
            for name in [pattern] if inner else matching([pattern], graph.outputs, "output"):
                if name in losses:
                    raise InputError(f"two losses are put on the output '{name}'; give it one.")
                losses[name] = choice
        named = [name for name, loss in losses.items() if not isinstance(loss, LossFunction)]
        return replace(self, loss=list(losses.values()), output=named or None)

    def outputs_among(self, graph: Graph, real: Sequence[str]) -> list[str]:
        """Return an output for each loss that is given by name.

        ``real`` are the outputs with floating-point numbers; others are not chosen by default. If
        it is not clear which outputs are meant, an InputError is raised.
        """
        count = len([choice for choice in self.choices if isinstance(choice, LossKind)])
        if self.output is None:
            for outputs in (real, final_outputs(graph, real)):
                if count in (len(outputs), 0):
                    return list(outputs[:count])
        chosen = [self.output] if isinstance(self.output, str) else list(self.output or ())
        if len(chosen) != count:
            several = f"{len(chosen)} outputs and {count} {'loss' if count == 1 else 'losses'}"
            known = f"{several} are given; the" if chosen else "the"
            example = (*real, *graph.outputs)[0]
            raise InputError(
                f"{known} model has the outputs {', '.join(graph.outputs)}; name "
                f"{'the one that the loss is' if count == 1 else f'those {count} that losses are'} "
                f"put on with output=… (--output), or give a loss for each output, such as "
                f"loss={{'{example}': 'normal'}} (--loss '{example}=normal')."
            )
        return chosen

    @property
    def coefficients(self) -> Sequence[float]:
        """The factor of each loss."""
        return [self.factor * choice.weight for choice in self.choices]


def bind_losses(
    graph: Graph,
    facts: Mapping[str, Fact],
    options: LossOptions,
    inputs: Mapping[str, Array] | None = None,
) -> tuple[tuple[LossBinding, ...], Batch]:
    """Bind losses to the outputs of a model; return the bindings and the batch.

    ``facts`` come from a sample run on ``inputs``, or on generated inputs if they are None. The
    targets of a single loss are named ``"targets"``.
    """
    choices, real = options.choices, real_outputs(graph, facts)
    if options.output is None and not real and any(isinstance(c, LossKind) for c in choices):
        check_real(graph, facts, graph.outputs)
    named = options.outputs_among(graph, real)
    doubt = _FINAL if options.output is None and 0 < len(named) < len(real) else ""
    heads = []
    for choice in choices:
        if isinstance(choice, LossKind):
            value = named.pop(0)
            targets = "targets" if len(choices) == 1 else f"targets of {value}"
            axis, links = options.class_axis, choice.on(value).links
            if axis == -1 and value in facts:
                axis = find_class_axis(graph, facts, value, links)
            loss = choice.on(value, targets=targets, class_axis=axis)
            loss.of_residuals = value in graph.residuals
            heads.append(LossBinding(loss, value, doubt=doubt and f"'{value}' {doubt}"))
        else:
            heads.append(LossBinding(choice, choice.inputs[0]))
    _check_known(graph, facts, heads)
    placed = [head for head in heads if not _is_total(head, facts)]
    outputs = [head.output for head in placed]
    run = open_run(graph, facts)
    batch = find_batch(graph, facts, outputs, inputs, options.batch_axes, run)
    for head in placed:
        _check_place(head, facts, batch.places.get(head.output))

    def sampled(name: str) -> Array:
        return run.values(sample_batch(graph, facts, inputs), [name])[name]

    heads = [
        _before_link(graph, facts, head, choice, sampled)
        if isinstance(choice, LossKind) and choice.find_logits
        else head
        for head, choice in zip(heads, choices, strict=True)
    ]
    heads = [_placed(head, batch.places.get(head.output)) for head in heads]
    return tuple(_with_default_targets(graph, facts, head) for head in heads), batch


def _before_link(
    graph: Graph, facts: Mapping[str, Fact], head: LossBinding, kind: LossKind, run: Sampled
) -> LossBinding:
    """Return the binding with a loss on the logits, if the output contains probabilities."""
    loss, output = head.loss, head.output
    logits = logits_before(graph, facts, output, loss.links, loss.class_axis)
    if logits is None:
        logits = logits_of_probabilities(graph, facts, loss, output, lambda: run(output))
    if logits is None:
        doubt = possible_probabilities(loss, lambda: run(output))
        return replace(head, doubt=f"'{output}' {doubt}") if doubt else head
    moved = kind.on(logits.value, targets=loss.targets, class_axis=loss.class_axis)
    return LossBinding(moved, output, logits, head.doubt)


def real_outputs(graph: Graph, facts: Mapping[str, Fact]) -> list[str]:
    """Return the names of outputs that have floating-point numbers."""
    return [name for name in graph.outputs if _is_real(facts, name)]


def check_real(graph: Graph, facts: Mapping[str, Fact], values: Iterable[str]) -> None:
    """Raise an InputError if no value contains real numbers."""
    whole = {name: facts[name].dtype for name in values if name in facts}
    if not whole or any(_is_real(facts, name) for name in whole):
        return
    kinds = []
    for name, dtype in whole.items():
        maker = graph.producers.get(name)
        by = f", made by {maker.op} node '{maker.name}' of '{maker.inputs[0]}'" if maker else ""
        kinds.append(f"'{name}' holds {'text' if dtype.kind in 'OU' else dtype}{by}")
    raise InputError(
        f"nothing can be differentiated: {'; '.join(kinds)}. Name a value of real numbers before "
        f"it with output=… (--output)."
    )


def _is_real(facts: Mapping[str, Fact], name: str) -> bool:
    return name in facts and facts[name].dtype.kind == "f"


def _check_known(graph: Graph, facts: Mapping[str, Fact], heads: Sequence[LossBinding]) -> None:
    known = set(graph.values())
    for missing in (n for head in heads for n in head.loss.inputs if n not in known):
        raise UnknownNameError(
            f"the loss reads '{missing}'{suggestion(missing, graph.outputs)}, which is not a value "
            f"of model '{graph.name}'; its outputs are: {', '.join(graph.outputs)}."
        )
    for name in (n for head in heads for n in head.loss.inputs if n not in facts):
        maker = graph.producers[name]
        raise InputError(
            f"the loss reads '{name}', which is a result of {maker.op} (node '{maker.name}') and "
            f"not a tensor; choose one of its operands: {', '.join(maker.inputs)}."
        )
    for head in heads:
        check_real(graph, facts, [head.output])


def _is_total(head: LossBinding, facts: Mapping[str, Fact]) -> bool:
    """Return whether a loss is a single number for the whole batch, which the file computes."""
    return isinstance(head.loss, OutputLoss) and not facts[head.output].shape


def _placed(head: LossBinding, place: ExampleAxis | None) -> LossBinding:
    """Return the binding with a loss that knows the axis of the examples, if it needs it."""
    if place is None or not head.loss.ordered:
        return head
    if place.repeats > 1:
        raise ShapeError(
            f"an axis of '{head.output}' holds examples and positions, so that the order of the "
            f"positions of an example is not known; give the examples an axis of their own."
        )
    return replace(head, loss=head.loss.placed(place.axis))


def _with_default_targets(
    graph: Graph, facts: Mapping[str, Fact], head: LossBinding
) -> LossBinding:
    """Return the binding with the input of token ids, and its mask, for a loss of such ids.

    The ids are the input ``input_ids``, or else the only input of integers in the shape of the
    targets that chooses rows of a table.
    """
    if not head.loss.predicts_inputs:
        return head
    shape = list(facts[head.loss.inputs[0]].shape)
    del shape[head.loss.class_axis % len(shape)]
    fitting = [
        entry.name
        for entry in graph.inputs
        if entry.dtype.kind in "iub" and facts[entry.name].shape == tuple(shape)
    ]
    read = {node.inputs[1] for node in graph.nodes if node.op in _TABLES}
    candidates = [name for name in fitting if name in read]
    ids = _IDS if _IDS in fitting else candidates[0] if len(candidates) == 1 else ""
    mask = _MASK if ids and _MASK in fitting else ""
    return replace(head, default_targets=(ids, mask))


def _check_place(head: LossBinding, facts: Mapping[str, Fact], place: ExampleAxis | None) -> None:
    shape, axis = facts[head.output].shape, head.loss.class_axis
    if place is None:
        raise ShapeError(
            f"'{head.output}' has shape {shape} for every number of examples, so that it has no "
            f"predictions of single examples. Choose an output with a prediction for each example, "
            f"or name the axis of the examples in the inputs with batch_axes (--batch-axis)."
        )
    if isinstance(head.loss, OutputLoss):
        return
    require_class_axis(head.output, shape, axis)
    if len(shape) > 1 and axis % len(shape) == place.axis:
        raise ShapeError(
            f"class_axis={axis} is the axis of '{head.output}' (shape {shape} in a sample run) "
            f"that holds the examples; give another class axis, or name the axis of the examples "
            f"in the inputs with batch_axes (--batch-axis)."
        )
