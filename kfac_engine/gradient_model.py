"""The gradient of a model as one plain ONNX model, which any runtime executes.

Forward and backward graph are joined; with a loss, that too is written as operators. Weights stay
in the file: the result takes the model's inputs and the targets (without a loss: a cotangent) and
gives the loss and the gradients. It can be differentiated again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from math import log, pi
from typing import TypeAlias

import numpy as np

from kfac_engine._types import Array, DType
from kfac_engine.autodiff.differentiate import Backward, needed
from kfac_engine.autodiff.differentiate import differentiate as backward_graph
from kfac_engine.autodiff.lower import lowered
from kfac_engine.autodiff.twice import joint_graph
from kfac_engine.errors import InputError, ModelError, ShapeError, UnknownNameError
from kfac_engine.graph.borders import with_borders
from kfac_engine.graph.load import ModelSource, load_model
from kfac_engine.graph.structure import AttributeValue, Fact, Graph, Input, Node
from kfac_engine.graph.trainable import trainable_parameters
from kfac_engine.graph.widen import GradientDType, handed_out_types, in_types
from kfac_engine.graph.write import ModelProto, build_model
from kfac_engine.objective import Reduction, check_reduction
from kfac_engine.registry import Registry

LOSS, TARGETS, COTANGENT, GRADIENT = "loss", "targets", "cotangent", "gradient/"
Sides: TypeAlias = tuple[int | str | None, ...]


def differentiate(  # noqa: PLR0913 (every choice a user has, each with a default)
    model: ModelSource,
    loss: str | None = None,
    output: str | None = None,
    wrt: Sequence[str] | None = None,
    *,
    class_axis: int = -1,
    reduction: Reduction = "mean",
    sample_inputs: Mapping[str, Array] | None = None,
    gradient_dtype: GradientDType = "file",
) -> ModelProto:
    """The gradient of a model as an ONNX model of standard operators.

    Args:
        model: Path, bytes or ``ModelProto``.
        loss: ``"categorical"``, ``"normal"``, ``"multi_bernoulli"`` or an alias; without one the
            gradient is that of ``⟨cotangent, output⟩``.
        output: The output to differentiate; may be left out where there is one.
        wrt: Patterns of parameter and input names; the trainable parameters by default.
        class_axis: Axis of the classes or features in the output.
        reduction: ``"mean"`` over batch and positions, ``"batch_mean"`` or ``"sum"``.
        sample_inputs: A batch to find shapes with, where none can be made up.
        gradient_dtype: Element type of the gradients of half-precision values: ``"file"`` for
            their own, or ``"float32"``, which is what everything in between is computed in.

    Returns:
        A model with the inputs of the old one and ``targets`` (or ``cotangent``, with a number
        where the model has a value of that name), and the outputs
        ``loss`` (or the output) and ``gradient/<name>`` for each name.

    Raises:
        InputError: The file, the loss or an option is wrong.
        UnknownNameError: A name or pattern goes by nothing.
        UnsupportedOpError: An operator in between has no derivative rule.
        ModelError: The output depends on none of ``wrt``.
    """
    check_reduction(reduction)
    loaded = load_model(model)
    narrow = {
        f"{GRADIENT}{name}": dtype
        for name, dtype in handed_out_types(loaded.stored, gradient_dtype).items()
    }
    names = _chosen(loaded.graph, wrt)
    graph, facts = lowered(loaded.graph, names, sample_inputs)
    value = _only_output(graph, output)
    sides = loaded.output_shapes.get(value, (None,) * len(facts[value].shape))
    if loss is None:
        backward = backward_graph(graph, facts, [value], names)
    else:
        pen = _Pen(facts[value])
        LOSS_GRAPHS[loss](pen, value, _checked_axis(value, facts[value], class_axis), reduction)
        graph, facts = _extended(graph, pen), {**facts, **pen.facts}
        backward = backward_graph(graph, facts, [LOSS], names)
        value, sides = LOSS, ()
    if not backward.gradients:
        raise ModelError(f"'{value}' depends on none of: {', '.join(names)}.")
    stored = {**loaded.stored, **narrow}
    return _written(graph, facts, backward, (value, sides), names, stored)


# -- losses as operators ---------------------------------------------------------------------------


class _Pen:
    """Writes the nodes of a loss, with what is known of their results.

    Args:
        fact: Of the output the loss is put on.
    """

    def __init__(self, fact: Fact) -> None:
        self.fact = fact
        self.nodes: list[Node] = []
        self.facts: dict[str, Fact] = {}
        self.constants: dict[str, Array] = {}
        self.targets: Input | None = None

    def op(
        self,
        op: str,
        *inputs: str,
        sides: tuple[int, ...],
        to: str = "",
        **attributes: AttributeValue,
    ) -> str:
        """Add a node with a result of these sides in the sample run; returns its name."""
        name = to or f"{LOSS}_{op}_{len(self.nodes)}"
        self.nodes.append(Node(op, inputs, (name,), attributes, name=f"node_{name}"))
        self.facts[name] = Fact(self.fact.dtype, sides)
        return name

    def constant(self, value: float | Sequence[int]) -> str:
        """A number in the output's type, or a list of axes."""
        dtype = self.fact.dtype if isinstance(value, float) else np.dtype(np.int64)
        name = f"{LOSS}_constant_{len(self.constants)}"
        self.constants[name] = array = np.asarray(value, dtype)
        self.facts[name] = Fact(array.dtype, array.shape)
        return name

    def take_targets(self, sides: tuple[int, ...], dtype: str | None = None) -> str:
        """Declare the targets."""
        self.targets = Input(
            TARGETS, np.dtype(dtype) if dtype else self.fact.dtype, (None,) * len(sides)
        )
        self.facts[TARGETS] = Fact(self.targets.dtype, sides)
        return TARGETS

    def reduce(self, nll: str, axis: int, reduction: Reduction) -> None:
        """Sum over the classes, then over positions and examples as the reduction says."""
        sides = self.facts[nll].shape
        if len(sides) > 1 and reduction != "sum":
            within = [axis] if reduction == "mean" else list(range(1, len(sides)))
            kept = tuple(side for i, side in enumerate(sides) if i not in within)
            nll = self.op("ReduceSum", nll, self.constant(within), sides=kept, keepdims=0)
        op = "ReduceSum" if reduction == "sum" else "ReduceMean"
        self.op(op, nll, sides=(), to=LOSS, keepdims=0)


LossGraph: TypeAlias = Callable[[_Pen, str, int, Reduction], None]


def _categorical(pen: _Pen, logits: str, axis: int, reduction: Reduction) -> None:
    """``−log softmax(z)[target]``, with integer targets."""
    sides = pen.fact.shape
    one = tuple(1 if i == axis else side for i, side in enumerate(sides))
    targets = pen.take_targets((*sides[:axis], *sides[axis + 1 :]), "int64")
    log_p = pen.op("LogSoftmax", logits, sides=sides, axis=axis)
    index = pen.op("Unsqueeze", targets, pen.constant([axis]), sides=one)
    pen.facts[index] = Fact(np.dtype(np.int64), one)
    picked = pen.op("GatherElements", log_p, index, sides=one, axis=axis)
    pen.reduce(pen.op("Neg", picked, sides=one), axis, reduction)


def _normal(pen: _Pen, mean: str, axis: int, reduction: Reduction) -> None:
    """``(t − m)² + ½ log π``: variance ½."""
    sides = pen.fact.shape
    error = pen.op("Sub", mean, pen.take_targets(sides), sides=sides)
    square = pen.op("Mul", error, error, sides=sides)
    nll = pen.op("Add", square, pen.constant(0.5 * log(pi)), sides=sides)
    pen.reduce(nll, axis, reduction)


def _multi_bernoulli(pen: _Pen, logits: str, axis: int, reduction: Reduction) -> None:
    """``softplus(z) − t·z``."""
    sides = pen.fact.shape
    softplus = pen.op("Softplus", logits, sides=sides)
    hit = pen.op("Mul", logits, pen.take_targets(sides), sides=sides)
    pen.reduce(pen.op("Sub", softplus, hit, sides=sides), axis, reduction)


LOSS_GRAPHS: Registry[LossGraph] = Registry(
    "loss",
    {
        "categorical": _categorical,
        "softmax_cross_entropy": _categorical,
        "normal": _normal,
        "squared_error": _normal,
        "multi_bernoulli": _multi_bernoulli,
        "sigmoid_cross_entropy": _multi_bernoulli,
    },
)


# -- private ---------------------------------------------------------------------------------------


def _only_output(graph: Graph, output: str | None) -> str:
    if output is None and len(graph.outputs) == 1:
        return graph.outputs[0]
    if output is None:
        raise InputError(
            f"the model has the outputs {', '.join(graph.outputs)}; name one with output=…."
        )
    if output not in set(graph.values()):
        raise UnknownNameError(f"'{output}' is not a value of model '{graph.name}'.")
    return output


def _chosen(graph: Graph, patterns: Sequence[str] | None) -> tuple[str, ...]:
    """Parameters and inputs that match; without patterns the trainable parameters."""
    if patterns is None:
        return trainable_parameters(graph)
    candidates = [entry.name for entry in graph.inputs if entry.dtype.kind == "f"]
    candidates += [name for name, array in graph.constants.items() if array.dtype.kind == "f"]
    chosen: dict[str, None] = {}
    for pattern in patterns:
        matched = [name for name in candidates if fnmatchcase(name, pattern) or name == pattern]
        if not matched:
            raise UnknownNameError(
                f"'{pattern}' fits no floating-point input or weight of model '{graph.name}'; "
                f"there are {', '.join(candidates[:8])}{', …' if len(candidates) > 8 else ''}."
            )
        chosen.update(dict.fromkeys(matched))
    return tuple(chosen)


def _checked_axis(value: str, fact: Fact, class_axis: int) -> int:
    rank = len(fact.shape)
    if not -rank <= class_axis < rank or (rank > 1 and class_axis % rank == 0):
        raise ShapeError(f"class_axis={class_axis} is no axis of '{value}' besides the batch axis.")
    return class_axis % rank


def _extended(graph: Graph, pen: _Pen) -> Graph:
    taken = {LOSS, TARGETS, *pen.facts}.intersection(graph.values())
    if taken:
        raise ModelError(f"the model has values of its own called {', '.join(sorted(taken))}.")
    assert pen.targets is not None  # every loss takes targets
    return Graph(
        nodes=(*graph.nodes, *pen.nodes),
        inputs=(*graph.inputs, pen.targets),
        outputs=(LOSS,),
        constants={**graph.constants, **pen.constants},
        opset=graph.opset,
        name=graph.name,
        domains=graph.domains,
    )


def _written(
    graph: Graph,
    facts: Mapping[str, Fact],
    backward: Backward,
    result: tuple[str, Sides],
    names: Sequence[str],
    stored: Mapping[str, DType],
) -> ModelProto:
    """The joint graph with readable names for what goes in and comes out, in stored types."""
    value, sides = result
    joint = joint_graph(graph, backward)
    cotangent = backward.cotangents[value]
    dtype = facts[value].dtype
    nodes, constants, inputs = list(joint.nodes), dict(joint.constants), list(graph.inputs)
    if value == LOSS:
        constants[cotangent] = np.ones((), dtype)
    else:
        given = _free(COTANGENT, graph)
        stored = {**stored, given: stored[value]} if value in stored else stored
        inputs.append(Input(given, dtype, sides))
        nodes.insert(0, Node("Identity", (given,), (cotangent,), name=f"node_{given}"))
    outputs = [Input(value, dtype, sides)]
    for name in names:
        nodes += _result(name, backward.gradients.get(name))
        declared = next((entry.shape for entry in graph.inputs if entry.name == name), None)
        shape = graph.constants[name].shape if name in graph.constants else declared
        outputs.append(Input(f"{GRADIENT}{name}", facts[name].dtype, shape))
    return _model(replace(joint, nodes=tuple(nodes), constants=constants), inputs, outputs, stored)


def _model(
    joint: Graph, inputs: Sequence[Input], outputs: Sequence[Input], stored: Mapping[str, DType]
) -> ModelProto:
    """What of ``joint`` the outputs need, in float32 between borders of stored types."""
    made = [entry.name for entry in outputs]
    nodes = needed(joint.nodes, made)
    read = {name for node in nodes for name in (*node.inputs, *node.captures)}
    inputs = [entry for entry in inputs if entry.name in read]
    constants = {name: array for name, array in joint.constants.items() if name in read}
    given = (*(entry.name for entry in inputs), *constants)
    return build_model(
        with_borders(
            nodes,
            {name: stored[name] for name in given if name in stored},
            {name: stored[name] for name in made if name in stored},
        ),
        [_in_type(entry, stored) for entry in inputs],
        [_in_type(entry, stored) for entry in outputs],
        in_types(constants, stored),
        joint.opset,
        name=f"gradient of {joint.name}",
        domains=joint.domains,
    )


def _free(name: str, graph: Graph) -> str:
    """``name``, or with a number where the model is a gradient model and has it already."""
    taken, index = set(graph.values()), 1
    while (free := name if index == 1 else f"{name}_{index}") in taken:
        index += 1
    return free


def _in_type(entry: Input, types: Mapping[str, DType]) -> Input:
    return replace(entry, dtype=types.get(entry.name, entry.dtype))


def _result(name: str, gradient: str | None) -> list[Node]:
    """Names a gradient; zeros where the output does not depend on the value."""
    target = f"{GRADIENT}{name}"
    if gradient is not None:
        return [Node("Identity", (gradient,), (target,), name=f"node_{target}")]
    return [Node("Sub", (name, name), (target,), name=f"node_{target}")]
