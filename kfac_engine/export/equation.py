"""Writes the residuals of an equation at sets of points as one plain ONNX model.

The network is applied to each set of points, with the derivatives that the residual of the set
asks for (``autodiff.forward_mode``). The residual is a Python function of arrays, which is recorded
(``recording``). All sets read the same weights, each as an operand of the operator that reads it in
the network, so that an engine finds the layers of the network, used several times.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from kfac_engine._types import Array
from kfac_engine.arguments import check_patterns
from kfac_engine.autodiff.differentiate import needed
from kfac_engine.autodiff.forward_builder import ForwardBuilder
from kfac_engine.autodiff.forward_mode import Jet, Pairs, push_jets
from kfac_engine.errors import ExportWarning, InputError, ShapeError, UnsupportedError, warn
from kfac_engine.export.derivatives import (
    Output,
    check_example_axis,
    check_smooth,
    chosen_outputs,
    derivative_model,
    feature_places,
    feature_sizes,
    forward_builder,
    kinks,
    numbered_labels,
    points_input,
    unit_vectors,
)
from kfac_engine.graph.analysis.declared_constants import declare_residuals
from kfac_engine.graph.files import saved_model
from kfac_engine.graph.load import LoadedModel, ModelSource, load_model
from kfac_engine.graph.node_builder import FLOAT_CODES
from kfac_engine.graph.passes.bodies import with_new_names
from kfac_engine.graph.structure import Fact, Graph, Input, Node
from kfac_engine.graph.write import ModelProto
from kfac_engine.recording.operations import new_tape
from kfac_engine.recording.recorded import Recorded, Size, Symbol, Tape, size_of
from kfac_engine.runtime.lower import lowered, with_taken_branches

Residual: TypeAlias = Callable[..., Any]


def equation(
    model: ModelSource,
    residuals: Mapping[str, Residual],
    wrt: str | Mapping[str, Sequence[str]] | None = None,
    outputs: str | Sequence[str] | None = None,
    *,
    sample_inputs: Mapping[str, Array] | None = None,
    path: str | Path | None = None,
) -> ModelProto:
    """Return a model that computes the residuals of an equation at sets of points.

    A residual is zero where the equation holds. It is a function of the network at the points of a
    set, written with NumPy: ``lambda u: u.d("t") - u.d("x", "x")``. The function runs once, and its
    operations become nodes of the file.

    Args:
        model: Path, bytes or ``ModelProto`` of the network.
        residuals: The residual of each set of points, by the name of the set. Its argument u has
            the points ``u.x``, ``(n, d)``, the network's output ``u.value``, ``(n, …)``, and in the
            same shape the derivatives ``u.d("t")`` and ``u.d("x", "x")`` by one and two features
            and ``u.laplacian()``, the sum of the second derivatives by all features or by those
            that it names. With several outputs, there is an argument for each. The residual is an
            array with the points on its first axis, ``(n, …)``.
        wrt: The input of points ``(n, d)``, if the network has several inputs. A mapping such as
            ``{"x": ("t", "x")}`` gives names to the features of a point; without names, they are
            numbers from zero. A mapping with several inputs takes the features of all of them.
        outputs: Name of an output of the network, or several; by default all that depend on the
            points.
        sample_inputs: A batch of the network that determines shapes, if none can be generated.
        path: Path of a file for the result. Required for more than 2 GB of weights.

    Returns:
        A model with the parameters of the network. For each set ``s``, it has the inputs of the
        network under the names ``s <input>``, and an output ``s``: the residuals. The sets differ
        in their numbers of points. Inputs without examples, such as a coefficient, keep their name
        and have one value for all sets.

    Raises:
        InputError: There is no set or no function, a derivative is of another order, a residual is
            not an array, or the input is not floating-point.
        ShapeError: The points are not on the first axis of an input, an output or a residual.
        UnknownNameError: The model has no such input or output, or the points no such feature.
        UnsupportedOpError: An operator between the points and an output has no derivative.
        UnsupportedError: A residual calls a function that a file cannot compute, a second
            derivative is zero almost everywhere, or points depend on each other.
        ModelError: An output does not depend on the points.
    """
    check_patterns("outputs", outputs)
    _check_residuals(residuals)
    loaded = with_taken_branches(load_model(model), sample_inputs)
    entries = _entries(loaded.graph, wrt)
    names = [entry.name for entry, _ in entries]
    graph, facts = lowered(loaded.graph, names, sample_inputs)
    sizes = [feature_sizes(entry, facts[entry.name], sample_inputs) for entry, _ in entries]
    fields = chosen_outputs(graph, facts, names, outputs)
    check_smooth(graph, facts, names, fields)
    axes = check_example_axis(graph, facts, names, fields, sample_inputs)
    numbers = _numbers(entries, sizes)
    copies = [_copy(graph, name, axes) for name in residuals]
    joint, joint_facts = _joined(graph, facts, copies, axes)
    b = forward_builder(joint, joint_facts, _of_copies(sample_inputs, copies))
    written = []
    for copy, residual in zip(copies, residuals.values(), strict=True):
        network = _Network(b, copy, dict(zip(names, sizes, strict=True)), fields, numbers)
        written.append(_Residual.of(network, residual))
    for recorded in written:
        b.nodes += recorded.nodes
        b.constants |= recorded.constants
    notes = kinks([node for recorded in written for node in recorded.bent])
    for note in notes:
        warn(note, ExportWarning)
    result, constants = derivative_model(
        _renamed_types(loaded, copies), b, [], [recorded.output for recorded in written], "equation"
    )
    declare_residuals(result)
    result.doc_string = "; ".join(notes)
    return saved_model(result, constants, path)


class Field:
    """An output u of the network at a set of n points, as a residual reads it.

    Its arrays have the points on the first axis, and are written to the file by NumPy's functions.

    Attributes:
        x: The points, ``(n, d)``. If ``wrt`` names several inputs, their features are joined.
        value: The values of the output, ``(n, …)``.
    """

    def __init__(self, network: "_Network", name: str) -> None:
        self._network, self._name = network, name
        self.x: Symbol = network.points
        self.value: Symbol = network.value(name)

    def d(self, *features: str | int) -> Symbol:
        """Return the derivative by one feature, or the second derivative by two, ``(n, …)``.

        Args:
            *features: Names of features, or their numbers from zero: ``u.d("t")``,
                ``u.d("x", "x")``.

        Returns:
            The derivative at each point.

        Raises:
            UnknownNameError: The points have no such feature.
            InputError: The derivative is of another order.
        """
        places = feature_places(features, self._network.numbers, self._network.what)
        if len(places) == 1:
            return self._network.derivative(self._name, places[0])
        return self._network.derivative(self._name, ((min(places), max(places)),))

    def laplacian(self, *features: str | int) -> Symbol:
        """Return the Laplacian, the sum of the second derivatives by features, ``(n, …)``.

        Args:
            *features: Names of features, or their numbers; all features by default.

        Returns:
            The Laplacian at each point.

        Raises:
            UnknownNameError: The points have no such feature.
        """
        numbers, what = self._network.numbers, self._network.what
        chosen = features or tuple(numbers)
        places = dict.fromkeys(i for name in chosen for i in feature_places([name], numbers, what))
        return self._network.derivative(self._name, tuple((i, i) for i in places))


# -- a residual ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Copy:
    """The network at one set of points: the names of its values there, by name in the network."""

    set: str
    names: Mapping[str, str]


class _Network:
    """Records the values and derivatives of the network that a residual reads.

    Attributes:
        numbers: Numbers of the features, by name or by the number as text.
        what: Begins the messages about a residual.
        points: The points as a recorded array.
        derivatives: The derivatives that were asked for, with the recorded array of each: the
            output of the network, and a feature or the pairs of features whose second derivatives
            are added.
    """

    def __init__(
        self,
        builder: ForwardBuilder,
        copy: _Copy,
        sizes: Mapping[str, tuple[int, ...]],
        outputs: Sequence[str],
        numbers: Mapping[str, int],
    ) -> None:
        self.builder, self.copy, self.sizes, self.outputs = builder, copy, sizes, outputs
        self.numbers, self.what = numbers, f"the residual of '{copy.set}'"
        self.tape: Tape = new_tape(
            f"{copy.set}/residual/", builder.fact(self._named(outputs[0])).dtype
        )
        first = self._named(next(iter(sizes)))
        self.count: Size = size_of(self.tape, first, 0)
        self.read: dict[str, Symbol] = {}
        self.derivatives: dict[tuple[str, int | Pairs], Symbol] = {}
        parts = [self._array(self._named(x), size) for x, size in sizes.items()]
        self.points: Symbol = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    def _named(self, name: str) -> str:
        return self.copy.names.get(name, name)

    def _array(self, name: str, shape: tuple[int, ...]) -> Symbol:
        return Recorded(self.tape, name, (self.count, *shape), self.builder.fact(name).dtype)

    def value(self, output: str) -> Symbol:
        """Return the values of an output."""
        name = self._named(output)
        self.read[name] = self._array(name, self.builder.fact(name).shape[1:])
        return self.read[name]

    def derivative(self, output: str, entry: int | Pairs) -> Symbol:
        """Return a derivative of an output; its nodes are written later."""
        key = output, entry
        if key not in self.derivatives:
            name = f"{self.tape.graph.prefix}derivative {len(self.derivatives)} of {output}"
            value = self.read[self._named(output)]
            self.derivatives[key] = Recorded(self.tape, name, value.shape, value.dtype)
            self.read[name] = self.derivatives[key]
        return self.derivatives[key]


@dataclass(frozen=True, slots=True)
class _Residual:
    """The nodes of a residual."""

    nodes: tuple[Node, ...]  # the nodes that compute it from values and derivatives
    constants: Mapping[str, Array]  # constants of these nodes
    output: Output  # the output of the file
    bent: tuple[Node, ...]  # nodes of the network whose second derivative is zero almost everywhere

    @classmethod
    def of(cls, network: _Network, residual: Residual) -> "_Residual":
        """Record a residual, and write the derivatives that it reads."""
        name, tape = network.copy.set, network.tape
        fields = [Field(network, output) for output in network.outputs]
        _check_arguments(network, residual)
        try:
            result = residual(*fields)
        except UnsupportedError as error:
            raise UnsupportedError(
                f"{network.what}: {error} Write it with NumPy's functions of arrays, without "
                f"branches on their entries."
            ) from error
        _check_result(network, result)
        nodes = needed(tape.graph.nodes, [result.name])
        read = {result.name}.union(*(node.inputs for node in nodes))
        if read.isdisjoint(network.read):
            raise InputError(
                f"{network.what} does not depend on the network; return a function of u.value, "
                f"u.d(…) or u.laplacian()."
            )
        bent = _write_derivatives(network, read)
        last = Node("Identity", (result.name,), (name,), name=f"{tape.graph.prefix}node of {name}")
        shape = (f"{name} points", *result.shape[1:])
        entry = Output(Input(name, result.dtype, shape), network.copy.names[network.outputs[0]])
        return cls((*nodes, last), tape.graph.constants, entry, bent)


def _check_arguments(network: _Network, residual: Residual) -> None:
    try:
        signature(residual).bind(*network.outputs)
    except TypeError as error:
        raise InputError(
            f"{network.what} is called with an argument for each output of the network, "
            f"{', '.join(network.outputs)}, but does not take them: {error}."
        ) from None
    except ValueError:  # a function of a compiled module may have no signature
        return


def _check_result(network: _Network, result: object) -> None:
    advice = "return an array with a number, or several, for each point"
    if not isinstance(result, Recorded):
        raise InputError(
            f"{network.what} is {type(result).__name__}, not an array of the network; {advice}, "
            f"and join several residuals with np.concatenate([…], axis=1)."
        )
    if result.dtype.name not in FLOAT_CODES:
        raise InputError(f"{network.what} has entries of {result.dtype}; {advice}.")
    sized = [isinstance(size, Size) for size in result.shape]
    if not result.shape or result.shape[0] != network.count or any(sized[1:]):
        value = next(iter(network.read.values())).shape
        raise ShapeError(
            f"{network.what} has the shape {_spelled(result.shape)} for n points, but needs the "
            f"points on its first axis only; the values of the network are {_spelled(value)}, and "
            f"a feature of the points is u.x[:, :1], (n, 1)."
        )


def _spelled(shape: tuple[Any, ...]) -> str:
    return f"({', '.join(map(str, shape))}{',' * (len(shape) == 1)})"


def _write_derivatives(network: _Network, read: set[str]) -> tuple[Node, ...]:
    """Write the derivatives that a residual reads; return nodes with kinks."""
    b, copy = network.builder, network.copy
    wanted = {key: array for key, array in network.derivatives.items() if array.name in read}
    sums = tuple(dict.fromkeys(entry for _, entry in wanted if not isinstance(entry, int)))
    firsts = {entry for _, entry in wanted if isinstance(entry, int)}
    directions = firsts.union(i for pairs in sums for pair in pairs for i in pair)
    jets, start = {}, 0
    for x, size in network.sizes.items():
        point = copy.names[x]
        rows = {start + i: name for i, name in unit_vectors(b, point, size).items()}
        jets[point] = Jet({i: name for i, name in rows.items() if i in directions})
        start += prod(size)
    known, bent = push_jets(b, jets, sums, [copy.names[output] for output in network.outputs])
    for (output, entry), array in wanted.items():
        u = copy.names[output]
        jet = known.get(u, Jet())
        if isinstance(entry, int):
            name = jet.tangents.get(entry)
        else:
            name = jet.seconds.get(sums.index(entry))
            if name is None and bent:
                original = bent[0].name.removeprefix(f"{copy.set}/")
                raise UnsupportedError(
                    f"{network.what} reads a second derivative that is zero almost everywhere, "
                    f"because of {bent[0].op} at node '{original}'; give the "
                    f"network a smooth activation function, such as Tanh, Softplus, Gelu or Sin."
                )
        b.op("Identity", name or b.zeros(u), result=array.name)
    return bent if sums else ()


# -- the network at each set -----------------------------------------------------------------------


def _check_residuals(residuals: object) -> None:
    like = '{"interior": lambda u: u.laplacian(), "boundary": lambda u: u.value}'
    if not isinstance(residuals, Mapping) or not residuals:
        raise InputError(
            f"residuals must be a dictionary with a function for each set of points, such as "
            f"{like}, got {residuals!r:.80}."
        )
    for name, function in residuals.items():
        if not isinstance(name, str) or not name:
            raise InputError(f"residuals has {name!r:.80} in place of the name of a set of points.")
        if not callable(function):
            raise InputError(
                f"the residual of '{name}' is {function!r:.80}, not a function; see {like}."
            )


def _entries(graph: Graph, wrt: object) -> list[tuple[Input, tuple[str, ...]]]:
    """Return the inputs of points, with the names of their features if the user gives them."""
    if wrt is None:
        real = [entry.name for entry in graph.inputs if entry.dtype.name in FLOAT_CODES]
        if len(real) > 1:
            raise InputError(
                f"the model has the inputs {', '.join(real)}; name the one with the points, such "
                f"as wrt='{real[0]}'."
            )
        wrt = next(iter(real), graph.inputs[0].name if graph.inputs else "")
    if isinstance(wrt, Mapping) and len(wrt) > 1:
        return [points_input(graph, {name: labels}) for name, labels in wrt.items()]
    return [points_input(graph, wrt)]


def _numbers(
    entries: Sequence[tuple[Input, tuple[str, ...]]], sizes: Sequence[tuple[int, ...]]
) -> dict[str, int]:
    """Return the numbers of the features of all inputs of points, by name."""
    if len(entries) > 1 and any(len(size) > 1 for size in sizes):
        raise ShapeError("several inputs of points need the shape (n, d) each.")
    if len(entries) == 1:
        return numbered_labels(entries[0][1], prod(sizes[0]))
    names: list[str] = []
    for (_, labels), size in zip(entries, sizes, strict=True):
        numbers = numbered_labels(labels, prod(size))
        names += numbers if labels else [str(len(names) + i) for i in numbers.values()]
    return numbered_labels(names, len(names))


def _copy(graph: Graph, name: str, axes: Mapping[str, int]) -> _Copy:
    """Return new names for the network's values at the set of points ``name``.

    Inputs without an example axis in ``axes`` keep their names.
    """
    names = {x: f"{name} {x}" for x in axes}
    results = (value for node in graph.nodes for value in node.outputs if value)
    names |= {value: f"{name}/{value}" for value in results}
    for new in (name, *names.values()):
        if new in graph.constants or any(entry.name == new for entry in graph.inputs):
            raise InputError(
                f"the set of points '{name}' has the name of a value of the model; rename it."
            )
    return _Copy(name, names)


def _joined(
    graph: Graph, facts: Mapping[str, Fact], copies: Sequence[_Copy], axes: Mapping[str, int]
) -> tuple[Graph, dict[str, Fact]]:
    """Return the graph of all copies of a network, which share its constants."""
    nodes = tuple(
        replace(with_new_names(node, copy.names), name=f"{copy.set}/{node.name}")
        for copy in copies
        for node in graph.nodes
    )
    inputs = {entry.name: entry for copy in copies for entry in _inputs(graph, copy, axes)}
    outputs = tuple(
        copy.names[name] for copy in copies for name in graph.outputs if name in copy.names
    )
    joint = replace(graph, nodes=nodes, inputs=tuple(inputs.values()), outputs=outputs)
    joint_facts = {
        copy.names.get(name, name): fact for copy in copies for name, fact in facts.items()
    }
    return joint, joint_facts


def _inputs(graph: Graph, copy: _Copy, axes: Mapping[str, int]) -> list[Input]:
    """Return the inputs of a copy; the axis of the points has a symbol of its own."""
    inputs = []
    for entry in graph.inputs:
        if entry.name in axes and entry.shape is not None:
            shape, axis = entry.shape, axes[entry.name]
            shape = (*shape[:axis], f"{copy.set} points", *shape[axis + 1 :])
            entry = replace(entry, name=copy.names[entry.name], shape=shape)
        inputs.append(entry)
    return inputs


def _of_copies(
    inputs: Mapping[str, Array] | None, copies: Sequence[_Copy]
) -> dict[str, Array] | None:
    if inputs is None:
        return None
    return {copy.names.get(name, name): array for copy in copies for name, array in inputs.items()}


def _renamed_types(loaded: LoadedModel, copies: Sequence[_Copy]) -> LoadedModel:
    """Return the model with the element types in the file of all copies of its values."""
    stored = {
        copy.names.get(name, name): dtype
        for copy in copies
        for name, dtype in loaded.stored.items()
    }
    return replace(loaded, stored=stored)
