"""Implements NumPy's functions on recorded arrays with ONNX operators."""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from itertools import pairwise
from math import log, pi
from typing import Any

import numpy as np

from kfac_engine._types import DType
from kfac_engine.errors import UnsupportedError
from kfac_engine.losses.outliers import STIRLING
from kfac_engine.recording.recorded import Recorded, Size, Symbol, Tape, broadcast_shape, lifted

_INTEGER, _TRUTH = np.dtype(np.int64), np.dtype(np.bool_)
_END = 2**62


class Namespace:
    """NumPy for code on recorded arrays: functions that create arrays record constants."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape

    @property
    def backend(self) -> Any:
        """The operations of the library on recorded arrays."""
        return self.tape.functions.backend(self.tape)

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def asarray(self, value: Any, dtype: Any = None) -> Symbol:
        array = lifted(self.tape, value, None if isinstance(value, Recorded) else dtype)
        return array if dtype is None else array.astype(dtype, copy=False)

    ascontiguousarray = array = asarray

    def zeros(self, shape: Any, dtype: Any = None) -> Symbol:
        sizes = tuple(shape) if isinstance(shape, tuple | list) else (shape,)
        dtype = dtype or self.tape.dtype
        return lifted(self.tape, np.zeros((), dtype), dtype).broadcast(sizes)

    empty = zeros

    def ones(self, shape: Any, dtype: Any = None) -> Symbol:
        return self.zeros(shape, dtype) + 1

    def eye(self, size: int, dtype: Any = None) -> Symbol:
        return identity_like(self.zeros((size, size), dtype))

    def arange(self, stop: Any) -> Any:
        if not isinstance(stop, Size):
            return np.arange(stop)
        bounds = [self.tape.constant(k, np.int64) for k in (0, 1)]
        last = self.tape.record("Squeeze", [stop.length()])
        name = self.tape.record("Range", [bounds[0], last, bounds[1]])
        return Recorded(self.tape, name, (stop,), _INTEGER)

    def result_type(self, *values: Any) -> DType:
        return _common([lifted(self.tape, value) for value in values])


# -- universal functions ---------------------------------------------------------------------------

_ARITHMETIC = {
    "add": "Add", "subtract": "Sub", "multiply": "Mul", "divide": "Div", "true_divide": "Div",
    "floor_divide": "Div", "remainder": "Mod", "power": "Pow", "maximum": "Max", "minimum": "Min",
    "negative": "Neg", "absolute": "Abs", "sqrt": "Sqrt", "exp": "Exp", "log": "Log",
    "tanh": "Tanh", "sign": "Sign", "sin": "Sin", "cos": "Cos", "tan": "Tan", "arcsin": "Asin",
    "arccos": "Acos", "arctan": "Atan", "sinh": "Sinh", "cosh": "Cosh", "arcsinh": "Asinh",
    "arccosh": "Acosh", "arctanh": "Atanh", "erf": "Erf",
}  # fmt: skip
_COMPARISONS = {
    "equal": "Equal", "less": "Less", "less_equal": "LessOrEqual", "greater": "Greater",
    "greater_equal": "GreaterOrEqual",
}  # fmt: skip
_LOGIC = {
    "logical_and": "And", "logical_or": "Or", "logical_not": "Not",
    "bitwise_and": "And", "bitwise_or": "Or", "invert": "Not",
}  # fmt: skip
# The number with which they return the other operand.
_NEUTRAL = {"add": 0, "subtract": 0, "multiply": 1, "divide": 1, "true_divide": 1}
_COMMUTES = {"add", "multiply"}
# They compute real numbers from integers, too.
_REAL = {
    "divide", "true_divide", "sqrt", "exp", "log", "tanh", "sin", "cos", "tan", "arcsin", "arccos",
    "arctan", "sinh", "cosh", "arcsinh", "arccosh", "arctanh", "erf",
}  # fmt: skip


def applied(tape: Tape, name: str, inputs: Sequence[Any]) -> Symbol:
    """Record a universal function of NumPy, given by its name.

    At least one of ``inputs`` is recorded. A function that files do not have raises
    UnsupportedError.
    """
    if name in _NEUTRAL and (unchanged := _without_effect(name, inputs)) is not None:
        return unchanged
    if name in _SPECIAL:
        return _SPECIAL[name](tape, *inputs)
    operators = {**_ARITHMETIC, **_COMPARISONS, **_LOGIC}
    if name not in operators:
        raise UnsupportedError(f"a file cannot compute numpy.{name}.")
    return _record(tape, operators[name], name, inputs)


def _without_effect(name: str, inputs: Sequence[Any]) -> Symbol | None:
    """Return ``x`` for ``x + 0``, ``x − 0``, ``x · 1`` and ``x / 1``; None for other operations."""
    for array, number in (inputs, inputs[::-1]) if name in _COMMUTES else (inputs,):
        if isinstance(array, Recorded) and isinstance(number, int | float):
            same = isinstance(number, int) or array.dtype.kind == "f"
            if same and array.dtype != _TRUTH and number == _NEUTRAL[name]:
                return array.copy()
    return None


def _record(tape: Tape, op: str, name: str, inputs: Sequence[Any]) -> Symbol:
    known = [lifted(tape, x) for x in inputs if _is_array(x)]
    common = _TRUTH if name in _LOGIC else _common(known, [x for x in inputs if not _is_array(x)])
    if name in _REAL and common.kind != "f":
        common = tape.dtype
    if common == _TRUTH and name in _ARITHMETIC:
        common = _INTEGER
    operands = [lifted(tape, x, common).astype(common, copy=False) for x in inputs]
    shape = broadcast_shape([x.shape for x in operands])
    dtype = _TRUTH if name in _COMPARISONS else common
    result = tape.record(op, [x.name for x in operands])
    return Recorded(tape, result, shape, dtype)


def _is_array(value: Any) -> bool:
    return isinstance(value, Recorded | Size) or np.ndim(value) > 0


def _common(known: Sequence[Symbol], numbers: Sequence[Any] = ()) -> DType:
    """Return the type of an operation; a number does not widen the type of an array."""
    real: DType | None = next((x.dtype for x in known if x.dtype.kind == "f"), None)
    if real is not None:
        return real
    if any(np.asarray(number).dtype.kind == "f" for number in numbers):
        tape: Tape = known[0].tape
        return tape.dtype
    whole: list[DType] = [x.dtype for x in known if x.dtype.kind in "iu"]
    if whole:
        return max(whole, key=lambda dtype: dtype.itemsize)
    return _INTEGER if any(not isinstance(n, bool | np.bool_) for n in numbers) else _TRUTH


def _power(tape: Tape, base: Any, exponent: Any) -> Symbol:
    if isinstance(base, Recorded) and np.ndim(exponent) == 0 and not isinstance(exponent, Recorded):
        if exponent == 0.5:
            return _record(tape, "Sqrt", "sqrt", [base])
        if exponent == 2:
            return base * base
    result = _record(tape, "Pow", "power", [base, exponent])
    if isinstance(base, float) and isinstance(exponent, Recorded) and not exponent.ndim:
        result.logarithm = exponent * log(base) if base > 0 else None
    return result


def _subtract(tape: Tape, left: Any, right: Any) -> Symbol:
    """Record a difference; ``1 − βᵗ`` without the cancellation that single precision has."""
    result = _record(tape, "Sub", "subtract", [left, right])
    exponent = right.logarithm if isinstance(right, Recorded) else None
    if exponent is None or np.ndim(left) or left != 1:
        return result
    return np.where(np.absolute(exponent) < 0.3, -_series(exponent), result)


def _series(x: Symbol) -> Symbol:
    """Return ``exp(x) − 1`` for small numbers."""
    total: Any = 1.0
    for k in range(14 if x.dtype == np.float64 else 7, 1, -1):
        total = 1.0 + x * total * (1 / k)
    return x * total


def _expm1(tape: Tape, x: Symbol) -> Symbol:
    return np.where(np.absolute(x) < 0.3, _series(x), _subtract(tape, np.exp(x), 1.0))


def _log1p(tape: Tape, x: Symbol) -> Symbol:
    """Record ``log(1 + x)``, by a series for small x, which the rounded sum would lose."""
    last = 8 if x.dtype == np.float64 else 3
    small: Any = 1 / last
    for k in range(last - 1, 0, -1):
        small = 1 / k - x * small
    small = x * small
    return np.where(np.absolute(x) < 1e-2, small, _record(tape, "Log", "log", [1.0 + x]))


def _gammaln(tape: Tape, x: Symbol) -> Symbol:
    """Record ``log Γ(x)`` of x ≥ 1: Stirling's series at x + 8, less logarithms of 8 factors."""
    y = x + 8.0
    square, series = 1.0 / (y * y), STIRLING[0]
    for coefficient in STIRLING[1:]:
        series = series * square + coefficient
    total = (y - 0.5) * np.log(y) - y + 0.5 * log(2 * pi) + series / y
    for k in (0.0, 4.0):  # no large count overflows
        total = total - np.log((x + k) * (x + (k + 1)) * (x + (k + 2)) * (x + (k + 3)))
    return total


# Numerators and denominators, the highest power first, of the quantiles of the normal distribution:
# near the median in r = .425² − (u − ½)², and in a tail u in r = √(−log u) − 1.6, or less 5.
# Source: Wichura 1988, Algorithm AS 241, function PPND7.
_CENTRE = (
    (59.109374720, 159.29113202, 50.434271938, 3.3871327179),
    (67.187563600, 78.757757664, 17.895169469, 1.0),
)
_TAILS = {
    1.6: (
        (0.17023821103, 1.3067284816, 2.7568153900, 1.4234372777),
        (0.12021132975, 0.73700164250, 1.0),
    ),
    5.0: (
        (0.017337203997, 0.42868294337, 3.0812263860, 6.6579051150),
        (0.012258202635, 0.24197894225, 1.0),
    ),
}  # fmt: skip


def _ndtri(tape: Tape, u: Symbol) -> Symbol:
    """Record the quantiles of the normal distribution, to seven digits."""

    def ratio(r: Symbol, coefficients: Sequence[Sequence[float]]) -> Symbol:
        over, under = (reduce(lambda total, c: total * r + c, row) for row in coefficients)
        return over / under

    q = u - 0.5
    tail = np.sqrt(-np.log(np.minimum(u, 1.0 - u)))
    near, far = (ratio(tail - shift, rows) for shift, rows in _TAILS.items())
    outer = np.sign(q) * np.where(tail <= 5.0, near, far)
    return np.where(np.absolute(q) <= 0.425, q * ratio(0.180625 - q * q, _CENTRE), outer)


def _matmul(tape: Tape, left: Symbol, right: Symbol) -> Symbol:
    left, right = lifted(tape, left), lifted(tape, right)
    shape = (*broadcast_shape([left.shape[:-2], right.shape[:-2]]), left.shape[-2])
    name = tape.record("MatMul", [left.name, right.name])
    return Recorded(tape, name, (*shape, right.shape[-1]), left.dtype)


def _not_equal(tape: Tape, left: Any, right: Any) -> Symbol:
    return _record(tape, "Not", "logical_not", [_record(tape, "Equal", "equal", [left, right])])


def _isfinite(tape: Tape, x: Symbol) -> Symbol:
    return _record(tape, "Equal", "equal", [x - x, 0.0])


_SPECIAL: Mapping[str, Callable[..., Symbol]] = {
    "power": _power,
    "float_power": _power,
    "subtract": _subtract,
    "expm1": _expm1,
    "log1p": _log1p,
    "gammaln": _gammaln,
    "ndtri": _ndtri,
    "matmul": _matmul,
    "not_equal": _not_equal,
    "isfinite": _isfinite,
    "square": lambda tape, x: x * x,
    "reciprocal": lambda tape, x: 1.0 / x,
    "positive": lambda tape, x: x,
}


# -- other functions -------------------------------------------------------------------------------


def called(function: Any, args: Any, options: dict[str, Any]) -> Any:
    """Record a call of a NumPy function that is not a ufunc, or raise ``UnsupportedError``."""
    name = f"{function.__module__}.{function.__name__}".removeprefix("numpy.")
    if name in _METHODS:
        return getattr(args[0], name)(*args[1:], **options)
    if name not in _FUNCTIONS:
        raise UnsupportedError(f"a file cannot compute numpy.{name}.")
    return _FUNCTIONS[name](*args, **options)


def _tape_of(values: Sequence[Any]) -> Tape:
    return next(value.tape for value in values if isinstance(value, Recorded))


def _norm(x: Symbol, axis: Any = None, keepdims: bool = False) -> Symbol:
    return np.sqrt((x * x).sum(axis=axis, keepdims=keepdims))


def _where(condition: Any, first: Any, second: Any) -> Symbol:
    tape = _tape_of((condition, first, second))
    arrays = [lifted(tape, x) for x in (first, second) if _is_array(x)]
    numbers = [x for x in (first, second) if not _is_array(x)]
    dtype = _common(arrays, numbers) if arrays else tape.dtype
    chosen = [lifted(tape, x, dtype).astype(dtype, copy=False) for x in (first, second)]
    operands = [lifted(tape, condition, _TRUTH), *chosen]
    shape = broadcast_shape([x.shape for x in operands])
    return Recorded(tape, tape.record("Where", [x.name for x in operands]), shape, dtype)


def _concatenate(parts: Sequence[Any], axis: int = 0) -> Symbol:
    tape = _tape_of(parts)
    arrays = [lifted(tape, part) for part in parts]
    if len(arrays) == 1:
        return arrays[0].copy()
    place = axis % arrays[0].ndim
    length = sum(a.shape[place] for a in arrays[1:]) + arrays[0].shape[place]
    shape = (*arrays[0].shape[:place], length, *arrays[0].shape[place + 1 :])
    name = tape.record("Concat", [a.name for a in arrays], {"axis": place})
    return Recorded(tape, name, shape, arrays[0].dtype)


def _stack(parts: Sequence[Any], axis: int = 0) -> Symbol:
    return _concatenate([_expand_dims(part, axis) for part in parts], axis)


def _expand_dims(x: Symbol, axis: int) -> Symbol:
    place = axis % (x.ndim + 1)
    return x.reshape((*x.shape[:place], 1, *x.shape[place:]))


def _moveaxis(x: Symbol, source: int, destination: int) -> Symbol:
    axes = [axis for axis in range(x.ndim) if axis != source % x.ndim]
    axes.insert(destination % x.ndim, source % x.ndim)
    return x.transpose(*axes)


def _take_along_axis(x: Symbol, indices: Any, axis: int) -> Symbol:
    index = lifted(x.tape, indices)
    place = axis % x.ndim
    return x.new("GatherElements", index.name, shape=index.shape, axis=place)


def _trace(x: Symbol, axis1: int = -2, axis2: int = -1) -> Symbol:
    del axis1, axis2  # the last two
    return (x * identity_like(x)).sum(axis=(-2, -1))


def _diagonal(x: Symbol) -> Symbol:
    return (x * identity_like(x)).sum(axis=-1)


def _median(x: Symbol) -> Symbol:
    """Return the median of a vector."""
    (d,) = x.shape
    half = d // 2 + 1
    names = x.tape.level.multi("TopK", [x.name, x.tape.integers(half)], ["", ""])
    largest = Recorded(x.tape, names[0], (half,), x.dtype)
    return largest[(d - 1) // 2 :].mean()


def identity_like(x: Symbol) -> Symbol:
    """Return an identity matrix as large as some matrices; it takes no bytes in the file."""
    d = x.shape[-1]
    matrix = x
    while matrix.ndim > 2:
        matrix = matrix[0]
    return matrix.new("EyeLike", shape=(d, d))


def _roll(x: Symbol, shift: int, axis: int) -> Symbol:
    """Return entries moved along an axis; those beyond an end come back at the other end."""
    place, integers = x.tape.integers(axis % x.ndim), x.tape.integers
    bounds = ((integers(-shift), integers(_END)), (integers(0), integers(-shift)))
    parts = [x.tape.record("Slice", [x.name, *pair, place]) for pair in bounds]
    return x.named(x.tape.record("Concat", parts, {"axis": axis % x.ndim}))


def _repeat(x: Symbol, count: int) -> Symbol:
    """Return a vector in which each entry is repeated."""
    return x[:, None].broadcast((*x.shape, count)).reshape(-1)


def _tile(x: Symbol, count: int) -> Symbol:
    """Return a vector several times."""
    return x[None].broadcast((count, *x.shape)).reshape(-1)


def _split(x: Symbol, parts: int | Sequence[int], axis: int = 0) -> list[Symbol]:
    """Divide an array into equal parts, or at some places."""
    place = axis % x.ndim
    size = x.shape[place]
    if isinstance(size, Size):
        raise UnsupportedError("a file cannot divide the axis of the examples.")
    if isinstance(parts, int):
        parts = [k * (size // parts) for k in range(1, parts)]
    if not parts:
        return [x.copy()]
    widths = [stop - start for start, stop in pairwise([0, *parts, size])]
    operands = [x.name, x.tape.integers(*widths)]
    names = x.tape.level.multi("Split", operands, [""] * len(widths), axis=place)
    shapes = [(*x.shape[:place], width, *x.shape[place + 1 :]) for width in widths]
    return [Recorded(x.tape, *each, x.dtype) for each in zip(names, shapes, strict=True)]


def _zeros_like(x: Symbol, dtype: Any = None) -> Symbol:
    return _full_like(x, 0, dtype)


def _full_like(x: Symbol, value: float, dtype: Any = None) -> Symbol:
    return lifted(x.tape, value, dtype or x.dtype).broadcast(x.shape)


# Functions that are methods of their first argument.
_METHODS = frozenset({
    "argmax", "clip", "copy", "max", "mean", "ravel", "reshape", "squeeze", "sum", "swapaxes",
    "transpose",
})  # fmt: skip
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "linalg.norm": _norm,
    "where": _where,
    "concatenate": _concatenate,
    "stack": _stack,
    "expand_dims": _expand_dims,
    "moveaxis": _moveaxis,
    "take_along_axis": _take_along_axis,
    "trace": _trace,
    "diagonal": _diagonal,
    "median": _median,
    "split": _split,
    "roll": _roll,
    "repeat": _repeat,
    "tile": _tile,
    "zeros_like": _zeros_like,
    "empty_like": _zeros_like,
    "ones_like": lambda x: _full_like(x, 1),
    "full_like": _full_like,
    "vdot": lambda x, y: (x * y).sum(),
    "ndim": lambda x: x.ndim,
    "shape": lambda x: x.shape,
    "size": lambda x: x.size,
    "broadcast_to": lambda x, shape: x.broadcast(tuple(shape)),
    "result_type": lambda *values: _common([x for x in values if isinstance(x, Recorded)]),
}
