"""Computes Gram matrices of patches for groups of channels.

Large groups are computed one by one, as images of their own (``patch_gram``). For small groups the
entries are sums over images, as follows.

A group of ``k`` channels is an image with an additional axis of length ``k``, under a kernel with
``k`` taps along this axis. The formula therefore assumes one channel in each group. The entry of
taps ``v + δ`` and ``v`` is a sum over output positions ``o`` of

    S[δ][o·stride + v·dilation − begin],   S[δ][q] = Σ_n x_n[q + δ·dilation] x_n[q].

Only ``S`` needs passes over the data: one image for each offset ``δ``, 13 for a 3 × 3 kernel.
Products with matrices of ones and zeros compute the sums over positions, one axis at a time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from math import prod

import numpy as np

from kfac_engine._types import Array, DType
from kfac_engine.backend.channel_groups import check_group_shape, scale, split_features
from kfac_engine.backend.cpu.patch_gram import patch_second_moment
from kfac_engine.backend.cpu.syrk import run_tasks, threads_for
from kfac_engine.backend.kernel_offsets import kernel_offsets
from kfac_engine.backend.patch_sums import patch_sums
from kfac_engine.backend.protocol import Accumulation
from kfac_engine.backend.threads import Workers
from kfac_engine.backend.window import Window

# Measured nanoseconds on one core in float32: for a pixel and an offset; for an offset; for an
# entry of a Gram matrix; for a pixel and a tap if the patches of each group are copied; for a call
# on one group. ADR 9 compares both algorithms.
_PIXEL = 0.27
_OFFSET = 2e4
_ENTRY = 10.0
_TAP = 1.6
_GROUP = 1e5
# Bytes of pixels that are multiplied at a time. With half a megabyte, two threads take 68 ms
# instead of 18 ms for 32 × 96 × 56 × 56, because they wait for each other between short calls.
_CHUNK_BYTES = 8 << 20
# Images that are summed in their own precision before the sums are added in float64.
_SUM_IMAGES = 64
# Number of multiplications of SYRK in the time that two entries in memory are multiplied.
_PIXEL_COST = 16
# Plans in the cache, and bytes of a plan. A 7 × 7 kernel over 224 × 224 pixels takes 0.1 MB.
_PLANS, _PLAN_BYTES = 16, 256 << 10
CACHE_BYTES = _PLANS * _PLAN_BYTES


@dataclass(frozen=True, slots=True)
class _Plan:
    """The sums over positions, and the entries of the result that they are added to."""

    shifts: tuple[int, ...]  # for each offset, the distance in memory from a pixel to its partner
    # For each offset, the channels ``v`` of a group for which ``v + δ`` is a channel.
    channels: tuple[slice, ...]
    # For each offset and each axis but the channels, a matrix ``(length, taps)``. It is 1 where tap
    # ``v`` sees a pixel at an output and tap ``v + δ`` sees another pixel of the image. Offsets
    # share matrices.
    seen: tuple[tuple[Array, ...], ...]
    rows: Array  # features of the larger of the two taps, over all offsets
    columns: Array  # features of the smaller tap


def grouped_second_moment(
    x: Array, window: Window, out: Array, how: Accumulation, scratch_bytes: int, workers: Workers
) -> None:
    """Compute the lower triangles of ``out ← beta·out + alpha·Σ z zᵀ`` for groups, in place.

    The arguments are as for ``patch_second_moment``, but ``out`` is ``(groups, d, d)`` with
    ``d = taps·channels/groups (+ 1)``.
    """
    homogeneous, alpha = how.homogeneous, how.alpha
    check_group_shape(x, window, out, out.shape[2], homogeneous=homogeneous)
    groups, size = len(out), x.shape[1] // len(out)
    positions = len(x) * prod(window.output_shape(x.shape[2:]))
    by_group = x.reshape(len(x), groups, size, *x.shape[2:])
    wide = _with_channel_axis(window, size)
    offsets = _count_offsets(wide, by_group.shape[2:])
    threads = threads_for(x.size * offsets * _PIXEL_COST, workers)
    spare = scratch_bytes // threads
    features = window.taps * size
    # The scratch memory must hold an image of a group with its products and their sums along an
    # axis. It must also hold three float64 copies of the final sums, each half as large as a Gram
    # matrix.
    numbers = max(4 * prod(by_group.shape[2:]), 3 * features * (features + 1))
    fits = numbers * out.itemsize <= spare and _plan_bytes(wide, by_group.shape[2:]) <= _PLAN_BYTES
    if not (fits and _sums_are_faster(by_group, offsets, window)):
        tasks = [
            partial(patch_second_moment, images, window, group_out, how, spare, workers)
            for images, group_out in zip(by_group.swapaxes(0, 1), out, strict=True)
        ]
        run_tasks(tasks, threads if groups >= threads else 1, workers)
        return
    plan = _plan(wide, by_group.shape[2:], out.dtype)
    scale(out, how.beta)
    d = out.shape[1] - homogeneous
    chunk = min(_CHUNK_BYTES, spare // 4) // out.itemsize
    small = _pixel_tasks(by_group, out[:, :d, :d], plan, alpha, chunk, threads)
    run_tasks(small, threads, workers)
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
    """Compute ``out ← beta·out`` plus the squared gradients of all examples, in threads.

    ``add`` adds the squares of a slice of the examples to ``beta`` times a result. Each of the
    ``parts`` except the first needs a copy of ``out`` as scratch memory.
    """
    edges = [examples * i // parts for i in range(parts + 1)]
    first, *others = (slice(a, b) for a, b in pairwise(edges))
    results = [np.empty(out.shape, out.dtype) for _ in others]
    tasks = [partial(add, part, result, 0.0) for part, result in zip(others, results, strict=True)]
    run_tasks([partial(add, first, out, beta), *tasks], parts, workers)
    for result in results:
        out += result


def _sums_are_faster(x: Array, offsets: int, window: Window) -> bool:
    """Return whether sums over images are faster than a call for each group."""
    groups, size = x.shape[1:3]
    entries = (window.taps * size) ** 2 / 2
    alone = _TAP * window.taps * x.size + _GROUP * groups
    return bool(_PIXEL * offsets * x.size + _OFFSET * offsets + _ENTRY * entries * groups <= alone)


def _count_offsets(window: Window, spatial_shape: tuple[int, ...]) -> int:
    """Return the number of offsets with a pair of pixels, without a list of them."""
    # An axis has as many offsets below zero as above; of δ and −δ, one is an offset.
    steps = (
        2 * min(kernel, -(-side // dilation)) - 1
        for kernel, side, dilation in zip(
            window.kernel, spatial_shape, window.dilations, strict=True
        )
    )
    return (prod(steps) + 1) // 2


def _plan_bytes(window: Window, spatial_shape: tuple[int, ...]) -> int:
    """Return an upper bound of the bytes of a plan."""
    ones = sum(k**2 * side for k, side in zip(window.kernel[1:], spatial_shape[1:], strict=True))
    return 8 * (ones + window.taps * (window.taps + 1))


def _pixel_tasks(
    x: Array, out: Array, plan: _Plan, alpha: float, numbers: int, threads: int
) -> list[Callable[[], None]]:
    """Return tasks that add ``alpha`` times the Gram matrices of small groups to ``out``.

    ``x`` is ``(n, groups, size, *spatial_shape)``. The matrices and rows of ``out``,
    ``(groups, d, d)``, may have gaps. A task multiplies ``numbers`` entries at a time.
    """
    n, groups = x.shape[:2]
    image = prod(x.shape[2:])
    count = max(1, min(n, _SUM_IMAGES, numbers // image))
    # Three copies of the sums are in float64.
    of_group = max(count * image, 3 * 2 * len(plan.rows))
    step = max(1, min(numbers // of_group, -(-groups // threads)))
    return [
        partial(_add_groups, x[:, g : g + step], out[g : g + step], plan, alpha, count)
        for g in range(0, groups, step)
    ]


def _add_groups(x: Array, out: Array, plan: _Plan, alpha: float, count: int) -> None:
    """Add ``alpha`` times the Gram matrices of the groups in ``x`` to ``out``.

    Products are computed for ``count`` images at a time. ``x`` is
    ``(n, groups, size, *spatial_shape)``.
    """
    groups, size, *spatial_shape = x.shape[1:]
    # With one channel in a group, all groups are one line, because products across groups are not
    # summed.
    lines = groups if size > 1 else 1
    products_of_lines = np.zeros((lines, groups // lines * size * prod(spatial_shape)), out.dtype)
    total = np.zeros((groups, len(plan.rows)))
    for start in range(0, len(x), count):
        images = x[start : start + count]
        if images.dtype != out.dtype:
            images = images.astype(out.dtype, order="C")
        flat = images.reshape(len(images), *products_of_lines.shape)
        place = 0
        for shift, channels, seen in zip(plan.shifts, plan.channels, plan.seen, strict=True):
            pixels = products_of_lines.shape[1] - shift
            behind, here = flat[:, :, shift:], flat[:, :, :pixels]
            np.einsum("nlq,nlq->lq", behind, here, out=products_of_lines[:, :pixels])
            products = products_of_lines.reshape(groups, size, *spatial_shape)
            sums = _sum_positions(products[:, channels], seen)
            total[:, place : place + sums.shape[1]] += sums
            place += sums.shape[1]
    out[:, plan.rows, plan.columns] += alpha * total


def _sum_positions(products: Array, seen: Sequence[Array]) -> Array:
    """Return the sums over positions of each group, ``(groups, channels · taps)``."""
    for ones in reversed(seen):
        lines = products.reshape(-1, products.shape[-1])
        sums = (lines @ ones).astype(np.float64, copy=False)
        # The taps of this axis come before the taps of later axes, after the channels.
        products = np.moveaxis(sums.reshape(*products.shape[:-1], -1), -1, 2)
    return products.reshape(len(products), -1)


def _with_channel_axis(window: Window, size: int) -> Window:
    """Return the window with an axis for the channels of a group."""
    return Window(
        (size, *window.kernel),
        (1, *window.strides),
        (1, *window.dilations),
        (0, *window.begins),
        (0, *window.ends),
    )


@lru_cache(maxsize=_PLANS)
def _plan(window: Window, spatial_shape: tuple[int, ...], dtype: DType) -> _Plan:
    """Return the plan of the sums over positions; ``_with_channel_axis`` returns the window."""
    apart = [prod(spatial_shape[axis + 1 :]) for axis in range(len(spatial_shape))]
    # Features are tap-major, so the first axis, which has the channels, is the innermost axis of
    # features.
    order = np.arange(window.taps).reshape(*window.kernel[1:], window.kernel[0])
    features = np.moveaxis(order, -1, 0)
    last = len(spatial_shape) - 1
    matrices: dict[tuple[int, int], Array] = {}
    shifts, channels, seen, rows, columns = [], [], [], [], []
    for step in kernel_offsets(window):
        pixels = [u * d for u, d in zip(step, window.dilations, strict=True)]
        if all(abs(p) < side for p, side in zip(pixels, spatial_shape, strict=True)):
            for at in enumerate(step[1:], 1):
                if at not in matrices:
                    # Sums along the last axis, the first of the sums, are in ``dtype``.
                    precision = dtype if at[0] == last else np.dtype(np.float64)
                    matrices[at] = _seen(window, *at, spatial_shape).astype(precision)
            earlier, later = (
                features[tuple(_taps(s, k) for s, k in zip(steps, window.kernel, strict=True))]
                for steps in (step, [-s for s in step])
            )
            shifts.append(sum(p * a for p, a in zip(pixels, apart, strict=True)))
            channels.append(_taps(step[0], window.kernel[0]))
            seen.append(tuple(matrices[at] for at in enumerate(step[1:], 1)))
            rows.append(np.maximum(earlier, later).ravel())
            columns.append(np.minimum(earlier, later).ravel())
    return _Plan(
        tuple(shifts), tuple(channels), tuple(seen), np.concatenate(rows), np.concatenate(columns)
    )


def _taps(step: int, kernel: int) -> slice:
    """Return the taps ``v`` of an axis for which ``v + step`` is a tap, too."""
    return slice(max(0, -step), kernel - max(0, step))


def _seen(window: Window, axis: int, step: int, spatial_shape: tuple[int, ...]) -> Array:
    """Return a matrix ``(length, taps)`` that is 1 where a tap and its partner see pixels."""
    taps = range(window.kernel[axis])[_taps(step, window.kernel[axis])]
    ones = np.zeros((spatial_shape[axis], len(taps)))
    for column, tap in enumerate(taps):
        ones[window.seen(axis, tap, spatial_shape)[1], column] = 1.0
    partner = np.arange(spatial_shape[axis]) + step * window.dilations[axis]
    ones[(partner < 0) | (partner >= spatial_shape[axis])] = 0.0
    return ones
