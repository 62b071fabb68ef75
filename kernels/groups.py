"""Launches products of rows for groups of channels, and sums over positions."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kfac_engine.kernels.geometry import WORK, Geometry, Struct, one_to_one
from kfac_engine.kernels.launch import (
    BLOCK,
    INPUTS,
    MACROS,
    Array,
    Device,
    blocks_for,
    float32,
    int32,
    kernel,
)

# Largest number of features for the small tile, because a large tile would be mostly empty.
_FEW = 32
# Number of blocks for each multiprocessor, so that the last wave is short.
_BLOCKS_EACH = 8
_SMALL, _LARGE = MACROS["group_products"]["SIDE"]
# Row lengths whose products fit the registers of a thread, and the least number of positions of a
# piece. The sums of the threads must take longer than their addition.
_FITTING = MACROS["few_products"]["ROWS"]
_FEW_LEAST = 4096
_WARPS = 8  # number of warps of a block
_SOURCES = {
    "few_products": "few_products",
    "few_squares": "few_products",
    "group_products": "group_products",
}
_SUM_BLOCK = (32, 8)


@dataclass(frozen=True, slots=True)
class Groups:
    """The sizes of a product of rows ``z`` for each group, and the scales of the result.

    Attributes:
        count: Number of groups.
        rows: Rows of the result of one group, with the homogeneous coordinate.
        columns: Columns of the result of one group.
        ones: Whether a 1 is appended to each row.
        alpha: Scale of the sum.
        beta: Scale of the old values; zero overwrites.
        scratch_bytes: Bound of the partial results; exceeded if one piece needs more.
    """

    count: int
    rows: int
    columns: int
    ones: bool
    alpha: float
    beta: float
    scratch_bytes: int


@dataclass(frozen=True, slots=True)
class _Form:
    """The kernel of a product, and the division of the product into pieces.

    Attributes:
        kernel: Name of the kernel.
        macros: Macros of its source, except the type of images.
        blocks: Number of blocks of one piece.
        least: Least number of images, or of positions, of a piece.
    """

    kernel: str
    macros: Mapping[str, int]
    blocks: int
    least: int


def add_group_moments(
    device: Device, x: Array, out: Array, images: Geometry, groups: Groups
) -> None:
    """Compute ``out ← beta·out + alpha·Σ z zᵀ`` for each group.

    The images ``x`` have any strides and fewer than 2³¹ positions. ``out`` is
    ``(groups, rows, rows)`` float32, contiguous.

    Sources: ``few_products.cu`` for short rows, ``group_products.cu``.
    """
    row = _in_registers(groups)
    if row:
        form = _Form("few_products", {"ROWS": row}, groups.count, _FEW_LEAST)
    else:
        side = _SMALL if groups.rows <= _FEW else _LARGE
        tiles = -(-groups.rows // side)
        blocks = groups.count * tiles * (tiles + 1) // 2
        # For a shorter piece, the start and the addition would dominate.
        form = _Form("group_products", {"SQUARE": 0, "SIDE": side}, blocks, 8 * _LARGE)
    _multiply(device, (x, x), out, (images, images), groups, form)


def add_squares(
    device: Device,
    x: Array,
    y: Array,
    out: Array,
    images: Geometry,
    groups: Groups,
) -> None:
    """Compute ``out ← beta·out + alpha·Σ_n (Σ_t z_nt y_ntᵀ)²`` for each group.

    ``y`` is ``(n, groups·columns, *outputs)``, of the type of ``x``; both have any strides. ``out``
    is ``(groups, rows, columns)`` float32, contiguous.

    Sources: as for ``add_group_moments``.
    """
    row = _in_registers(groups)
    if row and groups.columns == 1:
        form = _Form("few_squares", {"ROWS": row}, groups.count, _WARPS)
    else:
        side = _SMALL if min(groups.rows, groups.columns) <= _FEW else _LARGE
        blocks = groups.count * -(-groups.rows // side) * -(-groups.columns // side)
        form = _Form("group_products", {"SQUARE": 1, "SIDE": side}, blocks, 1)
    outputs = one_to_one(y.shape, _strides(y))
    _multiply(device, (x, y), out, (images, outputs), groups, form)


def _in_registers(groups: Groups) -> int:
    """Return the row length of the kernel with sums in registers; zero if no variant fits."""
    return next((rows for rows in _FITTING if groups.rows <= rows), 0)


def _multiply(
    device: Device,
    operands: tuple[Array, Array],
    out: Array,
    images: tuple[Geometry, Geometry],
    groups: Groups,
    form: _Form,
) -> None:
    """Launch the products of all pieces, and then their sum."""
    first, second = images
    squared = first is not second
    units = first.count if squared else first.count * first.positions
    affordable = max(1, groups.scratch_bytes // (4 * out.size))
    pieces = min(
        -(-_BLOCKS_EACH * device.processors // form.blocks), affordable, -(-units // form.least)
    )
    length = -(-units // max(1, pieces))
    # Pieces start at multiples of the positions that a block loads at a time.
    length = length if squared else -(-length // _LARGE) * _LARGE
    pieces = -(-units // length) if units else 0
    sizes = units, length, groups.count, groups.rows, groups.columns, int(groups.ones)
    work = np.array([sizes], WORK)
    parts = device.empty((max(1, pieces), *out.shape), np.float32)
    if pieces:
        macros = {**form.macros, "INPUT": INPUTS[operands[0].dtype.name]}
        multiply = kernel(device, _SOURCES[form.kernel], form.kernel, **macros)
        structs = (*_of_groups(first, second, groups.count), first.taps, second.taps, first.grid)
        multiply((form.blocks, pieces), (BLOCK,), (*operands, parts, *structs, work))
    add = kernel(device, "averages", "add_parts", INPUT=0)
    scales = int32(not squared), float32(groups.alpha), float32(groups.beta)
    add((blocks_for(out.size, device),), (BLOCK,), (out, parts, int32(pieces), work, *scales))


def sum_examples(device: Device, x: Array, ds: Array, sums: Array) -> None:
    """Compute ``sums ← [Σ x∘ds, Σ ds]`` of each example (``example_sums.cu``).

    ``x`` and ``ds`` are ``(n, entries, *spatial_shape)`` of one type and any strides. ``sums`` is
    ``(n, 2·entries)`` float32, contiguous.
    """
    if not sums.size:
        return
    g, h = (one_to_one(array.shape, _strides(array)) for array in (x, ds))
    entry, *rest = _strides(ds)[1:]
    across = all(entry < step for step, side in zip(rest, ds.shape[2:], strict=True) if side > 1)
    macros = {"ACROSS": int(across), "INPUT": INPUTS[x.dtype.name]}
    add = kernel(device, "example_sums", "example_sums", **macros)
    blocks = -(-ds.shape[1] // (32 if across else 8))
    add((blocks, len(ds)), _SUM_BLOCK, (x, ds, sums, g.images, h.images))


def draw_classes(device: Device, logits: Array, uniforms: Array, ids: Array) -> None:
    """Write a sampled class of each row to ``ids`` (``classes.cu``).

    All arrays are contiguous: ``logits`` is ``(outer, classes, inner)``, ``uniforms`` is
    ``(outer, inner)`` float64, and ``ids`` is ``(outer, inner)`` int64.
    """
    if not ids.size:
        return
    _, classes, inner = logits.shape
    lanes = 32 if inner < BLOCK else 1
    macros = {"LANES": lanes, "INPUT": INPUTS[logits.dtype.name]}
    draw = kernel(device, "classes", "draw_classes", **macros)
    sizes = np.int64(ids.size), np.int64(inner), int32(classes)
    draw((-(-ids.size * lanes // BLOCK),), (BLOCK,), (logits, uniforms, ids, *sizes))


def cross_entropy(device: Device, logits: Array, ids: Array, terms: Array, gradient: Array) -> None:
    """Write the cross-entropy of class ids to ``terms`` and its gradient to ``gradient``.

    All arrays are contiguous: ``logits`` and ``gradient`` are ``(outer, classes, inner)`` float32,
    ``terms`` is ``(outer, inner)`` float32, and ``ids`` is ``(outer, inner)`` int64 in
    ``[0, classes)``.

    Source: ``classes.cu``.
    """
    if not ids.size:
        return
    _, classes, inner = logits.shape
    lanes = 32 if inner < BLOCK else 1
    compute = kernel(device, "classes", "cross_entropy", LANES=lanes, INPUT=0)
    sizes = np.int64(ids.size), np.int64(inner), int32(classes)
    compute((-(-ids.size * lanes // BLOCK),), (BLOCK,), (logits, ids, terms, gradient, *sizes))


def _of_groups(first: Geometry, second: Geometry, groups: int) -> tuple[Struct, Struct]:
    """Return the structs of two images, with the number of channels of one group."""
    structs = first.images.copy(), second.images.copy()
    for struct in structs:
        struct["channels"] //= groups
    return structs


def _strides(x: Array) -> tuple[int, ...]:
    return tuple(stride // x.dtype.itemsize for stride in x.strides)
