"""Writes the gradient of a model as one plain ONNX model, which any runtime executes.

The result has the forward graph, the loss and the backward graph. Its inputs are the inputs of the
model and the targets, or a cotangent without a loss. Its outputs are the loss and the gradients.
The weights stay constants of the file. The result can be differentiated again.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from kfac_engine._types import Array, DType
from kfac_engine.arguments import check_choice, check_mapping, check_patterns
from kfac_engine.autodiff.activity import (
    behind_jumps,
    left_out,
    notes_of,
    nothing_to_train,
    straight_through,
    zero_notes,
)
from kfac_engine.autodiff.differentiate import (
    Backward,
    differentiate as backward_graph,
    needed,
    unused,
)
from kfac_engine.autodiff.second_order import joint_graph
from kfac_engine.engine.loss_bindings import (
    LossChoices,
    LossOptions,
    bind_losses,
    check_real,
    real_outputs,
)
from kfac_engine.errors import (
    InputError,
    ModelError,
    UnknownNameError,
    UnsupportedError,
    suggestion,
)
from kfac_engine.export.recorded_losses import LOSS, TARGETS, RecordedLoss, Term, record_losses
from kfac_engine.export.target_inputs import Form, TargetInputs
from kfac_engine.graph.analysis.subgraph import final_outputs
from kfac_engine.graph.analysis.trainable import matching, trainable_parameters
from kfac_engine.graph.files import saved_model, with_constants
from kfac_engine.graph.load import LoadedModel, ModelSource, load_model
from kfac_engine.graph.passes.upcast import GradientDType, in_types, result_types, with_borders
from kfac_engine.graph.structure import Fact, Graph, Input, Node, values_read
from kfac_engine.graph.webgpu import PROVIDERS, Provider, for_webgpu
from kfac_engine.graph.write import ModelProto, build_model
from kfac_engine.losses.objective import REDUCTIONS, Reduction
from kfac_engine.losses.output import OutputLoss
from kfac_engine.runtime.example_axis import with_batch_axes
from kfac_engine.runtime.lower import lowered, with_taken_branches

COTANGENT, GRADIENT = "cotangent", "gradient/"
DeclaredShape: TypeAlias = tuple[int | str | None, ...]


def differentiate(  # noqa: PLR0913 (every choice a user has, each with a default)
    model: ModelSource,
    loss: LossChoices | None = None,
    output: str | Sequence[str] | None = None,
    wrt: str | Sequence[str] | None = None,
    *,
    freeze: str | Sequence[str] | None = None,
    class_axis: int = -1,
    reduction: Reduction = "mean",
    sample_inputs: Mapping[str, Array] | None = None,
    batch_axes: Mapping[str, int] | None = None,
    gradient_dtype: GradientDType = "file",
    provider: Provider = "any",
    path: str | Path | None = None,
    probabilities: bool = False,
    weights: Form | None = None,
    mask: Form | None = None,
) -> ModelProto:
    """Return the gradient of a model as an ONNX model of standard operators.

    Args:
        model: Path, bytes or ``ModelProto``.
        loss: Name of a loss, a loss with options such as ``Categorical(…)``, a list with a loss for
            each output, or a dictionary from outputs to losses. If no target of a batch counts, the
            mean is NaN. Without a loss, the function is ``⟨cotangent, output⟩``.
        output: Name of the differentiated output, or a list; as for ``Engine.from_onnx``.
        wrt: Pattern of parameter and input names, or several; the trainable parameters by default.
        freeze: Pattern of parameter names to exclude, or several.
        class_axis: Axis of the classes or features in the output, as for ``Engine.from_onnx``.
        reduction: ``"mean"`` over batch and positions, ``"batch_mean"`` or ``"sum"``.
        sample_inputs: A batch that determines shapes, if none can be generated.
        batch_axes: Axis of the examples of each input, by name; determined by sample runs if
            omitted.
        gradient_dtype: Element type of the gradients of half-precision values: ``"file"`` for the
            type in the file, or ``"float32"``, the type of the computation.
        provider: ``"webgpu"`` writes convolutions so that onnxruntime-web computes them
            correctly on WebGPU.
        path: Path of a file for the result. Required for more than 2 GB of weights: they are
            written to ``<name>.data`` in the same folder, and the returned model refers to them.
        probabilities: Whether the targets of ``"categorical"`` are probabilities in the shape of
            the output, in place of class numbers.
        weights: Adds an input ``weights`` with a number ≥ 0 for each entry of the targets
            (``"targets"``), prediction (``"predictions"``) or example (``"examples"``). A class
            number is the target of one prediction. Targets of the weight 0 do not count and are not
            read; a negative weight makes the loss NaN.
        mask: Adds an input ``mask`` in place of ``weights``, with a Boolean for each target,
            prediction or example: whether it counts.

    Returns:
        A model with the inputs of ``model``, ``targets``, and ``weights`` or ``mask`` (``targets of
        <output>`` for several losses, ``cotangent`` without a loss). Its outputs are ``loss``, or
        the output without a loss, and ``gradient/<name>`` for each name. A name that the
        model already uses is followed by a number: ``cotangent_2``, ``gradient/<name>_2``.

    Raises:
        InputError: The file, the loss or an option is wrong.
        UnknownNameError: A name does not exist, or a pattern matches no name.
        UnsupportedOpError: An operator on a path from ``wrt`` to the output has no derivative rule.
        UnsupportedError: The loss is ``"output"``, which the file computes itself, or its code
            needs numbers that are known in a run only.
        ModelError: The output depends on none of ``wrt``.
    """
    check_choice("reduction", reduction, REDUCTIONS)
    check_choice("provider", provider, PROVIDERS)
    target_inputs = TargetInputs(probabilities, weights, mask)
    check_patterns("wrt", wrt)
    check_patterns("freeze", freeze)
    check_mapping("batch_axes", batch_axes, "{'input': 1}")
    loaded = with_taken_branches(load_model(model), sample_inputs)
    narrow = {
        free_name(f"{GRADIENT}{name}", loaded.graph): dtype
        for name, dtype in result_types(loaded.stored, gradient_dtype).items()
    }
    names = _chosen(loaded.graph, wrt, freeze)
    graph = replace(loaded.graph, inputs=with_batch_axes(loaded.graph.inputs, batch_axes))
    facts: Mapping[str, Fact]
    graph, facts = lowered(graph, names, sample_inputs)
    shape: DeclaredShape | None = None
    recorded: RecordedLoss | None = None
    if loss is None:
        target_inputs.check([])
        value = _only_output(graph, facts, output)
        shape, ends = declared_shape(loaded, value, facts[value]), [value]
    else:
        options = LossOptions(loss, output, class_axis, batch_axes).on(loaded.graph)
        graph, facts, recorded = _with_losses(
            loaded, (graph, facts), options, reduction, sample_inputs, target_inputs
        )
        value, ends = LOSS, list(recorded.cotangents)
    left = left_out(graph, facts, ends, names) if wrt is None else {}
    names = tuple(name for name in names if name not in left)
    backward = backward_graph(graph, facts, ends, names)
    if not backward.gradients:
        raise ModelError(
            f"'{value}' depends on none of: {', '.join(names)}; name a parameter or an input that "
            f"it depends on, or leave wrt out."
            if wrt
            else nothing_to_train(graph.name, [value], left)
        )
    whole = graph if recorded is None else recorded.after(graph, backward.cotangents)
    result, constants = _written(
        whole, facts, backward, (value, shape), names, {**loaded.stored, **narrow}
    )
    zero = [name for name in names if name not in backward.gradients]
    jumps = zero_notes(behind_jumps(graph, facts, ends, zero))
    result.doc_string = "; ".join((*notes_of(left), *jumps, *straight_through(graph, facts, names)))
    if provider == "webgpu":
        result, constants = for_webgpu(with_constants(result, constants)), {}
    return saved_model(result, constants, path)


def free_name(name: str, graph: Graph) -> str:
    """Return ``name``, with a number if a value of the graph has this name."""
    return unused(name, set(graph.values()))


def declared_shape(loaded: LoadedModel, value: str, fact: Fact) -> DeclaredShape:
    """Return the declared shape of an output; all sizes are None if the sample run has another."""
    shape = loaded.output_shapes.get(value, ())
    fits = len(shape) == len(fact.shape) and all(
        declared == size
        for declared, size in zip(shape, fact.shape, strict=True)
        if type(declared) is int
    )
    return shape if fits else (None,) * len(fact.shape)


def joint_model(
    joint: Graph, inputs: Sequence[Input], outputs: Sequence[Input], stored: Mapping[str, DType]
) -> tuple[ModelProto, dict[str, Array]]:
    """Return a model of the nodes that the outputs need, and the values of its initializers.

    ``joint`` is a forward graph with the nodes that were added to it. The model casts from and to
    the types of ``stored``, which are the element types in the file that differ from the element
    types in the graph.
    """
    names = [entry.name for entry in outputs]
    nodes = needed(joint.nodes, names)
    read = values_read(nodes)
    constants = {name: array for name, array in joint.constants.items() if name in read}
    stored_names = (*(entry.name for entry in inputs), *constants)
    model = build_model(
        with_borders(
            nodes,
            {name: stored[name] for name in stored_names if name in stored},
            {name: stored[name] for name in names if name in stored},
        ),
        [_in_type(entry, stored) for entry in inputs],
        [_in_type(entry, stored) for entry in outputs],
        {},
        joint.opset,
        name=joint.name,
        domains=joint.domains,
    )
    return model, in_types(constants, stored)


# -- private ---------------------------------------------------------------------------------------


def _with_losses(
    loaded: LoadedModel,
    known: tuple[Graph, Mapping[str, Fact]],
    options: LossOptions,
    reduction: Reduction,
    inputs: Mapping[str, Array] | None,
    target_inputs: TargetInputs,
) -> tuple[Graph, Mapping[str, Fact], RecordedLoss]:
    """Return the graph of what the losses read, its facts, and the losses."""
    graph, facts = known
    heads, batch = bind_losses(graph, facts, options, inputs)
    if any(isinstance(head.loss, OutputLoss) for head in heads):
        raise UnsupportedError(
            "the loss 'output' is in the file already; differentiate without a loss, and run the "
            "result with the cotangent 1."
        )
    target_inputs.check([head.loss for head in heads])
    terms = []
    for head, weight in zip(heads, options.coefficients, strict=True):
        declared = declared_shape(loaded, head.output, facts[head.output])
        if head.logits:
            constants = {**graph.constants, **head.logits.constants}
            nodes = (*graph.nodes, *head.logits.nodes)
            graph = replace(graph, nodes=nodes, constants=constants)
            facts = {**facts, **head.logits.facts}
        loss = copy(head.loss)
        loss.targets = loss.targets or TARGETS
        value = loss.inputs[0]
        if facts[value].shape != facts[head.output].shape:  # logits before a Reshape
            declared = (None,) * len(facts[value].shape)
        terms.append(Term(loss, batch.places[head.output], weight, declared))
    return graph, facts, record_losses(graph, facts, terms, reduction, target_inputs)


def _only_output(
    graph: Graph, facts: Mapping[str, Fact], output: str | Sequence[str] | None
) -> str:
    if output is not None and not isinstance(output, str):
        if len(output) != 1:
            raise InputError("several outputs need one loss each; pass loss=[…].")
        (output,) = output
    if output is not None and output not in set(graph.values()):
        raise UnknownNameError(
            f"'{output}'{suggestion(output, graph.values())} is not a value of model "
            f"'{graph.name}'."
        )
    check_real(graph, facts, graph.outputs if output is None else [output])
    real = final_outputs(graph, real_outputs(graph, facts))
    if output is None and len(real) != 1:
        raise InputError(
            f"the model has the outputs {', '.join(graph.outputs)}; name one with "
            f"output=… (--output)."
        )
    return real[0] if output is None else output


def _chosen(
    graph: Graph, patterns: str | Sequence[str] | None, freeze: str | Sequence[str] | None
) -> tuple[str, ...]:
    """Return the matching parameters and inputs; without patterns the trainable parameters."""
    if patterns is None:
        return trainable_parameters(graph, freeze=freeze)
    patterns = [patterns] if isinstance(patterns, str) else patterns
    if not patterns:
        raise InputError("wrt is empty; name a parameter or an input, or omit wrt.")
    candidates = [entry.name for entry in graph.inputs if entry.dtype.kind == "f"]
    candidates += [name for name, array in graph.constants.items() if array.dtype.kind == "f"]
    what = "floating-point input or weight"
    frozen = matching(freeze or (), candidates, what)
    # In the order of the patterns.
    chosen = dict.fromkeys(n for p in patterns for n in matching(p, candidates, what))
    return tuple(name for name in chosen if name not in frozen)


def _written(
    graph: Graph,
    facts: Mapping[str, Fact],
    backward: Backward,
    result: tuple[str, DeclaredShape | None],
    names: Sequence[str],
    stored: Mapping[str, DType],
) -> tuple[ModelProto, dict[str, Array]]:
    """Return the joint model with readable names of inputs and outputs, and its constants.

    ``result`` is the differentiated value and its declared shape; None for a loss, which has no
    cotangent as an input.
    """
    value, shape = result
    joint = joint_graph(graph, backward)
    nodes, constants, inputs = list(joint.nodes), dict(joint.constants), list(graph.inputs)
    dtype = facts[next(iter(backward.cotangents))].dtype
    if shape is not None:
        cotangent = backward.cotangents[value]
        cotangent_input = free_name(COTANGENT, graph)
        stored = {**stored, cotangent_input: stored[value]} if value in stored else stored
        inputs.append(Input(cotangent_input, dtype, shape))
        nodes.insert(
            0, Node("Identity", (cotangent_input,), (cotangent,), name=f"node_{cotangent_input}")
        )
    outputs = [Input(value, dtype, shape or ())]
    for name in names:
        target = free_name(f"{GRADIENT}{name}", graph)
        nodes += _result(name, target, backward.gradients.get(name))
        declared = next((entry.shape for entry in graph.inputs if entry.name == name), None)
        wrt_shape = graph.constants[name].shape if name in graph.constants else declared
        outputs.append(Input(target, facts[name].dtype, wrt_shape))
    name = f"gradient of {joint.name}"
    joint = replace(joint, nodes=tuple(nodes), constants=constants, name=name)
    read = values_read(needed(nodes, [entry.name for entry in outputs]))
    return joint_model(joint, [e for e in inputs if e.name in read], outputs, stored)


def _in_type(entry: Input, types: Mapping[str, DType]) -> Input:
    return replace(entry, dtype=types.get(entry.name, entry.dtype))


def _result(name: str, target: str, gradient: str | None) -> list[Node]:
    """Return the node that computes ``target``, the gradient of the value ``name``.

    The result is zero if ``gradient`` is None, because the output does not depend on the value.
    """
    if gradient is not None:
        return [Node("Identity", (gradient,), (target,), name=f"node_{target}")]
    return [Node("Sub", (name, name), (target,), name=f"node_{target}")]
