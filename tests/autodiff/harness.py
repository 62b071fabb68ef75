"""Runs one operator forward and backward, and differentiates it by finite differences.

A case says which operator, on which operands, and which attributes. Sizes may hold the letter
``N``: the batch, filled in when operands are drawn, so that one backward graph meets several sizes.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from kfac_engine.autodiff.differentiate import Backward, differentiate
from kfac_engine.graph.structure import AttributeValue, Fact, Graph, Input, Node
from kfac_engine.graph.write import build_model
from tests.autodiff.definitions import DEFINITIONS
from tests.oracle import Erf, Gelu

N = "N"
# The newest operator set that ONNX Runtime 1.31 executes.
NEWEST = 26

# -- operands --------------------------------------------------------------------------------------

Draw = Callable[[np.random.Generator, tuple[int, ...]], NDArray]


def normal(rng: np.random.Generator, sides: tuple[int, ...]) -> NDArray:
    return rng.normal(size=sides)


def positive(rng: np.random.Generator, sides: tuple[int, ...]) -> NDArray:
    return rng.uniform(0.5, 2, sides)


def distinct(rng: np.random.Generator, sides: tuple[int, ...]) -> NDArray:
    """No two elements nearer than 0.1, none near zero: finite differences meet no kink."""
    count = int(np.prod(sides))
    return (0.1 * (rng.permutation(count) - count // 2) + 0.03).reshape(sides)


@dataclass(frozen=True)
class Operand:
    """One operand: drawn or given; fed, or constant in the graph; differentiated or not."""

    sides: tuple[int | str, ...] = ()
    draw: Draw = normal
    value: NDArray | None = None
    constant: bool = False
    active: bool = True

    def array(self, rng: np.random.Generator, batch: int) -> NDArray:
        if self.value is not None:
            return self.value
        sides = tuple(batch if side == N else int(side) for side in self.sides)
        return np.asarray(self.draw(rng, sides))


def x(*sides: int | str, draw: Draw = normal) -> Operand:
    """A data input that wants a gradient."""
    return Operand(sides, draw)


def p(*sides: int, draw: Draw = normal) -> Operand:
    """A parameter: a constant of the graph that is fed and wants a gradient."""
    return Operand(sides, draw, constant=True)


def k(value: object, dtype: str = "int64") -> Operand:
    """A constant that is not differentiated: axes, sizes, indices."""
    return Operand(value=np.asarray(value, dtype), constant=True, active=False)


def indices(limit: int, *sides: int | str, dtype: str = "int64") -> Operand:
    """Fed indices of both signs, with repetitions, below ``limit``."""

    def draw(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray:
        return rng.integers(-limit, limit, shape).astype(dtype)

    return Operand(sides, draw, active=False)


def flags(*sides: int | str) -> Operand:
    """Fed booleans."""
    return Operand(sides, lambda rng, shape: rng.random(shape) < 0.5, active=False)


# -- cases -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One operator on given operands."""

    op: str  # the operator
    label: str  # what is special about the case
    operands: tuple[Operand | None, ...]  # none for an optional one that is left out
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)  # attributes of the node
    outputs: int = 1  # number of results
    seen: tuple[int, ...] = ()  # results that get a cotangent; all floating-point ones when empty
    opset: int = 18  # the oldest operator set that knows the form
    newest: int = NEWEST  # the newest one

    def __str__(self) -> str:
        return f"{self.op}-{self.label}"


def case(
    op: str,
    label: str,
    *operands: Operand | None,
    outputs: int = 1,
    seen: tuple[int, ...] = (),
    opset: int = 18,
    newest: int = NEWEST,
    **attributes: AttributeValue,
) -> Case:
    """A row of a table of cases."""
    return Case(op, label, operands, attributes, outputs, seen, opset, newest)


# -- running ---------------------------------------------------------------------------------------

Evaluator = Callable[[Mapping[str, NDArray]], dict[str, NDArray]]
# ONNX Runtime has no convolutions and pools in float64.
DTYPES = {"reference": "float64", "ort": "float32"}


def compiled(
    runtime: str,
    graph: Graph,
    nodes: Sequence[Node],
    constants: Mapping[str, NDArray],
    fed: Mapping[str, NDArray],
    names: Sequence[str],
) -> Evaluator:
    """Maps arrays like those ``fed`` to the values of ``names``, in "reference" or "ort"."""
    if not names:
        return lambda feeds: {}
    inputs = [Input(name, array.dtype, None) for name, array in fed.items()]
    read = {name for node in nodes for name in (*node.inputs, *node.captures)}
    graph_constants = {n: array for n, array in constants.items() if n in read and n not in fed}
    model = build_model(nodes, inputs, names, graph_constants, graph.opset)
    if runtime == "reference":
        run = ReferenceEvaluator(model, new_ops=[Erf, Gelu, *DEFINITIONS]).run
    else:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
        run = ort.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        ).run

    def evaluate(feeds: Mapping[str, NDArray]) -> dict[str, NDArray]:
        results = run(list(names), dict(feeds))
        return dict(zip(names, map(np.asarray, results), strict=True))

    return evaluate


@dataclass(frozen=True)
class Bench:
    """A graph under test with the facts and the backward graph of one sample run."""

    graph: Graph  # the forward graph
    sample: Mapping[str, NDArray]  # what the sample run was fed: data inputs and parameters
    outputs: tuple[str, ...]  # values that are differentiated
    wrt: tuple[str, ...]  # values that want a gradient
    runtime: str  # what evaluates it: "reference" or "ort"
    # Made once for all sizes of the batch.
    _evaluators: dict[tuple[Hashable, ...], Evaluator] = field(default_factory=dict)

    @cached_property
    def backward(self) -> Backward:
        return differentiate(self.graph, self.facts, self.outputs, self.wrt)

    @cached_property
    def facts(self) -> dict[str, Fact]:
        names = [name for node in self.graph.nodes for name in node.outputs if name]
        graph = self.graph
        evaluate = compiled(self.runtime, graph, graph.nodes, graph.constants, self.sample, names)
        values = evaluate(self.sample)
        known = {**self.graph.constants, **self.sample, **values}
        return {name: Fact(array.dtype, array.shape) for name, array in known.items()}

    def forward(self, feeds: Mapping[str, NDArray], names: Sequence[str]) -> Evaluator:
        """Evaluates forward values, those that only the backward graph asks for included."""
        nodes = (*self.graph.nodes, *self.backward.forward_nodes)
        constants = {**self.graph.constants, **self.backward.constants}
        return self._evaluator("forward", nodes, constants, feeds, names)

    def _evaluator(
        self,
        part: str,
        nodes: Sequence[Node],
        constants: Mapping[str, NDArray],
        fed: Mapping[str, NDArray],
        names: Sequence[str],
    ) -> Evaluator:
        key = (part, *fed, *names)
        if key not in self._evaluators:
            self._evaluators[key] = compiled(self.runtime, self.graph, nodes, constants, fed, names)
        return self._evaluators[key]

    def gradients(
        self, feeds: Mapping[str, NDArray], cotangents: Mapping[str, NDArray]
    ) -> dict[str, NDArray]:
        """Value asked for to its gradient; absent where it is zero by structure."""
        backward = self.backward
        known = {**self.graph.constants, **feeds}
        computed = [name for name in backward.saved if name not in known]
        saved = {name: known[name] for name in backward.saved if name in known}
        saved |= self.forward(feeds, computed)(feeds)
        cotangents = {backward.cotangents[name]: g for name, g in cotangents.items()}
        made = {name for node in backward.nodes for name in node.outputs}
        names = [name for name in dict.fromkeys(backward.gradients.values()) if name in made]
        fed = {**cotangents, **saved}
        evaluate = self._evaluator("backward", backward.nodes, backward.constants, fed, names)
        results = fed | evaluate(fed)
        return {name: results[gradient] for name, gradient in backward.gradients.items()}


def bench(case: Case, runtime: str, batch: int, opset: int | None = None) -> Bench:
    """The graph of a case, with a sample run at one size of the batch."""
    dtype = DTYPES[runtime]
    names = tuple("" if o is None else f"operand_{i}" for i, o in enumerate(case.operands))
    results = tuple(f"result_{i}" for i in range(case.outputs))
    arrays = draw(case, dtype, batch)
    constants = {
        n: arrays[n] for n, o in zip(names, case.operands, strict=True) if o and o.constant
    }
    graph = Graph(
        nodes=(Node(case.op, names, results, case.attributes, name="tested"),),
        inputs=tuple(Input(n, a.dtype, None) for n, a in arrays.items() if n not in constants),
        outputs=results,
        constants=constants,
        opset=opset or case.opset,
    )
    wrt = tuple(n for n, o in zip(names, case.operands, strict=True) if o and o.active)
    sample = {n: a for n, a in arrays.items() if n in wrt or n not in constants}
    made = Bench(graph, sample, results, wrt, runtime)
    seen = case.seen or [i for i, n in enumerate(results) if made.facts[n].dtype.kind == "f"]
    return replace(made, outputs=tuple(results[i] for i in seen))


def draw(case: Case, dtype: str, batch: int) -> dict[str, NDArray]:
    """Arrays for all operands; floating-point ones are numbers that float32 holds exactly."""
    rng = np.random.default_rng([batch, *case.op.encode()])
    arrays = {}
    for i, operand in enumerate(case.operands):
        if operand is not None:
            array = operand.array(rng, batch)
            floating = array.dtype.kind == "f"
            arrays[f"operand_{i}"] = array.astype("float32").astype(dtype) if floating else array
    return arrays


def finite_differences(
    made: Bench, feeds: Mapping[str, NDArray], cotangents: Mapping[str, NDArray], step: float
) -> dict[str, NDArray]:
    """Central differences of the contraction with ``cotangents``, by value asked for."""
    entries = {name: np.eye(feeds[name].size) for name in made.wrt}
    found = slopes(made, feeds, cotangents, step, entries)
    return {name: found[name].reshape(feeds[name].shape) for name in found}


def slopes(
    made: Bench,
    feeds: Mapping[str, NDArray],
    cotangents: Mapping[str, NDArray],
    step: float,
    directions: Mapping[str, NDArray],
) -> dict[str, NDArray]:
    """The same along directions, the rows of a matrix for each value asked for."""
    evaluate = made.forward(feeds, tuple(cotangents))

    def contraction(changed: Mapping[str, NDArray]) -> float:
        values = evaluate({**feeds, **changed})
        return sum(float(np.vdot(cotangent, values[n])) for n, cotangent in cotangents.items())

    found = {}
    for name in made.wrt:
        shape = (len(directions[name]), *feeds[name].shape)
        moves = step * directions[name].reshape(shape)
        rises = [
            contraction({name: feeds[name] + move}) - contraction({name: feeds[name] - move})
            for move in moves
        ]
        found[name] = np.array(rises) / (2 * step)
    return found
