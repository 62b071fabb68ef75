"""Defines arrays that record ONNX nodes, so that array formulas can write files.

``Recorded`` implements the protocols of NumPy. A function that is written for arrays, such as an
update rule or a loss, appends nodes to a ``Tape`` if its arguments are recorded. An array is a
cell: ``out=``, ``x += y`` and ``x[...] = y`` give it another value.

Sizes that are not known while a file is written, such as the number of examples, are ``Size``.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from math import prod
from operator import mul
from typing import Any, TypeAlias, Union

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from kfac_engine._types import DType
from kfac_engine.autodiff.differentiate import needed
from kfac_engine.errors import UnsupportedError
from kfac_engine.graph.node_builder import TYPE_CODES, NodeBuilder
from kfac_engine.graph.passes.order import captures
from kfac_engine.graph.structure import AttributeValue, Input, Subgraph, values_read
from kfac_engine.graph.write import build_model

Number: TypeAlias = Union[int, float, "Size"]
Shape: TypeAlias = tuple[Any, ...]
# A ``Recorded``. The library's functions that receive it are declared for arrays.
Symbol: TypeAlias = Any

_INTEGER, _TRUTH = np.dtype(np.int64), np.dtype(np.bool_)
_END = 2**62
# The operator set of the files, and the oldest one that has all operators that are recorded.
OPSET = 18


class Level(NodeBuilder):
    """The nodes of the graph, or of the body of one node; all new names start with ``prefix``.

    ``known`` has the name of each constant by its type, shape and bytes. ``computed`` has the name
    of the result of each operation, so that none is recorded twice.
    """

    def __init__(self, prefix: str) -> None:
        super().__init__(prefix)
        self.known: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self.computed: dict[tuple[object, ...], str] = {}

    def closed(self, results: Sequence["Recorded"], inputs: Sequence[Input] = ()) -> Subgraph:
        """Return the nodes as a body with these inputs and results."""
        computed = {name for node in self.nodes for name in node.outputs}
        empty, claimed = self._copies_of_empty(results), set[str]()
        outputs: list[Input] = []
        for value in results:
            # A result that another body computes must be copied, and a name can be one result.
            if value.name in empty:
                name = empty[value.name].pop()
            elif value.name in computed and value.name not in claimed:
                name = value.name
            else:
                name = self.op("Identity", value.name)
            claimed.add(name)
            # The runtime compares the shapes of both branches: only their ranks are equal.
            outputs.append(Input(name, value.dtype, (None,) * value.ndim))
        nodes = needed(self.nodes, [entry.name for entry in outputs])
        read = values_read(nodes)
        constants = {name: array for name, array in self.constants.items() if name in read}
        body = build_model(nodes, inputs, outputs, constants, OPSET, name=self.prefix).graph
        return Subgraph(body.SerializeToString(), captures(body))

    def _copies_of_empty(self, results: Sequence["Recorded"]) -> dict[str, list[str]]:
        """Write copies of constants without entries, of one in one node; return their names."""
        counts = Counter(value.name for value in results)
        copies = {}
        for name, count in counts.items():
            if count > 1 and name in self.constants and not self.constants[name].size:
                copies[name] = list(self.split(name, [0] * count, axis=0))
        return copies


class Tape:
    """Records operations; operations in a body belong to the body until it is closed.

    All new names start with ``prefix``; no value of the model starts with it. ``functions`` are
    what NumPy's functions record, see ``operations.new_tape``. ``dtype`` is the type of
    floating-point numbers: training files have single precision, because a GPU of a browser has no
    other. ``levels`` are the graph, and inside it the bodies that are open.
    """

    def __init__(self, prefix: str, functions: Any, dtype: DType | type = np.float32) -> None:
        self.functions, self.dtype = functions, np.dtype(dtype)
        self.levels = [Level(prefix)]
        self._bodies = 0

    @property
    def graph(self) -> Level:
        """The nodes of the graph."""
        return self.levels[0]

    @property
    def level(self) -> Level:
        """The list that receives new nodes."""
        return self.levels[-1]

    def record(
        self, op: str, inputs: Sequence[str], attributes: dict[str, AttributeValue] | None = None
    ) -> str:
        """Add a node with one result, unless the same is known; return the name of the result."""
        attributes = attributes or {}
        key = (op, *inputs, *sorted(attributes.items()))
        # A body casts for itself: the runtime warns of casts that it cannot remove for a body.
        for level in self.levels if op != "Cast" else (self.level,):
            if key in level.computed:
                return level.computed[key]
        name = self.level.write(op, inputs, ("",), attributes)[0]
        self.level.computed[key] = name
        return name

    def constant(self, value: object, dtype: DType | type | None = None) -> str:
        """Return the name of a constant; equal constants share a name."""
        array = np.asarray(value, dtype)
        key = array.dtype.str, array.shape, array.tobytes()
        for level in self.levels:
            if key in level.known:
                return level.known[key]
        self.level.known[key] = name = self.level.constant(array)
        return name

    def integers(self, *values: int) -> str:
        """Return the name of a constant vector of integers."""
        return self.constant(values, np.int64)

    @contextmanager
    def body(self) -> Iterator[Level]:
        """Return a context in which operations belong to a new body."""
        self._bodies += 1
        self.levels.append(Level(f"{self.graph.prefix}{self._bodies}/"))
        try:
            yield self.levels[-1]
        finally:
            self.levels.pop()

    def branch(
        self,
        condition: "Recorded",
        then: Callable[[], Sequence[Symbol]],
        otherwise: Callable[[], Sequence[Symbol]],
    ) -> list[Symbol]:
        """Record ``If``: only the operations of the branch that is taken are computed.

        Both functions return results of the same types and ranks. The results of the node have the
        shapes of the results of ``then``.
        """
        bodies = []
        for function in (then, otherwise):
            with self.body() as level:
                results = list(function())
                bodies.append((level.closed(results), results))
        (first, results), (second, _) = bodies
        names = self.level.multi(
            "If", [condition.name], [""] * len(results), then_branch=first, else_branch=second
        )
        return [value.named(name) for value, name in zip(results, names, strict=True)]


class Size:
    """A number that depends on sizes of inputs: ``factor · Π nᵖ``.

    ``numbers`` has the power p of each number n, a recorded integer; or it is one number.
    """

    __array_ufunc__ = None

    def __init__(self, numbers: "Recorded | Mapping[Recorded, float]", factor: float = 1) -> None:
        self.powers = {numbers: 1.0} if isinstance(numbers, Recorded) else dict(numbers)
        self.factor = factor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Size) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        powers = ("n" if power == 1 else f"n^{power:g}" for power in self.powers.values())
        return " ".join([*([f"{self.factor:g}"] if self.factor != 1 else []), *powers])

    def _key(self) -> tuple[object, ...]:
        return frozenset(self.powers.items()), self.factor

    @staticmethod
    def _of(powers: "Mapping[Recorded, float]", factor: float) -> Number:
        left = {number: power for number, power in powers.items() if power}
        return Size(left, factor) if left else factor

    def _with(self, other: "Size", sign: int) -> "dict[Recorded, float]":
        """Return the powers of the product with another number, or of the quotient."""
        powers = dict(self.powers)
        for number, power in other.powers.items():
            powers[number] = powers.get(number, 0) + sign * power
        return powers

    def __add__(self, other: Any) -> Any:
        if isinstance(other, Recorded):
            return np.add(self.recorded(), other)
        if other == 0:
            return self
        if not isinstance(other, Size):
            raise UnsupportedError(f"a file cannot add {self!r} and {other!r} examples.")
        if self.powers == other.powers:
            return self._of(self.powers, self.factor + other.factor)
        return Size(self.number() + other.number())

    __radd__ = __add__

    def __mul__(self, other: Any) -> Any:
        if isinstance(other, Recorded):
            whole = other.dtype.kind == "i" and set(self.powers.values()) == {1}
            return np.multiply(self.number() if whole else self.recorded(), other)
        if isinstance(other, Size):
            return self._of(self._with(other, 1), self.factor * other.factor)
        return self._of(self.powers, self.factor * other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        if isinstance(other, Recorded):
            return np.divide(self.recorded(), other)
        if isinstance(other, Size):
            return self._of(self._with(other, -1), self.factor / other.factor)
        return self._of(self.powers, self.factor / other)

    def __rtruediv__(self, other: Any) -> Any:
        if isinstance(other, Recorded):
            return np.divide(other, self.recorded())
        return self._of({n: -power for n, power in self.powers.items()}, other / self.factor)

    def __floordiv__(self, other: Any) -> Any:
        quotient = self / other
        powers = quotient.powers if isinstance(quotient, Size) else {}
        factor = quotient.factor if isinstance(quotient, Size) else quotient
        if factor != int(factor) or any(power < 0 for power in powers.values()):
            raise UnsupportedError(f"a file cannot divide {self!r} examples by {other!r}.")
        return self._of(powers, int(factor))

    def __rfloordiv__(self, other: "Recorded") -> Any:
        return np.floor_divide(other, self.number())

    def __rmod__(self, other: "Recorded") -> Any:
        return np.remainder(other, self.number())

    def __mod__(self, other: int) -> int:
        if self.factor % other:
            raise UnsupportedError(f"a file cannot divide {self!r} examples by {other!r}.")
        return 0

    def __gt__(self, other: float) -> bool:
        return other <= 0  # a batch has an example

    def __pow__(self, exponent: float) -> Number:
        powers = {number: power * exponent for number, power in self.powers.items()}
        return self._of(powers, self.factor**exponent)

    def recorded(self) -> Symbol:
        """Return the number as a recorded floating-point value."""
        value: Symbol = None
        factor = self.factor
        floats = [(n.astype(np.float64), power) for n, power in self.powers.items()]
        for n, power in floats:
            if power != -1:
                term = n if power == 1 else n**power
                value = term if value is None else value * term
        for n, power in floats:
            if power == -1 and value is None:
                value, factor = np.divide(factor, n), 1
            elif power == -1:
                value = value / n
        return value if factor == 1 else value * factor

    def number(self) -> Symbol:
        """Return the number as a recorded integer."""
        assert set(self.powers.values()) == {1}, "a length is a product of sizes"
        value: Symbol = reduce(mul, self.powers)
        return value if self.factor == 1 else value * int(self.factor)

    def length(self) -> str:
        """Return the name of a vector with the number, for the shape of an array."""
        number: Recorded = self.number()
        return number.tape.record("Reshape", [number.name, number.tape.integers(1)])


def size_of(tape: Tape, name: str, axis: int) -> Size:
    """Return the length of a graph value along ``axis``."""
    shape = tape.record("Shape", [name], {"start": axis, "end": axis + 1})
    return Size(Recorded(tape, tape.record("Squeeze", [shape]), (), _INTEGER))


class Recorded(NDArrayOperatorsMixin):
    """A value of the graph, whose nodes ``tape`` receives."""

    __hash__ = object.__hash__

    def __init__(self, tape: Tape, name: str, shape: Shape, dtype: DType | type) -> None:
        self.tape, self.name, self.shape = tape, name, tuple(shape)
        self.dtype = np.dtype(dtype)
        # The logarithm of a value that is a power of a number, otherwise None: see ``functions``.
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
        """Bytes of the array for one example. The library compares them to choose a formula."""
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

    def __iter__(self) -> Iterator[Symbol]:
        return (self[i] for i in range(len(self)))

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
        wanted = np.dtype(dtype)
        if wanted == np.float64 or (wanted.kind == "f" and self.dtype == self.tape.dtype):
            wanted = self.tape.dtype
        if wanted == self.dtype:
            return self.copy() if copy else self
        return self.new("Cast", shape=self.shape, dtype=wanted, to=TYPE_CODES[wanted.name])

    # -- shapes ------------------------------------------------------------------------------------

    def reshape(self, *shape: Any, order: str = "C") -> Symbol:
        whole = len(shape) == 1 and not isinstance(shape[0], int | Size)
        sizes = list(shape[0] if whole else shape)
        sizes = [s if isinstance(s, Size) else int(s) for s in sizes]
        if -1 in sizes:
            known = prod(s for s in sizes if s != -1)
            sizes[sizes.index(-1)] = self.size // known
        result = self.copy()
        if tuple(sizes) != self.shape:
            target = list(sizes)
            moving = [axis for axis, size in enumerate(sizes) if isinstance(size, Size)]
            if len(moving) > 1:  # zero keeps the size of an axis, and -1 stands for the rest
                moving = [axis for axis in moving if sizes[axis] not in self.shape[axis : axis + 1]]
                target = [
                    s if i in moving or isinstance(s, int) else 0 for i, s in enumerate(sizes)
                ]
            if moving:
                target[moving[0]] = -1
            result = self.new("Reshape", self._target(tuple(target)), shape=tuple(sizes))
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
        wide = dtype is not None and self.dtype.kind == np.dtype(dtype).kind == "f"
        if wide and axis is None and self.ndim > 1 and self.shape[-1] != 1:
            # A sum of sums rounds less than one long sum in single precision.
            return self._reduced("ReduceSum", -1, keepdims, dtype).sum(keepdims=keepdims)
        return self._reduced("ReduceSum", axis, keepdims, dtype)

    def max(self, axis: Any = None, keepdims: bool = False) -> Symbol:
        return self._reduced("ReduceMax", axis, keepdims)

    def min(self, axis: Any = None, keepdims: bool = False) -> Symbol:
        return self._reduced("ReduceMin", axis, keepdims)

    def mean(self, axis: Any = None, dtype: Any = None, keepdims: bool = False) -> Symbol:
        total = self.sum(axis, dtype or self.tape.dtype, keepdims)
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
        super().__init__(f"a file cannot be written: {what} known in a run only.")


def lifted(tape: Tape, value: Any, dtype: DType | type | None = None) -> Symbol:
    """Return a number, an array or a size as a value of the graph; recorded values do not change.

    Without a ``dtype``, floating-point numbers have the type of the tape, and others their own
    type.
    """
    if isinstance(value, Recorded):
        return value
    if isinstance(value, Size):
        return value.recorded()
    array = np.asarray(value)
    if dtype is not None:
        array = array.astype(dtype)
    elif array.dtype.kind == "f":
        array = array.astype(tape.dtype)
    return Recorded(tape, tape.constant(array), array.shape, array.dtype)


def broadcast_shape(shapes: Sequence[Shape]) -> Shape:
    """Return the shape of an operation on arrays; sizes that are not known fit each other."""
    rank = max(map(len, shapes), default=0)
    result: list[Any] = []
    for axis in range(-rank, 0):
        sizes = [shape[axis] for shape in shapes if len(shape) >= -axis]
        different = [size for size in dict.fromkeys(sizes) if size != 1]
        if len(different) > 1 and not all(isinstance(size, Size) for size in different):
            raise UnsupportedError(f"arrays of shapes {shapes} cannot be combined.")
        result.append(different[0] if different else 1)
    return tuple(result)
