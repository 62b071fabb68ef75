"""The truth, by brute force: Fisher matrices, gradients and patches from their definitions.

Everything runs in float64 through ``onnx.reference`` and is differentiated numerically. Nothing
of the engine is imported, nothing is clever: agreement with it is evidence.

Conventions: parameters are flattened row-major as stored and concatenated in the given order.
Losses are summed over the positions of an example (all axes but the batch and the class axis).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import erf

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from scipy.integrate import quad

Float = NDArray[np.float64]

# Central differences start at this step and halve it. Steps are powers of two, so that a linear
# network is differentiated to rounding; the first is long enough that rounding is not magnified.
_FIRST_STEP = 2.0**-3
_LEVELS = 20
_ORDERS = 5
# Refinement stops at this disagreement, relative to max(1, |f'|): a few roundings of f.
_ENOUGH = 1e-13
# A larger disagreement means a kink at the very point, or an operator that rounds to float32.
_HOPELESS = 1e-9


# -- the model -------------------------------------------------------------------------------------


def to_float64(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of ``model`` that computes in float64 where it computed in float32 or float16."""
    wide = onnx.ModelProto()
    wide.CopyFrom(model)
    _widen_graph(wide.graph)
    for function in wide.functions:
        _widen_nodes(function.node)
    return wide


def evaluate(model: onnx.ModelProto, inputs: Mapping[str, NDArray], *names: str) -> list[NDArray]:
    """Any values of ``model``, by name, in float64; floating-point inputs are widened."""
    return _evaluator(to_float64(model)).run(list(names), _widen_arrays(inputs))


# -- Fisher matrices -------------------------------------------------------------------------------


def dense_fisher(
    model: onnx.ModelProto,
    inputs: Mapping[str, NDArray],
    output: str,
    parameters: Sequence[str],
    loss: str,
    *,
    var: float = 0.5,
    class_axis: int = -1,
) -> Float:
    """The exact Fisher matrix ``(P, P)``: mean over the batch of ``Jᵀ F J``.

    Args:
        model: Any ONNX model whose initializers include ``parameters``.
        inputs: The batch.
        output: Name of the value that the loss reads; the batch axis is first.
        parameters: Names of initializers.
        loss: "categorical", "normal" or "multi_bernoulli".
        var: Variance of the normal distribution.
        class_axis: Axis of the classes or features.
    """
    z = _class_last(evaluate(model, inputs, output)[0], class_axis)
    jac = jacobian(model, inputs, output, parameters, class_axis=class_axis)
    F = np.zeros((jac.shape[-1], jac.shape[-1]))
    for index in np.ndindex(z.shape[:2]):
        F += jac[index].T @ predictive_fisher(loss, z[index], var) @ jac[index]
    return F / len(z)


def dense_empirical_fisher(
    model: onnx.ModelProto,
    inputs: Mapping[str, NDArray],
    output: str,
    parameters: Sequence[str],
    loss: str,
    targets: NDArray,
    *,
    var: float = 0.5,
    class_axis: int = -1,
) -> Float:
    """The empirical Fisher matrix ``(P, P)``: mean over the batch of ``g gᵀ``.

    g is one example's gradient of −log p of its target. Arguments as in ``dense_fisher``.
    """
    z = _class_last(evaluate(model, inputs, output)[0], class_axis)
    t = _targets_class_last(loss, targets, z, class_axis)
    jac = jacobian(model, inputs, output, parameters, class_axis=class_axis)
    score = np.zeros_like(z)
    for *index, c in np.ndindex(z.shape):
        nll = partial(_nll, loss, t=t[tuple(index)], var=var)
        score[(*index, c)] = derivative(nll, z[tuple(index)], (c,))
    g = np.einsum("btc,btcp->bp", score, jac)
    return g.T @ g / len(z)


# Of the errors over which the score is integrated.
_PARTS = (0, 1), (1, 50)


def predictive_fisher(loss: str, z: Float, var: float = 0.5) -> Float:
    """Fisher matrix of one prediction: the expectation of ``score scoreᵀ`` over outcomes."""
    classes = len(z)
    if loss == "categorical":
        p = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
        scores = [np.eye(classes)[k] - p for k in range(classes)]
        return sum(p[k] * np.outer(scores[k], scores[k]) for k in range(classes))
    if loss == "multi_bernoulli":
        p = 1 / (1 + np.exp(-z))
        return np.diag(p * (1 - p) ** 2 + (1 - p) * p**2)
    if loss == "poisson":
        return np.diag(np.exp(z))
    if loss in ("laplace", "huber"):  # of scale 1 and delta 1: E[score²] / E[1] over errors e > 0
        rho = {"laplace": lambda e: e, "huber": lambda e: e * e / 2 if e <= 1 else e - 0.5}[loss]
        slope = {"laplace": lambda e: 1.0, "huber": lambda e: min(e, 1.0)}[loss]
        total, squares = (
            sum(quad(lambda e, k=k: slope(e) ** k * np.exp(-rho(e)), *ends)[0] for ends in _PARTS)
            for k in (0, 2)
        )
        return np.eye(classes) * squares / total
    assert loss == "normal", loss
    return np.eye(classes) / var  # E[(t − m)²] / v² = 1 / v


def loss_and_gradient(
    model: onnx.ModelProto,
    inputs: Mapping[str, NDArray],
    output: str,
    parameters: Sequence[str],
    loss: str,
    targets: NDArray,
    *,
    var: float = 0.5,
    class_axis: int = -1,
    reduction: str = "mean",
) -> tuple[float, dict[str, Float]]:
    """The loss of a batch and its gradient by parameter, from finite differences of the loss.

    Args as in ``dense_fisher``; ``reduction`` is "mean" (over batch and positions), "batch_mean"
    (summed over positions, mean over the batch) or "sum".
    """
    theta, forward = _network(model, inputs, [output], parameters)

    def reduced(flat: Float) -> Float:
        z = _class_last(forward(flat)[0], class_axis)
        t = _targets_class_last(loss, targets, z, class_axis)
        total = sum(_nll(loss, z[i], t[i], var) for i in np.ndindex(z.shape[:2]))
        count = {"mean": z.shape[0] * z.shape[1], "batch_mean": z.shape[0], "sum": 1}
        return np.array(total / count[reduction])

    flat = np.concatenate([array.ravel() for array in theta.values()])
    slopes = np.array([derivative(reduced, flat, (i,)) for i in range(flat.size)])
    return float(reduced(flat)), _unflatten(slopes, theta)


def parameter_slices(model: onnx.ModelProto, parameters: Sequence[str]) -> dict[str, slice]:
    """Where each parameter lies in the flattened order of the matrices above."""
    sizes = [_initializers(model)[name].size for name in parameters]
    ends = np.cumsum(sizes)
    return {
        name: slice(int(end - size), int(end))
        for name, size, end in zip(parameters, sizes, ends, strict=True)
    }


# -- derivatives -----------------------------------------------------------------------------------


def jacobian(
    model: onnx.ModelProto,
    inputs: Mapping[str, NDArray],
    output: str,
    parameters: Sequence[str],
    *,
    class_axis: int = -1,
) -> Float:
    """Per-example Jacobian of ``output``, ``(batch, positions, classes, P)``."""
    theta, forward = _network(model, inputs, [output], parameters)
    flat = np.concatenate([array.ravel() for array in theta.values()])
    columns = [
        _class_last(derivative(lambda at: forward(at)[0], flat, (i,)), class_axis)
        for i in range(flat.size)
    ]
    return np.stack(columns, axis=-1)


def slope(
    model: onnx.ModelProto,
    inputs: Mapping[str, NDArray],
    output: str,
    direction: Mapping[str, NDArray],
) -> Float:
    """Derivative of ``output`` along a direction in the space of parameters, shaped like it."""
    outputs = along(model, inputs, [output], direction)
    return derivative(lambda step: outputs(step[0])[0], np.zeros(1), (0,))


def along(
    model: onnx.ModelProto,
    inputs: Mapping[str, NDArray],
    names: Sequence[str],
    direction: Mapping[str, NDArray],
) -> Callable[[float], list[Float]]:
    """Values of a model as functions of a step along a direction in the space of parameters."""
    theta, forward = _network(model, inputs, names, list(direction))
    flat, way = (
        np.concatenate([np.asarray(part[name], np.float64).ravel() for name in direction])
        for part in (theta, direction)
    )
    return lambda step: forward(flat + step * way)


def derivative(f: Callable[[Float], Float], x: Float, index: tuple[int, ...]) -> Float:
    """``∂f/∂x[index]``: central differences, extrapolated to step zero, entry by entry of f.

    Each entry keeps the estimate that agrees best with its neighbours in the extrapolation table
    (Ridders 1982, Adv. Eng. Software 4): linear entries settle at the first steps, smooth ones at
    a high order, and entries with a kink near x once the step is shorter than the way to it.
    """
    row, best, error = [_slope(f, x, index, _FIRST_STEP)], np.nan, np.inf
    for level in range(1, _LEVELS):
        new = [_slope(f, x, index, _FIRST_STEP / 2**level)]
        for order, previous in enumerate(row[:_ORDERS], start=1):
            finer = new[-1]
            new.append(finer + (finer - previous) / (4**order - 1))
            doubt = np.maximum(abs(new[-1] - finer), abs(new[-1] - previous))
            doubt = doubt / np.maximum(1, abs(new[-1]))
            best, error = np.where(doubt < error, new[-1], best), np.minimum(doubt, error)
        if (error <= _ENOUGH).all():
            break
        row = new
    assert (error < _HOPELESS).all(), f"no derivative at x{list(index)}: choose another point"
    return best


def _slope(f: Callable[[Float], Float], x: Float, index: tuple[int, ...], step: float) -> Float:
    ahead, behind = x.copy(), x.copy()
    ahead[index] += step
    behind[index] -= step
    return (f(ahead) - f(behind)) / (2 * step)


# -- geometry --------------------------------------------------------------------------------------


def conv_patches(
    x: NDArray,
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    begins: Sequence[int],
    ends: Sequence[int],
) -> NDArray:
    """Patches ``(n, positions, taps · channels)`` of images ``(n, channels, *sides)``, by loops.

    Position ``o`` and tap ``u`` of an axis see pixel ``o · stride + u · dilation − begin``, zero
    outside the image. Features are tap-major: ``(*kernel, channels)`` in row-major order.
    """
    n, channels, *sides = x.shape
    positions = [
        (side + begin + end - (k - 1) * d - 1) // s + 1
        for side, k, s, d, begin, end in zip(
            sides, kernel, strides, dilations, begins, ends, strict=True
        )
    ]
    found = np.zeros((n, *positions, *kernel, channels), x.dtype)
    for o in np.ndindex(*positions):
        for u in np.ndindex(*kernel):
            pixel = tuple(np.multiply(o, strides) + np.multiply(u, dilations) - begins)
            if all(0 <= i < side for i, side in zip(pixel, sides, strict=True)):
                found[(slice(None), *o, *u)] = x[(slice(None), slice(None), *pixel)]
    return found.reshape(n, np.prod(positions, dtype=int), -1)


# -- losses by definition --------------------------------------------------------------------------


def _nll(loss: str, z: Float, t: NDArray, var: float) -> float:
    """−log p of the target of one prediction."""
    if loss == "categorical":
        return float(np.log(np.exp(z - z[t]).sum()))
    if loss == "multi_bernoulli":
        return float((t * np.log1p(np.exp(-z)) + (1 - t) * np.log1p(np.exp(z))).sum())
    assert loss == "normal", loss
    return float((0.5 * np.log(2 * np.pi * var) + (t - z) ** 2 / (2 * var)).sum())


def _class_last(z: NDArray, class_axis: int) -> NDArray:
    """``(batch, positions, classes)``."""
    z = np.moveaxis(z, class_axis, -1)
    return z.reshape(z.shape[0], -1, z.shape[-1])


def _targets_class_last(loss: str, t: NDArray, z: Float, class_axis: int) -> NDArray:
    return t.reshape(z.shape[:2]) if loss == "categorical" else _class_last(t, class_axis)


# -- the model, private ----------------------------------------------------------------------------


def _network(
    model: onnx.ModelProto,
    inputs: Mapping[str, NDArray],
    outputs: Sequence[str],
    parameters: Sequence[str],
) -> tuple[dict[str, Float], Callable[[Float], list[Float]]]:
    """The parameters, and ``outputs`` as functions of all of them in one flat vector."""
    wide = to_float64(model)
    theta = {name: _initializers(wide)[name] for name in parameters}
    kept = [tensor for tensor in wide.graph.initializer if tensor.name not in theta]
    del wide.graph.initializer[:]
    wide.graph.initializer.extend(kept)
    evaluator, fixed = _evaluator(wide), _widen_arrays(inputs)

    def forward(flat: Float) -> list[Float]:
        return evaluator.run(list(outputs), {**fixed, **_unflatten(flat, theta)})

    return theta, forward


_erf = np.vectorize(erf, otypes=[np.float64])


class Erf(OpRun):
    """Erf in float64: the operator of ``onnx.reference`` rounds to float32."""

    op_domain = ""

    def _run(self, x: Float) -> tuple[Float]:
        return (_erf(x),)


class Gelu(OpRun):
    """Gelu in float64: the constants in the function of ``onnx.reference`` are float32."""

    op_domain = ""

    def _run(self, x: Float, approximate: str = "none") -> tuple[Float]:
        if approximate == "tanh":
            return (0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),)
        return (0.5 * x * (1 + _erf(x / np.sqrt(2))),)


class FusedMatMul(OpRun):
    """The product of ONNX Runtime's optimized files."""

    op_domain = "com.microsoft"

    def _run(self, x: Float, y: Float, alpha: float = 1.0, transB: int = 0) -> tuple[Float]:  # noqa: N803
        return (alpha * (x @ (y.swapaxes(-1, -2) if transB else y)),)


def _evaluator(model: onnx.ModelProto) -> ReferenceEvaluator:
    return ReferenceEvaluator(model, new_ops=[Erf, Gelu, FusedMatMul])


def _initializers(model: onnx.ModelProto) -> dict[str, NDArray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def _unflatten(flat: Float, like: Mapping[str, Float]) -> dict[str, Float]:
    pieces = np.split(flat, np.cumsum([array.size for array in like.values()])[:-1])
    return {
        name: piece.reshape(array.shape)
        for (name, array), piece in zip(like.items(), pieces, strict=True)
    }


def _widen_arrays(arrays: Mapping[str, NDArray]) -> dict[str, NDArray]:
    return {
        name: array.astype(np.float64) if array.dtype.kind == "f" else array
        for name, array in arrays.items()
    }


_NARROW = (TensorProto.FLOAT, TensorProto.FLOAT16)


def _widen_tensor(tensor: TensorProto) -> None:
    if tensor.data_type in _NARROW:
        array = numpy_helper.to_array(tensor).astype(np.float64)
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def _widen_graph(graph: onnx.GraphProto) -> None:
    for tensor in graph.initializer:
        _widen_tensor(tensor)
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.elem_type in _NARROW:
            value.type.tensor_type.elem_type = TensorProto.DOUBLE
    _widen_nodes(graph.node)


def _widen_nodes(nodes: Sequence[onnx.NodeProto]) -> None:
    for node in nodes:
        if node.op_type == "ConstantOfShape" and not node.attribute:
            zero = helper.make_tensor("value", TensorProto.FLOAT, [1], [0.0])
            node.attribute.append(helper.make_attribute("value", zero))
        for attribute in node.attribute:
            _widen_attribute(node, attribute)


def _widen_attribute(node: onnx.NodeProto, attribute: onnx.AttributeProto) -> None:
    if node.op_type == "Constant" and attribute.name in ("value_float", "value_floats"):
        array = np.array(helper.get_attribute_value(attribute), np.float64)
        attribute.CopyFrom(helper.make_attribute("value", numpy_helper.from_array(array)))
    elif attribute.type == onnx.AttributeProto.TENSOR:
        _widen_tensor(attribute.t)
    elif attribute.type == onnx.AttributeProto.GRAPH:
        _widen_graph(attribute.g)
    elif attribute.name in ("to", "dtype") and attribute.i in _NARROW:
        attribute.i = TensorProto.DOUBLE
