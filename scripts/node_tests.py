"""Runs and differentiates the node tests of the ``onnx`` package.

A case is a model of one operator, or of the definition of an operator, with operands and results.
The rewritten graph must have the same results. Its gradient must agree with central differences of
the kernels of ONNX Runtime along random directions.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper
from onnx.backend.test.loader import load_model_tests

import kfac_engine as ke
from kfac_engine.autodiff.differentiate import Backward, differentiate
from kfac_engine.autodiff.second_order import joint_graph
from kfac_engine.graph.load import load_graph
from kfac_engine.graph.structure import Graph
from kfac_engine.graph.write import CompactModel, build_model, serialize
from kfac_engine.runtime.lower import lowered
from kfac_engine.sessions.session import Session

Arrays: TypeAlias = Mapping[str, NDArray]
Verdict: TypeAlias = Literal["passed", "wrong", "refused", "not applicable"]

# Floating-point operands that are positions or counts, for which the results are not continuous.
PLACES: Mapping[str, tuple[int, ...]] = {
    "Resize": (1, 2),
    "Upsample": (1,),
    "Dropout": (1,),
    "NonMaxSuppression": (1, 3, 4),
    "Range": (0, 1, 2),
    "RoiAlign": (1,),
    "MaxRoiPool": (1,),
    "Loop": (0,),
}
FLOATS = {"float16", "bfloat16", "float32", "float64"}
# Operators whose results depend on a seed that runtimes use differently.
RANDOM = {
    "Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform",
    "RandomUniformLike",
}  # fmt: skip
NO_OPERAND = "no operand to differentiate with respect to"
NO_RESULT = "no floating-point result"
NO_ARRAYS = "sequences or optional values at the border"
# Noise that moves operands away from kinks and ties.
NOISE = 0.02
# Steps of the central differences, tried until one succeeds. Truncation errors and kinks need small
# steps, and rounding errors need large steps.
STEPS = (2.0**-8, 2.0**-6, 2.0**-10, 2.0**-12, 2.0**-14)
DIRECTIONS = 2
# ONNX Runtime computes in float32, so that with the best step differences have three correct digits
# of the sum of all terms.
TOLERANCE = 5e-3
EPSILON = 2.0**-23
# The expected results are those of other kernels. The tolerance of the package is 1e-3.
FORWARD_TOLERANCE = 2e-3
# The expected results in half precision were rounded after every step, and the graph computes in
# float32.
HALF_TOLERANCE = 2e-2


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a case, and the reason or the error.

    A case is ``"not applicable"`` if there is nothing to differentiate, or no runtime runs it.
    """

    name: str
    ops: tuple[str, ...]
    verdict: Verdict
    why: str = ""


class NotApplicableError(Exception):
    """Raised if a case cannot be checked, with the reason."""


class WrongError(Exception):
    """Raised if a value or a gradient differs, with the difference."""


def cases() -> list[onnx.backend.test.case.test_case.TestCase]:
    """Return all node tests of the installed package, sorted by name."""
    with warnings.catch_warnings():
        # The package divides by zero for some expected results.
        warnings.simplefilter("ignore")
        return sorted(load_model_tests(kind="node"), key=lambda case: case.name)


def outcomes(chosen: Sequence[object]) -> Iterator[Outcome]:
    """Yield the outcome of each case."""
    for case in chosen:
        ops = tuple(dict.fromkeys(node.op_type for node in case.model.graph.node))
        first = Outcome(case.name, ops, "passed")
        try:
            with np.errstate(all="ignore"):
                _check(case)
        except NotApplicableError as reason:
            yield replace(first, verdict="not applicable", why=str(reason))
        except WrongError as reason:
            yield replace(first, verdict="wrong", why=str(reason))
        except ke.UnsupportedError as reason:
            yield replace(first, verdict="refused", why=str(reason))
        else:
            yield first


# -- one case --------------------------------------------------------------------------------------


def _check(case: object) -> None:
    model, feeds, expected = _prepared(case)
    graph = _loaded(model)
    check(graph, {e.name: feeds[e.name] for e in graph.inputs if e.name in feeds}, expected)


def check(
    graph: Graph, feeds: Arrays, expected: Arrays | None = None, sample: Arrays | None = None
) -> None:
    """Compare the results and gradients of a graph with those of ONNX Runtime.

    Args:
        graph: Graph, which is differentiated with respect to its floating-point inputs.
        feeds: All inputs of the graph.
        expected: Results of the graph; by default those of the kernels of ONNX Runtime.
        sample: The batch of the sample run; by default ``feeds``.

    Raises:
        NotApplicableError: There is nothing to differentiate, or no runtime runs the graph.
        WrongError: The rewritten graph has other results, or the gradient is wrong.
        UnsupportedError: An operator is refused.
    """
    feeds = {entry.name: feeds[entry.name].astype(entry.dtype) for entry in graph.inputs}
    wrt = [entry.name for entry in graph.inputs if entry.dtype.kind == "f"]
    if not wrt:
        raise NotApplicableError(NO_OPERAND)
    truth = _Evaluator(graph, graph.outputs)
    outputs = [name for name in graph.outputs if truth.is_float(name)]
    if not outputs:
        raise NotApplicableError(NO_RESULT)
    result = truth(feeds)
    if expected is not None:
        _same(result, expected, "ONNX Runtime itself", NotApplicableError)
    rewritten, facts = lowered(graph, wrt, feeds if sample is None else sample)
    _same(_Evaluator(rewritten, graph.outputs)(feeds), expected or result, "a result", WrongError)
    backward = differentiate(rewritten, facts, outputs, wrt)
    _compare(rewritten, backward, truth, _moved(feeds, truth, outputs), outputs)


def _prepared(case: object) -> tuple[onnx.ModelProto, Arrays, Arrays]:
    """Return the model of a case with constant operands, its variables and expected results."""
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    operands, results = (_arrays(values) for values in case.data_sets[0])
    if not all(entry.type.HasField("tensor_type") for entry in model.graph.input):
        raise NotApplicableError(NO_ARRAYS)
    names = [entry.name for entry in model.graph.input]
    feeds = dict(zip(names, operands, strict=True))
    expected = [entry.name for entry in model.graph.output]
    fixed = {n: array for n, array in feeds.items() if not _is_variable(model, n, array)}
    if any(array.dtype.kind in "OSU" for array in feeds.values()):
        raise NotApplicableError("strings")
    if len(fixed) == len(feeds):
        raise NotApplicableError(NO_OPERAND)
    if not any(array.dtype.name in FLOATS for array in results):
        raise NotApplicableError(NO_RESULT)
    inputs = [entry for entry in model.graph.input if entry.name not in fixed]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    model.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in fixed.items())
    return (
        model,
        {n: array for n, array in feeds.items() if n not in fixed},
        dict(zip(expected, results, strict=True)),
    )


def _arrays(values: Sequence[object]) -> list[NDArray]:
    plain = [numpy_helper.to_array(v) if isinstance(v, onnx.TensorProto) else v for v in values]
    if not all(isinstance(array, np.ndarray | np.generic) for array in plain):
        raise NotApplicableError(NO_ARRAYS)
    return [np.asarray(array) for array in plain]


def _is_variable(model: onnx.ModelProto, name: str, array: NDArray) -> bool:
    places = {
        node.input[index]
        for node in model.graph.node
        for index in PLACES.get(node.op_type, ())
        if index < len(node.input)
    }
    floating = array.dtype.name in FLOATS
    return floating and array.size > 0 and name not in places and bool(np.isfinite(array).all())


def _loaded(model: onnx.ModelProto) -> Graph:
    foreign = [e.domain for e in model.opset_import if "training" in e.domain]
    if foreign:
        raise NotApplicableError("an operator of an optimizer")
    if RANDOM.intersection(node.op_type for node in model.graph.node):
        raise NotApplicableError("random results")
    try:
        return load_graph(model)
    except ke.ModelError as error:
        raise NotApplicableError(str(error)) from error


class _Evaluator:
    """Evaluates values of a graph with ONNX Runtime."""

    def __init__(self, graph: Graph, names: Sequence[str]) -> None:
        self._graph, self._names = graph, tuple(name for name in names if name)
        model = build_model(
            graph.nodes,
            graph.inputs,
            self._names,
            graph.constants,
            graph.opset,
            domains=graph.domains,
        )
        try:
            compact = CompactModel(serialize(model))
            self._session = Session(compact, threads=1, optimize=False, what="a case")
        except ke.BackendError as error:
            raise NotApplicableError(str(error)) from error

    def is_float(self, name: str) -> bool:
        dtype = self._session.output_dtypes.get(name)
        return dtype is not None and dtype.kind == "f"

    def __call__(self, feeds: Arrays) -> Arrays:
        names = [name for name in self._names if name in self._session.output_dtypes]
        dtypes = {entry.name: entry.dtype for entry in self._graph.inputs}
        feeds = {name: array.astype(dtypes[name]) for name, array in feeds.items()}
        try:
            return {n: np.array(a) for n, a in self._session.run(names, feeds).items()}
        except ke.BackendError as error:
            raise NotApplicableError(str(error)) from error


def _same(result: Arrays, expected: Arrays, what: str, error: type[Exception]) -> None:
    for name, array in result.items():
        wanted = expected[name]
        if array.shape != wanted.shape:
            raise error(f"{what} has shape {array.shape}, the case {wanted.shape}")
        loose = wanted.dtype.itemsize == 2 and wanted.dtype.kind not in "iub"
        tolerance = HALF_TOLERANCE if loose else FORWARD_TOLERANCE
        close = np.isclose(
            array.astype(np.float64), wanted.astype(np.float64), tolerance, tolerance,
            equal_nan=True,
        )  # fmt: skip
        if not close.all():
            raise error(f"{what} differs from the case at {int((~close).sum())} of {close.size}")


# -- the gradient ----------------------------------------------------------------------------------


def _moved(feeds: Arrays, truth: _Evaluator, outputs: Sequence[str]) -> Arrays:
    """Return valid operands near those of the case, away from kinks."""
    for low, high in ((-1, 1), (-1, 0), (0, 1), (0, 0)):
        rng = np.random.default_rng(0)
        moved = {
            name: (array + NOISE * rng.uniform(low, high, array.shape)).astype(array.dtype)
            if array.dtype.kind == "f"
            else array
            for name, array in feeds.items()
        }
        values = truth(moved)
        if all(np.isfinite(values[name]).all() for name in outputs):
            return moved
    raise NotApplicableError("results are not finite")


def _compare(
    graph: Graph, backward: Backward, truth: _Evaluator, feeds: Arrays, outputs: Sequence[str]
) -> None:
    rng = np.random.default_rng(1)
    values = truth(feeds)
    cotangents = {n: rng.normal(size=values[n].shape).astype(values[n].dtype) for n in outputs}
    fed = {**feeds, **{backward.cotangents[n]: g for n, g in cotangents.items()}}
    joint = joint_graph(graph, backward)
    gradients = _Evaluator(joint, joint.outputs)(fed) | fed if joint.outputs else fed
    for name, array in feeds.items():
        if array.dtype.kind != "f":
            continue
        # A value without a gradient depends on the operand by jumps only.
        gradient = gradients.get(backward.gradients.get(name, ""), np.zeros_like(array))
        if gradient.shape != array.shape:
            raise WrongError(f"the gradient of '{name}' has shape {gradient.shape}")
        if not np.isfinite(gradient).all():
            raise WrongError(f"the gradient of '{name}' is not finite")
        for _ in range(DIRECTIONS):
            direction = rng.uniform(0.5, 1, array.shape) * rng.choice([-1, 1], array.shape)
            _along(truth, feeds, cotangents, name, direction, gradient)


def _along(
    truth: _Evaluator,
    feeds: Arrays,
    cotangents: Arrays,
    name: str,
    direction: NDArray,
    gradient: NDArray,
) -> None:
    """Check a gradient along a direction, with the step that has the smallest error."""
    parts = (gradient.astype(np.float64) * direction).ravel()
    errors = []
    for step in STEPS:
        ends = [
            _weighted(truth, {**feeds, name: feeds[name] + sign * step * direction}, cotangents)
            for sign in (1, -1)
        ]
        terms = (ends[0] - ends[1]) / (2 * step)
        size = 1 + np.linalg.norm(terms) + np.linalg.norm(parts)
        numbers = np.concatenate([(gradient * feeds[name]).ravel(), ends[0]])
        rounding = EPSILON / step * np.linalg.norm(numbers.astype(np.float64))
        excess = np.maximum(abs(terms.sum() - parts.sum()) - rounding, 0)
        errors.append(float(excess / size))
        if errors[-1] <= TOLERANCE:
            return
    finite = [error for error in errors if np.isfinite(error)]
    if not finite:
        raise NotApplicableError("results are not finite around the operands")
    raise WrongError(f"the gradient of '{name}' is off by {min(finite):.1e}")


def _weighted(truth: _Evaluator, feeds: Arrays, cotangents: Arrays) -> NDArray:
    """Return all results times their cotangents, as one vector."""
    values = truth(feeds)
    return np.concatenate(
        [(values[n].astype(np.float64) * g).ravel() for n, g in cotangents.items()]
    )
