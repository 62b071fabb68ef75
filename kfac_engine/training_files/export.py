"""Defines ``export_training``, which writes a model's training step as plain ONNX files."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np

from kfac_engine._types import Array
from kfac_engine.arguments import check_choice, check_int
from kfac_engine.autodiff.differentiate import needed
from kfac_engine.autodiff.training_form import inference_form
from kfac_engine.curvature.config import RelativeDamping
from kfac_engine.curvature.schedule import Schedule
from kfac_engine.engine.build import Assembly, build
from kfac_engine.engine.engine import Engine
from kfac_engine.engine.loss_bindings import LossChoices
from kfac_engine.engine.options import EngineOptions
from kfac_engine.engine.report import inference_notes
from kfac_engine.engine.validation import check_variances
from kfac_engine.errors import (
    InferenceFormWarning,
    InputError,
    UnknownNameError,
    UnsupportedError,
    suggestion,
    warn,
)
from kfac_engine.export.target_inputs import Form, TargetInputs
from kfac_engine.graph.load import ModelSource
from kfac_engine.graph.passes.upcast import with_borders
from kfac_engine.graph.structure import Graph, Input, Node, values_read
from kfac_engine.graph.webgpu import PROVIDERS, Provider, for_webgpu
from kfac_engine.graph.write import ModelProto, build_model, serialize, with_properties
from kfac_engine.losses.objective import Reduction
from kfac_engine.recording.recorded import OPSET, Level, Symbol
from kfac_engine.runtime.model import OnnxModel
from kfac_engine.system.writing import check_outputs, checked_path, write_file
from kfac_engine.training.fit import OPTIMIZERS
from kfac_engine.training.gauss_newton import GaussNewton
from kfac_engine.training.kfac import KfacOptimizer
from kfac_engine.training.optimizer import Optimizer
from kfac_engine.training_files.description import DIFFERENT, Description, readme
from kfac_engine.training_files.evaluation import Metrics, record_metrics
from kfac_engine.training_files.files import (
    EVALUATE,
    INITIAL,
    PREDICT,
    README,
    TRAINING,
    TrainingFiles,
)
from kfac_engine.training_files.parts import declared_value
from kfac_engine.training_files.step import NEW, StepGraph, StepRecorder

NOISE = ("internal", "input")

# Options of K-FAC with the only value that a file can have, and what to do in its place.
_KFAC_ONLY: Mapping[str, tuple[object, str]] = {
    "learning_rate": ("auto", "leave learning_rate out, or export 'adamw' or 'muon'"),
    "l2": (0.0, "set weight_decay"),
    "adapt_damping": (False, "leave adapt_damping out: the damping is relative"),
}


def export_training(  # noqa: PLR0913 (every choice a user has, each with a default)
    model: ModelSource,
    loss: LossChoices = "categorical",
    optimizer: str = "kfac",
    *,
    path: str | Path,
    output: str | Sequence[str] | None = None,
    class_axis: int = -1,
    reduction: Reduction = "mean",
    probabilities: bool = False,
    weights: Form | None = None,
    mask: Form | None = None,
    trainable: str | Sequence[str] | None = None,
    freeze: str | Sequence[str] | None = None,
    train_form: bool = False,
    tie_weights: bool = False,
    batch_axes: Mapping[str, int] | None = None,
    sample_inputs: Mapping[str, Array] | None = None,
    accumulate: int = 1,
    noise: str = "internal",
    provider: Provider = "any",
    **options: Any,
) -> TrainingFiles:
    """Write the training step of a model as plain ONNX files, which any ONNX Runtime executes.

    ``training.onnx`` computes one step of the optimizer: its inputs are a batch, the value ``rate``
    of the schedule and the state, and its outputs the loss and the new state. ``initial.onnx`` has
    no inputs and returns the first state. ``predict.onnx`` is the model in inference form, with its
    trained weights as inputs, and ``evaluate.onnx`` measures its predictions. ``README.md``
    describes them, and has the loop in four languages.

    Args:
        model: Path, bytes or ``ModelProto``.
        loss: As in ``Engine.from_onnx``.
        optimizer: ``"kfac"``, ``"adamw"``, ``"adam"``, ``"muon"`` or ``"sgd"``.
        path: Folder of the files; it is created if it does not exist.
        output: Name of the output with the loss, as in ``Engine.from_onnx``.
        class_axis: Axis of the classes in the output, as for ``Engine.from_onnx``.
        reduction: ``"mean"``, ``"batch_mean"`` or ``"sum"``.
        probabilities: Whether targets of classes are probabilities, as for ``differentiate``.
        weights: What has a number in the input ``weights``, as for ``differentiate``.
        mask: What has a Boolean in the input ``mask``, as for ``differentiate``.
        trainable: Pattern of parameter names that are trained, or several.
        freeze: Pattern of parameter names that are not trained, or several. They are constants of
            the files, and no gradient is computed below the first layer that is trained.
        train_form: Whether normalizations and dropouts in inference form are trained.
        tie_weights: Whether equal weights are trained as one.
        batch_axes: Axis of the examples of each input, by name.
        sample_inputs: A batch that determines shapes; by default a generated batch. The files fix
            its sizes of all axes except those of the examples, such as the lengths of texts.
        accumulate: Number of parts into which a step divides the batch. The file evaluates
            the parts one after another, so that it needs the memory of one part, and adds their
            gradients.
        noise: ``"internal"``, where the file draws the random numbers of K-FAC's statistics, or
            ``"input"`` for an input with them: a row for each example that is measured.
        provider: ``"webgpu"`` writes convolutions and splits so that onnxruntime-web computes them
            on WebGPU, and correctly.
        **options: Options of the optimizer's class, such as ``learning_rate`` and
            ``weight_decay``.

    Returns:
        The files.

    Raises:
        UnknownNameError: The name of an optimizer, option, loss or parameter is unknown.
        UnsupportedError: A file cannot have an option, or an operation of the model. Nothing was
            written.
        InputError: The model, an option or the folder is wrong. Nothing was written.

    Warns:
        InferenceFormWarning: The model has normalizations or dropouts in inference form.
        UserWarning: The model leaves the size of an axis open, which the files fix.
    """
    folder = _checked_folder(path)
    check_choice("noise", noise, NOISE)
    check_choice("provider", provider, PROVIDERS)
    check_int("accumulate", accumulate, least=1)
    chosen = EngineOptions(
        loss=loss, output=output, class_axis=class_axis, reduction=reduction,
        trainable=trainable, freeze=freeze,
        train_form=train_form, tie_weights=tie_weights, batch_axes=batch_axes,
        sample_inputs=sample_inputs, backend="numpy", threads=1, gradient_dtype="float32",
    )  # fmt: skip
    target_inputs = TargetInputs(probabilities, weights, mask)
    _check_options(optimizer, options)
    assembly, estimator = build(model, chosen)
    _check_losses(assembly)
    target_inputs.check([head.loss for head in assembly.task.heads])
    _check_types(assembly.model)
    _check_folder(folder, assembly.model)
    _check_parts(accumulate, noise, assembly)
    engine = Engine(assembly, estimator, Schedule(), chosen.exps)
    trainer = OPTIMIZERS[optimizer](engine, **options)
    _check_damping(trainer)
    recorder = StepRecorder(
        engine,
        assembly,
        trainer,
        target_inputs,
        noise_is_input=noise == "input",
        parts=accumulate,
    )
    step = _with_read_noise(_recorded(recorder))
    for note in inference_notes(engine.passes.model):
        warn(f"{note}.", InferenceFormWarning)
    for note in _fixed_sizes(assembly, sample_inputs or {}):
        warn(note)
    metrics = record_metrics(assembly, target_inputs, step.targets)
    description = _described(assembly, optimizer, options, step, metrics.read)
    contents = {
        TRAINING: _training(assembly.model, step, description),
        INITIAL: _initial(step.state, description),
        PREDICT: _predict(assembly.model, step, description),
        EVALUATE: _evaluate(assembly.model, metrics, description),
    }
    if provider == "webgpu":
        contents = {name: for_webgpu(content) for name, content in contents.items()}
    serialized = {name: serialize(content) for name, content in contents.items()}
    text = readme(description, step.data)
    serialized[README] = text.encode()
    folder.mkdir(parents=True, exist_ok=True)
    check_outputs({name: folder / name for name in serialized})
    for name, data in serialized.items():
        write_file(folder / name, [data])
    return TrainingFiles(folder, model)


# -- checks ----------------------------------------------------------------------------------------


def _checked_folder(path: str | Path) -> Path:
    folder = checked_path(path)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"'{folder}' is a file; name a folder for the training files.")
    return folder


def _check_folder(folder: Path, model: OnnxModel) -> None:
    """Refuse to write over the model."""
    names = {folder.resolve() / name for name in (TRAINING, INITIAL, PREDICT, EVALUATE, README)}
    for path in model.loaded.files:
        if path.resolve() in names:
            raise InputError(
                f"the training files would overwrite the file of the model, '{path}'; name "
                f"another folder."
            )


def _check_options(optimizer: str, options: Mapping[str, Any]) -> None:
    """Refuse an optimizer, and options that a file cannot have."""
    make = OPTIMIZERS[optimizer]
    if make is GaussNewton:
        raise UnsupportedError(
            "a training file cannot have the optimizer 'gauss_newton', because ONNX has no "
            "Cholesky decomposition; choose 'kfac'."
        )
    known = [*signature(make).parameters]
    known = [name for name in known if name not in ("engine", "non_finite")]
    for name in options:
        if name not in known:
            raise UnknownNameError(
                f"'{optimizer}' has no option '{name}' in a training file"
                f"{suggestion(name, known)}; its options are: {', '.join(known)}."
            )
    for name, (value, instead) in _KFAC_ONLY.items() if optimizer == "kfac" else ():
        if name in options and options[name] != value:
            raise UnsupportedError(
                f"a training file cannot have {name}={options[name]!r:.40} of K-FAC; {instead}."
            )
    for name in ("learning_rate", "momentum", "adam_rate"):
        if callable(options.get(name)):
            raise UnsupportedError(
                f"{name} is a function, which a training file cannot call; give a number, and "
                f"the value of the schedule as the input 'rate' of each step."
            )


def _check_damping(optimizer: Optimizer) -> None:
    if isinstance(optimizer, KfacOptimizer) and not isinstance(optimizer.damping, RelativeDamping):
        raise UnsupportedError(
            "a training file inverts matrices with a relative damping only; leave damping out, or "
            "give a RelativeDamping."
        )


def _check_losses(assembly: Assembly) -> None:
    if assembly.task.batch.sets:
        raise UnsupportedError(
            f"a training file has one number of examples, but {assembly.task.batch.joint}; train "
            f"with fit."
        )
    for head in assembly.task.heads:
        if head.loss.targets is None:
            raise UnsupportedError(
                f"a training file reads targets, and the loss on '{head.output}' has none; choose "
                f"a loss on an output with predictions, such as loss='categorical'."
            )


def _check_types(model: OnnxModel) -> None:
    for name, array in model.parameters.items():
        if array.dtype != np.float32:
            raise UnsupportedError(
                f"parameter '{name}' has the type {array.dtype}, and training files compute in "
                f"single precision; convert the model to float32, or freeze the parameter."
            )


def _check_parts(parts: int, noise: str, assembly: Assembly) -> None:
    """Refuse batches of one value for each channel, and parts of those that cannot be divided."""
    if assembly.task.batch.fixed:
        check_variances(assembly.model.graph, assembly.model.facts, assembly.model.facts)
    if parts == 1:
        return
    obstacle = assembly.task.example_axes.obstacle
    if obstacle or not assembly.task.batch.inputs:
        raise UnsupportedError(
            f"a step cannot divide the batch: {obstacle or 'no input has an axis of examples'}; "
            f"leave accumulate out."
        )
    if noise == "input" and assembly.model.draws:
        raise UnsupportedError(
            "the random numbers of a model are inputs for a whole batch; leave accumulate out, or "
            "take noise='internal'."
        )


def _recorded(recorder: StepRecorder) -> StepGraph:
    """Record a step; an UnsupportedError for code that needs numbers in place of symbols."""
    try:
        return recorder.record()
    except (TypeError, AttributeError) as failure:
        if isinstance(failure, UnsupportedError):
            raise
        raise UnsupportedError(
            f"a file cannot compute a loss or the optimizer: {failure}; train in Python, or choose "
            f"another loss or optimizer."
        ) from failure


def _fixed_sizes(assembly: Assembly, sample: Mapping[str, Array]) -> Iterator[str]:
    """Yield a sentence for each axis that the model leaves open, and a generated batch fixes."""
    model, examples = assembly.model, assembly.task.batch.inputs
    for entry in model.graph.inputs:
        for axis, size in enumerate(() if entry.name in sample else entry.shape or ()):
            if not isinstance(size, int) and axis != examples.get(entry.name):
                named = f" ('{size}')" if size else ""
                yield (
                    f"axis {axis}{named} of input '{entry.name}' has any size in the model, but "
                    f"{model.facts[entry.name].shape[axis]} in the training files; pass "
                    f"sample_inputs (--inputs) with the size of your data, and pad or cut the data "
                    f"to it."
                )


def _with_read_noise(step: StepGraph) -> StepGraph:
    """Leave out random numbers that nothing reads, such as of a loss of frozen layers only."""
    read = values_read(
        needed(step.tape.graph.nodes, [value.name for value in step.outputs.values()])
    )
    noise = {name: shape for name, shape in step.noise.items() if name in read}
    unread = step.noise.keys() - noise
    return replace(step, data=tuple(e for e in step.data if e.name not in unread), noise=noise)


# -- contents --------------------------------------------------------------------------------------


def _described(
    assembly: Assembly,
    optimizer: str,
    options: Mapping[str, Any],
    step: StepGraph,
    evaluated: Mapping[str, str],
) -> Description:
    batch = assembly.task.batch
    digest = hashlib.sha256()
    for name, array in step.state.items():
        digest.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    for level_node in step.tape.graph.nodes:
        digest.update(repr((level_node.op, level_node.inputs, level_node.outputs)).encode())
    data = {entry.name for entry in assembly.model.graph.inputs}
    heads = {head.loss.require_target_name(): head for head in assembly.task.heads}
    outputs = [n for n in assembly.model.loaded.graph.outputs if n in assembly.model.facts]
    return Description(
        identity=digest.hexdigest()[:16],
        model=assembly.model.loaded.graph.name,
        optimizer=optimizer,
        options={name: _plain(value) for name, value in options.items()},
        losses=tuple(type(head.loss).__name__ for head in assembly.task.heads),
        inputs={name: batch.inputs.get(name, -1) for name in data},
        targets={
            entry.name: batch.places[heads[entry.name].output].axis
            for entry in step.data
            if entry.name in heads
        },
        outputs={head.output: name for name, head in heads.items()},
        weights=step.weights,
        state={name: array.shape for name, array in step.state.items()},
        parameters=step.parameters,
        metrics=step.metrics,
        data={entry.name: _as_json(entry) for entry in step.data},
        predictions={name: _as_json(declared_value(assembly, name)) for name in outputs},
        evaluated=evaluated,
        types={n: str(a.dtype) for n, a in step.state.items() if a.dtype != np.float32},
        different=DIFFERENT if DIFFERENT in step.state else "",
        noise=step.noise,
        factors=step.factors,
        ties=tuple((t.first, t.copy, t.transposed) for t in assembly.model.ties),
        batch_size=batch.size if batch.fixed else None,
    )


def _as_json(entry: Input) -> dict[str, Any]:
    """Return the type and the shape of an array."""
    dtype = entry.dtype if entry.stored is None else entry.stored
    return {"type": str(dtype), "shape": list(entry.shape or ())}


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | float | str | None) else repr(value)


def _training(model: OnnxModel, step: StepGraph, description: Description) -> ModelProto:
    """Return ``training.onnx``."""
    level = step.tape.graph
    outputs = []
    renamed = _renamed_results(level, step.outputs)
    for name, value in step.outputs.items():
        if value.name not in renamed:
            level.op("Identity", value.name, result=name)
        is_state = name.startswith(NEW) and value.ndim
        outputs.append(Input(name, value.dtype, (None,) * value.ndim if is_state else value.shape))
    nodes = needed(level.nodes, [entry.name for entry in outputs])
    read = values_read(nodes)
    state = [Input(name, array.dtype, array.shape) for name, array in step.state.items()]
    inputs = [entry for entry in (*step.data, *state) if entry.name in read]
    constants = {name: array for name, array in level.constants.items() if name in read}
    return _model(model, nodes, inputs, outputs, constants, "training step", description)


def _renamed_results(level: Level, outputs: Mapping[str, Symbol]) -> set[str]:
    """Give results of nodes that only the outputs read the names of these; return the old names."""
    read, counts = values_read(level.nodes), Counter(value.name for value in outputs.values())
    computed = {name for node in level.nodes for name in node.outputs}
    names = {
        value.name: name
        for name, value in outputs.items()
        if value.name in computed and value.name not in read and counts[value.name] == 1
    }
    level.nodes[:] = [
        replace(node, outputs=tuple(names.get(name, name) for name in node.outputs))
        for node in level.nodes
    ]
    return {*names}


def _initial(state: Mapping[str, Array], description: Description) -> ModelProto:
    """Return ``initial.onnx``, whose outputs are the first state."""
    nodes, constants = [], {}
    for name, array in state.items():
        zero = array.ndim > 0 and not array.any()
        # Averages and slots are zero at first, and take no bytes of the file.
        constants[f"first {name}"] = np.array(array.shape, np.int64) if zero else array
        value = {"value": np.zeros(1, array.dtype)} if zero else {}
        op = "ConstantOfShape" if zero else "Identity"
        nodes.append(Node(op, (f"first {name}",), (name,), value, f"node {name}"))
    outputs = [Input(name, array.dtype, array.shape) for name, array in state.items()]
    model = build_model(nodes, [], outputs, constants, OPSET, name="initial state")
    return with_properties(model, description.properties())


def _predict(model: OnnxModel, step: StepGraph, description: Description) -> ModelProto:
    """Return ``predict.onnx``, the model in inference form with its trained weights as inputs."""
    graph: Graph = inference_form(model.extended_graph(), model.buffers)
    # A loss may read a value that is not an output of the model, such as logits.
    outputs = [*dict.fromkeys((*description.predictions, *description.evaluated.values()))]
    nodes = needed(graph.nodes, outputs)
    read = values_read(nodes)
    inputs = [entry for entry in step.data if entry.name in read]
    weights = {n: a for n, a in step.state.items() if n in step.parameters and n in read}
    inputs += [Input(name, array.dtype, array.shape) for name, array in weights.items()]
    constants = {n: a for n, a in graph.constants.items() if n in read and n not in weights}
    declared = [
        Input(n, model.facts[n].dtype, (None,) * len(model.facts[n].shape)) for n in outputs
    ]
    return _model(model, nodes, inputs, declared, constants, "prediction", description)


def _evaluate(model: OnnxModel, metrics: Metrics, description: Description) -> ModelProto:
    """Return ``evaluate.onnx``, the metrics of predictions."""
    level = metrics.tape.graph
    for name, value in metrics.outputs.items():
        level.op("Identity", value.name, result=name)
    outputs = [Input(name, value.dtype, value.shape) for name, value in metrics.outputs.items()]
    nodes = needed(level.nodes, [entry.name for entry in outputs])
    read = values_read(nodes)
    inputs = [entry for entry in metrics.inputs if entry.name in read]
    constants = {name: array for name, array in level.constants.items() if name in read}
    result = build_model(nodes, inputs, outputs, constants, OPSET, name="evaluation")
    return with_properties(result, description.properties())


def _model(
    model: OnnxModel,
    nodes: Sequence[Node],
    inputs: Sequence[Input],
    outputs: Sequence[Input],
    constants: Mapping[str, Array],
    name: str,
    description: Description,
) -> ModelProto:
    """Return a model whose inputs and outputs have the types of the file."""
    stored = model.loaded.stored
    narrow = {
        entry.name: stored[entry.name] for entry in model.graph.inputs if entry.name in stored
    }
    narrow = {name: dtype for name, dtype in narrow.items() if any(e.name == name for e in inputs)}
    results = {e.name: stored[e.name] for e in outputs if e.name in stored}
    if narrow or results:
        nodes = with_borders(nodes, narrow, results)
    types = {**narrow, **results}

    def in_type(entries: Sequence[Input]) -> list[Input]:
        return [Input(e.name, types.get(e.name, e.dtype), e.shape) for e in entries]

    result = build_model(
        nodes,
        in_type(inputs),
        in_type(outputs),
        {n: np.asarray(a) for n, a in constants.items()},
        max(OPSET, model.graph.opset),
        name=name,
        domains=model.graph.domains,
    )
    return with_properties(result, description.properties())
