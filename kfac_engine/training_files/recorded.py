"""Arrays that record ONNX nodes instead of computing: the library's own formulas write files.

``Recorded`` implements the protocols of NumPy. A function that is written for arrays, such as an
update rule or a loss, appends nodes to a ``Tape`` if its arguments are recorded. An array is a
cell: ``out=``, ``x += y`` and ``x[...] = y`` give it another value.

The number of examples is not known while a file is written. Sizes that depend on it are ``Size``.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, TypeAlias, Union

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from kfac_engine._types import DType
from kfac_engine.errors import UnsupportedError
from kfac_engine.graph.node_builder import TYPE_CODES
from kfac_engine.graph.structure import AttributeValue
from kfac_engine.training_files.tape import Tape

Number: TypeAlias = Union[int, float, "Size"]
Shape: TypeAlias = tuple[Any, ...]
# A ``Recorded`` where the library's functions, which it passes through, are declared for arrays.
Symbol: TypeAlias = Any

_FLOAT, _INTEGER, _TRUTH = np.dtype(np.float32), np.dtype(np.int64), np.dtype(np.bool_)
_END = 2**62


class Size:
    """A number that depends on the number of examples: ``factor · nᵖ``.

    Args:
        examples: The number n, a recorded integer.
        factor: The factor.
        power: The power p.
    """

    __array_ufunc__ = None

    def __init__(self, examples: "Recorded", factor: float = 1, power: float = 1) -> None:
        self.examples, self.factor, self.power = examples, factor, power

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Size) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return f"{self.factor:g} n^{self.power:g}"

    def _key(self) -> tuple[object, ...]:
        return id(self.examples), self.factor, self.power

    def _of(self, factor: float, power: float) -> Number:
        return Size(self.examples, factor, power) if power else factor

    def __add__(self, other: Any) -> Any:
        if isinstance(other, Recorded):
            return np.add(self.recorded(), other)
        if other == 0:
            return self
        if not isinstance(other, Size) or other.power != self.power:
            raise UnsupportedError(f"a file cannot add {self!r} and {other!r} examples.")
        return self._of(self.factor + other.factor, self.power)

    __radd__ = __add__

    def __mul__(self, other: Any) -> Any:
        if isinstance(other, Recorded):
            return np.multiply(self.recorded(), other)
        if isinstance(other, Size) and other.examples is not self.examples:
            return np.multiply(self.recorded(), other.recorded())
        if isinstance(other, Size):
            return self._of(self.factor * other.factor, self.power + other.power)
        return self._of(self.factor * other, self.power)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        if isinstance(other, Recorded):
            return np.divide(self.recorded(), other)
        if isinstance(other, Size) and other.examples is not self.examples:
            return np.divide(self.recorded(), other.recorded())
        if isinstance(other, Size):
            return self._of(self.factor / other.factor, self.power - other.power)
        return self._of(self.factor / other, self.power)

    def __rtruediv__(self, other: Any) -> Any:
        if isinstance(other, Recorded):
            return np.divide(other, self.recorded())
        return self._of(other / self.factor, -self.power)

    def __floordiv__(self, other: Any) -> Any:
        quotient = self / other
        factor = quotient.factor if isinstance(quotient, Size) else quotient
        if factor != int(factor):
            raise UnsupportedError(f"a file cannot divide {self!r} examples by {other!r}.")
        return self._of(int(factor), self.power) if isinstance(quotient, Size) else int(factor)

    def __mod__(self, other: int) -> int:
        if self.factor % other:
            raise UnsupportedError(f"a file cannot divide {self!r} examples by {other!r}.")
        return 0

    def __gt__(self, other: float) -> bool:
        return other <= 0  # a batch has an example

    def __pow__(self, exponent: float) -> Number:
        return self._of(self.factor**exponent, self.power * exponent)

    def recorded(self) -> Symbol:
        """Return the number as a recorded value in single precision."""
        n = self.examples.astype(_FLOAT)
        if self.power == -1:
            return np.divide(self.factor, n)
        power = n if self.power == 1 else n**self.power
        return power if self.factor == 1 else power * self.factor

    def length(self) -> str:
        """Return the name of a vector with the number, for the shape of an array."""
        assert self.power == 1, "a length is proportional to the number of examples"
        tape = self.examples.tape
        scaled = self.examples if self.factor == 1 else self.examples * int(self.factor)
        return tape.record("Reshape", [scaled.name, tape.integers(1)])


class Recorded(NDArrayOperatorsMixin):
    """A value of the graph.

    Args:
        tape: Receives the nodes.
        name: Name of the value.
        shape: Sizes of its axes.
        dtype: Its element type.

    Attributes:
        logarithm: Of the power of a number: its logarithm; else None. See ``functions``.
    """

    __hash__ = object.__hash__

    def __init__(self, tape: Tape, name: str, shape: Shape, dtype: DType | type) -> None:
        self.tape, self.name, self.shape = tape, name, tuple(shape)
        self.dtype = np.dtype(dtype)
        self.logarithm: Recorded | None = None
        self._base: Recorded | None = None

    # -- what arrays have --------------------------------------------------------------------------

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> Any:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes for one example, by which the library chooses among equal formulas."""
        sizes = (int(s.factor) if isinstance(s, Size) else s for s in self.shape)
        return prod(sizes) * self.dtype.itemsize

    @property
    def T(self) -> Symbol:  # noqa: N802 (NumPy's name)
        return self.transpose(*reversed(range(self.ndim)))

    def __len__(self) -> int:
        size = self.shape[0]
        if isinstance(size, Size):
            raise _UnknownError("the number of examples is")
        return int(size)

    def __bool__(self) -> bool:
        raise _UnknownError("a truth value of it is")

    def __float__(self) -> float:
        raise _UnknownError("a number of it is")

    __int__ = __index__ = __float__

    def __array__(self, *_: object, **__: object) -> Any:
        raise _UnknownError("its entries are")

    def __array_namespace__(self) -> Any:
        return self.tape.functions.namespace(self.tape)

    def __array_ufunc__(
        self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = None, **options: Any
    ) -> Any:
        if method != "__call__" or options.keys() - {"casting", "dtype"}:
            raise UnsupportedError(f"a file cannot have {ufunc.__name__}.{method}{[*options]}.")
        result = self.tape.functions.applied(self.tape, ufunc.__name__, inputs)
        return out[0].bind(result) if out else result

    def __array_function__(
        self, function: Any, types: object, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        return self.tape.functions.called(function, args, kwargs)

    # -- values ------------------------------------------------------------------------------------

    def new(self, op: str, *inputs: str, shape: Shape, dtype: Any = None, **options: Any) -> Any:
        """Record an operation on this value and others; return its result."""
        attributes: dict[str, AttributeValue] = options
        name = self.tape.record(op, (self.name, *inputs), attributes)
        return Recorded(self.tape, name, shape, dtype or self.dtype)

    def named(self, name: str) -> Symbol:
        """Return a value of the same shape and type."""
        return Recorded(self.tape, name, self.shape, self.dtype)

    def bind(self, value: Any) -> Symbol:
        """Become another value, in this shape and type."""
        new = lifted(self.tape, value, self.dtype).astype(self.dtype)
        if new.shape != self.shape:
            new = new.broadcast(self.shape)
        self.name, self.logarithm = new.name, None
        if self._base is not None:
            self._base.bind(new.reshape(self._base.shape))
        return self

    def broadcast(self, shape: Shape) -> Symbol:
        """Return the value in a larger shape."""
        return self if shape == self.shape else self.new("Expand", self._target(shape), shape=shape)

    def _target(self, shape: Shape) -> str:
        """Return the name of a shape."""
        if not any(isinstance(size, Size) for size in shape):
            return self.tape.integers(*shape)
        parts = [s.length() if isinstance(s, Size) else self.tape.integers(s) for s in shape]
        return self.tape.record("Concat", parts, {"axis": 0})

    def copy(self, order: str = "C") -> Symbol:
        del order
        return self.named(self.name)

    def item(self) -> Symbol:
        return self.reshape(()) if self.ndim else self

    def tolist(self) -> Any:
        if not self.ndim:
            return self
        return [self[i].tolist() for i in range(len(self))]

    def astype(
        self, dtype: Any, order: str = "K", copy: bool = True, casting: str = "unsafe"
    ) -> Symbol:
        del order, casting
        wanted = np.dtype(dtype)
        # Training files compute in single precision: a GPU of a browser has no other.
        if wanted == np.float64 or (wanted.kind == "f" and self.dtype == _FLOAT):
            wanted = _FLOAT
        if wanted == self.dtype:
            return self.copy() if copy else self
        return self.new("Cast", shape=self.shape, dtype=wanted, to=TYPE_CODES[wanted.name])

    # -- shapes ------------------------------------------------------------------------------------

    def reshape(self, *shape: Any, order: str = "C") -> Symbol:
        del order
        whole = len(shape) == 1 and not isinstance(shape[0], int | Size)
        sizes = list(shape[0] if whole else shape)
        sizes = [s if isinstance(s, Size) else int(s) for s in sizes]
        if -1 in sizes:
            known = prod(s for s in sizes if s != -1)
            sizes[sizes.index(-1)] = self.size // known
        result = self.copy()
        if tuple(sizes) != self.shape:
            moving = [isinstance(size, Size) for size in sizes]
            target = [-1 if moves else s for moves, s in zip(moving, sizes, strict=True)]
            name = self.tape.integers(*target) if sum(moving) < 2 else self._target(tuple(sizes))
            result = self.new("Reshape", name, shape=tuple(sizes))
        result._base = self  # an assignment to a view changes the array
        return result

    def ravel(self, order: str = "C") -> Symbol:
        return self.reshape(-1, order=order)

    flatten = ravel

    def transpose(self, *axes: Any) -> Symbol:
        perm = axes[0] if len(axes) == 1 and not isinstance(axes[0], int) else axes
        perm = tuple(axis % self.ndim for axis in perm) or tuple(reversed(range(self.ndim)))
        if perm == tuple(range(self.ndim)):
            return self.copy()
        shape = tuple(self.shape[axis] for axis in perm)
        return self.new("Transpose", shape=shape, perm=perm)

    def swapaxes(self, first: int, second: int) -> Symbol:
        axes = list(range(self.ndim))
        axes[first], axes[second] = axes[second], axes[first]
        return self.transpose(*axes)

    def squeeze(self, axis: int) -> Symbol:
        shape = [size for i, size in enumerate(self.shape) if i != axis % self.ndim]
        return self.reshape(shape)

    def take(self, indices: Any, axis: int | None = None) -> Symbol:
        if axis is None:
            return self.reshape(-1).take(indices, 0)
        index, place = lifted(self.tape, indices, _INTEGER), axis % self.ndim
        shape = (*self.shape[:place], *index.shape, *self.shape[place + 1 :])
        return self.new("Gather", index.name, shape=shape, axis=place)

    def put(self, indices: Any, values: Any) -> None:
        index = lifted(self.tape, indices, _INTEGER).reshape(-1)
        new = lifted(self.tape, values, self.dtype).astype(self.dtype)
        entries = new.reshape(-1) if new.ndim else new.broadcast(index.shape)
        flat = self.reshape(-1)
        operands = index.name, entries.name
        result = flat.new("ScatterElements", *operands, shape=flat.shape, axis=0)
        self.bind(result.reshape(self.shape))

    def rows(self, start: int, stop: int, axis: int) -> Symbol:
        """Return a range of entries along an axis; negative numbers count from the end."""
        size, integers = self.shape[axis], self.tape.integers
        if isinstance(size, Size):
            raise UnsupportedError("a file cannot divide the axis of the examples.")
        start, stop, _ = slice(start, stop).indices(size)
        shape = (*self.shape[:axis], stop - start, *self.shape[axis + 1 :])
        if shape == self.shape:
            return self.copy()
        return self.new("Slice", integers(start), integers(stop), integers(axis), shape=shape)

    def __getitem__(self, key: Any) -> Symbol:
        if isinstance(key, np.ndarray | Recorded):
            return self.take(key, 0)
        result, axis = self, 0
        for entry in self._expanded(key):
            if entry is None:
                shape = (*result.shape[:axis], 1, *result.shape[axis:])
                result = result.reshape(shape)
            elif isinstance(entry, slice):
                if entry != slice(None):
                    stop = _END if entry.stop is None else entry.stop
                    result = result.rows(entry.start or 0, stop, axis)
            else:
                shape = (*result.shape[:axis], *result.shape[axis + 1 :])
                index = self.tape.constant(int(entry), np.int64)
                result = result.new("Gather", index, shape=shape, axis=axis)
                continue
            axis += 1
        return result

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(key, np.ndarray):
            self.bind(self._with_entries(key, value))
            return
        ranges = [(axis, entry) for axis, entry in enumerate(self._expanded(key))]
        cut = [(axis, entry) for axis, entry in ranges if entry != slice(None)]
        if not cut:
            self.bind(value)
            return
        ((axis, entry),) = cut
        start, stop, _ = entry.indices(self.shape[axis])
        middle = self.rows(start, stop, axis).bind(value)
        ends = (self.rows(0, start, axis), self.rows(stop, _END, axis))
        parts = [part for part in (ends[0], middle, ends[1]) if part.shape[axis]]
        self.bind(np.concatenate(parts, axis=axis))

    def _with_entries(self, index: Any, value: Any) -> Symbol:
        """Return a vector with other entries at some places."""
        new = lifted(self.tape, value, self.dtype).astype(self.dtype)
        flat = new.broadcast(index.shape).reshape(-1)
        places = self.tape.constant(index.reshape(-1), np.int64)
        return self.new("ScatterElements", places, flat.name, shape=self.shape, axis=0)

    def _expanded(self, key: Any) -> list[Any]:
        """Return an entry for each axis, and None for new axes."""
        entries = list(key) if isinstance(key, tuple) else [key]
        axes = sum(entry is not None and entry is not Ellipsis for entry in entries)
        rest = [slice(None)] * (self.ndim - axes)
        if not any(entry is Ellipsis for entry in entries):
            return [*entries, *rest]
        place = next(i for i, entry in enumerate(entries) if entry is Ellipsis)
        return [*entries[:place], *rest, *entries[place + 1 :]]

    # -- reductions --------------------------------------------------------------------------------

    def _reduced(self, op: str, axis: Any, keepdims: bool, dtype: Any = None) -> Any:
        axes = range(self.ndim) if axis is None else np.atleast_1d(axis).tolist()
        places = [a % self.ndim for a in axes]
        left = [1 if i in places else s for i, s in enumerate(self.shape)]
        shape = left if keepdims else [s for i, s in enumerate(self.shape) if i not in places]
        value = self if dtype is None else self.astype(dtype)
        if value.dtype == _TRUTH:
            value = value.astype(_INTEGER)
        if not places:
            return value
        return value.new(
            op, self.tape.integers(*places), shape=tuple(shape), keepdims=int(keepdims)
        )

    def sum(self, axis: Any = None, dtype: Any = None, keepdims: bool = False) -> Symbol:
        return self._reduced("ReduceSum", axis, keepdims, dtype)

    def max(self, axis: Any = None, keepdims: bool = False) -> Symbol:
        return self._reduced("ReduceMax", axis, keepdims)

    def min(self, axis: Any = None, keepdims: bool = False) -> Symbol:
        return self._reduced("ReduceMin", axis, keepdims)

    def mean(self, axis: Any = None, dtype: Any = None, keepdims: bool = False) -> Symbol:
        total = self.sum(axis, dtype or _FLOAT, keepdims)
        return total * (total.size / self.size)

    def clip(self, low: Any, high: Any = None) -> Symbol:
        raised = np.maximum(self, low)
        return raised if high is None else np.minimum(raised, high)

    def argmax(self, axis: int) -> Symbol:
        place = axis % self.ndim
        shape = (*self.shape[:place], *self.shape[place + 1 :])
        return self.new("ArgMax", shape=shape, dtype=_INTEGER, axis=place, keepdims=0)

    def cumsum(self, axis: int) -> Symbol:
        place = self.tape.constant(axis % self.ndim, np.int64)
        return self.new("CumSum", place, shape=self.shape)


class _UnknownError(TypeError, UnsupportedError):
    """Code reads a number that a file does not know before it runs."""

    def __init__(self, what: str) -> None:
        super().__init__(f"a step cannot be written as a file: {what} known in a run only.")


def lifted(tape: Tape, value: Any, dtype: DType | type | None = None) -> Symbol:
    """Return a number, an array or a size as a value of the graph.

    Args:
        tape: Receives the nodes.
        value: A recorded value is returned as it is.
        dtype: Element type of numbers; that of the array if None, float32 for float64.
    """
    if isinstance(value, Recorded):
        return value
    if isinstance(value, Size):
        return value.recorded()
    array = np.asarray(value)
    if dtype is not None:
        array = array.astype(dtype)
    elif array.dtype.kind == "f":
        array = array.astype(_FLOAT)
    return Recorded(tape, tape.constant(array), array.shape, array.dtype)


def broadcast_shape(shapes: Sequence[Shape]) -> Shape:
    """Return the shape of an operation on arrays of these shapes."""
    rank = max(map(len, shapes), default=0)
    result: list[Any] = []
    for axis in range(-rank, 0):
        sizes = [shape[axis] for shape in shapes if len(shape) >= -axis]
        different = [size for size in dict.fromkeys(sizes) if size != 1]
        if len(different) > 1:
            raise UnsupportedError(f"arrays of shapes {shapes} cannot be combined.")
        result.append(different[0] if different else 1)
    return tuple(result)
