"""What primitives on groups of channels mean, in plain array code: NumPy's form, and any library's.

The CuPy backend takes them for double precision, which its kernels do not compute; the NumPy
backend has another way to moments (``grouped_gram``) and takes the others.
"""

from itertools import product
from math import prod
from typing import Any

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend.protocol import Backend
from kfac_engine.backend.window import Window
from kfac_engine.errors import ShapeError

# Up to these, a pass over images for each tap beats patches and products: of 32 images of 96
# channels, 56 × 56, 3 × 3, depthwise, 61 ms against 414; with four channels a group of 64, 28 × 28,
# 43 against 108.
_FEW_CHANNELS, _FEW_OUTPUTS = 8, 4


def grouped_second_moment(
    backend: Backend,
    x: Array,
    window: Window,
    out: Array,
    *,
    homogeneous: bool,
    alpha: float,
    beta: float,
) -> None:
    """``out ← beta·out + alpha·Σ z zᵀ`` for each group of channels, some examples at a time."""
    check_group_sides(x, window, out, out.shape[2], homogeneous=homogeneous)
    scale(out, beta)
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


def squared_gradients(  # noqa: PLR0913 (the primitive's, and the backend)
    backend: Backend,
    x: Array,
    window: Window,
    ds: Array,
    out: Array,
    *,
    homogeneous: bool,
    alpha: float,
    beta: float,
) -> None:
    """``out ← beta·out + alpha·Σ_n (Σ_t z_nt ds_ntᵀ)²`` for each group, some examples at a time."""
    check_group_sides(x, window, out, ds.shape[1] // len(out), homogeneous=homogeneous)
    scale(out, beta)
    if _is_thin(x, ds, len(out)):
        _add_thin_squares(backend, x, window, ds, out, homogeneous=homogeneous, alpha=alpha)
        return
    # Per-example gradients are as large as the layer, times the batch.
    step = min(
        _examples(backend, x, window, out.itemsize),
        max(1, backend.scratch_bytes // max(out.size * out.itemsize, 1)),
    )
    for start in range(0, len(ds), step):
        # Products are taken in the result's type: half precision would overflow in them.
        rows = _rows(backend, x[start : start + step], window).astype(out.dtype, copy=False)
        some = ds[start : start + step].astype(out.dtype, copy=False)
        z = split_features(rows, len(out), window.taps)
        g = split_features(_pixels(some), len(out), 1)
        out[:, : z.shape[3]] += alpha * _summed_squares(backend, z, g)
        if homogeneous:
            out[:, -1] += alpha * (g.sum(axis=2) ** 2).sum(axis=0)


def example_sums(backend: Backend, x: Array, ds: Array, axes: tuple[int, ...]) -> Array:
    """``[Σ x∘ds, Σ ds]`` of each example, summed over ``axes``."""
    sums = [part.sum(axis=axes).reshape(len(ds), -1) for part in (x * ds, ds)]
    joined: Array = backend.xp.concatenate(sums, axis=1)
    return joined


def draw_classes(backend: Backend, logits: Array, uniforms: Array, axis: int) -> Array:
    """A class of each row of ``softmax(logits)``, by inversion of its cumulative weights."""
    xp = backend.xp
    shifted = logits - logits.max(axis=axis, keepdims=True)
    # float64, so that the last partial sum of many classes does not drift away from the total.
    cumulative = xp.exp(shifted.astype(xp.float64, copy=False)).cumsum(axis=axis)
    total = cumulative.take([-1], axis=axis)
    # `<=` steps over leading classes of probability zero when the uniform is exactly 0.
    below = cumulative <= xp.expand_dims(uniforms, axis) * total
    ids: Array = below.sum(axis=axis, dtype=xp.int64)
    return ids


def add_scaled(out: Array, measured: Array, alpha: float, beta: float) -> None:
    """``out ← beta·out + alpha·measured``, in place, in the wider type of the two; 0 overwrites."""
    scale(out, beta)
    out += measured.astype(np.promote_types(out.dtype, measured.dtype), copy=False) * alpha


def scale(out: Array, beta: float) -> None:
    """``out ← beta·out``, in place; zero overwrites, NaN included."""
    if beta == 0.0:
        out[...] = 0.0
    elif beta != 1.0:
        out *= beta


def split_features(rows: Array, groups: int, taps: int) -> Array:
    """Rows ``(n, t, taps·channels)`` by group: ``(n, groups, t, taps·channels / groups)``."""
    n, t, features = rows.shape
    split = rows.reshape(n, t, taps, groups, -1).transpose(0, 3, 1, 2, 4)
    parts: Array = split.reshape(n, groups, t, features // groups)
    return parts


def check_group_sides(
    x: Array, window: Window, out: Array, columns: int, *, homogeneous: bool
) -> int:
    """Rows of the result of one group.

    Args:
        x: Images.
        window: Geometry.
        out: The result.
        columns: Of one group.
        homogeneous: Whether there is a one.

    Returns:
        Features of a group, with the one.

    Raises:
        ShapeError: ``out`` is not ``(groups, rows, columns)`` and C-contiguous, or the channels do
            not fall into so many groups.
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
    """Whether a group has so few channels and outputs that passes over images beat patches."""
    few = x.shape[1] <= _FEW_CHANNELS * groups and ds.shape[1] <= _FEW_OUTPUTS * groups
    return few and prod(ds.shape[2:]) > 1


def _add_thin_squares(
    backend: Backend,
    x: Array,
    window: Window,
    ds: Array,
    out: Array,
    *,
    homogeneous: bool,
    alpha: float,
) -> None:
    """``out += alpha·Σ_n (Σ_t z_nt ds_ntᵀ)²``: a pass for each tap, channel, output of a group."""
    groups, sides = len(out), x.shape[2:]
    ds = ds.reshape(*ds.shape[:2], *window.output_shape(sides))
    numbers = (x.size + ds.size) // max(len(x), 1)
    step = max(1, backend.scratch_bytes // max(numbers * out.itemsize, 1))
    axes = list(range(2 + len(sides)))
    taps = list(product(*(range(side) for side in window.kernel)))
    for start in range(0, len(x), step):
        some = (array[start : start + step].astype(out.dtype, copy=False) for array in (x, ds))
        z, g = (a.reshape(len(a), groups, -1, *a.shape[2:]) for a in some)
        for (place, tap), c in product(enumerate(taps), range(z.shape[2])):
            seen = [window.seen(axis, u, sides) for axis, u in enumerate(tap)]
            here: tuple[Any, ...] = (..., *(outputs for outputs, _ in seen))
            there: tuple[Any, ...] = (..., *(pixels for _, pixels in seen))
            for j in range(g.shape[2]):
                sums = backend.xp.einsum(z[:, :, c][there], axes, g[:, :, j][here], axes, [0, 1])
                out[:, place * z.shape[2] + c, j] += alpha * (sums * sums).sum(axis=0)
        if homogeneous:
            total = g.sum(axis=tuple(axis + 1 for axis in axes[2:]))
            out[:, -1] += alpha * (total * total).sum(axis=0)


def _rows(backend: Backend, x: Array, window: Window) -> Array:
    return _pixels(x) if window.is_pointwise else backend.patches(x, window)


def _pixels(x: Array) -> Array:
    """Every pixel of images as a row: ``(n, pixels, channels)``."""
    rows: Array = x.reshape(*x.shape[:2], prod(x.shape[2:])).swapaxes(1, 2)
    return rows


def _examples(backend: Backend, x: Array, window: Window, itemsize: int) -> int:
    """Examples whose rows fit the working memory; one always does."""
    positions = prod(window.output_shape(x.shape[2:]))
    numbers = positions * window.taps * int(x.shape[1])
    return max(1, backend.scratch_bytes // max(numbers * itemsize, 1))


def _summed_squares(backend: Backend, z: Array, g: Array) -> Array:
    """``Σ_n (Σ_t z_nt g_ntᵀ)²`` of rows ``(n, groups, t, …)``."""
    if z.shape[2] == 1:  # the square of a product is the product of squares: nothing to write out
        squares: Array = (z[:, :, 0] ** 2).transpose(1, 2, 0) @ (g[:, :, 0] ** 2).swapaxes(0, 1)
        return squares
    per_example = backend.xp.matmul(z.swapaxes(2, 3), g)
    summed: Array = backend.xp.einsum("ngio,ngio->gio", per_example, per_example)
    return summed
