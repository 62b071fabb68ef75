"""Implements a backend's operations, and a file's random numbers, on recorded arrays.

Only operations that the statistics of training files need are here; another one raises an
``UnsupportedError``.
"""

from functools import reduce
from math import pi
from operator import mul
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import numpy as np

from kfac_engine._types import DType
from kfac_engine.backend import channel_groups
from kfac_engine.backend.protocol import Accumulation
from kfac_engine.backend.window import SlidingWindow, Window
from kfac_engine.errors import UnsupportedError
from kfac_engine.recording.functions import Namespace, applied, called
from kfac_engine.recording.recorded import Recorded, Size, Symbol, Tape, lifted, size_of

# A low-discrepancy sequence of two dimensions, in units of 2⁻²⁴: the powers of the inverse of the
# root of x³ = x + 1 (Roberts 2018). Its terms for the next examples and steps fill the unit square
# more evenly than random numbers.
_BITS = 2**24
_FIRST, _SECOND = 12664745, 9560333
_NEXT_EXAMPLE = 10368889  # the golden ratio
_PRIME = 2**31 - 1  # of the hashes
_COLUMNS = 256  # of the table of hashes
_LARGEST = 1 - 2**-24  # the largest float32 below one


def new_tape(prefix: str, dtype: DType | type = np.float32) -> Tape:
    """Return a tape without nodes; no value of the model starts with the prefix."""
    functions = SimpleNamespace(
        applied=applied, called=called, namespace=Namespace, backend=Operations
    )
    return Tape(prefix, functions, dtype)


class Operations:
    """The backend of recorded arrays; the tape receives the nodes."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.xp: Any = Namespace(tape)

    def __getattr__(self, name: str) -> NoReturn:
        raise UnsupportedError(f"a file cannot compute '{name}', an operation of this layer.")

    def asarray(self, value: Any, dtype: Any = None) -> Symbol:
        """Return a value of the graph."""
        return self.xp.asarray(value, dtype)

    def matmul(self, x: Symbol, y: Symbol) -> Symbol:
        """Return the product of two matrices, or of two stacks."""
        return np.matmul(x, y)

    def draw_classes(self, logits: Symbol, uniforms: Symbol, axis: int) -> Symbol:
        """Return a class for each row of ``softmax(logits)``; see ``Backend``."""
        library: Any = SimpleNamespace(xp=self.xp)
        return channel_groups.draw_classes(library, logits, uniforms, axis)

    def cross_entropy(self, logits: Symbol, ids: Symbol, axis: int) -> None:
        """Return None: a file has no such operator; see ``Backend``."""
        del logits, ids, axis

    def second_moment(
        self, x: Symbol, out: Symbol, how: Accumulation, *, feature_axis: int = -1
    ) -> None:
        """Compute ``out ← beta·out + alpha·Σ x xᵀ`` over rows; see ``Backend``."""
        rows = np.moveaxis(x, feature_axis, -1)
        self._add_moment(rows.reshape(-1, rows.shape[-1]), out, how)

    def patch_second_moment(
        self, x: Symbol, window: Window, out: Symbol, how: Accumulation
    ) -> None:
        """Compute ``out ← beta·out + alpha·Σ z zᵀ`` over patches; see ``Backend``."""
        rows = self.patches(x, window)
        if out.ndim == 2:
            self._add_moment(rows.reshape(-1, rows.shape[-1]), out, how)
            return
        groups = channel_groups.split_features(rows, out.shape[0], window.taps)
        stack = groups.transpose(1, 0, 2, 3).reshape(out.shape[0], -1, groups.shape[-1])
        self._add_moment(stack, out, how)

    def _add_moment(self, rows: Any, out: Symbol, how: Accumulation) -> None:
        """Add ``Σ r rᵀ`` of rows ``(…, rows, features)`` with a one appended where needed."""
        rows = rows.astype(out.dtype)
        alpha: Any = how.alpha
        beta: Any = how.beta
        if how.homogeneous:
            rows = self.homogeneous(rows)
        before = None if isinstance(beta, float) and beta == 0 else beta * out
        d = rows.shape[-1]
        if rows.ndim > 2:
            moment = rows.swapaxes(-1, -2) @ rows
        elif before is not None and isinstance(alpha, float) and alpha == 1:
            # The product adds to an array without a pass of its own.
            out.bind(rows.new("Gemm", rows.name, before.name, shape=(d, d), transA=1))
            return
        else:
            moment = rows.new("Gemm", rows.name, shape=(d, d), transA=1)
        new = alpha * moment
        out.bind(new if before is None else before + new)

    def homogeneous(self, rows: Symbol) -> Symbol:
        """Return rows with a one as their last feature."""
        after = [0] * (2 * rows.ndim - 1)
        one = self.tape.constant(1, rows.dtype)
        shape = (*rows.shape[:-1], rows.shape[-1] + 1)
        return rows.new("Pad", self.tape.integers(*after, 1), one, shape=shape)

    def patches(self, x: Symbol, window: Window) -> Symbol:
        """Return the patches of images of any size as rows ``(n, t, taps · channels)``."""
        n, channels = x.shape[:2]
        images: Any = x
        if not window.is_pointwise:
            images = self._copies(self._cropped(x, window), window)
        split = images.reshape(n, channels, window.taps, -1)
        return split.transpose(0, 3, 2, 1).reshape(n, -1, window.taps * channels)

    def _cropped(self, x: Symbol, window: Window) -> Symbol:
        """Return images without the pixels that a negative padding removes."""
        for axis, (begin, end) in enumerate(zip(window.begins, window.ends, strict=True), start=2):
            if min(begin, end) < 0:
                x = x.rows(max(0, -begin), x.shape[axis] - max(0, -end), axis)
        return x

    def _copies(self, x: Symbol, window: Window) -> Symbol:
        """Return ``(n, channels · taps, positions…)``: by a convolution with a filter per tap."""
        rank, channels = x.ndim, x.shape[1]
        taps = np.eye(window.taps, dtype=x.dtype).reshape(window.taps, 1, *window.kernel)
        filters = self.tape.constant(np.tile(taps, (channels, *(1,) * (rank - 1))))
        pads = tuple(max(0, size) for size in window.begins + window.ends)
        same = window.same if isinstance(window, SlidingWindow) else ""
        padding: dict[str, Any] = {"auto_pad": same} if same else {"pads": pads}
        copies = x.new(
            "Conv",
            filters,
            shape=(x.shape[0], channels * window.taps, *x.shape[2:]),
            group=channels,
            kernel_shape=window.kernel,
            strides=window.strides,
            dilations=window.dilations,
            **padding,
        )
        rows = zip(range(2, rank), x.shape[2:], window.reaches, window.strides, strict=True)
        positions = [
            size_of(self.tape, copies.name, axis)
            if isinstance(size, Size)
            else (size + pads[axis - 2] + pads[axis + rank - 4] - reach - 1) // stride + 1
            for axis, size, reach, stride in rows
        ]
        copies.shape = (*copies.shape[:2], *positions)
        return copies


class Draws:
    """Random numbers of a step.

    ``random`` and ``standard_normal``, named as in a generator, draw targets: terms of a
    low-discrepancy sequence, by the numbers of the step and the example. ``uniform`` and ``normal``
    are hashes of a counter, for the random nodes of a model, whose numbers must not follow a
    pattern. If ``noise`` is a list, the random numbers are inputs of the file, which the list
    receives; if it is None, the file draws them.
    """

    def __init__(self, tape: Tape, step: Symbol, noise: list["NoiseInput"] | None) -> None:
        self._tape, self._step, self._noise, self._count = tape, step, noise, 0

    def random(self, shape: Any) -> Symbol:
        """Return uniform numbers in (0, 1) for targets."""
        numbers = self._input(shape, "noise")
        return self._terms(shape, _FIRST) if numbers is None else numbers

    def standard_normal(self, shape: Any) -> Symbol:
        """Return normal numbers for targets, by the method of Box and Muller."""
        numbers = self._input(shape, "noise")
        if numbers is not None:
            return numbers
        return _normal(self._terms(shape, _FIRST), self._terms(shape, _SECOND))

    def uniform(self, shape: Any, name: str) -> Symbol:
        """Return uniform numbers in (0, 1); if files read their noise, the input ``name``."""
        numbers = self._input(shape, name)
        return self._hashes(shape) if numbers is None else numbers

    def normal(self, shape: Any, name: str) -> Symbol:
        """Return standard normal numbers; if files read their noise, the input ``name``."""
        numbers = self._input(shape, name)
        if numbers is not None:
            return numbers
        return _normal(self._hashes(shape), self._hashes(shape))

    def _input(self, shape: Any, name: str) -> Symbol | None:
        if self._noise is None:
            return None
        count = sum(entry.name.partition(" ")[0] == name for entry in self._noise)
        entry = NoiseInput(f"{name} {count}" if count else name, tuple(shape))
        self._noise.append(entry)
        return Recorded(self._tape, entry.name, entry.shape, np.float32)

    def _terms(self, shape: Any, next_step: int) -> Symbol:
        self._count += 1  # another part of the sequence for each draw of a step
        start = self._step * next_step + self._count * 7919 * next_step
        bits = self._counters(shape) * _NEXT_EXAMPLE + start
        flat = ((bits % _BITS).astype(np.float32) + 0.5) * (1 / _BITS)
        return flat.reshape(tuple(shape))

    def _hashes(self, shape: Any) -> Symbol:
        """Return numbers that are hashes of their place ``(row, column)`` in a table.

        An entry of the table is ``a·b + c`` modulo a prime, with hashes a and c of the row and b of
        the column. For any two entries, all pairs of values are equally probable.
        """
        size = _product(shape)
        length = size.number() if isinstance(size, Size) else size
        rows = (length + (_COLUMNS - 1)) // _COLUMNS
        factors, shifts = (self._scrambled(rows).reshape(-1, 1) for _ in range(2))
        table = (factors * self._scrambled(_COLUMNS) + shifts) % _PRIME
        numbers = np.minimum((table.astype(np.float32) + 0.5) * (1 / _PRIME), _LARGEST)
        flat = numbers.reshape(-1)
        end = size.length() if isinstance(size, Size) else self._tape.integers(size)
        entries = flat.new("Slice", self._tape.integers(0), end, shape=(size,))
        return entries.reshape(tuple(shape))

    def _scrambled(self, count: Any) -> Symbol:
        """Return hashes of the numbers from zero to a count, the next ones of the step."""
        self._count += 1
        start = (self._step * 1000003 + self._count * 69069) % _PRIME
        bits = (self._range(count) * 48271 + start) % _PRIME
        for constant in (1013904223, 1664525):  # x⁵ is a permutation of the residues
            square = bits * bits % _PRIME
            bits = (square * square % _PRIME * bits + constant) % _PRIME
        return bits

    def _counters(self, shape: Any) -> Symbol:
        """Return the numbers from zero to the number of entries."""
        size = _product(shape)
        return Namespace(self._tape).arange(size) if isinstance(size, Size) else self._range(size)

    def _range(self, stop: Any) -> Symbol:
        """Return the numbers from zero to a recorded or known number."""
        tape = self._tape
        bounds = [lifted(tape, k, np.int64).name for k in (0, stop, 1)]
        size = Size(stop) if isinstance(stop, Recorded) else stop
        return Recorded(tape, tape.record("Range", bounds), (size,), np.int64)


def _product(shape: Any) -> Any:
    """Return the number of entries of an array."""
    return reduce(mul, shape, 1)


def _normal(first: Symbol, second: Symbol) -> Symbol:
    """Return normal numbers from two independent uniform numbers."""
    radius, angle = (np.log(first) * -2.0) ** 0.5, second * (2 * pi)
    return radius * angle.new("Cos", shape=angle.shape)


class NoiseInput(NamedTuple):
    """An input of the file with random numbers."""

    name: str
    shape: tuple[Any, ...]
