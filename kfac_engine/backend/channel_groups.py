"""Computes with groups of channels in any array library.

The CuPy backend uses it for double precision, which its kernels do not compute. The NumPy backend
computes Gram matrices in another way (``grouped_gram``) and uses the other operations.
"""

from itertools import product
from math import prod
from typing import Any

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend.namespace import recordable
from kfac_engine.backend.protocol import Accumulation, Backend
from kfac_engine.backend.window import Window
from kfac_engine.errors import ShapeError

# Largest numbers of channels and outputs of a group for which a pass over the images for each tap
# is faster than products of patches. For depthwise 3 × 3 filters on 32 × 96 × 56 × 56, passes take
# 61 ms and patches 414 ms.
_FEW_CHANNELS, _FEW_OUTPUTS = 8, 4


def grouped_second_moment(
    backend: Backend, x: Array, window: Window, out: Array, how: Accumulation
) -> None:
    """Compute ``out ← beta·out + alpha·Σ z zᵀ`` over the patches ``z`` of each group, in place."""
    homogeneous, alpha = how.homogeneous, how.alpha
    check_group_shape(x, window, out, out.shape[2], homogeneous=homogeneous)
    scale(out, how.beta)
    d, step = out.shape[1] - homogeneous, _examples(backend, x, window, out.itemsize)
    for start in range(0, len(x), step):
        rows = _rows(backend, x[start : start + step], window).astype(out.dtype, copy=False)
        flat = rows.reshape(1, -1, rows.shape[2])
        groups = split_features(flat, len(out), window.taps)[0]
        out[:, :d, :d] += alpha * (groups.swapaxes(1, 2) @ groups)
        if homogeneous:
            sums = alpha * groups.sum(axis=1)
            out[:, :d, d] += sums
            out[:, d, :d] += sums
            out[:, d, d] += alpha * flat.shape[1]


def squared_gradients(
    backend: Backend, x: Array, window: Window, ds: Array, out: Array, how: Accumulation
) -> None:
    """Compute ``out ← beta·out + alpha·Σ_n (Σ_t z_nt ds_ntᵀ)²`` for each group, in place."""
    check_group_shape(x, window, out, ds.shape[1] // len(out), homogeneous=how.homogeneous)
    scale(out, how.beta)
    if _is_thin(x, ds, len(out)):
        _add_thin_squares(backend, x, window, ds, out, how)
        return
    # Gradients of all examples take the memory of the layer times the batch size.
    step = min(
        _examples(backend, x, window, out.itemsize),
        max(1, backend.scratch_bytes // max(out.size * out.itemsize, 1)),
    )
    for start in range(0, len(ds), step):
        # Products are computed in the type of the result: half precision would overflow.
        rows = _rows(backend, x[start : start + step], window).astype(out.dtype, copy=False)
        gradients = ds[start : start + step].astype(out.dtype, copy=False)
        z = split_features(rows, len(out), window.taps)
        g = split_features(_pixels(gradients), len(out), 1)
        out[:, : z.shape[3]] += how.alpha * _summed_squares(backend, z, g)
        if how.homogeneous:
            out[:, -1] += how.alpha * (g.sum(axis=2) ** 2).sum(axis=0)


def example_sums(backend: Backend, x: Array, ds: Array, axes: tuple[int, ...]) -> Array:
    """Return ``[Σ x∘ds, Σ ds]`` of each example, summed over ``axes``."""
    sums = [part.sum(axis=axes).reshape(len(ds), -1) for part in (x * ds, ds)]
    joined: Array = backend.xp.concatenate(sums, axis=1)
    return joined


@recordable
def draw_classes(backend: Backend, logits: Array, uniforms: Array, axis: int) -> Array:
    """Return a class for each row of ``softmax(logits)``, sampled with the numbers ``uniforms``."""
    xp = backend.xp
    shifted = logits - logits.max(axis=axis, keepdims=True)
    # float64: in float32 the last partial sum of many classes would differ from the total.
    cumulative = xp.exp(shifted.astype(xp.float64, copy=False)).cumsum(axis=axis)
    total = cumulative.take([-1], axis=axis)
    # `<=` skips leading classes of probability zero if the uniform number is exactly 0.
    below = cumulative <= xp.expand_dims(uniforms, axis) * total
    ids: Array = below.sum(axis=axis, dtype=xp.int64)
    return ids


def add_scaled(out: Array, measured: Array, alpha: float, beta: float) -> None:
    """Compute ``out ← beta·out + alpha·measured`` in the wider type of both; beta 0 overwrites."""
    scale(out, beta)
    out += measured.astype(np.promote_types(out.dtype, measured.dtype), copy=False) * alpha


def scale(out: Array, beta: float) -> None:
    """Compute ``out ← beta·out``, in place; zero overwrites, NaN included."""
    if beta == 0.0:
        out[...] = 0.0
    elif beta != 1.0:
        out *= beta


@recordable
def split_features(rows: Array, groups: int, taps: int) -> Array:
    """Return rows ``(n, t, taps·channels)`` by group: ``(n, groups, t, taps·channels/groups)``."""
    n, t, features = rows.shape
    split = rows.reshape(n, t, taps, groups, -1).transpose(0, 3, 1, 2, 4)
    parts: Array = split.reshape(n, groups, t, features // groups)
    return parts


def check_group_shape(
    x: Array, window: Window, out: Array, columns: int, *, homogeneous: bool
) -> int:
    """Return the number of features of a group, including the homogeneous coordinate.

    Raise ``ShapeError`` unless ``out`` is C-contiguous with shape ``(groups, features, columns)``
    and the groups divide the channels of ``x``.
    """
    groups, channels = len(out), int(x.shape[1])
    rows: int = window.taps * channels // groups + homogeneous
    fits = out.shape == (groups, rows, columns) and out.flags.c_contiguous
    if channels % groups or not fits:
        raise ShapeError(
            f"{groups} groups of {channels} channels under {window.taps} taps need a C-contiguous "
            f"result of shape {(groups, rows, columns)}, got {out.shape}, strides {out.strides}."
        )
    return rows


def _is_thin(x: Array, ds: Array, groups: int) -> bool:
    """Return whether groups are so small that passes over images are faster than patches."""
    few = x.shape[1] <= _FEW_CHANNELS * groups and ds.shape[1] <= _FEW_OUTPUTS * groups
    return few and prod(ds.shape[2:]) > 1


def _add_thin_squares(
    backend: Backend, x: Array, window: Window, ds: Array, out: Array, how: Accumulation
) -> None:
    """Add the squared gradients to ``out``, by one pass for each tap, channel and output."""
    groups, spatial_shape = len(out), x.shape[2:]
    ds = ds.reshape(*ds.shape[:2], *window.output_shape(spatial_shape))
    numbers = (x.size + ds.size) // max(len(x), 1)
    step = max(1, backend.scratch_bytes // max(numbers * out.itemsize, 1))
    axes = list(range(2 + len(spatial_shape)))
    taps = list(product(*(range(size) for size in window.kernel)))
    for start in range(0, len(x), step):
        batch = (array[start : start + step].astype(out.dtype, copy=False) for array in (x, ds))
        z, g = (a.reshape(len(a), groups, -1, *a.shape[2:]) for a in batch)
        for (u, tap), c in product(enumerate(taps), range(z.shape[2])):
            seen = [window.seen(axis, step, spatial_shape) for axis, step in enumerate(tap)]
            at_outputs: tuple[Any, ...] = (..., *(outputs for outputs, _ in seen))
            at_pixels: tuple[Any, ...] = (..., *(pixels for _, pixels in seen))
            for j in range(g.shape[2]):
                sums = backend.xp.einsum(
                    z[:, :, c][at_pixels], axes, g[:, :, j][at_outputs], axes, [0, 1]
                )
                out[:, u * z.shape[2] + c, j] += how.alpha * (sums * sums).sum(axis=0)
        if how.homogeneous:
            total = g.sum(axis=tuple(axis + 1 for axis in axes[2:]))
            out[:, -1] += how.alpha * (total * total).sum(axis=0)


def _rows(backend: Backend, x: Array, window: Window) -> Array:
    return _pixels(x) if window.is_pointwise else backend.patches(x, window)


def _pixels(x: Array) -> Array:
    """Return the pixels of images as rows ``(n, pixels, channels)``."""
    rows: Array = x.reshape(*x.shape[:2], prod(x.shape[2:])).swapaxes(1, 2)
    return rows


def _examples(backend: Backend, x: Array, window: Window, itemsize: int) -> int:
    """Return the number of examples whose rows fit the scratch memory; at least one."""
    positions = prod(window.output_shape(x.shape[2:]))
    numbers = positions * window.taps * int(x.shape[1])
    return max(1, backend.scratch_bytes // max(numbers * itemsize, 1))


def _summed_squares(backend: Backend, z: Array, g: Array) -> Array:
    """Return ``Σ_n (Σ_t z_nt g_ntᵀ)²`` of rows ``(n, groups, t, …)``."""
    if z.shape[2] == 1:  # the square of a product is the product of squares
        squares: Array = (z[:, :, 0] ** 2).transpose(1, 2, 0) @ (g[:, :, 0] ** 2).swapaxes(0, 1)
        return squares
    per_example = backend.xp.matmul(z.swapaxes(2, 3), g)
    summed: Array = backend.xp.einsum("ngio,ngio->gio", per_example, per_example)
    return summed
