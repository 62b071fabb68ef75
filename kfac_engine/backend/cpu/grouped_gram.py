"""Second moments of patches by groups of channels: pixel by pixel where groups are small.

A group of ``k`` channels is an image with one axis more, of side ``k``, under a kernel with as many
taps along it. So let every channel be a group of its own. Then the entry of taps ``v`` and
``v + δ`` is a sum over output positions ``o`` of

    S[δ][o·stride + v·dilation − begin],   S[δ][q] = Σ_n x_n[q + δ·dilation] x_n[q],

and only ``S``, one image for each of the 13 distances of a 3 × 3 kernel, takes passes over the
data: along memory, without patches. Sums over positions are products with matrices of ones and
zeros, one axis at a time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from math import prod

import numpy as np

from kfac_engine._types import Array, DType
from kfac_engine.backend.channel_groups import check_group_sides, scale, split_features
from kfac_engine.backend.cpu.patch_gram import patch_second_moment
from kfac_engine.backend.cpu.syrk import share, threads_for
from kfac_engine.backend.kernel_offsets import distances
from kfac_engine.backend.patch_sums import patch_sums
from kfac_engine.backend.threads import Workers
from kfac_engine.backend.window import Window

# Nanoseconds that things take, measured on 32 images of one core in float32: a pixel for each
# distance; for each tap, when patches of each group are copied and multiplied; a group that is
# taken alone. Milliseconds of both ways, groups alone / pixel by pixel:
#
#   channels of a group                      1            2            3            4            8
#   96 channels, 28 × 28, 3 × 3      43 /  8.5    45 / 22      50 / 36      43 / 65      40 / 117
#   128 channels, 7 × 7, 3 × 3                    15 /  3.0                8.1 / 4.6    5.7 / 9.5
#   96 channels, 28 × 28, 1 × 1      51 /  1.0    26 /  1.4    21 / 1.8     15 / 2.2    8.5 / 3.6
_PIXEL = 0.27
_TAP = 1.6
_GROUP = 2e5
# Pixels that are multiplied at a time. 32 × 96 × 56 × 56 take two threads 68 ms with half a
# megabyte, 20 with three, 18 with eight: they wait for each other between short calls.
_CHUNK_BYTES = 8 << 20
# So many images are summed in their own precision before the sums are added up in float64.
_SUM_IMAGES = 64
# A product of two numbers from memory takes as long as so many of SYRK's.
_PIXEL_COST = 16


@dataclass(frozen=True, slots=True)
class _Means:
    """What each of some threads may take.

    Attributes:
        threads: How many are worth having.
        numbers: That one multiplies at a time.
        workers: All there are.
    """

    threads: int
    numbers: int
    workers: Workers


@dataclass(frozen=True, slots=True)
class _Plan:
    """Where sums over positions come from and go to.

    Attributes:
        shifts: For each distance, how far a pixel's partner lies behind it in memory.
        seen: For each distance, for each axis, ``(side, taps)``: a one where a tap ``v`` sees a
            pixel at one of the outputs, and ``v + δ`` another.
        rows: Features of the later of the two taps, over all distances.
        columns: Those of the earlier.
    """

    shifts: tuple[int, ...]
    seen: tuple[tuple[Array, ...], ...]
    rows: Array
    columns: Array


def grouped_second_moment(  # noqa: PLR0913 (the primitive's, and what it may take)
    x: Array,
    window: Window,
    out: Array,
    *,
    homogeneous: bool,
    alpha: float,
    beta: float,
    scratch_bytes: int,
    workers: Workers,
) -> None:
    """Lower triangles of ``out ← beta·out + alpha·Σ z zᵀ`` for each group of channels, in place.

    Args:
        x: Images, ``(n, channels, *sides)``, any strides; accumulated in the dtype of ``out``.
        window: Geometry.
        out: ``(groups, taps·channels/groups (+ 1), same)``, C-contiguous.
        homogeneous: Whether each patch ends with an implicit one.
        alpha: Scale of the new moments.
        beta: Scale of the old ones; zero overwrites.
        scratch_bytes: Bound of the working memory, that of all threads together.
        workers: Threads.

    Raises:
        ShapeError: The images do not fit the window, or ``out`` is not of this shape and layout.
    """
    check_group_sides(x, window, out, out.shape[2], homogeneous=homogeneous)
    groups, size = len(out), x.shape[1] // len(out)
    positions = len(x) * prod(window.output_shape(x.shape[2:]))
    by_group = x.reshape(len(x), groups, size, *x.shape[2:])
    plan = _plan(_grown(window, size), by_group.shape[2:], out.dtype)
    threads = threads_for(x.size * len(plan.shifts) * _PIXEL_COST, workers)
    spare = scratch_bytes // threads
    # Of a group at least: an image, its products, and their sums along an axis.
    fits = 4 * prod(by_group.shape[2:]) * out.itemsize <= spare
    if not (fits and _pixels_are_quicker(by_group, plan, window)):
        moment = partial(patch_second_moment, homogeneous=homogeneous, alpha=alpha, beta=beta)
        tasks = [
            partial(moment, images, window, own, scratch_bytes=spare, workers=workers)
            for images, own in zip(by_group.swapaxes(0, 1), out, strict=True)
        ]
        share(tasks, threads if groups >= threads else 1, workers)
        return
    scale(out, beta)
    d = out.shape[1] - homogeneous
    chunk = min(_CHUNK_BYTES, spare // 4) // out.itemsize
    _add_pixels(by_group, out[:, :d, :d], plan, alpha, _Means(threads, chunk, workers))
    if homogeneous:
        sums = patch_sums(x, window, out.dtype, np)[None, None]
        out[:, d, :d] += alpha * split_features(sums, groups, window.taps)[0, :, 0]
        out[:, d, d] += alpha * positions


def squared_gradients(
    add: Callable[[slice, Array, float], None],
    examples: int,
    out: Array,
    beta: float,
    parts: int,
    workers: Workers,
) -> None:
    """``out ← beta·out`` and what each of some parts of the examples adds, side by side.

    Args:
        add: Adds the squares of some examples to ``beta`` times a result.
        examples: How many.
        out: The result.
        beta: Scale of the old one; zero overwrites.
        parts: Each but the first takes as much working memory as the result.
        workers: Threads.
    """
    edges = [examples * i // parts for i in range(parts + 1)]
    first, *others = (slice(a, b) for a, b in pairwise(edges))
    rooms = [np.empty(out.shape, out.dtype) for _ in others]
    tasks = [partial(add, part, room, 0.0) for part, room in zip(others, rooms, strict=True)]
    share([partial(add, first, out, beta), *tasks], parts, workers)
    for room in rooms:
        out += room


def _pixels_are_quicker(x: Array, plan: _Plan, window: Window) -> bool:
    """Whether to multiply pixel by pixel rather than to take every group alone."""
    alone = _TAP * window.taps * x.size + _GROUP * x.shape[1]
    return bool(_PIXEL * len(plan.shifts) * x.size <= alone)


def _add_pixels(x: Array, out: Array, plan: _Plan, alpha: float, means: _Means) -> None:
    """Add the moments of small groups.

    Args:
        x: Images by group, ``(n, groups, size, *sides)``.
        out: ``(groups, d, d)``; matrices and rows may lie apart.
        plan: For these sides.
        alpha: Scale of the moments.
        means: Threads, and how many numbers each multiplies at a time.
    """
    n, groups = x.shape[:2]
    image = prod(x.shape[2:])
    count = max(1, min(n, _SUM_IMAGES, means.numbers // image))
    step = max(1, min(means.numbers // (count * image), -(-groups // means.threads)))
    tasks = [
        partial(_add_groups, x[:, g : g + step], out[g : g + step], plan, alpha, count)
        for g in range(0, groups, step)
    ]
    share(tasks, means.threads, means.workers)


def _add_groups(x: Array, out: Array, plan: _Plan, alpha: float, count: int) -> None:
    """Add the moments of some groups, so many images at a time."""
    groups, size, *sides = x.shape[1:]
    # Without channels in a group, all groups are one line: products across them are not summed.
    lines = groups if size > 1 else 1
    room = np.zeros((lines, groups // lines * size * prod(sides)), out.dtype)
    total = np.zeros((groups, len(plan.rows)))
    for start in range(0, len(x), count):
        images = x[start : start + count]
        if images.dtype != out.dtype:
            images = images.astype(out.dtype, order="C")
        flat = images.reshape(len(images), *room.shape)
        found = []
        for shift, seen in zip(plan.shifts, plan.seen, strict=True):
            pixels = room.shape[1] - shift
            behind, here = flat[:, :, shift:], flat[:, :, :pixels]
            np.einsum("nlq,nlq->lq", behind, here, out=room[:, :pixels])
            found.append(_summed(room.reshape(groups, size, *sides), seen))
        total += np.concatenate(found, axis=1)
    out[:, plan.rows, plan.columns] += alpha * total


def _summed(products: Array, seen: Sequence[Array]) -> Array:
    """Sums over positions, for each group all taps: ``(groups, taps)``, float64."""
    for ones in reversed(seen):
        lines = products.reshape(-1, products.shape[-1])
        sums = (lines @ ones).astype(np.float64, copy=False)
        # The taps of this axis come before those of the axes behind it.
        products = np.moveaxis(sums.reshape(*products.shape[:-1], -1), -1, 1)
    return products.reshape(len(products), -1)


def _grown(window: Window, size: int) -> Window:
    """The window over groups as images, with an axis for the channels of a group."""
    return Window(
        (size, *window.kernel),
        (1, *window.strides),
        (1, *window.dilations),
        (0, *window.begins),
        (0, *window.ends),
    )


@lru_cache(maxsize=64)
def _plan(window: Window, sides: tuple[int, ...], dtype: DType) -> _Plan:
    """What sums over positions need, for a window that has grown."""
    apart = [prod(sides[axis + 1 :]) for axis in range(len(sides))]
    # Features are tap-major: the first axis, of channels, is the innermost there.
    order = np.arange(window.taps).reshape(*window.kernel[1:], window.kernel[0])
    features = np.moveaxis(order, -1, 0)
    shifts, seen, rows, columns = [], [], [], []
    for step in distances(window):
        pixels = [u * d for u, d in zip(step, window.dilations, strict=True)]
        if all(abs(p) < side for p, side in zip(pixels, sides, strict=True)):
            earlier, later = (
                features[tuple(_taps(s, k) for s, k in zip(steps, window.kernel, strict=True))]
                for steps in (step, [-s for s in step])
            )
            shifts.append(sum(p * a for p, a in zip(pixels, apart, strict=True)))
            seen.append(tuple(_seen(window, axis, step[axis], sides) for axis in range(len(sides))))
            rows.append(np.maximum(earlier, later).ravel())
            columns.append(np.minimum(earlier, later).ravel())
    cast = tuple((*some[:-1], some[-1].astype(dtype)) for some in seen)
    return _Plan(tuple(shifts), cast, np.concatenate(rows), np.concatenate(columns))


def _taps(step: int, kernel: int) -> slice:
    """The taps of an axis from which a step leads to another."""
    return slice(max(0, -step), kernel - max(0, step))


def _seen(window: Window, axis: int, step: int, sides: tuple[int, ...]) -> Array:
    """Ones where a tap sees a pixel of an axis and the tap a step on another: ``(side, taps)``."""
    taps = range(window.kernel[axis])[_taps(step, window.kernel[axis])]
    ones = np.zeros((sides[axis], len(taps)))
    for column, tap in enumerate(taps):
        ones[window.seen(axis, tap, sides)[1], column] = 1.0
    partner = np.arange(sides[axis]) + step * window.dilations[axis]
    ones[(partner < 0) | (partner >= sides[axis])] = 0.0
    return ones
