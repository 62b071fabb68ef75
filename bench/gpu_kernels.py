"""The kernels of the GPU suite, each compared with NumPy on the same data."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend.cpu.backend import NumpyBackend
from kfac_engine.backend.cuda.backend import CupyBackend
from kfac_engine.backend.protocol import Backend
from kfac_engine.bench.data import factor, normal
from kfac_engine.bench.gpu_counts import Counted, Sizes, kernels
from kfac_engine.bench.gpu_meter import Work, difference
from kfac_engine.bench.jobs import square_window
from kfac_engine.kernels.moments import mirror
from kfac_engine.kernels.symmetric import Floor, narrow, widen

_DECAY = 0.5
_WINDOW = square_window(3, 1, 1)
# Tolerance of squares and of sums of some thousand float32 numbers.
_TOLERANCE = 1e-4


class _Case(NamedTuple):
    """A function of a backend and arrays; it changes its last array and returns it.

    Second moments are compared in their lower triangles, the only part that NumPy writes.
    """

    kernel: str
    run: Callable[..., Array]
    arrays: tuple[Array, ...]
    symmetric: bool = False


def kernel_works(backend: CupyBackend, sizes: Sizes) -> Iterator[Work]:
    """Yield the work of every kernel; whole factors are part of the network's work."""
    counted = kernels(sizes)
    for case in (*_of_images(sizes), *_of_rows(sizes)):
        yield _compared(backend, case, counted[case.kernel])
    for kernel, run, wanted in _of_matrices(backend, sizes.matrix):
        yield Work(counted[kernel], run, check=_off(backend, run, wanted))


def _off(backend: CupyBackend, run: Callable[[], Array], wanted: Array) -> Callable[[], float]:
    return lambda: difference(backend.to_numpy(run()), wanted)


def _compared(backend: CupyBackend, case: _Case, counted: Counted) -> Work:
    """Return the work of a primitive, checked against NumPy in float64."""
    arrays = [backend.asarray(array) for array in case.arrays]

    def check() -> float:
        arrays = [backend.asarray(array.copy()) for array in case.arrays]
        result = backend.to_numpy(case.run(backend, *arrays))
        wide = [a.astype(np.float64) if a.dtype.kind == "f" else a for a in case.arrays]
        wanted = case.run(NumpyBackend(), *wide)
        pair = map(np.tril, (result, wanted)) if case.symmetric else (result, wanted)
        return float(difference(*pair))

    run = lambda: case.run(backend, *arrays)  # noqa: E731 (the work)
    return Work(counted, run, check=check, tolerance=_TOLERANCE)


def _of_images(sizes: Sizes) -> Iterator[_Case]:
    n, channels, side, *_ = sizes
    x, ds = normal(n, channels, side, side), normal(n, channels, side, side, seed=1)
    d = 9 * channels

    def moment(b: Backend, x: Array, out: Array) -> Array:
        b.patch_second_moment(x, _WINDOW, out, homogeneous=True, beta=_DECAY)
        return out

    def groups(b: Backend, x: Array, out: Array) -> Array:
        b.patch_second_moment(x, _WINDOW, out, beta=_DECAY)
        return out

    def squares(b: Backend, x: Array, ds: Array, out: Array) -> Array:
        b.squared_gradients(x, _WINDOW, ds, out, beta=_DECAY)
        return out

    def diagonal(b: Backend, x: Array, out: Array) -> Array:
        b.patch_squares(x, _WINDOW, out, beta=_DECAY)
        return out

    yield _Case("moment", moment, (x, _zeros(d + 1, d + 1)), symmetric=True)
    yield _Case("groups", groups, (x, _zeros(channels, 9, 9)), symmetric=True)
    yield _Case("squares", squares, (x, ds, _zeros(1, d, channels)))
    yield _Case("channels", squares, (x, ds, _zeros(channels, 9, 1)))
    yield _Case("diagonal", diagonal, (x, _zeros(d)))
    yield _Case("patches", lambda b, x: b.patches(x, _WINDOW), (x,))
    yield _Case("sums", lambda b, x, ds: b.example_sums(x, ds, (2, 3)), (x, ds))


def _of_rows(sizes: Sizes) -> Iterator[_Case]:
    rng, side, words = np.random.default_rng(0), sizes.matrix, sizes.words
    logits, uniforms = normal(sizes.draws, sizes.classes), rng.random(sizes.draws)
    ids = rng.integers(0, words, sizes.ids)

    def average(b: Backend, measured: Array, out: Array) -> Array:
        b.add_scaled(out, measured, 0.1, 0.9)
        return out

    yield _Case("classes", lambda b, z, u: b.draw_classes(z, u, 1), (logits, uniforms))
    yield _Case("ids", lambda b, ids: b.count_ids(ids, words), (ids,))
    norms = lambda b, x: b.asarray(np.array(b.squared_norms([x])))  # noqa: E731 (a case)
    yield _Case("norms", norms, (normal(side, side),))
    yield _Case("finite", lambda b, x: b.are_finite([x]), (normal(side, side),))
    yield _Case("average", average, (normal(side, side), _zeros(side, side)))


def _of_matrices(
    backend: CupyBackend, side: int
) -> Iterator[tuple[str, Callable[[], Array], Array]]:
    """Yield the conversions of a factor for a factorisation: kernel, run and expected result."""
    host = factor(side)
    whole = np.tril(host) + np.tril(host, -1).T
    damped = whole.astype(np.float64) + np.eye(side)
    stack, dampings = backend.asarray(host[None]), backend.asarray(np.ones(1))
    wide = backend.asarray(damped[None])

    def mirrored() -> Array:
        mirror(backend.device, stack[0])
        first: Array = stack[0]
        return first

    def widened() -> Array:
        wide: Array = widen(backend.device, stack, dampings, Floor(0.0, 0.0))[0][0]
        return wide

    def narrowed() -> Array:
        single: Array = narrow(backend.device, wide, np.float32)[0]
        return single

    yield "mirror", mirrored, whole
    yield "widen", widened, damped
    yield "narrow", narrowed, damped


def _zeros(*shape: int) -> Array:
    return np.zeros(shape, np.float32)
