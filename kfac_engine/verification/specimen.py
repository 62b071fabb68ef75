"""Defines ``Specimen``, the model and the part of a batch that a verification reads.

A copy of the model computes in float64, and further engines are built from its file.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from kfac_engine._types import Array
from kfac_engine.backend.namespace import on_host
from kfac_engine.engine.engine import Engine
from kfac_engine.errors import BackendError, ModelError
from kfac_engine.graph.analysis.subgraph import SubGraph, dependents
from kfac_engine.graph.reference import ReferenceModel
from kfac_engine.graph.structure import ONLY_SHAPES, Graph
from kfac_engine.losses.observed import Targets
from kfac_engine.runtime.model import OnnxModel
from kfac_engine.runtime.sample_run import open_run
from kfac_engine.runtime.trace import Trace

# An array in float64.
Floats: TypeAlias = NDArray[np.float64]
Item = TypeVar("Item")
# Largest difference of the float64 copy from the model in float32, relative to the largest entry.
_SAME = 1e-2
# Multiplications of a product in float64 that take as long as an entry of another result.
_ENTRY = 25
# For each product, how many multiplications an entry takes, by the shapes of the result, of the
# first and of the second operand.
_INNER: Mapping[str, Callable[..., int]] = {
    "MatMul": lambda _, left, right: left[-1],
    "Gemm": lambda result, left, right: prod(right) // max(result[-1], 1),
    "Conv": lambda _, left, right: prod(right[1:]),
}
_RESOLUTIONS = {"float16": 2.0**-10, "bfloat16": 2.0**-7}


@dataclass(frozen=True)
class Specimen:
    """A model with the first examples of a batch."""

    engine: Engine  # The engine of the model. No check changes its state.
    inputs: Mapping[str, Array]  # arrays by input name
    targets: Targets
    examples: int  # number of examples

    @classmethod
    def of_batch(
        cls, engine: Engine, inputs: Mapping[str, Array], targets: Targets, most: int
    ) -> "Specimen":
        """Return the first ``most`` examples of a batch, or the whole batch if it is indivisible.

        The method computes the loss of the whole batch first, so that wrong inputs and targets
        raise their errors here.
        """
        engine.loss(inputs, targets)
        axes = engine.example_axes
        if axes.inputs and not axes.obstacle:
            count = axes.check(inputs, targets)
            if count > most:
                inputs, targets = axes.part(inputs, targets, slice(most))
        examples = engine.objective.examples(engine.trace(inputs, targets))
        return cls(engine, inputs, targets, examples)

    def alone(self) -> "Specimen | None":
        """Return the first example; None if the model does not run with a single example."""
        axes = self.engine.example_axes
        if self.examples == 1:
            return self
        if axes.obstacle or not axes.inputs or self.coupling:
            return None
        return Specimen(self.engine, *axes.part(self.inputs, self.targets, slice(1)), 1)

    def with_engine(self, engine: Engine) -> "Specimen":
        """Return the same batch with another engine of the same model."""
        return Specimen(engine, self.inputs, self.targets, self.examples)

    @cached_property
    def coupling(self) -> str:
        """The node by which an example's results depend on other examples; empty for none."""
        return next((loss.coupling for loss in self.engine.losses if loss.coupling), "")

    @cached_property
    def model(self) -> OnnxModel:
        """The model of the engine."""
        model = self.engine.collection.graph
        assert isinstance(model, OnnxModel), "an engine has a model"
        return model

    @cached_property
    def trace(self) -> Trace:
        """The values of the batch."""
        return self.engine.trace(self.inputs, self.targets)

    @cached_property
    def parameters(self) -> dict[str, Floats]:
        """Values by parameter name, in float64."""
        host = on_host(self.model.parameters, self.engine.collection.backend)
        return {name: array.astype(np.float64) for name, array in host.items()}

    @cached_property
    def multiplications(self) -> float:
        """About how many multiplications take as long as a pass of the batch in float64."""
        facts, names = self.model.facts, self.engine.objective.inputs
        sampled = sum(prod(facts[name].shape) for name in names)
        entries, multiplied = 0, 0
        for node in self.model.graph.nodes:
            shapes = [facts[n].shape for n in (*node.outputs[:1], *node.inputs[:2]) if n in facts]
            entries += prod(shapes[0]) if shapes else 0
            if node.op in _INNER and len(shapes) == 3:
                multiplied += prod(shapes[0]) * _INNER[node.op](*shapes)
        growth = sum(self.trace[name].size for name in names) / max(sampled, 1)
        numbers = sum(array.size for array in self.parameters.values())
        return growth * (multiplied + _ENTRY * entries) + _ENTRY * numbers

    @cached_property
    def resolution(self) -> float:
        """The largest rounding error of an entry of ``gradients``, relative to the entry."""
        types = {np.dtype(dtype).name for dtype in self.model.result_types.values()}
        return max((_RESOLUTIONS.get(name, 0.0) for name in types), default=0.0)

    @cached_property
    def probability_weights(self) -> dict[str, float]:
        """Weights of probabilities in the objective, by the value that a loss of classes reads.

        The derivative of such a loss is a probability minus a target. The rounding error of a
        probability close to one exceeds this difference if the predictions are certain.
        """
        objective, sums = self.engine.objective, dict[str, float]()
        whole = objective.observe(self.trace).whole
        for weight, term in zip(objective.weights(whole), objective.terms, strict=True):
            for name in term.inputs if term.discrete else ():
                sums[name] = sums.get(name, 0.0) + weight
        return sums

    @cached_property
    def rounding(self) -> float:
        """The largest rounding error of a probability of one."""
        types = (np.dtype(self.trace[name].dtype) for name in self.probability_weights)
        return max((float(np.finfo(dtype).eps) for dtype in types), default=0.0)

    @cached_property
    def gradients(self) -> dict[str, Floats]:
        """The gradients that the engine computes, in float64, by parameter name."""
        result = self.engine.gradients(self.inputs, self.targets).gradients
        host = on_host(result, self.engine.collection.backend)
        return {name: host[name].astype(np.float64) for name in self.parameters}

    @cached_property
    def copy(self) -> "FloatCopy":
        """The copy of the model in which differences are computed."""
        return FloatCopy(self)


def wide(engine: Engine, arrays: Mapping[str, Array]) -> dict[str, Floats]:
    """Return arrays of an engine in float64 on the host."""
    host = on_host(arrays, engine.collection.backend)
    return {name: array.astype(np.float64) for name, array in host.items()}


def multiplied(engine: Engine, vectors: Mapping[str, Floats], exp: float) -> dict[str, Floats]:
    """Return the products of a power of the blocks with vectors, in float64."""
    cast = {name: a.astype(engine.parameters[name].dtype) for name, a in vectors.items()}
    return wide(engine, engine.precondition(cast, exp=exp))


def spread_evenly(items: Sequence[Item], most: int) -> tuple[Item, ...]:
    """Return at most ``most`` items at equal distances, the first and the last among them."""
    if len(items) <= most:
        return tuple(items)
    places = np.linspace(0, len(items) - 1, most).round().astype(int)
    return tuple(items[place] for place in dict.fromkeys(places.tolist()))


class FloatCopy:
    """A copy of the model for differences: in float64 where that is possible, else in float32.

    ``why_not`` says why the copy computes in float32, and is empty otherwise. ``passes`` counts
    evaluations.
    """

    def __init__(self, specimen: Specimen) -> None:
        self._specimen, self.passes = specimen, 0
        objective, backend = specimen.engine.objective, specimen.engine.collection.backend
        named = objective.named_targets(specimen.targets)
        batch = (objective.batch,) if objective.batch else ()
        self._fixed = on_host({n: specimen.trace[n] for n in batch} | named, backend)
        self._reference: ReferenceModel | None = None
        self._feeds: dict[str, Array] = {}
        self.why_not = ""
        for graph in _graphs_of(specimen.model, objective.inputs):
            try:
                self._open(graph)
            except ModelError as failure:
                self._reference, self.why_not = None, str(failure)
            else:
                self.why_not = ""
                break

    @property
    def is_double(self) -> bool:
        """Whether the copy computes in float64."""
        return self._reference is not None

    def outputs(self, parameters: Mapping[str, Array]) -> dict[str, Floats]:
        """Return the values that the losses read, in float64; ``parameters`` has all parameters."""
        self.passes += 1
        names, model = self._specimen.engine.objective.inputs, self._specimen.model
        if self._reference is not None:
            return self._reference.run({**self._feeds, **parameters})
        single = {n: a.astype(model.facts[n].dtype) for n, a in parameters.items()}
        feeds = {entry.name: self._specimen.trace[entry.name] for entry in model.graph.inputs}
        trace = model.run(feeds, parameters=single)
        host = on_host({n: trace[n] for n in names}, self._specimen.engine.collection.backend)
        return {name: array.astype(np.float64) for name, array in host.items()}

    def loss(self, parameters: Mapping[str, Array]) -> float:
        """Return the loss under the reduction of the engine; see ``outputs``."""
        values = {**self._fixed, **self.outputs(parameters)}
        return self._specimen.engine.objective.value(values)

    def _open(self, graph: Graph) -> None:
        """Open the copy in float64, and compare its values with the values of the model."""
        specimen, model = self._specimen, self._specimen.model
        names = specimen.engine.objective.inputs
        buffers = {name: model.memory_space.on_host(a) for name, a in model.buffers.items()}
        inputs = {e.name: model.memory_space.on_host(specimen.trace[e.name]) for e in graph.inputs}
        fixed = _without_parameters(graph, inputs, (*specimen.parameters, *buffers))
        fed = (*specimen.parameters, *buffers, *fixed)
        self._reference = ReferenceModel(graph, names, fed)
        self._feeds = {**inputs, **buffers, **fixed}
        rounded = _rounded(graph, model, specimen.parameters)
        if rounded:
            wide = ReferenceModel(graph, rounded, fed).run({**self._feeds, **specimen.parameters})
            for name in rounded:
                if not np.array_equal(wide[name], model.memory_space.on_host(specimen.trace[name])):
                    raise ModelError(
                        f"'{name}' rounds to other integers in float64 than in float32"
                    )
        for name, value in self.outputs(specimen.parameters).items():
            expected = model.memory_space.on_host(specimen.trace[name])
            scale = float(abs(expected).max(initial=0.0)) or 1.0
            if value.shape != expected.shape or not abs(value - expected).max() <= _SAME * scale:
                raise ModelError(
                    f"the reference implementation of onnx computes other values of '{name}' than "
                    f"ONNX Runtime"
                )


def _without_parameters(
    graph: Graph, inputs: Mapping[str, Array], parameters: Iterable[str]
) -> dict[str, Array]:
    """Return values that depend on no parameter and that other values are computed from.

    They are constants of the differences. ONNX Runtime computes them in the types of the file:
    where they are rounded to integers, such as buckets of distances, float64 may differ by one.
    """
    moved = dependents(graph.nodes, parameters)
    still = [node for node in graph.nodes if moved.isdisjoint(node.outputs)]
    read = {
        name for node in graph.nodes if not moved.isdisjoint(node.outputs)
        for name in (*node.inputs, *node.captures)
    }  # fmt: skip
    run = open_run(replace(graph, nodes=tuple(still), outputs=()))
    try:
        names = sorted(read & run.dtypes.keys())
        values = run.values(inputs, names) if names else {}
    except BackendError:  # an operator that the graph of the engine does not have
        return {}
    return {name: values[name] for name in names}


def _rounded(graph: Graph, model: OnnxModel, parameters: Iterable[str]) -> tuple[str, ...]:
    """Return the integers that depend on the values of parameters, such as the largest entries."""
    moved = dependents(graph.nodes, parameters, ONLY_SHAPES) & {*model.graph.values()}
    results = (name for node in graph.nodes for name in node.outputs if name in moved)
    return tuple(n for n in results if n in model.facts and model.facts[n].dtype.kind in "iu")


def _graphs_of(model: OnnxModel, names: tuple[str, ...]) -> Iterator[Graph]:
    """Yield graphs that compute ``names``: in the operators of the file, and of the engine."""
    graphs = [model.graph] if model.ties else [model.loaded.graph, model.graph]
    for graph in graphs:
        if {*names} <= {*graph.values()}:
            yield replace(graph, nodes=SubGraph(graph, names).nodes, outputs=names)


@dataclass(frozen=True, slots=True)
class Rebuild:
    """Builds engines with the file and the options of an engine."""

    original: Engine  # the engine
    file: Path  # file that the engine exported
    inputs: Mapping[str, Array]  # a batch, for the sample run

    @classmethod
    @contextmanager
    def exported(cls, engine: Engine, inputs: Mapping[str, Array]) -> "Iterator[Rebuild]":
        """Export an engine to a temporary folder for the duration of a ``with`` block."""
        with TemporaryDirectory(prefix="kfac-engine-verify-") as folder:
            file = Path(folder) / "model.onnx"
            engine.export(file)
            yield cls(engine, file, inputs)

    def engine(self, **changes: Any) -> Engine:
        """Return an engine without statistics, with some options replaced."""
        options = self.original.options
        values = {field.name: getattr(options, field.name) for field in fields(options)}
        if values["sample_inputs"] is None and self.original.losses[0].fixed_batch:
            values["sample_inputs"] = self.inputs
        return Engine.from_onnx(self.file, **{**values, **changes})
