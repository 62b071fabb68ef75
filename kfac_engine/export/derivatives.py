"""Writes the derivatives of a model with respect to an input as one plain ONNX model.

The derivatives are computed in forward mode (``autodiff.forward_mode``). The result has the nodes
of the model and the nodes of the derivatives, in which each weight is an operand of the operators
that read it in the model. An engine therefore finds the layers of the model, used several times.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import numpy as np

from kfac_engine._types import Array
from kfac_engine.arguments import check_bool, check_list, check_patterns, check_texts
from kfac_engine.autodiff.activity import activity, behind_quantizers
from kfac_engine.autodiff.forward_builder import ForwardBuilder
from kfac_engine.autodiff.forward_mode import Jet, Pairs, push_jets
from kfac_engine.engine.loss_bindings import check_real, real_outputs
from kfac_engine.errors import (
    ExportWarning,
    InputError,
    ModelError,
    ShapeError,
    UnknownNameError,
    UnsupportedError,
    UnsupportedOpError,
    suggestion,
    warn,
)
from kfac_engine.export.gradient_model import declared_shape, free_name, joint_model
from kfac_engine.graph.analysis.declared_constants import declare_untrained
from kfac_engine.graph.analysis.trainable import excluded_reason
from kfac_engine.graph.files import saved_model
from kfac_engine.graph.load import LoadedModel, ModelSource, load_model
from kfac_engine.graph.node_builder import FLOAT_CODES
from kfac_engine.graph.structure import Fact, Graph, Input, Node
from kfac_engine.graph.write import ModelProto
from kfac_engine.runtime.batch_axis import find_batch, find_coupling
from kfac_engine.runtime.lower import lowered, with_taken_branches
from kfac_engine.runtime.sample_run import measured_facts, open_run, sample_batch

DIRECTION = "direction"


@dataclass(frozen=True, slots=True)
class Output:
    """An output of the result, and the value that has its element type in the file."""

    entry: Input
    like: str


def derivatives(  # noqa: PLR0913 (every choice a user has, each with a default)
    model: ModelSource,
    wrt: str | Mapping[str, Sequence[str]],
    outputs: str | Sequence[str] | None = None,
    *,
    jacobian: bool = False,
    laplacian: bool = False,
    hessian: bool = False,
    directional: bool = False,
    selected: Sequence[Sequence[str | int]] = (),
    sample_inputs: Mapping[str, Array] | None = None,
    path: str | Path | None = None,
) -> ModelProto:
    """Return a model that computes derivatives of its outputs with respect to an input.

    The examples are on the first axis of the input x and of each output u. An example has the
    features x₁ … x_d. Derivatives are of each example's outputs with respect to its own features.

    Args:
        model: Path, bytes or ``ModelProto``.
        wrt: Name of the input x, of the shape ``(n, d)``. If an example has several axes, they
            replace d in the shapes below. A mapping such as ``{"x": ("t", "x")}`` gives names to
            the features.
        outputs: Name of an output u, or several; by default all that depend on x.
        jacobian: Whether to add ``jacobian of <u>``, ``(n, …, d)``: ∂u/∂x_i.
        laplacian: Whether to add ``laplacian of <u>``, ``(n, …)``: Σ_i ∂²u/∂x_i².
        hessian: Whether to add ``hessian of <u>``, ``(n, …, d, d)``: ∂²u/∂x_i∂x_j.
        directional: Whether to add an input ``direction``, a vector v for each example in the shape
            of x, and ``first directional of <u>`` and ``second directional of <u>``, ``(n, …)``:
            the derivatives of u(x + s v) with respect to s at s = 0.
        selected: Derivatives by one or two features, which are names or numbers from zero:
            ``[("t",), ("x", "x")]`` adds ``derivative of <u> by t`` and ``derivative of <u> by x,
            x``, ``(n, …)``. Only the directions of these features are computed.
        sample_inputs: A batch that determines shapes, if none can be generated.
        path: Path of a file for the result. Required for more than 2 GB of weights.

    Returns:
        A model with the inputs, outputs and parameters of ``model``, and the outputs above. A
        name that the model already uses is followed by a number.

    Raises:
        InputError: No derivative is chosen, a derivative is of another order, or the input is
            not floating-point.
        ShapeError: The input or an output does not have the examples on its first axis, or the
            number of features is unknown.
        UnknownNameError: The model has no such input or output, or the input no such feature.
        UnsupportedOpError: An operator between the input and an output has no derivative.
        UnsupportedError: The examples depend on each other.
        ModelError: An output does not depend on the input.
    """
    asked_for = [
        check_bool("jacobian", jacobian),
        check_bool("laplacian", laplacian),
        check_bool("hessian", hessian),
        check_bool("directional", directional),
        *check_list("selected", selected, '[("t",), ("x", "x")]'),
    ]
    if not any(asked_for):
        raise InputError(
            "no derivative is chosen; give one or several of: jacobian=True, laplacian=True, "
            "hessian=True, directional=True, selected=[…]."
        )
    check_patterns("outputs", outputs)
    loaded = with_taken_branches(load_model(model), sample_inputs)
    entry, labels = points_input(loaded.graph, wrt)
    x = entry.name
    graph, facts = lowered(loaded.graph, [x], sample_inputs)
    features = feature_sizes(entry, facts[x], sample_inputs)
    names = chosen_outputs(graph, facts, [x], outputs)
    check_smooth(graph, facts, [x], names)
    check_example_axis(graph, facts, [x], names, sample_inputs)
    d = prod(features)
    numbers = numbered_labels(labels, d)
    quantities = [
        *([_Quantity("jacobian of {}", tuple(range(d)), 1)] if jacobian else []),
        *([_Quantity("laplacian of {}", (tuple((i, i) for i in range(d)),))] if laplacian else []),
        *([_hessian(d)] if hessian else []),
        *(_directional(d) if directional else []),
        *(_selected(each, numbers) for each in selected),
    ]
    b = forward_builder(graph, facts, sample_inputs)
    direction = free_name(DIRECTION, graph)
    b.facts[direction] = facts[x]
    directions = {i for quantity in quantities for i in quantity.directions}
    tangents = {i: name for i, name in unit_vectors(b, x, features).items() if i in directions}
    if directional:
        tangents[d] = direction
    sums = tuple(dict.fromkeys(e for q in quantities for e in q.entries if not isinstance(e, int)))
    jets, bent = push_jets(b, {x: Jet(tangents)}, sums, names)
    written = _Written(b, sums, features)
    for name in names:
        for quantity in quantities:
            written.add(name, jets.get(name, Jet()), quantity)
    inputs = [replace(entry, name=direction)] if directional else []
    written_outputs = written.outputs(loaded, names)
    result, constants = derivative_model(loaded, b, inputs, written_outputs, "derivatives")
    notes = kinks(bent) if sums else []
    for note in notes:
        warn(note, ExportWarning)
    result.doc_string = "; ".join(notes)
    return saved_model(result, constants, path)


def forward_builder(
    graph: Graph, facts: Mapping[str, Fact], sample_inputs: Mapping[str, Array] | None
) -> ForwardBuilder:
    """Return a builder of derivatives, which runs the graph on the sample inputs."""

    def sample(values: Iterable[str]) -> Mapping[str, Array]:
        feeds = sample_batch(graph, facts, sample_inputs)
        return open_run(graph, facts).values(feeds, list(values))

    return ForwardBuilder(graph, facts, measured_facts, sample)


def derivative_model(
    loaded: LoadedModel,
    b: ForwardBuilder,
    inputs: Sequence[Input],
    outputs: Sequence[Output],
    name: str,
) -> tuple[ModelProto, dict[str, Array]]:
    """Return the model with further inputs and with these outputs, and its constants.

    Its name is ``name`` of the name of the model.
    """
    stored = loaded.stored
    types = {o.entry.name: stored[o.like] for o in outputs if o.like in stored}
    types |= {entry.name: entry.stored for entry in inputs if entry.stored is not None}
    joint = replace(
        b.graph,
        nodes=(*b.graph.nodes, *b.nodes),
        constants={**b.graph.constants, **b.constants},
        name=f"{name} of {b.graph.name}",
    )
    result, constants = joint_model(
        joint, [*b.graph.inputs, *inputs], [o.entry for o in outputs], {**stored, **types}
    )
    # A running mean, say, has uses in derivatives that do not tell it from a weight.
    old = loaded.graph
    untrained = {
        name: array
        for name, array in constants.items()
        if array.dtype.name in FLOAT_CODES
        and (name not in old.constants or excluded_reason(old, name) is not None)
    }
    declare_untrained(result, untrained)
    return result, constants


# -- what is asked for -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Quantity:
    """An output for each differentiated value."""

    label: str  # name of the output, with ``{}`` for that of the value
    # Its entries: the direction of a first derivative, or the pairs of directions whose second
    # derivatives are summed. Directions are features by number, and then the input.
    entries: tuple[int | Pairs, ...]
    axes: int = 0  # how often the axes of the features follow those of the value

    @property
    def directions(self) -> frozenset[int]:
        """The directions of all entries."""
        pairs = (((e, e),) if isinstance(e, int) else e for e in self.entries)
        return frozenset(i for entry in pairs for pair in entry for i in pair)


def _hessian(d: int) -> _Quantity:
    entries = tuple(((min(i, j), max(i, j)),) for i in range(d) for j in range(d))
    return _Quantity("hessian of {}", entries, 2)


def _directional(d: int) -> tuple[_Quantity, _Quantity]:
    return (
        _Quantity("first directional of {}", (d,)),
        _Quantity("second directional of {}", (((d, d),),)),
    )


def numbered_labels(labels: Sequence[str], d: int) -> dict[str, int]:
    """Return the numbers of the features, by name or by the number as text."""
    if labels and not len(labels) == len(set(labels)) == d:
        raise ShapeError(
            f"wrt (--features) names the features {', '.join(labels)}, but needs {d} different "
            f"names, one for each feature of an example."
        )
    return {name: i for i, name in enumerate(labels or map(str, range(d)))}


def _selected(features: Sequence[str | int], numbers: Mapping[str, int]) -> _Quantity:
    if isinstance(features, str) or not isinstance(features, Sequence):
        raise InputError(
            f"selected has {features!r:.80}, which is not a tuple of features; pass ('t',) for a "
            f"first derivative or ('x', 'x') for a second derivative."
        )
    places = feature_places(features, numbers, "selected")
    label = "derivative of {} by " + ", ".join(list(numbers)[i] for i in places)
    return _Quantity(label, (places[0] if len(places) == 1 else ((min(places), max(places)),),))


def feature_places(
    features: Sequence[object], numbers: Mapping[str, int], what: str
) -> tuple[int, ...]:
    """Return the numbers of the one or two features of a derivative.

    ``features`` are names or numbers. ``what`` begins a message.
    """
    known: dict[object, int] = {i: i for i in numbers.values()}
    known.update(numbers.items())
    places = []
    for feature in features:
        if not isinstance(feature, str | int) or isinstance(feature, bool) or feature not in known:
            raise UnknownNameError(
                f"{what} names the feature {feature!r:.80}{suggestion(feature, numbers)}; the "
                f"features are: {', '.join(numbers)}."
            )
        places.append(known[feature])
    if len(places) not in (1, 2):
        raise InputError(
            f"{what} has a derivative by {len(places)} features; pass one or two for each."
        )
    return tuple(places)


class _Written:
    """Writes the outputs of the derivatives; ``sums`` are the second derivatives of the jets."""

    def __init__(
        self, builder: ForwardBuilder, sums: Sequence[Pairs], features: tuple[int, ...]
    ) -> None:
        self._b, self._sums, self._features = builder, sums, features
        # The name of each derivative, with its value and the number of times that the axes of the
        # features follow those of the value.
        self._results: dict[str, tuple[str, int]] = {}

    def outputs(self, loaded: LoadedModel, names: Sequence[str]) -> list[Output]:
        """Return the outputs of the model, ``names`` among them, and then their derivatives."""
        facts, declared = self._b.facts, loaded.output_shapes
        outputs = [
            Output(Input(name, facts[name].dtype, declared.get(name)), name)
            for name in dict.fromkeys((*self._b.graph.outputs, *names))
        ]
        for name, (u, axes) in self._results.items():
            shape = (*declared_shape(loaded, u, facts[u]), *self._features * axes)
            outputs.append(Output(Input(name, facts[u].dtype, shape), u))
        return outputs

    def add(self, u: str, jet: Jet, quantity: _Quantity) -> None:
        """Write a derivative of the value ``u``."""
        b = self._b
        name = free_name(quantity.label.format(u), b.graph)
        values = [self._entry(jet, entry) or b.zeros(u) for entry in quantity.entries]
        if not quantity.axes:
            b.op("Identity", values[0], result=name)
        else:
            last, sizes = b.constant([-1]), b.constant(self._features * quantity.axes)
            stacked = b.op("Concat", *(b.op("Unsqueeze", v, last) for v in values), axis=-1)
            shape = b.op("Concat", b.op("Shape", u), sizes, axis=0)
            b.op("Reshape", stacked, shape, result=name)
        self._results[name] = u, quantity.axes

    def _entry(self, jet: Jet, entry: int | Pairs) -> str | None:
        if isinstance(entry, int):
            return jet.tangents.get(entry)
        return jet.seconds.get(self._sums.index(entry))


def unit_vectors(b: ForwardBuilder, wrt: str, features: tuple[int, ...]) -> dict[int, str]:
    """Write the unit vectors of the features, each in the shape of the input."""
    # They are whole numbers in the file, so that no engine takes them for weights.
    d = prod(features)
    whole = b.constant(np.eye(d, dtype=np.int8).reshape(d, *features))
    rows = b.op("Cast", whole, to=FLOAT_CODES[b.facts[wrt].dtype.name])
    each = b.split(rows, [1] * d, axis=0)
    shape = b.op("Shape", wrt)
    return {i: b.known_as(b.op("Expand", row, shape), wrt) for i, row in enumerate(each)}


# -- checks ----------------------------------------------------------------------------------------


def points_input(graph: Graph, wrt: object) -> tuple[Input, tuple[str, ...]]:
    """Return the input, and the names of its features if the user gives them."""
    labels: tuple[str, ...] = ()
    if isinstance(wrt, Mapping) and len(wrt) == 1:
        (wrt, features), *_ = wrt.items()
        labels = tuple(check_texts("wrt", features, "{'x': ('t', 'x')}"))
    known = {entry.name: entry for entry in graph.inputs}
    if not isinstance(wrt, str):
        raise InputError(
            f"wrt is {wrt!r:.80}, not the name of an input; pass wrt='x' or, with names of the "
            f"features, wrt={{'x': ('t', 'x')}}."
        )
    if wrt not in known:
        what = "a parameter" if wrt in graph.constants else "no input"
        raise UnknownNameError(
            f"wrt='{wrt}'{suggestion(wrt, known)} is {what} of model '{graph.name}'; its inputs "
            f"are: {', '.join(known)}."
        )
    if known[wrt].dtype.name not in FLOAT_CODES:
        raise InputError(
            f"the input '{wrt}' has whole numbers ({known[wrt].dtype}), which have no derivative; "
            f"name an input of real numbers."
        )
    return known[wrt], labels


def feature_sizes(
    entry: Input, fact: Fact, sample_inputs: Mapping[str, Array] | None
) -> tuple[int, ...]:
    """Return the sizes of the axes of an example."""
    if len(fact.shape) < 2:
        raise ShapeError(
            f"the input '{entry.name}' has {len(fact.shape)} axes, but needs the shape (n, d): "
            f"examples and their features; add an axis to the model's input."
        )
    declared = entry.shape or (None,) * len(fact.shape)
    for axis, size in enumerate(declared[1:], start=1):
        if not isinstance(size, int) and sample_inputs is None:
            raise ShapeError(
                f"axis {axis} of the input '{entry.name}' has no fixed size in the file, but the "
                f"result has one derivative for each feature; pass sample_inputs (--inputs) with "
                f"the size of the data."
            )
    return fact.shape[1:]


def chosen_outputs(
    graph: Graph, facts: Mapping[str, Fact], wrt: Sequence[str], outputs: str | Sequence[str] | None
) -> tuple[str, ...]:
    """Return the values to differentiate, which depend on one of the inputs ``wrt``."""
    active, inputs = activity(graph, facts, wrt).active, "' or '".join(wrt)
    if outputs is None:
        check_real(graph, facts, graph.outputs)
        chosen = tuple(name for name in real_outputs(graph, facts) if name in active)
        if not chosen:
            raise ModelError(
                f"no output of model '{graph.name}' has a derivative with respect to '{inputs}'; "
                f"name an input that an output depends on."
            )
        return chosen
    chosen = tuple(dict.fromkeys([outputs] if isinstance(outputs, str) else outputs))
    if not chosen:
        raise InputError("outputs is empty; name an output, or leave outputs out.")
    known = set(graph.values())
    for name in chosen:
        if name not in known:
            raise UnknownNameError(
                f"'{name}'{suggestion(name, known)} is not a value of model '{graph.name}'."
            )
        check_real(graph, facts, [name])
        if name not in active:
            raise ModelError(
                f"'{name}' does not depend on '{inputs}', or depends only through steps, so it has "
                f"no derivative; name another output or input."
            )
    return chosen


def check_example_axis(
    graph: Graph,
    facts: Mapping[str, Fact],
    wrt: Sequence[str],
    names: Sequence[str],
    sample_inputs: Mapping[str, Array] | None,
) -> dict[str, int]:
    """Return the axis of the examples in each input that has one.

    An error is raised unless each example's outputs depend on its own features only.
    """
    batch = find_batch(graph, facts, names, sample_inputs)
    for x in wrt:
        if batch.inputs.get(x) != 0:
            raise ShapeError(
                f"the input '{x}' does not have the examples on its first axis; transpose it in "
                f"the model."
            )
    for name in names:
        place = batch.places.get(name)
        if place is None or not place.comes_first:
            raise ShapeError(
                f"'{name}' of the shape {facts[name].shape} does not have the examples alone on "
                f"its first axis, so that it has no derivative for each example; name another "
                f"value with outputs=…."
            )
    if coupling := find_coupling(graph, facts, names, batch, sample_inputs):
        raise UnsupportedError(
            f"the derivatives are of each example's outputs with respect to its own features, but "
            f"{coupling} lets examples depend on each other; export the model in inference form."
        )
    return dict(batch.inputs)


def check_smooth(
    graph: Graph, facts: Mapping[str, Fact], wrt: Sequence[str], names: Sequence[str]
) -> None:
    """Refuse values behind a quantizer."""
    for node in behind_quantizers(graph, facts, names, wrt).values():
        raise UnsupportedOpError(
            f"{node.qualified_op} at node '{node.name}' rounds to numbers of a few bits, so that "
            f"its derivative is zero or does not exist; use the model as it was before "
            f"quantization."
        )


def kinks(bent: Sequence[Node]) -> list[str]:
    """Return a note on nodes whose second derivative is zero almost everywhere."""
    if not bent:
        return []
    more = f" and {len(bent) - 1} more" if len(bent) > 1 else ""
    return [
        f"the second derivative of {bent[0].op} at node '{bent[0].name}'{more} is zero almost "
        f"everywhere, and second derivatives of the outputs lack its kinks; use a smooth "
        f"activation function, such as Tanh, Softplus or Gelu"
    ]
