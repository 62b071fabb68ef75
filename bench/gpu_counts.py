"""Least multiplications and bytes of the GPU suite's work, from sizes only.

One triangle of a symmetric matrix is multiplied. Data are read once, results are written once, and
moving averages are read too.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kfac_engine.bench.resnet50 import Layer

_FLOAT, _DOUBLE = 4, 8


class Counted(NamedTuple):
    """Least numbers of multiplications and of moved bytes of a work."""

    case: str
    products: float
    moved: float


class Sizes(NamedTuple):
    """Sizes of the data of each kernel.

    ``ids`` are counted, of a vocabulary of a twentieth of them. Each image has 64 draws of a class.
    """

    images: int = 32
    channels: int = 64
    side: int = 56
    matrix: int = 4608
    ids: int = 1 << 20
    classes: int = 1000

    @property
    def words(self) -> int:
        """Size of the vocabulary."""
        return self.ids // 20

    @property
    def draws(self) -> int:
        """Number of draws."""
        return 64 * self.images


def input_factors(layers: Sequence[Layer], batch: int) -> Counted:
    """Return the cost of averaging the second moments of patches of layers."""
    one = layers[0]
    size = f"{batch}×{one.inputs}×{one.side}², {one.kernel}×{one.kernel}/{one.stride}"
    return Counted(
        f"A of {len(layers)} layers" if len(layers) > 1 else f"A: {size}",
        sum(_input_products(layer, batch) for layer in layers),
        _FLOAT * sum(batch * x.inputs * x.side**2 + 2 * x.d_in**2 for x in layers),
    )


def output_factors(layers: Sequence[Layer], batch: int) -> Counted:
    """Return the cost of averaging the second moments of pixels."""
    pixels = {layer: batch * layer.out_side**2 for layer in set(layers)}
    return Counted(
        f"G of {len(layers)} layers",
        sum(0.5 * pixels[x] * x.outputs**2 for x in layers),
        _FLOAT * sum(pixels[x] * x.outputs + 2 * x.outputs**2 for x in layers),
    )


def inverses(layers: Sequence[Layer]) -> Counted:
    """Return the cost of the inverses of all factors, ``d³`` flops each."""
    sides = [side for layer in layers for side in (layer.d_in, layer.outputs)]
    squares = sum(side * side for side in sides)
    return Counted(
        f"{len(sides)} inverses", sum(0.5 * side**3 for side in sides), 2 * _FLOAT * squares
    )


def gradients(layers: Sequence[Layer]) -> Counted:
    """Return the cost of multiplying gradients by two matrices each."""
    return Counted(
        f"gradients of {len(layers)} layers, preconditioned",
        sum(float(x.d_in * x.outputs) * (x.d_in + x.outputs) for x in layers),
        _FLOAT * sum(x.d_in**2 + 2 * x.d_in * x.outputs + x.outputs**2 for x in layers),
    )


def kernels(sizes: Sizes) -> Mapping[str, Counted]:
    """Return the cost of each kernel by name."""
    n, channels, side, matrix, *_ = sizes
    rows, d, square = n * side**2, 9 * channels, matrix**2
    x, size = _FLOAT * rows * channels, f"{n}×{channels}×{side}², 3×3"
    half = _FLOAT * square // 2  # one triangle
    return {
        "moment": Counted(f"A with its border, {size}", 13.0 * rows * channels**2,
                          x + 2 * _FLOAT * (d + 1) ** 2),
        "groups": Counted(f"A of each channel, {size}", 45.0 * rows * channels,
                          x + 2 * _FLOAT * 81 * channels),
        "squares": Counted(f"squared gradients, {size}", float(rows * d * channels),
                           2 * x + 2 * _FLOAT * d * channels),
        "channels": Counted(f"squared gradients of each channel, {size}", 9.0 * rows * channels,
                            2 * x + 2 * _FLOAT * d),
        "diagonal": Counted(f"squares of patches, {size}", 0.0, x + 2 * _FLOAT * d),
        "patches": Counted(f"patches written out, {size}", 0.0, 10 * x),
        "sums": Counted(f"sums of examples, {size}", 0.0, 2 * x + 2 * _FLOAT * n * channels),
        "classes": Counted(f"{sizes.draws} classes of {sizes.classes}", 0.0,
                           sizes.draws * (_FLOAT * sizes.classes + 2 * _DOUBLE)),
        "ids": Counted(f"{sizes.ids} identifiers of {sizes.words}", 0.0,
                       _DOUBLE * sizes.ids + _FLOAT * sizes.words),
        "average": Counted(f"average of {matrix}²", 0.0, 3 * _FLOAT * square),
        "norms": Counted(f"sum of squares of {matrix}²", 0.0, _FLOAT * square),
        "finite": Counted(f"whether {matrix}² is finite", 0.0, _FLOAT * square),
        "mirror": Counted(f"mirror, {matrix}²", 0.0, 2 * half),
        "widen": Counted(f"widened, damped and described, {matrix}²", 0.0,
                         half + _DOUBLE * square),
        "narrow": Counted(f"narrowed, {matrix}²", 0.0, _DOUBLE * square // 2 + 2 * half),
    }  # fmt: skip


def _input_products(layer: Layer, batch: int) -> float:
    """Return the multiplications of a lower triangle, by distances of taps if these are fewer."""
    rows, k = batch * layer.out_side**2, layer.kernel
    if layer.stride == 1 and k > 1:
        return float(rows * layer.inputs**2 * ((2 * k - 1) ** 2 + 1) / 2)
    return float(rows * layer.d_in**2 / 2)
