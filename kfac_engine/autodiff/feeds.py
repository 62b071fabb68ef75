"""What is fed to a model: the user's inputs, checked, and made-up ones for a sample run."""

from collections.abc import Iterator, Mapping, Sequence
from math import prod

import numpy as np

from kfac_engine._types import Array
from kfac_engine.autodiff.examples import first_examples
from kfac_engine.autodiff.runtime import Session
from kfac_engine.backend.namespace import array_module, as_array
from kfac_engine.backend.numpy_sums import all_finite
from kfac_engine.backend.place import HOST, Place
from kfac_engine.errors import (
    BackendError,
    InputError,
    ModelError,
    NonFiniteError,
    ShapeError,
    UnknownNameError,
)
from kfac_engine.graph.compact import compact_model
from kfac_engine.graph.structure import Fact, Graph, Input, Node
from kfac_engine.graph.widen import widened

# Sizes tried for open axes in a sample run, as (first axis, other axes). The first axis is
# the batch more often than not, and a batch of two keeps it apart from axes of one; other axes
# must be long enough for pooling and short enough for position tables. A batch of one comes last:
# some exporters bake it into Reshape targets.
_TRIED_SIZES = ((2, 8), (2, 32), (2, 224), (1, 8), (1, 32), (1, 224))
_MOST_ENTRIES = 2**31  # of an input that is made up


def check_inputs(graph: Graph, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """The inputs as arrays that fit the model's declaration.

    Args:
        graph: The model.
        inputs: Input name to array.

    Returns:
        One array for each declared input.

    Raises:
        InputError: An input is missing or of the wrong element type.
        UnknownNameError: A name is not an input of the model.
        ShapeError: An input does not fit its declared shape.
        NonFiniteError: An input holds NaN or infinity.
    """
    declared = ", ".join(f"'{entry.name}'" for entry in graph.inputs)
    if not isinstance(inputs, Mapping):
        raise InputError(
            f"inputs are given by name, as {{name: array}}, not as {type(inputs).__name__}; "
            f"the model needs: {declared}."
        )
    for name in inputs:
        if name in graph.constants:
            raise UnknownNameError(
                f"'{name}' is a constant of the model, whether or not its file lists it among the "
                f"inputs; a trainable one is changed with set_parameters. Inputs are: {declared}."
            )
        if name not in {entry.name for entry in graph.inputs}:
            raise UnknownNameError(f"the model has no input '{name}'; its inputs are: {declared}.")
    symbols: dict[str, tuple[int, str]] = {}
    checked = {}
    for entry in graph.inputs:
        if entry.name not in inputs:
            raise InputError(f"input '{entry.name}' is missing; the model needs: {declared}.")
        checked[entry.name] = _check_array(entry, inputs[entry.name])
        _check_symbols(entry, checked[entry.name].shape, symbols)
    return checked


def check_parameters(
    model: str, parameters: Mapping[str, Array], values: Mapping[str, Array], place: Place = HOST
) -> dict[str, Array]:
    """New values of parameters, as arrays that fit.

    Args:
        model: Name of the model, for messages.
        parameters: Parameter name to current value.
        values: Parameter name to new value.
        place: Where parameters lie.

    Returns:
        Parameter name to new value: copies in the parameter's element type.

    Raises:
        UnknownNameError: A name is not a trainable parameter.
        ShapeError: A value has another shape than the parameter.
        NonFiniteError: A value holds NaN or infinity.
    """
    checked = {}
    for name, value in values.items():
        if name not in parameters:
            raise UnknownNameError(
                f"'{name}' is not a trainable parameter of model '{model}'; they are: "
                f"{', '.join(parameters)}."
            )
        old = parameters[name]
        array = place.own(value).astype(old.dtype)
        if array.shape != old.shape:
            raise ShapeError(f"parameter '{name}' has shape {old.shape}, got {array.shape}.")
        checked[name] = array
    for name, finite in zip(checked, place.finite(list(checked.values())), strict=True):
        if not finite:
            raise NonFiniteError(f"the new value of parameter '{name}' holds NaN or infinity.")
    return checked


class SampleRun:
    """A session that gives every value of a graph, for a few runs on small batches.

    Args:
        graph: The model.
        declared: Whether inputs must have the sizes that the model declares.

    Raises:
        BackendError: ONNX Runtime refuses the graph.
    """

    def __init__(self, graph: Graph, *, declared: bool = True) -> None:
        inputs = [Input(e.name, e.dtype, e.shape if declared else None) for e in graph.inputs]
        computed = tuple(name for node in graph.nodes for name in node.outputs if name)
        model = compact_model(
            graph.nodes,
            inputs,
            computed,
            graph.constants,
            graph.opset,
            name=graph.name,
            domains=graph.domains,
            once=True,
        )
        what = f"a sample run of '{graph.name}'"
        self._session = Session(model, threads=0, optimize=False, once=True, what=what)
        self._computed = tuple(name for name in computed if name in self._session.output_dtypes)

    def values(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Inputs and results by name, without constants, sequences and optional values.

        Args:
            feeds: One array for each input.

        Returns:
            Name to array.

        Raises:
            BackendError: An operator failed: the sizes of the feeds do not fit.
        """
        return dict(feeds) | self._session.run(self._computed, feeds)


def sample_facts(graph: Graph, inputs: Mapping[str, Array] | None = None) -> dict[str, Fact]:
    """Element type and shape of every value, from one small run of the model.

    Args:
        graph: The model.
        inputs: A real batch to run on, or its first examples where the declaration tells them. An
            open axis of size one is doubled, to keep it apart from axes that are always one.
            Inputs are made up from their declared shapes when left out.

    Returns:
        Value name to fact; sequences and optional values have none.

    Raises:
        ModelError: The model runs on none of the inputs that were made up.
    """
    facts = {name: Fact(array.dtype, array.shape) for name, array in graph.constants.items()}
    run = SampleRun(graph)
    failures = []
    for feeds in _sample_feeds(graph, inputs):
        try:
            values = run.values(feeds)
        except BackendError as failure:
            failures.append(f"{failure}")
            continue
        return facts | {name: Fact(array.dtype, array.shape) for name, array in values.items()}
    raise ModelError(
        f"the model could not be run on "
        f"{'made-up inputs; pass sample_inputs, a real batch' if inputs is None else 'the batch'}. "
        f"{failures[0]}"
    )


def measured_facts(graph: Graph, feeds: Mapping[str, Array]) -> dict[str, Fact]:
    """Element type and shape of every value on a given batch; the values themselves are let go.

    Args:
        graph: A graph of any size.
        feeds: All its inputs, and constants that have another value.

    Returns:
        Value name to fact.
    """
    facts = {name: Fact(array.dtype, array.shape) for name, array in graph.constants.items()}
    facts |= {name: Fact(array.dtype, array.shape) for name, array in feeds.items()}
    computed = tuple(name for node in graph.nodes for name in node.outputs if name)
    shapes = {f"shape of {name}": name for name in computed}
    measures = tuple(Node("Shape", (name,), (shape,)) for shape, name in shapes.items())

    def session(nodes: Sequence[Node], outputs: Sequence[str]) -> Session:
        model = compact_model(
            nodes,
            [Input(name, array.dtype, None) for name, array in feeds.items()],
            outputs,
            {name: array for name, array in graph.constants.items() if name not in feeds},
            graph.opset,
            name=graph.name,
            domains=graph.domains,
            once=True,
        )
        what = f"a measuring run of '{graph.name}'"
        return Session(model, threads=0, optimize=False, once=True, what=what)

    # Outputs are kept until a run ends: a session that only tells types has all, none is run.
    dtypes = session(graph.nodes, computed).output_dtypes
    found = session((*graph.nodes, *measures), tuple(shapes)).run(tuple(shapes), feeds)
    return facts | {
        name: Fact(dtypes[name], tuple(int(side) for side in found[shape]))
        for shape, name in shapes.items()
    }


def sample_batch(
    graph: Graph, facts: Mapping[str, Fact], inputs: Mapping[str, Array] | None
) -> dict[str, Array]:
    """The inputs that facts were measured on.

    Args:
        graph: The model.
        facts: As ``sample_facts`` gave them for ``inputs``.
        inputs: A real batch; None makes some up.

    Returns:
        Input name to array.
    """
    return next(
        feeds
        for feeds in _sample_feeds(graph, inputs)
        if all(facts[name].shape == array.shape for name, array in feeds.items())
    )


def _sample_feeds(graph: Graph, inputs: Mapping[str, Array] | None) -> Iterator[dict[str, Array]]:
    """Inputs for a sample run, in the order in which they are tried."""
    if inputs is None:
        for first, other in _TRIED_SIZES:
            symbols: dict[str, int] = {}
            yield {entry.name: _made_up(entry, first, other, symbols) for entry in graph.inputs}
    else:
        given = check_inputs(graph, inputs)
        few = first_examples(graph.inputs, given)
        yield {entry.name: _doubled(entry, few[entry.name]) for entry in graph.inputs}
        yield {entry.name: _doubled(entry, given[entry.name]) for entry in graph.inputs}
        yield given


def _made_up(entry: Input, first: int, other: int, symbols: dict[str, int]) -> Array:
    """Small positive numbers, zeros for indices, True for masks: legal for nearly all operators."""
    if entry.shape is None:
        raise ModelError(
            f"input '{entry.name}' declares no shape; pass sample_inputs, a real batch."
        )
    sides = []
    for axis, side in enumerate(entry.shape):
        size = other if axis else first
        if isinstance(side, str):
            size = symbols.setdefault(side, size)  # one symbol is one size, as for real inputs
        sides.append(side if isinstance(side, int) else size)
    if not 0 < prod(sides) <= _MOST_ENTRIES:
        raise ModelError(
            f"input '{entry.name}' declares the shape ({_spelled(entry.shape)}), which "
            f"{'no batch can have' if prod(sides) else 'holds nothing'}; correct the declaration."
        )
    if np.issubdtype(entry.dtype, np.floating):
        return np.random.default_rng(0).uniform(0.1, 0.9, sides).astype(entry.dtype)
    filling: bool | str = "" if entry.dtype == np.object_ else entry.dtype == np.bool_
    return np.full(sides, filling, dtype=entry.dtype)


def _spelled(shape: Sequence[int | str | None]) -> str:
    return ", ".join("?" if side is None else str(side) for side in shape)


def _doubled(entry: Input, array: Array) -> Array:
    for axis, side in enumerate(entry.shape or ()):
        if not isinstance(side, int) and array.shape[axis] == 1:
            array = np.repeat(array, 2, axis=axis)
    return array


def _check_array(entry: Input, value: Array) -> Array:
    array = as_array(value)
    on_host = isinstance(array, np.ndarray)
    array = np.asarray(array) if on_host else array
    if entry.stored is not None and array.dtype == entry.stored:
        array = widened(array) if on_host else array.astype(np.float32)
    if array.dtype != entry.dtype:
        wanted = f"{entry.stored} or {entry.dtype}" if entry.stored else f"{entry.dtype}"
        raise InputError(
            f"input '{entry.name}' is {array.dtype}, the model wants {wanted}; convert it "
            f"with .astype('{entry.dtype}')."
        )
    if entry.shape is not None and (
        array.ndim != len(entry.shape)
        or any(
            isinstance(want, int) and want != have
            for want, have in zip(entry.shape, array.shape, strict=True)
        )
    ):
        raise ShapeError(
            f"input '{entry.name}' has shape {array.shape}, the model wants "
            f"({_spelled(entry.shape)})."
        )
    if array.shape[:1] == (0,):
        raise ShapeError(f"input '{entry.name}' has shape {array.shape}: an empty batch.")
    if np.issubdtype(array.dtype, np.floating) and not _finite(array):
        bad = tuple(int(i) for i in array_module(array).argwhere(~np.isfinite(array))[0])
        raise NonFiniteError(f"input '{entry.name}' holds NaN or infinity, first at index {bad}.")
    return array


def _finite(array: Array) -> bool:
    if isinstance(array, np.ndarray):
        return all_finite(array)
    return bool(np.isfinite(array).all())


def _check_symbols(entry: Input, shape: Sequence[int], symbols: dict[str, tuple[int, str]]) -> None:
    """One symbol of the declaration (``"batch"``) stands for one size in all inputs."""
    for symbol, size in zip(entry.shape or (), shape, strict=False):
        if isinstance(symbol, str):
            seen, where = symbols.setdefault(symbol, (size, entry.name))
            if seen != size:
                raise ShapeError(
                    f"axis '{symbol}' is {seen} in input '{where}' but {size} in '{entry.name}'."
                )
