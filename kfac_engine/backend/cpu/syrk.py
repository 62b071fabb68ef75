"""Lower triangles of ``out ← beta·out + alpha·Σ x xᵀ``, the work shared by threads.

With few rows each thread takes a band of ``out``: a rectangle left of the diagonal and a triangle,
bands of equal area. With many rows each takes part of them and a matrix of its own, and the
matrices are added up. The second way keeps products large, the first needs no memory.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from math import sqrt

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend.cpu import blas
from kfac_engine.backend.threads import Workers, single_threaded_blas

# Multiplications that take half a millisecond; those that another thread could do before it wakes.
_WORTH_A_THREAD = 3e7
_WAKING = 5e6
# Below, adding up one more matrix takes too long beside the products it saves: 4096 rows of 1024
# take 17.8 ms in parts and 19.0 ms in bands, 256 rows 2.0 ms and 1.3 ms.
_ROWS_OF_A_PART = 512
# Float32 sums run over so many columns before they are added up in float64.
_SUM_BLOCK = 4096
# Rows added at a time, so that little is read above the diagonal.
_ADDED_ROWS = 64
# Vectors of every processor, and cache lines.
_ALIGNED = 16


def threads_for(multiplications: float, workers: Workers) -> int:
    """How many threads are worth having.

    Args:
        multiplications: In all; half of ``d²·rows`` for a triangle.
        workers: Threads there are.

    Returns:
        At least one; one alone inside a task.
    """
    worth = int(multiplications / _WORTH_A_THREAD)
    return len(workers.bands(min(worth, workers.count))) if worth > 1 else 1


def share(tasks: Sequence[Callable[[], None]], threads: int, workers: Workers) -> None:
    """Do tasks side by side, if more than one thread is worth having; BLAS runs on one.

    Args:
        tasks: As for ``Workers.run``.
        threads: Worth having.
        workers: Threads there are.
    """
    if threads > 1:
        workers.run(tasks)
        return
    with single_threaded_blas():
        for task in tasks:
            task()


def parts_for(rows: int, side: int, workers: Workers, spare: int) -> int:
    """In how many parts to take rows, each with a matrix of its own.

    Args:
        rows: Number of rows.
        side: Of the matrix.
        workers: Threads there are.
        spare: Numbers there is memory for.

    Returns:
        One where bands are better, or where there is no memory for more.
    """
    threads = threads_for(rows * side * side / 2, workers)
    roomy = 1 + spare // max(side * side, 1)
    return max(1, min(threads, rows // _ROWS_OF_A_PART, roomy))


def accumulate(
    parts: Sequence[Iterable[Array]],
    out: Array,
    alpha: float,
    beta: float,
    workers: Workers,
    sums: Sequence[Array | None] = (),
) -> None:
    """Lower triangle of ``out ← beta·out + alpha·Σ piece pieceᵀ``.

    Args:
        parts: Matrices ``(d, k)`` that BLAS can read where they lie; of a part, each is used before
            the next is asked for. Each part but the first takes a matrix of working memory.
        out: ``(d, d)``; rows may lie apart.
        alpha: Scale of the new moment.
        beta: Scale of the old one; zero overwrites.
        workers: Threads.
        sums: For each part ``(d,)``, float64, to which its columns are added; nothing without.
    """
    first, *others = parts
    beside = sums or [None] * len(parts)
    if not others:
        _add_pieces(first, out, alpha, beta, workers, beside[0])
        return
    rooms = [_room(out) for _ in others]
    tasks = [partial(_add_pieces, first, out, alpha, beta, workers, beside[0])]
    tasks += [
        partial(_add_pieces, pieces, room, alpha, 0.0, workers, total)
        for pieces, room, total in zip(others, rooms, beside[1:], strict=True)
    ]
    workers.run(tasks)
    step = _ADDED_ROWS * len(parts)
    starts = [range(i, len(out), step) for i in range(0, step, _ADDED_ROWS)]
    workers.run([partial(_add_rooms, rooms, out, some) for some in starts])


def scale(out: Array, beta: float) -> None:
    """``out ← beta·out``, in place; zero overwrites, NaN included."""
    if beta == 0.0:
        out[...] = 0.0
    elif beta != 1.0:
        out *= beta


def _add_pieces(
    pieces: Iterable[Array],
    out: Array,
    alpha: float,
    beta: float,
    workers: Workers,
    total: Array | None,
) -> None:
    for piece in pieces:
        columns = [] if total is None else [partial(_add_columns, piece, total)]
        work = piece.size * len(piece) / 2
        threads = threads_for(work, workers)
        if threads == 1:
            for task in columns:
                task()
            blas.syrk(piece, out, alpha=alpha, beta=beta)
        else:
            bands = _bands(len(piece), threads, _WAKING / work)
            tasks = [partial(_add_band, piece, out, band, alpha, beta) for band in bands]
            workers.run([*tasks, *columns])
        beta = 1.0
    scale(out, beta)


def _add_columns(piece: Array, total: Array) -> None:
    for start in range(0, piece.shape[1], _SUM_BLOCK):
        block = piece[:, start : start + _SUM_BLOCK]
        total += block @ np.ones(block.shape[1], block.dtype)


def _bands(side: int, count: int, ahead: float) -> list[slice]:
    """Rows of a lower triangle in bands of about equal area, the first larger by some of all."""
    each = (1.0 - ahead) / count
    areas = (ahead + each * i for i in range(1, count))
    cuts = {_ALIGNED * round(side * sqrt(area) / _ALIGNED) for area in areas}
    return [slice(a, b) for a, b in pairwise(sorted({0, *cuts, side})) if b <= side]


def _add_band(piece: Array, out: Array, band: slice, alpha: float, beta: float) -> None:
    rows, left = piece[band], slice(0, band.start)
    if band.start:
        blas.gemm(rows, piece[left], out[band, left], alpha=alpha, beta=beta)
    blas.syrk(rows, out[band, band], alpha=alpha, beta=beta)


def _room(like: Array) -> Array:
    """An uninitialised matrix, but for zeros where ``_add_rooms`` reads above the diagonal."""
    room: Array = np.empty(like.shape, like.dtype)
    for start in range(0, len(room), _ADDED_ROWS):
        some = slice(start, start + _ADDED_ROWS)
        room[some, some] = 0.0
    return room


def _add_rooms(rooms: Iterable[Array], out: Array, starts: range) -> None:
    for start in starts:
        stop = min(start + _ADDED_ROWS, len(out))
        for room in rooms:
            out[start:stop, :stop] += room[start:stop, :stop]
