"""The GPU suite's kernels, one by one, each against what NumPy makes of the same data."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend.cupy_backend import CupyBackend
from kfac_engine.backend.numpy_backend import NumpyBackend
from kfac_engine.backend.protocol import Backend
from kfac_engine.bench.gpu_meter import Work, difference
from kfac_engine.bench.jobs import square_window
from kfac_engine.bench.made import factor, normal
from kfac_engine.kernels.moments import mirror
from kfac_engine.kernels.symmetric import Floor, narrow, widen

_DECAY = 0.5
_WINDOW = square_window(3, 1, 1)
# Of squares and of sums of some thousand float32 numbers.
_TOLERANCE = 1e-4


class Sizes(NamedTuple):
    """How much each kernel is given.

    Attributes:
        images: In a batch.
        channels: Of each.
        side: Pixels an axis.
        matrix: Side of matrices.
        ids: Identifiers that are counted, of a twentieth as many words.
        classes: That are drawn from, for each image 64 times.
    """

    images: int = 32
    channels: int = 64
    side: int = 56
    matrix: int = 4608
    ids: int = 1 << 20
    classes: int = 1000


class _Case(NamedTuple):
    """A function of a backend and arrays; what it changes is its last array, and its result.

    Of second moments, NumPy's are sure to have their lower triangles only.
    """

    name: str
    run: Callable[..., Array]
    arrays: tuple[Array, ...]
    products: float = 0.0
    symmetric: bool = False


def kernel_works(backend: CupyBackend, sizes: Sizes) -> Iterator[Work]:
    """Every kernel but those of whole factors, which the network has.

    Args:
        backend: On the device.
        sizes: Of the data.

    Yields:
        Work with its check.
    """
    for case in (*_of_images(sizes), *_of_rows(sizes)):
        yield _compared(backend, case)
    yield from _of_matrices(backend, sizes.matrix)


def _compared(backend: CupyBackend, case: _Case) -> Work:
    """A primitive, checked against NumPy's."""
    arrays = [backend.asarray(array) for array in case.arrays]

    def check() -> float:
        given = [backend.asarray(array.copy()) for array in case.arrays]
        found = backend.to_numpy(case.run(backend, *given))
        wide = [a.astype(np.float64) if a.dtype.kind == "f" else a for a in case.arrays]
        wanted = case.run(NumpyBackend(), *wide)
        return difference(*map(np.tril, (found, wanted)) if case.symmetric else (found, wanted))

    # What is changed in place is read as one of the arrays, and written as the result.
    moved = sum(array.nbytes for array in arrays) + case.run(backend, *arrays).nbytes
    return Work(
        case.name,
        lambda: case.run(backend, *arrays),
        case.products,
        moved,
        check=check,
        tolerance=_TOLERANCE,
    )


def _of_images(sizes: Sizes) -> Iterator[_Case]:
    n, channels, side, *_ = sizes
    x, ds = normal(n, channels, side, side), normal(n, channels, side, side, seed=1)
    rows, d = n * side**2, 9 * channels
    told = f"{n}×{channels}×{side}², 3×3"

    def moment(b: Backend, x: Array, out: Array) -> Array:
        b.patch_second_moment(x, _WINDOW, out, homogeneous=True, beta=_DECAY)
        return out

    def groups(b: Backend, x: Array, out: Array) -> Array:
        b.grouped_second_moment(x, _WINDOW, out, beta=_DECAY)
        return out

    def squares(b: Backend, x: Array, ds: Array, out: Array) -> Array:
        b.squared_gradients(x, _WINDOW, ds, out, beta=_DECAY)
        return out

    def diagonal(b: Backend, x: Array, out: Array) -> Array:
        b.patch_squares(x, _WINDOW, out, beta=_DECAY)
        return out

    yield _Case(
        f"A with its border, {told}", moment, (x, _zeros(d + 1, d + 1)), rows * d * d / 2, True
    )
    yield _Case(
        f"A of each channel, {told}", groups, (x, _zeros(channels, 9, 9)), rows * d * 5.0, True
    )
    yield _Case(f"squared gradients, {told}", squares, (x, ds, _zeros(1, d, channels)),
                float(rows) * d * channels)  # fmt: skip
    yield _Case(f"squares of patches, {told}", diagonal, (x, _zeros(d)))
    yield _Case(f"patches written out, {told}", lambda b, x: b.patches(x, _WINDOW), (x,))
    yield _Case(f"sums of examples, {told}", lambda b, x, ds: b.example_sums(x, ds, (2, 3)),
                (x, ds))  # fmt: skip


def _of_rows(sizes: Sizes) -> Iterator[_Case]:
    draws, rng = 64 * sizes.images, np.random.default_rng(0)
    logits, uniforms = normal(draws, sizes.classes), rng.random(draws)
    words = sizes.ids // 20
    ids = rng.integers(0, words, sizes.ids)

    side = sizes.matrix

    def average(b: Backend, measured: Array, out: Array) -> Array:
        b.add_scaled(out, measured, 0.1, 0.9)
        return out

    yield _Case(f"{draws} classes of {sizes.classes}", lambda b, z, u: b.draw_classes(z, u, 1),
                (logits, uniforms))  # fmt: skip
    yield _Case(f"{sizes.ids} identifiers of {words}", lambda b, ids: b.count_ids(ids, words),
                (ids,))  # fmt: skip
    arrays = normal(side, side), _zeros(side, side)
    yield _Case(f"average of {side}²", average, arrays)


def _of_matrices(backend: CupyBackend, side: int) -> Iterator[Work]:
    """A factor's way to a factorisation, and back."""
    host = factor(side)
    whole = np.tril(host) + np.tril(host, -1).T
    damped = whole.astype(np.float64) + np.eye(side)
    stack, asked = backend.asarray(host[None]), backend.asarray(np.ones(1))
    wide = backend.asarray(damped[None])

    def work(name: str, run: Callable[[], Array], wanted: Array, moved: int) -> Work:
        return Work(
            f"{name}, {side}²",
            run,
            0.0,
            float(moved),
            check=lambda: difference(backend.to_numpy(run()), wanted),
        )

    half = stack.nbytes // 2  # one triangle is read

    def mirrored() -> Array:
        mirror(backend.device, stack[0])
        return stack[0]

    def widened() -> Array:
        return widen(backend.device, stack, asked, Floor(0.0, 0.0))[0][0]

    def narrowed() -> Array:
        return narrow(backend.device, wide, np.float32)[0]

    yield work("mirror", mirrored, whole, 2 * half)
    yield work("widened, damped and described", widened, damped, half + wide.nbytes)
    yield work("narrowed", narrowed, damped, wide.nbytes // 2 + stack.nbytes)


def _zeros(*shape: int) -> Array:
    zeros: Any = np.zeros(shape, np.float32)
    return zeros
